"""`moe_finalize` through the compiled library: every expert's output is read once, and each result written once."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiled import NormSpec, library
from ..blocks import with_contiguous_rows
from ..host import address_of, code_of, host_norm, rows_of
from ..norms import NormFormula
from .backward import recorded, recorded_add_norm


def moe_finalize(
    expert_outputs: Tensor, weights: Tensor, shared: Tensor | None, scaling: float | None
) -> Tensor | None:
    """See the dispatcher; None for what the library does not take."""
    codes = _codes(expert_outputs, weights, shared)
    if codes is None:
        return None

    def run() -> Tensor:
        total = expert_outputs.new_empty(expert_outputs.shape[0], expert_outputs.shape[2])
        _run(expert_outputs, weights, shared, scaling, codes, total)
        return total

    return recorded(run, expert_outputs, weights, shared, scaling)


def moe_finalize_add_norm(
    expert_outputs: Tensor,
    weights: Tensor,
    residual: Tensor,
    formula: NormFormula,
    shared: Tensor | None,
    scaling: float | None,
) -> tuple[Tensor, Tensor] | None:
    """See the dispatcher; None for what the library does not take."""
    codes = _codes(expert_outputs, weights, shared, residual)
    spec = None if codes is None else host_norm(formula, expert_outputs.shape[2])
    if codes is None or spec is None:
        return None

    def run() -> tuple[Tensor, Tensor]:
        normed, total = (torch.empty_like(residual, memory_format=torch.contiguous_format) for _ in range(2))
        _run(expert_outputs, weights, shared, scaling, codes, total, residual, normed, spec)
        return normed, total

    return recorded_add_norm(run, expert_outputs, weights, residual, formula, shared, scaling)


def _codes(expert_outputs: Tensor, weights: Tensor, *rows: Tensor | None) -> tuple[int, int] | None:
    """The library's codes of the outputs' dtype and the weights'; None where it does not compute as defined."""
    code, of_weights = code_of(expert_outputs, *(one for one in rows if one is not None)), code_of(weights)
    if code is None or of_weights is None:
        return None
    if weights.dtype == torch.float64 and expert_outputs.dtype != torch.float64:
        return None
    return code, of_weights


def _run(
    expert_outputs: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    scaling: float | None,
    codes: tuple[int, int],
    total: Tensor,
    residual: Tensor | None = None,
    normed: Tensor | None = None,
    norm: NormSpec | None = None,
) -> None:
    """Write the results."""
    if not total.numel():
        return
    count, choices, hidden = expert_outputs.shape
    outputs = with_contiguous_rows(expert_outputs)
    shared, shared_stride = rows_of(shared)
    residual, residual_stride = rows_of(residual)
    lib = library()
    assert lib is not None
    failed = lib.moe_finalize(
        outputs.data_ptr(),
        outputs.stride(0),
        outputs.stride(1),
        choices,
        weights.data_ptr(),
        weights.stride(0),
        weights.stride(1),
        codes[1],
        1.0 if scaling is None else scaling,
        address_of(shared),
        shared_stride,
        address_of(residual),
        residual_stride,
        total.data_ptr(),
        address_of(normed),
        count,
        hidden,
        codes[0],
        norm,
    )
    if failed:
        raise MemoryError(f"no memory for a row of {hidden} elements")

"""`add_norm` through the compiled library: each value is read once and each result written once."""

from __future__ import annotations

from torch import Tensor

from ...collectives import fresh
from ...compiled import NormSpec, QuantizedSpec, library
from ..host import address_of, code_of, host_norm, rows_of
from ..norms import NormFormula
from .backward import recorded


def add_norm(value: Tensor, residual: Tensor, formula: NormFormula) -> tuple[Tensor, Tensor] | None:
    """See the dispatcher; None for what the library does not take."""
    code = code_of(value, residual)
    if code is None or value.shape != residual.shape or (spec := norm_of(value, formula)) is None:
        return None
    return recorded(value, residual, formula, lambda: _run(value, residual, spec, code))  # type: ignore[return-value]


def norm(value: Tensor, formula: NormFormula) -> Tensor | None:
    """See the dispatcher; None for what the library does not take."""
    code = code_of(value)
    if code is None or (spec := norm_of(value, formula)) is None:
        return None
    return recorded(value, None, formula, lambda: _run(value, None, spec, code))[0]


def norm_of(value: Tensor, formula: NormFormula) -> NormSpec | None:
    """`formula` for the rows of `value`; None where that has none, and where the norm is not for the library."""
    shape = value.shape
    return host_norm(formula, shape[-1]) if shape and shape[-1] else None


def _run(value: Tensor, residual: Tensor | None, spec: NormSpec, code: int) -> tuple[Tensor, Tensor | None]:
    normed = fresh(value)
    total = None if residual is None else fresh(normed)
    normalize(value, residual, spec, code, total, normed)
    return normed, total


def normalize(
    value: Tensor,
    residual: Tensor | None,
    spec: NormSpec,
    code: int,
    total: Tensor | None,
    normed: Tensor | None = None,
    quantized: QuantizedSpec | None = None,
) -> None:
    """Write the sum and its norm, of tensors that the library takes: `total` and either `normed` or `quantized`."""
    hidden = value.shape[-1]
    count = value.numel() // hidden
    if not count:
        return
    value, value_stride = rows_of(value)
    residual, residual_stride = rows_of(residual)
    lib = library()
    assert lib is not None
    failed = lib.add_norm(
        value.data_ptr(),
        value_stride,
        address_of(residual),
        residual_stride,
        address_of(total),
        address_of(normed),
        quantized,
        count,
        hidden,
        code,
        spec,
    )
    if failed:
        raise MemoryError(f"no memory for a row of {hidden} elements")

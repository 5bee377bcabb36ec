"""The definition of `add_norm`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..norms import Kind, NormFormula


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums of that dtype are accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(value: Tensor) -> Tensor:
    """`value` in the dtype sums are accumulated in."""
    return value.to(accumulator(value.dtype))


def norm(total: Tensor, formula: NormFormula, dtype: torch.dtype) -> Tensor:
    """The norm of `total`, which is in an accumulation dtype, rounded once to `dtype`."""
    if formula.kind is Kind.LAYER:
        total = total - total.mean(-1, keepdim=True)
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + formula.eps)
    if formula.weight is not None:
        normed = normed * (wide(formula.weight) + formula.offset if formula.offset else wide(formula.weight))
    if formula.bias is not None:
        normed = normed + wide(formula.bias)
    return normed.to(dtype)


def add_norm(
    value: Tensor, residual: Tensor | None, formula: NormFormula, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """See the dispatcher."""
    total = wide(value) if residual is None else wide(value) + wide(residual)
    dtype = dtype or (value if residual is None else residual).dtype
    return norm(total, formula, dtype), total.to(dtype)

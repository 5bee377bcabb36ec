"""The definition of `moe_finalize`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..add_norm.naive import norm, wide
from ..norms import NormFormula


def total(expert_outputs: Tensor, weights: Tensor, shared: Tensor | None, scaling: float | None) -> Tensor:
    """The output before it is rounded: the choices in their order, then scaled, then the shared expert's."""
    outputs, factors = wide(expert_outputs), wide(weights)
    rows, _, hidden = outputs.shape
    made = outputs.new_zeros(rows, hidden, dtype=torch.promote_types(outputs.dtype, factors.dtype))
    for output, factor in zip(outputs.unbind(1), factors.unbind(1), strict=True):
        made = made + output * factor[:, None]
    if scaling is not None:
        made = made * scaling
    return made if shared is None else made + wide(shared)


def moe_finalize(
    expert_outputs: Tensor, weights: Tensor, shared: Tensor | None = None, scaling: float | None = None
) -> Tensor:
    """See the dispatcher."""
    return total(expert_outputs, weights, shared, scaling).to(expert_outputs.dtype)


def moe_finalize_add_norm(
    expert_outputs: Tensor,
    weights: Tensor,
    residual: Tensor,
    formula: NormFormula,
    shared: Tensor | None = None,
    scaling: float | None = None,
) -> tuple[Tensor, Tensor]:
    """See the dispatcher."""
    summed = total(expert_outputs, weights, shared, scaling) + wide(residual)
    return norm(summed, formula, residual.dtype), summed.to(residual.dtype)

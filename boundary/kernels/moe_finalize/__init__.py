"""Combine the outputs of a token's experts, in one pass over the rows; also onto the residual, with its norm.

`output = scaling * sum_c weights[c] * expert_outputs[c] + shared`, the choices in their order, accumulated in float32
(float64 where the tensors are) and rounded once. Of a sum over ranks it makes this rank's term.
"""

from __future__ import annotations

from torch import Tensor

from ..blocks import takes
from ..norms import NormFormula
from . import cpu, naive


def moe_finalize(
    expert_outputs: Tensor, weights: Tensor, shared: Tensor | None = None, scaling: float | None = None
) -> Tensor:
    """The output: a new tensor `[rows, hidden]` of the expert outputs' dtype.

    Args:
        expert_outputs: `[rows, choices, hidden]`, of any strides.
        weights: `[rows, choices]`: the router's; of another dtype, if need be.
        shared: `[rows, hidden]`: the shared expert's output. It is neither weighed nor scaled.
        scaling: What the routed experts' sum is multiplied by; None where the weights already have been.

    Raises:
        ValueError: The shapes do not go together.
    """
    _check(expert_outputs, weights, shared)
    made = None
    if takes(expert_outputs, weights, shared):
        from . import triton

        made = triton.moe_finalize(expert_outputs, weights, shared, scaling)
    if made is None:
        made = cpu.moe_finalize(expert_outputs, weights, shared, scaling)
    return naive.moe_finalize(expert_outputs, weights, shared, scaling) if made is None else made


def moe_finalize_add_norm(
    expert_outputs: Tensor,
    weights: Tensor,
    residual: Tensor,
    formula: NormFormula,
    shared: Tensor | None = None,
    scaling: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`(norm(output + residual), output + residual)`, of the output before it is rounded: new tensors of the
    residual's dtype.

    Args:
        expert_outputs, weights, shared, scaling: As for `moe_finalize`.
        residual: `[rows, hidden]`.
        formula: The norm, over the last dim.

    Raises:
        ValueError: The shapes do not go together.
    """
    _check(expert_outputs, weights, shared, residual)
    made = None
    if takes(expert_outputs, weights, shared, residual, formula.weight, formula.bias):
        from . import triton

        made = triton.moe_finalize_add_norm(expert_outputs, weights, residual, formula, shared, scaling)
    if made is None:
        made = cpu.moe_finalize_add_norm(expert_outputs, weights, residual, formula, shared, scaling)
    if made is None:
        made = naive.moe_finalize_add_norm(expert_outputs, weights, residual, formula, shared, scaling)
    return made


def _check(expert_outputs: Tensor, weights: Tensor, *rows: Tensor | None) -> None:
    if expert_outputs.dim() != 3 or weights.shape != expert_outputs.shape[:2]:
        raise ValueError(
            f"expert outputs of shape {tuple(expert_outputs.shape)} are not [rows, choices, hidden] for weights of "
            f"shape {tuple(weights.shape)}"
        )
    wanted = (expert_outputs.shape[0], expert_outputs.shape[2])
    for one in rows:
        if one is not None and one.shape != wanted:
            raise ValueError(f"rows of shape {tuple(one.shape)} do not add to outputs of shape {wanted}")


__all__ = ["moe_finalize", "moe_finalize_add_norm"]

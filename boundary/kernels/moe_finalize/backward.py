"""The gradients of `moe_finalize`, whose kernels only make results: the definition's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from .. import recording
from ..norms import NormFormula
from . import naive


def recorded(
    run: Callable[[], Tensor], expert_outputs: Tensor, weights: Tensor, shared: Tensor | None, scaling: float | None
) -> Tensor:
    """`run()`, which makes `moe_finalize` of these tensors, with its gradient where autograd records."""

    def definition(expert_outputs: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        return naive.moe_finalize(expert_outputs, weights, shared, scaling)

    return recording.recorded(run, definition, expert_outputs, weights, shared)


def recorded_add_norm(
    run: Callable[[], tuple[Tensor, Tensor]],
    expert_outputs: Tensor,
    weights: Tensor,
    residual: Tensor,
    formula: NormFormula,
    shared: Tensor | None,
    scaling: float | None,
) -> tuple[Tensor, Tensor]:
    """`run()`, which makes `moe_finalize_add_norm` of these tensors, with its gradient where autograd records."""

    def definition(
        expert_outputs: Tensor,
        weights: Tensor,
        residual: Tensor,
        shared: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        of_inputs = replace(formula, weight=weight, bias=bias)
        return naive.moe_finalize_add_norm(expert_outputs, weights, residual, of_inputs, shared, scaling)

    return recording.recorded(run, definition, expert_outputs, weights, residual, shared, formula.weight, formula.bias)

"""The gradient of a norm of a sum: what both terms of the sum get, and what the norm's parameters get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import gpu
from ..host import records
from ..norms import Kind, NormFormula
from .naive import wide


def backward(
    total: Tensor, formula: NormFormula, normed_gradient: Tensor | None, total_gradient: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of the sum, the weight and the bias, in accumulation dtypes; None for zero.

    Args:
        total: The sum that was normalized, `[..., hidden]`.
        formula: The norm.
        normed_gradient, total_gradient: The gradients of the two results.
    """
    if normed_gradient is None:
        return (None if total_gradient is None else wide(total_gradient)), None, None
    total, gradient = wide(total), wide(normed_gradient)
    if formula.kind is Kind.LAYER:
        total = total - total.mean(-1, keepdim=True)
    scale = (total.square().mean(-1, keepdim=True) + formula.eps).rsqrt()
    unit = total * scale
    rows = tuple(range(gradient.dim() - 1))
    weight_gradient = bias_gradient = None
    if formula.bias is not None:
        bias_gradient = gradient.sum(rows) if rows else gradient
    if formula.weight is not None:
        weight_gradient = (gradient * unit).sum(rows) if rows else gradient * unit
        gradient = gradient * (wide(formula.weight) + formula.offset)
    back = gradient - unit * (gradient * unit).mean(-1, keepdim=True)
    if formula.kind is Kind.LAYER:
        back = back - gradient.mean(-1, keepdim=True)
    back = back * scale
    return (back if total_gradient is None else back + wide(total_gradient)), weight_gradient, bias_gradient


def recorded(
    value: Tensor,
    residual: Tensor | None,
    formula: NormFormula,
    run: Callable[[], tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor | None]:
    """`run()`, which makes `(normalized, sum)` of these tensors, with its gradient where autograd records.

    Without a residual there is no sum, and `run` gives None for it.
    """
    if not records(value, residual, formula.weight, formula.bias):
        return run()
    made = _AddNorm.apply(value, residual, formula.weight, formula.bias, formula, run)
    return made if residual is not None else (made, None)  # type: ignore[return-value]


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        formula: NormFormula,
        run: Callable[[], tuple[Tensor, Tensor | None]],
    ) -> Any:
        ctx.formula = formula
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(value, residual, weight, bias)
        normed, total = run()
        return normed if total is None else (normed, total)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        value, residual, weight, bias = ctx.saved_tensors
        formula = replace(ctx.formula, weight=weight, bias=bias)
        normed_gradient, total_gradient = gradients if residual is not None else (*gradients, None)
        of_parameters = ctx.needs_input_grad[2:4]
        made = _through_triton(value, residual, formula, normed_gradient, total_gradient, of_parameters)
        if made is None:
            total = wide(value) if residual is None else wide(value) + wide(residual)
            made = backward(total, formula, normed_gradient, total_gradient)
        given, *parameters = made
        given = None if given is None else given.to(value.dtype)
        parameters = [
            gradient.to(parameter.dtype) if needed and gradient is not None and parameter is not None else None
            for gradient, parameter, needed in zip(
                parameters, (formula.weight, formula.bias), of_parameters, strict=True
            )
        ]
        return given, None if residual is None else given, *parameters, None, None


def _through_triton(
    value: Tensor,
    residual: Tensor | None,
    formula: NormFormula,
    normed_gradient: Tensor | None,
    total_gradient: Tensor | None,
    of_parameters: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """The gradients by the kernel; None for what it does not take, and where they are to have gradients themselves."""
    tensors = value, residual, formula.weight, formula.bias, normed_gradient, total_gradient
    if normed_gradient is None or torch.is_grad_enabled() or not gpu.runs(*tensors):
        return None
    from . import triton

    if not triton.takes(value, residual, formula):
        return None
    return triton.backward(value, residual, formula, normed_gradient, total_gradient, of_parameters)

"""What the operations that begin with a sum over ranks have in common: their gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .add_norm import norm_of_sum
from .add_norm.backward import backward
from .all_reduce_add_norm.naive import added
from .host import records
from .norms import NormFormula
from .quantization import Quantization

Results = tuple[Tensor | tuple[Tensor, ...] | None, Tensor]
"""`(normalized, sum)`; None where there is no norm, and a tuple where it is quantized."""


class _SumAddNorm(torch.autograd.Function):
    """The formula is that of a norm that has a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        term: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        formula: NormFormula | None,
        run: Callable[[], Results],
        back: Callable[[Tensor], Tensor],
    ) -> Any:
        normed, total = run()
        ctx.formula, ctx.back, ctx.dtypes = formula, back, (term.dtype, residual.dtype)
        ctx.save_for_backward(total, weight, bias)
        return normed, total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        total, *parameters = ctx.saved_tensors
        formula = None if ctx.formula is None else replace(ctx.formula, weight=parameters[0], bias=parameters[1])
        if formula is None:
            given, weight, bias = gradients[1], None, None
        else:
            given, weight, bias = backward(total, formula, *gradients)
            if weight is not None and formula.weight is not None:
                weight = weight.to(formula.weight.dtype)
            if bias is not None and formula.bias is not None:
                bias = bias.to(formula.bias.dtype)
        if given is None:
            return None, None, weight, bias, None, None, None
        return ctx.back(given.to(ctx.dtypes[0])), given.to(ctx.dtypes[1]), weight, bias, None, None, None


def in_steps(
    terms: list[Tensor], residual: Tensor, formula: NormFormula | None, form: Quantization | None = None
) -> Results:
    """The results without a kernel for all of it. The norm is made as that of any tensor, so that a sum that somebody
    looks at before it is normalized has the same."""
    total = added(terms, residual)
    normed = None
    if formula is not None:
        normed = norm_of_sum(total, formula, residual.dtype) if form is None else form.add_norm(total, None, formula)[0]
    return normed, total.to(residual.dtype)


def summing(
    term: Tensor,
    residual: Tensor,
    formula: NormFormula | None,
    form: Quantization | None,
    run: Callable[[], Results],
    back: Callable[[Tensor], Tensor],
) -> Results:
    """`run()`, which makes the operation's results of these tensors, with its gradient where autograd records.

    The norm's gradient is that at the rounded sum, which is what is kept; a quantized one has none. `back` makes a
    term's gradient of the sum's: all ranks compute the same loss, so each term gets the gradient of the rows that it is
    a term of.
    """
    if form is not None:
        formula = None
    weight, bias = (None, None) if formula is None else (formula.weight, formula.bias)
    if not records(term, residual, weight, bias):
        return run()
    return _SumAddNorm.apply(term, residual, weight, bias, formula, run, back)  # type: ignore[return-value]

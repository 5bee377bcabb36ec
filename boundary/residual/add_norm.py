"""The plain residual: add the contribution, normalize the sum.

One numerical contract holds whichever way an input is made: the sum is accumulated in float32 (float64 where
the tensors are), the variance is taken of that sum and not of its rounding, and the residual is rounded once.
It needs the norm's own formula, so it holds for norms that offer `of_sum` (:class:`RMSNorm`,
:class:`GemmaRMSNorm`) and for torch's `RMSNorm` and `LayerNorm`. Any other norm is a black box: it gets the
rounded sum, as the model's author wrote it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import add_norm as kernel
from ..kernels.add_norm.naive import accumulator, wide
from ..kernels.norms import Kind, NormFormula, formula_of
from ..kernels.quantization import of_kernels
from ..layout import Layout
from . import LayerResidual, Norm, StageUpdate


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, computed in float32 and rounded once."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    @property
    def gain(self) -> Tensor:
        """What the normalized value is multiplied by."""
        return self.weight

    def of_sum(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """The norm of a sum that has not been rounded yet, in `dtype`."""
        return rms_norm(total, self.gain, self.eps, dtype)

    def formula(self) -> NormFormula:
        """The norm, as kernels know it. Holds for this very class: a subclass with another norm states its own."""
        return NormFormula(Kind.RMS, self.weight, self.eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        formula = formula_of(self, accumulator(hidden_states.dtype))
        if formula is None:
            return self.of_sum(wide(hidden_states), hidden_states.dtype)
        return kernel.norm(hidden_states, formula)


class GemmaRMSNorm(RMSNorm):
    """The norm whose weight is an offset from one."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps)
        nn.init.zeros_(self.weight)

    @property
    def gemma_weight(self) -> Tensor:
        """One plus the weight, in the accumulation dtype: what a fused kernel is given as gamma."""
        return 1.0 + wide(self.weight)

    @property
    def gain(self) -> Tensor:
        return self.gemma_weight

    def formula(self) -> NormFormula:
        return NormFormula(Kind.RMS, self.weight, self.eps, offset=1.0)


def rms_norm(total: Tensor, gain: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """`total / sqrt(mean(total^2) + eps) * gain` over the last dim, in the dtype of `total`, rounded once to
    `dtype`.
    """
    normalized = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    if gain is not None:
        normalized = normalized * wide(gain)
    return normalized.to(dtype)


Format = Callable[[Tensor], tuple[Tensor, ...]]
"""Makes the input of quantized compute of normalized rows: tensors that each have one row per token (data and scales),
and that move together. A :class:`boundary.kernels.quantization.Quantization` is made in one pass with the norm.
"""


def normalize_sum(norm: Norm, total: Tensor, rounded: Tensor, form: Format | None = None) -> Any:
    """The norm of a sum: of `total` where the norm's formula is known, else of what it was rounded to."""
    formula = formula_of(norm, total.dtype)
    if formula is not None and (known := of_kernels(form, formula)) is not None:
        return known.add_norm(total, None, formula)[0]
    of_sum = getattr(norm, "of_sum", None)
    if not rounded.shape[0]:
        normalized = rounded.new_empty(rounded.shape)
    elif formula is not None:
        normalized = kernel.norm_of_sum(total, formula, rounded.dtype)
    else:
        normalized = norm(rounded) if of_sum is None else of_sum(total, rounded.dtype)
    return normalized if form is None else form(normalized)


def add_norm(
    contribution: Tensor,
    residual: Tensor,
    norm: Norm,
    post_residual_addition: Tensor | None = None,
    form: Format | None = None,
) -> tuple[Any, Tensor]:
    """`(norm(sum), sum)` of contribution, residual and addition, under the contract above. New tensors; the norm in
    the format `form`, if there is one.
    """
    if post_residual_addition is None:
        formula = formula_of(norm, accumulator(residual.dtype))
        if formula is not None and (known := of_kernels(form, formula)) is not None:
            return known.add_norm(contribution, residual, formula)
        if formula is not None:
            normalized, total = kernel.add_norm(contribution, residual, formula)
            return normalized if form is None else form(normalized), total
    total = wide(residual) + wide(contribution)
    if post_residual_addition is not None:
        total = total + wide(post_residual_addition)
    rounded = total.to(residual.dtype)
    return normalize_sum(norm, total, rounded, form), rounded


@dataclass(frozen=True)
class AddUpdate:
    """`residual + contribution`."""

    at_producer: bool = False
    plain: bool = True
    outlives_producer: bool = True

    def apply(self, contribution: Tensor, residual: LayerResidual) -> LayerResidual:
        total = wide(residual.tensor) + wide(contribution)
        return LayerResidual(total.to(residual.tensor.dtype), residual.rows)


@dataclass(frozen=True)
class AddNormRead:
    """The norm of the residual.

    Attributes:
        quantize: Makes the input format of quantized compute.
        before_gather: Read on the source rows.
    """

    quantize: Format | None = None
    before_gather: bool = False
    keeps_residual: bool = True

    def enter(self, hidden_states: Tensor, rows: Layout) -> LayerResidual:
        return LayerResidual(hidden_states, rows)

    def read(self, residual: LayerResidual, norm: Norm) -> tuple[Any, LayerResidual]:
        value, form = residual.tensor, self.quantize
        formula = None if form is None else formula_of(norm, accumulator(value.dtype))
        if formula is not None and (known := of_kernels(form, formula)) is not None:
            return known.add_norm(value, None, formula)[0], residual
        normalized = norm(value) if value.shape[0] else value.new_empty(value.shape)
        return normalized if form is None else form(normalized), residual

    def update_and_read(
        self,
        update: StageUpdate,
        contribution: Tensor,
        residual: LayerResidual,
        norm: Norm,
        post_residual_addition: Tensor | None = None,
    ) -> tuple[Any, LayerResidual]:
        if not update.plain:
            updated = update.apply(contribution, residual)
            if post_residual_addition is not None:
                raise ValueError("post_residual_addition needs a plain residual update")
            return self.read(updated, norm)
        read, total = add_norm(contribution, residual.tensor, norm, post_residual_addition, self.quantize)
        return read, LayerResidual(total, residual.rows)

    def contract(self, residual: LayerResidual) -> Tensor:
        return residual.tensor

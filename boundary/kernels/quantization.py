"""What quantized compute reads: a format, made in one pass with the sum and the norm it is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .add_norm.naive import wide
from .add_norm_quantize import add_norm_quantize
from .add_norm_quantize.naive import check, quantize, scale_of
from .norms import NormFormula


@dataclass(frozen=True, eq=False)
class Quantization:
    """One byte an element, as the `quantize` of a read (:class:`boundary.residual.add_norm.AddNormRead`).

    A read with a norm whose formula is known makes it of the sum before that is rounded, in the same pass. Of another
    norm's rows, which were rounded, it is called with them.

    Attributes:
        dtype: `torch.float8_e4m3fn` or `torch.int8`.
        scale: One positive float32 for all rows, which compute knows: what is made is `(data,)`. None for a scale of
            each row, float32 `[rows, 1]`, at which its largest magnitude is the largest value of `dtype`: what is made
            is `(data, scale)`. `data * scale` is about the norm.

    Raises:
        ValueError: The dtype is another, or the scale is not one positive float32.
    """

    dtype: torch.dtype
    scale: Tensor | None = None

    def __post_init__(self) -> None:
        check(self.dtype, self.scale)
        if self.scale is not None and not 0 < self.scale.item() < math.inf:
            raise ValueError(f"a scale is positive and finite, and this one is {self.scale.item()}")

    def __call__(self, normalized: Tensor) -> tuple[Tensor, ...]:
        normed = wide(normalized).float().detach()
        scale = scale_of(normed, self.dtype) if self.scale is None else self.scale.detach()
        return self.tuple_of(quantize(normed, scale, self.dtype), scale)

    def add_norm(
        self, value: Tensor, residual: Tensor | None, formula: NormFormula
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """What is made of the norm of `value + residual`, and that sum, in the residual's dtype."""
        data, scale, total = add_norm_quantize(value, residual, formula, self.dtype, self.scale)
        return self.tuple_of(data, scale), total

    def tuple_of(self, data: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """What compute gets: what has one row for each token."""
        return (data, scale) if self.scale is None else (data,)


def of_kernels(form: object, formula: NormFormula | None) -> Quantization | None:
    """`form`, where kernels make it in one pass with a norm of that formula. A subclass may mean something else."""
    return form if formula is not None and type(form) is Quantization else None  # type: ignore[return-value]

"""The definition of `add_norm_quantize`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..add_norm.naive import norm, wide
from ..norms import NormFormula

#: The least and the largest finite value of what is quantized to.
LIMITS = {torch.float8_e4m3fn: (-448.0, 448.0), torch.int8: (-128.0, 127.0)}
#: The least scale of a row: that of a row of zeros.
FLOOR = 2.0**-40


def check(dtype: torch.dtype, scale: Tensor | None) -> None:
    """Refuse what nothing is quantized to.

    Raises:
        ValueError: The dtype is another, or the scale is not one float32.
    """
    if dtype not in LIMITS:
        raise ValueError(f"nothing is quantized to {dtype}, only to {' and '.join(map(str, LIMITS))}")
    if scale is not None and (scale.numel() != 1 or scale.dim() > 1 or scale.dtype != torch.float32):
        raise ValueError(
            f"a scale for all rows is one float32, and this one is {scale.dtype} of shape {tuple(scale.shape)}; "
            "for a scale of each row give none"
        )


def scale_of(normed: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of each row, `[..., 1]` float32, at which its largest magnitude is the largest value of `dtype`."""
    largest = normed.nan_to_num(nan=0.0).abs().amax(-1, keepdim=True)
    return (largest / LIMITS[dtype][1]).clamp_min(FLOOR)


def quantize(normed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`normed / scale`, clamped, and rounded to nearest even."""
    scaled = (normed / scale).clamp(*LIMITS[dtype])
    return scaled.round().nan_to_num(nan=0.0).to(dtype) if dtype == torch.int8 else scaled.to(dtype)


def add_norm_quantize(
    value: Tensor, residual: Tensor | None, formula: NormFormula, dtype: torch.dtype, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See the dispatcher."""
    total = wide(value) if residual is None else wide(value) + wide(residual)
    normed = norm(total, formula, torch.float32).detach()
    scale = scale_of(normed, dtype) if scale is None else scale
    return quantize(normed, scale.detach(), dtype), scale, value if residual is None else total.to(residual.dtype)

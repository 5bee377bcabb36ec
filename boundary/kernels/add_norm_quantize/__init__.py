"""Add two values, normalize the sum and quantize the norm, in one pass over the rows.

What a quantized linear reads is then written once, in one byte an element, and the norm in the model's dtype never is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import gpu
from ..norms import NormFormula
from . import cpu, naive


def add_norm_quantize(
    value: Tensor,
    residual: Tensor | None,
    formula: NormFormula,
    dtype: torch.dtype,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(quantized, scale, value + residual)`, of which `quantized * scale` is about `norm(value + residual)`.

    The sum has a gradient; the quantized rows and their scales have none.

    Args:
        value: `[..., hidden]`, of any strides.
        residual: Of the same shape; of the same dtype, or torch's operations are used. None for none.
        formula: The norm, over the last dim.
        dtype: `torch.float8_e4m3fn` or `torch.int8`.
        scale: One positive float32 for all rows; None for a scale of each row, at which its largest magnitude is the
            largest value of `dtype`.

    Returns:
        `[..., hidden]` of `dtype`, new; the scale that was given, or `[..., 1]` float32, new; and the sum, new and of
        the residual's dtype, or `value` itself without a residual.

    Raises:
        ValueError: The dtype is another, or the scale is not one float32.
    """
    naive.check(dtype, scale)
    made = None
    if gpu.runs(value, residual, formula.weight, formula.bias, scale):
        from . import triton

        made = triton.add_norm_quantize(value, residual, formula, dtype, scale)
    if made is None:
        made = cpu.add_norm_quantize(value, residual, formula, dtype, scale)
    return naive.add_norm_quantize(value, residual, formula, dtype, scale) if made is None else made


__all__ = ["add_norm_quantize"]

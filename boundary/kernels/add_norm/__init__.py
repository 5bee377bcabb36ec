"""Add two values and normalize the sum, in one pass over the rows.

A path answers None to what it does not take, and the dispatcher asks them in order: Triton's kernels, the compiled
library, and torch's own operations, which take everything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import gpu
from ..norms import NormFormula
from . import cpu, naive


def add_norm(value: Tensor, residual: Tensor, formula: NormFormula) -> tuple[Tensor, Tensor]:
    """`(norm(value + residual), value + residual)`: new tensors of the residual's dtype.

    Args:
        value: `[..., hidden]`, of any strides.
        residual: Of the same shape; of the same dtype, or torch's operations are used.
        formula: The norm, over the last dim.
    """
    made = None
    if gpu.runs(value, residual, formula.weight, formula.bias):
        from . import triton

        made = triton.add_norm(value, residual, formula)
    if made is None:
        made = cpu.add_norm(value, residual, formula)
    return naive.add_norm(value, residual, formula) if made is None else made


def norm(value: Tensor, formula: NormFormula) -> Tensor:
    """The norm of `value`, `[..., hidden]`, in its dtype: a new tensor."""
    made = None
    if gpu.runs(value, formula.weight, formula.bias):
        from . import triton

        made = triton.norm(value, formula)
    if made is None:
        made = cpu.norm(value, formula)
    return naive.norm(naive.wide(value), formula, value.dtype) if made is None else made


def norm_of_sum(total: Tensor, formula: NormFormula, dtype: torch.dtype) -> Tensor:
    """The norm of a sum that has not been rounded yet, `[..., hidden]` in an accumulation dtype, in `dtype`."""
    return norm(total, formula) if total.dtype == dtype else naive.norm(total, formula, dtype)


__all__ = ["add_norm", "norm", "norm_of_sum"]

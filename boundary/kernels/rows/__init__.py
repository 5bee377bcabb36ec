"""Rows moved by an index, each in one pass, and zeros where there is nothing: what compute on chosen rows begins and
ends with. The two are each other's gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import gpu
from ..blocks import takes
from . import cpu, naive


def gather_rows(value: Tensor, index: Tensor) -> Tensor:
    """The rows of `value` that `index` names, in its order: a new tensor `[places, ...]`, to the bit.

    Its gradient is `scatter_rows`.

    Args:
        value: `[rows, ...]`, of any dtype.
        index: `[places]`, integers. An index that is no row's, such as -1, gives a row of zeros; a row may be named
            more than once.

    Raises:
        ValueError: The index is not a list of integers.
    """
    _check(index)
    made = None
    if gpu.runs(value, index):
        from . import triton

        made = triton.gather_rows(value, index)
    if made is None:
        made = cpu.gather_rows(value, index)
    return naive.gather_rows(value, index) if made is None else made


def scatter_rows(value: Tensor, index: Tensor, rows: int) -> Tensor:
    """Row `i` of `value` to row `index[i]`: a new tensor `[rows, ...]` with zeros where nothing comes.

    What comes to one place is added in its order, accumulated in float32 (float64 and integers in themselves) and
    rounded once. Its gradient is `gather_rows`.

    Args:
        value: `[places, ...]`.
        index: `[places]`, integers. What goes to no row of the result, such as -1, is left out.
        rows: How many rows the result has.

    Raises:
        ValueError: The index is not a list of integers, one for each row.
    """
    _check(index)
    if index.shape[0] != value.shape[0]:
        raise ValueError(f"{index.shape[0]} places are not one for each of {value.shape[0]} rows")
    if takes(value) and gpu.runs(value, index):
        from . import triton

        return triton.scatter_rows(value, index, rows)
    made = cpu.scatter_rows(value, index, rows)
    return naive.scatter_rows(value, index, rows) if made is None else made


def _check(index: Tensor) -> None:
    if index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"an index of rows has one dim and integers, not shape {tuple(index.shape)} of {index.dtype}")


__all__ = ["gather_rows", "scatter_rows"]

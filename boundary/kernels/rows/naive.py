"""The definition of `gather_rows` and `scatter_rows`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..add_norm.naive import wide


def gather_rows(value: Tensor, index: Tensor) -> Tensor:
    """See the dispatcher."""
    rows = value.shape[0]
    if not rows:
        return value.new_zeros(index.shape[0], *value.shape[1:])
    outside = (index < 0) | (index >= rows)
    found = value.index_select(0, index.clamp(0, rows - 1))
    return torch.where(outside.view(-1, *[1] * (value.dim() - 1)), value.new_zeros(()), found)


def scatter_rows(value: Tensor, index: Tensor, rows: int) -> Tensor:
    """See the dispatcher."""
    terms = wide(value) if value.is_floating_point() else value
    outside = (index < 0) | (index >= rows)
    # One row more than asked for takes what goes nowhere.
    placed = terms.new_zeros(rows + 1, *value.shape[1:])
    placed = placed.index_add(0, torch.where(outside, rows, index), terms)
    return placed[:rows].to(value.dtype)

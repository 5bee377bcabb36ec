"""What the Triton paths that go row by row have in common: the dtypes their kernels compute on, and a row's blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from .gpu import runs

BLOCK = 1024
"""The most elements of a row that one program takes, where it need not have the whole row."""

_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def takes(*tensors: Tensor | None) -> bool:
    """Whether Triton's kernels run on these and accumulate them in float32, as their definitions do."""
    return all(tensor is None or tensor.dtype in _DTYPES for tensor in tensors) and runs(*tensors)


def with_contiguous_rows(value: Tensor) -> Tensor:
    """`value` where its last dim is contiguous, whatever its other strides are; else a copy."""
    return value if value.stride(-1) == 1 else value.contiguous()


def block_of(width: int, most: int = BLOCK) -> int:
    """A power of two that holds a row of `width` elements, or as much of it as one program takes."""
    return min(most, 1 << (width - 1).bit_length())

"""`gather_rows` and `scatter_rows` through the compiled library: each row of a result is written once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...compiled import library
from ..host import code_of, rows_of
from ..ordinary import is_ordinary, watched
from ..recording import recorded
from . import naive


def gather_rows(value: Tensor, index: Tensor) -> Tensor | None:
    """See the dispatcher; None for what the library does not take."""
    if library() is None or watched() or not (_in_memory(value) and _in_memory(index)):
        return None
    return recorded(lambda: _run_gather(value, index), naive.gather_rows, value, index)


def scatter_rows(value: Tensor, index: Tensor, rows: int) -> Tensor | None:
    """See the dispatcher; None for what the library does not take."""
    code = code_of(value)
    if code is None or not _in_memory(index):
        return None
    return recorded(
        lambda: _run_scatter(value, index, rows, code),
        lambda value, index: naive.scatter_rows(value, index, rows),
        value,
        index,
    )


def _in_memory(tensor: Tensor) -> bool:
    return tensor.is_cpu and is_ordinary(tensor)


def _run_gather(value: Tensor, index: Tensor) -> Tensor:
    out = value.new_empty(index.shape[0], *value.shape[1:])
    if not out.numel():
        return out
    flat, stride = rows_of(matrix(value))
    places, size = index.to(torch.int64).contiguous(), value.itemsize
    lib = library()
    assert lib is not None
    lib.gather_rows(
        flat.data_ptr(),
        value.shape[0],
        stride * size,
        places.data_ptr(),
        out.data_ptr(),
        len(places),
        flat.shape[1] * size,
    )
    return out


def _run_scatter(value: Tensor, index: Tensor, rows: int, code: int) -> Tensor:
    out = value.new_empty(rows, *value.shape[1:])
    if not out.numel():
        return out
    flat, stride = rows_of(matrix(value))
    places = index.to(torch.int64).contiguous()
    lib = library()
    assert lib is not None
    failed = lib.scatter_rows(
        flat.data_ptr(),
        stride,
        places.data_ptr(),
        len(places),
        out.data_ptr(),
        rows,
        flat.shape[1],
        code,
    )
    if failed:
        raise MemoryError(f"no memory to sort {len(places)} places of {rows} rows")
    return out


def matrix(value: Tensor) -> Tensor:
    """`[rows, width]`, which may have no rows."""
    return value if value.dim() == 2 else value.reshape(value.shape[0], math.prod(value.shape[1:]))

"""`gather_rows` and `scatter_rows` through Triton: each row of a result is written once, by whoever makes it.

So no row is left as it was found, and none is zeroed before it is written. To know what comes to a place, the index of
a scatter is sorted; the rows are not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import gpu
from ..add_norm.triton import POINTERS
from ..blocks import block_of, takes
from ..host import rows_of
from ..recording import recorded
from . import naive
from .cpu import matrix

#: Rows are moved as integers of their elements' size, whatever they are.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _gather(value, index, out, rows, width, value_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index + row).to(tl.int64)
    there = tl.where((source >= 0) & (source < rows), width, 0)
    found = tl.load(value + source * value_stride + at, mask=at < there, other=0)
    tl.store(out + row * width + at, found, mask=at < width)


@triton.jit
def _scatter(value, order, starts, out, width, value_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(tl.load(starts + row), tl.load(starts + row + 1)):
        source = tl.load(order + place)
        total += tl.load(value + source * value_stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, total.to(out.dtype.element_ty), mask=inside)


def gather_rows(value: Tensor, index: Tensor) -> Tensor | None:
    """See the dispatcher; None for what the kernel does not take."""
    if value.itemsize not in BITS or value.is_conj():
        return None

    def back(value: Tensor, index: Tensor, given: Tensor) -> tuple[Tensor, None]:
        return _run_scatter(given, index, value.shape[0]), None

    return recorded(
        lambda: _run_gather(value, index), naive.gather_rows, value, index, back=back if takes(value) else None
    )


def scatter_rows(value: Tensor, index: Tensor, rows: int) -> Tensor:
    """See the dispatcher."""
    return recorded(
        lambda: _run_scatter(value, index, rows),
        lambda value, index: naive.scatter_rows(value, index, rows),
        value,
        index,
        back=lambda value, index, given: (_run_gather(given, index), None),
    )


def _run_gather(value: Tensor, index: Tensor) -> Tensor:
    out = value.new_empty(index.shape[0], *value.shape[1:])
    if not out.numel():
        return out
    bits = BITS[value.itemsize]
    flat, stride = rows_of(matrix(value.view(bits)))
    width = flat.shape[1]
    block = block_of(width)
    grid = (index.shape[0], triton.cdiv(width, block))
    index, out_bits = index.contiguous(), out.view(bits)
    gpu.launch(_gather, grid, flat, index, out_bits, value.shape[0], width, stride, BLOCK=block)
    return out


def _run_scatter(value: Tensor, index: Tensor, rows: int) -> Tensor:
    out = value.new_empty(rows, *value.shape[1:])
    if not out.numel():
        return out
    flat, stride = rows_of(matrix(value))
    width = flat.shape[1]
    block = block_of(width)
    # Stable, so that what comes to one place is added in the order in which it was given.
    targets, order = index.sort(stable=True)
    starts = torch.searchsorted(targets, torch.arange(rows + 1, dtype=index.dtype, device=index.device))
    grid = (rows, triton.cdiv(width, block))
    gpu.launch(_scatter, grid, flat, order, starts, out, width, stride, BLOCK=block)
    return out


def _compiled() -> list[gpu.Variant]:
    numbers: dict[str, str] = dict.fromkeys(("width", "value_stride"), "i32")
    constants = {"BLOCK": block_of(4096)}
    variants = [
        gpu.Variant(_gather, {"value": bits, "out": bits, "index": "*i64", "rows": "i32"} | numbers, constants, 4)
        for bits in ("*i8", "*i16", "*i32", "*i64")
    ]
    for pointer in POINTERS.values():
        tensors = {"value": pointer, "out": pointer, "order": "*i64", "starts": "*i64"}
        variants.append(gpu.Variant(_scatter, tensors | numbers, constants, 4))
    return variants


COMPILED = _compiled()

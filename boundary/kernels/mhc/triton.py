"""`mix` through Triton: every stream is read once, and all mixed streams are added up from it as it comes.

A program holds a block of all streams of one row. `LANES` are the streams, of which there is a power of two; those
beyond the last are zeros. The gradient's program goes over the whole row, because the coefficients' are sums over it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import gpu
from ..add_norm.triton import POINTERS
from ..blocks import block_of, with_contiguous_rows
from ..host import rows_of
from ..recording import recorded
from . import naive

#: The most streams that a kernel is unrolled for.
STREAMS = 8
#: The most elements that a program holds of all streams, forward and backward.
HELD, HELD_BACK = 4096, 512


@triton.jit
def _mix(
    streams, comb, post, contribution, out, row_stride, stream_stride, contribution_stride, hidden,
    STREAMS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < hidden
    lane = tl.arange(0, LANES)
    real = lane < STREAMS
    total = tl.zeros([LANES, BLOCK], tl.float32)
    # Streams may be far apart: an address is moved from one to the next, and no product of 32 bits made.
    stream_place = streams + row * row_stride + at
    for stream in tl.static_range(STREAMS):  # type: ignore[reportGeneralTypeIssues]
        factor = tl.load(comb + (row * STREAMS + lane) * STREAMS + stream, mask=real, other=0.0).to(tl.float32)
        value = tl.load(stream_place, mask=inside, other=0.0).to(tl.float32)
        stream_place += stream_stride
        total += factor[:, None] * value[None, :]
    factor = tl.load(post + row * STREAMS + lane, mask=real, other=0.0).to(tl.float32)
    value = tl.load(contribution + row * contribution_stride + at, mask=inside, other=0.0).to(tl.float32)
    total += factor[:, None] * value[None, :]
    place = out + (row * STREAMS + lane[:, None]) * hidden + at[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def _gradients(
    streams, comb, post, contribution, given, streams_back, comb_back, post_back, contribution_back,
    row_stride, stream_stride, contribution_stride, hidden,
    STREAMS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    real = lane < STREAMS
    of_post = tl.load(post + row * STREAMS + lane, mask=real, other=0.0).to(tl.float32)
    comb_sum = tl.zeros([LANES, LANES], tl.float32)
    post_sum = tl.zeros([LANES], tl.float32)
    for start in range(0, hidden, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < hidden
        place = given + (row * STREAMS + lane[:, None]) * hidden + at[None, :]
        gradient = tl.load(place, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
        value = tl.load(contribution + row * contribution_stride + at, mask=inside, other=0.0).to(tl.float32)
        post_sum += tl.sum(gradient * value[None, :], 1)
        back = tl.sum(gradient * of_post[:, None], 0)
        place = contribution_back + row * hidden + at
        tl.store(place, back.to(contribution_back.dtype.element_ty), mask=inside)
        stream_place = streams + row * row_stride + at
        for stream in tl.static_range(STREAMS):  # type: ignore[reportGeneralTypeIssues]
            factor = tl.load(comb + (row * STREAMS + lane) * STREAMS + stream, mask=real, other=0.0).to(tl.float32)
            value = tl.load(stream_place, mask=inside, other=0.0).to(tl.float32)
            stream_place += stream_stride
            of_stream = tl.sum(gradient * value[None, :], 1)
            comb_sum += tl.where(lane[None, :] == stream, tl.expand_dims(of_stream, 1), 0.0)
            back = tl.sum(gradient * factor[:, None], 0)
            place = streams_back + (row * STREAMS + stream) * hidden + at
            tl.store(place, back.to(streams_back.dtype.element_ty), mask=inside)
    place = comb_back + (row * STREAMS + lane[:, None]) * STREAMS + lane[None, :]
    tl.store(place, comb_sum.to(comb_back.dtype.element_ty), mask=real[:, None] & real[None, :])
    tl.store(post_back + row * STREAMS + lane, post_sum.to(post_back.dtype.element_ty), mask=real)


def mix(streams: Tensor, comb: Tensor, post: Tensor, contribution: Tensor) -> Tensor | None:
    """See the dispatcher; None for what the kernel does not take."""
    if not 0 < streams.shape[1] <= STREAMS:
        return None
    return recorded(
        lambda: _run(streams, comb, post, contribution),
        naive.mix,
        streams,
        comb,
        post,
        contribution,
        back=_run_back,
    )


def _run(streams: Tensor, comb: Tensor, post: Tensor, contribution: Tensor) -> Tensor:
    out = torch.empty_like(streams, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    rows, count, hidden = streams.shape
    streams = with_contiguous_rows(streams)
    contribution, contribution_stride = rows_of(contribution)
    lanes, block = _tile(count, hidden, HELD)
    gpu.launch(
        _mix, (rows, triton.cdiv(hidden, block)), streams, comb.contiguous(), post.contiguous(), contribution, out,
        streams.stride(0), streams.stride(1), contribution_stride, hidden, STREAMS=count, LANES=lanes, BLOCK=block,
    )  # fmt: skip
    return out


def _run_back(
    streams: Tensor, comb: Tensor, post: Tensor, contribution: Tensor, given: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, count, hidden = streams.shape
    inputs = (streams, comb, post, contribution)
    if not streams.numel():
        return tuple(torch.zeros_like(one) for one in inputs)  # type: ignore[return-value]
    streams_back, comb_back, post_back, contribution_back = backs = tuple(
        torch.empty_like(one, memory_format=torch.contiguous_format) for one in inputs
    )
    streams = with_contiguous_rows(streams)
    contribution, contribution_stride = rows_of(contribution)
    lanes, block = _tile(count, hidden, HELD_BACK)
    gpu.launch(
        _gradients, (rows,), streams, comb.contiguous(), post.contiguous(), contribution, given.contiguous(),
        streams_back, comb_back, post_back, contribution_back, streams.stride(0), streams.stride(1),
        contribution_stride, hidden, STREAMS=count, LANES=lanes, BLOCK=block,
    )  # fmt: skip
    return backs  # type: ignore[return-value]


def _tile(count: int, hidden: int, held: int) -> tuple[int, int]:
    """The lanes for that many streams, and how much of each a program holds."""
    lanes = triton.next_power_of_2(count)
    return lanes, min(block_of(hidden), held // lanes)


def _compiled() -> list[gpu.Variant]:
    numbers: dict[str, str] = dict.fromkeys(("row_stride", "stream_stride", "contribution_stride", "hidden"), "i32")
    variants = []
    for count in (1, 2, 4, STREAMS):
        forward, backward = (
            {"STREAMS": count, "LANES": lanes, "BLOCK": block}
            for lanes, block in (_tile(count, 4096, held) for held in (HELD, HELD_BACK))
        )
        for pointer in POINTERS.values():
            tensors = {"streams": pointer, "comb": "*fp32", "post": "*fp32", "contribution": pointer}
            variants.append(gpu.Variant(_mix, tensors | numbers | {"out": pointer}, forward, 4))
            backs = {f"{name}_back": kind for name, kind in tensors.items()} | {"given": pointer}
            variants.append(gpu.Variant(_gradients, tensors | backs | numbers, backward, 4))
    return variants


COMPILED = _compiled()

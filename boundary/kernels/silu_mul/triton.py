"""`silu_mul` in one Triton kernel, its gradient in another: each value is read once, each result written once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import gpu
from ..add_norm.triton import POINTERS
from ..blocks import block_of
from ..host import records, rows_of
from . import naive


@triton.jit
def _silu_mul(gate, up, out, width, gate_stride, up_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    made = x / (1.0 + tl.exp(-x)) * y
    tl.store(out + row * width + column, made.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gradients(
    gate, up, given, gate_back, up_back, width, gate_stride, up_stride, given_stride, back_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(given + row * given_stride + column, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-x))
    x_back = gradient * y * (share * (1.0 + x * (1.0 - share)))
    y_back = gradient * (x * share)
    place = row * back_stride + column
    tl.store(gate_back + place, x_back.to(gate_back.dtype.element_ty), mask=inside)
    tl.store(up_back + place, y_back.to(up_back.dtype.element_ty), mask=inside)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See the dispatcher."""
    return _SiluMul.apply(gate, up) if records(gate, up) else _run(gate, up)  # type: ignore[return-value]


def silu_mul_halves(value: Tensor) -> Tensor:
    """See the dispatcher."""
    return _SiluMul.apply(value) if records(value) else _run(*_pair(value))  # type: ignore[return-value]


class _SiluMul(torch.autograd.Function):
    """Of a gate and an up, or of one tensor that holds both: then its gradient is one tensor too."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return _run(*_pair(*inputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs, (given,) = ctx.saved_tensors, gradients
        if torch.is_grad_enabled() or not gpu.runs(*inputs, given):
            backs = naive.gradients(*_pair(*inputs), given)
            return backs if len(inputs) == 2 else torch.cat(backs, dim=-1)
        results = tuple(torch.empty_like(one, memory_format=torch.contiguous_format) for one in inputs)
        _run_back(*_pair(*inputs), given, *_pair(*results))
        return results


def _pair(value: Tensor, up: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return value, up
    gate, up = value.chunk(2, dim=-1)
    return gate, up


def _run(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    rows, width = gate.shape
    gate, gate_stride = rows_of(gate)
    up, up_stride = rows_of(up)
    block = block_of(width)
    grid = (rows, triton.cdiv(width, block))
    gpu.launch(_silu_mul, grid, gate, up, out, width, gate_stride, up_stride, BLOCK=block)
    return out


def _run_back(gate: Tensor, up: Tensor, given: Tensor, gate_back: Tensor, up_back: Tensor) -> None:
    """Write the gradients of `gate` and `up` to the last two, which have equal strides and contiguous rows."""
    if not gate.numel():
        return
    rows, width = gate.shape
    gate, gate_stride = rows_of(gate)
    up, up_stride = rows_of(up)
    given, given_stride = rows_of(given)
    block = block_of(width)
    grid = (rows, triton.cdiv(width, block))
    gpu.launch(
        _gradients, grid, gate, up, given, gate_back, up_back, width, gate_stride, up_stride, given_stride,
        gate_back.stride(0), BLOCK=block,
    )  # fmt: skip


def _compiled() -> list[gpu.Variant]:
    strides: dict[str, str] = dict.fromkeys(("width", "gate_stride", "up_stride"), "i32")
    of_gradients: dict[str, str] = dict.fromkeys(("given_stride", "back_stride"), "i32")
    constants = {"BLOCK": block_of(4096)}
    variants = []
    for pointer in POINTERS.values():
        tensors = dict.fromkeys(("gate", "up", "out"), pointer)
        variants.append(gpu.Variant(_silu_mul, tensors | strides, constants, 4))
        tensors = dict.fromkeys(("gate", "up", "given", "gate_back", "up_back"), pointer)
        variants.append(gpu.Variant(_gradients, tensors | strides | of_gradients, constants, 4))
    return variants


COMPILED = _compiled()

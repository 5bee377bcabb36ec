"""`moe_finalize` through Triton: every expert's output is read once, and added up in the choices' order.

Without a norm a program holds a block of a row, with one it holds the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import gpu
from ..add_norm.triton import POINTERS, contiguous, norm_row, num_warps
from ..blocks import block_of, with_contiguous_rows
from ..host import rows_of
from ..norms import Kind, NormFormula
from .backward import recorded, recorded_add_norm

#: The most choices that a kernel is unrolled for.
CHOICES = 16
#: The longest row that the registers of a program hold, with its norm.
LONGEST = 8192


@triton.jit
def finalize_row(
    outputs, weights, shared, row, outputs_stride, choice_stride, weights_stride, weight_stride, shared_stride,
    at, inside, scaling, CHOICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of the output in float32, or the part of it that is `at`."""
    total = tl.zeros([BLOCK], tl.float32)
    # Choices may be far apart: an address is moved from one to the next, and no product of 32 bits made.
    place = outputs + row * outputs_stride + at
    for choice in tl.static_range(CHOICES):  # type: ignore[reportGeneralTypeIssues]
        weight = tl.load(weights + row * weights_stride + choice * weight_stride).to(tl.float32)
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32) * weight
        place += choice_stride
    if scaling is not None:
        total = total * scaling
    if shared is not None:
        total += tl.load(shared + row * shared_stride + at, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def _finalize(
    outputs, weights, shared, out, outputs_stride, choice_stride, weights_stride, weight_stride, shared_stride,
    hidden, scaling, CHOICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < hidden
    total = finalize_row(outputs, weights, shared, row, outputs_stride, choice_stride, weights_stride, weight_stride,
                         shared_stride, at, inside, scaling, CHOICES, BLOCK)  # fmt: skip
    tl.store(out + row * hidden + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _finalize_add_norm(
    outputs, weights, shared, residual, weight, bias, normed, out, outputs_stride, choice_stride, weights_stride,
    weight_stride, shared_stride, residual_stride, hidden, scaling, eps, offset,
    LAYER: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    total = finalize_row(outputs, weights, shared, row, outputs_stride, choice_stride, weights_stride, weight_stride,
                         shared_stride, at, inside, scaling, CHOICES, BLOCK)  # fmt: skip
    total += tl.load(residual + row * residual_stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + at, total.to(out.dtype.element_ty), mask=inside)
    result = norm_row(total, weight, bias, at, inside, hidden, eps, offset, LAYER)
    tl.store(normed + row * hidden + at, result.to(normed.dtype.element_ty), mask=inside)


def moe_finalize(
    expert_outputs: Tensor, weights: Tensor, shared: Tensor | None, scaling: float | None
) -> Tensor | None:
    """See the dispatcher; None for what the kernel does not take."""
    if expert_outputs.shape[1] > CHOICES:
        return None

    def run() -> Tensor:
        rows, choices, hidden = expert_outputs.shape
        out = expert_outputs.new_empty(rows, hidden)
        if not out.numel():
            return out
        outputs = with_contiguous_rows(expert_outputs)
        added, shared_stride = rows_of(shared)
        block = block_of(hidden)
        gpu.launch(
            _finalize, (rows, triton.cdiv(hidden, block)), outputs, weights, added, out, outputs.stride(0),
            outputs.stride(1), weights.stride(0), weights.stride(1), shared_stride, hidden, scaling, CHOICES=choices,
            BLOCK=block,
        )  # fmt: skip
        return out

    return recorded(run, expert_outputs, weights, shared, scaling)


def moe_finalize_add_norm(
    expert_outputs: Tensor,
    weights: Tensor,
    residual: Tensor,
    formula: NormFormula,
    shared: Tensor | None,
    scaling: float | None,
) -> tuple[Tensor, Tensor] | None:
    """See the dispatcher; None for what the kernel does not take."""
    hidden = expert_outputs.shape[2]
    if expert_outputs.shape[1] > CHOICES or not 0 < hidden <= LONGEST:
        return None
    if any(one is not None and one.shape != (hidden,) for one in (formula.weight, formula.bias)):
        return None

    def run() -> tuple[Tensor, Tensor]:
        rows, choices, _ = expert_outputs.shape
        normed, out = (torch.empty_like(residual, memory_format=torch.contiguous_format) for _ in range(2))
        if not rows:
            return normed, out
        outputs = with_contiguous_rows(expert_outputs)
        added, shared_stride = rows_of(shared)
        kept, residual_stride = rows_of(residual)
        block = triton.next_power_of_2(hidden)
        gpu.launch(
            _finalize_add_norm, (rows,), outputs, weights, added, kept, contiguous(formula.weight),
            contiguous(formula.bias), normed, out, outputs.stride(0), outputs.stride(1), weights.stride(0),
            weights.stride(1), shared_stride, residual_stride, hidden, scaling, formula.eps, formula.offset,
            num_warps=num_warps(block), LAYER=formula.kind is Kind.LAYER, CHOICES=choices, BLOCK=block,
        )  # fmt: skip
        return normed, out

    return recorded_add_norm(run, expert_outputs, weights, residual, formula, shared, scaling)


def _compiled() -> list[gpu.Variant]:
    strides = ("outputs_stride", "choice_stride", "weights_stride", "weight_stride", "shared_stride")
    integers: dict[str, str] = dict.fromkeys((*strides, "hidden"), "i32")
    numbers = integers | {"scaling": "fp32", "weights": "*fp32"}
    of_norm = {"residual_stride": "i32", "eps": "fp32", "offset": "fp32"}
    variants = []
    for pointer in POINTERS.values():
        tensors = dict.fromkeys(("outputs", "shared", "out"), pointer)
        variants.append(gpu.Variant(_finalize, tensors | numbers, {"CHOICES": 8, "BLOCK": block_of(4096)}, 4))
        tensors |= dict.fromkeys(("residual", "weight", "bias", "normed"), pointer)
        for block, choices in ((4096, 8), (LONGEST, CHOICES)):
            constants = {"CHOICES": choices, "LAYER": True, "BLOCK": block}
            variants.append(gpu.Variant(_finalize_add_norm, tensors | numbers | of_norm, constants, num_warps(block)))
    bare = {"shared": None, "scaling": None, "CHOICES": CHOICES, "BLOCK": block_of(4096)}
    tensors = dict.fromkeys(("outputs", "weights", "out"), "*bf16")
    variants.append(gpu.Variant(_finalize, tensors | integers, bare, 4))
    return variants


COMPILED = _compiled()

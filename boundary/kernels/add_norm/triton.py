"""`add_norm` through Triton: one program holds one row, so each value is read once and each result written once.

The parts of a kernel are kernels of their own, which operations that begin with this one call too. A row is `[BLOCK]`
in float32 there, of which the first `hidden` elements count: `inside` says which they are, and the sum is zero
elsewhere. A tensor that is not there is None.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import gpu
from ..host import rows_of
from ..norms import Kind, NormFormula
from .backward import recorded

#: What the kernels compute in, in Triton's words.
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
#: The longest row that the registers of a program hold: forward, backward, and backward with the parameters' gradients.
LONGEST, LONGEST_BACK, LONGEST_PARAMETERS = 32768, 16384, 8192
#: In how many sums a parameter's gradient is added up before they are: row `i` is in sum `i % PROGRAMS`.
PROGRAMS = 256


@triton.jit
def sum_row(value, residual, value_start, residual_start, at, inside):
    """A row of the sum; `value_start` and `residual_start` are where it begins."""
    total = tl.load(value + value_start + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        total += tl.load(residual + residual_start + at, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def normalize_row(total, inside, hidden, eps, LAYER: tl.constexpr):
    """The row normalized, without gain and bias, and by what it was multiplied to be so."""
    if LAYER:
        total = tl.where(inside, total - tl.sum(total, 0) / hidden, 0.0)
    scale = tl.rsqrt(tl.sum(total * total, 0) / hidden + eps)
    return total * scale, scale


@triton.jit
def norm_row(total, weight, bias, at, inside, hidden, eps, offset, LAYER: tl.constexpr):
    """The norm of a row, with gain and bias, not rounded."""
    normed, _ = normalize_row(total, inside, hidden, eps, LAYER)
    if weight is not None:
        normed = normed * (tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + offset)
    if bias is not None:
        normed = normed + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    return normed


@triton.jit
def add_norm_row(
    value, residual, weight, bias, total, row, value_stride, residual_stride, at, inside, hidden, eps, offset,
    LAYER: tl.constexpr,
):  # fmt: skip
    """Writes a row of the sum, rounded, and returns its norm, which is not."""
    added = sum_row(value, residual, row * value_stride, row * residual_stride, at, inside)
    if total is not None:
        tl.store(total + row * hidden + at, added.to(total.dtype.element_ty), mask=inside)
    return norm_row(added, weight, bias, at, inside, hidden, eps, offset, LAYER)


@triton.jit
def _forward(
    value, residual, weight, bias, normed, total, value_stride, residual_stride, hidden, eps, offset,
    LAYER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    result = add_norm_row(value, residual, weight, bias, total, row, value_stride, residual_stride, at, inside,
                          hidden, eps, offset, LAYER)  # fmt: skip
    tl.store(normed + row * hidden + at, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    value, residual, weight, normed_gradient, total_gradient, given, weight_sums, bias_sums,
    value_stride, residual_stride, normed_stride, total_stride, rows, hidden, eps, offset,
    LAYER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    weight_sum = tl.zeros([BLOCK], tl.float32)
    bias_sum = tl.zeros([BLOCK], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        added = sum_row(value, residual, row * value_stride, row * residual_stride, at, inside)
        unit, scale = normalize_row(added, inside, hidden, eps, LAYER)
        gradient = tl.load(normed_gradient + row * normed_stride + at, mask=inside, other=0.0).to(tl.float32)
        if weight_sums is not None:
            weight_sum += gradient * unit
        if bias_sums is not None:
            bias_sum += gradient
        if weight is not None:
            gradient = gradient * (tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + offset)
        back = gradient - unit * (tl.sum(gradient * unit, 0) / hidden)
        if LAYER:
            back -= tl.sum(gradient, 0) / hidden
        back = back * scale
        if total_gradient is not None:
            back += tl.load(total_gradient + row * total_stride + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(given + row * hidden + at, back.to(given.dtype.element_ty), mask=inside)
    if weight_sums is not None:
        tl.store(weight_sums + program * hidden + at, weight_sum, mask=inside)
    if bias_sums is not None:
        tl.store(bias_sums + program * hidden + at, bias_sum, mask=inside)


def add_norm(value: Tensor, residual: Tensor, formula: NormFormula) -> tuple[Tensor, Tensor] | None:
    """See the dispatcher; None for what the kernels do not take."""
    if not takes(value, residual, formula):
        return None
    return recorded(value, residual, formula, lambda: _run(value, residual, formula))  # type: ignore[return-value]


def norm(value: Tensor, formula: NormFormula) -> Tensor | None:
    """See the dispatcher; None for what the kernels do not take."""
    if not takes(value, None, formula):
        return None
    return recorded(value, None, formula, lambda: _run(value, None, formula))[0]


def takes(value: Tensor, residual: Tensor | None, formula: NormFormula) -> bool:
    """Whether a row's sum and norm are for these kernels; `gpu.runs` has said that they may have the tensors."""
    if not value.dim() or not 0 < value.shape[-1] <= LONGEST or value.dtype not in POINTERS:
        return False
    if residual is not None and (residual.shape != value.shape or residual.dtype != value.dtype):
        return False
    parameters = [parameter for parameter in (formula.weight, formula.bias) if parameter is not None]
    return all(parameter.shape == value.shape[-1:] and parameter.dtype in POINTERS for parameter in parameters)


def num_warps(block: int) -> int:
    """For rows of `block` elements: 16 of them to a thread, as long as there are threads."""
    return min(max(block // 512, 1), 32)


def _run(value: Tensor, residual: Tensor | None, formula: NormFormula) -> tuple[Tensor, Tensor | None]:
    hidden = value.shape[-1]
    normed = torch.empty_like(value, memory_format=torch.contiguous_format)
    total = None if residual is None else torch.empty_like(normed)
    count = value.numel() // hidden
    if not count:
        return normed, total
    value, value_stride = rows_of(value)
    residual, residual_stride = rows_of(residual)
    weight, bias = contiguous(formula.weight), contiguous(formula.bias)
    block = triton.next_power_of_2(hidden)
    gpu.launch(
        _forward, (count,), value, residual, weight, bias, normed, total, value_stride, residual_stride, hidden,
        formula.eps, formula.offset, num_warps=num_warps(block), LAYER=formula.kind is Kind.LAYER, BLOCK=block,
    )  # fmt: skip
    return normed, total


def backward(
    value: Tensor,
    residual: Tensor | None,
    formula: NormFormula,
    normed_gradient: Tensor,
    total_gradient: Tensor | None,
    of_parameters: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """The gradients of the sum, in the value's dtype, and of the weight and the bias, in float32.

    Args:
        value, residual, formula: As forward, which took them.
        normed_gradient, total_gradient: The gradients of the two results.
        of_parameters: Whether there is a weight, and a bias, that needs its gradient; None stands for the others'.

    Returns:
        None for rows that are too long.
    """
    hidden = value.shape[-1]
    if hidden > (LONGEST_PARAMETERS if any(of_parameters) else LONGEST_BACK):
        return None
    given = torch.empty_like(value, memory_format=torch.contiguous_format)
    count = value.numel() // hidden
    programs = min(count, PROGRAMS) if any(of_parameters) else count
    weight_sums, bias_sums = (
        torch.empty(programs, hidden, dtype=torch.float32, device=value.device) if needed else None
        for needed in of_parameters
    )
    if count:
        value, value_stride = rows_of(value)
        residual, residual_stride = rows_of(residual)
        normed_gradient, normed_stride = rows_of(normed_gradient)
        total_gradient, total_stride = rows_of(total_gradient)
        block = triton.next_power_of_2(hidden)
        gpu.launch(
            _backward, (programs,), value, residual, contiguous(formula.weight), normed_gradient, total_gradient,
            given, weight_sums, bias_sums, value_stride, residual_stride, normed_stride, total_stride, count, hidden,
            formula.eps, formula.offset, num_warps=num_warps(block), LAYER=formula.kind is Kind.LAYER, BLOCK=block,
        )  # fmt: skip
    return given, None if weight_sums is None else weight_sums.sum(0), None if bias_sums is None else bias_sums.sum(0)


def contiguous(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _compiled() -> list[gpu.Variant]:
    numbers = dict.fromkeys(("value_stride", "residual_stride", "hidden"), "i32") | {"eps": "fp32", "offset": "fp32"}
    strides = dict.fromkeys(("normed_stride", "total_stride", "rows"), "i32")
    variants = []
    for block in (128, LONGEST_PARAMETERS, LONGEST_BACK, LONGEST):
        for pointer in POINTERS.values():
            constants = {"LAYER": True, "BLOCK": block}
            tensors = dict.fromkeys(("value", "residual", "weight", "bias", "normed", "total"), pointer)
            variants.append(gpu.Variant(_forward, tensors | numbers, constants, num_warps(block)))
            if block > LONGEST_BACK:
                continue
            tensors = dict.fromkeys(
                ("value", "residual", "weight", "normed_gradient", "total_gradient", "given"), pointer
            )
            sums = {"weight_sums": "*fp32", "bias_sums": "*fp32"}
            if block > LONGEST_PARAMETERS:
                constants, sums = constants | dict.fromkeys(sums), {}
            variants.append(gpu.Variant(_backward, tensors | sums | numbers | strides, constants, num_warps(block)))
    bare = {"residual": None, "weight": None, "bias": None, "total": None, "LAYER": False, "BLOCK": 4096}
    variants.append(gpu.Variant(_forward, {"value": "*bf16", "normed": "*bf16"} | numbers, bare, num_warps(4096)))
    return variants


COMPILED = _compiled()

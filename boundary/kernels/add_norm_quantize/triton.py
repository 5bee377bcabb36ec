"""`add_norm_quantize` through Triton: one program holds one row and finds its scale before it writes anything."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import gpu
from ..add_norm.triton import POINTERS, add_norm_row, contiguous, num_warps, takes
from ..host import records, rows_of
from ..norms import Kind, NormFormula
from .naive import FLOOR, LIMITS

#: The longest row that the registers of a program hold.
LONGEST = 16384
_POINTERS = {torch.float8_e4m3fn: "*fp8e4nv", torch.int8: "*i8"}
_FLOAT8_CAPABILITY = (8, 9)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
# Adding this to a float32 of at most 2^22 leaves no bits for a fraction: the sum is rounded to an integer, to even.
_INTEGERS = tl.constexpr(1.5 * 2**23)


@triton.jit
def _add_norm_quantize(
    value, residual, weight, bias, quantized, row_scales, scale, total, value_stride, residual_stride, hidden, eps,
    offset, LOW: tl.constexpr, HIGH: tl.constexpr, FLOOR: tl.constexpr, TO_INTEGERS: tl.constexpr,
    LAYER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    normed = add_norm_row(value, residual, weight, bias, total, row, value_stride, residual_stride, at, inside,
                          hidden, eps, offset, LAYER)  # fmt: skip
    if row_scales is not None:
        largest = tl.max(tl.where(normed == normed, tl.abs(normed), 0.0), 0)
        divisor = tl.maximum(tl.div_rn(tl.minimum(largest, _LARGEST), HIGH), FLOOR)
        tl.store(row_scales + row, divisor)
    else:
        divisor = tl.load(scale)
    scaled = tl.div_rn(normed, divisor)
    # These comparisons leave a NaN what it is, which a minimum does not.
    scaled = tl.where(scaled > HIGH, HIGH, scaled)
    scaled = tl.where(scaled < LOW, LOW, scaled)
    if TO_INTEGERS:
        scaled = tl.where(scaled == scaled, (scaled + _INTEGERS) - _INTEGERS, 0.0)
    tl.store(quantized + row * hidden + at, scaled.to(quantized.dtype.element_ty), mask=inside)


def add_norm_quantize(
    value: Tensor, residual: Tensor | None, formula: NormFormula, dtype: torch.dtype, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """See the dispatcher; None for what the kernel does not take, and where autograd records."""
    if not takes(value, residual, formula) or records(value, residual, formula.weight, formula.bias):
        return None
    hidden, device = value.shape[-1], value.device
    if hidden > LONGEST:
        return None
    if value.is_cuda and dtype != torch.int8 and torch.cuda.get_device_capability(device) < _FLOAT8_CAPABILITY:
        return None
    quantized = torch.empty(value.shape, dtype=dtype, device=device)
    total = None if residual is None else torch.empty_like(value, memory_format=torch.contiguous_format)
    if scale is None:
        row_scales = scales = torch.empty(*value.shape[:-1], 1, dtype=torch.float32, device=device)
    else:
        row_scales, scales = None, scale
    made = quantized, scales, value if total is None else total
    count = value.numel() // hidden
    if not count:
        return made
    value, value_stride = rows_of(value)
    residual, residual_stride = rows_of(residual)
    weight, bias = contiguous(formula.weight), contiguous(formula.bias)
    low, high = LIMITS[dtype]
    block = triton.next_power_of_2(hidden)
    gpu.launch(
        _add_norm_quantize, (count,), value, residual, weight, bias, quantized, row_scales, scale, total, value_stride,
        residual_stride, hidden, formula.eps, formula.offset, num_warps=num_warps(block), LOW=low, HIGH=high,
        FLOOR=FLOOR, TO_INTEGERS=dtype == torch.int8, LAYER=formula.kind is Kind.LAYER, BLOCK=block,
    )  # fmt: skip
    return made


def _compiled() -> list[gpu.Variant]:
    numbers = dict.fromkeys(("value_stride", "residual_stride", "hidden"), "i32") | {"eps": "fp32", "offset": "fp32"}
    variants = []
    for dtype, quantized in _POINTERS.items():
        low, high = LIMITS[dtype]
        limits = {"LOW": low, "HIGH": high, "FLOOR": FLOOR, "TO_INTEGERS": dtype == torch.int8, "LAYER": True}
        for block in (128, LONGEST):
            for pointer in POINTERS.values():
                tensors = dict.fromkeys(("value", "residual", "weight", "bias", "total"), pointer)
                for used, other in (("row_scales", "scale"), ("scale", "row_scales")):
                    signature = tensors | {"quantized": quantized, used: "*fp32"} | numbers
                    constants = limits | {other: None, "BLOCK": block}
                    variants.append(gpu.Variant(_add_norm_quantize, signature, constants, num_warps(block)))
    return variants


COMPILED = _compiled()

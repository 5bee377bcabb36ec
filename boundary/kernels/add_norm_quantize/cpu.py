"""`add_norm_quantize` through the compiled library: a row's norm stays in the cache until it is quantized."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiled import library
from ..add_norm.naive import wide
from ..host import address_of, code_of, host_norm, records, rows_of
from ..norms import NormFormula
from .naive import FLOOR, LIMITS


def add_norm_quantize(
    value: Tensor, residual: Tensor | None, formula: NormFormula, dtype: torch.dtype, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """See the dispatcher; None for what the library does not take.

    Where autograd records, the sum is torch's, which has the same bits.
    """
    code = code_of(value) if residual is None else code_of(value, residual)
    if code is None or not value.dim() or not value.shape[-1]:
        return None
    if residual is not None and residual.shape != value.shape:
        return None
    if scale is not None and (code_of(scale) is None or records(scale)):
        return None
    hidden = value.shape[-1]
    spec = host_norm(formula, hidden)
    if spec is None:
        return None
    quantized = value.new_empty(value.shape, dtype=dtype)
    scales = value.new_empty((*value.shape[:-1], 1), dtype=torch.float32) if scale is None else scale
    total, written = value, None
    if residual is not None and records(value, residual):
        total = (wide(value) + wide(residual)).to(residual.dtype)
    elif residual is not None:
        total = written = torch.empty_like(value, memory_format=torch.contiguous_format)
    count = value.numel() // hidden
    if not count:
        return quantized, scales, total
    value, value_stride = rows_of(value)
    residual, residual_stride = rows_of(residual)
    lib = library()
    assert lib is not None
    failed = lib.add_norm_quantize(
        value.data_ptr(),
        value_stride,
        address_of(residual),
        residual_stride,
        address_of(written),
        quantized.data_ptr(),
        dtype == torch.int8,
        scales.data_ptr() if scale is None else None,
        1.0 if scale is None else scale.item(),
        *LIMITS[dtype],
        FLOOR,
        count,
        hidden,
        code,
        spec,
    )
    if failed:
        raise MemoryError(f"no memory for a row of {hidden} elements")
    return quantized, scales, total

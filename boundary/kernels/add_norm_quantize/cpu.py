"""`add_norm_quantize` through the compiled library: a row's norm stays in the cache until it is quantized."""

from __future__ import annotations

import torch
from torch import Tensor

from ...collectives import fresh
from ...compiled import QuantizedSpec
from ..add_norm.cpu import norm_of, normalize
from ..add_norm.naive import wide
from ..host import code_of, records
from ..norms import NormFormula
from .naive import FLOOR, LIMITS


def add_norm_quantize(
    value: Tensor, residual: Tensor | None, formula: NormFormula, dtype: torch.dtype, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """See the dispatcher; None for what the library does not take.

    Where autograd records, the sum is torch's, which has the same bits.
    """
    code = code_of(value) if residual is None else code_of(value, residual)
    if code is None or (residual is not None and residual.shape != value.shape) or not takes_scale(scale):
        return None
    spec = norm_of(value, formula)
    if spec is None:
        return None
    data, scales, quantized = quantized_rows(value, dtype, scale)
    total, written = value, None
    if residual is not None and records(value, residual):
        total = (wide(value) + wide(residual)).to(residual.dtype)
    elif residual is not None:
        total = written = fresh(value)
    normalize(value, residual, spec, code, written, quantized=quantized)
    return data, scales, total


def takes_scale(scale: Tensor | None) -> bool:
    """Whether the library may read the scale that is given."""
    return scale is None or (code_of(scale) is not None and not records(scale))


def quantized_rows(like: Tensor, dtype: torch.dtype, scale: Tensor | None) -> tuple[Tensor, Tensor, QuantizedSpec]:
    """For as many rows as `like` has, `[..., hidden]`: new memory, its scales or the one that is given, and both as the
    library takes them. They must outlive its call.
    """
    data = fresh(like, dtype=dtype)
    low, high = LIMITS[dtype]
    if scale is None:
        scales = fresh(like, (*like.shape[:-1], 1), torch.float32)
        spec = QuantizedSpec(data.data_ptr(), scales.data_ptr(), dtype == torch.int8, 1.0, low, high, FLOOR)
        return data, scales, spec
    return data, scale, QuantizedSpec(data.data_ptr(), None, dtype == torch.int8, scale.item(), low, high, FLOOR)

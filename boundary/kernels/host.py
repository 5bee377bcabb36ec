"""What every path through the compiled library asks first: whether it may touch the tensors' memory, and how."""

from __future__ import annotations

from functools import lru_cache
from typing import overload

import torch
from torch import Tensor

from ..compiled import NormSpec, dtypes
from .norms import NormFormula
from .ordinary import is_ordinary, watched


def code_of(*tensors: Tensor) -> int | None:
    """The library's code of the one dtype that all tensors have; None where the library must not compute on them.

    It takes ordinary tensors in this machine's memory, and nothing while what torch computes is watched.
    """
    return None if watched() else _code_in_memory(*tensors)


def _code_in_memory(*tensors: Tensor) -> int | None:
    """The code of the tensors' one dtype, if they are ordinary and in this machine's memory."""
    dtype = tensors[0].dtype
    code = dtypes().get(dtype)
    if code is None:
        return None
    for tensor in tensors:
        if tensor.dtype is not dtype or not tensor.is_cpu or not is_ordinary(tensor):
            return None
    return code


def records(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is computed from these."""
    if not torch.is_grad_enabled():
        return False
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


@overload
def rows_of(value: Tensor) -> tuple[Tensor, int]: ...
@overload
def rows_of(value: Tensor | None) -> tuple[Tensor | None, int]: ...
def rows_of(value: Tensor | None) -> tuple[Tensor | None, int]:
    """An ordinary tensor with contiguous rows, a view where it has them; and how many elements its rows are apart."""
    if value is None:
        return None, 0
    if value.is_contiguous():
        return value, value.shape[-1]
    if value.dim() == 2 and value.stride(1) == 1:
        return value, value.stride(0)
    return value.contiguous(), value.shape[-1]


def address_of(value: Tensor | None) -> int | None:
    """Where an ordinary tensor lies, for the library; null for none."""
    return None if value is None else value.data_ptr()


def host_norm(formula: NormFormula, hidden: int) -> NormSpec | None:
    """`formula` as the library takes it, for rows of `hidden` elements; None where it is not for the library.

    It is good for as long as the formula's tensors are. Only where `code_of` takes what is normalized.
    """
    weight, bias = formula.weight, formula.bias
    if weight is None:
        code = 0 if bias is None else _code_in_memory(bias)
    else:
        code = _code_in_memory(weight) if bias is None else _code_in_memory(weight, bias)
    if code is None:
        return None
    addresses: list[int | None] = []
    for parameter in (weight, bias):
        if parameter is None:
            addresses.append(None)
        elif parameter.shape != (hidden,) or not parameter.is_contiguous() or not (place := parameter.data_ptr()):
            return None
        else:
            addresses.append(place)
    return _spec(formula.kind, code, *addresses, formula.eps, formula.offset)


#: The same numbers again and again: making them a structure of C's takes longer than finding it.
_spec = lru_cache(maxsize=1024)(NormSpec)

"""Which tensors may be handed over by their addresses: ordinary ones, while nobody watches what torch computes.

A kernel reads and writes memory behind torch's back. So it takes no stand-ins for tensors, and nothing while somebody
watches or transforms torch's operations.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.jit._trace import is_tracing

_CLASSES = (Tensor, nn.Parameter)
_STRIDED = torch.strided  # found sooner than through the module


def watched() -> bool:
    """Whether a compiler, a tracer, a dispatch mode or one of torch's transforms follows what is computed now."""
    # The first first, because a compiler follows what comes after.
    return (
        torch.compiler.is_compiling()
        or forward_ad._current_level >= 0
        or peek_interpreter_stack() is not None
        or _len_torch_dispatch_stack() > 0
        or is_tracing()
    )


def is_ordinary(tensor: Tensor) -> bool:
    """Whether the tensor's elements lie in memory as they read, at its strides."""
    if type(tensor) not in _CLASSES or tensor.layout is not _STRIDED:
        return False
    return not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())

"""Triton's kernels on the CPU: what a kernel does, element by element, without a GPU.

Triton decides when it is imported whether kernels are compiled or interpreted, for the whole process and for its own
library too (`tl.sum` is a kernel). The suite's other tests compile. So here the kernels stay what they are, and only
how one is launched or called is replaced, for as long as the context lasts.

Triton's interpreter cuts a float32 off where a GPU rounds it to nearest even, and so no result in half precision would
be the definition's. Here it rounds, by torch's conversion.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, TensorHandle
from triton.runtime.jit import JITFunction

_BITS = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}
_LANGUAGE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
_DTYPES = {tl.float16: torch.float16, tl.float32: torch.float32, **_BITS}
_cast = interpreter.InterpreterBuilder.cast_impl


@contextmanager
def interpreted() -> Iterator[None]:
    """Every kernel launched meanwhile, of any module, is interpreted, on tensors on the CPU; `gpu.runs` says yes.

    A kernel in it sees the interpreter's rules: a value that is out of bounds of a cast is no warning, and programs
    run one after the other. Nothing can be compiled meanwhile.
    """
    with (
        knobs.runtime.scope(),
        mock.patch.object(JITFunction, "run", _launch),
        mock.patch.object(JITFunction, "__call__", _call),
        mock.patch.object(interpreter.InterpreterBuilder, "cast_impl", _rounding_cast),
        mock.patch.object(interpreter.InterpreterBuilder, "create_fp_to_fp", _rounding_cast),
        np.errstate(all="ignore"),
    ):
        knobs.runtime.interpret = True
        yield


def _launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    # A kernel that another calls finds the language as the interpreter has it, whatever names its module knows it by.
    scope = interpreter._patch_lang(_LANGUAGE)
    try:
        InterpretedFunction(self.fn).run(*args, grid=grid, warmup=warmup, **options)
    finally:
        scope.restore()


def _call(self: JITFunction, *args: Any, **options: Any) -> Any:
    return InterpretedFunction(self.fn).rewrite()(*args, **options)


def _rounding_cast(self: Any, source: TensorHandle, target: tl.dtype, rounding_mode: Any = None) -> TensorHandle:
    """Between floating-point types, to nearest even; `rounding_mode` says nothing else in these kernels."""
    held, wanted = source.dtype.scalar, target.scalar
    if held not in _DTYPES or wanted not in _DTYPES or not {held, wanted} & set(_BITS):
        return _cast(self, source, target)
    value = torch.from_numpy(np.ascontiguousarray(source.data))
    value = (value.view(_BITS[held]) if held in _BITS else value).to(_DTYPES[wanted])
    if wanted not in _BITS:
        return TensorHandle(value.numpy(), wanted)
    return TensorHandle(value.view(torch.uint16 if value.itemsize == 2 else torch.uint8).numpy(), wanted)

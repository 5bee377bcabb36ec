"""What every path through Triton asks first: whether its kernels take the tensors, and where they run.

Triton is not needed to import this package. A path's module, `triton.py` beside the definition, is imported by its
dispatcher once `runs` has said yes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .ordinary import is_ordinary, watched


def runs(*tensors: Tensor | None) -> bool:
    """Whether Triton's kernels take these tensors, of which None counts for nothing.

    They are ordinary ones on one CUDA device, or on the CPU while Triton interprets its kernels (`TRITON_INTERPRET=1`;
    a Triton that nobody has imported yet does not). Nothing is taken while what torch computes is watched.
    """
    if watched():
        return False
    device = None
    for tensor in tensors:
        if tensor is None:
            continue
        if device is None:
            if tensor.is_cpu and not _interprets():
                return False  # before all else that it asks: every path on CPUs begins here
            device = tensor.device
        elif tensor.device != device:
            return False
        if not is_ordinary(tensor):
            return False
    if device is None:
        return False
    return _compiles() if device.type == "cuda" else device.type == "cpu" and _interprets()


def on(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's device the one that kernels are launched on."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def options(num_warps: int = 4) -> dict[str, Any]:
    """How a kernel is compiled: no multiplication in it is fused with an addition, as in no definition."""
    return {"num_warps": num_warps, "enable_fp_fusion": False}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, **constants: object) -> None:
    """Runs `grid` programs of the kernel, on the device of its first argument, which is a tensor."""
    with on(arguments[0]):
        kernel[grid](*arguments, **constants, **options(num_warps))


@cache
def _compiles() -> bool:
    return torch.version.hip is None and find_spec("triton") is not None


def _interprets() -> bool:
    knobs = sys.modules.get("triton.knobs")
    return knobs is not None and knobs.runtime.interpret


@dataclass(frozen=True)
class Variant:
    """A kernel as it is launched on a GPU, to be compiled without one: each `triton.py` lists its own as `COMPILED`.

    Attributes:
        kernel: The function that `triton.jit` decorates.
        signature: The type of each argument that is not a constant, in Triton's words: `*bf16`, `i32`, `fp32`.
        constants: The other arguments' values, None for a tensor that is not there.
        num_warps: As in the launch.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int

"""Kernels compiled for an H100's instructions (sm_90) on a machine without one, and what the machine code needs.

Triton brings its own assembler, and the tool that reads what was assembled. A register too few shows there as stack: a
value that was spilled is in memory that each thread has to itself.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from boundary.kernels import gpu
from boundary.kernels.gpu import Variant

_TARGET = GPUTarget("cuda", 90, 32)
_READER = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Resources:
    """What one kernel needs: registers of a thread, spilled bytes of a thread, shared bytes of a program."""

    registers: int
    spilled: int
    shared: int


def stated() -> dict[str, list[Variant]]:
    """The variants that each module `boundary/kernels/*/triton.py` states, by the operation's name."""
    found = {}
    for path in sorted(Path(gpu.__file__).parent.glob("*/triton.py")):
        module = import_module(f"boundary.kernels.{path.parent.name}.triton")
        found[path.parent.name] = getattr(module, "COMPILED", [])
    return found


def compiled(variant: Variant, folder: Path) -> Resources:
    """Compiles it; `folder` is for a file.

    Pointers and integers are taken to be multiples of 16, as a model's are, so that loads are as wide as they get.
    """
    names = variant.kernel.arg_names
    unknown = {*variant.signature, *variant.constants} ^ set(names)
    assert not unknown, f"{variant.kernel} has other arguments than the variant: {sorted(unknown)}"
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith(("*", "i"))
    }
    source = ASTSource(variant.kernel, signature, dict(variant.constants), aligned)
    made = triton.compile(source, _TARGET, gpu.options(variant.num_warps))
    return resources(made.asm["cubin"], folder)


def resources(cubin: bytes, folder: Path) -> Resources:
    """What the machine code of one kernel needs."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    text = subprocess.run([_READER, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    assert len(found) == 1, text
    registers, stack, shared, local = map(int, found[0])
    return Resources(registers, stack + local, shared)

"""The C library of this package, compiled for the machine it runs on, the first time it is asked for.

What is in it needs neither torch nor Python: plain functions over addresses, called through `ctypes`. So it is not
built with the package but by the system's compiler where it runs, with all of that machine's instructions, and kept
in the user's cache under a name that says from which sources, by which compiler and for which processor it was made.
Ranks that start together wait for the one that compiles.

Without a compiler - `CC` names one; by default it is `cc`, `gcc` or `clang` - there is no library, and whoever would
use it does the same without: torch's operations in place of kernels, sockets in place of shared memory.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

SOURCES = ("rows.c", "channel.c")
HEADERS = ("rows.h", "rows_typed.h")
# No fused multiply-add and no reordering: what a sum's bits are is said by the sources alone.
FLAGS = [
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wno-psabi",
    "-shared",
    "-fPIC",
    "-pthread",
]
COMPILE_SECONDS = 120

#: What the library calls the dtypes it computes in.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}

_logger = logging.getLogger(__name__)


class NormSpec(ctypes.Structure):
    """A norm, as the library takes it.

    `kind` is 0 for none, 1 for root mean square, 2 for layer norm. The gain is `offset + weight`, without `weight`
    one. `weight` and `bias` are the addresses of contiguous tensors of `weight_dtype`, or None.
    """

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("weight_dtype", ctypes.c_int32),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("eps", ctypes.c_double),
        ("offset", ctypes.c_double),
    ]


class QuantizedSpec(ctypes.Structure):
    """Where rows go in one byte an element, as the library takes it.

    `rows` is the address of contiguous rows, `scales` that of one float32 for each, or None for `scale`. Values are
    clamped to `low` and `high`, and rounded to integers or to `float8_e4m3fn`; a row's own scale is at least `floor`.
    """

    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("to_integers", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("low", ctypes.c_float),
        ("high", ctypes.c_float),
        ("floor", ctypes.c_float),
    ]


class Unavailable(Exception):
    """There is no library; the message says why."""


@cache
def library() -> ctypes.CDLL | None:
    """The library; None where it cannot be had, which is said in the log once."""
    try:
        return _declared(_load())
    except (Unavailable, OSError) as error:
        _logger.info("kernels and shared memory are not used: %s", error)
        return None


@cache
def fingerprint() -> str:
    """Equal in two processes if they have the same library; empty without one."""
    return _digest(_compiler()) if library() is not None else ""


@cache
def dtypes() -> dict[torch.dtype, int]:
    """The dtypes that the library knows, with their codes; none without a library."""
    lib = library()
    return {} if lib is None else {dtype: code for dtype, code in DTYPES.items() if lib.knows_dtype(code)}


def _compiler() -> list[str]:
    """The command that compiles."""
    named = os.environ.get("CC")
    for command in [shlex.split(named)] if named else [["cc"], ["gcc"], ["clang"]]:
        if command and (path := shutil.which(command[0])):
            return [path, *command[1:]]
    raise Unavailable(f"there is no compiler (CC={named!r})" if named else "there is no C compiler")


@cache
def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model", "cpu family", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _digest(compiler: list[str]) -> str:
    status = os.stat(compiler[0])
    digest = hashlib.sha256()
    for part in (*compiler, *FLAGS, str(status.st_size), str(status.st_mtime_ns), platform.machine(), _processor()):
        digest.update(part.encode() + b"\0")
    for name in SOURCES + HEADERS:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:24]


def _load() -> ctypes.CDLL:
    """The library, compiled if need be."""
    if sys.platform != "linux":
        raise Unavailable(f"it is written for Linux, and this is {sys.platform}")
    compiler = _compiler()
    name = f"boundary-{_digest(compiler)}.so"
    folder = _cache_folder()
    if folder is None:
        # What is loaded needs its file no longer.
        with tempfile.TemporaryDirectory(prefix="boundary-") as passing:
            _compile(compiler, Path(passing) / name)
            return ctypes.CDLL(str(Path(passing) / name))
    path = folder / name
    if not path.exists():
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _compile(compiler, path)
    return ctypes.CDLL(str(path))


def _cache_folder() -> Path | None:
    """Where libraries are kept; None where the user has no place that can be written to."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "unsharded"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


def _compile(compiler: list[str], path: Path) -> None:
    """Compile to `path`, which exists afterwards as a whole or not at all."""
    folder = Path(__file__).parent
    with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        command = [*compiler, *FLAGS, *(str(folder / name) for name in SOURCES), "-o", str(made), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"{shlex.join(command)} failed: {error.stderr.strip()[-2000:]}") from error
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"{shlex.join(command)} took more than {COMPILE_SECONDS} s") from error
        os.replace(made, path)


def _declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    """`lib`, with its functions' signatures."""
    integer, size, address, text, number = (
        ctypes.c_int,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_double,
    )
    norm, quantized = ctypes.POINTER(NormSpec), ctypes.POINTER(QuantizedSpec)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "knows_dtype": (integer, [integer]),
        "add_norm": (
            integer,
            [address, size, address, size, address, address, quantized, size, size, integer, norm],
        ),
        "moe_finalize": (
            integer,
            [address, size, size, size, address, size, size, integer, number, address, size, address, size, address]
            + [address, size, size, integer, norm],
        ),
        "gather_rows": (None, [address, size, size, address, address, size, size]),
        "scatter_rows": (integer, [address, size, address, size, address, size, size, integer]),
        "max_ranks": (integer, []),
        "segment_bytes": (size, [integer, size]),
        "channel_open": (address, [integer, integer, integer, size, ctypes.POINTER(integer)]),
        "channel_close": (None, [address]),
        "channel_peer": (integer, [address]),
        "channel_text": (text, [address, integer]),
        "longest_row": (size, [address]),
        "exchange": (integer, [address, text, integer, *[address] * 6, size]),
        "gather": (integer, [address, address, size]),
        "reduce": (integer, [address, address, size]),
    }  # fmt: skip
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib

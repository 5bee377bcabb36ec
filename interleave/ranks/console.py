"""What a rank's terminal is: rank 0 writes to the driver's, the others to nowhere, and nobody reads.

A rank has no keyboard. A breakpoint in a block would wait for one for ever, so it raises, and says where there
is one.
"""

from __future__ import annotations

import bdb
import builtins
import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from ..errors import InterleaveError


class Outlet(io.TextIOBase):
    """A text stream that hands over whole lines (and, on `flush`, what there is) to `send`."""

    encoding = "utf-8"

    def __init__(self, send: Callable[[str], None], log: TextIO | None = None) -> None:
        self._send = send
        self._log = log
        self._text = ""
        self._lock = threading.Lock()

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        with self._lock:
            self._text += text
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        with self._lock:
            text, self._text = self._text, ""
        if not text:
            return
        if self._log is not None:
            self._log.write(text)
            self._log.flush()
        # A driver that is gone reads nothing; the rank's watcher ends the process.
        with contextlib.suppress(OSError):
            self._send(text)


class NoKeyboard(io.TextIOBase):
    """The standard input of a rank."""

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> str:
        refuse()

    def readline(self, size: int = -1, /) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse()


def refuse(*args: Any, **kwargs: Any) -> NoReturn:
    """Stands in for everything that would wait for the user."""
    raise InterleaveError(
        "a block that runs on several ranks cannot stop for the user: breakpoint(), input() and pdb have no "
        "terminal there. Load the model with tp=1 (every degree 1) and run the same block: then it runs in "
        "this process, and a debugger works"
    )


def install(rank: int, send: Callable[[str, str], None]) -> None:
    """Make this process's streams those of `rank`; `send(stream, text)` reaches the driver (rank 0 only)."""
    silence = os.open(os.devnull, os.O_RDWR)
    os.dup2(silence, 0)
    os.close(silence)
    sys.stdin = NoKeyboard()
    builtins.input = refuse
    sys.breakpointhook = refuse
    bdb.Bdb.set_trace = refuse
    if rank == 0:
        sys.stdout = Outlet(lambda text: send("stdout", text))
        sys.stderr = Outlet(lambda text: send("stderr", text), log=sys.stderr)
    else:
        sys.stdout = Outlet(lambda text: None)


def flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()

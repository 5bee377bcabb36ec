"""The end of an engine whose client is gone.

vLLM's processes end with the one that started them, if that one is told to end; killed, it leaves them behind, with the
model's memory. So each rank watches the client.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

#: Seconds that a rank has to end in order.
GRACE = 5.0


class Client(NamedTuple):
    """A process, and the machine (and the namespace of process ids) in which its number means it."""

    pid: int
    place: str


def here() -> Client:
    """This process."""
    return Client(os.getpid(), place())


def end_with(client: Client, then: Callable[[], None]) -> None:
    """End this process when the client has, where that can be seen from here, and call `then` before."""
    if not hasattr(os, "pidfd_open") or client.place != place() or client.pid == os.getpid():
        return
    try:
        descriptor = os.pidfd_open(client.pid)
    except ProcessLookupError:
        _end(then)
    else:
        threading.Thread(target=_watch, args=(descriptor, then), name="watch the client", daemon=True).start()


def place() -> str:
    """The machine, and the namespace of process ids on it."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _watch(descriptor: int, then: Callable[[], None]) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    _end(then)


def _end(then: Callable[[], None]) -> None:
    then()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


__all__ = ["Client", "end_with", "here", "place"]

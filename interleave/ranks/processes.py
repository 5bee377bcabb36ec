"""The rank processes as the operating system sees them: started, watched, ended, and read when one is gone.

A rank is a program of its own (`python -m interleave.ranks.rank`), so the caller's script is never imported
again and needs no `__main__` guard. It sees the driver's `sys.path`, and hashes strings like its peers: ranks
that walk a set of names in different orders would visit locations in different orders.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    Std,
    SubprocessContext,
    start_processes,
)
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

PROGRAM = ("-m", "interleave.ranks.rank")
#: How many lines of a dead rank's output an error shows.
TAIL_LINES = 20
#: A Unix socket's path has room for this many bytes.
_SOCKET_PATH = 100


class Processes:
    """`world_size` running rank programs, their private directory, and the store they meet through.

    Args:
        world_size: How many.
        program: What to run after the interpreter's name.
    """

    def __init__(self, world_size: int, program: tuple[str, ...] = PROGRAM) -> None:
        self.world_size = world_size
        self._program = program
        self.secret = secrets.token_bytes(32)
        self.directory = _private_directory()
        self.door_path = str(self.directory / "door")
        # The driver serves the store, so it outlives any rank, and no port is chosen before it is bound.
        listening = socket.create_server(("127.0.0.1", 0))
        self._store = TCPStore(
            "127.0.0.1",
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        self._handlers: dict[int, SubprocessHandler] = {}

    def start(self) -> None:
        shared = {
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "INTERLEAVE_DOOR": self.door_path,
            "INTERLEAVE_SECRET": self.secret.hex(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.world_size))),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", _loopback()),
        }
        ranks = range(self.world_size)
        with _quietly():
            context = start_processes(
                name="rank",
                entrypoint=sys.executable,
                args=dict.fromkeys(ranks, ("-P", *self._program)),
                envs={rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in ranks},
                logs_specs=DefaultLogsSpecs(str(self.directory / "logs"), redirects=Std.ALL),
            )
        assert isinstance(context, SubprocessContext)
        self._handlers = context.subprocess_handlers
        self._logs = (context.stdouts, context.stderrs)
        for handler in self._handlers.values():
            # The ranks have their own descriptors of the logs.
            for log in (handler._stdout, handler._stderr):
                if log is not None:
                    log.close()

    def ended(self) -> dict[int, int]:
        """The exit codes of the ranks that have ended, by rank; negative: the signal that ended it."""
        codes = {rank: handler.proc.poll() for rank, handler in self._handlers.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def wait(self, seconds: float) -> bool:
        """Whether all ranks ended within `seconds`."""
        until = time.monotonic() + seconds
        while len(self.ended()) < len(self._handlers):
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def wait_for(self, rank: int, seconds: float) -> None:
        """Wait until `rank` has ended, but not longer than `seconds`."""
        until = time.monotonic() + seconds
        while rank not in self.ended() and time.monotonic() < until:
            time.sleep(0.01)

    def kill(self) -> None:
        """End every rank, and what it started, now."""
        for rank, handler in self._handlers.items():
            if rank not in self.ended():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(handler.proc.pid, signal.SIGKILL)
        self.wait(10.0)

    def remove(self) -> None:
        """Delete the private directory, logs included."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def describe(self, rank: int) -> str:
        """How `rank` ended and the last lines it wrote."""
        code = self.ended().get(rank)
        if code is None:
            how = "closed its connection"
        elif code >= 0:
            how = f"ended with exit code {code}"
        else:
            how = f"was killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += " (the system does that when memory runs out)"
        lines = []
        for logs in self._logs:
            with contextlib.suppress(OSError):
                with open(logs[rank], errors="replace", newline="") as log:
                    text = log.read()
                # A progress bar draws over itself: of such a line only what stands last counts, and that is the bar.
                lines += [line for line in text.split("\n") if line.strip() and "\r" not in line][-TAIL_LINES:]
        if not lines:
            return f"rank {rank} {how}; it had written nothing"
        return f"rank {rank} {how}; the last it wrote:\n  " + "\n  ".join(lines)


def _private_directory() -> Path:
    directory = tempfile.mkdtemp(prefix="interleave-")
    if len(os.fsencode(directory)) > _SOCKET_PATH:
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix="interleave-", dir="/tmp")
    return Path(directory)


def _loopback() -> str:
    """The interface on which the ranks of one machine meet, whatever the host's name resolves to."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep elastic from what suits a launcher and not a notebook: its signal handlers and its log lines."""
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {name: signal.getsignal(getattr(signal, name)) for name in names} if in_main else {}
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        for name, handler in handlers.items():
            if handler is not None:
                signal.signal(getattr(signal, name), handler)

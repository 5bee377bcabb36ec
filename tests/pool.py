"""Ranks for the tests: real processes with real collectives, started once and sent work.

A rank spends several seconds importing torch, transformers and nnsight, so no test starts its own. A `Pool`
is a world of N processes that stays alive and calls what it is sent on every rank:

    def doubled(world, value):          # a module-level function: it is pickled by reference
        total = torch.tensor([value * world.rank])
        dist.all_reduce(total)
        return total.item()

    pools(3).run(doubled, 2)            # [6, 6, 6]: one result per rank

`world.keep` keeps a model between calls (`world.cache` is the dict behind it): one is loaded once and used by
many tests. Nothing else is promised to survive from one call to the next.

A pool in which anything raised, died or hung is ended with all its ranks and replaced at the next use:
whatever state its groups are in, the next test does not inherit it. A rank notices the end of the pytest
process as the end of its channel, in a thread of its own, and exits even from inside a collective.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

ROOT = Path(__file__).resolve().parent.parent
COLLECTIVE_TIMEOUT = timedelta(seconds=20)
START_TIMEOUT = 180.0
RUN_TIMEOUT = 60.0
#: Once one rank has failed, how long the others may take to say how they fared.
GRACE = 5.0


class RankFailed(Exception):
    """A rank died or hung, or raised something that cannot be carried over to the test."""


@dataclass
class World:
    """What a function sent to a pool gets as its first argument: this rank's place, and its memory."""

    rank: int
    size: int
    cache: dict[Any, Any] = field(default_factory=dict)

    def keep(self, key: Any, load: Callable[[], Any]) -> Any:
        """What `load` gives, made once for `key` and kept until something else is asked for.

        With what was kept before go the process groups that were made for it: each has a thread that wakes a hundred
        times a second, and a pool that keeps dozens of models is busy with nothing.
        """
        if key not in self.cache:
            self.cache.clear()
            gc.collect()
            for group in list(c10d._world.pg_map):
                if group is not dist.group.WORLD:
                    dist.destroy_process_group(group)
            self.cache[key] = load()
        return self.cache[key]


@dataclass
class Failure:
    """What a rank sends back instead of a result."""

    exception: BaseException | None
    text: str


class Rank:
    """The pytest process's end of one rank: its process, its channel and its log."""

    def __init__(self, rank: int, size: int, port: int, log: Path) -> None:
        ours, theirs = socket.socketpair()
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        # A rank is no test: what it does must not be attributed to whichever test happened to start the pool.
        environment.pop("PYTEST_CURRENT_TEST", None)
        self.number = rank
        self.log = log
        with theirs, log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"from tests.pool import serve; serve({theirs.fileno()})"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
        self.channel = Connection(ours.detach())

    def tail(self) -> str:
        """The last lines of what the rank wrote, indented for an error message."""
        lines = self.log.read_text(errors="replace").splitlines()[-40:]
        return "\n".join(f"    {line}" for line in lines) or "    (nothing)"


class Pool:
    """A world of `size` ranks, alive from the construction until `close`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.alive = True
        self._logs = tempfile.TemporaryDirectory(prefix="ranks-")
        # Hosted here, so that the port is known before any rank starts and no two pools can race for one.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks = [
            Rank(rank, size, self._store.port, Path(self._logs.name) / f"{rank}.log") for rank in range(size)
        ]
        try:
            self._collect(START_TIMEOUT, "starting")
        except BaseException:
            self.close()
            raise

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = RUN_TIMEOUT) -> list[Any]:
        """Call `function(world, *args)` on every rank.

        Args:
            function: A module-level function; the ranks import its module.
            *args: Pickled once and sent to every rank.
            timeout: Seconds after which the ranks count as hung.

        Returns:
            The result of rank 0, of rank 1, and so on.

        Raises:
            RankFailed: A rank hung or died; the message has the test's name and what each rank last wrote.
            Exception: What the lowest rank that raised raised, with every failed rank's traceback as a note.
        """
        if not self.alive:
            raise RankFailed(f"this pool of {self.size} ranks has ended; ask for a new one")
        work = pickle.dumps((list(sys.path), pickle.dumps((function, args))))
        try:
            for rank in self._ranks:
                rank.channel.send_bytes(work)
            return self._collect(timeout, getattr(function, "__qualname__", repr(function)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the ranks. A second call does nothing."""
        if not self.alive:
            return
        self.alive = False
        for rank in self._ranks:
            rank.process.kill()
            rank.channel.close()
        for rank in self._ranks:
            rank.process.wait()
        self._logs.cleanup()

    def _collect(self, timeout: float, what: str) -> list[Any]:
        replies: dict[int, Any] = {}
        dead: list[str] = []
        deadline = time.monotonic() + timeout
        while waiting := [rank for rank in self._ranks if rank.number not in replies]:
            ready = wait([rank.channel for rank in waiting], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in waiting:
                if rank.channel not in ready:
                    continue
                try:
                    replies[rank.number] = pickle.loads(rank.channel.recv_bytes())
                except (EOFError, ConnectionError):
                    code = rank.process.wait()
                    replies[rank.number] = None
                    dead.append(f"rank {rank.number} ended with exit code {code}:\n{rank.tail()}")
            if dead or any(isinstance(reply, Failure) for reply in replies.values()):
                deadline = min(deadline, time.monotonic() + GRACE)

        failures = {rank: reply for rank, reply in replies.items() if isinstance(reply, Failure)}
        if dead:
            raise RankFailed(f"{self._where(what)}: " + "\n".join(dead))
        if failures:
            raise self._error(what, failures)
        if waiting:
            raise RankFailed(self._hung(what, waiting, timeout))
        return [replies[rank] for rank in range(self.size)]

    def _error(self, what: str, failures: dict[int, Failure]) -> BaseException:
        first = failures[min(failures)]
        error = first.exception or RankFailed(f"{self._where(what)}: a rank raised what cannot be pickled")
        for rank, failure in sorted(failures.items()):
            error.add_note(f"on rank {rank} of {self.size}:\n{failure.text}")
        return error

    def _hung(self, what: str, ranks: list[Rank], timeout: float) -> str:
        for rank in ranks:
            rank.process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        stacks = "\n".join(f"rank {rank.number}:\n{rank.tail()}" for rank in ranks)
        numbers = ", ".join(str(rank.number) for rank in ranks)
        return f"{self._where(what)}: rank {numbers} of {self.size} still at work after {timeout:g} s\n{stacks}"

    @staticmethod
    def _where(what: str) -> str:
        test = os.environ.get("PYTEST_CURRENT_TEST", "outside a test").removesuffix(" (call)")
        return f"{what} ({test})"


class Pools:
    """The pools of a test session, by size, started when first asked for.

    At most `limit` are alive; the one that was used longest ago makes room.
    """

    def __init__(self, limit: int = 2) -> None:
        self.limit = limit
        self._pools: OrderedDict[int, Pool] = OrderedDict()

    def __call__(self, size: int) -> Pool:
        """A living pool of `size` ranks."""
        pool = self._pools.pop(size, None)
        if pool is None or not pool.alive:
            self._pools = OrderedDict((key, other) for key, other in self._pools.items() if other.alive)
            while len(self._pools) >= self.limit:
                self._pools.popitem(last=False)[1].close()
            pool = Pool(size)
        self._pools[size] = pool
        return pool

    def close(self) -> None:
        """End every pool."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def serve(descriptor: int) -> None:
    """A rank's whole life: join the world, then call what the channel brings until it ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # A terminal's Ctrl-C reaches the ranks too; they end when the pytest process closes their channels.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Connection(descriptor)
    work: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(channel, work), daemon=True).start()

    import nnsight  # noqa: F401 - imported for its cost, which is paid here once
    import transformers  # noqa: F401

    world = World(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=COLLECTIVE_TIMEOUT)
    channel.send_bytes(pickle.dumps(None))
    while True:
        channel.send_bytes(_reply(world, work.get()))


def _receive(channel: Connection, work: queue.SimpleQueue[bytes]) -> None:
    try:
        while True:
            work.put(channel.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _reply(world: World, payload: bytes) -> bytes:
    try:
        path, call = pickle.loads(payload)
        # Test modules outside a package are importable from the directory pytest put on its path.
        sys.path[:] = path
        function, args = pickle.loads(call)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return pickle.dumps(function(world, *args))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        try:
            reply = pickle.dumps(Failure(error, text))
            pickle.loads(reply)
            return reply
        except Exception:
            return pickle.dumps(Failure(None, text))

"""Ranks that share memory: threads of the test's own process, each with an end of its own, or a pool's processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from boundary.collectives import CollectiveError, SharedGroup
from boundary.parallel import Parallel, ThreadWorld, build
from boundary.shared_memory import WINDOW, SharedMemory
from tests.pool import World

T = TypeVar("T")
#: Bytes of a slot of which most messages in the tests need several.
NARROW = 1 << 13


def shared_group(
    store: Store, rank: int, ranks: tuple[int, ...], limit: float = 20.0, window: int = WINDOW, name: str = "shared"
) -> SharedGroup:
    """This rank's end; every rank of `ranks` calls, with a store of their own."""
    transport = SharedMemory.connect(store, ranks.index(rank), len(ranks), 20.0, window)
    return SharedGroup(transport, ranks, limit, name)


def group_on(world: World, name: str, limit: float = 20.0, window: int = WINDOW) -> SharedGroup:
    """A group of all ranks of a pool, under a name not used before."""
    store = PrefixStore(name, _get_default_store())
    return shared_group(store, world.rank, tuple(range(world.size)), limit, window)


def kept_group(world: World, window: int = WINDOW) -> SharedGroup:
    """A group of all ranks of a pool that tests which break nothing share."""
    if ("shared", window) not in world.cache:
        world.cache["shared", window] = group_on(world, f"kept {window} {len(world.cache)}", window=window)
    return world.cache["shared", window]


class SharedThreads:
    """`size` threads that share memory and stay in step over many calls of `run`."""

    def __init__(self, size: int, window: int = NARROW) -> None:
        self.size = size
        self._store = dist.HashStore()
        ranks = tuple(range(size))
        self.groups = on_threads(size, lambda rank: shared_group(self._store, rank, ranks, window=window))

    def run(self, rank_main: Callable[[SharedGroup], T]) -> list[T]:
        """`rank_main(group)` on every thread; what each returned."""
        return on_threads(self.size, lambda rank: rank_main(self.groups[rank]))


def on_threads(size: int, play: Callable[[int], T], seconds: float = 30.0) -> list[T]:
    """`play(rank)` on a thread per rank; what each returned. The first error that explains the others is raised."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = play(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise min(errors, key=lambda error: isinstance(error, CollectiveError))
    assert len(results) == size, f"only ranks {sorted(results)} of {size} returned"
    return [results[rank] for rank in range(size)]


class SharedThreadWorld(ThreadWorld):
    """A world of threads whose groups share memory; aborting it closes them."""

    def __init__(self, topology, limit: float = 10.0) -> None:
        super().__init__(topology, limit)
        self._store = dist.HashStore()
        self._made: list[SharedGroup] = []

    def join(self, rank: int) -> Parallel:
        def make_group(name: str, ranks: tuple[int, ...]) -> SharedGroup | None:
            if rank not in ranks:
                return None
            store = PrefixStore("-".join(map(str, ranks)), self._store)
            group = shared_group(store, rank, ranks, self.limit, NARROW, name)
            self._made.append(group)
            return group

        return build(self.topology, rank, make_group)

    def abort(self, reason: str) -> None:
        for group in list(self._made):
            group.transport.close()

"""Worlds of threads: the ranks of a test as threads of its own process, with real exchanges among them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from boundary.collectives import CollectiveError, Group, ThreadGroup

T = TypeVar("T")


def run_world(size: int, rank_main: Callable[[Group], T], limit: float = 10.0) -> list[T]:
    """Run `rank_main(group)` on `size` threads, one a rank, and return what each returned, by rank.

    The first rank to raise ends the others' waits, and its error is raised here. A rank that neither returns
    nor waits for the group within three times `limit` fails the test.
    """
    groups = ThreadGroup.create(range(size), limit)
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []

    def play(group: ThreadGroup) -> None:
        try:
            results[group.rank] = rank_main(group)
        except BaseException as error:
            errors.append((group.rank, error))
            group.abort(f"rank {group.rank} raised {error!r}")

    threads = [threading.Thread(target=play, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * limit)
    if errors:
        # An error of its own explains the CollectiveErrors of those who waited for that rank.
        rank, error = min(errors, key=lambda entry: isinstance(entry[1], CollectiveError))
        error.add_note(f"on rank {rank} of {size}")
        raise error
    stuck = [rank for rank in range(size) if rank not in results]
    assert not stuck, f"ranks {stuck} of {size} did not return within {3 * limit} s"
    return [results[rank] for rank in range(size)]

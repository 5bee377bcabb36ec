"""A board on which every rank of a world posts, and from which every rank reads: what the ranks say *about*
their work.

It stands on the key-value store through which the process group was set up, and not on collectives, because
it serves exactly when collectives cannot: ranks that disagree, ranks that wait for each other, groups that
are lost.
"""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import Store


class Absent(Exception):
    """Some ranks have not posted on a topic in time.

    Attributes:
        posts: What the others posted, by rank.
        ranks: The ranks that are missing.
    """

    def __init__(self, posts: dict[int, bytes], ranks: list[int]) -> None:
        super().__init__(f"nothing from rank {', '.join(map(str, ranks))}")
        self.posts, self.ranks = posts, ranks


class Board:
    """Topics, each with one post per rank. All ranks take up the same topics in the same order."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._spent: list[str] = []

    def exchange(self, topic: str, post: bytes, limit: float) -> list[bytes]:
        """Post on `topic`, and wait for every rank's post, in rank order.

        Raises:
            Absent: Not all posted within `limit` seconds. This rank's post stays, for those that come later.
            RuntimeError: The store is gone.
        """
        keys = [f"{topic}/{rank}" for rank in range(self._world_size)]
        self._store.set(keys[self._rank], post)  # type: ignore[arg-type]
        try:
            self._store.wait(keys, timedelta(seconds=limit))
        except RuntimeError:
            there = [rank for rank, key in enumerate(keys) if self._store.check([key])]
            if len(there) < self._world_size:
                self._spent.append(keys[self._rank])
                posts = {rank: self._store.get(keys[rank]) for rank in there}
                raise Absent(posts, [rank for rank in range(self._world_size) if rank not in posts]) from None
        posts = self._store.multi_get(keys)
        # That all are at this topic shows that nobody will read an earlier one again.
        for key in self._spent:
            self._store.delete_key(key)
        self._spent = [keys[self._rank]]
        return posts

    def withdraw(self, topic: str) -> None:
        """Take this rank's post back, so that ranks that come later do not take it for a present one."""
        key = f"{topic}/{self._rank}"
        self._store.delete_key(key)
        self._spent = [spent for spent in self._spent if spent != key]

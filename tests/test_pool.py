"""The pool itself: what its ranks share, how it reports what goes wrong on them, and that none survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.pool import ROOT, Pool, Pools, RankFailed, World


class Unpicklable(Exception):
    """Cannot be rebuilt from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one + two)


def place(world: World) -> tuple[int, int, int]:
    return world.rank, world.size, os.getpid()


def summed(world: World, value: int) -> int:
    total = torch.tensor([value * (world.rank + 1)])
    dist.all_reduce(total)
    return int(total)


def remembered(world: World, key: str) -> int:
    world.cache[key] = world.cache.get(key, 0) + 1
    return world.cache[key]


def raises_on(world: World, rank: int, kind: type[Exception], *args: object) -> None:
    if world.rank == rank:
        raise kind(*args)


def one_rank_waits(world: World) -> None:
    if world.rank == 0:
        time.sleep(600)


def one_rank_dies(world: World) -> None:
    if world.rank == 1:
        os._exit(7)


def test_every_rank_is_a_process_of_one_world(pools: Pools):
    places = pools(2).run(place)
    assert [(rank, size) for rank, size, _ in places] == [(0, 2), (1, 2)]
    assert len({os.getpid(), *(pid for _, _, pid in places)}) == 3


def test_ranks_meet_in_real_collectives(pools: Pools):
    assert pools(2).run(summed, 5) == [15, 15]


def test_what_a_rank_caches_is_there_at_the_next_call(pools: Pools):
    first = pools(2).run(remembered, "calls")
    assert pools(2).run(remembered, "calls") == [count + 1 for count in first]


def test_an_error_on_a_rank_is_raised_with_rank_and_traceback():
    pool = Pool(2)
    with pytest.raises(KeyError, match="lost") as caught:
        pool.run(raises_on, 1, KeyError, "lost")
    (note,) = caught.value.__notes__
    assert note.startswith("on rank 1 of 2")
    assert "in raises_on" in note
    assert not pool.alive


def test_an_error_that_cannot_be_carried_over_still_shows_its_traceback(pools: Pools):
    with pytest.raises(RankFailed, match="raises_on") as caught:
        pools(2).run(raises_on, 0, Unpicklable, 1, 2)
    assert "Unpicklable: 3" in caught.value.__notes__[0]


def test_a_hung_rank_is_killed_with_its_fellows_and_the_test_is_named(pools: Pools):
    pool = pools(2)
    processes = [psutil.Process(pid) for _, _, pid in pool.run(place)]
    started = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0 of 2 still at work") as caught:
        pool.run(one_rank_waits, timeout=2)
    assert time.monotonic() - started < 10
    assert "test_a_hung_rank_is_killed_with_its_fellows_and_the_test_is_named" in str(caught.value)
    assert "in one_rank_waits" in str(caught.value)
    assert not any(process.is_running() for process in processes)
    assert pools(2).run(summed, 1) == [3, 3]


def test_a_rank_that_dies_is_reported_with_its_exit_code():
    pool = Pool(2)
    with pytest.raises(RankFailed, match="rank 1 ended with exit code 7"):
        pool.run(one_rank_dies)
    assert not pool.alive


def test_the_pool_used_longest_ago_makes_room():
    pools = Pools(limit=1)
    try:
        first = pools(1)
        assert pools(1) is first
        second = pools(2)
        assert not first.alive
        assert pools(2) is second
        assert second.run(summed, 1) == [3, 3]
    finally:
        pools.close()
    assert not second.alive


def test_no_rank_survives_a_killed_test_session():
    program = (
        "import time\n"
        "from tests.pool import Pool\n"
        "from tests.test_pool import place\n"
        "print(*(pid for _, _, pid in Pool(2).run(place)), flush=True)\n"
        "time.sleep(600)\n"
    )
    session = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert session.stdout is not None
    with session, session.stdout:
        ranks = [psutil.Process(int(pid)) for pid in session.stdout.readline().split()]
        assert len(ranks) == 2
        session.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(ranks, timeout=5)
    assert not alive

"""Memory shared by processes: many steps, dying and late ranks, overlapping groups, and what is left behind."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from boundary.collectives import CollectiveError, CollectiveTimeout, SharedGroup
from boundary.kernels.all_reduce_add_norm import all_reduce_add_norm
from boundary.sockets import _short_directory
from tests.pool import Pool, Pools, RankFailed, World

from .test_add_norm import draw, formula
from .worlds import group_on, kept_group, shared_group


def alternating(world: World, steps: int) -> float:
    """Steps of changing kinds and sizes; every result is checked. Returns the seconds they took."""
    group = kept_group(world)
    generator = torch.Generator().manual_seed(1)
    sizes = [1, 3, 576, 1000, 20_000]
    choices = torch.randint(0, 4, (steps,), generator=generator).tolist()
    lengths = torch.randint(0, len(sizes), (steps,), generator=generator).tolist()
    ones = {size: torch.ones(size) for size in sizes}
    total = float(group.size * (group.size + 1) // 2)
    start = time.perf_counter()
    for step, (choice, length) in enumerate(zip(choices, lengths, strict=True)):
        value = ones[sizes[length]] * (group.rank + 1)
        key = f"step {step}"
        if choice == 0:
            found, wanted = group.all_reduce(value, key), total
        elif choice == 1:
            found, wanted = group.all_gather(value, key=key)[group.size - 1], float(group.size)
        elif choice == 2:
            found, wanted = group.broadcast(value, 0, key), 1.0
        else:
            rows = value.view(-1, 1)
            counts = [0] * (group.size - 1) + [len(value)]
            found, wanted = group.reduce_scatter(rows, counts, key), total
        assert bool((found == wanted).all()), (step, choice, length)
    return time.perf_counter() - start


@pytest.mark.parametrize(("size", "steps"), [(2, 10_000), (3, 1_000)])
def test_ten_thousand_steps_of_alternating_kinds_and_sizes_are_seconds(pools: Pools, size: int, steps: int):
    assert max(pools(size).run(alternating, steps)) < 30


def on_one_core(world: World) -> float:
    """More ranks than cores: whoever waits has to let the others run."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        group = group_on(world, "one core")
        start = time.perf_counter()
        for step in range(200):
            group.all_reduce(torch.ones(64), f"step {step}")
        return time.perf_counter() - start
    finally:
        os.sched_setaffinity(0, cores)


def test_four_ranks_on_one_core_do_not_wait_out_each_others_time(pools: Pools):
    assert max(pools(4).run(on_one_core)) < 4


def overlapping(world: World) -> list[float]:
    store = dist.distributed_c10d._get_default_store()
    prefix = dist.distributed_c10d.PrefixStore
    groups = {
        ranks: shared_group(prefix(f"overlap {ranks}", store), world.rank, ranks)
        for ranks in [(0, 1), (1, 2), (0, 2), (0, 1, 2)]
        if world.rank in ranks
    }
    sums = []
    for step in range(200):
        for ranks, group in groups.items():
            found = group.all_reduce(torch.full((50,), 10.0**world.rank), f"step {step}")
            assert found.tolist() == [sum(10.0**rank for rank in ranks)] * 50
            sums.append(found[0].item())
    return sums


def test_groups_that_overlap_stand_side_by_side(pools: Pools):
    assert [len(sums) for sums in pools(3).run(overlapping)] == [600] * 3


def edits(world: World) -> bool:
    """What was handed out is this rank's own: writing to it reaches nobody, and later steps do not reach it."""
    group = kept_group(world)
    held: list[tuple[Tensor, Tensor]] = []
    norm_of = formula("rms", 24, torch.float32)
    for step in range(6):
        value = torch.full((5, 24), float(world.rank + step))
        made = [group.all_reduce(value, "sum"), *group.all_gather(value, key="pieces")]
        made.append(group.reduce_scatter(value, [5] + [0] * (group.size - 1), "part"))
        made += [one for one in all_reduce_add_norm(value, group, value, norm_of, "fused") if one is not None]
        held += [(one, one.clone()) for one in made]
    for one, copy in held:
        assert torch.equal(one, copy)
        one *= 2
        assert torch.equal(one, copy * 2)
    return all(torch.equal(one, copy * 2) for one, copy in held)


def test_what_is_handed_out_shares_memory_with_nobody(pools: Pools):
    assert all(pools(3).run(edits))


# Ranks that do not come.


def leftovers() -> set[str]:
    """What could stay behind: a segment with our name, if it had one in a file system, and sockets there."""
    folder = _short_directory() or tempfile.gettempdir()
    return {str(path) for path in (*Path("/dev/shm").glob("*ranks*"), *Path(folder).glob("ranks-*/rank"))}


def one_is_killed(world: World, op: str, folder: str) -> None:
    group = group_on(world, f"killed {op}", limit=20.0)
    term = torch.ones(300_000 if op == "between steps" else 64)
    for _ in range(20):
        group.all_reduce(term, "all are here")
    if world.rank == 1:
        if op == "between steps":
            # It ends somewhere inside: the others are in any state.
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            while True:
                group.all_reduce(term, "goes on")
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    error: Any = None
    try:
        while True:
            if op == "all_gather":
                group.all_gather(term, key="lonely")
            elif op == "fused":
                all_reduce_add_norm(term.view(4, 16), group, term.view(4, 16), None, "lonely")
            else:
                group.all_reduce(term, "goes on" if op == "between steps" else "lonely")
    except CollectiveError as raised:
        error = raised
    report = {"type": type(error).__name__, "peer": error.peer, "text": str(error), "s": time.monotonic() - start}
    start = time.monotonic()
    try:
        group.all_reduce(torch.ones(1), "again")
    except CollectiveError as raised:
        report["again"] = [str(raised), time.monotonic() - start]
    Path(folder, f"{world.rank}.json").write_text(json.dumps(report))


@pytest.mark.parametrize("op", ["all_gather", "fused", "between steps"])
def test_a_killed_rank_is_an_error_on_every_survivor_and_leaves_nothing(op: str, tmp_path: Path):
    before = leftovers()
    pool = Pool(3)
    try:
        with pytest.raises(RankFailed):
            pool.run(one_is_killed, op, str(tmp_path))
        deadline = time.monotonic() + 10
        while len(list(tmp_path.glob("*.json"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        pool.close()
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 2)]
    for report in reports:
        assert report["type"] == "CollectiveError" and report["s"] < 5
        # A survivor that noticed closes its own connections, and the other may meet that first.
        assert report["peer"] in (0, 1, 2) and "closed" in report["text"]
        assert "failed before" in report["again"][0] and report["again"][1] < 1
    assert 1 in [report["peer"] for report in reports]
    deadline = time.monotonic() + 10  # other programs of this machine have theirs, for a while
    while not leftovers() <= before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert leftovers() <= before


def from_one_core(world: World, tries: int, steps: int) -> tuple[list[int], bool]:
    """The core after `steps` sums that began on one core, in each try; and whether all cores are allowed as before."""
    group = kept_group(world)
    getcpu = ctypes.CDLL(None).sched_getcpu
    allowed = os.sched_getaffinity(0)
    cores = []
    try:
        for attempt in range(tries):
            os.sched_setaffinity(0, {min(allowed)})
            group.all_reduce(torch.ones(64), f"together {attempt}")
            os.sched_setaffinity(0, allowed)
            for step in range(steps):
                group.all_reduce(torch.ones(64), f"apart {step}")
            cores.append(getcpu())
            group.all_reduce(torch.ones(64), f"seen {attempt}")
    finally:
        kept = os.sched_getaffinity(0) == allowed
        os.sched_setaffinity(0, allowed)
    return cores, kept


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_on_one_core_move_apart(pools: Pools, size: int):
    tries = 9
    cores, kept = zip(*pools(size).run(from_one_core, tries, 40), strict=True)
    assert all(kept), "the cores that a process may use are no longer those it had"
    assert sum(len(set(places)) > 1 for places in zip(*cores, strict=True)) > tries // 2, cores


def one_is_late(world: World) -> tuple[str, float, int | None]:
    group = group_on(world, "late", limit=0.6)
    group.all_reduce(torch.ones(4), "all are here")
    start = time.monotonic()
    if world.rank == 2:
        time.sleep(1.5)
    try:
        group.all_reduce(torch.ones(4), "one is late")
        group.all_reduce(torch.ones(4), "and so out of step")
    except CollectiveError as error:
        return type(error).__name__, time.monotonic() - start, error.peer
    return "none", 0.0, None


def test_a_late_rank_ends_every_wait_at_the_limit(pools: Pools):
    first, second, late = pools(3).run(one_is_late)
    for kind, seconds, peer in (first, second):
        assert (
            kind in (CollectiveTimeout.__name__, CollectiveError.__name__) and 0.5 < seconds < 1.4 and peer is not None
        )
    assert CollectiveTimeout.__name__ in (first[0], second[0])
    assert late[0] == CollectiveError.__name__


class Interrupted(Exception):
    pass


def waits_alone(world: World, seconds: float) -> str:
    """A signal's handler runs while this rank waits, and what it raises ends the wait."""
    group = group_on(world, f"waits alone {seconds}", limit=20.0)
    group.all_reduce(torch.ones(1), "all are here")
    if world.rank == 0:
        time.sleep(1.0)
        try:
            group.all_reduce(torch.ones(1), "too late")
            group.all_reduce(torch.ones(1), "surely")
        except CollectiveError as error:
            return str(error)
        return "no error"

    def raise_it(*_: object) -> None:
        raise Interrupted

    previous = signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    start = time.monotonic()
    try:
        group.all_reduce(torch.ones(1), "too late")
    except Interrupted:
        assert time.monotonic() - start < 0.9
        try:
            group.all_reduce(torch.ones(1), "again")
        except CollectiveError as error:
            return f"interrupted, then {error}"
        return "went on out of step"
    finally:
        signal.signal(signal.SIGALRM, previous)
    return "no error"


@pytest.mark.parametrize("seconds", [0.03, 0.3])
def test_a_signals_handler_ends_a_wait_and_the_group(pools: Pools, seconds: float):
    """Before the library returns to Python to look for signals the first time, and after."""
    late, waiting = pools(2).run(waits_alone, seconds)
    assert "closed" in late and "interrupted, then" in waiting and "failed before" in waiting


def sums_that_differ(world: World, name: str, calls: list[tuple[str, int, list[int] | None]]) -> tuple[str, float]:
    group = group_on(world, name, limit=20.0)
    how, rows, counts = calls[world.rank]
    term = torch.ones(rows, 4)
    start = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        if how == "all_reduce":
            group.all_reduce(term, "k")
        elif how == "gather":
            group.all_gather(term, key="k")
        elif how == "fused":
            all_reduce_add_norm(term, group, term, None, "k")
        elif how == "half":
            group.all_reduce(term.bfloat16(), "k")
        else:
            group.reduce_scatter(term, counts or [], "k")
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("sizes", [("all_reduce", 3, None), ("all_reduce", 4, None)]),
        ("dtypes", [("all_reduce", 3, None), ("half", 3, None)]),
        ("shares", [("scatter", 3, [1, 2]), ("scatter", 3, [2, 1])]),
        ("sum and gather", [("all_reduce", 3, None), ("gather", 3, None)]),
        ("sum and scatter", [("all_reduce", 3, None), ("scatter", 3, [1, 2])]),
        ("bare and fused", [("all_reduce", 3, None), ("fused", 3, None)]),
        ("one of three", [("all_reduce", 3, None), ("fused", 3, None), ("all_reduce", 3, None)]),
        ("long and short", [("all_reduce", 100_000, None), ("gather", 1, None)]),
    ],
)
def test_sums_that_differ_are_never_mixed(pools: Pools, name: str, calls: list[Any]):
    for message, seconds in pools(len(calls)).run(sums_that_differ, f"differ: {name}", calls):
        assert "it is at 'k' with" in message and seconds < 5


def memory_of(world: World) -> tuple[int, int]:
    """How many descriptors and mappings of segments this process has, while a group stands and after."""

    def count() -> int:
        maps = Path("/proc/self/maps").read_text().count("memfd:ranks")
        for name in os.listdir("/proc/self/fd"):
            try:
                maps += "memfd:ranks" in os.readlink(f"/proc/self/fd/{name}")
            except OSError:
                continue
        return maps

    gc.collect()  # what earlier tests' exceptions still hold
    before = count()
    group: SharedGroup | None = group_on(world, "memory")
    assert group is not None
    group.all_reduce(torch.ones(3))
    standing = count() - before
    del group
    return standing, count() - before


def test_a_segment_is_one_mapping_and_goes_with_its_group(pools: Pools):
    assert pools(2).run(memory_of) == [(1, 0)] * 2


def test_a_group_checks_that_its_memory_is_its_ranks():
    from .worlds import SharedThreads

    transport = SharedThreads(2).groups[0].transport
    with pytest.raises(ValueError, match="2 ranks"):
        SharedGroup(transport, (0, 1, 2), 1.0)


def test_values_of_any_dtype_take_several_steps(pools: Pools):
    assert all(pools(2).run(long_values))


def long_values(world: World) -> bool:
    group = kept_group(world)
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.bfloat16):
        pieces = [(draw(300_001 + rank, dtype=torch.float32, seed=rank) * 9).to(dtype) for rank in range(world.size)]
        found = group.all_gather(pieces[world.rank], [piece.shape for piece in pieces], f"long {dtype}")
        assert all(torch.equal(a, b) for a, b in zip(found, pieces, strict=True))
        deal = [pieces[world.rank][: 1000 * (peer + 1)] for peer in range(world.size)]
        dealt = group.all_to_all(deal, [deal[world.rank].shape] * world.size, f"deal {dtype}")
        assert all(torch.equal(a, b[: len(a)]) for a, b in zip(dealt, pieces, strict=True))
    integers = group.all_reduce(torch.arange(5) * (world.rank + 1), "integers")
    return integers.tolist() == [3 * value for value in range(5)]

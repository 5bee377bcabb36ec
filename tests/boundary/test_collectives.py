"""Exchanges among threads and among processes: what arrives, what is counted, how disagreement ends."""

from __future__ import annotations

import pickle
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from boundary.collectives import (
    CollectiveError,
    CollectiveTimeout,
    Event,
    GlooGroup,
    Group,
    NcclGroup,
    SharedGroup,
    SocketGroup,
    ThreadGroup,
    record,
)
from boundary.shared_memory import SharedMemory
from boundary.sockets import Sockets
from tests.pool import Pools, World
from tests.worlds import run_world

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def fill(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values > 0) if dtype is torch.bool else (values * 9).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit-equal, of one shape and dtype."""
    a, b = (x.resolve_conj().contiguous() for x in (a, b))
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
    )


# What a rank does; the tests below run it on threads and on processes.


def exchange_everything(group: Group) -> list[Event]:
    """Every collective, every dtype; strided, uneven, empty and scalar pieces. Asserts what arrives."""
    ranks = range(group.size)
    with record() as events:
        for dtype in DTYPES:
            pieces = [fill((4, rank), dtype, rank).transpose(0, 1) for rank in ranks]
            found = group.all_gather(pieces[group.rank], [(rank, 4) for rank in ranks], f"uneven {dtype}")
            assert all(same(a, b) for a, b in zip(found, pieces, strict=True))
            assert all(part.is_contiguous() for rank, part in enumerate(found) if rank != group.rank)
            scalars = [fill((), dtype, 10 + rank) for rank in ranks]
            found = group.all_gather(scalars[group.rank], key="scalars")
            assert all(same(a, b) for a, b in zip(found, scalars, strict=True))
        conjugates = [fill((3,), torch.complex64, rank).conj() for rank in ranks]
        found = group.all_gather(conjugates[group.rank], key="conjugates")
        assert all(same(a, b) for a, b in zip(found, conjugates, strict=True))

        terms = [fill((2, 3), torch.float32, rank) for rank in ranks]
        total = group.all_reduce(terms[group.rank], "sum")
        expected = terms[0].clone()
        for term in terms[1:]:
            expected = expected + term
        assert same(total, expected), "added in rank order, so every rank holds these very bits"
        assert same(terms[group.rank], fill((2, 3), torch.float32, group.rank)), "never in place"

        for source in ranks:
            value = fill((3, 2), torch.float32, source)
            found = group.broadcast(value if group.rank == source else torch.empty(3, 2), source, "broadcast")
            assert same(found, value)

        mixed = [[fill((rank + 1, 2), dtype, rank) for rank in ranks] for dtype in DTYPES[:3] * 2]
        shapes = [[tuple(piece.shape) for piece in row] for row in mixed]
        gathered = group.all_gather_many([row[group.rank] for row in mixed], shapes, "many")
        for row, expected_row in zip(gathered, mixed, strict=True):
            assert all(same(a, b) for a, b in zip(row, expected_row, strict=True))
        alike = group.all_gather_many([torch.full((2,), group.rank), torch.ones(())], key="alike")
        assert [part.tolist() for part in alike[0]] == [[rank, rank] for rank in ranks]
    return [event for event in events if event.rank == group.rank]


def check_events(events: list[Event], rank: int, size: int) -> None:
    assert {event.op for event in events} == {"all_gather", "all_reduce", "broadcast"}
    assert {event.ranks for event in events} == {tuple(range(size))}
    assert sum(event.key.startswith("many/") for event in events) == 3, "one exchange per dtype"
    (summed,) = [event for event in events if event.key == "sum"]
    assert summed.op == "all_reduce" and summed.nbytes == 2 * (size - 1) * 24
    broadcasts = [event.nbytes for event in events if event.op == "broadcast"]
    assert broadcasts == [24 * (size - 1) if source == rank else 24 for source in range(size)]
    (uneven,) = [event for event in events if event.key == f"uneven {torch.float32}"]
    assert uneven.nbytes == 16 * ((size - 1) * rank + sum(range(size)) - rank)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_collective_among_threads(size: int) -> None:
    for rank, events in enumerate(run_world(size, exchange_everything)):
        check_events(events, rank, size)


def test_alone_nothing_is_exchanged() -> None:
    value = torch.ones(2)

    def rank_main(group: Group) -> None:
        (gathered,) = group.all_gather(value)
        assert gathered.data_ptr() == value.data_ptr()
        total = group.all_reduce(value)
        assert torch.equal(total, value) and total.data_ptr() != value.data_ptr()
        assert torch.equal(group.broadcast(value, 0), value)
        assert torch.equal(group.all_gather_many([value])[0][0], value)

    with record() as events:
        run_world(1, rank_main)
    assert not events


def test_half_precision_is_summed_in_float32_and_rounded_once() -> None:
    # In bfloat16, 256 + 1 is 256: added one by one the ones would vanish.
    terms = [256.0, 1.0, 1.0, 1.0]
    for total in run_world(4, lambda group: group.all_reduce(torch.tensor([terms[group.rank]]).bfloat16())):
        assert total.dtype is torch.bfloat16
        assert total.item() == torch.tensor(259.0).bfloat16().item() == 260.0


def test_results_can_be_edited_and_counted_in_inference_mode() -> None:
    def rank_main(group: Group) -> None:
        with torch.inference_mode():
            piece = torch.ones(2, 3)
            values = [group.all_reduce(piece), group.all_gather(piece)[1 - group.rank]]
            values.append(group.all_gather_many([piece])[0][1 - group.rank])
            if group.rank:
                values.append(group.broadcast(piece, 0))
            else:
                group.broadcast(piece, 0)
        for value in values:
            before = value._version
            value += 1
            assert value._version > before and not value.requires_grad

    run_world(2, rank_main)


def test_gradients_are_left_to_the_caller() -> None:
    def rank_main(group: Group) -> None:
        leaf = torch.ones(2, requires_grad=True)
        results = [*group.all_gather(leaf), group.all_reduce(leaf), group.broadcast(leaf, 0)]
        results += group.all_gather_many([leaf])[0]
        assert not any(value.requires_grad for value in results)

    run_world(2, rank_main)


def test_a_piece_unlike_its_announced_shape_is_refused_before_anything_is_sent() -> None:
    group = ThreadGroup.create((0, 1))[0]
    with record() as events, pytest.raises(ValueError, match=r"\(2, 3\).*\[\(2, 4\), \(2, 3\)\]"):
        group.all_gather(torch.ones(2, 3), [(2, 4), (2, 3)])
    with pytest.raises(ValueError, match="source=2"):
        group.broadcast(torch.ones(2), 2)
    assert not events


def test_pieces_that_cannot_be_dealt_out_are_refused_before_anything_is_sent() -> None:
    group = ThreadGroup.create((0, 1))[0]
    ones, own = torch.ones(2, 3), (2, 3)
    with record() as events:
        for pieces, shapes, text in [
            ([ones], [own, own], "not one for each of 2 ranks"),
            ([ones, ones], [own], "not one for each of 2 ranks"),
            ([ones, ones, ones], [own] * 3, "not one for each of 2 ranks"),
            ([ones, ones.double()], [own, own], "several dtypes"),
            ([ones, ones], [(1, 3), (1, 3)], "own piece has shape"),
        ]:
            with pytest.raises(ValueError, match=text):
                group.all_to_all(pieces, shapes, "deal")
    assert not events


def test_recordings_nest_and_end() -> None:
    def rank_main(group: Group) -> tuple[int, int]:
        with record() as outer:
            group.all_reduce(torch.ones(1), "a")
            group.all_reduce(torch.ones(1), "a barrier, so that both inner recordings see the same")
            with record() as inner:
                group.all_reduce(torch.ones(1), "b")
        group.all_reduce(torch.ones(1), "c")
        return len([e for e in outer if e.rank == group.rank]), len([e for e in inner if e.rank == group.rank])

    assert run_world(2, rank_main) == [(3, 1), (3, 1)]


def test_groups_of_threads_stand_side_by_side() -> None:
    pairs = [ThreadGroup.create((0, 2), name="even"), ThreadGroup.create((1, 3), name="odd")]

    def rank_main(group: Group) -> tuple[float, tuple[int, ...]]:
        pair = pairs[group.rank % 2][group.rank // 2]
        return pair.all_reduce(torch.tensor(float(group.rank))).item(), pair.ranks

    assert run_world(4, rank_main) == [(2.0, (0, 2)), (4.0, (1, 3)), (2.0, (0, 2)), (4.0, (1, 3))]


def test_a_group_checks_its_place() -> None:
    with pytest.raises(ValueError, match="rank 2"):
        ThreadGroup(ThreadGroup.create((0, 1))[0]._meeting, (0, 1), 2, 1.0, "g")
    with pytest.raises(ValueError, match="limit=0"):
        ThreadGroup.create((0, 1), limit=0)


@pytest.mark.parametrize(("first", "second"), [(("a", 4), ("b", 4)), (("a", 4), ("b", 6)), (("a", 4), ("a", 6))])
def test_threads_that_disagree_raise_at_once(first: tuple[str, int], second: tuple[str, int]) -> None:
    calls = [first, second]
    raised: list[CollectiveError] = []

    def rank_main(group: Group) -> None:
        key, length = calls[group.rank]
        with pytest.raises(CollectiveError) as caught:
            group.all_gather(torch.ones(length), key=key)
        raised.append(caught.value)
        with pytest.raises(CollectiveError):
            group.all_gather(torch.ones(1), key="the group is out of step")

    start = time.monotonic()
    run_world(2, rank_main, limit=30.0)
    assert time.monotonic() - start < 10
    assert sorted(error.key for error in raised) == sorted(key for key, _ in calls)


def test_a_thread_that_does_not_come_is_named_within_the_limit() -> None:
    def rank_main(group: Group) -> CollectiveError | None:
        if group.rank == 2:
            return None
        with pytest.raises(CollectiveError) as caught:
            group.all_reduce(torch.ones(1), "lonely")
        return caught.value

    start = time.monotonic()
    errors = run_world(3, rank_main, limit=0.5)
    assert time.monotonic() - start < 5
    first = next(error for error in errors if isinstance(error, CollectiveTimeout))
    assert (first.group, first.key) == ("threads", "lonely") and first.seconds >= 0.5
    assert "exchange 'lonely' of group 'threads'" in str(first)


def test_a_rank_that_raises_frees_the_others() -> None:
    def rank_main(group: Group) -> None:
        if group.rank == 1:
            raise KeyError("mine")
        group.all_reduce(torch.ones(1))

    start = time.monotonic()
    with pytest.raises(KeyError, match="mine") as caught:
        run_world(3, rank_main, limit=30.0)
    assert time.monotonic() - start < 10
    assert caught.value.__notes__ == ["on rank 1 of 3"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("Thread-") and not thread.daemon]


@pytest.mark.parametrize(
    "error",
    [
        CollectiveError("gone", "tp", "k", 3),
        CollectiveTimeout(2.5, "tp", "k"),
        CollectiveTimeout(1.0, "g", "k", 1),
    ],
)
def test_errors_travel_between_processes(error: CollectiveError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error) and vars(copy) == vars(error)


# Processes.


def new_group(world: World, kind: str, name: str, limit: float = 20.0) -> SharedGroup | SocketGroup | GlooGroup:
    """A group of ours for the whole world, over a transport that nothing else uses."""
    ranks = range(world.size)
    store = dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
    if kind == "shared":
        return SharedGroup(SharedMemory.connect(store, world.rank, world.size, 20.0), ranks, limit, name)
    if kind == "sockets":
        return SocketGroup(Sockets.connect(store, world.rank, world.size, 20.0), ranks, limit, name)
    transport: Any = dist.ProcessGroupGloo(store, world.rank, world.size, timedelta(seconds=20))
    return GlooGroup(transport, ranks, limit, name)


def everything_among_processes(world: World, kind: str) -> list[Event]:
    return exchange_everything(new_group(world, kind, f"everything {kind}"))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["shared", "sockets", "gloo"])
def test_every_collective_among_processes(pools: Pools, kind: str, size: int) -> None:
    for rank, events in enumerate(pools(size).run(everything_among_processes, kind)):
        check_events(events, rank, size)


def large_messages(world: World, kind: str) -> None:
    """More than any socket buffers, in both directions at once, while one rank is a step behind."""
    group = new_group(world, kind, f"large messages {kind}")
    pieces = [torch.arange(3_000_000 + rank) * (rank + 1) for rank in range(world.size)]
    for step in range(3):
        if world.rank == 1:
            time.sleep(0.1)
        gathered = group.all_gather(pieces[world.rank], [piece.shape for piece in pieces], f"step {step}")
        assert all(same(a, b) for a, b in zip(gathered, pieces, strict=True))


@pytest.mark.parametrize("kind", ["shared", "sockets"])
def test_messages_larger_than_any_buffer_arrive(pools: Pools, kind: str) -> None:
    pools(3).run(large_messages, kind)


def ordinary_process_group(world: World) -> list[float]:
    group = GlooGroup(dist.new_group(), range(world.size), 20.0)  # type: ignore[arg-type]
    return [group.all_reduce(torch.tensor(float(world.rank + 1)), f"k{i}").item() for i in range(3)]


def test_a_process_group_of_torchs_carries_a_group(pools: Pools) -> None:
    assert pools(2).run(ordinary_process_group) == [[3.0] * 3] * 2


def disagree(world: World, kind: str, name: str, calls: list[tuple[str, str, int]]) -> dict[str, Any]:
    """Each rank makes another call; then the group is brought back over a new transport."""
    group = new_group(world, kind, name, limit=1.5)
    group.all_reduce(torch.ones(3), "in step")
    method, key, length = calls[world.rank]
    error = None
    start = time.monotonic()
    try:
        if method == "all_gather":
            group.all_gather(torch.full((length,), float(world.rank)), key=key)
        elif method == "integers":
            group.all_gather(torch.full((length,), world.rank, dtype=torch.int32), key=key)
        elif method == "broadcast":
            group.broadcast(torch.ones(length), 0, key)
    except CollectiveError as raised:
        error = raised
    seconds = time.monotonic() - start
    group.transport = new_group(world, kind, f"{name}/again").transport  # type: ignore[assignment]
    group.limit = 20.0
    again = group.all_reduce(torch.ones(3), "in step again")
    return {"error": error, "seconds": seconds, "again": again.tolist()}


@pytest.mark.parametrize("kind", ["shared", "sockets", "gloo"])
@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("equal size", [("all_gather", "a", 4), ("all_gather", "b", 4)]),
        ("unequal size", [("all_gather", "a", 4), ("all_gather", "longer", 4096)]),
        ("one key, two sizes", [("all_gather", "a", 4), ("all_gather", "a", 4096)]),
        ("one key, two dtypes", [("all_gather", "a", 4), ("integers", "a", 4)]),
        ("two operations", [("broadcast", "a", 4), ("all_gather", "b", 4)]),
        ("one rank only", [("all_gather", "a", 4), ("none", "", 0)]),
        ("three ranks", [("all_gather", "a", 4), ("all_gather", "a", 4), ("all_gather", "b", 4)]),
    ],
)
def test_processes_that_disagree_meet_an_error_within_the_limit(
    pools: Pools, kind: str, name: str, calls: list[tuple[str, str, int]]
) -> None:
    replies = pools(len(calls)).run(disagree, kind, f"{kind} {name}", calls)
    at_once = kind != "gloo" and name != "one rank only"
    # The rank that waited out its limit closes its connections, and another may meet that first.
    assert any(isinstance(reply["error"], CollectiveTimeout) for reply in replies) is not at_once
    for rank, ((method, key, _), reply) in enumerate(zip(calls, replies, strict=True)):
        assert reply["seconds"] < 6
        assert reply["again"] == [float(len(calls))] * 3, "a new transport brings the group back"
        # A broadcast's source only sends, and what it sends may lie in a buffer that nobody reads.
        if method in ("none", "broadcast"):
            continue
        error = reply["error"]
        assert isinstance(error, CollectiveError), "values of two exchanges were mixed"
        assert (error.group, error.key) == (f"{kind} {name}", key)
        assert error.peer is not None and error.peer != rank
        if at_once:
            assert reply["seconds"] < 1.4 and f"it is at {calls[error.peer][1]!r} with" in str(error)


def close_while_a_peer_waits(world: World, transport: str, kind: str) -> tuple[str | None, float]:
    group = new_group(world, transport, f"closing {transport} {kind}", limit=30.0)
    group.all_reduce(torch.ones(1))
    start = time.monotonic()
    if kind == "peer closes" and world.rank == 0:
        time.sleep(0.2)
        group.transport.close()  # type: ignore[union-attr]
        return None, 0.0
    if kind == "own thread closes":
        threading.Timer(0.2, group.transport.close).start()  # type: ignore[union-attr]
        if world.rank == 0:
            time.sleep(0.5)
            return None, 0.0
    with pytest.raises(CollectiveError) as caught:
        group.all_reduce(torch.ones(1), "waits")
    assert not isinstance(caught.value, CollectiveTimeout)
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("transport", ["shared", "sockets"])
@pytest.mark.parametrize("kind", ["peer closes", "own thread closes"])
def test_closing_a_transport_frees_whoever_waits(pools: Pools, transport: str, kind: str) -> None:
    (_, _), (message, seconds) = pools(2).run(close_while_a_peer_waits, transport, kind)
    assert message is not None and "closed" in message and seconds < 10


def test_nccl_groups_speak_bytes_to_every_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    # No machine of the suite has two GPUs: the batch that would be handed to nccl is looked at instead.
    class Transport:
        def rank(self) -> int:
            return 1

        def size(self) -> int:
            return 3

    batches = []

    class Operation:
        def __init__(self, direction: Any, tensor: Tensor, group: Any, group_peer: int) -> None:
            self.seen = (direction.__name__, tensor.dtype, tensor.numel(), group_peer)

    monkeypatch.setattr(dist, "P2POp", Operation)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: batches.append([op.seen for op in ops]) or [])
    group = NcclGroup(Transport(), (4, 5, 6), 5.0)  # type: ignore[arg-type]
    group.all_gather(torch.ones(3, dtype=torch.bfloat16), [(2,), (3,), (0,)], "k")
    assert batches == [[("isend", torch.uint8, 6, 0), ("irecv", torch.uint8, 4, 0), ("isend", torch.uint8, 6, 2)]]

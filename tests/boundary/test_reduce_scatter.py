"""The collectives that send each peer a tensor of its own, over every transport of one machine."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist

from boundary.collectives import CollectiveError, GlooGroup, Group, SharedGroup, SocketGroup, record, sum_in_rank_order
from boundary.shared_memory import SharedMemory
from boundary.sockets import Sockets
from tests.pool import Pools, World
from tests.worlds import run_world


def term(rank: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows, 3, generator=generator)


def exchanges(group: Group):
    """Both collectives with uneven and empty shares; what arrived, and what it cost."""
    counts = [2, 0, 3, 1][: group.size]
    with record() as events:
        rows = group.reduce_scatter(term(group.rank, sum(counts)), counts, "rs")
        pieces = [torch.full((group.rank + peer, 2), float(10 * group.rank + peer)) for peer in range(group.size)]
        arrived = group.all_to_all(pieces, [(peer + group.rank, 2) for peer in range(group.size)], "a2a")
    return rows, arrived, [(event.op, event.nbytes) for event in events if event.rank == group.rank]


def check(results):
    size = len(results)
    counts = [2, 0, 3, 1][:size]
    whole = sum_in_rank_order([term(rank, sum(counts)) for rank in range(size)])
    for rank, (rows, arrived, events) in enumerate(results):
        start = sum(counts[:rank])
        assert torch.equal(rows, whole[start : start + counts[rank]])
        for peer, piece in enumerate(arrived):
            assert torch.equal(piece, torch.full((rank + peer, 2), float(10 * peer + rank)))
        others = sum(counts) - counts[rank]
        assert events[0] == ("reduce_scatter", 12 * (others + (size - 1) * counts[rank]))
        moved = sum(rank + peer for peer in range(size) if peer != rank)
        assert events[1] == ("all_to_all", 2 * 8 * moved)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_among_threads(size):
    check(run_world(size, exchanges))


def on_transport(world: World, kind: str):
    ranks = range(world.size)
    if kind == "gloo":
        group: Group = GlooGroup(dist.new_group(list(ranks)), ranks, 10.0)
    elif kind.startswith("shared"):
        store = dist.FileStore(f"{tempfile.gettempdir()}/{kind}", world.size)
        group = SharedGroup(SharedMemory.connect(store, world.rank, world.size, 10.0), ranks, 10.0)
    else:
        store = dist.FileStore(f"{tempfile.gettempdir()}/{kind}", world.size)
        group = SocketGroup(Sockets.connect(store, world.rank, world.size, 10.0), ranks, 10.0)
    return exchanges(group)


@pytest.mark.parametrize("kind", ["gloo", "sockets", "shared"])
def test_among_processes(pools: Pools, kind: str, tmp_path):
    name = kind if kind == "gloo" else f"{kind}-{tmp_path.name}-{id(tmp_path)}"
    check(pools(2).run(on_transport, name))


def test_shares_that_do_not_make_up_the_term_are_refused():
    def rank_main(group: Group):
        with pytest.raises(ValueError, match="do not make up"):
            group.reduce_scatter(torch.ones(3, 1), [1, 1], "rs")
        return True

    assert all(run_world(2, rank_main))


def test_ranks_that_disagree_on_their_shares_meet_an_error():
    def rank_main(group: Group):
        counts = [1, 2] if group.rank else [2, 1]
        with pytest.raises(CollectiveError):
            group.reduce_scatter(torch.ones(3, 1), counts, "rs")
        return True

    assert all(run_world(2, rank_main))


def test_the_term_is_not_written_to():
    def rank_main(group: Group):
        value = term(group.rank, 3)
        before = value.clone()
        group.reduce_scatter(value, [2, 1], "rs").zero_()
        group.all_reduce(value, "ar").zero_()
        return torch.equal(value, before)

    assert all(run_world(2, rank_main))

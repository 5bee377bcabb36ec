"""Wholes gathered along a dim: joined of pieces, or through shared memory, where each piece goes to its place."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from boundary.collectives import CollectiveError, Group, Run, SharedGroup, record
from tests.worlds import run_world

from .worlds import SharedThreads

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[SharedThreads]:
    """Threads with a slot so narrow that most wholes take several steps, which end within rows."""
    yield SharedThreads(request.param)


def packed(blocks: list[list[int]]) -> tuple[tuple[Run, ...], tuple[int, ...]]:
    """The runs of a whole of blocks, each of which has columns of every rank, and how wide each rank's piece is."""
    starts = [0, *accumulate(width for block in blocks for width in block)]
    widths = [0] * len(blocks[0])
    runs = []
    for start, (rank, width) in zip(starts, ((r, w) for block in blocks for r, w in enumerate(block)), strict=False):
        runs.append(Run(rank, widths[rank], start, width))
        widths[rank] += width
    return tuple(runs), tuple(widths)


@settings(deadline=None, max_examples=60)
@given(dtype=st.sampled_from(DTYPES), dim=st.sampled_from([0, 1, 2, -1, -2]), apart=st.booleans(), data=st.data())
def test_a_whole_is_its_pieces_side_by_side(ranks: SharedThreads, dtype: torch.dtype, dim: int, apart: bool, data):
    """Packed or plain, of even and uneven widths, some of them nothing."""
    width = st.lists(st.sampled_from([0, 1, 3, 64, 500]), min_size=ranks.size, max_size=ranks.size)
    runs, widths = packed(data.draw(st.lists(width, min_size=1, max_size=3)))
    shape = [3, 2, 5]
    shape[dim] = sum(widths)
    whole = (torch.arange(torch.Size(shape).numel()).reshape(shape) % 251).to(dtype)
    pieces = [
        torch.cat([whole.narrow(dim, run.whole, run.width) for run in runs if run.rank == rank], dim)
        for rank in range(ranks.size)
    ]

    def rank_main(group: Group) -> list[tuple[str, int, str]]:
        piece = pieces[group.rank]
        if apart:
            piece = torch.stack([piece, piece], -1)[..., 0]
        if dtype.is_floating_point:
            piece = piece.requires_grad_()
        with record() as events:
            found = group.all_gather_along(dim, piece, tuple(shape), runs, widths, "along")
        assert torch.equal(found, whole) and found.dtype == dtype and found.is_contiguous()
        assert not found.requires_grad
        found.zero_()
        assert torch.equal(piece, pieces[group.rank]), "the whole is nobody else's memory"
        return [(event.op, event.nbytes, event.key) for event in events if event.rank == group.rank]

    assert ranks.run(rank_main) == run_world(ranks.size, rank_main)


def test_a_whole_can_be_written_to_in_any_mode(ranks: SharedThreads):
    runs, widths = packed([[2] * ranks.size])

    def rank_main(group: SharedGroup) -> Tensor:
        with torch.inference_mode():
            whole = group.all_gather_along(1, torch.ones(3, 2), (3, 2 * group.size), runs, widths, "inference")
        before = whole._version
        assert whole.mul_(2)._version == before + 1
        return whole

    assert all(torch.equal(whole, torch.full((3, 2 * ranks.size), 2.0)) for whole in ranks.run(rank_main))


@pytest.mark.parametrize("what", ["key", "dim", "widths", "dtype", "operation"])
def test_ranks_that_gather_different_wholes_raise_on_all_sides(what: str):
    def rank_main(group: SharedGroup) -> str:
        odd = group.rank == 1
        key = "other" if odd and what == "key" else "k"
        dtype = torch.int32 if odd and what == "dtype" else torch.float32
        dim = 0 if odd and what == "dim" else 1
        runs, widths = packed([[3, 1]] if odd and what == "widths" else [[2, 2]])
        piece = torch.ones((2, 4) if dim == 0 else (4, widths[group.rank]), dtype=dtype)
        try:
            if odd and what == "operation":
                group.all_reduce(piece, key)
            else:
                group.all_gather_along(dim, piece, (4, 4), runs, widths, key)
        except CollectiveError as error:
            return str(error)
        return ""

    texts = SharedThreads(2).run(rank_main)
    assert all(texts) and any("gathered along" in text or "summed" in text for text in texts), texts


@pytest.mark.parametrize("world", [SharedThreads(2).run, lambda rank_main: run_world(2, rank_main)])
@pytest.mark.parametrize(
    ("shape", "whole", "runs", "widths"),
    [
        ((4, 1), (4, 4), [(0, 0, 0, 2), (1, 0, 2, 2)], (2, 2)),  # a piece that is too narrow
        ((3, 2), (4, 4), [(0, 0, 0, 2), (1, 0, 2, 2)], (2, 2)),  # of too few rows
        ((4, 2, 1), (4, 4), [(0, 0, 0, 2), (1, 0, 2, 2)], (2, 2)),  # of another dim
        ((4, 2), (4, 4), [(0, 0, 0, 2), (1, 0, 3, 1)], (2, 2)),  # a hole
        ((4, 2), (4, 4), [(0, 0, 0, 2)], (2, 2)),  # an end that nobody has
        ((4, 2), (4, 4), [(0, 0, 0, 2), (1, 1, 2, 2)], (2, 2)),  # beyond a piece
        ((4, 2), (4, 4), [(0, 0, 0, 2), (1, -1, 2, 2)], (2, 2)),  # before it
        ((4, 2), (4, 4), [(0, 0, 0, 3), (1, 0, 3, 1)], (2, 2)),  # wider than it
    ],
)
def test_what_does_not_make_up_a_whole_is_refused_before_anything_is_sent(world, shape, whole, runs, widths):
    def rank_main(group: Group) -> None:
        with record() as events, pytest.raises(ValueError, match="do not make up a whole"):
            group.all_gather_along(1, torch.ones(shape), whole, tuple(Run(*run) for run in runs), widths, "k")
        assert not events

    world(rank_main)

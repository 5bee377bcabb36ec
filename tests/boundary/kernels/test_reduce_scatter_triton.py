"""The kernel that completes a rank's own rows of a sum in memory that GPUs share: its data parts, interpreted, as in
`test_all_reduce_triton`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from boundary import symmetric_memory
from boundary.collectives import NcclGroup, record
from boundary.kernels.all_reduce_add_norm import triton as all_reduce
from boundary.kernels.norms import NormFormula
from boundary.kernels.reduce_scatter_add_norm import naive, reduce_scatter_add_norm, triton
from tests.norms import KINDS
from tests.worlds import run_world

from .interpreting import interpreted
from .test_add_norm import draw, formula, is_norm, strided
from .test_add_norm_triton import DTYPES
from .test_all_reduce_triton import Ranks

PROGRAMS = 3


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(triton, "PROGRAMS", PROGRAMS)
    with interpreted():
        yield


def results_of(residuals: list[Tensor], norm: NormFormula | None) -> list[tuple[Tensor | None, Tensor]]:
    """Where a call leaves its results: full of NaN, on every rank."""
    empty = [
        [torch.full_like(own, torch.nan, memory_format=torch.contiguous_format) for own in residuals] for _ in "nt"
    ]
    return [(None if norm is None else normed, total) for normed, total in zip(*empty, strict=True)]


def complete(
    ranks: Ranks, terms: list[Tensor], counts: Sequence[int], residuals: list[Tensor], norm: NormFormula | None
) -> list[tuple[Tensor | None, Tensor]]:
    """One call, on every rank."""
    results = results_of(residuals, norm)
    for part in (triton.COPY, triton.SUM, triton.TAKE_TURNS):
        for rank, workspace in enumerate(ranks.workspaces):
            triton.launch(terms[rank], counts, workspace, residuals[rank], norm, *results[rank], part.value)
    return results


@settings(deadline=None, max_examples=4)
@given(
    dtype=st.sampled_from(DTYPES),
    counts=st.lists(st.integers(0, 4), min_size=2, max_size=4).filter(any),
    hidden=st.integers(1, 70),
    kind=st.sampled_from([None, *KINDS]),
    apart=st.booleans(),
)
@example(dtype=torch.bfloat16, counts=[5, 0, 2, 6], hidden=64, kind="rms", apart=True)
@example(dtype=torch.float16, counts=[0, 3, 0], hidden=33, kind="layer", apart=True)
@example(dtype=torch.float32, counts=[0, 1], hidden=1, kind="gemma", apart=False)
def test_it_is_the_definition_call_after_call(
    dtype: torch.dtype, counts: list[int], hidden: int, kind: str | None, apart: bool
):
    rows, size = sum(counts), len(counts)
    ranks = Ranks(size, rows, hidden, dtype)
    norm = None if kind is None else formula(kind, hidden, dtype)
    for call in range(2):
        terms = [draw(rows, hidden, dtype=dtype, seed=10 * call + rank) for rank in range(size)]
        whole = draw(rows, hidden, dtype=dtype, seed=10 * call + 9)
        if apart:
            terms, whole = [strided(term) for term in terms], strided(whole)
        before = [term.clone() for term in terms], whole.clone()
        results = complete(ranks, terms, counts, list(whole.split(counts)), norm)
        _, wanted = naive.finish(terms, whole, norm)
        unrounded = sum((term.float() for term in terms[1:]), terms[0].float()) + whole.float()
        assert torch.equal(torch.cat([total for _, total in results]), wanted)
        if norm is not None:
            assert is_norm(torch.cat([normed for normed, _ in results if normed is not None]), unrounded, norm)
        assert all(map(torch.equal, terms, before[0])) and torch.equal(whole, before[1])
        assert all(int(workspace.turns.sum()) == PROGRAMS * (1 - call % 2) for workspace in ranks.workspaces)


def test_it_takes_turns_with_all_reduces_of_other_widths(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(all_reduce, "PROGRAMS", PROGRAMS)
    ranks = Ranks(2, 6, 16, torch.float32)
    for call, hidden in enumerate((16, 9, 5, 16, 3)):
        terms = [draw(6, hidden, dtype=torch.float32, seed=2 * call + rank) for rank in range(2)]
        wanted = terms[0] + terms[1] + terms[0]
        if call % 2:
            results = ranks.complete(terms, terms[0], None, two_shots=call == 3)
            assert all(torch.equal(total, wanted) for _, total in results)
        else:
            results = complete(ranks, terms, [1, 5], list(terms[0].split([1, 5])), None)
            assert torch.equal(torch.cat([total for _, total in results]), wanted)
        assert all(int(workspace.turns.sum()) == PROGRAMS * (1 - call % 2) for workspace in ranks.workspaces)


@pytest.mark.parametrize("counts", [[4, 7], [1, 0, 6], [5, 5, 5, 5]])
def test_a_program_reads_the_rows_that_it_waits_for(counts: list[int]):
    """They are those that the others brought as the same program. The other slot is full of NaN, and all programs but
    one take that."""
    rows = sum(counts)
    for program in range(PROGRAMS):
        ranks = Ranks(len(counts), rows, 8, torch.float32)
        terms = [draw(rows, 8, dtype=torch.float32, seed=rank) for rank in range(len(counts))]
        residuals = list(torch.zeros(rows, 8).split(counts))
        results = results_of(residuals, None)
        for part in (triton.COPY, triton.SUM):
            for rank, workspace in enumerate(ranks.workspaces):
                triton.launch(terms[rank], counts, workspace, residuals[rank], None, *results[rank], part.value)
                workspace.turns[:PROGRAMS] = (torch.arange(PROGRAMS) != program).int()
        summed = torch.cat([total for _, total in results])[:, 0].isfinite().nonzero().flatten()
        assert summed.tolist() == list(range(program, rows, PROGRAMS))


@pytest.mark.parametrize(
    ("rows", "hidden", "dtype", "residual_dtype", "width"),
    [
        (5, 8, torch.float32, torch.float32, 8),
        (4, 8, torch.float64, torch.float64, 8),
        (4, 8, torch.float32, torch.bfloat16, 8),
        (4, 8, torch.float32, torch.float32, 7),
        (0, 8, torch.float32, torch.float32, 8),
        (1, triton.LONGEST + 1, torch.bfloat16, torch.bfloat16, triton.LONGEST + 1),
    ],
    ids=["rows", "float64", "dtypes", "weight", "no rows", "long rows"],
)
def test_what_it_does_not_take_touches_nothing_on_any_rank(
    rows: int, hidden: int, dtype: torch.dtype, residual_dtype: torch.dtype, width: int
):
    ranks = Ranks(2, 4, 8, torch.float32)
    term, norm = torch.zeros(rows, hidden, dtype=dtype), formula("rms", width, torch.float32)
    for workspace, kept in zip(ranks.workspaces, (rows, 0), strict=True):
        residual = torch.zeros(kept, hidden, dtype=residual_dtype)
        assert triton.reduce_scatter_add_norm(term, [rows, 0], workspace, residual, norm) is None
        assert not workspace.turns.any()
    assert all(bool((memory == 0xFF).all()) for memory in ranks.memory)


def test_a_rank_that_keeps_no_rows_takes_what_the_others_take(monkeypatch: pytest.MonkeyPatch):
    launched = []
    monkeypatch.setattr(triton, "launch", lambda term, counts, workspace, *rest: launched.append(workspace.rank))
    for rank, workspace in enumerate(Ranks(3, 4, 8, torch.float32).workspaces):
        residual, norm = torch.zeros([4, 0, 0][rank], 8), formula("rms", 8, torch.float32)
        made = triton.reduce_scatter_add_norm(torch.zeros(4, 8), [4, 0, 0], workspace, residual, norm)
        assert made is not None and made[1].shape == residual.shape
    assert launched == [0, 1, 2]


class Transport:
    def rank(self) -> int:
        return 0


def grouped(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> NcclGroup:
    """A group of GPUs as its first rank has it, which was given this memory."""
    group = NcclGroup(Transport(), range(len(ranks.workspaces)), 1.0)  # type: ignore[arg-type]
    monkeypatch.setitem(symmetric_memory._made, group, ranks.workspaces[0])
    return group


def test_a_group_with_a_workspace_completes_in_it(monkeypatch: pytest.MonkeyPatch):
    """A group of one, which waits for nobody."""
    group = grouped(Ranks(1, 4, 8, torch.float32), monkeypatch)
    term, residual = (draw(4, 8, dtype=torch.float32, seed=seed) for seed in range(2))
    norm, turns = formula("rms", 8, torch.float32), symmetric_memory._made[group].turns
    leaf = term.clone().requires_grad_()
    for call, value in enumerate((term, leaf)):
        normed, total = reduce_scatter_add_norm(value, [4], group, residual, norm, "k")
        assert torch.equal(total, term + residual) and normed is not None and is_norm(normed, term + residual, norm)
        assert turns[:PROGRAMS].tolist() == [1 - call] * PROGRAMS
        if call:
            total.sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, torch.ones(4, 8))


def test_its_event_counts_what_any_other_groups_does(monkeypatch: pytest.MonkeyPatch):
    counts = [2, 0, 3]
    group = grouped(Ranks(3, 5, 8, torch.float32), monkeypatch)
    made = torch.zeros(2, 8)
    monkeypatch.setattr(triton, "reduce_scatter_add_norm", lambda *arguments: (None, made))

    def event_of(group) -> tuple[str, int, str]:
        with record() as events:
            result = reduce_scatter_add_norm(
                torch.zeros(5, 8), counts, group, torch.zeros(counts[group.rank], 8), None, "k"
            )
        assert group.rank or torch.equal(result[1], made)
        event = next(event for event in events if event.rank == group.rank and event.group == group.name)
        return event.op, event.nbytes, event.key

    assert event_of(group) == run_world(3, event_of)[0]

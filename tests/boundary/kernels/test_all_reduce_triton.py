"""The kernel that completes sums in memory that GPUs share: its data parts, interpreted, on one rank's turn at a time.

Triton's interpreter runs a kernel to its end, so ranks cannot wait for each other in it: every rank plays one part of
a call, then every rank the next. How they wait is in `test_meeting`, and compiled in `test_compilation`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from boundary.collectives import NcclGroup
from boundary.fusions.triton import install_triton_fusion
from boundary.kernels.all_reduce_add_norm import naive, triton
from boundary.kernels.norms import NormFormula
from boundary.symmetric_memory import Workspace, capacity_of, num_bytes, workspace_of
from tests.norms import KINDS

from .interpreting import interpreted
from .test_add_norm import draw, formula, is_norm, strided
from .test_add_norm_triton import DTYPES


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(triton, "PROGRAMS", 3)
    with interpreted():
        yield


class Ranks:
    """The memory of several ranks, all of it here."""

    def __init__(self, size: int, rows: int, hidden: int, dtype: torch.dtype) -> None:
        capacity = capacity_of(rows, hidden, dtype)
        # NaN in every dtype, wherever nothing is written. Nobody looks at the flags here.
        self.memory = [torch.full((num_bytes(capacity, size),), 0xFF, dtype=torch.uint8) for _ in range(size)]
        addresses = [memory.data_ptr() for memory in self.memory]
        self.workspaces = [
            Workspace.over(addresses, rank, capacity, torch.device("cpu"), self.memory) for rank in range(size)
        ]

    def complete(
        self, terms: list[Tensor], residual: Tensor, norm: NormFormula | None, two_shots: bool
    ) -> list[tuple[Tensor | None, Tensor]]:
        """One call, on every rank."""
        results = [
            (None if norm is None else torch.full_like(residual, torch.nan), torch.full_like(residual, torch.nan))
            for _ in terms
        ]
        for part in (triton.COPY, triton.SUM, triton.COLLECT, triton.TAKE_TURNS):
            for term, workspace, (normed, total) in zip(terms, self.workspaces, results, strict=True):
                triton.launch(term, workspace, residual, norm, normed, total, part.value, two_shots)
        return results


@pytest.mark.parametrize("two_shots", [False, True])
@settings(deadline=None, max_examples=6)
@given(
    dtype=st.sampled_from(DTYPES),
    size=st.integers(1, 4),
    rows=st.integers(1, 8),
    hidden=st.integers(1, 70),
    kind=st.sampled_from([None, *KINDS]),
    apart=st.booleans(),
)
@example(dtype=torch.bfloat16, size=3, rows=14, hidden=64, kind="rms", apart=True)
@example(dtype=torch.float16, size=2, rows=1, hidden=1, kind="layer", apart=False)
def test_it_is_the_definition_call_after_call(
    two_shots: bool, dtype: torch.dtype, size: int, rows: int, hidden: int, kind: str | None, apart: bool
):
    ranks = Ranks(size, rows, hidden, dtype)
    norm = None if kind is None else formula(kind, hidden, dtype)
    for call in range(2):
        terms = [draw(rows, hidden, dtype=dtype, seed=10 * call + rank) for rank in range(size)]
        residual = draw(rows, hidden, dtype=dtype, seed=10 * call + 9)
        if apart:
            terms, residual = [strided(term) for term in terms], strided(residual)
        before = [term.clone() for term in terms]
        results = ranks.complete(terms, residual, norm, two_shots)
        _, wanted = naive.finish(terms, residual, norm)
        unrounded = sum((term.float() for term in terms[1:]), terms[0].float()) + residual.float()
        for normed, total in results:
            assert torch.equal(total, wanted)
            assert norm is None if normed is None else norm is not None and is_norm(normed, unrounded, norm)
            assert normed is None or torch.equal(normed, results[0][0])  # type: ignore[arg-type]
        assert all(map(torch.equal, terms, before))


def test_a_sum_of_negative_zeros_keeps_its_sign():
    ranks = Ranks(2, 1, 8, torch.float32)
    zeros = torch.full((1, 8), -0.0)
    for _, total in ranks.complete([zeros, zeros], zeros, None, two_shots=False):
        assert total.signbit().all()


def test_calls_in_turn_use_the_slots_in_turn():
    """What one call has read may still be read by a slower rank while the next one is under way."""
    ranks = Ranks(2, 2, 8, torch.float32)
    slot = num_bytes(ranks.workspaces[0].capacity, 0) // 2

    def slots() -> list[bytes]:
        memory = ranks.memory[0].numpy()
        return [memory[:slot].tobytes(), memory[slot : 2 * slot].tobytes()]

    seen = [slots()]
    for call in range(4):
        terms = [draw(2, 8, dtype=torch.float32, seed=2 * call + rank) for rank in range(2)]
        ranks.complete(terms, terms[0], None, two_shots=True)
        seen.append(slots())
        assert [a == b for a, b in zip(seen[-2], seen[-1], strict=True)] == [call % 2 == 1, call % 2 == 0]


@pytest.mark.parametrize(
    ("rows", "hidden", "dtype", "residual_dtype", "width"),
    [
        (5, 8, torch.float32, torch.float32, 8),
        (4, 9, torch.float32, torch.float32, 9),
        (4, 8, torch.float64, torch.float64, 8),
        (4, 8, torch.float32, torch.bfloat16, 8),
        (4, 8, torch.float32, torch.float32, 7),
        (0, 8, torch.float32, torch.float32, 8),
        (1, triton.LONGEST + 1, torch.bfloat16, torch.bfloat16, triton.LONGEST + 1),
    ],
    ids=["rows", "width", "float64", "dtypes", "weight", "no rows", "long rows"],
)
def test_what_it_does_not_take_touches_nothing(
    rows: int, hidden: int, dtype: torch.dtype, residual_dtype: torch.dtype, width: int
):
    ranks = Ranks(2, 4, 8, torch.float32)
    term = torch.zeros(rows, hidden, dtype=dtype)
    residual, norm = term.to(residual_dtype), formula("rms", width, torch.float32)
    assert triton.all_reduce_add_norm(term, ranks.workspaces[0], residual, norm) is None
    assert all(bool((memory == 0xFF).all()) for memory in ranks.memory)
    assert not ranks.workspaces[0].turns.any()


def test_it_takes_what_fits():
    workspace = Ranks(2, 4, 8, torch.float32).workspaces[0]
    term = torch.zeros(4, 8)
    assert triton.takes(term, workspace, term, formula("rms", 8, torch.float32))
    assert triton.takes(term, workspace, term, None)


def test_a_group_has_no_workspace_until_it_is_made():
    class Transport:
        def rank(self) -> int:
            return 0

    group = NcclGroup(Transport(), [0, 1], 1.0)  # type: ignore[arg-type]
    assert workspace_of(group) is None
    fusions = install_triton_fusion(terminal_finalize=True)
    assert not fusions.serves(group) and fusions.terminal_finalize

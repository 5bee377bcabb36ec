"""Sums over ranks, bare and with a residual and a norm, through shared memory: against the definition, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from boundary import collectives
from boundary.collectives import Group, SharedGroup, ThreadGroup, record, sum_in_rank_order
from boundary.kernels.add_norm import add_norm
from boundary.kernels.all_reduce_add_norm import all_reduce_add_norm, cpu
from boundary.kernels.all_reduce_add_norm import naive as all_reduced
from boundary.kernels.norms import NormFormula
from boundary.kernels.quantization import Quantization
from boundary.kernels.reduce_scatter_add_norm import naive as scattered
from boundary.kernels.reduce_scatter_add_norm import reduce_scatter_add_norm
from tests.norms import KINDS
from tests.pool import Pools, World
from tests.worlds import run_world

from .test_add_norm import DTYPES, close, draw, formula, strided
from .worlds import NARROW, SharedThreads, kept_group

HIDDEN = [1, 8, 33, 250]


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[SharedThreads]:
    """Threads with a slot so narrow that most sums take several steps."""
    yield SharedThreads(request.param)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit-equal, but for what kind of NaN."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=15)
@given(rows=st.integers(0, 40), hidden=st.sampled_from(HIDDEN), data=st.data())
def test_sums_have_the_definitions_bits(ranks: SharedThreads, dtype: torch.dtype, rows: int, hidden: int, data):
    terms = [draw(rows, hidden, dtype=dtype, seed=rank) for rank in range(ranks.size)]
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), min_size=ranks.size - 1, max_size=ranks.size - 1)))
    counts = [end - start for start, end in zip([0, *cuts], [*cuts, rows], strict=True)]
    whole = sum_in_rank_order(terms)

    def rank_main(group: SharedGroup) -> None:
        term = strided(terms[group.rank]) if rows else terms[group.rank]
        total = group.all_reduce(term, "sum")
        part = group.reduce_scatter(term, counts, "part")
        start = sum(counts[: group.rank])
        assert torch.equal(total, whole)
        assert torch.equal(part, whole[start : start + counts[group.rank]])
        assert torch.equal(term, terms[group.rank]), "never in place"

    ranks.run(rank_main)


@pytest.mark.parametrize("kind", [*KINDS, None])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=8)
@given(rows=st.integers(0, 40), hidden=st.sampled_from(HIDDEN), data=st.data())
def test_a_fused_sum_is_the_definition(ranks: SharedThreads, dtype: torch.dtype, kind, rows: int, hidden: int, data):
    """Also where the slots are full of NaN from before, the residual's rows are apart, and ranks share the rows out."""
    terms = [draw(rows, hidden, dtype=dtype, seed=rank) for rank in range(ranks.size)]
    residual = draw(rows, hidden, dtype=dtype, seed=9)
    norm_of = None if kind is None else formula(kind, hidden, dtype)
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), min_size=ranks.size - 1, max_size=ranks.size - 1)))
    counts = [end - start for start, end in zip([0, *cuts], [*cuts, rows], strict=True)]

    def rank_main(group: SharedGroup) -> tuple[Tensor | None, Tensor]:
        group.all_reduce(torch.full((2 * NARROW,), torch.nan), "poison")
        term, start = terms[group.rank], sum(counts[: group.rank])
        apart = strided(residual) if rows else residual
        made = all_reduce_add_norm(term, group, apart, norm_of, "whole")
        if rows:
            assert cpu.sum_add_norm(term, group, apart, norm_of, None, "again") is not None, "declined"
        wanted = all_reduced.all_reduce_add_norm(term, group, residual, norm_of, "wanted")
        own = residual[start : start + counts[group.rank]]
        part = reduce_scatter_add_norm(term, counts, group, own, norm_of, "part")
        wanted_part = scattered.reduce_scatter_add_norm(term, counts, group, own, norm_of, "wanted part")
        for found, right in ((made, wanted), (part, wanted_part)):
            assert torch.equal(found[1], right[1]), "the sum has the definition's bits"
            if norm_of is None:
                assert found[0] is None
            else:
                assert found[0] is not None and right[0] is not None and close(found[0], right[0])
        assert torch.equal(apart, residual), "the residual is not written to"
        if made[0] is not None and part[0] is not None:
            assert torch.equal(part[0], made[0][start : start + counts[group.rank]])
        return made

    with mock.patch.object(collectives, "TWO_SHOTS", data.draw(st.sampled_from([1, 1 << 20]))):
        results = ranks.run(rank_main)
    for normed, total in results[1:]:
        assert torch.equal(total, results[0][1])
        assert normed is None or (results[0][0] is not None and torch.equal(normed, results[0][0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fused_or_one_after_the_other_gives_the_same_bits(ranks: SharedThreads, dtype: torch.dtype):
    """Where a sum is not rounded: so looking at one on the way changes nothing."""

    def rank_main(group: SharedGroup) -> None:
        for rows, hidden in ((1, 577), (19, 96), (64, 31)):
            term, residual = draw(rows, hidden, dtype=dtype, seed=group.rank), draw(rows, hidden, dtype=dtype, seed=9)
            for kind in KINDS:
                norm_of = formula(kind, hidden, dtype)
                fused = all_reduce_add_norm(term, group, residual, norm_of, "fused")
                apart = add_norm(group.all_reduce(term, "sum"), residual, norm_of)
                assert fused[0] is not None
                assert torch.equal(fused[0], apart[0]) and torch.equal(fused[1], apart[1])
                counts = [rows // group.size + (rank < rows % group.size) for rank in range(group.size)]
                own = residual.split(counts)[group.rank]
                fused = reduce_scatter_add_norm(term, counts, group, own, norm_of, "fused part")
                apart = add_norm(group.reduce_scatter(term, counts, "part"), own, norm_of)
                assert fused[0] is not None
                assert torch.equal(fused[0], apart[0]) and torch.equal(fused[1], apart[1])

    ranks.run(rank_main)
    run_world(ranks.size, rank_main)  # also where no memory is shared, and no pass does it all


FORMS = [Quantization(torch.int8), Quantization(torch.float8_e4m3fn), Quantization(torch.int8, torch.tensor(0.02))]


@pytest.mark.parametrize("form", FORMS, ids=["int8", "float8", "one scale"])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=8)
@given(rows=st.integers(0, 40), hidden=st.sampled_from(HIDDEN), kind=st.sampled_from(KINDS), data=st.data())
def test_a_quantized_sum_has_the_bits_of_the_unrounded_sum_quantized(
    ranks: SharedThreads, dtype: torch.dtype, form: Quantization, rows: int, hidden: int, kind: str, data
):
    """In one pass through shared memory, and in steps where none is shared; whatever part of it a rank keeps."""
    terms = [draw(rows, hidden, dtype=dtype, seed=rank) for rank in range(ranks.size)]
    residual = draw(rows, hidden, dtype=dtype, seed=9)
    norm_of = formula(kind, hidden, dtype)
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), min_size=ranks.size - 1, max_size=ranks.size - 1)))
    counts = [end - start for start, end in zip([0, *cuts], [*cuts, rows], strict=True)]
    unrounded = all_reduced.added(terms, residual)
    wanted = form.add_norm(unrounded, None, norm_of)[0]

    def rank_main(group: Group) -> None:
        term, start = terms[group.rank], sum(counts[: group.rank])
        own = slice(start, start + counts[group.rank])
        if rows and isinstance(group, SharedGroup):
            assert cpu.sum_add_norm(term, group, residual, norm_of, None, "taken", form) is not None, "declined"
            assert cpu.sum_add_norm(term, group, residual[own], norm_of, counts, "too", form) is not None, "declined"
        for grad in (False, True):
            term = term.clone().requires_grad_(grad)
            made = all_reduce_add_norm(term, group, residual, norm_of, "whole", form)
            part = reduce_scatter_add_norm(term, counts, group, residual[own], norm_of, "part", form)
            for (read, total), kept in ((made, slice(None)), (part, own)):
                assert isinstance(read, tuple) and len(read) == len(wanted)
                assert torch.equal(total, unrounded[kept].to(dtype)) and total.requires_grad == grad
                for found, right in zip(read, wanted, strict=True):
                    right = right[kept]
                    assert found.dtype == right.dtype and found.shape == right.shape and not found.requires_grad
                    assert torch.equal(found.view(torch.uint8), right.contiguous().view(torch.uint8))

    ranks.run(rank_main)
    run_world(ranks.size, rank_main)


def test_a_quantized_sum_can_be_written_to_in_any_mode():
    def rank_main(group: SharedGroup) -> None:
        with torch.inference_mode():
            term = draw(4, 6, dtype=torch.float32, seed=group.rank)
            read, _ = all_reduce_add_norm(term, group, term.clone(), formula("rms", 6, torch.float32), "k", FORMS[0])
        assert isinstance(read, tuple) and not any(one.is_inference() for one in read)

    SharedThreads(2).run(rank_main)


def test_the_gradient_of_a_quantized_sum_is_that_of_the_sum():
    def rank_main(group: SharedGroup) -> None:
        term = draw(4, 6, dtype=torch.float32, seed=group.rank).requires_grad_()
        residual = draw(2, 6, dtype=torch.float32, seed=8).requires_grad_()
        norm_of, weights = formula("rms", 6, torch.float32), draw(2, 6, dtype=torch.float32, seed=9)
        assert norm_of.weight is not None
        norm_of.weight.requires_grad_()
        _, total = reduce_scatter_add_norm(term, [2, 2], group, residual, norm_of, "k", FORMS[0])
        (total * weights).sum().backward()
        assert term.grad is not None and torch.equal(term.grad, torch.cat([weights, weights]))
        assert residual.grad is not None and torch.equal(residual.grad, weights)
        assert norm_of.weight.grad is None
        plain, own = term.detach(), residual.detach()
        _, total = reduce_scatter_add_norm(plain, [2, 2], group, own, norm_of, "weight", FORMS[0])
        assert not total.requires_grad, "the weight is that of a norm without a gradient"

    SharedThreads(2).run(rank_main)


def test_nans_and_infinities_of_any_rank_arrive(ranks: SharedThreads):
    def rank_main(group: SharedGroup) -> None:
        term = torch.zeros(4, 40, dtype=torch.bfloat16)
        term[group.rank % 4, 7] = torch.nan if group.rank % 2 else torch.inf
        residual = torch.ones_like(term)
        found = all_reduce_add_norm(term, group, residual, formula("rms", 40, torch.bfloat16), "found")
        wanted = all_reduced.all_reduce_add_norm(term, group, residual, formula("rms", 40, torch.bfloat16), "wanted")
        assert found[0] is not None and wanted[0] is not None
        assert same(found[1], wanted[1]) and same(found[0], wanted[0])

    ranks.run(rank_main)


def test_a_row_longer_than_a_slot_is_summed_by_steps_and_then_normalized(ranks: SharedThreads):
    """All ranks decline before anything is sent: one exchange is seen, that of the definition."""
    hidden = NARROW

    def rank_main(group: SharedGroup) -> int:
        term, residual = draw(2, hidden, dtype=torch.float32, seed=group.rank), torch.ones(2, hidden)
        with record() as events:
            declined = cpu.sum_add_norm(term, group, residual, None, None, "declines")
            own = [event for event in events if event.rank == group.rank]
        assert declined is None and not own
        found = all_reduce_add_norm(term, group, residual, None, "whole")
        assert torch.equal(found[1], group.all_reduce(term, "sum") + residual)
        return 1

    ranks.run(rank_main)


class Hollow(Tensor):
    """A stand-in for a tensor, with no memory."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Hollow:
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        plain = [torch.zeros(one.shape, dtype=one.dtype) if isinstance(one, Hollow) else one for one in args]
        return function(*plain, **(kwargs or {}))


def test_a_tensor_without_memory_is_not_sent():
    def rank_main(group: SharedGroup) -> None:
        with pytest.raises(ValueError, match="without memory"):
            group.all_reduce(Hollow(torch.ones(2, 8)), "hollow")

    SharedThreads(2).run(rank_main)


def test_what_is_declined_touches_nothing():
    group = ThreadGroup.create((0, 1))[0]
    term = torch.ones(2, 8)
    with record() as events:
        assert cpu.sum_add_norm(term, group, term, None, None, "threads") is None
    shared = SharedThreads(2)

    def rank_main(group: SharedGroup) -> None:
        assert cpu.sum_add_norm(term.int(), group, term.int(), None, None, "integers") is None
        assert cpu.sum_add_norm(term, group, term.double(), None, None, "two dtypes") is None
        assert cpu.sum_add_norm(term[:0], group, term[:0], None, None, "no rows") is None
        assert cpu.sum_add_norm(term, group, term, formula("rms", 7, torch.float32), None, "another width") is None

        with pytest.raises(ValueError, match="do not make up"):
            group.reduce_scatter(term, [3, -1], "a negative share")
        with pytest.raises(ValueError, match="does not go onto a residual"):
            group.sum_add_norm(term, torch.ones(2, 4), None, key="narrow")
        with pytest.raises(ValueError, match="does not go onto a residual"):
            group.sum_add_norm(term, term.double(), None, key="another dtype")

    with record() as events:
        shared.run(rank_main)
    assert not events


def test_a_scattered_sum_refuses_rows_that_do_not_fit():
    group = ThreadGroup.create((0, 1))[0]
    with pytest.raises(ValueError, match="do not make up"):
        reduce_scatter_add_norm(torch.ones(3, 2), [1, 1], group, torch.ones(1, 2), None, "k")
    with pytest.raises(ValueError, match="do not make up"):
        reduce_scatter_add_norm(torch.ones(4, 2), [5, -1], group, torch.ones(5, 2), None, "k")
    with pytest.raises(ValueError, match="keeps 2 rows"):
        reduce_scatter_add_norm(torch.ones(3, 2), [2, 1], group, torch.ones(3, 2), None, "k")


def test_events_are_those_of_every_other_group(ranks: SharedThreads):
    def rank_main(group: Group) -> list[tuple[str, int, str]]:
        counts = [3, 0, 1, 2][: group.size]
        term = draw(sum(counts), 5, dtype=torch.float32)
        residual = torch.ones(counts[group.rank], 5)
        with record() as events:
            group.all_reduce(term, "a")
            group.reduce_scatter(term, counts, "b")
            all_reduce_add_norm(term, group, term, None, "c")
            reduce_scatter_add_norm(term, counts, group, residual, None, "d")
        return [(event.op, event.nbytes, event.key) for event in events if event.rank == group.rank]

    assert ranks.run(rank_main) == run_world(ranks.size, rank_main)


@pytest.mark.parametrize("kind", ["rms", None])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_sum_in_two_shots_is_one_all_reduce_of_fewer_bytes(monkeypatch, kind: str | None, rows: int):
    def rank_main(group: SharedGroup) -> tuple[int, list[Tensor | None]]:
        term, residual = draw(rows, 40, dtype=torch.float32, seed=group.rank), torch.ones(rows, 40)
        norm_of = None if kind is None else formula(kind, 40, torch.float32)
        with record() as events:
            made = all_reduce_add_norm(term, group, residual, norm_of, "k")
        (event,) = [event for event in events if event.rank == group.rank]
        assert event.op == "all_reduce" and event.key == "k"
        return event.nbytes, list(made)

    ranks = SharedThreads(4)
    at_once = ranks.run(rank_main)
    monkeypatch.setattr(collectives, "TWO_SHOTS", 1)
    shared_out = ranks.run(rank_main)
    for (_, wanted), (_, found) in zip(at_once, shared_out, strict=True):
        for a, b in zip(wanted, found, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    results = 1 if kind is None else 2
    # What all ranks send: the rows that others keep, and their own results to all others; and that is received.
    assert sum(nbytes for nbytes, _ in shared_out) == 2 * (3 + 3 * results) * rows * 40 * 4
    assert sum(nbytes for nbytes, _ in at_once) == 2 * 4 * 3 * rows * 40 * 4


# Gradients: every rank computes the same loss.


def loss_of(results: tuple[Tensor | None, Tensor], weights: Tensor) -> Tensor:
    normed, total = results
    assert normed is not None
    return (normed * weights).sum() + (total.sin() * weights).sum()


@pytest.mark.parametrize("kind", ["gemma", "layer"])
@pytest.mark.parametrize("counts", [None, [3, 1], [0, 4]])
def test_gradients_equal_one_process(kind: str, counts: list[int] | None):
    rows, hidden = 4, 6
    terms = [draw(rows, hidden, dtype=torch.float64, seed=rank) for rank in range(2)]
    residual, weights = (draw(rows, hidden, dtype=torch.float64, seed=seed) for seed in (8, 9))
    norm_of = formula(kind, hidden, torch.float64)
    parameters = [p.clone().requires_grad_() for p in (norm_of.weight, norm_of.bias) if p is not None]
    alone = NormFormula(norm_of.kind, parameters[0], norm_of.eps, parameters[-1] if norm_of.bias is not None else None,
                        norm_of.offset)  # fmt: skip
    inputs = [terms[0].clone().requires_grad_(), residual.clone().requires_grad_()]
    loss_of(add_norm(inputs[0] + terms[1], inputs[1], alone), weights).backward()

    def rank_main(group: SharedGroup) -> None:
        leaves = [p.detach().clone().requires_grad_() for p in parameters]
        own_norm = NormFormula(norm_of.kind, leaves[0], norm_of.eps, leaves[-1] if norm_of.bias is not None else None,
                               norm_of.offset)  # fmt: skip
        term = terms[group.rank].clone().requires_grad_()
        start, end = (0, rows) if counts is None else (sum(counts[: group.rank]), sum(counts[: group.rank + 1]))
        own = residual[start:end].clone().requires_grad_()
        if counts is None:
            made = all_reduce_add_norm(term, group, own, own_norm, "fused")
        else:
            made = reduce_scatter_add_norm(term, counts, group, own, own_norm, "fused")
        loss_of(made, weights[start:end]).backward()
        assert term.grad is not None and own.grad is not None and inputs[0].grad is not None
        assert torch.allclose(term.grad, inputs[0].grad, rtol=1e-12)
        assert inputs[1].grad is not None and torch.allclose(own.grad, inputs[1].grad[start:end], rtol=1e-12)
        for leaf, parameter in zip(leaves, parameters, strict=True):
            assert leaf.grad is not None and parameter.grad is not None
            gradient = leaf.grad if counts is None else group.all_reduce(leaf.grad, "its own rows' share")
            assert torch.allclose(gradient, parameter.grad, rtol=1e-12)

    SharedThreads(2).run(rank_main)


@pytest.mark.parametrize("dtype", DTYPES)
def test_autograds_recording_changes_no_bit_of_a_fused_sum(dtype: torch.dtype):
    def rank_main(group: SharedGroup) -> None:
        term, residual = draw(5, 40, dtype=dtype, seed=group.rank), draw(5, 40, dtype=dtype, seed=7)
        norm_of = formula("rms", 40, dtype)
        plain = all_reduce_add_norm(term, group, residual, norm_of, "plain")
        recorded = all_reduce_add_norm(term.clone().requires_grad_(), group, residual, norm_of, "recorded")
        assert plain[0] is not None and recorded[0] is not None and recorded[0].requires_grad
        assert torch.equal(plain[0], recorded[0]) and torch.equal(plain[1], recorded[1])

    SharedThreads(2).run(rank_main)


# The same among processes, where the interleaving is the machine's.


def fused_on_processes(world: World, seed: int, window: int) -> list[Tensor]:
    group = kept_group(world, window)
    generator = torch.Generator().manual_seed(seed)
    made: list[Tensor] = []
    for _ in range(20):
        rows, hidden = (int(torch.randint(1, high, (), generator=generator)) for high in (70, 700))
        dtype = DTYPES[int(torch.randint(0, 4, (), generator=generator))]
        counts = [rows // group.size + (rank < rows % group.size) for rank in range(group.size)]
        term, residual = draw(rows, hidden, dtype=dtype, seed=group.rank), draw(rows, hidden, dtype=dtype, seed=9)
        norm_of = formula("gemma", hidden, dtype)
        fused = all_reduce_add_norm(term, group, residual, norm_of, "fused")
        own = residual[sum(counts[: group.rank]) :][: counts[group.rank]]
        part = reduce_scatter_add_norm(term, counts, group, own, norm_of, "part")
        for mine, whole in zip(part, fused, strict=True):
            assert mine is not None and whole is not None
            assert torch.equal(torch.cat(group.all_gather(mine, [(n, hidden) for n in counts], "parts")), whole)
        wanted = all_reduced.all_reduce_add_norm(term, group, residual, norm_of, "wanted")
        assert fused[0] is not None and wanted[0] is not None
        assert torch.equal(fused[1], wanted[1]) and close(fused[0], wanted[0])
        made += [fused[0], fused[1]]
    return made


@pytest.mark.parametrize("window", [NARROW, 1 << 19])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_processes_hold_the_same_bits_in_every_run(pools: Pools, size: int, window: int):
    run = partial(pools(size).run, fused_on_processes, 0, window)
    first = run()
    for results in [first, *(run() for _ in range(9))]:
        for rank in range(size):
            assert all(torch.equal(a, b) for a, b in zip(results[rank], first[0], strict=True))

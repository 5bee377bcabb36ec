"""Fusion providers: who is asked, in which order; and the rounding of the plain add and norm."""

from __future__ import annotations

import pytest
import torch
from stacks import reference
from stacks.decoders import Decoder
from stacks.worlds import batch_of, build, on_threads
from torch import nn

from boundary import HandoffOutput, PaddingMode, Topology, declare_attn, declare_ffn, get_forward, prepare
from boundary.collectives import record
from boundary.fusions import FusedAttentionInput, FusedMlpInput
from boundary.fusions.all_reduce import ReferenceProvider, all_reduce_add_norm, fused_scatter
from boundary.layout import ATTN_DP, ATTN_TP_SCATTER, FULL, Layout, SumGroup
from boundary.output import Contribution, OutputTransform, Owed
from boundary.residual import LayerResidual
from boundary.residual import batch as residual_batch
from boundary.residual.add_norm import AddNormRead, AddUpdate, GemmaRMSNorm, RMSNorm, add_norm

from .checks import enter, layer, norm, on_ranks, ops, rows_of, run_ffn, term_of
from .test_decoders import CONFIG, DENSE, MOE, embedded, expected, sparse_of


class Provider:
    """Candidates that note when they are tried, and decline or run as told."""

    def __init__(self, order, **answers):
        self.order, self.answers = order, answers

    def _candidate(self, kind, name, group):
        def run(value, over, residual, layernorm):
            self.order.append(name)
            if self.answers.get(name, False):
                return all_reduce_add_norm(value, over, residual, layernorm)
            return None

        return kind(group, run)

    def attention_input(self, plan):
        return [self._candidate(FusedAttentionInput, name, SumGroup.TP) for name in ("first", "second")]

    def ffn_input(self, plan):
        return [
            self._candidate(FusedMlpInput, "other group", SumGroup.TP),
            self._candidate(FusedMlpInput, "first", SumGroup.ATTN_TP),
            self._candidate(FusedMlpInput, "second", SumGroup.ATTN_TP),
        ]

    def can_defer_finalize(self, plan, batch):
        return False

    def can_defer_all_reduce(self, plan, batch):
        return True


@pytest.mark.parametrize("answers, tried", [
    ({"first": True}, ["first"]),
    ({"second": True}, ["first", "second"]),
    ({}, ["first", "second"]),
])  # fmt: skip
def test_candidates_are_tried_in_order_for_their_own_group(answers, tried):
    """The result is the same whoever completes, and the sum runs once."""
    orders = [[], []]

    def rank_main(parallel, batch, make):
        provider = Provider(orders[parallel.rank], **answers)
        attn, ffn = layer(make, options={"fusions": provider})
        enter(attn, batch, rows_of("x", 4))
        prepared = ffn.prepare(attn.finish(term_of(rows_of("a", 4), parallel.attention_tp), batch), batch)
        total = rows_of("x", 4) + rows_of("a", 4)
        assert torch.equal(batch.residual_stream.residual.tensor, total)
        return torch.equal(prepared, norm("ffn")(total))

    results, events = on_ranks(rank_main, attention_tp=2)
    assert all(results) and orders == [tried, tried] and ops(events) == ["all_reduce"]


def test_a_provider_comes_before_the_built_in_fusion_at_attentions_input_too():
    orders = [[], []]

    def rank_main(parallel, batch, make):
        provider = Provider(orders[parallel.rank], second=True)
        attn, ffn = layer(make, options={"fusions": provider})
        second, _ = layer(make, previous=declare_ffn(), options={"fusions": provider})
        enter(attn, batch, rows_of("x", 4))
        ffn.prepare(attn.finish(term_of(rows_of("a", 4), parallel.attention_tp), batch), batch)
        orders[parallel.rank].clear()
        handle = run_ffn(ffn, batch, rows_of("out", 4), parallel.tp)
        prepared = second.prepare(handle, batch)
        total = rows_of("x", 4) + rows_of("a", 4) + rows_of("out", 4)
        return torch.equal(prepared, norm("attn")(total))

    results, _ = on_ranks(rank_main, attention_tp=2, runtime={"allreduce_fusion": True})
    assert all(results) and orders == [["first", "second"]] * 2


def test_an_addition_or_a_capture_bypasses_fused_candidates():
    orders = [[], []]

    def rank_main(parallel, batch, make):
        provider = Provider(orders[parallel.rank], first=True)
        second, _ = layer(make, previous=declare_ffn(), options={"fusions": provider})
        for option in (
            {"post_residual_addition": rows_of("extra", 4)},
            {"capture_output": lambda *a, **k: None},
        ):
            attn, ffn = layer(make)
            enter(attn, batch, rows_of("x", 4))
            ffn.prepare(attn.finish(term_of(rows_of("a", 4), parallel.attention_tp), batch), batch)
            second.prepare(run_ffn(ffn, batch, rows_of("out", 4), parallel.tp), batch, **option)
        return True

    on_ranks(rank_main, attention_tp=2)
    assert orders == [[], []]


def test_fused_candidates_are_not_offered_where_the_read_or_the_update_is_not_plain():
    def rank_main(parallel, batch, make):
        read = AddNormRead(keeps_residual=False)
        (stage,) = make((declare_ffn(read=read), norm(), {"fusions": Provider([])}), previous=declare_attn())
        return stage.plan.select(batch).entry.candidates

    assert on_ranks(rank_main, attention_tp=2)[0] == [(), ()]


def test_the_built_in_fusion_declines_mixed_dtypes_and_too_many_rows():
    def rank_main(parallel, batch, make):
        over = parallel.bound_sum(SumGroup.TP)
        half, full = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(2, 8)
        mixed = RMSNorm(8)
        assert all_reduce_add_norm(half, over, half, mixed) is None
        assert all_reduce_add_norm(full, over, half, mixed) is None
        assert all_reduce_add_norm(torch.ones(2049, 8), over, torch.ones(2049, 8), mixed) is None
        assert all_reduce_add_norm(torch.ones(0, 8), over, torch.ones(0, 8), mixed) is None
        assert all_reduce_add_norm(full, over, full, mixed) is not None
        return True

    results, events = on_ranks(rank_main, attention_tp=2)
    assert all(results) and ops(events) == ["all_reduce"]


class Scattering(Provider):
    """The same for sums that a reduce-scatter completes."""

    def _candidate(self, kind, name, group):
        def scatter(term, over, counts, residual, layernorm):
            self.order.append((name, counts))
            return fused_scatter(term, over, counts, residual, layernorm) if self.answers.get(name, False) else None

        return kind(group, super()._candidate(kind, name, group).run, scatter=scatter)


def into_the_next_layer(make, batch, parallel, provider, *, transform=None, **prepare):
    """Through a layer to the next attention's input: the producer's term, what was prepared, and what had to be."""
    options = {} if provider is None else {"fusions": provider}
    decl = declare_ffn(transform=transform)
    attn, ffn = layer(make, ffn=decl)
    second, _ = layer(make, previous=decl, options=options)
    own, rows = batch.rows.cell(parallel.at)[0], batch.rows.model_rows
    x, a = (rows_of(f"{name}{parallel.at.dp}", own) for name in "xa")
    enter(attn, batch, x)
    whole = rows_of("out", len(ffn.prepare(attn.finish(term_of(a, parallel.attention_tp), batch), batch)))
    term = term_of(whole, parallel.tp)
    with ffn.exit(batch) as output:
        assert output.mlp_reduce_scatter and get_forward().skips_reduction
    before, handle = term.clone(), output.finish(term)
    prepared = second.prepare(handle, batch, **prepare)
    assert torch.equal(term, before)
    mover = second.plan.runtime.mover
    added = mover.move(whole if transform is None else 2 * whole, FULL, rows, batch.rows)
    total = x + a + added + prepare.get("post_residual_addition", 0)
    assert torch.equal(batch.residual_stream.residual.tensor, total)
    return torch.equal(prepared, norm("attn")(total)) if own else prepared.shape == (0, 8)


@pytest.mark.parametrize("tokens", [(3, 1), (2, 2), (4, 0), (0, 1)])
@pytest.mark.parametrize("answers, tried", [
    ({"first": True}, ["first"]),
    ({"second": True}, ["first", "second"]),
    ({}, ["first", "second"]),
])  # fmt: skip
def test_a_reduce_scatter_is_offered_with_the_rows_that_every_rank_keeps(answers, tried, tokens):
    """Also on ranks that keep none. Whoever completes, the result and what is sent are the same."""
    orders, kinds = [[], []], []
    for fused in (True, False):

        def rank_main(parallel, batch, make, fused=fused):
            provider = Scattering(orders[parallel.rank], **answers) if fused else None
            return into_the_next_layer(make, batch, parallel, provider)

        results, events = on_ranks(
            rank_main, tokens=tokens, padding=PaddingMode.SUM_LEN, attention_dp=2, runtime={"boundary_reduction": "rsv"}
        )
        assert all(results) and ops(events) == ["all_gather", "reduce_scatter"]
        kinds.append(sorted((event.rank, event.op, event.nbytes) for event in events))
    assert orders == [[(name, list(tokens)) for name in tried]] * 2 and kinds[0] == kinds[1]


@pytest.mark.parametrize("what", ["an addition", "a capture", "padding", "a gather after it"])
def test_a_reduce_scatter_is_not_offered_with(what):
    orders = [[] for _ in range(4)]

    def rank_main(parallel, batch, make):
        prepare = {}
        if what == "an addition":
            prepare["post_residual_addition"] = rows_of("extra", 4)
        if what == "a capture":
            prepare["capture_output"] = lambda value, owned=False: None
        provider = Scattering(orders[parallel.rank], first=True)
        return into_the_next_layer(make, batch, parallel, provider, **prepare)

    results, events = on_ranks(
        rank_main, tokens=(3 if what == "padding" else 4, 4), padding=PaddingMode.MAX_LEN, attention_dp=2,
        attention_tp=2 if what == "a gather after it" else 1, runtime={"boundary_reduction": "rs"},
    )  # fmt: skip
    assert all(results) and orders == [[]] * 4 and "reduce_scatter" in ops(events)


@pytest.mark.parametrize("residual_on, asked", [("slices", False), ("attention's", True), ("all", True)])
def test_a_reduce_scatter_is_not_offered_where_the_residual_would_be_gathered(residual_on, asked):
    """A residual on slices that is read on attention's rows; one that is there, or is cut to them, is none such."""
    orders = [[], []]

    def rank_main(parallel, batch, make):
        stage, _ = layer(
            make, previous=declare_ffn(), options={"fusions": Scattering(orders[parallel.rank], first=True)}
        )
        entry, mover = stage.plan.select(batch).entry, stage.plan.runtime.mover
        attention = entry.edge.input.read_rows
        assert attention == Layout(frozenset({ATTN_DP}))
        over = parallel.bound_sum(SumGroup.TP)
        owed = Owed(FULL, attention, over, scatter=True)
        term = term_of(rows_of("out", 4), parallel.tp)
        contribution = Contribution(term, owed, attention, AddUpdate(), mover, batch.rows)
        slices = Layout(frozenset({ATTN_DP, ATTN_TP_SCATTER}))
        rows = {"slices": slices, "attention's": attention, "all": FULL}[residual_on]
        residual = LayerResidual(rows_of("x", 4 if rows == FULL else 2), rows)
        made = prepare._fused(entry, contribution, residual, batch)
        assert (made is None) != asked and (contribution.value is term) != asked
        return True

    results, events = on_ranks(rank_main, tokens=(2, 2), padding=PaddingMode.SUM_LEN, attention_dp=2)
    assert all(results) and ops(events) == (["reduce_scatter"] if asked else [])
    assert orders == [[("first", [2, 2])] if asked else []] * 2


def test_a_reduce_scatter_is_not_offered_where_rows_are_still_cut_after_it():
    """It was selected to land on attention's rows, and the read is on slices of them."""

    def rank_main(parallel, batch, make):
        stage, _ = layer(make)
        attention, slices = Layout(frozenset({ATTN_DP})), Layout(frozenset({ATTN_DP, ATTN_TP_SCATTER}))
        mover, over = stage.plan.runtime.mover, parallel.bound_sum(SumGroup.TP)
        assert mover.shares(over, FULL, slices, batch.rows) == [1, 1, 1, 1]
        for lands, counts in ((attention, None), (slices, [1, 1, 1, 1])):
            owed = Owed(FULL, lands, over, scatter=True)
            contribution = Contribution(torch.ones(4, 8), owed, lands, AddUpdate(), mover, batch.rows)
            assert prepare._shares(contribution, owed, slices) == counts
        return True

    results, _ = on_ranks(rank_main, tokens=(2, 2), padding=PaddingMode.SUM_LEN, attention_dp=2, attention_tp=2)
    assert all(results)


@pytest.mark.parametrize("takes", [True, False])
def test_a_transform_runs_before_the_reduce_scatter_and_once(takes):
    order = [[], []]

    def rank_main(parallel, batch, make):
        def double(value):
            order[parallel.rank].append("transform")
            return 2 * value

        provider = Scattering(order[parallel.rank], second=takes)
        transform = OutputTransform(double, before_reduce_scatter=True)
        return into_the_next_layer(make, batch, parallel, provider, transform=transform)

    results, _ = on_ranks(
        rank_main, tokens=(3, 1), padding=PaddingMode.SUM_LEN, attention_dp=2, runtime={"boundary_reduction": "rsv"}
    )
    assert all(results) and order == [["transform", ("first", [3, 1]), ("second", [3, 1])]] * 2


@pytest.mark.parametrize("rows, counts", [(5, [3, 2]), (1, [1, 0]), (0, None)])
def test_a_reduce_scatter_of_attentions_sum_onto_slices_is_offered(rows, counts):
    """The residual is cut to the slices first."""
    orders = [[], []]

    def rank_main(parallel, batch, make):
        provider = Scattering(orders[parallel.rank], first=True)
        attn, ffn = layer(make, ffn=declare_ffn(sparse=True), options={"fusions": provider})
        enter(attn, batch, rows_of("x", rows))
        prepared = ffn.prepare(attn.finish(term_of(rows_of("a", rows), parallel.attention_tp), batch), batch)
        total = (rows_of("x", rows) + rows_of("a", rows)).tensor_split(2)[parallel.rank]
        assert torch.equal(batch.residual_stream.residual.tensor, total)
        return torch.equal(prepared, norm("ffn")(total))

    results, events = on_ranks(rank_main, tokens=(rows,), attention_tp=2, runtime={"a2a_backend": "all_to_all"})
    assert all(results) and orders == [[("first", counts)] if counts else []] * 2
    assert ops(events) == (["reduce_scatter"] if counts else [])


def test_a_fused_reduce_scatter_declines_mixed_dtypes_and_norms_that_take_the_unrounded_sum():
    class Subclass(RMSNorm):
        pass

    def rank_main(parallel, batch, make):
        over, own = parallel.bound_sum(SumGroup.TP), 2 * (parallel.rank == 0)
        half, full = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(2, 8)
        assert fused_scatter(half, over, [2, 0], half[:own], RMSNorm(8)) is None
        assert fused_scatter(full, over, [2, 0], half[:own], RMSNorm(8)) is None
        assert fused_scatter(full, over, [2, 0], full[:own], Subclass(8)) is None
        assert fused_scatter(full[:0], over, [0, 0], full[:0], RMSNorm(8)) is None
        assert fused_scatter(full, over, [2, 0], full[:own], RMSNorm(8)) is not None
        return True

    results, events = on_ranks(rank_main, attention_tp=2)
    assert all(results) and ops(events) == ["reduce_scatter"]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_deferred_finalize_flows_through_a_decoder(terminal):
    """The reference provider's handoffs reach the next attention's input, and the final norm's service."""
    pattern = MOE * 2
    ran = {}

    def rank_main(parallel):
        provider = ReferenceProvider(finalizes=True, terminal_finalize=terminal)
        model = build(parallel, lambda: Decoder(sparse_of(pattern), fusions=provider))
        ids, batch = batch_of(parallel, [4])
        if terminal:
            model.norm = GemmaRMSNorm(CONFIG.hidden).double()
            model.norm.weight = nn.Parameter(reference.weight("model.norm", CONFIG.hidden))
        out = model(ids, batch, handoff_norm=provider if terminal else None)
        ran[parallel.rank] = provider.ran
        return out

    with record() as events:
        results = on_threads(Topology(attention_tp=2, moe_ep=2), rank_main)
    residual = reference.stack(pattern, CONFIG, embedded(0, 4))[1][-1]
    for rank, out in enumerate(results):
        if terminal:
            final = GemmaRMSNorm(CONFIG.hidden).double()
            final.weight = nn.Parameter(reference.weight("model.norm", CONFIG.hidden))
            assert torch.equal(out, final(residual))
        else:
            assert torch.equal(out, expected(pattern, 0, 4))
        assert ("terminal finalize" in ran[rank]) is terminal
        assert "attention finalize" in ran[rank] and "ffn all-reduce" in ran[rank]
    sums = [event for event in events if event.op == "all_reduce" and event.rank == 0]
    assert len(sums) == 4


def test_the_final_norm_completes_a_handoff_without_a_service_and_rejects_a_capture_with_one():
    def rank_main(parallel):
        outs = []
        for capture in (None, lambda value, owned=False: None):
            provider = ReferenceProvider(finalizes=True, terminal_finalize=True)
            model = build(parallel, lambda provider=provider: Decoder([True], fusions=provider))
            ids, batch = batch_of(parallel, [4])
            outs.append(model(ids, batch, capture=capture))
            ids, batch = batch_of(parallel, [4])
            if capture is not None:
                with pytest.raises(ValueError, match="no residual to capture"):
                    model(ids, batch, capture=capture, handoff_norm=provider)
        return outs

    for outs in on_threads(Topology(attention_tp=2), rank_main):
        assert all(torch.equal(out, expected(MOE, 0, 4)) for out in outs)


def test_a_service_for_the_final_norm_needs_a_gemma_weight():
    class Handed(HandoffOutput):
        def complete(self):
            return rows_of("out", 4)

    class Finalizing(ReferenceProvider):
        def can_defer_finalize(self, plan, forward_batch):
            return True

    def rank_main(parallel, batch, make):
        provider = Finalizing(terminal_finalize=True)
        attn, ffn = layer(make, ffn=declare_ffn(sparse=True), terminal=True, options={"fusions": provider})
        enter(attn, batch, rows_of("x", 4))
        ffn.prepare(attn.finish(term_of(rows_of("a", 4), parallel.attention_tp), batch), batch)
        with ffn.exit(batch) as output:
            assert output.defer_moe_finalize
        handle = output.finish(Handed())
        with pytest.raises(TypeError, match="gemma_weight"):
            residual_batch.norm(handle, batch, norm(), handoff_norm=provider)
        return True

    assert all(on_ranks(rank_main, attention_tp=2)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("make", [RMSNorm, GemmaRMSNorm, lambda size: nn.RMSNorm(size, eps=1e-6)])
def test_the_plain_pair_rounds_the_residual_once_and_norms_the_unrounded_sum(make, dtype):
    generator = torch.Generator().manual_seed(0)
    layernorm = make(64).to(dtype)
    layernorm.weight = nn.Parameter(torch.randn(64, generator=generator).to(dtype))
    x, r, extra = (torch.randn(33, 64, generator=generator).to(dtype) for _ in range(3))
    for addition in (None, extra):
        exact = r.float() + x.float() + (0 if addition is None else addition.float())
        gain = layernorm.weight.double() + (1 if isinstance(layernorm, GemmaRMSNorm) else 0)
        want = exact.double() * torch.rsqrt(exact.double().square().mean(-1, keepdim=True) + 1e-6) * gain
        normed, total = add_norm(x, r, layernorm, addition)
        assert torch.equal(total, exact.to(dtype))
        # One rounding: within half a unit in the last place, and a float32 computation's error.
        error = (normed.double() - want).abs()
        bound = want.abs() * torch.finfo(dtype).eps / 2 * 1.02 + 1e-5 * (dtype == torch.float32) + 1e-7
        assert (error <= bound).all()
    if dtype == torch.bfloat16:
        twice = layernorm((x.float() + r.float()).to(dtype))
        assert not torch.equal(twice, add_norm(x, r, layernorm)[0])


def test_a_norm_of_unknown_formula_gets_the_rounded_sum():
    seen = []

    def black_box(value):
        seen.append(value)
        return value

    x = torch.full((1, 2), 1.0, dtype=torch.bfloat16)
    r = torch.full((1, 2), 2.0**-9, dtype=torch.bfloat16)
    add_norm(x, r, black_box)
    assert seen[0].dtype == torch.bfloat16 and torch.equal(seen[0], x)


@pytest.mark.parametrize("make", [RMSNorm, GemmaRMSNorm])
def test_each_norm_means_the_same_alone_and_with_an_addition(make):
    layernorm = make(16)
    layernorm.weight = nn.Parameter(torch.linspace(-1, 1, 16))
    value = torch.randn(3, 16)
    alone = AddNormRead().read(LayerResidual(value, FULL), layernorm)[0]
    added = add_norm(torch.zeros_like(value), value, layernorm)[0]
    assert torch.equal(alone, added)


def test_norms_do_not_run_without_rows():
    def fails(value):
        raise AssertionError("ran")

    empty = torch.empty(0, 4)
    read = AddNormRead()
    residual = LayerResidual(empty, FULL)
    assert read.read(residual, fails)[0].shape == (0, 4)
    assert read.update_and_read(AddUpdate(), empty, residual, fails)[0].shape == (0, 4)


def test_a_norm_that_no_kernel_knows_does_not_run_on_a_rank_that_keeps_no_rows():
    def rank_main(parallel, batch, make):
        kept, calls = [0, 3][parallel.rank], []
        residual = torch.ones(kept, 8, requires_grad=True)

        def twice(value):
            calls.append(value.shape[0])
            return 2 * value

        with torch.enable_grad():
            over = parallel.bound_sum(SumGroup.TP)
            made = fused_scatter(torch.ones(3, 8), over, [0, 3], residual, twice)
        assert made is not None
        normed, total = made
        assert torch.equal(total, torch.full((kept, 8), 3.0)) and torch.equal(normed, 2 * total)
        assert normed.requires_grad
        return calls

    assert on_ranks(rank_main, attention_tp=2)[0] == [[], [3]]


def test_every_rank_sees_one_sequence_when_fusions_run():
    def rank_main(parallel):
        model = build(
            parallel,
            lambda: Decoder(sparse_of(DENSE + MOE), fusions=ReferenceProvider()),
            allreduce_fusion=True,
        )
        ids, batch = batch_of(parallel, [3, 0][: parallel.topology.attention_dp])
        return model(ids, batch)

    from .test_decoders import assert_same_sequence

    for topology in (Topology(attention_tp=2), Topology(attention_dp=2), Topology(2, 1, 2)):
        with record() as events:
            results = on_threads(topology, rank_main)
        assert_same_sequence(events)
        assert torch.equal(results[0][:3], expected(DENSE + MOE, 0, 3))

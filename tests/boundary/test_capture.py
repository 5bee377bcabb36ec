"""Capturing the residual: the right value and rows, in storage that nobody rewrites, at no extra sum."""

from __future__ import annotations

import pytest
import torch
from stacks import reference
from stacks.decoders import Decoder
from stacks.weights import Config, GridNorm
from stacks.worlds import batch_of, build, on_threads

from boundary import PaddingMode, Topology, declare_attn, declare_ffn
from boundary.collectives import record
from boundary.residual import batch as residual_batch
from boundary.residual.access import AuxHiddenStateList

from .checks import enter, layer, norm, on_ranks, ops, rows_of, run_ffn, term_of
from .test_decoders import CONFIG, DENSE, MOE, embedded, sparse_of


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("topology", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_captures_equal_the_residuals_of_one_process(topology, fusion):
    """Every layer's input and the final residual; the sums that run are those of the run without captures."""
    dp, tp = topology
    tokens, pattern = [5, 2][:dp], DENSE + MOE + DENSE
    counts = {}
    for captures in (False, True):

        def rank_main(parallel, captures=captures):
            model = build(parallel, lambda: Decoder(sparse_of(pattern)), allreduce_fusion=fusion)
            ids, batch = batch_of(parallel, tokens, PaddingMode.SUM_LEN)
            collector = AuxHiddenStateList()
            model(ids, batch, capture=collector.capture if captures else None)
            return collector

        with record() as events:
            results = on_threads(Topology(attention_dp=dp, attention_tp=tp), rank_main)
        sums = [event for event in events if event.op in ("all_reduce", "reduce_scatter")]
        counts[captures] = len(sums)
    assert counts[True] == counts[False]
    for rank, collector in enumerate(results):
        count = tokens[rank // tp]
        want = reference.stack(pattern, CONFIG, embedded(rank // tp, count))[1]
        wanted = [want[0], want[2], want[4], want[6]]
        assert len(collector) == len(wanted)
        for value, truth in zip(collector, wanted, strict=True):
            assert torch.equal(value[:count], truth)


def test_a_capture_is_taken_after_the_fused_update_and_read():
    order = []

    class Watching(GridNorm):
        def forward(self, hidden_states):
            order.append("norm")
            return super().forward(hidden_states)

    def rank_main(parallel, batch, make):
        attn, ffn = layer(make)
        (second,) = make(
            (type(attn.declaration)(**vars(attn.declaration) | {"previous": None}), Watching("n", 8)),
            previous=declare_ffn(),
        )
        enter(attn, batch, rows_of("x", 4))
        ffn.prepare(attn.finish(rows_of("a", 4), batch), batch)
        handle = run_ffn(ffn, batch, rows_of("out", 4), parallel.tp)
        second.prepare(handle, batch, capture_output=lambda value, owned=False: order.append("capture"))
        return True

    on_ranks(rank_main)
    assert order == ["norm", "capture"]


def test_the_first_capture_is_the_raw_input_and_is_borrowed():
    def rank_main(parallel, batch, make):
        attn, _ = layer(make)
        seen = []
        residual_batch.start(batch)
        hidden = rows_of("x", 4).clone()
        attn.prepare(hidden, batch, capture_output=lambda value, owned=False: seen.append((value, owned)))
        assert seen[0][0] is hidden and seen[0][1] is False
        return True

    assert all(on_ranks(rank_main, attention_tp=2)[0])


def second_layer(make, batch, parallel, **kwargs):
    """A second attention whose pending input is `out` onto the residual `x + a`."""
    attn, ffn = layer(make, **kwargs)
    second, _ = layer(make, previous=declare_ffn(**({"sparse": True} if "ffn" in kwargs else {})))
    rows = batch.rows.cell(parallel.at)[0]
    enter(attn, batch, rows_of("x", rows))
    prepared = ffn.prepare(attn.finish(term_of(rows_of("a", rows), parallel.attention_tp), batch), batch)
    return second, run_ffn(ffn, batch, rows_of("out", len(prepared)), parallel.tp)


def test_with_an_addition_the_capture_holds_the_sum_before_it_and_owns_it():
    def rank_main(parallel, batch, make):
        second, handle = second_layer(make, batch, parallel)
        seen = []
        prepared = second.prepare(
            handle,
            batch,
            post_residual_addition=rows_of("extra", 4),
            capture_output=lambda value, owned=False: seen.append((value, owned)),
        )
        total = rows_of("x", 4) + rows_of("a", 4) + rows_of("out", 4)
        assert torch.equal(seen[0][0], total) and seen[0][1] is True
        return torch.equal(prepared, norm("attn")(total + rows_of("extra", 4)))

    assert all(on_ranks(rank_main, attention_tp=2)[0])


class Seen(AuxHiddenStateList):
    """Notes what it is given, and whether as its own."""

    def __init__(self):
        super().__init__()
        self.owned = []

    def capture(self, value, *, owned=False):
        self.owned.append(owned)
        super().capture(value, owned=owned)


def both(prepare, **options):
    """What each of the two captures of one `prepare` collects."""
    output, last = Seen(), Seen()
    prepared = prepare(capture_output=output.capture, captured_last_layer_outputs=last, **options)
    assert len(output) == len(last) == 1
    return prepared, output, last


@pytest.mark.parametrize("entry", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("scattered", [False, True])
def test_both_captures_hold_the_same_residual(scattered, adds, entry):
    """Before a post-residual addition, and at the entry the raw input; each on its own rows."""

    def rank_main(parallel, batch, make):
        extra = {"post_residual_addition": rows_of("extra", 4)} if adds else {}
        if entry:
            (second,) = make((declare_attn(gathers_tp_input=False), norm("attn")))
            residual_batch.start(batch)
            hidden, total = rows_of("x", 4), rows_of("x", 4)
        else:
            attn, ffn = layer(make)
            (second,) = make((declare_attn(gathers_tp_input=False), norm("attn")), previous=declare_ffn())
            enter(attn, batch, rows_of("x", 4))
            ffn.prepare(attn.finish(term_of(rows_of("a", 4), parallel.attention_tp), batch), batch)
            hidden = run_ffn(ffn, batch, rows_of("out", 4), parallel.tp)
            total = rows_of("x", 4) + rows_of("a", 4) + rows_of("out", 4)
        prepared, output, last = both(lambda **options: second.prepare(hidden, batch, **options), **extra)
        mine = total.tensor_split(2)[parallel.at.tp] if scattered and not entry else total
        assert torch.equal(output[0], mine) and torch.equal(last[0], total)
        # Gathered rows are the capture's own; at the entry it is the model's tensor.
        assert last.owned == [False if entry else scattered or adds]
        return torch.equal(prepared, norm("attn")(total + extra.get("post_residual_addition", 0)))

    variant = {"input_scattered": True} if scattered else {}
    assert all(on_ranks(rank_main, attention_tp=2, runtime=variant, batch_options=variant)[0])


@pytest.mark.parametrize("fusion", [False, True])
def test_a_capture_on_computes_rows_alone_leaves_the_fused_completion_on(fusion):
    def rank_main(parallel, batch, make):
        second, handle = second_layer(make, batch, parallel)
        collector = AuxHiddenStateList()
        second.prepare(handle, batch, captured_last_layer_outputs=collector)
        return torch.equal(collector[0], rows_of("x", 4) + rows_of("a", 4) + rows_of("out", 4))

    assert all(on_ranks(rank_main, attention_tp=2, runtime={"allreduce_fusion": fusion})[0])


@pytest.mark.parametrize("scattered", [False, True])
def test_both_captures_of_several_streams_are_hidden_states(scattered):
    """At the entry the input, later what the streams stand for."""
    from stacks.decoders import HyperConnectedDecoder

    variant = {"input_scattered": True} if scattered else {}

    def rank_main(parallel):
        model = build(parallel, lambda: HyperConnectedDecoder([False, False]), **variant)
        ids, batch = batch_of(parallel, [4], **variant)
        residual_batch.start(batch)
        (attn, ffn), (second, _) = model.boundaries
        attention, mlp = model.computes[0]
        embedded_ids = model.embed[ids]
        hidden, output, last = both(lambda **options: attn.prepare(embedded_ids, batch, **options))
        assert torch.equal(output[0], embedded_ids) and torch.equal(last[0], embedded_ids)
        hidden = ffn.prepare(attn.finish(attention(hidden), batch), batch)
        with ffn.exit(batch) as exit_:
            hidden = mlp(hidden)
        hidden = exit_.finish(hidden)
        _, output, last = both(lambda **options: second.prepare(hidden, batch, **options))
        # Of scattered rows the stream holds this rank's slice.
        mean = batch.residual_stream.residual.tensor.unflatten(1, (CONFIG.streams, -1)).mean(1)
        assert len(last[0]) == 4 and len(mean) == (2 if scattered else 4)
        start = 2 * parallel.at.tp if scattered else 0
        return torch.equal(output[0], mean) and torch.equal(last[0][start : start + len(mean)], mean)

    assert all(on_threads(Topology(attention_tp=2), rank_main))


def test_a_later_candidate_that_writes_the_residual_withdraws_the_certificate():
    """The first candidate may decline: the certificate speaks for whichever runs."""
    from boundary.fusions import FusedMlpInput
    from boundary.layout import SumGroup

    class Two:
        def attention_input(self, plan):
            return []

        def ffn_input(self, plan):
            def in_place(value, over, residual, layernorm):
                residual.add_(over.group.all_reduce(value, "sum"))
                return layernorm(residual), residual

            return [
                FusedMlpInput(SumGroup.ATTN_TP, lambda *_: None, leaves_residual=lambda rows: True),
                FusedMlpInput(SumGroup.ATTN_TP, in_place),
            ]

        def can_defer_finalize(self, plan, batch):
            return False

        def can_defer_all_reduce(self, plan, batch):
            return False

    def rank_main(parallel, batch, make):
        attn, ffn = layer(make, options={"fusions": Two()})
        residual_batch.start(batch)
        hidden = residual_batch.written(rows_of("x", 4).clone(), batch)
        collector = AuxHiddenStateList()
        attn.prepare(hidden, batch, capture_output=collector.capture)
        ffn.prepare(attn.finish(term_of(rows_of("a", 4), parallel.attention_tp), batch), batch)
        assert torch.equal(batch.residual_stream.residual.tensor, rows_of("x", 4) + rows_of("a", 4))
        return torch.equal(collector[0], rows_of("x", 4))

    assert all(on_ranks(rank_main, attention_tp=2)[0])


def test_an_addition_of_another_shape_or_over_a_nonlinear_update_is_refused_before_any_collective():
    from stacks.decoders import HyperConnectedDecoder

    def rank_main(parallel):
        from boundary.collectives import record

        model = build(parallel, lambda: HyperConnectedDecoder([False, False]))
        ids, batch = batch_of(parallel, [4])
        residual_batch.start(batch)
        attn, ffn = model.boundaries[0]
        handle = attn.finish(model.computes[0][0](attn.prepare(model.embed[ids], batch)), batch)
        with record() as events, pytest.raises(ValueError, match="needs a plain residual update"):
            ffn.prepare(handle, batch, post_residual_addition=torch.zeros(4, CONFIG.hidden))
        assert not events and batch.residual_stream.pending is handle._contribution
        return True

    def plain_main(parallel, batch, make):
        second, handle = second_layer(make, batch, parallel)
        for wrong in (rows_of("extra", 1), rows_of("extra", 2), rows_of("extra", 4)[:, :1]):
            with pytest.raises(ValueError, match="post_residual_addition has shape"):
                second.prepare(handle, batch, post_residual_addition=wrong)
        prepared = second.prepare(handle, batch, post_residual_addition=rows_of("extra", 4))
        total = rows_of("x", 4) + rows_of("a", 4) + rows_of("out", 4) + rows_of("extra", 4)
        return torch.equal(prepared, norm("attn")(total))

    assert all(on_threads(Topology(attention_tp=2), rank_main))
    assert all(on_ranks(plain_main, attention_tp=2)[0])


def test_a_capture_on_slices_is_gathered_back_to_the_producers_rows_and_owned():
    """Behind an all-to-all MoE the residual is on slices; a capture by cut would not be owned."""

    def rank_main(parallel, batch, make):
        ffn = declare_ffn(sparse=True)
        attn, ffn_boundary = layer(make, ffn=ffn)
        second, _ = layer(make, previous=ffn)
        entry = second.plan.select(batch).entry
        enter(attn, batch, rows_of("x", 4))
        prepared = ffn_boundary.prepare(attn.finish(term_of(rows_of("a", 4), parallel.attention_tp), batch), batch)
        with ffn_boundary.exit(batch) as output:
            pass
        handle = output.finish(prepared)
        collector, seen = AuxHiddenStateList(), []
        second.prepare(
            handle,
            batch,
            capture_output=lambda value, owned=False: seen.append((value, owned)),
            captured_last_layer_outputs=collector,
        )
        value, owned = seen[0]
        total = rows_of("x", 4) + rows_of("a", 4)
        total = total + norm("ffn")(total)
        # The producer's rows are its slices; on compute's rows the collector has all of them.
        own = total.tensor_split(2)[parallel.at.tp]
        assert torch.equal(value, own) and owned is False and not entry.capture_move_allocates
        return torch.equal(collector[0], total)

    assert all(on_ranks(rank_main, attention_tp=2, moe_ep=2, runtime={"a2a_backend": "x"})[0])


def test_a_gathered_capture_is_owned_and_a_slice_is_not():
    def rank_main(parallel, batch, make):
        attn, _ = layer(make)
        gathers = attn.plan.select(batch).entry.capture_move_allocates
        seen = []
        residual_batch.start(batch)
        hidden = residual_batch.written(rows_of("x", 4), batch)
        attn.prepare(hidden, batch, capture_output=lambda value, owned=False: seen.append((value, owned)))
        value, owned = seen[0]
        return torch.equal(value, rows_of("x", 4)) and owned and gathers

    results, _ = on_ranks(
        rank_main,
        attention_tp=2,
        runtime={"input_scattered": True},
        batch_options={"input_scattered": True},
    )
    assert all(results)


@pytest.mark.parametrize("rows, fusion, want", [(4, True, True), (4, False, False), (4096, True, False)])
def test_the_next_input_certifies_that_it_leaves_the_residual_alone(rows, fusion, want):
    """Only where the built-in fusion is the first candidate, for the rows it takes."""

    def rank_main(parallel, batch, make):
        attn, _ = layer(make)
        certificate = attn.plan.select(batch).entry.captures_owned
        return certificate is not None and certificate(rows)

    assert set(on_ranks(rank_main, attention_tp=2, runtime={"allreduce_fusion": fusion})[0]) == {want}


def test_a_custom_provider_that_comes_first_withdraws_the_certificate():
    from boundary.fusions import FusedMlpInput
    from boundary.layout import SumGroup

    class First:
        def attention_input(self, plan):
            return []

        def ffn_input(self, plan):
            return [FusedMlpInput(SumGroup.ATTN_TP, lambda *_: None)]

        def can_defer_finalize(self, plan, batch):
            return False

        def can_defer_all_reduce(self, plan, batch):
            return False

    def rank_main(parallel, batch, make):
        attn, _ = layer(make, options={"fusions": First()})
        return attn.plan.select(batch).entry.captures_owned(4)

    assert set(on_ranks(rank_main, attention_tp=2, runtime={"allreduce_fusion": True})[0]) == {False}


def test_the_collector_copies_what_it_borrows_and_keeps_what_it_owns():
    collector, value = AuxHiddenStateList(), torch.ones(2)
    collector.capture(value)
    collector.capture(value, owned=True)
    value.zero_()
    assert torch.equal(collector[0], torch.ones(2)) and collector[1] is value


def test_a_borrowed_capture_survives_the_residual_being_overwritten():
    def rank_main(parallel, batch, make):
        second, handle = second_layer(make, batch, parallel)
        collector = AuxHiddenStateList()
        second.prepare(handle, batch, capture_output=collector.capture)
        batch.residual_stream.residual.tensor.zero_()
        return torch.equal(collector[0], rows_of("x", 4) + rows_of("a", 4) + rows_of("out", 4))

    assert all(on_ranks(rank_main, attention_tp=2)[0])


def test_a_certified_capture_survives_the_stage_that_certified_it():
    def rank_main(parallel, batch, make):
        attn, ffn = layer(make)
        residual_batch.start(batch)
        hidden = residual_batch.written(rows_of("x", 4).clone(), batch)
        collector = AuxHiddenStateList()
        attn.prepare(hidden, batch, capture_output=collector.capture)
        assert collector[0] is hidden
        ffn.prepare(attn.finish(term_of(rows_of("a", 4), parallel.attention_tp), batch), batch)
        return torch.equal(collector[0], rows_of("x", 4))

    assert all(on_ranks(rank_main, attention_tp=2, runtime={"allreduce_fusion": True})[0])


def test_an_ffn_takes_no_capture():
    def rank_main(parallel, batch, make):
        attn, ffn = layer(make)
        enter(attn, batch, rows_of("x", 4))
        handle = attn.finish(rows_of("a", 4), batch)
        for option in ({"capture_output": print}, {"captured_last_layer_outputs": AuxHiddenStateList()}):
            with pytest.raises(TypeError, match="takes no capture"):
                ffn.prepare(handle, batch, **option)
        return True

    assert all(on_ranks(rank_main)[0])


def test_capture_output_completes_dynamic_work_on_the_output_and_a_declared_sum_on_a_copy():
    def rank_main(parallel, batch, make):
        attn, ffn = layer(make)
        enter(attn, batch, rows_of("x", 4))
        declared = attn.finish(term_of(rows_of("a", 4), parallel.attention_tp), batch)
        handle, taken = attn.capture_output(declared, batch)
        assert handle is declared and torch.equal(taken, rows_of("x", 4) + rows_of("a", 4))
        ffn.prepare(handle, batch)
        dynamic = run_ffn(ffn, batch, rows_of("out", 4), parallel.tp)
        handle, taken = ffn.capture_output(dynamic, batch)
        assert handle is not dynamic and torch.equal(handle, rows_of("out", 4))
        return torch.equal(taken, rows_of("x", 4) + rows_of("a", 4) + rows_of("out", 4))

    results, events = on_ranks(rank_main, attention_tp=2)
    # The declared sum runs twice: on the copy, and in the FFN's input.
    assert all(results) and ops(events) == ["all_reduce"] * 3


def test_capture_output_of_no_rows_completes_nothing():
    def rank_main(parallel, batch, make):
        attn, _ = layer(make)
        enter(attn, batch, rows_of("x", 0))
        handle = attn.finish(rows_of("a", 0), batch)
        return attn.capture_output(handle, batch, skip_empty=True) == (handle, None)

    results, events = on_ranks(rank_main, tokens=(0,), attention_tp=2)
    assert all(results) and not events


def test_a_later_pipeline_stage_captures_its_own_layers():
    pattern, cut = DENSE * 3, 1
    config = Config()

    def rank_main(parallel):
        layers = range(cut) if parallel.pipeline_rank == 0 else range(cut, 3)
        model = build(parallel, lambda: Decoder(sparse_of(pattern), layers=layers))
        ids, batch = batch_of(parallel, [4])
        collector = AuxHiddenStateList()
        if parallel.pipeline_rank == 0:
            sent = model(ids, batch, capture=collector.capture)
            for name in ("hidden_states", "residual"):
                parallel.pipeline.broadcast(sent[name], 0, name)
            return collector
        buffer = torch.empty(4, config.hidden, dtype=torch.float64)
        received = {n: parallel.pipeline.broadcast(buffer, 0, n) for n in ("hidden_states", "residual")}
        model(ids, batch, received=received, capture=collector.capture)
        return collector

    results = on_threads(Topology(attention_tp=2, pipeline=2), rank_main)
    want = reference.stack(pattern, config, embedded(0, 4))[1]
    for rank, collector in enumerate(results):
        wanted = [want[0]] if rank < 2 else [want[2], want[4], want[6]]
        assert len(collector) == len(wanted)
        assert all(torch.equal(a, b) for a, b in zip(collector, wanted, strict=True))


def test_a_capture_of_several_streams_is_the_hidden_state_they_stand_for():
    from stacks.decoders import HyperConnectedDecoder

    def rank_main(parallel):
        model = build(parallel, lambda: HyperConnectedDecoder([False, False]))
        ids, batch = batch_of(parallel, [4])
        seen = []
        residual_batch.start(batch)
        (attn, ffn), (second, _) = model.boundaries
        attention, mlp = model.computes[0]
        hidden = ffn.prepare(attn.finish(attention(attn.prepare(model.embed[ids], batch)), batch), batch)
        with ffn.exit(batch) as output:
            hidden = mlp(hidden)
        hidden = output.finish(hidden)
        second.prepare(hidden, batch, capture_output=lambda value, owned=False: seen.append((value, owned)))
        value, owned = seen[0]
        return owned and torch.equal(value, hidden.unflatten(1, (CONFIG.streams, -1)).mean(1))

    assert all(on_threads(Topology(attention_tp=2), rank_main))

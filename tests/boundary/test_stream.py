"""The residual stream: its states, what belongs to it, and what the model's own code may do with it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from boundary import OwedOutput, PaddingMode, ProducerReduction, declare_attn, declare_ffn
from boundary.residual import batch as residual_batch
from boundary.residual.access import AuxHiddenStateList
from boundary.residual.mhc import MhcRead, MhcUpdate
from boundary.residual.stream import ResidualStream, StreamState

from .checks import HIDDEN, enter, layer, norm, on_ranks, ops, rows_of, run_ffn, term_of

FOREIGN = "output does not belong to this residual stream; change layer outputs through boundary accessors"


def started(make, batch, parallel, **kwargs):
    """A layer whose attention has finished: `(attn, ffn, handle)`. The residual is `x`, the output `a`."""
    attn, ffn = layer(make, **kwargs)
    enter(attn, batch, rows_of("x", 4))
    return attn, ffn, attn.finish(term_of(rows_of("a", 4), parallel.attention_tp), batch)


def test_the_three_states():
    def rank_main(parallel, batch, make):
        attn, ffn = layer(make)
        residual_batch.start(batch)
        stream = batch.residual_stream
        assert stream.state is StreamState.INITIAL
        attn.prepare(rows_of("x", 4), batch)
        assert stream.state is StreamState.WRITTEN
        handle = attn.finish(term_of(rows_of("a", 4), parallel.attention_tp), batch)
        assert stream.state is StreamState.PENDING
        ffn.prepare(handle, batch)
        assert stream.state is StreamState.WRITTEN
        return True

    assert all(on_ranks(rank_main, attention_tp=2)[0])


def test_a_stage_outside_a_started_stack_is_refused():
    def rank_main(parallel, batch, make):
        attn, ffn = layer(make)
        for call in (
            lambda: attn.prepare(rows_of("x", 4), batch),
            lambda: attn.finish(rows_of("x", 4), batch),
            lambda: ffn.exit(batch),
            lambda: residual_batch.norm(rows_of("x", 4), batch, norm()),
        ):
            with pytest.raises(RuntimeError, match=r"^start the layer stack before entering a stage$"):
                call()
        return True

    assert all(on_ranks(rank_main)[0])


def test_a_later_stage_does_not_take_a_new_stream():
    def rank_main(parallel, batch, make):
        (boundary,) = make((declare_attn(), norm()), previous=declare_ffn())
        residual_batch.start(batch)
        with pytest.raises(RuntimeError, match="previous=None"):
            boundary.prepare(rows_of("x", 4), batch)
        return True

    assert all(on_ranks(rank_main)[0])


def test_a_written_stream_enters_a_stack_without_its_enter():
    def rank_main(parallel, batch, make):
        attn, _ = layer(make)
        residual_batch.start(batch)
        hidden = residual_batch.written(rows_of("w", 4), batch)
        read = type(attn.declaration.read)
        prepared = attn.prepare(hidden, batch)
        assert read is not None and torch.equal(prepared, norm("attn")(rows_of("w", 4)))
        return True

    assert all(on_ranks(rank_main, attention_tp=2)[0])


@pytest.mark.parametrize("tp", [1, 2])
def test_foreign_outputs_are_refused_and_nothing_is_consumed(tp):
    def rank_main(parallel, batch, make):
        _, ffn, handle = started(make, batch, parallel)
        foreign = [rows_of("a", 4), rows_of("x", 4)]
        if not isinstance(handle, OwedOutput):
            foreign += [handle.clone(), handle[:], handle.view(4, HIDDEN)]
        for output in foreign:
            with pytest.raises(RuntimeError) as error:
                ffn.prepare(output, batch)
            assert str(error.value) == FOREIGN
        done = residual_batch.complete_output(handle, batch)
        assert torch.equal(done, rows_of("a", 4))
        if handle is not done:
            with pytest.raises(RuntimeError, match="does not belong"):
                ffn.prepare(handle, batch)
        ffn.prepare(done, batch)
        return True

    assert all(on_ranks(rank_main, attention_tp=tp)[0])


def test_outputs_do_not_cross_microbatches():
    def rank_main(parallel, batch, make):
        from dataclasses import replace

        attn, ffn = layer(make)
        other = replace(batch, residual_stream=None)
        handles = []
        for one, name in ((batch, "x"), (other, "y")):
            enter(attn, one, rows_of(name, 4))
            handles.append(attn.finish(term_of(rows_of(name, 4), parallel.attention_tp), one))
        with pytest.raises(RuntimeError, match="does not belong"):
            ffn.prepare(handles[1], batch)
        for one, handle, name in zip((batch, other), handles, "xy", strict=True):
            prepared = ffn.prepare(handle, one)
            assert torch.equal(prepared, norm("ffn")(2 * rows_of(name, 4)))
        return True

    assert all(on_ranks(rank_main, attention_tp=2)[0])


def test_an_owed_handle_is_no_tensor():
    def rank_main(parallel, batch, make):
        _, _, handle = started(make, batch, parallel)
        assert isinstance(handle, OwedOutput)
        tensor = rows_of("x", 4)
        for use in (
            lambda: handle + 1,
            lambda: 1 + handle,
            lambda: tensor + handle,
            lambda: handle + tensor,
            lambda: handle * 2,
            lambda: handle[0],
            lambda: handle[:, :1],
            lambda: -handle,
            lambda: handle @ tensor,
            lambda: torch.relu(handle),
            lambda: torch.cat([tensor, handle]),
            lambda: len(handle),
            lambda: bool(handle),
            lambda: list(handle),
        ):
            with pytest.raises(TypeError):
                use()
        with pytest.raises(AttributeError):
            _ = handle.shape
        with pytest.raises(RuntimeError, match="does not belong"):
            stream = ResidualStream()
            stream.check(handle)
        return True

    assert all(on_ranks(rank_main, attention_tp=2)[0])


def test_completing_is_idempotent_and_the_consumer_does_not_sum_again():
    def rank_main(parallel, batch, make):
        _, ffn, handle = started(make, batch, parallel)
        done = residual_batch.complete_output(handle, batch)
        assert residual_batch.complete_output(done, batch) is done
        assert batch.residual_stream.state is StreamState.PENDING
        prepared = ffn.prepare(done, batch)
        return torch.equal(prepared, norm("ffn")(rows_of("x", 4) + rows_of("a", 4)))

    results, events = on_ranks(rank_main, attention_tp=2)
    assert all(results) and ops(events) == ["all_reduce"]


@pytest.mark.parametrize("dp, tp", [(1, 2), (2, 2), (2, 1)])
def test_a_completed_output_leads_to_the_same_input_as_an_owed_one(dp, tp):
    """Under attention DP the order in which the residual joins the sum gives way to the plain one."""

    def rank_main(parallel, batch, make):
        prepared = []
        for complete in (False, True):
            _, ffn, handle = started(make, batch, parallel)
            if complete:
                handle = residual_batch.complete_output(handle, batch)
            prepared.append(ffn.prepare(handle, batch))
        return torch.equal(*prepared) and len(prepared[0]) == 4 * dp

    assert all(on_ranks(rank_main, tokens=(4, 4)[:dp], attention_dp=dp, attention_tp=tp)[0])


def test_the_update_that_travelled_with_the_contribution_runs():
    def rank_main(parallel, batch, make):
        read = MhcRead(lambda wide: (wide[:, :1], wide[:, :1], wide[:, :1, None]), 1, HIDDEN)
        producer = declare_ffn(update=MhcUpdate(1, at_producer=True))
        (consumer,) = make((declare_attn(read=read), norm()), previous=producer)
        _, ffn, handle = started(make, batch, parallel)
        stream = batch.residual_stream
        with pytest.raises(RuntimeError, match="plain addition"):
            consumer.prepare(handle, batch)
        # Nothing was consumed: the right consumer still finds it, and no sum has run.
        assert stream.state is StreamState.PENDING
        ffn.prepare(handle, batch)
        return True

    results, events = on_ranks(rank_main, attention_tp=2)
    assert all(results) and ops(events) == ["all_reduce"]


def test_a_declared_sum_must_be_the_one_the_consumer_expects():
    def rank_main(parallel, batch, make):
        _, _, handle = started(make, batch, parallel)
        (stranger,) = make((declare_attn(), norm()), previous=declare_ffn())
        with pytest.raises(RuntimeError, match="declared sum"):
            stranger.prepare(handle, batch)
        return True

    results, events = on_ranks(rank_main, attention_tp=2)
    assert all(results) and not events


def test_fold_writes_the_residual():
    def rank_main(parallel, batch, make):
        _, ffn, handle = started(make, batch, parallel)
        folded = residual_batch.fold(handle, batch)
        assert batch.residual_stream.state is StreamState.WRITTEN
        assert torch.equal(folded, rows_of("x", 4) + rows_of("a", 4))
        assert residual_batch.fold(folded, batch) is folded
        return torch.equal(ffn.prepare(folded, batch), norm("ffn")(folded))

    assert all(on_ranks(rank_main, attention_tp=2)[0])


def test_written_drops_what_was_pending_and_makes_old_handles_stale():
    def rank_main(parallel, batch, make):
        _, ffn, handle = started(make, batch, parallel)
        mine = residual_batch.written(rows_of("w", 4), batch)
        with pytest.raises(RuntimeError, match="does not belong"):
            ffn.prepare(handle, batch)
        return torch.equal(ffn.prepare(mine, batch), norm("ffn")(rows_of("w", 4)))

    assert all(on_ranks(rank_main, attention_tp=2)[0])


def test_take_output_wants_a_written_stream_and_its_own_tensor():
    def rank_main(parallel, batch, make):
        _, _, handle = started(make, batch, parallel)
        with pytest.raises(RuntimeError) as error:
            residual_batch.take_output(handle, batch)
        assert str(error.value) == "write the residual update before taking the final output"
        folded = residual_batch.fold(handle, batch)
        normed = residual_batch.written(norm()(folded), batch)
        with pytest.raises(RuntimeError, match="does not belong"):
            residual_batch.take_output(folded, batch)
        assert residual_batch.take_output(normed, batch) is normed
        assert batch.residual_stream is None
        return True

    assert all(on_ranks(rank_main, attention_tp=2)[0])


def test_start_resets_an_old_stream():
    def rank_main(parallel, batch, make):
        attn, _, _ = started(make, batch, parallel)
        prepared = enter(attn, batch, rows_of("y", 4))
        return torch.equal(prepared, norm("attn")(rows_of("y", 4)))

    assert all(on_ranks(rank_main, attention_tp=2)[0])


@pytest.mark.parametrize("tp", [1, 2])
def test_an_addition_joins_the_output_once_after_its_sum(tp):
    def rank_main(parallel, batch, make):
        _, ffn, handle = started(make, batch, parallel)
        added = residual_batch.add_to_output(handle, batch, rows_of("extra", 4))
        assert torch.equal(added, rows_of("a", 4) + rows_of("extra", 4))
        total = rows_of("x", 4) + added
        assert torch.equal(ffn.prepare(added, batch), norm("ffn")(total))
        written = residual_batch.written(rows_of("w", 4), batch)
        more = residual_batch.add_to_output(written, batch, rows_of("extra", 4))
        return torch.equal(more, rows_of("w", 4) + rows_of("extra", 4))

    assert all(on_ranks(rank_main, attention_tp=tp)[0])


def test_a_snapshot_completes_a_copy_and_leaves_the_term_alone():
    def rank_main(parallel, batch, make):
        _, ffn, handle = started(make, batch, parallel)
        term = handle._contribution.value
        before = term.clone()
        taken = residual_batch.snapshot(handle, batch)
        assert torch.equal(taken, rows_of("x", 4) + rows_of("a", 4))
        assert handle._contribution.value is term and torch.equal(term, before)
        taken.zero_()
        return torch.equal(ffn.prepare(handle, batch), norm("ffn")(rows_of("x", 4) + rows_of("a", 4)))

    results, events = on_ranks(rank_main, attention_tp=2)
    assert all(results) and ops(events) == ["all_reduce", "all_reduce"]


def test_a_snapshot_of_a_nonlinear_update_raises_and_leaves_the_state():
    def rank_main(parallel, batch, make):
        def coefficients(wide):
            one = torch.ones(len(wide), 1, dtype=wide.dtype)
            return one, one, one[:, :, None]

        read = MhcRead(coefficients, 1, HIDDEN)
        attn, ffn = layer(
            make,
            attn=declare_attn(update=MhcUpdate(1), read=read),
            ffn=declare_ffn(update=MhcUpdate(1, at_producer=True), read=read),
        )
        enter(attn, batch, rows_of("x", 4))
        handle = attn.finish(term_of(rows_of("a", 4), parallel.attention_tp), batch)
        for call in (residual_batch.snapshot, residual_batch.fold):
            with pytest.raises(RuntimeError, match="requires a plain residual update"):
                call(handle, batch)
        with pytest.raises(RuntimeError) as error:
            residual_batch.snapshot(handle, batch)
        assert str(error.value) == "snapshot requires a plain residual update"
        return torch.equal(ffn.prepare(handle, batch), norm("ffn")(rows_of("x", 4) + rows_of("a", 4)))

    results, events = on_ranks(rank_main, attention_tp=2)
    assert all(results) and ops(events) == ["all_reduce"]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_snapshot_of_written_streams_is_refused_before_anything_completes(tp):
    """A residual of several streams is no hidden state, written or pending."""
    from stacks.decoders import HyperConnectedDecoder
    from stacks.worlds import batch_of, build, on_threads

    from boundary import Topology

    def rank_main(parallel):
        model = build(parallel, lambda: HyperConnectedDecoder([False, False]))
        ids, batch = batch_of(parallel, [4])
        residual_batch.start(batch)
        attn, ffn = model.boundaries[0]
        attention, mlp = model.computes[0]
        handle = attn.finish(attention(attn.prepare(model.embed[ids], batch)), batch)
        hidden = ffn.prepare(handle, batch)
        with ffn.exit(batch) as output:
            hidden = mlp(hidden)
        written = output.finish(hidden)
        second, _ = model.boundaries[1]
        sent = residual_batch.to_pp(written, batch)
        received = second.from_pp(sent, batch)
        for call in (residual_batch.snapshot, ffn.capture_output):
            with pytest.raises(RuntimeError, match=r"^snapshot requires a plain residual update$"):
                call(received, batch)
        with pytest.raises(ValueError, match="extra has shape"):
            residual_batch.add_to_output(received, batch, model.embed[ids])
        return torch.equal(received, sent["hidden_states"])

    assert all(on_threads(Topology(attention_tp=tp), rank_main))


def test_capture_output_of_a_nonlinear_update_completes_nothing():
    """Neither a declared sum nor one that was left for this batch alone."""

    def rank_main(parallel, batch, make):
        def coefficients(wide):
            one = torch.ones(len(wide), 1, dtype=wide.dtype)
            return one, one, one[:, :, None]

        mixer = declare_attn(
            reduction=ProducerReduction.SCOPED, update=MhcUpdate(1), read=MhcRead(coefficients, 1, HIDDEN)
        )
        for following in (mixer, declare_ffn()):
            (boundary,) = make((mixer, norm()), following=following)
            enter(boundary, batch, rows_of("x", 4))
            with boundary.exit(batch) as output:
                assert output.skips_reduction
            handle = output.finish(term_of(rows_of("a", 4), parallel.attention_tp))
            with pytest.raises(RuntimeError, match=r"^snapshot requires a plain residual update$"):
                boundary.capture_output(handle, batch)
            assert batch.residual_stream.pending is handle._contribution and handle._contribution.owed is not None
        return True

    results, events = on_ranks(rank_main, attention_tp=2)
    assert all(results) and not events


def test_a_terminal_mixer_with_several_streams_ends_its_stack_with_a_hidden_state():
    """The last stage applies its update and contracts, whichever kind it is."""
    from stacks import reference
    from stacks.weights import Config

    config = Config()

    def rank_main(parallel, batch, make):
        width = config.hidden
        read = MhcRead(lambda wide: reference.coefficients("c", config, wide), config.streams, width)
        update = MhcUpdate(config.streams)
        from stacks.weights import GridNorm, weight

        layernorm, hidden, out = GridNorm("n", width), weight("x", 4, width), weight("out", 4, width)
        (mixer,) = make((declare_attn(update=update, read=read), layernorm), terminal=True)
        enter(mixer, batch, hidden)
        done = mixer.finish(term_of(out, parallel.attention_tp), batch)
        _, residual = read.read(read.enter(hidden, batch.rows.model_rows), layernorm)
        want = read.contract(update.apply(out, residual))
        assert torch.equal(residual_batch.snapshot(done, batch), want)
        return torch.equal(residual_batch.norm(done, batch, layernorm), layernorm(want))

    for tp in (1, 2):
        assert all(on_ranks(rank_main, attention_tp=tp)[0])


def test_an_addition_keeps_the_outputs_dtype():
    def rank_main(parallel, batch, make):
        (boundary,) = make((declare_attn(), torch.nn.Identity()))
        half, extra = rows_of("x", 4).bfloat16(), rows_of("extra", 4)
        for state in ("initial", "written", "pending"):
            residual_batch.start(batch)
            hidden = residual_batch.written(half, batch) if state == "written" else half
            if state == "pending":
                boundary.prepare(hidden, batch)
                hidden = boundary.finish(term_of(rows_of("x", 4), parallel.attention_tp).bfloat16(), batch)
            hidden = residual_batch.add_to_output(hidden, batch, extra)
            assert hidden.dtype is torch.bfloat16
            assert torch.equal(hidden, (rows_of("x", 4) + extra).bfloat16()), state
        return True

    assert all(on_ranks(rank_main, attention_tp=2)[0])


def test_a_written_stream_opens_the_sequence_parallel_region_too():
    def rank_main(parallel, batch, make):
        attn, _ = layer(make, attn=declare_attn(gathers_tp_input=False))
        residual_batch.start(batch)
        prepared = attn.prepare(residual_batch.written(rows_of("w", 4), batch), batch)
        assert len(batch.residual_stream.residual.tensor) == 2
        return batch.variant.name, torch.equal(prepared, norm("attn")(rows_of("w", 4)))

    facts = {"runtime": {"sequence_parallel": True}, "batch_options": {"sequence_parallel": True}}
    assert on_ranks(rank_main, attention_tp=2, **facts)[0] == [("SEQUENCE_PARALLEL", True)] * 2


def test_consumers_release_the_term_and_leaving_releases_the_stream():
    def rank_main(parallel, batch, make):
        _, ffn, handle = started(make, batch, parallel)
        term = weakref.ref(handle._contribution.value)
        ffn.prepare(handle, batch)
        gc.collect()
        assert term() is None
        for leave in (
            lambda handle: residual_batch.norm(handle, batch, norm()),
            lambda handle: residual_batch.to_pp(residual_batch.complete_output(handle, batch), batch),
        ):
            _, ffn, handle = started(make, batch, parallel)
            contribution = weakref.ref(handle._contribution)
            leave(handle)
            del handle
            gc.collect()
            assert contribution() is None and batch.residual_stream is None
        return True

    assert all(on_ranks(rank_main, attention_tp=2)[0])


def test_a_pending_row_move_is_owed_work_without_a_sum():
    def rank_main(parallel, batch, make):
        attn, ffn = layer(make, ffn=declare_ffn(sparse=True), options={"fusions": Finalizing()})
        enter(attn, batch, rows_of("x", 4))
        prepared = ffn.prepare(attn.finish(rows_of("a", 4), batch), batch)
        with ffn.exit(batch) as output:
            assert output.defer_moe_finalize
        handle = output.finish(Whole(rows_of("out", len(prepared))))
        assert isinstance(handle, OwedOutput) and handle._contribution.owed.sum is None
        with pytest.raises(RuntimeError, match="handoff"):
            residual_batch.snapshot(handle, batch)
        done = residual_batch.complete_output(handle, batch)
        return torch.equal(done, rows_of("out", 8)[4 * parallel.at.dp :][:4])

    assert all(on_ranks(rank_main, tokens=(4, 4), attention_dp=2)[0])


from boundary import HandoffOutput  # noqa: E402


class Whole(HandoffOutput):
    def __init__(self, value):
        self.value = value

    def complete(self):
        return self.value


class Finalizing:
    def attention_input(self, plan):
        return []

    def ffn_input(self, plan):
        return []

    def can_defer_finalize(self, plan, batch):
        return True

    def can_defer_all_reduce(self, plan, batch):
        return False


def test_skip_empty_completes_and_skips_only_the_norm():
    def rank_main(parallel, batch, make):
        collector = AuxHiddenStateList()

        def fails(value):
            assert value.shape[0], "the norm ran without rows"
            return value

        attn, ffn = layer(make)
        rows = batch.rows.cell(parallel.at)[0]
        enter(attn, batch, rows_of("x", 8)[:rows])
        handle = attn.finish(rows_of("a", 8)[:rows], batch)
        ffn.prepare(handle, batch)
        handle = run_ffn(ffn, batch, rows_of("out", 3), parallel.tp)
        assert isinstance(handle, OwedOutput)
        out = residual_batch.norm(handle, batch, fails, skip_empty=True, capture_output=collector.capture)
        assert len(collector) == 1 and len(out) == len(collector[0]) == rows
        return rows

    results, events = on_ranks(rank_main, tokens=(3, 0), attention_dp=2, padding=PaddingMode.SUM_LEN)
    assert results == [3, 0]
    assert [event.op for event in events if event.rank == 1] == ["all_gather", "all_reduce"]


def test_a_split_prefill_keeps_one_stream_over_its_segments():
    def rank_main(parallel, batch, make):
        attn, ffn = layer(make)
        enter(attn, batch, rows_of("x", 4))
        handle = attn.finish(term_of(rows_of("a", 4), parallel.attention_tp), batch)
        stream = batch.residual_stream
        # The next segment, later, goes on with the same batch and the handle that was kept.
        ffn.prepare(handle, batch)
        handle = run_ffn(ffn, batch, rows_of("out", 4), parallel.tp)
        assert batch.residual_stream is stream
        total = rows_of("x", 4) + rows_of("a", 4) + rows_of("out", 4)
        return torch.equal(residual_batch.norm(handle, batch, norm()), norm()(total))

    assert all(on_ranks(rank_main, attention_tp=2)[0])


def test_a_draft_folds_normalizes_and_takes_its_output():
    """The order of a Nemotron-H-like MTP head, whose mixer's sum is then completed once."""
    mixer = declare_attn(reduction=ProducerReduction.SCOPED, gathers_tp_input=False)

    def rank_main(parallel, batch, make):
        (boundary,) = make((mixer, norm("in")), following=declare_ffn())
        enter(boundary, batch, rows_of("x", 4))
        with boundary.exit(batch) as output:
            assert output.skips_reduction
            value = term_of(rows_of("a", 4), parallel.attention_tp)
        handle = output.finish(value)
        folded = residual_batch.fold(handle, batch)
        out = residual_batch.take_output(residual_batch.written(norm()(folded), batch), batch)
        return torch.equal(out, norm()(rows_of("x", 4) + rows_of("a", 4)))

    results, events = on_ranks(rank_main, attention_tp=2)
    assert all(results) and ops(events) == ["all_reduce"]

"""The FFN's and the mixer's exit: one decision, obeyed by compute and by `finish()`."""

from __future__ import annotations

import pytest
import torch
from stacks.worlds import build

from boundary import (
    ForwardBatch,
    HandoffOutput,
    OutputTransform,
    OwedOutput,
    PaddingMode,
    ProducerReduction,
    Topology,
    declare_attn,
    declare_ffn,
    fresh_forward,
    get_forward,
    make_stages,
)
from boundary.fusions.all_reduce import MAX_ROWS, ReferenceProvider
from boundary.layout import RowFacts
from boundary.linear import RowParallelLinear
from boundary.parallel import ThreadWorld
from boundary.residual import batch as residual_batch
from boundary.residual.add_norm import AddUpdate
from boundary.runtime import bind

from .checks import HIDDEN, enter, layer, norm, on_ranks, ops, rows_of, run_ffn, term_of


def through_attention(attn, ffn, batch, parallel, name="x"):
    """Enter the stack and prepare the FFN; returns its input. Attention's output is `rows_of('attn out')`."""
    rows = batch.rows.cell(parallel.at)[0]
    enter(attn, batch, rows_of(f"{name}{parallel.at.dp}", rows))
    out = rows_of(f"attn out{parallel.at.dp}", rows)
    handle = attn.finish(term_of(out, parallel.attention_tp), batch)
    return ffn.prepare(handle, batch)


def flags():
    forward = get_forward()
    return forward.fuse_mlp_allreduce, forward.mlp_reduce_scatter, forward.defer_moe_finalize


def test_a_deferred_sum_names_its_group_and_moves_no_rows():
    def rank_main(parallel, batch, make):
        attn, ffn = layer(make)
        prepared = through_attention(attn, ffn, batch, parallel)
        handle = run_ffn(ffn, batch, rows_of("out", len(prepared)), parallel.tp)
        owed = handle._contribution.owed
        assert owed.plain_sum is owed.sum and owed.sum.group is parallel.tp and not owed.declared
        return True

    assert on_ranks(rank_main, attention_tp=2)[0] == [True, True]


def test_under_attention_dp_a_deferred_sum_reduces_then_scatters():
    def rank_main(parallel, batch, make):
        attn, ffn = layer(make)
        prepared = through_attention(attn, ffn, batch, parallel)
        whole = rows_of("out", len(prepared))
        handle = run_ffn(ffn, batch, whole, parallel.tp)
        assert isinstance(handle, OwedOutput)
        owed = handle._contribution.owed
        assert owed.rows != owed.lands and owed.plain_sum is None
        value = residual_batch.complete_output(handle, batch)
        start = sum(cells[0] for cells in batch.rows.padded[: parallel.at.dp])
        live = batch.rows.cell(parallel.at)[1]
        assert torch.equal(value[:live], whole[start : start + live]) and not value[live:].any()
        return True

    _, events = on_ranks(rank_main, tokens=(3, 1), attention_dp=2, attention_tp=2, padding=PaddingMode.SUM_LEN)
    assert ops(events)[-1] == "all_reduce" and "all_gather" not in ops(events)


@pytest.mark.parametrize("policy, padding, op", [
    ("rs", PaddingMode.MAX_LEN, "reduce_scatter"),
    ("rs", PaddingMode.SUM_LEN, "all_reduce"),
    ("rsv", PaddingMode.SUM_LEN, "reduce_scatter"),
    ("rs+rsv", PaddingMode.SUM_LEN, "reduce_scatter"),
    ("ar", PaddingMode.MAX_LEN, "all_reduce"),
])  # fmt: skip
@pytest.mark.parametrize("terminal", [False, True])
def test_the_skip_flag_and_the_sum_that_runs_agree(policy, padding, op, terminal):
    """One collective sums each output, whatever the policy and the padding, in the next input or at once."""

    def rank_main(parallel, batch, make):
        attn, ffn = layer(make, terminal=terminal)
        prepared = through_attention(attn, ffn, batch, parallel)
        whole = rows_of("out", len(prepared))
        with ffn.exit(batch) as output:
            assert output.mlp_reduce_scatter is (op == "reduce_scatter")
            skips = get_forward().skips_reduction
            value = term_of(whole, parallel.tp)
            value = value if skips else parallel.tp.all_reduce(value, "compute sums")
        handle = output.finish(value)
        assert isinstance(handle, OwedOutput) is not terminal
        done = residual_batch.complete_output(handle, batch)
        start = sum(cells[0] for cells in batch.rows.padded[: parallel.at.dp])
        live = batch.rows.cell(parallel.at)[1]
        return torch.equal(done[:live], whole[start : start + live])

    results, events = on_ranks(
        rank_main, tokens=(3, 1), padding=padding, attention_dp=2, runtime={"boundary_reduction": policy}
    )
    assert all(results)
    assert [name for name in ops(events) if name != "all_gather"] == [op]


def test_variable_reduce_scatter_needs_one_rank_per_data_parallel_rank():
    def rank_main(parallel, batch, make):
        attn, ffn = layer(make)
        through_attention(attn, ffn, batch, parallel)
        return ffn.exit(batch)._decision.mlp_reduce_scatter

    for dp, tp, want in [(2, 1, True), (2, 2, False)]:
        results, _ = on_ranks(
            rank_main,
            tokens=(3, 1),
            padding=PaddingMode.SUM_LEN,
            attention_dp=dp,
            attention_tp=tp,
            runtime={"boundary_reduction": "rsv"},
        )
        assert set(results) == {want}


@pytest.mark.parametrize("change", ["provider", "rows", "variant", "plan"])
@pytest.mark.parametrize("policy", ["ar", "rs"])
@pytest.mark.parametrize("lora", [True, False])
def test_finish_acts_on_the_decision_that_compute_saw(change, policy, lora):
    """Whatever changes between compute and `finish()`: what runs is what the flags said."""

    class Fickle:
        answer = True

        def attention_input(self, plan):
            return []

        def ffn_input(self, plan):
            return []

        def can_defer_finalize(self, plan, batch):
            return False

        def can_defer_all_reduce(self, plan, batch):
            return self.answer

    def rank_main(parallel, batch, make):
        provider = Fickle()
        attn, ffn = layer(make, options={"fusions": provider})
        through_attention(attn, ffn, batch, parallel)
        dp, facts = parallel.at.dp, batch.rows
        whole = rows_of("out", facts.padded[0][0] * parallel.topology.attention_dp)
        path = ffn.plan.select(batch)
        with ffn.exit(batch) as output:
            skips = get_forward().skips_reduction
            value = term_of(whole, parallel.tp)
            value = value if skips else parallel.tp.all_reduce(value, "compute sums")
        if change == "provider":
            provider.answer = False
        elif change == "rows":
            batch.rows = RowFacts(((4,), (8,)), ((2,), (7,)), PaddingMode.SUM_LEN)
        elif change == "variant":
            batch.input_scattered = True
        else:
            for name in ("defer", "scatter", "finalize"):
                setattr(path.decider, name, path.decider.complete)
            path.decider.decide = lambda batch: path.decider.complete
            ffn.plan.paths.clear()
        handle = output.finish(value)
        batch.rows, batch.input_scattered = facts, False
        done = residual_batch.complete_output(handle, batch)
        live = facts.cell(parallel.at)[1]
        return skips, torch.equal(done[:live], whole[4 * dp : 4 * dp + live])

    for topology, tokens in ({"attention_dp": 2}, (3, 4)), ({"attention_tp": 2}, (4,)):
        results, events = on_ranks(
            rank_main, tokens=tokens, padding=PaddingMode.MAX_LEN,
            runtime={"boundary_reduction": policy, "lora": lora}, **topology,
        )  # fmt: skip
        assert all(equal for _, equal in results)
        sums = [event.key for event in events if event.rank == 0 and event.op in ("all_reduce", "reduce_scatter")]
        skipped = {skips for skips, _ in results}
        # Attention TP's own sum comes before; the output's runs once, where the flags said.
        assert len(skipped) == 1 and len(sums) == topology.get("attention_tp", 1)
        assert (sums[-1] == "compute sums") is not skipped.pop()


@pytest.mark.parametrize("answer", ["a term", "a sum", "a handoff"])
def test_each_flag_speaks_for_itself(answer):
    """Having asked whether a finalize may be left says nothing about the sum, and the other way round."""

    def rank_main(parallel, batch, make):
        attn, ffn = layer(make, ffn=declare_ffn(sparse=True), options={"fusions": FinalizeProvider()})
        through_attention(attn, ffn, batch, parallel)
        term = term_of(rows_of("out", 4), parallel.tp)
        with ffn.exit(batch) as output:
            if answer == "a handoff":
                assert get_forward().skips_reduction
                value = Later(term, parallel.tp)
            else:
                assert get_forward().defer_moe_finalize
                value = term if answer == "a term" else parallel.tp.all_reduce(term, "sums regardless")
        with pytest.raises(RuntimeError, match=r"read no (flag|defer_moe_finalize)"):
            output.finish(value)
        return True

    assert all(on_ranks(rank_main, attention_tp=2)[0])


def test_looking_at_an_exit_from_outside_does_not_count_as_computes_reading():
    def rank_main(parallel, batch, make):
        attn, ffn = layer(make)
        through_attention(attn, ffn, batch, parallel)
        output = ffn.exit(batch)
        assert output.fuse_mlp_allreduce and not output.mlp_reduce_scatter and not output.defer_moe_finalize
        with output:
            value = parallel.tp.all_reduce(term_of(rows_of("out", 4), parallel.tp), "sums regardless")
        assert output.fuse_mlp_allreduce
        with pytest.raises(RuntimeError, match="read no flag"):
            output.finish(value)
        return True

    assert all(on_ranks(rank_main, attention_tp=2)[0])


def test_an_exit_whose_stream_is_gone_is_refused():
    def rank_main(parallel, batch, make):
        for leave in (residual_batch.start, lambda batch: setattr(batch, "residual_stream", None)):
            attn, ffn = layer(make)
            through_attention(attn, ffn, batch, parallel)
            with ffn.exit(batch) as output:
                assert get_forward().skips_reduction
            leave(batch)
            with pytest.raises(RuntimeError, match="released or replaced"):
                output.finish(rows_of("out", 4))
        return True

    assert all(on_ranks(rank_main, attention_tp=2)[0])


def test_an_output_is_handed_on_once_for_each_prepare_however_it_is_done():
    """Also where the first time wrote the residual, so that nothing is pending."""

    def rank_main(parallel, batch, make):
        attn, ffn = layer(
            make,
            attn=declare_attn(update=AddUpdate(at_producer=True)),
            ffn=declare_ffn(update=AddUpdate(at_producer=True)),
        )
        once = "once, after its stage's prepare"
        enter(attn, batch, rows_of("x", 4))
        hidden = attn.finish(term_of(rows_of("a", 4), parallel.attention_tp), batch)
        with pytest.raises(RuntimeError, match=once):
            attn.finish(rows_of("a", 4), batch)
        ffn.prepare(hidden, batch)
        first, second = ffn.exit(batch), ffn.exit(batch)
        with first:
            pass
        with second:
            pass
        hidden = first.finish(rows_of("out", 4))
        for again in (lambda: second.finish(rows_of("out", 4)), lambda: ffn.postprocess(rows_of("out", 4), batch)):
            with pytest.raises(RuntimeError, match=once):
                again()
        return torch.equal(hidden, rows_of("x", 4) + rows_of("a", 4) + rows_of("out", 4))

    assert all(on_ranks(rank_main, attention_tp=2)[0])


@pytest.mark.parametrize("runtime, topology, want", [
    ({"lora": True}, {"attention_tp": 2}, True),
    ({"lora": True}, {"attention_dp": 2}, False),
    ({"shared_expert_tp1": True}, {"attention_dp": 2, "moe_ep": 2}, False),
])  # fmt: skip
def test_a_fused_consumer_takes_only_sums_that_land_where_their_terms_are(runtime, topology, want):
    """Under attention DP the output moves too, so nobody could fuse it, whatever a provider answers."""

    def rank_main(parallel, batch, make):
        attn, ffn = layer(make, ffn=declare_ffn(sparse=True), options={"fusions": ReferenceProvider()})
        through_attention(attn, ffn, batch, parallel)
        return ffn.exit(batch).fuse_mlp_allreduce

    tokens = (4,) * topology.get("attention_dp", 1)
    assert set(on_ranks(rank_main, tokens=tokens, runtime=runtime, **topology)[0]) == {want}


def test_the_padded_rows_decide_whether_the_built_in_fusion_takes_a_sum():
    def rank_main(parallel, batch, make):
        _, ffn = layer(make)
        answers = []
        for padded in (MAX_ROWS, MAX_ROWS + 1):
            batch.rows = RowFacts(((padded,),), ((4,),))
            answers.append(ffn.exit(batch).fuse_mlp_allreduce)
        return answers

    def started(parallel, batch, make):
        residual_batch.start(batch)
        return rank_main(parallel, batch, make)

    runtime = {"lora": True, "allreduce_fusion": True}
    assert on_ranks(started, attention_tp=2, runtime=runtime)[0] == [[True, False]] * 2


@pytest.mark.parametrize("sparse, runtime, topology, terminal, transform, want", [
    (True, {}, {"attention_tp": 2}, False, None, True),
    (False, {}, {"attention_tp": 2}, False, None, False),
    (True, {"quantized_communication": True}, {"attention_tp": 2}, False, None, False),
    (True, {}, {"attention_tp": 2}, True, None, True),
    (True, {}, {"attention_dp": 2}, False, None, True),
    (True, {}, {"attention_dp": 2}, True, None, False),
    (True, {}, {"attention_tp": 2}, True, OutputTransform(abs), False),
])  # fmt: skip
def test_which_finalizes_may_be_left(sparse, runtime, topology, terminal, transform, want):
    """A MoE's; and a final norm takes over only one that stays on its rows."""

    def rank_main(parallel, batch, make):
        provider = ReferenceProvider(finalizes=True, terminal_finalize=True)
        ffn = declare_ffn(sparse=sparse, transform=transform)
        attn, ffn = layer(make, ffn=ffn, terminal=terminal, options={"fusions": provider})
        through_attention(attn, ffn, batch, parallel)
        return ffn.exit(batch).defer_moe_finalize

    tokens = (4,) * topology.get("attention_dp", 1)
    assert set(on_ranks(rank_main, tokens=tokens, runtime=runtime, **topology)[0]) == {want}


def test_a_stage_without_permission_never_asks_the_provider_about_its_sum():
    class Provider:
        def attention_input(self, plan):
            return []

        def ffn_input(self, plan):
            return []

        def can_defer_finalize(self, plan, batch):
            return False

        def can_defer_all_reduce(self, plan, batch):
            raise AssertionError("asked")

    def rank_main(parallel, batch, make):
        attn, ffn = layer(make, terminal=True, options={"fusions": Provider()})
        through_attention(attn, ffn, batch, parallel)
        return ffn.exit(batch)._decision.fuse_mlp_allreduce

    assert on_ranks(rank_main, attention_tp=2, runtime={"lora": True})[0] == [False, False]


def test_lora_and_replicated_shared_experts_leave_their_sum_only_to_a_fused_consumer():
    asked = []

    class Provider:
        def __init__(self, takes):
            self.takes = takes

        def attention_input(self, plan):
            return []

        def ffn_input(self, plan):
            return []

        def can_defer_finalize(self, plan, batch):
            return False

        def can_defer_all_reduce(self, plan, batch):
            asked.append(plan)
            return self.takes

    def decision(options, runtime):
        def rank_main(parallel, batch, make):
            attn, ffn = layer(make, ffn=declare_ffn(sparse=True), options=options)
            rows = 4
            enter(attn, batch, rows_of("x", rows))
            ffn.prepare(attn.finish(term_of(rows_of("a", rows), parallel.attention_tp), batch), batch)
            return ffn.exit(batch)._decision.fuse_mlp_allreduce

        return set(on_ranks(rank_main, attention_tp=2, runtime=runtime)[0])

    for fact in ({"lora": True}, {"shared_expert_tp1": True}):
        assert decision({}, fact) == {False}
        assert decision({}, {**fact, "allreduce_fusion": True}) == {True}
        assert decision({"fusions": Provider(True)}, fact) == {True}
        assert decision({"fusions": Provider(False)}, fact) == {False}
        asked.clear()
        assert decision({"fusions": Provider(True)}, {**fact, "a2a_backend": "x"}) == {False}
        assert decision({"fusions": Provider(True)}, {**fact, "quantized_communication": True}) == {False}
        assert not asked
    assert decision({}, {}) == {True}


@pytest.mark.parametrize("runtime, topology, tokens, want", [
    ({}, {"attention_tp": 2}, (4,), True),
    ({}, {"attention_tp": 2}, (0,), False),
    ({}, {"attention_dp": 2}, (0, 3), True),
    ({}, {"attention_dp": 2}, (0, 0), False),
    ({"quantized_communication": True}, {"attention_tp": 2}, (4,), False),
    ({"speculative_algorithm": "EAGLE3"}, {"attention_dp": 2}, (4, 4), False),
    ({"speculative_algorithm": "EAGLE3"}, {"attention_tp": 2}, (4,), True),
    ({}, {"attention_tp": 1}, (4,), False),
    ({}, {"attention_dp": 2, "attention_cp": 2}, (4, 4), False),
    ({}, {"attention_cp": 2}, (4,), True),
])  # fmt: skip
def test_when_an_all_reduce_is_left_to_the_next_input(runtime, topology, tokens, want):
    def rank_main(parallel, batch, make):
        attn, ffn = layer(make)
        through_attention(attn, ffn, batch, parallel)
        return ffn.exit(batch)._decision.fuse_mlp_allreduce

    results, _ = on_ranks(rank_main, tokens=tokens, runtime=runtime, **topology)
    assert set(results) == {want}


def test_flags_are_restored_after_the_scope_and_when_compute_raises():
    def rank_main(parallel, batch, make):
        attn, ffn = layer(make)
        through_attention(attn, ffn, batch, parallel)
        assert flags() == (False, False, False)
        exit_ = ffn.exit(batch)
        with pytest.raises(ZeroDivisionError), exit_:
            assert flags() == (True, False, False)
            _ = 1 / 0
        assert flags() == (False, False, False)
        with pytest.raises(RuntimeError, match="failed"):
            exit_.finish(rows_of("out", 4))
        return True

    assert all(on_ranks(rank_main, attention_tp=2)[0])


def test_a_module_called_for_its_own_sake_inside_an_exit_completes_itself():
    """No flag reaches it, and it neither fulfils nor spends those of the open exit."""

    def rank_main(parallel, batch, make):
        from boundary import Runtime

        with bind(Runtime(parallel, boundary_reduction="ar")):
            linear = RowParallelLinear(HIDDEN, HIDDEN)
        linear.load_whole(rows_of("w", HIDDEN))
        attn, ffn = layer(make)
        through_attention(attn, ffn, batch, parallel)
        whole = rows_of("z", 4)
        mine = whole.tensor_split(parallel.tp.size, dim=1)[parallel.tp.rank]
        exit_ = ffn.exit(batch)
        with exit_:
            with fresh_forward():
                aside = linear(mine)
            assert torch.equal(aside, whole @ rows_of("w", HIDDEN).T)
        with pytest.raises(RuntimeError, match="read no flag"):
            exit_.finish(mine.new_zeros(4, HIDDEN))
        return True

    assert all(on_ranks(rank_main, attention_tp=2)[0])


def test_finish_refuses_a_compute_that_read_no_flag():
    def rank_main(parallel, batch, make):
        attn, ffn = layer(make)
        through_attention(attn, ffn, batch, parallel)
        with ffn.exit(batch) as output:
            value = parallel.tp.all_reduce(term_of(rows_of("out", 4), parallel.tp), "sums regardless")
        with pytest.raises(RuntimeError, match="read no flag"):
            output.finish(value)
        return True

    assert all(on_ranks(rank_main, attention_tp=2)[0])


def test_a_second_finish_raises_also_after_the_residual_was_written():
    def rank_main(parallel, batch, make):
        from boundary.residual.add_norm import AddUpdate

        for update in (AddUpdate(), AddUpdate(at_producer=True)):
            attn, ffn = layer(make, ffn=declare_ffn(update=update))
            through_attention(attn, ffn, batch, parallel)
            with ffn.exit(batch) as output:
                value = term_of(rows_of("out", 4), parallel.tp)
                value = value if get_forward().skips_reduction else parallel.tp.all_reduce(value, "sum")
            output.finish(value)
            with pytest.raises(RuntimeError, match="finished"):
                output.finish(value)
        attn, ffn = layer(make)
        enter(attn, batch, rows_of("x", 4))
        attn.finish(rows_of("x", 4), batch)
        with pytest.raises(RuntimeError, match="pending already"):
            attn.finish(rows_of("x", 4), batch)
        return True

    assert all(on_ranks(rank_main, attention_tp=2)[0])


class Later(HandoffOutput):
    def __init__(self, term, group):
        self.term, self.group, self.completed = term, group, 0

    def complete(self):
        self.completed += 1
        return self.group.all_reduce(self.term, "finalize")


class FinalizeProvider:
    terminal_finalize = False

    def attention_input(self, plan):
        return []

    def ffn_input(self, plan):
        return []

    def can_defer_finalize(self, plan, batch):
        return True

    def can_defer_all_reduce(self, plan, batch):
        return False


@pytest.mark.parametrize("hands_off", [True, False])
def test_a_finalize_handoff_is_completed_once_and_a_tensor_in_its_place_is_a_deferred_sum(hands_off):
    def rank_main(parallel, batch, make):
        attn, ffn = layer(make, ffn=declare_ffn(sparse=True), options={"fusions": FinalizeProvider()})
        through_attention(attn, ffn, batch, parallel)
        whole = rows_of("out", 4)
        with ffn.exit(batch) as output:
            assert get_forward().defer_moe_finalize
            value = term_of(whole, parallel.tp)
            if hands_off:
                value = Later(value, parallel.tp)
            else:
                assert get_forward().skips_reduction
        handle = output.finish(value)
        done = residual_batch.complete_output(handle, batch)
        assert residual_batch.complete_output(done, batch) is done
        assert not hands_off or value.completed == 1
        return torch.equal(done, whole)

    results, events = on_ranks(rank_main, attention_tp=2)
    assert all(results) and ops(events) == ["all_reduce", "all_reduce"]


def test_a_handoff_that_was_not_asked_for_is_refused():
    def rank_main(parallel, batch, make):
        attn, ffn = layer(make, ffn=declare_ffn(sparse=True))
        through_attention(attn, ffn, batch, parallel)
        with ffn.exit(batch) as output:
            assert not get_forward().defer_moe_finalize
        with pytest.raises(RuntimeError, match="defer_moe_finalize is false"):
            output.finish(Later(rows_of("out", 4), parallel.tp))
        return True

    assert all(on_ranks(rank_main, attention_tp=2)[0])


def test_a_terminal_finalize_needs_a_provider_that_takes_it():
    def rank_main(parallel, batch, make):
        answers = []
        for takes in (False, True):
            provider = FinalizeProvider()
            provider.terminal_finalize = takes
            attn, ffn = layer(make, ffn=declare_ffn(sparse=True), terminal=True, options={"fusions": provider})
            through_attention(attn, ffn, batch, parallel)
            answers.append(ffn.exit(batch)._decision.defer_moe_finalize)
        return answers

    assert on_ranks(rank_main, attention_tp=2)[0] == [[False, True]] * 2


@pytest.mark.parametrize("permitted", [True, False])
@pytest.mark.parametrize("policy", ["ar", "rs"])
def test_a_transform_runs_after_the_sum_unless_it_may_precede_the_reduce_scatter(permitted, policy):
    order = []

    def rank_main(parallel, batch, make):
        def double(value):
            order.append(("transform", value.shape[0]))
            return 2 * value

        ffn_decl = declare_ffn(transform=OutputTransform(double, before_reduce_scatter=permitted))
        attn, ffn = layer(make, ffn=ffn_decl)
        through_attention(attn, ffn, batch, parallel)
        whole = rows_of("out", 8)
        handle = run_ffn(ffn, batch, whole, parallel.tp)
        assert isinstance(handle, OwedOutput) is permitted
        done = residual_batch.complete_output(handle, batch)
        return torch.equal(done, 2 * whole[4 * parallel.at.dp : 4 * parallel.at.dp + 4])

    results, events = on_ranks(
        rank_main, tokens=(4, 4), attention_dp=2, padding=PaddingMode.MAX_LEN,
        runtime={"boundary_reduction": policy},
    )  # fmt: skip
    assert all(results)
    assert order == [("transform", 8)] * 2
    expected = "reduce_scatter" if permitted and policy == "rs" else "all_reduce"
    assert ops(events) == ["all_gather", expected]


@pytest.mark.parametrize("policy", ["ar", "rs"])
def test_a_local_tail_is_never_left_and_counted_once(policy):
    """The replicated tail joins the sum's result, or one rank's term where a reduce-scatter sums."""

    def rank_main(parallel, batch, make):
        attn, ffn = layer(make, ffn=declare_ffn(reduction=ProducerReduction.LOCAL_TAIL))
        through_attention(attn, ffn, batch, parallel)
        whole, tail = rows_of("out", 8), rows_of("tail", 8)
        with ffn.exit(batch) as output:
            value = term_of(whole, parallel.tp)
            assert not output.fuse_mlp_allreduce
            if output.mlp_reduce_scatter:
                value = value + tail if parallel.tp.rank == 0 else value
            else:
                value = parallel.tp.all_reduce(value, "compute sums") + tail
        done = output.finish(value)
        assert not isinstance(done, OwedOutput)
        return torch.equal(done, (whole + tail)[4 * parallel.at.dp : 4 * parallel.at.dp + 4])

    results, events = on_ranks(
        rank_main, tokens=(4, 4), attention_dp=2, padding=PaddingMode.MAX_LEN,
        runtime={"boundary_reduction": policy},
    )  # fmt: skip
    assert all(results)
    assert ops(events) == ["all_gather", "reduce_scatter" if policy == "rs" else "all_reduce"]


def test_a_mixers_exit_leaves_its_sum_always_before_an_ffn_and_per_batch_before_a_mixer():
    mixer = declare_attn(reduction=ProducerReduction.SCOPED, gathers_tp_input=False)

    def rank_main(parallel, batch, make):
        answers = []
        for following, terminal in [(declare_ffn(), False), (mixer, False), (None, False), (None, True)]:
            (boundary,) = make((mixer, norm()), previous=declare_ffn(), following=following, terminal=terminal)
            residual_batch.start(batch)
            answers.append(boundary.exit(batch).skips_reduction)
        return answers

    for topology, tokens, want in [
        ({"attention_tp": 2}, (3,), [True, True, False, False]),
        ({"attention_tp": 2}, (0,), [True, False, False, False]),
        ({"attention_dp": 2, "attention_tp": 2}, (3, 3), [True, False, False, False]),
        ({"attention_dp": 2}, (3, 3), [False, False, False, False]),
    ]:
        results, _ = on_ranks(rank_main, tokens=tokens, **topology)
        assert results == [want] * len(results)


def test_the_terminal_stage_of_a_partial_mixer_completes_its_own_sum():
    def rank_main(parallel, batch, make):
        (boundary,) = make((declare_attn(), norm()), terminal=True)
        enter(boundary, batch, rows_of("x", 4))
        out = boundary.finish(term_of(rows_of("out", 4), parallel.attention_tp), batch)
        return torch.equal(out, rows_of("out", 4))

    results, events = on_ranks(rank_main, attention_tp=2)
    assert all(results) and ops(events) == ["all_reduce"]


def test_the_path_is_looked_up_once_per_exit():
    def rank_main(parallel, batch, make):
        attn, ffn = layer(make)
        through_attention(attn, ffn, batch, parallel)
        looked_up = []
        select = ffn.plan.select
        ffn.plan.select = lambda batch: looked_up.append(batch) or select(batch)
        run_ffn(ffn, batch, rows_of("out", 4), parallel.tp)
        return len(looked_up)

    assert on_ranks(rank_main, attention_tp=2)[0] == [1, 1]


@pytest.mark.parametrize("tp", [1, 2])
def test_an_exit_is_traced_into_one_graph(tp):
    """`torch.compile(fullgraph=True)` follows the exit scope, its flags and the handle on a sum left to the final norm.

    The collective itself is stood in for: an exchange with other ranks through the host is no graph operation.
    """
    parallel = ThreadWorld(Topology(attention_tp=tp)).join(0)
    sums = []
    parallel.tp.all_reduce = lambda term, key="": sums.append(key) or term + term
    attn, ffn = build(parallel, lambda: make_stages((declare_attn(), norm("attn")), (declare_ffn(), norm("ffn"))))
    batch = ForwardBatch(RowFacts(((4,),), ((4,),)))
    weight, final = rows_of("w", HIDDEN), norm("final")

    def forward(hidden):
        residual_batch.start(batch)
        hidden = attn.prepare(hidden, batch)
        hidden = attn.finish(hidden, batch)
        hidden = ffn.prepare(hidden, batch)
        with ffn.exit(batch) as output:
            hidden = hidden @ weight
            if not get_forward().fuse_mlp_allreduce:
                hidden = parallel.tp.all_reduce(hidden) if tp > 1 else hidden
        hidden = output.finish(hidden)
        return residual_batch.norm(hidden, batch, final)

    with torch.no_grad():
        hidden = rows_of("x", 4)
        compiled = torch.compile(forward, fullgraph=True, backend="eager")(hidden)
        assert len(sums) == (2 if tp > 1 else 0)
        assert torch.equal(compiled, forward(hidden))
        # Its own sum and the output's: with the flag up, compute runs none.
        assert sums == ["sum over attention TP", "sum over full TP"] * (2 if tp > 1 else 0)

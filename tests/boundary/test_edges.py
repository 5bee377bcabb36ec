"""Construction: which rows and sums each stage gets, what is refused, and how stages are assembled."""

from __future__ import annotations

import itertools

import pytest
import torch
from stacks import reference
from stacks.decoders import HybridDecoder
from stacks.worlds import build, on_threads

from boundary import (
    BatchVariant,
    ProducerReduction,
    Runtime,
    Topology,
    bind,
    declare_attn,
    declare_ffn,
    make_attn_stage,
    make_ffn_stage,
    make_stages,
)
from boundary.boundary import make_boundary, make_output_boundary
from boundary.construction import leaves_sum, resolve_input
from boundary.contracts import EdgeDecl, Leaves, Order, StageInput, StageKind, StageOutput
from boundary.layout import ATTN_CP, ATTN_DP, ATTN_TP_SCATTER, FULL, Layout, SumGroup
from boundary.residual import batch as residual_batch
from boundary.residual.add_norm import AddNormRead, AddUpdate
from boundary.residual.mhc import MhcRead, MhcUpdate

from .checks import HIDDEN, enter, layer, norm, on_ranks, ops, rows_of, term_of
from .test_decoders import CONFIG, check_batches, embedded, expected

MIXER = declare_attn(reduction=ProducerReduction.SCOPED, gathers_tp_input=False)


def of_topology(rank_main, runtime=None, **topology):
    """`rank_main(runtime)` on each rank of a topology."""
    return on_threads(
        Topology(**topology),
        lambda parallel: rank_main(Runtime(parallel, **{"boundary_reduction": "rs+rsv", **(runtime or {})})),
    )


def test_size_one_axes_are_left_out_of_layouts():
    topology = Topology(attention_dp=2, attention_tp=1)
    assert topology.layout(ATTN_DP, ATTN_CP, ATTN_TP_SCATTER) == Layout(frozenset({ATTN_DP}))
    assert Topology().layout(ATTN_DP, ATTN_TP_SCATTER) == FULL


def test_declarations_refuse_the_other_kinds_contract():
    with pytest.raises(ValueError, match=r"^PARTIAL is not supported for ffn stages$"):
        declare_ffn(reduction=ProducerReduction.PARTIAL)
    with pytest.raises(ValueError, match=r"^LOCAL_TAIL is not supported for attention stages$"):
        declare_attn(reduction=ProducerReduction.LOCAL_TAIL)


def test_a_full_tp_sum_on_rows_that_its_ranks_do_not_share_is_refused():
    def rank_main(runtime):
        rows = runtime.parallel.topology.layout(ATTN_DP)
        over = runtime.parallel.bound_sum(SumGroup.TP)
        with pytest.raises(ValueError, match="different tokens"):
            make_output_boundary(
                StageOutput(rows, over, rows, rows), AddUpdate(), runtime.mover, transform=None,
                permits=frozenset(), contract=None,
            )  # fmt: skip
        return True

    assert all(of_topology(rank_main, attention_dp=2))


def test_orders_that_add_before_the_sum_need_a_plain_addition():
    def rank_main(runtime):
        rows = runtime.parallel.topology.layout(ATTN_DP)
        for order in (Order.JOIN_THEN_GATHER, Order.JOIN_SLICES):
            edge = EdgeDecl(None, StageInput(FULL, rows, order), rows, rows, None)
            with pytest.raises(ValueError, match="plain addition"):
                make_boundary(edge, AddNormRead(), norm(), runtime.mover, update_is_plain=False, model_rows=rows)
        return True

    assert all(of_topology(rank_main, attention_dp=2, attention_tp=2))


def test_a_residual_that_cannot_be_moved_to_its_reader_is_refused():
    """Layouts of one topology form a chain; an edge between two that do not is of no topology."""

    def rank_main(runtime):
        scatter, shard = Layout(frozenset({ATTN_TP_SCATTER})), Layout(frozenset({ATTN_CP}))
        edge = EdgeDecl(None, StageInput(FULL, scatter), shard, scatter, None)
        with pytest.raises(ValueError, match="no move of the residual from ATTN_CP to ATTN_TP_SCATTER"):
            make_boundary(edge, AddNormRead(), norm(), runtime.mover, update_is_plain=True, model_rows=FULL)
        return True

    assert all(of_topology(rank_main, attention_tp=2))


@pytest.mark.parametrize("topology, read, want", [
    ({"attention_dp": 2, "attention_tp": 2}, AddNormRead(), Order.JOIN_THEN_GATHER),
    ({"attention_dp": 2, "attention_tp": 2}, AddNormRead(before_gather=True), Order.PLAIN),
    ({"attention_dp": 4}, AddNormRead(), Order.PLAIN),
    ({"attention_tp": 4}, AddNormRead(), Order.PLAIN),
    ({"attention_dp": 2, "attention_cp": 2, "attention_tp": 2}, AddNormRead(), Order.PLAIN),
])  # fmt: skip
def test_when_the_residual_joins_the_sum_before_the_gather(topology, read, want):
    def rank_main(runtime):
        decl = declare_ffn(read=read, previous=declare_attn())
        return resolve_input(decl, runtime, BatchVariant.ORDINARY).order

    assert set(of_topology(rank_main, **topology)) == {want}


@pytest.mark.parametrize("read, sequence", [
    (AddNormRead(), ["all_reduce"]),
    (AddNormRead(before_gather=True), ["all_reduce", "all_gather"]),
])  # fmt: skip
def test_both_orders_make_the_same_input(read, sequence):
    def rank_main(parallel, batch, make):
        attn, ffn = layer(make, ffn=declare_ffn(read=read))
        dp = parallel.at.dp
        enter(attn, batch, rows_of(f"x{dp}", 4))
        handle = attn.finish(term_of(rows_of(f"a{dp}", 4), parallel.attention_tp), batch)
        prepared = ffn.prepare(handle, batch)
        totals = [rows_of(f"x{at}", 4) + rows_of(f"a{at}", 4) for at in range(2)]
        assert torch.equal(batch.residual_stream.residual.tensor, totals[dp])
        return torch.equal(prepared, norm("ffn")(torch.cat(totals)))

    results, events = on_ranks(rank_main, tokens=(4, 4), attention_dp=2, attention_tp=2)
    assert all(results)
    assert ops(events) == sequence


@pytest.mark.parametrize("producer, consumer, topology, want", [
    (declare_attn(), StageKind.FFN, {"attention_tp": 2}, Leaves.ALWAYS),
    (declare_attn(), StageKind.ATTN, {"attention_tp": 2}, Leaves.ALWAYS),
    (MIXER, StageKind.FFN, {"attention_tp": 2}, Leaves.ALWAYS),
    (MIXER, StageKind.FFN, {"attention_dp": 2, "attention_tp": 2}, Leaves.ALWAYS),
    (MIXER, StageKind.ATTN, {"attention_tp": 2}, Leaves.PER_BATCH),
    (MIXER, StageKind.ATTN, {"attention_dp": 2, "attention_tp": 2}, Leaves.NEVER),
    (MIXER, None, {"attention_tp": 2}, Leaves.NEVER),
    (MIXER, StageKind.FFN, {"attention_dp": 2}, Leaves.NEVER),
    (declare_ffn(), StageKind.ATTN, {"attention_tp": 2}, Leaves.NEVER),
    (declare_ffn(sparse=True), StageKind.ATTN, {"attention_tp": 2}, Leaves.NEVER),
])  # fmt: skip
def test_both_sides_of_an_edge_agree_on_what_a_mixer_leaves(producer, consumer, topology, want):
    def rank_main(runtime):
        assert leaves_sum(producer, consumer, runtime) is want
        with bind(runtime):
            following = None if consumer is None else {StageKind.FFN: declare_ffn(), StageKind.ATTN: MIXER}[consumer]
            (stage,) = make_stages((producer, norm()), following=following)
            assert stage.plan.paths[BatchVariant.ORDINARY].exit.output.leaves_sum is want
            if following is not None:
                (next_stage,) = make_stages((following, norm()), previous=producer)
                expects = next_stage.plan.paths[BatchVariant.ORDINARY].entry.edge.expects_sum
                assert (expects is not None) is (want is Leaves.ALWAYS)
                assert expects is None or expects.group is runtime.parallel.attention_tp
        return True

    assert all(of_topology(rank_main, **topology))


@pytest.mark.parametrize("topology, moe, want", [
    ({"attention_tp": 4}, {"moe_ep": 2}, "tp"),
    ({"attention_tp": 4}, {"moe_ep": 4}, "moe_ep"),
    ({"attention_tp": 4}, {"moe_ep": 1}, "moe_tp"),
    ({"attention_cp": 2, "attention_tp": 4}, {"moe_ep": 2, "moe_dp": 2}, None),
    ({"attention_cp": 2, "attention_tp": 2}, {"moe_ep": 2, "moe_dp": 2}, "moe_ep"),
    ({"attention_cp": 2}, {"moe_dp": 2}, None),
    ({}, {}, None),
])  # fmt: skip
def test_the_group_that_sums_a_moe_output(topology, moe, want):
    """One group covers the terms or nothing is left to a boundary; equal ranks are the same group."""

    def rank_main(runtime):
        over = runtime.parallel.bound_sum(SumGroup.MOE_OUTPUT)
        if want is None:
            return over is None
        assert (over.group is runtime.parallel.tp) is (moe.get("moe_dp", 1) == 1)
        return over.group is getattr(runtime.parallel, want)

    assert all(of_topology(rank_main, **topology, **moe))


def test_terminal_and_entry_are_facts_of_the_declared_stack():
    def rank_main(runtime):
        with bind(runtime):
            attn, ffn = make_stages((declare_attn(), norm()), (declare_ffn(), norm()), terminal=True)
            assert not attn.declaration.terminal and ffn.declaration.terminal
            assert attn.plan.paths[BatchVariant.ORDINARY].entry.enters
            assert not ffn.plan.paths[BatchVariant.ORDINARY].entry.enters
            (later,) = make_stages((declare_attn(), norm()), previous=declare_ffn())
            assert not later.plan.paths[BatchVariant.ORDINARY].entry.enters
            output = ffn.plan.paths[BatchVariant.ORDINARY].exit.output
            return not (output.leaves_for_input or output.leaves_for_scatter)

    assert all(of_topology(rank_main, attention_tp=2))


def test_assembly_refuses_what_belongs_elsewhere():
    runtime = Runtime(boundary_reduction="ar")
    attn, ffn = declare_attn(), declare_ffn()
    last = declare_attn(terminal=True)
    cases = [
        (lambda: make_stages((declare_attn(previous=ffn), norm())), ValueError, "not to the declarations"),
        (lambda: make_stages((declare_ffn(terminal=True), norm())), ValueError, "not to the declarations"),
        (lambda: make_stages(), ValueError, "at least one"),
        (lambda: make_stages((ffn, norm()), previous=attn, prepared_from=attn), ValueError, "not both"),
        (lambda: make_stages((ffn, norm()), terminal=True, following=attn), ValueError, "terminal"),
        (lambda: make_stages((ffn, norm(), {"qkv_latent_func": print})), TypeError, r"an (FFN|ffn)"),
        (lambda: make_stages((attn, norm(), {"unknown": 1})), TypeError, r"attention stage.*unknown"),
        (lambda: make_attn_stage(ffn, norm()), ValueError, "attention stages"),
        (
            lambda: make_ffn_stage(ffn, norm(), following=declare_attn()),
            ValueError,
            "must name this producer",
        ),
        (lambda: declare_ffn(scattered_residual="other"), ValueError, "other"),
        (lambda: make_ffn_stage(declare_ffn(previous=attn, prepared_from=attn), norm()), ValueError, "not both"),
        (lambda: make_attn_stage(last, norm(), following=declare_ffn(previous=last)), ValueError, "nothing following"),
        (
            lambda: make_stages((attn, norm()), following=declare_ffn(previous=declare_ffn(sparse=True))),
            ValueError,
            "must name this producer",
        ),
    ]
    with bind(runtime):
        for call, error, text in cases:
            with pytest.raises(error, match=text):
                call()
        single = declare_ffn(previous=attn)
        assert make_ffn_stage(single, norm(), following=declare_attn(previous=single)) is not None
        assert make_stages((attn, norm()), previous=ffn, following=declare_ffn(previous=attn))


def test_an_unresolved_policy_stops_construction():
    with bind(Runtime()), pytest.raises(ValueError, match="resolved per architecture"):
        make_stages((declare_ffn(), norm()))
    with bind(Runtime().for_model("Qwen3MoeForCausalLM")):
        make_stages((declare_ffn(), norm()))


def test_an_active_variant_without_a_path_is_refused_by_name():
    def rank_main(parallel, batch, make):
        attn, _ = layer(make)
        residual_batch.start(batch)
        with pytest.raises(RuntimeError) as error:
            attn.prepare(rows_of("x", 4), batch)
        assert str(error.value) == "no stage boundary path for the active INPUT_SCATTERED batch"
        return True

    assert all(on_ranks(rank_main, attention_tp=2, batch_options={"input_scattered": True})[0])


@pytest.mark.parametrize("options, topology", [
    ({"input_scattered": True}, {"attention_dp": 2, "attention_tp": 2}),
    ({"input_scattered": True}, {"attention_cp": 2, "attention_tp": 2}),
    ({"sequence_parallel": True}, {"attention_cp": 2}),
    ({}, {"attention_tp": 4, "moe_dp": 2}),
    ({}, {"attention_dp": 2, "attention_cp": 2, "moe_dp": 2}),
])  # fmt: skip
def test_combinations_without_a_correct_path_are_refused(options, topology):
    with pytest.raises(ValueError):
        of_topology(lambda runtime: runtime, runtime=options, **topology)


def test_branches_are_refused_where_other_variants_may_come():
    def rank_main(runtime):
        source = declare_ffn(sparse=True, previous=declare_attn())
        with bind(runtime), pytest.raises(ValueError, match="ordinary token rows"):
            make_stages((declare_ffn(), norm()), prepared_from=source)
        return True

    assert all(of_topology(rank_main, attention_cp=2))
    for variant in ("input_scattered", "sequence_parallel"):
        assert all(of_topology(rank_main, runtime={variant: True}, attention_tp=2))


def test_an_ffn_update_that_does_not_outlive_its_layer_runs_at_the_producer():
    read = MhcRead(lambda wide: wide, 1, HIDDEN)
    with bind(Runtime(boundary_reduction="ar")):
        with pytest.raises(ValueError, match="outlive"):
            make_stages((declare_ffn(update=MhcUpdate(1), read=read), norm()))
        make_stages((declare_ffn(update=MhcUpdate(1, at_producer=True), read=read), norm()))


@pytest.mark.parametrize("tbo, want", [(False, True), (True, False)])
def test_a_dense_layer_before_a_sparse_one_hands_on_attentions_rows_only_for_overlap(tbo, want):
    def rank_main(runtime):
        with bind(runtime):
            (stage,) = make_stages((declare_ffn(next_sparse=True), norm()), previous=declare_attn())
            handoff = stage.plan.paths[BatchVariant.ORDINARY].exit.output.handoff_rows
            (consumer,) = make_stages((declare_attn(), norm()), previous=declare_ffn(next_sparse=True))
            assert consumer.plan.paths[BatchVariant.ORDINARY].entry.edge.input.read_rows == handoff
            return ATTN_TP_SCATTER in handoff.sharded

    options = {"dense_local": True, "two_batch_overlap": tbo}
    assert set(of_topology(rank_main, runtime=options, attention_dp=2, attention_tp=2)) == {want}


def test_neighbours_are_described_not_touched():
    """The same declarations, grouped into one call or many, bind the same contracts."""

    def rank_main(runtime):
        decls = [MIXER, declare_ffn(), MIXER, declare_ffn(sparse=True)]
        with bind(runtime):
            together = make_stages(*((decl, norm()) for decl in decls), terminal=True)
            apart = [
                make_stages(
                    (decl, norm()),
                    previous=decls[index - 1] if index else None,
                    following=decls[index + 1] if index < 3 else None,
                    terminal=index == 3,
                )[0]
                for index, decl in enumerate(decls)
            ]
        for one, other in zip(together, apart, strict=True):
            left, right = (stage.plan.paths[BatchVariant.ORDINARY].decl for stage in (one, other))
            assert left == right
        return True

    assert all(of_topology(rank_main, attention_dp=2, attention_tp=2))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_any_sequence_of_stages_computes_its_value(length):
    patterns = ["".join(letters) for letters in itertools.product("M*-E", repeat=length)]

    def make():
        return torch.nn.ModuleList(HybridDecoder(pattern) for pattern in patterns)

    def call(models, ids, batch, parallel):
        return torch.cat([model(ids, batch) for model in models], dim=1)

    check_batches(
        Topology(attention_tp=2),
        make,
        lambda at, count: torch.cat([expected(pattern, at, count) for pattern in patterns], dim=1),
        batches=[(None, [3])],
        call=call,
    )


def test_a_stack_entered_at_the_embedding_of_another_width_is_refused():
    from stacks.decoders import HyperConnectedDecoder

    def rank_main(parallel):
        model = build(parallel, lambda: HyperConnectedDecoder([False]))
        read = model.boundaries[0][0].declaration.read
        narrow, wide = embedded(0, 3), embedded(0, 3).repeat(1, CONFIG.streams)
        assert torch.equal(read.enter(narrow, FULL).tensor, wide)
        assert read.enter(wide, FULL).tensor is wide
        with pytest.raises(ValueError, match="width 3"):
            read.enter(narrow[:, :3], FULL)
        assert read.enter(narrow[:0], FULL).tensor.shape == (0, CONFIG.hidden * CONFIG.streams)
        return True

    assert all(on_threads(Topology(), rank_main))


def test_a_hyper_connection_update_uses_its_own_coefficients_once():
    streams = 2
    update = MhcUpdate(streams)
    read = MhcRead(lambda wide: reference.coefficients("c", CONFIG, wide), streams, CONFIG.hidden)
    _, residual = read.read(read.enter(embedded(0, 3), FULL), norm())
    updated = update.apply(embedded(1, 3), residual)
    assert updated.coefficients == () and updated.tensor.shape == residual.tensor.shape
    with pytest.raises(RuntimeError, match="its own stage's read"):
        update.apply(embedded(1, 3), updated)


def test_an_empty_batch_keeps_the_wide_shape_and_spends_its_coefficients():
    from stacks.decoders import HyperConnectedDecoder

    def rank_main(parallel):
        model = build(parallel, lambda: HyperConnectedDecoder([False]))
        attn, ffn = model.boundaries[0]
        from stacks.worlds import batch_of

        _, batch = batch_of(parallel, [0])
        residual_batch.start(batch)
        prepared = attn.prepare(embedded(0, 0), batch)
        assert prepared.shape == (0, CONFIG.hidden)
        residual = batch.residual_stream.residual
        assert residual.tensor.shape == (0, 2 * CONFIG.hidden) and len(residual.coefficients) == 2
        ffn.prepare(attn.finish(prepared, batch), batch)
        with ffn.exit(batch) as output:
            pass
        out = output.finish(prepared)
        return out.shape == (0, CONFIG.hidden) and not batch.residual_stream.residual.coefficients

    assert all(on_threads(Topology(attention_tp=2), rank_main))


def test_entering_a_stack_runs_no_collective():
    _, events = on_ranks(
        lambda parallel, batch, make: enter(layer(make)[0], batch, rows_of("x", 4)) is not None,
        attention_tp=2,
    )
    assert ops(events) == []

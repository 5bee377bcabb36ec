"""Linears and reductions that obey the contract above them, and the check that they do."""

from __future__ import annotations

import pytest
import torch
from stacks.decoders import Decoder
from stacks.parts import Attention, Moe, dense_mlp
from stacks.weights import weight
from stacks.worlds import batch_of, build, on_threads
from torch import nn

from boundary import (
    OwedOutput,
    PaddingMode,
    ProducerReduction,
    Runtime,
    SumGroup,
    Topology,
    bind,
    declare_attn,
    declare_ffn,
    get_forward,
    make_stages,
)
from boundary.collectives import record
from boundary.linear import ColumnParallelLinear, MoeOutputReduction, RowParallelLinear, check_compute, declared_groups
from boundary.parallel import SoloGroup
from boundary.residual import batch as residual_batch
from boundary.runtime import bound_runtime

from .checks import enter, layer, norm, on_ranks, ops, rows_of, term_of
from .test_decoders import CONFIG, MOE, expected


def test_column_then_row_is_the_whole_linear_pair():
    whole_up, whole_down = weight("up", 12, 8), weight("down", 8, 12)
    bias_up, bias_down = weight("bu", 12), weight("bd", 8)

    def rank_main(parallel):
        with bind(Runtime(parallel, boundary_reduction="ar")):
            up = ColumnParallelLinear(8, 12, bias=True, packed=(8, 4))
            down = RowParallelLinear(12, 8, bias=True)
            alone = RowParallelLinear(12, 8, reduce_results=False)
        up.load_whole(whole_up, bias_up)
        down.load_whole(whole_down.index_select(1, _order(parallel.tp.size)), bias_down)
        alone.load_whole(whole_down)
        x = rows_of("x", 3)
        made = down(up(x))
        assert torch.equal(made, (x @ whole_up.T + bias_up) @ whole_down.T + bias_down)
        # Without reduce_results the term is returned, and nothing is exchanged.
        return alone(up(x)).shape == (3, 8)

    def _order(size):
        """Packed parts are dealt out each on its own, so the ranks' features interleave."""
        parts = torch.arange(12).split((8, 4))
        return torch.cat([part.tensor_split(size)[rank] for rank in range(size) for part in parts])

    for tp in (1, 2, 4):
        with record() as events:
            assert all(on_threads(Topology(attention_tp=tp), rank_main))
        assert sum(event.rank == 0 for event in events) == (tp > 1)


def test_sizes_that_do_not_divide_are_refused():
    def rank_main(parallel):
        with bind(Runtime(parallel, boundary_reduction="ar")):
            with pytest.raises(ValueError, match="out_features=3"):
                ColumnParallelLinear(8, 3)
            with pytest.raises(ValueError, match="in_features=3"):
                RowParallelLinear(3, 8)
            with pytest.raises(ValueError, match="does not add up"):
                ColumnParallelLinear(8, 4, packed=(2, 4))
        return True

    assert all(on_threads(Topology(attention_tp=2), rank_main))


def test_attention_sums_over_attention_tp_and_ffns_over_full_tp():
    def rank_main(parallel):
        with bind(Runtime(parallel, boundary_reduction="ar")):
            mixer, ffn = RowParallelLinear(8, 8, SumGroup.ATTN_TP), RowParallelLinear(8, 8)
        return mixer.group is parallel.attention_tp and ffn.group is parallel.tp

    assert all(on_threads(Topology(attention_dp=2, attention_tp=2), rank_main))


def test_a_row_parallel_linear_reads_the_flags_of_the_open_exit():
    def rank_main(parallel, batch, make):
        with bind(Runtime(parallel, boundary_reduction="ar")):
            linear = RowParallelLinear(8, 8)
        linear.load_whole(weight("w", 8, 8))
        attn, ffn = layer(make)
        enter(attn, batch, rows_of("x", 4))
        prepared = ffn.prepare(attn.finish(term_of(rows_of("a", 4), parallel.attention_tp), batch), batch)
        mine = prepared.tensor_split(2, dim=1)[parallel.tp.rank]
        with ffn.exit(batch) as output:
            value = linear(mine)
        handle = output.finish(value)
        assert isinstance(handle, OwedOutput)
        whole = prepared @ weight("w", 8, 8).T
        assert torch.equal(residual_batch.complete_output(handle, batch), whole)
        return torch.equal(linear(mine), whole)

    results, events = on_ranks(rank_main, attention_tp=2)
    assert all(results) and ops(events) == ["all_reduce"] * 3


@pytest.mark.parametrize("topology, runtime, num_sums", [
    ({"attention_tp": 4, "moe_ep": 2}, {}, 1),
    ({"attention_tp": 4, "moe_ep": 4}, {}, 1),
    ({"attention_tp": 4}, {}, 1),
    ({"attention_tp": 2, "moe_ep": 2}, {"a2a_backend": "x"}, 0),
    ({"attention_cp": 2, "attention_tp": 4, "moe_ep": 2, "moe_dp": 2}, {}, 2),
    ({}, {}, 0),
])  # fmt: skip
def test_a_moe_output_is_summed_as_often_as_its_groups_need(topology, runtime, num_sums):
    def rank_main(parallel):
        with bind(Runtime(parallel, boundary_reduction="ar", **runtime)):
            reduction = MoeOutputReduction()
        whole, terms = rows_of("whole", 3), rows_of("whole", 3) / 8
        groups = reduction.groups
        size = 1
        for group in groups:
            size *= group.size
        return torch.equal(reduction(terms * 8 / size), whole)

    with record() as events:
        assert all(on_threads(Topology(**topology), rank_main))
    assert sum(event.rank == 0 and event.ranks[0] == 0 for event in events) == num_sums


@pytest.mark.parametrize("policy, padding", [("ar", PaddingMode.SUM_LEN), ("rs", PaddingMode.MAX_LEN)])
@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("dp, tp", [(1, 2), (2, 1), (2, 2)])
def test_a_shared_expert_counts_once(dp, tp, replicated, policy, padding):
    """Sharded it joins the routed term; replicated it joins one rank's, whichever transport sums."""
    tokens = [4, 2][:dp]

    def rank_main(parallel):
        model = build(
            parallel, lambda: Decoder([True]), boundary_reduction=policy, shared_expert_tp1=replicated,
            allreduce_fusion=True,
        )  # fmt: skip
        ids, batch = batch_of(parallel, tokens, padding)
        return model(ids, batch)

    results = on_threads(Topology(attention_dp=dp, attention_tp=tp, moe_ep=dp * tp), rank_main)
    for rank, result in enumerate(results):
        count = tokens[rank // tp]
        assert torch.equal(result[:count], expected(MOE, rank // tp, count))


def test_a_moe_that_needs_two_sums_reads_no_flag():
    def rank_main(parallel):
        with bind(Runtime(parallel, boundary_reduction="ar")):
            reduction = MoeOutputReduction()
        assert len(reduction.groups) == 2 and parallel.bound_sum(SumGroup.MOE_OUTPUT) is None
        return True

    assert all(on_threads(Topology(attention_cp=2, attention_tp=4, moe_ep=2, moe_dp=2), rank_main))


class Summing(nn.Module):
    def __init__(self, *linears):
        super().__init__()
        self.linears = nn.ModuleList(linears)


def test_a_compute_that_breaks_its_contract_is_refused_where_the_model_is_built():
    def rank_main(parallel, batch, make):
        with bind(Runtime(parallel, boundary_reduction="ar")):
            sums = [RowParallelLinear(8, 8, SumGroup.ATTN_TP) for _ in range(2)]
            quiet = RowParallelLinear(8, 8, SumGroup.ATTN_TP, reduce_results=False)
            unsharded = RowParallelLinear(8, 8, SoloGroup(), reduce_results=False)
            good_attention, good_mlp = Attention("x", CONFIG), dense_mlp("x", CONFIG)
            moe = Moe("x", CONFIG)
        attn, ffn = layer(make)
        mixer = declare_attn(reduction=ProducerReduction.SCOPED)
        (scoped,) = make((mixer, norm()), following=declare_ffn())
        check_compute(attn, good_attention)
        check_compute(ffn, good_mlp)
        check_compute(ffn, moe)
        with bind(Runtime(parallel, boundary_reduction="ar")):
            whole = RowParallelLinear(8, 8, SoloGroup())
        for boundary, compute, text in [
            (attn, Summing(sums[0]), "nothing sums.*linears.0"),
            (attn, Summing(unsharded), "whole output"),
            (ffn, Summing(whole), "exactly one reduction sums, and here do none"),
            (scoped, Summing(quiet), "exactly one reduction sums, and here do none"),
            (scoped, Summing(*sums), "exactly one reduction sums"),
            (ffn, Summing(sums[0], MoeOutputReduction(Runtime(parallel))), "exactly one"),
        ]:
            with pytest.raises(ValueError, match=text):
                check_compute(boundary, compute)
        check_compute(attn, Summing(quiet))
        check_compute(scoped, Summing(sums[0]))
        return True

    assert all(on_ranks(rank_main, attention_tp=2)[0])


def mlp_over(over, **options):
    return Summing(ColumnParallelLinear(8, 8, over), RowParallelLinear(8, 8, over, **options))


@pytest.mark.parametrize("topology, runtime, declare, compute, text", [
    # Attention TP holds half of the terms of a dense FFN's sum, each of them twice.
    ((2, 1, 2), {}, declare_ffn, lambda: mlp_over(SumGroup.ATTN_TP), "declares a sum over"),
    ((2, 1, 2), {}, declare_ffn, lambda: mlp_over(SumGroup.TP), None),
    ((1, 2, 2), {}, declare_ffn, lambda: mlp_over(SumGroup.ATTN_TP), "declares a sum over"),
    # A MoE's one reduction sums over what expert and MoE tensor parallelism cover; a plain linear does not.
    ((1, 1, 4, 2), {}, lambda: declare_ffn(sparse=True), MoeOutputReduction, None),
    ((1, 1, 4, 2), {}, lambda: declare_ffn(sparse=True), lambda: mlp_over(SumGroup.MOE_OUTPUT), "declares a sum"),
    ((1, 2, 4, 2, 2), {}, lambda: declare_ffn(sparse=True), MoeOutputReduction, None),
    ((1, 2, 4, 2, 2), {}, lambda: declare_ffn(sparse=True), lambda: mlp_over(SumGroup.TP), "declares a sum over"),
    ((1, 2, 4, 2, 2), {}, declare_ffn, MoeOutputReduction, "declares a sum over"),
    # On rows of its own a rank has nothing to add to another's.
    ((1, 1, 2, 2), {"a2a_backend": "x"}, lambda: declare_ffn(sparse=True), lambda: mlp_over(SumGroup.TP), "complete"),
    ((1, 1, 2, 2), {"a2a_backend": "x"}, lambda: declare_ffn(sparse=True), MoeOutputReduction, None),
    ((1, 1, 2), {"dense_local": True}, declare_ffn, lambda: mlp_over(SumGroup.TP), "complete without a sum"),
    ((2,), {}, lambda: declare_attn(reduction=ProducerReduction.SCOPED), lambda: mlp_over(SumGroup.TP), "complete"),
    # A PARTIAL projection's terms are those of attention TP's sum.
    ((2, 1, 2), {}, declare_attn, lambda: mlp_over(SumGroup.TP, reduce_results=False), "another sum's term"),
    ((2, 1, 2), {}, declare_attn, lambda: mlp_over(SumGroup.ATTN_TP, reduce_results=False), None),
    ((2,), {}, declare_attn, lambda: mlp_over(SumGroup.TP, reduce_results=False), "another sum's term"),
    # Two groups of two ranks on a mesh of 2 x 2 are not one another.
    ((2, 1, 2, 2), {}, lambda: declare_attn(reduction=ProducerReduction.SCOPED),
     lambda: mlp_over(bound_runtime().parallel.attention_dp), "declares a sum over"),
])  # fmt: skip
def test_the_reduction_sums_over_the_declared_group_and_no_other(topology, runtime, declare, compute, text):
    def rank_main(parallel):
        with bind(Runtime(parallel, boundary_reduction="ar", **runtime)):
            (boundary,) = make_stages((declare(), norm()))
            module = Summing(compute())
            groups = declared_groups(boundary.declaration, boundary.plan.runtime)
            for path in boundary.plan.paths.values():
                over = path.decl.output.sum
                assert groups == (over.group,) if over is not None else len(groups) != 1
            if text is None:
                check_compute(boundary, module)
            else:
                with pytest.raises(ValueError, match=text):
                    check_compute(boundary, module)
        return True

    names = ("attention_dp", "attention_cp", "attention_tp", "moe_ep", "moe_dp")
    assert all(on_threads(Topology(**dict(zip(names, topology, strict=False))), rank_main))


def test_a_lora_delta_joins_its_base_before_the_one_sum():
    """Base and delta are terms of the same sum: added locally they cost no second collective."""

    def rank_main(parallel, batch, make):
        with bind(Runtime(parallel, boundary_reduction="ar")):
            base = RowParallelLinear(8, 8, reduce_results=False)
            delta = RowParallelLinear(8, 8, reduce_results=False)
        base.load_whole(weight("w", 8, 8))
        delta.load_whole(weight("delta", 8, 8))
        attn, ffn = layer(make)
        enter(attn, batch, rows_of("x", 4))
        prepared = ffn.prepare(attn.finish(term_of(rows_of("a", 4), parallel.attention_tp), batch), batch)
        mine = prepared.tensor_split(2, dim=1)[parallel.tp.rank]
        with ffn.exit(batch) as output:
            assert get_forward().skips_reduction
            value = base(mine) + delta(mine)
        done = residual_batch.complete_output(output.finish(value), batch)
        return torch.equal(done, prepared @ (weight("w", 8, 8) + weight("delta", 8, 8)).T)

    results, events = on_ranks(rank_main, attention_tp=2)
    assert all(results) and ops(events) == ["all_reduce"] * 2


def test_outside_any_exit_no_flag_is_up():
    forward = get_forward()
    assert not (forward.fuse_mlp_allreduce or forward.mlp_reduce_scatter or forward.defer_moe_finalize)

"""Handoffs beside the sequence: token order, latents, LoRA rows, overlap, branches, pipeline cuts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stacks import reference
from stacks.decoders import Decoder, ShortcutDecoder
from stacks.worlds import batch_of, build, on_threads

from boundary import (
    ForwardBatch,
    OwedOutput,
    PaddingMode,
    Topology,
    declare_attn,
    declare_ffn,
)
from boundary.adapters import tbo
from boundary.adapters.cp import TokenDeal, deal_facts, interleaved, zigzag
from boundary.adapters.lora import LoraRows
from boundary.collectives import record
from boundary.forward import pad_counts
from boundary.layout import RowFacts
from boundary.residual import LayerResidual
from boundary.residual import batch as residual_batch
from boundary.residual.add_norm import AddUpdate

from .checks import enter, layer, norm, on_ranks, ops, rows_of, run_ffn, term_of
from .test_decoders import CONFIG, DENSE, MOE, embedded, sparse_of


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([interleaved, zigzag]),
    st.integers(1, 4),
    st.lists(st.integers(1, 19), min_size=1, max_size=4),
)
def test_tokens_come_back_in_the_order_they_were_dealt_from(deal_tokens, degree, lengths):
    deal = deal_tokens(lengths, degree)
    if min(lengths) < 2 * degree:
        assert deal is None
        return
    value = torch.arange(sum(lengths) * 2).reshape(-1, 2) + 1
    shards = [deal.shard(value, rank) for rank in range(degree)]
    assert torch.equal(deal.in_token_order(torch.cat(shards)), value)
    for rank, shard in enumerate(shards):
        assert len(shard) == deal.padded[rank] and not shard[deal.live[rank] :].any()
    assert len(set(deal.padded)) == 1


def test_gathering_and_taking_back_are_each_others_inverse_on_every_rank():
    deal = zigzag([9, 5], 2)
    assert deal is not None
    value = rows_of("v", 14)

    def rank_main(parallel):
        group = parallel.attention_cp
        part = deal.shard(value, group.rank)
        whole = deal.gather(part, group)
        return torch.equal(whole, value) and torch.equal(deal.take_back(whole, group), part)

    assert all(on_threads(Topology(attention_cp=2), rank_main))


def test_a_deal_that_loses_or_repeats_a_token_is_refused():
    with pytest.raises(ValueError, match="exactly one rank"):
        TokenDeal(((0, 1), (1,)), (2, 1))
    with pytest.raises(ValueError, match="less than the tokens"):
        TokenDeal(((0, 1), (2,)), (1, 1))
    with pytest.raises(ValueError, match="do not fit"):
        RowFacts(((2,),), ((3,),))


@pytest.mark.parametrize("policy, op", [("ar", "all_reduce"), ("rs", "reduce_scatter")])
def test_a_dense_mlp_under_context_parallelism_gathers_before_and_takes_its_shard_back(policy, op):
    """Ranks of full TP hold other tokens, so a sum without the gather would add unrelated rows."""

    def rank_main(parallel, batch, make):
        deals = [interleaved([8], 2)]
        cp_batch = ForwardBatch(deal_facts(deals))
        attn, ffn = layer(make)
        cp = parallel.at.cp
        enter(attn, cp_batch, rows_of(f"x{cp}", 4))
        handle = attn.finish(term_of(rows_of(f"a{cp}", 4), parallel.attention_tp), cp_batch)
        prepared = ffn.prepare(handle, cp_batch)
        assert len(prepared) == 8
        handle = run_ffn(ffn, cp_batch, rows_of("out", 8), parallel.tp)
        done = residual_batch.complete_output(handle, cp_batch)
        return torch.equal(done, rows_of("out", 8)[4 * cp : 4 * cp + 4])

    results, events = on_ranks(rank_main, attention_cp=2, attention_tp=2, runtime={"boundary_reduction": policy})
    assert all(results)
    mine = [event.op for event in events if 0 in event.ranks and event.rank == event.ranks.index(0)]
    # Attention TP's own sum, the gather over CP, and the FFN's one sum over all four ranks.
    rest = ["all_gather"] if op == "reduce_scatter" else []
    assert mine == ["all_reduce", "all_gather", op, *rest]


def test_the_latent_is_gathered_instead_of_the_rows():
    """In an input-scattered batch attention projects its slice; otherwise the same call gathers nothing."""

    def rank_main(parallel, batch, make):
        calls = []

        def latent(hidden, forward_batch):
            calls.append(len(hidden))
            return hidden[:, :2] * 2

        for scattered in (True, False):
            one = replace(batch, input_scattered=scattered)
            (attn,) = make((declare_attn(), norm(), {"qkv_latent_func": latent}))
            residual_batch.start(one)
            prepared = attn.prepare(rows_of("x", 4), one)
            whole = norm()(rows_of("x", 4))
            assert len(prepared) == (2 if scattered else 4)
            assert torch.equal(one.attention_input.fetch_qkv_latent(), whole[:, :2] * 2)
            assert torch.equal(one.attention_input.fetch_hidden_states(), whole)
        return calls

    results, events = on_ranks(rank_main, attention_tp=2, runtime={"input_scattered": True})
    assert results == [[2, 4]] * 2
    latent_bytes, row_bytes = (event.nbytes for event in events if event.rank == 0)
    assert latent_bytes * 4 == row_bytes


def test_an_attention_without_an_adapter_gets_its_rows_gathered():
    def rank_main(parallel, batch, make):
        lengths = []
        for gathers in (True, False):
            (attn,) = make((declare_attn(gathers_tp_input=gathers), norm(), {"qkv_latent_func": lambda h, b: h}))
            residual_batch.start(batch)
            lengths.append(len(attn.prepare(rows_of("x", 4), batch)))
        return lengths

    results, _ = on_ranks(
        rank_main, attention_tp=2, runtime={"input_scattered": True}, batch_options={"input_scattered": True}
    )
    assert results == [[2, 4]] * 2


@pytest.mark.parametrize("a2a, topology, want", [
    (None, {"attention_dp": 2}, (LoraRows.DP_LOCAL, LoraRows.TP_GLOBAL)),
    ("x", {"attention_dp": 2}, (LoraRows.DP_LOCAL, LoraRows.DP_LOCAL)),
    (None, {"attention_tp": 2}, (LoraRows.DP_LOCAL, LoraRows.TP_GLOBAL)),
])  # fmt: skip
def test_the_rows_lora_runs_on_are_published_with_the_path(a2a, topology, want):
    def rank_main(parallel, batch, make):
        attn, ffn = layer(make, ffn=declare_ffn(sparse=True))
        rows = batch.rows.cell(parallel.at)[0]
        enter(attn, batch, rows_of("x", rows))
        published = [batch.lora_rows]
        ffn.prepare(attn.finish(term_of(rows_of("a", rows), parallel.attention_tp), batch), batch)
        return *published, batch.lora_rows

    tokens = (4,) * topology.get("attention_dp", 1)
    results, _ = on_ranks(rank_main, tokens=tokens, runtime={"lora": True, "a2a_backend": a2a}, **topology)
    assert set(results) == {want}


class OverlapLayer(torch.nn.Module):
    """A layer whose microbatches take turns at each operation, without exit scopes."""

    def __init__(self, decoder, index):
        super().__init__()
        self.layer = decoder.layers[index]

    def forward(self, hidden, batches):
        layer = self.layer
        steps = [
            lambda x, b: layer.attn_boundary.prepare(x, b),
            lambda x, b: layer.self_attn(x) if len(x) else x,
            lambda x, b: layer.attn_boundary.finish(x, b),
            lambda x, b: layer.ffn_boundary.prepare(x, b),
            lambda x, b: layer.mlp(x),
            lambda x, b: layer.ffn_boundary.postprocess(x, b),
        ]
        for step in steps:
            hidden = [step(x, b) for x, b in zip(hidden, batches, strict=True)]
        return hidden


@pytest.mark.parametrize("dp, tp", [(1, 2), (2, 1), (2, 2)])
def test_two_overlapping_microbatches_compute_what_one_batch_does(dp, tp):
    """Requests are dealt out after the first layer, which leaves its sum, and merge at the end."""
    requests = [[4, 3], [2, 3]][:dp]
    pattern = DENSE + MOE + MOE

    def rank_main(parallel):
        model = build(parallel, lambda: Decoder(sparse_of(pattern)), two_batch_overlap=True)
        runtime = model.layers[0].attn_boundary.plan.runtime
        mine = requests[parallel.at.dp]
        _, batch = batch_of(parallel, [sum(one) for one in requests], PaddingMode.MAX_LEN)
        rows = batch.rows.cell(parallel.at)[0]
        embeddings = [embedded(10 * parallel.at.dp + child, count) for child, count in enumerate(mine)]
        padding = torch.full((rows - sum(mine), CONFIG.hidden), 4.0, dtype=torch.float64)
        residual_batch.start(batch)
        first = model.layers[0]
        # The first layer runs unsplit; its attention sees one request at a time.
        hidden = first.attn_boundary.prepare(torch.cat([*embeddings, padding]), batch)
        parts = [first.self_attn(part) for part in hidden[: sum(mine)].split(mine)]
        attended = torch.cat([*parts, padding[:, :0].new_zeros(len(padding), CONFIG.hidden)])
        hidden = first.attn_boundary.finish(attended, batch)
        hidden = first.ffn_boundary.prepare(hidden, batch)
        with first.ffn_boundary.exit(batch) as output:
            hidden = first.mlp(hidden)
        hidden = output.finish(hidden)
        assert isinstance(hidden, OwedOutput)
        children = [
            ForwardBatch(
                pad_counts([one[child] for one in requests], parallel.topology, PaddingMode.MAX_LEN, batch.mode)
            )
            for child in range(2)
        ]
        halves = tbo.split(hidden, batch, children, mine, runtime)
        assert batch.residual_stream is None
        with pytest.raises(RuntimeError, match="does not belong"):
            model.layers[1].attn_boundary.prepare(halves[1], children[0])
        for index in (1, 2):
            halves = OverlapLayer(model, index)(halves, children)
            assert not any(isinstance(half, OwedOutput) for half in halves)
        merged = tbo.merge(halves, children, batch, mine, runtime)
        assert all(child.residual_stream is None for child in children)
        out = residual_batch.norm(merged, batch, model.norm)
        return out[: sum(mine)].split(mine)

    results = on_threads(Topology(attention_dp=dp, attention_tp=tp, moe_ep=dp * tp), rank_main)
    for rank, outs in enumerate(results):
        at = rank // tp
        for child, out in enumerate(outs):
            want = reference.stack(pattern, CONFIG, embedded(10 * at + child, requests[at][child]))[0]
            assert torch.equal(out, want), (rank, child)


def test_microbatches_merge_only_in_one_state():
    def rank_main(parallel, batch, make):
        attn, _ = layer(make)
        enter(attn, batch, rows_of("x", 4))
        handle = attn.finish(rows_of("a", 4), batch)
        children = [ForwardBatch(RowFacts(((2,),), ((2,),))) for _ in range(2)]
        halves = tbo.split(handle, batch, children, [2, 2], attn.plan.runtime)
        halves[0] = residual_batch.fold(halves[0], children[0])
        with pytest.raises(RuntimeError, match="same state"):
            tbo.merge(halves, children, batch, [2, 2], attn.plan.runtime)
        return True

    assert all(on_ranks(rank_main)[0])


def test_a_microbatch_pads_with_zeros_of_its_own():
    def rank_main(parallel, batch, make):
        attn, _ = layer(make)
        enter(attn, batch, rows_of("x", 4))
        handle = attn.finish(rows_of("a", 4), batch)
        children = [ForwardBatch(RowFacts(((rows,),), ((live,),))) for rows, live in ((4, 3), (4, 1))]
        halves = tbo.split(handle, batch, children, [3, 1], attn.plan.runtime)
        assert [len(half) for half in halves] == [4, 4]
        assert torch.equal(halves[1][0], rows_of("a", 4)[3]) and not halves[1][1:].any()
        return not children[0].residual_stream.residual.tensor[3:].any()

    assert all(on_ranks(rank_main)[0])


def test_a_prepared_branch_is_entered_through_branch_input():
    def rank_main(parallel, batch, make):
        _, source = layer(make, ffn=declare_ffn(sparse=True))
        branch = make((declare_ffn(), norm()), (declare_attn(), norm()), prepared_from=source.declaration)
        residual_batch.start(batch)
        with pytest.raises(RuntimeError) as error:
            branch[0].prepare(rows_of("x", 4), batch)
        assert str(error.value) == "a prepared branch must enter through branch_input, not prepare"
        with pytest.raises(RuntimeError, match="prepared_from"):
            branch[0].branch_input(branch[1], rows_of("x", 4), batch)
        return True

    assert all(on_ranks(rank_main)[0])


def test_a_branch_leaves_its_source_alone_and_merges_without_a_second_residual():
    """Values are in `test_decoders`; here: streams, and what the merge takes from which side."""

    def rank_main(parallel, batch, make):
        attn, source = layer(make, ffn=declare_ffn(sparse=True))
        (first,) = make((declare_ffn(), norm()), prepared_from=source.declaration)
        enter(attn, batch, rows_of("x", 4))
        prepared = source.prepare(attn.finish(term_of(rows_of("a", 4), parallel.attention_tp), batch), batch)
        main = batch.residual_stream
        hidden, forked = first.branch_input(source, prepared, batch)
        assert hidden is prepared and forked.residual_stream is not main
        beside = source.branch_output(rows_of("moe", 4), batch)
        assert batch.residual_stream is main and main.pending is None
        handle = run_ffn(first, forked, rows_of("dense", 4), parallel.tp)
        merged = first.merge_branch(handle, forked, beside, batch)
        assert batch.residual_stream is not main and forked.residual_stream is None
        total = rows_of("x", 4) + rows_of("a", 4) + rows_of("dense", 4) + rows_of("moe", 4)
        return torch.equal(residual_batch.norm(merged, batch, norm()), norm()(total))

    results, events = on_ranks(rank_main, attention_tp=2)
    assert all(results) and ops(events) == ["all_reduce"] * 2


def test_pipelines_refuse_what_they_would_destroy():
    def rank_main(parallel, batch, make):
        attn, ffn = layer(make)
        enter(attn, batch, rows_of("x", 4))
        handle = attn.finish(term_of(rows_of("a", 4), parallel.attention_tp), batch)
        with pytest.raises(RuntimeError, match="rank-to-rank"):
            residual_batch.to_pp(handle, batch, rank_to_rank=False)
        sent = residual_batch.to_pp(handle, batch)
        assert set(sent) == {"hidden_states", "residual"} and batch.residual_stream is None
        with pytest.raises(KeyError, match="residual"):
            ffn.from_pp({"hidden_states": sent["hidden_states"]}, batch)
        received = ffn.from_pp(sent, batch)
        assert isinstance(received, OwedOutput)
        prepared = ffn.prepare(received, batch)
        return torch.equal(prepared, norm("ffn")(rows_of("x", 4) + rows_of("a", 4)))

    results, events = on_ranks(rank_main, attention_tp=2)
    assert all(results) and ops(events) == ["all_reduce"]


def test_a_written_stream_crosses_alone_and_a_pending_nonlinear_update_does_not_cross():
    from stacks.decoders import HyperConnectedDecoder

    def rank_main(parallel):
        model = build(parallel, lambda: HyperConnectedDecoder([False, False]))
        ids, batch = batch_of(parallel, [4])
        residual_batch.start(batch)
        (attn, ffn), (second, _) = model.boundaries
        attention, mlp = model.computes[0]
        hidden = attention(attn.prepare(model.embed[ids], batch))
        handle = attn.finish(hidden, batch)
        with pytest.raises(RuntimeError, match="no plain addition"):
            residual_batch.to_pp(handle, batch)
        hidden = ffn.prepare(handle, batch)
        with ffn.exit(batch) as output:
            hidden = mlp(hidden)
        hidden = output.finish(hidden)
        stayed = batch.residual_stream.residual.tensor
        sent = residual_batch.to_pp(hidden, batch)
        assert set(sent) == {"hidden_states"} and torch.equal(sent["hidden_states"], stayed)
        # A key left over from another step is not looked at.
        received = second.from_pp({**sent, "residual": torch.ones(1)}, batch)
        prepared = second.prepare(received, batch)
        read = second.declaration.read.read
        want = read(LayerResidual(stayed, batch.rows.model_rows), second.plan.select(batch).entry.norm)[0]
        return torch.equal(prepared, want)

    assert all(on_threads(Topology(attention_tp=2), rank_main))


def on_slices(make, batch, update=None):
    """An FFN whose compute runs on slices of attention's rows: `(ffn, its declaration, output)`."""
    decl = declare_ffn(sparse=True, update=update)
    (ffn,) = make((decl, norm("ffn")), previous=declare_attn())
    residual_batch.start(batch)
    hidden = residual_batch.written(rows_of("x", 4), batch)
    hidden = ffn.prepare(hidden, batch)
    assert len(hidden) == 2
    with ffn.exit(batch) as output:
        hidden = 2 * hidden
    return ffn, decl, output.finish(hidden)


def after_slices():
    return rows_of("x", 4) + 2 * norm("ffn")(rows_of("x", 4))


SLICES = {"attention_tp": 2, "moe_ep": 2, "runtime": {"a2a_backend": "x"}}


@pytest.mark.parametrize("writes", ["at the producer", "by fold", "nobody"])
def test_a_residual_on_slices_crosses_on_the_models_rows(writes):
    """Each rank sends all rows of its attention, and the receiver's input is the one that stayed would be."""

    def rank_main(parallel, batch, make):
        at_producer = writes == "at the producer"
        _, decl, hidden = on_slices(make, batch, AddUpdate(at_producer=at_producer))
        if writes == "by fold":
            hidden = residual_batch.fold(hidden, batch)
        sent = residual_batch.to_pp(hidden, batch)
        total = sent["hidden_states"] + sent.get("residual", 0)
        assert torch.equal(total, after_slices()) and batch.residual_stream is None
        (second,) = make((declare_attn(), norm("attn")), previous=decl)
        received = second.from_pp(sent, batch, allow_missing_residual=writes == "by fold")
        return torch.equal(second.prepare(received, batch), norm("attn")(after_slices()))

    assert all(on_ranks(rank_main, **SLICES)[0])


def test_an_addition_to_a_stream_on_slices_lands_on_them():
    def rank_main(parallel, batch, make):
        for at_producer in (True, False):
            _, _, hidden = on_slices(make, batch, AddUpdate(at_producer=at_producer))
            for wrong in (rows_of("extra", 2), rows_of("extra", 4)[:, :4], rows_of("extra", 1)):
                with pytest.raises(ValueError, match="extra has shape"):
                    residual_batch.add_to_output(hidden, batch, wrong)
            hidden = residual_batch.add_to_output(hidden, batch, rows_of("extra", 4))
            assert len(hidden) == 2
            (second,) = make((declare_attn(), norm("attn")), previous=declare_ffn(sparse=True))
            if not at_producer:
                prepared = second.prepare(hidden, batch)
                assert torch.equal(prepared, norm("attn")(after_slices() + rows_of("extra", 4)))
            else:
                sent = residual_batch.to_pp(hidden, batch)["hidden_states"]
                assert torch.equal(sent, after_slices() + rows_of("extra", 4))
        return True

    assert all(on_ranks(rank_main, **SLICES)[0])


@pytest.mark.parametrize("at_producer", [True, False])
def test_microbatches_of_a_stream_on_slices_get_attentions_rows(at_producer):
    """Split after an FFN on slices, and merged after another: each microbatch has its own tokens."""

    def rank_main(parallel, batch, make):
        ffn, decl, hidden = on_slices(make, batch, AddUpdate(at_producer=at_producer))
        runtime = ffn.plan.runtime
        children = [ForwardBatch(pad_counts([count], parallel.topology, None, batch.mode)) for count in (3, 1)]
        parts = tbo.split(hidden, batch, children, [3, 1], runtime)
        outputs = []
        for part, child, rows in zip(parts, children, after_slices().split([3, 1]), strict=True):
            residual = child.residual_stream.residual.tensor
            assert torch.equal(residual if at_producer else residual + part, rows)
            (own,) = make((decl, norm("ffn")), previous=decl)
            outputs.append(own.postprocess(own.prepare(part, child), child))
        merged = tbo.merge(outputs, children, batch, [3, 1], runtime)
        total = after_slices() + norm("ffn")(after_slices())
        (second,) = make((declare_attn(), norm("attn")), previous=decl)
        return torch.equal(second.prepare(merged, batch), norm("attn")(total))

    assert all(on_ranks(rank_main, **SLICES)[0])


def test_microbatches_carry_the_coefficients_of_their_rows():
    """Hyper-connections: the pending update of each microbatch has those of its own read."""
    from stacks.decoders import HyperConnectedDecoder

    def rank_main(parallel):
        model = build(parallel, lambda: HyperConnectedDecoder([False]))
        attn, ffn = model.boundaries[0]
        attention, mlp = model.computes[0]
        outs = []
        for splits in (False, True):
            ids, batch = batch_of(parallel, [4])
            residual_batch.start(batch)
            hidden = attn.finish(attention(attn.prepare(model.embed[ids], batch)), batch)
            if splits:
                children = [batch_of(parallel, [count])[1] for count in (3, 1)]
                runtime = attn.plan.runtime
                parts = tbo.split(hidden, batch, children, [3, 1], runtime)
                hidden = tbo.merge(parts, children, batch, [3, 1], runtime)
                again = [batch_of(parallel, [count])[1] for count in (3, 1)]
                parts = tbo.split(hidden, batch, again, [3, 1], runtime)
                done = []
                for part, child in zip(parts, again, strict=True):
                    done.append(ffn.postprocess(mlp(ffn.prepare(part, child)), child))
                outs.append(residual_batch.norm(tbo.merge(done, again, batch, [3, 1], runtime), batch, model.norm))
            else:
                hidden = ffn.postprocess(mlp(ffn.prepare(hidden, batch)), batch)
                outs.append(residual_batch.norm(hidden, batch, model.norm))
        return torch.equal(*outs)

    assert all(on_threads(Topology(attention_tp=2), rank_main))


def test_a_merge_that_is_refused_has_completed_and_released_nothing():
    def rank_main(parallel, batch, make):
        attn, _ = layer(make)
        enter(attn, batch, rows_of("x", 4))
        handle = attn.finish(term_of(rows_of("a", 4), parallel.attention_tp), batch)
        with pytest.raises(RuntimeError, match="does not belong"):
            tbo.split(rows_of("a", 4), batch, [], [], attn.plan.runtime)
        assert batch.residual_stream is not None and batch.residual_stream.pending.owed is not None
        children = [ForwardBatch(RowFacts(((2,),), ((2,),))) for _ in range(2)]
        halves = tbo.split(handle, batch, children, [2, 2], attn.plan.runtime)
        halves[0] = residual_batch.fold(halves[0], children[0])
        with pytest.raises(RuntimeError, match="same state"):
            tbo.merge(halves, children, batch, [2, 2], attn.plan.runtime)
        return all(child.residual_stream is not None for child in children)

    assert all(on_ranks(rank_main, attention_tp=2)[0])


@pytest.mark.parametrize("tp", [1, 2])
def test_a_mixers_transform_crosses_with_its_sum(tp):
    """It runs once: in the producer where the sum is complete there, else after the receiver's sum."""
    from boundary import OutputTransform

    def rank_main(parallel, batch, make):
        attn, ffn = layer(make, attn=declare_attn(transform=OutputTransform(lambda value: value * value)))
        enter(attn, batch, rows_of("x", 4))
        handle = attn.finish(term_of(rows_of("a", 4), parallel.attention_tp), batch)
        received = ffn.from_pp(residual_batch.to_pp(handle, batch), batch)
        return torch.equal(ffn.prepare(received, batch), norm("ffn")(rows_of("x", 4) + rows_of("a", 4) ** 2))

    assert all(on_ranks(rank_main, attention_tp=tp)[0])


def test_coefficients_of_an_unfinished_stage_do_not_cross():
    from stacks.decoders import HyperConnectedDecoder

    def rank_main(parallel):
        model = build(parallel, lambda: HyperConnectedDecoder([False]))
        ids, batch = batch_of(parallel, [4])
        residual_batch.start(batch)
        model.boundaries[0][0].prepare(model.embed[ids], batch)
        with pytest.raises(RuntimeError, match="cannot cross"):
            residual_batch.to_pp(batch.residual_stream.residual.tensor, batch)
        return True

    assert all(on_threads(Topology(), rank_main))


def test_a_merge_refuses_to_discard_what_is_pending_in_the_main_stream():
    def rank_main(parallel, batch, make):
        attn, source = layer(make, ffn=declare_ffn(sparse=True))
        (first,) = make((declare_ffn(), norm()), prepared_from=source.declaration)
        enter(attn, batch, rows_of("x", 4))
        prepared = source.prepare(attn.finish(rows_of("a", 4), batch), batch)
        _, forked = first.branch_input(source, prepared, batch)
        beside = source.branch_output(rows_of("moe", 4), batch)
        run_ffn(source, batch, rows_of("moe", 4), parallel.tp)
        handle = run_ffn(first, forked, rows_of("dense", 4), parallel.tp)
        with pytest.raises(RuntimeError, match="main stream has a contribution pending"):
            first.merge_branch(handle, forked, beside, batch)
        return True

    assert all(on_ranks(rank_main)[0])


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5])
def test_a_latent_is_gathered_by_ranks_that_all_have_rows(tokens):
    """A rank without a row skips attention's compute; no other may then wait for it in the adapter."""

    def rank_main(parallel, batch, make):
        latent = lambda hidden, batch: hidden[:, :2] * 2  # noqa: E731
        (attn,) = make((declare_attn(), norm(), {"qkv_latent_func": latent}))
        residual_batch.start(batch)
        hidden = attn.prepare(rows_of("x", tokens), batch)
        if hidden.shape[0]:
            hidden = batch.attention_input.fetch_qkv_latent()
            assert torch.equal(hidden, norm()(rows_of("x", tokens))[:, :2] * 2)
        return bool(hidden.shape[0])

    facts = {"runtime": {"input_scattered": True}, "batch_options": {"input_scattered": True}}
    results, _ = on_ranks(rank_main, tokens=(tokens,), attention_tp=4, **facts)
    assert set(results) == {tokens > 0}


def test_what_attention_was_given_is_let_go_with_its_layer():
    def rank_main(parallel, batch, make):
        attn, ffn = make(
            (declare_attn(), norm(), {"qkv_latent_func": lambda hidden, batch: hidden}), (declare_ffn(), norm("ffn"))
        )
        enter(attn, batch, rows_of("x", 4))
        assert batch.attention_input is not None
        ffn.prepare(attn.finish(rows_of("a", 4), batch), batch)
        return batch.attention_input is None

    assert all(on_ranks(rank_main)[0])


def test_dynamic_work_completes_before_the_cut():
    def rank_main(parallel, batch, make):
        attn, ffn = layer(make)
        enter(attn, batch, rows_of("x", 4))
        ffn.prepare(attn.finish(term_of(rows_of("a", 4), parallel.attention_tp), batch), batch)
        sent = residual_batch.to_pp(run_ffn(ffn, batch, rows_of("out", 4), parallel.tp), batch)
        return torch.equal(sent["hidden_states"], rows_of("out", 4))

    assert all(on_ranks(rank_main, attention_tp=2)[0])


def test_interleaved_branches_of_several_layers_keep_one_sequence():
    def rank_main(parallel):
        model = build(parallel, lambda: ShortcutDecoder(2))
        return model(*batch_of(parallel, [3, 0]))

    from .test_decoders import assert_same_sequence

    with record() as events:
        on_threads(Topology(attention_dp=2), rank_main)
    assert_same_sequence(events)

"""The same decoders on real processes over gloo: the values of one process, bit for bit, at two and four ranks."""

from __future__ import annotations

import pytest
import torch
from stacks import reference
from stacks.decoders import Decoder, DraftModel, HybridDecoder, HyperConnectedDecoder, ShortcutDecoder
from stacks.worlds import batch_of, build

from boundary import PaddingMode, Topology
from boundary.adapters.cp import deal_facts, zigzag
from boundary.collectives import record
from boundary.forward import ForwardBatch
from boundary.parallel import Parallel, from_torch_distributed
from tests.pool import Pools, World

from .test_decoders import CONFIG, DENSE, MOE, assert_same_sequence, embedded, expected, sparse_of

BATCHES = [(PaddingMode.MAX_LEN, [4, 4]), (PaddingMode.SUM_LEN, [5, 2]), (PaddingMode.SUM_LEN, [3, 0])]


def stacks():
    """Every kind of stack, with what it computes for some rows."""
    return {
        "dense": (lambda: Decoder([False, False]), lambda x: reference.stack(DENSE * 2, CONFIG, x)[0]),
        "moe": (lambda: Decoder([True, False]), lambda x: reference.stack(MOE + DENSE, CONFIG, x)[0]),
        "hybrid": (lambda: HybridDecoder("M-*E"), lambda x: reference.stack("M-*E", CONFIG, x)[0]),
        "shortcut": (lambda: ShortcutDecoder(1), lambda x: reference.shortcut(1, CONFIG, x)),
        "mhc": (
            lambda: HyperConnectedDecoder([False, True]),
            lambda x: reference.hyper_connected(DENSE + MOE, CONFIG, x),
        ),
    }


def on_rank(world: World, topology: Topology, rank_main, *args):
    """`rank_main(parallel, *args)` on a rank of the pool; its groups are made once per topology."""
    if topology not in world.cache:
        world.cache[topology] = from_torch_distributed(topology, limit=20.0)
    with torch.no_grad():
        return rank_main(world.cache[topology], *args)


def stacks_main(parallel: Parallel, options: dict, names: list[str]):
    outputs, events_by_run = {}, []
    for name in names:
        make, _ = stacks()[name]
        model = build(parallel, make, **options)
        for padding, tokens in BATCHES:
            ids, batch = batch_of(parallel, tokens[: parallel.topology.attention_dp], padding)
            with record() as events:
                outputs[name, padding, tuple(tokens)] = model(ids, batch)
            events_by_run += events
    return outputs, events_by_run


@pytest.mark.parametrize("dp, tp, options", [
    (1, 2, {"boundary_reduction": "ar"}),
    (2, 1, {"boundary_reduction": "rs+rsv"}),
    (2, 2, {"boundary_reduction": "rs", "a2a_backend": "all_to_all"}),
])  # fmt: skip
def test_every_stack_equals_one_process(pools: Pools, dp, tp, options):
    names = list(stacks())
    topology = Topology(dp, 1, tp, moe_ep=dp * tp)
    results = pools(topology.tp).run(on_rank, topology, stacks_main, options, names)
    assert_same_sequence([event for _, events in results for event in events])
    for rank, (outputs, _) in enumerate(results):
        for (name, _, tokens), output in outputs.items():
            count = tokens[rank // tp]
            want = stacks()[name][1](embedded(rank // tp, count))
            assert torch.equal(output[:count], want), (name, rank, tokens)


def pipeline_main(parallel: Parallel):
    layers = range(1) if parallel.pipeline_rank == 0 else range(1, 3)
    model = build(parallel, lambda: Decoder([False, True, False], layers=layers))
    draft = build(parallel, DraftModel)
    ids, batch = batch_of(parallel, [5])
    sent = {name: torch.empty(5, CONFIG.hidden, dtype=torch.float64) for name in ("hidden_states", "residual")}
    if parallel.pipeline_rank == 0:
        sent = model(ids, batch)
    received = {name: parallel.pipeline.broadcast(value, 0, name) for name, value in sent.items()}
    out = model(ids, batch, received=received) if parallel.pipeline_rank else None
    ids, batch = batch_of(parallel, [5])
    return out, draft(ids, embedded(1, 5), batch)


def test_a_pipeline_of_two_stages_and_a_draft_equal_one_process(pools: Pools):
    results = pools(4).run(on_rank, Topology(attention_tp=2, pipeline=2), pipeline_main)
    for rank, (out, drafted) in enumerate(results):
        assert torch.equal(drafted, reference.draft(CONFIG, embedded(0, 5), embedded(1, 5)))
        assert (out is None) is (rank < 2)
        assert out is None or torch.equal(out, expected(DENSE + MOE + DENSE, 0, 5))


def cp_main(parallel: Parallel):
    deal = zigzag([9], 2)
    assert deal is not None
    model = build(parallel, lambda: Decoder(sparse_of(DENSE * 2)), boundary_reduction="rs")
    model.embed = deal.shard(embedded(0, 9), parallel.at.cp)
    out = model(torch.arange(len(model.embed)), ForwardBatch(deal_facts([deal])), deal=deal)
    return deal.gather(out, parallel.attention_cp)


def test_a_context_parallel_batch_equals_one_process(pools: Pools):
    for out in pools(2).run(on_rank, Topology(attention_cp=2), cp_main):
        assert torch.equal(out, expected(DENSE * 2, 0, 9))

"""Whole decoders on every rank, against the definition for one process: equal bits, one sequence of sums."""

from __future__ import annotations

import pytest
import torch
from stacks import reference
from stacks.decoders import Decoder, DraftModel, HybridDecoder, HyperConnectedDecoder, ShortcutDecoder
from stacks.weights import Config
from stacks.worlds import batch_of, build, on_threads, tokens_of

from boundary import PaddingMode, Topology
from boundary.adapters.cp import deal_facts, interleaved, zigzag
from boundary.collectives import record
from boundary.forward import ForwardBatch

CONFIG = Config()
DENSE, MOE = "*-", "*E"
TOPOLOGIES = [(1, 1), (1, 2), (1, 4), (2, 1), (4, 1), (2, 2)]
ROWS = {"even": [4, 4, 4, 4], "ragged": [5, 2, 3, 1], "idle": [3, 0, 2, 0], "none": [0, 0, 0, 0]}


def embedded(dp_rank, count):
    return reference.weight("embed", CONFIG.vocabulary, CONFIG.hidden)[tokens_of(dp_rank, count)]


def expected(pattern, dp_rank, count):
    return reference.stack(pattern, CONFIG, embedded(dp_rank, count))[0]


def sparse_of(pattern):
    return [pattern[index : index + 2] == MOE for index in range(0, len(pattern), 2)]


def assert_same_sequence(events):
    """All ranks of a group ran the same exchanges in the same order."""
    sequences: dict = {}
    for event in events:
        own = sequences.setdefault((event.group, event.ranks), {}).setdefault(event.rank, [])
        own.append((event.op, event.key))
    for (group, ranks), by_rank in sequences.items():
        assert len(by_rank) == len(ranks), f"only ranks {sorted(by_rank)} of {group} {ranks} took part"
        assert len({tuple(sequence) for sequence in by_rank.values()}) == 1, (group, by_rank)


def check_batches(topology, make, want, *, batches=None, options=None, batch_options=None, call=None):
    """Build once per rank, run every batch, compare live rows with `want(dp_rank, count)` bit for bit."""
    batches = batches or [(padding, rows) for padding in PaddingMode for rows in ROWS.values()]
    dp = topology.attention_dp

    def rank_main(parallel):
        model = build(parallel, make, **(options or {}))
        outputs = []
        for padding, rows in batches:
            ids, batch = batch_of(parallel, rows[:dp], padding, **(batch_options or {}))
            outputs.append(model(ids, batch) if call is None else call(model, ids, batch, parallel))
            assert batch.residual_stream is None
        return outputs

    with record() as events:
        results = on_threads(topology, rank_main)
    assert_same_sequence(events)
    for rank, outputs in enumerate(results):
        at = topology.coordinates(rank)
        for (padding, rows), output in zip(batches, outputs, strict=True):
            count = rows[at.dp]
            assert torch.equal(output[:count], want(at.dp, count)), (rank, padding, rows)
    return events


@pytest.mark.parametrize("pattern", [DENSE * 2, MOE + DENSE, DENSE + MOE * 2])
@pytest.mark.parametrize("policy", ["ar", "rs", "rsv", "rs+rsv"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_decoders_equal_one_process(topology, policy, pattern):
    dp, tp = topology
    check_batches(
        Topology(attention_dp=dp, attention_tp=tp, moe_ep=max(dp, tp) if dp * tp != 4 else 2),
        lambda: Decoder(sparse_of(pattern)),
        lambda at, count: expected(pattern, at, count),
        options={"boundary_reduction": policy},
    )


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_an_all_to_all_moe_equals_one_process(topology):
    dp, tp = topology
    pattern = DENSE + MOE * 2
    check_batches(
        Topology(attention_dp=dp, attention_tp=tp, moe_ep=dp * tp),
        lambda: Decoder(sparse_of(pattern)),
        lambda at, count: expected(pattern, at, count),
        options={"a2a_backend": "all_to_all", "boundary_reduction": "rs+rsv"},
    )


@pytest.mark.parametrize("topology", [(1, 2), (2, 1), (2, 2)])
def test_dense_ffns_on_slices_of_the_rows_equal_one_process(topology):
    dp, tp = topology
    pattern = DENSE * 2 + MOE
    check_batches(
        Topology(attention_dp=dp, attention_tp=tp),
        lambda: Decoder(sparse_of(pattern)),
        lambda at, count: expected(pattern, at, count),
        options={"dense_local": True},
    )


@pytest.mark.parametrize("pattern", ["M-*E", "MMEM*-", "*MM--EE*"])
@pytest.mark.parametrize("topology", [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)])
def test_a_hybrid_of_single_stage_layers_equals_one_process(topology, pattern):
    dp, tp = topology
    check_batches(
        Topology(attention_dp=dp, attention_tp=tp, moe_ep=tp),
        lambda: HybridDecoder(pattern),
        lambda at, count: expected(pattern, at, count),
        options={"boundary_reduction": "rs+rsv"},
    )


@pytest.mark.parametrize("a2a", [None, "all_to_all"])
@pytest.mark.parametrize("topology", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_shortcut_branch_equals_one_process(topology, a2a):
    dp, tp = topology
    check_batches(
        Topology(attention_dp=dp, attention_tp=tp, moe_ep=dp * tp),
        lambda: ShortcutDecoder(2),
        lambda at, count: reference.shortcut(2, CONFIG, embedded(at, count)),
        options={"a2a_backend": a2a},
    )


@pytest.mark.parametrize("a2a", [None, "all_to_all"])
@pytest.mark.parametrize("topology", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_hyper_connections_equal_one_process(topology, a2a):
    dp, tp = topology
    check_batches(
        Topology(attention_dp=dp, attention_tp=tp, moe_ep=dp * tp),
        lambda: HyperConnectedDecoder([False, True]),
        lambda at, count: reference.hyper_connected(DENSE + MOE, CONFIG, embedded(at, count)),
        options={"a2a_backend": a2a, "boundary_reduction": "rs+rsv"},
    )


@pytest.mark.parametrize("topology", [(1, 2), (2, 1), (2, 2)])
def test_a_draft_head_equals_one_process(topology):
    dp, tp = topology
    check_batches(
        Topology(attention_dp=dp, attention_tp=tp),
        DraftModel,
        lambda at, count: reference.draft(CONFIG, embedded(at, count), embedded(at + 1, count)),
        call=lambda model, ids, batch, parallel: model(
            ids, _with_padding(embedded(parallel.at.dp + 1, batch.rows.cell(parallel.at)[1]), len(ids)), batch
        ),
    )


def _with_padding(rows, padded):
    return torch.cat([rows, torch.full((padded - len(rows), rows.shape[1]), 4.0, dtype=rows.dtype)])


SCATTERED_ROWS = [(None, [8]), (None, [5]), (None, [1]), (None, [0])]


@pytest.mark.parametrize("policy", ["ar", "rs"])
@pytest.mark.parametrize("variant", ["input_scattered", "sequence_parallel"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_scattered_batches_equal_one_process(variant, policy, tp):
    pattern = DENSE + MOE + DENSE
    for joins in ("joins", "gathers"):
        check_batches(
            Topology(attention_tp=tp),
            lambda: Decoder(sparse_of(pattern), declare={"scattered_residual": joins}),  # noqa: B023
            lambda at, count: expected(pattern, at, count),
            batches=SCATTERED_ROWS,
            options={"boundary_reduction": policy, variant: True},
            batch_options={variant: True},
        )


@pytest.mark.parametrize("policy", ["ar", "rs"])
def test_a_sequence_parallel_region_under_attention_dp_equals_one_process(policy):
    check_batches(
        Topology(attention_dp=2, attention_tp=2),
        lambda: Decoder([False, False]),
        lambda at, count: expected(DENSE * 2, at, count),
        options={"boundary_reduction": policy, "sequence_parallel": True},
        batch_options={"sequence_parallel": True},
    )


@pytest.mark.parametrize("variant", ["input_scattered", "sequence_parallel"])
def test_scattered_hyper_connections_equal_one_process(variant):
    check_batches(
        Topology(attention_tp=2),
        lambda: HyperConnectedDecoder([False, True]),
        lambda at, count: reference.hyper_connected(DENSE + MOE, CONFIG, embedded(at, count)),
        batches=SCATTERED_ROWS,
        options={"boundary_reduction": "rs", variant: True},
        batch_options={variant: True},
    )


@pytest.mark.parametrize("policy", ["ar", "rs"])
@pytest.mark.parametrize("deal", [interleaved, zigzag])
@pytest.mark.parametrize("dp, cp, tp, moe_dp", [(1, 2, 1, 1), (1, 2, 2, 1), (2, 2, 1, 1), (1, 2, 2, 2)])
def test_context_parallel_batches_equal_one_process(dp, cp, tp, moe_dp, deal, policy):
    lengths = [8, 5] if dp == 2 else [9]
    pattern = DENSE + MOE

    def rank_main(parallel):
        model = build(parallel, lambda: Decoder(sparse_of(pattern)), boundary_reduction=policy)
        deals = [deal([length], cp) for length in lengths]
        at = parallel.at
        batch = ForwardBatch(deal_facts(deals))
        own = deals[at.dp]
        cut = own.shard(model.embed[tokens_of(at.dp, lengths[at.dp])], at.cp)
        model.embed = torch.cat([cut, torch.full((1, CONFIG.hidden), 4.0, dtype=cut.dtype)])
        live = own.live[at.cp]
        ids = torch.tensor([row if row < live else len(cut) for row in range(len(cut))], dtype=torch.long)
        output = model(ids, batch, deal=own)
        ordinary = batch_of(parallel, [3, 2][:dp], None)
        model.embed = reference.weight("embed", CONFIG.vocabulary, CONFIG.hidden)
        return own.gather(output, parallel.attention_cp), model(*ordinary)

    with record() as events:
        results = on_threads(Topology(dp, cp, tp, moe_dp=moe_dp), rank_main)
    assert_same_sequence(events)
    for rank, (output, decoded) in enumerate(results):
        at = rank // (cp * tp)
        assert torch.equal(output, expected(pattern, at, lengths[at])), rank
        count = [3, 2][at]
        assert torch.equal(decoded[:count], expected(pattern, at, count)), rank


def plain(pattern):
    return lambda at, count: expected(pattern, at, count)


PIPELINES = {
    "decoder": (lambda layers: Decoder([False, True, False], layers=layers), plain(DENSE + MOE + DENSE), 3, 0),
    "hybrid": (lambda layers: HybridDecoder("M-*E", layers=layers), plain("M-*E"), 4, 0),
    "mixers": (lambda layers: HybridDecoder("MM*-", layers=layers), plain("MM*-"), 4, 0),
    "streams": (
        lambda layers: HyperConnectedDecoder([True, False, True], layers=layers),
        lambda at, count: reference.hyper_connected(MOE + DENSE + MOE, CONFIG, embedded(at, count)),
        3,
        CONFIG.streams,
    ),
}
"""Makes a part of the model, its definition, how many parts it has, and how many streams a written residual."""

CUTS = [
    (1, 1, {}),
    (1, 2, {}),
    (2, 1, {}),
    (2, 2, {}),
    (1, 2, {"a2a_backend": "all_to_all"}),
    (2, 2, {"a2a_backend": "all_to_all"}),
    (1, 2, {"input_scattered": True}),
    (1, 2, {"sequence_parallel": True}),
    (2, 2, {"sequence_parallel": True}),
]


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("dp, tp, fact", CUTS, ids=[f"{dp}-{tp}-{'-'.join(fact) or 'plain'}" for dp, tp, fact in CUTS])
def test_every_pipeline_cut_equals_one_process(name, dp, tp, fact):
    """Whatever rows the stream is on, pending or written, the next stage continues with the right ones."""
    make, want, parts, streams = PIPELINES[name]
    topology = Topology(attention_dp=dp, attention_tp=tp, moe_ep=dp * tp, pipeline=2)
    options = {"boundary_reduction": "rs+rsv", **fact}
    variant = {key: value for key, value in fact.items() if key != "a2a_backend"}

    def rank_main(parallel):
        outputs = []
        for cut in range(1, parts):
            here = range(cut) if parallel.pipeline_rank == 0 else range(cut, parts)
            model = build(parallel, lambda: make(here), **options)  # noqa: B023
            ids, batch = batch_of(parallel, [5, 2][:dp], **variant)
            if parallel.pipeline_rank == 0:
                sent = model(ids, batch)
                assert sorted(sent) == (["hidden_states"] if streams else ["hidden_states", "residual"])
            else:
                shape = (len(ids), CONFIG.hidden * (streams or 1))
                names = ("hidden_states",) if streams else ("hidden_states", "residual")
                sent = {name: torch.empty(shape, dtype=torch.float64) for name in names}
            received = {name: parallel.pipeline.broadcast(value, 0, f"pp {name}") for name, value in sent.items()}
            if parallel.pipeline_rank:
                outputs.append(model(ids, batch, received=received))
        return outputs

    with record() as events:
        results = on_threads(topology, rank_main)
    assert_same_sequence(events)
    for rank, outputs in enumerate(results[dp * tp :]):
        count = [5, 2][rank // tp]
        assert len(outputs) == parts - 1
        for output in outputs:
            assert torch.equal(output[:count], want(rank // tp, count)), rank

"""Topologies, groups, row counts, policies, and what the package stands on."""

from __future__ import annotations

import ast
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stacks.worlds import on_threads

import boundary
from boundary import ForwardMode, PaddingMode, Runtime, SumGroup, Topology, exchange_batch
from boundary.forward import pad_counts
from boundary.layout import ATTN_CP, ATTN_DP, ATTN_TP_SCATTER, FULL, RowFacts
from boundary.ops import RowMover
from boundary.parallel import ThreadWorld
from boundary.policy import BoundaryReduction, Scatter, resolve
from boundary.runtime import bind, bound_runtime


def test_groups_by_name_on_a_mesh_of_all_axes():
    def rank_main(parallel):
        names = ("tp", "attention_tp", "attention_cp", "attention_dp", "moe_ep", "moe_tp", "pipeline")
        return {name: getattr(parallel, name).ranks for name in names}

    topology = Topology(2, 2, 2, moe_ep=4, pipeline=2)
    results = on_threads(topology, rank_main)
    assert results[0] == {
        "tp": tuple(range(8)),
        "attention_tp": (0, 1),
        "attention_cp": (0, 2),
        "attention_dp": (0, 4),
        "moe_ep": (0, 2, 4, 6),
        "moe_tp": (0, 1),
        "pipeline": (0, 8),
    }
    assert results[13]["attention_tp"] == (12, 13) and results[13]["pipeline"] == (5, 13)
    for rank, groups in enumerate(results):
        assert all(rank in ranks for ranks in groups.values())


def test_equal_ranks_are_one_group():
    def rank_main(parallel):
        return (
            parallel.attention_tp is parallel.tp
            and parallel.moe_tp is parallel.tp
            and parallel.bound_sum(SumGroup.MOE_OUTPUT).group is parallel.tp
        )

    assert all(on_threads(Topology(attention_tp=2), rank_main))


@pytest.mark.parametrize("sizes", [{"attention_tp": 0}, {"attention_tp": 4, "moe_ep": 3}, {"moe_dp": 2}])
def test_degrees_that_do_not_fit_are_refused(sizes):
    with pytest.raises(ValueError):
        Topology(**sizes)


MAX, SUM = PaddingMode.MAX_LEN, PaddingMode.SUM_LEN
EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE


@pytest.mark.parametrize("tokens, topology, padding, mode, rows, chosen", [
    ([3, 5], Topology(2, 1, 2), MAX, EXTEND, [6, 6], MAX),
    ([3, 5], Topology(2, 1, 2), SUM, EXTEND, [4, 6], SUM),
    ([3, 5], Topology(2), None, EXTEND, [3, 5], SUM),
    ([3, 5], Topology(2), None, DECODE, [5, 5], MAX),
    ([1, 9, 0, 0], Topology(4), None, DECODE, [1, 9, 0, 0], SUM),
    ([0, 0], Topology(2), None, DECODE, [0, 0], MAX),
    ([5], Topology(1, 1, 2), None, EXTEND, [5], MAX),
])  # fmt: skip
def test_row_counts_are_padded_to_tiles_and_then_by_mode(tokens, topology, padding, mode, rows, chosen):
    facts = pad_counts(tokens, topology, padding, mode)
    assert [cells[0] for cells in facts.padded] == rows and facts.padding is chosen
    assert [cells[0] for cells in facts.live] == tokens and facts.tokens == sum(tokens)


def test_the_exchange_gives_all_ranks_the_same_facts_and_keeps_the_idle_mode():
    def rank_main(parallel):
        tokens = [3, 0][parallel.at.dp]
        batch = exchange_batch(parallel, tokens, DECODE if tokens else ForwardMode.IDLE)
        return batch.rows, batch.idle

    results = on_threads(Topology(2, 1, 2), rank_main)
    assert len({rows for rows, _ in results}) == 1
    assert [idle for _, idle in results] == [False, False, True, True]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([(1, 1, 2), (2, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 1), (1, 1, 3)]), st.data())
def test_moves_up_and_down_the_chain_are_each_others_inverse(sizes, data):
    """Cut then gather is the identity on live rows, padding arrives as zeros, whatever was in it."""
    topology = Topology(*sizes)
    dp, cp, _ = sizes
    counts = st.integers(0, 5)
    padded = data.draw(st.lists(st.lists(counts, min_size=cp, max_size=cp), min_size=dp, max_size=dp))
    live = [[data.draw(st.integers(0, rows)) for rows in cells] for cells in padded]
    facts = RowFacts(tuple(map(tuple, padded)), tuple(map(tuple, live)))
    layouts = [
        FULL,
        topology.layout(ATTN_DP),
        facts.model_rows,
        topology.layout(*_axes(facts), ATTN_TP_SCATTER),
    ]
    total = sum(map(sum, padded))
    whole = torch.arange(total * 2.0).reshape(total, 2) + 1
    start = 0
    for rows, tokens in zip(chain.from_iterable(padded), chain.from_iterable(live), strict=True):
        whole[start + tokens : start + rows] = 0
        start += rows

    def rank_main(parallel):
        mover = RowMover(parallel)
        at = mover.move(whole, FULL, facts.model_rows, facts)
        poisoned = at.clone()
        poisoned[facts.cell(parallel.at)[1] :] = torch.nan
        for outer in layouts:
            for inner in layouts:
                if not outer.contains(inner) or not facts.model_rows.contains(inner) or inner == outer:
                    continue
                piece = mover.move(mover.move(poisoned, facts.model_rows, inner, facts), inner, outer, facts)
                assert torch.equal(piece, mover.move(whole, FULL, outer, facts)), (outer, inner)
        return True

    assert all(on_threads(topology, rank_main))


def _axes(facts):
    return facts.model_rows.sharded


def test_rows_that_contain_neither_are_not_moved():
    def rank_main(parallel):
        mover, topology = RowMover(parallel), parallel.topology
        facts = RowFacts(((2,), (2,)), ((2,), (2,)))
        with pytest.raises(ValueError, match="no move"):
            mover.move(torch.ones(2, 1), topology.layout(ATTN_DP), topology.layout(ATTN_TP_SCATTER), facts)
        return ATTN_CP not in topology.layout(ATTN_CP).sharded

    assert all(on_threads(Topology(2, 1, 2), rank_main))


@pytest.mark.parametrize("option, permits", [
    ("ar", set()), ("rs", {Scatter.RS}), ("rsv", {Scatter.RSV}), ("rs+rsv", {Scatter.RS, Scatter.RSV}),
])  # fmt: skip
def test_policies_are_permissions(option, permits):
    assert BoundaryReduction(option).permits == permits


def test_auto_is_resolved_per_architecture_and_a_draft_resolves_its_own():
    runtime = Runtime()
    with pytest.raises(ValueError, match="resolved per architecture"):
        _ = runtime.policy
    assert runtime.for_model("DeepseekV3ForCausalLM").policy is BoundaryReduction.RS
    assert runtime.for_draft("Qwen3MoeForCausalLM").policy is BoundaryReduction.RS_RSV
    assert runtime.for_model("Unknown").policy is BoundaryReduction.AR
    chosen = Runtime(boundary_reduction="rsv", speculative_boundary_reduction="rs")
    assert chosen.for_model("DeepseekV3ForCausalLM").policy is BoundaryReduction.RSV
    assert chosen.for_draft("Unknown").policy is BoundaryReduction.RS
    with pytest.raises(ValueError):
        resolve("sometimes")


def test_a_runtime_is_bound_to_the_thread_that_builds():
    def rank_main(parallel):
        runtime = Runtime(parallel, boundary_reduction="ar")
        with bind(runtime):
            assert bound_runtime() is runtime
        return bound_runtime().parallel.topology.tp

    assert on_threads(Topology(attention_tp=2), rank_main) == [1, 1]


def test_a_world_of_threads_can_be_ended():
    world = ThreadWorld(Topology(attention_tp=2))
    parallel = world.join(0)
    world.abort("over")
    with pytest.raises(boundary.collectives.CollectiveError, match="over"):
        parallel.tp.all_reduce(torch.ones(1))


def test_the_package_stands_on_torch_alone():
    """Every import of every module: the standard library, torch, triton, or the package itself."""
    allowed = {*sys.stdlib_module_names, "torch", "triton", "boundary"}
    folder = Path(boundary.__file__).parent
    modules = list(folder.rglob("*.py"))
    assert len(modules) > 20
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] in allowed, f"{path.name} imports {name}"


def test_no_module_reads_the_environment():
    """But one: which compiler there is, and where its product is kept, on which ranks agree before they use it."""
    folder = Path(boundary.__file__).parent
    transports = {"collectives.py", "sockets.py", "shared_memory.py"}
    for path in folder.rglob("*.py"):
        if path != folder / "compiled" / "__init__.py":
            text = path.read_text()
            assert "os.environ" not in text and "getenv" not in text, path.name
            assert "import os" not in text or path.name in transports, path.name

"""Collectives and bytes per layer, next to what has to be moved; and what a boundary costs on the host."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from stacks.decoders import Decoder
from stacks.worlds import batch_of, build, on_threads

from boundary import PaddingMode, Topology, declare_attn, declare_ffn, make_stages
from boundary.collectives import record
from boundary.residual import batch as residual_batch

from .checks import rows_of
from .test_decoders import CONFIG, DENSE, MOE, sparse_of


def per_layer(topology, *, tokens, sparse=False, policy="ar", padding=None, runtime=None, batch_options=None):
    """What rank 0 runs in one inner layer: the difference between a deep and a shallow decoder."""
    counts, nbytes = [], []
    for depth in (2, 4):

        def rank_main(parallel, depth=depth):
            model = build(
                parallel, lambda: Decoder(sparse_of((MOE if sparse else DENSE) * depth)),
                boundary_reduction=policy, **(runtime or {}),
            )  # fmt: skip
            return model(*batch_of(parallel, tokens, padding, **(batch_options or {})))

        with record() as events:
            on_threads(topology, rank_main)
        mine = [event for event in events if 0 in event.ranks and event.rank == event.ranks.index(0)]
        counts.append(Counter(event.op for event in mine))
        nbytes.append(sum(event.nbytes for event in mine))
    ops = {op: (counts[1][op] - counts[0][op]) / 2 for op in counts[1] if counts[1][op] != counts[0][op]}
    return ops, (nbytes[1] - nbytes[0]) / 2


ROW = CONFIG.hidden * 8
"""Bytes of one row."""


@pytest.mark.parametrize("policy", ["ar", "rs", "rsv", "rs+rsv"])
@pytest.mark.parametrize("tp", [2, 4])
def test_dense_tp_runs_two_all_reduces_under_every_policy(policy, tp):
    """A reduce-scatter is not eligible where no rows are dealt out, and falls back."""
    ops, nbytes = per_layer(Topology(attention_tp=tp), tokens=[8], policy=policy)
    assert ops == {"all_reduce": 2}
    # An all-reduce here exchanges whole terms: each rank sends its own to, and receives one from, each peer.
    assert nbytes == 2 * 2 * (tp - 1) * 8 * ROW


@pytest.mark.parametrize("tp", [2, 4])
def test_input_scattered_rows_with_rs(tp):
    """The FFN's all-reduce becomes a reduce-scatter and attention's all-gather, 1/TP of the rows between."""
    scattered = {"runtime": {"input_scattered": True}, "batch_options": {"input_scattered": True}}
    ops, nbytes = per_layer(Topology(attention_tp=tp), tokens=[8], policy="rs", **scattered)
    assert ops == {"all_reduce": 1, "reduce_scatter": 1, "all_gather": 1}
    whole, pair = 2 * (tp - 1) * 8 * ROW, 2 * 2 * (tp - 1) * (8 // tp) * ROW
    assert nbytes == whole + pair
    # With `ar` the FFN keeps its all-reduce, and attention still gathers.
    ops, more = per_layer(Topology(attention_tp=tp), tokens=[8], policy="ar", **scattered)
    assert ops == {"all_reduce": 2, "all_gather": 1} and more > nbytes


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dp", [2, 4])
def test_attention_dp_alone_with_rs(dp, sparse):
    """One all-gather into the FFN, one reduce-scatter out of it, no all-reduce; minimal bytes."""
    ops, nbytes = per_layer(
        Topology(attention_dp=dp), tokens=[4] * dp, policy="rs", padding=PaddingMode.MAX_LEN, sparse=sparse
    )
    assert ops == {"all_gather": 1, "reduce_scatter": 1}
    assert nbytes == 2 * 2 * (dp - 1) * 4 * ROW


def test_ragged_rows_with_rsv_move_only_what_there_is():
    ops, nbytes = per_layer(Topology(attention_dp=2), tokens=[5, 1], policy="rsv", padding=PaddingMode.SUM_LEN)
    assert ops == {"all_gather": 1, "reduce_scatter": 1}
    # Rank 0 sends its 5 rows and receives 1; then it sends 1 row's term and receives terms of its 5.
    assert nbytes == 2 * (5 + 1) * ROW


def test_attention_dp_and_tp_share_one_collective_into_the_ffn():
    """The residual joins the sum, so attention TP's all-reduce and the gather are one."""
    ops, _ = per_layer(Topology(attention_dp=2, attention_tp=2), tokens=[4, 4], padding=PaddingMode.MAX_LEN)
    assert ops == {"all_reduce": 2}


def test_sequence_parallel_rows_with_rs():
    options = {"runtime": {"sequence_parallel": True}, "batch_options": {"sequence_parallel": True}}
    ops, _ = per_layer(Topology(attention_tp=2), tokens=[8], policy="rs", **options)
    assert ops == {"all_gather": 2, "reduce_scatter": 2}


@contextmanager
def empty():
    yield


HOST_FACTOR = 30
"""A boundary (prepare, flags, exit, finish) costs at most so many empty Python context managers."""


def test_a_boundarys_host_cost_is_a_small_multiple_of_an_empty_context_manager():
    """No kernels, no rows: everything that construction could decide has been decided.

    Measured on a loaded two-core machine: about 11 of them.
    """

    class Silent(torch.nn.Module):
        def forward(self, value):
            return value

    def rank_main(parallel):
        attn, ffn = build(
            parallel,
            lambda: make_stages((declare_attn(), Silent()), (declare_ffn(), Silent()), previous=declare_ffn()),
        )
        del attn
        _, batch = batch_of(parallel, [0])
        hidden = rows_of("x", 0)

        def through_boundary():
            # The loop's own bookkeeping (a fresh stream) is part of what is timed.
            residual_batch.start(batch)
            value = residual_batch.written(hidden, batch)
            value = ffn.prepare(value, batch)
            with ffn.exit(batch) as output:
                pass
            output.finish(value)

        def through_nothing():
            with empty():
                pass

        return min(_seconds(through_boundary) / _seconds(through_nothing) for _ in range(5))

    ratio = on_threads(Topology(), rank_main)[0]
    assert ratio < HOST_FACTOR, ratio


def _seconds(function, repeat=300):
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeat):
            function()
        best = min(best, time.perf_counter() - start)
    return best

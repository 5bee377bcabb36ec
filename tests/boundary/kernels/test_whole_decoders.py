"""Every test of whole decoders once more, unchanged, with all that this machine can fuse: groups of shared memory, the
provider of their fusion in every stage, and the built-in fusion behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import stacks.decoders
import stacks.worlds

import boundary.construction
from boundary import Runtime, Topology
from boundary.collectives import SharedGroup
from boundary.fusions.shared_memory import install_shared_memory_fusion

from .. import test_decoders, test_gradients, test_processes
from ..test_decoders import *  # noqa: F403
from ..test_processes import assert_same_sequence, on_rank, stacks_main
from .worlds import SharedThreadWorld


class Fused:
    """How often the library ran a sum together with the residual, and the rows that it dealt out."""

    count = 0
    shares: ClassVar[list[tuple[int, ...]]] = []


@pytest.fixture(autouse=True)
def everything_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Fused]]:
    switch_on(monkeypatch.setattr)
    Fused.count = 0
    Fused.shares.clear()
    yield Fused


def switch_on(patch: Any) -> None:
    """Threads share memory; stages without a provider get one; the built-in fusion is enabled."""
    candidates = boundary.construction._candidates
    decider = boundary.construction._decider
    sum_add_norm = SharedGroup.sum_add_norm
    provider = install_shared_memory_fusion(terminal_finalize=False)

    def counted(self: SharedGroup, term: Any, residual: Any, norm: Any, counts: Any, key: str) -> Any:
        made = sum_add_norm(self, term, residual, norm, counts, key)
        Fused.count += made is not None
        if made is not None and counts is not None:
            Fused.shares.append(tuple(counts))
        return made

    def build(parallel: Any, make: Any, **options: Any) -> Any:
        with boundary.bind(Runtime(parallel, **{"boundary_reduction": "ar", "allreduce_fusion": True, **options})):
            return make()

    patch(SharedGroup, "sum_add_norm", counted)
    patch(boundary.construction, "_candidates", lambda plan, fusions: candidates(plan, fusions or provider))
    patch(boundary.construction, "_decider", lambda plan, bound, fusions: decider(plan, bound, fusions or provider))
    for module in (stacks.worlds, test_decoders, test_gradients, test_processes):
        patch(module, "build", build)
    patch(stacks.worlds, "ThreadWorld", SharedThreadWorld)


def test_the_library_ran_the_fused_sums(everything_on: type[Fused]):
    """Without this the tests above could pass with everything declined."""
    test_decoders.test_decoders_equal_one_process((1, 2), "ar", test_decoders.DENSE * 2)
    assert everything_on.count > 0
    everything_on.count = 0
    test_decoders.test_a_hybrid_of_single_stage_layers_equals_one_process((1, 4), "M-*E")
    assert everything_on.count > 0


@pytest.mark.parametrize("test, arguments, shares", [
    (test_decoders.test_decoders_equal_one_process, ((2, 1), "rs", test_decoders.DENSE * 2), {(4, 4)}),
    (test_decoders.test_decoders_equal_one_process, ((2, 1), "rsv", test_decoders.MOE * 2), {(4, 4), (5, 2), (3, 0)}),
    (test_decoders.test_decoders_equal_one_process, ((4, 1), "rsv", test_decoders.DENSE * 2), {(5, 2, 3, 1)}),
    (test_decoders.test_an_all_to_all_moe_equals_one_process, ((1, 2),), {(2, 2), (3, 2), (2, 1)}),
    (test_decoders.test_dense_ffns_on_slices_of_the_rows_equal_one_process, ((1, 2),), {(2, 2), (3, 2), (2, 1)}),
    (test_decoders.test_scattered_batches_equal_one_process, ("sequence_parallel", "rs", 4), {(2, 2, 2, 2)}),
    (test_decoders.test_scattered_batches_equal_one_process, ("sequence_parallel", "ar", 4), {(1, 0, 0, 0)}),
    (test_decoders.test_scattered_batches_equal_one_process, ("input_scattered", "rs", 2), {(4, 4)}),
])  # fmt: skip
def test_the_library_ran_the_fused_reduce_scatters(everything_on: type[Fused], test, arguments, shares):
    test(*arguments)
    assert shares <= set(everything_on.shares)


@pytest.mark.parametrize("dp, tp, options", [
    (2, 1, {"boundary_reduction": "rsv"}),
    (1, 2, {"sequence_parallel": True, "boundary_reduction": "rs"}),
    (1, 4, {"sequence_parallel": True}),
])  # fmt: skip
def test_every_rank_gets_the_gradients_of_one_process_through_fused_reduce_scatters(
    everything_on: type[Fused], dp, tp, options
):
    test_gradients.test_every_rank_gets_the_gradients_of_one_process(dp, tp, options)
    assert everything_on.shares


def on_fused_rank(
    world: Any, topology: Topology, options: dict, names: list[str]
) -> tuple[Any, int, set[tuple[int, ...]]]:
    saved: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, name: str, value: Any) -> None:
        saved.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    switch_on(patch)
    Fused.count = 0
    Fused.shares.clear()
    try:
        return on_rank(world, topology, stacks_main, options, names), Fused.count, set(Fused.shares)
    finally:
        for owner, name, value in reversed(saved):
            setattr(owner, name, value)


@pytest.mark.parametrize("dp, tp, options", [
    (1, 2, {"boundary_reduction": "ar"}),
    (2, 1, {"boundary_reduction": "rs+rsv"}),
    (2, 2, {"boundary_reduction": "rs", "a2a_backend": "all_to_all"}),
])  # fmt: skip
def test_every_stack_equals_one_process_among_processes(pools, dp, tp, options):
    import torch

    names = list(test_processes.stacks())
    topology = Topology(dp, 1, tp, moe_ep=dp * tp)
    results = pools(topology.tp).run(on_fused_rank, topology, options, names)
    assert_same_sequence([event for (_, events), _, _ in results for event in events])
    for rank, ((outputs, _), count, shares) in enumerate(results):
        assert count > 0
        assert tp > 1 or shares == {(4, 4), (5, 2), (3, 0)}
        for (name, _, tokens), output in outputs.items():
            live = tokens[rank // tp]
            want = test_processes.stacks()[name][1](test_decoders.embedded(rank // tp, live))
            assert torch.equal(output[:live], want), (name, rank, tokens)

"""What boundaries need to know of the server around them: one frozen object, bound while a model is built.

A boundary reads its environment at construction and never again: no globals, no environment variables. The
model's constructor runs inside `bind(runtime)`; every stage and every parallel linear made there keeps what
it needs of it. The binding belongs to the thread that made it, so ranks that are threads do not see one
another's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch.distributed as dist

from .contracts import BatchVariant
from .ops import RowMover
from .parallel import Parallel, solo
from .policy import BoundaryReduction, resolve


@dataclass(frozen=True, eq=False)
class Runtime:
    """The configuration of one rank's worker.

    Attributes:
        parallel: This rank's place and groups.
        boundary_reduction: Permitted FFN output transports; `speculative_boundary_reduction` is the draft's.
        a2a_backend: The expert all-to-all in use, or None. With one, a sparse FFN dispatches and combines its
            own tokens, so it runs on slices of attention's rows and its output is complete.
        quantized_communication: All-reduces are quantized: they may not be left to a later stage.
        lora: Adapters are served.
        shared_expert_tp1: A MoE's shared expert is replicated instead of sharded.
        dense_local: Dense FFNs hold all their weights and run on slices of attention's rows.
        speculative_algorithm: The drafting algorithm, or None. EAGLE kinds read outputs under attention DP.
        two_batch_overlap: Two microbatches may be interleaved.
        input_scattered, sequence_parallel: Batches of these variants may come, so paths for them are built.
        allreduce_fusion: The built-in fusion of all-reduce, residual addition and norm is enabled.
    """

    parallel: Parallel = field(default_factory=solo)
    boundary_reduction: BoundaryReduction | str = BoundaryReduction.AUTO
    speculative_boundary_reduction: BoundaryReduction | str = BoundaryReduction.AUTO
    a2a_backend: str | None = None
    quantized_communication: bool = False
    lora: bool = False
    shared_expert_tp1: bool = False
    dense_local: bool = False
    speculative_algorithm: str | None = None
    two_batch_overlap: bool = False
    input_scattered: bool = False
    sequence_parallel: bool = False
    allreduce_fusion: bool = False

    def __post_init__(self) -> None:
        topology = self.parallel.topology
        if self.input_scattered and topology.attention_tp != topology.tp:
            raise ValueError(
                "input-scattered batches need attention TP to span full TP: "
                f"attention_dp={topology.attention_dp}, attention_cp={topology.attention_cp}"
            )
        if self.sequence_parallel and topology.attention_cp > 1:
            raise ValueError(f"sequence-parallel batches do not combine with attention_cp={topology.attention_cp}")
        if topology.moe_dp > 1 and (topology.moe_dp != topology.attention_cp or topology.attention_dp > 1):
            raise ValueError(
                f"moe_dp={topology.moe_dp} needs equal attention_cp (it is {topology.attention_cp}) and no "
                f"attention DP (it is {topology.attention_dp})"
            )

    def for_model(self, architecture: str) -> Runtime:
        """This runtime with `auto` resolved for a model of that class."""
        return replace(self, boundary_reduction=resolve(self.boundary_reduction, architecture))

    def for_draft(self, architecture: str) -> Runtime:
        """This runtime for a draft model of that class, which has a policy of its own."""
        return replace(self, boundary_reduction=resolve(self.speculative_boundary_reduction, architecture))

    @cached_property
    def mover(self) -> RowMover:
        return RowMover(self.parallel)

    @property
    def policy(self) -> BoundaryReduction:
        """The resolved policy. Raises ValueError while it is still `auto`."""
        policy = BoundaryReduction(self.boundary_reduction)
        _ = policy.permits
        return policy

    @property
    def variants(self) -> tuple[BatchVariant, ...]:
        """The batch variants that may come."""
        present = {
            BatchVariant.ORDINARY: True,
            BatchVariant.CP: self.parallel.topology.attention_cp > 1,
            BatchVariant.INPUT_SCATTERED: self.input_scattered,
            BatchVariant.SEQUENCE_PARALLEL: self.sequence_parallel,
        }
        return tuple(variant for variant, is_present in present.items() if is_present)


_bound: ContextVar[Runtime | None] = ContextVar("boundary_runtime", default=None)


@contextmanager
def bind(runtime: Runtime) -> Iterator[Runtime]:
    """Build a model for `runtime`: what is constructed inside, on this thread, keeps it."""
    token = _bound.set(runtime)
    try:
        yield runtime
    finally:
        _bound.reset(token)


def bound_runtime() -> Runtime:
    """The runtime that is bound on this thread; for a process on its own, that of one unsharded rank."""
    runtime = _bound.get()
    if runtime is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                "build the model inside `with bind(Runtime(...)):`; this process is one of several ranks"
            )
        runtime = Runtime(boundary_reduction=BoundaryReduction.AR)
    return runtime

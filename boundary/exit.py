"""The exit of a stage: decide once how its output completes, tell compute by flags, and do exactly that.

A decision is made when the exit is created, from the bound output and facts that all ranks share. It names
the flags that compute sees and what the output owes after compute obeyed them, so the two cannot disagree:
whatever changes between compute and `finish()`, `finish()` acts on the decision that compute saw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .boundary import StageExit
from .contracts import Leaves
from .forward import ForwardBatch, ForwardFlags, publish, restore
from .layout import PaddingMode, RowFacts
from .output import HandoffOutput, Output, Owed
from .policy import Scatter

DefersByProvider = Callable[[ForwardBatch], bool]


@dataclass(frozen=True)
class Decision:
    """How one output completes.

    Attributes:
        owed: What compute's tensor owes, or None.
        carries: It is left to the next stage.
        fuse_mlp_allreduce, mlp_reduce_scatter, defer_moe_finalize: The flags for compute.
        owed_handoff: What a handoff owes, where one is permitted.
    """

    owed: Owed | None
    carries: bool = False
    fuse_mlp_allreduce: bool = False
    mlp_reduce_scatter: bool = False
    defer_moe_finalize: bool = False
    owed_handoff: Owed | None = None

    def flags(self) -> ForwardFlags:
        return ForwardFlags(self.fuse_mlp_allreduce, self.mlp_reduce_scatter, self.defer_moe_finalize)


class Decider:
    """The decisions of one bound FFN output: all of them are made at construction, a batch selects one.

    Args:
        bound: The output.
        needs_consumer: The all-reduce is left only if a fused consumer takes the batch (LoRA, TP1 shared
            experts).
        takes_sum: Whether one does.
        takes_finalize: Whether a MoE may leave its finalize in this batch.
    """

    def __init__(
        self,
        bound: StageExit,
        *,
        needs_consumer: bool = False,
        takes_sum: DefersByProvider | None = None,
        takes_finalize: DefersByProvider | None = None,
    ) -> None:
        output = bound.output
        self.bound = bound
        self._needs_consumer = needs_consumer
        self._takes_sum = takes_sum
        self._takes_finalize = takes_finalize
        self._topology = bound.mover.topology
        self.complete = Decision(bound.owed(summed=True))
        self.scatter = Decision(
            bound.owed(summed=False, scatter=True), carries=output.leaves_for_scatter, mlp_reduce_scatter=True
        )
        left = bound.owed(summed=False)
        self.defer = Decision(left, carries=True, fuse_mlp_allreduce=True)
        self.finalize = Decision(
            left,
            carries=True,
            fuse_mlp_allreduce=True,
            defer_moe_finalize=True,
            owed_handoff=bound.owed(summed=True, handoff=True),
        )

    def decide(self, batch: ForwardBatch) -> Decision:
        """The decision for this batch; the same on every rank."""
        output = self.bound.output
        takes_finalize = self._takes_finalize is not None and self._takes_finalize(batch)
        if self.scatter_of(batch.rows) is not None:
            return self.scatter
        if takes_finalize and output.leaves_for_finalize:
            return self.finalize
        if not output.leaves_for_input or not batch.rows.tokens:
            return self.complete
        if self._needs_consumer and not (self._takes_sum is not None and self._takes_sum(batch)):
            return self.complete
        return self.defer

    def scatter_of(self, facts: RowFacts) -> Scatter | None:
        """The reduce-scatter selected for these row counts: variable where possible, else of a fixed size."""
        scatters = self.bound.scatters
        if not scatters or not facts.tokens:
            return None
        if Scatter.RSV in scatters:
            return Scatter.RSV
        tiles = facts.even and not facts.padded[0][0] % self._topology.attention_tp
        return Scatter.RS if tiles and facts.padding is PaddingMode.MAX_LEN else None


class _Exit:
    """A context around compute, and the one call that hands its output on."""

    def __init__(self, bound: StageExit, decision: Decision, batch: ForwardBatch, what: str) -> None:
        self._bound = bound
        self._decision = decision
        self._batch = batch
        self._facts = batch.rows
        self._stream = batch.residual_stream
        self._what = what
        self._flags = decision.flags()
        self._outer = self._flags
        self._state = "created"

    def __enter__(self) -> Any:
        if self._state != "created":
            raise RuntimeError(f"this exit was {self._state} already; make one per computation")
        self._outer = publish(self._flags)
        self._state = "open"
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        restore(self._outer)
        self._state = "failed" if failure is not None else "closed"

    @property
    def fuse_mlp_allreduce(self) -> bool:
        return self._look("fuse_mlp_allreduce")

    def _look(self, flag: str) -> bool:
        """A flag. Only while the exit is open does looking count as compute's having read it."""
        return getattr(self._flags if self._state == "open" else self._decision, flag)

    def finish(self, hidden_states: Tensor | HandoffOutput) -> Output:
        """Hand compute's output on, once, after the `with` block. Every rank calls it.

        Returns:
            What the model passes to the next boundary.

        Raises:
            RuntimeError: Compute failed, was not run inside the block, left a flag unread, or returned a
                handoff that was not asked for; the output was finished before; or the batch's stream has been
                released or replaced since the exit was made.
        """
        if self._state != "closed":
            raise RuntimeError(f"finish() needs an exit whose computation succeeded; this one is {self._state}")
        decision = self._decision
        handoff = isinstance(hidden_states, HandoffOutput)
        if handoff and not decision.defer_moe_finalize:
            raise RuntimeError("compute returned a HandoffOutput although defer_moe_finalize is false")
        if handoff and not self._flags.finalize_consulted:
            raise RuntimeError("compute returned a HandoffOutput and read no defer_moe_finalize that says it may")
        if not handoff and self._flags.leaves_sum and not self._flags.sum_consulted and hidden_states.shape[0]:
            raise RuntimeError(
                f"the {self._what} exit left the output sum to the boundary, and compute read no flag that "
                "says so: it has summed already. Let its reduction read get_forward() or the exit object"
            )
        stream = self._stream
        if stream is None or self._batch.residual_stream is not stream:
            raise RuntimeError(
                f"the batch's residual stream was released or replaced while this {self._what} exit was in use"
            )
        self._state = "finished"
        owed = decision.owed_handoff if handoff else decision.owed
        return self._bound.deliver(hidden_states, owed, decision.carries, stream, self._facts)


class FfnExit(_Exit):
    """Publishes `fuse_mlp_allreduce`, `mlp_reduce_scatter` and `defer_moe_finalize` while an FFN computes."""

    def __init__(self, decider: Decider, batch: ForwardBatch) -> None:
        super().__init__(decider.bound, decider.decide(batch), batch, "FFN")

    @property
    def mlp_reduce_scatter(self) -> bool:
        return self._look("mlp_reduce_scatter")

    @property
    def defer_moe_finalize(self) -> bool:
        return self._look("defer_moe_finalize")


class MixerExit(_Exit):
    """Publishes `fuse_mlp_allreduce` while a mixer computes: whether its attention-TP sum stays with the next
    stage.
    """

    def __init__(self, bound: StageExit, batch: ForwardBatch) -> None:
        leaves = bound.output.leaves_sum
        skips = leaves is Leaves.ALWAYS or (leaves is Leaves.PER_BATCH and batch.rows.tokens > 0)
        owed = bound.owed(summed=not skips, declared=leaves is Leaves.ALWAYS)
        super().__init__(bound, Decision(owed, carries=skips, fuse_mlp_allreduce=skips), batch, "mixer")

    @property
    def skips_reduction(self) -> bool:
        """Compute leaves its output unsummed."""
        return self.fuse_mlp_allreduce

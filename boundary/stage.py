"""What the model calls: `prepare` before compute, and `finish` or `exit` after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .adapters import branch
from .adapters.attention import AttnTpContext
from .adapters.lora import lora_rows
from .construction import StagePlan
from .contracts import Leaves, ProducerReduction, StageKind
from .exit import FfnExit, MixerExit
from .forward import ForwardBatch
from .output import Output
from .prepare import Capture, prepare_input
from .residual import batch as residual_batch

if TYPE_CHECKING:
    from .factories import StageDeclaration
    from .residual.access import AuxHiddenStateList


class StageBoundary:
    """One stage's boundary: made once per layer by the factories, and used by every forward pass.

    It keeps no tensors: what a forward pass leaves behind is in its batch's residual stream. All methods are
    called by every rank of the pipeline stage, by those without token rows too.

    Attributes:
        declaration: What the model declared, with its neighbours.
        plan: The bound paths.
    """

    def __init__(
        self, declaration: StageDeclaration, plan: StagePlan, qkv_latent_func: Callable[..., Any] | None
    ) -> None:
        self.declaration = declaration
        self.plan = plan
        self._qkv_latent_func = qkv_latent_func
        self._enters = declaration.previous is None and declaration.prepared_from is None
        self._attn = declaration.kind is StageKind.ATTN
        self._lora_rows = {variant: lora_rows(path.decl) for variant, path in plan.paths.items()}
        self._serves_lora = plan.runtime.lora

    def __repr__(self) -> str:
        return f"StageBoundary({self.declaration.kind.value}, {[variant.name for variant in self.plan.paths]})"

    def certify(self, following: StageBoundary) -> None:
        """Take over what the next local stage's input certifies about the residual that this one reads."""
        for variant, path in self.plan.paths.items():
            its_entry = following.plan.paths[variant].entry
            if path.entry is not None and its_entry is not None:
                self.plan.paths[variant] = replace(path, entry=path.entry.certified_by(its_entry))

    def prepare(
        self,
        hidden_states: Output,
        forward_batch: ForwardBatch,
        *,
        post_residual_addition: Tensor | None = None,
        capture_output: Capture | None = None,
        captured_last_layer_outputs: AuxHiddenStateList | None = None,
    ) -> Any:
        """Complete the previous output, update the residual, and return this stage's input in its read's
        format.

        Args:
            hidden_states: What the previous boundary call returned; the embedding where the stack starts.
            forward_batch: The batch.
            post_residual_addition: Added to the updated residual before the norm, on the model's rows.
            capture_output: Called with the updated residual on the producer's rows, `capture(value, *,
                owned=False)`; where the stack starts, with the input. What comes before
                `post_residual_addition`, and the hidden state that a residual of several streams stands for.
                Mixers only.
            captured_last_layer_outputs: Collects the same on the rows compute runs on. Mixers only.

        Raises:
            RuntimeError: The stack was not started, the output is not this stream's, or the stage is a
                branch's.
            ValueError: `post_residual_addition` does not fit the residual, or its update.
        """
        if self.declaration.prepared_from is not None:
            raise RuntimeError("a prepared branch must enter through branch_input, not prepare")
        if not self._attn and (capture_output is not None or captured_last_layer_outputs is not None):
            raise TypeError("an FFN's prepare() takes no capture: capture at an attention's, or at the final norm")
        stream = residual_batch.stream_of(forward_batch)
        if self._enters and forward_batch.sequence_parallel:
            forward_batch.sequence_parallel_open = True
        path = self.plan.select(forward_batch)
        assert path.entry is not None
        if self._serves_lora:
            forward_batch.lora_rows = self._lora_rows[forward_batch.variant]
        prepared = prepare_input(
            path.entry,
            stream,
            hidden_states,
            forward_batch,
            post_residual_addition=post_residual_addition,
            capture_output=capture_output,
            captured_last_layer_outputs=captured_last_layer_outputs,
        )
        forward_batch.attention_input = None
        if self._qkv_latent_func is not None:
            gathers = path.entry.leaves_gather_to_adapter(forward_batch.rows)
            forward_batch.attention_input = AttnTpContext(
                prepared,
                self._qkv_latent_func,
                forward_batch,
                path.decl.input if gathers else None,
                self.plan.runtime.mover,
            )
        return prepared

    def finish(self, hidden_states: Tensor, forward_batch: ForwardBatch) -> Output:
        """Register a `PARTIAL` mixer's output: its term of the attention-TP sum, which the next input
        completes.

        Raises:
            TypeError: The stage's output goes through `exit()`.
            RuntimeError: It was finished already.
        """
        if self.declaration.reduction is not ProducerReduction.PARTIAL:
            raise TypeError("only a PARTIAL stage has finish(); publish this stage's output through exit()")
        bound = self.plan.select(forward_batch).exit
        leaves = bound.output.leaves_sum is Leaves.ALWAYS
        owed = bound.owed(summed=False, declared=leaves)
        stream = residual_batch.stream_of(forward_batch)
        return bound.deliver(hidden_states, owed, leaves, stream, forward_batch.rows)

    def exit(self, forward_batch: ForwardBatch) -> FfnExit | MixerExit:
        """The context for a `SCOPED` or `LOCAL_TAIL` stage's compute. Its `finish()` hands the output on.

        Raises:
            TypeError: The stage is `PARTIAL`: its compute never sums.
        """
        if self.declaration.reduction is ProducerReduction.PARTIAL:
            raise TypeError("a PARTIAL stage has no exit(); hand its term to finish()")
        residual_batch.stream_of(forward_batch)
        path = self.plan.select(forward_batch)
        if self._attn:
            return MixerExit(path.exit, forward_batch)
        return FfnExit(path.decider, forward_batch)

    def postprocess(self, hidden_states: Tensor, forward_batch: ForwardBatch) -> Output:
        """Hand on an FFN output that compute, running outside any exit, has reduced fully. Leaves nothing
        owed.
        """
        bound = self.plan.select(forward_batch).exit
        stream = residual_batch.stream_of(forward_batch)
        return bound.deliver(hidden_states, bound.owed(summed=True), False, stream, forward_batch.rows)

    def capture_output(
        self, hidden_states: Output, forward_batch: ForwardBatch, *, skip_empty: bool = False
    ) -> tuple[Output, Tensor | None]:
        """A snapshot of the residual with the pending output in it, and the handle that the model passes on.

        Work that was decided for this batch completes on the output itself; a declared sum completes on a
        copy, and the consumer still runs it. With `skip_empty`, no rows means no snapshot and no completion.
        """
        if skip_empty and not forward_batch.rows.cell(self.plan.runtime.parallel.at)[0]:
            return hidden_states, None
        stream = residual_batch.stream_of(forward_batch)
        pending = stream.check(hidden_states)
        residual_batch.require_plain(stream)
        if pending is not None and pending.owed is not None and not pending.owed.declared:
            hidden_states = residual_batch.complete_output(hidden_states, forward_batch)
        return hidden_states, residual_batch.snapshot(hidden_states, forward_batch)

    def from_pp(
        self, tensors: dict[str, Tensor], forward_batch: ForwardBatch, *, allow_missing_residual: bool = False
    ) -> Output:
        """Take over the stream that another pipeline stage exported with `residual.batch.to_pp()`.

        A sum that this stage's declared producer always leaves arrives as it was, one term per rank, and is
        completed by this stage's input. A producer that writes the residual sends that alone.

        Raises:
            KeyError: An ordinary handoff without its residual, unless `allow_missing_residual` says that the
                stream was written.
        """
        forward_batch.sequence_parallel_open = forward_batch.sequence_parallel
        entry = self.plan.select(forward_batch).entry
        previous = self.declaration.previous
        if entry is None or previous is None:
            raise RuntimeError("only a stage declared with its previous producer receives from a pipeline stage")
        written = previous.update.at_producer or (allow_missing_residual and "residual" not in tensors)
        update = None if written else previous.update
        return residual_batch.receive(tensors, forward_batch, entry, update, previous.transform)

    def branch_input(
        self, source: StageBoundary, hidden_states: Any, forward_batch: ForwardBatch
    ) -> tuple[Any, ForwardBatch]:
        """Enter a branch with the input that `source` has prepared. See `adapters.branch`."""
        return branch.branch_input(self, source, hidden_states, forward_batch)

    def branch_output(self, hidden_states: Tensor, forward_batch: ForwardBatch) -> Tensor:
        """Put a branch's complete output on its handoff rows. See `adapters.branch`."""
        return branch.branch_output(self, hidden_states, forward_batch)

    def merge_branch(
        self, hidden_states: Output, branch_batch: ForwardBatch, other: Tensor, forward_batch: ForwardBatch
    ) -> Output:
        """Join a branch into the main stack. See `adapters.branch`."""
        return branch.merge_branch(self, hidden_states, branch_batch, other, forward_batch)

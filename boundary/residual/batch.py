"""The residual of a batch, for the model's own code: entering and leaving a stack, and everything in between.

Each function takes what the last boundary call returned and returns what the next one is to be given. Where a
contribution owes work, completing it may be a collective: every rank calls these functions, at the same
places.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ..layout import FULL
from ..output import Contribution, HandoffOutput, Output, Owed, UnreducedOutput
from . import LayerResidual, Norm, StageUpdate
from .access import aligned, snapshot_of
from .add_norm import add_norm, wide
from .stream import ResidualStream

if TYPE_CHECKING:
    from ..boundary import StageEntry
    from ..forward import ForwardBatch
    from ..output import OutputTransform
    from ..prepare import Capture


class HandoffNorm(Protocol):
    """A final norm that takes over a terminal MoE's finalize."""

    def finalize(self, handoff: HandoffOutput, residual: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        """Finalize, sum, add the residual, normalize with gain `gamma`: `(normalized, residual)`."""
        ...


def start(forward_batch: ForwardBatch) -> None:
    """Begin a layer stack: a fresh stream, whatever an earlier forward pass left."""
    forward_batch.residual_stream = ResidualStream()
    forward_batch.sequence_parallel_open = False


def stream_of(forward_batch: ForwardBatch) -> ResidualStream:
    """The batch's stream. Raises RuntimeError outside a stack."""
    if forward_batch.residual_stream is None:
        raise RuntimeError("start the layer stack before entering a stage")
    return forward_batch.residual_stream


def complete_output(hidden_states: Output, forward_batch: ForwardBatch) -> Tensor:
    """Finish outstanding communication and finalize work. The residual update stays pending."""
    stream = stream_of(forward_batch)
    return hidden_states if stream.check(hidden_states) is None else stream.complete()


def fold(hidden_states: Output, forward_batch: ForwardBatch) -> Tensor:
    """Complete a plain contribution and fold it into the residual: the stream is written.

    Raises:
        RuntimeError: The update is not a plain addition.
    """
    stream = stream_of(forward_batch)
    contribution = stream.check(hidden_states)
    if contribution is None:
        return hidden_states
    if not contribution.update.plain:
        raise RuntimeError("fold requires a plain residual update")
    return stream.write(_updated(contribution, stream.residual), contribution.mover, contribution.facts)


def _updated(contribution: Contribution, residual: LayerResidual | None) -> LayerResidual:
    value = contribution.complete()
    if residual is None:
        return LayerResidual(value, contribution.rows)
    return contribution.update.apply(value, aligned(contribution, residual))


def written(hidden_states: Tensor, forward_batch: ForwardBatch) -> Tensor:
    """Make `hidden_states` the residual: for compute that produced the full residual itself, on the rows on
    which the previous output was to meet it.

    What was pending is dropped; `fold()` it first where there may be something.
    """
    stream = stream_of(forward_batch)
    stream.computing = False
    holder = stream.pending or stream.residual
    rows = forward_batch.rows.model_rows if holder is None else holder.rows
    return stream.write(LayerResidual(hidden_states, rows))


def take_output(hidden_states: Tensor, forward_batch: ForwardBatch) -> Tensor:
    """Release the stream at an exit whose output is written already.

    Raises:
        RuntimeError: A contribution is pending.
    """
    stream = stream_of(forward_batch)
    if stream.pending is not None:
        raise RuntimeError("write the residual update before taking the final output")
    stream.check(hidden_states)
    _release(forward_batch)
    return hidden_states


def norm(
    hidden_states: Output,
    forward_batch: ForwardBatch,
    layernorm: Norm,
    *,
    skip_empty: bool = False,
    capture_output: Capture | None = None,
    handoff_norm: HandoffNorm | None = None,
) -> Tensor:
    """Leave the stack: complete, update, and normalize. The batch's stream is released.

    Args:
        hidden_states: What the last boundary call returned.
        forward_batch: The batch.
        layernorm: The final norm.
        skip_empty: Do not call the norm where there are no rows. Owed work is completed all the same: it may
            be a collective that other ranks join.
        capture_output: Given the updated residual that the norm reads; the empty one where there are no rows,
            so that collections have one length on every rank.
        handoff_norm: Takes over a terminal MoE's finalize. Reads the norm's `gemma_weight`.
    """
    stream = stream_of(forward_batch)
    contribution = stream.check(hidden_states)
    if contribution is not None and contribution.owed is not None and contribution.owed.handoff and handoff_norm:
        if capture_output is not None:
            raise ValueError("a final norm that takes over a finalize has no residual to capture")
        return _finalized(stream, contribution, forward_batch, layernorm, handoff_norm)
    contribution, residual = stream.arrive(hidden_states)
    del hidden_states
    if contribution is not None and residual is not None and contribution.update.plain:
        value = contribution.complete()
        residual = aligned(contribution, residual)
        contribution.take()
        if value.shape[0] or not skip_empty:
            normalized, updated = add_norm(value, residual.tensor, layernorm)
        else:
            normalized = updated = value
    else:
        if contribution is not None:
            residual = _updated(contribution, residual)
        if residual is None:
            raise RuntimeError("there is nothing to normalize: no stage has run since the stack was started")
        updated = residual.tensor
        normalized = layernorm(updated) if updated.shape[0] or not skip_empty else updated
    if capture_output is not None:
        capture_output(updated, owned=False)
    _release(forward_batch)
    return normalized


def _finalized(
    stream: ResidualStream,
    contribution: Contribution,
    forward_batch: ForwardBatch,
    layernorm: Norm,
    handoff_norm: HandoffNorm,
) -> Tensor:
    gamma = getattr(layernorm, "gemma_weight", None)
    if not isinstance(gamma, Tensor):
        raise TypeError(f"handoff_norm needs a final norm with a gemma_weight, not {type(layernorm).__name__}")
    owed, residual = contribution.owed, stream.residual
    assert owed is not None
    if residual is None or owed.rows != owed.lands or residual.rows != owed.lands or owed.transform is not None:
        raise RuntimeError("handoff_norm takes a handoff whose rows are the residual's; complete_output() first")
    value = contribution.take()
    assert isinstance(value, HandoffOutput)
    normalized, _ = handoff_norm.finalize(value, residual.tensor, gamma)
    _release(forward_batch)
    return normalized


def _release(forward_batch: ForwardBatch) -> None:
    forward_batch.residual_stream = None
    forward_batch.attention_input = None
    forward_batch.sequence_parallel_open = False


def snapshot(hidden_states: Output, forward_batch: ForwardBatch) -> Tensor:
    """The residual with the pending output in it, in storage of its own. Nothing of the main output is
    consumed.

    Raises:
        RuntimeError: The update is no plain addition, or a finalize is owed.
    """
    stream = stream_of(forward_batch)
    contribution = stream.check(hidden_states)
    require_plain(stream)
    if contribution is None:
        return hidden_states.clone()
    return snapshot_of(contribution, stream.residual)


def require_plain(stream: ResidualStream) -> None:
    """Refuse a snapshot of what is no hidden state. Nothing has run or changed.

    Raises:
        RuntimeError: The pending update, or the one that wrote the residual, is no plain addition.
    """
    pending = stream.pending
    if not stream.plain or (pending is not None and not pending.update.plain):
        raise RuntimeError("snapshot requires a plain residual update")


def add_to_output(hidden_states: Output, forward_batch: ForwardBatch, extra: Tensor) -> Tensor:
    """Add `extra` (on the model's rows) once to the output: after its sum, before its residual update.

    Where the stream is written, it joins the residual. The dtype stays the output's.

    Raises:
        ValueError: `extra` has not the shape of the output on the model's rows; to a residual of several
            streams there is nothing that a hidden state could be added to.
    """
    stream = stream_of(forward_batch)
    contribution = stream.check(hidden_states)
    if contribution is None:
        residual = stream.residual
        if residual is None:
            return _plus(hidden_states, stream.model_rows_to(extra, FULL, hidden_states, "extra"))
        added = stream.model_rows_to(extra, residual.rows, residual.tensor, "extra")
        return stream.write(replace(residual, tensor=_plus(residual.tensor, added)))
    value = stream.complete()
    contribution.value = _plus(value, stream.model_rows_to(extra, contribution.rows, value, "extra"))
    return contribution.value


def _plus(value: Tensor, extra: Tensor) -> Tensor:
    return (wide(value) + wide(extra)).to(value.dtype)


def to_pp(hidden_states: Output, forward_batch: ForwardBatch, *, rank_to_rank: bool = True) -> dict[str, Tensor]:
    """The stream as tensors for the next pipeline stage; the batch's stream is released.

    Everything is on attention's rows. Work that was decided for this batch is completed; a declared sum is
    left to the receiver, whose `from_pp` declares it again, so each rank's term must reach the same rank
    there.

    Args:
        hidden_states: What the last boundary call returned. Not completed by hand: the receiver would sum it
            again.
        forward_batch: The batch.
        rank_to_rank: The transport carries each rank's tensors to the same rank of the next pipeline stage.

    Raises:
        RuntimeError: A declared sum would cross a transport that is not rank to rank, or the pending update
            is no plain addition.
    """
    stream = stream_of(forward_batch)
    contribution = stream.check(hidden_states)
    if contribution is None:
        if stream.residual is None:
            raise RuntimeError("no stage has run since the stack was started")
        if stream.residual.coefficients:
            raise RuntimeError("a stage was prepared and not finished: the coefficients of its read cannot cross")
        del hidden_states
        sent = stream.residual_on().tensor
        _release(forward_batch)
        return {"hidden_states": sent}
    if not contribution.update.plain:
        raise RuntimeError("a pending update that is no plain addition cannot cross to another pipeline stage")
    declared = contribution.owed is not None and contribution.owed.declared
    if declared and not rank_to_rank:
        raise RuntimeError(
            "this output still owes a declared sum, whose terms only a rank-to-rank transport preserves: "
            "it must not cut tensors into slices or send one rank's to all"
        )
    _, residual = stream.arrive(hidden_states)
    del hidden_states
    rows = contribution.facts.model_rows
    value = contribution.take() if declared else contribution.complete(rows)
    assert isinstance(value, Tensor)
    tensors = {"hidden_states": value}
    if residual is not None:
        tensors["residual"] = residual.moved(rows, contribution.mover, contribution.facts).tensor
    _release(forward_batch)
    return tensors


def receive(
    tensors: dict[str, Tensor],
    forward_batch: ForwardBatch,
    entry: StageEntry,
    update: StageUpdate | None,
    transform: OutputTransform | None = None,
) -> Output:
    """Make the batch's stream from what `to_pp` exported, as the producer declared before `entry` would have
    left it.

    Args:
        tensors: What arrived.
        forward_batch: The batch.
        entry: The bound input of the stage that receives.
        update: The declared producer's; None says that it has written the residual.
        transform: The declared producer's, which runs after a sum that arrives unsummed.
    """
    stream = forward_batch.residual_stream = ResidualStream()
    rows = entry.model_rows
    hidden_states = tensors["hidden_states"]
    if update is None:
        stream.plain = entry.expects_plain and entry.read.keeps_residual
        return stream.write(LayerResidual(hidden_states, rows), entry.mover, forward_batch.rows)
    residual = LayerResidual(tensors["residual"], rows)
    over = entry.edge.expects_sum
    output: Tensor | UnreducedOutput = hidden_states
    if over is not None:
        output = UnreducedOutput(hidden_states, Owed(rows, rows, over, transform=transform, declared=True))
    return stream.leave(output, update, rows, entry.mover, forward_batch.rows, residual)


__all__ = [
    "add_to_output",
    "complete_output",
    "fold",
    "norm",
    "receive",
    "snapshot",
    "start",
    "take_output",
    "to_pp",
    "written",
]

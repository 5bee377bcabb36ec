"""Two-batch overlap: one batch's rows as microbatches that take turns.

A schedule interleaves the microbatches' operations, so they must not share a stream: `split` completes what
is owed, and gives every microbatch its rows of the output and of the residual in a stream of its own. `merge`
puts streams that are in the same state back together. In between, FFNs run without an exit scope, which must
not stay open while another microbatch computes, and hand their complete output to `boundary.postprocess()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..forward import ForwardBatch
from ..ops import RowMover
from ..output import Contribution, Output
from ..residual import LayerResidual
from ..residual import batch as residual_batch
from ..residual.stream import ResidualStream

if TYPE_CHECKING:
    from ..runtime import Runtime


def split(
    hidden_states: Output,
    forward_batch: ForwardBatch,
    children: Sequence[ForwardBatch],
    tokens: Sequence[int],
    runtime: Runtime,
) -> list[Tensor]:
    """Deal out this rank's live rows to its microbatches, in order. Every rank calls it.

    Microbatches have attention's rows: an output or a residual on slices of those is gathered first.

    Args:
        hidden_states: What the last boundary call returned for the batch.
        forward_batch: The batch; its stream is released.
        children: The microbatches, with row counts of their own: rows beyond their tokens are zeros.
        tokens: How many of this rank's tokens each takes.
        runtime: The one the stages were bound to.

    Returns:
        Each microbatch's hidden states.

    Raises:
        RuntimeError: The output is not this batch's. Nothing has been completed.
    """
    stream = residual_batch.stream_of(forward_batch)
    mover, rows = runtime.mover, forward_batch.rows.model_rows
    value, contribution, residual = _on_model_rows(stream, hidden_states, forward_batch, mover)
    forward_batch.residual_stream = None
    outputs: list[Tensor] = []
    start = 0
    for child, count in zip(children, tokens, strict=True):
        padded, _ = child.rows.cell(runtime.parallel.at)
        child.residual_stream = own = ResidualStream()
        own.plain = stream.plain
        child.sequence_parallel_open = forward_batch.sequence_parallel_open
        part = None
        if residual is not None:
            cut = (_rows(one, start, count, padded) for one in (residual.tensor, *residual.coefficients))
            tensor, *coefficients = cut
            part = LayerResidual(tensor, rows, tuple(coefficients))
        if contribution is not None:
            output = _rows(value, start, count, padded)
            outputs.append(output)
            own.leave(output, contribution.update, rows, mover, child.rows, part)
        elif part is not None:
            outputs.append(own.write(part, mover, child.rows))
        else:
            outputs.append(_rows(value, start, count, padded))
        start += count
    return outputs


def _on_model_rows(
    stream: ResidualStream, hidden_states: Output, batch: ForwardBatch, mover: RowMover
) -> tuple[Tensor, Contribution | None, LayerResidual | None]:
    """Take the value, the completed contribution and the residual out of a stream, all on attention's rows.

    In a written stream the value is the residual's tensor, as it is after the move.
    """
    stream.check(hidden_states)
    contribution, residual = stream.arrive(hidden_states)
    rows = batch.rows.model_rows
    if residual is not None:
        residual = residual.moved(rows, mover, batch.rows)
    if contribution is not None:
        return contribution.complete(rows), contribution, residual
    return (hidden_states if residual is None else residual.tensor), None, residual


def _rows(value: Tensor, start: int, count: int, padded: int) -> Tensor:
    part = value.new_zeros(padded, *value.shape[1:])
    part[:count] = value[start : start + count]
    return part


def merge(
    outputs: Sequence[Output],
    children: Sequence[ForwardBatch],
    forward_batch: ForwardBatch,
    tokens: Sequence[int],
    runtime: Runtime,
) -> Tensor:
    """The microbatches' live rows together again as the batch's, on attention's rows; the arguments are those
    of `split`. Every rank calls it.

    Raises:
        RuntimeError: An output is not its microbatch's, the microbatches' streams are not in the same state,
            or their updates differ. Nothing has been completed or released.
    """
    streams = [residual_batch.stream_of(child) for child in children]
    states = set()
    for output, stream in zip(outputs, streams, strict=True):
        pending, residual = stream.check(output), stream.residual
        shape = None if residual is None else len(residual.coefficients)
        states.add((None if pending is None else (pending.update, pending.rows), shape))
    if len(states) != 1:
        raise RuntimeError("microbatches are merged in the same state and with the same pending update")
    mover, rows = runtime.mover, forward_batch.rows.model_rows
    padded, _ = forward_batch.rows.cell(runtime.parallel.at)

    def joined(parts: Sequence[Tensor]) -> Tensor:
        whole = parts[0].new_zeros(padded, *parts[0].shape[1:])
        live = torch.cat([part[:count] for part, count in zip(parts, tokens, strict=True)])
        whole[: live.shape[0]] = live
        return whole

    values: list[Tensor] = []
    contributions: list[Contribution | None] = []
    residuals: list[tuple[Tensor, ...]] = []
    for output, stream, child in zip(outputs, streams, children, strict=True):
        value, contribution, residual = _on_model_rows(stream, output, child, mover)
        values.append(value)
        contributions.append(contribution)
        if residual is not None:
            residuals.append((residual.tensor, *residual.coefficients))
        child.residual_stream = None
    stream = forward_batch.residual_stream = ResidualStream()
    stream.plain = streams[0].plain
    residual = None
    if residuals:
        tensor, *coefficients = (joined(parts) for parts in zip(*residuals, strict=True))
        residual = LayerResidual(tensor, rows, tuple(coefficients))
    if (first := contributions[0]) is not None:
        value = joined(values)
        stream.leave(value, first.update, rows, mover, forward_batch.rows, residual)
        return value
    if residual is not None:
        return stream.write(residual, mover, forward_batch.rows)
    return joined(values)

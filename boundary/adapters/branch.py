"""Branches: stages that share an input with another stage and run beside it, as in a shortcut-connected MoE.

The source stage prepares once. `branch_input` hands the same read to the branch's first stage, on that
stage's rows, and forks the residual: the branch carries it on in a batch of its own. The source's compute
stays outside: `branch_output` puts its complete result on the handoff rows and writes no residual.
`merge_branch` adds that result to the branch's last output; residual and update are the branch's alone, so
nothing enters the residual twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..output import Output
from ..residual import batch as residual_batch
from ..residual.stream import ResidualStream

if TYPE_CHECKING:
    from ..forward import ForwardBatch
    from ..stage import StageBoundary


def branch_input(
    boundary: StageBoundary, source: StageBoundary, hidden_states: Any, forward_batch: ForwardBatch
) -> tuple[Any, ForwardBatch]:
    """Enter the branch that starts at `boundary`, with what `source.prepare()` returned.

    Returns:
        The input on the branch's compute rows, and the branch's own batch.

    Raises:
        RuntimeError: `boundary` was not declared as prepared from `source`.
    """
    if boundary.declaration.prepared_from != source.declaration:
        raise RuntimeError(
            "this stage is not prepared from that source: declare it with prepared_from=source.declaration"
        )
    stream = residual_batch.stream_of(forward_batch)
    if stream.pending is not None or stream.residual is None:
        raise RuntimeError("a branch is entered after its source's prepare and before its source's finish")
    path, its_path = boundary.plan.select(forward_batch), source.plan.select(forward_batch)
    mover = boundary.plan.runtime.mover
    moved = mover.move(hidden_states, its_path.decl.input.rows, path.decl.input.rows, forward_batch.rows)
    fork = ResidualStream()
    fork.write(stream.residual, mover, forward_batch.rows)
    fork.plain, fork.computing = stream.plain, True
    return moved, replace(forward_batch, residual_stream=fork)


def branch_output(source: StageBoundary, hidden_states: Tensor, forward_batch: ForwardBatch) -> Tensor:
    """The source's complete output on attention's rows, where branches meet; the stream is not touched."""
    bound = source.plan.select(forward_batch).exit
    rows = forward_batch.rows.model_rows
    owed = bound.owed(summed=True)
    if owed is not None:
        return owed.run(hidden_states, rows, bound.mover, forward_batch.rows)
    return bound.mover.move(hidden_states, bound.output.rows, rows, forward_batch.rows)


def merge_branch(
    boundary: StageBoundary,
    hidden_states: Output,
    branch_batch: ForwardBatch,
    other: Tensor,
    forward_batch: ForwardBatch,
) -> Output:
    """Add `other` to the branch's last output, and make the branch's stream the batch's.

    Args:
        boundary: The branch's last stage.
        hidden_states: What its exit returned.
        branch_batch: The branch's batch.
        other: What `branch_output` returned.
        forward_batch: The batch the branch was forked from.

    Raises:
        RuntimeError: The branch has written its residual, so that nothing is pending to which `other` could
            be added; or something is pending in the batch itself.
    """
    stream = residual_batch.stream_of(branch_batch)
    contribution = stream.check(hidden_states)
    if contribution is None:
        raise RuntimeError("the branch's output is in its residual already: nothing is pending to merge with")
    main = forward_batch.residual_stream
    if main is not None and main.pending is not None:
        raise RuntimeError("the main stream has a contribution pending, which merging the branch would discard")
    value = stream.complete()
    facts = contribution.facts
    contribution.value = value + contribution.mover.move(other, facts.model_rows, contribution.rows, facts)
    forward_batch.residual_stream = stream
    branch_batch.residual_stream = None
    return contribution.value

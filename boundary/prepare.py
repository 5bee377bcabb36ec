"""Executing a bound input: complete what the producer owes, update the residual, read it, move what was read.

The state of the stream says what there is to do, the entry says in which order; nothing here chooses a path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .boundary import StageEntry
from .contracts import Order
from .forward import ForwardBatch
from .layout import FULL, Layout, SumGroup
from .output import Contribution, Output, Owed
from .residual import LayerResidual
from .residual.add_norm import wide
from .residual.stream import ResidualStream

if TYPE_CHECKING:
    from .fusions import Fused, FusedInput
    from .residual.access import AuxHiddenStateList

Capture = Callable[..., None]
"""`capture(value, *, owned=False)`: keeps `value`; unless it is owned, keeps a copy."""


@dataclass(frozen=True)
class Captures:
    """Who is to have the updated residual: the same value on two layouts.

    Attributes:
        output: Takes it on the producer's rows.
        last_layer: Takes it on the rows compute runs on.
    """

    output: Capture | None = None
    last_layer: Capture | None = None

    def __bool__(self) -> bool:
        return self.output is not None or self.last_layer is not None

    def take(self, entry: StageEntry, residual: LayerResidual, batch: ForwardBatch, *, computed: bool) -> None:
        """Hand out the hidden state that `residual`, on the read's rows, stands for, and say of each whether
        nothing else writes its storage. `computed`: it was made for the captures.
        """
        residual = LayerResidual(residual.tensor, residual.rows)  # coefficients need not move along
        for capture, rows in ((self.output, entry.capture_rows), (self.last_layer, entry.edge.input.rows)):
            if capture is None:
                continue
            moved = residual.moved(rows, entry.mover, batch.rows)
            hidden = entry.read.contract(moved)
            if hidden is residual.tensor:
                certified = entry.captures_owned is not None and entry.captures_owned(hidden.shape[0])
                owned = computed or certified
            else:
                owned = hidden is not moved.tensor or entry.move_allocates(rows)
            capture(hidden, owned=owned)

    def take_entry(self, entry: StageEntry, hidden_states: Tensor, batch: ForwardBatch) -> None:
        """Hand out what a stack is entered with, before the read makes a residual of it."""
        if self.output is not None:
            self.output(hidden_states, owned=False)
        if self.last_layer is not None:
            source, rows = entry.model_rows, entry.edge.input.rows
            moved = entry.mover.move(hidden_states, source, rows, batch.rows)
            self.last_layer(moved, owned=source != rows and rows.contains(source))


def prepare_input(
    entry: StageEntry,
    stream: ResidualStream,
    hidden_states: Output,
    batch: ForwardBatch,
    *,
    post_residual_addition: Tensor | None = None,
    capture_output: Capture | None = None,
    captured_last_layer_outputs: AuxHiddenStateList | None = None,
) -> Any:
    """The consumer's input, in the read's format, on the rows its compute (or its input adapter) takes.

    Every rank calls it, those without rows too. The stream is left written, with the residual on the read's
    rows.

    Raises:
        RuntimeError: The output is not this stream's, or the producer is not the declared one. No collective
            has run.
        ValueError: The addition has another shape than the residual on the model's rows, or the pending
            update is no plain addition.
    """
    needs, mover, facts = entry.edge.input, entry.mover, batch.rows
    pending = stream.check(hidden_states)
    extra = post_residual_addition
    if pending is not None:
        _check_producer(entry, pending, adds=extra is not None)
    elif stream.residual is None and not entry.enters:
        raise RuntimeError("a new stream is entered through a stage declared with previous=None")
    if extra is not None:
        stream.mover, stream.facts = mover, facts
        like = extra if stream.residual is None else stream.residual.tensor
        extra = stream.model_rows_to(extra, needs.read_rows, like, "post_residual_addition")
    plain = stream.plain and (pending is None or pending.update.plain) and entry.read.keeps_residual
    contribution, residual = stream.arrive(hidden_states)
    captures = Captures(
        capture_output, None if captured_last_layer_outputs is None else captured_last_layer_outputs.capture
    )

    if contribution is not None:
        del hidden_states, pending
        input_, residual, rows = _from_pending(entry, contribution, residual, batch, extra, captures)
    else:
        if residual is None:
            captures.take_entry(entry, hidden_states, batch)
            captures = Captures()
            residual = entry.read.enter(hidden_states, entry.model_rows)
        input_, residual, rows = _from_written(entry, residual, batch, extra, captures)
    stream.write(residual, mover, facts)
    stream.computing, stream.plain = True, plain
    return input_ if entry.leaves_gather_to_adapter(facts) else mover.move(input_, rows, needs.rows, facts)


def _check_producer(entry: StageEntry, contribution: Contribution, *, adds: bool) -> None:
    """Refuse, before any collective, a contribution that the declared producer could not have left, and an
    addition (`adds`) between an update and a read that are one operation.
    """
    if adds and not contribution.update.plain:
        raise ValueError("post_residual_addition needs a plain residual update")
    if contribution.update.plain != entry.expects_plain:
        kinds = {True: "a plain addition", False: "not a plain addition"}
        raise RuntimeError(
            f"this stage was declared after a producer whose update is {kinds[entry.expects_plain]}, and the "
            f"contribution's is {kinds[contribution.update.plain]}"
        )
    owed = contribution.owed
    if owed is not None and owed.declared:
        expected = entry.edge.expects_sum
        if owed.sum is None or expected is None or owed.sum.group is not expected.group:
            raise RuntimeError(
                f"the contribution owes a declared sum over {owed.sum}, and this stage was declared to "
                f"expect {expected}"
            )


def _from_written(
    entry: StageEntry,
    residual: LayerResidual,
    batch: ForwardBatch,
    extra: Tensor | None,
    captures: Captures,
) -> tuple[Any, LayerResidual, Layout]:
    """Read a residual into which nothing is pending."""
    rows = entry.edge.residual_to
    residual = residual.moved(rows, entry.mover, batch.rows)
    captures.take(entry, residual, batch, computed=False)
    if extra is not None:
        residual = _added(residual, extra)
    read, residual = entry.read.read(residual, entry.norm)
    return read, residual, rows


def _added(residual: LayerResidual, extra: Tensor) -> LayerResidual:
    if residual.tensor.shape != extra.shape:
        raise ValueError(
            f"post_residual_addition has shape {tuple(extra.shape)}, and the residual {tuple(residual.tensor.shape)}"
        )
    total = wide(residual.tensor) + wide(extra)
    return LayerResidual(total.to(residual.tensor.dtype), residual.rows, residual.coefficients)


def _from_pending(
    entry: StageEntry,
    contribution: Contribution,
    residual: LayerResidual | None,
    batch: ForwardBatch,
    extra: Tensor | None,
    captures: Captures,
) -> tuple[Any, LayerResidual, Layout]:
    """Complete the contribution, apply its update, read. Returns the input, the residual, and the input's
    rows.
    """
    needs, mover, facts = entry.edge.input, entry.mover, batch.rows
    rows = entry.edge.residual_to
    update = contribution.update
    if residual is None:
        # A producer outside the stream's stages left no residual: its output is the residual.
        value = contribution.complete(rows)
        return _from_written(entry, entry.read.enter(value, rows), batch, extra, captures)

    owed = contribution.owed
    observed = extra is not None or captures.output is not None
    if owed is not None and not observed and update.plain:
        if needs.order is not Order.PLAIN and owed.plain_sum is not None and owed.sum is not None:
            scattered = needs.order is Order.JOIN_THEN_GATHER or residual.rows != needs.rows
            if owed.sum.name is SumGroup.ATTN_TP and scattered:
                return _join(entry, contribution, residual, batch)
        elif (fused := _fused(entry, contribution, residual, batch)) is not None:
            input_, residual = fused
            captures.take(entry, residual, batch, computed=False)
            return input_, residual, rows

    value = contribution.complete(rows)
    residual = residual.moved(rows, mover, facts)
    contribution.take()
    if captures and extra is not None:
        captures.take(entry, update.apply(value, residual), batch, computed=True)
    read, residual = entry.read.update_and_read(update, value, residual, entry.norm, extra)
    if extra is None:
        captures.take(entry, residual, batch, computed=False)
    return read, residual, rows


def _fused(
    entry: StageEntry, contribution: Contribution, residual: LayerResidual, batch: ForwardBatch
) -> tuple[Any, LayerResidual] | None:
    """What the first candidate that takes it makes of the contribution; None if all decline, and then nothing has been
    done but a transform that goes before the sum in any case.
    """
    owed, rows = contribution.owed, entry.edge.input.read_rows
    assert owed is not None
    counts = _shares(contribution, owed, rows) if residual.rows.contains(rows) else None
    if counts is None:
        movable = owed.rows == owed.lands == rows == residual.rows and (owed.plain_sum is not None or owed.handoff)
        if not movable or owed.transform is not None:
            return None
    form = getattr(entry.read, "quantize", None)
    for candidate in entry.candidates:
        matches = candidate.accepts_handoff if owed.handoff else (
            owed.sum is not None and not candidate.accepts_handoff and candidate.sum_group is owed.sum.name
        )  # fmt: skip
        if not matches:
            continue
        options = {"form": form} if candidate.formats else {}
        if counts is None:
            made = candidate.run(contribution.value, owed.sum, residual.tensor, entry.norm, **options)
        else:
            moved = residual.moved(rows, entry.mover, batch.rows)
            made = _scattered(entry, candidate, contribution, counts, moved, options)
        if made is None:
            continue
        contribution.take()
        read, updated = made
        return read if form is None or candidate.formats else form(read), LayerResidual(updated, rows)
    return None


def _shares(contribution: Contribution, owed: Owed, rows: Layout) -> list[int] | None:
    """How many rows each rank keeps, where one reduce-scatter leaves the sum on `rows` and no more is to be done."""
    mover = contribution.mover
    if owed.sum is None or owed.scatter_rows(rows, mover) != rows:
        return None
    return mover.shares(owed.sum, owed.rows, rows, contribution.facts)


def _scattered(
    entry: StageEntry,
    candidate: FusedInput,
    contribution: Contribution,
    counts: list[int],
    residual: LayerResidual,
    options: dict[str, Any],
) -> Fused | None:
    """What a candidate makes of a sum that a reduce-scatter completes on the residual's rows. Before it is asked, a
    transform runs that goes before the sum.
    """
    assert contribution.owed is not None and contribution.owed.sum is not None
    if candidate.scatter is None:
        return None
    contribution.transform_term()
    assert isinstance(contribution.value, Tensor)
    return candidate.scatter(contribution.value, contribution.owed.sum, counts, residual.tensor, entry.norm, **options)


def _join(
    entry: StageEntry, contribution: Contribution, residual: LayerResidual, batch: ForwardBatch
) -> tuple[Any, LayerResidual, Layout]:
    """Let the residual take part in the sum, on one rank for each of its rows, so that one collective does
    both.
    """
    needs, mover, facts = entry.edge.input, entry.mover, batch.rows
    owed, term = contribution.owed, contribution.take()
    assert owed is not None and owed.sum is not None and isinstance(term, Tensor)
    if needs.order is Order.JOIN_SLICES:
        joined = term.clone()
        start, length = facts.span(needs.rows, residual.rows, mover.at, mover.topology)
        joined[start : start + length] += residual.tensor
        total = mover.all_reduce(joined, owed.sum)
        read, updated = entry.read.read(LayerResidual(total, needs.rows), entry.norm)
        return read, updated, needs.rows
    residual = residual.moved(needs.read_rows, mover, facts)
    total = mover.sum_gather(mover.joined(term, residual.tensor), needs.read_rows, facts)
    read, _ = entry.read.read(LayerResidual(total, FULL), entry.norm)
    # A copy: the gathered buffer is then free, and nothing else shares storage with the residual.
    own = mover.move(total, FULL, needs.read_rows, facts).clone()
    return read, LayerResidual(own, needs.read_rows), FULL

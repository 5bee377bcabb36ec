"""Binding: from contracts to the operations a forward pass runs.

:func:`make_boundary` binds the consumer's half of an edge, :func:`make_output_boundary` a producer's output.
Both refuse what has no correct implementation, at construction, so that a forward pass meets no combination
nobody thought of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from .contracts import EdgeDecl, Order, StageOutput
from .layout import Layout, RowFacts
from .ops import RowMover
from .output import HandoffOutput, Output, OutputTransform, Owed, UnreducedOutput
from .policy import Scatter
from .residual import LayerResidual, Norm, StageRead, StageUpdate
from .residual.stream import ResidualStream, StreamState

if TYPE_CHECKING:
    from .fusions import FusedInput

Certificate = Callable[[int], bool]
"""Whether, for so many rows, the next input path leaves the residual it is given untouched."""


@dataclass(frozen=True, eq=False)
class StageEntry:
    """The bound consumer half of an edge; `prepare` executes it.

    Attributes:
        edge: What is connected.
        read, norm: The consumer's.
        mover: The rank's moves.
        enters: The stage starts the stack.
        expects_plain: The declared producer's update is a plain addition.
        model_rows: The rows the model's own tensors have in this variant: those of attention.
        candidates: Fused completions, in the order they are tried.
        captures_owned: What a capture may say of a residual that does not move: the next local stage's
            certificate.
    """

    edge: EdgeDecl
    read: StageRead
    norm: Norm
    mover: RowMover
    enters: bool
    expects_plain: bool
    model_rows: Layout
    candidates: tuple[FusedInput, ...] = ()
    captures_owned: Certificate | None = None

    @property
    def capture_rows(self) -> Layout:
        """The rows a captured residual is brought to: the producer's."""
        return self.model_rows if self.edge.output is None else self.edge.output.handoff_rows

    @property
    def capture_move_allocates(self) -> bool:
        """Bringing a captured residual to the producer's rows gathers: its storage is the capture's own."""
        return self.move_allocates(self.capture_rows)

    def move_allocates(self, rows: Layout) -> bool:
        """Whether bringing a residual from the read's rows to `rows` gathers. A cut is a view."""
        read_rows = self.edge.input.read_rows
        return rows != read_rows and rows.contains(read_rows)

    def leaves_gather_to_adapter(self, facts: RowFacts) -> bool:
        """Whether the attention-input adapter gathers what this input hands out on slices.

        Not where a rank of attention TP has no row while another has one: that rank skips attention's
        compute, in which the adapter gathers.
        """
        rows = facts.cell(self.mover.at)[0]
        return self.edge.input.gathered_by_adapter and not 0 < rows < self.mover.topology.attention_tp

    @property
    def certificate(self) -> Certificate | None:
        """What the candidates certify about the residual, all of them: any may be the one that runs. A stage
        without candidates certifies nothing.
        """
        candidates = self.candidates
        if not candidates:
            return None
        return lambda rows: all(candidate.leaves_residual(rows) for candidate in candidates)

    def certified_by(self, following: StageEntry) -> StageEntry:
        """This entry with the certificate of the stage that reads its residual next."""
        return replace(self, captures_owned=following.certificate)


def make_boundary(
    edge: EdgeDecl,
    read: StageRead,
    norm: Norm,
    mover: RowMover,
    *,
    update_is_plain: bool,
    model_rows: Layout,
    candidates: tuple[FusedInput, ...] = (),
) -> StageEntry:
    """The consumer's half of `edge`.

    Raises:
        ValueError: The transition has no correct implementation.
    """
    needs = edge.input
    if not (needs.read_rows.contains(needs.rows) or needs.rows.contains(needs.read_rows)):
        raise ValueError(f"there is no move from the read's rows ({needs.read_rows}) to compute's ({needs.rows})")
    source, target = edge.residual_from, edge.residual_to
    if not (source.contains(target) or target.contains(source)):
        raise ValueError(f"there is no move of the residual from {source} to {target}")
    if needs.order is not Order.PLAIN and not (update_is_plain and read.keeps_residual):
        raise ValueError(f"{needs.order.value!r} needs a plain addition and a read that keeps the residual")
    fits = needs.order is Order.PLAIN and update_is_plain and read.keeps_residual
    expected = edge.expects_sum
    usable = tuple(
        candidate
        for candidate in candidates
        if fits and (expected is None or candidate.accepts_handoff or candidate.sum_group is expected.name)
    )
    return StageEntry(edge, read, norm, mover, edge.output is None, update_is_plain, model_rows, usable)


@dataclass(frozen=True, eq=False)
class StageExit:
    """A bound producer output: what its compute leaves, and how that reaches the stream.

    Attributes:
        output: The rows and the sum.
        update: The producer's.
        mover: The rank's moves.
        transform: Runs between the sum and the update.
        scatters: The reduce-scatters that are permitted and possible for this output.
        contract: Where the stack ends: makes the hidden state of the residual.
    """

    output: StageOutput
    update: StageUpdate
    mover: RowMover
    transform: OutputTransform | None
    scatters: frozenset[Scatter]
    contract: Callable[[LayerResidual], Tensor] | None

    def owed(
        self, *, summed: bool, scatter: bool = False, handoff: bool = False, declared: bool = False
    ) -> Owed | None:
        """What an output of this stage owes: its sum unless `summed`, its transform, and its way to the
        handoff rows.
        """
        output = self.output
        terms = None if summed else output.sum
        if terms is None and output.rows == output.lands and self.transform is None and not handoff:
            return None
        return Owed(output.rows, output.lands, terms, scatter, self.transform, handoff, declared)

    def deliver(
        self,
        value: Tensor | HandoffOutput,
        owed: Owed | None,
        carries: bool,
        stream: ResidualStream,
        facts: RowFacts,
    ) -> Output:
        """Hand compute's output to the stream.

        Args:
            value: What compute returned, or a `HandoffOutput`.
            owed: What it owes.
            carries: That may be left to the next stage; otherwise it is done here.
            stream: The batch's.
            facts: The batch's row counts.

        Returns:
            What the model passes on: a complete tensor, the written residual, or a handle.

        Raises:
            RuntimeError: No stage was prepared whose output this could be, or it was handed on already.
        """
        output, mover = self.output, self.mover
        if stream.state is StreamState.PENDING:
            raise RuntimeError("a contribution is pending already: an output is finished once, after its prepare")
        if not stream.computing:
            raise RuntimeError("no stage is computing: an output is finished once, after its stage's prepare")
        stream.computing = False
        if output.writes_residual:
            residual = stream.residual
            assert residual is not None
            value = self._completed(value, owed, residual.rows, facts)
            residual = self.update.apply(value, residual).moved(output.handoff_rows, mover, facts)
            if self.contract is not None:
                residual = replace(residual, tensor=self.contract(residual))
            stream.plain = self.contract is not None or (stream.plain and self.update.plain)
            return stream.write(residual, mover, facts)
        if owed is not None and carries:
            ready = UnreducedOutput(value, owed)
        else:
            ready = self._completed(value, owed, output.handoff_rows, facts)
        return stream.leave(ready, self.update, output.handoff_rows, mover, facts)

    def _completed(self, value: Tensor | HandoffOutput, owed: Owed | None, target: Layout, facts: RowFacts) -> Tensor:
        if owed is not None:
            return owed.run(value, target, self.mover, facts)
        assert isinstance(value, Tensor)
        return self.mover.move(value, self.output.rows, target, facts)


def make_output_boundary(
    output: StageOutput,
    update: StageUpdate,
    mover: RowMover,
    *,
    transform: OutputTransform | None,
    permits: frozenset[Scatter],
    contract: Callable[[LayerResidual], Tensor] | None,
) -> StageExit:
    """The bound output.

    Raises:
        ValueError: The output could not be completed correctly.
    """
    if output.sum is not None and output.sum.axes is not None and output.sum.axes & output.rows.sharded:
        raise ValueError(f"a sum over {output.sum.name.value} would add different tokens: the rows are {output.rows}")
    if not (output.rows.contains(output.handoff_rows) or output.handoff_rows.contains(output.rows)):
        raise ValueError(f"there is no move from {output.rows} back to {output.handoff_rows}")
    scatters = _possible(output, mover, transform, permits)
    return StageExit(output, update, mover, transform, scatters, contract)


def _possible(
    output: StageOutput, mover: RowMover, transform: OutputTransform | None, permits: frozenset[Scatter]
) -> frozenset[Scatter]:
    if output.sum is None or output.rows == output.lands:
        return frozenset()
    if transform is not None and not transform.before_reduce_scatter:
        return frozenset()
    if not mover.can_scatter(output.sum, output.rows, output.lands):
        return frozenset()
    topology = mover.topology
    # A variable reduce-scatter's sizes are the data-parallel ranks' rows: one for each rank of the group.
    variable = topology.attention_dp > 1 and topology.attention_dp == topology.tp
    return frozenset(scatter for scatter in permits if scatter is Scatter.RS or variable)

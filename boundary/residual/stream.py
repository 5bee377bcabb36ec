"""The residual stream of one batch: the residual, and the one contribution that is on its way into it.

The stream is in one of three states. *Initial*: nothing yet; the first stage makes the residual from its
input. *Written*: a residual, and nothing pending. *Pending*: a contribution, with a residual where there is
one.

The model carries a token from boundary to boundary: the contribution's tensor, the handle on owed work, or
the residual itself. Each boundary checks that what it is given *is* that object. So a rebound layer output,
another microbatch's output or a handle that was completed since raises, where applying the wrong pending work
would be silent.
"""

from __future__ import annotations

from enum import Enum

from torch import Tensor

from ..layout import Layout, RowFacts
from ..ops import RowMover
from ..output import Contribution, Output, OwedOutput, UnreducedOutput
from . import LayerResidual, StageUpdate

FOREIGN = "output does not belong to this residual stream; change layer outputs through boundary accessors"


class StreamState(Enum):
    INITIAL = "initial"
    WRITTEN = "written"
    PENDING = "pending"


class ResidualStream:
    """One batch's residual between boundaries. Not shared between microbatches.

    Attributes:
        mover: The moves of the rank whose boundaries wrote here; None before the first did.
        facts: The row counts they saw.
        computing: A stage has been prepared, and its output has not been handed on yet.
        plain: The residual is a hidden state of its own: no update that is not a plain addition has made it,
            and no read has widened it.
    """

    __slots__ = ("_contribution", "_handle", "_residual", "computing", "facts", "mover", "plain")

    def __init__(self) -> None:
        self._residual: LayerResidual | None = None
        self._contribution: Contribution | None = None
        self._handle: OwedOutput | None = None
        self.mover: RowMover | None = None
        self.facts: RowFacts | None = None
        self.computing = False
        self.plain = True

    @property
    def state(self) -> StreamState:
        if self._contribution is not None:
            return StreamState.PENDING
        return StreamState.INITIAL if self._residual is None else StreamState.WRITTEN

    @property
    def pending(self) -> Contribution | None:
        return self._contribution

    @property
    def residual(self) -> LayerResidual | None:
        return self._residual

    def check(self, output: Output) -> Contribution | None:
        """The pending contribution `output` stands for; None where nothing is pending. Changes nothing.

        Raises:
            RuntimeError: `output` is not what this stream handed out last.
        """
        if self._contribution is not None:
            belongs = output is (self._handle if self._contribution.owed is not None else self._contribution.value)
        elif self._residual is not None:
            belongs = output is self._residual.tensor
        else:
            belongs = isinstance(output, Tensor)
        if not belongs:
            raise RuntimeError(FOREIGN)
        return self._contribution

    def arrive(self, output: Output) -> tuple[Contribution | None, LayerResidual | None]:
        """Take the pending contribution and the residual out of the stream, at the end of an edge.

        Raises:
            RuntimeError: `output` is not what this stream handed out last.
        """
        self.check(output)
        arrived = self._contribution, self._residual
        self._contribution = self._residual = self._handle = None
        self.computing = False
        return arrived

    def leave(
        self,
        output: Tensor | UnreducedOutput,
        update: StageUpdate,
        rows: Layout,
        mover: RowMover,
        facts: RowFacts,
        residual: LayerResidual | None = None,
    ) -> Tensor | OwedOutput:
        """Record a producer's output as pending, and return what the model passes on.

        Args:
            output: A complete tensor on `rows`, or unfinished work that lands there.
            update: How it enters the residual.
            rows: The rows it meets the next stage on.
            mover, facts: The rank's moves, and the batch's row counts.
            residual: Replaces the stream's, if given.

        Raises:
            RuntimeError: A contribution is pending already: a stage was finished twice, or never prepared.
        """
        if self._contribution is not None:
            raise RuntimeError(
                "a contribution is pending already: an output is finished once, after its stage's prepare"
            )
        if residual is not None:
            self._residual = residual
        self.mover, self.facts = mover, facts
        if isinstance(output, UnreducedOutput):
            self._contribution = Contribution(output.value, output.owed, rows, update, mover, facts)
            self._handle = OwedOutput(self._contribution)
            return self._handle
        self._contribution = Contribution(output, None, rows, update, mover, facts)
        return output

    def complete(self) -> Tensor:
        """Finish what the pending contribution owes. It stays pending; the model passes the tensor on from
        here.
        """
        assert self._contribution is not None
        self._handle = None
        return self._contribution.complete()

    def write(self, residual: LayerResidual, mover: RowMover | None = None, facts: RowFacts | None = None) -> Tensor:
        """Make `residual` the stream's and return its tensor. What was pending is dropped.

        Boundaries give their `mover` and `facts`; without them those known so far stay.
        """
        self._contribution = self._handle = None
        self._residual = residual
        if mover is not None:
            self.mover, self.facts = mover, facts
        return residual.tensor

    def residual_on(self, target: Layout | None = None) -> LayerResidual:
        """The residual on the rows of `target` (by default those of the model's own tensors): a collective
        where that means a gather.
        """
        residual, mover, facts = self._residual, self.mover, self.facts
        assert residual is not None
        if mover is None or facts is None:
            # No boundary has written yet, so the model's own code has: on the model's rows.
            return residual
        return residual.moved(facts.model_rows if target is None else target, mover, facts)

    def model_rows_to(self, extra: Tensor, target: Layout, like: Tensor, what: str) -> Tensor:
        """`extra`, which is on the model's rows, on those of `target`, where it is added to `like`.

        Raises:
            ValueError: It has other rows than the model's tensors, or another width than `like`.
        """
        mover, facts = self.mover, self.facts
        rows = like.shape[0] if mover is None or facts is None else facts.cell(mover.at)[0]
        if tuple(extra.shape) != (rows, *like.shape[1:]):
            raise ValueError(f"{what} has shape {tuple(extra.shape)}, and {(rows, *like.shape[1:])} is needed here")
        return extra if mover is None or facts is None else mover.move(extra, facts.model_rows, target, facts)

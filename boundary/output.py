"""What a producer hands on: a contribution to the residual, and the work it still owes.

A contribution is *owed* work when it is not yet the plain tensor it stands for: its terms must be added over
a group, its rows must move, or a MoE's finalize must run. The model then holds an :class:`OwedOutput`, which
refuses to be used as a tensor, and passes it on. The work is done once: by :meth:`Owed.run`, which exits and
:meth:`Contribution.complete` call; or, together with the residual addition, by `prepare` where the residual
joins the sum, by a fused candidate, or by a final norm that takes over a finalize.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from .layout import Layout, RowFacts
from .ops import RowMover
from .parallel import BoundSum

if TYPE_CHECKING:
    from .residual import StageUpdate


class HandoffOutput(ABC):
    """Work of a producer's own that a fused consumer may take over: a deferred MoE finalize, say."""

    @abstractmethod
    def complete(self) -> Tensor:
        """The unfused completion: the whole output on the producer's rows, nothing owed.

        May be a collective, so all ranks call it, those without rows too.
        """


@dataclass(frozen=True)
class OutputTransform:
    """What happens to a contribution between its sum and the residual update; it acts on each row alone.

    Attributes:
        apply: The transform.
        before_reduce_scatter: It may run on the terms before a reduce-scatter, because it commutes with the
            sum. Without it, the sum completes by an all-reduce in the producer, and then the transform runs.
    """

    apply: Callable[[Tensor], Tensor]
    before_reduce_scatter: bool = False


@dataclass(frozen=True)
class Owed:
    """What one output still requires.

    Attributes:
        rows: The rows it has now.
        lands: The rows on which completing it leaves it.
        sum: The group over which its terms are added, or None.
        scatter: A reduce-scatter was selected to add and to land.
        transform: Runs once the sum is complete; before it where a reduce-scatter permits.
        handoff: The value is a `HandoffOutput`.
        declared: Both sides know of it from their declarations. Everything else is decided batch by batch.
    """

    rows: Layout
    lands: Layout
    sum: BoundSum | None = None
    scatter: bool = False
    transform: OutputTransform | None = None
    handoff: bool = False
    declared: bool = False

    @property
    def plain_sum(self) -> BoundSum | None:
        """The group, where a sum is all that is owed: no movement, no transform, no finalize."""
        bare = self.rows == self.lands and not self.scatter and self.transform is None and not self.handoff
        return self.sum if bare else None

    def scatter_rows(self, target: Layout, mover: RowMover) -> Layout | None:
        """The rows on which a reduce-scatter leaves the sum on its way to `target`; None where none completes it."""
        if self.sum is None or (self.transform is not None and not self.transform.before_reduce_scatter):
            return None
        retargets = self.rows == self.lands and self.rows != target and self.rows.contains(target)
        if not self.scatter and not (retargets and mover.can_scatter(self.sum, self.rows, target)):
            return None
        return target if retargets else self.lands

    def run(self, value: Tensor | HandoffOutput, target: Layout, mover: RowMover, facts: RowFacts) -> Tensor:
        """Do the work, and move the rows from `lands` to `target`. Every rank of the groups calls it.

        Where only a sum is owed and `target` is a cut of its rows, one reduce-scatter does both.
        """
        if isinstance(value, HandoffOutput):
            value = value.complete()
        elif self.sum is not None:
            lands = self.scatter_rows(target, mover)
            if lands is not None:
                if self.transform is not None:
                    value = self.transform.apply(value)
                value = mover.reduce_scatter(value, self.sum, self.rows, lands, facts)
                return mover.move(value, lands, target, facts)
            value = mover.all_reduce(value, self.sum)
        if self.transform is not None and value.shape[0]:
            value = self.transform.apply(value)
        return mover.move(mover.move(value, self.rows, self.lands, facts), self.lands, target, facts)


class Contribution:
    """A producer's output on its way into the residual, with the update that will put it there.

    Attributes:
        value: The tensor, its term of a sum, or a handoff. None once a consumer has taken it.
        owed: The work it still requires, or None: it is complete.
        rows: The rows of the completed value.
        update: The producer's.
        mover, facts: The rank's moves and the row counts of the batch that made it.
    """

    __slots__ = ("__weakref__", "facts", "mover", "owed", "rows", "update", "value")

    def __init__(
        self,
        value: Tensor | HandoffOutput,
        owed: Owed | None,
        rows: Layout,
        update: StageUpdate,
        mover: RowMover,
        facts: RowFacts,
    ) -> None:
        self.value: Tensor | HandoffOutput | None = value
        self.owed = owed
        self.rows = rows
        self.update = update
        self.mover = mover
        self.facts = facts

    def complete(self, target: Layout | None = None) -> Tensor:
        """The plain tensor on the rows of `target` (its own by default). A second call does nothing."""
        value = self.take()
        target = self.rows if target is None else target
        if self.owed is None:
            assert isinstance(value, Tensor)
            done = self.mover.move(value, self.rows, target, self.facts)
        else:
            done = self.owed.run(value, target, self.mover, self.facts)
        self.value, self.owed, self.rows = done, None, target
        return done

    def transform_term(self) -> None:
        """Run a transform that goes before the reduce-scatter, and owe it no more."""
        if self.owed is not None and self.owed.transform is not None:
            assert isinstance(self.value, Tensor)
            self.value = self.owed.transform.apply(self.value)
            self.owed = replace(self.owed, transform=None)

    def completed_copy(self) -> Tensor:
        """What `complete` would return, on memory of its own; this contribution still owes what it owed."""
        value = self.value
        assert isinstance(value, Tensor), "a handoff cannot be completed on a copy"
        if self.owed is None:
            return value.clone()
        return self.owed.run(value.clone(), self.rows, self.mover, self.facts)

    def take(self) -> Tensor | HandoffOutput:
        """The value, which this object and the model's handle then no longer keep alive."""
        value, self.value = self.value, None
        if value is None:
            raise RuntimeError("this contribution has been consumed")
        return value


@dataclass(frozen=True)
class UnreducedOutput:
    """The form in which exits and adapters give unfinished work to the stream."""

    value: Tensor | HandoffOutput
    owed: Owed


class OwedOutput:
    """The model's handle on an output that still owes work. It is passed to the next boundary, not computed
    with.
    """

    __slots__ = ("__weakref__", "_contribution")

    def __init__(self, contribution: Contribution) -> None:
        self._contribution = contribution

    def __repr__(self) -> str:
        return f"OwedOutput({self._contribution.owed})"

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            "this output still owes a reduction or a finalize, so it is no tensor yet: pass it to the next "
            "boundary, or complete it with residual.batch.complete_output()"
        )

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> NoReturn:
        raise TypeError(f"{func} was given an output that still owes a reduction or a finalize")


def _refuse_operators() -> None:
    operators = "add radd iadd sub rsub isub mul rmul imul matmul rmatmul truediv rtruediv neg pow abs"
    protocol = "getitem setitem len iter bool float int index array lt le gt ge"
    for name in (*operators.split(), *protocol.split()):
        setattr(OwedOutput, f"__{name}__", OwedOutput._refuse)


_refuse_operators()

Output = Any
"""What a model holds between boundaries: a tensor, or an `OwedOutput`."""

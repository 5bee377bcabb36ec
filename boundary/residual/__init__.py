"""The residual: how a producer's contribution enters it, and how a consumer reads it.

The two ends of an edge own one operation each. The producer owns its :class:`StageUpdate`; the consumer owns
its :class:`StageRead` and a norm. Both state what they are capable of, and only from that does a boundary
conclude that an update may run before a sum, or a read on other rows: a plain addition commutes with a sum, a
hyper-connection's combination does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ..layout import Layout, RowFacts
from ..ops import RowMover

Norm = Callable[[Tensor], Tensor]
"""The consumer's norm: from rows to rows."""


@dataclass(frozen=True, eq=False)
class LayerResidual:
    """The residual and what belongs to its rows.

    Attributes:
        tensor: The residual: one row per token, wider than the hidden size where the update says so.
        rows: The rows it is on.
        coefficients: What a read left for the update of the same stage. They move with the rows; the update
            uses them.
    """

    tensor: Tensor
    rows: Layout
    coefficients: tuple[Tensor, ...] = ()

    def moved(self, target: Layout, mover: RowMover, facts: RowFacts) -> LayerResidual:
        """All of it on the rows of `target`: a collective where that means a gather."""
        if target == self.rows:
            return self
        tensor, *coefficients = mover.move((self.tensor, *self.coefficients), self.rows, target, facts)
        return LayerResidual(tensor, target, tuple(coefficients))


class StageUpdate(Protocol):
    """How a stage's contribution enters the residual.

    Attributes:
        plain: It is `residual + contribution`, which may be reordered with a sum and fused with a norm.
        at_producer: It runs at the producer's exit.
        outlives_producer: Its parameters and state live long enough for the next layer to run it.
    """

    @property
    def plain(self) -> bool: ...
    @property
    def at_producer(self) -> bool: ...
    @property
    def outlives_producer(self) -> bool: ...

    def apply(self, contribution: Tensor, residual: LayerResidual) -> LayerResidual:
        """The updated residual. Both are complete and on the same rows; neither is written to."""
        ...


class StageRead(Protocol):
    """How a stage reads its input from the residual.

    Attributes:
        keeps_residual: The read leaves the residual as it is, and its input is the norm of it.
        before_gather: It must run on the source rows, before they are gathered.

    One that keeps the residual may also have `quantize`, the format of its input (`add_norm.Format`): a fused candidate
    makes its input in that.
    """

    @property
    def keeps_residual(self) -> bool: ...
    @property
    def before_gather(self) -> bool: ...

    def enter(self, hidden_states: Tensor, rows: Layout) -> LayerResidual:
        """The residual with which a stack starts."""
        ...

    def read(self, residual: LayerResidual, norm: Norm) -> tuple[Any, LayerResidual]:
        """`(compute_input, residual)`. At zero rows the norm is not called and shapes stay right."""
        ...

    def update_and_read(
        self,
        update: StageUpdate,
        contribution: Tensor,
        residual: LayerResidual,
        norm: Norm,
        post_residual_addition: Tensor | None = None,
    ) -> tuple[Any, LayerResidual]:
        """The update and the read, fused where the pair allows. The addition comes between the two."""
        ...

    def contract(self, residual: LayerResidual) -> Tensor:
        """The hidden state that a residual stands for: what the stack ends with, and what a capture keeps."""
        ...

"""Getting at what a stream holds, without disturbing it: aligned rows, and copies for collectors."""

from __future__ import annotations

from torch import Tensor

from ..output import Contribution
from . import LayerResidual


class AuxHiddenStateList(list[Tensor]):
    """Hidden states collected on the way through a stack, for a draft model or an observer."""

    def capture(self, value: Tensor, *, owned: bool = False) -> None:
        """Keep `value`: itself where nobody else will write its storage (`owned`), else a copy."""
        self.append(value if owned else value.clone())


def aligned(contribution: Contribution, residual: LayerResidual) -> LayerResidual:
    """The residual on the rows of the completed contribution: a collective where that means a gather."""
    return residual.moved(contribution.rows, contribution.mover, contribution.facts)


def snapshot_of(contribution: Contribution, residual: LayerResidual | None) -> Tensor:
    """Contribution plus residual, in storage of its own; the contribution still owes what it owed.

    Raises:
        RuntimeError: The update is no plain addition, or the value is a handoff, which exists once.
    """
    if not contribution.update.plain:
        raise RuntimeError("snapshot requires a plain residual update")
    if contribution.owed is not None and contribution.owed.handoff:
        raise RuntimeError("a snapshot cannot complete a handoff on a copy; complete_output() first")
    value = contribution.completed_copy()
    if residual is None:
        return value
    return contribution.update.apply(value, aligned(contribution, residual)).tensor

"""What can go wrong, said so that the reader knows what happened, where, and what to do next.

Every error a user meets is an :class:`InterleaveError`. The subclasses name the few situations in which the
promise of this package - the value one process would have produced, or a refusal - ends in the refusal.
"""

from __future__ import annotations


class InterleaveError(Exception):
    """The base of every error this package raises on purpose."""


class UnknownLayout(InterleaveError, ValueError):
    """A value is, or may be, one rank's piece, and nothing tells how the pieces make the whole.

    Raised in the block, at the line that asked for the value, instead of handing out a piece.
    """


class ShapeChanged(InterleaveError, ValueError):
    """A replacement changed the size of the dim that the ranks share, so it cannot be cut into pieces.

    Raised in the block, at the line of the assignment or of the `.skip`.
    """


class Unshardable(InterleaveError, ValueError):
    """The model cannot be split as asked: the degree, the plan or a style rules it out.

    Raised before any weight is read, with the degrees that work.
    """


class Unserved(UnknownLayout):
    """The runtime has nothing there that one process would have, or cannot take what a block wants to put there."""


class DivergedBlock(InterleaveError, RuntimeError):
    """The ranks of a group did not run the same block: some waited for others that never came.

    Raised on every rank within the group's limit. The next trace works: the groups are rebuilt.
    """


class RankDied(InterleaveError, RuntimeError):
    """A rank process ended while the driver needed it."""

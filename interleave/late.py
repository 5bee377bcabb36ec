"""Edits that come late: a block that writes into a value it was handed, after the model has gone on.

On one process the block and the model hold the same tensor, so a late write reaches whatever the model still does
with it. A whole is a copy; so what a block was handed is remembered together with the piece that went on into the
model, and when the block has written into the one, the other follows - before the model runs again.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

from boundary.collectives import Group

from .errors import InterleaveError
from .layout import Layout, cut


class Handed(NamedTuple):
    """A whole in a block's hands, and the piece of it that the model works with."""

    location: str
    whole: weakref.ref[torch.Tensor]
    version: int
    piece: torch.Tensor
    piece_version: int | None
    layout: Layout
    group: Group


class LateEdits:
    """What the blocks of the running trace were handed and may still write into."""

    def __init__(self) -> None:
        self._handed: list[Handed] = []

    def remember(self, location: str, whole: torch.Tensor, piece: torch.Tensor, layout: Layout, group: Group) -> None:
        """`piece`, of `whole`, goes on into the model. A whole without a version counter cannot be watched."""
        if whole.is_inference() or whole is piece:
            return
        self._handed.append(Handed(location, weakref.ref(whole), whole._version, piece, _version(piece), layout, group))

    def settle(self) -> None:
        """Let the pieces follow what was written since. No collective.

        Raises:
            InterleaveError: The model itself has written into the piece meanwhile, so the two cannot be joined.
        """
        kept = []
        for handed in self._handed:
            whole = handed.whole()
            if whole is None:
                continue
            if whole._version != handed.version:
                if _version(handed.piece) != handed.piece_version:
                    raise InterleaveError(
                        f"the block wrote into the value of `{handed.location}` after the model had gone on and "
                        f"changed it in place itself; make the edit before the block asks for anything else"
                    )
                handed.piece.copy_(cut(whole, handed.layout, handed.group, f"{handed.location}/late"))
                handed = handed._replace(version=whole._version, piece_version=_version(handed.piece))
            kept.append(handed)
        self._handed = kept

    def clear(self) -> None:
        """Forget the trace."""
        self._handed = []


def _version(piece: torch.Tensor) -> int | None:
    """The piece's version counter; None for one that inference mode made without."""
    return None if piece.is_inference() else piece._version

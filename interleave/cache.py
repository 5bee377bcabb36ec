"""Caches that assemble once.

A cache only looks, so it does not need its value at the visit: it keeps a snapshot of the piece and the layout, and
all that a trace left pending is assembled together at its end - one exchange per dtype instead of one per value.
Reading the cache inside the block assembles what is pending first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from . import nnsight_port as port
from .fragments import Fragments, Placed, Tree, Withheld, is_piece, plan_leaves
from .layout import assemble_many, whole_shape

if TYPE_CHECKING:
    from .interleaver import Visit


class Cache(port.Cache):
    """nnsight's cache, whose entries are assembled before anybody looks at them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._entries: dict[str, list[port.Entry]] = {}
        self._settle: Callable[[], None] | None = None
        self._recording = False
        super().__init__(*args, **kwargs)

    @property
    def entries(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
    ) -> dict[str, list[port.Entry]]:
        """Module path -> one entry per visit."""
        if self._settle is not None and not self._recording:
            self._settle()
        return self._entries

    @entries.setter
    def entries(self, entries: dict[str, list[port.Entry]]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._entries = entries

    def _record(self, path: str, key: str, value: Any) -> None:
        self._recording = True
        try:
            super()._record(path, key, value)
        finally:
            self._recording = False

    def defer(self, selected: tuple[str, str], settle: Callable[[], None]) -> Callable[[Any], None]:
        """Keep a place for a value that comes later; returns what puts it there.

        Args:
            selected: The module path and the slot, as `subscriptions` names them.
            settle: Brings everything pending; called when somebody reads the entries before that.
        """
        path, slot = selected
        self._record(path, slot, None)
        self._settle = settle
        entry = self._entries[path][-1]

        def fill(value: Any) -> None:
            setattr(entry, slot, self._transform(value))

        return fill

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_settle": None}


@dataclass
class Pending:
    """One visit's value, which caches wait for.

    Attributes:
        value: A copy of the piece, with what cannot be assembled withheld.
        tree: Its layout.
        nbytes: How large its wholes are.
        location: Where it was.
        takers: What puts the assembled value into each cache that keeps it.
    """

    value: Any
    tree: Tree
    nbytes: int
    location: str
    takers: list[Callable[[Any], None]]

    def withhold(self) -> None:
        """The run ended before the value could be assembled."""
        for take in self.takers:
            take(Withheld(None, self.location, "the trace raised before its caches were assembled"))

    @classmethod
    def snapshot(cls, visit: Visit) -> Pending:
        """A copy of the visit's piece: the model may write over its own before the trace ends."""
        fragments = visit.fragments
        tree = fragments.layout(visit.location)
        nbytes = 0

        def keep(leaf: Any, node: Any) -> Any:
            nonlocal nbytes
            if isinstance(node, Placed) and is_piece(leaf, node.layout):
                shape = whole_shape(leaf.shape, node.layout, fragments.groups[node.axis])
                nbytes += prod(shape) * leaf.element_size()
                return leaf.detach().clone()
            return fragments.withheld(visit.location, leaf, node)

        value = fragments.withhold(visit.location, plan_leaves(visit.brought, tree, keep))
        return cls(value, tree, nbytes, visit.location, [])


def assemble_pending(pending: list[Pending], fragments: Fragments, key: str) -> None:
    """Assemble every pending value - one exchange per axis and dtype - and put it in its cache.

    Every rank of the groups must call it with the same list.
    """
    pieces: dict[str, list[tuple[torch.Tensor, Any]]] = {}
    for item in pending:

        def collect(leaf: Any, node: Any) -> Any:
            if isinstance(node, Placed) and is_piece(leaf, node.layout):
                pieces.setdefault(node.axis, []).append((leaf, node.layout))
            return leaf

        plan_leaves(item.value, item.tree, collect)
    wholes = {
        axis: iter(assemble_many(found, fragments.groups[axis], f"{key}/{axis}")) for axis, found in pieces.items()
    }
    for item in pending:

        def take(leaf: Any, node: Any) -> Any:
            if isinstance(node, Placed) and is_piece(leaf, node.layout):
                return next(wholes[node.axis])
            return leaf

        whole = plan_leaves(item.value, item.tree, take)
        for taker in item.takers:
            taker(whole)

"""What a vLLM engine's values are on each rank, by location.

Views (`views/`) declare the locations they act out. Everything else is vLLM's own value: whole, unless it lies between
a layer that splits its output and one that takes its input split. Even whole values are served as copies, unless they
were made for the visit: fused kernels write their results into the storage of their arguments, and what a block saved
must stay what the module returned.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from boundary.collectives import ThreadGroup
from interleave import nnsight_port as port
from interleave.errors import InterleaveError
from interleave.fragments import Fragments, Placed, Refused, Tree
from interleave.late import LateEdits
from interleave.layout import Layout, Snapshot

BETWEEN = "it lies between a layer that splits its output and one that takes its input split"

#: A value that every rank holds whole.
COPY = Placed(Snapshot(), "alone")


class EngineFragments(Fragments):
    """Layouts of an engine's values. Every rank of the engine has the same.

    Attributes:
        between: Paths of the modules whose inner values are pieces.
        read_only: Locations that can be looked at and not changed -> why.
        made: The value of the visit that is served now, where it was made for it: blocks get it, and no copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True
        self.late: LateWrites = LateWrites()
        self.groups["alone"] = ThreadGroup.create([0], name="alone")[0]
        self.between: set[str] = set()
        self.read_only: dict[str, str] = {}
        self.made: Any = None

    def instrument(self, envoy: port.Envoy) -> None:
        """Nothing: views declare what is known, once the tree stands."""

    def layout(self, location: str) -> Tree:
        if location in self.tree:
            return self.tree[location]
        if location.endswith((".skip", ".called")):
            return None
        path = location.partition(".source.")[0]
        while path:
            path = path.rpartition(".")[0]
            if path in self.between:
                return Refused(BETWEEN)
        return COPY

    def whole(self, location: str, value: Any, key: str = "") -> tuple[Any, Callable[[Any], Any] | None]:
        if value is self.made and all(node == COPY for node in nodes(self.layout(location))):
            return value, None
        return super().whole(location, value, key)

    def exchanges(self, location: str) -> bool:
        return any(isinstance(node, Placed) and node.layout.exchanges for node in nodes(self.layout(location)))

    def hand_on(self, location: str, whole: torch.Tensor, piece: torch.Tensor, placed: Placed) -> torch.Tensor:
        """`piece`: the engine writes over it, so what a block writes into `whole` afterwards has nowhere to go."""
        self.late.watch(location, whole)
        return piece


class LateWrites(LateEdits):
    """What blocks were handed and the model has gone on from: a write into it would be lost, and is refused.

    In HuggingFace's model such a write may reach what the model still does in the same layer; when the layer has run,
    nobody uses the values of it any more, and the block may do with them what it likes (`clear`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._watched: list[tuple[str, weakref.ref[torch.Tensor], int]] = []

    def watch(self, location: str, whole: torch.Tensor) -> None:
        """The model goes on from the visit at which blocks were handed `whole`."""
        if not whole.is_inference():
            self._watched.append((location, weakref.ref(whole), whole._version))

    def settle(self) -> None:
        """A block has run on. Raises InterleaveError if it wrote where nothing can be written any more."""
        for number, (location, whole, version) in enumerate(self._watched):
            tensor = whole()
            if tensor is not None and tensor._version != version:
                del self._watched[number]
                raise InterleaveError(
                    f"the block wrote into the value of `{location}` after the engine had gone on from there, so the "
                    f"model would not see it: make the edit before the block asks for anything else, or write into a "
                    f"copy (`.clone()`) if only the block is to see it"
                )

    def clear(self) -> None:
        self._watched.clear()


def node(layout: Layout | None, axis: str = "tp") -> Placed:
    """The node of a leaf: its layout, or a copy of a whole."""
    return COPY if layout is None else Placed(layout, axis)


def nodes(tree: Tree) -> Iterator[Placed | Refused | None]:
    """All nodes of a tree."""
    if isinstance(tree, Placed | Refused) or tree is None:
        yield tree
    else:
        for branch in tree.values() if isinstance(tree, Mapping) else tree:
            yield from nodes(branch)

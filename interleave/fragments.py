"""Which values are pieces, and how one visit's value is made whole and put back.

A runtime knows, for each location, how the value there is spread over its ranks. It says so with *data*: a tree of
:class:`Placed`, :class:`Withheld` and None, shaped like the value (`(args, kwargs)` for an input). This module holds
everything that follows from such a tree and is the same for every runtime:

* `whole` assembles the placed leaves and gives back the way home as a closure;
* the way home decides, leaf by leaf, whether anything was touched: an untouched value returns as the very object
  that came, so that looking changes nothing;
* leaves that cannot be made whole are withheld: a stand-in that raises `UnknownLayout` the moment it is used.

A subclass fills `tree` in `instrument`; nothing else is needed for a runtime whose values are plain pieces.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from boundary.collectives import Group

from . import nnsight_port as port
from .errors import ShapeChanged, UnknownLayout, Unserved
from .late import LateEdits
from .layout import Layout, Partial, Whole, assemble, cut, same_bits, whole_shape


class Placed(NamedTuple):
    """A leaf (or every tensor below a node) that is a piece: its layout over one axis of the mesh."""

    layout: Layout
    axis: str = "tp"

    def __str__(self) -> str:
        return f"{self.layout} over {self.axis}" if self.layout.exchanges else str(self.layout)


@dataclass(frozen=True)
class Refused:
    """A leaf that may be a piece and of which nobody knows the layout."""

    reason: str

    def __str__(self) -> str:
        return f"refused: {self.reason}"

    def error(self, location: str) -> UnknownLayout:
        """What a block that asks for it gets."""
        return UnknownLayout(unknown(location, self.reason))


class Missing(Refused):
    """A leaf that one process has and this runtime does not compute at all."""

    def error(self, location: str) -> UnknownLayout:
        return Unserved(missing(location, self.reason))


#: A node that stands at every leaf of a value.
_EVERYWHERE = Refused("everywhere")

#: The layout of a value: one node for all tensors below it, or a node per entry; None is whole.
Tree = Placed | Refused | tuple["Tree", ...] | Mapping[Any, "Tree"] | None


def unknown(location: str, reason: str) -> str:
    """The text of an `UnknownLayout`: what, where, and what to do."""
    return (
        f"`{location}` may be one rank's piece of a larger value, and its layout is not known: {reason}. "
        f"Read a location whose layout is known (`model.layout(path)` tells), say what it is with "
        f"`model.declare({location!r}, ...)`, or run this block on one process (tp=1)."
    )


def missing(location: str, reason: str) -> str:
    """The same for what the runtime does not have."""
    return f"`{location}` has no value on this runtime: {reason}"


class Withheld:
    """What a block finds in place of a leaf that cannot be made whole.

    It may be passed on (to an ad-hoc call, or left where it is) and turns back into the real object there. Anything
    else - an attribute, an index, a torch function - raises `UnknownLayout` at the line that tried.
    """

    __slots__ = ("_location", "_reason", "_value")

    #: What refuses.
    _kind: ClassVar[type[Refused]] = Refused

    #: Questions a withheld object still answers: their answer is the same on every rank.
    _answers = frozenset({"get_seq_length", "get_max_cache_shape", "__len__"})

    def __init__(self, value: Any, location: str, reason: str) -> None:
        object.__setattr__(self, "_value", value)
        object.__setattr__(self, "_location", location)
        object.__setattr__(self, "_reason", reason)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self._kind(self._reason).error(self._location)

    def __getattr__(self, name: str) -> Any:
        if name in self._answers and self._value is not None:
            return getattr(self._value, name)
        if name.startswith("__") and name != "__torch_function__":
            raise AttributeError(name)
        return self._refuse()

    def __repr__(self) -> str:
        return f"Withheld({self._location}: {self._reason})"

    def __reduce__(self) -> tuple:
        return type(self), (None, self._location, self._reason)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        def find(value: Any) -> Withheld | None:
            if isinstance(value, Withheld):
                return value
            if isinstance(value, list | tuple):
                return next((found for v in value if (found := find(v)) is not None), None)
            return None

        withheld = find(list(args) + list((kwargs or {}).values()))
        assert withheld is not None
        return withheld._refuse()

    __getitem__ = __setitem__ = __setattr__ = __iter__ = __bool__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = _refuse


#: What stands behind a stand-in for a value that is nowhere.
NOTHING = object()


class Lacking(Withheld):
    """What a block finds in place of a leaf that the runtime does not compute.

    Args:
        location, reason: Of the leaf.
    """

    __slots__ = ()
    _kind = Missing

    @classmethod
    def at(cls, location: str, reason: str) -> Lacking:
        return cls(NOTHING, location, reason)


def reveal(value: Any) -> Any:
    """`value` with every stand-in replaced by the object it stands for; the same object if there is none."""

    def change(leaf: Any) -> Any:
        if isinstance(leaf, Withheld):
            if leaf._value is None:
                raise UnknownLayout(
                    f"a value withheld at `{leaf._location}` was saved by another trace and is not here any more"
                )
            return leaf._value
        return leaf

    return rebuild(value, change)


def rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with each leaf replaced by `change(leaf)`; containers are copied only where a leaf changed."""
    return plan_leaves(value, _EVERYWHERE, lambda leaf, _: change(leaf))


def with_items(container: dict, items: Mapping) -> dict:
    """A copy of `container`, whatever dict it is (a ModelOutput, too), holding `items`."""
    if type(container) is dict:
        return dict(items)
    new = copy.copy(container)
    for key, item in items.items():
        new[key] = item
    return new


def holds(value: Any, types: tuple[type, ...]) -> bool:
    """Whether an object of one of `types` is anywhere in `value`."""
    if isinstance(value, list | tuple):
        return any(holds(item, types) for item in value)
    if isinstance(value, dict):
        return any(holds(item, types) for item in value.values())
    return isinstance(value, types)


def branch(tree: Tree, key: Any) -> Tree:
    """The part of `tree` that describes entry `key` of the value it describes."""
    if isinstance(tree, tuple) and not isinstance(tree, Placed):
        return tree[key] if isinstance(key, int) and key < len(tree) else None
    if isinstance(tree, Mapping):
        return tree.get(key)
    return tree


def plan_leaves(value: Any, tree: Tree, change: Callable[[Any, Placed | Refused], Any]) -> Any:
    """`value` with `change(leaf, node)` at every leaf that `tree` places or refuses; containers copied as needed."""
    if tree is None:
        return value
    if isinstance(value, torch.Tensor):
        return change(value, tree) if isinstance(tree, Placed | Refused) else value
    if isinstance(value, tuple):
        new = [plan_leaves(item, branch(tree, i), change) for i, item in enumerate(value)]
        if all(a is b for a, b in zip(new, value, strict=True)):
            return value
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    if isinstance(value, list):
        new = [plan_leaves(item, branch(tree, i), change) for i, item in enumerate(value)]
        return value if all(a is b for a, b in zip(new, value, strict=True)) else new
    if isinstance(value, dict):
        new = {key: plan_leaves(item, branch(tree, key), change) for key, item in value.items()}
        return value if all(new[key] is value[key] for key in value) else with_items(value, new)
    if isinstance(tree, Placed | Refused):
        return change(value, tree)
    return value


def is_fixed(value: Any, tree: Tree) -> bool:
    """Whether every container on the way to the leaves that `tree` describes is a tuple, which nobody can change."""
    if tree is None or not isinstance(value, list | dict | tuple):
        return True
    return isinstance(value, tuple) and all(is_fixed(item, branch(tree, i)) for i, item in enumerate(value))


class Leaf(NamedTuple):
    """One assembled leaf of an open bracket."""

    piece: torch.Tensor
    whole: torch.Tensor
    placed: Placed
    snapshot: torch.Tensor | None  # what a Partial's whole was: its piece cannot tell whether it was edited


class Fragments(port.Fragments):
    """Layouts by location, and the arithmetic that follows from them. See the module docstring.

    Attributes:
        tree: Location -> the layout of its value. A location that is absent is whole.
        late: What blocks were handed and may still write into.
        groups: Axis -> this project's own group of the ranks along it.
        boundaries: Paths of the modules that split or sum.
        holding: Paths of the modules that are a boundary or hold one: an ad-hoc call of one takes and gives pieces.
        interior: Paths of modules whose forward runs on pieces -> why its operations are refused.
        opaque: Types that hold pieces inside (a KV cache): withheld wherever they appear.
    """

    opaque: tuple[type, ...] = ()

    def __init__(self) -> None:
        self.tree: dict[str, Tree] = {}
        self.groups: dict[str, Group] = {}
        self.late = LateEdits()
        self.boundaries: set[str] = set()
        self.holding: set[str] = set()
        self.interior: dict[str, str] = {}

    def layout(self, location: str) -> Tree:
        """The layout of the value at `location`; None means whole. Answers alike on every rank."""
        if location in self.tree:
            return self.tree[location]
        if ".source." in location:
            reason = self.interior.get(location.partition(".source.")[0])
            return None if reason is None else Refused(reason)
        return None

    def bound(self, path: str) -> None:
        """Enter a boundary."""
        self.boundaries.add(path)
        while path:
            self.holding.add(path)
            path = path.rpartition(".")[0]

    def parameter(self, path: str, parameter: Any) -> Placed | None:
        """How a sharded parameter is spread; None if every rank holds all of it. For a runtime to say."""
        raise UnknownLayout(unknown(path, "this runtime does not say how its parameters are spread"))

    def own_forward(self, module: torch.nn.Module) -> Any:
        """What instruments the module's own forward inside a wrapper of the runtime's; None without one."""
        return None

    def fragmented(self, location: str) -> bool:
        return self.layout(location) is not None

    def exchanges(self, location: str) -> bool:
        """Whether the ranks have to exchange anything to make the value at `location` whole."""
        return True

    def whole(self, location: str, value: Any, key: str = "") -> tuple[Any, Callable[[Any], Any] | None]:
        """The value one process would have here, and the way back. Every rank of the group must call it.

        Args:
            location: Where the model is.
            value: What this rank's model brought: tensors in any nesting of containers.
            key: Names the exchange; the ranks' keys must agree. Default: the location.

        Raises:
            UnknownLayout: The value as a whole is refused. A refused part of it is withheld instead.
        """
        tree = self.layout(location)
        if isinstance(tree, Refused):
            raise tree.error(location)
        key = key or location
        leaves: list[Leaf] = []
        passed: list[Any] = []

        def open_leaf(leaf: Any, node: Placed | Refused) -> Any:
            if isinstance(node, Refused):
                return self.withheld(location, leaf, node)
            if isinstance(leaf, DTensor):
                raise UnknownLayout(unknown(location, "it is a DTensor here, since gradients are being recorded"))
            if not is_piece(leaf, node.layout):
                passed.append(leaf)
                return leaf
            suffix = f"#{len(leaves)}" if leaves else ""
            whole = assemble(leaf, node.layout, self.groups[node.axis], key + suffix)
            if whole is not leaf:
                snapshot = whole.detach().clone() if isinstance(node.layout, Partial) else None
                leaves.append(Leaf(leaf, whole, node, snapshot))
            return whole

        opened = plan_leaves(value, tree, open_leaf)
        whole = self.withhold(location, opened)
        if whole is value:
            return value, None
        fixed = whole is opened and is_fixed(value, tree)

        def close_leaf(leaf: Any, node: Placed | Refused) -> Any:
            if isinstance(node, Refused) or not is_whole(leaf, node.layout) or any(leaf is p for p in passed):
                return leaf
            number = next((n for n, opened in enumerate(leaves) if same_storage(leaf, opened.whole)), None)
            if number is not None and self.untouched(leaf, leaves[number]):
                return self.hand_on(location, leaf, leaves[number].piece, node)
            like = next((opened.whole for opened in leaves if opened.placed == node), None)
            check_shared(location, node, like, leaf)
            suffix = f"#{number}" if number else ""
            piece = cut(leaf, node.layout, self.groups[node.axis], f"{key}{suffix}/back")
            return self.hand_on(location, leaf, piece, node)

        def undo(left: Any) -> Any:
            if left is whole and fixed and all(self.untouched(leaf.whole, leaf) for leaf in leaves):
                for leaf in leaves:
                    self.hand_on(location, leaf.whole, leaf.piece, leaf.placed)
                return value
            closed = reveal(plan_leaves(left, tree, close_leaf))
            return value if same_parts(closed, value) else closed

        return whole, undo

    def hand_on(self, location: str, whole: torch.Tensor, piece: torch.Tensor, placed: Placed) -> torch.Tensor:
        """`piece` goes on into the model while the block may still write into `whole`."""
        self.late.remember(location, whole, piece, placed.layout, self.groups[placed.axis])
        return piece

    def untouched(self, whole: torch.Tensor, leaf: Leaf) -> bool:
        """Whether an opened leaf still has the bits it was opened with, and autograd does not need it on its graph."""
        if torch.is_grad_enabled() and (whole.requires_grad or leaf.piece.requires_grad):
            return False
        if leaf.snapshot is not None:
            return same_bits(whole, leaf.snapshot)
        group = self.groups[leaf.placed.axis]
        return leaf.placed.layout.is_piece_of(leaf.piece, whole, group.rank, group.size)

    def split(self, location: str, whole: Any, key: str = "") -> Any:
        """This rank's piece of a value that was never gathered: a `.skip` replacement, an ad-hoc argument."""
        key = key or f"{location}/split"

        def cut_leaf(leaf: Any, node: Placed | Refused) -> Any:
            if isinstance(node, Refused) or not is_whole(leaf, node.layout):
                return leaf
            return self.hand_on(location, leaf, cut(leaf, node.layout, self.groups[node.axis], key), node)

        tree = self.layout(location)
        if isinstance(tree, Refused):
            raise tree.error(location)
        return reveal(plan_leaves(whole, tree, cut_leaf))

    def withheld(self, location: str, leaf: Any, node: Any) -> Any:
        """A refused leaf's stand-in; any other leaf itself."""
        if not isinstance(node, Refused) or leaf is None:
            return leaf
        return (Lacking if isinstance(node, Missing) else Withheld)(leaf, location, node.reason)

    def withhold(self, location: str, value: Any) -> Any:
        """`value` with its opaque leaves (KV caches) withheld."""
        if not self.opaque or not holds(value, self.opaque):
            return value

        def change(leaf: Any) -> Any:
            if isinstance(leaf, self.opaque):
                return Withheld(leaf, location, "it holds the pieces of this rank's heads")
            return leaf

        return rebuild(value, change)

    def check(self, location: str, expected: Any, replacement: Any) -> None:
        """Raise unless every dim that the ranks share has, in `replacement`, the size it has in `expected`.

        Args:
            location: Where the replacement goes.
            expected: A value (or a structure of shapes) with the whole sizes.
            replacement: What the block wants to put there.

        Raises:
            ShapeChanged: With the location, the dim and both sizes.
        """
        check_shared(location, self.layout(location), expected, replacement)

    def expected(self, location: str, value: Any) -> Any:
        """`value` with each piece replaced by an empty meta tensor of the whole's shape. No collective."""

        def shape_of(leaf: Any, node: Placed | Refused) -> Any:
            if isinstance(node, Refused) or not is_piece(leaf, node.layout):
                return leaf
            shape = whole_shape(leaf.shape, node.layout, self.groups[node.axis])
            return torch.empty(shape, dtype=leaf.dtype, device="meta")

        return plan_leaves(value, self.layout(location), shape_of)


def check_shared(location: str, tree: Tree, expected: Any, replacement: Any) -> None:
    """See `Fragments.check`. `expected` may be None where only the layout's own sizes are known."""
    if isinstance(tree, Placed) and isinstance(replacement, torch.Tensor):
        dim = tree.layout.shared_dim
        if dim is None:
            return
        if isinstance(expected, torch.Tensor):
            size, shape = expected.shape[dim], f" of shape {tuple(expected.shape)}"
        else:
            size, shape = tree.layout.size, ""
        found = replacement.shape[dim] if -replacement.dim() <= dim < replacement.dim() else None
        if size is not None and found != size:
            raise ShapeChanged(
                f"the ranks share dim {dim} of the value{shape} at `{location}`, so a replacement must keep that "
                f"dim's size {size}; this one has shape {tuple(replacement.shape)}. Give a value of the whole's size."
            )
    elif isinstance(tree, Placed | Refused) or tree is None:
        return
    elif isinstance(replacement, list | tuple):
        for i, item in enumerate(replacement):
            entry = expected[i] if isinstance(expected, list | tuple) and i < len(expected) else None
            check_shared(location, branch(tree, i), entry, item)
    elif isinstance(replacement, dict):
        for key, item in replacement.items():
            entry = expected.get(key) if isinstance(expected, dict) else None
            check_shared(location, branch(tree, key), entry, item)


def is_whole(leaf: Any, layout: Layout) -> bool:
    """Whether a leaf that a block puts under a placed node is a tensor that has to be cut."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and type(layout) is not Whole


def is_piece(leaf: Any, layout: Layout) -> bool:
    """Whether a leaf under a placed node is a tensor that can be a piece (a mask of integers cannot)."""
    if not isinstance(leaf, torch.Tensor) or type(layout) is Whole or leaf.dim() == 0:
        return False
    return not layout.exchanges or leaf.is_floating_point() or leaf.is_complex()


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of the same storage."""
    if a is b:
        return True
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.device == b.device
        and a.data_ptr() == b.data_ptr()
    )


def same_parts(a: Any, b: Any) -> bool:
    """Whether two structures are made of the very same objects."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same_parts(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_parts(a[key], b[key]) for key in a)
    return False


__all__ = [
    "Fragments",
    "Placed",
    "Refused",
    "Tree",
    "Withheld",
    "reveal",
]

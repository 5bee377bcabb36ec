"""What a piece is of the whole: a small closed algebra, and the two ways between them.

A model split across ranks computes *pieces*: columns, terms of a sum, token rows. A layout is plain data that
says which, and what a runtime knows about a location is nothing but its layout; the arithmetic is here, once.

===================================================  ================================================
:class:`Whole`                                       the piece is the whole
:class:`Snapshot`                                    the same, in storage that is soon written over
:class:`Shard` (dim, widths or blocks, replicas)     the ranks' pieces side by side along a dim
:class:`Partial` (addend)                            the ranks' sum, to which the addend is added once
:class:`Rows` (dim, counts, live, order)             token rows of several ranks: padded, even permuted
===================================================  ================================================

`assemble` makes a piece whole, `cut` takes this rank's piece of a whole; they undo each other. Both are
differentiable, and the rule of the gradients is this: every rank computes the same loss from the same whole,
so **a whole's gradient is replicated, never summed**.

================  ===================================  ====================================
..                forward                              backward
================  ===================================  ====================================
assemble Shard    all-gather                           own slice; of replicas one gets it
cut Shard         slice                                all-gather; replicas are summed
assemble Partial  all-reduce                           identity
cut Partial       the whole on one rank, else zeros    identity on every rank
================  ===================================  ====================================

(`Rows` is like `Shard`.) The all-gather of torch's functional collectives sums in its backward, and a plain
slice as `cut` hands each rank only its own part: both give every rank another gradient, none the right one.

A value may be split over several axes of the mesh; `assemble_axes` and `cut_axes` compose layouts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from boundary.collectives import Group, Run, outside_inference, side_by_side, sum_in_rank_order

Shape = tuple[int, ...]


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits; NaNs equal themselves and -0.0 differs from 0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = _BITS.get(a.element_size())
    if bits is None or a.is_complex():
        return torch.equal(a, b)
    return torch.equal(a.detach().view(bits), b.detach().view(bits))


def other_bits(a: Tensor, b: Tensor) -> Tensor:
    """Where the bits of two tensors of one shape and dtype differ: bool, of their shape."""
    bits = _BITS.get(a.element_size())
    return a != b if bits is None or a.is_complex() else a.detach().view(bits) != b.detach().view(bits)


class Layout(ABC):
    """What one rank's piece is of the whole. Layouts are immutable, hashable and compare by content.

    The methods are arithmetic: they take the pieces of all ranks, or a rank's index and the degree, and
    communicate nothing. `assemble` and `cut` add the exchange and the gradient.

    """

    #: Whether the ranks have to exchange anything to make the whole.
    exchanges = True

    @property
    def shared_dim(self) -> int | None:
        """The dim the ranks share: a replacement of the whole must keep its size. None: any size will do."""
        return None

    @property
    def size(self) -> int | None:
        """The whole's size along `shared_dim`; None where the piece that arrives decides."""
        return None

    def is_whole(self, degree: int) -> bool:
        """Whether a piece is the whole already (before an addend): where there is but one rank, for most."""
        return degree == 1

    @abstractmethod
    def whole_shape(self, piece_shape: Sequence[int], rank: int, degree: int) -> Shape:
        """The whole's shape, given the shape of `rank`'s piece. ValueError if its piece has another shape."""

    @abstractmethod
    def piece_shape(self, whole_shape: Sequence[int], rank: int, degree: int) -> Shape:
        """The shape of `rank`'s piece. ValueError if no whole of this layout has that shape."""

    @abstractmethod
    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole, a new tensor, out of all ranks' pieces in rank order."""

    @abstractmethod
    def take(self, whole: Tensor, rank: int, degree: int) -> Tensor:
        """The piece of `rank`, a new contiguous tensor."""

    def is_piece_of(self, piece: Tensor, whole: Tensor, rank: int, degree: int) -> bool:
        """Whether `piece` holds the very bits that `take` would give."""
        return same_bits(self.take(whole, rank, degree), piece)

    @abstractmethod
    def take_gradient(self, gradient: Tensor, rank: int, degree: int) -> Tensor:
        """The gradient of `rank`'s piece, given the whole's, where the whole was assembled."""

    @abstractmethod
    def join_gradient(self, gradient: Tensor, group: Group, key: str) -> Tensor:
        """The whole's gradient, given that of this rank's piece, where the piece was cut from it."""

    def gather(self, piece: Tensor, group: Group, key: str) -> Tensor:
        """`join` of what all ranks hold. Every rank of the group calls it."""
        return self.join(group.all_gather(piece, self.shapes(piece, group), key))

    def shapes(self, piece: Tensor, group: Group) -> list[Shape] | None:
        """The shape of every rank's piece, given this rank's; None if all are alike. Refuses a misfit."""
        whole = self.whole_shape(piece.shape, group.rank, group.size)
        return [self.piece_shape(whole, rank, group.size) for rank in range(group.size)]


@dataclass(frozen=True)
class Whole(Layout):
    """Every rank holds the whole value."""

    exchanges = False

    def __str__(self) -> str:
        return "whole"

    def is_whole(self, degree: int) -> bool:
        return True

    def whole_shape(self, piece_shape: Sequence[int], rank: int, degree: int) -> Shape:
        return tuple(piece_shape)

    def piece_shape(self, whole_shape: Sequence[int], rank: int, degree: int) -> Shape:
        return tuple(whole_shape)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        return pieces[0].clone()

    def take(self, whole: Tensor, rank: int, degree: int) -> Tensor:
        return whole.clone(memory_format=torch.contiguous_format)

    def take_gradient(self, gradient: Tensor, rank: int, degree: int) -> Tensor:
        return gradient

    def join_gradient(self, gradient: Tensor, group: Group, key: str) -> Tensor:
        return gradient


@dataclass(frozen=True)
class Snapshot(Whole):
    """Every rank holds the whole value, in storage that the runtime writes over: what a block is served is a copy."""

    def is_whole(self, degree: int) -> bool:
        return False

    def gather(self, piece: Tensor, group: Group, key: str) -> Tensor:
        return piece.clone()

    def is_piece_of(self, piece: Tensor, whole: Tensor, rank: int, degree: int) -> bool:
        return same_bits(piece, whole)


@dataclass(frozen=True)
class Block:
    """A run of columns that is split on its own: `sum(widths)` of the whole, `widths[i]` of the i-th piece.

    Attributes:
        widths: The width of each distinct piece, in order; zeros are allowed.
        replicas: How many consecutive ranks hold each distinct piece.
    """

    widths: tuple[int, ...]
    replicas: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(self.widths))
        if not self.widths or any(width < 0 for width in self.widths):
            raise ValueError(f"widths={self.widths!r}: one width, 0 or more, for each distinct piece")
        _check_replicas(self.replicas)

    def __str__(self) -> str:
        return "+".join(map(str, self.widths)) + (f" x{self.replicas}" if self.replicas > 1 else "")

    @property
    def size(self) -> int:
        """How wide the block is in the whole."""
        return sum(self.widths)

    @property
    def degree(self) -> int:
        """How many ranks the block is split over."""
        return len(self.widths) * self.replicas

    @staticmethod
    def split(size: int, degree: int, replicas: int = 1) -> Block:
        """A block of `size` columns, dealt to `degree` ranks by the chunk rule."""
        if replicas < 1 or degree % replicas:
            raise ValueError(f"replicas={replicas!r} does not divide the degree {degree}")
        return Block(chunk_widths(size, degree // replicas), replicas)


@dataclass(frozen=True)
class Shard(Layout):
    """The ranks' pieces side by side along `dim`.

    Attributes:
        dim: The dim they share; negative counts from the end.
        widths: The width of each distinct piece. None: all are as wide as the one that arrives.
        blocks: Packed sub-tensors (`q|k|v`, `gate|up`), each split on its own. A piece is then `[q0|k0|v0]`
            and the whole is `[q|k|v]`. Given instead of `widths` and `replicas`.
        replicas: How many consecutive ranks hold the same piece (fewer key-value heads than ranks).
    """

    dim: int
    widths: tuple[int, ...] | None = None
    blocks: tuple[Block, ...] | None = None
    replicas: int = 1

    def __post_init__(self) -> None:
        _check_replicas(self.replicas)
        if self.blocks is not None:
            object.__setattr__(self, "blocks", tuple(self.blocks))
            if self.widths is not None or self.replicas != 1:
                raise ValueError(f"widths={self.widths!r} and replicas={self.replicas!r} belong to each block")
            if len({block.degree for block in self.blocks}) != 1:
                raise ValueError(f"blocks split over different degrees: {[b.degree for b in self.blocks]}")
        elif self.widths is not None:
            object.__setattr__(self, "widths", Block(self.widths, self.replicas).widths)

    def __str__(self) -> str:
        if self.blocks is not None:
            return f"shard(dim {self.dim}: {' | '.join(map(str, self.blocks))})"
        widths = "" if self.widths is None else ": " + "+".join(map(str, self.widths))
        return f"shard(dim {self.dim}{widths}{f' x{self.replicas}' if self.replicas > 1 else ''})"

    @property
    def shared_dim(self) -> int:
        return self.dim

    @property
    def size(self) -> int | None:
        if self.blocks is not None:
            return sum(block.size for block in self.blocks)
        return None if self.widths is None else sum(self.widths)

    def whole_shape(self, piece_shape: Sequence[int], rank: int, degree: int) -> Shape:
        width = piece_shape[_dim(self.dim, piece_shape)]
        if self._even:
            return _resized(piece_shape, self.dim, width * self._distinct(degree))
        plan = self._fixed_plan(degree)
        if plan.widths[rank] != width:
            raise ValueError(
                f"{self}: rank {rank}'s piece is {plan.widths[rank]} wide, and one of shape {tuple(piece_shape)} came"
            )
        return _resized(piece_shape, self.dim, plan.size)

    def piece_shape(self, whole_shape: Sequence[int], rank: int, degree: int) -> Shape:
        return _resized(whole_shape, self.dim, self._plan(whole_shape, degree).widths[rank])

    def shapes(self, piece: Tensor, group: Group) -> list[Shape] | None:
        whole = self.whole_shape(piece.shape, group.rank, group.size)
        if self._even:
            return None
        return [_resized(whole, self.dim, width) for width in self._own_plan.widths]

    def gather(self, piece: Tensor, group: Group, key: str) -> Tensor:
        whole_shape = self.whole_shape(piece.shape, group.rank, group.size)
        plan = self._plan(whole_shape, group.size)
        return group.all_gather_along(self.dim, piece, whole_shape, plan.runs, plan.widths, key)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        whole_shape = self.whole_shape(pieces[0].shape, 0, len(pieces))
        return side_by_side(self.dim, pieces, self._plan(whole_shape, len(pieces)).runs)

    def is_piece_of(self, piece: Tensor, whole: Tensor, rank: int, degree: int) -> bool:
        plan = self._plan(whole.shape, degree)
        return plan.widths[rank] == piece.shape[self.dim] and all(
            same_bits(whole.narrow(self.dim, part.whole, part.width), piece.narrow(self.dim, part.piece, part.width))
            for part in plan.parts[rank]
        )

    def take(self, whole: Tensor, rank: int, degree: int) -> Tensor:
        plan = self._plan(whole.shape, degree)
        parts = [whole.narrow(self.dim, part.whole, part.width) for part in plan.parts[rank]]
        if len(parts) == 1:
            return parts[0].clone(memory_format=torch.contiguous_format)
        return torch.cat(parts, self.dim)

    def take_gradient(self, gradient: Tensor, rank: int, degree: int) -> Tensor:
        # Below the pieces each replica's gradient is added to the others', so one of them carries all of it.
        taken = self.take(gradient, rank, degree)
        for part in self._plan(gradient.shape, degree).parts[rank]:
            if part.copy:
                taken.narrow(self.dim, part.piece, part.width).zero_()
        return taken

    def join_gradient(self, gradient: Tensor, group: Group, key: str) -> Tensor:
        gradients = group.all_gather(gradient, self.shapes(gradient, group), key)
        parts = []
        for holders in self._plan(self.whole_shape(gradient.shape, group.rank, group.size), group.size).holders:
            copies = [gradients[rank].narrow(self.dim, part.piece, part.width) for rank, part in holders]
            parts.append(sum_in_rank_order(copies) if len(copies) > 1 else copies[0])
        return torch.cat(parts, self.dim)

    @property
    def _even(self) -> bool:
        return self.blocks is None and self.widths is None

    def _distinct(self, degree: int) -> int:
        """How many distinct pieces an even split has."""
        if degree % self.replicas:
            raise ValueError(f"{self}: {self.replicas} replicas do not divide the degree {degree}")
        return degree // self.replicas

    def _plan(self, whole_shape: Sequence[int], degree: int) -> _Plan:
        size = whole_shape[_dim(self.dim, whole_shape)]
        if self._even:
            distinct = self._distinct(degree)
            if size % distinct:
                raise ValueError(
                    f"{self}: {size} of shape {tuple(whole_shape)} is no multiple of {distinct} equal pieces"
                )
            return _even_plan(size // distinct, distinct, self.replicas)
        plan = self._fixed_plan(degree)
        if plan.size != size:
            raise ValueError(f"{self}: the whole is {plan.size} wide, and one of shape {tuple(whole_shape)} came")
        return plan

    def _fixed_plan(self, degree: int) -> _Plan:
        plan = self._own_plan
        if len(plan.widths) != degree:
            raise ValueError(f"{self} is for a degree of {len(plan.widths)}, and the group has {degree} ranks")
        return plan

    @cached_property
    def _own_plan(self) -> _Plan:
        return _plan(self.blocks or (Block(self.widths or (), self.replicas),))


@dataclass(frozen=True)
class _Part:
    """A run of columns: where it starts in a piece and in the whole, and which of its copies this one is."""

    piece: int
    whole: int
    width: int
    copy: int


@dataclass(frozen=True)
class _Plan:
    """A `Shard` worked out for its degree.

    Attributes:
        size: The whole's width.
        widths: Each rank's piece's width.
        parts: What each rank's piece consists of, in the piece's order.
        holders: For each run of the whole, in the whole's order, the (rank, part) that hold it.
    """

    size: int
    widths: tuple[int, ...]
    parts: tuple[tuple[_Part, ...], ...]
    holders: tuple[tuple[tuple[int, _Part], ...], ...]

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Where the whole's columns come from: of those that several ranks hold, from the first of these."""
        first = (holders[0] for holders in self.holders)
        return tuple(Run(rank, part.piece, part.whole, part.width) for rank, part in first)


@lru_cache(maxsize=4096)
def _even_plan(width: int, distinct: int, replicas: int) -> _Plan:
    return _plan((Block((width,) * distinct, replicas),))


def _plan(blocks: tuple[Block, ...]) -> _Plan:
    degree = blocks[0].degree
    widths = [0] * degree
    parts: list[list[_Part]] = [[] for _ in range(degree)]
    holders: list[tuple[tuple[int, _Part], ...]] = []
    start = 0
    for block in blocks:
        for index, width in enumerate(block.widths):
            held = []
            for copy in range(block.replicas):
                rank = index * block.replicas + copy
                part = _Part(widths[rank], start, width, copy)
                widths[rank] += width
                parts[rank].append(part)
                held.append((rank, part))
            holders.append(tuple(held))
            start += width
    return _Plan(start, tuple(widths), tuple(map(tuple, parts)), tuple(holders))


@dataclass(frozen=True)
class Partial(Layout):
    """Every rank holds one term; the whole is their sum.

    Attributes:
        addend: What is added once to the sum, after it: a bias, or a function that returns it (or None). It
            is no part of the layout's identity.
    """

    addend: Tensor | Callable[[], Tensor | None] | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return "partial" if self.addend is None else "partial + addend"

    def added(self) -> Tensor | None:
        """The addend's value now."""
        return self.addend if self.addend is None or isinstance(self.addend, Tensor) else self.addend()

    def whole_shape(self, piece_shape: Sequence[int], rank: int, degree: int) -> Shape:
        return tuple(piece_shape)

    def piece_shape(self, whole_shape: Sequence[int], rank: int, degree: int) -> Shape:
        return tuple(whole_shape)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        return sum_in_rank_order(pieces)

    def take(self, whole: Tensor, rank: int, degree: int) -> Tensor:
        if rank:
            return torch.zeros_like(whole, memory_format=torch.contiguous_format)
        return whole.clone(memory_format=torch.contiguous_format)

    def take_gradient(self, gradient: Tensor, rank: int, degree: int) -> Tensor:
        return gradient

    def join_gradient(self, gradient: Tensor, group: Group, key: str) -> Tensor:
        return gradient

    def gather(self, piece: Tensor, group: Group, key: str) -> Tensor:
        return group.all_reduce(piece, key)

    def shapes(self, piece: Tensor, group: Group) -> list[Shape] | None:
        return None


@dataclass(frozen=True)
class Rows(Layout):
    """Token rows of several ranks. Padded rows that a rank carries along are no part of the whole.

    Attributes:
        dim: The dim the rows lie along.
        counts: How many rows each rank's piece has, padding included.
        live: How many of them, the first ones, are real. None: all.
        order: For each row of the whole its place among the live rows of all ranks, laid side by side (zigzag
            and strided context parallelism). None: as they lie.

    A piece that was cut has zeros in its padded rows.
    """

    dim: int
    counts: tuple[int, ...]
    live: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", tuple(self.counts))
        if not self.counts or any(count < 0 for count in self.counts):
            raise ValueError(f"counts={self.counts!r}: one count, 0 or more, for each rank")
        if self.live is not None:
            object.__setattr__(self, "live", tuple(self.live))
            if len(self.live) != len(self.counts) or not all(
                0 <= live <= count for live, count in zip(self.live, self.counts, strict=True)
            ):
                raise ValueError(f"live={self.live!r} does not fit into counts={self.counts!r}")
            if self.live == self.counts:
                object.__setattr__(self, "live", None)
        if self.order is not None:
            object.__setattr__(self, "order", tuple(self.order))
            if sorted(self.order) != list(range(self.size)):
                raise ValueError(f"order={self.order!r} is no permutation of the {self.size} live rows")
            if list(self.order) == sorted(self.order):
                object.__setattr__(self, "order", None)

    def __str__(self) -> str:
        live = "" if self.live is None else f", live {'+'.join(map(str, self.live))}"
        order = ", permuted" if self.order else ""
        return f"rows(dim {self.dim}: {'+'.join(map(str, self.counts))}{live}{order})"

    @property
    def shared_dim(self) -> int:
        return self.dim

    @property
    def size(self) -> int:
        return sum(self._live)

    def is_whole(self, degree: int) -> bool:
        return degree == 1 and self.live is None and self.order is None

    @property
    def _live(self) -> tuple[int, ...]:
        return self.counts if self.live is None else self.live

    def whole_shape(self, piece_shape: Sequence[int], rank: int, degree: int) -> Shape:
        self._check(piece_shape, self.counts[rank] if degree == len(self.counts) else None, degree)
        return _resized(piece_shape, self.dim, self.size)

    def piece_shape(self, whole_shape: Sequence[int], rank: int, degree: int) -> Shape:
        self._check(whole_shape, self.size, degree)
        return _resized(whole_shape, self.dim, self.counts[rank])

    def _check(self, shape: Sequence[int], rows: int | None, degree: int) -> None:
        if degree != len(self.counts):
            raise ValueError(f"{self} is for {len(self.counts)} ranks, and the group has {degree}")
        if shape[_dim(self.dim, shape)] != rows:
            raise ValueError(f"{self}: {rows} rows expected, and a tensor of shape {tuple(shape)} came")

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        rows = [piece.narrow(self.dim, 0, live) for piece, live in zip(pieces, self._live, strict=True)]
        joined = torch.cat(rows, self.dim)
        if self.order is None:
            return joined
        return joined.index_select(self.dim, _index(self.order, joined.device))

    def take(self, whole: Tensor, rank: int, degree: int) -> Tensor:
        piece = whole.new_zeros(self.piece_shape(whole.shape, rank, degree))
        start, live = sum(self._live[:rank]), self._live[rank]
        if self.order is None:
            rows = whole.narrow(self.dim, start, live)
        else:
            places = _inverse(self.order)[start : start + live]
            rows = whole.index_select(self.dim, _index(places, whole.device))
        piece.narrow(self.dim, 0, live).copy_(rows)
        return piece

    def take_gradient(self, gradient: Tensor, rank: int, degree: int) -> Tensor:
        return self.take(gradient, rank, degree)

    def join_gradient(self, gradient: Tensor, group: Group, key: str) -> Tensor:
        return self.gather(gradient, group, key)


@lru_cache(maxsize=64)
def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


@lru_cache(maxsize=64)
def _index(places: tuple[int, ...], device: torch.device) -> Tensor:
    with outside_inference():
        return torch.tensor(places, dtype=torch.long, device=device)


def chunk_widths(size: int, degree: int) -> tuple[int, ...]:
    """How `torch.chunk` and DTensor deal `size` to `degree` ranks: ceil(size / degree) each, while it lasts.

    The last ranks may get less, or nothing: 9 over 4 is 3, 3, 3, 0.
    """
    if size < 0 or degree < 1:
        raise ValueError(f"size={size!r}, degree={degree!r}: nothing to deal, or nobody to deal to")
    step = -(-size // degree)
    return tuple(max(0, min(step, size - rank * step)) for rank in range(degree))


def assemble(piece: Tensor, layout: Layout, group: Group, key: str = "") -> Tensor:
    """The whole that `piece` is this rank's piece of. Every rank of the group calls it, with its own piece.

    Args:
        piece: Any strides.
        layout: What it is; the same on every rank.
        group: The ranks that share the whole.
        key: Names the exchange; the same on every rank.

    Returns:
        A new tensor, with a version counter, that may be edited in place with gradients on. `piece` itself if
        it is the whole already.

    Raises:
        ValueError: The piece does not fit the layout.
        CollectiveError: The ranks did not come together.
    """
    addend = layout.added() if isinstance(layout, Partial) else None
    if layout.is_whole(group.size):
        return piece if addend is None else piece + addend
    if torch.is_grad_enabled() and piece.requires_grad:
        whole: Tensor = _Assemble.apply(piece, layout, group, key)  # type: ignore[assignment]
    else:
        with outside_inference():
            whole = layout.gather(piece, group, key)
    if addend is None:
        return whole
    with outside_inference():
        return whole + addend


def cut(whole: Tensor, layout: Layout, group: Group, key: str = "") -> Tensor:
    """This rank's piece of `whole`: `assemble`'s inverse.

    Nothing is exchanged, but in the backward of a `Shard` and of `Rows`: every rank of the group runs that.

    Args:
        whole: Equal on every rank; any strides.
        layout: What a piece is.
        group: The ranks that share the whole.
        key: Names the backward's exchange.

    Returns:
        A new contiguous tensor that shares nothing with `whole`; `whole` itself if that is the piece. Of a
        `Partial` the first rank gets the whole, less the addend, and the others zeros.

    Raises:
        ValueError: The whole does not fit the layout.
    """
    addend = layout.added() if isinstance(layout, Partial) else None
    recording = torch.is_grad_enabled() and (whole.requires_grad or (addend is not None and addend.requires_grad))
    if addend is not None and (group.rank == 0 or recording):
        # The addend's gradient is replicated like the whole's, so with gradients every rank subtracts it.
        whole = whole - addend
    if layout.is_whole(group.size):
        return whole
    if recording:
        return _Cut.apply(whole, layout, group, key)  # type: ignore[return-value]
    with outside_inference():
        return layout.take(whole, group.rank, group.size)


class _Assemble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, layout: Layout, group: Group, key: str) -> Tensor:
        ctx.layout, ctx.group = layout, group
        return layout.gather(piece, group, key)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, None, None]:
        return ctx.layout.take_gradient(gradient, ctx.group.rank, ctx.group.size), None, None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, layout: Layout, group: Group, key: str) -> Tensor:
        ctx.layout, ctx.group, ctx.key = layout, group, key
        return layout.take(whole, group.rank, group.size)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, None, None]:
        return ctx.layout.join_gradient(gradient, ctx.group, f"{ctx.key}/grad"), None, None, None


def assemble_many(pieces: Sequence[tuple[Tensor, Layout]], group: Group, key: str = "") -> list[Tensor]:
    """`assemble` of each `(piece, layout)`, in one exchange per dtype. Every rank of the group calls it.

    Pieces at which gradients are being recorded are assembled one by one.
    """
    wholes: list[Tensor | None] = [None] * len(pieces)
    together: list[int] = []
    for index, (piece, layout) in enumerate(pieces):
        alone = torch.is_grad_enabled() and piece.requires_grad
        if alone or not layout.exchanges or layout.is_whole(group.size):
            wholes[index] = assemble(piece, layout, group, f"{key}/{index}")
        else:
            together.append(index)
    if together:
        shapes = [pieces[index][1].shapes(pieces[index][0], group) for index in together]
        gathered = group.all_gather_many([pieces[index][0] for index in together], shapes, key)
        with outside_inference():
            for index, ranks_pieces in zip(together, gathered, strict=True):
                layout = pieces[index][1]
                whole = layout.join(ranks_pieces)
                addend = layout.added() if isinstance(layout, Partial) else None
                wholes[index] = whole if addend is None else whole + addend
    return [whole for whole in wholes if whole is not None]


Axes = Sequence[tuple[Layout, Group]]


def assemble_axes(piece: Tensor, axes: Axes, key: str = "") -> Tensor:
    """The whole of a value that several mesh axes split, made whole over one axis after the other.

    Args:
        piece: This rank's piece of a piece.
        axes: A layout and a group for each axis, *innermost first*: the split that was made last is undone
            first. `cut_axes` takes the same list.
        key: Names the exchanges.
    """
    for index, (layout, group) in enumerate(axes):
        piece = assemble(piece, layout, group, f"{key}/{index}")
    return piece


def cut_axes(whole: Tensor, axes: Axes, key: str = "") -> Tensor:
    """This rank's piece of a value that several mesh axes split; `axes` as in `assemble_axes`."""
    for index, (layout, group) in reversed(list(enumerate(axes))):
        whole = cut(whole, layout, group, f"{key}/{index}")
    return whole


def whole_shape(piece_shape: Sequence[int], layout: Layout, group: Group) -> Shape:
    """The shape `assemble` gives for this rank's piece of `piece_shape`."""
    return layout.whole_shape(piece_shape, group.rank, group.size)


def piece_shape(shape: Sequence[int], layout: Layout, group: Group) -> Shape:
    """The shape `cut` gives on this rank for a whole of `shape`."""
    return layout.piece_shape(shape, group.rank, group.size)


def _check_replicas(replicas: int) -> None:
    if replicas < 1:
        raise ValueError(f"replicas={replicas!r}: at least one rank holds a piece")


def _dim(dim: int, shape: Sequence[int]) -> int:
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"there is no dim {dim} in shape {tuple(shape)}")
    return dim % len(shape)


def _resized(shape: Sequence[int], dim: int, size: int) -> Shape:
    resized = list(shape)
    resized[dim] = size
    return tuple(resized)

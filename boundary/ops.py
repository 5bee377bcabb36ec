"""Moving token rows between layouts and completing sums: the only module that runs collectives on rows.

Layouts form a chain (see `layout`), so a move is a *gather*, which needs the group of the axes it removes, or
a *cut*, which is local. A sum is completed by an all-reduce, by a reduce-scatter that also deals out the
rows, or by a *sum-gather*: each rank writes its term into its own slot of a zero buffer, and one all-reduce
both adds the terms and places the rows.

Every function takes a value that may be a tuple of tensors (quantized data and its scales): each member moves
with its rows. Rows are dim 0. Padding rows are zeroed on the way into a gather or a sum, so that what
happened to be in them reaches nobody. Collectives are skipped where the rows at the source layout are none,
which the ranks of the group agree on because they hold the same rows there.

Moves and sums carry gradients; see `differentiable`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .collectives import Group
from .gradients import once
from .layout import ATTN_TP_SCATTER, FULL, Layout, RowFacts
from .parallel import BoundSum, Parallel

Step = Callable[[Tensor], Tensor]
Value = TypeVar("Value", Tensor, tuple[Tensor, ...])


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, run: Step, back: Step) -> Tensor:
        ctx.back = back
        if run is _same:
            return value.view_as(value)
        made = run(value)
        # A cut is a view, and a view made in here could not be edited in place.
        return made.clone() if made.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() else made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return once(ctx.back(gradients[0]), gradients[0]), None, None


def differentiable(value: Tensor, run: Step, back: Step) -> Tensor:
    """`run(value)`, with `back` as its gradient where autograd records.

    All ranks compute the same loss, so the gradient of rows that several ranks hold is the same on each of them, and
    no rank's is added to another's: a sum's is handed to each term, a gather's is cut, a cut's is gathered.
    """
    if torch.is_grad_enabled() and value.requires_grad:
        return _Differentiable.apply(value, run, back)  # type: ignore[return-value]
    return run(value)


def summed(term: Tensor, group: Group, key: str) -> Tensor:
    """The sum of every rank's term; its gradient is each term's."""
    return differentiable(term, lambda term: group.all_reduce(term, key), _same)


def with_addend(term: Tensor, addend: Tensor, on_this_rank: bool) -> Tensor:
    """One rank's term of a sum that `addend`, held by all ranks, joins once. Its gradient is the same on all."""
    if on_this_rank:
        return term + addend
    if torch.is_grad_enabled() and addend.requires_grad:
        return term + (addend - addend.detach())
    return term


def shared_input(value: Tensor, group: Group) -> Tensor:
    """`value` as the input of compute whose weights the group's ranks share out.

    Each rank's compute sees a part of the weights, so what reaches `value` from behind is a term of its gradient.
    """
    if group.size == 1:
        return value
    return differentiable(value, _same, lambda gradient: group.all_reduce(gradient, "gradient of a shared input"))


def _same(value: Tensor) -> Tensor:
    return value


class RowMover:
    """The moves and sums of one rank. Methods that run a collective are called by every rank of its group."""

    def __init__(self, parallel: Parallel) -> None:
        self.parallel = parallel
        self.topology = parallel.topology
        self.at = parallel.at

    def count(self, layout: Layout, facts: RowFacts) -> int:
        """How many rows this rank holds at `layout`."""
        return facts.count(layout, self.at, self.topology)

    def move(self, value: Value, source: Layout, target: Layout, facts: RowFacts) -> Value:
        """`value` on the rows of `target`. The same object where it is there already; a cut is a view.

        Raises:
            ValueError: Neither layout contains the other.
        """
        if source == target:
            return value
        if isinstance(value, tuple):
            return cast(Value, tuple(self.move(member, source, target, facts) for member in value))
        if target.contains(source):
            return differentiable(
                value,
                lambda rows: self._gather(rows, source, target, facts),
                lambda gradient: self._cut(gradient, target, source, facts),
            )
        if source.contains(target):
            return differentiable(
                value,
                lambda rows: self._cut(rows, source, target, facts),
                lambda gradient: self._gather(gradient, target, source, facts),
            )
        raise ValueError(f"there is no move from {source} to {target}: neither rows contain the other's")

    def _cut(self, value: Tensor, source: Layout, target: Layout, facts: RowFacts) -> Tensor:
        start, length = facts.span(source, target, self.at, self.topology)
        return self.blank_padding(value.narrow(0, start, length), target, facts)

    def _gather(self, value: Tensor, source: Layout, target: Layout, facts: RowFacts) -> Tensor:
        group = self.parallel.over(source.sharded - target.sharded)
        counts = self._counts(source, group.ranks, facts)
        value = self.blank_padding(value, source, facts)
        shapes = [(count, *value.shape[1:]) for count in counts]
        return torch.cat(group.all_gather(value, shapes, f"gather {source} to {target}"))

    def _counts(self, layout: Layout, ranks: tuple[int, ...], facts: RowFacts) -> list[int]:
        first = self.parallel.pipeline_rank * self.topology.tp
        return [facts.count(layout, self.topology.coordinates(rank - first), self.topology) for rank in ranks]

    def blank_padding(self, value: Tensor, layout: Layout, facts: RowFacts) -> Tensor:
        """`value` with zeros in its padding rows; the same object where it has none.

        At layouts that hold several cells this is left alone: a gather that made them has blanked them.
        """
        if layout != facts.model_rows:
            if ATTN_TP_SCATTER not in layout.sharded:
                return value
            _, live = facts.cell(self.at)
            cell = Layout(layout.sharded - {ATTN_TP_SCATTER})
            start, length = facts.span(cell, layout, self.at, self.topology)
            live = min(max(live - start, 0), length)
        else:
            length, live = facts.cell(self.at)
        if live == length:
            return value
        blanked = value.new_zeros(value.shape)
        blanked[:live] = value[:live]
        return blanked

    def all_reduce(self, term: Tensor, over: BoundSum) -> Tensor:
        """The sum over the group: a new tensor, the same bits on every rank."""
        if not term.shape[0]:
            return term
        return summed(term, over.group, f"sum over {over.name.value}")

    def can_scatter(self, over: BoundSum, source: Layout, target: Layout) -> bool:
        """Whether one reduce-scatter over that group leaves each rank its own rows of `target`, or its slice
        of them.
        """
        return over.axes is not None and over.axes in (
            target.sharded - source.sharded,
            self._sliced(target).sharded - source.sharded,
        )

    def shares(self, over: BoundSum, source: Layout, target: Layout, facts: RowFacts) -> list[int] | None:
        """How many rows of `target` each rank of the group keeps, where one reduce-scatter is all that
        `reduce_scatter` does. None where there are no rows, or padding to blank, or slices to gather after: the same
        on all ranks.
        """
        if over.axes != target.sharded - source.sharded or facts.live != facts.padded:
            return None
        counts = self._counts(target, over.group.ranks, facts)
        return counts if any(counts) else None

    def _sliced(self, layout: Layout) -> Layout:
        return Layout(layout.sharded | self.topology.axes(ATTN_TP_SCATTER))

    def reduce_scatter(self, term: Tensor, over: BoundSum, source: Layout, target: Layout, facts: RowFacts) -> Tensor:
        """The sum over the group, on the rows of `target`; needs `can_scatter`.

        Where the ranks of attention TP share the rows of `target`, each takes a slice and they gather it
        after.
        """
        if not term.shape[0]:
            return self.move(term, source, target, facts)
        exact = over.axes == target.sharded - source.sharded
        lands = target if exact else self._sliced(target)
        counts = self._counts(lands, over.group.ranks, facts)

        def run(term: Tensor) -> Tensor:
            part = over.group.reduce_scatter(term, counts, f"sum over {over.name.value} onto {lands}")
            return self.blank_padding(part, lands, facts)

        part = differentiable(term, run, lambda gradient: self._gather(gradient, lands, source, facts))
        return self.move(part, lands, target, facts)

    def joined(self, term: Tensor, residual: Tensor) -> Tensor:
        """A term of the sum over attention TP, the residual being in exactly one of them."""
        return with_addend(term, residual, self.at.tp == 0)

    def sum_gather(self, term: Tensor, source: Layout, facts: RowFacts) -> Tensor:
        """All rows, each the sum of the terms that attention TP's ranks hold of it: one all-reduce over full
        TP.
        """
        total = facts.count(FULL, self.at, self.topology)
        if not total:
            return term
        start, length = facts.span(FULL, source, self.at, self.topology)

        def run(term: Tensor) -> Tensor:
            placed = term.new_zeros(total, *term.shape[1:])
            placed[start : start + length] = self.blank_padding(term, source, facts)
            return self.parallel.tp.all_reduce(placed, f"sum and gather {source}")

        return differentiable(term, run, lambda gradient: self._cut(gradient, FULL, source, facts))

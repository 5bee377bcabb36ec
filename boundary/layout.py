"""Which token rows a rank holds, and which ranks hold the terms of a sum: two separate facts.

The ranks of a pipeline stage form a mesh of three axes, outermost first: attention data parallelism,
attention context parallelism, attention tensor parallelism. A :class:`Layout` names the axes that deal out
token rows:

* `ATTN_DP`: each rank of the axis has requests of its own;
* `ATTN_CP`: each rank has its part of the same requests (while a context-parallel batch runs);
* `ATTN_TP_SCATTER`: the ranks that share attention's rows have taken a slice of them each.

Axes of size one are left out, so equal layouts compare equal. The axes nest: rows are dealt out over an inner
axis only after the outer ones, so layouts form a chain, and every transition is a walk up (a gather) or down
(a cut). What ranks hold at a layout is the rows of its *cells*, one cell per data- and context-parallel rank,
side by side in rank order; slices come from `tensor_split`. A :class:`SumGroup` says separately over whom a
value must still be added. Nothing here is ever inferred from a shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class TokenAxis(Enum):
    """An axis of ranks that deals out token rows; in the order of nesting, outermost first."""

    ATTN_DP = 0
    ATTN_CP = 1
    ATTN_TP_SCATTER = 2

    def __repr__(self) -> str:
        return self.name


ATTN_DP, ATTN_CP, ATTN_TP_SCATTER = TokenAxis


class SumGroup(Enum):
    """The ranks that hold the terms of a sum."""

    ATTN_TP = "attention TP"
    TP = "full TP"
    MOE_OUTPUT = "MoE output"


class Coordinates(NamedTuple):
    """Where a rank stands on the three axes."""

    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Topology:
    """The degrees of one model replica. MoE parallelism re-uses the same ranks, expert axis outside.

    Attributes:
        attention_dp, attention_cp, attention_tp: Their product is the full TP degree.
        moe_ep, moe_dp: Degrees of expert parallelism and of MoE data parallelism; what remains of the full TP
            degree is `moe_tp`.
        pipeline: How many pipeline stages there are.
    """

    attention_dp: int = 1
    attention_cp: int = 1
    attention_tp: int = 1
    moe_ep: int = 1
    moe_dp: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        if min(self.sizes) < 1 or min(self.moe_ep, self.moe_dp, self.pipeline) < 1:
            raise ValueError(f"every degree is at least 1: {self!r}")
        if self.tp % (self.moe_ep * self.moe_dp):
            raise ValueError(
                f"moe_ep={self.moe_ep} x moe_dp={self.moe_dp} does not divide the full TP degree {self.tp}"
            )

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.attention_dp, self.attention_cp, self.attention_tp

    @property
    def tp(self) -> int:
        """The full TP degree: every rank of a pipeline stage."""
        return self.attention_dp * self.attention_cp * self.attention_tp

    @property
    def moe_tp(self) -> int:
        return self.tp // (self.moe_ep * self.moe_dp)

    def size(self, axis: TokenAxis) -> int:
        return self.sizes[axis.value]

    def coordinates(self, rank: int) -> Coordinates:
        """Where full-TP rank `rank` stands: attention TP is the innermost axis."""
        outer, tp = divmod(rank, self.attention_tp)
        return Coordinates(*divmod(outer, self.attention_cp), tp)

    def rank(self, at: Coordinates) -> int:
        return (at.dp * self.attention_cp + at.cp) * self.attention_tp + at.tp

    def axes(self, *axes: TokenAxis) -> frozenset[TokenAxis]:
        """`axes` without those of size one."""
        return frozenset(axis for axis in axes if self.size(axis) > 1)

    def layout(self, *axes: TokenAxis) -> Layout:
        return Layout(self.axes(*axes))


@dataclass(frozen=True)
class Layout:
    """The axes over which a value's rows are dealt out. The empty one: every rank holds every row."""

    sharded: frozenset[TokenAxis] = frozenset()

    def __str__(self) -> str:
        return "+".join(axis.name for axis in TokenAxis if axis in self.sharded) or "all rows"

    def contains(self, other: Layout) -> bool:
        """Whether this layout's rows include those of `other`, so that `other` is a cut of it."""
        return self.sharded <= other.sharded


FULL = Layout()


class PaddingMode(Enum):
    """How the row counts of attention-DP ranks are padded: to their maximum, or each only to its own tile."""

    MAX_LEN = "max_len"
    SUM_LEN = "sum_len"


@dataclass(frozen=True)
class RowFacts:
    """How many rows each cell of a batch has: the same facts on every rank, exchanged before any path is
    chosen.

    Attributes:
        padded: `padded[dp][cp]`: the rows that rank's tensors have. One entry per DP rank where no
            context-parallel batch runs: the CP ranks then hold the same rows.
        live: Those of them that are tokens. They come first; the others are padding and are zeroed on the
            way.
        padding: The mode that made `padded`.
    """

    padded: tuple[tuple[int, ...], ...]
    live: tuple[tuple[int, ...], ...]
    padding: PaddingMode = PaddingMode.MAX_LEN
    _spans: dict[tuple[Layout, Layout, Coordinates], tuple[int, int]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for padded, live in zip(self.padded, self.live, strict=True):
            if any(not 0 <= tokens <= rows for rows, tokens in zip(padded, live, strict=True)):
                raise ValueError(f"live counts {self.live} do not fit in the padded counts {self.padded}")

    @property
    def context_parallel(self) -> bool:
        return len(self.padded[0]) > 1

    @property
    def model_rows(self) -> Layout:
        """The rows of one cell: those attention runs on, and the model's own tensors have."""
        dealt = {ATTN_DP: len(self.padded) > 1, ATTN_CP: self.context_parallel}
        return Layout(frozenset(axis for axis, is_dealt in dealt.items() if is_dealt))

    @property
    def tokens(self) -> int:
        """Tokens of all DP ranks together: a fact that all ranks share."""
        return sum(map(sum, self.live))

    @property
    def even(self) -> bool:
        """Whether every cell has the same number of rows."""
        return len({rows for cells in self.padded for rows in cells}) == 1

    def cell(self, at: Coordinates) -> tuple[int, int]:
        """Padded and live rows of the cell that the rank at `at` holds."""
        cp = at.cp if self.context_parallel else 0
        return self.padded[at.dp][cp], self.live[at.dp][cp]

    def span(self, outer: Layout, inner: Layout, at: Coordinates, topology: Topology) -> tuple[int, int]:
        """Where the rank at `at` finds its rows of `inner` among its rows of `outer`: start and length."""
        key = (outer, inner, at)
        if (span := self._spans.get(key)) is None:
            span = self._spans[key] = self._find(outer, inner, at, topology)
        return span

    def count(self, layout: Layout, at: Coordinates, topology: Topology) -> int:
        """How many rows the rank at `at` holds at `layout`."""
        return self.span(layout, layout, at, topology)[1]

    def _find(self, outer: Layout, inner: Layout, at: Coordinates, topology: Topology) -> tuple[int, int]:
        own = at._replace(cp=at.cp if self.context_parallel else 0)
        start = length = 0
        for dp, cells in enumerate(self.padded):
            for cp, rows in enumerate(cells):
                if not _holds(outer, own, dp, cp):
                    continue
                if _holds(inner, own, dp, cp):
                    length += rows
                elif (dp, cp) < (own.dp, own.cp):
                    start += rows
        if ATTN_TP_SCATTER in inner.sharded and ATTN_TP_SCATTER not in outer.sharded:
            base, extra = divmod(length, topology.attention_tp)
            start += base * at.tp + min(at.tp, extra)
        if ATTN_TP_SCATTER in inner.sharded:
            base, extra = divmod(length, topology.attention_tp)
            length = base + (at.tp < extra)
        return start, length


def _holds(layout: Layout, at: Coordinates, dp: int, cp: int) -> bool:
    return (ATTN_DP not in layout.sharded or dp == at.dp) and (ATTN_CP not in layout.sharded or cp == at.cp)

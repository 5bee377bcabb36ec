"""What one forward pass knows: the batch's facts, its residual stream, and the flags an open exit publishes.

The flags live with the thread that computes (ranks may be threads), on a stack of scopes: an exit pushes its
scope while compute runs and restores the previous one after, also when compute raises.

Whatever this thread calls while an exit is open sees its flags: a module that is called in between for
another purpose returns its term instead of its output, and its reading counts as compute's. Code that makes
such a call *must* make it inside :func:`fresh_forward`, where no flag is up and every module completes its
own output.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from .contracts import BatchVariant
from .layout import PaddingMode, RowFacts, Topology
from .parallel import Parallel

if TYPE_CHECKING:
    from .adapters.attention import AttnTpContext
    from .adapters.lora import LoraRows
    from .residual.stream import ResidualStream


class ForwardMode(Enum):
    """What the batch does. An idle rank keeps `IDLE`, whatever padding rows it carries along."""

    EXTEND = "extend"
    DECODE = "decode"
    IDLE = "idle"


@dataclass(eq=False)
class ForwardBatch:
    """The batch a model's forward runs on, as boundaries see it.

    Attributes:
        rows: The row counts of all ranks.
        mode: This rank's own; never consulted for a decision that changes collectives.
        input_scattered: Attention's input stays on attention-TP slices between layers. The same on all ranks.
        sequence_parallel: May run as a sequence-parallel region, which the stage that enters the stack opens.
        residual_stream: The stream of this batch while it is inside a layer stack.
        attention_input: What the attention-input adapter holds for compute.
        lora_rows: Which rows LoRA runs on, as the last path selected published it.
    """

    rows: RowFacts
    mode: ForwardMode = ForwardMode.EXTEND
    input_scattered: bool = False
    sequence_parallel: bool = False
    residual_stream: ResidualStream | None = None
    attention_input: AttnTpContext | None = None
    lora_rows: LoraRows | None = None
    sequence_parallel_open: bool = field(default=False, repr=False)

    @property
    def variant(self) -> BatchVariant:
        """The path this batch takes through every stage, from facts that all ranks share."""
        if self.sequence_parallel_open:
            return BatchVariant.SEQUENCE_PARALLEL
        if self.input_scattered:
            return BatchVariant.INPUT_SCATTERED
        if self.rows.context_parallel:
            return BatchVariant.CP
        return BatchVariant.ORDINARY

    @property
    def idle(self) -> bool:
        return self.mode is ForwardMode.IDLE


def pad_counts(tokens: list[int], topology: Topology, padding: PaddingMode | None, mode: ForwardMode) -> RowFacts:
    """The facts of an ordinary batch in which DP rank `d` has `tokens[d]` tokens.

    Counts are first raised to a multiple of attention TP where rows may be sliced; then every rank gets the
    maximum (`MAX_LEN`) or its own (`SUM_LEN`). With `padding=None` the cheaper is chosen: `MAX_LEN` for
    decode unless it would more than double the rows, `SUM_LEN` for prefill on several ranks.
    """
    tile = topology.attention_tp if topology.attention_dp > 1 else 1
    padded = [-(-count // tile) * tile for count in tokens]
    if padding is None:
        worthwhile = 2 * sum(padded) >= max(padded) * len(padded)
        fixed = len(padded) == 1 or (mode is not ForwardMode.EXTEND and worthwhile)
        padding = PaddingMode.MAX_LEN if fixed else PaddingMode.SUM_LEN
    if padding is PaddingMode.MAX_LEN:
        padded = [max(padded)] * len(padded)
    return RowFacts(tuple((rows,) for rows in padded), tuple((count,) for count in tokens), padding)


def exchange_batch(
    parallel: Parallel,
    num_tokens: int,
    mode: ForwardMode = ForwardMode.EXTEND,
    *,
    padding: PaddingMode | None = None,
    **options: Any,
) -> ForwardBatch:
    """The batch of a rank that has `num_tokens` tokens: every rank calls it, idle ones too, before any path
    is chosen.

    The counts and modes of all attention-DP ranks are exchanged, so that everything decided from the result
    is decided alike on every rank. The rank's tensors are then padded to `batch.rows.cell(parallel.at)[0]`
    rows.

    Args:
        parallel: This rank's groups.
        num_tokens: Its live tokens; 0 on an idle rank.
        mode: What it does.
        padding: Ask for a mode instead of letting the counts choose.
        **options: Further attributes of the batch.
    """
    modes = list(ForwardMode)
    own = torch.tensor([num_tokens, modes.index(mode)])
    seen = [entry.tolist() for entry in parallel.attention_dp.all_gather(own, key="row counts")]
    busy = [modes[code] for count, code in seen if count]
    shared = ForwardMode.EXTEND if ForwardMode.EXTEND in busy else ForwardMode.DECODE
    facts = pad_counts([count for count, _ in seen], parallel.topology, padding, shared)
    return ForwardBatch(facts, mode, **options)


class ForwardFlags:
    """The flags one exit publishes to compute. Whether anybody read one that is up is remembered: apart for
    the two that leave the sum, and for the one that leaves the finalize, since who reads one may not know of
    the other.

    Attributes:
        sum_consulted: `fuse_mlp_allreduce` or `mlp_reduce_scatter` was read while it was up.
        finalize_consulted: `defer_moe_finalize` was.
    """

    __slots__ = (
        "_defer_moe_finalize",
        "_fuse_mlp_allreduce",
        "_mlp_reduce_scatter",
        "finalize_consulted",
        "sum_consulted",
    )

    def __init__(
        self,
        fuse_mlp_allreduce: bool = False,
        mlp_reduce_scatter: bool = False,
        defer_moe_finalize: bool = False,
    ) -> None:
        self._fuse_mlp_allreduce = fuse_mlp_allreduce
        self._mlp_reduce_scatter = mlp_reduce_scatter
        self._defer_moe_finalize = defer_moe_finalize
        self.sum_consulted = False
        self.finalize_consulted = False

    @property
    def fuse_mlp_allreduce(self) -> bool:
        """Skip the output all-reduce: the next stage's input runs it."""
        self.sum_consulted |= self._fuse_mlp_allreduce
        return self._fuse_mlp_allreduce

    @property
    def mlp_reduce_scatter(self) -> bool:
        """Leave the sum to the boundary's reduce-scatter."""
        self.sum_consulted |= self._mlp_reduce_scatter
        return self._mlp_reduce_scatter

    @property
    def defer_moe_finalize(self) -> bool:
        """A MoE may return a `HandoffOutput`."""
        self.finalize_consulted |= self._defer_moe_finalize
        return self._defer_moe_finalize

    @property
    def skips_reduction(self) -> bool:
        """Whether compute leaves its output unsummed, for whichever reason."""
        fuse, scatter = self.fuse_mlp_allreduce, self.mlp_reduce_scatter
        return fuse or scatter

    @property
    def leaves_sum(self) -> bool:
        """`skips_reduction`, for who only looks: it does not count as read."""
        return self._fuse_mlp_allreduce or self._mlp_reduce_scatter


class _RankThread(threading.local):
    """What is in force on one thread; a plain attribute, which graph capture can follow."""

    flags: ForwardFlags = ForwardFlags()


_thread = _RankThread()


def get_forward() -> ForwardFlags:
    """The flags in force for the compute that runs on this thread. Outside any exit none is up."""
    return _thread.flags


def publish(flags: ForwardFlags) -> ForwardFlags:
    """Put `flags` in force, and return those that were: what `restore` takes."""
    previous = _thread.flags
    _thread.flags = flags
    return previous


def restore(previous: ForwardFlags) -> None:
    _thread.flags = previous


@contextmanager
def fresh_forward() -> Iterator[ForwardFlags]:
    """Call modules for one's own purposes: no flag is up inside, and those of the open exit return after."""
    flags = ForwardFlags()
    previous = publish(flags)
    try:
        yield flags
    finally:
        restore(previous)

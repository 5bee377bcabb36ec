"""Fused completions of a stage's input, and who offers them.

A *candidate* does in one operation what an input path does in several: complete the sum, by an all-reduce or a
reduce-scatter, add the residual, normalize. A provider is given to a layer's stages as their `fusions` option, and
its candidates are tried in order, before the built-in one. A candidate that declines returns None, before it has
modified an input or started a collective, and decides so from facts that all ranks share: the path then goes on
without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ..forward import ForwardBatch
from ..layout import SumGroup

if TYPE_CHECKING:
    from ..construction import StagePlan

Fused = tuple[Any, Tensor]
"""The input, normalized or in the read's format, and the updated residual."""


def _never(rows: int) -> bool:
    return False


@dataclass(frozen=True)
class FusedInput:
    """A candidate that completes a sum together with a plain residual addition and a norm.

    Attributes:
        sum_group: The sum it completes. Contributions that owe another one are not offered.
        run: `run(value, sum, residual, norm)`, all rows of one rank; None to decline.
        accepts_handoff: It takes `HandoffOutput`s instead of terms of a sum.
        leaves_residual: For how many rows the residual tensor is certainly not written to, whatever is
            answered. The rows are all of the residual's, of which `scatter` may be given a part.
        scatter: `scatter(term, sum, counts, residual, norm)`, where one reduce-scatter completes the sum: rank
            `i` of the group keeps `counts[i]` rows of it, and the residual has this rank's, of which there may
            be none. None to decline; None in its place offers nothing.
        formats: `run` and `scatter` take another argument, `form`: the read's input format
            (`boundary.residual.add_norm.Format`), in which they make the input; None for the residual's dtype. Without
            this the format is made of the normalized rows.
    """

    sum_group: SumGroup
    run: Callable[..., Fused | None]
    accepts_handoff: bool = False
    leaves_residual: Callable[[int], bool] = _never
    scatter: Callable[..., Fused | None] | None = None
    formats: bool = False


@dataclass(frozen=True)
class FusedMlpInput(FusedInput):
    """A candidate for an FFN's input."""


@dataclass(frozen=True)
class FusedAttentionInput(FusedInput):
    """A candidate for an attention's input."""


class FusionProvider(Protocol):
    """Supplies a layer's candidates and says what may be left to them. One object for a layer's stages."""

    def attention_input(self, plan: StagePlan) -> Sequence[FusedAttentionInput]:
        """Candidates for an attention's input, in order."""
        ...

    def ffn_input(self, plan: StagePlan) -> Sequence[FusedMlpInput]:
        """Candidates for an FFN's input, in order."""
        ...

    def can_defer_finalize(self, plan: StagePlan, forward_batch: ForwardBatch) -> bool:
        """Whether this FFN may return a `HandoffOutput`; asked on every exit, one answer on all ranks."""
        ...

    def can_defer_all_reduce(self, plan: StagePlan, forward_batch: ForwardBatch) -> bool:
        """Whether a LoRA or TP1-shared-expert FFN may leave its all-reduce to the next input."""
        ...

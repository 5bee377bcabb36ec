"""The built-in fusion of all-reduce, residual addition and norm, and a provider that shows the interface.

The sum and the addition are accumulated without an intermediate rounding, and the norm is taken of that: in one
pass where the group's memory is shared, in plain torch elsewhere. The provider defines what a fused finalize has to
return.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..collectives import sum_in_rank_order
from ..forward import ForwardBatch
from ..kernels import all_reduce_add_norm as kernel
from ..kernels.add_norm.naive import accumulator
from ..kernels.moe_finalize import moe_finalize
from ..kernels.norms import formula_of
from ..kernels.quantization import of_kernels
from ..kernels.reduce_scatter_add_norm import reduce_scatter_add_norm
from ..layout import SumGroup
from ..ops import differentiable, summed
from ..output import HandoffOutput
from ..parallel import BoundSum
from ..residual import Norm
from ..residual.add_norm import Format, normalize_sum, rms_norm, wide
from . import Fused, FusedAttentionInput, FusedMlpInput

if TYPE_CHECKING:
    from ..construction import StagePlan

MAX_ROWS = 2048
"""Beyond so many rows the sum is bound by bandwidth, and fusing buys nothing."""


def takes(rows: int) -> bool:
    return 0 < rows <= MAX_ROWS


def all_reduce_add_norm(
    term: Tensor, over: BoundSum | None, residual: Tensor, norm: Norm, form: Format | None = None
) -> Fused | None:
    """Sum `term` over the group, add the residual, normalize: one rounding. Declines what it cannot do as
    stated, and what is too large to gain.
    """
    if not takes(term.shape[0]):
        return None
    return fused_sum(term, over, residual, norm, form)


def fused_sum(
    term: Tensor, over: BoundSum | None, residual: Tensor, norm: Norm, form: Format | None = None
) -> Fused | None:
    """`all_reduce_add_norm` for any number of rows."""
    if over is None or not term.shape[0] or not _one_dtype(term, residual, norm):
        return None
    key = f"sum over {over.name.value}"
    formula = formula_of(norm, accumulator(term.dtype))
    if formula is None and hasattr(norm, "of_sum"):
        return _of_unrounded_sum(term, over, residual, norm, key, form)
    known = of_kernels(form, formula)
    normed, total = kernel.all_reduce_add_norm(term, over.group, residual, formula, key, known)
    return _read(normed, total, norm, form), total


def fused_scatter(
    term: Tensor,
    over: BoundSum,
    counts: Sequence[int],
    residual: Tensor,
    norm: Norm,
    form: Format | None = None,
) -> Fused | None:
    """`fused_sum` of which each rank keeps its own rows. Declines a norm that no kernel knows and that takes the sum
    before it is rounded.
    """
    formula = formula_of(norm, accumulator(term.dtype))
    takes_unrounded = formula is None and hasattr(norm, "of_sum")
    if not term.shape[0] or not _one_dtype(term, residual, norm) or takes_unrounded:
        return None
    key = f"sum over {over.name.value}, scattered"
    known = of_kernels(form, formula)
    normed, total = reduce_scatter_add_norm(term, counts, over.group, residual, formula, key, known)
    return _read(normed, total, norm, form), total


def _read(normed: Tensor | tuple[Tensor, ...] | None, total: Tensor, norm: Norm, form: Format | None) -> Any:
    """The input, of what a kernel has made of it."""
    if isinstance(normed, tuple):
        return normed
    if normed is None:
        normed = norm(total) if total.shape[0] else total.clone()
    return normed if form is None else form(normed)


def _one_dtype(term: Tensor, residual: Tensor, norm: Norm) -> bool:
    weight = getattr(norm, "weight", None)
    return term.dtype == residual.dtype and (weight is None or weight.dtype == term.dtype)


def _of_unrounded_sum(
    term: Tensor, over: BoundSum, residual: Tensor, norm: Norm, key: str, form: Format | None
) -> Fused:
    """For a norm that no kernel knows and that takes the sum before it is rounded."""

    def run(term: Tensor) -> Tensor:
        terms = over.group.all_gather(term, key=key, op="all_reduce")
        return sum_in_rank_order([wide(one) for one in terms])

    total = differentiable(term, run, lambda gradient: gradient.to(term.dtype)) + wide(residual)
    rounded = total.to(residual.dtype)
    return normalize_sum(norm, total, rounded, form), rounded


def built_in_attention_input(sum_group: SumGroup) -> FusedAttentionInput:
    return FusedAttentionInput(sum_group, all_reduce_add_norm, leaves_residual=takes, formats=True)


def built_in_ffn_input() -> FusedMlpInput:
    return FusedMlpInput(SumGroup.ATTN_TP, all_reduce_add_norm, leaves_residual=takes, formats=True)


class SumHandoff(HandoffOutput):
    """A MoE output whose combination of expert outputs and whose sum are both still to do.

    Attributes:
        expert_outputs: `[rows, choices, hidden]`: this rank's term of each routed output; zeros for other
            ranks' experts.
        weights: `[rows, choices]`: the router's, with its scaling factor applied.
        over: The group that holds the other terms.
    """

    def __init__(self, expert_outputs: Tensor, weights: Tensor, over: BoundSum) -> None:
        self.expert_outputs = expert_outputs
        self.weights = weights
        self.over = over

    def combined(self) -> Tensor:
        """This rank's term of the output."""
        return moe_finalize(self.expert_outputs, self.weights)

    def complete(self) -> Tensor:
        term = self.combined()
        return summed(term, self.over.group, "finalize") if term.shape[0] else term


@dataclass
class ReferenceProvider:
    """A provider in plain torch.

    Attributes:
        eps: The epsilon of the norms it fuses.
        finalizes: MoEs may leave their finalize.
        terminal_finalize: Also in the last layer, whose final norm is then given this object as
            `handoff_norm`.
        ran: What its candidates did, in order.
    """

    eps: float = 1e-6
    finalizes: bool = False
    terminal_finalize: bool = False
    ran: list[str] = field(default_factory=list)

    def attention_input(self, plan: StagePlan) -> Sequence[FusedAttentionInput]:
        def run(value: Any, over: BoundSum | None, residual: Tensor, norm: Norm) -> Fused | None:
            return self._note("attention all-reduce", all_reduce_add_norm(value, over, residual, norm))

        def run_handoff(value: Any, over: BoundSum | None, residual: Tensor, norm: Norm) -> Fused | None:
            return self._note("attention finalize", self._finalize_add_norm(value, residual, norm))

        return [
            FusedAttentionInput(SumGroup.MOE_OUTPUT, run_handoff, accepts_handoff=True),
            FusedAttentionInput(SumGroup.MOE_OUTPUT, run),
            FusedAttentionInput(SumGroup.TP, run),
        ]

    def ffn_input(self, plan: StagePlan) -> Sequence[FusedMlpInput]:
        def run(value: Any, over: BoundSum | None, residual: Tensor, norm: Norm) -> Fused | None:
            return self._note("ffn all-reduce", all_reduce_add_norm(value, over, residual, norm))

        return [FusedMlpInput(SumGroup.ATTN_TP, run)]

    def can_defer_finalize(self, plan: StagePlan, forward_batch: ForwardBatch) -> bool:
        return self.finalizes and forward_batch.rows.tokens > 0

    def can_defer_all_reduce(self, plan: StagePlan, forward_batch: ForwardBatch) -> bool:
        return takes(forward_batch.rows.tokens)

    def finalize(self, handoff: HandoffOutput, residual: Tensor, gamma: Tensor) -> Fused:
        """Complete a terminal handoff, add the residual, and normalize with gain `gamma`."""
        total = wide(handoff.complete()) + wide(residual)
        self.ran.append("terminal finalize")
        return rms_norm(total, gamma, self.eps, residual.dtype), total.to(residual.dtype)

    def _finalize_add_norm(self, value: HandoffOutput, residual: Tensor, norm: Norm) -> Fused | None:
        if not isinstance(value, SumHandoff):
            return None
        total = wide(value.complete()) + wide(residual)
        rounded = total.to(residual.dtype)
        return normalize_sum(norm, total, rounded), rounded

    def _note(self, what: str, made: Fused | None) -> Fused | None:
        if made is not None:
            self.ran.append(what)
        return made

"""The fusion of sum, residual and norm in one pass, whatever the size, for the groups that have kernels for it: one
that gives every rank all rows, and one that gives each its own.

Which groups these are is what providers of this kind differ in (`shared_memory.py`, `triton.py`), and is the same on
all ranks of a group; sums of others are declined. Sums are taken in rank order in any case, so there is no other mode
for determinism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..collectives import Group
from ..forward import ForwardBatch
from ..kernels import all_reduce_add_norm as kernel
from ..kernels.norms import Kind, NormFormula
from ..layout import SumGroup
from ..output import HandoffOutput
from ..parallel import BoundSum
from ..residual import Norm
from ..residual.add_norm import Format
from . import Fused, FusedAttentionInput, FusedMlpInput
from .all_reduce import SumHandoff, fused_scatter, fused_sum

if TYPE_CHECKING:
    from ..construction import StagePlan


def _any(rows: int) -> bool:
    return True


@dataclass(frozen=True)
class OnePassFusion:
    """A provider for the stages of a model; one object for all of them, on every rank with the same options.

    Attributes:
        serves: Whether a group's sums are for it.
        finalizes: MoEs may leave their finalize, as :class:`boundary.fusions.all_reduce.SumHandoff`.
        terminal_finalize: Also in the last layer, whose final norm is then given this object as `handoff_norm`.
        eps: The epsilon of that norm.
        formats: The input is made in the read's format in the same pass.
    """

    serves: Callable[[Group], bool]
    finalizes: bool = True
    terminal_finalize: bool = False
    eps: float = 1e-6
    formats: bool = True

    def attention_input(self, plan: StagePlan) -> Sequence[FusedAttentionInput]:
        return [
            FusedAttentionInput(
                SumGroup.MOE_OUTPUT, self._finalize, accepts_handoff=True, leaves_residual=_any, formats=self.formats
            ),
            FusedAttentionInput(SumGroup.MOE_OUTPUT, self._sum, **self._of_terms),
            FusedAttentionInput(SumGroup.TP, self._sum, **self._of_terms),
        ]

    def ffn_input(self, plan: StagePlan) -> Sequence[FusedMlpInput]:
        return [FusedMlpInput(SumGroup.ATTN_TP, self._sum, **self._of_terms)]

    @property
    def _of_terms(self) -> dict[str, Any]:
        """What all candidates that take terms of sums have in common."""
        return {"leaves_residual": _any, "scatter": self._scatter, "formats": self.formats}

    def can_defer_finalize(self, plan: StagePlan, forward_batch: ForwardBatch) -> bool:
        return self.finalizes and forward_batch.rows.tokens > 0

    def can_defer_all_reduce(self, plan: StagePlan, forward_batch: ForwardBatch) -> bool:
        return forward_batch.rows.tokens > 0

    def finalize(self, handoff: HandoffOutput, residual: Tensor, gamma: Tensor) -> Fused:
        """Complete a terminal handoff, add the residual, and normalize with gain `gamma`.

        Raises:
            TypeError: The handoff is not one that this provider lets a MoE leave.
        """
        if not isinstance(handoff, SumHandoff):
            raise TypeError(f"this provider finalizes SumHandoff, not {type(handoff).__name__}")
        formula = NormFormula(Kind.RMS, gamma, self.eps)
        normed, total = kernel.all_reduce_add_norm(
            handoff.combined(), handoff.over.group, residual, formula, "terminal finalize"
        )
        assert normed is not None
        return normed, total

    def _sum(
        self, term: Any, over: BoundSum | None, residual: Tensor, norm: Norm, form: Format | None = None
    ) -> Fused | None:
        if over is None or not self.serves(over.group):
            return None
        return fused_sum(term, over, residual, norm, form)

    def _scatter(
        self,
        term: Tensor,
        over: BoundSum,
        counts: Sequence[int],
        residual: Tensor,
        norm: Norm,
        form: Format | None = None,
    ) -> Fused | None:
        return fused_scatter(term, over, counts, residual, norm, form) if self.serves(over.group) else None

    def _finalize(
        self, value: Any, over: BoundSum | None, residual: Tensor, norm: Norm, form: Format | None = None
    ) -> Fused | None:
        if not isinstance(value, SumHandoff) or not self.serves(value.over.group):
            return None
        if value.expert_outputs.dtype != residual.dtype or not value.expert_outputs.shape[0]:
            return None
        return fused_sum(value.combined(), value.over, residual, norm, form)

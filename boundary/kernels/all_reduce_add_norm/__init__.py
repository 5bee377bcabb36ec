"""Complete a sum over ranks, add the residual and normalize, in one pass over the rows.

A path answers None to what it does not take, from facts that all ranks share and before anything is sent, and the
dispatcher asks them in order: Triton's kernel where a group has a workspace, shared memory, and torch's operations.
"""

from __future__ import annotations

from torch import Tensor

from ...collectives import Group, NcclGroup
from ...symmetric_memory import workspace_of
from ..norms import NormFormula
from ..quantization import Quantization
from ..summing import Results, in_steps, summing
from . import cpu, naive


def all_reduce_add_norm(
    term: Tensor,
    group: Group,
    residual: Tensor,
    formula: NormFormula | None,
    key: str,
    form: Quantization | None = None,
) -> Results:
    """`(norm(sum + residual), sum + residual)`, the sum over the ranks' terms: the same bits on every rank.

    Every rank of the group calls it. The sum is accumulated in rank order and then the residual added, without a
    rounding in between.

    Args:
        term: `[rows, hidden]`: this rank's term, of one shape and dtype on all ranks. Not written to.
        group: The ranks.
        residual: `[rows, hidden]`, the same on all ranks. Not written to.
        formula: The norm, over the last dim; None for none.
        key: What this exchange is; equal on all ranks.
        form: What the norm is quantized to, before it is rounded; None for the residual's dtype.

    Returns:
        New tensors of the residual's dtype; None for the normalized rows without a formula, and what `form` makes of
        them with one.

    Raises:
        CollectiveError: The ranks did not meet.
    """

    def run() -> Results:
        workspace = workspace_of(group) if isinstance(group, NcclGroup) else None
        if workspace is not None and form is None:
            from . import triton

            made = triton.all_reduce_add_norm(term, workspace, residual, formula)
            if made is not None:
                group.note("all_reduce", 2 * (group.size - 1) * term.nbytes, key)
                return made
        made = cpu.sum_add_norm(term, group, residual, formula, None, key, form)
        return in_steps(naive.terms_of(term, group, key), residual, formula, form) if made is None else made

    return summing(term, residual, formula, form, run, lambda gradient: gradient)


__all__ = ["all_reduce_add_norm"]

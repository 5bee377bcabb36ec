"""Complete a sum over ranks of which each keeps its own rows, add the residual and normalize, in one pass.

The paths are those of `all_reduce_add_norm`, asked in the same order; the one through shared memory is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...collectives import Group, NcclGroup
from ...gradients import once
from ...symmetric_memory import workspace_of
from ..all_reduce_add_norm.cpu import sum_add_norm
from ..norms import NormFormula
from ..quantization import Quantization
from ..summing import Results, in_steps, summing
from . import naive


def reduce_scatter_add_norm(
    term: Tensor,
    counts: Sequence[int],
    group: Group,
    residual: Tensor,
    formula: NormFormula | None,
    key: str,
    form: Quantization | None = None,
) -> Results:
    """`(norm(sum + residual), sum + residual)` on this rank's rows of the sum over the ranks' terms.

    Every rank of the group calls it, those that keep no rows too. The gradient of a term is gathered, so every rank of
    the group runs the backward pass too.

    Args:
        term: `[rows, hidden]`: this rank's term, of one shape and dtype on all ranks. Not written to.
        counts: How many rows of the sum each rank keeps, in rank order; they make up the term's.
        group: The ranks.
        residual: `[counts[rank], hidden]`: this rank's rows of it. Not written to.
        formula: The norm, over the last dim; None for none.
        key: What this exchange is; equal on all ranks.
        form: What the norm is quantized to, before it is rounded; None for the residual's dtype.

    Returns:
        As `all_reduce_add_norm`.

    Raises:
        CollectiveError: The ranks did not meet.
        ValueError: The counts do not make up the term's rows, or the residual has other rows than this rank keeps.
    """
    if len(counts) != group.size or sum(counts) != term.shape[0] or min(counts) < 0:
        raise ValueError(f"{list(counts)} rows for {group.size} ranks do not make up the term's {term.shape[0]}")
    if residual.shape != (counts[group.rank], *term.shape[1:]):
        raise ValueError(
            f"this rank keeps {counts[group.rank]} rows of {tuple(term.shape)}, and the residual has shape "
            f"{tuple(residual.shape)}"
        )

    def run() -> Results:
        workspace = workspace_of(group) if isinstance(group, NcclGroup) else None
        if workspace is not None and form is None:
            from . import triton

            made = triton.reduce_scatter_add_norm(term, counts, workspace, residual, formula)
            if made is not None:
                own = made[1].nbytes
                group.note("reduce_scatter", term.nbytes - own + (group.size - 1) * own, key)
                return made
        made = sum_add_norm(term, group, residual, formula, counts, key, form)
        return in_steps(naive.terms_of(term, counts, group, key), residual, formula, form) if made is None else made

    def gathered(gradient: Tensor) -> Tensor:
        shapes = [(count, *gradient.shape[1:]) for count in counts]
        return once(torch.cat(group.all_gather(gradient, shapes, f"gradient of {key}")), gradient)

    return summing(term, residual, formula, form, run, gathered)


__all__ = ["reduce_scatter_add_norm"]

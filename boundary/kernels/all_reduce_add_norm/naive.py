"""The definition of `all_reduce_add_norm`."""

from __future__ import annotations

from torch import Tensor

from ...collectives import Group, sum_in_rank_order
from ..add_norm.naive import norm, wide
from ..norms import NormFormula


def all_reduce_add_norm(
    term: Tensor, group: Group, residual: Tensor, formula: NormFormula | None, key: str
) -> tuple[Tensor | None, Tensor]:
    """See the dispatcher."""
    return finish(terms_of(term, group, key), residual, formula)


def terms_of(term: Tensor, group: Group, key: str) -> list[Tensor]:
    """Every rank's term."""
    return group.all_gather(term, key=key, op="all_reduce")


def added(terms: list[Tensor], residual: Tensor) -> Tensor:
    """The terms in their order, then the residual, in the dtype that they are accumulated in."""
    return sum_in_rank_order([wide(term) for term in terms]) + wide(residual)


def finish(terms: list[Tensor], residual: Tensor, formula: NormFormula | None) -> tuple[Tensor | None, Tensor]:
    """Add the terms and the residual; normalize the sum."""
    total = added(terms, residual)
    normed = None if formula is None else norm(total, formula, residual.dtype)
    return normed, total.to(residual.dtype)

"""The definition of `reduce_scatter_add_norm`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...collectives import Group
from ..all_reduce_add_norm.naive import finish
from ..norms import NormFormula


def reduce_scatter_add_norm(
    term: Tensor, counts: Sequence[int], group: Group, residual: Tensor, formula: NormFormula | None, key: str
) -> tuple[Tensor | None, Tensor]:
    """See the dispatcher."""
    return finish(terms_of(term, counts, group, key), residual, formula)


def terms_of(term: Tensor, counts: Sequence[int], group: Group, key: str) -> list[Tensor]:
    """This rank's rows of every rank's term."""
    parts = term.detach().split(list(counts))
    return group.all_to_all(parts, [parts[group.rank].shape] * group.size, key, op="reduce_scatter")

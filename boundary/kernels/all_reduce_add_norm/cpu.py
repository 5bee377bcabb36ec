"""`all_reduce_add_norm` through shared memory: the terms are added up as they are read, and the sum is normalized
while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...collectives import Group, SharedGroup
from ..add_norm_quantize.cpu import quantized_rows, takes_scale
from ..host import code_of, host_norm
from ..norms import NormFormula
from ..quantization import Quantization
from ..summing import Results


def sum_add_norm(
    term: Tensor,
    group: Group,
    residual: Tensor,
    formula: NormFormula | None,
    counts: Sequence[int] | None,
    key: str,
    form: Quantization | None = None,
) -> Results | None:
    """The sum onto the residual, of all rows or with `counts` of this rank's; None for what is not for the library.

    Whether it is, is decided before anything is sent, from what the ranks of one model have alike: dtypes, widths, and
    that its tensors are ordinary ones.
    """
    if not isinstance(group, SharedGroup):
        return None
    code, shape = code_of(term, residual), term.shape
    if code is None or len(shape) != 2:
        return None
    if residual.shape != (shape if counts is None else (counts[group.rank], shape[1])):
        return None
    norm = None if formula is None else host_norm(formula, shape[1])
    if formula is not None and norm is None:
        return None
    if form is None or norm is None:
        return group.sum_add_norm(term, residual, norm, counts, key)
    if not takes_scale(form.scale):
        return None
    data, scale, quantized = quantized_rows(residual, form.dtype, form.scale)
    made = group.sum_add_norm(term, residual, norm, counts, key, quantized)
    return None if made is None else (form.tuple_of(data, scale), made[1])

"""Norms as the kernels know them: a kind and numbers, read off the module that a model has."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor, nn


class Kind(IntEnum):
    RMS = 1
    LAYER = 2


@dataclass(eq=False, slots=True)  # not frozen: that takes four times as long to make, and every norm makes one
class NormFormula:
    """`(x - center) / sqrt(mean((x - center)^2) + eps) * gain + bias` over the last dim.

    Attributes:
        kind: `RMS` says that the center is 0, `LAYER` that it is the mean.
        weight, bias: `[hidden]`, or None for no factor and no addend.
        offset: What is added to the weight to make the gain: one, for norms whose weight is an offset from one.
        eps: Is added to the mean of squares.
    """

    kind: Kind
    weight: Tensor | None
    eps: float
    bias: Tensor | None = None
    offset: float = 0.0


def formula_of(norm: object, dtype: torch.dtype) -> NormFormula | None:
    """The formula of `norm` for sums accumulated in `dtype`; None where it is not known.

    Known are norms whose own class states it (a method `formula`; a subclass may be another norm), and torch's own
    over one dim.
    """
    stated = vars(type(norm)).get("formula")
    if stated is not None:
        return stated(norm)
    if type(norm) is nn.RMSNorm and len(norm.normalized_shape) == 1:
        return NormFormula(Kind.RMS, norm.weight, torch.finfo(dtype).eps if norm.eps is None else norm.eps)
    if type(norm) is nn.LayerNorm and len(norm.normalized_shape) == 1:
        return NormFormula(Kind.LAYER, norm.weight, norm.eps, norm.bias)
    return None

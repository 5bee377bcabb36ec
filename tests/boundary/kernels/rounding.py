"""What it is to be rounded once: half a place of the dtype off what is right, and what float32's own sums are off."""

from __future__ import annotations

import torch
from torch import Tensor


def rounded_once(found: Tensor, right: Tensor) -> bool:
    """Whether `found` may be `right`, which is in float64, computed in float32 and rounded once to its own dtype.

    Two results that are may still differ by a place of the dtype, because what is right may be between them.
    """
    assert found.shape == right.shape and right.dtype == torch.float64
    bound = right.abs() * torch.finfo(found.dtype).eps / 2 + 1e-5 * (right.abs() + 1)
    return bool(((found.double() - right).abs() <= bound).all())

"""The definition of `silu_mul`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..add_norm.naive import wide


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See the dispatcher."""
    return (torch.nn.functional.silu(wide(gate)) * wide(up)).to(gate.dtype)


def gradients(gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """What `gate` and `up` get of the result's `gradient`, each rounded once."""
    x, y, given = wide(gate), wide(up), wide(gradient)
    share = torch.sigmoid(x)
    back = given * y * (share * (1 + x * (1 - share)))
    return back.to(gate.dtype), (given * (x * share)).to(up.dtype)

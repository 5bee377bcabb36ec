"""The definition of `mix`; `collapse` is defined by `moe_finalize`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..add_norm.naive import wide


def mix(streams: Tensor, comb: Tensor, post: Tensor, contribution: Tensor) -> Tensor:
    """See the dispatcher."""
    values, count = wide(streams), streams.shape[1]
    # Stream by stream, so that a row's bits do not depend on how many rows there are.
    mixed = [
        sum(comb[:, i, j, None] * values[:, j] for j in range(count)) + post[:, i, None] * wide(contribution)
        for i in range(count)
    ]
    return torch.stack(mixed, dim=1).to(streams.dtype)

"""Weights by name, equal on every rank and in the reference, and functions that stay on a grid of binary
fractions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from zlib import crc32

import torch
from torch import Tensor, nn

DTYPE = torch.float64


@dataclass(frozen=True)
class Config:
    """Sizes of a tiny decoder."""

    hidden: int = 8
    heads: int = 4
    inner: int = 16
    experts: int = 4
    choices: int = 2
    streams: int = 2
    vocabulary: int = 32


@cache
def weight(name: str, *shape: int) -> Tensor:
    """The whole weight called `name`: quarters between -1/2 and 1/2, drawn from the name."""
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    return torch.randint(-2, 3, shape, generator=generator).to(DTYPE) / 4


def on_grid(value: Tensor) -> Tensor:
    """`value` rounded to sixteenths, within -4 and 4."""
    return torch.round(value * 16).clamp(-64, 64) / 16


class GridNorm(nn.Module):
    """An RMS norm whose result lies on the grid."""

    def __init__(self, name: str, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + weight(name, hidden), requires_grad=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        mean_square = hidden_states.square().mean(-1, keepdim=True)
        return on_grid(hidden_states * torch.rsqrt(mean_square + 1e-6) * self.weight)

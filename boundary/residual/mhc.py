"""Manifold-constrained hyper-connections: a residual of several streams, mixed by coefficients that it
computes.

The residual of a token is `streams` vectors side by side, `[rows, streams * hidden]`. A read computes three
sets of coefficients from it: `pre` weighs the streams into the stage's input, and `post` and `comb` stay with
the residual until the stage's output `y` is there; then stream `i` becomes `sum_j comb[i, j] * stream_j +
post[i] * y`. `comb` is doubly stochastic (Sinkhorn), which keeps the streams' total.

The update multiplies, so it runs only on a complete sum and on the residual's own rows. Its coefficients
belong to rows: they are moved with the residual, used once and gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.mhc import collapse, mix
from ..layout import Layout
from . import LayerResidual, Norm, StageUpdate
from .add_norm import wide

Coefficients = tuple[Tensor, Tensor, Tensor]
"""`pre [rows, streams]`, `post [rows, streams]`, `comb [rows, streams, streams]`."""


class HyperConnection(nn.Module):
    """The learned coefficients of one stage.

    Attributes:
        streams: How many vectors a token's residual has.
        project: From the normalized residual to the `streams * (2 + streams)` raw coefficients.
        iterations: Sinkhorn rounds that make `comb` doubly stochastic.
    """

    def __init__(self, hidden_size: int, streams: int, iterations: int = 8, eps: float = 1e-6) -> None:
        super().__init__()
        self.streams = streams
        self.iterations = iterations
        self.eps = eps
        self.project = nn.Linear(hidden_size * streams, streams * (2 + streams))

    def forward(self, residual: Tensor) -> Coefficients:
        n = self.streams
        values = wide(residual)
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps)
        raw = nn.functional.linear(values, wide(self.project.weight), wide(self.project.bias))
        pre, post, comb = raw.split([n, n, n * n], dim=-1)
        return (
            torch.sigmoid(pre),
            2 * torch.sigmoid(post),
            sinkhorn(comb.unflatten(-1, (n, n)), self.iterations),
        )


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """Positive matrices (the last two dims) whose rows and columns each sum to one, nearly."""
    matrix = torch.exp(logits - logits.amax((-2, -1), keepdim=True))
    for _ in range(iterations):
        matrix = matrix / matrix.sum(-1, keepdim=True)
        matrix = matrix / matrix.sum(-2, keepdim=True)
    return matrix


@dataclass(frozen=True)
class MhcUpdate:
    """Put a stage's output back into the streams, by the coefficients that its own read left.

    Attributes:
        streams: How many vectors a token's residual has.
        at_producer: Run at the exit: what an FFN does, because its coefficients do not outlive its layer.
    """

    streams: int
    at_producer: bool = False
    plain: bool = False
    outlives_producer: bool = False

    def apply(self, contribution: Tensor, residual: LayerResidual) -> LayerResidual:
        """Raises RuntimeError where no read has left coefficients since the last update."""
        if not residual.coefficients:
            raise RuntimeError("a hyper-connection update needs the coefficients of its own stage's read")
        post, comb = residual.coefficients
        streams = residual.tensor.unflatten(-1, (self.streams, -1))
        updated = mix(streams, comb, post, contribution).flatten(1)
        return LayerResidual(updated, residual.rows)


@dataclass(frozen=True)
class MhcRead:
    """Mix the streams into a stage's input, and leave the coefficients for its update.

    Attributes:
        coefficients: A :class:`HyperConnection`, or any function from the residual to its coefficients.
        streams: How many vectors a token's residual has.
        hidden_size: The width of one stream.
    """

    coefficients: Callable[[Tensor], Coefficients]
    streams: int
    hidden_size: int
    keeps_residual: bool = False
    before_gather: bool = True

    def enter(self, hidden_states: Tensor, rows: Layout) -> LayerResidual:
        """A hidden state starts every stream; one that is as wide as the streams already is taken as they
        are.
        """
        width = hidden_states.shape[-1]
        if width == self.hidden_size:
            return LayerResidual(hidden_states.repeat(1, self.streams), rows)
        if width == self.hidden_size * self.streams:
            return LayerResidual(hidden_states, rows)
        raise ValueError(
            f"the stack was entered with rows of width {width}: neither the hidden size {self.hidden_size} "
            f"nor {self.streams} streams of it"
        )

    def read(self, residual: LayerResidual, norm: Norm) -> tuple[Any, LayerResidual]:
        value = residual.tensor
        pre, post, comb = self.coefficients(value)
        mixed = collapse(value.unflatten(-1, (self.streams, -1)), pre)
        normalized = norm(mixed) if mixed.shape[0] else mixed
        return normalized, LayerResidual(value, residual.rows, (post, comb))

    def update_and_read(
        self,
        update: StageUpdate,
        contribution: Tensor,
        residual: LayerResidual,
        norm: Norm,
        post_residual_addition: Tensor | None = None,
    ) -> tuple[Any, LayerResidual]:
        if post_residual_addition is not None:
            raise ValueError("post_residual_addition needs a plain residual update")
        return self.read(update.apply(contribution, residual), norm)

    def contract(self, residual: LayerResidual) -> Tensor:
        """The mean of the streams."""
        streams = wide(residual.tensor).unflatten(-1, (self.streams, -1))
        return streams.mean(-2).to(residual.tensor.dtype)

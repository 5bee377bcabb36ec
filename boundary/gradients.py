"""Gradients that ranks exchange: autograd does not see how they were made."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor


def once(made: Tensor, gradient: Tensor) -> Tensor:
    """`made`, a gradient that was made of `gradient`. Where autograd did not record how, whoever differentiates it
    once more is told so, instead of getting nothing.
    """
    if torch.is_grad_enabled() and gradient.requires_grad and not made.requires_grad:
        return _Once.apply(made, gradient)  # type: ignore[return-value]
    return made


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, gradient: Tensor) -> Tensor:
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise NotImplementedError("a gradient that ranks have exchanged cannot be differentiated once more")


__all__ = ["once"]

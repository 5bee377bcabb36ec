"""Attention blocks: HuggingFace's return the output and the attention weights, which a serving engine never has."""

from __future__ import annotations

from typing import Any

import torch

from .base import Native, TensorView


class AttentionView(TensorView):
    """A block with projections and the attention itself in it."""

    keyword = "hidden_states"
    described_output = "(output, None)"

    def dressed(self, tensor: Any) -> Any:
        return tensor, None

    def undressed(self, value: Any) -> torch.Tensor:
        return value[0]

    def call(self, native: Native, args: tuple, kwargs: dict[str, Any]) -> Any:
        return super(TensorView, self).call(native, args, kwargs)

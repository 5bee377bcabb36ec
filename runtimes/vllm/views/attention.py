"""Attention blocks: HuggingFace's return the output and the attention weights, which a serving engine never has."""

from __future__ import annotations

from typing import Any

import torch

from interleave.fragments import Lacking

from .base import OF_A_STEP, TensorView


class AttentionView(TensorView):
    """A block with projections and the attention itself in it."""

    keyword = "hidden_states"
    uncallable = OF_A_STEP
    described_output = "(output, None)"

    #: Whether HuggingFace's block gives its weights, the way transformers loads the model by default.
    gives_weights = False

    def dressed(self, tensor: Any) -> Any:
        if not self.gives_weights or not isinstance(tensor, torch.Tensor):
            return tensor, None
        return tensor, Lacking.at(f"{self.path}.output[1]", "the engine's attention never holds its weights")

    def undressed(self, value: Any) -> torch.Tensor:
        return value[0]

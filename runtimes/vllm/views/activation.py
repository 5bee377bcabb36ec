"""Activations: vLLM's take gate and up together, and multiply; HuggingFace's take the gate alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul

from interleave.fragments import Missing, Placed, Refused

from ..interleaver import EngineInterleaver
from .base import Native, TensorView


def function(module: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What the activation does to the gate; None if its product is not `activation(gate) * up`."""
    if type(module) is SiluAndMul:
        return F.silu
    if type(module) is GeluAndMul:
        return lambda gate: F.gelu(gate, approximate=module.approximate)
    return None


class ActivationView(TensorView):
    """The activation between `gate_proj` and `up_proj`."""

    def __init__(
        self, path: str, module: torch.nn.Module, interleaver: EngineInterleaver, gate: Placed | Refused, width: int
    ) -> None:
        self.function = function(module)
        output = gate if self.function is not None else Missing("vLLM multiplies within the activation")
        super().__init__(path, module, interleaver, input=gate, output=output, width=width)
        if isinstance(output, Refused):
            self.uncallable = output.reason

    def forward(self, native: Native, args: tuple, kwargs: dict[str, Any]) -> Any:
        fused = self.taken(args, kwargs)
        half = fused.shape[-1] // 2
        gate, up = fused[..., :half], fused[..., half:]
        left = self.enter(gate)
        if left is not gate:
            gate.copy_(left)
        skipped = self.gate()
        activated: torch.Tensor | None = None
        if (skipped is not None or self.wanted("output")) and self.function is not None:
            before = self.function(gate)
            original = before.clone()
            after = self.leave(before if skipped is None else self.over(before, skipped))
            if self.interleaver.recording or after is not before or not torch.equal(after, original):
                activated = after
        else:
            self.leave(gate)
        self.done(gate)
        return native(fused) if activated is None else activated * up

    def call(self, native: Native, args: tuple, kwargs: dict[str, Any]) -> Any:
        assert self.function is not None
        return self.function(self.undressed_input((args, kwargs)))

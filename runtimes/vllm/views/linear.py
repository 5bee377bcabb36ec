"""Linears: vLLM's give `(output, bias)`, and fuse what HuggingFace keeps apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interleave.fragments import Missing, Placed, Refused

from ..fragments import COPY, node
from ..interleaver import EngineInterleaver
from ..parallel import Part, sides
from .base import Native, TensorView


class LinearView(TensorView):
    """A linear of vLLM's, parallel or not."""

    def __init__(self, path: str, module: torch.nn.Module, interleaver: EngineInterleaver) -> None:
        found = sides(module, path)
        input: Placed | Refused = COPY if found is None else node(found.input, found.axis)
        output: Placed | Refused = COPY if found is None else node(found.output, found.axis)
        if getattr(module, "skip_bias_add", False) and getattr(module, "bias", None) is not None:
            output = Missing("vLLM adds this linear's bias later, in another operation")
        super().__init__(path, module, interleaver, input=input, output=output, width=getattr(module, "output_size", None))

    def picked(self, output: Any) -> torch.Tensor:
        return output[0] if isinstance(output, tuple) else output

    def packed(self, output: Any, tensor: torch.Tensor) -> Any:
        return (tensor, *output[1:]) if isinstance(output, tuple) else tensor


class PartView(TensorView):
    """One of HuggingFace's linears inside a fused one: the same input, some columns of the output."""

    def __init__(
        self, path: str, module: torch.nn.Module, interleaver: EngineInterleaver, fused: FusedLinearView, part: Part
    ) -> None:
        layout = part.layout
        width = part.width if layout is None else layout.size or part.width
        super().__init__(path, module, interleaver, input=fused.input, output=node(layout), width=width)
        self.fused = fused
        self.columns = slice(part.start, part.start + part.width)

    def play(self, native: Native, tensor: torch.Tensor, output: torch.Tensor, later: slice) -> None:
        """Visit this linear, given the fused one's input and output; edits land in `output`.

        Args:
            later: The columns of the linears that come after it. They share the input, so what is written into it
                is for them too; a replacement is not.
        """
        left = self.enter(tensor)
        if self.changed:
            own = self.columns if left is not tensor else slice(self.columns.start, later.stop)
            output[:, own].copy_(self.fused.picked(native(left))[:, own])
        skipped = self.gate()
        own = output[:, self.columns]
        after = self.leave(own if skipped is None else self.over(own, skipped))
        if after is not own:
            own.copy_(after)

    def call(self, native: Native, args: tuple, kwargs: dict[str, Any]) -> Any:
        def part(*args: Any, **kwargs: Any) -> torch.Tensor:
            return self.fused.picked(self.fused.module(*args, **kwargs))[:, self.columns]

        return super().call(part, args, kwargs)


class FusedLinearView(LinearView):
    """A linear that computes several of HuggingFace's at once.

    HuggingFace runs other modules between them (a norm between `q_proj` and `k_proj`, the activation between
    `gate_proj` and `up_proj`), so a part that comes after such a module is visited when that has been.

    Attributes:
        scenes: Parts to visit, with the name of the sibling after which it is their turn; None: at once.
    """

    def __init__(self, path: str, module: torch.nn.Module, interleaver: EngineInterleaver) -> None:
        super().__init__(path, module, interleaver)
        self.scenes: list[tuple[str | None, list[PartView]]] = []
        self._coming: list[tuple[str | None, list[PartView]]] = []
        self._running: tuple[Native, torch.Tensor, torch.Tensor] | None = None

    def arrange(self, parts: Sequence[PartView], order: Sequence[str], siblings: dict[str, TensorView]) -> None:
        """Set the scenes from HuggingFace's order of the names in the parent's forward."""
        named = {part.path.rpartition(".")[2]: part for part in parts}
        after: str | None = None
        scene: list[PartView] = []
        for name in [*order, *(name for name in named if name not in order)]:
            if name in named:
                scene.append(named.pop(name))
            elif name in siblings and scene and named:
                self.scenes.append((after, scene))
                after, scene = name, []
                siblings[name].followed_by = self
        self.scenes.append((after, scene))

    def forward(self, native: Native, args: tuple, kwargs: dict[str, Any]) -> Any:
        tensor = self.taken(args, kwargs)
        left = self.enter(tensor)
        skipped = self.gate()
        output = native(left)
        before = self.picked(output)
        after = self.leave(before if skipped is None else self.over(before, skipped))
        self._coming = list(self.scenes)
        self._running = (native, left, after)
        self.resume(None)
        return output if after is before else self.packed(output, after)

    def resume(self, sibling: str | None) -> None:
        """Visit the parts whose turn it is now."""
        if self._running is None or not self._coming or self._coming[0][0] != sibling:
            return
        native, tensor, output = self._running
        _, scene = self._coming.pop(0)
        for part in scene:
            part.play(native, tensor, output, slice(part.columns.stop, output.shape[-1]))
        if not self._coming:
            self._running = None

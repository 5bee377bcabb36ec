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
        super().__init__(
            path, module, interleaver, input=input, output=output, width=getattr(module, "output_size", None)
        )
        if isinstance(output, Placed) and getattr(module, "return_bias", False):
            self.fragments.tree[f"{path}.raw.output"] = (output, None)
        #: Linears of the same input that HuggingFace runs before this one; vLLM may run them after it.
        self.earlier: list[LinearView] = []
        self._ran = -1
        self._ahead: tuple[torch.Tensor, Any] | None = None

    def forward(self, native: Native, args: tuple, kwargs: dict[str, Any]) -> Any:
        tensor = self.taken(args, kwargs)
        if self._ahead is not None:
            known, output = self._ahead
            self._ahead = None
            if known is tensor:
                return output
        for linear in self.earlier:
            linear.run_ahead(tensor)
        self._ran = self.interleaver.step
        return super().forward(native, args, kwargs)

    def run_ahead(self, tensor: torch.Tensor) -> None:
        """Run and visit this linear now, before vLLM does; what it gives is kept for vLLM."""
        if self._ran != self.interleaver.step and self.native is not None:
            self._ahead = (tensor, self.forward(self.native, (tensor,), {}))

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

    def play(self, native: Native, tensor: torch.Tensor, output: torch.Tensor, later: slice) -> torch.Tensor:
        """Visit this linear, given the fused one's input and output; edits land in `output`.

        Args:
            later: The columns of the linears that come after it.

        Returns:
            Their input: what was written into the input is for them too, a replacement is not.
        """
        left = self.enter(tensor)
        after_me = tensor
        if self.changed:
            assert self.shared is not None
            after_me = self.shared
            output[:, later].copy_(self.fused.picked(native(after_me))[:, later])
            output[:, self.columns].copy_(self.fused.picked(native(left))[:, self.columns])
        skipped = self.gate()
        own = output[:, self.columns]
        after = self.leave(own if skipped is None else self.over(own, skipped))
        if after is not own:
            own.copy_(after)
        return after_me

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
        turn: str | None = None
        last: str | None = None
        scene: list[PartView] = []
        for name in [*order, *(name for name in named if name not in order)]:
            if name in named:
                if last is not None:
                    self.scenes.append((turn, scene))
                    siblings[last].followed_by = self
                    turn, last, scene = last, None, []
                scene.append(named[name])
            elif name in siblings and scene:
                last = name
        self.scenes.append((turn, scene))

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

        def play(tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
            for part in scene:
                tensor = part.play(native, tensor, output, slice(part.columns.stop, output.shape[-1]))
            return tensor

        if self.interleaver.recording:
            locations = [part.location(side) for part in scene for side in ("input", "output")]
            self._running = (native, self.recorded(locations, play, tensor, output), output)
        else:
            self._running = (native, play(tensor, output), output)
        if not self._coming:
            self._running = None

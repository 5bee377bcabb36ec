"""Decoder layers: vLLM's carry the residual stream as two parts, of which HuggingFace's is the sum."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch

from boundary.collectives import outside_inference
from interleave.layout import same_bits

from .base import OF_A_STEP, Native, TensorView

#: Bytes of a tensor that stay in a core's cache next to two more.
CACHED = 1 << 17


class LayerView(TensorView):
    """One layer of the stack: the stream before and after it."""

    uncallable = OF_A_STEP

    def __init__(self, path: str, module: torch.nn.Module, interleaver: Any, width: int) -> None:
        super().__init__(path, module, interleaver, width=width)
        parameters = list(inspect.signature(type(module).forward).parameters)[1:]
        self._residual = parameters.index("residual") if "residual" in parameters else None

    def forward(self, native: Native, args: tuple, kwargs: dict[str, Any]) -> Any:
        tensor = self.taken(args, kwargs)
        residual = self.residual(args, kwargs)
        if residual is None:
            left = self.enter(tensor)
            if left is not tensor:
                args, kwargs = self.put(args, kwargs, left)
        else:
            self.pair("input", tensor, residual)
        skipped = self.gate()
        with self.interleaver.skipping(self.path, skipped):
            output = native(*args, **kwargs)
        self.fragments.late.clear()
        if not isinstance(output, tuple):
            before = output if skipped is None else self.over(output, skipped)
            return self.leave(before)
        part, residual = output[:2]
        if skipped is not None:
            stream = part + residual
            self.settle_stream(stream, self.over(stream, skipped), part, residual)
        self.pair("output", part, residual)
        return output

    def residual(self, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The second part of the stream as it comes in; the first layer gets none."""
        if self._residual is None:
            return None
        return kwargs.get("residual", args[self._residual] if len(args) > self._residual else None)

    def pair(self, side: str, part: torch.Tensor, residual: torch.Tensor) -> None:
        """The visit of the stream on one side of the layer; edits land in its two parts."""
        if self.interleaver.recording:
            self.interleaver.record([self.location(side)], partial(self.pair, side), part, residual)
            return
        if not self.wanted(side):
            self.pass_by(side)
            return
        dress, undress = (
            (self.dressed_input, self.undressed_input) if side == "input" else (self.dressed, self.undressed)
        )
        read = self.location(side) in self.interleaver.parked
        with outside_inference():
            stream = part + residual
        self.fragments.made = dress(self.batched(stream))
        try:
            left = self.unbatched(undress(self.visit(side, self.fragments.made)))
        finally:
            self.fragments.made = None
        if not read:
            return
        self.fragments.late.watch(self.location(side), stream)
        if self.interleaver.swapped:
            self.fragments.late.watch(self.location(side), left)
        if not is_sum(left, part, residual):
            self.settle_stream(part + residual, left, part, residual)


def is_sum(stream: torch.Tensor, part: torch.Tensor, residual: torch.Tensor) -> bool:
    """Whether the stream has the bits of the sum of its parts, which may have padding behind its rows: nobody wrote
    into it, not even where no version counter tells. The rows are added up again a few at a time, which stay in the
    cache.
    """
    total = stream.shape[0]
    rows = max(1, CACHED // max(1, stream[:1].nbytes)) if stream.is_cpu else max(1, total)
    return all(map(same_sum, stream.split(rows), part[:total].split(rows), residual[:total].split(rows)))


def same_sum(stream: torch.Tensor, part: torch.Tensor, residual: torch.Tensor) -> bool:
    return same_bits(stream, part + residual)

"""Norms: vLLM's take the two parts of the residual stream, add them, and give the norm and the sum."""

from __future__ import annotations

from typing import Any

import torch

from interleave.fragments import Placed, Refused

from ..fragments import COPY
from ..interleaver import EngineInterleaver
from .base import Native, TensorView


class NormView(TensorView):
    """A norm over the last dim: of the stream, of a part of it, or of each head.

    Args:
        heads: How many heads all ranks have, if it is one over the heads of queries or keys.
    """

    def __init__(
        self,
        path: str,
        module: torch.nn.Module,
        interleaver: EngineInterleaver,
        *,
        input: Placed | Refused = COPY,
        output: Placed | Refused = COPY,
        heads: int | None = None,
    ) -> None:
        self.heads = heads
        weight = getattr(module, "weight", None)
        width = weight.shape[-1] if isinstance(weight, torch.Tensor) and isinstance(output, Placed) else None
        super().__init__(path, module, interleaver, input=input, output=output, width=width)
        #: The stream before the visit of the input, and the rows whose norm is taken of something else.
        self._replaced: tuple[torch.Tensor, list[slice]] | None = None

    def forward(self, native: Native, args: tuple, kwargs: dict[str, Any]) -> Any:
        residual = kwargs.get("residual", args[1] if len(args) > 1 else None)
        if residual is None:
            return super().forward(native, args, kwargs)
        tensor = self.taken(args, kwargs)
        self.add(tensor, residual)
        skipped = self.gate()
        output, residual = native(tensor, residual)
        self.restore(residual)
        after = self.leave(output if skipped is None else self.over(output, skipped))
        self.done(after)
        return after, residual

    def add(self, tensor: torch.Tensor, residual: torch.Tensor) -> None:
        """The visit of the input, the stream, of which vLLM holds the two parts; edits land in these."""
        self._replaced = None
        if self.interleaver.recording:
            self.interleaver.record([self.location("input")], self.add, tensor, residual)
            return
        if not self.wanted("input"):
            self.pass_by("input")
            return
        stream = tensor + residual
        value = self.dressed_input(self.batched(stream))
        left = self.visit("input", value)
        if left is not value:
            self.settle_stream(stream, self.unbatched(self.undressed_input(left)), tensor, residual)
            self._replaced = stream, [span.rows for span in self.interleaver.swapped]

    def restore(self, residual: torch.Tensor) -> None:
        """Let the stream go on as it was where a block replaced what the norm is taken of."""
        if self.interleaver.recording:
            self.interleaver.record([self.location("input")], self.restore, residual)
        elif self._replaced is not None:
            stream, swapped = self._replaced
            for rows in swapped:
                residual[rows].copy_(stream[rows])

    def skip_shape(self, rows: int) -> tuple[int, ...] | None:
        if self.width is None:
            return None
        return (1, rows, self.width) if self.heads is None else (1, rows, self.heads, self.width)

"""The token embedding."""

from __future__ import annotations

from typing import Any

import torch

from interleave.fragments import Placed, Refused

from ..fragments import COPY, node
from ..interleaver import EngineInterleaver
from ..parallel import sides
from .base import Native, TensorView


class EmbeddingView(TensorView):
    """Ids in, rows out."""

    def __init__(self, path: str, module: torch.nn.Module, interleaver: EngineInterleaver) -> None:
        found = sides(module, path)
        output: Placed | Refused = COPY if found is None else node(found.output, found.axis)
        super().__init__(path, module, interleaver, output=output, width=getattr(module, "embedding_dim", None))

    def batched(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = super().batched(tensor)
        return tensor if tensor.is_floating_point() else tensor.long()

    def settle(self, tensor: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        # The ids are the engine's own, and it keeps them: an edit of them is for this module.
        return super().settle(tensor if tensor.is_floating_point() else tensor.clone(), left)

    def call(self, native: Native, args: tuple, kwargs: dict[str, Any]) -> Any:
        ids = self.undressed_input((args, kwargs))
        rows = native(ids.reshape(-1))
        key = self.interleaver.call_key(self.path)
        return self.fragments.whole(self._locations["output"], rows.reshape(*ids.shape, -1), key)[0]

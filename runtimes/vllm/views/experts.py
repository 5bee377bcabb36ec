"""Mixtures of experts: HuggingFace's router and experts are two modules on flat rows, vLLM's experts do the routing."""

# vLLM's and nnsight's classes meet here at run time, and their declared types do not say so.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch

from interleave.errors import Unserved
from interleave.fragments import Lacking, Missing
from interleave.layout import same_bits

from ..fragments import COPY, node
from ..interleaver import EngineInterleaver
from ..parallel import sides
from .base import Native, TensorView
from .linear import LinearView

ROUTING = "vLLM routes inside its experts, by the router's logits: change the router's input, or the block's output"


class FlatView(TensorView):
    """A module that HuggingFace calls on rows without a batch axis."""

    def batched(self, tensor: torch.Tensor) -> torch.Tensor:
        total = self.interleaver.batcher.total
        return tensor if tensor.shape[0] == total else tensor[:total]

    def unbatched(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def skip_shape(self, rows: int) -> tuple[int, ...] | None:
        return None if self.width is None else (rows, self.width)


class ExpertsView(FlatView):
    """The routed experts: their sum, weighted and over all ranks."""

    def __init__(self, path: str, module: torch.nn.Module, interleaver: EngineInterleaver, width: int) -> None:
        found = sides(module, path)
        output = COPY if found is None else node(found.output, found.axis)
        if getattr(module, "_shared_experts", None) is not None:
            output = Missing("vLLM's experts add the shared experts' output to it; the block's output is their sum")
        super().__init__(path, module, interleaver, input=Missing(ROUTING), output=output, width=width)

    def dressed_input(self, tensor: Any) -> tuple[tuple, dict[str, Any]]:
        routing = Lacking.at(self._locations["input"], ROUTING)
        return (tensor, routing, routing), {}


class RouterView(LinearView, FlatView):
    """The router: logits, and the weights and numbers of the experts that they choose.

    Args:
        experts: vLLM's experts, which choose.
        flat: Whether HuggingFace gives the router flat rows.
    """

    described_output = "(logits, weights, indices)"
    unskippable = ROUTING

    def __init__(
        self,
        path: str,
        module: torch.nn.Module,
        interleaver: EngineInterleaver,
        experts: torch.nn.Module,
        flat: bool,
    ) -> None:
        super().__init__(path, module, interleaver)
        self.experts = experts
        self.flat = flat
        self.place("output", (COPY, COPY, COPY))
        self.fragments.read_only[self._locations["output"]] = ROUTING
        self._rows: torch.Tensor | None = None

    def batched(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = super().batched(tensor)
        return flat if self.flat else flat[None]

    def unbatched(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.flat else tensor[0]

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        self._rows = super().enter(tensor)
        return self._rows

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._rows is not None
        return self.look(tensor, self._rows)

    def look(self, tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The visit of the output, made of the rows that came in and of the logits."""
        if self.interleaver.recording:
            self.interleaver.record([self.location("output")], self.look, tensor, rows)
            return tensor
        if not self.wanted("output"):
            self.pass_by("output")
            return tensor
        total = self.interleaver.batcher.total
        value = self.routing(rows[:total], tensor[:total])
        left = self.visit("output", value)
        if left is not value:
            for mediator, span in self.interleaver.spans():
                if any(not same_bits(a[span.rows], b[span.rows]) for a, b in zip(value, left, strict=True)):
                    error = Unserved(f"`{self._locations['output']}` can be read and not changed: {ROUTING}")
                    self.interleaver.fail(mediator, error)
        return tensor

    def routing(self, rows: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What HuggingFace's router returns: the logits, and the chosen experts, the one with most weight first."""
        weights, indices = self.experts.router.select_experts(
            hidden_states=rows, router_logits=logits.clone(), topk_indices_dtype=torch.int64
        )
        weights, order = weights.sort(dim=-1, descending=True, stable=True)
        return logits, weights.to(logits.dtype), indices.gather(-1, order)

    def call(self, native: Native, args: tuple, kwargs: dict[str, Any]) -> Any:
        rows = self.undressed_input((args, kwargs))
        rows = rows.reshape(-1, rows.shape[-1])
        key = self.interleaver.call_key(self.path)
        return self.fragments.whole(self._locations["output"], self.routing(rows, self.picked(native(rows))), key)[0]


class TupleBlockView(TensorView):
    """A block of experts that HuggingFace lets return the router's weights beside the rows."""

    described_output = "(output, router weights)"

    def dressed(self, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor, None
        return tensor, Lacking.at(f"{self.path}.output[1]", "the router's weights are the router's `output[1]`")

    def undressed(self, value: Any) -> torch.Tensor:
        return value[0]

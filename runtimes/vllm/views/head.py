"""The ends of the model: ids that come in, hidden states that leave the stack, logits.

HuggingFace's head computes logits for every position; an engine computes those it samples from. When a block waits for
the head, the logits of its request are computed for all positions (in a generation: for the last, as
HuggingFace does), and an edit of the last position's reaches the sampler.
"""

# vLLM's and nnsight's classes meet here at run time, and their declared types do not say so.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from interleave import nnsight_port as port
from interleave.fragments import Lacking

from ..fragments import COPY
from ..interleaver import EngineInterleaver
from ..rows import Span
from .base import OF_A_STEP, Native, TensorView

PAGED = "the engine keeps keys and values of all requests in pages of its own"


class StackView(TensorView):
    """The model without its head: ids in, the hidden states of all rows out."""

    keyword = "input_ids"
    unskippable = "the engine's other requests need it"
    uncallable = OF_A_STEP
    described_output = "a BaseModelOutputWithPast"

    def __init__(
        self, path: str, module: torch.nn.Module, interleaver: EngineInterleaver, head: HeadView | None
    ) -> None:
        self.head = head
        super().__init__(path, module, interleaver)
        self.place("output", {"last_hidden_state": COPY})

    def dressed(self, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        cache: Any = Lacking.at(f"{self.path}.output.past_key_values", PAGED)
        return BaseModelOutputWithPast(last_hidden_state=tensor, past_key_values=cache)  # type: ignore[arg-type]

    def undressed(self, value: Any) -> torch.Tensor:
        return value["last_hidden_state"]

    def batched(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = super().batched(tensor)
        return tensor if tensor.is_floating_point() else tensor.long()

    def picked(self, output: Any) -> torch.Tensor:
        return output[0] if isinstance(output, tuple) else output

    def packed(self, output: Any, tensor: torch.Tensor) -> Any:
        return (tensor, *output[1:]) if isinstance(output, tuple) else tensor

    def settle(self, tensor: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        return super().settle(tensor if tensor.is_floating_point() else tensor.clone(), left)

    def enter(self, tensor: torch.Tensor | None) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None if tensor is None else super().enter(tensor)

    def leave(self, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor  # a pipeline stage that is not the last
        if self.interleaver.recording:
            # The head computes behind the graph, with what the graph leaves.
            heads = [] if self.head is None else [self.head.location("input"), self.head.location("output")]
            return self.recorded([self.location("output"), *heads], self.leave, tensor)
        left = super().leave(tensor)
        if self.head is not None:
            self.head.states = left
        return left


class RootView(StackView):
    """The whole model: its input. Its output is the head's matter."""

    def leave(self, tensor: Any) -> Any:
        return tensor

    def gate(self) -> None:
        self.pass_by("skip")


class HeadView(TensorView):
    """The head. It stands around vLLM's logits processor, which is what uses `lm_head`.

    Args:
        path, module: Of `lm_head`.
        processor: vLLM's logits processor.
        root: The path of the whole model, whose output holds the logits.

    Attributes:
        states: The hidden states that left the stack in this step.
    """

    def __init__(
        self,
        path: str,
        module: torch.nn.Module,
        interleaver: EngineInterleaver,
        processor: torch.nn.Module,
        root: str,
    ) -> None:
        super().__init__(path, module, interleaver, width=getattr(processor, "org_vocab_size", None))
        self.processor = processor
        self.result = f"{root}.output"
        self.fragments.tree[self.result] = self.fragments.tree["result"] = {"logits": COPY}
        self.states: torch.Tensor | None = None

    def forward(self, native: Native, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Around the processor's forward, whose logits are those that are sampled from."""
        logits = native(*args, **kwargs)
        blocks = self.waiting()
        states, self.states = self.states, None
        if not blocks or states is None or not isinstance(logits, torch.Tensor):
            for location in (*self._locations.values(), self.result, "result"):
                self.interleaver.pass_by(location)
            return logits
        return self.act(blocks, states, logits)

    def waiting(self) -> list[port.Mediator]:
        """The blocks that want something of the head's."""
        locations = {*self._locations.values(), self.result, "result"}
        keeping = {id(mediator) for place in locations for mediator, *_ in self.interleaver.observers.get(place, ())}
        return [
            mediator
            for mediator, _ in self.interleaver.spans()
            if id(mediator) in keeping or (mediator.pending is not None and mediator.pending.provider in locations)
            if every_position(mediator) or mediator.pending is None or mediator.pending.provider != "result"
        ]

    def act(self, blocks: list[port.Mediator], states: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """HuggingFace's head, for the rows of the requests that want it."""
        batcher, others = self.interleaver.batcher, self.interleaver.mediators
        spans = [mediator.batch_group for mediator in blocks]
        edited = [getattr(mediator, "edited", False) for mediator in blocks]
        rows = [
            states[span.rows] if every_position(m) else states[span.rows][-1:]
            for m, span in zip(blocks, spans, strict=True)
        ]
        whole, total = batcher.total, sum(map(len, rows))
        starts = [sum(map(len, rows[:index])) for index in range(len(rows))]
        try:
            batcher.total = total
            self.interleaver.mediators = blocks
            for mediator, start, own in zip(blocks, starts, rows, strict=True):
                mediator.batch_group, mediator.edited = Span(start, len(own), total), False  # type: ignore[attr-defined]
            found = self.head(torch.cat(rows))
            changed = [getattr(mediator, "edited", False) for mediator in blocks]
        finally:
            batcher.total = whole
            self.interleaver.mediators = others
            for mediator, span, before in zip(blocks, spans, edited, strict=True):
                mediator.batch_group = span
                mediator.edited = before or mediator.edited  # type: ignore[attr-defined]
            self.interleaver._reindex_parked()
        if any(changed):
            logits = logits.clone()
            for mediator, start, own, is_changed in zip(blocks, starts, rows, changed, strict=True):
                if is_changed:
                    logits[mediator.row].copy_(found[start + len(own) - 1])  # type: ignore[attr-defined]
        return logits

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The visits of the head and of the model's output, for these rows."""
        left = self.enter(hidden)
        skipped = self.gate()
        before = self.logits(left)
        self.fragments.late.clear()
        after = self.leave(before if skipped is None else self.over(before, skipped))
        after = self.scaled(after)
        for location in (self.result, "result"):
            if not self.interleaver.wanted(location):
                self.interleaver.pass_by(location)
                continue
            cache: Any = Lacking.at(f"{location}.past_key_values", PAGED)
            value = CausalLMOutputWithPast(logits=after[None], past_key_values=cache)  # type: ignore[arg-type]
            left = self.interleaver.handle(location, value)
            after = after if left is value else self.settle(after, left["logits"][0])
        return after

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What HuggingFace's head gives: whole, and without the vocabulary's padding. Every rank calls."""
        bias = getattr(self.module, "bias", None)
        found = self.processor._get_logits(hidden, self.module, bias)
        assert found is not None
        return found

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """What the model does to the head's output: a cap, a scale."""
        processor = self.processor
        if processor.soft_cap is None and processor.scale == 1.0:
            return logits
        before, processor.logits_as_input = processor.logits_as_input, True
        try:
            return type(processor).forward(processor, self.module, logits.clone())
        finally:
            processor.logits_as_input = before

    def call(self, native: Native, args: tuple, kwargs: dict[str, Any]) -> Any:
        hidden = self.undressed_input((args, kwargs))
        found = self.logits(hidden.reshape(-1, hidden.shape[-1]))
        return found.reshape(*hidden.shape[:-1], -1)


def every_position(mediator: port.Mediator) -> bool:
    """Whether the block's request asked for the logits of all its positions."""
    return getattr(mediator, "every_position", True)

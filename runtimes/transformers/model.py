"""A transformers model under a trace, on one process or as one rank of several."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TextGenerationPipeline

from interleave import nnsight_port as port
from interleave.envoy import DecoderLayerEnvoy
from interleave.errors import InterleaveError
from interleave.interleaver import Interleaver
from interleave.model import Model


class TransformersModel(Model, port.TransformersModel):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The envoy tree over a transformers model: `trace`, `generate`, `session`, `edit`, `layout`.

    Args:
        module: A loaded causal language model, sharded or not; on meta for a driver.
        tokenizer: What turns prompts into ids; None where only ids are given.
        interleaver: With the fragments that learn what is sharded as the tree is built.
        dispatched: False for a tree without weights.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        tokenizer: PreTrainedTokenizerBase | None,
        interleaver: Interleaver,
        dispatched: bool = True,
    ) -> None:
        # nnsight's own constructors load the model and look at its sharding; here both are done already, so the
        # tree is built by the common base, around the pipeline that prepares inputs.
        self.task = "text-generation"
        self.repo_id = getattr(module, "name_or_path", None)
        self.revision = None
        self.peft = None
        self.processor = self.image_processor = self.feature_extractor = None
        self.tokenizer = tokenizer
        self.pipeline = TextGenerationPipeline(model=module, tokenizer=tokenizer, device=module.device)
        self._configure_tokenizer()
        self.dispatched = dispatched
        self.args, self.kwargs = (), {}
        port.Envoy.__init__(self, module, interleaver=interleaver, envoys=layer_envoys(module))
        self._add_generator()

    def _batch(self, invokes: list, fn: Any) -> tuple:
        """nnsight's preparation of the inputs, once it is clear that text can be read.

        Raises:
            InterleaveError: A prompt is text and the checkpoint has no tokenizer.
        """
        if self.tokenizer is None and any(isinstance(part, str) for inputs, _ in invokes for part in _parts(inputs)):
            raise InterleaveError("this checkpoint has no tokenizer, so a prompt cannot be text: give token ids")
        return super()._batch(invokes, fn)

    def _add_generator(self) -> None:
        self.generator = port.GeneratorEnvoy(
            port.Generator(), path=f"{self.path}.generator", interleaver=self.interleaver, parent=self
        )
        self._children.append(self.generator)


def _parts(inputs: Any) -> list:
    return [part for item in inputs for part in (item if isinstance(item, list | tuple) else [item])]


def layer_envoys(module: torch.nn.Module) -> dict[Any, type[port.Envoy]]:
    """The classes of the entries of the model's stack of layers, which have a residual stream to name."""
    config = getattr(module, "config", None)
    depth = getattr(config.get_text_config() if config is not None else None, "num_hidden_layers", None)
    return {
        type(layer): DecoderLayerEnvoy
        for stack in module.modules()
        if isinstance(stack, torch.nn.ModuleList) and len(stack) == depth
        for layer in stack
    }

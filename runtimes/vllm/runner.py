"""The model runner: vLLM's own, whichever the platform has, with blocks in its steps."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from vllm.distributed.parallel_state import get_tp_group
from vllm.tokenizers import cached_tokenizer_from_config

from interleave.agreement import Agreement

from . import nnsight_port as vllm_port
from .fragments import EngineFragments
from .interleaver import EngineInterleaver
from .model import EngineModel
from .payload import Tree
from .requests import Requests
from .rows import RowBatcher

#: In vLLM's `additional_config`: what the client wants of the workers.
CONFIG = "interleave"


class Runner(vllm_port.NNsightGPUModelRunner):
    """Mixed over the platform's runner by `mixed`."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        # nnsight's own builds a tree of its own kind; vLLM's is the one after it.
        super(vllm_port.NNsightGPUModelRunner, self).load_model(*args, **kwargs)
        wanted = self.vllm_config.additional_config.get(CONFIG, {})
        taps = self.vllm_config.additional_config.get("nnsight_taps", ())
        fragments = EngineFragments()
        agreement = None
        tp = get_tp_group()
        if tp.world_size > 1:
            agreement = Agreement(wanted.get("limit", 60.0), driven=True, device_type=self.device.type)
            fragments.groups["tp"] = agreement.group(tp.ranks)
        tokenizer = None
        if not self.model_config.skip_tokenizer_init:
            tokenizer = cached_tokenizer_from_config(self.model_config)
        interleaver = EngineInterleaver(taps, fragments=fragments, agreement=agreement)
        self.nnsight_model = EngineModel.over(
            self.get_model(), tokenizer, interleaver, self.model_config, wanted.get("unchecked", False)
        )
        interleaver.batcher = RowBatcher()
        self.nnsight_requests = Requests(Tree(self.nnsight_model))
        self.nnsight_persistent_objects = self.nnsight_model._remoteable_persistent_objects()

    def interleave_layouts(self) -> dict[str, Any]:
        """The layouts of all locations, for the client."""
        fragments = self.nnsight_model.interleaver.fragments
        return {"tree": fragments.tree, "between": fragments.between}

    def interleave_rebuild(self, generation: int) -> None:
        """Make the groups of our own exchanges anew, after ranks that did not agree."""
        agreement = self.nnsight_model.interleaver.agreement
        if agreement is not None:
            agreement.rebuild(generation)


_mixed: dict[type, type] = {}


def mixed(runner: type) -> type:
    """`Runner` over the platform's own class of runner."""
    if runner not in _mixed:
        _mixed[runner] = type(f"Interleaving{runner.__name__}", (Runner, runner), {})
    return _mixed[runner]


__all__ = ["CONFIG", "Runner", "dist", "mixed"]

"""The model runner: vLLM's own, whichever the platform has, with blocks in its steps."""

# vLLM's and nnsight's classes meet here at run time, and their declared types do not say so.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from typing import Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.tokenizers import cached_tokenizer_from_config

from interleave.agreement import Agreement

from . import nnsight_port as vllm_port
from .arenas import Arenas
from .ending import ending
from .fragments import EngineFragments
from .interleaver import EngineInterleaver
from .model import EngineModel
from .payload import Tree
from .requests import Requests
from .rows import RowBatcher
from .stages import Stages

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
        interleaver.device = self.device
        self.nnsight_model = EngineModel.over(
            self.get_model(),
            tokenizer,
            interleaver,
            self.model_config,
            wanted.get("unchecked", False),
            wanted.get("names", ()),
        )
        interleaver.batcher = RowBatcher()
        arenas = Arenas(*wanted["arenas"]) if "arenas" in wanted else None
        reached = arenas is not None and arenas.reachable()
        self.nnsight_requests = Requests(Tree(self.nnsight_model), arenas if reached else None)
        self.nnsight_persistent_objects = self.nnsight_model._remoteable_persistent_objects()

        if get_pp_group().world_size > 1:
            interleaver.stages = Stages(get_pp_group(), wanted.get("limit", 60.0))
            interleaver.stages.meet(self.nnsight_model)

    @property
    def stages(self) -> Stages | None:
        """This rank's place in the pipeline, if there is one."""
        return self.nnsight_model.interleaver.stages

    def _update_states(self, scheduler_output: Any) -> None:
        if self.stages is not None:
            self.stages.open()
        super()._update_states(scheduler_output)
        if self.stages is not None:
            self.stages.begin(self.nnsight_model.interleaver)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        output = super().execute_model(*args, **kwargs)
        if self.stages is not None:
            self.stages.send_on()
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        if self.stages is not None:
            with self.nnsight_model.interleaver.between_steps():
                self.stages.send_back(self.nnsight_model.interleaver)
            self.nnsight_requests.record_saves()
        return ending(output, [request.id for request in self.nnsight_requests.requests.values() if request.ended])

    def collect_nnsight(
        self, request_ids: list[str], finished_request_ids: list[str] | None = None, outputs: dict | None = None
    ) -> bytes | None:
        finished = set(finished_request_ids or ())
        wanted = {*request_ids, *finished}
        requests = [request for request in self.nnsight_requests.requests.values() if request.named(wanted)]
        for request in requests if outputs is None else ():
            request.answers = False  # the client has given it up, and opens no answer
        collected = super().collect_nnsight(request_ids, finished_request_ids, outputs)
        if collected is not None:
            collected = self.nnsight_requests.with_answers(collected, requests, wanted)
        for request in requests:
            if request.named(finished) and request.mediator is not None:
                request.mediator.release()
        return collected

    def _finish_erred(self, sampler_output: Any) -> None:
        """Nothing: the scheduler is told."""

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


__all__ = ["CONFIG", "Runner", "mixed"]

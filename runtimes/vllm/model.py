"""A vLLM engine under a trace: the client's tree, and the same tree in the workers."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from vllm import SamplingParams

from interleave import nnsight_port as port
from interleave.errors import InterleaveError
from interleave.load import LoadRequest
from interleave.model import Model, Tracer

from . import nnsight_port as vllm_port
from .casting import Casting
from .envoys import EngineEnvoy, instrument
from .fragments import EngineFragments
from .interleaver import EngineInterleaver
from .names import Original, graft
from .parallel import refuse_unknown
from .requests import EVERY_POSITION


class EngineTracer(Tracer, vllm_port.VLLMTracer):
    """nnsight's tracer for engines, with our caches and our errors."""


class EngineModel(Model, EngineEnvoy, vllm_port.VLLM):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The envoy tree over a vLLM engine: `trace`, `generate`, `session`, `edit`, `layout`, `close`."""

    _WORKER_CLS = "runtimes.vllm.worker.Worker"

    def __init__(self, request: LoadRequest, options: dict[str, Any]) -> None:
        fragments = EngineFragments()
        fragments.enabled = False
        self.__dict__["_persistent_id"] = "Envoy:model"
        vllm_port.VLLM.__init__(
            self,
            request.source,
            dispatch=True,
            interleaver=EngineInterleaver(fragments=fragments),
            envoys=None,
            **options,
        )
        known = pickle.loads(self._ask("interleave_layouts")[0])
        fragments.tree, fragments.between = known["tree"], known["between"]
        self._failures = 0

    @classmethod
    def over(
        cls, module: torch.nn.Module, tokenizer: Any, interleaver: EngineInterleaver, config: Any
    ) -> EngineModel:
        """The tree in a worker, over the model that vLLM loaded there."""
        refuse_unknown(module)
        original = Original(config.hf_config)
        graft(module, original)
        model = cls.__new__(cls)
        model.__dict__.update(
            _persistent_id="Envoy:model", tokenizer=tokenizer, vllm_entrypoint=None, dispatched=True, args=(), kwargs={}
        )
        port.Envoy.__init__(model, module, interleaver=interleaver)
        interleaver.around = Casting(model, original, config.get_hidden_size()).cast()
        for envoy in model.modules():
            instrument(envoy, interleaver)
        return model

    def _load_meta(self, repo_id: str, **kwargs: Any) -> torch.nn.Module:
        # vLLM's loader empties the accelerator's cache, and raises where there is no accelerator.
        nothing = nullcontext() if torch.accelerator.is_available() else mock.patch("torch.accelerator.empty_cache")
        with nothing:
            model = super()._load_meta(repo_id, **kwargs)
        graft(model, Original(self._hf_config(repo_id, kwargs)))
        return model

    @staticmethod
    def _hf_config(repo_id: str, options: dict[str, Any]) -> Any:
        from vllm.transformers_utils.config import get_config

        return get_config(repo_id, options.get("trust_remote_code", False))

    def _ask(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker."""
        core = getattr(self.vllm_entrypoint, "llm_engine", self.vllm_entrypoint)
        return core.collective_rpc(method, args=args)

    # -- traces ----------------------------------------------------------------------------------------------

    def trace(self, *inputs: Any, tracer_cls: Any = None, backend: Any = None, **options: Any) -> Any:
        """Open a trace: one forward of each prompt. vLLM's sampling parameters are taken too."""
        options = {"max_tokens": 1, **sampling(options)}
        return super().trace(*inputs, tracer_cls=tracer_cls or EngineTracer, backend=backend, **options)

    def _remoteable_persistent_objects(self) -> dict[str, Any]:
        objects = super()._remoteable_persistent_objects()
        return objects | {f"Envoy:{envoy.path}": envoy for envoy in self.modules()}

    def _attach_mediators(self, params: list[SamplingParams], **options: Any) -> list:
        every = options.pop("every_position", True)
        attached = super()._attach_mediators(params, **options)
        for param in params:
            param.extra_args = {**(param.extra_args or {}), EVERY_POSITION: every}
        return attached

    def _collect(self, mediators: list, outputs: list) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        errors = []
        for output in outputs:
            error = getattr(output, "nnsight_error", None)
            if error is not None and "raised" in error:
                output.nnsight_error = None
                if not error["is_control_flow"]:
                    errors.append(error["raised"].rebuild())
        vllm_port.VLLM._collect(mediators, outputs)
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End the engine."""
        engine, self.vllm_entrypoint = self.vllm_entrypoint, None
        if engine is not None:
            core = getattr(engine, "llm_engine", engine)
            core.engine_core.shutdown()


def sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters of vLLM's, out of transformers' names and vLLM's own; greedy unless told otherwise."""
    options = dict(options)
    if "max_new_tokens" in options:
        options["max_tokens"] = options.pop("max_new_tokens")
    sample = options.pop("do_sample", None)
    if sample is False:
        options["temperature"] = 0.0
    elif sample is None:
        options.setdefault("temperature", 0.0)
    return options


__all__ = ["EngineModel", "InterleaveError"]

"""A vLLM engine under a trace: the client's tree, and the same tree in the workers."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.torch_utils import set_default_torch_dtype

from interleave import nnsight_port as port
from interleave.errors import InterleaveError
from interleave.load import LoadRequest
from interleave.model import Model, Tracer

from . import nnsight_port as vllm_port
from .casting import Casting
from .envoys import EngineEnvoy, instrument
from .fragments import EngineFragments
from .interleaver import EngineInterleaver
from .names import Absent, Original, graft
from .parallel import refuse_unknown
from .payload import Answers, Tree, ship
from .stages import graft_elsewhere
from .requests import BLOCK, EVERY_POSITION, PACKED


#: Arguments of a transformers model's forward that change nothing here: a request is its own tokens, and cached.
OF_FORWARD = ("attention_mask", "use_cache")


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
        if options["pipeline_parallel_size"] > 1:
            # vLLM makes room for what a stage receives in its trial forward, and makes none on CPUs.
            self._ask("execute_dummy_batch")
        known = pickle.loads(self._ask("interleave_layouts")[0])
        fragments.tree, fragments.between = known["tree"], known["between"]
        self._failures = 0

    @classmethod
    def over(
        cls,
        module: torch.nn.Module,
        tokenizer: Any,
        interleaver: EngineInterleaver,
        config: ModelConfig,
        unchecked: bool = False,
        names: Iterable[str] = (),
    ) -> EngineModel:
        """The tree in a worker, over the model that vLLM loaded there. `names`: what other stages of a pipeline hold."""
        refuse_unknown(module)
        original = Original.of(config)
        graft_elsewhere(module, names)
        graft(module, original)
        model = cls.__new__(cls)
        model.__dict__.update(
            _persistent_id="Envoy:model", tokenizer=tokenizer, vllm_entrypoint=None, dispatched=True, args=(), kwargs={}
        )
        port.Envoy.__init__(model, module, interleaver=interleaver)
        casting = Casting(model, original, config.get_hidden_size(), config.architecture, unchecked)
        interleaver.around = casting.cast()
        for envoy in model.modules():
            instrument(envoy, interleaver)
        return model

    def _load(self, repo_id: str, **options: Any) -> torch.nn.Module:
        """Start the engine. Stages of a pipeline are told the names of what they do not hold."""
        self.__dict__["_module"] = module = self._load_meta(repo_id, **options)
        if options.get("pipeline_parallel_size", 1) > 1:
            names = [name for name, found in module.named_modules() if name and not isinstance(found, Absent)]
            options["additional_config"]["interleave"]["names"] = names
        return super()._load(repo_id, **options)

    def _load_meta(self, repo_id: str, **options: Any) -> torch.nn.Module:
        """The tree that blocks are written against: vLLM's modules, unsharded and without weights."""
        options |= {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "enable_expert_parallel": False}
        with self._meta_device():
            config = EngineArgs(model=repo_id, **options).create_engine_config()
            with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
                with torch.device("meta"), self._meta_values():
                    model = initialize_model(config)
        # Kept by vLLM for whoever asks next: the engine, whose rotary embeddings need values.
        _ROPE_DICT.clear()
        kinds = config.model_config
        self._graph_unsafe_prefill = bool(kinds.is_hybrid or kinds.is_attention_free)
        self.tokenizer = None if kinds.skip_tokenizer_init else cached_tokenizer_from_config(kinds)
        graft(model, Original.of(kinds))
        return model

    def _ask(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker."""
        core = getattr(self.vllm_entrypoint, "llm_engine", self.vllm_entrypoint)
        return core.collective_rpc(method, args=args)

    # -- traces ----------------------------------------------------------------------------------------------

    def trace(self, *inputs: Any, tracer_cls: Any = None, backend: Any = None, **options: Any) -> Any:
        """Open a trace: one forward of each prompt.

        Args:
            *inputs: A prompt - text, token ids, a tokenizer's output, one of vLLM's prompts - or a list of prompts:
                the block then runs once for each, and what it saved comes back as lists in their order.
            tracer_cls, backend: nnsight's.
            **options: `input_ids=` instead of a prompt; `max_new_tokens`, `do_sample`; vLLM's sampling parameters.
        """
        prompts = [options.pop(name) for name in ("input_ids",) if name in options]
        for name in OF_FORWARD:
            options.pop(name, None)
        options = {"max_tokens": 1, **sampling(options)}
        return super().trace(*inputs, *prompts, tracer_cls=tracer_cls or EngineTracer, backend=backend, **options)

    def generate(self, *inputs: Any, **options: Any) -> Any:
        """Generate, in a trace when used in a `with`; else vLLM's request outputs. vLLM's sampling parameters.

        In a trace the head gives the logits of the last position, as transformers' `generate` has them computed.
        """
        options = {"max_tokens": 16, "every_position": False, **sampling(options)}
        tracer = self.trace(*inputs, **options)
        try:
            tracer.capture()  # here, because it looks for the block where its caller's caller is
        except port.WithBlockNotFoundError:
            options.pop("every_position")
            self._check_options(options, "lora_request", "edits")
            return self._generate([self._prompt(prompt) for prompt in split(*inputs)], **options)
        return tracer

    def _batch(self, invokes: list[tuple], fn: Any) -> tuple:
        """vLLM's requests: one for each prompt of each invoke."""
        requests, every = [], []
        self._counts = []
        for inputs, options in invokes:
            prompts = split(*inputs)
            options = sampling_of(options)
            self._check_options(options, "every_position", "lora_request", "edits")
            every += [options.pop("every_position", None)] * len(prompts)
            self._counts.append(len(prompts))
            requests += [((prompt,), options) for prompt in prompts]
        (prompts, params, adapters), rest = super()._batch(requests, fn)
        for param, own in zip(params, every, strict=True):
            if own is not None:
                param.every_position = own
        return (prompts, params, adapters), rest

    def _remoteable_persistent_objects(self) -> dict[str, Any]:
        objects = super()._remoteable_persistent_objects()
        return objects | {f"Envoy:{envoy.path}": envoy for envoy in self.modules()}

    def _attach_mediators(self, params: list[SamplingParams], **options: Any) -> list:
        """Put each invoke's block on its request, and the trace's options on the requests that did not set their own.

        Raises:
            InterleaveError: An invoke has no prompt, or an option is none of vLLM's sampling parameters.
        """
        every = options.pop("every_position", True)
        edits = self._edit_names(options.pop("edits", None))
        self._check_options(options)
        blocks = [mediator for mediator in self.interleaver.mediators if mediator.batch_group is not None]
        if any(
            m.batch_group is None and m.node is not None and port.skippable(m.node) for m in self.interleaver.mediators
        ):
            raise InterleaveError("an invoke without a prompt has no request to run in: give it a prompt")
        tree = Tree(self)
        blocks = [block for block, count in zip(blocks, self._counts, strict=True) for _ in range(count)]
        shipped: dict[int, bytes] = {}
        for block, param in zip(blocks, params, strict=True):
            named: frozenset[str] = getattr(param, "nnsight_named", frozenset())
            for name, value in options.items():
                if name not in named:
                    setattr(param, name, value)
            wanted = getattr(param, "nnsight_edits", None) if "edits" in named else edits
            self._check_edit_names(wanted)
            if id(block) not in shipped:
                shipped[id(block)], block.sent = ship(block, tree)  # type: ignore[attr-defined]
            own = getattr(param, "every_position", every)
            param.extra_args = {**(param.extra_args or {}), BLOCK: shipped[id(block)], EVERY_POSITION: own}
            if wanted is not None:
                param.extra_args["nnsight_edits"] = wanted
            param.skip_reading_prefix_cache = True
        return blocks

    @staticmethod
    def _check_options(options: dict[str, Any], *ours: str) -> None:
        unknown = [name for name in options if name not in ours and not hasattr(SamplingParams(), name)]
        if unknown:
            raise InterleaveError(f"{unknown[0]!r} is no option of a trace, and none of vLLM's sampling parameters")

    def _collect(self, mediators: list, outputs: list) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        answers = Answers(Tree(self))
        errors = []
        for mediator, output in zip(mediators, outputs, strict=True):
            self.unpack(answers, mediator, output)
            error = getattr(output, "nnsight_error", None)
            if error is not None and "raised" in error:
                output.nnsight_error = None
                if not error["is_control_flow"]:
                    errors.append(error["raised"].rebuild())
        vllm_port.VLLM._collect(mediators, outputs)
        for error in errors[1:]:
            errors[0].add_note(f"another request's block raised {type(error).__name__}: {error}")
        if errors:
            raise errors[0]

    def unpack(self, answers: Answers, mediator: Any, output: Any) -> None:
        """Open what a finished request brought back, and make its block's changes to the caller's objects."""
        sequences = []
        for packed in getattr(output, "nnsight_sequences", None) or [getattr(output, "nnsight_saves", {})]:
            saves = dict(packed)
            if PACKED in saves:
                found, random = answers.open(saves.pop(PACKED), mediator.sent)
                saves |= found
                if random is not None and len(self.interleaver.mediators) == 1:
                    random.set()
            sequences.append(saves)
        output.nnsight_sequences = sequences
        output.nnsight_saves = sequences[0]
        output.saves = {k: v for k, v in getattr(output, "saves", {}).items() if k != PACKED} | sequences[0]

    def close(self) -> None:
        """End the engine."""
        engine, self.vllm_entrypoint = self.vllm_entrypoint, None
        if engine is not None:
            core = getattr(engine, "llm_engine", engine)
            core.engine_core.shutdown()


def sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters of vLLM's, out of transformers' names and vLLM's own; greedy unless told otherwise."""
    options = sampling_of(options)
    options.setdefault("temperature", 0.0)
    return options


def sampling_of(options: dict[str, Any]) -> dict[str, Any]:
    """The same, with nothing added."""
    options = dict(options)
    if "max_new_tokens" in options:
        options["max_tokens"] = options.pop("max_new_tokens")
    sample = options.pop("do_sample", None)
    if sample is not None:
        options.setdefault("temperature", 1.0 if sample else 0.0)
    return options


def split(*inputs: Any) -> list[Any]:
    """The prompts of one invoke, each as vLLM takes it.

    Raises:
        InterleaveError: There is none, or more than one argument.
    """
    if len(inputs) != 1:
        raise InterleaveError(f"an invoke takes one prompt or one list of prompts, not {len(inputs)} arguments")
    prompt = inputs[0]
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        ids, mask = prompt["input_ids"], prompt.get("attention_mask")
        rows = rows_of(ids)
        masks = [None] * len(rows) if mask is None else rows_of(mask)
        return [
            row if kept is None else [number for number, keep in zip(row, kept, strict=True) if keep]
            for row, kept in zip(rows, masks, strict=True)
        ]
    if isinstance(prompt, torch.Tensor):
        return rows_of(prompt)
    if isinstance(prompt, list | tuple) and prompt and not isinstance(prompt[0], int):
        return [single for item in prompt for single in split(item)]
    return [prompt]


def rows_of(ids: Any) -> list[list[int]]:
    """Token ids as lists, one for each prompt."""
    rows = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
    return rows if rows and isinstance(rows[0], list) else [rows]


__all__ = ["EngineModel", "EngineTracer"]

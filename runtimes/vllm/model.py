"""A vLLM engine under a trace: the client's tree, and the same tree in the workers."""

# vLLM's and nnsight's classes meet here at run time, and their declared types do not say so.
# pyright: reportAttributeAccessIssue=false, reportIncompatibleVariableOverride=false, reportOptionalMemberAccess=false

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Iterable
from types import CodeType
from typing import Any

import cloudpickle
import torch
from vllm import SamplingParams
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.torch_utils import set_default_torch_dtype

from interleave import nnsight_port as port
from interleave.errors import DivergedBlock, InterleaveError
from interleave.layout import Layout
from interleave.load import LoadRequest
from interleave.model import Model, Tracer

from . import declaring, ending
from . import nnsight_port as vllm_port
from .arenas import Arenas
from .casting import Casting
from .edits import EditTracer
from .engine import Engine, reveal
from .envoys import EngineEnvoy, instrument
from .fragments import EngineFragments
from .interleaver import EngineInterleaver
from .names import Absent, Original, graft
from .parallel import refuse_unknown
from .payload import Answers, Tree, ship
from .prompts import apart, check, split
from .requests import BLOCK, EVERY_POSITION, PACKED, STREAM
from .stages import graft_elsewhere
from .streams import Stream

#: Arguments of a transformers model's forward that change nothing here: a request is its own tokens, and cached.
OF_FORWARD = ("attention_mask", "use_cache")
#: Where a module's name ends in a location.
SIDES = ("input", "inputs", "output", "skip", "source")


class EngineTracer(Tracer, vllm_port.VLLMTracer):
    """nnsight's tracer for engines, with our caches and our errors. Traces of several threads run one after another."""

    def execute(self, code: CodeType) -> None:
        with self.envoy.turn:
            super().execute(code)


class EngineModel(Model, EngineEnvoy, vllm_port.VLLM):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The envoy tree over a vLLM engine: `trace`, `generate`, `session`, `edit`, `layout`, `close`."""

    _WORKER_CLS = "runtimes.vllm.worker.Worker"

    def __init__(self, request: LoadRequest, options: dict[str, Any], arenas: Arenas) -> None:
        self.__dict__["arenas"] = arenas
        #: Whose trace runs; a block's sessions and traces are its thread's own.
        self.__dict__["turn"] = threading.RLock()
        weakref.finalize(self, arenas.end)
        fragments = EngineFragments()
        fragments.enabled = False
        ending.use(options)
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
        #: Where blocks lay what they captured; None where not every rank is known to reach it.
        self._outbound: Arenas | None = None
        if not self._async_engine:
            self._learn(self._ask("interleave_layouts"))
            if all(self._ask("interleave_reaches")):
                self._outbound = arenas
        self._generation = 0
        #: The arenas of blocks that run.
        self._laid: list[str] = []
        #: The blocks that the last trace put on its requests.
        self.attached: list = []

    def _learn(self, layouts: list[bytes]) -> None:
        fragments = self.interleaver.fragments
        known = pickle.loads(layouts[0])
        fragments.tree, fragments.between = known["tree"], known["between"]

    def layout(self, path: str) -> str:
        if self._async_engine and not self.interleaver.fragments.tree:
            raise InterleaveError("an async engine tells its layouts to those who wait: `await model.alayout(path)`")
        return super().layout(path)

    def _location(self, path: str) -> str:
        """With vLLM's name of a module that HuggingFace's model calls otherwise."""
        first, _, below = path.partition(".")
        for names in (path, below) if first == self.path else (path,):
            envoy: Any = self
            rest = names.split(".")
            while rest and rest[0] not in SIDES:
                found = envoy[int(rest[0])] if rest[0].isdigit() else getattr(envoy, rest[0], None)
                if not isinstance(found, port.Envoy):
                    break
                envoy, rest = found, rest[1:]
            if envoy is not self and (not rest or rest[0] in SIDES):
                return super()._location(".".join([envoy.path, *rest]))
        return super()._location(path)

    async def alayout(self, path: str) -> str:
        """`layout`, on an async engine."""
        if not self.interleaver.fragments.tree:
            self._learn(await self.vllm_entrypoint.collective_rpc("interleave_layouts"))
        return super().layout(path)

    def declare(self, path: str, layout: Layout, axis: str = "tp") -> None:
        """As on every runtime; `.raw` in a path means vLLM's own value. On an async engine: `await model.adeclare()`.

        Raises:
            InterleaveError: There is no such module, location or axis, or this is an async engine.
            Unserved: The engine does not compute it.
        """
        self._check_open()
        if self._async_engine:
            raise InterleaveError("an async engine is told a layout by those who wait: `await model.adeclare(...)`")
        said = self._understood(path, layout, axis)
        if said is not None:
            self._learn(self._ask("interleave_declare", said))

    async def adeclare(self, path: str, layout: Layout, axis: str = "tp") -> None:
        """`declare`, on an async engine."""
        self._check_open()
        if not self.interleaver.fragments.tree:
            self._learn(await self.vllm_entrypoint.collective_rpc("interleave_layouts"))
        said = self._understood(path, layout, axis)
        if said is not None:
            self._learn(await self.vllm_entrypoint.collective_rpc("interleave_declare", args=(said,)))

    def _understood(self, path: str, layout: Layout, axis: str) -> bytes | None:
        """What the workers are told; None if there are no pieces that it could be about."""
        engine = getattr(self.vllm_entrypoint, "llm_engine", self.vllm_entrypoint)
        axes = ["tp"] if engine.vllm_config.parallel_config.tensor_parallel_size > 1 else []
        said = declaring.understood(self, self.interleaver.fragments.tree, path, layout, axis, axes)
        return cloudpickle.dumps(said) if axes else None

    def next_generation(self) -> int:
        """A number for the ranks' next groups."""
        self._generation += 1
        return self._generation

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
        """The tree in a worker, over the model that vLLM loaded. `names`: what other stages of a pipeline hold."""
        refuse_unknown(module)
        interleaver.vocabulary = config.get_vocab_size()
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

    def _load_sync(self, repo_id: str, **options: Any) -> Any:
        llm = super()._load_sync(repo_id, **options)
        llm.llm_engine.__class__ = Engine
        return llm

    def _load_meta(self, repo_id: str, **options: Any) -> torch.nn.Module:
        """The tree that blocks are written against: vLLM's modules, unsharded and without weights."""
        options |= {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "enable_expert_parallel": False}
        with self._meta_device():
            config = EngineArgs(model=repo_id, **options).create_engine_config()
            dtype = set_default_torch_dtype(config.model_config.dtype)
            with set_current_vllm_config(config), dtype, torch.device("meta"), self._meta_values():
                model = initialize_model(config)
        # Kept by vLLM for whoever asks next: the engine, whose rotary embeddings need values.
        _ROPE_DICT.clear()
        kinds = config.model_config
        self._graph_unsafe_prefill = bool(kinds.is_hybrid or kinds.is_attention_free)
        self.tokenizer = None if kinds.skip_tokenizer_init else cached_tokenizer_from_config(kinds)
        self._vocabulary = kinds.get_vocab_size()
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
        self._check_open()
        if backend is None and self._async_engine:
            backend = Stream(self)
        return super().trace(*inputs, *prompts, tracer_cls=tracer_cls or EngineTracer, backend=backend, **options)

    def generate(self, *inputs: Any, **options: Any) -> Any:
        """Generate, in a trace when used in a `with`; else vLLM's request outputs. vLLM's sampling parameters.

        In a trace the head gives the logits of the last position, as transformers' `generate` has them computed.
        """
        options = {"max_tokens": 16, "every_position": False, **sampling(options)}
        tracer = self.trace(*inputs, **options)
        try:
            with self.turn:  # Python's parser is not for two threads at once
                tracer.capture()  # here, because it looks for the block where its caller's caller is
        except port.WithBlockNotFoundError:
            pass
        else:
            return tracer
        options.pop("every_position")
        self._check_options(options, "lora_request", "edits")
        prompts = self._prompts(*inputs)
        if self._installed_edits:
            prompts = [apart(prompt) for prompt in prompts]
            options["skip_reading_prefix_cache"] = True
        with self.turn:
            return self._generate(prompts, **options)

    def edit(self, *, name: str | None = None, inplace: bool = True, backend: Any = None) -> EditTracer:  # type: ignore[override]
        """Install a block on the engine, for every request from now on, also those of vLLM's own clients.

        What it saves comes back on the requests' outputs, as `output.saves`; what it raised as `output.error`.

        Args:
            name: Requests that pass `edits=[names]` run the edits of these names, and those that have none. Requests
                that pass nothing run all.
            inplace: There is one engine, so nothing but True.
            backend: nnsight's.

        Returns:
            For a `with`: a tracer and the edit, which has `clear`.
        """
        if not inplace:
            raise InterleaveError("an edit is installed on the engine, and there is one: inplace=False cannot be had")
        if name is not None and not isinstance(name, str):
            raise InterleaveError(f"name={name!r}: an edit's name is a string")
        self._check_open()
        return EditTracer(self, backend=backend, name=name)

    def _check_open(self) -> None:
        if self.vllm_entrypoint is None:
            raise InterleaveError("the model is closed, and its engine has ended: load it again")

    def _prompts(self, *inputs: Any) -> list[Any]:
        """vLLM's prompts, of one invoke."""
        prompts = [self._prompt(prompt) for prompt in split(*inputs)]
        for prompt in prompts:
            check(prompt, self._vocabulary)
            if self.tokenizer is None and isinstance(prompt, str):
                raise InterleaveError("a text needs a tokenizer, and the model was loaded without: give token ids")
        return prompts

    def _batch(self, invokes: list[tuple], fn: Any) -> tuple:
        """vLLM's requests: one for each prompt of each invoke."""
        requests, every = [], []
        self._counts = []
        for inputs, options in invokes:
            prompts = self._prompts(*inputs)
            options = sampling_of(options)
            self._check_options(options, "every_position", "lora_request", "edits")
            every += [options.pop("every_position", None)] * len(prompts)
            self._counts.append(len(prompts))
            requests += [((prompt,), options) for prompt in prompts]
        (prompts, params, adapters), rest = super()._batch(requests, fn)
        for param, own in zip(params, every, strict=True):
            if own is not None:
                param.every_position = own
        return ([apart(prompt) for prompt in prompts], params, adapters), rest

    def _remoteable_persistent_objects(self) -> dict[str, Any]:
        objects = super()._remoteable_persistent_objects()
        return objects | {f"Envoy:{envoy.path}": envoy for envoy in self.modules()}

    def _call(self, prompts: list, params: list, lora_requests: list, **options: Any) -> list:
        """Run a trace's requests; vLLM's bars of progress stay away from its output."""
        try:
            blocks = self._attach_mediators(params, **options)
            outputs = self.vllm_entrypoint.generate(
                prompts, sampling_params=params, lora_request=lora_requests, use_tqdm=False
            )
        finally:
            for name in self._laid:
                self.arenas.remove(name)
            self._laid.clear()
        self._collect(blocks, outputs)
        return outputs

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
        stream = 0
        for block, param in zip(blocks, params, strict=True):
            named: frozenset[str] = getattr(param, "nnsight_named", frozenset())
            for name, value in options.items():
                if name not in named:
                    setattr(param, name, value)
            wanted = getattr(param, "nnsight_edits", None) if "edits" in named else edits
            self._check_edit_names(wanted)
            if id(block) not in shipped:
                sent = ship(block, tree, self._outbound)
                shipped[id(block)], block.sent = sent.data, sent.sent  # type: ignore[attr-defined]
                if sent.arena is not None:
                    self._laid.append(sent.arena)
            own = getattr(param, "every_position", every)
            param.extra_args = {
                **(param.extra_args or {}),
                BLOCK: shipped[id(block)],
                EVERY_POSITION: own,
                STREAM: stream,
            }
            stream += param.n
            if wanted is not None:
                param.extra_args["nnsight_edits"] = wanted
            param.skip_reading_prefix_cache = True
        self.attached = blocks
        return blocks

    @staticmethod
    def _check_options(options: dict[str, Any], *ours: str) -> None:
        unknown = [name for name in options if name not in ours and not hasattr(SamplingParams(), name)]
        if unknown:
            raise InterleaveError(f"{unknown[0]!r} is no option of a trace, and none of vLLM's sampling parameters")

    def _collect(self, mediators: list, outputs: list) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        answers = Answers(Tree(self), self.arenas)
        errors = []
        for mediator, output in zip(mediators, outputs, strict=True):
            self.unpack(answers, mediator, output)
            output.nnsight_error = None
            if output.error is not None:
                errors.append(output.error)
        lost = answers.settle(mediators)
        vllm_port.VLLM._collect(mediators, outputs)
        if any(isinstance(error, DivergedBlock) for error in errors):
            self._ask("interleave_rebuild", self.next_generation())
        for error in errors[1:]:
            errors[0].add_note(f"another request's block raised {type(error).__name__}: {error}")
        if lost is not None:
            if not errors:
                raise lost
            errors[0].add_note(str(lost))
        if errors:
            errors[0].__intervention_tb__ = errors[0].__traceback__
            raise errors[0]

    def unpack(self, answers: Answers, mediator: Any, output: Any) -> None:
        """Open what a finished request brought back."""
        sequences = []
        for packed in getattr(output, "nnsight_sequences", None) or [getattr(output, "nnsight_saves", {})]:
            saves = dict(packed)
            if PACKED in saves:
                try:
                    saves |= answers.open(saves.pop(PACKED), mediator.sent)
                except Exception as error:
                    # The other requests' answers are opened all the same.
                    output.error = error if output.error is None else output.error
            sequences.append(saves)
        output.nnsight_sequences = sequences
        output.nnsight_saves = sequences[0]
        output.saves = {k: v for k, v in getattr(output, "saves", {}).items() if k != PACKED} | sequences[0]

    async def _generate_async(self, prompts: Any, params: Any, lora_request: Any) -> list:
        outputs = await super()._generate_async(prompts, params, lora_request)
        for output in outputs:
            reveal(output)
        return outputs

    def close(self) -> None:
        """End the engine and its processes. A second call does nothing."""
        engine, self.vllm_entrypoint = self.vllm_entrypoint, None
        if self._async_engine and engine is not None:
            engine.shutdown()
        elif engine is not None:
            engine.llm_engine.engine_core.shutdown()
        self.arenas.end()


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


__all__ = ["EngineModel", "EngineTracer"]

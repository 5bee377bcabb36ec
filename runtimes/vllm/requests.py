"""The blocks that ride an engine's requests: nnsight's book-keeping, with rows, refusals and errors of our own.

What a block cannot be given whole is an error of its own request: the others go on, and so does the engine.
"""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import torch
from greenlet import error as greenlet_error
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from interleave import nnsight_port as port
from interleave.errors import InterleaveError
from interleave.ranks.raised import Raised

from . import nnsight_port as vllm_port
from .arenas import Arenas
from .payload import Tree, arrive
from .rows import Span

#: In a request's extra arguments: whether the head gives logits for every position.
EVERY_POSITION = "interleave_every_position"
#: The block that rides a request.
BLOCK = "interleave_block"
#: Which of a trace's streams of random numbers its block draws from; those of its further sequences are the next ones.
STREAM = "interleave_stream"
#: Among a request's saved values: all of them, packed, with what the block changed.
PACKED = "interleave packed"


def deferred(error: BaseException) -> dict[str, Any]:
    """A block's error as it travels to the client: nnsight's description, and the exception itself with its lines."""
    described = vllm_port.capture_exception(error)
    return {**described, "raised": Raised.of(error)}


class Request(vllm_port.Request):
    """One request, with the block that rides it.

    Attributes:
        traced: Whether a block came with it.
        answers: Whether this rank answers the client.
        answer: What its block saved and changed, under :data:`PACKED`.
    """

    __slots__ = ("answer", "answers", "traced")

    @property
    def ended(self) -> bool:
        """Whether its block has raised or stopped, or cannot run: there is nothing to compute for it."""
        mediator = self.mediator
        return self.traced and (self.error is not None or (mediator is not None and mediator.exception is not None))

    def saves(self) -> dict[str, Any]:
        """What its block saved and changed, packed for the client, if this rank answers; or the error of packing it."""
        mediator = self.mediator
        if mediator is None or mediator.arrived is None:
            return {}
        saved = super().saves()
        for value in saved.values():
            port.saves().discard(id(value))
        if self.answers:
            try:
                self.answer = {PACKED: mediator.arrived.answer(saved, mediator.drawn())}
            except Exception as error:
                self.answer = {PACKED: Raised.of(error)}
        return self.answer


class Requests(vllm_port.Requests):
    """The blocks of the engine's requests, on one worker.

    Args:
        tree: The model, as blocks refer to it.
        arenas: Where large tensors lie between the client and this worker; None where they share no memory.
    """

    def __init__(self, tree: Tree, arenas: Arenas | None = None) -> None:
        super().__init__()
        self.tree = tree
        self.arenas = arenas
        #: Requests of which this step computes old tokens only: there is nothing new for their blocks.
        self.behind: set[str] = set()
        self._turns = 0

    def _take_turn(self) -> bool:
        """Whether it is this rank that answers for the next traced request: every rank of the first stage could, since
        all hold the same values, so they take turns."""
        self._turns += 1
        return get_pp_group().is_first_rank and self._turns % get_tp_group().world_size == get_tp_group().rank_in_group

    def with_answers(self, collected: bytes, requests: list[Request], wanted: set[str]) -> bytes:
        """What nnsight collects on this rank, and this rank's answers, of which nnsight takes those of rank 0 alone."""
        answered = [request for request in requests if request.answer]
        if not answered or get_pp_group().rank == 0:  # the rank among all of the engine
            return collected
        entries = pickle.loads(collected)
        for request in answered:
            engine_id, index = request.key(wanted)
            entry = entries[engine_id]
            entry["sequences"][index]["saves"] = request.answer
            if not index:
                entry["saves"] = request.answer
        return pickle.dumps(entries)

    def register(self, registration_id: str, payload: bytes, persistent_objects: dict, name: str | None = None) -> None:
        """Take a block that is to run for every request from now on."""
        stream = f"edit {len(self.templates)}"
        self.templates[registration_id] = arrive(payload, self.tree, self.arenas, stream)
        self.names[registration_id] = name

    def add(self, new_requests: list, persistent_objects: dict) -> None:
        """Take the block off each new request, and give it its copies of the installed ones."""
        for data in new_requests:
            if data.req_id in self.requests:
                continue  # put aside before, and taken up again
            request = self.requests[data.req_id] = Request(data.req_id)
            extra = getattr(data.sampling_params, "extra_args", None) or {}
            request.traced = BLOCK in extra
            request.answer, request.answers = {}, request.traced and self._take_turn()
            self.install(request, extra.get("nnsight_edits"))
            if BLOCK in extra:
                try:
                    stream = extra.get(STREAM, 0) + request.index
                    request.mediator = arrive(extra[BLOCK], self.tree, self.arenas, stream)
                except Exception as error:
                    request.error = deferred(error)
            if request.mediator is not None:
                request.mediator.key = (request.id, None)
            for number, copy in request.copies.items():
                copy.key = (request.id, number)
            for mediator in request.workers():
                mediator.every_position = extra.get(EVERY_POSITION, True)
            if data.num_computed_tokens and request.workers():
                self.refuse(
                    request,
                    f"the engine took {data.num_computed_tokens} tokens of this prompt from its prefix cache, so they "
                    f"are not computed and no block can see them. Load the model with enable_prefix_caching=False, or "
                    f"send the prompt with `skip_reading_prefix_cache=True`",
                )

    def install(self, request: Any, wanted: list[str] | None) -> None:
        """Give a request its copies of the installed blocks: all of them, or the unnamed and those it names."""
        if wanted is not None:
            names = {name for name in self.names.values() if name is not None}
            unknown = [name for name in wanted if name not in names]
            if unknown:
                request.error = deferred(
                    InterleaveError(
                        f"edits={wanted!r}: none is installed as {unknown!r}; installed are {sorted(names)}"
                    )
                )
        for number, template in self.templates.items():
            name = self.names.get(number)
            if wanted is None or name is None or name in wanted:
                request.copies[number] = template.for_request()

    def harvest(self, finished: set[str]) -> None:
        over = [request.copies for request in self.requests.values() if request.named(finished)]
        super().harvest(finished)
        for copies in over:
            for copy in copies.values():
                copy.release()
        for request in self.requests.values():
            for taken in request.harvested.values() if request.named(finished) else ():
                for name, value in list(taken["saves"].items()):
                    try:
                        pickle.dumps(value)
                    except Exception as error:
                        del taken["saves"][name]
                        kind = type(value).__name__
                        told = InterleaveError(f"{name!r} ({kind}) cannot leave the engine: {error}")
                        taken["error"] = deferred(told)

    def refuse(self, request: Any, text: str) -> None:
        """Make `text` the request's error, and run no block for it."""
        request.error = deferred(InterleaveError(text))
        request.mediator = None
        request.copies = {}

    def refuse_chunked(self, spans: list[tuple[str, int]], states: dict) -> None:
        for request_id, scheduled in spans:
            request, state = self.requests.get(request_id), states.get(request_id)
            if request is None or state is None or not request.workers():
                continue
            if state.num_computed_tokens + scheduled < state.num_prompt_tokens:
                self.refuse(
                    request,
                    f"the engine computes this prompt of {state.num_prompt_tokens} tokens in several steps "
                    f"({scheduled} tokens in this one), so no block can see it whole. Load the model with "
                    f"enable_chunked_prefill=False, or raise max_num_batched_tokens above the prompt's length",
                )
        self.refuse_recomputed(spans, states)

    def refuse_recomputed(self, spans: list[tuple[str, int]], states: dict) -> None:
        """A request that was preempted is computed again from its first token: without what its block did."""
        self.behind = set()
        for request_id, scheduled in spans:
            request, state = self.requests.get(request_id), states.get(request_id)
            if request is None or state is None or state.num_computed_tokens + 1 >= state.num_tokens:
                continue
            begun = [mediator for mediator in request.workers() if getattr(mediator, "steps", 0)]
            if begun and state.num_computed_tokens + scheduled < state.num_tokens:
                self.behind.add(request_id)
            if any(getattr(mediator, "edited", False) for mediator in begun):
                self.refuse(
                    request,
                    "the engine ran out of room for keys and values, put this request aside and computes its tokens "
                    "again, without the edits that its block made. Give the engine more room "
                    "(gpu_memory_utilization, VLLM_CPU_KVCACHE_SPACE), or fewer requests at once (max_num_seqs)",
                )

    def scope(self, model: Any, spans: list[tuple[str, int]]) -> None:
        super().scope(model, [("" if name in self.behind else name, size) for name, size in spans])
        total = model.interleaver.batcher.total
        for mediator in model.interleaver.mediators:
            start, size = mediator.batch_group
            if getattr(mediator, "steps", 0) and size > 1:
                # Computed again after a preemption: the block has seen all of these rows but the last.
                start, size = start + size - 1, 1
            mediator.batch_group = Span(start, size, total)
            mediator.steps = getattr(mediator, "steps", 0) + 1

    def unflatten(self, model: Any) -> None:
        for mediator in model.interleaver.mediators:
            mediator.batch_group = Span(mediator.row, 1, self.nrows)
        model.interleaver.batcher.total = self.nrows

    def serve_result(self, mediator: Any, output: Any) -> None:
        """A generation's result, as transformers gives it: the ids of the prompt and of what was generated."""
        if mediator is None or not mediator.alive or mediator.pending is None or mediator.pending.provider != "result":
            return
        index = next(request.index for request in self.requests.values() if request.mediator is mediator)
        completions = {completion.index: completion for completion in output.outputs}
        completion = completions.get(index, output.outputs[0])
        ids = torch.tensor([[*output.prompt_token_ids, *completion.token_ids]])
        interleaver = mediator.interleaver
        with contextlib.suppress(greenlet_error), interleaver.between_steps():
            while mediator.pending is not None and mediator.pending.provider == "result":
                interleaver.resume(mediator, ids)
        self.record(mediator)

    def record(self, mediator: Any) -> None:
        error = mediator.exception
        if error is not None and getattr(mediator, "nnsight_error", None) is None:
            mediator.nnsight_error = deferred(error)
        super().record(mediator)

    def finish_dangling(self, mediator: Any, taps: frozenset = frozenset(), quiet: bool = False) -> None:
        if mediator is None or not mediator.alive or mediator.pending is None:
            return
        location = mediator.pending.provider
        error, expected = vllm_port.dangling_unwind(mediator)
        if taps and isinstance(error, port.OutOfOrderError) and location not in taps and _is_location(location):
            expected = None
            error = InterleaveError(
                f"`{location}` is none of this engine's taps, and its CUDA graphs serve nothing else: name it in "
                f"`taps=` when the model is loaded, or load it with enforce_eager=True"
            )
        try:
            mediator.worker.throw(error)
        except greenlet_error:
            return
        except BaseException as thrown:
            if quiet:
                return
            mediator.nnsight_error = deferred(thrown)
            if expected is not None and thrown is error:
                mediator.nnsight_error |= {"is_control_flow": True, "warning": expected}
        finally:
            del error  # its traceback holds this frame, and so the block


def _is_location(location: str | None) -> bool:
    return location is not None and location.rpartition(".")[2] in ("input", "output", "skip")

"""The bracket inside a serving engine.

One step of the engine runs many requests, whose blocks start and end at different steps. So counts go on from step
to step, a block's error ends its own request only, and it is known which request replaced a value and which wrote
into it: in HuggingFace's model a write into a tensor is seen by everybody who holds the tensor, a replacement is not.
"""

# vLLM's and nnsight's classes meet here at run time, and their declared types do not say so.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from interleave import nnsight_port as port
from interleave.errors import InterleaveError, Unserved
from interleave.fragments import Refused
from interleave.interleaver import Interleaver, Visit, throw
from interleave.layout import same_bits
from interleave.ranks.raised import Raised

from . import nnsight_port as vllm_port
from .rows import Skipped, Span, fitted
from .stages import OF_THE_LAST, VLLMS_OWN, Stages

if TYPE_CHECKING:
    from interleave.agreement import Agreement

    from .fragments import EngineFragments
    from .views.base import View


#: Of a module: what views act out.
SIDES = ("input", "skip", "output")


class EngineInterleaver(vllm_port.VLLMInterleaver, Interleaver):
    """This project's interleaver for a model runner: nnsight's taps for CUDA graphs, our bracket.

    Args:
        taps: Locations that replayed CUDA graphs serve; empty on an eager engine.
        fragments: The layouts.
        agreement: How the ranks stay together; None on one rank.

    Attributes:
        views: Path -> the view that acts HuggingFace's module out there.
        around: Path -> the view that stands around the forward of vLLM's module there.
        swapped: The rows that were replaced, not written into, in the visit that was served last.
        skipped: The modules that run now and that some requests skip, by path, with those requests' rows.
        step: Counts the engine's steps.
        stages: The pipeline that this rank is a stage of; None if it has one stage.
        device: Where the engine computes.
        vocabulary: How many tokens the model knows.
    """

    fragments: EngineFragments  # pyright: ignore[reportIncompatibleVariableOverride]

    #: The engine's other requests have nothing to do with it, whatever it is.
    thrown = (Exception,)

    def __init__(
        self, taps: Iterable[str] = (), *, fragments: EngineFragments, agreement: Agreement | None = None
    ) -> None:
        Interleaver.__init__(self, fragments, agreement)
        self.taps = frozenset(taps)
        self.views: dict[str, View] = {}
        self.around: dict[str, View] = {}
        self.swapped: list[Span] = []
        self.skipped: list[tuple[str, list[Span]]] = []
        self.step = 0
        self.stages: Stages | None = None
        self.device = torch.device("cpu")
        self.vocabulary = 0
        self.defer_exceptions = True

    def __enter__(self) -> Interleaver:
        self.step += 1
        return super().__enter__()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Blocks run on, though the model does not."""
        before, self.interleaving = self.interleaving, True
        try:
            yield
        finally:
            self.interleaving = before

    def wanted(self, location: str) -> bool:
        """Whether somebody waits at `location`, a cache keeps it, or a graph is to serve it."""
        return location in self.parked or location in self.observers or location in self.taps

    @property
    def recording(self) -> bool:
        """Whether vLLM records a CUDA graph now: visits are taken down for its replays, and not made."""
        return bool(self.taps) and vllm_port.capture() is not None

    def record(self, locations: Iterable[str], visit: Callable[..., Any], *tensors: torch.Tensor) -> None:
        """Have every replay of the graph that is being recorded stop here for `visit`, which takes the graph's tensors;
        if a tap is among `locations`."""
        capture = vllm_port.capture()
        if capture is None or self.taps.isdisjoint(locations):
            return
        live = vllm_port.weak(tensors)

        def replay() -> None:
            if self.interleaving:
                visit(*live)

        capture.add_eager(replay)

    def pass_by(self, location: str) -> None:
        """Count a visit that nobody wants."""
        if self.stages is not None:
            if not self.stages.mine(location):
                return
            self.stages.note(None, "visited", location)
        self.count(location)

    def count(self, location: str) -> None:
        """A visit has passed."""
        self.counts[location] = self.counts.get(location, 0) + 1

    def handle(self, provider: str, value: Any) -> Any:
        stages = self.stages
        if stages is not None and not stages.mine(provider):
            return value
        if provider in self.parked:
            self.swapped = []
            value = self.guarded(provider, value)
        else:
            value = super().handle(provider, value)
        if stages is not None:
            stages.note(None, "visited", provider)
        return value

    def guarded(self, location: str, value: Any) -> Any:
        """`handle` where blocks wait: whatever goes wrong there is the blocks' and their requests', never the
        engine's."""
        try:
            left = super().handle(location, value)
            if left is not value and self.view_at(location) is None:
                self.judge(location, value, left)
        except Exception as error:
            self.blame(location, error)
            return value
        return left

    def judge(self, location: str, before: Any, after: Any) -> None:
        """Look at what blocks made of a value of vLLM's own, which no view carries into the model.

        Raises:
            InterleaveError: It is made otherwise than it was, or has ids that the model does not have.
        """
        fitted(location, before, after)
        for mediator, span in self.spans():
            pair = [tensors_in(self.batcher.narrow(value, span)) for value in (before, after)]
            if not all(map(same_bits, *pair)):
                if location not in OF_THE_LAST:
                    mark_edited(mediator)
                for was, now in zip(*pair, strict=True):
                    self.check_integers(location, was, now)

    def check_integers(self, location: str, before: torch.Tensor, after: torch.Tensor, *, ids: bool = False) -> None:
        """Raise for edited integers that could lead the engine out of its tables.

        Args:
            location: Where.
            before, after: A request's own.
            ids: Whether they are token ids; the sampler's are known to be.
        """
        if before.is_floating_point() or torch.equal(before, after):
            return
        if not ids and location not in OF_THE_LAST:
            raise Unserved(f"`{location}` can be read and not changed: the engine indexes its tables with it")
        wrong = after[(after < 0) | (after >= self.vocabulary)]
        if wrong.numel():
            raise InterleaveError(
                f"`{location}`: token {int(wrong[0])} is none of the model's, which has {self.vocabulary}"
            )

    def blame(self, location: str, error: Exception) -> None:
        """Make `error` the error of the blocks that were at `location` last."""
        for mediator, _ in self.spans():
            if mediator.alive and mediator.exception is None and touched(mediator, location):
                if self.stages is not None:
                    self.stages.note(mediator, "raised", location, Raised.of(error))
                self.end(mediator, error)
        self._reindex_parked()

    def observe(self, visit: Visit, observers: list) -> None:
        observers = [observer for observer in observers if self.happens(observer[0], visit.location)]
        if self.stages is None:
            super().observe(visit, observers)
            return
        # Every stage's caches are to hold it.
        value = visit.value if visit.refused else visit.open()
        for mediator, cache, selected in observers:
            own = self.batcher.narrow(value, mediator.batch_group)
            cache.observe_selected(selected, own)
            self.stages.note(mediator, "cache", visit.location, (mediator.caches.index(cache), selected, own))

    @contextmanager
    def skipping(self, path: str, skipped: Skipped | None) -> Iterator[None]:
        """While the module runs for the other requests: what is in it does not happen for those that skip it."""
        if skipped is None:
            yield
            return
        self.skipped.append((f"{path}.", [span for span, _ in skipped.parts]))
        try:
            yield
        finally:
            self.skipped.pop()

    def happens(self, mediator: port.Mediator, location: str) -> bool:
        """Whether the block's request runs the module at `location`."""
        return not any(location.startswith(path) and mediator.batch_group in spans for path, spans in self.skipped)

    def _ready(self, provider: str) -> list[port.Mediator]:
        ready = super()._ready(provider)
        return [mediator for mediator in ready if self.happens(mediator, provider)] if self.skipped else ready

    def uncallable(self, path: str) -> str | None:
        """Why a block cannot call the module; None if it can."""
        if self.stages is not None and not self.stages.mine(path):
            return self.stages.uncallable(path)
        view = self.views.get(path)
        return VLLMS_OWN if view is None else view.uncallable

    def throw(self, mediator: port.Mediator, error: Exception) -> Any:
        request = mediator.pending
        # Other stages refuse by themselves what can be known without the model's values.
        if self.stages is not None and request is not None and self.refusal(request) is None:
            self.stages.note(mediator, "raised", request.provider, Raised.of(error))
        return super().throw(mediator, error)

    def resume(self, mediator: port.Mediator, answer: Any) -> None:
        """Give a block what it waits for, outside of a visit."""
        try:
            mediator.pending = mediator.switch(answer)
        except Exception as error:
            self.end(mediator, error)
        else:
            self.refuse(mediator)

    def end(self, mediator: port.Mediator, error: BaseException) -> None:
        """Make `error` the end of a block, wherever it is."""
        mediator.pending = None
        mediator.exception = error  # type: ignore[assignment]

    def answer(self, request: port.Pending, mediator: port.Mediator, visit: Visit) -> Any:
        refusal = self.refusal(request)
        if refusal is not None:
            raise refusal
        span = mediator.batch_group
        mediator.last = visit.location  # type: ignore[attr-defined]
        if request.event is port.Event.VALUE or not isinstance(span, Span):
            answer = super().answer(request, mediator, visit)
            if self.stages is not None:
                self.stages.note(mediator, "value", visit.location, answer)
            return answer
        if request.event is port.Event.SWAP:
            own = self.batcher.narrow(visit.open(), span)
            request = request._replace(value=self.fitting(visit.location, own, request.value))
            super().answer(request, mediator, visit)
            self.swapped.append(span)
        else:
            self.views[visit.location.removesuffix(".skip")].check_skip(request.value, span.size)
            visit.value = self.batcher.gather_skip(visit.value, span, request.value)
        mark_edited(mediator)
        if self.stages is not None:
            self.stages.note(mediator, "done", visit.location)
        return None

    def fitting(self, location: str, own: Any, replacement: Any) -> Any:
        """A replacement as the value there is made. Raises InterleaveError, at its line, for one that does not fit."""
        view = self.view_at(location)
        if view is not None:
            replacement = view.redressed(location.rpartition(".")[2], own, replacement)
        return fitted(location, own, replacement)

    def view_at(self, location: str) -> View | None:
        """The view that acts out what is at `location`; None for a value of vLLM's own."""
        path, _, side = location.rpartition(".")
        return self.views.get(path) if side in SIDES else None

    def _reindex_parked(self) -> None:
        for mediator in list(self.mediators):
            self.refuse(mediator)
        super()._reindex_parked()

    def refuse(self, mediator: port.Mediator) -> None:
        """Raise at once, in a block that waits for what will never come; the model need not get there first."""
        while (request := mediator.pending) is not None and (refusal := self.refusal(request)) is not None:
            self.fail(mediator, refusal, shared=False)

    def refusal(self, request: port.Pending) -> InterleaveError | None:
        """Why a request cannot be granted, whatever the model computes."""
        location = request.provider
        if location is None:  # a barrier
            return None
        if request.event is port.Event.SKIP:
            path = location.removesuffix(".skip")
            reason = self.unskippable(path)
            return None if reason is None else Unserved(f"`{path}` cannot be skipped: {reason}")
        if request.event is port.Event.SWAP and location in self.fragments.read_only:
            return Unserved(f"`{location}` can be read and not changed: {self.fragments.read_only[location]}")
        layout = self.fragments.layout(location)
        return layout.error(location) if isinstance(layout, Refused) else None

    def unskippable(self, path: str) -> str | None:
        """Why the module cannot be skipped; None if it can."""
        if self.stages is not None and not self.stages.mine(path):
            return self.stages.unskippable(path)
        view = self.views.get(path)
        return VLLMS_OWN if view is None else view.unskippable

    def fail(self, mediator: port.Mediator, error: BaseException, *, shared: bool = True) -> None:
        """Raise `error` in a block, at the line where it waits; if it does not catch it, or is over, its request ends.

        Args:
            shared: Whether the other stages of a pipeline have to be told; they find out themselves what can be known
                without the model's values.
        """
        if mediator.exception is not None:
            return
        if mediator.pending is None:
            if shared and self.stages is not None:
                self.stages.note(mediator, "raised", "", Raised.of(error))
            self.end(mediator, error)
            return
        try:
            mediator.pending = self.throw(mediator, error) if shared else throw(mediator, error)
        except Exception as raised:
            self.end(mediator, raised)

    def spans(self) -> list[tuple[port.Mediator, Span]]:
        """The running blocks, and which rows of this step are theirs."""
        return [(m, m.batch_group) for m in self.mediators if isinstance(m.batch_group, Span)]

    def fresh(self) -> bool:
        """Never: a step of the engine continues the steps before it."""
        return False


def tensors_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    port.apply(value, found.append, torch.Tensor)
    return found


def touched(mediator: port.Mediator, location: str) -> bool:
    """Whether the block was at `location` last."""
    return getattr(mediator, "last", None) == location or (
        mediator.pending is not None and mediator.pending.provider == location
    )


def mark_edited(mediator: port.Mediator) -> None:
    """Remember that a block has changed the computation of its request."""
    mediator.edited = True  # type: ignore[attr-defined]


__all__ = ["EngineInterleaver", "Skipped", "mark_edited"]

"""The bracket: make a visit's value whole once, serve everybody who waits for it, put it back.

`Interleaver.handle` is called at every location the model reaches, and is the only place that runs the bracket:

    nobody waits            count the visit, hand the value back as it came
    only caches             keep a snapshot of the piece; it is assembled with others at the end of the trace
    a parked reader         make the value whole, serve all readers of this occurrence, put back what they left
    only a replacement      nothing is gathered: the replacement is cut down by the location's rule

Every rank runs the same block against the same model, so every rank takes the same branch here and reaches the same
exchanges in the same order. Nothing in this module asks which rank it is.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from boundary.collectives import CollectiveError

from . import nnsight_port as port
from .cache import Pending, assemble_pending
from .errors import InterleaveError
from .fragments import Fragments, Refused
from .parameters import Parameters

if TYPE_CHECKING:
    from .agreement import Agreement

#: Bytes of wholes that caches may leave pending before they are assembled ahead of the end of the trace.
PENDING_BYTES = 256 * 2**20


class Visit:
    """One arrival of the model at a location, while it is being served.

    `value` is a piece as the model brought it, or whole: opened by a reader, or put there by a replacement.
    """

    __slots__ = ("brought", "fragmented", "fragments", "interleaver", "location", "state", "undo", "value")

    def __init__(self, interleaver: Interleaver, location: str, value: Any) -> None:
        self.interleaver = interleaver
        self.fragments = interleaver.fragments
        self.location = location
        self.brought = self.value = value
        self.undo: Any = None
        fragments = self.fragments
        self.fragmented = fragments.enabled and fragments.fragmented(location)
        self.state: Literal["piece", "whole", "replaced"] = "piece" if self.fragmented else "whole"
        if not self.fragmented and fragments.enabled:
            served = fragments.withhold(location, value)
            if served is not value:
                self.value = served
                self.undo = lambda left: value if left is served else fragments.split(location, left)

    def open(self) -> Any:
        """The whole value. A collective, the first time at a fragmented location."""
        if self.state == "piece":
            key = self.interleaver.key(self.location, "read")
            self.value, self.undo = self.fragments.whole(self.location, self.value, key)
            self.state = "whole"
        return self.value

    def replace(self, value: Any) -> None:
        """Put the block's replacement there, or raise what one process or the sharding has against it."""
        if self.fragmented:
            self.fragments.check(self.location, self.expected(), value)
        self.value = value
        if self.state == "piece":
            self.state = "replaced"

    @property
    def refused(self) -> bool:
        """Whether all of the value is refused."""
        return isinstance(self.fragments.layout(self.location), Refused)

    def expected(self) -> Any:
        """A structure with the whole sizes of what the model brought."""
        return self.fragments.expected(self.location, self.brought)

    def close(self) -> Any:
        """What goes on into the model."""
        if self.state == "replaced":
            return self.fragments.split(self.location, self.value, self.interleaver.key(self.location, "swap"))
        return self.value if self.undo is None else self.undo(self.value)


class Interleaver(port.Interleaver):
    """nnsight's interleaver with the bracket of this project.

    Attributes:
        fragments: Which values are pieces, and how they become whole.
        agreement: How the ranks stay together; None on one process.
        parameters: The whole parameters that blocks have in hand.
        ranks: The rank processes this tree's blocks run on, where this process drives them.
    """

    fragments: Fragments  # type: ignore[assignment]

    #: Errors in answering a block that are raised in the block, and not in the model.
    thrown: tuple[type[Exception], ...] = (InterleaveError, CollectiveError)

    def __init__(self, fragments: Fragments | None = None, agreement: Agreement | None = None) -> None:
        super().__init__(fragments if fragments is not None else Fragments())
        self.agreement = agreement
        self.parameters = Parameters(self)
        self.ranks: Any = None
        self.pending: list[Pending] = []
        self.pending_bytes = 0
        self.calls = 0
        self.flushes = 0

    # -- names of exchanges ----------------------------------------------------------------------------------

    def key(self, location: str, kind: str) -> str:
        """The name under which the ranks exchange something at this visit; entered in the ledger."""
        return self.numbered(location, self.counts.get(location, 0), kind)

    def numbered(self, location: str, occurrence: int, kind: str) -> str:
        if self.agreement is None:
            return f"{location}.i{occurrence}/{kind}"
        return self.agreement.key(location, occurrence, kind)

    def call_key(self, path: str) -> str:
        """The name of the exchanges that an ad-hoc call makes."""
        self.calls += 1
        return self.numbered(path, self.calls, "call")

    # -- the bracket -----------------------------------------------------------------------------------------

    def handle(self, provider: str, value: Any) -> Any:
        """Route the value at `provider` to whoever waits for it; return it, edited if a block wrote to it."""
        occurrence = self.counts.get(provider, 0)
        observers = self.observers.get(provider)
        if provider not in self.parked and not observers:
            self.counts[provider] = occurrence + 1
            return value

        visit = Visit(self, provider, value)
        stopped: port.EarlyStopException | None = None
        served = False
        while ready := self._ready(provider):
            served = True
            for mediator in ready:
                try:
                    self.serve(mediator, visit)
                except port.EarlyStopException as stop:
                    # The block asked to halt what comes after this location: the visit itself is finished first.
                    mediator.pending = None
                    if self.defer_exceptions:
                        mediator.exception = stop
                    else:
                        stopped = stop
                except Exception as error:
                    if not self.defer_exceptions:
                        raise
                    mediator.pending = None
                    mediator.exception = error
        if served:
            self._reindex_parked()
        if self.batcher is not None:
            visit.value = self.batcher.assemble_skip(visit.value)
        self.counts[provider] = occurrence + 1
        if observers:
            self.observe(visit, observers)
        value = visit.close()
        if stopped is not None:
            raise stopped
        return value

    def serve(self, mediator: port.Mediator, visit: Visit) -> None:
        """Answer every request that `mediator` makes at this visit, in the order it makes them.

        What is refused is raised in the block, at the line that asked, so that the block may catch it and go on.
        """
        location = visit.location
        occurrence = mediator.occurrence(location)
        while (
            (request := mediator.pending) is not None
            and request.provider == location
            and request.iteration == occurrence
        ):
            if mediator.iteration:
                mediator.iteration = None  # a pinned step is reached: what follows in it is sequential
            try:
                answer = (self.answer(request, mediator, visit),)
            except self.thrown as error:
                mediator.pending = self.throw(mediator, self.told(error))
                continue
            mediator.pending = mediator.switch(*answer)
            self.settle()

    def throw(self, mediator: port.Mediator, error: Exception) -> Any:
        """Raise what an answer came to in the block; what the block asks for next, if it goes on."""
        return throw(mediator, error)

    def told(self, error: Exception) -> Exception:
        """What `error` is called where the ranks' agreement knows better."""
        return error if self.agreement is None else self.agreement.translate(error)

    def answer(self, request: port.Pending, mediator: port.Mediator, visit: Visit) -> Any:
        """Do what one request asks for; the value a read is answered with, None for the others."""
        group = mediator.batch_group
        batcher = self.batcher if group is not None and self.batcher is not None and self.batcher.batching else None
        if request.event is port.Event.VALUE:
            value = visit.open()
            return value if batcher is None else batcher.narrow(value, group)
        if request.event is port.Event.SWAP:
            value = request.value
            visit.replace(value if batcher is None else batcher.widen(visit.open(), group, value))
        elif request.event is port.Event.SKIP:
            self.check_skip(visit.location, request.value)
            value = request.value
            visit.value = value if batcher is None else batcher.gather_skip(visit.value, group, value)
        return None

    def check_skip(self, gate: str, replacement: Any) -> None:
        """Refuse, at the line of the `.skip`, a replacement that the ranks could not share."""
        output = gate.removesuffix(".skip") + ".output"
        if self.fragments.enabled and self.fragments.fragmented(output):
            self.fragments.check(output, None, replacement)

    def settle(self) -> None:
        """Carry what blocks wrote, into parameters and into values the model has already gone on with, to the model."""
        self.parameters.settle()
        self.fragments.late.settle()

    # -- caches ----------------------------------------------------------------------------------------------

    def observe(self, visit: Visit, observers: list) -> None:
        """Give the visit's value to the caches that keep it; a piece waits for the others of this trace."""
        batcher = self.batcher
        pending: Pending | None = None
        for mediator, cache, selected in observers:
            group = mediator.batch_group
            at_once = not cache.detach or not self.fragments.exchanges(visit.location)
            if visit.state == "piece" and at_once and not visit.refused:
                visit.open()
            if visit.state != "piece":
                cache.observe_selected(selected, visit.value if batcher is None else batcher.narrow(visit.value, group))
                continue
            if pending is None:
                pending = Pending.snapshot(visit)
                self.pending.append(pending)
                self.pending_bytes += pending.nbytes
            fill = cache.defer(selected, self.flush)
            pending.takers.append(
                fill if batcher is None else lambda whole, fill=fill, group=group: fill(batcher.narrow(whole, group))
            )
        if self.pending_bytes > PENDING_BYTES:
            self.flush()

    def flush(self) -> None:
        """Assemble everything that caches left pending: one exchange per dtype, however many values."""
        pending, self.pending, self.pending_bytes = self.pending, [], 0
        if pending:
            self.flushes += 1
            assemble_pending(pending, self.fragments, self.numbered("caches", self.flushes, "cache"))

    # -- the life of a run -----------------------------------------------------------------------------------

    def __enter__(self) -> Interleaver:
        self.pending, self.pending_bytes = [], 0
        self.calls = self.flushes = 0
        if self.fresh():
            # From here, so that a run that the ranks left at different places does not tell them apart for ever.
            self.counts.clear()
        self.parameters.settle()
        try:
            super().__enter__()
            self.settle()
        except BaseException:
            self.forget()
            raise
        return self

    def fresh(self) -> bool:
        """Whether the run that begins is a new one, and does not continue another."""
        return all(mediator.worker is None for mediator in self.mediators)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        swallow = super().__exit__(exc_type, exc_value, traceback)
        try:
            if exc_type is None or swallow:
                self.flush()
        finally:
            self.forget()
        return swallow

    def forget(self) -> None:
        """Drop what the run left: values that caches still wait for are withheld, since the run ended in an error."""
        pending, self.pending, self.pending_bytes = self.pending, [], 0
        for item in pending:
            item.withhold()
        self.parameters.clear()
        self.fragments.late.clear()


def throw(mediator: port.Mediator, error: BaseException) -> Any:
    """Raise `error` in the block, at the line that is waiting; what the block asks for next, if it goes on."""
    worker = mediator.worker
    assert worker is not None
    worker.parent = port.getcurrent()
    try:
        return worker.throw(error)
    except BaseException as raised:
        if not hasattr(raised, "__intervention_tb__"):
            raised.__intervention_tb__ = raised.__traceback__  # type: ignore[attr-defined]
        raise

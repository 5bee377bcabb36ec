"""The driver's side of a model that lives on ranks: blocks are sent there, and what they saved comes back."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from .. import nnsight_port as port
from ..errors import DivergedBlock, InterleaveError
from ..load import LoadRequest
from .channel import Message
from .fleet import Fleet
from .packing import Packed, Packer, Sent, Tree, Unpacker, apply, apply_tensors, pack
from .processes import PROGRAM
from .raised import combine
from .surroundings import DriverRandom, Surroundings
from .tensors import Incoming, Kept, Outgoing
from .work import Block, Call, Reply, Request


@dataclass
class Outcome:
    """What a run gave back by name, and the error to raise instead, if any."""

    values: dict[str, Any]
    error: BaseException | None


class Ranks:
    """The rank processes of one model. Blocks of several threads run one after the other.

    Args:
        request: What every rank loads.
        model: The driver's outline of it: an envoy tree on meta tensors. It is not kept alive.
        program: The rank program, after the interpreter's name.

    Raises:
        RankDied: A rank ended while it loaded.
        InterleaveError, or what the runtime's `load` raises: The model cannot be loaded.
    """

    def __init__(self, request: LoadRequest, model: port.Envoy, program: tuple[str, ...] = PROGRAM) -> None:
        self._request = request
        self._program = program
        self._model = weakref.ref(model)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False
        self._random = DriverRandom()
        self._start()

    def backend(self, model: port.Envoy | None = None) -> Backend:
        """What runs a captured block on the ranks. `model` is the tree's root, or an edited copy of it."""
        return Backend(self, model)

    def call(self, envoy: port.Envoy, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """`envoy.method(*args, **kwargs)` on the ranks: one run without a block; rank 0's result."""
        outcome = self.run(envoy.root, Call(envoy, method, args, kwargs))
        if outcome.error is not None:
            raise outcome.error
        return outcome.values["result"]

    def close(self) -> None:
        """End the ranks. A second call does nothing; afterwards traces are refused."""
        self._same_process()
        with self._lock:
            self._closed = True
            self._finalizer()

    def run(self, model: port.Envoy | None, work: Block | Call) -> Outcome:
        """Run `work` on every rank and take over its effects on what it captured.

        Args:
            model: The tree that `work` is written against; None: the model these ranks were started for.

        Raises:
            InterleaveError: Something that `work` needs cannot cross; nothing was sent.
            RankDied: A rank ended meanwhile.
            KeyboardInterrupt: The user's; the ranks have stopped, too.
        """
        self._same_process()
        model = model if model is not None else self._model()
        if model is None:
            raise InterleaveError("the model these ranks hold was deleted")
        with self._lock:
            self._ready()
            tree = Tree(model)
            tensors = Outgoing(self._kept)
            try:
                data, packer = pack(work, lambda file: Packer(file, tree, tensors))
            except Exception as error:
                raise _naming(error, work, tree) from None
            sent = Sent(packer, tensors)
            sources = self._unseen(packer.filenames | work.filenames)
            surroundings = Surroundings.now(self._random)
            arena = None
            try:
                table, arena = tensors.finish()
                replies = self._fleet.ask("run", Request(Packed(data, table), surroundings, sources), arena)
            except BaseException:
                self._kept.distrust()
                raise
            finally:
                if arena is not None:
                    os.close(arena)
            return self._conclude(replies, tree, sent)

    def _conclude(self, replies: dict[int, Message], tree: Tree, sent: Sent) -> Outcome:
        answers: dict[int, Reply] = {rank: message.body for rank, message in replies.items()}
        error = _judge(answers, self._request.world_size)
        values: dict[str, Any] = {}
        first = answers.get(0)
        if first is not None and first.random is not None:
            self._random.take(first.random)
        if first is not None and first.packed is not None and not isinstance(error, DivergedBlock):
            tensors = Incoming(first.packed.table, replies[0].arena)
            unpacker = Unpacker(first.packed.pickle, tree, tensors, sent.objects, sent.tensors)
            values, edits, changes, changed, grads = unpacker.load()
            tree.add_edits(edits)
            for change in changes:
                apply(change, sent.objects[change.number])
            apply_tensors(sent.tensors, changed, grads)
        elif first is not None and replies[0].arena is not None:
            os.close(replies[0].arena)
        if error is not None:
            self._fleet.recover()
            if not self._fleet.alive:
                error.add_note(
                    f"The ranks were ended ({self._fleet.why}). The next trace starts new ones and loads the "
                    f"model again"
                )
        return Outcome(values, error)

    def _unseen(self, filenames: set[str]) -> dict[str, str]:
        """The texts of these sources, those that the ranks have left out."""
        texts = {name: port.Tracer.source(name) for name in filenames - self._seen}
        self._seen |= texts.keys()
        return {name: text for name, text in texts.items() if text}

    def _start(self) -> None:
        self._kept = Kept()
        self._seen: set[str] = set()
        self._fleet = Fleet(self._request, self._program)
        self._finalizer = weakref.finalize(self, _end, self._fleet, os.getpid())
        try:
            replies = self._fleet.ask("load", self._request)
            error = _judge({rank: reply.body for rank, reply in replies.items()}, self._request.world_size)
            if error is not None:
                raise error
            model: Any = self._model()
            layouts = replies[0].body.layouts
            if model is not None and layouts is not None:
                model.interleaver.fragments.tree = layouts
        except BaseException:
            self._finalizer.detach()
            self._fleet.kill("the model could not be loaded")
            raise

    def _ready(self) -> None:
        """Have living ranks, or say why not."""
        if self._closed:
            raise InterleaveError("this model was closed: load it again to go on")
        self._fleet.check()
        if not self._fleet.alive:
            reason = self._fleet.why.splitlines()[0]
            what = f"starting {self._request.world_size} new ranks and loading {self._request.source} again"
            print(f"interleave: {what} ({reason})", file=sys.stderr)
            self._finalizer.detach()
            self._start()

    def _same_process(self) -> None:
        if os.getpid() != self._pid:
            raise InterleaveError(
                "this process was forked from the one that loaded the model, and the ranks answer only to that "
                "one: load the model in this process"
            )


class Backend(port.Backend):
    """Runs a tracer's captured block on the ranks and binds what it saved in the caller's frame."""

    def __init__(self, ranks: Ranks, model: port.Envoy | None) -> None:
        self._ranks = ranks
        self._model = model

    def __call__(self, tracer: Any) -> None:
        try:
            outcome = self._ranks.run(self._model, Block.of(tracer))
        finally:
            # `with ... as tracer` stays bound after the block, and this backend with it.
            self._model = None
        if outcome.error is not None:
            # The frames it came with are the user's own; the way to here is plumbing.
            outcome.error.__intervention_tb__ = outcome.error.__traceback__  # type: ignore[attr-defined]
            raise outcome.error
        for value in outcome.values.values():
            port.mark(value)
        port.push_result(tracer.info.frame, outcome.values)


def start(request: LoadRequest, model: Any) -> Any:
    """Start the ranks that `request` asks for and make `model`, the outline, their driver.

    Returns:
        `model`, with `model.ranks` set, once every rank has loaded.
    """
    model.ranks = Ranks(request, model)
    return model


def _end(fleet: Fleet, pid: int) -> None:
    """Let the ranks go, when the model is closed or collected, or the program ends. Not in a forked child."""
    if os.getpid() == pid:
        fleet.end()


def _judge(answers: dict[int, Reply], world_size: int) -> BaseException | None:
    """The error that these answers amount to, or None."""
    errors = {rank: answer.error.rebuild() for rank, answer in answers.items() if answer.error is not None}
    if errors:
        return combine(errors, world_size)
    if len(answers) < world_size:
        missing = sorted(set(range(world_size)) - set(answers))
        return InterleaveError(f"ranks {missing} did not answer")
    if len({answer.digest for answer in answers.values()}) > 1:
        parties: dict[str | None, list[int]] = {}
        for rank, answer in sorted(answers.items()):
            parties.setdefault(answer.digest, []).append(rank)
        sides = " and ".join(f"ranks {ranks}" for ranks in parties.values())
        return DivergedBlock(
            f"the ranks ran the block to its end, but {sides} did not make the same exchanges: what the "
            f"block reads must not depend on the rank, on time, or on anything else that differs between them"
        )
    return None


def _naming(error: Exception, work: Block | Call, tree: Tree) -> InterleaveError:
    """Says which of the variables cannot cross to the ranks, and where the block is."""
    for name, value in work.variables.items():
        try:
            pack(value, lambda file: Packer(file, tree, Outgoing()))
        except Exception as own:
            return InterleaveError(
                f"{name} ({type(value).__name__}) cannot go to the ranks, and the block at {work.where} needs "
                f"it: {own}. Take what the block needs from it before the block"
            )
    return InterleaveError(f"the block at {work.where} cannot go to the ranks: {error}")

"""A block on its way to the engine's workers and back, inside the request that it rides.

The same packing as for ranks that we start ourselves (`interleave.ranks`), so that the results are those of a local
trace: code crosses as code, objects that the block captured keep their identity, and what it did to them is done to
the client's own.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import pickle
import types
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from greenlet import GreenletExit

from interleave import nnsight_port as port
from interleave.errors import InterleaveError
from interleave.interleaver import throw
from interleave.ranks.packing import (
    Captured,
    Packer,
    Sent,
    Tree,
    Unpacker,
    pack,
)
from interleave.ranks.raised import Raised
from interleave.ranks.surroundings import RandomState
from interleave.ranks.tensors import Incoming, Outgoing, Table

from .arenas import LARGE, Arenas
from .drawing import Drawn, Generators, draws_with_torch_only, go_on, same, stream
from .merging import Merger, told


@dataclass
class Bytes:
    """A pickle with its tensors: those that are large in the arena of that name, if there is one."""

    pickle: bytes
    table: Table
    arena: str | None = None

    @classmethod
    def of(
        cls,
        value: Any,
        tree: Tree,
        tensors: Outgoing,
        known: Any = ({}, {}),
        arenas: Arenas | None = None,
        shared: bool = False,
    ) -> tuple[Bytes, Packer]:
        """`shared`: for several receivers, who do not give the arena back."""
        data, packer = pack(value, lambda file: Packer(file, tree, tensors, known))
        return cls(data, *_laid_out(tensors, arenas, shared)), packer

    def tensors(self, arenas: Arenas | None, shared: bool = False) -> Incoming:
        """The tensors: seen in their arena where other receivers share it; else copied out of it, and it is given
        back."""
        if self.arena is None:
            return Incoming(self.table, None)
        assert arenas is not None
        tensors = Incoming(self.table, arenas.open(self.arena), mapped=shared)
        if not shared:
            arenas.give_back(self.arena)
        return tensors


def _laid_out(tensors: Outgoing, arenas: Arenas | None, shared: bool) -> tuple[Table, str | None]:
    """The table of a message's tensors, and the name of their arena; without one where that has no room."""
    if arenas is not None:
        name = arenas.name()
        try:
            table, descriptor = tensors.finish(partial(arenas.create if shared else arenas.take, name), LARGE)
        except OSError:
            with contextlib.suppress(OSError):
                arenas.remove(name)
        else:
            if descriptor is None:
                return table, None
            os.close(descriptor)
            return table, name
    return tensors.finish(arena=None)[0], None


class Block(NamedTuple):
    """What a request carries: the block, its sources, and the client's random state."""

    packed: Bytes
    sources: dict[str, str]
    random: RandomState


class Shipped(NamedTuple):
    """A packed block; what its answer will refer to; and the arena that its ranks read."""

    data: bytes
    sent: Sent
    arena: str | None


def ship(mediator: port.Mediator, tree: Tree, arenas: Arenas | None = None) -> Shipped:
    """Pack a block, in the client.

    Args:
        mediator: The block.
        tree: The model on this side.
        arenas: Where its large tensors are laid; None: they travel in the message.

    Raises:
        InterleaveError: With the name of a variable that cannot cross.
    """
    tensors = Outgoing()
    _, used_globals, used_locals = port.reduce_block(mediator.node, mediator.glbls, mediator.lcls)
    saved = port.saves()
    mediator.presaved = {name for name, value in used_locals.items() if id(value) in saved}
    try:
        packed, packer = Bytes.of((mediator, mediator.presaved), tree, tensors, arenas=arenas, shared=True)
    except Exception as error:
        raise _naming(error, {**used_globals, **used_locals}, tree) from None
    texts = {name: port.Tracer.source(name) for name in packer.filenames}
    sources = {name: text for name, text in texts.items() if text}
    data = pickle.dumps(Block(packed, sources, RandomState.now()))
    return Shipped(data, Sent(packer, tensors), packed.arena)


def _naming(error: Exception, variables: dict[str, Any], tree: Tree) -> Exception:
    for name, value in variables.items():
        try:
            Bytes.of(value, tree, Outgoing())
        except Exception as own:
            return InterleaveError(
                f"the block uses {name!r} ({type(value).__name__}), which cannot be sent to the engine: {own}"
            )
    return error


class EngineMediator(port.Mediator):
    """A block in a worker: it draws from random numbers of its own, and leaves the engine's alone.

    Attributes:
        key: Which of the engine's blocks it is, on every rank: its request, and the installed edit if it is one.
        arrived: How it came, for the way back.
        every_position: Whether the head gives it logits for every position.
        edited: Whether it changed anything.
        steps: How many of the engine's steps its request was in.
        stream: Which of the streams that follow from the client's random state is its own; 0: the client's.
        origin: The random state that it begins with.
        random: Where it is in drawing random numbers.
        plain: Whether it can draw from torch's generators only, which is known before it runs first; saving and
            setting Python's and numpy's takes fifty times as long, at every value that is served.
        generators: Where it is with torch's alone.
        requests: Of an installed block, how many requests it has run for.
    """

    key: tuple[str, str | None] | None = None
    plain: bool | None = None
    generators: Generators | None = None
    arrived: Arrived | None = None
    every_position = True
    edited = False
    steps = 0
    stream: int | str = 0
    origin: RandomState | None = None
    random: RandomState | None = None
    requests = 0

    def draw_from(self, state: RandomState, number: int | str) -> None:
        """Before it runs: draw from that stream of those that follow from a state."""
        self.stream = number
        self.origin = self.random = stream(state, number) if number else state

    def for_request(self) -> EngineMediator:
        """A copy of an installed block, for the next request."""
        copy = EngineMediator(self.code, self.glbls, dict(self.lcls))
        copy.presaved = set(self.presaved)
        self.requests += 1
        if self.random is not None:
            copy.draw_from(self.random, self.requests)
        return copy

    def switch(self, *args: Any) -> Any:
        if self.random is None:
            return super().switch(*args)
        if self.plain is None:
            self.plain = all(map(draws_with_torch_only, [*self.glbls.values(), *self.lcls.values()]))
        engine = Generators.now() if self.plain else RandomState.now()
        (self.generators or self.random).set()
        try:
            return super().switch(*args)
        finally:
            if self.plain:
                self.generators = Generators.now()
            else:
                self.random = RandomState.now()
            engine.set()

    def release(self) -> None:
        """Let go of what it held, now that its request is over: frames of errors and functions hold it in circles,
        which Python finds at some later time. If it still waits for something, it is ended."""
        if self.alive:
            with contextlib.suppress(BaseException):
                throw(self, GreenletExit())
        self.lcls.shared.clear()
        self.lcls.clear()
        self.exception = self.arrived = None

    def drawn(self) -> Drawn:
        """What it has drawn, for the client."""
        if self.origin is None or self.random is None:
            return Drawn(None, False)
        now = self.random if self.generators is None else self.generators.within(self.random)
        return Drawn(None if self.stream else now, not same(self.origin, now))


def arrive(data: bytes, tree: Tree, arenas: Arenas | None, stream: int | str = 0) -> EngineMediator:
    """A block that has come to a worker.

    Args:
        data: What `ship` packed.
        tree: The model on this side.
        arenas: Where its large tensors lie.
        stream: Which random numbers are its own.
    """
    block: Block = pickle.loads(data)
    for filename, text in block.sources.items():
        port.SOURCES[filename] = text
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    tensors = block.packed.tensors(arenas, shared=True)
    unpacker = Unpacker(block.packed.pickle, tree, tensors)
    loaded = mediator, presaved = unpacker.load()
    memo = unpacker.memo.copy()  # pyright: ignore[reportAttributeAccessIssue]
    # Without the block itself: what it holds ends with its request, and does not wait for a collection of garbage.
    objects = {number: value for number, value in memo.items() if value is not loaded and value is not mediator}
    # The variables around code are no objects of the client's; Python itself puts things there.
    scopes = {id(code.__globals__) for code in objects.values() if isinstance(code, types.FunctionType)}
    scopes.add(id(mediator.glbls))
    numbers = {number for number, value in objects.items() if id(value) in scopes}
    mediator.__class__ = EngineMediator
    mediator.presaved = presaved
    mediator.draw_from(block.random, stream)
    mediator.arrived = Arrived(tree, arenas, Captured(objects, tensors), numbers)
    return mediator


@dataclass
class Arrived:
    """What a block came with to a worker, for the way back.

    Attributes:
        tree: The model on this side.
        arenas: Where large tensors lie on the way.
        captured: The objects that it captured.
        scopes: The numbers of those that Python keeps variables in.
    """

    tree: Tree
    arenas: Arenas | None
    captured: Captured
    scopes: set[int]

    def answer(self, saves: dict[str, Any], drawn: Drawn) -> Bytes:
        """Pack what the block saved, what it did to the objects that it captured, and what it drew."""
        captured = self.captured
        changes = [change for change in captured.changes() if change.number not in self.scopes]
        # What it drew apart: Python's state is hundreds of numbers, and `Packer` looks at every object that it meets.
        content = (saves, changes, captured.tensor_changes(), pickle.dumps(drawn))
        try:
            packed, _ = Bytes.of(content, self.tree, Outgoing(detach=True), captured.known, self.arenas)
        except Exception as error:
            raise self._naming(error, saves) from None
        return packed

    def _naming(self, error: Exception, saves: dict[str, Any]) -> Exception:
        for name, value in saves.items():
            try:
                Bytes.of(value, self.tree, Outgoing(detach=True), self.captured.known)
            except Exception as own:
                return InterleaveError(f"{name!r} ({type(value).__name__}) cannot leave the engine: {own}")
        return error


class Answers:
    """Takes what the requests of a trace bring back, and then makes their changes to the client's objects."""

    def __init__(self, tree: Tree, arenas: Arenas | None) -> None:
        self.tree, self.arenas = tree, arenas
        self._merger = Merger()
        self._drawn: list[Drawn] = []

    def open(self, packed: Bytes | Raised, sent: Sent) -> dict[str, Any]:
        """The saved values of one request's block. Raises what came of packing them."""
        if isinstance(packed, Raised):
            raise packed.rebuild()
        unpacker = Unpacker(packed.pickle, self.tree, packed.tensors(self.arenas), sent.objects, sent.tensors)
        saves, changes, tensors, drawn = unpacker.load()
        self._merger.add(sent, changes, tensors)
        self._drawn.append(pickle.loads(drawn))
        return saves

    def settle(self, blocks: Iterable[port.Mediator], advance: bool = True) -> InterleaveError | None:
        """Make all changes, and go on drawing behind the blocks, if that is wanted.

        Returns:
            The error for what several requests changed, in the words of `blocks`; or None.
        """
        if advance:
            go_on(self._drawn)
        conflicts = self._merger.merge()
        if not conflicts:
            return None
        variables: dict[str, Any] = {}
        for block in blocks:
            _, used_globals, used_locals = port.reduce_block(block.node, block.glbls, block.lcls)
            variables |= {**used_globals, **used_locals}
        return told(conflicts, variables)


__all__ = ["Answers", "EngineMediator", "Shipped", "Tree", "arrive", "ship"]

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
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any, NamedTuple

import torch

from interleave import nnsight_port as port
from interleave.errors import InterleaveError
from interleave.ranks.packing import (
    Captured,
    Change,
    Packer,
    Sent,
    Tree,
    Unpacker,
    apply,
    apply_tensors,
    pack,
)
from interleave.ranks.surroundings import RandomState
from interleave.ranks.tensors import Incoming, Outgoing, Table

from .arenas import LARGE, Arenas


@dataclass
class Bytes:
    """A pickle with its tensors: those that are large in the arena of that name, if there is one."""

    pickle: bytes
    table: Table
    arena: str | None = None

    @classmethod
    def of(
        cls, value: Any, tree: Tree, tensors: Outgoing, known: Any = ({}, {}), arenas: Arenas | None = None
    ) -> tuple[Bytes, Packer]:
        data, packer = pack(value, lambda file: Packer(file, tree, tensors, known))
        return cls(data, *_laid_out(tensors, arenas)), packer

    def tensors(self, arenas: Arenas | None, shared: bool = False) -> Incoming:
        """The tensors; their arena is removed, unless it is shared with other receivers."""
        if self.arena is None:
            return Incoming(self.table, None)
        assert arenas is not None
        descriptor = arenas.open(self.arena)
        if not shared:
            arenas.remove(self.arena)
        return Incoming(self.table, descriptor, mapped=shared)


def _laid_out(tensors: Outgoing, arenas: Arenas | None) -> tuple[Table, str | None]:
    """The table of a message's tensors, and the name of their arena; without one where that has no room."""
    if arenas is not None:
        name = arenas.name()
        try:
            table, descriptor = tensors.finish(partial(arenas.create, name), LARGE)
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
        packed, packer = Bytes.of((mediator, mediator.presaved), tree, tensors, arenas=arenas)
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


class Generators(NamedTuple):
    """The states of torch's generators."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def now(cls) -> Generators:
        awake = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state() if awake else None)

    def set(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


def draws_with_torch_only(value: Any) -> bool:
    """Whether a variable of a block's is nothing through which Python's or numpy's generators could be reached."""
    if isinstance(value, list | tuple):
        return all(map(draws_with_torch_only, value))
    if isinstance(value, dict):
        return all(map(draws_with_torch_only, value.values()))
    if isinstance(value, types.ModuleType | types.FunctionType):
        name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__ or ""
        return name.partition(".")[0] in ("torch", "nnsight", "interleave")
    known = (torch.Tensor, port.Envoy, port.Tracer, int, float, str, torch.dtype, torch.device, NoneType)
    return isinstance(value, known)


class EngineMediator(port.Mediator):
    """A block in a worker: it draws from the client's random state, and leaves the engine's alone.

    Attributes:
        arrived: How it came, for the way back.
        every_position: Whether the head gives it logits for every position.
        edited: Whether it changed anything.
        steps: How many of the engine's steps its request was in.
        random: Where it is in drawing random numbers.
        plain: Whether it can draw from torch's generators only, which is known before it runs first; saving and
            setting Python's and numpy's takes fifty times as long, at every value that is served.
        generators: Where it is with torch's alone.
    """

    plain: bool | None = None
    generators: Generators | None = None
    arrived: Arrived | None = None
    every_position = True
    edited = False
    steps = 0
    random: RandomState | None = None

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

    def drawn(self) -> RandomState | None:
        """Where the block is in drawing random numbers, for the client."""
        if self.random is not None and self.generators is not None:
            self.random.torch = self.generators.cpu.numpy().tobytes()
            self.random.cuda = None if self.generators.cuda is None else self.generators.cuda.numpy().tobytes()
        return self.random


class Arrived:
    """A block that has come to a worker."""

    def __init__(self, data: bytes, tree: Tree, arenas: Arenas | None) -> None:
        block: Block = pickle.loads(data)
        for filename, text in block.sources.items():
            port.SOURCES[filename] = text
            linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        tensors = block.packed.tensors(arenas, shared=True)
        unpacker = Unpacker(block.packed.pickle, tree, tensors)
        mediator, presaved = unpacker.load()
        self.tree, self.arenas = tree, arenas
        self.captured = Captured(unpacker.memo.copy(), tensors)  # pyright: ignore[reportAttributeAccessIssue]
        mediator.__class__ = EngineMediator
        mediator.presaved = presaved
        mediator.random = block.random
        mediator.arrived = self
        self.mediator: EngineMediator = mediator

    def answer(self, saves: dict[str, Any]) -> Bytes:
        """Pack what the block saved, and what it did to the objects that it captured."""
        captured = self.captured
        # Apart: Python's state is hundreds of numbers, and `Packer` looks at every object that it meets.
        drawn = pickle.dumps(self.mediator.drawn())
        content = (saves, captured.changes(), captured.tensor_changes(), drawn)
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
    """Puts what several requests' blocks did to the client's objects together."""

    def __init__(self, tree: Tree, arenas: Arenas | None) -> None:
        self.tree, self.arenas = tree, arenas
        self._before: dict[int, Any] = {}

    def open(self, packed: Bytes, sent: Sent) -> tuple[dict[str, Any], RandomState | None]:
        """The saved values of one request's block; its changes are made on the way."""
        unpacker = Unpacker(packed.pickle, self.tree, packed.tensors(self.arenas), sent.objects, sent.tensors)
        saves, changes, tensors, drawn = unpacker.load()
        for change in changes:
            self._apply(change, sent.objects[change.number])
        apply_tensors(sent.tensors, tensors, [])
        return saves, pickle.loads(drawn)

    def _apply(self, change: Change, target: Any) -> None:
        """A list that several blocks appended to gets all of their items, a dict all of their entries."""
        first = id(target) not in self._before
        if first:
            self._before[id(target)] = list(target) if isinstance(target, list) else None
        new = change.elements
        before = self._before[id(target)]
        if not first and isinstance(target, list) and new is not None and _starts_with(new, before):
            target.extend(new[len(before) :])
        elif not first and isinstance(target, dict) and new is not None:
            target.update(zip(new[::2], new[1::2], strict=True))
        else:
            apply(change, target)


def _starts_with(items: list, start: list) -> bool:
    return len(items) >= len(start) and all(a is b for a, b in zip(items, start, strict=False))


__all__ = ["Answers", "Arrived", "EngineMediator", "Shipped", "Tree", "ship"]

"""A block on its way to the engine's workers and back, inside the request that it rides.

The same packing as for ranks that we start ourselves (`interleave.ranks`), so that the results are those of a local
trace: code crosses as code, objects that the block captured keep their identity, and what it did to them is done to
the client's own.
"""

from __future__ import annotations

import linecache
import os
import pickle
from dataclasses import dataclass
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
from interleave.ranks.tensors import Incoming, Outgoing, Table, new_arena


@dataclass
class Bytes:
    """A pickle with its tensors."""

    pickle: bytes
    table: Table
    arena: bytes | None

    @classmethod
    def of(cls, value: Any, tree: Tree, tensors: Outgoing, known: Any = ({}, {})) -> tuple[Bytes, Packer]:
        data, packer = pack(value, lambda file: Packer(file, tree, tensors, known))
        table, arena = tensors.finish()
        content = None
        if arena is not None:
            content = os.pread(arena, os.fstat(arena).st_size, 0)
            os.close(arena)
        return cls(data, table, content), packer

    def tensors(self) -> Incoming:
        arena = None
        if self.arena is not None:
            arena = new_arena(len(self.arena))
            os.pwrite(arena, self.arena, 0)
        return Incoming(self.table, arena)


class Block(NamedTuple):
    """What a request carries: the block, its sources, and the client's random state."""

    packed: Bytes
    sources: dict[str, str]
    random: RandomState


def ship(mediator: port.Mediator, tree: Tree) -> tuple[bytes, Sent]:
    """Pack a block, in the client; and what the answer will refer to.

    Raises:
        InterleaveError: With the name of a variable that cannot cross.
    """
    tensors = Outgoing()
    _, used_globals, used_locals = port.reduce_block(mediator.node, mediator.glbls, mediator.lcls)
    saved = port.saves()
    mediator.presaved = {name for name, value in used_locals.items() if id(value) in saved}
    try:
        packed, packer = Bytes.of((mediator, mediator.presaved), tree, tensors)
    except Exception as error:
        raise _naming(error, {**used_globals, **used_locals}, tree) from None
    texts = {name: port.Tracer.source(name) for name in packer.filenames}
    sources = {name: text for name, text in texts.items() if text}
    return pickle.dumps(Block(packed, sources, RandomState.now())), Sent(packer, tensors)


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
    """A block in a worker: it draws from the client's random state, and leaves the engine's alone.

    Attributes:
        arrived: How it came, for the way back.
        every_position: Whether the head gives it logits for every position.
        edited: Whether it changed anything.
        steps: How many of the engine's steps its request was in.
        random: Where it is in drawing random numbers.
    """

    arrived: Arrived | None = None
    every_position = True
    edited = False
    steps = 0
    random: RandomState | None = None

    def switch(self, *args: Any) -> Any:
        if self.random is None:
            return super().switch(*args)
        engine = RandomState.now()
        self.random.set()
        try:
            return super().switch(*args)
        finally:
            self.random = RandomState.now()
            engine.set()


class Arrived:
    """A block that has come to a worker."""

    def __init__(self, data: bytes, tree: Tree) -> None:
        block: Block = pickle.loads(data)
        for filename, text in block.sources.items():
            port.SOURCES[filename] = text
            linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        tensors = block.packed.tensors()
        unpacker = Unpacker(block.packed.pickle, tree, tensors)
        mediator, presaved = unpacker.load()
        self.tree = tree
        self.captured = Captured(unpacker.memo.copy(), tensors)  # pyright: ignore[reportAttributeAccessIssue]
        mediator.__class__ = EngineMediator
        mediator.presaved = presaved
        mediator.random = block.random
        mediator.arrived = self
        self.mediator: EngineMediator = mediator

    def answer(self, saves: dict[str, Any]) -> bytes:
        """Pack what the block saved, and what it did to the objects that it captured."""
        captured = self.captured
        content = (saves, captured.changes(), captured.tensor_changes(), self.mediator.random)
        try:
            packed, _ = Bytes.of(content, self.tree, Outgoing(detach=True), captured.known)
        except Exception as error:
            raise self._naming(error, saves) from None
        return pickle.dumps(packed)

    def _naming(self, error: Exception, saves: dict[str, Any]) -> Exception:
        for name, value in saves.items():
            try:
                Bytes.of(value, self.tree, Outgoing(detach=True), self.captured.known)
            except Exception as own:
                return InterleaveError(f"{name!r} ({type(value).__name__}) cannot leave the engine: {own}")
        return error


class Answers:
    """Puts what several requests' blocks did to the client's objects together."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._before: dict[int, Any] = {}

    def open(self, data: bytes, sent: Sent) -> tuple[dict[str, Any], RandomState | None]:
        """The saved values of one request's block; its changes are made on the way."""
        packed: Bytes = pickle.loads(data)
        unpacker = Unpacker(packed.pickle, self.tree, packed.tensors(), sent.objects, sent.tensors)
        saves, changes, tensors, random = unpacker.load()
        for change in changes:
            self._apply(change, sent.objects[change.number])
        apply_tensors(sent.tensors, tensors, [])
        return saves, random

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


__all__ = ["Answers", "Arrived", "EngineMediator", "Tree", "ship", "torch"]

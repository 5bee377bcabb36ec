"""The random numbers that blocks draw in an engine.

In one process the blocks of a trace draw one after another from one stream. In an engine they run side by side, so
only the first request's block draws from the client's stream, and the client's generators go on where it left them;
every other has a stream of its own, which follows from the client's state and from which request it is. All ranks draw
alike, and the engine's own generators are left alone.
"""

from __future__ import annotations

import hashlib
import random
import types
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch

from interleave import nnsight_port as port
from interleave.ranks.surroundings import RandomState, cuda_is_awake


class Generators(NamedTuple):
    """The states of torch's generators."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def now(cls) -> Generators:
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state() if cuda_is_awake() else None)

    def set(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)

    def within(self, state: RandomState) -> RandomState:
        """All generators' state, of which these are torch's."""
        cuda = None if self.cuda is None else self.cuda.numpy().tobytes()
        return RandomState(self.cpu.numpy().tobytes(), state.python, state.numpy, cuda)


class Drawn(NamedTuple):
    """What a block drew.

    Attributes:
        state: Where it left the client's own generators; None if it had a stream of its own.
        moved: Whether it drew anything.
    """

    state: RandomState | None
    moved: bool


def digest(state: RandomState, *more: Any) -> bytes:
    """A hash of a state."""
    kind, numbers, *rest = state.numpy
    text = repr((state.python, kind, rest, more)).encode()
    return hashlib.sha256(b"".join((state.torch, numbers.tobytes(), state.cuda or b"", text))).digest()


def stream(state: RandomState, key: int | str) -> RandomState:
    """Another state, as if seeded anew: of equal states and keys the same, of any others an unrelated one."""
    seed = digest(state, key)
    number = int.from_bytes(seed[:8], "little") >> 1
    cuda = None
    if cuda_is_awake():
        cuda = torch.Generator("cuda").manual_seed(number).get_state().numpy().tobytes()
    return RandomState(
        torch.Generator().manual_seed(number).get_state().numpy().tobytes(),
        random.Random(seed).getstate(),
        np.random.RandomState(np.frombuffer(seed, np.uint32)).get_state(),
        cuda,
    )


def same(one: RandomState, other: RandomState) -> bool:
    """Whether nothing was drawn between two states; CUDA's counts where both have one."""
    if one.cuda is None or other.cuda is None:
        one, other = (RandomState(state.torch, state.python, state.numpy, None) for state in (one, other))
    return digest(one) == digest(other)


def go_on(drawn: list[Drawn]) -> None:
    """Advance the client's generators after a trace: to where the first request's block left them. Where that drew
    nothing, and another one did, by one number, so that the next trace's streams are others."""
    first = next((one for one in drawn if one.state is not None), None)
    if first is not None and first.state is not None:
        first.state.set()
    if any(one.moved for one in drawn) and not (first is not None and first.moved):
        torch.rand(())


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


__all__ = ["Drawn", "Generators", "draws_with_torch_only", "go_on", "same", "stream"]

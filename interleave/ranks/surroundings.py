"""What around a block decides how it computes: random states, autograd's modes, the default dtype, autocast.

They belong to the driver's thread, where the user set them, so they travel with every block. Random states
come back: `torch.manual_seed` in the driver is honoured, every rank draws the same numbers, and the next draw in
the driver continues where the block stopped.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass
class RandomState:
    """The states of torch's, Python's and numpy's global generators; `cuda` is None where CUDA sleeps."""

    torch: bytes
    python: Any
    numpy: Any
    cuda: bytes | None

    @classmethod
    def now(cls) -> RandomState:
        return cls(
            torch.get_rng_state().numpy().tobytes(),
            random.getstate(),
            np.random.get_state(),
            torch.cuda.get_rng_state().numpy().tobytes() if cuda_is_awake() else None,
        )

    def set(self) -> None:
        """Make this the state of this process. A CUDA state is set only where CUDA is awake."""
        torch.set_rng_state(_state(self.torch))
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        if self.cuda is not None and cuda_is_awake():
            torch.cuda.set_rng_state(_state(self.cuda))


def cuda_is_awake() -> bool:
    return torch.cuda.is_initialized()


def _state(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class DriverRandom:
    """The driver's random state as the ranks should see it.

    A driver that never touches CUDA itself has no CUDA state to send; waking CUDA up for it would cost hundreds
    of megabytes on the device. It then hands the ranks' own state on from trace to trace, until the user seeds:
    torch queues the seeding of a sleeping CUDA, and the queue shows that it happened.
    """

    def __init__(self) -> None:
        self._cuda: bytes | None = None
        self._seeding = _queued_seeding()

    def state(self) -> tuple[RandomState, int | None]:
        """The state for the next block, and a seed for the ranks' CUDA generators if the user just seeded."""
        state, seed = RandomState.now(), None
        if state.cuda is None:
            state.cuda = self._cuda
            queued = _queued_seeding()
            if queued is not self._seeding or self._cuda is None:
                self._seeding, seed = queued, torch.initial_seed()
        return state, seed

    def take(self, state: RandomState) -> None:
        """What rank 0 had after the block."""
        state.set()
        self._cuda = state.cuda


def _queued_seeding() -> Any:
    """An object that is another one after each `torch.manual_seed` while CUDA sleeps."""
    tracker = getattr(torch.cuda, "_lazy_seed_tracker", None)
    return getattr(tracker, "manual_seed_all_cb", None)


@dataclass
class Surroundings:
    """What of the driver's thread a block needs on a rank, apart from its variables."""

    random: RandomState
    cuda_seed: int | None
    grad: bool
    inference: bool
    dtype: torch.dtype
    autocast: dict[str, torch.dtype]

    @classmethod
    def now(cls, driver: DriverRandom) -> Surroundings:
        state, seed = driver.state()
        return cls(
            state,
            seed,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            {
                device: torch.get_autocast_dtype(device)
                for device in ("cpu", "cuda")
                if torch.is_autocast_enabled(device)
            },
        )

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Run a block in these surroundings, on a rank. Random states stay as the block leaves them."""
        before = torch.get_default_dtype()
        self.random.set()
        if self.cuda_seed is not None and torch.cuda.is_available():
            torch.cuda.manual_seed_all(self.cuda_seed)
        with contextlib.ExitStack() as stack:
            stack.callback(torch.set_default_dtype, before)
            torch.set_default_dtype(self.dtype)
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(device, dtype=dtype))
            yield

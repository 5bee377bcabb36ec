"""The rank's two threads: what the watcher may do to the main thread, and when."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from interleave.ranks.rank import Interruptible, Together


class Agreement:
    """Records what a rank's agreement is told."""

    driven = False

    def __init__(self) -> None:
        self.told: list[str] = []

    def break_groups(self) -> None:
        self.told.append("break")

    def rebuild(self, generation: int) -> None:
        self.told.append(f"rebuild {generation}")


def test_a_late_break_does_not_hit_the_next_groups() -> None:
    agreement = Agreement()
    together = Together(SimpleNamespace(interleaver=SimpleNamespace(agreement=agreement)))
    assert agreement.driven
    together.if_current(0, together.break_groups)
    together.rebuild(1)
    together.if_current(0, together.break_groups)
    assert agreement.told == ["break", "rebuild 1"]


def test_an_interrupt_wakes_a_running_block_and_nothing_else() -> None:
    interruptible = Interruptible()
    interruptible.interrupt()
    with pytest.raises(KeyboardInterrupt), interruptible.running():
        interruptible.interrupt()
        time.sleep(10)
    interruptible.interrupt()

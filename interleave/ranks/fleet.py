"""All ranks of one model, as the driver talks to them: ask all, wait for all, bring them back after trouble.

A question goes to every rank, and every rank answers. What can go wrong in between:

* A rank raises, and its peers wait for it in a collective. After a moment the groups of the ranks that
  answered are cut, so the others fail at once instead of at their limit.
* A rank dies. Its connection ends, the others are ended, and `RankDied` tells how.
* The user interrupts. The ranks get the interrupt, those that are deep in a collective get their groups cut,
  and the model stays loaded.

After an error or an interrupt the ranks rebuild their groups. Ranks that do not come back are killed; whoever
uses the model next starts new ones.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import wait
from typing import Any

from ..errors import RankDied
from ..load import LoadRequest
from .channel import Channel, Door, Message
from .processes import PROGRAM, Processes

#: Seconds that the ranks may take to end a block after another rank's error, before groups are cut.
GRACE = 1.0
#: Seconds that interrupted ranks may take to come back.
PATIENCE = 5.0


class Interrupts:
    """Notes Ctrl-C instead of raising it, so that no message is left half sent or half read.

    Does nothing outside the main thread, where Python raises no interrupts, nor where they are ignored.
    """

    def __init__(self) -> None:
        self.count = 0
        self._previous: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._previous = previous
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, *_: Any) -> None:
        self.count += 1

    def deliver(self) -> None:
        """Do now what the program does on Ctrl-C; call it after the `with`."""
        if self.count and self._previous is not None:
            self._previous(signal.SIGINT, None)


class Fleet:
    """Running ranks that have loaded `request`'s model.

    Attributes:
        alive: Whether the ranks can be asked; once False it stays so.
        why: What ended them.

    Raises:
        RankDied: A rank ended before it was ready.
        KeyboardInterrupt: The user did not want to wait.
    """

    def __init__(self, request: LoadRequest, program: tuple[str, ...] = PROGRAM) -> None:
        self.alive = True
        self.why = ""
        self._limit = request.limit
        self._generation = 0
        self._requests: dict[int, Channel] = {}
        self._controls: dict[int, Channel] = {}
        self._processes = Processes(request.world_size, program)
        try:
            door = Door(self._processes.door_path, self._processes.secret)
            with contextlib.closing(door):
                self._processes.start()
                channels = door.admit(2 * request.world_size, self._check)
            self._requests = {rank: c for (purpose, rank), c in channels.items() if purpose == "requests"}
            self._controls = {rank: c for (purpose, rank), c in channels.items() if purpose == "control"}
        except BaseException:
            self.kill("it did not start")
            raise

    @property
    def ranks(self) -> range:
        return range(self._processes.world_size)

    def ask(self, kind: str, body: Any, arena: int | None = None) -> dict[int, Message]:
        """Send a request to every rank and wait for the replies; a rank that was given up on has none.

        Raises:
            RankDied: A rank ended; the others were ended too.
            KeyboardInterrupt: After the ranks came back, or were killed.
        """
        with Interrupts() as interrupts:
            try:
                self._send(kind, body, arena)
                replies = self._gather(interrupts, can_break=kind == "run")
            except BaseException as error:
                self.kill(str(error))
                raise
            for reply in replies.values() if interrupts.count else ():
                if reply.arena is not None:
                    os.close(reply.arena)
            if interrupts.count:
                self.recover()
        interrupts.deliver()
        return replies

    def recover(self) -> None:
        """Have the ranks make their groups anew after an error. Where that fails, they are killed."""
        if not self.alive:
            return
        self._generation += 1
        with Interrupts() as interrupts:
            try:
                self._send("rebuild", self._generation, None)
                replies = self._gather(interrupts, can_break=False, seconds=self._limit + PATIENCE)
                errors = [reply.body.error for reply in replies.values() if reply.body.error is not None]
                if self.alive and errors:
                    self.kill(f"their groups could not be made anew: {errors[0].rebuild()}")
            except RankDied as error:
                self.kill(str(error))
        interrupts.deliver()

    def _send(self, kind: str, body: Any, arena: int | None) -> None:
        for rank, channel in self._requests.items():
            try:
                channel.send(kind, body, arena)
            except OSError:
                raise self._died(rank) from None

    def _control(self, kind: str, ranks: Any) -> None:
        for rank in ranks:
            with contextlib.suppress(OSError):
                self._controls[rank].send(kind, self._generation)

    def _gather(self, interrupts: Interrupts, can_break: bool, seconds: float | None = None) -> dict[int, Message]:
        """One reply of every rank. Ranks that had to be given up on are missing, and all are killed then.

        Args:
            can_break: Whether ranks may be freed from a collective by cutting groups; where not, ranks that
                wait for one that raised are given up on after the grace.
            seconds: Give up on all that have not answered by then.
        """
        replies: dict[int, Message] = {}
        started = time.monotonic()
        failed: float | None = None
        interrupted: float | None = None
        cut = False
        while len(replies) < len(self.ranks):
            missing = [rank for rank in self.ranks if rank not in replies]
            self._read(missing, replies)
            now = time.monotonic()
            missing = [rank for rank in missing if rank not in replies]
            if failed is None and any(reply.body.error is not None for reply in replies.values()):
                failed = now
            if interrupts.count and interrupted is None:
                interrupted = now
                self._control("interrupt", missing)
            since = min((moment for moment in (failed, interrupted) if moment is not None), default=None)
            if since is None:
                if seconds is not None and now - started > seconds:
                    self.kill(f"ranks {missing} did not answer within {seconds:g} s")
                    break
                continue
            if can_break and not cut and now - since > GRACE:
                cut = True
                self._control("break", self.ranks if interrupted is not None else list(replies))
            patience = self._limit + PATIENCE if interrupted is None else PATIENCE
            if not can_break:
                patience = GRACE
            if interrupts.count > 1 or now - since > patience:
                self.kill(f"ranks {missing} did not end the block when they were told to")
                break
        return replies

    def _read(self, missing: list[int], replies: dict[int, Message]) -> None:
        """Take what the missing ranks have sent, waiting a moment for it."""
        waiting: dict[Any, int] = {self._requests[rank].connection: rank for rank in missing}
        ready = wait(list(waiting), timeout=0.1)
        if not ready:
            self._check()
        for connection in ready:
            rank = waiting[connection]
            try:
                message = self._requests[rank].receive()
            except (EOFError, OSError):
                raise self._died(rank) from None
            if message.kind == "write":
                name, text = message.body
                stream = getattr(sys, name)
                stream.write(text)
                stream.flush()
            else:
                replies[rank] = message

    def _check(self) -> None:
        """Raise `RankDied` if a rank has ended."""
        for rank in self._processes.ended():
            raise self._died(rank)

    def check(self) -> None:
        """Notice a rank that died since the last reply. Raises nothing: `alive` and `why` tell."""
        if self.alive and self._processes.ended():
            rank = min(self._processes.ended())
            self.kill(str(self._died(rank)))

    def _died(self, rank: int) -> RankDied:
        # The connection ends a moment before the process can be asked how it ended.
        self._processes.wait_for(rank, 2.0)
        return RankDied(
            f"{self._processes.describe(rank)}\nThe other ranks were ended. The next trace starts new ones and "
            f"loads the model again"
        )

    def kill(self, why: str) -> None:
        """End all ranks at once; they cannot be asked any more."""
        self.alive, self.why = False, self.why or why
        self._processes.kill()
        self._close()

    def end(self) -> None:
        """Let the ranks go: idle ones leave by themselves, others are killed."""
        if not self.alive:
            return
        self.alive, self.why = False, "it was closed"
        for channel in self._requests.values():
            with contextlib.suppress(OSError):
                channel.send("close")
        self._processes.wait(1.0)
        self._processes.kill()
        self._close()

    def _close(self) -> None:
        for channel in (*self._requests.values(), *self._controls.values()):
            channel.close()
        self._processes.remove()

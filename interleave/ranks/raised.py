"""Errors that cross from a rank to the driver: the same type, with the user's own frames.

An exception object pickles badly (its constructor may want other arguments than it keeps), and a traceback not at
all. So the exception is tried out on the rank, replaced by a description where it does not survive, and its frames
travel as names and numbers, from which the driver builds a traceback that displays like the original.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle
from tblib import Traceback

from .. import nnsight_port as port
from ..errors import DivergedBlock, InterleaveError

#: Frames of these packages say nothing about the user's code.
_OURS = [Path(__file__).parents[2] / package for package in ("interleave", "runtimes", "boundary")]
_PLUMBING = tuple(os.path.join(root, "") for root in (Path(inspect.getfile(port.Envoy)).parents[1], *_OURS))


#: An endless recursion has thousands of frames, and they say the same.
MOST_FRAMES = 60


@dataclass
class Raised:
    """One rank's exception: `exception` is its pickle, `frames` its traceback, `cause` what it was raised from."""

    exception: bytes
    frames: dict[str, Any] | None
    cause: Raised | None

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Describe `error`, on the rank."""
        inside = error.__dict__.pop("__intervention_tb__", None)
        frames = _user_frames(inside) or _user_frames(error.__traceback__)
        cause = None if error.__cause__ is None else cls.of(error.__cause__)
        return cls(_portable(error), frames, cause)

    def rebuild(self) -> BaseException:
        """The exception, on the driver; raise it as it is, it has its traceback."""
        error: BaseException = cloudpickle.loads(self.exception)
        if self.cause is not None:
            error.__cause__ = self.cause.rebuild()
        return error.with_traceback(self.traceback())

    def traceback(self) -> TracebackType | None:
        return None if self.frames is None else Traceback.from_dict(self.frames).as_traceback()


def _portable(error: BaseException) -> bytes:
    try:
        data = cloudpickle.dumps(error)
        if type(cloudpickle.loads(data)).__qualname__ == type(error).__qualname__:
            return data
    except Exception:
        # Whatever goes wrong in foreign pickling code: the description below always works.
        pass
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    stand_in = InterleaveError(f"{kind}: {error}")
    for note in getattr(error, "__notes__", ()):
        stand_in.add_note(note)
    return cloudpickle.dumps(stand_in)


def _user_frames(traceback: TracebackType | None) -> dict[str, Any] | None:
    found = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_PLUMBING):
            found.append(traceback)
        traceback = traceback.tb_next
    if len(found) > MOST_FRAMES:
        found = [*found[: MOST_FRAMES // 2], *found[-MOST_FRAMES // 2 :]]
    kept = None
    for entry in reversed(found):
        kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return None if kept is None else Traceback(kept).to_dict()


def combine(errors: dict[int, BaseException], world_size: int) -> BaseException:
    """The one error the user sees for those of several ranks: of the lowest rank, the others as notes.

    Ranks that raise the same are one error. A rank that merely lost the others does not hide what they raised.
    """
    own = [rank for rank, error in errors.items() if not isinstance(error, DivergedBlock)]
    first = min(own or errors)
    chosen = errors[first]
    for rank, error in sorted(errors.items()):
        if rank != first and (type(error), str(error)) != (type(chosen), str(chosen)):
            chosen.add_note(f"rank {rank} raised {type(error).__name__}: {error}")
    silent = sorted(set(range(world_size)) - set(errors))
    if silent and own:
        chosen.add_note(f"only {_named(sorted(errors))} raised; {_named(silent)} did not")
    return chosen


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

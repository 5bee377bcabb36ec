"""What a driver asks its ranks to run - a captured block, or a method of the model - and what they answer."""

from __future__ import annotations

import marshal
from dataclasses import dataclass
from typing import Any

from .. import nnsight_port as port
from .packing import Packed
from .raised import Raised
from .surroundings import RandomState, Surroundings


@dataclass
class Block:
    """A captured `with` block: its tracer, its code object, and the variables it reads.

    `run` gives what the block saved, by name; on the driver these names are bound in the caller's frame.
    """

    tracer: Any
    code: bytes
    globals: dict[str, Any]
    locals: dict[str, Any]

    @classmethod
    def of(cls, tracer: Any) -> Block:
        """Reduce `tracer`, in the driver, to what the block refers to."""
        frame = tracer.info.frame
        _, used_globals, used_locals = port.reduce_block(tracer.node, frame.f_globals, dict(frame.f_locals))
        return cls(tracer, marshal.dumps(tracer.info.code), used_globals, used_locals)

    @property
    def variables(self) -> dict[str, Any]:
        """Everything that crosses, by the name the user knows it by."""
        inputs = {f"the trace's input {place}": value for place, value in enumerate(getattr(self.tracer, "args", ()))}
        options = {f"the trace's {name}=": value for name, value in getattr(self.tracer, "kwargs", {}).items()}
        return {**inputs, **options, **self.globals, **self.locals}

    @property
    def filenames(self) -> set[str]:
        return {self.tracer.info.frame.f_code.co_filename}

    @property
    def where(self) -> str:
        return f"{self.tracer.info.frame.f_code.co_filename}:{self.tracer.node.lineno}"

    def run(self) -> dict[str, Any]:
        code = marshal.loads(self.code)
        frame = self.tracer.info.frame
        frame.f_globals, frame.f_locals = self.globals, dict(self.locals)
        self.tracer.info = port.Tracer.Info(frame, code)
        self.tracer.backend = port.Backend()
        missing = object()
        port.inc()
        try:
            self.tracer.execute(code)
            return {
                name: value for name, value in frame.f_locals.items() if self.locals.get(name, missing) is not value
            }
        finally:
            port.dec()


@dataclass
class Call:
    """`envoy.method(*args, **kwargs)`, as a plain call. `run` gives its result, under the name `result`."""

    envoy: Any
    method: str
    args: tuple
    kwargs: dict[str, Any]

    @property
    def variables(self) -> dict[str, Any]:
        """As for a block."""
        arguments = {f"argument {place}": value for place, value in enumerate(self.args)}
        return {**arguments, **{f"{name}=": value for name, value in self.kwargs.items()}}

    @property
    def filenames(self) -> set[str]:
        return set()

    @property
    def where(self) -> str:
        return "this call"

    def run(self) -> dict[str, Any]:
        return {"result": getattr(self.envoy, self.method)(*self.args, **self.kwargs)}


@dataclass
class Request:
    """One block or one call, for every rank: what to run (`packed`), in which surroundings.

    `sources` are the texts, by file name, of code that the ranks cannot read from a file and have not seen yet.
    """

    packed: Packed
    surroundings: Surroundings
    sources: dict[str, str]


@dataclass
class Reply:
    """How it ended on one rank. Only rank 0 sends `packed`, what comes back, its random state, and after loading
    the model's layouts."""

    error: Raised | None = None
    packed: Packed | None = None
    random: RandomState | None = None
    digest: str | None = None
    layouts: dict[str, Any] | None = None

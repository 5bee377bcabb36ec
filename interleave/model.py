"""What every runtime's root envoy has in common: how a trace begins and ends, layouts, and the end of the model."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from boundary import collectives

from . import errors
from . import nnsight_port as port
from .cache import Cache
from .envoy import Envoy
from .errors import InterleaveError
from .fragments import Placed, Refused, Tree, reveal
from .interleaver import Interleaver
from .layout import Layout

#: The packages whose frames are plumbing between a block and the model: an error shows the user's own lines.
_PLUMBING = tuple(str(Path(inspect.getfile(package)).parent) for package in (errors, collectives, port.nnsight))


class Tracer(port.InterleavingTracer):
    """nnsight's tracer, whose caches assemble once and whose errors show the user's own lines."""

    def __exit__(self, *raised: Any) -> bool:
        try:
            return super().__exit__(*raised)
        except BaseException as error:
            if not (hasattr(error, "__intervention_tb__") or isinstance(error, InterleaveError | KeyboardInterrupt)):
                raise  # not the block's: where it happened is what matters
            trace = port.filter_traceback(self.traceback(error), lambda frame: not _is_plumbing(frame))
            if trace is None:
                raise
            raise error.with_traceback(trace) from error.__cause__

    def cache(
        self,
        modules: list[Any] | None = None,
        device: Any = torch.device("cpu"),  # noqa: B008 - nnsight's own default
        dtype: Any = None,
        detach: bool = True,
        include_output: bool = True,
        include_inputs: bool = False,
        non_blocking: bool = False,
    ) -> port.CacheView:
        """Record many modules' values; nnsight's arguments. Every value is whole, post-intervention."""
        mediator = port.Mediator.current("tracer.cache()")
        if mediator.pending is not None:
            raise ValueError("tracer.cache() must be declared before the block reads or writes a value")
        cache = Cache(
            self.envoy,
            modules=modules,
            device=device,
            dtype=dtype,
            detach=detach,
            include_output=include_output,
            include_inputs=include_inputs,
            non_blocking=non_blocking,
        )
        mediator.caches.append(cache)
        return port.save(port.CacheView(cache, None))


def _is_plumbing(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PLUMBING)


class Model(Envoy):
    """The root of a model's envoy tree. Runtimes derive from it, before nnsight's own model classes.

    Attributes:
        interleaver: This project's interleaver, with the fragments and the agreement of the runtime.
    """

    interleaver: Interleaver

    @property
    def ranks(self) -> Any:
        """The rank processes that run the blocks, where this process is their driver; None elsewhere."""
        return self.interleaver.ranks

    @ranks.setter
    def ranks(self, ranks: Any) -> None:
        self.interleaver.ranks = ranks

    def trace(self, *inputs: Any, tracer_cls: Any = None, backend: Any = None, **kwargs: Any) -> Any:
        """Open a trace; nnsight's arguments. On a driver the block runs on the ranks."""
        return super().trace(*inputs, tracer_cls=tracer_cls or Tracer, backend=backend or self._backend(), **kwargs)

    def session(self, backend: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Open a session of several traces; on a driver it runs on the ranks as one block."""
        return super().session(backend=backend or self._backend(), **kwargs)

    def _backend(self) -> Any:
        return None if self.ranks is None else self.ranks.backend(self)

    def interleave(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `fn` in step with the registered blocks. Every rank must make the call."""
        if self.ranks is not None:
            if port.detect_fake_mode() is None:
                return self.ranks.call(self, "interleave", (fn, *args), kwargs)
            with self._unsharded():
                return super().interleave(fn, *args, **kwargs)
        if self.interleaver.fragments.enabled:
            args, kwargs = reveal((args, kwargs))
        with self._agreed(summary(fn, args, kwargs)):
            return super().interleave(fn, *args, **kwargs)

    @contextmanager
    def _unsharded(self) -> Iterator[None]:
        """A driver's outline computes shapes as one process: it is not sharded itself."""
        fragments = self.interleaver.fragments
        enabled, fragments.enabled = fragments.enabled, False
        try:
            yield
        finally:
            fragments.enabled = enabled

    @contextmanager
    def _agreed(self, what: str) -> Iterator[None]:
        """One trace in the ranks' agreement: it starts on all of them, and ends well on all or raises on all."""
        agreement = self.interleaver.agreement
        if agreement is None:
            yield
            return
        agreement.open(what)
        try:
            yield
        except BaseException as error:
            told = agreement.translate(error) if isinstance(error, Exception) else error
            agreement.close(told)
            if told is error:
                raise
            if hasattr(error, "__intervention_tb__"):
                told.__intervention_tb__ = error.__intervention_tb__  # type: ignore[attr-defined]
            raise told from error
        agreement.close()

    # -- layouts ---------------------------------------------------------------------------------------------

    def layout(self, path: str) -> str:
        """What the value at a location is on each rank.

        Args:
            path: A location (`"model.layers.5.mlp.gate_proj.output"`), or a module's path, for its output. The
                root's own name may be left out.

        Returns:
            `"whole"`, or the layout over an axis of the mesh, or why the value is refused; of a value with several
            parts, those of the parts.

        Raises:
            InterleaveError: The model has no such module.
        """
        return describe(self.interleaver.fragments.layout(self._location(path)))

    def declare(self, path: str, layout: Layout, axis: str = "tp") -> None:
        """Say what a refused location's value is, where you know and the package does not.

        Args:
            path: A location; `*` stands for any part of a name (`"model.layers.*.mlp.source.self_act_fn_0.output"`).
            layout: How the ranks' pieces make the whole.
            axis: The axis of the mesh they are spread over.

        Raises:
            InterleaveError: The model is not sharded over that axis, or has no such module.
        """
        fragments = self.interleaver.fragments
        if not fragments.enabled:
            return
        if self.ranks is not None:
            self.ranks.call(self, "declare", (path, layout, axis), {})
        elif axis not in fragments.groups:
            raise InterleaveError(f"the model is not sharded over {axis!r}; its axes are {sorted(fragments.groups)}")
        module, dot, operation = path.partition(".source.")
        if not dot:
            module, dot, operation = path.rpartition(".")
        names = [e.path for e in self.modules()]
        short = [name.partition(".")[2] for name in names]
        found = [
            n
            for n, s in zip(names, short, strict=True)
            if fnmatch.fnmatchcase(n, module) or fnmatch.fnmatchcase(s, module)
        ]
        if not found:
            raise InterleaveError(f"the model has no module {module!r}")
        for name in found:
            fragments.tree[f"{name}{dot}{operation}"] = Placed(layout, axis)

    def _location(self, path: str) -> str:
        names = {envoy.path for envoy in self.modules()}
        root = self.path
        if ".source." in path:
            module = path.partition(".source.")[0]
            return path if module in names else f"{root}.{path}"
        for name in (path, f"{root}.{path}"):
            if name in names:
                return f"{name}.output"
            module, _, side = name.rpartition(".")
            if module in names and side in ("input", "inputs", "output"):
                return f"{module}.{side.removesuffix('s') if side == 'inputs' else side}"
        raise InterleaveError(f"the model has no module or location {path!r}; `print(model)` shows its modules")

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the ranks this model started, if any. A second call does nothing; a closed model refuses traces."""
        if self.ranks is not None:
            self.ranks.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def describe(tree: Tree) -> str:
    """A layout tree in words, on one line: what a value's parts are, in order."""
    if tree is None:
        return "whole"
    if isinstance(tree, Placed | Refused):
        return str(tree)
    if isinstance(tree, tuple):
        parts = [describe(node) for node in tree]
        while len(parts) > 1 and parts[-1] == "whole":
            parts.pop()
        return parts[0] if len(parts) == 1 else "(" + ", ".join(parts) + ")"
    return "{" + ", ".join(f"{key}: {describe(node)}" for key, node in tree.items()) + "}"


def summary(fn: Any, args: tuple, kwargs: dict) -> str:
    """What a trace is about to run on, so that ranks with different inputs find out before they start.

    Tensors by dtype and shape: a model's own collectives of unequal sizes would end the process.
    """
    batcher = kwargs.get("batcher")
    inputs = [args, {k: v for k, v in kwargs.items() if k != "batcher"}, getattr(batcher, "invokes", ())]

    def said(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{value.dtype}{list(value.shape)}"
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{key}: {said(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list | tuple):
            return "[" + ", ".join(map(said, value)) + "]"
        return repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__

    return f"{fn if isinstance(fn, str) else getattr(fn, '__name__', 'a call')}{said(inputs)}"

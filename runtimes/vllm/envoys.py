"""Envoys over an engine's modules: HuggingFace's values by HuggingFace's names, vLLM's own under `.raw`."""

# vLLM's and nnsight's classes meet here at run time, and their declared types do not say so.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm.forward_context import is_forward_context_available

from interleave import nnsight_port as port
from interleave.envoy import Envoy
from interleave.errors import InterleaveError, Unserved
from interleave.fragments import missing
from interleave.layout import assemble
from interleave.ranks.raised import Raised

from .interleaver import EngineInterleaver
from .names import Absent, PartOf, TiedHead
from .parallel import is_parallel, parts, weight
from .stages import Stages
from .views.base import View

#: Names of parameters that HuggingFace's modules have.
PARAMETERS = ("weight", "bias")


class Raw:
    """vLLM's own values at a module: its structure, its shapes ([rows, ...], no batch axis), whole over the ranks.

    `input`, `inputs`, `output` read and write as on an envoy; `source` shows the operations of vLLM's forward.
    """

    def __init__(self, envoy: EngineEnvoy) -> None:
        self.envoy = envoy
        self.interleaver = envoy.interleaver
        self.path = envoy.path if envoy.path not in envoy.interleaver.views else f"{envoy.path}.raw"

    inputs = port.Envoy.inputs
    input = port.Envoy.input
    output = port.Envoy.output

    @property
    def source(self) -> port.Source:
        """The operations of vLLM's forward."""
        return port.Source(self.envoy, self.path, install_source(self.envoy))

    def __repr__(self) -> str:
        return f"vLLM's own {self.envoy.path}"


class EngineEnvoy(Envoy):
    """An envoy whose module runs in an engine's workers."""

    interleaver: EngineInterleaver  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, module: torch.nn.Module, path: str = "model", **options: Any) -> None:
        # A block refers to envoys by path: the tree itself does not travel.
        self.__dict__["_persistent_id"] = f"Envoy:{path}"
        super().__init__(module, path, **options)

    def _resolve_envoy_class(self, module: torch.nn.Module, path: str) -> type[port.Envoy]:
        if isinstance(module, Absent):
            return AbsentEnvoy
        if isinstance(self._module, torch.nn.ModuleList) and self.path.endswith(".layers"):
            return EngineLayerEnvoy
        return EngineEnvoy

    @property
    def raw(self) -> Raw:
        """vLLM's own values at this module."""
        return Raw(self)

    def __call__(self, *args: Any, hook: bool = False, **kwargs: Any) -> Any:
        """Run this module ad hoc, as HuggingFace's: wholes in, wholes out, with a batch axis. In a block only.

        Raises:
            InterleaveError: The module computes with the requests of a step (attention, layers), or this is no block.
        """
        interleaver = self.interleaver
        if not interleaver.interleaving:
            raise InterleaveError(f"`{self.path}` runs in the engine's workers: call it in a trace's block")
        reason = interleaver.uncallable(self.path)
        if reason is not None:
            raise Unserved(f"`{self.path}` cannot be called from a block: {reason}")
        if interleaver.stages is not None and not interleaver.stages.mine(self.path):
            return port.Mediator.value(f"{self.path}.called")
        view = interleaver.views[self.path]
        if view.needs_step and not is_forward_context_available():
            return self._telling(self.path, self._too_late)
        return self._telling(self.path, lambda: self._run(view, args, kwargs))

    def _too_late(self) -> Any:
        raise Unserved(f"`{self.path}` can be called while the engine runs the model, and that is over in this step")

    def _run(self, view: View, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.interleaver.interleaving = False
        try:
            return view.call(view.module, args, kwargs)
        finally:
            self.interleaver.interleaving = True

    def _telling(self, called: str, compute: Callable[[], Any]) -> Any:
        """What `compute` gives or raises; the other stages of a pipeline, whose blocks ask for it, too, are told."""
        stages = self.interleaver.stages
        if stages is None:
            return compute()
        block = port.Mediator.current("a call")
        try:
            value = compute()
        except Exception as error:
            stages.note(block, "raised", f"{called}.called", Raised.of(error))
            raise
        stages.note(block, "value", f"{called}.called", value)
        return value

    def __getattr__(self, name: str) -> Any:
        interleaver: EngineInterleaver = self.__dict__["interleaver"]
        if interleaver.stages is not None and interleaver.interleaving and name in PARAMETERS:
            return self._across_stages(name, interleaver.stages)
        return self._parameter(name)

    def _parameter(self, name: str) -> Any:
        if name in PARAMETERS and isinstance(self._module, PartOf | TiedHead):
            return self._whole(name, None)
        return super().__getattr__(name)

    def _across_stages(self, name: str, stages: Stages) -> Any:
        """A parameter, which the stage that holds the module reads and the others are told."""
        called = f"{self.path}.{name}"
        if not stages.mine(self.path):
            return port.Mediator.value(f"{called}.called")
        return self._telling(called, lambda: self._parameter(name))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        raise Unserved(f"the parameters in `{self.path}` are vLLM's, fused and renamed: read a module's `.weight`")

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        raise Unserved(f"the parameters in `{self.path}` are vLLM's, fused and renamed: read a module's `.weight`")

    def _whole(self, name: str, value: Any) -> Any:
        """A parameter as HuggingFace's model has it, whole; a copy, since every request of the engine uses it.

        Raises:
            InterleaveError: This is no block: the parameters are in the workers.
            UnknownLayout: The engine has packed or quantized it.
        """
        module, views = self._module, self.interleaver.views
        if isinstance(module, PartOf | TiedHead):
            view = views.get(self.path)
            value = None if view is None else getattr(view.module, name)
        if value is not None and not isinstance(value, torch.Tensor):
            return value
        if not self.interleaver.interleaving or (value is None and self.path not in views):
            raise InterleaveError(f"`{self.path}.{name}` is in the engine's workers: read it in a trace's block")
        if value is None:
            return None
        owner = views[self.path].module if isinstance(module, PartOf | TiedHead) else module
        layout = weight(owner, name) if is_parallel(owner) else None
        piece = value.detach()
        if isinstance(module, PartOf):
            part = parts(owner)[module.shard]
            piece = piece[part.start : part.start + part.width]
            layout = None if part.layout is None else replace(part.layout, dim=0)
        if layout is None:
            return piece.clone()
        groups = self.interleaver.fragments.groups
        key = self.interleaver.call_key(f"{self.path}.{name}")
        return assemble(piece, layout, groups.get("tp", groups["alone"]), key)

    @property
    def source(self) -> port.Source:
        raise Unserved(
            f"the forward that runs at `{self.path}` is vLLM's and has other operations than HuggingFace's: "
            f"`.raw.source` shows them"
        )


class EngineLayerEnvoy(EngineEnvoy):
    """The envoy of a decoder layer."""

    @port.eproperty(key="output")
    def residual(self, value: Any) -> torch.Tensor:
        """The residual stream after this layer: [1, tokens, hidden], in the model's dtype."""
        return value


def absent(name: str) -> property:
    def refuse(self: port.Envoy, *_: Any) -> Any:
        reason = "vLLM's model has no such module"
        raise Unserved(missing(f"{self.path}.{name}", reason))

    return property(refuse, refuse)


class AbsentEnvoy(EngineEnvoy):
    """A name of HuggingFace's that vLLM's model has nothing for."""

    input = absent("input")
    inputs = absent("input")
    output = absent("output")
    raw = absent("raw")

    def skip(self, replacement: Any) -> None:
        raise Unserved(missing(f"{self.path}.skip", "vLLM's model has no such module"))


def instrument(envoy: port.Envoy, interleaver: EngineInterleaver) -> None:
    """Put the view around a module's forward, where it has one; vLLM's own values move to `.raw`."""
    view = interleaver.around.get(envoy.path)
    if view is not None:
        state = port.install_controller(envoy)
        register(state, envoy, interleaver)
        surround(state, view, interleaver, envoy._module)


def register(state: Any, envoy: port.Envoy, interleaver: EngineInterleaver) -> None:
    """Have vLLM's own values at a module visited where its envoy has them; the controller's own place is the view's."""
    state.register(interleaver, f"{envoy.path}.raw" if envoy.path in interleaver.views else envoy.path)


def surround(state: Any, view: View, interleaver: EngineInterleaver, module: torch.nn.Module) -> None:
    """Make the module's body the view's, in a step with blocks."""
    native: Callable[..., Any] = state.body
    view.native = partial(native, module)

    def body(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (interleaver.interleaving and interleaver.busy):
            return native(module, *args, **kwargs)

        return view.forward(view.native, args, kwargs)

    state.body = body


def install_source(envoy: EngineEnvoy) -> Any:
    """Instrument the operations of the module's own forward, inside its view."""
    state = port.install_controller(envoy)
    before = state.sourced
    compiled = port.install_source(envoy)
    if not before:
        instrument(envoy, envoy.interleaver)
    elif envoy.path in envoy.interleaver.around:
        register(state, envoy, envoy.interleaver)
    return compiled


__all__ = ["AbsentEnvoy", "EngineEnvoy", "EngineLayerEnvoy", "Raw", "instrument"]

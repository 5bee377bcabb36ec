"""Envoys over modules that may be sharded: calls, parameters and sources in terms of wholes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from . import nnsight_port as port
from .fragments import reveal
from .interleaver import Interleaver


class Envoy(port.Envoy):
    """nnsight's envoy, whose ad-hoc calls take and give wholes and whose parameters read whole."""

    interleaver: Interleaver

    def _resolve_envoy_class(self, module: torch.nn.Module, path: str) -> type[port.Envoy]:
        chosen = super()._resolve_envoy_class(module, path)
        return Envoy if chosen is port.Envoy else chosen

    def __call__(self, *args: Any, hook: bool = False, **kwargs: Any) -> Any:
        """Run this module ad hoc. Arguments and result are wholes; every rank must make the call.

        Args:
            *args: What the module's forward takes, as one process would give it.
            hook: Whether the trace sees the call (nnsight's meaning).
            **kwargs: Keyword arguments of the forward.

        Raises:
            UnknownLayout: The module is sharded in a way that does not tell how its result is spread.
        """
        if self.interleaver.ranks is not None:
            return self.interleaver.ranks.call(self, "__call__", args, {**kwargs, "hook": hook})
        fragments = self.interleaver.fragments
        if not fragments.enabled:
            return super().__call__(*args, hook=hook, **kwargs)
        args, kwargs = reveal((args, kwargs))
        output = f"{self.path}.output"
        if self.path not in fragments.holding:
            # Nothing of the module is split: on wholes it computes what one process would.
            return fragments.withhold(output, super().__call__(*args, hook=hook, **kwargs))
        key = self.interleaver.call_key(self.path)
        args, kwargs = first_positional(self._module, args, kwargs)
        args, kwargs = fragments.split(f"{self.path}.input", (args, kwargs), f"{key}/in")
        result = super().__call__(*args, hook=hook, **kwargs)
        whole, _ = fragments.whole(output, result, key)
        return whole

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, torch.Tensor) and value.is_meta and self.interleaver.ranks is not None:
            return self.interleaver.ranks.call(self, "__getattr__", (name,), {})
        return self._whole(name, value)

    @property
    def device(self) -> torch.device | None:
        """Where values for this module belong: on a driver the CPU, from where they go to the ranks."""
        return torch.device("cpu") if self.interleaver.ranks is not None else super().device

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The module's parameters by name (torch's arguments), each of them whole. Every rank must iterate."""
        for name, parameter in self._module.named_parameters(*args, **kwargs):
            yield name, self._whole(name, parameter)

    def parameters(self, *args: Any, **kwargs: Any) -> Iterator[torch.Tensor]:
        """The module's parameters (torch's arguments), each of them whole. Every rank must iterate."""
        for _, parameter in self.named_parameters(*args, **kwargs):
            yield parameter

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The module's state (torch's arguments) in wholes. Every rank must call it."""
        state = self._module.state_dict(*args, **kwargs)
        return {name: self._whole(name, value) for name, value in state.items()}

    def _whole(self, name: str, value: Any) -> Any:
        if isinstance(value, DTensor):
            return self.interleaver.parameters.read(f"{self.path}.{name}", value)
        return value

    @property
    def source(self) -> port.Source:
        """The operations of this module's own forward, under the names they have on one process."""
        inner = self.interleaver.fragments.own_forward(self._module)
        if inner is None:
            return super().source
        return port.Source(self, self.path, inner.instrument(self))


def first_positional(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The call with its first argument given by position, as the layouts of inputs and some wrappers expect it."""
    if args:
        return args, kwargs
    first = next(iter(list(inspect.signature(type(module).forward).parameters)[1:]), None)
    if first not in kwargs:
        return args, kwargs
    return (kwargs[first],), {key: value for key, value in kwargs.items() if key != first}


class DecoderLayerEnvoy(Envoy):
    """The envoy of one entry of a model's stack of layers."""

    @port.eproperty(key="output")
    def residual(self, value: Any) -> torch.Tensor:
        """The residual stream after this layer: [batch, tokens, hidden], in the model's dtype."""
        return value if isinstance(value, torch.Tensor) else value[0]

    @residual.postprocess
    def residual(self, value: Any) -> Any:
        served = port.Mediator.value(f"{self.path}.output")
        return value if isinstance(served, torch.Tensor) else (value, *served[1:])

"""What transformers installed on a module that it shards.

transformers applies a parallel style by replacing `module.forward` with a closure: it transforms the inputs, runs the
forward it replaced, and transforms the output. Everything there is to know about a sharded module is in that closure -
the style object, the mesh, the module's own forward - so it is read from there and from nowhere else: the plan a
model declares tells only what was asked for, and the helpers that resolve it move between releases.

The tap sits *outside* the wrapper: nnsight's controller runs the wrapper as its body. So a row-parallel output is
already reduced and carries its bias, a gathered head is gathered, a vocab-parallel embedding is summed; those read
whole without an exchange of ours.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from interleave import nnsight_port as port

_INSTALLED = ".install_forward.<locals>."
_WRAPPER = "__interleave_wrapper__"


@dataclass
class Wrapper:
    """One installed style.

    Attributes:
        style: The style object, or its class where the closure does not hold the object.
        mesh: The mesh the style works on, one axis.
        own: The cell that holds the module's own forward; None for a style that wraps by a hook.
    """

    style: Any
    mesh: DeviceMesh
    own: CellType | None
    _compiled: Any = None

    @property
    def style_name(self) -> str:
        """The class name of the style, such as `ColwiseParallel`."""
        style = self.style if isinstance(self.style, type) else type(self.style)
        return style.__name__

    def instrument(self, envoy: port.Envoy) -> Any:
        """Instrument the module's own forward, inside the wrapper; the operations have single-process names."""
        if self._compiled is None:
            if self.own is None:
                raise port.SourceNotAvailable(f"{self.style_name} keeps no forward to look into")
            state = port.install_controller(envoy)
            operation = port.make_op(lambda: state.active()[:2])
            self.own.cell_contents, self._compiled = port.instrument(self.own.cell_contents, operation)
        return self._compiled


def installed(module: torch.nn.Module) -> Wrapper | None:
    """What transformers wrapped this module in, or None. Remembered on the module."""
    known = module.__dict__.get(_WRAPPER)
    if known is not None:
        return known
    wrapper = _from_forward(module.__dict__.get("forward")) or _from_hooks(module)
    if wrapper is not None:
        module.__dict__[_WRAPPER] = wrapper
    return wrapper


def tap_outside(module: torch.nn.Module, wrapper: Wrapper) -> None:
    """Make nnsight's controller run the wrapper as its body. Before the controller is installed; idempotent."""
    if port.STATE in module.__dict__:
        return
    for number, hook in list(module._backward_hooks.items()):
        if _INSTALLED in getattr(hook, "__qualname__", ""):
            module._backward_hooks[number] = _with_real_grad(hook)
    forward = module.__dict__.get("forward")
    if wrapper.own is None or forward is None:
        return
    for cell in _cells(forward).values():
        if inspect.isfunction(hook := cell.cell_contents) and _INSTALLED in hook.__qualname__:
            cell.cell_contents = _with_real_grad(hook)
    module.__dict__["forward"] = _editable(forward)
    module.__dict__[port.BODY_FORWARD] = True


def _with_real_grad(hook: Callable) -> Callable:
    """A backward hook that sees a parameter's real `.grad`.

    In a traced backward, `Tensor.grad` is the block's way to ask for a gradient and parks whoever reads it; the style's
    own hook would wait there for ever.
    """

    @functools.wraps(hook)
    def run(*args: Any) -> Any:
        served = torch.Tensor.grad
        torch.Tensor.grad = torch._C.TensorBase.grad  # type: ignore[assignment,attr-defined]
        try:
            return hook(*args)
        finally:
            torch.Tensor.grad = served  # type: ignore[assignment]

    return run


def _editable(forward: Callable) -> Callable:
    """`forward`, whose output may be edited in place while autograd records.

    The wrapper's output is a view that a custom autograd Function made, and autograd refuses in-place edits of those;
    the same storage under a fresh, viewless tensor has no such history.
    """

    @functools.wraps(forward)
    def editable(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if isinstance(output, torch.Tensor) and output.requires_grad and output._is_view():
            return torch.ops.aten._unsafe_view(output, output.shape)
        return output

    return editable


def _cells(function: Any) -> dict[str, CellType]:
    code = getattr(function, "__code__", None)
    return dict(zip(code.co_freevars, function.__closure__ or (), strict=True)) if code is not None else {}


def _style(function: Any, cells: dict[str, CellType]) -> Any:
    """The style object in the closure, else the class that defined the closure."""
    if "self" in cells:
        return cells["self"].cell_contents
    owner = function.__qualname__.split(".install_forward.")[0]
    return functools.reduce(getattr, owner.split("."), sys.modules[function.__module__])


def _from_forward(forward: Any) -> Wrapper | None:
    if _INSTALLED not in getattr(forward, "__qualname__", ""):
        return None
    cells = _cells(forward)
    mesh = next(
        (cell.cell_contents for name, cell in cells.items() if isinstance(cell.cell_contents, DeviceMesh)),
        None,
    )
    own = next((cell for name, cell in cells.items() if name.endswith("forward")), None)
    if mesh is None:
        # The mesh may sit one closure deeper (a style whose wrapper only registers hooks).
        inner = [_cells(cell.cell_contents) for cell in cells.values() if callable(cell.cell_contents)]
        mesh = next(
            (c.cell_contents for found in inner for c in found.values() if isinstance(c.cell_contents, DeviceMesh)),
            None,
        )
    if mesh is None or own is None:
        return None
    return Wrapper(_style(forward, cells), mesh, own)


def _from_hooks(module: torch.nn.Module) -> Wrapper | None:
    """A style that installs a backward hook instead of a forward."""
    for hook in module._backward_hooks.values():
        if _INSTALLED in getattr(hook, "__qualname__", ""):
            cells = _cells(hook)
            if "mesh" in cells:
                return Wrapper(_style(hook, cells), cells["mesh"].cell_contents, None)
    return None

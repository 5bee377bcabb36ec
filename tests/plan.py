"""What one process does: every value that enters or leaves a module, leaf by leaf.

The list of what a sharded model must get right is never of our making. `survey` runs the unsharded model
once, plain torch without any tracing, and notes each module's first inputs and output, keyword arguments
included. The result is a `Plan`: the visits in the order of the run, and for each the leaves that are there
to be read and written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from transformers.cache_utils import Cache

Side = Literal["input", "output"]


class Step(NamedTuple):
    """One step from a value to a part of it: an entry of a container, or an attribute of a KV cache."""

    key: Any
    attribute: bool = False

    def __str__(self) -> str:
        return f".{self.key}" if self.attribute else f"[{self.key!r}]"


Way = tuple[Step, ...]


def leaves(value: Any, path: Way = ()) -> Iterator[tuple[Way, Any]]:
    """Every leaf of `value` with the way to it: through tuples, lists, dicts and KV caches."""
    if isinstance(value, Cache):
        for index, layer in enumerate(value.layers):
            for name in ("keys", "values"):
                way = (*path, Step("layers", True), Step(index), Step(name, True))
                yield way, getattr(layer, name, None)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, Step(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, Step(index)))
    else:
        yield path, value


def fetch(value: Any, path: Way) -> Any:
    """The part of `value` that `path` leads to."""
    for step in path:
        value = getattr(value, step.key) if step.attribute else value[step.key]
    return value


def replaced(value: Any, path: Way, new: Any) -> Any:
    """A copy of `value`, container by container, in which `path` leads to `new`."""
    if not path:
        return new
    step, *rest = path
    item = replaced(value[step.key], tuple(rest), new)
    if isinstance(value, tuple):
        items = [item if index == step.key else other for index, other in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    copy = value.copy()
    copy[step.key] = item
    return copy


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of `value` with `change` applied to every tensor that is not inside a KV cache."""
    for path, leaf in list(leaves(value)):
        if isinstance(leaf, torch.Tensor) and not any(step.attribute for step in path):
            value = replaced(value, path, change(leaf))
    return value


def pattern(shape: torch.Size) -> torch.Tensor:
    """Numbers of magnitude one, another at every position: a permutation of what they touch shows."""
    return torch.sin(torch.arange(1, shape.numel() + 1) * 0.7).reshape(shape)


def magnitude(tensor: torch.Tensor) -> float:
    """The root mean square of the finite entries."""
    finite = tensor.detach().double()[tensor.isfinite()]
    return float(finite.square().mean().sqrt()) if finite.numel() else 1.0


@dataclass
class Spot:
    """One leaf of a location: what there is to read, and perhaps to write."""

    name: str
    path: Way
    #: Root mean square on one process, so that every side draws the same edit; None for what is not a tensor.
    scale: float | None
    shape: torch.Size | None
    dtype: torch.dtype | None
    #: Spots with the same number are the same tensor object on one process; None without a gradient.
    tensor: int | None

    @property
    def writable(self) -> bool:
        return bool(self.shape) and not any(step.attribute for step in self.path)


@dataclass
class Visit:
    """One side of one module, at its first call, and the leaves of the value there."""

    module: str
    side: Side
    spots: list[Spot]
    #: For an output: a value of the same structure, drawn afresh, to put in its place.
    substitute: Any = None


@dataclass
class Plan:
    """What one process does with `inputs`: the visits in order, and the logits."""

    inputs: dict[str, Any]
    visits: list[Visit]
    logits: torch.Tensor

    def spots(self) -> Iterator[tuple[Visit, Spot]]:
        for visit in self.visits:
            for spot in visit.spots:
                yield visit, spot


def survey(model: torch.nn.Module, inputs: dict[str, Any]) -> Plan:
    """Run `model` on one process, without tracing, and note every module's first inputs and output."""
    seen: list[tuple[str, Side, Any]] = []
    done: set[tuple[str, Side]] = set()

    def note(module: str, side: Side, value: Any) -> None:
        if (module, side) not in done:
            done.add((module, side))
            # The objects themselves are kept: which of them are one and the same is part of the survey.
            seen.append((module, side, [(path, leaf, kept(leaf)) for path, leaf in leaves(value)]))
            if side == "output":
                substitutes[module] = mapped(value, drawn)

    substitutes: dict[str, Any] = {}
    hooks = []
    for name, module in model.named_modules(prefix="model"):
        hooks.append(
            module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: note(name, "input", (args, kwargs)), with_kwargs=True
            )
        )
        hooks.append(module.register_forward_hook(lambda _, args, output, name=name: note(name, "output", output)))
    try:
        logits = model(**copied(inputs)).logits.detach()
    finally:
        for hook in hooks:
            hook.remove()

    numbers: dict[int, int] = {}
    visits = []
    for module, side, found in seen:
        spots = []
        for path, leaf, value in found:
            tensor = isinstance(leaf, torch.Tensor)
            spots.append(
                Spot(
                    name=f"{module}.{side}" + "".join(str(step) for step in path),
                    path=path,
                    scale=magnitude(value) if tensor else None,
                    shape=value.shape if tensor else None,
                    dtype=value.dtype if tensor else None,
                    tensor=numbers.setdefault(id(leaf), len(numbers)) if tensor and leaf.requires_grad else None,
                )
            )
        visits.append(Visit(module, side, spots, substitutes.get(module) if side == "output" else None))
    return Plan(inputs, visits, logits)


def drawn(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like `tensor` in shape, dtype and magnitude, and in nothing else."""
    if not tensor.dtype.is_floating_point:
        return tensor.flip(-1)
    return (magnitude(tensor) * (0.3 + pattern(tensor.shape))).to(tensor.dtype)


def copied(inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs that a block may edit in place."""
    return mapped(dict(inputs), torch.Tensor.clone)


def kept(leaf: Any) -> Any:
    """A leaf as it is now, whatever the model does with it later."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    if leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype):
        return leaf
    return type(leaf).__name__

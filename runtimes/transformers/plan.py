"""What a model's published plan will do to it, read before any weight: boundaries, and the degrees that can work."""

from __future__ import annotations

import re
from functools import reduce
from math import gcd
from typing import Any

import torch
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from interleave.errors import Unshardable

from .styles import Boundary, boundary

_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def pattern(name: str) -> str:
    """A module's name with its layer numbers as `*`, the way plans spell it."""
    return _NUMBER.sub(".*", name)


def planned(model: torch.nn.Module) -> dict[str, Any]:
    """Module name -> the style object that the model's tensor-parallel plan gives it.

    Args:
        model: A transformers model, on any device; meta is enough.

    Raises:
        Unshardable: The model publishes no plan, or its plan names a style transformers does not have.
    """
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    found = {}
    for name, _ in model.named_modules():
        style = plan.get(pattern(name))
        if style is None:
            continue
        if style not in ALL_PARALLEL_STYLES:
            raise Unshardable(
                f"the plan of {type(model).__name__} gives `{name}` the style {style!r}, "
                f"which transformers itself does not have"
            )
        found[name] = ALL_PARALLEL_STYLES[style]
    if not found:
        raise Unshardable(
            f"{type(model).__name__} publishes no tensor-parallel plan, so every rank would load all of it. "
            f"Load it on one process (tp=1)."
        )
    return found


def boundaries(model: torch.nn.Module, degree: int) -> dict[str, Boundary]:
    """Module name -> the layouts of its two sides at `degree`. Raises `Unshardable` for a style without a rule."""
    return {name: boundary(style, model.get_submodule(name), degree, name) for name, style in planned(model).items()}


def split_sizes(model: torch.nn.Module) -> dict[str, int]:
    """What the plan splits, by name -> its size: a degree works if it divides every one of them."""
    sizes: dict[str, int] = {}
    for name, sides in boundaries(model, 1).items():
        if sides.split is None:
            continue
        weight = getattr(model.get_submodule(name), "weight")  # noqa: B009 - a Module's attributes are untyped
        sizes[f"{pattern(name)} ({sides.split} features)"] = weight.shape[0 if sides.split == "output" else -1]
        if sides.output is not None and "Attention" in type(_parent(model, name)).__name__:
            sizes.update(_heads(model))
    return sizes


def check_degree(model: torch.nn.Module, degree: int) -> None:
    """Refuse a degree that cannot work, with those that do.

    Raises:
        Unshardable: Something that the plan splits is not a multiple of `degree`.
    """
    sizes = split_sizes(model)
    against = {name: size for name, size in sizes.items() if size % degree}
    if not against:
        return
    largest = reduce(gcd, sizes.values())
    working = [d for d in range(2, largest + 1) if largest % d == 0]
    shown = list(against.items())[:4]
    raise Unshardable(
        f"{type(model).__name__} cannot be split tp={degree} ways: "
        + ", ".join(f"{name} is {size}" for name, size in shown)
        + (f" and {len(against) - 4} more" if len(against) > 4 else "")
        + ". "
        + (f"The degrees that work are {', '.join(map(str, working))}." if working else "No degree above 1 works.")
    )


def _parent(model: torch.nn.Module, name: str) -> torch.nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _heads(model: torch.nn.Module) -> dict[str, int]:
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    found = {}
    for field in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, field, None)
        if isinstance(count, int):
            found[field] = count
    return found

"""Which rows of a step's tensors belong to a request.

An engine packs the tokens of all requests of a step into one axis; a block sees those of its own request only. The
rows are another span in every step, so a span carries the size of the axis it counts on.
"""

# vLLM's and nnsight's classes meet here at run time, and their declared types do not say so.
# pyright: reportArgumentType=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from boundary.collectives import outside_inference
from interleave import nnsight_port as port
from interleave.errors import InterleaveError, ShapeChanged
from interleave.fragments import Lacking, holds, with_items


class Span(NamedTuple):
    """Rows `start` to `start + size` of the `total` rows of a step's tensors."""

    start: int
    size: int
    total: int

    @property
    def rows(self) -> slice:
        """For indexing a tensor whose first axis holds the step's rows."""
        return slice(self.start, self.start + self.size)


class Skipped(NamedTuple):
    """What requests put in place of a module's output: each for its own rows."""

    parts: list[tuple[Span, Any]]


def axis(tensor: torch.Tensor, total: int) -> int | None:
    """The axis that holds a step's rows: the first, or the second behind an axis of one. None: it has none."""
    if tensor.dim() and tensor.shape[0] == total:
        return 0
    if tensor.dim() > 1 and tensor.shape[0] == 1 and tensor.shape[1] == total:
        return 1
    return None


NO_ROWS = "it does not have a row for each of this step's tokens, so nobody knows which part of it is this request's"


class RowBatcher(port.Batcher):
    """nnsight's batcher, where every request always is one of many."""

    def __init__(self) -> None:
        super().__init__(None)

    @property
    def batching(self) -> bool:
        return True

    def narrow(self, value: Any, group: Span | None) -> Any:
        """The request's rows of every tensor in `value`: views, in which edits land.

        A tensor without rows of requests is withheld.
        """
        if group is None:
            return value

        def own(tensor: torch.Tensor) -> Any:
            dim = axis(tensor, group.total)
            if dim is None:
                return tensor if tensor.dim() == 0 else Lacking.at("a tensor of this value", NO_ROWS)
            return tensor.narrow(dim, group.start, group.size)

        return own(value) if type(value) is torch.Tensor else port.apply(value, own, torch.Tensor)

    def _widen_tensor(self, full: torch.Tensor, group: Any, edited: torch.Tensor) -> torch.Tensor:
        """`full`, with the request's rows replaced by `edited`."""
        dim = axis(full, group.total)
        if dim is None:
            return full
        with outside_inference():
            new = full.clone()
        new.narrow(dim, group.start, group.size).copy_(edited)
        return new

    def gather_skip(self, running: Any, group: Any, replacement: Any) -> Skipped:
        """Add one request's replacement of a module's output."""
        parts = running.parts if isinstance(running, Skipped) else []
        return Skipped([*parts, (group, replacement)])

    def assemble_skip(self, running: Any) -> Any:
        """The replacements as they are: a module runs for the rows that nobody replaces."""
        return running


def fitted(location: str, expected: Any, replacement: Any) -> Any:
    """A replacement, in the structure of the value that it replaces.

    Args:
        location: Where it goes, for the error.
        expected: The request's own rows there.
        replacement: What its block puts there. Entries of a dict that are no tensors may be left out.

    Raises:
        ShapeChanged: A tensor has another shape: the engine computes with the rows of all requests at once.
        InterleaveError: It is made otherwise.
    """
    if isinstance(expected, torch.Tensor):
        if not isinstance(replacement, torch.Tensor):
            raise InterleaveError(f"`{location}` takes {describe(expected)}, and got {describe(replacement)}")
        if replacement.shape != expected.shape:
            raise ShapeChanged(
                f"`{location}`: the engine computes with the rows of all requests at once, so a replacement must have "
                f"the shape {tuple(expected.shape)} of what it replaces; this one is {tuple(replacement.shape)}"
            )
        if replacement.is_floating_point() and not expected.is_floating_point():
            raise InterleaveError(f"`{location}` takes values of {expected.dtype}, and got {replacement.dtype}")
        return replacement
    if isinstance(expected, dict):
        needed = {key for key, value in expected.items() if holds(value, (torch.Tensor,))}
        if not isinstance(replacement, Mapping) or any(key not in replacement for key in needed):
            raise InterleaveError(f"`{location}` takes {describe(expected)}, and got {describe(replacement)}")
        items = {**expected, **replacement}
        return with_items(expected, items | {key: fitted(location, expected[key], items[key]) for key in needed})
    if isinstance(expected, list | tuple):
        if not isinstance(replacement, list | tuple) or len(replacement) != len(expected):
            raise InterleaveError(f"`{location}` takes {describe(expected)}, and got {describe(replacement)}")
        new = [fitted(location, *pair) for pair in zip(expected, replacement, strict=True)]
        return type(expected)(*new) if hasattr(expected, "_fields") else type(expected)(new)
    return replacement


def describe(value: Any) -> str:
    """What a value is made of, in a few words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {', '.join(map(repr, value)) or 'nothing in it'}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}: ({', '.join(map(describe, value))})"
    return "None" if value is None else f"a {type(value).__name__}"

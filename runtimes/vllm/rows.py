"""Which rows of a step's tensors belong to a request.

An engine packs the tokens of all requests of a step into one axis; a block sees those of its own request only. The
rows are another span in every step, so a span carries the size of the axis it counts on.
"""

# vLLM's and nnsight's classes meet here at run time, and their declared types do not say so.
# pyright: reportArgumentType=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from interleave import nnsight_port as port
from interleave.errors import ShapeChanged


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


class RowBatcher(port.Batcher):
    """nnsight's batcher, where every request always is one of many."""

    def __init__(self) -> None:
        super().__init__(None)

    @property
    def batching(self) -> bool:
        return True

    def narrow(self, value: Any, group: Span | None) -> Any:
        """The request's rows of every tensor in `value`: views, in which edits land."""
        if group is None:
            return value

        def own(tensor: torch.Tensor) -> torch.Tensor:
            dim = axis(tensor, group.total)
            return tensor if dim is None else tensor.narrow(dim, group.start, group.size)

        return port.apply(value, own, torch.Tensor)

    def _widen_tensor(self, full: torch.Tensor, group: Any, edited: torch.Tensor) -> torch.Tensor:
        """`full`, with the request's rows replaced by `edited`."""
        dim = axis(full, group.total)
        if dim is None:
            return edited
        own = full.narrow(dim, group.start, group.size)
        if not isinstance(edited, torch.Tensor) or edited.shape != own.shape:
            found = tuple(edited.shape) if isinstance(edited, torch.Tensor) else type(edited).__name__
            raise ShapeChanged(
                f"the engine computes with the rows of all requests at once, so a replacement must have the shape "
                f"{tuple(own.shape)} of what it replaces; this one is {found}"
            )
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

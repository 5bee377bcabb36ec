"""Parameters that read whole.

On a sharded model a parameter is this rank's piece. A block that reads one gets the whole, assembled once per trace;
what the block writes into it in place goes back into the piece before the model runs on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from .fragments import Placed
from .layout import assemble, cut

if TYPE_CHECKING:
    from .interleaver import Interleaver


class Held(NamedTuple):
    """One parameter that a block has in hand."""

    parameter: DTensor
    whole: torch.Tensor
    placed: Placed
    version: int


class Parameters:
    """The parameters that the blocks of the running trace have read."""

    def __init__(self, interleaver: Interleaver) -> None:
        self._interleaver = interleaver
        self._held: dict[int, Held] = {}

    def read(self, path: str, parameter: DTensor) -> torch.Tensor:
        """The whole parameter, detached: what one process holds under `path`. Every rank must ask.

        Raises:
            UnknownLayout: Its placement is none that this package understands.
        """
        held = self._held.get(id(parameter))
        if held is not None:
            return held.whole
        fragments = self._interleaver.fragments
        placed = fragments.parameter(path, parameter)
        if placed is None:
            return parameter.to_local().detach()
        key = self._interleaver.numbered(path, 0, "parameter")
        local = parameter.to_local().detach()
        whole = assemble(local, placed.layout, fragments.groups[placed.axis], key)
        if self._interleaver.interleaving:
            self._held[id(parameter)] = Held(parameter, whole, placed, whole._version)
        return whole

    def settle(self) -> None:
        """Write what blocks changed back into the pieces. No collective."""
        for name, held in self._held.items():
            if held.whole._version == held.version:
                continue
            group = self._interleaver.fragments.groups[held.placed.axis]
            with torch.no_grad():
                held.parameter.to_local().copy_(cut(held.whole, held.placed.layout, group))
            self._held[name] = held._replace(version=held.whole._version)

    def clear(self) -> None:
        """Forget the trace's parameters, after a last `settle`."""
        self.settle()
        self._held.clear()

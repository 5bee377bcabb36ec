"""Parameters that read whole.

On a sharded model a parameter is this rank's piece. A block that reads one gets the whole, assembled once per trace;
what the block writes into it in place goes back into the piece before the model runs on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from .fragments import Placed
from .layout import assemble, cut, same_bits

if TYPE_CHECKING:
    from .interleaver import Interleaver


class Held(NamedTuple):
    """One parameter that a block has in hand."""

    parameter: DTensor
    whole: torch.Tensor
    placed: Placed
    settled: torch.Tensor  # the piece of the whole as it was when the parameter last followed it


class Parameters:
    """The parameters that the blocks of the running trace have read."""

    def __init__(self, interleaver: Interleaver) -> None:
        self._interleaver = interleaver
        self._held: dict[int, Held] = {}

    def read(self, path: str, parameter: DTensor) -> torch.Tensor:
        """The whole parameter, detached: what one process holds under `path`. Every rank must ask.

        Inside a block it takes edits; outside of one it is a copy.

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
        whole = self._assembled(path, parameter, placed)
        if parameter.grad is not None:
            whole.grad = self._assembled(f"{path}.grad", parameter.grad, placed)
        if self._interleaver.interleaving:
            self._held[id(parameter)] = Held(parameter, whole, placed, self._cut(whole, placed))
        return whole

    def _assembled(self, path: str, parameter: torch.Tensor, placed: Placed) -> torch.Tensor:
        assert isinstance(parameter, DTensor)
        local = parameter.to_local().detach()
        key = self._interleaver.numbered(path, 0, "parameter")
        return assemble(local, placed.layout, self._interleaver.fragments.groups[placed.axis], key)

    def settle(self) -> None:
        """Write what blocks changed back into the pieces. No collective.

        Bits are compared, since writes through `.data` or numpy move no version counter.
        """
        for name, held in self._held.items():
            piece = self._cut(held.whole, held.placed)
            if not same_bits(piece, held.settled):
                with torch.no_grad():
                    held.parameter.to_local().copy_(piece)
                self._held[name] = held._replace(settled=piece)

    def _cut(self, whole: torch.Tensor, placed: Placed) -> torch.Tensor:
        return cut(whole, placed.layout, self._interleaver.fragments.groups[placed.axis])

    def clear(self) -> None:
        """Forget the trace's parameters, after a last `settle`."""
        self.settle()
        self._held.clear()

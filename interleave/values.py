"""What a user knows of a value and the package does not: gather and shard by hand, inside a block."""

from __future__ import annotations

from typing import Any

import torch

from . import nnsight_port as port
from .errors import InterleaveError
from .fragments import Fragments
from .layout import Shard, assemble, cut


def gather(value: Any, dim: int = -1, axis: str = "tp") -> Any:
    """The ranks' equal pieces of `value` side by side along `dim`; the value itself on one process.

    Every rank must make the call, inside a block. Gradients pass.

    Args:
        value: A tensor, or tensors in containers: this rank's piece.
        dim: The dim the ranks share.
        axis: The axis of the mesh.

    Raises:
        InterleaveError: Outside a block, or on a model that is not sharded over `axis`.
    """
    return _by_hand(value, axis, lambda leaf, group, key: assemble(leaf, Shard(dim), group, key))


def shard(value: Any, dim: int = -1, axis: str = "tp") -> Any:
    """This rank's equal piece of a whole along `dim`: `gather`'s inverse. The value itself on one process.

    Every rank must make the call, inside a block, with the same whole. Gradients pass.

    Args:
        value: A tensor, or tensors in containers: wholes, whose `dim` the degree divides.
        dim: The dim the ranks share.
        axis: The axis of the mesh.

    Raises:
        InterleaveError: Outside a block, or on a model that is not sharded over `axis`.
        ValueError: The degree does not divide the dim.
    """
    return _by_hand(value, axis, lambda leaf, group, key: cut(leaf, Shard(dim), group, key))


def _by_hand(value: Any, axis: str, change: Any) -> Any:
    try:
        interleaver: Any = port.Mediator.current("interleave.gather/shard").interleaver
    except ValueError:
        raise InterleaveError("gather and shard are used inside a trace block") from None
    fragments = getattr(interleaver, "fragments", None)
    if not isinstance(fragments, Fragments) or not fragments.enabled:
        return value
    if axis not in fragments.groups:
        raise InterleaveError(f"the model is not sharded over {axis!r}; its axes are {sorted(fragments.groups)}")
    key = interleaver.call_key(f"by hand over {axis}")
    count = iter(range(10**6))
    return port.apply(value, lambda leaf: change(leaf, fragments.groups[axis], f"{key}#{next(count)}"), torch.Tensor)

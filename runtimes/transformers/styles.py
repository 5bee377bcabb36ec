"""What each of transformers' parallel styles means for the values outside its wrapper.

One row per style class, by name; each reads the style object's own declarations (its input and output layouts, its
split factor) and the module's real sizes. A class that is not in the table is refused by name: a value handed to a
block is whole or refused, and guessing is neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.distributed.tensor.placement_types import Shard as ShardPlacement

from interleave.errors import Unshardable
from interleave.fragments import Placed, Tree
from interleave.layout import Block, Shard, chunk_widths


class Boundary(NamedTuple):
    """The layouts of a module's two sides: its `(args, kwargs)`, and its output. None is whole."""

    input: Tree = None
    output: Tree = None
    interior: bool = False  # both sides lie between other sharded modules; the style alone does not tell
    split: str | None = None  # which features of the module's weight are split: "output", "input", or none


def boundary(style: Any, module: torch.nn.Module, degree: int, path: str) -> Boundary:
    """What `style` makes of the two sides of `module`, which it wraps at `path`.

    Args:
        style: A transformers style object, or its class.
        module: The wrapped module; only its declared sizes are read.
        degree: The size of the mesh axis.
        path: Names the module in the refusal.

    Raises:
        Unshardable: The style, or a layout it declares, is none that this package understands.
    """
    name = (style if isinstance(style, type) else type(style)).__name__
    rule = RULES.get(name)
    if rule is None:
        raise Unshardable(
            f"`{path}` is sharded by transformers' {name}, which this package does not understand, so its values "
            f"cannot be made whole. The styles it understands are {', '.join(sorted(RULES))}. "
            f"Load the model on one process, or with a plan that avoids that style."
        )
    return rule(style, module, degree, path)


def columns(style: Any, module: torch.nn.Module, degree: int, path: str) -> Boundary:
    """Output features are split. Some styles gather them again before they leave the wrapper."""
    if isinstance(style.output_layouts, Replicate):
        return Boundary(split="output")
    _last_dim(style.output_layouts, module, path)
    piece = Placed(Shard(-1, widths=chunk_widths(_features(module, "out"), degree)))
    return Boundary(output=piece, split="output")


def rows(style: Any, module: torch.nn.Module, degree: int, path: str) -> Boundary:
    """Input features are split, by the module before or by the wrapper; the wrapper sums and adds the bias."""
    if not isinstance(style.output_layouts, Replicate):
        raise Unshardable(
            f"`{path}` hands its output on as {style.output_layouts} (token rows of several ranks), "
            f"which this version does not make whole. Use a plan without sequence-parallel rows."
        )
    if isinstance(module, torch.nn.Embedding):
        return Boundary()
    if isinstance(style.input_layouts, Replicate):
        return Boundary(split="input")
    _last_dim(style.input_layouts, module, path)
    piece = Placed(Shard(-1, widths=chunk_widths(_features(module, "in"), degree)))
    return Boundary(input=((piece,), None), split="input")


def packed_columns(style: Any, module: torch.nn.Module, degree: int, path: str) -> Boundary:
    """Several column-parallel weights packed in one, each split on its own."""
    if not style.use_local_output:
        raise Unshardable(f"`{path}` hands on a DTensor ({type(style).__name__}); only local pieces are understood")
    size, factor = _features(module, "out"), style.split_factor
    block = Block(chunk_widths(size // factor, degree))
    return Boundary(output=Placed(Shard(-1, blocks=(block,) * factor)), split="output")


def summed(style: Any, module: torch.nn.Module, degree: int, path: str) -> Boundary:
    """The wrapper sums the ranks' outputs; the inputs are whole."""
    return Boundary()


def replicated(style: Any, module: torch.nn.Module, degree: int, path: str) -> Boundary:
    """A replicated module inside a sharded forward (a norm over heads): its values are what flows there."""
    return Boundary(interior=True)


#: Style class -> what it makes of a module's two sides.
RULES: dict[str, Callable[[Any, torch.nn.Module, int, str], Boundary]] = {
    "ColwiseParallel": columns,
    "RowwiseParallel": rows,
    "EmbeddingParallel": summed,
    "PackedColwiseParallel": packed_columns,
    "AllReduceParallel": summed,
    "ReplicatedWithGradAllReduce": replicated,
}


def _last_dim(placement: Placement, module: torch.nn.Module, path: str) -> None:
    if not (isinstance(placement, ShardPlacement) and placement.dim == -1):
        raise Unshardable(
            f"`{path}` ({type(module).__name__}) declares the layout {placement}, and only a split of the last dim "
            f"or none is understood here"
        )


def _features(module: torch.nn.Module, side: str) -> int:
    """The module's full width on one side. Its declaration, which sharding leaves as it was."""
    if isinstance(module, torch.nn.Embedding):
        return module.embedding_dim
    size = getattr(module, f"{side}_features", None)
    if size is None:
        size = getattr(module, "weight").shape[0 if side == "out" else -1]  # noqa: B009 - a Module's attributes are untyped
    return int(size)

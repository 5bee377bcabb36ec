"""Which values are pieces under transformers' tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.cache_utils import Cache

from interleave import nnsight_port as port
from interleave.agreement import Agreement
from interleave.errors import InterleaveError, UnknownLayout, Unshardable
from interleave.fragments import Fragments, Placed, Refused, branch, unknown
from interleave.layout import Block, Shard, chunk_widths

from .styles import Boundary, boundary
from .wrapper import Wrapper, installed, tap_outside

BETWEEN = "it lies between a module that splits its output and one that takes its input split"
INSIDE = "the operations inside a sharded module run on pieces"
WEIGHTS = "attention weights hold this rank's heads"
AT_LOAD = "it lies inside a sharded forward, and is decided when the model is loaded"


class TransformersFragments(Fragments):
    """Layouts read off the wrappers that transformers installed.

    Attributes:
        sides: Path -> what the style at that path makes of the module's two sides.
        outputs: Locations of the outputs of the model and of its base, which may hold all layers' weights.
        weighing: Paths of the attention modules whose weights may hold only this rank's heads.
    """

    opaque = (Cache,)

    def __init__(self, agreement: Agreement | None = None) -> None:
        super().__init__()
        self.agreement = agreement
        self.sides: dict[str, Boundary] = {}
        self.weighing: set[str] = set()
        self.outputs: tuple[str, ...] = ()

    def instrument(self, envoy: port.Envoy) -> None:
        """Record what the style on this envoy's module, if any, makes of its two sides.

        Raises:
            Unshardable: The style is none that this package understands.
        """
        module = envoy._module
        wrapper = installed(module)
        if wrapper is None:
            return
        tap_outside(module, wrapper)
        degree = wrapper.mesh.size()
        if degree == 1:
            return
        if self.agreement is None:
            raise InterleaveError(f"`{envoy.path}` is sharded over {degree} ranks, and this model was loaded for one")
        if "tp" not in self.groups:
            self.groups["tp"] = self.agreement.group(wrapper.mesh.mesh.flatten().tolist())
            self.agreement.adopt(wrapper.mesh)
        self.enabled = True
        self.record(envoy.path, boundary(wrapper.style, module, degree, envoy.path))

    def record(self, path: str, sides: Boundary) -> None:
        """Enter one module's two sides."""
        self.sides[path] = sides
        self.interior[path] = INSIDE
        if sides.interior:
            return
        self.bound(path)
        for side, tree in (("input", sides.input), ("output", sides.output)):
            if tree is not None:
                self.tree[f"{path}.{side}"] = tree

    def settle(self, root: port.Envoy, between: str = BETWEEN, weights: str = WEIGHTS) -> None:
        """Once the whole tree is known: withhold what lies inside sharded forwards, until it is decided.

        Args:
            root: The model's envoy.
            between, weights: Why, for a value there and for attention weights.

        Raises:
            Unshardable: A module splits its output, and no module takes it split.
        """
        envoys = {envoy.path: envoy for envoy in root.modules()}
        for path, sides in self.sides.items():
            if sides.interior:
                self.tree[f"{path}.input"] = self.tree[f"{path}.output"] = Refused(between)
        for parent in self.parents():
            self.interior[parent] = between
            if "Attention" in type(envoys[parent]._module).__name__:
                self.weighing.add(parent)
                self.tree[f"{parent}.output"] = (None, Refused(weights))
            for path in envoys:
                if path.startswith(f"{parent}.") and path not in self.boundaries:
                    self.interior[path] = between
                    self.tree[f"{path}.input"] = self.tree[f"{path}.output"] = Refused(between)
        base = getattr(root._module, "base_model_prefix", "")
        if self.weighing:
            self.outputs = ("result", f"{root.path}.output", f"{root.path}.{base}.output")
            for location in self.outputs:
                self.tree[location] = {"attentions": Refused(weights)}

    def whole(self, location: str, value: Any, key: str = "") -> tuple[Any, Callable[[Any], Any] | None]:
        if location in self.outputs and isinstance(value, tuple):
            return self._whole_of_tuple(location, value, key)
        return super().whole(location, value, key)

    def _whole_of_tuple(self, location: str, value: tuple, key: str) -> tuple[Any, Callable[[Any], Any] | None]:
        """A model's output without names (`return_dict=False`): attentions are known by their four dims."""
        node = branch(self.tree.get(location), "attentions")
        named = self.tree[location]
        self.tree[location] = tuple(node if is_attentions(part) else None for part in value)
        try:
            return super().whole(location, value, key)
        finally:
            self.tree[location] = named

    def parents(self) -> list[str]:
        """The smallest modules that hold both a split output and a split input: attention, MLP."""
        splits = [path for path, sides in self.sides.items() if sides.output is not None]
        takes = [path for path, sides in self.sides.items() if sides.input is not None]
        found: dict[str, None] = {}
        for path in splits:
            parent = path
            while "." in parent:
                parent = parent.rpartition(".")[0]
                if any(other.startswith(f"{parent}.") for other in takes):
                    found[parent] = None
                    break
            else:
                raise Unshardable(
                    f"`{path}` splits its output and no module takes it split, so what the model computes from it "
                    f"cannot be made whole. Give it a style that gathers, such as 'colwise_gather_output'."
                )
        return list(found)

    def parameter(self, path: str, parameter: Any) -> Placed | None:
        """How a DTensor parameter is spread over its mesh of one axis."""
        assert isinstance(parameter, DTensor)
        placement = parameter.placements[0]
        degree = parameter.device_mesh.size()
        if isinstance(placement, Replicate) or degree == 1:
            return None
        if isinstance(placement, _StridedShard) and len(parameter.placements) == 1:
            factor = placement.split_factor
            dim = placement.dim % parameter.dim()
            block = Block(chunk_widths(parameter.shape[dim] // factor, degree))
            return Placed(Shard(dim, blocks=(block,) * factor))
        if isinstance(placement, ShardPlacement) and len(parameter.placements) == 1:
            dim = placement.dim % parameter.dim()
            return Placed(Shard(dim, widths=chunk_widths(parameter.shape[dim], degree)))
        raise UnknownLayout(unknown(path, f"its parameter is placed as {parameter.placements}"))

    def own_forward(self, module: torch.nn.Module) -> Wrapper | None:
        wrapper = installed(module)
        return wrapper if wrapper is not None and wrapper.own is not None else None


def is_attentions(part: Any) -> bool:
    """Whether one part of an output without names is the layers' attention weights: tensors of four dims."""
    return isinstance(part, tuple) and any(isinstance(item, torch.Tensor) and item.dim() == 4 for item in part)

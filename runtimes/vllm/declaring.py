"""What the user says of values whose layout the engine's layers do not tell: `model.declare`.

The client checks what was said, at its line; the workers, where the values are, act on it from the next trace on.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from interleave import nnsight_port as port
from interleave.errors import InterleaveError, Unserved
from interleave.fragments import Missing, Placed, Tree
from interleave.layout import Layout, Whole

from .fragments import COPY, nodes
from .names import Absent

if TYPE_CHECKING:
    from .interleaver import EngineInterleaver

RAW = ".raw"


class Declared(NamedTuple):
    """What was said.

    Attributes:
        modules: The paths of the modules.
        raw: Whether it is of vLLM's own values there.
        place: Where at the modules: `.output`, `.source.self_act_fn_0.output`.
        layout, axis: How the pieces make the whole.
    """

    modules: list[str]
    raw: bool
    place: str
    layout: Layout
    axis: str


def understood(
    model: Any, tree: dict[str, Tree], path: str, layout: Layout, axis: str, axes: Iterable[str]
) -> Declared:
    """What the arguments of `declare` mean.

    Args:
        model: The client's envoys.
        tree: The known layouts.
        axes: Those that the model is sharded over.

    Raises:
        InterleaveError: There is no such module, axis or location.
        Unserved: The engine does not compute it.
    """
    if not isinstance(layout, Layout):
        raise InterleaveError(f"{layout!r} is no layout: those of `interleave.layout` say how pieces make a whole")
    if axes and axis not in axes:
        raise InterleaveError(f"the model is not sharded over {axis!r}; its axes are {sorted(axes)}")
    pattern, dot, place = path.partition(".source.")
    if not dot:
        pattern, dot, place = path.rpartition(".")
    if place.rpartition(".")[2] not in ("input", "output"):
        raise InterleaveError(f"{path!r} is no location: one ends in `.input` or `.output`")
    raw = pattern.endswith(RAW)
    pattern = pattern.removesuffix(RAW)
    if dot == ".source." and not raw:
        raise Unserved(
            f"`{path}` has no value on this runtime: the forward that runs is vLLM's, and its operations are under "
            f"`{pattern}.raw.source`"
        )
    found = [envoy for envoy in model.modules() if any(fnmatch.fnmatchcase(name, pattern) for name in names(envoy))]
    if not found:
        raise InterleaveError(f"the model has no module {pattern!r}")
    for envoy in found:
        location = f"{envoy.path}{RAW if raw else ''}{dot}{place}"
        if isinstance(envoy._module, Absent):
            raise Missing("vLLM's model has no such module").error(location)
        for node in nodes(tree.get(location)):
            if isinstance(node, Missing):
                raise node.error(location)
    return Declared([envoy.path for envoy in found], raw, f"{dot}{place}", layout, axis)


def declare(interleaver: EngineInterleaver, said: Declared) -> None:
    """Enter it, in a worker."""
    # What the engine writes over is handed out as a copy.
    placed = COPY if isinstance(said.layout, Whole) else Placed(said.layout, said.axis)
    for path in said.modules:
        own = RAW if said.raw and path in interleaver.views else ""
        interleaver.fragments.tree[f"{path}{own}{said.place}"] = placed


def names(envoy: port.Envoy) -> tuple[str, str]:
    """With the root's own name, and without."""
    return envoy.path, envoy.path.partition(".")[2]


__all__ = ["Declared", "declare", "understood"]

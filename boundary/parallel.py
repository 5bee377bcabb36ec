"""The process groups of a topology, by name.

Groups are keyed by the axes they vary: the ranks that share a rank's coordinates on all other axes. So
attention TP is "varies `ATTN_TP_SCATTER`", full TP is "varies everything", and a gather of rows that several
axes deal out finds its group by naming those axes. Two names for the same ranks are the same object: whether
a MoE's output is summed by the full TP group is a question of identity.

Every rank builds every group, in one order, because making a process group is itself a collective.
"""

from __future__ import annotations

import platform
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations, count

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from .collectives import GlooGroup, Group, Messages, NcclGroup, SharedGroup, ThreadGroup
from .compiled import COMPILE_SECONDS
from .layout import ATTN_TP_SCATTER, Coordinates, SumGroup, TokenAxis, Topology
from .shared_memory import SharedMemory, available


class SoloGroup(Group):
    """A group of one rank, which has nobody to exchange with."""

    def __init__(self, name: str = "solo", rank: int = 0) -> None:
        super().__init__(name, (rank,), 0, limit=1.0)

    def _exchange(self, send: Messages, receive: Messages, key: str) -> None:
        """Nothing to do."""


@dataclass(frozen=True)
class BoundSum:
    """A sum group resolved on a topology: one collective group that covers all terms.

    Attributes:
        name: What the declaration calls it.
        group: Its ranks.
        axes: The token axes those ranks vary, where they are exactly such a set: only then can a
            reduce-scatter hand each rank its own rows.
    """

    name: SumGroup
    group: Group
    axes: frozenset[TokenAxis] | None


@dataclass(frozen=True, eq=False)
class Parallel:
    """One rank's place in a topology, and its groups.

    Attributes:
        rank: The full-TP rank inside the pipeline stage.
        pipeline_rank: Which pipeline stage this is.
        by_axes: For each set of axes of size above one, the group that varies them.
        moe_ep, moe_tp: The groups inside MoE computation.
        pipeline: The ranks with this full-TP rank on all pipeline stages.
    """

    topology: Topology
    rank: int
    pipeline_rank: int
    by_axes: dict[frozenset[TokenAxis], Group]
    moe_ep: Group
    moe_tp: Group
    pipeline: Group

    @property
    def at(self) -> Coordinates:
        return self.topology.coordinates(self.rank)

    def over(self, axes: Iterable[TokenAxis]) -> Group:
        """The group that varies `axes`; axes of size one count for nothing."""
        return self.by_axes[self.topology.axes(*axes)]

    @property
    def tp(self) -> Group:
        return self.over(TokenAxis)

    @property
    def attention_tp(self) -> Group:
        return self.over([ATTN_TP_SCATTER])

    @property
    def attention_dp(self) -> Group:
        return self.over([TokenAxis.ATTN_DP])

    @property
    def attention_cp(self) -> Group:
        return self.over([TokenAxis.ATTN_CP])

    @property
    def moe_output(self) -> tuple[Group, ...]:
        """The groups whose sums, one after the other, complete a MoE's output: none, one, or EP then MoE TP.

        Where both axes are wider than one and MoE data parallelism is off, the full TP group covers both at
        once.
        """
        if self.topology.moe_ep > 1 and self.topology.moe_tp > 1 and self.topology.moe_dp == 1:
            return (self.tp,)
        return tuple(group for group in (self.moe_ep, self.moe_tp) if group.size > 1)

    def bound_sum(self, name: SumGroup) -> BoundSum | None:
        """`name` on this topology; None where there is nothing to add, or where no single group covers the
        terms.
        """
        if name is SumGroup.MOE_OUTPUT:
            groups = self.moe_output
        else:
            groups = (self.attention_tp if name is SumGroup.ATTN_TP else self.tp,)
        if len(groups) != 1 or groups[0].size == 1:
            return None
        axes = next((axes for axes, group in self.by_axes.items() if group is groups[0]), None)
        return BoundSum(name, groups[0], axes)


MakeGroup = Callable[[str, tuple[int, ...]], Group | None]
"""Makes the group of these global ranks; None where the calling rank is not in it."""


def build(topology: Topology, rank: int, make_group: MakeGroup) -> Parallel:
    """All groups of `topology` for global rank `rank`.

    Global ranks are numbered pipeline stage by pipeline stage. Every rank calls this, and `make_group` is
    called for the same groups in the same order on all of them, groups of one excepted.
    """
    made: dict[tuple[int, ...], Group] = {}
    offered: set[tuple[int, ...]] = set()

    def partition(name: str, parts: Iterable[Sequence[int]]) -> Group:
        mine: Group | None = None
        for part in parts:
            ranks = tuple(part)
            if ranks not in offered:
                offered.add(ranks)
                group = (
                    (SoloGroup(name, rank) if rank in ranks else None) if len(ranks) == 1 else make_group(name, ranks)
                )
                if group is not None:
                    made[ranks] = group
            if rank in ranks:
                mine = made[ranks]
        assert mine is not None, f"rank {rank} is in no part of {name}"
        return mine

    replicas = [range(stage * topology.tp, (stage + 1) * topology.tp) for stage in range(topology.pipeline)]

    def varying(axes: frozenset[TokenAxis]) -> list[list[int]]:
        parts: dict[tuple[int, ...], list[int]] = {}
        for stage, ranks in enumerate(replicas):
            for tp_rank, global_rank in enumerate(ranks):
                at = topology.coordinates(tp_rank)
                fixed = (stage, *(-1 if axis in axes else at[axis.value] for axis in TokenAxis))
                parts.setdefault(fixed, []).append(global_rank)
        return list(parts.values())

    wide = [axis for axis in TokenAxis if topology.size(axis) > 1]
    sets = [frozenset(axes) for size in range(len(wide) + 1) for axes in combinations(wide, size)]
    names = {frozenset(wide): "tp", **{frozenset([axis]): _NAMES[axis] for axis in wide}}
    if len(wide) == 1:
        names = {frozenset(wide): "tp"}
    by_axes = {axes: partition(names.get(axes, _joined(axes)), varying(axes)) for axes in sets}

    blocks = [ranks[start : start + topology.tp // topology.moe_dp] for ranks in replicas
              for start in range(0, topology.tp, topology.tp // topology.moe_dp)]  # fmt: skip
    moe_tp = partition("moe_tp", [block[start : start + topology.moe_tp] for block in blocks
                                  for start in range(0, len(block), topology.moe_tp)])  # fmt: skip
    moe_ep = partition("moe_ep", [block[start :: topology.moe_tp] for block in blocks
                                  for start in range(topology.moe_tp)])  # fmt: skip
    pipeline = partition("pipeline", [range(tp_rank, topology.tp * topology.pipeline, topology.tp)
                                      for tp_rank in range(topology.tp)])  # fmt: skip
    stage, tp_rank = divmod(rank, topology.tp)
    return Parallel(topology, tp_rank, stage, by_axes, moe_ep, moe_tp, pipeline)


_NAMES = {
    TokenAxis.ATTN_DP: "attention_dp",
    TokenAxis.ATTN_CP: "attention_cp",
    TokenAxis.ATTN_TP_SCATTER: "attention_tp",
}


def _joined(axes: frozenset[TokenAxis]) -> str:
    return "_x_".join(_NAMES[axis] for axis in TokenAxis if axis in axes) or "solo"


def solo() -> Parallel:
    """One process that holds everything."""
    return build(Topology(), 0, lambda name, ranks: None)


def from_torch_distributed(topology: Topology, limit: float = 60.0) -> Parallel:
    """The groups of the initialized default process group, whose world size is the topology's.

    Every rank calls this. Ranks on CPUs of one machine share memory, where they have a compiler; else groups stand on
    the backend of the default group. `limit` bounds in seconds how long any exchange waits for a peer.
    """
    world = topology.tp * topology.pipeline
    if dist.get_world_size() != world:
        raise ValueError(f"{topology!r} needs {world} ranks, and there are {dist.get_world_size()}")
    kind = NcclGroup if dist.get_backend() == "nccl" else GlooGroup
    rank = dist.get_rank()
    store = PrefixStore(f"boundary/{next(_worlds)}", dist.distributed_c10d._get_default_store())
    places = [""] * world if kind is NcclGroup else _places(store, rank, world, limit)

    def make_group(name: str, ranks: tuple[int, ...]) -> Group | None:
        if places[ranks[0]] and len({places[member] for member in ranks}) == 1 and available(len(ranks)):
            if rank not in ranks:
                return None
            own = PrefixStore("-".join(map(str, ranks)), store)
            return SharedGroup(SharedMemory.connect(own, ranks.index(rank), len(ranks), limit), ranks, limit, name)
        handle = dist.new_group(list(ranks))
        return kind(handle, ranks, limit, name) if isinstance(handle, dist.ProcessGroup) else None

    return build(topology, rank, make_group)


#: Tells the worlds of one process apart; ranks make them in one order.
_worlds = count()


def _places(store: Store, rank: int, world: int, limit: float) -> list[str]:
    """For each rank what ranks that can share memory have in common; empty where one cannot at all."""
    library = available(1)
    store.set(f"place/{rank}", f"{platform.node()}/{uuid.getnode()}/{library}" if library else "")
    keys = [f"place/{number}" for number in range(world)]
    # The first rank that asks for the library compiles it.
    store.wait(keys, timedelta(seconds=max(limit, COMPILE_SECONDS)))
    return [store.get(key).decode() for key in keys]


class ThreadWorld:
    """A world whose ranks are threads of one process, for tests and for reading along.

    `ThreadWorld(topology).join(rank)` is called by the thread that plays `rank`.
    """

    def __init__(self, topology: Topology, limit: float = 10.0) -> None:
        self.topology = topology
        self.limit = limit
        self.size = topology.tp * topology.pipeline
        self._groups: dict[tuple[int, ...], list[ThreadGroup]] = {}
        self._lock = threading.Lock()

    def join(self, rank: int) -> Parallel:
        def make_group(name: str, ranks: tuple[int, ...]) -> Group | None:
            if rank not in ranks:
                return None
            with self._lock:
                if ranks not in self._groups:
                    self._groups[ranks] = ThreadGroup.create(ranks, self.limit, name)
            return self._groups[ranks][ranks.index(rank)]

        return build(self.topology, rank, make_group)

    def abort(self, reason: str) -> None:
        """End every wait in the world with an error."""
        for groups in self._groups.values():
            groups[0].abort(reason)

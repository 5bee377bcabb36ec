"""The process groups a rank talks through: made here, cut here, made again here.

A group in which an operation timed out or failed is lost: gloo closes its connections, and whatever is still
under way pairs with the next operation. So groups must be replaceable while everything that uses them stays.
Two kinds of users hold a group, and each is served in its own way:

* **Ours.** The bracket holds a `boundary.collectives.Group`. The object stays; its `transport` is exchanged.
* **The model's.** A sharded model finds its groups by *name*: DTensor, DeviceMesh and the functional
  collectives resolve a name at every call. A new process group is registered under the old name and takes the
  old one's place in `torch.distributed`'s tables (also as the default group, where a mesh axis is the world).

A new group is made directly over the store, under a prefix that names the generation: only its members take
part, none of them needs a working group, and nothing left over from an earlier generation is read.

Cutting lets a waiting rank go at once instead of at its limit, and it must work from another thread while
this rank itself waits. gloo offers no way: `abort` and `shutdown` leave a wait as it is, and dropping the
last reference frees the peers only, and only if no traceback holds another. The sockets do it: after a
`shutdown(2)` both ends see a closed connection, at once, in whatever thread they wait. Each group therefore
remembers the sockets that its creation opened, by inode, because the descriptor may be somebody else's by
then. For nccl its own `abort` does this job.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    PrefixStore,
    Store,
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from boundary.collectives import GlooGroup, Group, NcclGroup, SharedGroup, SocketGroup
from boundary.shared_memory import SharedMemory, available
from boundary.sockets import Sockets

from .errors import InterleaveError, RankDied

T = TypeVar("T")

#: Seconds to wait for the members of a group that is made for the first time: some load a model for longer.
PATIENCE = 600.0


@dataclass
class Wire:
    """What one group stands on at one generation.

    Attributes:
        backends: The backends behind a process group, by kind.
        sockets: The sockets that they opened: `(fd, inode)`.
        links: The connections behind a group of our own.
    """

    backends: dict[str, Any] = field(default_factory=dict)
    sockets: list[tuple[int, int]] = field(default_factory=list)
    links: Sockets | None = None

    def cut(self) -> None:
        """Close the connections: operations on this wire fail on both ends. Any thread may call."""
        for descriptor, inode in self.sockets:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if os.fstat(connection.fileno()).st_ino == inode:
                    connection.shutdown(socket.SHUT_RDWR)
        if self.links is not None:
            self.links.close()
        for kind, backend in self.backends.items():
            if kind == "nccl":
                backend.abort()


class Groups:
    """All groups of this rank that can be cut and made again.

    Args:
        store: Where the members of a new group find each other; the same on all ranks.
        limit: Seconds that any operation on these groups, and the making of one, may take.
        device_type: What our own groups carry: `"cpu"` (through shared memory on one machine, over sockets if there
            is no compiler, over gloo on several machines) or `"cuda"` (over nccl).

    Attributes:
        generation: Names the present groups; equal on all ranks whenever they work.
    """

    def __init__(self, store: Store, limit: float, device_type: str = "cpu") -> None:
        self.generation = 0
        self._store = store
        self._limit = limit
        self._device_type = device_type
        self._ours: dict[tuple[int, ...], Group] = {}
        self._adopted: set[str] = set()
        self._meshes: list[DeviceMesh] = []
        self._wires: dict[str, Wire] = {}
        self._wired: set[str] = set()

    def ours(self, ranks: Iterable[int]) -> Group:
        """Our own group of these global ranks, made at the first call and kept.

        Its members call; ranks that are in several groups ask for them in one order.

        Raises:
            ValueError: This rank is not a member, or a rank is named twice.
            RankDied: A member did not come.
        """
        members = tuple(ranks)
        if members not in self._ours:
            rank = dist.get_rank()
            if rank not in members or len(set(members)) != len(members):
                raise ValueError(f"ranks={members}: a group has distinct ranks, this one ({rank}) among them")
            name = _our_name(members)
            kind = self._kind_for(name, members) if self._device_type == "cpu" else NcclGroup
            if kind is SharedGroup:
                group: Group = SharedGroup(self._shared_transport(members), members, self._limit, name)
            elif kind is SocketGroup:
                group = SocketGroup(self._socket_transport(members), members, self._limit, name)
            elif kind is GlooGroup:
                group = GlooGroup(self._gloo_transport(members), members, self._limit, name)
            else:
                group = NcclGroup(self._nccl_transport(members), members, self._limit, name)
            self._ours[members] = group
        return self._ours[members]

    def adopt(self, *meshes: DeviceMesh | dist.ProcessGroup) -> None:
        """Take over a model's meshes (or single groups): from now on they can be cut and made again.

        Every rank calls, with the same meshes. Each group of two ranks or more is replaced at once, under its
        name, by one that carries the limit. Whoever holds the old group as an object keeps the old one.

        Raises:
            InterleaveError: A group stands on a backend other than gloo and nccl.
            RankDied: A member of a group did not come.
        """
        found: dict[str, dist.ProcessGroup] = {}
        for mesh in meshes:
            if isinstance(mesh, DeviceMesh):
                self._meshes.append(mesh)
            for group in _groups_of(mesh):
                if group.size() > 1 and group.group_name not in self._adopted:
                    found[group.group_name] = group
        for group in found.values():
            _kinds_of(group)
        for name in sorted(found):
            self._replace(name)
            self._adopted.add(name)

    def cut(self) -> None:
        """Close this rank's connections, so that whoever waits on them - peers or this rank - fails at once.

        Any thread may call, at any time. The groups stay unusable until :meth:`remake`.
        """
        for wire in list(self._wires.values()):
            wire.cut()

    def remake(self, generation: int) -> None:
        """Replace every group. All ranks call, with one `generation` that no earlier call had.

        Raises:
            RuntimeError: A member did not come within the limit (RankDied), or the store is gone.
        """
        self.cut()
        self._wires.clear()
        self.generation = generation
        # One order on all ranks, whichever groups each of them is in: no two ranks wait for each other.
        for name in sorted(self._adopted):
            self._replace(name)
        for members, group in sorted(self._ours.items()):
            if isinstance(group, SharedGroup):
                group.transport = self._shared_transport(members)
            elif isinstance(group, SocketGroup):
                group.transport = self._socket_transport(members)
            elif isinstance(group, GlooGroup):
                group.transport = self._gloo_transport(members)
            elif isinstance(group, NcclGroup):
                group.transport = _resolve_process_group(group.transport.group_name)

    def _kind_for(self, name: str, members: tuple[int, ...]) -> type[Group]:
        """The fastest kind of group that these ranks can form. They all find the same."""
        store = PrefixStore(f"machines/{name}", self._store)
        rank = members.index(dist.get_rank())
        machine, memory = f"{platform.node()}/{uuid.getnode()}", available(len(members))
        self._assemble("on", store, members, rank, max(self._limit, PATIENCE), f"{machine} {memory}")
        said = {store.get(f"on/{number}").decode() for number in range(len(members))}
        if said == {f"{machine} {memory}"} and memory:
            return SharedGroup
        return SocketGroup if {one.rpartition(" ")[0] for one in said} == {machine} else GlooGroup

    def _shared_transport(self, members: tuple[int, ...]) -> SharedMemory:
        """Memory shared by the ranks of one machine. Waits until all members are here."""
        return self._local_transport(members, SharedMemory.connect, lambda made: made.sockets)

    def _socket_transport(self, members: tuple[int, ...]) -> Sockets:
        """Connections among the ranks of one machine. Waits until all members are here."""
        return self._local_transport(members, Sockets.connect, lambda made: made)

    def _local_transport(self, members: tuple[int, ...], connect: Callable[..., T], links: Callable[[T], Sockets]) -> T:
        name, rank = _our_name(members), members.index(dist.get_rank())
        store = PrefixStore(f"{self.generation}/{name}", self._store)
        self._assemble("here", store, members, rank, self._patience(name))
        made = connect(store, rank, len(members), self._limit)
        self._wires[name] = Wire(links=links(made))
        # A member that is done may cut at once, while another one is still connecting.
        self._assemble("made", store, members, rank, self._limit)
        return made

    def _gloo_transport(self, members: tuple[int, ...]) -> Any:
        """The bare backend: it sends and receives like a process group, without the dispatcher in between."""
        rank = members.index(dist.get_rank())
        return self._wire(_our_name(members), {"gloo"}, members, rank).backends["gloo"]

    def _nccl_transport(self, members: tuple[int, ...]) -> dist.ProcessGroup:
        """A group that `torch.distributed` knows: batched point-to-point operations look it up there."""
        limit = timedelta(seconds=self._limit)
        group: Any = dist.new_group(list(members), limit, "nccl", use_local_synchronization=True)
        self.adopt(group)
        return _resolve_process_group(group.group_name)

    def _replace(self, name: Any) -> None:
        """Put a new process group in the place of the one that the model knows by `name`."""
        old: Any = _resolve_process_group(name)
        kinds = _kinds_of(old)
        wire = self._wire(name, set(kinds.values()), tuple(dist.get_process_group_ranks(old)), old.rank())
        types = {"gloo": dist.ProcessGroup.BackendType.GLOO, "nccl": dist.ProcessGroup.BackendType.NCCL}
        new: Any = dist.ProcessGroup(c10d._world.pg_map[old][1], old.rank(), old.size())
        new._set_default_backend(types["nccl" if "nccl" in kinds.values() else "gloo"])
        if old.bound_device_id is not None:
            new.bound_device_id = old.bound_device_id
        for device, kind in kinds.items():
            new._register_backend(torch.device(device), types[kind], wire.backends[kind])
        new._set_group_name(name)
        new._set_group_desc(old.group_desc)
        _swap_in_tables(old, new)
        for mesh in self._meshes:
            registry = _registry_of(mesh)
            if name in registry:
                registry[name] = new

    def _wire(self, name: str, kinds: set[str], members: tuple[int, ...], rank: int) -> Wire:
        """The backends of a new group. Waits until all members are here."""
        store = PrefixStore(f"{self.generation}/{name}", self._store)
        self._assemble("here", store, members, rank, self._patience(name))
        before = set(_sockets())
        wire = Wire()
        for kind in sorted(kinds):
            wire.backends[kind] = _backend(kind, PrefixStore(kind, store), name, members, rank, self._limit)
        wire.sockets = [opened for opened in _sockets() if opened not in before and _is_connected(opened[0])]
        self._wires[name] = wire
        # A member that is done may cut at once, while another one is still connecting.
        self._assemble("made", store, members, rank, self._limit)
        return wire

    def _patience(self, name: str) -> float:
        """How long the members of a group are waited for: the first time some may still be loading the model."""
        first = name not in self._wired
        self._wired.add(name)
        return max(self._limit, PATIENCE) if first else self._limit

    def _assemble(
        self, state: str, store: Store, members: tuple[int, ...], rank: int, patience: float, said: str = ""
    ) -> None:
        """Wait until all members of a group have reached a state of its making, and `said` something there."""
        keys = [f"{state}/{number}" for number in range(len(members))]
        store.set(keys[rank], said)
        try:
            store.wait(keys, timedelta(seconds=patience))
        except dist.DistStoreError as error:
            absent = [member for member, key in zip(members, keys, strict=True) if not store.check([key])]
            raise RankDied(f"ranks {absent} did not come to make a group within {patience:g} s") from error


@contextlib.contextmanager
def passing_groups() -> Iterator[None]:
    """Destroy, at the end, the process groups that were made inside. Every rank leaves after all are done with them.

    A gloo group has a thread that wakes a hundred times a second for as long as the group lives.
    """
    before = set(c10d._world.pg_map)
    try:
        yield
    finally:
        for group in set(c10d._world.pg_map) - before:
            dist.destroy_process_group(group)


def _our_name(members: tuple[int, ...]) -> str:
    return f"interleave:{'-'.join(map(str, members))}"


def _groups_of(mesh: DeviceMesh | dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """The groups of a mesh: one per axis, and those of meshes that were flattened out of it."""
    if not isinstance(mesh, DeviceMesh):
        yield mesh
        return
    yield from mesh.get_all_groups()
    for name in _registry_of(mesh):
        yield _resolve_process_group(name)


def _registry_of(mesh: DeviceMesh) -> dict[Any, dist.ProcessGroup]:
    """The groups that a mesh and all meshes cut or flattened out of it hold as objects, by name."""
    root = getattr(mesh, "_root_mesh", None) or mesh
    return getattr(root, "_pg_registry", {})


def _kinds_of(group: dist.ProcessGroup) -> dict[str, str]:
    """The kind of backend (`"gloo"`, `"nccl"`) that serves each device type of a group."""
    kinds = {}
    for device in group._device_types:
        backend = type(group._get_backend(device)).__name__
        kind = {"ProcessGroupGloo": "gloo", "ProcessGroupNCCL": "nccl"}.get(backend)
        if kind is None:
            raise InterleaveError(
                f"the model's process group {group.group_name!r} stands on {backend}, which cannot be made"
                " again after an error; gloo and nccl can (TORCH_DISTRIBUTED_DEBUG=DETAIL wraps them)"
            )
        kinds[device.type] = kind
    return kinds


def _backend(kind: str, store: Store, name: str, members: tuple[int, ...], rank: int, limit: float) -> Any:
    """A new gloo or nccl backend for these global ranks, of which this one is number `rank`."""
    timeout = timedelta(seconds=limit)
    if kind == "gloo":
        backend: Any = dist.ProcessGroupGloo(store, rank, len(members), timeout=timeout)
        backend.options.global_ranks_in_group = list(members)
        backend.options.group_name = name
    else:
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.global_ranks_in_group = list(members)
        options.group_name = name
        backend = dist.ProcessGroupNCCL(store, rank, len(members), options)
    backend._set_sequence_number_for_group()
    return backend


def _swap_in_tables(old: dist.ProcessGroup, new: dist.ProcessGroup) -> None:
    """Let `new` be to `torch.distributed` what `old` was: by object, by name, by tag, and as the default."""
    world: Any = c10d._world
    is_default = old == world.default_pg
    for table in "pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag":
        entries = getattr(world, table)
        if old in entries:
            entries[new] = entries.pop(old)
    world.pg_coalesce_state.pop(old, None)
    for listed in world.tags_to_pg.values():
        listed[:] = [new if group == old else group for group in listed]
    _unregister_process_group(new.group_name)
    _register_process_group(new.group_name, new)
    if is_default:
        c10d._update_default_pg(new)


def _sockets() -> Iterator[tuple[int, int]]:
    """This process's open sockets as `(fd, inode)`; none where the system does not list them."""
    try:
        descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                yield descriptor, status.st_ino


def _is_connected(descriptor: int) -> bool:
    """Whether a descriptor is a network connection: a listening socket is not, nor is a local channel."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            return connection.family != socket.AF_UNIX and bool(connection.getpeername())
    except OSError:
        return False

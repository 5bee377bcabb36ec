"""Memory on every rank's GPU that the kernels of all ranks see, for completing sums (`kernels/meeting.py`).

It is made before it is used, and before a CUDA graph is recorded: what fits into it is fixed then.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .collectives import Group, NcclGroup

#: How many programs a kernel has that the ranks meet in; few enough that a GPU runs all of them at once.
PROGRAMS = 64
#: What a slot holds, each of `capacity` bytes: the term, and in two shots the sum and its norm.
REGIONS = 3
#: There are two slots, which take turns.
SLOTS = 2


@dataclass
class Workspace:
    """One rank's view of it.

    Attributes:
        rank, size: This rank's index, and how many ranks there are.
        capacity: Bytes of the longest term.
        slots, flags: `[size]`, int64: the address of each rank's slots, and of its flags.
        turns: `[PROGRAMS]`, int32: for each program the slot that it takes next.
        memory: What keeps the addresses good.
    """

    rank: int
    size: int
    capacity: int
    slots: Tensor
    flags: Tensor
    turns: Tensor
    memory: object

    @classmethod
    def over(cls, addresses: list[int], rank: int, capacity: int, device: torch.device, memory: object) -> Workspace:
        """On memory that stands and whose flags are down: each rank's begins at its address, for `num_bytes`."""
        flags = SLOTS * REGIONS * capacity
        slots = torch.tensor(addresses, dtype=torch.int64)
        turns = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        return cls(rank, len(addresses), capacity, slots.to(device), (slots + flags).to(device), turns, memory)

    @classmethod
    def connect(cls, group: NcclGroup, rows: int, hidden: int, dtype: torch.dtype) -> Workspace:
        """Memory for terms of up to `rows` rows. Every rank of the group calls it.

        Raises:
            RuntimeError: torch cannot share memory between these GPUs.
        """
        from torch.distributed import _symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        capacity = capacity_of(rows, hidden, dtype)
        memory = symmetric.empty(num_bytes(capacity, group.size), dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(memory, group.transport.group_name)
        memory.zero_()
        torch.cuda.synchronize(device)
        handle.barrier()
        return cls.over(list(handle.buffer_ptrs), group.rank, capacity, device, (memory, handle))


_made: WeakKeyDictionary[Group, Workspace] = WeakKeyDictionary()


def prepare(group: NcclGroup, rows: int, hidden: int, dtype: torch.dtype) -> None:
    """Give the group a workspace, unless it has one. Every rank of it calls; see `Workspace.connect`."""
    if group not in _made:
        _made[group] = Workspace.connect(group, rows, hidden, dtype)


def workspace_of(group: Group) -> Workspace | None:
    """The group's workspace, if it has been given one."""
    return _made.get(group)


def capacity_of(rows: int, hidden: int, dtype: torch.dtype) -> int:
    """Bytes of a region for such terms: a multiple of what a thread reads at a time."""
    return (rows * hidden * dtype.itemsize + 15) // 16 * 16


def num_bytes(capacity: int, size: int) -> int:
    """Bytes of one rank's memory: its slots, and the flags that `size` ranks raise there."""
    return SLOTS * REGIONS * capacity + PROGRAMS * size * 4

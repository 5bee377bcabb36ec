"""Tensors between processes: a table beside the pickle, small contents inside it, large ones in shared memory.

Pickle would copy every tensor into its stream, and would lose that two tensors share memory. So a message has
a *table*: one `View` for each tensor, one `Memory` for each piece of memory under them. Tensors that share
memory there share it here. Only the bytes that the tensors cover travel, so one row of a large activation
costs a row.

Small memories travel inline. Large ones lie in an *arena*, an anonymous file in memory whose descriptor goes
through the socket: it has no name, so nothing has to be unlinked and nothing survives the processes, and it
does not count against the size of `/dev/shm`, which containers keep small.

What a block captured - a probe, a sparse autoencoder, a steering vector - is usually the same at every trace.
Large captured memories are therefore named by the hash of their bytes, sent once, and kept in their arena by
the ranks. A trace sees them through a private copy-on-write mapping: all ranks share one copy, and a block
that writes into a captured tensor does not spoil the kept bytes.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..errors import InterleaveError

#: From this many bytes on, a memory lies in an arena.
LARGE = 64 * 1024
#: How many bytes of captured memories the ranks keep (one copy for all of them).
KEPT_BYTES = 2 * 1024**3
#: Memories start at multiples of this: the widest dtype's size divides it, and so does a cache line.
ALIGNMENT = 64

ORDINARY = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class View:
    """How one tensor lies in its memory. `offset`, `stride` count elements; `grad` is a place in the table."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool
    is_parameter: bool
    grad: int | None


@dataclass(frozen=True)
class Memory:
    """A piece of memory: its bytes, or its offset in the message's arena, or the key of kept bytes, or both."""

    num_bytes: int
    device: str
    inline: bytes | None = None
    offset: int | None = None
    key: bytes | None = None


@dataclass
class Table:
    """Every tensor of a message, in the order in which the pickle met them."""

    views: list[View] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)
    #: Keys the receiver must drop after this message: the sender alone decides what is kept.
    forget: list[bytes] = field(default_factory=list)


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a strided view says all about `tensor`: no subclass, no sparse or quantized layout."""
    return type(tensor) in ORDINARY and tensor.layout == torch.strided and not tensor.is_quantized


def new_arena(num_bytes: int) -> int:
    """A descriptor of that much anonymous memory, which lives as long as a descriptor or a mapping of it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("interleave", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as unnamed:
            descriptor = os.dup(unnamed.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def write(descriptor: int, content: Any, offset: int) -> None:
    """Write all of a buffer into an arena. Raises OSError where there is no room for it."""
    left = memoryview(content).cast("B")
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written


def read(descriptor: int, into: Any, offset: int) -> None:
    """Fill a buffer from an arena."""
    left = memoryview(into).cast("B")
    while left:
        count = os.preadv(descriptor, [left], offset)
        if not count:
            raise InterleaveError("a message's tensors end before they are complete")
        left, offset = left[count:], offset + count


def bytes_of(memory: torch.Tensor) -> Any:
    """The bytes of a uint8 tensor, as a numpy array; without a copy where it lies on the CPU."""
    return memory.detach().cpu().numpy()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Outgoing:
    """Collects the tensors of one message, and then writes their table and arena.

    Args:
        kept: What the receiver keeps by content; None where nothing is to be kept (results).
        detach: Whether plain tensors arrive as leaves that require no gradient.
    """

    def __init__(self, kept: Kept | None = None, detach: bool = False) -> None:
        self.tensors: list[torch.Tensor] = []
        self._kept = kept
        self._detach = detach
        self._index: dict[int, int] = {}

    def add(self, tensor: torch.Tensor) -> int:
        """The place of `tensor` in the table. Meta tensors are refused: there is nothing to send."""
        if tensor.is_meta:
            raise InterleaveError(
                "a tensor on the meta device has no values; the driver's model holds no weights: "
                "read parameters inside the block"
            )
        place = self._index.get(id(tensor))
        if place is None:
            place = self._index[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None:
                self.add(tensor.grad)
        return place

    def finish(self, arena: Callable[[int], int] | None = new_arena, large: int = LARGE) -> tuple[Table, int | None]:
        """The table and the arena's descriptor (the caller closes it), or None where nothing lies in one.

        Args:
            arena: Gives the descriptor of an arena of that many bytes. None: all bytes go into the table.
            large: From this many bytes on, a memory lies in the arena.

        Raises:
            OSError: The arena has no room.
        """
        table = Table()
        views: dict[int, View] = {}
        contents: list[tuple[Memory, torch.Tensor]] = []
        in_use: set[bytes] = set()
        end = 0
        for members in self._by_storage():
            covered, placed = self._cover(members, len(table.memories))
            views.update(placed)
            num_bytes, device = covered.numel(), covered.device.type
            if arena is None or num_bytes < large:
                memory = Memory(num_bytes, device, inline=bytes_of(covered).tobytes())
            elif self._kept is None:
                memory = Memory(num_bytes, device, offset=end)
            else:
                key = hashlib.sha256(memoryview(bytes_of(covered))).digest()
                known = self._kept.touch(key, num_bytes)
                in_use.add(key)
                memory = Memory(num_bytes, device, offset=None if known else end, key=key)
            if memory.offset is not None:
                contents.append((memory, covered))
                end = _aligned(end + num_bytes)
            table.memories.append(memory)
        table.views = [views[place] for place in range(len(self.tensors))]
        if self._kept is not None:
            table.forget = self._kept.trim(in_use)
        if not end or arena is None:
            return table, None
        descriptor = arena(end)
        try:
            for memory, covered in contents:
                assert memory.offset is not None
                write(descriptor, bytes_of(covered), memory.offset)
        except BaseException:
            os.close(descriptor)
            raise
        return table, descriptor

    def _by_storage(self) -> list[list[int]]:
        storages: dict[int, list[int]] = {}
        for place, tensor in enumerate(self.tensors):
            storages.setdefault(tensor.untyped_storage()._cdata, []).append(place)
        return list(storages.values())

    def _cover(self, members: list[int], memory: int) -> tuple[torch.Tensor, dict[int, View]]:
        """The uint8 tensor over the bytes that `members` cover, and how each of them lies in it."""
        tensors = [self.tensors[place].detach() for place in members]
        tensors = [t.resolve_conj().resolve_neg() if t.is_conj() or t.is_neg() else t for t in tensors]
        if len(tensors) == 1 and span(tensors[0]) > tensors[0].numel() * tensors[0].itemsize:
            # A sparse view of memory that nothing else in the message looks at: its elements are enough.
            tensors = [tensors[0].contiguous()]
        starts = [int(tensor.storage_offset()) * tensor.itemsize for tensor in tensors]
        low = min(starts) // ALIGNMENT * ALIGNMENT
        high = max(start + span(tensor) for start, tensor in zip(starts, tensors, strict=True))
        covered = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
        covered.set_(tensors[0].untyped_storage(), low, (high - low,), (1,))
        placed = {}
        for place, tensor, start in zip(members, tensors, starts, strict=True):
            original = self.tensors[place]
            is_parameter = isinstance(original, torch.nn.Parameter)
            grad = original.grad if original.is_leaf and original.requires_grad else None
            placed[place] = View(
                memory=memory,
                dtype=tensor.dtype,
                size=tuple(tensor.size()),
                stride=tuple(tensor.stride()),
                offset=(start - low) // tensor.itemsize,
                requires_grad=original.requires_grad and (is_parameter or not self._detach),
                is_parameter=is_parameter,
                grad=None if grad is None else self._index[id(grad)],
            )
        return covered, placed


def span(tensor: torch.Tensor) -> int:
    """How many bytes lie from the first element of `tensor` to its last."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return (sum((int(size) - 1) * int(stride) for size, stride in steps) + 1) * tensor.itemsize


class Kept:
    """The sender's record of what the receivers keep: above a bound of bytes, the least recently used goes."""

    def __init__(self, bound: int = KEPT_BYTES) -> None:
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._stale: list[bytes] = []
        self._bound = bound

    def touch(self, key: bytes, num_bytes: int) -> bool:
        """Whether the receivers have `key` already; from now on they do."""
        known = key in self._sizes
        self._sizes[key] = num_bytes
        self._sizes.move_to_end(key)
        return known

    def trim(self, in_use: set[bytes]) -> list[bytes]:
        """What the receivers drop before they take the message that uses `in_use`, so that the bound holds."""
        forgotten, self._stale = self._stale, []
        total = sum(self._sizes.values())
        for key in list(self._sizes):
            if total <= self._bound:
                break
            if key not in in_use:
                total -= self._sizes.pop(key)
                forgotten.append(key)
        return forgotten

    def distrust(self) -> None:
        """After a message of which nobody knows whether it arrived: assume that nothing is kept."""
        self._stale += self._sizes
        self._sizes.clear()


class Shelf:
    """The receiver's kept memories: a key names a place in an arena that was received earlier."""

    def __init__(self) -> None:
        self.places: dict[bytes, tuple[Arena, int]] = {}

    def forget(self, keys: list[bytes]) -> None:
        for key in keys:
            self.places.pop(key, None)


class Arena:
    """A received descriptor, closed with the last user of it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def mapping(self, writable: bool) -> mmap.mmap:
        """All of it; what is written to a writable mapping stays there (copy-on-write)."""
        access = mmap.ACCESS_COPY if writable else mmap.ACCESS_READ
        return mmap.mmap(self.descriptor, self.size, access=access)

    def __del__(self) -> None:
        os.close(self.descriptor)


class Incoming:
    """The tensors of a received message, built from its table.

    Attributes:
        tensors: In the table's order; each a leaf, with a version counter (never an inference tensor).
    """

    def __init__(
        self,
        table: Table,
        descriptor: int | None,
        shelf: Shelf | None = None,
        device: str = "cpu",
        mapped: bool = False,
    ) -> None:
        """`shelf` is where kept memories lie; `device` is where tensors go that were not on the CPU. `mapped`: whether
        all memories in the arena are seen through private mappings, as kept ones are, and not copied out of it."""
        self.table = table
        self._mapped = mapped
        arena = None if descriptor is None else Arena(descriptor)
        shelf = Shelf() if shelf is None else shelf
        shelf.forget(table.forget)
        self._places = [self._locate(memory, arena, shelf) for memory in table.memories]
        mappings: dict[int, mmap.mmap] = {}
        with torch.inference_mode(False):
            self._memories = [
                self._take(index, mappings).to(device if memory.device != "cpu" else "cpu")
                for index, memory in enumerate(table.memories)
            ]
            self.tensors = [self._tensor(view) for view in table.views]
            for view, tensor in zip(table.views, self.tensors, strict=True):
                if view.grad is not None:
                    tensor.grad = self.tensors[view.grad]

    @staticmethod
    def _locate(memory: Memory, arena: Arena | None, shelf: Shelf) -> tuple[Arena, int] | None:
        """Where the bytes of `memory` are; None: inline. New bytes that have a key are kept."""
        if memory.offset is None:
            return None if memory.key is None else shelf.places[memory.key]
        assert arena is not None
        place = (arena, memory.offset)
        if memory.key is not None:
            shelf.places[memory.key] = place
        return place

    def _take(self, index: int, mappings: dict[int, mmap.mmap]) -> torch.Tensor:
        memory, place = self.table.memories[index], self._places[index]
        if place is not None and (memory.key is not None or self._mapped):
            arena, offset = place
            if id(arena) not in mappings:
                mappings[id(arena)] = arena.mapping(writable=True)
            mapping = mappings[id(arena)]
            return torch.frombuffer(mapping, dtype=torch.uint8, count=memory.num_bytes, offset=offset)
        taken = torch.empty(memory.num_bytes, dtype=torch.uint8)
        if place is None:
            taken.numpy()[:] = self._original(index)
        else:
            arena, offset = place
            read(arena.descriptor, taken.numpy(), offset)
        return taken

    def _original(self, index: int) -> Any:
        """The bytes of a memory as they were sent, as a numpy array."""
        memory, place = self.table.memories[index], self._places[index]
        if place is None:
            assert memory.inline is not None
            return np.frombuffer(memory.inline, dtype=np.uint8)
        arena, offset = place
        mapping = arena.mapping(writable=False)
        return np.frombuffer(mapping, dtype=np.uint8, count=memory.num_bytes, offset=offset)

    def _tensor(self, view: View) -> torch.Tensor:
        memory = self._memories[view.memory]
        tensor = torch.empty(0, dtype=view.dtype, device=memory.device)
        tensor.set_(memory.untyped_storage(), view.offset, view.size, view.stride)
        if view.is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=view.requires_grad)
        return tensor.requires_grad_(view.requires_grad)

    def changed(self) -> set[int]:
        """The places of the tensors whose bits differ from those that were sent.

        Bits, not version counters: a counter does not see writes through `.data` or `.numpy()`.
        """
        changed = {
            index
            for index, memory in enumerate(self._memories)
            if not np.array_equal(bytes_of(memory), self._original(index))
        }
        return {
            place
            for place, view in enumerate(self.table.views)
            if view.memory in changed or self._moved(view, self.tensors[place])
        }

    def _moved(self, view: View, tensor: torch.Tensor) -> bool:
        """Whether the tensor object looks elsewhere or differently by now (`.data =`, `resize_`)."""
        there = tensor.untyped_storage()._cdata == self._memories[view.memory].untyped_storage()._cdata
        now = (tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()))
        return not there or now != (view.dtype, view.size, view.stride)


def overwrite(target: torch.Tensor, source: torch.Tensor) -> None:
    """Give `target`, in place, what `source` holds; its version counter moves as for any in-place write."""
    with torch.no_grad():
        if target.size() != source.size() or target.dtype != source.dtype:
            target.data = source.to(target.device)
        elif span(target) < target.numel() * target.itemsize:
            # An expanded tensor: several elements are one place in memory, which `copy_` refuses.
            once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in target.stride())
            target[once].copy_(source[once])
        else:
            target.copy_(source)

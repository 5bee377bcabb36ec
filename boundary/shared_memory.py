"""Memory that the ranks of one machine share: the fastest way for them to exchange tensors, and to add them up.

Each rank has a place of its own in one segment and writes only there; flags say what is ready (`compiled/channel.c`
has the protocol). What comes out of it is copied into the caller's tensors, or summed into them, before the segment
is used again: nothing that is handed out lies in it.

The segment has no name in any file system. One rank makes it and hands its descriptor to the others over their
sockets, and it is gone with the last process that maps it, however that ends. The sockets stay: one that closes says
that a peer is gone, and closing them ends every wait. Waits end after their limit in any case. Where ranks outnumber
cores a wait soon gives its core away, and a rank that waits for one on its own core moves to another if its thread may.

One rank's end belongs to one group and one thread at a time. Without the compiled library there is none of this, and
the sockets alone do the same work (see :class:`boundary.collectives.SocketGroup`).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import Store

from .compiled import NormSpec, QuantizedSpec, fingerprint, library
from .sockets import PeerFailed, Sockets

#: Bytes of a rank's slot, of which only those that are used take memory. What is longer goes in several steps.
WINDOW = 1 << 19
#: How long a wait is away from Python, which handles signals in between.
SLICE_NS = 100_000_000

_DONE, _AGAIN, _CLOSED, _MISMATCH, _NO_MEMORY = range(5)
# Not in every build of Python: from the kernel's interface.
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 2, 4


#: The library's `sum_t` and `gather_t`: packing them is several times as fast as handing over the fields one by one.
_SUM = struct.Struct("=QQqQqQQqQqQQQ")
_GATHER = struct.Struct("=QQQQqqQQq")


class Run(NamedTuple):
    """Columns side by side: whose piece has them, where they begin in it and in the whole, and how many there are."""

    rank: int
    piece: int
    whole: int
    width: int


@lru_cache(maxsize=1024)
def _placement(runs: tuple[Run, ...], widths: tuple[int, ...], column: int) -> tuple[int, int, tuple[Any, Any]]:
    """The addresses of the bytes of each rank's rows, and of the library's `run_t` of all runs; and what lies there."""
    row_bytes = (ctypes.c_int64 * len(widths))(*(width * column for width in widths))
    numbers = [number for rank, *columns in runs for number in (rank, *(column * one for one in columns))]
    placed = (ctypes.c_int64 * len(numbers))(*numbers)
    return ctypes.addressof(row_bytes), ctypes.addressof(placed), (row_bytes, placed)


class _Name(NamedTuple):
    """A message's name for the wire: as text, where that lies, and as a token, which is never 0."""

    text: ctypes.Array[ctypes.c_char]
    address: int
    token: int


@lru_cache(maxsize=4096)
def _named(what: str) -> _Name:
    encoded = what.encode()
    text = ctypes.create_string_buffer(encoded)
    return _Name(text, ctypes.addressof(text), int.from_bytes(blake2b(encoded, digest_size=8).digest()) | 1)


def available(size: int) -> str:
    """Equal and not empty on ranks that can share memory, if they run on one machine: `size` ranks with one library."""
    lib = library()
    return fingerprint() if lib is not None and size <= lib.max_ranks() else ""


class SharedMemory:
    """This rank's end of a segment that it shares with the other ranks of a group.

    Attributes:
        rank, size: This rank's index, and how many ranks there are.
        sockets: The connections that say whether the peers are there.
        longest_row: Bytes of the longest row that `reduce` takes with a norm.
    """

    def __init__(self, sockets: Sockets, descriptor: int, window: int) -> None:
        lib = library()
        assert lib is not None, "ranks without the library are not connected"
        self.rank, self.size, self.sockets = sockets.rank, sockets.size, sockets
        self._lib = lib
        self._failed: str | None = None
        links = (ctypes.c_int * self.size)(*sockets.descriptors)
        self._channel = lib.channel_open(descriptor, self.rank, self.size, window, links)
        if not self._channel:
            raise OSError(f"the segment of {self.size} ranks could not be mapped")
        self.longest_row = lib.longest_row(self._channel)
        # What the library takes: pointers, lengths and tokens, one per rank, of what is sent and of what arrives.
        self._arrays = [(kind * self.size)() for kind in (ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64) * 2]
        self._request = ctypes.create_string_buffer(max(_SUM.size, _GATHER.size))
        self._request_address = ctypes.addressof(self._request)

    @classmethod
    def connect(cls, store: Store, rank: int, size: int, limit: float, window: int = WINDOW) -> SharedMemory:
        """Share memory with all other ranks. Every rank calls it, with a store that only this group sees.

        Raises:
            TimeoutError: A rank did not come within `limit` seconds.
            OSError: The ranks are not on one machine, or there is no memory.
        """
        lib = library()
        if lib is None or size > lib.max_ranks():
            raise OSError(f"{size} ranks cannot share memory here; connect them by sockets")
        sockets = Sockets.connect(store, rank, size, limit)
        descriptor = cls._made(size, window) if rank == 0 else cls._received(sockets, limit)
        try:
            made = cls(sockets, descriptor, window)
            for peer in range(1, size) if rank == 0 else ():
                socket.send_fds(sockets.link(peer), [b"m"], [descriptor])
        finally:
            os.close(descriptor)
        return made

    @staticmethod
    def _made(size: int, window: int) -> int:
        """The descriptor of a new segment."""
        lib = library()
        assert lib is not None
        descriptor = os.memfd_create("ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, lib.segment_bytes(size, window))
        # Nobody can take away what the others have mapped.
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
        return descriptor

    @staticmethod
    def _received(sockets: Sockets, limit: float) -> int:
        """The descriptor of the segment that rank 0 has made."""
        link = sockets.link(0)
        poll = select.poll()
        poll.register(link, select.POLLIN)
        if not poll.poll(limit * 1000):
            raise TimeoutError(f"rank 0 did not share its memory within {limit:g} s")
        _, descriptors, _, _ = socket.recv_fds(link, 1, 1)
        if not descriptors:
            raise OSError("rank 0 could not share its memory")
        return descriptors[0]

    def exchange(
        self,
        sends: Sequence[tuple[str, int, int] | None],
        receives: Sequence[tuple[str, int, int] | None],
        dealt: bool,
        limit: float,
    ) -> None:
        """Send a message to each peer, and receive each peer's. Every rank calls it, those without messages too.

        Args:
            sends: For each rank what its message is, its address and its bytes; None to send nothing.
            receives: For each rank what its message must be, where it goes, and its bytes; None to await nothing.
            dealt: The messages to the peers are not all the same.
            limit: Seconds after which waiting ends.

        Raises:
            PeerFailed: A peer's message is another one, it is gone, or it did not come in time.
        """
        text = _named("nothing").text
        for messages, (addresses, lengths, tokens) in zip(
            (sends, receives), (self._arrays[:3], self._arrays[3:]), strict=True
        ):
            for rank, message in enumerate(messages):
                if message is None:
                    addresses[rank], lengths[rank], tokens[rank] = None, 0, 0
                else:
                    text, _, tokens[rank] = _named(message[0])
                    addresses[rank], lengths[rank] = message[1], message[2]
        sent = next((message for message in sends if message is not None), None)
        if sent is not None:
            text = _named(sent[0]).text
        self._run(self._lib.exchange, (self._channel, text, dealt, *self._arrays), limit)

    def gather(
        self,
        what: str,
        piece: int,
        whole: int,
        rows: int,
        column: int,
        width: int,
        runs: tuple[Run, ...],
        widths: tuple[int, ...],
        limit: float,
    ) -> None:
        """Put every rank's piece into this rank's whole. Every rank calls it.

        Args:
            what: What is gathered; equal on all ranks.
            piece, whole: The addresses of `rows` rows each.
            column: The bytes of a column of a row.
            width: How many columns a row of the whole has.
            runs: Where each of them comes from.
            widths: How many columns a row of each rank's piece has.
            limit: Seconds after which waiting ends.

        Raises:
            PeerFailed: As in `exchange`.
        """
        name = _named(what)
        row_bytes, placed, kept = _placement(runs, widths, column)
        _GATHER.pack_into(
            self._request,
            0,
            name.address,
            name.token,
            piece,
            whole,
            rows,
            width * column,
            row_bytes,
            placed,
            len(runs),
        )
        self._run(self._lib.gather, (self._channel, self._request_address), limit)
        del kept  # by now the library is done with it

    def reduce(
        self,
        what: str,
        dtype: int,
        term: int,
        count: int,
        total: int | None,
        limit: float,
        counts: Sequence[int] | None = None,
        width: int = 0,
        residual: int | None = None,
        residual_stride: int = 0,
        normed: int | None = None,
        norm: NormSpec | None = None,
        quantized: QuantizedSpec | None = None,
    ) -> None:
        """Add up the ranks' terms in rank order, and the residual to the sum; normalize it. Every rank calls it.

        Args:
            what: What is summed; equal on all ranks.
            dtype: The library's code.
            term: The address of `count` elements, or with `counts`, one per rank, of as many as these make up.
            total: Where the sum goes: all of it, or with `counts` this rank's part.
            limit: Seconds after which waiting ends.
            counts: How many elements of the sum each rank keeps.
            width: Elements of a row, where there is a residual or a norm; at most `longest_row` bytes.
            residual, residual_stride: What is added, and how many elements its rows are apart.
            normed, norm: Where the norm goes, and which it is.
            quantized: Where it goes instead, in one byte an element.

        Raises:
            PeerFailed: As in `exchange`.
        """
        name = _named(what)
        parts = None if counts is None else (ctypes.c_int64 * self.size)(*counts)
        _SUM.pack_into(
            self._request,
            0,
            name.address,
            name.token,
            dtype,
            term,
            count,
            0 if parts is None else ctypes.addressof(parts),
            total or 0,
            width,
            residual or 0,
            residual_stride,
            normed or 0,
            0 if quantized is None else ctypes.addressof(quantized),
            0 if norm is None else ctypes.addressof(norm),
        )
        self._run(self._lib.reduce, (self._channel, self._request_address), limit)

    def _run(self, function: ctypes._NamedFuncPointer, arguments: tuple, limit: float) -> None:  # type: ignore[name-defined]
        """Call until it is done. After a failure the ranks are out of step, so there is no second one."""
        if self._failed is not None or self.sockets.closed:
            raise PeerFailed(self._anyone, f"the connection is closed ({self._failed or 'by this rank'})")
        status = _AGAIN
        try:
            status = function(*arguments, min(SLICE_NS, int(limit * 1e9)))
            if status == _DONE:
                return
            deadline = time.monotonic() + limit - SLICE_NS / 1e9
            while status == _AGAIN and (left := deadline - time.monotonic()) > 0:
                status = function(*arguments, min(SLICE_NS, int(left * 1e9)))
        except BaseException:
            status = _CLOSED
            raise
        finally:
            if status != _DONE:
                self._failed = "an exchange failed before"
                # Whoever waits for this rank waits in vain.
                self.sockets.close()
        if status == _DONE:
            return
        peer = self._lib.channel_peer(self._channel)
        if status == _AGAIN:
            raise PeerFailed(peer, "no answer", timed_out=True)
        if status == _MISMATCH:
            raise PeerFailed(peer, f"it is at {self._lib.channel_text(self._channel, peer).decode(errors='replace')}")
        if status == _CLOSED:
            raise PeerFailed(peer, "the connection is closed")
        raise MemoryError("no memory for a row of sums")

    @property
    def _anyone(self) -> int:
        return (self.rank + 1) % self.size

    def close(self) -> None:
        """End every wait on the segment, here and at the peers, with an error. Any thread may call."""
        self.sockets.close()

    def __del__(self) -> None:
        if getattr(self, "_channel", None):
            self._lib.channel_close(self._channel)

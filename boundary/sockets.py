"""Sockets among the ranks of one machine: how a few small tensors get from each rank to all others fastest.

A library's point-to-point messages pass through a thread of its own on either side, and each hand-over between
threads costs a wake-up; with more ranks than cores one of them often waits for a whole time slice. Here the
thread that wants the tensors moves the bytes itself: it writes to every peer and reads from every peer, without
blocking on either, until all is done, straight from and into the tensors' memory.

A message is a preamble and the bytes. The preamble says what the message is, and the receiver knows what it
must say: peers that disagree find out when the first bytes arrive and learn what the other wanted, without
waiting and without a byte of a value going astray. One rank's sockets belong to one group and one thread at a
time.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress

from torch.distributed.distributed_c10d import Store

_LENGTHS = struct.Struct("<IQ")


class PeerFailed(Exception):
    """An exchange with the peer of that index failed; `timed_out` says that it did not come in time."""

    def __init__(self, peer: int, what: str, timed_out: bool = False) -> None:
        super().__init__(what)
        self.peer, self.timed_out = peer, timed_out


class _Flow:
    """What is left to move to or from one peer: a preamble, then a payload."""

    def __init__(self, link: socket.socket, preamble: bytes | bytearray, payload: memoryview) -> None:
        self.link = link
        self.left = [memoryview(preamble), payload]
        self.moved = 0

    def write(self) -> bool:
        """Send what goes without waiting. Whether all is done."""
        while self.left:
            try:
                self._advance(self.link.sendmsg(self.left))
            except BlockingIOError:
                return False
        return True

    def read(self) -> bool:
        """Receive what is there. Whether all is done; ConnectionError if the peer is gone."""
        while self.left:
            try:
                num_bytes = self.link.recvmsg_into(self.left)[0]
            except BlockingIOError:
                return False
            if not num_bytes:
                raise ConnectionError("end of stream")
            self._advance(num_bytes)
        return True

    def _advance(self, num_bytes: int) -> None:
        self.moved += num_bytes
        while self.left and num_bytes >= len(self.left[0]):
            num_bytes -= len(self.left.pop(0))
        if num_bytes:
            self.left[0] = self.left[0][num_bytes:]


class _Incoming(_Flow):
    """A flow from a peer, whose preamble must be the expected one as far as it has come."""

    def __init__(self, link: socket.socket, expected: bytes, payload: memoryview) -> None:
        self.expected = expected
        self.preamble = bytearray(len(expected))
        super().__init__(link, self.preamble, payload)

    def mismatch(self) -> str | None:
        """What the peer's message is, if it is not the expected one."""
        come = min(self.moved, len(self.expected))
        if self.preamble[:come] == self.expected[:come]:
            return None
        found = bytes(self.preamble[:come])
        if come < _LENGTHS.size:
            return "something else"
        length, _ = _LENGTHS.unpack_from(found)
        text = found[_LENGTHS.size : _LENGTHS.size + length]
        with suppress(OSError):
            text += self.link.recv(length - len(text)) if length > len(text) else b""
        return text.decode(errors="replace")


class Sockets:
    """This rank's connection to each other rank of a group.

    Attributes:
        rank, size: This rank's index, and how many ranks there are.
        closed: This rank has ended its connections.
    """

    def __init__(self, rank: int, links: Sequence[socket.socket | None]) -> None:
        self.rank = rank
        self.size = len(links)
        self.closed = False
        self._links = list(links)
        for link in self._links:
            if link is not None:
                link.setblocking(False)
        # Not in a `__del__`: in a cycle that is collected, the sockets might go first, with a warning for each.
        weakref.finalize(self, _close_all, self._links)
        # Starting with the next rank, each on another, spreads the load: no rank is everyone's first peer.
        self._order = [(rank + step) % self.size for step in range(1, self.size)]

    @classmethod
    def connect(cls, store: Store, rank: int, size: int, limit: float) -> Sockets:
        """Connect this rank with all others. Every rank calls it, with a store that only this group sees.

        Raises:
            TimeoutError: A rank did not come within `limit` seconds.
            OSError: The ranks are not on one machine.
        """
        links: list[socket.socket | None] = [None] * size
        with (
            tempfile.TemporaryDirectory(prefix="ranks-", dir=_short_directory()) as directory,
            socket.socket(socket.AF_UNIX) as listener,
        ):
            path = os.path.join(directory, "rank")
            listener.bind(path)
            listener.listen(size)
            listener.settimeout(limit)
            store.set(f"socket/{rank}", path)
            for peer in range(rank):
                link = socket.socket(socket.AF_UNIX)
                link.settimeout(limit)
                link.connect(store.get(f"socket/{peer}").decode())
                link.sendall(struct.pack("<I", rank))
                links[peer] = link
            for _ in range(rank + 1, size):
                link, _ = listener.accept()
                link.settimeout(limit)
                links[struct.unpack("<I", link.recv(4, socket.MSG_WAITALL))[0]] = link
        return cls(rank, links)

    def exchange(
        self,
        sends: Sequence[tuple[str, memoryview] | None],
        receives: Sequence[tuple[str, memoryview] | None],
        limit: float,
    ) -> None:
        """Send a message to each peer, and receive each peer's.

        Args:
            sends: For each rank what its message is, and the bytes; None to send nothing.
            receives: For each rank what its message must be, and where its bytes go; None to await nothing.
            limit: Seconds after which waiting ends.

        Raises:
            PeerFailed: A peer's message is another one, its connection is closed, or it did not come in time.
        """
        deadline = time.monotonic() + limit
        peer = self.rank
        incoming: dict[int, _Incoming] = {}
        outgoing: dict[int, _Flow] = {}
        for index in self._order:
            link = self._links[index]
            assert link is not None
            if (message := sends[index]) is not None:
                outgoing[index] = _Flow(link, _preamble(*message), message[1])
            if (awaited := receives[index]) is not None:
                incoming[index] = _Incoming(link, _preamble(*awaited), awaited[1])
        try:
            while True:
                for peer in list(outgoing):
                    if outgoing[peer].write():
                        del outgoing[peer]
                for peer in list(incoming):
                    flow = incoming[peer]
                    done = flow.read()
                    if (found := flow.mismatch()) is not None:
                        raise PeerFailed(peer, f"it is at {found}")
                    if done:
                        del incoming[peer]
                if not outgoing and not incoming:
                    return
                self._wait(outgoing, incoming, deadline)
        except OSError as error:
            raise PeerFailed(peer, f"the connection is closed ({error})") from error

    def _wait(self, outgoing: dict[int, _Flow], incoming: dict[int, _Incoming], deadline: float) -> None:
        """Sleep until a byte can be moved."""
        poll = select.poll()
        for peer in {**outgoing, **incoming}:
            link = self._links[peer]
            assert link is not None
            poll.register(
                link, (select.POLLOUT if peer in outgoing else 0) | (select.POLLIN if peer in incoming else 0)
            )
        seconds = deadline - time.monotonic()
        if seconds <= 0 or not poll.poll(seconds * 1000):
            raise PeerFailed(next(iter({**incoming, **outgoing})), "no answer", timed_out=True)

    def link(self, peer: int) -> socket.socket:
        """The connection to one peer."""
        link = self._links[peer]
        assert link is not None, "a rank has no connection to itself"
        return link

    @property
    def descriptors(self) -> list[int]:
        """The connections by rank; -1 for this rank itself."""
        return [-1 if link is None else link.fileno() for link in self._links]

    def close(self) -> None:
        """End all connections: exchanges that wait, here and at the peers, fail at once. Any thread may call."""
        self.closed = True
        for link in self._links:
            if link is not None:
                # Not `close`: a descriptor that another thread waits on must not be given to someone else.
                with suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)


def _close_all(links: list[socket.socket | None]) -> None:
    for link in links:
        if link is not None:
            link.close()


def _short_directory() -> str | None:
    """Where sockets may lie: their paths are limited to some hundred bytes. None: where temporary files lie."""
    return None if len(tempfile.gettempdir()) < 80 else "/tmp"


def _preamble(what: str, payload: memoryview) -> bytes:
    text = what.encode()
    return _LENGTHS.pack(len(text), len(payload)) + text

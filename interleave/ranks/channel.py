"""One connection between the driver and a rank: messages, and the descriptors of arenas.

A private directory holds a Unix socket; both ends prove that they know a secret that never appears on a
command line. After a message that has an arena, its descriptor follows through the socket.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple


class Message(NamedTuple):
    """`arena` is a descriptor that now belongs to the receiver, or None."""

    kind: str
    body: Any
    arena: int | None = None


class Channel:
    """Messages both ways over a connected socket. Sending is safe from several threads, receiving is not."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._sending = threading.Lock()
        _open.add(self)

    def send(self, kind: str, body: Any = None, arena: int | None = None) -> None:
        """Send one message. `arena` stays the caller's.

        Raises:
            OSError: The other end is gone.
        """
        data = pickle.dumps((kind, body, arena is not None), protocol=pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self.connection.send_bytes(data)
            if arena is not None:
                send_handle(self.connection, arena, None)

    def receive(self) -> Message:
        """The next message; waits for it.

        Raises:
            EOFError, OSError: The other end is gone.
        """
        kind, body, has_arena = pickle.loads(self.connection.recv_bytes())
        return Message(kind, body, recv_handle(self.connection) if has_arena else None)

    def close(self) -> None:
        self.connection.close()


_open: weakref.WeakSet[Channel] = weakref.WeakSet()


def _forget() -> None:
    """A forked child must not hold the sockets open: the ranks take their closing for the driver's death."""
    for channel in list(_open):
        channel.close()


os.register_at_fork(after_in_child=_forget)


class Door:
    """The driver's socket, where each rank knocks twice: for its requests and for its control connection."""

    def __init__(self, path: str, secret: bytes) -> None:
        self._secret = secret
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(path)
        self._socket.listen(256)
        self._socket.settimeout(0.1)

    def admit(self, count: int, check: Callable[[], None]) -> dict[tuple[str, int], Channel]:
        """Wait until `count` channels are open; each by what it said it is: its purpose and its rank.

        `check` is called again and again while waiting; it raises where waiting is in vain.
        """
        channels: dict[tuple[str, int], Channel] = {}
        while len(channels) < count:
            check()
            try:
                accepted, _ = self._socket.accept()
            except TimeoutError:
                continue
            accepted.setblocking(True)
            connection = Connection(accepted.detach())
            try:
                deliver_challenge(connection, self._secret)
                answer_challenge(connection, self._secret)
            except (AuthenticationError, EOFError, OSError):
                connection.close()
                continue
            channel = Channel(connection)
            channels[channel.receive().body] = channel
        return channels

    def close(self) -> None:
        self._socket.close()


def knock(path: str, secret: bytes, purpose: str, rank: int) -> Channel:
    """Open a rank's channel for `purpose`."""
    for _ in range(50):
        try:
            channel = Channel(Client(path, family="AF_UNIX", authkey=secret))
            break
        except BlockingIOError:
            # The queue of the listening socket is full: many ranks start at the same moment.
            time.sleep(0.1)
    else:
        raise ConnectionError(f"the driver at {path} does not answer")
    channel.send("hello", (purpose, rank))
    return channel

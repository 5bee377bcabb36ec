"""Where large tensors lie on their way between the client and an engine's ranks: files in memory.

vLLM's own messages copy what they carry some ten times. A client therefore makes a directory, in memory where the
machine has one that processes share, and a message names a file in it. Whoever sends writes the file. A result's is
given back once it has been read, and the next result is written over it: the system takes longer to find new memory
than a rank takes to fill it. A block's is removed when its requests have ended. The directory ends with the client: on
`close`, at its exit, or, if it is killed, by its ranks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from typing import NamedTuple

from .watch import place

#: Memory that processes of one machine share, as files.
SHARED_MEMORY = "/dev/shm"
#: From this many bytes on, a tensor lies in a file.
LARGE = 4096
#: Bytes of files that were given back, at most, and the part of the directory's file system: whichever is less.
KEPT_BYTES = 256 << 20
KEPT_PART = 1 / 8
#: How the names of files that were given back begin.
FREE = "free-"


class Arenas(NamedTuple):
    """A directory for arenas.

    Attributes:
        path: Where it is.
        place: The machine on which it is there.
    """

    path: str
    place: str

    @classmethod
    def make(cls) -> Arenas:
        """A new directory, of this process."""
        shared = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else None
        return cls(tempfile.mkdtemp(prefix="interleave-", dir=shared), place())

    def reachable(self) -> bool:
        """Whether this process can use it."""
        return self.place == place() and os.access(self.path, os.W_OK | os.X_OK)

    def name(self) -> str:
        """A name for a new arena."""
        return uuid.uuid4().hex

    def create(self, name: str, num_bytes: int) -> int:
        """The descriptor of a new arena; the caller closes it. Raises OSError where the directory is gone or full."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(os.path.join(self.path, name), flags, 0o600)
        os.ftruncate(descriptor, num_bytes)
        return descriptor

    def take(self, name: str, num_bytes: int) -> int:
        """The same of an arena that was given back, if one is large enough: it may be larger, and holds anything."""
        path = os.path.join(self.path, name)
        for size, free in self._free():
            if size >= num_bytes:
                # Another sender may have been faster.
                with contextlib.suppress(FileNotFoundError):
                    os.rename(os.path.join(self.path, free), path)
                    return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return self.create(name, num_bytes)

    def _free(self) -> list[tuple[int, str]]:
        """The bytes and the name of every file that was given back, the smallest first. The name tells the bytes."""
        names = [name for name in os.listdir(self.path) if name.startswith(FREE)]
        return sorted((int(name.split("-")[1]), name) for name in names)

    def open(self, name: str) -> int:
        """The descriptor of an arena; the caller closes it."""
        return os.open(os.path.join(self.path, name), os.O_RDONLY | os.O_CLOEXEC)

    def remove(self, name: str) -> None:
        """Give an arena's memory back, once those who have it open are done with it."""
        os.unlink(os.path.join(self.path, name))

    def give_back(self, name: str) -> None:
        """Let another result have an arena that nobody reads any more; where enough of them are kept, remove it."""
        path = os.path.join(self.path, name)
        size = os.stat(path).st_size
        system = os.statvfs(self.path)
        bound = min(KEPT_BYTES, KEPT_PART * system.f_blocks * system.f_frsize)
        if size + sum(kept for kept, _ in self._free()) > bound:
            os.unlink(path)
        else:
            os.rename(path, os.path.join(self.path, f"{FREE}{size}-{name}"))

    def end(self) -> None:
        """Remove the directory. A second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)


__all__ = ["LARGE", "Arenas"]

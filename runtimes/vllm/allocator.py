"""What the C library does with memory that a worker frees."""

from __future__ import annotations

import ctypes

#: Freed bytes that stay with the process.
KEPT_BYTES = 256 << 20
#: From this many bytes on, an allocation is a mapping of its own; the C library takes no more.
MAPPED_BYTES = 32 << 20

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, as the allocators of servers do.

    glibc gives the end of its heap back at once, and there lie the values that blocks hold until their request ends. To
    be handed its pages anew takes the next step longer than to fill them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


__all__ = ["keep_freed_memory"]

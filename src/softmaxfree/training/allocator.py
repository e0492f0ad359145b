"""Sets the C library's allocator for a process that allocates the same memory in every step."""

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""The numbers of mallopt's parameters in glibc."""


def keep_freed_memory() -> None:
    """Keeps freed memory for the next step, instead of returning it to the system.

    Page faults take a part of the time of a training step on a CPU. Does nothing where the C
    library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_THRESHOLD, 32 * 2**20)  # the largest value that glibc accepts
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_TOP_PAD, 256 * 2**20)

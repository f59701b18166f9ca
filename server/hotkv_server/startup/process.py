"""The process: limits, malloc, signals of memory, and memory that only the start needed."""

import ctypes
import gc
import mmap
import os
import resource
import signal
import sys
from pathlib import Path

import numpy as np

from hotkv_server.memory import mapping

PRIVATE_UMASK = 0o077
"""Nothing that the server makes is open to others, unless it says so itself."""
UNUSED_LIBRARIES = ("libllvmlite", "openblas")
"""The compiler behind numba's cached kernels, and numpy's linear algebra."""
M_MMAP_THRESHOLD = -3
LARGE_BLOCK_BYTES = 1 << 20
SWITCH_INTERVAL_S = 0.0005
"""How long the event loop may hold the GIL while a copy thread that has ended its piece waits for
it."""


def hear_sigterm() -> None:
    """Has SIGTERM end the first process of a container, until the server drains by it: the kernel
    keeps from that process what it does not ask for."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def prepare() -> None:
    """First of all: private files, SIGBUS, malloc's threshold, the limit of descriptors."""
    os.umask(PRIVATE_UMASK)
    mapping.install_guard()
    return_large_blocks()
    raise_file_limit()


def settle() -> None:
    """Before ready: shorter turns of the GIL, and no garbage or pages of the start."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    trim_memory()


def raise_file_limit() -> None:
    """Raises the soft limit of descriptors, often 1024, to the hard one: sessions hold some."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def return_large_blocks() -> None:
    """Makes malloc give large blocks back when they are freed; it would keep some as large as the
    largest messages."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def trim_memory() -> None:
    """Gives back free heap, and the file pages of libraries that a running server does not use."""
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    # Not smaps: for an arena of small pages the kernel takes seconds to count them.
    for start, end in unused_library_pages(Path("/proc/self/maps").read_text()):
        if not has_own_pages(start, end):
            libc.madvise(start, end - start, mmap.MADV_DONTNEED)


def unused_library_pages(maps: str) -> list[tuple[int, int]]:
    """Address ranges of read-only mappings of UNUSED_LIBRARIES. The kernel reads them again if they
    are used again."""
    ranges = []
    for line in maps.splitlines():
        addresses, mode, *_, name = line.split(maxsplit=5)
        if mode in ("r-xp", "r--p") and any(library in name for library in UNUSED_LIBRARIES):
            start, _, end = addresses.partition("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges


def has_own_pages(start: int, end: int) -> bool:
    """True if some pages of the range are not those of its file (relocated data): no file has a
    copy of them."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        entries = np.frombuffer(
            os.pread(
                pagemap.fileno(), (end - start) // mmap.PAGESIZE * 8, start // mmap.PAGESIZE * 8
            ),
            np.uint64,
        )
    present, swapped, of_file = (entries >> np.uint64(bit) & np.uint64(1) for bit in (63, 62, 61))
    return bool(np.any(swapped | (present & ~of_file & np.uint64(1))))

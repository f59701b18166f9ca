"""Prepares the process: umask, limits, malloc, signals, and release of memory that only the
start needed."""

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
from hotkv_server.settings import Settings
from hotkv_server.startup import StartError

PRIVATE_UMASK = 0o077
"""Files are private, unless the server sets another mode."""
UNUSED_LIBRARIES = ("libllvmlite", "openblas")
"""In file names of libraries that a running server does not use: numba's compiler, and numpy's
linear algebra."""
M_MMAP_THRESHOLD = -3
LARGE_BLOCK_BYTES = 1 << 20
SWITCH_INTERVAL_S = 0.0005
"""Longest time that the event loop holds the GIL while a copy thread waits for it."""


MIN_DESCRIPTORS = 128
"""The server itself needs up to 42, an engine's session 4, and clients' memory may not use the
last quarter (`wire.descriptors`)."""
OWN_ADDRESS_BYTES = 2560 << 20
"""Besides the arena: 2 GiB were measured."""


def check_limits(settings: Settings) -> None:
    """Raises StartError."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < MIN_DESCRIPTORS:
        raise StartError(
            f"the limit of open files is {most}, too low for engines to connect: raise it to "
            f"{MIN_DESCRIPTORS} or more (LimitNOFILE, ulimit -n)"
        )
    address_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    needed_bytes = settings.arena.most_bytes + OWN_ADDRESS_BYTES
    if address_bytes != resource.RLIM_INFINITY and address_bytes < needed_bytes:
        raise StartError(
            f"the limit of address space is {address_bytes >> 20} MiB, and this arena needs "
            f"{needed_bytes >> 20} MiB: raise it (LimitAS, ulimit -v), or lower arena.bytes"
        )


def end_at_sigterm() -> None:
    """The kernel ignores SIGTERM for pid 1 of a container if it has no handler. Later the server
    installs one that drains."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def prepare() -> None:
    """Before all other steps."""
    os.umask(PRIVATE_UMASK)
    mapping.install_guard()
    return_large_blocks()
    raise_file_limit()


def settle() -> None:
    """Right before the server is ready."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    trim_memory()


def raise_file_limit() -> None:
    """The soft limit is often 1024, and sessions hold descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def return_large_blocks() -> None:
    """By default malloc would keep freed pieces as large as the largest messages."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def trim_memory() -> None:
    """Returns unused heap, and file pages of UNUSED_LIBRARIES, to the kernel."""
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    # Not smaps: the kernel counts its pages, which takes seconds if the arena has small ones.
    for start, end in unused_library_pages(Path("/proc/self/maps").read_text(errors="replace")):
        if not has_own_pages(start, end):
            libc.madvise(start, end - start, mmap.MADV_DONTNEED)


def unused_library_pages(maps: str) -> list[tuple[int, int]]:
    """Read-only mappings, which the kernel reads again at the next use."""
    ranges = []
    for line in maps.splitlines():
        addresses, mode, *_, name = line.split(maxsplit=5)
        if mode in ("r-xp", "r--p") and any(library in name for library in UNUSED_LIBRARIES):
            start, _, end = addresses.partition("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges


def has_own_pages(start: int, end: int) -> bool:
    """True if pages differ from the mapped file (relocated data), so that the kernel could not
    read them again. Also if the kernel does not say."""
    at, count = start // mmap.PAGESIZE * 8, (end - start) // mmap.PAGESIZE * 8
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            entries = np.frombuffer(os.pread(pagemap.fileno(), count, at), np.uint64)
    except OSError:
        return True
    present, swapped, of_file = (entries >> np.uint64(bit) & np.uint64(1) for bit in (63, 62, 61))
    return bool(np.any(swapped | (present & ~of_file & np.uint64(1))))

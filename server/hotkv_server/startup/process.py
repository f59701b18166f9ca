"""Prepares the process: umask, limit of descriptors, malloc, signal handlers, and release of memory
that only the start needed."""

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
"""Umask of the server. The server's files are private, unless the server sets another mode."""
UNUSED_LIBRARIES = ("libllvmlite", "openblas")
"""Parts of the file names of libraries that a running server does not use: the compiler of numba's
kernels, and numpy's linear algebra."""
M_MMAP_THRESHOLD = -3
LARGE_BLOCK_BYTES = 1 << 20
SWITCH_INTERVAL_S = 0.0005
"""Longest time for which the event loop holds the GIL while a copy thread waits for the GIL, in
seconds."""


MIN_DESCRIPTORS = 128
"""Fewest file descriptors with which engines can connect: the server itself needs up to 42, an
engine's session 4, and clients' memory may not use the last quarter (`wire.descriptors`)."""
OWN_ADDRESS_BYTES = 2560 << 20
"""Address space that the server needs besides the arena: 2 GiB were measured."""


def check_limits(settings: Settings) -> None:
    """Raises StartError if the limits of this process are too low for a server."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < MIN_DESCRIPTORS:
        raise StartError(
            f"the limit of open files is {most}, too low for engines to connect: raise it to "
            f"{MIN_DESCRIPTORS} or more (LimitNOFILE, ulimit -n)"
        )
    address_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    needed_bytes = settings.arena.bytes + OWN_ADDRESS_BYTES
    if address_bytes != resource.RLIM_INFINITY and address_bytes < needed_bytes:
        raise StartError(
            f"the limit of address space is {address_bytes >> 20} MiB, and this arena needs "
            f"{needed_bytes >> 20} MiB: raise it (LimitAS, ulimit -v), or lower arena.bytes"
        )


def hear_sigterm() -> None:
    """Installs a handler by which SIGTERM ends the process, if this is the first process of a
    container (pid 1). The reason: for such a process, the kernel ignores SIGTERM if there is no
    handler. Later the server installs another handler, which first lets running work end (drain).
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def prepare() -> None:
    """Prepares the process before all other steps: private files, handling of SIGBUS, malloc's
    threshold, the limit of descriptors."""
    os.umask(PRIVATE_UMASK)
    mapping.install_guard()
    return_large_blocks()
    raise_file_limit()


def settle() -> None:
    """Prepares the process right before it is ready: shortens the time for which a thread holds the
    GIL, and frees garbage and memory pages that only the start needed."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    trim_memory()


def raise_file_limit() -> None:
    """Raises the soft limit of descriptors, which is often 1024, to the hard limit, because
    sessions hold descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def return_large_blocks() -> None:
    """Makes malloc return large pieces of memory to the kernel when they are freed. By default
    malloc would keep freed pieces as large as the largest messages."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def trim_memory() -> None:
    """Returns unused heap memory to the kernel. Also returns the file pages of libraries that a
    running server does not use."""
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    # Read maps and not smaps: for smaps the kernel counts the pages, which takes seconds if the
    # arena has small pages.
    for start, end in unused_library_pages(Path("/proc/self/maps").read_text(errors="replace")):
        if not has_own_pages(start, end):
            libc.madvise(start, end - start, mmap.MADV_DONTNEED)


def unused_library_pages(maps: str) -> list[tuple[int, int]]:
    """Returns the address ranges of read-only mappings of UNUSED_LIBRARIES. If their pages are
    dropped, the kernel reads them again at the next use."""
    ranges = []
    for line in maps.splitlines():
        addresses, mode, *_, name = line.split(maxsplit=5)
        if mode in ("r-xp", "r--p") and any(library in name for library in UNUSED_LIBRARIES):
            start, _, end = addresses.partition("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges


def has_own_pages(start: int, end: int) -> bool:
    """Returns True if some pages of the range differ from the mapped file (relocated data). Such
    pages must not be dropped, because the kernel could not read them again from the file. Also
    returns True if the kernel does not say."""
    at, count = start // mmap.PAGESIZE * 8, (end - start) // mmap.PAGESIZE * 8
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            entries = np.frombuffer(os.pread(pagemap.fileno(), count, at), np.uint64)
    except OSError:
        return True
    present, swapped, of_file = (entries >> np.uint64(bit) & np.uint64(1) for bit in (63, 62, 61))
    return bool(np.any(swapped | (present & ~of_file & np.uint64(1))))

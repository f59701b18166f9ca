"""Opens the arena and the block table, and warns if the machine lacks memory or other resources."""

import contextlib
import errno
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import hotkv_proto
from hotkv_proto import limits
from hotkv_server import systemd
from hotkv_server.memory import left_behind, numa
from hotkv_server.memory.arena import ARENA_FILE, BusyError, NodeMemory, clear
from hotkv_server.memory.left_behind import write_owner
from hotkv_server.settings import Settings
from hotkv_server.settings.storage import entries_for
from hotkv_server.startup import StartError

log = logging.getLogger(__name__)

NVIDIA_DRIVER = Path("/proc/driver/nvidia")
"""There in containers too."""
ARENA_MODE = 0o600
"""Clients receive descriptors instead."""


def open_memory(settings: Settings, *, reset: bool) -> NodeMemory:
    """Raises StartError if another server uses the arena, or its files can't be opened.

    reset: drops the blocks that an earlier server left.
    """
    arena = settings.arena
    _tell_of_locked_memory(arena.bytes)
    warn_of_others(settings)
    try:
        if reset:
            clear(settings.arena_dir)
        with systemd.patience(
            "bringing the arena in", lambda: limits.allocated_bytes(settings.arena_dir / ARENA_FILE)
        ):
            memory = NodeMemory.open(
                settings.arena_dir,
                arena.bytes,
                arena.slab_size,
                arena.capacity,
                secrets.randbits(62) | 1,
                ARENA_MODE,
                most_bytes=arena.most_bytes,
                entries_for=entries_for,
                gives_back=not may_be_registered(),
                prefault=arena.prefault,
                place=placer(arena.numa, arena.bytes, arena.slab_size),
            )
        with contextlib.ExitStack() as undo:
            undo.callback(memory.discard if memory.leftover is None else memory.release)
            runtime_dir = settings.runtime_dir.absolute()
            write_owner(settings.arena_dir, runtime_dir, hotkv_proto.__version__)
            undo.pop_all()
    except BusyError as error:
        raise StartError(f"arena.dir: {error}") from error
    except OSError as error:
        full = (
            "; not enough memory is free: lower arena.bytes"
            if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFAULT)
            else ""
        )
        raise StartError(f"arena: {error}{full}") from error
    if memory.num_bytes < arena.bytes // memory.slab_bytes * memory.slab_bytes:
        log.warning(
            "arena stays bytes=%d wanted_bytes=%d: engines of the earlier server may still read "
            "residencies in it; drain the server before the restart that makes it larger",
            memory.num_bytes,
            arena.bytes,
        )
    if arena.prefault and memory.leftover is None and not memory.arena.huge_bytes:
        log.warning("no huge pages, so copies are slower: %s", limits.why_no_huge_pages())
    return memory


def may_be_registered() -> bool:
    """Engines may have registered the arena with CUDA: they would go on reading pages that were
    given back."""
    return NVIDIA_DRIVER.exists()


def _tell_of_locked_memory(arena_bytes: int) -> None:
    if limits.memlock_bytes() < arena_bytes:
        log.info(
            "locked memory is limited to %d bytes: enough for engines on CPU, too little to pin "
            "the arena",
            limits.memlock_bytes(),
        )


def warn_of_others(settings: Settings) -> None:
    """Warns if other servers' arenas leave too little memory, and names those whose server has
    ended."""
    directory = settings.arena_dir.absolute()
    folder = (
        left_behind.SHARED_MEMORY
        if directory.is_relative_to(left_behind.SHARED_MEMORY)
        else directory.parent
    )
    others = [other for other in left_behind.find(folder) if other.path != directory]
    gone_bytes = sum(other.num_bytes for other in others if other.is_stale)
    try:
        space = os.statvfs(folder)
    except OSError:
        return
    free_bytes = min(space.f_bavail * space.f_frsize, limits.available_bytes())
    missing_bytes = (
        settings.arena.bytes - limits.allocated_bytes(settings.arena_dir / ARENA_FILE) - free_bytes
    )
    if missing_bytes > 0 and any(other.num_bytes for other in others):
        log.warning(
            "%d MiB are missing for the arena, and other arenas in %s hold %d MiB, those whose "
            "server is gone %d MiB of it: `hotkv-server arenas --folder %s` lists them, and with "
            "--remove NAME gives an arena's memory back",
            missing_bytes >> 20,
            folder,
            sum(other.num_bytes for other in others) >> 20,
            gone_bytes >> 20,
            folder,
        )


def placer(wanted: str, arena_bytes: int, slab_bytes: int) -> Callable[[int, int], None] | None:
    """Places memory, by address and number of bytes, on the nodes of `arena.numa`; None if it
    chooses none. Raises StartError if a chosen node has no memory."""
    try:
        nodes = numa.choose(wanted)
        parts = numa.parts(wanted, arena_bytes, slab_bytes)
    except ValueError as error:
        raise StartError(f"arena.numa {error}") from error
    if not nodes:
        return None
    named = ",".join(map(str, nodes))

    def place(address: int, num_bytes: int) -> None:
        ranges: list[tuple[int, int, tuple[int, ...]]] = [
            (start, size, (node,)) for start, size, node in parts.ranges(num_bytes)
        ]
        why_not = [
            refusal
            for start, size, chosen in ranges or [(0, num_bytes, nodes)]
            if (refusal := numa.place(address + start, size, chosen))
        ]
        if why_not:
            log.warning("arena not placed on NUMA nodes=%s: %s", named, why_not[0])
        else:
            log.info("arena placed on NUMA nodes=%s parts=%d", named, len(parts.starts))

    return place

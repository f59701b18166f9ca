"""Opens the tiers below host memory during the start of a server, and restores the blocks that an
earlier server left on the disk."""

import logging
import os
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hotkv_proto.errors import HotKVError
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.restore import BelowSpace, restore_below
from hotkv_server.cache.room.policies import POLICIES
from hotkv_server.cache.room.space import Space
from hotkv_server.dataplane.plan import Region
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.memory.clerk import Clerk
from hotkv_server.memory.state import StateError
from hotkv_server.node.persistence import state_of
from hotkv_server.security.path_checks import UnsafeError, check_files, check_own_dir
from hotkv_server.settings import Settings
from hotkv_server.startup import StartError
from hotkv_server.tiers.book.books import TierBooks, books_of
from hotkv_server.tiers.book.place_sizes import EncodedBytes
from hotkv_server.tiers.compression.form import room_bytes
from hotkv_server.tiers.drive.below import TierBelow
from hotkv_server.tiers.drive.flushes import FlushDriver, GenerationRelay
from hotkv_server.tiers.drive.generation_notes import GENERATIONS_FILE, GenerationNotes, NotesFolder
from hotkv_server.tiers.drive.records import LowerMemory, records_file_bytes
from hotkv_server.tiers.drive.shared import TierShared
from hotkv_server.tiers.drive.tiers import Tiers, moving_bytes
from hotkv_server.tiers.kinds import TIERS, TierResources, shared_tiers
from hotkv_server.tiers.protocol import SharedTier
from hotkv_server.tiers.remote.client import MissingError

if TYPE_CHECKING:
    from hotkv_server.tiers.disk.tier import DiskTier

log = logging.getLogger(__name__)

T = TypeVar("T")
ANSWER_S = 60.0
"""Longest wait for the disk at the start. The time to allocate disk space does not count."""
SLOWEST_BYTES_PER_S = 50 << 20
"""Slowest speed at which a disk is expected to allocate space. When the disk tier is opened, the
start waits, in addition to ANSWER_S, as long as the whole tier takes at this speed."""


@dataclass(frozen=True, slots=True)
class LowerPart:
    """The opened disk tier.

    `memory`: the records of the tier's blocks, and the lock on the tier's folder. Close `tier`
        before `memory`, because closing `memory` unlocks the folder for another server.
    `space`: the places in the slab file (the file with the disk's blocks). The core assigns these
        places to blocks.
    `tier`: copies blocks to and from the slab file.
    """

    memory: LowerMemory
    space: Space
    tier: "DiskTier"


def check_tiers(settings: Settings) -> None:
    """Raises StartError if a server with these settings can't start its tiers.

    The possible reasons: the folder of the disk tier is unusable or has no room; the modules of a
    tier are not installed; the file that records flushes (`GENERATIONS_FILE`) belongs to another
    user. Does not connect to stores, because a server also starts while a store is down.
    """
    try:
        check_files([settings.arena_dir / GENERATIONS_FILE])
    except (UnsafeError, OSError) as error:
        raise StartError(f"arena.dir: {error}") from error
    disk = settings.tiers.disk
    if disk.path is not None:
        path = disk.path
        # The disk also has a table that records its blocks. Require room for two such tables,
        # because a later start briefly has an old and a new table.
        records_bytes = 2 * records_file_bytes(settings.tiers.capacity, disk.bytes)
        is_private = bool(settings.security.tenants)
        _answered(path, ANSWER_S, lambda: _check_disk(path, disk.bytes, records_bytes, is_private))
    try:
        for name, _ in shared_tiers(settings):
            TIERS[name]()
    except MissingError as error:
        raise StartError(f"tiers: {error}") from error
    except ImportError as missing:
        raise StartError(f"tiers: {missing.name} is not installed") from missing


def _answered(path: Path, wait_s: float, call: Callable[[], T]) -> T:
    """Runs `call` on a thread and returns its result. Raises StartError if `call` takes longer than
    `wait_s`. Also raises any error that `call` raises.

    `path`: the folder of the disk tier, which `call` uses. A server refuses to start if its disk
        hangs, because it could not record flushes (deletions of all blocks of a key space) there
        for the next server.
    """
    try:
        return Clerk("disk-start").do(call).result(wait_s)
    except futures.TimeoutError:
        raise StartError(
            f"tiers.disk.path: the disk of {path} has not answered for {wait_s:.0f} s: mend it, or "
            "choose another folder"
        ) from None


def _check_own(path: Path, *, is_private: bool) -> None:
    try:
        check_own_dir(path, is_private=is_private)
    except (UnsafeError, OSError) as error:
        raise StartError(f"tiers.disk.path: {error}") from error


def _check_disk(path: Path, num_bytes: int, records_bytes: int, is_private: bool) -> None:
    """Raises StartError if the disk tier's folder `path` can't be written, if other users could
    have changed what it has, or if it has no room for the slab file, which holds the blocks.

    `num_bytes`: size of the slab file. Files that the folder already has count as part of it.
    `records_bytes`: size of the file that records which blocks the disk has. If the slab file is
        not completely allocated yet, there must be room for this file too, because without it no
        block would be written.
    """
    folder = next(filter(os.path.exists, (path.absolute(), *path.absolute().parents)))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise StartError(f"tiers.disk.path: {folder} is no folder that this user may write")
    if os.path.lexists(path):
        _check_own(path, is_private=is_private)
    space = os.statvfs(folder)
    held = sum(one.stat().st_blocks * 512 for one in path.glob("*") if one.is_file())
    needed = num_bytes + (records_bytes if held < num_bytes else 0)
    if (free := space.f_bavail * space.f_frsize) + held < needed:
        raise StartError(
            f"tiers.disk: {folder} has {free >> 20} MiB free, tiers.disk.bytes asks for "
            f"{-(-(needed - held) >> 20)} MiB more: lower it, or choose another folder"
        )


def open_lower(settings: Settings, arena: Region, *, reset: bool) -> LowerPart | None:
    """Opens the disk tier, and allocates its disk space. Returns None if the settings have no disk.
    Blocks the calling thread. Raises StartError.

    `arena`: host memory with the slots of blocks.
    `reset`: True drops the blocks that an earlier server left on the disk.
    """
    tiers, disk = settings.tiers, settings.tiers.disk
    if disk.path is None:
        return None
    # Import these here, because servers without a disk tier need neither its compiled code nor
    # xxhash.
    from hotkv_server.tiers.disk.slab_file import SlabFile
    from hotkv_server.tiers.disk.tier import DiskTier

    path = disk.path

    def open_files() -> tuple[LowerMemory, SlabFile]:
        _check_own(path, is_private=bool(settings.security.tenants))
        try:
            memory = LowerMemory.open(
                path, disk.bytes, tiers.slab_bytes, tiers.capacity, reset=reset
            )
        except OSError as error:
            raise StartError(f"tiers.disk.path: {error}") from error
        try:
            return memory, SlabFile.open(path, memory.num_bytes)
        except OSError as error:
            memory.close()
            raise StartError(f"tiers.disk: {error}") from error

    memory, file = _answered(path, ANSWER_S + disk.bytes / SLOWEST_BYTES_PER_S, open_files)
    tier = DiskTier(arena, file, num_threads=disk.threads)
    policy = POLICIES[settings.policy](tiers.capacity)
    space = Space(memory.table, memory.num_bytes, memory.slab_bytes, policy)
    return LowerPart(memory, space, tier)


class OpenedTiers:
    """Sets up the tiers during the start of a server. The server calls `add_books`, `take_over` and
    `drive`, in this order.

    `lower`: the opened disk tier; None without a disk.
    """

    def __init__(self, settings: Settings, arena: Region, lower: LowerPart | None) -> None:
        self._settings = settings
        self._arena = arena
        self._lower = lower
        self._generations: FlushDriver | None = None
        encodes = settings.tiers.disk.compress == "auto"
        self._encoded_bytes: EncodedBytes | None = room_bytes if encodes else None

    def __repr__(self) -> str:
        return f"OpenedTiers({self._lower!r})"

    def add_books(self, core: CacheCore) -> None:
        """Makes the `TierBooks`, which records which blocks are on the disk, and which blocks move
        between tiers at present. Its constructor registers it in the core."""
        space = None if self._lower is None else self._lower.space
        TierBooks(core, space, self._settings.tiers.write_bytes_per_day, self._encoded_bytes)

    def take_over(self, core: CacheCore) -> bool:
        """Restores the blocks that an earlier server left on the disk, then starts the thread that
        writes the disk's records. Returns True if there is a disk; its blocks may have added key
        spaces to the core. Blocks the calling thread. Raises StartError."""
        if self._lower is None:
            return False
        memory, began_s = self._lower.memory, time.monotonic()
        _recall_budget(books_of(core), memory, began_s)
        if memory.why_empty:
            log.warning("disk tier starts empty reason=%r", memory.why_empty)
        num_encoded = _restore(core, self._lower, began_s)
        try:
            if num_encoded or self._encoded_bytes is not None:
                self._lower.tier.prepare_encoding()
        except OSError as error:
            raise StartError(f"tiers.disk.compress: no memory: {error}") from error
        memory.start(core.catalog.revision, state_of(core, memory.slab_bytes))
        return True

    def drive(self, core: CacheCore, verifier: Verifier, memory: NodeMemory) -> Tiers:
        """Opens the shared tiers. Returns the object that makes the calls to all tiers (lookups,
        reads, writes, flushes). The core must already have restored the blocks in the arena. Does
        not wait for stores, so a store may be down. Raises StartError."""
        shared: list[tuple[SharedTier, GenerationRelay]] = []
        for name, open_at in shared_tiers(self._settings):
            relay = GenerationRelay()
            try:
                tier = open_at(TierResources(self._arena, memory.arena.fd, relay))
            except (OSError, MissingError) as error:
                raise StartError(f"tiers.{name}: {error}") from error
            shared.append((tier, relay))
        self._generations = generations = FlushDriver(core, shared, self._open_notes(core, memory))
        most_bytes = moving_bytes(core)
        driven = [TierShared(core, tier, verifier, generations, most_bytes) for tier, _ in shared]
        below = None
        if (lower := self._lower) is not None:
            below = TierBelow(core, lower.tier, verifier, generations, most_bytes, lower.memory)
        wait_s = self._settings.tiers.lookup_wait_ms / 1000
        return Tiers(core, self._arena, wait_s, generations, below, driven)

    def _open_notes(self, core: CacheCore, memory: NodeMemory) -> GenerationNotes:
        """Returns the `GenerationNotes`, the record of flushes (deletions of all blocks of a key
        space). Its file has a copy in the arena's folder and, if there is a disk, another copy in
        the disk's folder. The core must already have restored the blocks in both folders."""
        folders = [NotesFolder(memory.directory, bool(core.space.used_bytes()))]
        if (lower := self._lower) is not None:
            folders.append(NotesFolder(lower.memory.folder, bool(lower.space.used_bytes())))
        return GenerationNotes(folders)

    def close(self) -> None:
        """Closes the records of the disk tier, and unlocks the disk's folder for another server.
        Called after the tiers have closed."""
        if self._lower is not None:
            self._lower.memory.close()

    def discard(self) -> None:
        """Removes the files with the record of flushes (`GenerationNotes`), unless they are still
        needed. They are needed if there is a disk, because its blocks outlive the server. They are
        also needed if a flush is not complete: the next server must then still raise the generation
        (a number that each flush raises) of the key space in a store. Called at the end of a server
        that leaves no blocks in the arena to the next server. Blocks the calling thread."""
        if self._lower is None and self._generations is not None:
            self._generations.discard()


def open_tiers(settings: Settings, arena: Region, *, reset: bool) -> OpenedTiers | None:
    """Opens the disk tier if the settings have a disk. Returns an object whose `drive` later opens
    the shared tiers; returns None if the settings have no tier. But if an earlier server had tiers,
    returns an object also without tiers: it records flushes (deletions of all blocks of a key
    space) for these tiers, because a later server may have them again. Blocks while disk space is
    allocated. Raises StartError.

    `arena`: host memory with the slots of blocks.
    `reset`: True drops the blocks that an earlier server left on the disk.
    """
    lower = open_lower(settings, arena, reset=reset)
    had_tiers = (settings.arena_dir / GENERATIONS_FILE).exists()
    if lower is None and not any(shared_tiers(settings)) and not had_tiers:
        return None
    return OpenedTiers(settings, arena, lower)


def _recall_budget(books: TierBooks, memory: LowerMemory, now_s: float) -> None:
    """Counts the disk writes of an earlier server in this server's daily budget of disk writes.
    Reads the sizes and times of these writes from a file. If the file is unusable, logs the reason
    and begins with the full budget."""
    assert books.lower is not None, "a tier without places"
    try:
        wall_s, written = time.time(), memory.read_written()
        books.lower.down.gate.recall([(wall_s - at_s, size) for at_s, size in written], now_s)
    except (StateError, OSError) as error:
        log.warning("the disk's write budget begins anew reason=%r", str(error))


def _restore(core: CacheCore, part: LowerPart, began_s: float) -> int:
    """Restores the blocks on the disk from the records that an earlier server left. Returns the
    number of restored blocks that are encoded (compressed). `began_s`: when the restoring began, a
    time of time.monotonic."""
    memory = part.memory
    if memory.old is None or memory.state is None:
        return 0
    numbers: dict[int, int] = {}
    for known in memory.state.key_spaces:
        try:
            numbers[known.number], _ = core.catalog.register(known.key_space, (), began_s)
        except HotKVError as error:
            log.warning("key space of the disk tier dropped reason=%r", error.message)
    below = BelowSpace(part.space, core.catalog, room_bytes)
    restored = restore_below(below, memory.old.records, numbers, began_s)
    log.info(
        "disk tier restored blocks=%d encoded=%d dropped=%s took_s=%.2f",
        restored.blocks,
        restored.encoded,
        ",".join(f"{why}:{count}" for why, count in restored.dropped.items()) or "0",
        time.monotonic() - began_s,
    )
    return restored.encoded

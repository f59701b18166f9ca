"""Opens the tiers at a server's start, and restores the disk's blocks."""

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
from hotkv_server.cache.room.policies.hotness import Hotness
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
"""Longest wait for the disk at the start, apart from allocation."""
SLOWEST_BYTES_PER_S = 50 << 20
"""Slowest speed of allocation. The start waits as long as the whole disk tier takes, plus
ANSWER_S."""


@dataclass(frozen=True, slots=True)
class LowerPart:
    """The opened disk tier. Close `tier` before `memory`, which unlocks the folder for another
    server."""

    memory: LowerMemory
    space: Space
    tier: "DiskTier"


def check_tiers(settings: Settings) -> None:
    """Raises StartError if the tiers can't start: an unusable disk folder or no room, missing
    modules, or another user's GENERATIONS_FILE. Does not connect to stores, which may be down at
    the start."""
    try:
        check_files([settings.arena_dir / GENERATIONS_FILE])
    except (UnsafeError, OSError) as error:
        raise StartError(f"arena.dir: {error}") from error
    disk = settings.tiers.disk
    if disk.path is not None:
        path = disk.path
        # A later start briefly has an old and a new table.
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
    """Runs `call` on a thread, and returns its result or raises its error. StartError after
    `wait_s`: on a hung disk flushes could not be recorded.
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
    """Raises StartError if the folder can't be written, could have been changed by other users, or
    has no room.

    `num_bytes`: of the slab file; what the folder has counts.
    `records_bytes`: also needed until the slab file is allocated, as without records no block is
        written.
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
    """Opens the disk tier and allocates its space; None without a disk. Blocking. Raises
    StartError.

    `reset`: drops an earlier server's blocks.
    """
    tiers, disk = settings.tiers, settings.tiers.disk
    if disk.path is None:
        return None
    # Servers without a disk need neither compiled code nor xxhash.
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
    policy = Hotness(tiers.capacity)
    space = Space(memory.table, memory.num_bytes, memory.slab_bytes, policy)
    return LowerPart(memory, space, tier)


class OpenedTiers:
    """Sets up the tiers at the start: `add_books`, `take_over`, `drive`, in this order. `lower`:
    None without a disk."""

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
        """The books register themselves in the core."""
        space = None if self._lower is None else self._lower.space
        TierBooks(core, space, self._settings.tiers.write_bytes_per_day, self._encoded_bytes)

    def take_over(self, core: CacheCore) -> bool:
        """Restores the disk's blocks and starts the thread of its records. True if there is a
        disk, whose blocks may have added key spaces. Blocking. Raises StartError."""
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
        memory.start(core.catalog.revision, state_of(core.catalog, memory.slab_bytes))
        return True

    def drive(self, core: CacheCore, verifier: Verifier, memory: NodeMemory) -> Tiers:
        """Opens the shared tiers, without waiting for stores. The arena's blocks must be
        restored. Raises StartError."""
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
        """Copies for the arena and the disk, whose blocks must be restored."""
        folders = [NotesFolder(memory.directory, bool(core.space.used_bytes()))]
        if (lower := self._lower) is not None:
            folders.append(NotesFolder(lower.memory.folder, bool(lower.space.used_bytes())))
        return GenerationNotes(folders)

    def close(self) -> None:
        """After the tiers: closes the disk's records and unlocks its folder."""
        if self._lower is not None:
            self._lower.memory.close()

    def discard(self) -> None:
        """Removes the book of flushes, unless a disk's blocks outlive the server, or a store
        must still raise a generation. Blocking. Called at the end of a server that leaves no
        blocks in the arena."""
        if self._lower is None and self._generations is not None:
            self._generations.discard()


def open_tiers(settings: Settings, arena: Region, *, reset: bool) -> OpenedTiers | None:
    """None without tiers now and before: an earlier server's tiers need their flushes recorded, as
    a later server may have them again. Blocking while space is allocated. Raises StartError.

    `reset`: drops an earlier server's blocks on the disk.
    """
    lower = open_lower(settings, arena, reset=reset)
    had_tiers = (settings.arena_dir / GENERATIONS_FILE).exists()
    if lower is None and not any(shared_tiers(settings)) and not had_tiers:
        return None
    return OpenedTiers(settings, arena, lower)


def _recall_budget(books: TierBooks, memory: LowerMemory, now_s: float) -> None:
    """Counts an earlier server's writes in the budget, or logs why it begins full."""
    assert books.lower is not None, "a tier without places"
    try:
        wall_s, written = time.time(), memory.read_written()
        books.lower.down.gate.recall([(wall_s - at_s, size) for at_s, size in written], now_s)
    except (StateError, OSError) as error:
        log.warning("the disk's write budget begins anew reason=%r", str(error))


def _restore(core: CacheCore, part: LowerPart, began_s: float) -> int:
    """Restores the disk's blocks from their records; returns the number of encoded ones."""
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

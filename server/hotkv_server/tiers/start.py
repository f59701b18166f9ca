"""Opens the tiers besides host memory, and takes over what an earlier server has left in that below
it."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from hotkv_proto.errors import HotKVError
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.restore.restore import Below, restore_below
from hotkv_server.cache.room.policies import POLICIES
from hotkv_server.cache.room.space import Space
from hotkv_server.dataplane.plan import Region
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.memory.clerk import Clerk
from hotkv_server.memory.state import StateError
from hotkv_server.node.persistence import state_of
from hotkv_server.settings import Settings
from hotkv_server.settings.tiers import STAGING_BYTES
from hotkv_server.startup import StartError
from hotkv_server.tiers.book.books import TierBooks, books_of
from hotkv_server.tiers.book.place_sizes import EncodedBytes
from hotkv_server.tiers.compression.form import room_bytes
from hotkv_server.tiers.drive.below import TierBelow
from hotkv_server.tiers.drive.epoch_notes import EpochNotes, NotesFolder
from hotkv_server.tiers.drive.epochs import EpochRelay, Epochs
from hotkv_server.tiers.drive.records import LowerMemory
from hotkv_server.tiers.drive.shared import TierShared
from hotkv_server.tiers.drive.tiers import Tiers, moving_bytes
from hotkv_server.tiers.protocol import SharedTier
from hotkv_server.tiers.remote.errors import MissingError

if TYPE_CHECKING:
    from hotkv_server.tiers.disk.tier import DiskTier

log = logging.getLogger(__name__)

T = TypeVar("T")
ANSWER_S = 60.0
"""Longest wait for the disk at the start, and as much longer as allocating its bytes may take."""
SLOWEST_BYTES_PER_S = 50 << 20


@dataclass(frozen=True, slots=True)
class LowerPart:
    """The disk tier of a server: its records, the space that the core fills, and its bytes.
    Closing `memory`, after the tier, lets another server have the folder."""

    memory: LowerMemory
    space: Space
    tier: "DiskTier"


def check_tiers(settings: Settings) -> None:
    """Raises StartError if the disk tier's folder can't be used or has no room, or a tier's modules
    are not installed. Asks no store: one that is away comes back by itself."""
    disk = settings.tiers.disk
    if disk.path is not None:
        path = disk.path
        _answered(path, ANSWER_S, lambda: _check_disk(path, disk.bytes))
    try:
        shared_tiers(settings)
        if settings.tiers.s3 is not None:
            from hotkv_server.tiers.s3 import bucket

            bucket.check_installed()
    except MissingError as error:
        raise StartError(f"tiers: {error}") from error
    except ImportError as missing:
        raise StartError(f"tiers: {missing.name} is not installed") from missing


def _answered(path: Path, wait_s: float, call: Callable[[], T]) -> T:
    """What the call gives, which touches the disk's folder. Raises what it raises, and StartError
    if the disk has not answered by then: a server without it could not tell it of flushes."""
    try:
        return Clerk("disk-start").do(call).result(wait_s)
    except TimeoutError:
        raise StartError(
            f"tiers.disk.path: the disk of {path} has not answered for {wait_s:.0f} s: mend it, or "
            "choose another folder"
        ) from None


def _check_disk(path: Path, num_bytes: int) -> None:
    folder = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise StartError(f"tiers.disk.path: {folder} is no folder that this user may write")
    space = os.statvfs(folder)
    held = sum(one.stat().st_blocks * 512 for one in path.glob("*") if one.is_file())
    if (free := space.f_bavail * space.f_frsize) + held < num_bytes:
        raise StartError(
            f"tiers.disk: {folder} has {free >> 20} MiB free, tiers.disk.bytes asks for "
            f"{(num_bytes - held) >> 20} MiB more: lower it, or choose another folder"
        )


def open_lower(settings: Settings, arena: Region, *, reset: bool) -> LowerPart | None:
    """Opens the disk tier; None if there is none. `reset`: drops what an earlier server has left in
    it. Blocks while its space is allocated. Raises StartError."""
    tiers, disk = settings.tiers, settings.tiers.disk
    if disk.path is None:
        return None
    # Servers without a tier need neither its kernels nor xxhash.
    from hotkv_server.tiers.disk.slab_file import SlabFile
    from hotkv_server.tiers.disk.tier import DiskTier

    path = disk.path

    def open_files() -> tuple[LowerMemory, SlabFile]:
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


def encoded_bytes(settings: Settings) -> EncodedBytes | None:
    """The sizes of places for blocks that the disk tier is to encode; None if it encodes none."""
    return room_bytes if settings.tiers.disk.compress == "auto" else None


def open_books(settings: Settings, core: CacheCore, lower: LowerPart | None) -> None:
    """Gives the core the books of the tiers of the settings, if there are any."""
    if lower is not None or shared_tiers(settings):
        space = None if lower is None else lower.space
        TierBooks(core, space, settings.tiers.write_bytes_per_day, encoded_bytes(settings))


def take_over_lower(settings: Settings, core: CacheCore, part: LowerPart) -> None:
    """Fills the space of the tier with what its records say, whether this server encodes or not.
    Blocks. Raises StartError."""
    memory, began_s = part.memory, time.monotonic()
    num_encoded = 0
    books = books_of(core)
    assert books.lower is not None, "a tier without places"
    try:
        wall_s, written = time.time(), memory.read_written()
        books.lower.down.gate.recall([(wall_s - at_s, size) for at_s, size in written], began_s)
    except (StateError, OSError) as error:
        log.warning("the disk's write budget begins anew reason=%r", str(error))
    if memory.why_empty:
        log.warning("disk tier starts empty reason=%r", memory.why_empty)
    if memory.old is not None and memory.state is not None:
        numbers: dict[int, int] = {}
        for known in memory.state.key_spaces:
            try:
                numbers[known.number], _ = core.catalog.register(known.key_space, (), began_s)
            except HotKVError as error:
                log.warning("key space of the disk tier dropped reason=%r", error.message)
        below = Below(part.space, core.catalog, room_bytes)
        restored = restore_below(below, memory.old.records, numbers, began_s)
        num_encoded = restored.encoded
        log.info(
            "disk tier restored blocks=%d encoded=%d dropped=%s took_s=%.2f",
            restored.blocks,
            num_encoded,
            ",".join(f"{why}:{count}" for why, count in restored.dropped.items()) or "0",
            time.monotonic() - began_s,
        )
    try:
        if num_encoded or encoded_bytes(settings) is not None:
            part.tier.prepare_encoding()
    except OSError as error:
        raise StartError(f"tiers.disk.compress: no memory: {error}") from error
    memory.start(core.catalog.revision, state_of(core, memory.slab_bytes))


def open_notes(core: CacheCore, memory: NodeMemory, lower: LowerPart | None) -> EpochNotes:
    """Where an earlier server has noted what it knew of flushes, beside its blocks, which the core
    has already."""
    folders = [NotesFolder(memory.directory, bool(core.space.used_bytes()))]
    if lower is not None:
        folders.append(NotesFolder(lower.memory.folder, bool(lower.space.used_bytes())))
    return EpochNotes(folders)


def make_tiers(
    settings: Settings,
    core: CacheCore,
    verifier: Verifier,
    memory: NodeMemory,
    lower: LowerPart | None,
) -> Tiers | None:
    """All tiers of the settings as the runtime drives them, over a core that has what an earlier
    server has left; None if there are none. Connects to nothing yet: a store that is away comes
    back by itself. Raises StartError."""
    arena = Region(memory.arena.address, memory.arena.num_bytes, "the arena")
    opened_tiers: list[tuple[SharedTier, EpochRelay]] = []
    for name, compress, make in shared_tiers(settings):
        relay = EpochRelay()
        try:
            tier = opened(make, compress, arena, memory.arena.fd, relay)
        except (OSError, MissingError) as error:
            raise StartError(f"tiers.{name}: {error}") from error
        opened_tiers.append((tier, relay))
    if lower is None and not opened_tiers:
        return None
    epochs = Epochs(core, opened_tiers, open_notes(core, memory, lower))
    most_bytes = moving_bytes(core)
    shared = [TierShared(core, tier, verifier, epochs, most_bytes) for tier, _ in opened_tiers]
    below = None
    if lower is not None:
        below = TierBelow(core, lower.tier, verifier, epochs, most_bytes, lower.memory)
    return Tiers(core, arena, settings.tiers.lookup_wait_ms / 1000, epochs, below, shared)


MakeShared: TypeAlias = Callable[[Region, int, EpochRelay], SharedTier]
"""Makes a tier over memory, given the file that it is a mapping of."""


def shared_tiers(settings: Settings) -> list[tuple[str, str, MakeShared]]:
    """Name, `compress` and maker of each shared tier of the settings, in the order in which they
    are asked. Servers without one don't need its modules."""
    makers: list[tuple[str, str, MakeShared]] = []
    if (mooncake := settings.tiers.mooncake) is not None:
        from hotkv_server.tiers.mooncake.tier import mooncake_tier

        def make_mooncake(memory: Region, fd: int, relay: EpochRelay) -> SharedTier:
            return mooncake_tier(memory, fd, mooncake, on_epoch=relay)

        makers.append(("mooncake", mooncake.compress, make_mooncake))
    if (valkey := settings.tiers.valkey) is not None:
        from hotkv_server.tiers.valkey.tier import ValkeyTier

        def make_valkey(memory: Region, fd: int, relay: EpochRelay) -> SharedTier:
            return ValkeyTier(memory, valkey, on_epoch=relay)

        makers.append(("valkey", valkey.compress, make_valkey))
    if (s3 := settings.tiers.s3) is not None:
        from hotkv_server.tiers.s3.tier import S3Tier

        def make_s3(memory: Region, fd: int, relay: EpochRelay) -> SharedTier:
            return S3Tier(memory, s3, on_epoch=relay)

        makers.append(("s3", s3.compress, make_s3))
    return makers


def opened(
    make: MakeShared, compress: str, arena: Region, fd: int, relay: EpochRelay
) -> SharedTier:
    """A tier over the arena, or over staging memory if it compresses. Raises OSError, or
    MissingError without the tier's library."""
    if compress == "off":
        return make(arena, fd, relay)
    from hotkv_server.tiers.compressed import CompressedTier

    return CompressedTier(lambda staging, fd: make(staging, fd, relay), arena, STAGING_BYTES)

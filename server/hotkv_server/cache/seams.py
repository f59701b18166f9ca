"""Interfaces through which `CacheCore` (which decides which blocks are cached) calls optional parts
of the server (capabilities). A `Pinner` pins entries: blocks, or sketches (compact summaries
of a block's attention keys, for sparse attention). A `Below` stores blocks in the tiers below host
memory.

The core calls each registered object in turn and depends only on these interfaces.
"""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from hotkv_server.cache.values import (
    BoolMask,
    Entries,
    HashList,
    Int64s,
    KeySpaceRecord,
    SessionRecord,
)

if TYPE_CHECKING:
    from hotkv_server.cache.room.space import Space


# Pinners: objects that pin entries in the arena. Leases, retentions and moves between tiers pin
# entries too, but without a `Pinner`.
#
# Always true: a pinned entry keeps its slot and is not evicted until its last pin is released. A
# pinner reports its pins in `pins`, so that the core can verify the sum of all pins.


class StorePins(Protocol):
    """Pins the blocks of one store for the `Pinner` that made this object. The core first passes
    the blocks that are ready when the store begins, and later the blocks that the store makes
    ready. The object itself skips blocks that the `Pinner` need not pin. The positions in a call
    are in rising order."""

    def left_bytes(self) -> int:
        """Returns how many bytes of the arena may still be pinned through this object."""

    def pin(self, group_index: int, positions: Int64s, entries: Entries) -> None:
        """Pins blocks that are ready and verified. `positions`: the number of blocks before each
        block in its chain (prompt)."""

    def pin_linked(self, group_index: int, positions: Int64s) -> None:
        """Pins the sketches (compact summaries of attention keys) of the blocks at
        `positions` in the group `group_index`. Skips a block without a sketch. `positions`:
        the number of blocks before each block in its chain (prompt)."""


class Pinner(Protocol):
    """Pins entries (blocks or their sketches) in the arena, for example for residencies
    (requests whose KV stays in host memory)."""

    def of_store(self, session: SessionRecord, residency_id: str) -> StorePins | None:
        """Returns the object that pins the blocks of one store of this session for a residency (a
        request whose KV stays in host memory). Returns None if this pinner has no residency
        `residency_id` in the session's key space."""

    def end(self, session: SessionRecord) -> Iterator[None]:
        """Releases all pins of a session (connection of an engine), which is about to be closed and
        starts no new work. Yields after each part of the work."""

    def condemned(self, entries: Entries) -> None:
        """Called when the bytes of these blocks do not match their checksums, before
        the cache core drops the blocks, so that this object can react to the loss."""

    def is_read(self, entries: Entries) -> BoolMask:
        """Returns a mask of the entries (blocks or their sketches) that a client may read
        directly in the arena because this pinner pins them. Such an entry stays marked
        (`ReaderMemory.marks`), so that the next server retains it."""

    def pins(self) -> Int64s:
        """Returns for each entry number (index of a record in the block table) how many times this
        object pins that block or sketch (compact form of keys). Takes time linear in the
        capacity of the block table."""

    def check_invariants(self, live_sessions: Collection[int]) -> None:
        """Raises AssertionError if the state of this object is inconsistent. Takes time linear in
        the capacity."""


# Tiers below host memory: the disk and the shared stores.
#
# Always true: after a flush (deletion of all blocks of a key space) its blocks can't be found, even
# if they lie in a tier below or are being moved.


class Below(Protocol):
    """Stores blocks in tiers below host memory. `space`: the entries (records in the block table)
    of the disk, and their places in the disk's file, which the core manages; None without a disk.
    The other tiers manage their blocks themselves."""

    @property
    def space(self) -> "Space | None": ...

    @property
    def is_moving(self) -> bool:
        """True while a block is being moved between tiers, so that a tier may read or write the
        block's slot."""

    def add_key_space(self, record: KeySpaceRecord) -> None:
        """Registers a key space (a model in a configuration)."""

    def forget_key_space(self, record: KeySpaceRecord) -> None:
        """Forgets a key space (a model in a configuration) for which `has_blocks` returns
        False."""

    def has_blocks(self, key_space_id: int) -> bool:
        """Returns True if a block of the key space (a model in a configuration) lies on the
        disk (in `space`), or is being moved to or from any tier. Does not ask the shared tiers.
        Returns False if there is no disk."""

    def offer_stored(self, entries: Entries) -> None:
        """Offers to the tiers below blocks that an engine has just stored, in the order of their
        prompt. The tiers decide which of them to copy."""

    def offer_used(self, entries: Entries) -> None:
        """Offers to the tiers below blocks that were just used, in the order of their prompt. A
        tier may accept a block now that it refused when the block was stored."""

    def offer_demoted(self, entries: Entries) -> BoolMask:
        """Offers ready blocks of host memory for demotion to `space` (the disk). Returns a mask:
        True for each block that lies in `space` already or is being moved to it. All False if there
        is no `space`."""

    def find(self, key_space_id: int, listed: HashList) -> BoolMask:
        """Returns a mask of the blocks of `listed` that are ready in `space` (on the disk)."""

    def stopped(self, key_space_id: int) -> AbstractContextManager[None]:
        """Stops promotions and demotions of blocks of the key space (a model in a configuration)
        while the context is open: none begins, and a move already in flight makes no block ready.
        """

    def flush(self, key_space_id: int, portion: int) -> Iterator[int]:
        """Drops the blocks of a key space (a model in a configuration) from `space`, in parts.
        Each part scans `portion` entry numbers. Yields for each part how many blocks it dropped.
        The caller has stopped moving blocks of the key space between tiers (`stopped`)."""

    def reserved(self) -> Entries:
        """Returns the entries (table records) in host memory that are reserved for blocks that are
        being promoted."""

    def pins(self) -> Int64s:
        """Returns for each entry number (index of a record in the block table) how many times this
        object pins that block in host memory."""

    def check_invariants(self) -> None:
        """Raises AssertionError if the state of this object is inconsistent. Takes time linear in
        the capacity."""

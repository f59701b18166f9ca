"""Helpers for the tests of `CacheCore` (the server's bookkeeping of blocks): tables in plain
memory, hashes made from numbers, key spaces of two groups, and `World`, a core with shortcuts for
sessions."""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine

from hotkv_proto.blocks import NO_RETENTION, Retention, StoreOptions
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace, Sketch
from hotkv_proto.table import (
    HEADER,
    SLOT_ALIGN,
    BlockTable,
    TableGeometry,
    Words,
    hash_words,
)
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.readers import ReaderMemory
from hotkv_server.cache.restore import Restored, restore
from hotkv_server.cache.room import reserve as reserve_module
from hotkv_server.cache.room import slabs
from hotkv_server.cache.room.policies import POLICIES
from hotkv_server.cache.room.removal import finished
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.values import (
    CoreConfig,
    Entries,
    HashList,
    Int64s,
    Reservation,
    Run,
    SessionRecord,
    SlotRun,
)
from hotkv_server.residency.book.residencies import Residencies

SLAB = 4 * SLOT_ALIGN


def make_table(capacity: int, num_buckets: int = 0) -> BlockTable:
    """Returns a block table in new memory. `num_buckets` 0: as many buckets as a server would
    use."""
    geometry = TableGeometry.for_capacity(capacity, 1, 1 << 30)
    if num_buckets:
        geometry = TableGeometry(num_buckets, capacity, 1, 1 << 30)
    mapping = np.zeros(geometry.file_bytes, np.uint8)
    mapping[: HEADER.size] = np.frombuffer(geometry.pack(), np.uint8)
    return BlockTable.open(mapping)


def hash_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little", signed=True)).digest()


def words_of(numbers: Sequence[int]) -> Words:
    """Returns the block hashes made from these numbers, as uint32 [n, 8]."""
    return hash_words(b"".join(map(hash_of, numbers)), 32)


def make_key_space(name: str, full_bytes: int, window_bytes: int, num_shards: int = 1) -> KeySpace:
    """Returns a key space of two groups, full attention and sliding window, with the given slot
    sizes."""
    groups = (
        GroupSpec(GroupKind.FULL_ATTENTION, 16, _shards(full_bytes, num_shards)),
        GroupSpec(
            GroupKind.SLIDING_WINDOW, 16, _shards(window_bytes, num_shards), window_tokens=64
        ),
    )
    return KeySpace(name, "revision", "bfloat16", groups, 16)


RUNS_PER_ARENA = st.sampled_from([(1, 64), (1, 4), (2, 4), slabs.RUNS_PER_ARENA])
"""Bounds (least, most) for the number of runs (groups of adjacent slabs with slots of one size)
into which an arena can be cut. With low bounds, a small arena may have long runs, as a large arena
has; with the server's own bounds, its runs are short."""


class AnyRuns(RuleBasedStateMachine):
    """A base for state machines with small arenas, of which the reserve may take a quarter. A
    subclass that varies the length of runs calls `use_runs` in its `start`; `teardown` restores
    the defaults."""

    def __init__(self) -> None:
        super().__init__()
        self._before = slabs.RUNS_PER_ARENA, slabs.FEW_SLABS
        self._arena_part, reserve_module.ARENA_PART = reserve_module.ARENA_PART, 4

    def use_runs(self, runs_per_arena: tuple[int, int]) -> None:
        slabs.RUNS_PER_ARENA, slabs.FEW_SLABS = runs_per_arena, 0

    def teardown(self) -> None:
        slabs.RUNS_PER_ARENA, slabs.FEW_SLABS = self._before
        reserve_module.ARENA_PART = self._arena_part


def _shards(slot_bytes: int, num_shards: int) -> tuple[int, ...]:
    first = slot_bytes - (num_shards - 1)
    return (first,) + (1,) * (num_shards - 1)


class World:
    """A test harness for a `CacheCore`: an arena of `num_slabs` slabs (pieces of equal size) with
    four slots each, and shortcuts for calls of sessions. Blocks stored in a call are ready when the
    call returns."""

    def __init__(
        self,
        num_slabs: int = 6,
        capacity: int = 100,
        policy: str = "lru",
        memory: ReaderMemory | None = None,
        **config: object,
    ) -> None:
        values = CoreConfig(num_slabs * SLAB, SLAB, capacity, **config)  # type: ignore[arg-type]
        made = POLICIES[policy](capacity)
        self.core = CacheCore(values, make_table(capacity), made, memory)
        self.num_calls = 0

    def open(
        self,
        engine: str = "engine",
        model: str = "model",
        sizes: tuple[int, int] = (SLOT_ALIGN, SLOT_ALIGN),
        *,
        num_shards: int = 1,
        kinds: tuple[Sketch, ...] = (),
        tenant: str = "",
        now_s: float = 0.0,
    ) -> SessionRecord:
        """Opens a session in a key space of two groups."""
        key_space = replace(make_key_space(model, *sizes, num_shards), tenant=tenant)
        return self.core.open_session(engine, "rank", key_space, now_s, kinds)

    def store(
        self,
        session: SessionRecord,
        numbers: Sequence[int],
        now_s: float = 1.0,
        *,
        group: int = 0,
        depth: int = 0,
        parent: int | None = None,
        retention: Retention = NO_RETENTION,
        residency_id: str = "",
        is_private: bool = False,
    ) -> list[int]:
        """Stores blocks of a group under a new lease. Returns one result per block.

        numbers: a number for each block, from which its hash is made.
        depth: position of the first block in its prompt.
        parent: number of the block before the first one; None if there is none.
        """
        self.num_calls += 1
        before = None if parent is None else words_of([parent])[0]
        name, runs = f"store {self.num_calls}", [Run(group, words_of(numbers), before, depth)]
        number = session.number
        options = retention, residency_id, is_private
        begin_store(self.core, number, name, name, runs, 0, 0.0, now_s, *options)
        results: list[int] = self.core.end_store(number, name, True, now_s)[0].tolist()
        return results

    def found(self, numbers: Sequence[int], key_space_id: int = 1, group: int = 0) -> list[int]:
        """Looks up blocks, given by their numbers. Returns the numbers of those that are found."""
        (mask,) = self.core.lookup(key_space_id, [HashList(group, words_of(numbers))])
        return [number for number, hit in zip(numbers, mask.tolist(), strict=True) if hit]

    def entries(self, numbers: Sequence[int], key_space_id: int = 1, group: int = 0) -> Entries:
        """Returns for each block its word in the block index: the number of the block's entry
        (record), with the high bit set while the block is reserved; 0 for an absent block."""
        return self.core.space.index.find(key_space_id, group, words_of(numbers))


def residencies(core: CacheCore) -> Residencies:
    """Returns the object that manages the core's residencies (requests whose KV stays in host
    memory). Creates it at the first call."""
    for pinner in core.pinners:
        if isinstance(pinner, Residencies):
            return pinner
    return Residencies(core)


def reason_of(call: Callable[[], object]) -> Reason:
    """Calls the core, which must refuse the call. Returns the reason."""
    with pytest.raises(HotKVError) as refused:
        call()
    return refused.value.reason


def grants(call: Callable[[int], object]) -> int:
    """Makes calls with the arguments 0, 1, … until one is refused as OVERLOADED. Returns the number
    of calls that succeeded."""
    for number in itertools.count():
        try:
            call(number)
        except HotKVError as error:
            assert error.reason is Reason.OVERLOADED
            return number
    raise AssertionError


def taken_over(
    old: CacheCore, policy: str, last_used_s: float | None, now_s: float
) -> tuple[CacheCore, Restored]:
    """Kills the server `old`: makes the core of the next server, and restores into it the blocks
    from the state that is left. Returns the new core and a report of the restore.

    last_used_s: the time of last use of every block; None: unknown.
    """
    capacity, old_marks = old.config.capacity, old.marks.copy()
    memory = ReaderMemory(old.words._words, np.zeros(capacity + 1, np.uint8))
    core = CacheCore(old.config, make_table(capacity), POLICIES[policy](capacity), memory)
    for record in old.key_spaces.values():
        core.catalog.register(record.key_space, record.sketches, 0.0)
    records = old.space.index.table.records.copy()
    used = None if last_used_s is None else np.full(len(records), last_used_s)
    numbers = {number: number for number in old.key_spaces}
    return core, restore(core, records, numbers, used, now_s, old_marks)


def insert(
    space: Space,
    key_space_id: int,
    group_index: int,
    hashes: Words,
    slot_bytes: int,
    depths: Int64s,
) -> Entries:
    """Makes room for blocks and inserts them as reserved entries (records in the block table).
    Returns the entries. `depths`: the blocks' positions in their prompts."""
    finished(space.make_room(key_space_id, group_index, slot_bytes, len(hashes)))
    return space.insert(key_space_id, group_index, hashes, slot_bytes, depths, 1)


def reserve(
    core: CacheCore, session: int, lease_id: str, runs: list[Run], ttl_s: float, now_s: float
) -> Reservation:
    """Runs the generator `CacheCore.reserve` to its end. Returns the reservation."""
    return finished(core.reserve(session, lease_id, runs, ttl_s, now_s))


def begin_store(
    core: CacheCore,
    session: int,
    transfer_id: str,
    lease_id: str,
    runs: list[Run],
    shard_index: int,
    ttl_s: float,
    now_s: float,
    retention: Retention = NO_RETENTION,
    residency_id: str = "",
    is_private: bool = False,
) -> list[SlotRun]:
    """Runs the generator `CacheCore.begin_store` to its end. Returns the slots to copy to."""
    options = StoreOptions(retention, residency_id, is_private=is_private)
    return finished(
        core.begin_store(session, transfer_id, lease_id, runs, shard_index, ttl_s, now_s, options)
    )


def expire(core: CacheCore, now_s: float) -> int:
    """Runs the generator `CacheCore.expire` to its end. Returns the number of expired leases."""
    before = core.counters.expired_leases
    for _ in core.expire(now_s):
        pass
    return core.counters.expired_leases - before


def make_room_ahead(core: CacheCore, now_s: float) -> int:
    """Runs the generator `CacheCore.make_room_ahead` to its end. Returns how many blocks it has
    evicted; their notices are left to be taken."""
    before = core.space.removal.evicted_blocks
    for _ in core.make_room_ahead(now_s):
        pass
    return core.space.removal.evicted_blocks - before


def flush(core: CacheCore, key_space_id: int) -> int:
    """Runs the generator `CacheCore.flush` to its end. Returns the number of blocks that were
    ready."""
    return sum(core.flush(key_space_id))


def evict(core: CacheCore, key_space_id: int, group_index: int, hashes: Words) -> tuple[int, int]:
    """Runs the generator `CacheCore.evict` to its end. Returns (dropped, kept) blocks. Checks that
    `would_evict` predicted both numbers."""
    said = would_evict(core, key_space_id, group_index, hashes)
    counts = list(core.evict(key_space_id, group_index, hashes))
    return _as_said(core, said, sum(one for one, _ in counts), sum(kept for _, kept in counts))


def evict_all(core: CacheCore, key_space_id: int) -> tuple[int, int]:
    """Runs the generator `CacheCore.evict_all` to its end. Returns (dropped, kept) blocks. Checks
    that `would_evict` predicted both numbers."""
    said = would_evict(core, key_space_id)
    counts = list(core.evict_all(key_space_id))
    return _as_said(core, said, sum(one for one, _ in counts), sum(kept for _, kept in counts))


Said = tuple[int, int, int]


def would_evict(
    core: CacheCore, key_space_id: int, group_index: int = 0, hashes: Words | None = None
) -> Said:
    """Runs the generator `CacheCore.would_evict` to its end. Returns (dropped blocks, kept blocks,
    bytes in use after such an evict)."""
    used_bytes = core.space.used_bytes()
    counts = list(core.would_evict(key_space_id, group_index, hashes))
    assert core.space.used_bytes() == used_bytes
    return (
        sum(one for one, _, _ in counts),
        sum(kept for _, kept, _ in counts),
        used_bytes - sum(num_bytes for _, _, num_bytes in counts),
    )


def _as_said(core: CacheCore, said: Said, dropped: int, kept: int) -> tuple[int, int]:
    assert (dropped, kept, core.space.used_bytes()) == said
    return dropped, kept


INVERSE = pow(0x9E37_79B9_7F4A_7C15, -1, 1 << 64)


def crafted_hash(
    home: int, num_buckets: int, tag: int, tail: int, salt: int, hash_bytes: int
) -> bytes:
    """Returns a hash whose home bucket (where a lookup begins) is `home`, of `num_buckets`, and
    whose tag (the bits that a lookup compares) is `tag`.

    tail: the value of all bytes after the first eight, so that hashes with the same home and tag
        can differ.
    salt: the number that the table mixes into the hashes of the key space.
    """
    mixed = -(-(home << 32) // num_buckets) << 32 | tag
    prefix = mixed * INVERSE % (1 << 64) ^ salt
    return prefix.to_bytes(8, "little") + bytes([tail]) * (hash_bytes - 8)

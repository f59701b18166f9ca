"""For tests of `CacheCore`: hashes made from numbers, key spaces of two groups, and `World`.
Generators run to their end here."""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine

from bench.policies import POLICIES
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
from hotkv_server.cache.leases.leases import Reservation
from hotkv_server.cache.readers import ReaderMemory
from hotkv_server.cache.restore import Restored, restore
from hotkv_server.cache.room import reserve as reserve_module
from hotkv_server.cache.room import slabs
from hotkv_server.cache.room.removal import finished
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.values import (
    CoreConfig,
    Entries,
    HashList,
    Int64s,
    Run,
    SessionRecord,
    SlotRun,
    aligned,
)
from hotkv_sparse.server.residency.book.residencies import Residencies

SLAB = 4 * SLOT_ALIGN


def make_table(capacity: int, num_buckets: int = 0) -> BlockTable:
    """`num_buckets` 0: as many as a server would use."""
    geometry = TableGeometry.for_capacity(capacity, 1, 1 << 30)
    if num_buckets:
        geometry = TableGeometry(num_buckets, capacity, 1, 1 << 30)
    mapping = np.zeros(geometry.file_bytes, np.uint8)
    mapping[: HEADER.size] = np.frombuffer(geometry.pack(), np.uint8)
    return BlockTable.open(mapping)


def hash_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little", signed=True)).digest()


def words_of(numbers: Sequence[int]) -> Words:
    return hash_words(b"".join(map(hash_of, numbers)), 32)


def make_key_space(name: str, full_bytes: int, window_bytes: int, num_shards: int = 1) -> KeySpace:
    """Two groups: full attention and sliding window."""
    groups = (
        GroupSpec(GroupKind.FULL_ATTENTION, 16, _shards(full_bytes, num_shards)),
        GroupSpec(
            GroupKind.SLIDING_WINDOW, 16, _shards(window_bytes, num_shards), window_tokens=64
        ),
    )
    return KeySpace(name, "revision", "bfloat16", groups, 16)


RUNS_PER_ARENA = st.sampled_from([(1, 64), (1, 4), (2, 4), slabs.RUNS_PER_ARENA])
"""Bounds (least, most) of the runs of slabs into which an arena is cut. Low ones give a small
arena long runs."""


class AnyRuns(RuleBasedStateMachine):
    """A base for state machines with small arenas, of which the reserve may take a quarter. One
    that varies `RUNS_PER_ARENA` calls `use_runs` in `start`."""

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
    """A `CacheCore` whose slabs have four slots."""

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
        """Stores blocks, which are ready then; one result per block. `parent`: number of a
        block."""
        self.num_calls += 1
        before = None if parent is None else words_of([parent])[0]
        name, runs = f"store {self.num_calls}", [Run(group, words_of(numbers), before, depth)]
        number = session.number
        options = retention, residency_id, is_private
        begin_store(self.core, number, name, name, runs, 0, 0.0, now_s, *options)
        results: list[int] = self.core.end_store(number, name, True, now_s)[0].tolist()
        return results

    def found(self, numbers: Sequence[int], key_space_id: int = 1, group: int = 0) -> list[int]:
        (mask,) = self.core.lookup(key_space_id, [HashList(group, words_of(numbers))])
        return [number for number, hit in zip(numbers, mask.tolist(), strict=True) if hit]

    def entries(self, numbers: Sequence[int], key_space_id: int = 1, group: int = 0) -> Entries:
        """Entries of blocks, with the high bit set while they are reserved; 0 if absent."""
        return self.core.space.index.find(key_space_id, group, words_of(numbers))


def residencies(core: CacheCore) -> Residencies:
    """The core's one; made at the first call."""
    for pinner in core.pinners:
        if isinstance(pinner, Residencies):
            return pinner
    return Residencies(core)


def reason_of(call: Callable[[], object]) -> Reason:
    with pytest.raises(HotKVError) as refused:
        call()
    return refused.value.reason


def grants(call: Callable[[int], object]) -> int:
    """Calls with 0, 1, … until one is OVERLOADED. How many succeeded."""
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
    """Kills the server, and restores its blocks into the next. `last_used_s` None: unknown."""
    capacity, old_marks = old.config.capacity, old.marks.copy()
    memory = ReaderMemory(old.words._words, np.zeros(capacity + 1, np.uint8))
    arena_bytes = old.space.pool.num_slabs * old.config.slab_bytes
    config = replace(old.config, arena_bytes=arena_bytes)
    core = CacheCore(config, make_table(capacity), POLICIES[policy](capacity), memory)
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
    """Makes room, and inserts blocks as reserved."""
    slot_bytes = aligned(slot_bytes)
    finished(space.make_room(key_space_id, group_index, slot_bytes, len(hashes)))
    return space.insert(key_space_id, group_index, hashes, slot_bytes, depths, 1)


def reserve(
    core: CacheCore, session: int, lease_id: str, runs: list[Run], ttl_s: float, now_s: float
) -> Reservation:
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
    options = StoreOptions(retention, residency_id, is_private=is_private)
    return finished(
        core.begin_store(session, transfer_id, lease_id, runs, shard_index, ttl_s, now_s, options)
    )


def expire(core: CacheCore, now_s: float) -> int:
    """Number of leases that expired."""
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
    """Number of blocks that were ready."""
    return sum(core.flush(key_space_id))


def evict(core: CacheCore, key_space_id: int, group_index: int, hashes: Words) -> tuple[int, int]:
    """(Dropped, kept) blocks, as `would_evict` predicted."""
    said = would_evict(core, key_space_id, group_index, hashes)
    counts = list(core.evict(key_space_id, group_index, hashes))
    return _as_said(core, said, sum(one for one, _ in counts), sum(kept for _, kept in counts))


def evict_all(core: CacheCore, key_space_id: int) -> tuple[int, int]:
    """As `evict`."""
    said = would_evict(core, key_space_id)
    counts = list(core.evict_all(key_space_id))
    return _as_said(core, said, sum(one for one, _ in counts), sum(kept for _, kept in counts))


Said = tuple[int, int, int]


def would_evict(
    core: CacheCore, key_space_id: int, group_index: int = 0, hashes: Words | None = None
) -> Said:
    """(Dropped blocks, kept blocks, bytes in use after such an evict)."""
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
    """A hash with this home bucket and tag.

    tail: all bytes after the first eight, so that such hashes can differ.
    salt: of the key space.
    """
    mixed = -(-(home << 32) // num_buckets) << 32 | tag
    prefix = mixed * INVERSE % (1 << 64) ^ salt
    return prefix.to_bytes(8, "little") + bytes([tail]) * (hash_bytes - 8)

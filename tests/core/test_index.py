"""Tests the block index against a dict, with and without compiled kernels."""

import copy
from contextlib import suppress
from dataclasses import dataclass, replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hotkv_proto import table
from hotkv_proto.table import (
    HEADER,
    RESERVED_FLAG,
    SLOT_ALIGN,
    BlockTable,
    TableGeometry,
    hash_prefixes,
    hash_words,
)
from hotkv_server.cache.arrays import first_occurrences, rows
from hotkv_server.cache.table.index import BlockIndex, Chains
from tests.core.support import crafted_hash, make_table

SALTS = {1: [0x1234_5678_9ABC_DEF0, 0x0FED_CBA9_8765_4321], 2: [3]}
GROUPS = [
    (key_space_id, group) for key_space_id, salts in SALTS.items() for group in range(len(salts))
]

Key = tuple[int, int, bytes]
"""Key space, group, block hash."""


@dataclass
class Entry:
    number: int
    offset: int
    depth: int
    reuses: int
    ready: bool = False
    mask: int = 0
    check: int = 0

    @property
    def word(self) -> int:
        return self.number if self.ready else self.number | int(RESERVED_FLAG)


class IndexMachine(RuleBasedStateMachine):
    """`plain` reads the table as a client without numba does."""

    @initialize(
        hash_bytes=st.sampled_from([8, 16, 20, 32]),
        num_buckets=st.integers(1, 12),
        capacity=st.integers(1, 90),
    )
    def start(self, hash_bytes: int, num_buckets: int, capacity: int) -> None:
        self.hash_bytes, self.num_buckets, self.capacity = hash_bytes, num_buckets, capacity
        self.index = BlockIndex(make_table(capacity, num_buckets))
        self.plain = copy.copy(self.index.table)
        self.plain._kernels = None
        self.buckets = self.index.table.buckets.copy()
        for key_space_id, salts in SALTS.items():
            self.index.add_key_space(key_space_id, salts)
        self.model: dict[Key, Entry] = {}
        self.reuses = [0] * (capacity + 1)
        self.pins = [0] * (capacity + 1)

    def keys(self, data: st.DataObject, max_size: int = 12) -> tuple[int, int, list[bytes]]:
        """Few home buckets and tags, so that hashes often collide."""
        key_space_id, group = data.draw(st.sampled_from(GROUPS))
        salt = SALTS[key_space_id][group]
        home, tag, tail = st.integers(0, self.num_buckets - 1), st.integers(0, 9), st.integers(0, 2)
        crafted = st.builds(
            lambda h, t, x: crafted_hash(h, self.num_buckets, t, x, salt, self.hash_bytes),
            home,
            tag,
            tail,
        )
        return key_space_id, group, data.draw(st.lists(crafted, unique=True, max_size=max_size))

    def pack(self, hashes: list[bytes]) -> table.Words:
        return hash_words(b"".join(hashes), self.hash_bytes)

    def some(self, data: st.DataObject, *, ready: bool) -> list[Key]:
        matching = [key for key, entry in self.model.items() if entry.ready == ready]
        return (
            data.draw(st.lists(st.sampled_from(matching), unique=True, max_size=12))
            if matching
            else []
        )

    def numbers(self, keys: list[Key]) -> table.Words:
        return np.array([self.model[key].number for key in keys], np.uint32)

    @rule(
        data=st.data(),
        depth=st.integers(0, 1 << 31),
        offset=st.integers(0, 1 << 30),
        lease=st.integers(1, 1 << 32),
    )
    def insert(self, data: st.DataObject, depth: int, offset: int, lease: int) -> None:
        self.put(*self.keys(data), depth, offset, lease)

    @rule(home=st.integers(0, 11), tail=st.integers(0, 2), count=st.integers(8, 10))
    def crowd(self, home: int, tail: int, count: int) -> None:
        """Inserts more than their home bucket can hold."""
        home %= self.num_buckets
        hashes = [
            crafted_hash(home, self.num_buckets, tag, tail, SALTS[2][0], self.hash_bytes)
            for tag in range(count)
        ]
        self.put(2, 0, hashes, 0, 0, 1)

    def put(
        self,
        key_space_id: int,
        group: int,
        hashes: list[bytes],
        depth: int,
        offset: int,
        lease: int,
    ) -> None:
        """Inserts the hashes that are not there yet."""
        fresh = [h for h in hashes if (key_space_id, group, h) not in self.model]
        offsets = (offset + np.arange(len(fresh), dtype=np.int64)) * SLOT_ALIGN
        depths = depth + np.arange(len(fresh), dtype=np.int64)
        lease %= 1 << 32
        entries = self.index.insert(
            key_space_id, group, self.pack(fresh), offsets, 3 * SLOT_ALIGN, depths, lease
        )
        ways_left = self.num_buckets * table.WAYS - len(self.model)
        assert len(entries) == min(len(fresh), self.capacity - len(self.model), ways_left)
        for h, number, at, d in zip(
            fresh, entries.tolist(), offsets.tolist(), depths.tolist(), strict=False
        ):
            assert (
                number not in {entry.number for entry in self.model.values()}
                and 1 <= number <= self.capacity
            )
            self.reuses[number] += 1
            self.model[key_space_id, group, h] = Entry(number, at, d, self.reuses[number])
        links = self.index.table.records[entries][:, [table.W_PARENT, table.W_SKETCH]]
        assert not links.any(), "a link of the entry that had the number before"
        assert np.all(self.index.owners(entries) == lease)
        assert np.all(self.index.mark_written(entries, 0) == 0)

    @rule(data=st.data(), bit=st.integers(0, 31))
    def mark(self, data: st.DataObject, bit: int) -> None:
        keys = self.some(data, ready=False)
        masks = self.index.mark_written(self.numbers(keys), 1 << bit)
        for key, mask in zip(keys, masks.tolist(), strict=True):
            self.model[key].mask |= 1 << bit
            assert mask == self.model[key].mask

    @rule(data=st.data())
    def link(self, data: st.DataObject) -> None:
        keys = self.some(data, ready=data.draw(st.booleans()))
        words = np.array(
            data.draw(st.permutations([*self.numbers(keys).tolist(), 0, 0])), np.uint32
        )
        parent = data.draw(st.sampled_from([None, *self.model]))
        parent_words = None if parent is None else self.pack([parent[2]])[0]
        group = (2, 0) if parent is None else parent[:2]
        Chains(self.index).link(*group, words, parent_words)
        before = 0 if parent is None else self.model[parent].number
        for word in words.tolist():
            assert word == 0 or self.index.table.records[word, table.W_PARENT] == before
            before = word

    @rule(data=st.data(), check=st.integers(0, (1 << 64) - 1))
    def publish(self, data: st.DataObject, check: int) -> None:
        keys = self.some(data, ready=False)
        numbers = self.numbers(keys)
        self.index.publish(numbers, self.index.mixed(numbers), np.full(len(keys), check, np.uint64))
        for key in keys:
            self.model[key].ready, self.model[key].check = True, check

    @rule(data=st.data(), ready=st.booleans())
    def remove(self, data: st.DataObject, ready: bool) -> None:
        keys = [
            key for key in self.some(data, ready=ready) if not self.pins[self.model[key].number]
        ]
        self.index.remove(self.numbers(keys), self.index.mixed(self.numbers(keys)))
        for key in keys:
            del self.model[key]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), twice=st.booleans())
    def pin(self, data: st.DataObject, twice: bool) -> None:
        numbers = self.numbers(self.some(data, ready=True) * (2 if twice else 1))
        self.index.pin(numbers, 1)
        for number in numbers.tolist():
            self.pins[number] += 1

    @precondition(lambda self: any(self.pins))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        number = data.draw(
            st.sampled_from([number for number, count in enumerate(self.pins) if count])
        )
        self.index.pin(np.array([number], np.uint32), -1)
        self.pins[number] -= 1

    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        """Looks up by hash, and by tag as clients do."""
        key_space_id, group, hashes = self.keys(data, max_size=30)
        words, salt, packed = self.pack(hashes), SALTS[key_space_id][group], b"".join(hashes)
        found = [self.model.get((key_space_id, group, h)) for h in hashes]
        expected = [entry.word if entry else 0 for entry in found]
        assert self.index.find(key_space_id, group, words).tolist() == expected
        for h, entry in zip(hashes, found, strict=True):
            if entry:
                record = self.index.table.records[entry.number]
                self.check_record(record, entry, h, key_space_id, group)
        probes = [
            view.probe(hash_prefixes(packed, self.hash_bytes), salt)
            for view in (self.index.table, self.plain)
        ]
        assert np.array_equal(probes[0], probes[1])
        tags = [self.tag(*key) for key in self.model]
        for h, entry, probed in zip(hashes, found, probes[0].tolist(), strict=True):
            # A probe compares only tags, so it may find an absent block.
            assert probed or not entry
            if tags.count(self.tag(key_space_id, group, h)) <= (entry is not None):
                assert probed == (entry.word if entry else 0)
        ready = self.index.table.ready(packed, self.hash_bytes, salt)
        assert ready.tolist() == [0 < word < int(RESERVED_FLAG) for word in probes[0].tolist()]
        # A writer that dies leaves the sequence number odd, which means a miss.
        self.index.table.buckets[:, table.SEQ] += 1
        assert not self.index.find(key_space_id, group, words).any()
        for view in (self.index.table, self.plain):
            assert not view.probe(hash_prefixes(packed, self.hash_bytes), salt).any()
        self.index.table.buckets[:, table.SEQ] -= 1

    def tag(self, key_space_id: int, group: int, block_hash: bytes) -> int:
        return int(table.mix(self.pack([block_hash]), SALTS[key_space_id][group])[0]) & 0xFFFF_FFFF

    def check_record(
        self, record: table.Words, entry: Entry, block_hash: bytes, key_space_id: int, group: int
    ) -> None:
        state = table.STATE_READY if entry.ready else table.STATE_RESERVED
        assert record[:8].tobytes() == block_hash.ljust(32, b"\0")
        assert record[table.W_KEY_SPACE] == key_space_id
        assert record[table.W_GROUP_STATE] == group | state << 16
        assert int(record[table.W_OFFSET]) * SLOT_ALIGN == entry.offset
        assert record[table.W_SIZE] == 3
        assert record[table.W_DEPTH] == entry.depth
        assert record[table.W_REUSES] == entry.reuses
        if entry.ready:
            assert int(record[table.W_CHECK]) | int(record[table.W_CHECK + 1]) << 32 == entry.check

    def passed_by(self) -> list[int]:
        """For each bucket, its keys that lie in a later one."""
        rows = self.index.table.buckets[:, table.ENTRIES :].tolist()
        passed = [0] * self.num_buckets
        for (key_space_id, group, block_hash), entry in self.model.items():
            mixed = int(table.mix(self.pack([block_hash]), SALTS[key_space_id][group])[0])
            bucket = (mixed >> 32) * self.num_buckets >> 32
            while entry.word not in rows[bucket]:
                passed[bucket] += 1
                bucket = (bucket + 1) % self.num_buckets
        return passed

    @invariant()
    def agrees(self) -> None:
        """Readers notice a change by the bucket's sequence number."""
        index = self.index
        index.check_invariants()
        buckets, before = index.table.buckets, self.buckets
        others = np.arange(buckets.shape[1]) != table.SEQ
        has_changed = (buckets != before)[:, others].any(axis=1)
        risen = (buckets - before)[:, table.SEQ].view(np.int32)
        assert (risen >= 0).all() and risen[has_changed].all(), "a reader would not look again"
        self.buckets = buckets.copy()
        assert buckets[:, table.OVERFLOW].tolist() == self.passed_by()
        assert index.num_entries == len(self.model)
        assert index.pins.tolist() == self.pins
        for key_space_id, group in GROUPS:
            ready = {
                entry.number
                for key, entry in self.model.items()
                if entry.ready and key[0] == key_space_id
            }
            assert set(index.ready_blocks(key_space_id).tolist()) == ready
            mine = [key for key in self.model if key[:2] == (key_space_id, group)]
            hashes, salt = [key[2] for key in mine], SALTS[key_space_id][group]
            words, expected = self.pack(hashes), [self.model[key].word for key in mine]
            assert index.find(key_space_id, group, words).tolist() == expected
            assert self.plain.probe(hash_prefixes(b"".join(hashes), self.hash_bytes), salt).all()


TestIndexMachine = IndexMachine.TestCase


def test_pins_exceed_any_small_counter() -> None:
    index = BlockIndex(make_table(4))
    many = np.ones(70_000, np.uint32)
    index.pin(many, 1)
    assert index.pins[1] == 70_000
    index.pin(many, -1)
    assert index.pins[1] == 0
    with pytest.raises(AssertionError):
        index.pin(many[:1], -1)


def test_block_in_the_last_searched_bucket_is_found() -> None:
    """All have one home bucket, and one more finds no place."""
    most, num_buckets = table.WAYS * table.MAX_PROBE_BUCKETS, 2 * table.MAX_PROBE_BUCKETS
    index = BlockIndex(make_table(most + 8, num_buckets))
    index.add_key_space(2, [3])
    packed = b"".join(crafted_hash(0, num_buckets, tag, 1, 3, 32) for tag in range(most + 1))
    hashes, places = table.hash_words(packed, 32), np.zeros(most + 1, np.int64)
    entries = index.insert(2, 0, hashes, places, SLOT_ALIGN, places, 1)
    assert len(entries) == most
    index.publish(entries, index.mixed(entries), np.zeros(most, np.uint64))
    expected = [*entries.tolist(), 0]
    assert index.find(2, 0, hashes).tolist() == expected
    prefixes = table.hash_prefixes(packed, 32)
    assert table.probe_reference(index.table.buckets, prefixes, 3).tolist() == expected


@given(
    capacity=st.integers(1, 5000),
    epoch=st.integers(-(1 << 63), (1 << 63) - 1),
    arena_bytes=st.integers(0, (1 << 63) - 1),
)
def test_header_comes_back_and_table_has_room(capacity: int, epoch: int, arena_bytes: int) -> None:
    geometry = TableGeometry.for_capacity(capacity, epoch, arena_bytes)
    assert geometry.num_buckets * table.WAYS > capacity
    for one in (geometry, TableGeometry(1, 1, epoch, arena_bytes)):
        assert TableGeometry.unpack(one.pack(), one.file_bytes) == one


@given(data=st.data(), noise=st.binary(min_size=HEADER.size, max_size=HEADER.size))
def test_headers_that_are_none_are_refused(data: st.DataObject, noise: bytes) -> None:
    geometry = TableGeometry.for_capacity(20, 1, 1 << 20)
    good = geometry.pack()
    assume(not noise.startswith(table.MAGIC))
    fields = ("num_buckets", "capacity")
    bad = [noise, *(replace(geometry, **{name: 0}).pack() for name in fields)]
    for header, file_bytes in [(good, geometry.file_bytes - 1), *((one, 1 << 30) for one in bad)]:
        with pytest.raises(ValueError, match="block table"):
            TableGeometry.unpack(header, file_bytes)
    at = data.draw(st.integers(0, HEADER.size - 1))
    damaged = good[:at] + noise[at : at + 1] + good[at + 1 :]
    with suppress(ValueError):
        TableGeometry.unpack(damaged, geometry.file_bytes)
    short = data.draw(st.integers(0, HEADER.size))
    with pytest.raises(ValueError, match="block table"):
        BlockTable.open(np.zeros(short, np.uint8))


FEW_WORDS = st.lists(st.sampled_from([0, 1]), min_size=8, max_size=8)


@given(data=st.data(), words=st.lists(FEW_WORDS, max_size=8))
def test_rows_of_hashes_are_those_of_lists(data: st.DataObject, words: list[list[int]]) -> None:
    """Some hashes differ only after their first eight bytes."""
    hashes = np.array(words, np.uint32).reshape(-1, 8)
    expected = [at for at, row in enumerate(words) if row not in words[:at]]
    assert first_occurrences(hashes).tolist() == expected
    places = [at for at in range(len(words)) if data.draw(st.booleans())]
    assert rows(hashes, np.array(places, np.int64)).tolist() == [words[at] for at in places]


@example([(1, 0, 1), (1, 1, 1)])
@given(st.lists(st.tuples(st.integers(1, 2), st.integers(0, 1), st.integers(1, 2)), max_size=8))
def test_records_split_by_key_space_group_size(kinds: list[tuple[int, int, int]]) -> None:
    index = BlockIndex(make_table(1, 1))
    records = np.zeros((len(kinds), index.table.records.shape[1]), np.uint32)
    for number, (record, (key_space_id, group, size)) in enumerate(
        zip(records, kinds, strict=True)
    ):
        record[[table.W_KEY_SPACE, table.W_SIZE]] = key_space_id, size
        record[table.W_GROUP_STATE] = group | number % 3 << 16
    parts = [
        [
            (int(r[table.W_KEY_SPACE]), int(r[table.W_GROUP_STATE]) & 0xFFFF, int(r[table.W_SIZE]))
            for r in part
        ]
        for part in index.parts(records)
    ]
    assert sorted(kind for part in parts for kind in part) == sorted(kinds)
    assert sorted(part[0] for part in parts) == sorted(set(kinds))
    assert all(len(set(part)) == 1 for part in parts)

"""Representations live with blocks: a machine over the whole core, with a naive model beside it,
and how they are numbered and counted."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hotkv_proto.blocks import BlockResult
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import MAX_GROUPS, Representation
from hotkv_proto.table import RESERVED_FLAG, SLOT_ALIGN
from hotkv_server.cache import inspect
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies import LRU, POLICIES
from hotkv_server.cache.sessions import MAX_REPRESENTATIONS
from hotkv_server.cache.values import CoreConfig, HashList, LoadPositions, Run
from tests.core.cache_model import snapshot
from tests.core.support import (
    begin_store,
    evict,
    evict_all,
    expire,
    flush,
    make_key_space,
    make_table,
    reserve,
    taken_over,
    words_of,
)

SLAB = 4 * SLOT_ALIGN
NUM_SLABS = 6
NUM_HASHES = 12
GROUPS = (0, MAX_GROUPS, MAX_GROUPS + 1)
"""Blocks, and representations of them in two versions."""
NUMBERS = st.lists(st.integers(0, NUM_HASHES - 1), min_size=1, max_size=7, unique=True)
RARELY = st.sampled_from([False, False, False, True])
Key = tuple[int, int]
"""Group, number of the hash."""


@dataclass
class Write:
    """A write lease: per key that is reserved its shards written, and the copies in flight, key and
    slot offset per shard."""

    runs: list[Run]
    lists: list[tuple[int, list[int]]]
    session: int
    masks: dict[Key, int] = field(default_factory=dict)
    aborted: set[Key] = field(default_factory=set)
    copies: dict[int, list[tuple[int, int, Key, int]]] = field(default_factory=dict)
    """Per shard: (run, position, key, slot offset) of each block."""
    seen: int = 0
    released: bool = False


class RepresentationMachine(RuleBasedStateMachine):
    """Two engines on one key space, each with a version of its own, share a small arena."""

    @initialize(
        num_shards=st.integers(1, 2),
        block_bytes=st.sampled_from([SLOT_ALIGN, 2 * SLOT_ALIGN, SLAB]),
        sizes=st.sampled_from(
            [(SLOT_ALIGN, SLOT_ALIGN), (SLOT_ALIGN, 2 * SLOT_ALIGN), (SLAB + 1, SLOT_ALIGN)]
        ),
        capacity=st.sampled_from([9, 60]),
        policy=st.sampled_from(sorted(POLICIES)),
    )
    def start(
        self,
        num_shards: int,
        block_bytes: int,
        sizes: tuple[int, int],
        capacity: int,
        policy: str,
    ) -> None:
        config = CoreConfig(
            NUM_SLABS * SLAB,
            SLAB,
            capacity,
            lease_ttl_s=10.0,
            unadmitted_share=1.0,
        )
        self.core = CacheCore(config, make_table(capacity), POLICIES[policy](capacity))
        self.num_shards, self.policy = num_shards, policy
        self.key_space = key_space = make_key_space("one", block_bytes, SLOT_ALIGN, num_shards)
        kinds = [
            Representation(0, "rot2u", number, (size - 1, 1)[:num_shards])
            for number, size in enumerate(sizes)
        ]
        self.kinds = kinds
        self.now_s = 0.0
        self.sessions = [
            self.core.open_session(f"e{at}", "rank", key_space, 0.0, (kind,)).number
            for at, kind in enumerate(kinds)
        ]
        again = self.core.open_session("e9", "rank", key_space, 0.0, tuple(reversed(kinds)))
        assert again.representations == (MAX_GROUPS + 1, MAX_GROUPS)
        self.ready: set[Key] = set()
        self.kept: dict[int, int] = {}
        self.writes: dict[str, Write] = {}
        self.reads: dict[str, tuple[int, list[tuple[Key, int]]]] = {}
        self.arena: dict[tuple[int, int], Key | None] = {}
        self.names = 0

    # What the core shows

    def word(self, key: Key) -> int:
        return int(self.core.space.index.find(1, key[0], words_of([key[1]]))[0])

    def offset(self, key: Key) -> int:
        return int(
            self.core.space.index.offsets(np.array([self.word(key) & ~int(RESERVED_FLAG)]))[0]
        )

    def pinned(self) -> set[int]:
        return {offset for _, held in self.reads.values() for _, offset in held}

    def settle(self, *, makes_room: bool = False) -> None:
        """Takes what the core tells of the last call, and compares. Alone, representations go only
        when room is made."""
        rows = {words_of([number])[0].tobytes(): number for number in range(NUM_HASHES)}
        for notice in self.core.take_effects():
            assert notice.group_index == 0, "a notice names a representation"
            for row in notice.hashes:
                self.ready.remove((0, rows[row.tobytes()]))
        self.kept = {
            number: kind for number, kind in self.kept.items() if (0, number) in self.ready
        }
        found = {
            key
            for group in GROUPS
            for key in [(group, n) for n in range(NUM_HASHES)]
            if 0 < self.word(key) < int(RESERVED_FLAG)
        }
        expected = self.ready | {(kind, number) for number, kind in self.kept.items()}
        assert found <= expected, "something is found that nobody stored, or whose block is gone"
        assert found == expected or (
            makes_room and all(key[0] >= MAX_GROUPS for key in expected - found)
        )
        self.kept = {number: kind for number, kind in self.kept.items() if (kind, number) in found}
        self.core.check_invariants()

    # Stores

    @rule(
        engine=st.integers(0, 1),
        blocks=NUMBERS | st.just([]),
        others=NUMBERS | st.just([]),
        shard=st.integers(0, 1),
        front=st.booleans(),
    )
    def begin_store(
        self, engine: int, blocks: list[int], others: list[int], shard: int, front: bool
    ) -> None:
        """Blocks and representations, of the same or others, in either order."""
        self.begin_whole(engine, blocks, others, shard % self.num_shards, front=front)

    @rule(engine=st.integers(0, 1), blocks=NUMBERS, others=NUMBERS)
    def store(self, engine: int, blocks: list[int], others: list[int]) -> None:
        """All ranks store blocks with representations, and some of those of others, and all goes
        well."""
        others = [number for number in others if (0, number) in self.ready and number not in blocks]
        self.begin_whole(engine, blocks, blocks + others)
        for shard in range(self.num_shards):
            if shard:
                self.begin(f"w{self.names}", self.writes[f"w{self.names}"], shard, set())
            self.finish(f"w{self.names}", shard, succeeded=True)

    def begin_whole(
        self,
        engine: int,
        blocks: list[int],
        others: list[int],
        shard: int = 0,
        *,
        front: bool = False,
    ) -> None:
        lists = [
            (group, numbers)
            for group, numbers in ((0, blocks), (MAX_GROUPS + engine, others))
            if numbers
        ]
        lists = lists[::-1] if front else lists
        runs = [Run(group, words_of(numbers), None, 0) for group, numbers in lists]
        self.names += 1
        before = self.ready | {(kind, number) for number, kind in self.kept.items()}
        self.begin(f"w{self.names}", Write(runs, lists, self.sessions[engine]), shard, before)

    def joinable(self) -> list[str]:
        writes = sorted(self.writes.items())
        return [
            name
            for name, w in writes
            if not w.released and len(w.copies) + w.seen.bit_count() < self.num_shards
        ]

    @precondition(lambda self: self.joinable())
    @rule(data=st.data())
    def join_store(self, data: st.DataObject) -> None:
        """The other rank stores its shard of the same blocks."""
        name = data.draw(st.sampled_from(self.joinable()))
        write = self.writes[name]
        shard = next(
            shard
            for shard in range(self.num_shards)
            if shard not in write.copies and not write.seen >> shard & 1
        )
        self.begin(name, write, shard, set())

    def begin(self, name: str, write: Write, shard: int, before: set[Key]) -> None:
        deciding = name not in self.writes
        slots = begin_store(
            self.core, write.session, f"{name}-{shard}", name, write.runs, shard, 0.0, self.now_s
        )
        results = self.core.transfers._transfers[write.session, f"{name}-{shard}"].results  # type: ignore[union-attr]
        self.settle(makes_room=deciding)
        others = {
            key for other in self.writes.values() if other is not write for key in other.masks
        }
        copies = []
        for run, ((group, numbers), slot_run) in enumerate(zip(write.lists, slots, strict=True)):
            for at, number in enumerate(numbers):
                key, result = (group, number), BlockResult(int(results[run][at]))
                if deciding:
                    self.check_result(key, result, before, others)
                    write.masks.update({key: 0} if result == BlockResult.RESERVED else {})
            for at, offset in zip(
                slot_run.positions.tolist(), slot_run.offsets.tolist(), strict=True
            ):
                key = (group, numbers[at])
                assert key in write.masks and offset not in self.pinned(), (
                    "a pinned slot was given away"
                )
                self.arena[offset, shard] = None
                copies.append((run, at, key, offset))
        for group, number in write.masks:
            with_block = group == 0 or (0, number) in self.ready or (0, number) in write.masks
            assert with_block or not deciding, "a representation without a block was reserved"
        write.copies[shard] = copies
        self.writes[name] = write

    def check_result(
        self, key: Key, result: BlockResult, before: set[Key], others: set[Key]
    ) -> None:
        """`before`: found when the store began; `others`: reserved under other leases. For blocks,
        room may take representations."""
        still = key in before and (key[0] == 0 or self.kept.get(key[1]) == key[0])
        assert (
            result == BlockResult.PRESENT if still else result != BlockResult.PRESENT or key[0] == 0
        )
        blocked = key in others or (key[0] >= MAX_GROUPS and (0, key[1]) in others)
        assert (result == BlockResult.IN_FLIGHT) == (blocked and not still)
        assert result in (
            BlockResult.PRESENT,
            BlockResult.IN_FLIGHT,
            BlockResult.RESERVED,
            BlockResult.NO_SPACE,
        )

    @precondition(lambda self: any(write.copies for write in self.writes.values()))
    @rule(data=st.data(), succeeded=st.sampled_from([True, True, True, False]))
    def end_store(self, data: st.DataObject, succeeded: bool) -> None:
        name = data.draw(
            st.sampled_from(sorted(name for name, write in self.writes.items() if write.copies))
        )
        self.finish(
            name, data.draw(st.sampled_from(sorted(self.writes[name].copies))), succeeded=succeeded
        )

    def finish(self, name: str, shard: int, *, succeeded: bool) -> None:
        write = self.writes[name]
        copies = write.copies.pop(shard)
        write.seen |= 1 << shard
        for _, _, key, offset in copies:
            self.arena[offset, shard] = key if succeeded else None
        results = self.core.end_store(write.session, f"{name}-{shard}", succeeded, self.now_s)
        for run, at, key, _ in sorted(copies, key=lambda copy: copy[2][0]):
            assert results[run][at] == self.end_block(write, key, shard, succeeded=succeeded)
        if not write.copies:
            write.masks = {
                key: mask for key, mask in write.masks.items() if key not in write.aborted
            }
        if not write.copies and (write.released or write.seen == (1 << self.num_shards) - 1):
            assert write.released or not write.masks
            del self.writes[name]
        self.settle()

    def end_block(self, write: Write, key: Key, shard: int, *, succeeded: bool) -> BlockResult:
        if not succeeded:
            write.aborted.add(key)
        if key in write.aborted:
            return BlockResult.ABORTED
        write.masks[key] |= 1 << shard
        if write.masks[key] != (1 << self.num_shards) - 1:
            return BlockResult.WRITTEN
        if key[0] >= MAX_GROUPS and (0, key[1]) not in self.ready:
            write.aborted.add(key)
            return BlockResult.ABORTED
        del write.masks[key]
        if key[0] >= MAX_GROUPS:
            self.kept[key[1]] = key[0]
        else:
            self.ready.add(key)
        return BlockResult.STORED

    # Reads

    @rule(engine=st.integers(0, 1), blocks=NUMBERS | st.just([]), others=NUMBERS)
    def acquire(self, engine: int, blocks: list[int], others: list[int]) -> None:
        self.names += 1
        lists = [
            (group, numbers)
            for group, numbers in ((0, blocks), (MAX_GROUPS + engine, others))
            if numbers
        ]
        counters = self.core.counters
        before = counters.acquired_blocks, counters.acquired_representations
        grant = self.core.acquire(
            self.sessions[engine],
            f"r{self.names}",
            [HashList(g, words_of(n)) for g, n in lists],
            0.0,
            self.now_s,
        )
        held = []
        for (group, numbers), mask in zip(lists, grant.pinned, strict=True):
            for number, granted in zip(numbers, mask.tolist(), strict=True):
                key = (group, number)
                assert granted == (key in self.ready or self.kept.get(number) == group), (
                    "another version was offered, or a kept one was not"
                )
                held += [(key, self.offset(key))] if granted else []
            positions = np.flatnonzero(mask)
            transfer = f"l{self.names}-{group}"
            (slots,) = self.core.begin_load(
                self.sessions[engine],
                transfer,
                f"r{self.names}",
                [LoadPositions(group, positions.astype(np.int64))],
            )
            assert slots.offsets.tolist() == [offset for key, offset in held if key[0] == group]
            self.core.end_load(self.sessions[engine], transfer, True)
        num_blocks = sum(group == 0 for (group, _), _ in held)
        assert counters.acquired_blocks == before[0] + num_blocks
        assert counters.acquired_representations == before[1] + len(held) - num_blocks
        self.reads[f"r{self.names}"] = (self.sessions[engine], held)
        self.settle()

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.reads)))
        session, _ = self.reads.pop(name)
        assert self.core.release(session, name)
        self.settle()

    @rule(really=RARELY)
    def expire(self, really: bool) -> None:
        """All leases without copies end."""
        if not really:
            return
        self.now_s += 20.0
        expire(self.core, self.now_s)
        self.reads = {}
        for name in [name for name, write in self.writes.items() if not write.copies]:
            del self.writes[name]
        for write in self.writes.values():
            write.released = True
        self.settle()

    # Operators

    @rule(numbers=NUMBERS, everything=RARELY)
    def evict(self, numbers: list[int] | None, everything: bool) -> None:
        numbers = None if everything else numbers
        named = {key for key in self.ready if numbers is None or key[1] in numbers}
        reserved = {
            key
            for write in self.writes.values()
            for key in write.masks
            if key[0] == 0 and numbers and key[1] in numbers
        }
        pinned = {key for key in named if self.offset(key) in self.pinned()}
        counts = (
            evict_all(self.core, 1)
            if numbers is None
            else evict(self.core, 1, 0, words_of(numbers))
        )
        assert counts == (len(named - pinned), len(named & pinned) + len(reserved))
        self.settle()

    @rule(really=RARELY)
    def flush(self, really: bool) -> None:
        if not really:
            return
        assert flush(self.core, 1) == len(self.ready)
        for name, write in list(self.writes.items()):
            write.aborted |= set(write.masks)
            if not write.copies:
                write.masks = {}
                if write.seen == (1 << self.num_shards) - 1:
                    del self.writes[name]
        self.settle()
        assert not self.ready

    @rule(really=RARELY)
    def restart(self, really: bool) -> None:
        """The server is killed, whatever it was doing, and another one takes over its table."""
        if not really:
            return
        self.core, restored = taken_over(self.core, self.policy, None, self.now_s)
        assert (restored.blocks, restored.representations) == (
            len(self.ready),
            len(self.kept),
        ) and set(restored.dropped) <= {"unfinished"}
        self.writes, self.reads = {}, {}
        self.sessions = [
            self.core.open_session(f"e{at}", "rank", self.key_space, self.now_s, (kind,)).number
            for at, kind in enumerate(self.kinds)
        ]
        self.settle()

    @rule(group=st.sampled_from([-1, 2, MAX_GROUPS - 1, MAX_GROUPS + 2]))
    def nonsense(self, group: int) -> None:
        before = snapshot(self.core)
        one, session = words_of([1]), self.sessions[0]
        calls = [
            lambda: self.core.lookup(1, [HashList(group, one)]),
            lambda: self.core.acquire(session, "x", [HashList(group, one)], 0.0, self.now_s),
            lambda: reserve(self.core, session, "x", [Run(group, one)], 0.0, self.now_s),
            lambda: self.core.touch(session, [HashList(MAX_GROUPS, one)], self.now_s),
            lambda: evict(self.core, 1, MAX_GROUPS, one),
        ]
        for call in calls:
            with pytest.raises(HotKVError) as raised:
                call()
            assert raised.value.reason == Reason.INVALID_FIELD and snapshot(self.core) == before

    @invariant()
    def bytes_are_right(self) -> None:
        """What can be found, and what is pinned though it can't, holds the bytes that were stored
        for it."""
        if not hasattr(self, "ready"):
            return
        places = {
            key: self.offset(key)
            for key in self.ready | {(kind, number) for number, kind in self.kept.items()}
        }
        for key, offset in [
            *places.items(),
            *(item for _, held in self.reads.values() for item in held),
        ]:
            assert all(self.arena[offset, shard] == key for shard in range(self.num_shards)), (
                f"{key} holds other bytes"
            )


TestRepresentationMachine = RepresentationMachine.TestCase


def test_the_version_stored_last_is_kept_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    core = CacheCore(CoreConfig(NUM_SLABS * SLAB, SLAB, 100), make_table(100), LRU(100))
    kinds = tuple(Representation(0, "rot2u", version, (100,)) for version in (1, 2))
    key_space = make_key_space("m", SLOT_ALIGN, SLOT_ALIGN)
    session = core.open_session("engine", "rank", key_space, 0.0, kinds).number
    for name, group, numbers in (
        ("a", 0, [1, 2, 3]),
        ("b", MAX_GROUPS, [1, 2, 3]),
        ("c", MAX_GROUPS + 1, [2]),
    ):
        begin_store(core, session, name, name, [Run(group, words_of(numbers))], 0, 0.0, 1.0)
        assert set(core.end_store(session, name, True, 1.0)[0].tolist()) == {BlockResult.STORED}
    asked = [HashList(MAX_GROUPS + kind, words_of([1, 2, 3])) for kind in range(2)]
    assert [mask.tolist() for mask in core.lookup(1, asked)] == [
        [True, False, True],
        [False, True, False],
    ]
    # In parts of any size it is the same.
    for part in (1, 2, 1 << 17):
        monkeypatch.setattr(inspect, "PART_ENTRIES", part)
        *_, counted = inspect.census(core)
        assert (counted.representation_bytes, counted.num_blocks) == (3 * SLOT_ALIGN, 3)
        assert (counted.blocks[1], counted.representations[1], counted.blocks.sum()) == (3, 3, 3)
    core.check_invariants()


def test_equal_kinds_have_one_number_and_numbers_are_bounded() -> None:
    core = CacheCore(CoreConfig(NUM_SLABS * SLAB, SLAB, 100), make_table(100), LRU(100))
    one, other = (
        make_key_space("one", SLOT_ALIGN, SLOT_ALIGN),
        make_key_space("other", SLOT_ALIGN, SLOT_ALIGN),
    )
    kinds = tuple(
        Representation(version % 2, "rot2u", version, (100,))
        for version in range(MAX_REPRESENTATIONS)
    )
    numbers = core.open_session("a", "rank", one, 0.0, kinds).representations
    assert numbers == tuple(range(MAX_GROUPS, MAX_GROUPS + MAX_REPRESENTATIONS))
    assert core.open_session("b", "rank", one, 0.0, kinds[7:9]).representations == numbers[7:9]
    assert core.open_session("c", "rank", other, 0.0, kinds[7:9]).representations == numbers[:2]
    refused: list[tuple[tuple[Representation, ...], Reason]] = [
        ((Representation(0, "rot3u", 1, (100,)),), Reason.OVERLOADED),
        ((kinds[0], kinds[0]), Reason.INVALID_FIELD),
        ((Representation(2, "rot2u", 1, (100,)),), Reason.INVALID_FIELD),
        ((Representation(0, "rot2u", 1, (100, 100)),), Reason.INVALID_FIELD),
        ((Representation(0, "rot2u", 1, (NUM_SLABS * SLAB + 1,)),), Reason.INVALID_FIELD),
    ]
    before = snapshot(core)
    for wrong, reason in refused:
        with pytest.raises(HotKVError) as raised:
            core.open_session(
                "d", "rank", one if reason is Reason.OVERLOADED else other, 0.0, wrong
            )
        assert raised.value.reason == reason and snapshot(core) == before

"""Tests that sketches are stored and removed with their blocks."""

from dataclasses import dataclass, field
from functools import partial

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bench.policies import POLICIES
from hotkv_proto.blocks import BlockResult
from hotkv_proto.errors import Reason
from hotkv_proto.keys import MAX_GROUPS, Sketch
from hotkv_proto.table import RESERVED_FLAG, SLOT_ALIGN
from hotkv_server.cache import inspect
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.sessions import MAX_SKETCHES
from hotkv_server.cache.values import HashList, LoadPositions, Run, SessionRecord
from tests.core.cache_model import refused
from tests.core.support import (
    SLAB,
    World,
    begin_store,
    evict,
    evict_all,
    expire,
    flush,
    taken_over,
    words_of,
)

NUM_HASHES = 12
GROUPS = (0, MAX_GROUPS, MAX_GROUPS + 1)
"""Blocks, and two versions of their sketches."""
NUMBERS = st.lists(st.integers(0, NUM_HASHES - 1), min_size=1, max_size=7, unique=True)
SOME = NUMBERS | st.just([])
RARELY = st.sampled_from([False, False, False, True])
Key = tuple[int, int]
"""Group, number of the hash."""


@dataclass
class Write:
    """A write lease of the model.

    masks: shards that are written, by reserved key.
    copies: for each shard being written, (index of the run, position there, key, offset).
    """

    lists: list[tuple[int, list[int]]]
    session: int
    masks: dict[Key, int] = field(default_factory=dict)
    aborted: set[Key] = field(default_factory=set)
    copies: dict[int, list[tuple[int, int, Key, int]]] = field(default_factory=dict)
    seen: int = 0
    released: bool = False


class SketchMachine(RuleBasedStateMachine):
    """Two engines of one key space have different versions of sketches."""

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
        self.world = World(6, capacity, policy, lease_ttl_s=10.0, unadmitted_share=1.0)
        self.num_shards, self.whole, self.policy = num_shards, (1 << num_shards) - 1, policy
        self.block_bytes = block_bytes
        self.kinds = [
            Sketch(0, "rot2u", number, (size - 1, 1)[:num_shards])
            for number, size in enumerate(sizes)
        ]
        self.now_s, self.names = 0.0, 0
        self.open()
        again = self.opened("e9", *reversed(self.kinds))
        assert again.sketches == (MAX_GROUPS + 1, MAX_GROUPS)
        self.ready: set[Key] = set()
        self.kept: dict[int, int] = {}
        self.num_kept = 0
        self.writes: dict[str, Write] = {}
        self.reads: dict[str, tuple[int, list[tuple[Key, int]]]] = {}
        self.arena: dict[tuple[int, int], Key | None] = {}

    def opened(self, engine: str, *kinds: Sketch) -> SessionRecord:
        sizes = (self.block_bytes, SLOT_ALIGN)
        return self.world.open(engine, sizes=sizes, num_shards=self.num_shards, kinds=kinds)

    def open(self) -> None:
        self.sessions = [self.opened(f"e{at}", kind).number for at, kind in enumerate(self.kinds)]

    # The core's view

    @property
    def core(self) -> CacheCore:
        return self.world.core

    def word(self, key: Key) -> int:
        return int(self.world.entries([key[1]], 1, key[0])[0])

    def offset(self, key: Key) -> int:
        entry = np.array([self.word(key) & ~int(RESERVED_FLAG)])
        return int(self.core.space.index.offsets(entry)[0])

    def pinned(self) -> set[int]:
        return {offset for _, held in self.reads.values() for _, offset in held}

    def all_ready(self) -> set[Key]:
        return self.ready | {(kind, number) for number, kind in self.kept.items()}

    def settle(self, *, makes_room: bool = False) -> None:
        """Only making room may remove a sketch whose block stays."""
        rows = {words_of([number])[0].tobytes(): number for number in range(NUM_HASHES)}
        for notice in self.core.take_effects():
            assert notice.group_index == 0, "a notice names a sketch"
            for row in notice.hashes:
                self.ready.remove((0, rows[row.tobytes()]))
        self.kept = {at: kind for at, kind in self.kept.items() if (0, at) in self.ready}
        keys = [(group, number) for group in GROUPS for number in range(NUM_HASHES)]
        found = {key for key in keys if 0 < self.word(key) < int(RESERVED_FLAG)}
        gone = self.all_ready() - found
        assert found <= self.all_ready(), "found, but nobody stored it, or its block is gone"
        assert not gone or (makes_room and all(key[0] >= MAX_GROUPS for key in gone))
        self.kept = {at: kind for at, kind in self.kept.items() if (kind, at) in found}
        self.core.check_invariants()

    # Stores

    @rule(
        engine=st.integers(0, 1),
        blocks=SOME,
        others=SOME,
        shard=st.integers(0, 1),
        front=st.booleans(),
    )
    def begin_store(
        self, engine: int, blocks: list[int], others: list[int], shard: int, front: bool
    ) -> None:
        """`front`: the sketches come first."""
        self.begin_whole(engine, blocks, others, shard % self.num_shards, front=front)

    @rule(engine=st.integers(0, 1), blocks=NUMBERS, others=NUMBERS)
    def store(self, engine: int, blocks: list[int], others: list[int]) -> None:
        """Stores blocks with all ranks' sketches, and sketches of ready `others`."""
        others = [number for number in others if (0, number) in self.ready and number not in blocks]
        name = self.begin_whole(engine, blocks, blocks + others)
        for shard in range(self.num_shards):
            if shard:
                self.begin(name, self.writes[name], shard, set())
            self.finish(name, shard, succeeded=True)

    def lists(
        self, engine: int, blocks: list[int], others: list[int]
    ) -> list[tuple[int, list[int]]]:
        named = ((0, blocks), (MAX_GROUPS + engine, others))
        return [(group, numbers) for group, numbers in named if numbers]

    def begin_whole(
        self,
        engine: int,
        blocks: list[int],
        others: list[int],
        shard: int = 0,
        *,
        front: bool = False,
    ) -> str:
        self.names += 1
        lists, name = self.lists(engine, blocks, others), f"w{self.names}"
        write = Write(lists[::-1] if front else lists, self.sessions[engine])
        self.begin(name, write, shard, self.all_ready())
        return name

    def joinable(self) -> list[tuple[str, int]]:
        """(Lease name, shard) for what open write leases still lack."""
        return [
            (name, shard)
            for name, write in sorted(self.writes.items())
            for shard in range(self.num_shards)
            if not write.released and shard not in write.copies and not write.seen >> shard & 1
        ]

    @precondition(lambda self: self.joinable())
    @rule(data=st.data())
    def join_store(self, data: st.DataObject) -> None:
        name, shard = data.draw(st.sampled_from(self.joinable()))
        self.begin(name, self.writes[name], shard, set())

    def begin(self, name: str, write: Write, shard: int, before: set[Key]) -> None:
        deciding, transfer = name not in self.writes, f"{name}-{shard}"
        runs = [Run(group, words_of(numbers)) for group, numbers in write.lists]
        session, now_s = write.session, self.now_s
        slots = begin_store(self.core, session, transfer, name, runs, shard, 0.0, now_s)
        results = self.core.transfers._transfers[session, transfer].results  # type: ignore[union-attr]
        self.settle(makes_room=deciding)
        leased = [other.masks for other in self.writes.values() if other is not write]
        others = {key for masks in leased for key in masks}
        write.copies[shard] = copies = []
        for run, ((group, numbers), slot_run) in enumerate(zip(write.lists, slots, strict=True)):
            for at, number in enumerate(numbers) if deciding else ():
                key, result = (group, number), BlockResult(int(results[run][at]))
                self.check_result(key, result, before, others)
                write.masks.update({key: 0} if result == BlockResult.RESERVED else {})
            placed = zip(slot_run.positions.tolist(), slot_run.offsets.tolist(), strict=True)
            for at, offset in placed:
                key = (group, numbers[at])
                assert key in write.masks
                assert offset not in self.pinned(), "a pinned slot was given away"
                self.arena[offset, shard] = None
                copies.append((run, at, key, offset))
        for group, number in write.masks if deciding else ():
            with_block = (0, number) in self.ready or (0, number) in write.masks
            assert group == 0 or with_block, "a sketch without a block was reserved"
        self.writes[name] = write

    def check_result(
        self, key: Key, result: BlockResult, before: set[Key], others: set[Key]
    ) -> None:
        """An earlier sketch may be gone: making room may remove it.

        before: found when the store began.
        others: reserved by other leases.
        """
        if key in before and (key[0] == 0 or self.kept.get(key[1]) == key[0]):
            assert result == BlockResult.PRESENT
        elif key in others or (0, key[1]) in others:
            assert result == BlockResult.IN_FLIGHT
        else:
            allowed = {BlockResult.RESERVED, BlockResult.NO_SPACE}
            assert result in allowed | ({BlockResult.PRESENT} if key[0] == 0 else set())

    @precondition(lambda self: any(write.copies for write in self.writes.values()))
    @rule(data=st.data(), succeeded=st.sampled_from([True, True, True, False]))
    def end_store(self, data: st.DataObject, succeeded: bool) -> None:
        going = sorted((name, at) for name, write in self.writes.items() for at in write.copies)
        self.finish(*data.draw(st.sampled_from(going)), succeeded=succeeded)

    def finish(self, name: str, shard: int, *, succeeded: bool) -> None:
        write = self.writes[name]
        copies = write.copies.pop(shard)
        write.seen |= 1 << shard
        for _, _, key, offset in copies:
            self.arena[offset, shard] = key if succeeded else None
        counters, num_kept = self.core.counters, self.num_kept
        before = counters.stored_sketches
        results = self.core.end_store(write.session, f"{name}-{shard}", succeeded, self.now_s)
        for run, at, key, _ in sorted(copies, key=lambda copy: copy[2][0]):
            assert results[run][at] == self.end_block(write, key, shard, succeeded=succeeded)
        assert counters.stored_sketches - before == self.num_kept - num_kept
        self.settle_write(name, write)
        self.settle()

    def settle_write(self, name: str, write: Write) -> None:
        """Drops aborted blocks once no copy is in flight, and ends the lease after its last
        shard or its release."""
        if not write.copies:
            masks = write.masks.items()
            write.masks = {key: mask for key, mask in masks if key not in write.aborted}
            if write.released or write.seen == self.whole:
                assert write.released or not write.masks
                del self.writes[name]

    def end_block(self, write: Write, key: Key, shard: int, *, succeeded: bool) -> BlockResult:
        if not succeeded:
            write.aborted.add(key)
        if key in write.aborted:
            return BlockResult.ABORTED
        write.masks[key] |= 1 << shard
        if write.masks[key] != self.whole:
            return BlockResult.WRITTEN
        if key[0] and (0, key[1]) not in self.ready:
            write.aborted.add(key)
            return BlockResult.ABORTED
        del write.masks[key]
        if key[0]:
            self.kept[key[1]] = key[0]
            self.num_kept += 1
        else:
            self.ready.add(key)
        return BlockResult.STORED

    # Reads

    @rule(engine=st.integers(0, 1), blocks=SOME, others=NUMBERS)
    def acquire(self, engine: int, blocks: list[int], others: list[int]) -> None:
        """The sketches are of the engine's own version."""
        self.names += 1
        name, session = f"r{self.names}", self.sessions[engine]
        lists, held = self.lists(engine, blocks, others), []
        counters = self.core.counters
        before = counters.acquired_sketches, counters.missed_sketches
        asked = [HashList(group, words_of(numbers)) for group, numbers in lists]
        grant = self.core.acquire(session, name, asked, 0.0, self.now_s)
        for (group, numbers), mask in zip(lists, grant.pinned, strict=True):
            granted = [(group, n) for n, ok in zip(numbers, mask.tolist(), strict=True) if ok]
            assert granted == [(group, n) for n in numbers if (group, n) in self.all_ready()]
            places = [(key, self.offset(key)) for key in granted]
            load = [LoadPositions(group, np.flatnonzero(mask).astype(np.int64))]
            (slots,) = self.core.begin_load(session, f"l{group}", name, load)
            assert slots.offsets.tolist() == [offset for _, offset in places]
            self.core.end_load(session, f"l{group}", True)
            held += places
        num_found = sum(group > 0 for (group, _), _ in held)
        after = counters.acquired_sketches, counters.missed_sketches
        assert after == (before[0] + num_found, before[1] + len(others) - num_found)
        self.reads[name] = (session, held)
        self.settle()

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.reads)))
        session, _ = self.reads.pop(name)
        assert self.core.release(session, name)
        self.settle()

    @precondition(lambda self: self.reads or self.writes)
    @rule(really=RARELY)
    def expire(self, really: bool) -> None:
        """A lease does not end while a copy is in flight."""
        if not really:
            return
        self.now_s += 20.0
        expire(self.core, self.now_s)
        self.reads = {}
        self.writes = {name: write for name, write in self.writes.items() if write.copies}
        for write in self.writes.values():
            write.released = True
        self.settle()

    # Operators

    @rule(numbers=NUMBERS, everything=RARELY)
    def evict(self, numbers: list[int], everything: bool) -> None:
        keys = {(0, number) for number in (range(NUM_HASHES) if everything else numbers)}
        named, reserved = self.ready & keys, set()
        if not everything:
            reserved = {key for write in self.writes.values() for key in write.masks} & keys
        pinned = {key for key in named if self.offset(key) in self.pinned()}
        hashes = words_of(numbers)
        counts = evict_all(self.core, 1) if everything else evict(self.core, 1, 0, hashes)
        assert counts == (len(named - pinned), len(pinned) + len(reserved))
        self.settle()

    @rule(really=RARELY)
    def flush(self, really: bool) -> None:
        if not really:
            return
        assert flush(self.core, 1) == len(self.ready)
        for name, write in list(self.writes.items()):
            write.aborted |= set(write.masks)
            self.settle_write(name, write)
        self.settle()
        assert not self.ready

    @rule(really=RARELY)
    def restart(self, really: bool) -> None:
        if not really:
            return
        self.world.core, restored = taken_over(self.core, self.policy, None, self.now_s)
        counts = (restored.blocks, restored.sketches)
        assert counts == (len(self.ready), len(self.kept))
        assert set(restored.dropped) <= {"unfinished"}
        self.writes, self.reads = {}, {}
        self.open()
        self.settle()

    @invariant()
    def bytes_are_right(self) -> None:
        places = [(key, self.offset(key)) for key in self.all_ready()]
        places += [item for _, held in self.reads.values() for item in held]
        for key, offset in places:
            for shard in range(self.num_shards):
                assert self.arena[offset, shard] == key, f"{key} holds other bytes"


TestSketchMachine = SketchMachine.TestCase


def test_the_version_stored_last_is_kept_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    session = world.open(kinds=tuple(Sketch(0, "rot2u", at, (100,)) for at in (1, 2)))
    for group, numbers in ((0, [1, 2, 3]), (MAX_GROUPS, [1, 2, 3]), (MAX_GROUPS + 1, [2])):
        assert set(world.store(session, numbers, group=group)) == {BlockResult.STORED}
    found = [world.found([1, 2, 3], group=MAX_GROUPS + kind) for kind in range(2)]
    assert found == [[1, 3], [2]]
    world.core.space.index.unverified[world.entries([1, 3])] = True
    # Counts must not depend on the entries per part.
    for part in (1, 2, 1 << 17):
        monkeypatch.setattr(inspect, "PART_ENTRIES", part)
        *_, counted = inspect.census(world.core)
        assert (counted.sketch_bytes, counted.num_blocks) == (3 * SLOT_ALIGN, 3)
        assert (counted.blocks[1], counted.sketches[1], counted.blocks.sum()) == (3, 3, 3)
        assert counted.num_unverified == 2
    one = words_of([1])
    for group in (-1, 2, MAX_GROUPS - 1, MAX_GROUPS + 2):
        refused(world.core, partial(world.found, [1], 1, group), Reason.INVALID_FIELD)
    for call in (
        lambda: world.core.touch(session.number, [HashList(MAX_GROUPS, one)], 1.0),
        lambda: evict(world.core, 1, MAX_GROUPS, one),
    ):
        refused(world.core, call, Reason.INVALID_FIELD)
    world.core.check_invariants()


def test_the_sketches_of_the_coldest_blocks_make_room() -> None:
    world = World(2, unadmitted_share=1.0)
    session = world.open(kinds=(Sketch(0, "rot2u", 1, (SLOT_ALIGN,)),))
    for group in (0, MAX_GROUPS):
        world.store(session, range(4), group=group)
    world.core.acquire(session.number, "pin", [HashList(0, words_of([1, 3, 0, 2]))], 0.0, 2.0)
    assert world.store(session, [9, 10]) == [BlockResult.STORED] * 2
    assert world.found(range(4), group=MAX_GROUPS) == [1, 3]


def test_equal_kinds_have_one_bounded_number() -> None:
    world = World()
    kinds = tuple(Sketch(version % 2, "rot2u", version, (100,)) for version in range(MAX_SKETCHES))
    numbers = world.open(kinds=kinds).sketches
    assert numbers == tuple(range(MAX_GROUPS, MAX_GROUPS + MAX_SKETCHES))
    assert world.open("b", kinds=kinds[7:9]).sketches == numbers[7:9]
    assert world.open("c", "other", kinds=kinds[7:9]).sketches == numbers[:2]
    for model, wrong, reason in (
        ("model", (Sketch(0, "rot3u", 1, (100,)),), Reason.OVERLOADED),
        ("other", (kinds[0], kinds[0]), Reason.INVALID_FIELD),
        ("other", (Sketch(2, "rot2u", 1, (100,)),), Reason.INVALID_FIELD),
        ("other", (Sketch(0, "rot2u", 1, (100, 100)),), Reason.INVALID_FIELD),
        ("other", (Sketch(0, "rot2u", 1, (6 * SLAB + 1,)),), Reason.INVALID_FIELD),
    ):
        refused(world.core, partial(world.open, "d", model, kinds=wrong), reason)

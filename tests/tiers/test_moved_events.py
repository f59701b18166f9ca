"""Tests the events about blocks that move between tiers: ready and removed blocks per medium,
with parents and tokens, and none about flushed blocks."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hotkv_proto.blocks import RunContent
from hotkv_proto.keys import KeySpace
from hotkv_server.cache.values import Entries, HashList, Medium, Run
from hotkv_server.events.capability import MOST_NAMES, EventsCapability
from hotkv_server.events.drive import (
    NO_CONTENT,
    Event,
    EventHub,
    KeySpaceCleared,
    RemovedEvent,
    StoredEvent,
    moved_events,
)
from hotkv_server.node import event_loop
from hotkv_server.node.health import Health
from hotkv_server.node.removals import Effects, Removals
from hotkv_server.settings.outlets import EventSettings
from hotkv_server.tiers.protocol import NO_GENERATION
from tests.core.support import begin_store, evict, flush, words_of
from tests.doubles.memory_tier import MemoryStore
from tests.support.waiting import eventually
from tests.tiers.nodes import BLOCKS, NUM_SLOTS, Setup, SharedNode, patient_flushes

NUMBERS = {words_of([n])[0].tobytes(): n for n in range(200)}


class Listener:
    """is_alone: each key space has a topic of its own."""

    published_events = lost_events = queued_bytes = 0

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.names: list[str] = []
        self.is_alone = True

    def add_name(self, number: int, name: str) -> None:
        self.names.append(name)

    def add_key_space(self, number: int, key_space: KeySpace, names: Sequence[str] = ()) -> None:
        self.names = list(names)

    def forget_key_space(self, number: int) -> None: ...

    def publish(self, unix_time_s: float, events: Sequence[Event]) -> None:
        self.events += events

    def clear(self, number: int) -> None:
        self.events.append(KeySpaceCleared(number))

    def sends_clear(self, number: int) -> bool:
        return self.is_alone

    def settle(self) -> None:
        """This publisher loses no events."""


class Heard:
    def __init__(self, node: Any, *, of_pool: bool = False) -> None:
        core, self.listener = node.core, Listener()
        self.hub = EventHub(self.listener, of_pool=of_pool)
        self.events = EventsCapability(node, EventSettings(), self.hub)
        self.events.key_space_added(1, core.key_space(1), ())
        self.effects = Effects(core, node.events, list, asyncio.Event(), asyncio.Event())
        self.removals = Removals(core, node.events, self.effects.run)
        self.read()

    def moved(self, entries: Entries, medium: Medium, tier: str) -> None:
        """First the events of earlier removals, as a real node orders them."""
        self.effects.run()
        self.events.blocks_moved(entries, medium, tier)

    def read(self) -> list[Event]:
        self.effects.run()
        events, self.listener.events = self.listener.events, []
        return events


def numbers_of(words: Any) -> list[int]:
    return [NUMBERS[row.tobytes()] for row in words]


@contextlib.asynccontextmanager
async def heard(one: Any, *, of_pool: bool = False) -> AsyncIterator[Heard]:
    ear = Heard(one, of_pool=of_pool)
    flushed = ear.removals.flushed_elsewhere
    flush_here = ear.removals.flush if of_pool else one.flushed_here
    one.tiers.start(Health(), ear.effects.run, flush_here, ear.moved, flushed)
    if isinstance(one, SharedNode):
        await one.until_told()
    try:
        yield ear
    finally:
        await one.tiers.close()


def stored(events: list[Event], medium: Medium) -> list[StoredEvent]:
    return [one for one in events if isinstance(one, StoredEvent) and one.medium is medium]


def removed(events: list[Event], medium: Medium) -> set[int]:
    return {
        number
        for one in events
        if isinstance(one, RemovedEvent) and one.medium is medium
        for number in numbers_of(one.hashes)
    }


async def test_moved_blocks_event_has_tokens_and_parent() -> None:
    """Routers that match prompts by tokens ignore events without tokens."""
    one = Setup(10.0)
    async with heard(one) as ear:
        tokens = np.arange(16 * len(BLOCKS), dtype=np.int32)
        run = StoredEvent(1, 0, words_of(BLOCKS), None, 0, RunContent(tokens))
        ear.events._contents.keep(one.core.key_space(1).fingerprint, run)
        await one.lie_below(BLOCKS)
        await asyncio.sleep(0.05)
        assert all(await one.leased(BLOCKS))
        events = ear.read()
        for medium in (Medium.DISK, Medium.CPU):
            told = sorted(stored(events, medium), key=lambda event: event.depth)
            assert [n for event in told for n in numbers_of(event.hashes)] == BLOCKS
            found = np.concatenate([event.content.token_ids for event in told])
            assert np.array_equal(found, tokens)
            for event in told:
                before = [] if event.parent is None else numbers_of(event.parent[None])
                assert before == BLOCKS[: event.depth][-1:]
        assert ear.events.counters()["events_without_tokens_total"] == 0


async def test_disk_evictions_and_losses_are_published() -> None:
    one = Setup(10.0)
    async with heard(one) as ear:
        await one.lie_below(BLOCKS)
        for place in list(one.store.content)[:2]:
            one.store.damage(place, 100)
        assert sum(await one.leased(BLOCKS)) == 4 and one.lower.counters.lost == 2
        events = ear.read()
        lost = removed(events, Medium.DISK)
        assert len(lost) == 2
        assert {n for e in stored(events, Medium.CPU) for n in numbers_of(e.hashes)} == (
            set(BLOCKS) - lost
        )
        # So that the disk evicts.
        believed = set(BLOCKS) - lost
        for first in range(20, 190, 10):
            count = one.lower.counters.demoted
            one.put(list(range(first, first + 10)))
            await one.until_down(count + 10)
            await asyncio.sleep(0)
            evict(one.core, 1, 0, words_of(list(range(first, first + 10))))
        await asyncio.sleep(0.1)
        for event in ear.read():
            if stored([event], Medium.DISK):
                assert not set(numbers_of(event.hashes)) & believed, "stored twice"
                believed |= set(numbers_of(event.hashes))
            gone = removed([event], Medium.DISK)
            assert gone <= believed
            believed -= gone
        every = list(range(200))
        lies = one.lower.up.find(1, HashList(0, words_of(every))) != 0
        assert believed == set(np.flatnonzero(lies).tolist())


async def test_flush_clears_disk_then_nothing_is_published() -> None:
    one = Setup(0.05)
    async with heard(one) as ear:
        await one.lie_below(BLOCKS)
        await asyncio.sleep(0.05)
        ear.read()
        one.tier.faults.is_hung = True
        assert not any(await one.leased(BLOCKS))
        flush(one.core, 1)
        ear.effects.run(1)
        (cleared,) = ear.read()
        assert isinstance(cleared, KeySpaceCleared)
        assert removed(list(cleared.removed), Medium.DISK) == set(BLOCKS)
        one.tier.faults.is_hung = False
        await eventually(lambda: not len(one.lower.moves), "the move does not end")
        assert not stored(ear.read(), Medium.CPU) and not any(await one.leased(BLOCKS))


async def test_evictions_for_coming_blocks_are_published_before() -> None:
    """The events must not wait for the disk, which hangs."""
    one = Setup(0.05)
    async with heard(one) as ear:
        await one.lie_below(BLOCKS)
        others = list(range(20, 20 + NUM_SLOTS))
        one.put(others)
        await one.until_down(len(BLOCKS) + len(others))
        ear.read()
        one.tier.faults.is_hung = True
        assert not any(await one.leased(BLOCKS))
        gone = removed(ear.listener.events, Medium.CPU)
        assert len(gone) >= len(BLOCKS) and gone <= set(others)
        one.tier.faults.is_hung = False
        await eventually(lambda: one.has(BLOCKS), "it does not arrive")
        assert all(await one.leased(BLOCKS))


@pytest.mark.parametrize(("is_full", "is_alone"), [(False, True), (True, True), (False, False)])
async def test_other_nodes_flush_clears_only_the_store(
    monkeypatch: pytest.MonkeyPatch, is_full: bool, is_alone: bool
) -> None:
    """If not `is_alone`, the topic is cleared too. `is_full`: the flush leaves NO_GENERATION."""
    patient_flushes(monkeypatch)
    store = MemoryStore(places=False)
    one, other = SharedNode(store, 10.0), SharedNode(store, 10.0)
    async with heard(one) as ear, heard(other) as far:
        ear.listener.is_alone = is_alone
        await one.share(BLOCKS)
        copied = ear.read()
        told = [(numbers_of(one.hashes), one.tier) for one in stored(copied, Medium.REMOTE)]
        assert told == [([n], "shared") for n in BLOCKS] and len(copied) == len(told)
        evict(one.core, 1, 0, words_of(BLOCKS))
        assert ear.read() and not far.read()
        if is_full:
            store.generations[one.generations.fingerprint(1)] = NO_GENERATION
        else:
            assert all(await other.leased(BLOCKS))
            await eventually(lambda: len(far.listener.events) == len(BLOCKS), "not all come")
            assert len(stored(far.read(), Medium.CPU)) == len(BLOCKS)
            assert not await other.flush()
        await eventually(lambda: bool(ear.listener.events), "readers are not told")
        assert ear.read() == [KeySpaceCleared(1)] * (1 if is_alone else 2)


async def test_node_without_copies_clears_no_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a decode node. A second, later clear would make readers forget what was copied
    meanwhile."""
    patient_flushes(monkeypatch)
    store = MemoryStore(places=False)
    one, other = SharedNode(store, 10.0), SharedNode(store, 10.0)
    async with heard(one, of_pool=True) as ear, heard(other, of_pool=True) as far:
        await one.share(BLOCKS)
        assert all(await other.leased(BLOCKS)) and other.core.space.index.num_entries
        ear.read()
        assert not await one.flush()
        await eventually(
            lambda: other.generation() == one.generation(), "the flush does not arrive"
        )
        assert ear.read() == [KeySpaceCleared(1)] and not far.read()
        assert not other.core.space.index.num_entries


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize(("of_pool", "is_alone"), [(False, False), (False, True), (True, True)])
async def test_flush_clears_old_store_blocks_only(
    monkeypatch: pytest.MonkeyPatch, of_pool: bool, is_alone: bool, is_copied: bool
) -> None:
    """of_pool: only events about the shared store, so none about the new block.
    is_alone: the topic has only this key space's blocks.
    is_copied: an older block is copied during the flush.
    """
    monkeypatch.setattr(event_loop, "SLICE_S", 0.0)
    one = SharedNode(MemoryStore(places=False), 10.0)
    async with heard(one, of_pool=of_pool) as ear:
        ear.listener.is_alone = is_alone
        await one.share(BLOCKS)
        assert len(stored(ear.read(), Medium.REMOTE)) == len(BLOCKS)
        flushed, new = one.core.flush, StoredEvent(1, 0, words_of([20]), None, 0, NO_CONTENT)
        old = replace(new, hashes=words_of([0]), medium=Medium.REMOTE, tier="shared")
        key_space = one.core.key_space(1)

        def flushing(number: int) -> Iterator[int]:
            yield from flushed(number)
            # Another task stores between two parts of the flush.
            one.put([20])
            ear.hub.publish([old] * is_copied + [new])

        monkeypatch.setattr(one.core, "flush", flushing)
        await ear.removals.flush(1)
        told = ear.read()
        while not of_pool and not isinstance(told.pop(0), KeySpaceCleared):
            """Skips the events before the one that clears the key space."""
        # Cleared again if readers may still believe that the store has flushed blocks: `old` was
        # copied during the flush, or the first clear came as removals, as others share the
        # topic. All cached blocks follow it.
        is_cleared_again = of_pool or is_copied or not is_alone
        expected = [old] * is_copied + [new] * (not of_pool)
        assert told == expected + [KeySpaceCleared(1)] * is_cleared_again
        monkeypatch.setattr(one.core, "flush", flushed)
        monkeypatch.setattr(one.core.catalog, "surplus", lambda *_: 1)
        await ear.removals.forget_for(key_space, ())
        assert not one.core.space.index.num_entries and bool(ear.read()) != of_pool
        # Forgotten before its flush ends: no more events.
        ear.events.key_space_forgotten(1)
        ear.hub.flushed(1, False)
        assert not ear.read()


def test_a_model_has_a_bounded_number_of_names(caplog: pytest.LogCaptureFixture) -> None:
    one = Setup(0.0)
    ear, key_space = Heard(one), one.core.key_space(1)
    names = [f"name {number}" for number in range(MOST_NAMES)]
    for name in [*names, names[0], "one more"]:
        ear.events.model_named(1, name)
    assert ear.listener.names == names and "'one more'" in caplog.text
    ear.events.key_space_forgotten(1)
    ear.events.key_space_added(2, key_space, ["another"])
    assert ear.listener.names == names and "'another'" in caplog.text


@pytest.mark.parametrize("is_known", [False, True])
def test_event_has_what_is_known_of_blocks(is_known: bool) -> None:
    """The evicted parent's entry belongs to another block, which must not be named. `is_known`:
    the contents' file has parents and tokens."""
    one = Setup(0.0)
    one.put([0, 1, 2])
    index = one.core.space.index
    entries = index.find(1, 0, words_of([2, 1]))
    evict(one.core, 1, 0, words_of([0]))
    one.put([50])
    begin_store(one.core, one.number, "s", "s", [Run(1, words_of([1]))], 0, 0.0, 1.0)
    one.core.end_store(one.number, "s", True, 1.0)
    entries = np.append(entries, index.find(1, 0, words_of([50])))
    entries = np.append(entries, index.find(1, 1, words_of([1])))
    content = RunContent(np.arange(32, dtype=np.int32))
    run = StoredEvent(0, 0, words_of([1, 2]), words_of([0])[0], 1, content)

    def find(
        key_space_id: int, group_index: int, hashes: list[bytes]
    ) -> tuple[list[StoredEvent], list[int]]:
        numbers = [2, 1, 50] if group_index == 0 else [1]
        assert hashes == [words.tobytes() for words in words_of(numbers)] and key_space_id == 1
        return ([run], [2]) if is_known and group_index == 0 else ([], [*range(len(hashes))])

    events = moved_events(index, entries, Medium.REMOTE, "v", find)
    (other,) = (event for event in events if event.group_index == 1)
    assert (numbers_of(other.hashes), other.depth, other.content) == ([1], 0, NO_CONTENT)
    events.remove(other)
    expected = [([1, 2], run.parent, 1, content)]
    if not is_known:
        expected = [([1], None, 1, NO_CONTENT), ([2], None, 2, NO_CONTENT)]
    assert [(numbers_of(e.hashes), e.parent, e.depth, e.content) for e in events] == [
        ([50], None, 0, NO_CONTENT),
        *expected,
    ]
    assert {(e.key_space_id, e.group_index, e.medium, e.tier) for e in events} == {
        (1, 0, Medium.REMOTE, "v")
    }
    assert not moved_events(index, entries[:0], Medium.CPU, "", find)

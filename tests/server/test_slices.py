"""Tests that others are served between parts of long work."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from hotkv_proto.blocks import RunContent
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache import core as core_module
from hotkv_server.cache.room import reserve
from hotkv_server.cache.values import HashList, Run
from hotkv_server.events.capability import EventsCapability
from hotkv_server.events.drive import KeySpaceCleared, RemovedEvent, StoredEvent, stored_events
from hotkv_server.monitoring.counts import census
from hotkv_server.monitoring.topics import tier_rows
from hotkv_server.node import event_loop as slices
from hotkv_server.node import node as node_module
from tests.core.support import begin_store, make_key_space, words_of
from tests.server.capable import capability_of, capable
from tests.server.nodes import PAGE, live_node, store_in, worker
from tests.server.support import hashes
from tests.support.waiting import eventually

NUM_BLOCKS = 12
KEY_SPACE = make_key_space("sliced", SLOT_ALIGN, SLOT_ALIGN)


@pytest.mark.parametrize("restores", [False, True])
async def test_others_store_while_a_key_space_flushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, restores: bool
) -> None:
    """By its events, a reader must know in the end what is ready."""
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    monkeypatch.setattr(core_module, "BLOCKS", 1)

    async with live_node(tmp_path) as node:
        events = capability_of(capable(node), EventsCapability).hub
        session = (await node.sessions.open("engine", "rank", KEY_SPACE, "test")).record.number
        turns, seen = 0, set[int]()

        def found(number: int) -> bool:
            return bool(node.core.lookup(1, [HashList(0, words_of([number]))])[0][0])

        def store(number: int) -> None:
            run = [Run(0, words_of([number]))]
            begin_store(node.core, session, "t", f"l {number} {turns}", run, 0, 0.0, 1.0)
            results = node.core.end_store(session, "t", True, 1.0)
            events.publish(stored_events(1, run, [RunContent(np.empty(0, np.int32))], results))

        async def meddle() -> None:
            nonlocal turns
            while True:
                turns += 1
                seen.add(sum(map(found, range(NUM_BLOCKS))))
                if restores and turns == 5:
                    store(next(number for number in range(NUM_BLOCKS) if not found(number)))
                await asyncio.sleep(0)

        with events.feeds.reader() as feed:
            for number in range(NUM_BLOCKS):
                store(number)
            meddling = asyncio.create_task(meddle())
            assert await node.removals.flush(1) >= NUM_BLOCKS
            left = {number for number in range(NUM_BLOCKS) if found(number)}
            meddling.cancel()
            items, lost = await feed.get(1000)
        assert len(seen) > 5, "nobody was served between"
        assert not lost and len(left) <= restores
        believed, was_cleared = set[bytes](), False
        for item in items:
            match item.event:
                case StoredEvent(hashes=hashes):
                    believed |= {row.tobytes() for row in hashes}
                case RemovedEvent(hashes=hashes):
                    believed -= {row.tobytes() for row in hashes}
                case KeySpaceCleared():
                    was_cleared = True
                    believed.clear()
        assert believed == {words_of([number])[0].tobytes() for number in left}
        assert was_cleared


async def test_a_store_wakes_the_making_of_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fills the server's table of 64 blocks. After the next store, the server must evict as many
    blocks as its reserve has, and say so to sessions and operators."""
    monkeypatch.setattr(reserve, "ARENA_PART", 16)
    monkeypatch.setattr(reserve, "WINDOW_S", 1e9)
    monkeypatch.setattr(node_module, "ROOM_S", 1e9)
    async with live_node(tmp_path) as node:
        session = await worker(node, 64)
        assert await store_in(node, session, hashes(64)) == [1] * 64
        node.start()
        assert await store_in(node, session, hashes(1)) == [1]
        space = node.core.space
        await eventually(lambda: space.books.free_numbers() >= 15, "room is made")
        await eventually(lambda: session.notices.qsize() >= 1, "the session is told")
        (host,) = tier_rows(node, await census(node))
        assert host["reserve_byte_count"] == space.books.free_numbers() * PAGE
        evicted = space.removal.evicted_blocks
        assert await store_in(node, session, hashes(4)) == [1] * 4
        assert space.removal.evicted_blocks == evicted, "a store evicted though it had room"

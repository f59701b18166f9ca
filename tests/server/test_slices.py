"""Long work on the event loop: others are served between its parts, and every answer is true at its
moment."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hotkv_proto.blocks import RunContent
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache import core as core_module
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room import space
from hotkv_server.cache.room.policies import LRU
from hotkv_server.cache.room.removal import Books, Removal
from hotkv_server.cache.room.space import keep_bounds
from hotkv_server.cache.values import CoreConfig, HashList, Run, TenantShare
from hotkv_server.events.capability import EventsCapability
from hotkv_server.events.drive import BlocksRemoved, BlocksStored, KeySpaceCleared, stored_events
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.node import event_loop as slices
from hotkv_server.node import removals
from hotkv_server.node.node import Node
from tests.core.support import begin_store, make_key_space, words_of
from tests.server.capable import capable

NUM_BLOCKS = 12
KEY_SPACE = make_key_space("sliced", SLOT_ALIGN, SLOT_ALIGN)


@pytest.mark.parametrize("restores", [False, True])
def test_while_a_key_space_is_flushed_others_store_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, restores: bool
) -> None:
    """A router that believes the events knows exactly what is there; only where nobody stored is
    the key space told to be clear."""
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    monkeypatch.setattr(core_module, "BLOCKS", 1)

    async def scenario() -> None:
        memory = NodeMemory.open(tmp_path, 1 << 20, 1 << 16, 64, 1, prefault=False)
        node = Node(
            CacheCore(CoreConfig(1 << 20, 1 << 16, 64), memory.table, LRU(64)),
            memory,
            None,  # type: ignore[arg-type]
        )
        events = capable(node).capability(EventsCapability).hub
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
                case BlocksStored(hashes=hashes):
                    believed |= {row.tobytes() for row in hashes}
                case BlocksRemoved(hashes=hashes):
                    believed -= {row.tobytes() for row in hashes}
                case KeySpaceCleared():
                    was_cleared = True
                    believed.clear()
        assert believed == {words_of([number])[0].tobytes() for number in left}
        assert was_cleared != restores
        await node.close()
        memory.remove()

    asyncio.run(scenario())


def test_a_lowered_bound_is_looked_at_again_only_after_blocks_were_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a second later at the soonest; not within one turn of the timer, if that takes long."""
    looks = 0

    def counted(books: Books, removal: Removal) -> Iterator[None]:
        nonlocal looks
        looks += 1
        return keep_bounds(books, removal)

    monkeypatch.setattr(removals, "keep_bounds", counted)
    monkeypatch.setattr(removals, "KEEPING_S", 0.0)
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    monkeypatch.setattr(space, "EVICTED_PER_PART", 1)

    async def scenario() -> None:
        memory = NodeMemory.open(tmp_path, 1 << 20, 1 << 16, 64, 1, prefault=False)
        config = CoreConfig(1 << 20, 1 << 16, 64, tenants={"": TenantShare()})
        node = Node(CacheCore(config, memory.table, LRU(64)), memory, None)  # type: ignore[arg-type]
        session = (await node.sessions.open("engine", "rank", KEY_SPACE, "test")).record.number
        runs = [Run(0, words_of(range(NUM_BLOCKS)))]
        begin_store(node.core, session, "t", "l", runs, 0, 0.0, 1.0)
        node.core.end_store(session, "t", True, 1.0)
        index = node.core.space.index
        blocks = index.ready_blocks()
        index.pin(blocks, 1)
        size = int(index.slot_bytes(blocks)[0])
        node.removals.share_out({"": TenantShare(0, 2 * size)})
        for now_s in (10.0, 10.2, 11.5, 13.0):
            await node.removals.keep_bounds(now_s)
        assert looks == 1 and len(index.ready_blocks()) == NUM_BLOCKS
        index.pin(blocks, -1)
        await node.removals.keep_bounds(10.9)
        assert looks == 1, "too soon"
        await node.removals.keep_bounds(20.0)
        assert len(index.ready_blocks()) > 2, "all in one turn"
        turns = 0
        while len(index.ready_blocks()) > 2:
            await node.removals.keep_bounds(20.0)
            turns += 1
        assert looks == 2 and turns > 2
        await node.close()
        memory.remove()

    asyncio.run(scenario())

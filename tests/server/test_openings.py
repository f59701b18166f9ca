"""A session is open when its key space is written down: sessions that open meanwhile wait too, and
a client that leaves meanwhile leaves nothing behind."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hotkv_proto.errors import HotKVError
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace, Representation
from hotkv_proto.messages.layout import key_space_message
from hotkv_proto.v1 import cache_pb2, warm_pb2
from hotkv_server.cache import sessions as key_spaces
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies import LRU
from hotkv_server.cache.values import CoreConfig, Run, TenantShare
from hotkv_server.events import service as event_service
from hotkv_server.events.capability import EventsCapability
from hotkv_server.memory import arena
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.memory.state import ServerState, read_state, write_state
from hotkv_server.node.node import Node
from hotkv_server.warm_start.service import WarmStartService
from tests.core.support import begin_store, hash_of, words_of
from tests.server.capable import capable

SPACE = KeySpace("m", "w", "bf16", (GroupSpec(GroupKind.FULL_ATTENTION, 16, (4096,)),), 16)
KIND = Representation(0, "rot2u", 1, (100,))
CONFIG = CoreConfig(1 << 20, 1 << 16, 64)


class Disk:
    """Writes of the state wait for `go`; with `error` they fail."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.error: OSError | None = None
        self.num_writes = 0

    def write(self, path: Path, state: ServerState) -> None:
        self.num_writes += 1
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error
        write_state(path, state)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(arena, "write_state", made.write)
    return made


@contextlib.contextmanager
def node_in(folder: Path, config: CoreConfig = CONFIG) -> Iterator[Node]:
    memory = NodeMemory.open(folder, 1 << 20, 1 << 16, 64, 1, prefault=False)
    yield capable(Node(CacheCore(config, memory.table, LRU(64)), memory, None))  # type: ignore[arg-type]
    memory.remove()


async def until(condition: Callable[[], bool]) -> None:
    """Waits for the condition, and for what the loop has begun by then."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)
    for _ in range(3):
        await asyncio.sleep(0)


def written(folder: Path) -> list[str]:
    """Models in the state, with how many kinds of representations."""
    return [
        f"{known.key_space.model} {len(known.representations)}"
        for known in read_state(folder / "state.json").key_spaces
    ]


def test_all_that_open_wait_for_the_write(tmp_path: Path, disk: Disk) -> None:
    async def scenario(node: Node) -> None:
        kinds = [(SPACE, ()), (SPACE, ()), (replace(SPACE, model="n"), ()), (SPACE, (KIND,))]
        tasks = [
            asyncio.create_task(node.sessions.open("e", "rank", space, "test", kind))
            for space, kind in kinds
        ]
        await until(lambda: len(node.sessions) == len(tasks) and disk.num_writes > 0)
        assert disk.num_writes == 1 and not any(task.done() for task in tasks)
        disk.go.set()
        sessions = await asyncio.gather(*tasks)
        assert written(tmp_path) == ["m 1", "n 0"] and disk.num_writes <= 2
        assert sorted(s.record.number for s in sessions) == [1, 2, 3, 4]
        # What is known needs no write.
        await node.sessions.open("e", "rank", SPACE, "test", (KIND,))
        assert disk.num_writes <= 2
        await node.close()

    with node_in(tmp_path) as node:
        asyncio.run(scenario(node))


def test_who_goes_away_meanwhile_leaves_no_session_and_stops_no_write(
    tmp_path: Path, disk: Disk
) -> None:
    async def scenario(node: Node) -> None:
        task = asyncio.create_task(node.sessions.open("e", "rank", SPACE, "test"))
        await until(lambda: disk.num_writes > 0)
        task.cancel()
        await until(task.done)
        assert task.cancelled() and not node.sessions and not node.core.sessions
        other = asyncio.create_task(
            node.sessions.open("e", "rank", replace(SPACE, model="n"), "test")
        )
        await until(lambda: len(node.sessions) == 1)
        assert disk.num_writes == 1 and not other.done()
        disk.go.set()
        await other
        assert written(tmp_path) == ["m 0", "n 0"]
        await node.close()

    with node_in(tmp_path) as node:
        asyncio.run(scenario(node))


def test_a_write_that_fails_is_tried_again_with_the_next_session(
    tmp_path: Path, disk: Disk
) -> None:
    async def scenario(node: Node) -> None:
        disk.go.set()
        disk.error = OSError(28, "No space left on device")
        await node.sessions.open("e", "rank", SPACE, "test")
        disk.error = None
        await node.sessions.open("e", "rank", SPACE, "test")
        assert written(tmp_path) == ["m 0"]
        await node.close()

    with node_in(tmp_path) as node:
        asyncio.run(scenario(node))


def test_tenants_that_come_with_a_reload_have_their_share_of_the_catalog(
    tmp_path: Path, disk: Disk
) -> None:
    """And what others have beyond theirs goes as these open other key spaces."""

    async def scenario(node: Node) -> None:
        disk.go.set()
        a, b = (replace(SPACE, tenant=name) for name in "ab")
        for number in range(3):
            session = await node.sessions.open("e", "tool", replace(a, model=f"{number}"), "test")
            await node.sessions.close(session)
        node.removals.share_out({name: TenantShare() for name in "abcdefgh"})
        assert node.core.catalog.max_of_tenant == 2
        for space in (b, replace(a, model="new")):
            await node.sessions.open("e", "tool", space, "test")
        assert written(tmp_path) == ["2 0", "m 0", "new 0"]
        node.core.check_invariants()
        await node.close()

    config = CoreConfig(1 << 20, 1 << 16, 64, tenants={"a": TenantShare(), "b": TenantShare()})
    with (
        pytest.MonkeyPatch.context() as patch,
        node_in(tmp_path, config) as node,
    ):
        patch.setattr(key_spaces, "MAX_KEY_SPACES", 16)
        node.core.catalog.max_of_tenant = 8
        asyncio.run(scenario(node))


def test_what_is_forgotten_is_written_down_so_and_read_on_by_who_was_behind(
    tmp_path: Path, disk: Disk
) -> None:
    """Also with blocks, where there is no room otherwise; numbers of the dead are never given away
    anew."""

    async def scenario(node: Node) -> None:
        disk.go.set()
        node.core.catalog.max_of_tenant = 2
        spaces = [replace(SPACE, model=name) for name in "mnop"]
        with node.capability(EventsCapability).hub.feeds.reader() as feed:
            first = await node.sessions.open("e", "tool", spaces[0], "test")
            begin_store(
                node.core, first.record.number, "t", "l", [Run(0, words_of(range(3)))], 0, 0.0, 0.0
            )
            node.core.end_store(first.record.number, "t", True, 0.0)
            await node.sessions.close(first)
            for space in spaces[1:3]:
                await node.sessions.open("e", "tool", space, "test")
            assert written(tmp_path) == ["n 0", "o 0"]
            assert [known.number for known in read_state(tmp_path / "state.json").key_spaces] == [
                2,
                3,
            ]
            with pytest.raises(HotKVError, match="close some"):
                await node.sessions.open("e", "tool", spaces[3], "test")
            told = [event_service._message(item) for item in (await feed.get(100))[0]]
        assert [(event.key_space_id, event.WhichOneof("body")) for event in told] == [
            (1, "cleared"),
            (2, "cleared"),
            (1, "cleared"),
            (3, "cleared"),
        ]
        node.core.check_invariants()
        await node.close()

    with node_in(tmp_path) as node:
        asyncio.run(scenario(node))


def test_the_timer_forgets_what_was_left_long_ago(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(node: Node) -> None:
        disk.go.set()
        node.start()
        session = await node.sessions.open("e", "tool", SPACE, "test")
        monkeypatch.setattr(key_spaces, "FORGET_S", 0.0)
        for _ in range(2):
            ticked_s = node.last_tick_s
            await until(lambda at_s=ticked_s: node.last_tick_s > at_s)  # type: ignore[misc]
        assert list(node.core.key_spaces) == [1], "forgotten in use"
        await node.sessions.close(session)
        await until(lambda: not node.core.key_spaces)
        assert (await node.sessions.open("e", "tool", SPACE, "test")).record.key_space_id == 2
        await node.close()

    with node_in(tmp_path) as node:
        asyncio.run(scenario(node))


def test_a_key_space_that_is_fetched_for_is_known_as_if_an_engine_had_come(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written down first, told of, and forgotten by a timer that goes on."""
    request = warm_pb2.PrefetchBlocksRequest(
        key_space=key_space_message(SPACE),
        groups=[cache_pb2.GroupHashes(group_index=0, hashes=hash_of(1))],
    )

    async def scenario(node: Node) -> None:
        node.start()
        with node.capability(EventsCapability).hub.feeds.reader() as feed:
            task = asyncio.create_task(WarmStartService(node).PrefetchBlocks(request, None))
            await until(lambda: disk.num_writes > 0)
            assert not task.done(), "not written down"
            disk.go.set()
            assert (await task).absent_block_count == 1 and written(tmp_path) == ["m 0"]
            told = [event_service._message(item) for item in (await feed.get(100))[0]]
        assert [(event.key_space_id, event.WhichOneof("body")) for event in told] == [
            (1, "cleared")
        ]
        monkeypatch.setattr(key_spaces, "FORGET_S", 0.0)
        await until(lambda: not node.core.key_spaces)
        for _ in range(2):
            ticked_s = node.last_tick_s
            await until(lambda at_s=ticked_s: node.last_tick_s > at_s)  # type: ignore[misc]
        assert (await node.sessions.open("e", "rank", SPACE, "test")).record.key_space_id == 2
        await node.close()

    with node_in(tmp_path) as node:
        asyncio.run(scenario(node))


def test_the_end_of_a_key_space_that_was_never_told_of_is_passed_over(tmp_path: Path) -> None:
    with node_in(tmp_path) as node:
        node.capability(EventsCapability).hub.forget_key_space(7)

"""Tests that a session waits until its key space is in the state file."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from hotkv_proto.errors import HotKVError
from hotkv_proto.keys import KeySpace, Sketch
from hotkv_server.cache.values import Run
from hotkv_server.events.capability import EventsCapability
from hotkv_server.events.drive import KeySpaceCleared
from hotkv_server.memory import arena
from hotkv_server.memory.state import ServerState, read_state, write_state
from hotkv_server.node.node import Node
from tests.core.support import begin_store, words_of
from tests.server.capable import capability_of, capable
from tests.server.nodes import SPACE, live_node
from tests.support.waiting import eventually

KIND = Sketch(0, "rot2u", 1, (100,))


class Disk:
    """A fake disk: writes wait for `go`, and fail with `error`."""

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


@contextlib.asynccontextmanager
async def node_in(folder: Path, disk: Disk, *, waits: bool = False) -> AsyncIterator[Node]:
    """`waits`: writes of the state file wait for `disk.go`."""
    if not waits:
        disk.go.set()
    async with live_node(folder) as node:
        yield capable(node)


async def until(condition: Callable[[], bool]) -> None:
    """And then three rounds of the event loop."""
    await eventually(condition)
    for _ in range(3):
        await asyncio.sleep(0)


def written(folder: Path) -> list[str]:
    """Key spaces in the state file, with their number of sketches, such as "m 1"."""
    return [
        f"{known.key_space.model} {len(known.sketches)}"
        for known in read_state(folder / "arena" / "state.json").key_spaces
    ]


async def test_all_that_open_wait_for_the_write(tmp_path: Path, disk: Disk) -> None:
    async with node_in(tmp_path, disk, waits=True) as node:
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
        # The key space is known, so nothing is written.
        await node.sessions.open("e", "rank", SPACE, "test", (KIND,))
        assert disk.num_writes <= 2


async def test_leaving_client_stops_no_write(tmp_path: Path, disk: Disk) -> None:
    async with node_in(tmp_path, disk, waits=True) as node:
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


async def test_failed_write_is_retried_with_next_session(tmp_path: Path, disk: Disk) -> None:
    async with node_in(tmp_path, disk) as node:
        disk.error = OSError(28, "No space left on device")
        await node.sessions.open("e", "rank", SPACE, "test")
        disk.error = None
        await node.sessions.open("e", "rank", SPACE, "test")
        assert written(tmp_path) == ["m 0"]


async def leave_blocks(node: Node, space: KeySpace) -> None:
    session = await node.sessions.open("e", "tool", space, "test")
    number, run = session.record.number, [Run(0, words_of(range(3)))]
    begin_store(node.core, number, "t", "l", run, 0, 0.0, 0.0)
    node.core.end_store(number, "t", True, 0.0)
    await node.sessions.close(session)


async def test_forgetting_is_written_and_read_when_behind(tmp_path: Path, disk: Disk) -> None:
    """The oldest unused key space goes although it has blocks. Readers of events get its clear
    event."""
    async with node_in(tmp_path, disk) as node:
        node.core.catalog.max_of_tenant = 2
        spaces = [replace(SPACE, model=name) for name in "mnop"]
        with capability_of(node, EventsCapability).hub.feeds.reader() as feed:
            await leave_blocks(node, spaces[0])
            for space in spaces[1:3]:
                await node.sessions.open("e", "tool", space, "test")
            assert written(tmp_path) == ["n 0", "o 0"]
            known = read_state(tmp_path / "arena" / "state.json").key_spaces
            assert [one.number for one in known] == [2, 3]
            with pytest.raises(HotKVError, match="close some"):
                await node.sessions.open("e", "tool", spaces[3], "test")
            told = [item.event for item in (await feed.get(100))[0]]
        cleared = [event for event in told if isinstance(event, KeySpaceCleared)]
        assert [event.key_space_id for event in cleared] == [1, 2, 1, 3]
        # Removals may come after the clear event, but the last event is a clear.
        assert told[-1] is cleared[-1]
        node.core.check_invariants()


async def test_waiting_together_opens_no_more_than_allowed(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three open. A fourth is refused at once. Another tenant's session does not count."""
    async with node_in(tmp_path, disk) as node:
        await node.sessions.open("e", "tool", SPACE, "test")
        go, forgets = asyncio.Event(), list[object]()

        async def forget_for(*what: object) -> None:
            forgets.append(what)
            await go.wait()

        monkeypatch.setattr(node.removals, "forget_for", forget_for)
        words = ("e", "tool", replace(SPACE, tenant="t"), "test")
        open_one = partial(node.sessions.open, *words, max_of_tenant=2)
        opens = [asyncio.create_task(open_one()) for _ in range(3)]
        await until(lambda: len(forgets) == 3)
        go.set()
        *_, late = await asyncio.gather(*opens, return_exceptions=True)
        with pytest.raises(HotKVError, match="close some first") as refused:
            await open_one()
        assert str(late) == str(refused.value)
        assert len(node.sessions) == len(forgets) == 3

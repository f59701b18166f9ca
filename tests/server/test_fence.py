"""Fences on the server's side: a store that could not be revoked is refused or not kept, and no
page takes another's place."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hotkv_proto.blocks import BlockResult
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.layout import FENCE_HANDLE, FENCE_WORDS, Layout, MemoryHandle, PageTensor
from hotkv_proto.table import hash_words
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies import LRU
from hotkv_server.cache.values import CoreConfig, Run
from hotkv_server.dataplane.host import HostCopyEngine
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.node.node import Node
from hotkv_server.node.session import LiveSession

KEY_SPACE = KeySpace("m", "w", "bf16", (GroupSpec(GroupKind.FULL_ATTENTION, 16, (4096,)),), 16)
LAYOUT = Layout(0, 1, (MemoryHandle("kv", 4096),), (PageTensor(0, "kv", 0, 4096, 4096, 0),))
FENCE_BYTES = 4 * FENCE_WORDS


def memory_file(num_bytes: int) -> int:
    fd = os.memfd_create("test")
    if num_bytes:
        os.posix_fallocate(fd, 0, num_bytes)
    return fd


class Place:
    """A node in this process, and a session with memory of one block."""

    def __init__(self, folder: Path) -> None:
        self.memory = NodeMemory.open(folder / "arena", 1 << 20, 1 << 16, 64, 1, prefault=False)
        self.copies = HostCopyEngine(1)
        self.node = Node(
            CacheCore(CoreConfig(1 << 20, 1 << 16, 64), self.memory.table, LRU(64)),
            self.memory,
            self.copies,
        )

    async def open(self, fence_fd: int | None) -> LiveSession:
        session = await self.node.sessions.open("e", "worker", KEY_SPACE, "test")
        session.receive("kv", memory_file(4096))
        if fence_fd is not None:
            session.receive(FENCE_HANDLE, fence_fd)
        await self.node.sessions.register_memory(session, LAYOUT)
        return session

    async def store(self, session: LiveSession, fence_index: int) -> int:
        """Returns the result of one block's store."""
        name, run = os.urandom(4).hex(), Run(0, hash_words(os.urandom(32), 32))
        storing = await self.node.transfers.store(
            session, name, name, [run], [np.zeros(1, np.int64)], 5.0, fence_index=fence_index
        )
        end = await storing
        return int(end.results[0][0])

    async def refused(self, session: LiveSession, fence_index: int) -> str:
        """Returns the words of a refusal that changed nothing."""
        with pytest.raises(HotKVError) as raised:
            await self.store(session, fence_index)
        assert raised.value.reason is Reason.INVALID_FIELD and session.jobs == {}
        assert (len(self.node.core.leases), len(self.node.core.transfers)) == (0, 0)
        return raised.value.message


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.copies.close()
    made.memory.remove()


def test_a_fence_index_needs_a_fence(place: Place) -> None:
    async def scenario() -> None:
        session = await place.open(None)
        message = await place.refused(session, 5)
        assert (
            "fence_index is 5" in message
            and "linked no fence" in message
            and repr(FENCE_HANDLE) in message
        )
        assert await place.store(session, 0) == BlockResult.STORED
        await place.node.close()

    asyncio.run(scenario())


def test_a_fence_index_is_a_word_of_the_page(place: Place) -> None:
    async def scenario() -> None:
        session = await place.open(memory_file(FENCE_BYTES))
        for index in (-1, FENCE_WORDS, 1 << 30):
            assert f"fence_index is {index}" in await place.refused(session, index)
        for index in (0, 1, FENCE_WORDS - 1):
            assert await place.store(session, index) == BlockResult.STORED
        await place.node.close()

    asyncio.run(scenario())


def test_a_revoked_store_is_not_kept(place: Place) -> None:
    async def scenario() -> None:
        fd = memory_file(FENCE_BYTES)
        session = await place.open(os.dup(fd))
        os.pwrite(fd, (1).to_bytes(4, "little"), 4 * 7)
        assert [await place.store(session, index) for index in (6, 7, 8)] == [
            BlockResult.STORED,
            BlockResult.ABORTED,
            BlockResult.STORED,
        ]
        await place.node.close()
        os.close(fd)

    asyncio.run(scenario())


@pytest.mark.parametrize("num_bytes", [FENCE_BYTES - 1, 13, 12, 0])
def test_a_page_that_is_cut_short_after_the_copy_revokes(place: Place, num_bytes: int) -> None:
    """Also where the word itself is still there, and not set: the engine could have meant any."""

    async def scenario() -> None:
        fd = memory_file(FENCE_BYTES)
        session = await place.open(os.dup(fd))
        assert not session.is_revoked(3) and not session.is_revoked(0)
        os.truncate(fd, num_bytes)
        assert session.is_revoked(3) and not session.is_revoked(0)
        await place.node.close()
        os.close(fd)

    asyncio.run(scenario())


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_fence_that_is_cut_short_revokes_everything(place: Place, when: str) -> None:
    async def scenario() -> None:
        fd = memory_file(FENCE_BYTES)
        session = await place.open(os.dup(fd))
        if when == "before":
            os.truncate(fd, FENCE_BYTES - 1)
            assert "fence is shorter" in await place.refused(session, 3)
        else:
            storing = asyncio.create_task(place.store(session, 3))
            await asyncio.sleep(0)
            os.truncate(fd, 0)
            assert await storing == BlockResult.ABORTED
        assert await place.store(session, 0) == BlockResult.STORED
        await place.node.close()
        os.close(fd)

    asyncio.run(scenario())


@pytest.mark.parametrize("num_bytes", [0, 1, FENCE_BYTES - 1])
def test_a_page_that_is_too_short_is_no_fence(place: Place, num_bytes: int) -> None:
    async def scenario() -> None:
        session = await place.node.sessions.open("e", "worker", KEY_SPACE, "test")
        fd = memory_file(num_bytes)
        with pytest.raises(ValueError, match=str(num_bytes)):
            session.receive(FENCE_HANDLE, fd)
        assert session.fence is None
        with pytest.raises(OSError):
            os.fstat(fd)
        await place.node.close()

    asyncio.run(scenario())


def test_a_fence_that_is_gone_by_the_commit_revokes(place: Place) -> None:
    async def scenario() -> None:
        session = await place.open(memory_file(FENCE_BYTES))
        storing = asyncio.create_task(place.store(session, 3))
        await asyncio.sleep(0)
        session.forget([FENCE_HANDLE])
        assert await storing == BlockResult.ABORTED
        await place.node.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("handle_id", ["kv", FENCE_HANDLE])
def test_a_second_descriptor_of_one_name_is_refused(place: Place, handle_id: str) -> None:
    """The first is what the server would go on reading, while the engine writes into the second."""

    async def scenario() -> None:
        session = await place.node.sessions.open("e", "worker", KEY_SPACE, "test")
        session.receive(handle_id, memory_file(FENCE_BYTES))
        with pytest.raises(HotKVError, match=handle_id) as raised:
            session.receive(handle_id, memory_file(FENCE_BYTES))
        assert raised.value.reason is Reason.DUPLICATE_ID
        session.forget([handle_id])
        session.receive(handle_id, memory_file(FENCE_BYTES))
        await place.node.close()

    asyncio.run(scenario())

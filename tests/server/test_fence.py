"""Tests fences on the server's side. A fence is a page with a word for each store, by which the
engine revokes it."""

import asyncio
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from hotkv_proto.blocks import BlockResult
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.layout import FENCE_HANDLE, FENCE_WORDS
from hotkv_server.memory.mapping import FileMapping
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.node import Node
from tests.server.nodes import SPACE, live_node, memory_file, store_in, worker
from tests.server.support import hashes

FENCE_BYTES = 4 * FENCE_WORDS


async def store(node: Node, session: LiveSession, fence_index: int) -> int:
    return (await store_in(node, session, hashes(1), fence_index=fence_index))[0]


async def refused(node: Node, session: LiveSession, fence_index: int) -> str:
    """The error's message. No lease or transfer may remain."""
    with pytest.raises(HotKVError) as raised:
        await store(node, session, fence_index)
    assert raised.value.reason is Reason.INVALID_FIELD and session.jobs == {}
    assert (len(node.core.leases), len(node.core.transfers)) == (0, 0)
    return raised.value.message


async def test_a_fence_index_needs_a_fence(tmp_path: Path) -> None:
    async with live_node(tmp_path) as node:
        session = await worker(node)
        message = await refused(node, session, 5)
        assert "fence_index is 5" in message
        assert "linked no fence" in message and repr(FENCE_HANDLE) in message
        assert await store(node, session, 0) == BlockResult.STORED


async def test_fence_index_names_the_revoking_word(tmp_path: Path) -> None:
    async with live_node(tmp_path) as node:
        fd = memory_file(FENCE_BYTES)
        session = await worker(node, fence_fd=os.dup(fd))
        for index in (-1, FENCE_WORDS, 1 << 30):
            assert f"fence_index is {index}" in await refused(node, session, index)
        os.pwrite(fd, (1).to_bytes(4, "little"), 4 * 7)
        for index in (0, 1, 6, 7, 8, FENCE_WORDS - 1):
            result = BlockResult.ABORTED if index == 7 else BlockResult.STORED
            assert await store(node, session, index) == result
        os.close(fd)


@pytest.mark.parametrize("num_bytes", [FENCE_BYTES - 1, 13, 12, 0])
async def test_a_page_that_is_cut_short_revokes(
    tmp_path: Path, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores count as revoked even if their words are in the part that is left."""
    async with live_node(tmp_path) as node:
        fd = memory_file(FENCE_BYTES)
        session = await worker(node, fence_fd=os.dup(fd))
        assert not session.is_revoked(3) and not session.is_revoked(0)
        with monkeypatch.context() as patched:
            # It is cut between the check of its length and the read.
            patched.setattr(FileMapping, "is_whole", Mock(side_effect=[True, False]))
            assert session.is_revoked(3)
        storing = asyncio.create_task(store(node, session, 3))
        await asyncio.sleep(0)
        os.truncate(fd, num_bytes)
        assert session.is_revoked(3) and not session.is_revoked(0)
        assert await storing == BlockResult.ABORTED
        assert "fence is shorter" in await refused(node, session, 3)
        assert await store(node, session, 0) == BlockResult.STORED
        os.close(fd)


async def test_store_whose_page_goes_is_not_kept(tmp_path: Path) -> None:
    async with live_node(tmp_path) as node:
        session = await worker(node, fence_fd=memory_file(FENCE_BYTES))
        storing = asyncio.create_task(store(node, session, 3))
        await asyncio.sleep(0)
        session.forget([FENCE_HANDLE])
        assert await storing == BlockResult.ABORTED


@pytest.mark.parametrize("handle_id", ["kv", FENCE_HANDLE])
async def test_a_second_descriptor_of_one_name_is_refused(tmp_path: Path, handle_id: str) -> None:
    """The server would read one file while the engine writes into the other. A forgotten name
    can be used again."""
    async with live_node(tmp_path) as node:
        session = await node.sessions.open("e", "worker", SPACE, "test")
        session.receive(handle_id, memory_file(FENCE_BYTES))
        with pytest.raises(HotKVError, match=handle_id) as raised:
            session.receive(handle_id, memory_file(FENCE_BYTES))
        assert raised.value.reason is Reason.DUPLICATE_ID
        session.forget([handle_id])
        session.receive(handle_id, memory_file(FENCE_BYTES))

"""Tests the page of ends: words by which a client learns that a transfer is done, before the
answer."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from hotkv_client import BlockRun, GroupHashes, LoadRun, TransferStatus
from hotkv_client.ends import Ends
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto.blocks import BlockResult
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.layout import DONE_FLAG, END_WORDS, ENDS_HANDLE
from hotkv_server.memory import mapping
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.node import Node
from tests.server.nodes import PAGE, live_node, memory_file, store_in, worker
from tests.server.support import block_ids, hashes
from tests.support.waiting import wait_for

Make = Callable[..., PagedEngine]
ENDS_BYTES = 8 * END_WORDS


def words(fd: int) -> list[int]:
    return [int(word) for word in np.frombuffer(os.pread(fd, ENDS_BYTES, 0), np.uint64)]


async def with_page(node: Node, **wanted: Any) -> tuple[LiveSession, int]:
    session, fd = await worker(node, 2), memory_file(ENDS_BYTES)
    session.receive(ENDS_HANDLE, os.dup(fd))
    session.wants_evictions = False
    return session, fd


async def test_a_store_of_all_blocks_writes_its_word(tmp_path: Path) -> None:
    async with live_node(tmp_path) as node:
        session, fd = await with_page(node)
        names = hashes(2)
        assert await store_in(node, session, names, end_index=3) == [BlockResult.STORED] * 2
        assert [at for at, word in enumerate(words(fd)) if word] == [3]
        assert words(fd)[3] == DONE_FLAG + 2 * PAGE
        # One is there already.
        told = await store_in(node, session, [names[0], *hashes(1)], end_index=4)
        assert told == [BlockResult.PRESENT, BlockResult.STORED] and not words(fd)[4]
        session.wants_evictions = True
        await store_in(node, session, hashes(1), end_index=5)
        assert not words(fd)[5], "a word would overtake the notices"
        os.close(fd)


@pytest.mark.parametrize("index", [-1, END_WORDS, 1 << 30])
async def test_a_word_beyond_the_page_is_refused(tmp_path: Path, index: int) -> None:
    async with live_node(tmp_path) as node:
        session, fd = await with_page(node)
        with pytest.raises(HotKVError, match=f"end_index is {index}") as raised:
            await store_in(node, session, hashes(1), end_index=index)
        assert raised.value.reason is Reason.INVALID_FIELD and not len(node.core.transfers)
        os.close(fd)


async def test_a_word_needs_a_page(tmp_path: Path) -> None:
    async with live_node(tmp_path) as node:
        session = await worker(node)
        with pytest.raises(HotKVError, match=f"no page of ends.*{ENDS_HANDLE}"):
            await store_in(node, session, hashes(1), end_index=1)
        with pytest.raises(HotKVError, match=ENDS_HANDLE) as raised:
            session.receive(ENDS_HANDLE, memory_file(ENDS_BYTES))
            session.receive(ENDS_HANDLE, memory_file(ENDS_BYTES))
        assert raised.value.reason is Reason.DUPLICATE_ID


async def test_a_page_that_is_cut_short_harms_nobody(tmp_path: Path) -> None:
    mapping.install_guard()
    async with live_node(tmp_path) as node:
        session, fd = await with_page(node)
        os.truncate(fd, 0)
        await store_in(node, session, hashes(1), end_index=1)
        assert await store_in(node, session, hashes(1), end_index=0) == [BlockResult.STORED]
        os.close(fd)


def test_a_poll_sees_an_end_before_its_answer(engine: Make, monkeypatch: Any) -> None:
    """Answers that may wait for others go with the next that may not."""
    one, names = engine(), hashes(4)
    session, ids = one.session, block_ids(4)
    connection = session._connection
    assert connection is not None
    answers = list[Any]()
    answered = connection._answered
    monkeypatch.setattr(connection, "_answered", answers.append)
    runs = [BlockRun(0, names[:3], ids[:3]), BlockRun(0, names[3:], ids[3:])]
    store = session.store("s", "s", runs, 20, polls=True)
    wait_for(store.done, "the word")
    result = store.result(0)
    assert result.status is TransferStatus.DONE and result.num_bytes > 0
    assert [one.tolist() for one in result.results] == [
        [BlockResult.STORED] * 3,
        [BlockResult.STORED],
    ]
    wait_for(lambda: answers, "the answer")
    (answer,) = answers
    assert answer.store.byte_count == result.num_bytes
    monkeypatch.setattr(connection, "_answered", answered)
    connection._answered(answer)
    assert session._connection is connection and connection.num_pending == 0
    assert connection._ends is not None and len(connection._ends._free) == END_WORDS - 1
    assert store.result(0) is result


def test_what_was_done_when_the_link_broke_is_done(engine: Make, monkeypatch: Any) -> None:
    one, names = engine(), hashes(2)
    session, ids = one.session, block_ids(2)
    connection = session._connection
    assert connection is not None
    session.store("s", "s", [BlockRun(0, names, ids)], 20).result(60)
    session.acquire("r", [GroupHashes(0, names)]).result(60)
    answers = list[Any]()
    monkeypatch.setattr(connection, "_answered", answers.append)
    load = session.load("l", "r", [LoadRun(0, np.arange(2, dtype=np.int32), ids)], 20, polls=True)
    wait_for(lambda: answers, "the answer")
    connection.end()
    assert load.result(0).status is TransferStatus.DONE


@given(st.lists(st.sampled_from(["take", "write", "give back"]), max_size=60))
@settings(max_examples=40, deadline=None)
def test_words_are_cleared_and_never_shared(steps: list[str]) -> None:
    ends = Ends()
    page = np.memmap(f"/proc/self/fd/{ends.fd}", np.uint64)
    model: dict[int, int | None] = {}
    for step in steps:
        if step == "take":
            index = ends.take()
            assert 0 < index < END_WORDS and index not in model
            model[index] = None
        elif model:
            index = next(iter(model))
            if step == "write":
                page[index] = DONE_FLAG + index
                model[index] = index
            else:
                ends.give_back(index)
                del model[index]
        assert {at: ends.done_bytes(at) for at in model} == model
    ends.close()


def test_without_a_free_word_a_transfer_has_none() -> None:
    ends = Ends()
    taken = {ends.take() for _ in range(END_WORDS - 1)}
    assert taken == set(range(1, END_WORDS)) and ends.take() == 0
    ends.give_back(0)
    assert ends.take() == 0
    ends.give_back(7)
    assert ends.take() == 7
    ends.close()

"""Tests the queue of messages to a session's client, and their order."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hotkv_proto.errors import HotKVError
from hotkv_proto.v1 import errors_pb2, session_pb2
from hotkv_server.cache.values import EvictionNotice
from hotkv_server.node.removals import NOTICE_BLOCKS
from hotkv_server.wire import session_stream as session_service
from hotkv_server.wire.guard.limits import Pace
from hotkv_server.wire.session_stream import SessionOutbox, SessionStream
from tests.server.nodes import SPACE, live_node

BOUNDS = {
    "OUTBOX_MESSAGES": 6,
    "OUTBOX_BYTES": 800,
    "UNREAD_ANSWERS": 4,
    "UNREAD_BYTES": 400,
    "KEPT_BYTES": 100,
}
STEPS = st.lists(st.sampled_from([0, 15, 96, 145, 394, 794, "read", "look"]), max_size=40)


@given(STEPS)
def test_client_that_does_not_read_loses_session(
    steps: list[int | str],
) -> None:
    """steps: "look" lets SLOW_READER_S pass; a number queues an answer with a text of this
    length."""
    ends, looks, handle = list[HotKVError](), list[Callable[[], None]](), mock.Mock()
    queued, num_ends, num_read = list[int](), 0, 0
    planned: int | None = None  # number of messages that were read when the next "look" was planned

    def is_much() -> bool:
        return len(queued) >= 4 or sum(queued) >= 400

    def later(after_s: float, look: Callable[[int], None], count: int) -> mock.Mock:
        looks.append(lambda: look(count))
        return handle

    async def run() -> None:
        nonlocal planned, num_ends, num_read
        reads, real = asyncio.Semaphore(0), asyncio.get_running_loop()
        loop = SimpleNamespace(create_future=real.create_future, call_later=later)

        async def write(message: session_pb2.ConnectResponse) -> None:
            await reads.acquire()

        outbox = SessionOutbox(write, ends.append)
        with mock.patch.object(asyncio, "get_running_loop", lambda: loop):
            sending, room = asyncio.create_task(outbox.send_all()), None
            for step in steps:
                if isinstance(step, int):
                    text = errors_pb2.ErrorDetail(message="x" * step)
                    message = session_pb2.ConnectResponse(error=text)
                    outbox.put(message)
                    is_full = len(queued) == 6
                    queued.extend([message.ByteSize()] * (not is_full))
                    if is_full or sum(queued) > 800:
                        num_ends += 1
                    elif planned is None and (sum(queued) > 100 or is_much()):
                        planned = num_read
                elif step == "read" and queued:
                    reads.release()
                    num_read += 1
                    del queued[0]
                elif step == "look" and planned is not None:
                    looks.pop()()
                    is_slow = sum(queued) > 100 or is_much()
                    num_ends += is_slow and planned == num_read
                    planned = num_read if is_slow and planned < num_read else None
                if room is None or room.done():
                    room = asyncio.create_task(outbox.room())
                for _ in range(4):
                    await asyncio.sleep(0)
                assert room.done() == (not is_much())
                assert (len(ends), len(looks)) == (num_ends, planned is not None)
                assert repr(outbox) == f"SessionOutbox({len(queued)} messages, {sum(queued)} bytes)"
        outbox.close()
        assert handle.cancel.called == (planned is not None)
        outbox.put(session_pb2.ConnectResponse())
        sending.cancel()
        outbox.drop()
        assert repr(outbox) == "SessionOutbox(0 messages, 0 bytes)"

    with mock.patch.multiple(session_service, **BOUNDS):
        asyncio.run(run())


async def test_session_hears_opening_then_notices_then_answers(
    tmp_path: Path,
) -> None:
    """The evictions come while the session opens."""
    written: list[session_pb2.ConnectResponse] = []

    async def write(message: session_pb2.ConnectResponse) -> None:
        written.append(message)

    async def requests() -> AsyncIterator[session_pb2.ConnectRequest]:
        yield session_pb2.ConnectRequest(request_id=1, ping=session_pb2.Ping())

    async with live_node(tmp_path) as node:
        session = await node.sessions.open("e", "tool", SPACE, "test")
        sizes = [NOTICE_BLOCKS // 2, NOTICE_BLOCKS // 2, 1, NOTICE_BLOCKS - 1, 2]
        for number, size in enumerate(sizes):
            session.notify(EvictionNotice(1, 0, np.full((size, 8), number, np.uint32)))
        stream = SessionStream(node, session, write, Pace(1e6))
        opened = session_pb2.SessionOpened(session_id="s")
        await stream.run(requests(), session_pb2.ConnectResponse(session_opened=opened))
    first, *notices, last = written
    assert (first.WhichOneof("body"), last.request_id) == ("session_opened", 1)
    groups = [list(message.eviction_notice.groups) for message in notices]
    assert [[len(one.hashes) // 32 for one in some] for some in groups] == [
        sizes[:2], sizes[2:4], sizes[4:]
    ]  # fmt: skip
    assert [one.hashes[0] for some in groups for one in some] == [*range(5)]

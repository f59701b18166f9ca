"""The stream of one open session: requests in, answers and notices out.

Always true: requests are taken one at a time, and no more of them while the client has many answers
to read. No answer overtakes a notice from before.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from hotkv_proto.errors import HotKVError
from hotkv_proto.messages.cache import packed_words
from hotkv_proto.v1 import cache_pb2, session_pb2
from hotkv_server.cache.values import EvictionNotice
from hotkv_server.node.effects import NOTICE_BLOCKS
from hotkv_server.node.node import Node
from hotkv_server.node.session import OUTBOX_MESSAGES, LiveSession, Notice, unread
from hotkv_server.wire.guard.throttle import Pace
from hotkv_server.wire.session.calls import SessionCalls

log = logging.getLogger(__name__)

LAST_WORDS_S = 2.0
NOTICE_PAUSE_S = 0.02
"""Between two messages with notices that nothing else calls for."""


UNREAD_ANSWERS, UNREAD_BYTES = 256, 4 << 20
"""A client that has so many to read, or so much, is asked for nothing more until it has read
some."""
KEPT_BYTES, SLOW_READER_S = 64 << 10, 5.0
"""A client that leaves more than this unread, and reads none of it for so long, is closed."""
OUTBOX_BYTES = 32 << 20


class SessionOutbox:
    """What a session's client has yet to read. `write`: sends a message, and waits while the client
    reads too slowly. `on_end`: ends the session, given why.

    Always true: the outbox is bounded, by messages and by bytes. A client that lets it fill up, or
    leaves much in it and reads none of that for some seconds, is told to go.
    """

    def __init__(
        self,
        write: Callable[[session_pb2.ConnectResponse], Awaitable[None]],
        on_end: Callable[[HotKVError], None],
    ) -> None:
        self._write = write
        self._on_end = on_end
        self._queue: asyncio.Queue[session_pb2.ConnectResponse] = asyncio.Queue(OUTBOX_MESSAGES)
        self._unread_bytes = 0
        self._num_written = 0
        self._watch: asyncio.TimerHandle | None = None
        self._was_read = asyncio.Event()

    def __repr__(self) -> str:
        return f"SessionOutbox({self._queue.qsize()} messages, {self._unread_bytes} bytes)"

    def put(self, message: session_pb2.ConnectResponse) -> None:
        """Adds a message; ends the session if it is one too many."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self._on_end(unread())
            return
        self._unread_bytes += message.ByteSize()
        if self._unread_bytes > OUTBOX_BYTES:
            self._on_end(unread())
        elif self._watch is None and (self._unread_bytes > KEPT_BYTES or self._has_much()):
            self._look_later()

    async def room(self) -> None:
        """Waits until the client has so little to read that it may ask for more."""
        while self._has_much():
            self._was_read.clear()
            await self._was_read.wait()

    async def send_all(self) -> None:
        """Writes messages for ever, in order."""
        while True:
            message = await self._queue.get()
            await self._write(message)
            self._unread_bytes -= message.ByteSize()
            self._num_written += 1
            self._queue.task_done()
            self._was_read.set()
            # The next one may be long in coming.
            del message

    async def drained(self, timeout_s: float) -> None:
        """Waits until all is written, or the time is up."""
        await asyncio.wait({asyncio.create_task(self._queue.join())}, timeout=timeout_s)

    def close(self) -> None:
        """Stops watching the client."""
        if self._watch is not None:
            self._watch.cancel()

    def _has_much(self) -> bool:
        return self._queue.qsize() >= UNREAD_ANSWERS or self._unread_bytes >= UNREAD_BYTES

    def _look_later(self) -> None:
        self._watch = asyncio.get_running_loop().call_later(
            SLOW_READER_S, self._judge, self._num_written
        )

    def _judge(self, num_written: int) -> None:
        """Ends the session if its client has read nothing since so much was written, and much
        waits."""
        self._watch = None
        if self._unread_bytes > KEPT_BYTES or self._has_much():
            if self._num_written == num_written:
                self._on_end(unread())
            else:
                self._look_later()


class SessionStream:
    """See the module."""

    def __init__(self, node: Node, session: LiveSession, context: Any, pace: Pace) -> None:
        self._session = session
        self._outbox = SessionOutbox(context.write, self._end)
        self._calls = SessionCalls(node, session, pace, self._send)
        self._ended = asyncio.Event()
        self._why: HotKVError | None = None
        self._has_logged_refusal = False
        session.on_end = self._end

    async def run(
        self,
        requests: AsyncIterator[session_pb2.ConnectRequest],
        opened: session_pb2.ConnectResponse,
    ) -> HotKVError | None:
        """Serves the session until the client or the server ends it; returns why the server did."""
        self._send(opened)
        reader = asyncio.create_task(self._read(requests))
        endings = {
            reader,
            asyncio.create_task(self._outbox.send_all()),
            asyncio.create_task(self._ended.wait()),
        }
        notices = asyncio.create_task(self._forward_notices())
        try:
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                # What is on its way is still sent, to a client that reads.
                await self._outbox.drained(LAST_WORDS_S)
        finally:
            self._outbox.close()
            for task in (*endings, notices):
                task.cancel()
            await asyncio.gather(*endings, notices, return_exceptions=True)
        return self._why

    async def _read(self, requests: AsyncIterator[session_pb2.ConnectRequest]) -> None:
        while True:
            # Before a message is taken: it may be large.
            await self._outbox.room()
            request = await anext(requests, None)
            if request is None:
                return
            self._session.heard_s = time.monotonic()
            try:
                response = await self._calls.handle(request)
            except Exception as error:  # noqa: BLE001 The edge of the stream: every failure is an answer.
                response = self._calls.refused(error)
                if not request.request_id and not self._has_logged_refusal:
                    self._has_logged_refusal = True
                    log.warning(
                        "refused without an answer session=%d: %s",
                        self._session.record.number,
                        response.error.message,
                    )
            if response is not None and request.request_id:
                response.request_id = request.request_id
                self._send(response)
            # The next one may be long in coming.
            del request, response

    def _end(self, why: HotKVError) -> None:
        self._why = self._why or why
        self._ended.set()

    def _send(self, message: session_pb2.ConnectResponse) -> None:
        """Sends an answer, after all notices from before."""
        if not self._session.notices.empty():
            self._send_notices([])
        self._outbox.put(message)

    async def _forward_notices(self) -> None:
        """Sends notices as they come. One store may evict blocks that many sessions know, so
        evictions of some milliseconds share a message."""
        while True:
            self._send_notices([await self._session.notices.get()])
            await asyncio.sleep(NOTICE_PAUSE_S)

    def _send_notices(self, notices: list[Notice]) -> None:
        """Sends these and all that wait, with those of evictions in few messages."""
        while not self._session.notices.empty():
            notices.append(self._session.notices.get_nowait())
        groups, num_blocks = list[cache_pb2.GroupHashes](), 0
        for notice in notices:
            if isinstance(notice, EvictionNotice):
                packed = packed_words(notice.hashes, self._session.key_space.hash_bytes)
                if groups and num_blocks + len(notice.hashes) > NOTICE_BLOCKS:
                    self._put_evicted(groups)
                    groups, num_blocks = [], 0
                groups.append(cache_pb2.GroupHashes(group_index=notice.group_index, hashes=packed))
                num_blocks += len(notice.hashes)
            else:
                drain = session_pb2.DrainNotice(deadline_ms=int(notice.deadline_s * 1000))
                self._outbox.put(session_pb2.ConnectResponse(drain_notice=drain))
        if groups:
            self._put_evicted(groups)

    def _put_evicted(self, groups: list[cache_pb2.GroupHashes]) -> None:
        notice = session_pb2.EvictionNotice(groups=groups)
        self._outbox.put(session_pb2.ConnectResponse(eviction_notice=notice))

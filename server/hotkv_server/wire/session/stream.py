"""The stream of one open session: requests in, answers and notices out.

Always true: requests are taken one at a time, and no more of them while the client has many answers
to read. No answer overtakes a notice from before.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from hotkv_proto.errors import HotKVError
from hotkv_proto.messages.cache import packed_words
from hotkv_proto.v1 import cache_pb2, session_pb2
from hotkv_server.cache.values import EvictionNotice
from hotkv_server.node.effects import NOTICE_BLOCKS
from hotkv_server.node.node import Node
from hotkv_server.node.session import LiveSession, Notice
from hotkv_server.wire.guard.throttle import Pace
from hotkv_server.wire.session.calls import SessionCalls
from hotkv_server.wire.session.outbox import SessionOutbox

log = logging.getLogger(__name__)

LAST_WORDS_S = 2.0
NOTICE_PAUSE_S = 0.02
"""Between two messages with notices that nothing else calls for."""


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

"""Serves SparseService: calls for sequences, and streams of selections.

A stream selects in order and reads its next request only after the answer is sent, so nothing is
selected for a client that does not read. A refusal is an answer; the stream goes on. It belongs
to the first open session that a request names, and ends with it, or if none is named within
FIRST_REQUEST_TIMEOUT_S.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

from hotkv_proto.errors import HotKVError, Reason, invalid
from hotkv_proto.messages.errors import error_detail
from hotkv_proto.v1 import sparse_pb2, sparse_pb2_grpc
from hotkv_server.cache.room.shares import FairBound
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.node import Node
from hotkv_server.sparse import calls
from hotkv_server.sparse.drive import SparseDecode, spec_of
from hotkv_server.wire.edge import MAX_SELECT_STREAMS
from hotkv_server.wire.errors import abort, answer, as_refusal
from hotkv_server.wire.guard.interceptor import Malformed
from hotkv_server.wire.guard.limits import Pace, SessionlessCalls

FIRST_REQUEST_TIMEOUT_S = 10.0
IDLE_CHECK_S = 5.0
"""Interval at which an idle stream looks whether its session is open."""


class SparseService(sparse_pb2_grpc.SparseServiceServicer):
    def __init__(
        self, node: Node, sparse: SparseDecode, pace: Pace, guests: SessionlessCalls
    ) -> None:
        self._node = node
        self._sparse = sparse
        self._pace = pace
        self._guests = guests
        self._streams = FairBound(MAX_SELECT_STREAMS)
        self._numbers = itertools.count()

    async def CreateSequence(
        self, request: sparse_pb2.CreateSequenceRequest, context: Any
    ) -> sparse_pb2.CreateSequenceResponse:
        async def call() -> sparse_pb2.CreateSequenceResponse:
            session = self._node.sessions.get(request.session_id)
            return await calls.create_sequence(self._sparse, session, request)

        return await answer(self._node, context, call)

    async def AppendBlocks(
        self, request: sparse_pb2.AppendBlocksRequest, context: Any
    ) -> sparse_pb2.AppendBlocksResponse:
        async def call() -> sparse_pb2.AppendBlocksResponse:
            session = self._node.sessions.get(request.session_id)
            return await calls.append_blocks(self._sparse, session, request)

        return await answer(self._node, context, call)

    async def DeleteSequence(
        self, request: sparse_pb2.DeleteSequenceRequest, context: Any
    ) -> sparse_pb2.DeleteSequenceResponse:
        async def call() -> sparse_pb2.DeleteSequenceResponse:
            session = self._node.sessions.get(request.session_id)
            return await calls.delete_sequence(self._sparse, session, request)

        return await answer(self._node, context, call)

    async def SelectBlocks(
        self, request_iterator: AsyncIterator[sparse_pb2.SelectBlocksRequest], context: Any
    ) -> AsyncIterator[sparse_pb2.SelectBlocksResponse]:
        session: LiveSession | None = None
        request: Any = None
        try:
            with self._guests.stay():
                deadline_s = time.monotonic() + FIRST_REQUEST_TIMEOUT_S
                while session is None:
                    request = await _first(request_iterator, deadline_s)
                    try:
                        session = await self._session(request)
                    except Exception as error:  # noqa: BLE001 The edge of the stream: every failure is an answer.
                        yield self._refused(error, context)
            owner = session.record.owner
            if not self._streams.room(owner):
                raise HotKVError(
                    Reason.OVERLOADED, self._streams.refusal(owner, "streams of selections")
                )
        except StopAsyncIteration:
            return
        except Exception as error:  # noqa: BLE001 The edge of the stream: every failure is an answer.
            await abort(context, as_refusal(self._node, error, f"peer={context.peer()}"))
        assert session is not None, "abort raises"
        self._streams.take(owner, 1)
        number = next(self._numbers)
        try:
            async for asked in _while_open(request, request_iterator, session):
                try:
                    response = await self._select(asked, number)
                except Exception as error:  # noqa: BLE001 The edge of the stream: every failure is an answer.
                    response = self._refused(error, context)
                yield response
        finally:
            self._streams.give(owner, 1)

    def _refused(self, error: Exception, context: Any) -> sparse_pb2.SelectBlocksResponse:
        return sparse_pb2.SelectBlocksResponse(
            error=error_detail(as_refusal(self._node, error, f"peer={context.peer()}"))
        )

    async def _session(self, request: sparse_pb2.SelectBlocksRequest | Malformed) -> LiveSession:
        if isinstance(request, Malformed):
            await self._pace.turn()
            raise request.error()
        return self._node.sessions.get(request.session_id)

    async def _select(
        self, request: sparse_pb2.SelectBlocksRequest | Malformed, stream: int
    ) -> sparse_pb2.SelectBlocksResponse:
        session = await self._session(request)
        assert not isinstance(request, Malformed)
        sparse = self._sparse
        sequence = sparse.sequences.get(session.record.number, request.sequence_id)
        asked = calls.select_request(request, spec_of(sequence))
        selected = await sparse.selections.select(session, sequence, asked, stream)
        return calls.select_response(selected)


async def _first(requests: AsyncIterator[Any], deadline_s: float) -> Any:
    """Next request of a stream without a session. Raises StopAsyncIteration at its end,
    HotKVError at the deadline."""
    try:
        return await asyncio.wait_for(anext(requests), max(0.0, deadline_s - time.monotonic()))
    except asyncio.TimeoutError:
        raise invalid(
            f"no request of a session has come within {FIRST_REQUEST_TIMEOUT_S:g} s; open the "
            "stream with the first selection"
        ) from None


async def _while_open(
    first: Any, requests: AsyncIterator[Any], session: LiveSession
) -> AsyncIterator[Any]:
    """Yields requests until the client ends the stream or the session closes. One that arrives
    while it closes is yielded too, for the caller to refuse."""
    yield first
    is_open = True
    while is_open:
        request = asyncio.ensure_future(anext(requests))
        try:
            while not (await asyncio.wait({request}, timeout=IDLE_CHECK_S))[0]:
                if session.closing:
                    return
            yield request.result()
        except StopAsyncIteration:
            return
        finally:
            request.cancel()
        is_open = not session.closing

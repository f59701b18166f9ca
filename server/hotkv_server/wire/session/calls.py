"""The calls of one session's stream: which function serves which message, and when it is answered.

Always true: a call that names a request id is answered once. Transfers are answered when they end,
and leases and residencies whose blocks are compared with their check values first when that is
done; all others at once.
"""

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.messages.cache import load_response, store_response
from hotkv_proto.messages.errors import error_detail
from hotkv_proto.messages.layout import read_device_order, read_layout
from hotkv_proto.messages.session import memory_registered_message
from hotkv_proto.v1 import session_pb2
from hotkv_server.node.node import Node
from hotkv_server.node.session import LiveSession
from hotkv_server.node.transfers import TransferEnd
from hotkv_server.wire import calls
from hotkv_server.wire.edge import calls_of
from hotkv_server.wire.errors import as_refusal
from hotkv_server.wire.guard.throttle import Pace


class SessionCalls:
    """See the module. `send`: for answers that come later."""

    def __init__(
        self,
        node: Node,
        session: LiveSession,
        pace: Pace,
        send: Callable[[session_pb2.ConnectResponse], None],
    ) -> None:
        self._node = node
        self._session = session
        self._pace = pace
        self._send = send
        self._traceable = calls_of(node)
        self._of_capabilities = {
            body: call for one in node.capabilities for body, call in one.session_calls().items()
        }

    def refused(self, error: Exception) -> session_pb2.ConnectResponse:
        """The answer to a call that failed."""
        return session_pb2.ConnectResponse(
            error=error_detail(as_refusal(self._node, error, self._session.name))
        )

    async def handle(
        self, request: session_pb2.ConnectRequest
    ) -> session_pb2.ConnectResponse | None:
        """Serves a request; None if it is answered later, or not at all. Raises whatever the call
        fails with."""
        node, session = self._node, self._session
        match request.WhichOneof("body"):
            case "lookup":
                found = self._traceable.lookup(node, session, request.lookup)
                if not isinstance(found, asyncio.Task):
                    return session_pb2.ConnectResponse(lookup=found)
                found.add_done_callback(partial(self._answer_task, request.request_id, "lookup"))
                return None
            case "acquire_lease":
                acquired = self._traceable.acquire(node, session, request.acquire_lease)
                if not isinstance(acquired, asyncio.Task):
                    return session_pb2.ConnectResponse(acquire_lease=acquired)
                acquired.add_done_callback(
                    partial(self._answer_task, request.request_id, "acquire_lease")
                )
                return None
            case "reserve_blocks":
                return session_pb2.ConnectResponse(
                    reserve_blocks=await calls.reserve(node, session, request.reserve_blocks)
                )
            case "release_lease":
                return session_pb2.ConnectResponse(
                    release_lease=calls.release(node, session, request.release_lease)
                )
            case "load":
                load = self._traceable.load(node, session, request.load)
                # What answers a transfer does not keep its message.
                load.add_done_callback(partial(self._answer_load, request.request_id))
                return None
            case "store":
                store = await self._traceable.store(node, session, request.store)
                groups = [run.group_index for run in request.store.runs]
                store.add_done_callback(partial(self._answer_store, request.request_id, groups))
                return None
            case "cancel_transfer":
                return session_pb2.ConnectResponse(
                    cancel_transfer=calls.cancel(node, session, request.cancel_transfer)
                )
            case "report_use":
                await calls.report_use(node, session, request.report_use)
                return None
            case "flush":
                return session_pb2.ConnectResponse(flushed=await calls.flush(node, session))
            case "ping":
                return session_pb2.ConnectResponse(pong=session_pb2.Pong())
            case "register_memory":
                memory = request.register_memory
                taken = await node.sessions.register_memory(
                    session,
                    read_layout(memory.layout),
                    read_device_order(memory.order),
                )
                return session_pb2.ConnectResponse(
                    memory_registered=memory_registered_message(*taken)
                )
            case "malformed":
                raise await self._slowed(request.error())
            case "open_session":
                raise HotKVError(
                    Reason.INVALID_FIELD,
                    "open_session was sent twice; open another stream for another session",
                )
            case body if (call := self._of_capabilities.get(body or "")) is not None:
                assert body is not None
                return await self._served(request, body, call(session, getattr(request, body)))
            case _:
                raise HotKVError(Reason.INVALID_FIELD, "body is empty or of a newer protocol")

    async def _served(
        self, request: session_pb2.ConnectRequest, body: str, answer: Any
    ) -> session_pb2.ConnectResponse | None:
        """The answer of a capability's call; None if it comes later, or never."""
        if isinstance(answer, asyncio.Task):
            answer.add_done_callback(partial(self._answer_task, request.request_id, body))
            return None
        if inspect.isawaitable(answer):
            answer = await answer
        return None if answer is None else session_pb2.ConnectResponse(**{body: answer})

    async def _slowed(self, error: HotKVError) -> HotKVError:
        """The error, when it may be answered."""
        await self._pace.turn()
        return error

    def _answer_task(self, request_id: int, body: str, done: "asyncio.Task[Any]") -> None:
        """Sends what a task has come to, as the field `body` of the answer."""
        if done.cancelled():
            return
        try:
            response = session_pb2.ConnectResponse(**{body: done.result()})
        except Exception as error:  # noqa: BLE001 The edge of the stream: every failure is an answer.
            response = self.refused(error)
        response.request_id = request_id
        self._send(response)

    def _answer_load(self, request_id: int, done: "asyncio.Future[TransferEnd]") -> None:
        if not done.cancelled():
            answer = load_response(done.result())
            self._send(session_pb2.ConnectResponse(request_id=request_id, load=answer))

    def _answer_store(
        self, request_id: int, groups: list[int], done: "asyncio.Future[TransferEnd]"
    ) -> None:
        if not done.cancelled():
            answer = store_response(done.result(), groups)
            self._send(session_pb2.ConnectResponse(request_id=request_id, store=answer))

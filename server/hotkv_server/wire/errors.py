"""Runs calls, and turns their errors into gRPC errors. Each refusal is counted by reason;
refusals for lack of rights are logged too, at a bounded rate, so that a refused client can't
fill the disk."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import Message

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.messages.errors import STATUS_KEY, error_status
from hotkv_proto.versions import MAX_MESSAGE_BYTES
from hotkv_server.logs import Throttle
from hotkv_server.node.broadcast import Feeds, Measured
from hotkv_server.node.node import Node

log = logging.getLogger(__name__)
log.addFilter(Throttle())
rights_log = logging.getLogger(f"{__name__}.rights")

CODES: dict[Reason, grpc.StatusCode] = {
    Reason.INVALID_FIELD: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.INVALID_HASH: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.INVALID_LAYOUT: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.UNKNOWN_SESSION: grpc.StatusCode.NOT_FOUND,
    Reason.UNKNOWN_LEASE: grpc.StatusCode.NOT_FOUND,
    Reason.UNKNOWN_KEY_SPACE: grpc.StatusCode.NOT_FOUND,
    Reason.UNKNOWN_HANDLE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.FOREIGN_LEASE: grpc.StatusCode.PERMISSION_DENIED,
    Reason.NOT_ALLOWED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.DUPLICATE_ID: grpc.StatusCode.ALREADY_EXISTS,
    Reason.NO_MEMORY_REGISTERED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.VERSION_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
    Reason.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Reason.NO_ROOM_FOR_RESIDENCY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.RESIDENCY_TOO_LARGE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.UNKNOWN_RESIDENCY: grpc.StatusCode.NOT_FOUND,
}
"""A test proves that every `Reason` is listed."""

ABOUT_RIGHTS = frozenset(
    {
        Reason.UNAUTHENTICATED,
        Reason.NOT_ALLOWED,
        Reason.FOREIGN_LEASE,
        Reason.UNKNOWN_SESSION,
        Reason.UNKNOWN_KEY_SPACE,
        Reason.UNKNOWN_HANDLE,
    }
)
"""Refusals for lack of rights. Each is logged with the peer's identity."""

Answer = TypeVar("Answer", bound=Message)


rights_log.addFilter(Throttle())


def _is_of_the_server(record: logging.LogRecord) -> bool:
    """A filter for gRPC's log: drops records which only say that a client left before its
    answer."""
    return not (
        record.exc_info
        and record.exc_info[0] is not None
        and record.exc_info[0].__name__ == "ExecuteBatchError"
    )


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_of_the_server)


def as_refusal(node: Node, error: Exception, who: str) -> HotKVError:
    """A HotKVError stays as it is; any other exception is a defect of the server and becomes
    INTERNAL. Counts the error. Logs defects and ABOUT_RIGHTS. `who`: the caller, for the log."""
    if isinstance(error, HotKVError):
        refusal = error
    else:
        log.error("a call failed in the server: %s", who, exc_info=error)
        node.health.note("a call", error)
        refusal = HotKVError(
            Reason.INTERNAL, f"the server failed: {type(error).__name__}; its log says more"
        )
    node.refusals[refusal.reason] += 1
    if refusal.reason in ABOUT_RIGHTS:
        rights_log.warning("refused %s: %s", who, refusal)
    return refusal


async def abort(context: Any, error: HotKVError) -> NoReturn:
    """Ends a gRPC call with the error's code, its message, and its reason in a form for
    programs."""
    code = CODES[error.reason]
    status = error_status(error, code.value[0])
    trailers = ((STATUS_KEY, status.SerializeToString()),)
    await context.abort(code, error.message, trailers)
    raise AssertionError("abort returned")


async def answer(node: Node, context: Any, call: Callable[[], Awaitable[Answer]]) -> Answer:
    """Serves a unary call; ends it with the code of what `call` raises."""
    try:
        return await call()
    except Exception as error:  # noqa: BLE001 The client gets every failure as an answer.
        await abort(context, as_refusal(node, error, f"peer={context.peer()}"))


# The first answer of a stream is empty: it tells the client that reading has begun. A client
# that reads too slowly misses items and learns how many.


Item = TypeVar("Item", bound=Measured)
Part = TypeVar("Part", bound=Message)
Response = TypeVar("Response", bound=Message)

MAX_RESPONSE_ITEMS = 256
MAX_RESPONSE_BYTES = MAX_MESSAGE_BYTES - 16 * MAX_RESPONSE_ITEMS
"""Of the items in one answer, to each of which the message adds a few bytes."""


async def stream(
    context: Any,
    node: Node,
    key_space_id: int,
    feeds: Feeds[Item],
    message: Callable[[Item], Part | None],
    response: Callable[[list[Part], int], Response],
    first: Callable[[], AsyncIterator[Item]] | None = None,
) -> AsyncIterator[Response]:
    """Streams the items of a feed until the client ends the call. An unknown key space that is not
    0 ends it with UNKNOWN_KEY_SPACE.

    message: None for an item for which the client did not ask.
    response: makes an answer from messages and the number of lost items.
    first: items to send before the feed's, which is opened earlier, so that none is missed.
    """
    try:
        if key_space_id:
            node.core.key_space(key_space_id)
        with feeds.reader() as feed:
            yield response([], 0)
            if first is not None:
                async for item in first():
                    if (part := message(item)) is not None:
                        yield response([part], 0)
            while True:
                items, lost = await feed.get(MAX_RESPONSE_ITEMS)
                parts: list[Part] = []
                num_bytes = 0
                for part in filter(None, map(message, items)):
                    if num_bytes + part.ByteSize() > MAX_RESPONSE_BYTES and parts:
                        yield response(parts, 0)
                        parts, num_bytes = [], 0
                    parts.append(part)
                    num_bytes += part.ByteSize()
                if parts or lost:
                    yield response(parts, lost)
    except Exception as error:  # noqa: BLE001 The client gets every failure as an answer.
        await abort(context, as_refusal(node, error, f"peer={context.peer()}"))

"""Refusals on the wire: one table from reasons to canonical gRPC codes, and the trailers of failed
calls.

Each refusal is counted by reason, and logged if it is about rights. The lines of that log are
bounded: a client that is refused a thousand times a second fills no disk.
"""

import logging
import re
import time
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any as AnyType
from typing import NoReturn, TypeVar

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.v1 import (
    admin_pb2,
    cache_pb2,
    errors_pb2,
    events_pb2,
    hints_pb2,
    layout_pb2,
    residency_pb2,
    session_pb2,
    sparse_pb2,
)
from hotkv_server.node.node import Node
from hotkv_server.wire.guard.throttle import LineBound

log = logging.getLogger(__name__)
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
"""Total over `Reason`; a test proves it."""

STATUS_KEY = "grpc-status-details-bin"
"""Trailer with a google.rpc.Status, where every gRPC library looks for it."""
ERROR_INFO_URL = "type.googleapis.com/google.rpc.ErrorInfo"
ERROR_DOMAIN = "hotkv"
_PATH = re.compile(r"[a-z][a-z0-9_]*(\[\d+\])?(\.[a-z][a-z0-9_]*(\[\d+\])?)*(?![\w'])")
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
"""Reasons for which a peer without rights is refused; each is logged with the peer."""
MAX_LINES_PER_S = 50

Answer = TypeVar("Answer", bound=Message)


class _Throttle(logging.Filter):
    """Lets at most `lines_per_s` lines a second through."""

    def __init__(self, lines_per_s: int) -> None:
        super().__init__()
        self._bound = LineBound(lines_per_s)

    def filter(self, record: logging.LogRecord) -> bool:
        return self._bound.take(time.monotonic())


rights_log.addFilter(_Throttle(MAX_LINES_PER_S))


def _is_of_the_server(record: logging.LogRecord) -> bool:
    """Returns False for the tracebacks that gRPC logs if a client leaves while its answer is being
    written."""
    return not (
        record.exc_info
        and record.exc_info[0] is not None
        and record.exc_info[0].__name__ == "ExecuteBatchError"
    )


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_of_the_server)


def detail(error: HotKVError) -> errors_pb2.ErrorDetail:
    """The refusal on the wire."""
    return errors_pb2.ErrorDetail(
        reason=errors_pb2.ErrorReason.ValueType(int(error.reason)),
        message=error.message,
        field=field_at_fault(error.message),
        retryable=error.retryable,
    )


@cache
def _field_names() -> frozenset[str]:
    """Names of all fields of the wire, and of what stands for one of several."""
    files = (
        admin_pb2,
        cache_pb2,
        events_pb2,
        hints_pb2,
        layout_pb2,
        residency_pb2,
        session_pb2,
        sparse_pb2,
    )
    messages = [m for f in files for m in f.DESCRIPTOR.message_types_by_name.values()]
    return frozenset(
        item.name for message in messages for item in (*message.fields, *message.oneofs)
    )


def field_at_fault(message: str) -> str:
    """Path of the field that a refusal's sentence begins with; empty if it begins with none."""
    path = _PATH.match(message)
    if path is None or path[0].partition(".")[0].partition("[")[0] not in _field_names():
        return ""
    return path[0]


def status(error: HotKVError) -> errors_pb2.Status:
    """The refusal as a google.rpc.Status with one google.rpc.ErrorInfo."""
    told = detail(error)
    metadata = {"retryable": str(told.retryable).lower()}
    if told.field:
        metadata["field"] = told.field
    info = errors_pb2.ErrorInfo(reason=error.reason.name, domain=ERROR_DOMAIN, metadata=metadata)
    code: int = CODES[error.reason].value[0]
    return errors_pb2.Status(
        code=code,
        message=error.message,
        details=[Any(type_url=ERROR_INFO_URL, value=info.SerializeToString())],
    )


def as_refusal(node: Node, error: Exception, who: str) -> HotKVError:
    """Returns the refusal for any exception: itself, or INTERNAL for a defect, which is logged
    here. `who`: the caller, for the log."""
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


async def abort(context: AnyType, error: HotKVError) -> NoReturn:
    """Ends a call with the refusal's code, message and machine-readable reason."""
    trailers = ((STATUS_KEY, status(error).SerializeToString()),)
    await context.abort(CODES[error.reason], error.message, trailers)
    raise AssertionError("abort returned")


async def answer(node: Node, context: AnyType, call: Callable[[], Awaitable[Answer]]) -> Answer:
    """Runs a unary call; the edge where exceptions become codes."""
    try:
        return await call()
    except Exception as error:  # noqa: BLE001 The edge of unary calls: every failure is an answer.
        await abort(context, as_refusal(node, error, f"peer={context.peer()}"))

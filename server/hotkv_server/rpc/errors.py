"""One table from reasons to canonical gRPC codes, and how a refusal leaves the server: counted by
reason, and logged where it is about rights. Lines of that log are bounded, so that who is refused a
thousand times a second fills no disk.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import Message

from hotkv.errors import HotKVError, Reason
from hotkv.v1 import errors_pb2
from hotkv_server.runtime.node import Node

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
    Reason.UNKNOWN_TRANSFER: grpc.StatusCode.NOT_FOUND,
    Reason.UNKNOWN_HANDLE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.FOREIGN_LEASE: grpc.StatusCode.PERMISSION_DENIED,
    Reason.NOT_ALLOWED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.DUPLICATE_ID: grpc.StatusCode.ALREADY_EXISTS,
    Reason.NO_MEMORY_REGISTERED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.VERSION_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.CANCELLED: grpc.StatusCode.CANCELLED,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
    Reason.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
}
"""Total over `Reason`; a test proves it."""

METADATA_KEY = "hotkv-error-bin"
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
"""Reasons that a peer without rights runs into; each is logged with who it was."""
MAX_LINES_PER_S = 50

Answer = TypeVar("Answer", bound=Message)


class _Throttle(logging.Filter):
    """Lets so many lines a second through."""

    def __init__(self, lines_per_s: int) -> None:
        super().__init__()
        self._lines_per_s = lines_per_s
        self._second = 0
        self._lines = 0

    def filter(self, record: logging.LogRecord) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._lines = second, 0
        self._lines += 1
        return self._lines <= self._lines_per_s


rights_log.addFilter(_Throttle(MAX_LINES_PER_S))


def _is_of_the_server(record: logging.LogRecord) -> bool:
    """False for what gRPC logs, with a traceback each time, when a client has gone while its answer
    was being written."""
    return not (
        record.exc_info
        and record.exc_info[0] is not None
        and record.exc_info[0].__name__ == "ExecuteBatchError"
    )


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_of_the_server)


def detail(error: HotKVError) -> errors_pb2.ErrorDetail:
    """The refusal on the wire."""
    return errors_pb2.ErrorDetail(
        reason=errors_pb2.ErrorReason.ValueType(int(error.reason)), message=error.message
    )


def as_refusal(node: Node, error: Exception, who: str) -> HotKVError:
    """What to answer for any exception: refusals as they are, anything else is a defect, logged
    here. `who` asked, for the log."""
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
    """Ends a call with the refusal's code, message and machine-readable reason."""
    await context.abort(
        CODES[error.reason], error.message, ((METADATA_KEY, detail(error).SerializeToString()),)
    )
    raise AssertionError("abort returned")


async def answer(node: Node, context: Any, call: Callable[[], Awaitable[Answer]]) -> Answer:
    """Runs a unary call; the edge where exceptions become codes."""
    try:
        return await call()
    except Exception as error:  # noqa: BLE001 The edge of unary calls: every failure is an answer.
        await abort(context, as_refusal(node, error, f"peer={context.peer()}"))

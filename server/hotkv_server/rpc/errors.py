"""One table from reasons to canonical gRPC codes, and how a refusal leaves the server."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import Message

from hotkv.errors import HotKVError, Reason
from hotkv.v1 import errors_pb2

log = logging.getLogger(__name__)

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
}
"""Total over `Reason`; a test proves it."""

METADATA_KEY = "hotkv-error-bin"

Answer = TypeVar("Answer", bound=Message)


def detail(error: HotKVError) -> errors_pb2.ErrorDetail:
    """The refusal on the wire."""
    return errors_pb2.ErrorDetail(reason=errors_pb2.ErrorReason.ValueType(int(error.reason)), message=error.message)


def as_refusal(error: Exception) -> HotKVError:
    """What to answer for any exception: refusals as they are, anything else is a defect, logged here."""
    if isinstance(error, HotKVError):
        return error
    log.exception("a call failed in the server")
    return HotKVError(Reason.INTERNAL, f"the server failed: {type(error).__name__}; its log says more")


async def abort(context: Any, error: HotKVError) -> NoReturn:
    """Ends a call with the refusal's code, message and machine-readable reason."""
    await context.abort(CODES[error.reason], error.message, ((METADATA_KEY, detail(error).SerializeToString()),))
    raise AssertionError("abort returned")


async def answer(context: Any, call: Callable[[], Awaitable[Answer]]) -> Answer:
    """Runs a unary call; the edge where exceptions become codes."""
    try:
        return await call()
    except Exception as error:  # noqa: BLE001 The edge of unary calls: every failure is an answer.
        await abort(context, as_refusal(error))

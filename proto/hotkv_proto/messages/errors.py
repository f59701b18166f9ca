"""Converts refusals (`HotKVError`) to messages and back (errors.proto). In a stream a refusal is
an `ErrorDetail` in place of an answer; elsewhere a google.rpc.Status in the trailers."""

import re
from functools import cache

from google.protobuf.any_pb2 import Any

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.v1 import errors_pb2

STATUS_KEY = "grpc-status-details-bin"
"""Trailer with a google.rpc.Status that has a google.rpc.ErrorInfo."""
ERROR_INFO_URL = "type.googleapis.com/google.rpc.ErrorInfo"
ERROR_DOMAIN = "hotkv"
_PATH = re.compile(r"[a-z][a-z0-9_]*(\[\d+\])?(\.[a-z][a-z0-9_]*(\[\d+\])?)*(?![\w'])")


def error_detail(error: HotKVError) -> errors_pb2.ErrorDetail:
    return errors_pb2.ErrorDetail(
        reason=errors_pb2.ErrorReason.ValueType(int(error.reason)),
        message=error.message,
        field=field_at_fault(error.message),
        retryable=error.retryable,
    )


@cache
def _field_names() -> frozenset[str]:
    """Fields and oneofs of all messages."""
    # Only a server refuses; a client that reads refusals does without these imports.
    from hotkv_proto.v1 import (
        admin_pb2,
        cache_pb2,
        events_pb2,
        hints_pb2,
        layout_pb2,
        residency_pb2,
        session_pb2,
        sparse_pb2,
    )

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
    """The field's path with which the sentence begins, or empty."""
    path = _PATH.match(message)
    if path is None or path[0].partition(".")[0].partition("[")[0] not in _field_names():
        return ""
    return path[0]


def read_error_detail(detail: errors_pb2.ErrorDetail) -> HotKVError:
    known = int(detail.reason) in set(Reason)
    reason = Reason(int(detail.reason)) if known else None
    return _refusal(reason, detail.message, detail.retryable)


def _refusal(reason: Reason | None, message: str, retryable: bool) -> HotKVError:
    """reason: None for one of a newer server, which becomes OVERLOADED if retryable, otherwise
    INTERNAL."""
    return HotKVError(reason or (Reason.OVERLOADED if retryable else Reason.INTERNAL), message)


def error_status(error: HotKVError, code: int) -> errors_pb2.Status:
    """code: gRPC's, for the reason."""
    told = error_detail(error)
    metadata = {"retryable": str(told.retryable).lower()}
    if told.field:
        metadata["field"] = told.field
    info = errors_pb2.ErrorInfo(reason=error.reason.name, domain=ERROR_DOMAIN, metadata=metadata)
    return errors_pb2.Status(
        code=code,
        message=error.message,
        details=[Any(type_url=ERROR_INFO_URL, value=info.SerializeToString())],
    )


def read_error_status(packed: bytes) -> HotKVError | None:
    """None if it does not come from hotkv. Raises protobuf's DecodeError if the bytes are no
    such message."""
    told = errors_pb2.Status.FromString(packed)
    for detail_of in told.details:
        if detail_of.type_url == ERROR_INFO_URL:
            info = errors_pb2.ErrorInfo.FromString(detail_of.value)
            if info.domain == ERROR_DOMAIN:
                retryable = info.metadata.get("retryable") == "true"
                return _refusal(Reason.__members__.get(info.reason), told.message, retryable)
    return None

"""Turns the failures of gRPC's calls into HotKVErrors."""

import contextlib

import grpc
from google.protobuf.message import DecodeError

from hotkv_client.channels import why_unanswered
from hotkv_proto.errors import HotKVError, NoAnswerError, Reason
from hotkv_proto.messages.errors import STATUS_KEY, read_error_status


def as_error(error: grpc.RpcError) -> HotKVError:
    """Keeps the server's reason. Without a readable one: OVERLOADED for RESOURCE_EXHAUSTED,
    NoAnswerError if the server could not be reached or did not answer in time, else INTERNAL."""
    trailers = dict(getattr(error, "trailing_metadata", lambda: ())() or ())
    with contextlib.suppress(DecodeError):
        packed = trailers.get(STATUS_KEY, b"")
        if (said := read_error_status(packed)) is not None:
            return said
    code = getattr(error, "code", lambda: grpc.StatusCode.UNKNOWN)()
    details = getattr(error, "details", lambda: str(error))()
    why = why_unanswered(code, str(details))
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return NoAnswerError(why)
    is_overload = code == grpc.StatusCode.RESOURCE_EXHAUSTED
    return HotKVError(Reason.OVERLOADED if is_overload else Reason.INTERNAL, why)

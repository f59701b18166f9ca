"""Refusals as any gRPC client reads them: google.rpc.Status with a google.rpc.ErrorInfo."""

from typing import Any

import grpc
import pytest

from demo.processes import Server, runtime_folder
from hotkv_client.wire import answers as _answers
from hotkv_proto.errors import RETRYABLE, HotKVError, Reason
from hotkv_proto.messages.errors import STATUS_KEY, error_status, field_at_fault, read_error_detail
from hotkv_proto.v1 import cache_pb2, cache_pb2_grpc, errors_pb2
from hotkv_server.wire.errors import CODES

google = pytest.importorskip("google.rpc", reason="googleapis-common-protos is not installed")
from google.rpc import error_details_pb2, status_pb2  # noqa: E402


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_reads_as_googles_own_messages(reason: Reason) -> None:
    packed = error_status(
        HotKVError(reason, "lease_id is odd"), CODES[reason].value[0]
    ).SerializeToString()
    status = status_pb2.Status.FromString(packed)
    assert (status.code, status.message) == (CODES[reason].value[0], "lease_id is odd")
    info = error_details_pb2.ErrorInfo()
    assert len(status.details) == 1 and status.details[0].Unpack(info)
    assert (info.reason, info.domain) == (reason.name, "hotkv")
    retryable = "true" if RETRYABLE[reason] else "false"
    assert dict(info.metadata) == {"field": "lease_id", "retryable": retryable}


class FailedCall(grpc.RpcError):
    """A call as gRPC gives it to the client."""

    def __init__(self, *trailers: tuple[str, bytes]) -> None:
        self._trailers = trailers

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._trailers

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.ABORTED

    def details(self) -> str:
        return "details"


@pytest.mark.parametrize("reason", Reason)
def test_the_client_reads_the_trailer(reason: Reason) -> None:
    told = HotKVError(reason, "hashes is odd")
    trailer = (STATUS_KEY, error_status(told, 1).SerializeToString())
    read = _answers.as_error(FailedCall(("x", b""), trailer))
    assert (read.reason, read.message, read.retryable) == (reason, told.message, RETRYABLE[reason])


@pytest.mark.parametrize(
    ("retryable", "reason"), [(True, Reason.OVERLOADED), (False, Reason.INTERNAL)]
)
def test_a_reason_of_a_newer_server_keeps_its_advice(retryable: bool, reason: Reason) -> None:
    detail = errors_pb2.ErrorDetail(reason=99, message="new", retryable=retryable)  # type: ignore[arg-type]
    assert read_error_detail(detail).reason is reason
    info = error_details_pb2.ErrorInfo(
        reason="NEW", domain="hotkv", metadata={"retryable": str(retryable).lower()}
    )
    status = status_pb2.Status(message="new")
    status.details.add().Pack(info)
    read = _answers.as_error(FailedCall((STATUS_KEY, status.SerializeToString())))
    assert (read.reason, read.message) == (reason, "new")


def test_details_of_others_are_not_taken_for_hotkvs() -> None:
    status = status_pb2.Status(message="proxy")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="DRAINING", domain="a.proxy"))
    read = _answers.as_error(FailedCall((STATUS_KEY, status.SerializeToString())))
    assert (read.reason, read.message) == (Reason.INTERNAL, "ABORTED: details")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("lease_id 'x' is unknown", "lease_id"),
        ("layout.handles[3].handle_id is long", "layout.handles[3].handle_id"),
        ("key_space.groups[0].kind is 9", "key_space.groups[0].kind"),
        ("requests: 2000 with 5", "requests"),
        ("hashes and all: give one", "hashes"),
        ("body is empty", "body"),
        ("role is 7", "role"),
        ("the server failed", ""),
        ("1024 sessions are open", ""),
        ("lease_ids are odd", ""),
        ("", ""),
    ],
)
def test_the_field_is_what_the_sentence_begins_with(message: str, field: str) -> None:
    assert field_at_fault(message) == field


def test_a_failed_call_carries_both_trailers() -> None:
    with runtime_folder(64 << 20) as folder, Server(folder, "16MiB") as server:
        server.wait_ready()
        with grpc.insecure_channel(server.target) as channel:
            stub: Any = cache_pb2_grpc.CacheServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.Lookup(cache_pb2.LookupRequest(key_space_id=77))
    trailers = dict(caught.value.trailing_metadata())  # type: ignore[attr-defined]
    status = status_pb2.Status.FromString(trailers[STATUS_KEY])
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.metadata["field"]) == ("UNKNOWN_KEY_SPACE", "key_space_id")

"""Tests that any gRPC client can read a refusal, a google.rpc.Status."""

from typing import Any

import grpc
import pytest

from hotkv_client.wire import admin as _admin
from hotkv_client.wire.call_errors import as_error
from hotkv_proto.errors import RETRYABLE, HotKVError, Reason
from hotkv_proto.messages.errors import STATUS_KEY, error_status, field_at_fault, read_error_detail
from hotkv_proto.v1 import cache_pb2, errors_pb2, session_pb2, warm_pb2
from hotkv_server.wire.errors import CODES
from hotkv_server.wire.guard import audit

google = pytest.importorskip("google.rpc", reason="googleapis-common-protos is not installed")
from google.rpc import error_details_pb2, status_pb2  # noqa: E402


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_reads_as_googles_own_messages(reason: Reason) -> None:
    told, code = HotKVError(reason, "lease_id is odd"), CODES[reason].value[0]
    packed = error_status(told, code).SerializeToString()
    status = status_pb2.Status.FromString(packed)
    assert (status.code, status.message) == (code, "lease_id is odd")
    info = error_details_pb2.ErrorInfo()
    assert len(status.details) == 1 and status.details[0].Unpack(info)
    assert (info.reason, info.domain) == (reason.name, "hotkv")
    retryable = "true" if RETRYABLE[reason] else "false"
    assert dict(info.metadata) == {"field": "lease_id", "retryable": retryable}
    read = as_error(FailedCall(("x", b""), (STATUS_KEY, packed)))
    assert (read.reason, read.message, read.retryable) == (reason, told.message, RETRYABLE[reason])


class FailedCall(grpc.RpcError):
    def __init__(self, *trailers: tuple[str, bytes]) -> None:
        self.trailing_metadata = lambda: trailers
        self.code = lambda: grpc.StatusCode.ABORTED
        self.details = lambda: "details"


@pytest.mark.parametrize(
    ("retryable", "reason"), [(True, Reason.OVERLOADED), (False, Reason.INTERNAL)]
)
def test_newer_servers_reason_keeps_its_advice(retryable: bool, reason: Reason) -> None:
    detail = errors_pb2.ErrorDetail(reason=99, message="new", retryable=retryable)  # type: ignore[arg-type]
    assert read_error_detail(detail).reason is reason
    info = error_details_pb2.ErrorInfo(
        reason="NEW", domain="hotkv", metadata={"retryable": str(retryable).lower()}
    )
    status = status_pb2.Status(message="new")
    status.details.add().Pack(info)
    read = as_error(FailedCall((STATUS_KEY, status.SerializeToString())))
    assert (read.reason, read.message) == (reason, "new")


def test_details_of_others_are_not_taken_for_hotkvs() -> None:
    status = status_pb2.Status(message="proxy")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="DRAINING", domain="a.proxy"))
    read = as_error(FailedCall((STATUS_KEY, status.SerializeToString())))
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


class Refusing:
    """A stub whose streams fail after their first answers."""

    def GetHintOutcomes(self, request: Any, **how: Any) -> Any:
        raise FailedCall()

    def ExportBlocks(self, request: Any, **how: Any) -> Any:
        yield warm_pb2.ExportBlocksResponse(key_space={"hash_byte_count": 32})
        yield warm_pb2.ExportBlocksResponse(groups=[{"group_index": 1, "hashes": b"h"}])
        raise FailedCall()


def test_an_admins_calls_fail_as_hotkvs_errors() -> None:
    stub: Any = Refusing()
    with pytest.raises(HotKVError, match="ABORTED"):
        _admin.poll_hints(stub, "", "m", 0, 1, 1.0, (), b"")
    parts = _admin.export(stub, 1, 1, 1.0, ())
    assert [next(parts), next(parts)] == [{"hash_byte_count": 32}, [(1, b"h")]]
    with pytest.raises(HotKVError, match="ABORTED"):
        next(parts)


def test_the_audit_has_sizes_in_place_of_contents() -> None:
    run = cache_pb2.BlockRun(hashes=bytes(64), depth=3)
    assert audit.arguments(run) == {"hashes": "64 bytes", "depth": 3}
    request = cache_pb2.ReserveBlocksRequest(lease_id="l" * 99, runs=[run] * 2, ttl_ms=5)
    request.retention.SetInParent()
    expected = {"lease_id": "l" * audit.MAX_TEXT, "runs": "2 entries", "ttl_ms": 5}
    assert audit.arguments(request) == {**expected, "retention": "set"}
    assert audit.arguments(session_pb2.RequestReport(saved_s=float("inf"))) == {"saved_s": "inf"}

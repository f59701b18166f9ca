"""Malformed messages, over the wire: each is answered with a reason, and nobody else suffers."""

import os
import queue
import time
from collections.abc import Callable

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from demo.processes import Server
from hotkv.errors import HotKVError, Reason
from hotkv.v1 import (
    cache_pb2,
    session_pb2,
    session_pb2_grpc,
)
from hotkv_client import (
    BlockRun,
    _wire,
)
from hotkv_client.admin import AdminClient
from hotkv_client.channels import admin_target
from hotkv_client.testing import PagedEngine
from tests.server.refusals import fill, reason_of

Make = Callable[..., PagedEngine]
INT32 = np.int32
SILENT = ("ping", "report_use", "report_sparse")
"""Bodies that are never refused, or not answered where all is well."""


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.binary(max_size=400))
def test_random_bytes_do_no_harm(server: Server, data: bytes) -> None:
    with (
        grpc.insecure_channel(server.target) as channel,
        grpc.insecure_channel(admin_target(server.target)) as admins,
    ):
        for method in (
            "CacheService/Lookup",
            "CacheService/Load",
            "CacheService/Store",
            "AdminService/Explain",
            "AdminService/ListBlocks",
        ):
            call = (admins if "Admin" in method else channel).unary_unary(
                f"/hotkv.v1.{method}", request_serializer=bytes, response_deserializer=bytes
            )
            try:
                call(data, timeout=5)
            except grpc.RpcError as error:
                assert reason_of(error) != Reason.INTERNAL, error
        for method in ("AdminService/WatchRequests", "EventService/Subscribe"):
            watch = admins.unary_stream(
                f"/hotkv.v1.{method}", request_serializer=bytes, response_deserializer=bytes
            )
            answers = watch(data, timeout=5)
            try:
                next(answers)
                answers.cancel()
            except grpc.RpcError as error:
                assert reason_of(error) in (Reason.INVALID_FIELD, Reason.UNKNOWN_KEY_SPACE), error
        stream = channel.stream_stream(
            "/hotkv.v1.SessionService/Connect",
            request_serializer=bytes,
            response_deserializer=bytes,
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(stream(iter([data]), timeout=5))
        assert reason_of(caught.value) != Reason.INTERNAL


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("grpc.health.v1.Health/Check", "unary_unary"),
        ("grpc.health.v1.Health/Watch", "unary_stream"),
        ("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "stream_stream"),
        ("grpc.channelz.v1.Channelz/GetTopChannels", "unary_unary"),
    ],
)
def test_what_is_no_message_of_other_services_is_refused_too(
    server: Server, method: str, kind: str
) -> None:
    """gRPC answered UNKNOWN, and logged a traceback each time."""
    with grpc.insecure_channel(admin_target(server.target)) as channel:
        call = getattr(channel, kind)(
            f"/{method}", request_serializer=bytes, response_deserializer=bytes
        )
        with pytest.raises(grpc.RpcError) as caught:
            answer = call(
                iter([b"\xff" * 9]) if kind == "stream_stream" else b"\xff" * 9, timeout=10
            )
            list(answer)
    assert (caught.value.code(), reason_of(caught.value)) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        Reason.INVALID_FIELD,
    )
    assert "Traceback" not in server.log.read_text()


def test_messages_on_an_open_stream_may_be_anything(engine: Make) -> None:
    """Fields filled at random: every message is answered, and the session goes on."""
    one = engine()
    random = np.random.default_rng(7)
    bodies = [
        f.name
        for f in session_pb2.ConnectRequest.DESCRIPTOR.oneofs_by_name["body"].fields
        if f.name not in SILENT
    ]
    for _ in range(300):
        request = session_pb2.ConnectRequest()
        fill(getattr(request, str(random.choice(bodies))), random, 0)
        future = one.session._call(lambda request=request: request)  # type: ignore[misc]
        try:
            future.result(10)
        except HotKVError as error:
            assert error.reason is not Reason.INTERNAL, (error, request)
    assert (
        one.session.store("s", "s", [BlockRun(0, [os.urandom(32)], np.zeros(1, INT32))], 5)
        .result(5)
        .results[0][0]
        == 1
    )


def test_a_client_that_does_not_read_is_closed_and_nobody_else_suffers(
    server: Server, engine: Make
) -> None:
    one = engine()
    requests: queue.SimpleQueue[session_pb2.ConnectRequest | None] = queue.SimpleQueue()
    opening_message = _wire.open_session(one.session.config)
    opening_message.open_session.engine_id = "never-reads"
    requests.put(opening_message)
    small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    with (
        grpc.insecure_channel(server.target, small_window) as channel,
        AdminClient(server.target) as admin,
    ):
        stream = session_pb2_grpc.SessionServiceStub(channel).Connect(iter(requests.get, None))
        next(stream)
        # A read lease, and then calls whose refusal repeats its long name.
        requests.put(
            session_pb2.ConnectRequest(
                acquire_lease=cache_pb2.AcquireLeaseRequest(lease_id="x" * 250)
            )
        )
        unheard = cache_pb2.ReserveBlocksRequest(lease_id="x" * 250)
        for i in range(1, 40_000):
            requests.put(session_pb2.ConnectRequest(request_id=i, reserve_blocks=unheard))
        deadline_s = time.monotonic() + 60
        while any(s["engine_id"] == "never-reads" for s in admin.sessions()):
            one.session.ping(5)
            assert time.monotonic() < deadline_s, "a client that does not read keeps its session"
        requests.put(None)
        stream.cancel()

"""Tests health, reflection, channelz, and what processes import."""

import contextlib
import os
import signal
import subprocess
import sys

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from demo.processes import Server
from hotkv_client import BlockRun, GroupHashes, LoadRun, Role, SessionConfig
from hotkv_client.admin import AdminClient
from hotkv_client.channels import HEALTH_CHECK
from hotkv_client.hints import HintClient
from hotkv_client.targets import admin_target
from hotkv_client.wire import call_messages as _wire
from hotkv_client.wire import sparse as _sparse_wire
from hotkv_proto.blocks import NO_OPTIONS
from hotkv_proto.keys import KeySpace
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_proto.order import NO_ORDER
from hotkv_proto.v1 import session_pb2
from tests.robustness.odd_clients import OWN_CONNECTION
from tests.robustness.raw_client import RawSession, word_of
from tests.server.nodes import memory_file
from tests.server.support import FULL, PAGE_BYTES, block_ids, hashes

SERVED = {"hotkv.v1.CacheService", "hotkv.v1.SessionService", "hotkv.v1.SparseService"}
FOR_ADMINS = {"hotkv.v1.AdminService", "hotkv.v1.EventService", "grpc.channelz.v1.Channelz"}


def test_health_reflection_and_channelz(server: Server) -> None:
    with grpc.insecure_channel(server.target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", *SERVED, "hotkv.v1.EventService", "hotkv.v1.AdminService"):
            asked = health_pb2.HealthCheckRequest(service=name)
            assert health.Check(asked).status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)

        def reflected(**asked: str) -> reflection_pb2.ServerReflectionResponse:
            request = reflection_pb2.ServerReflectionRequest(**asked)
            return next(stub.ServerReflectionInfo(iter([request])))

        listed = reflected(list_services="").list_services_response.service
        names = {service.name for service in listed}
        assert {*SERVED, "grpc.health.v1.Health"} <= names and not FOR_ADMINS & names
        answer = reflected(file_containing_symbol="hotkv.v1.CacheService")
        assert answer.file_descriptor_response.file_descriptor_proto
    with grpc.insecure_channel(admin_target(server.target)) as channel:
        asked = channelz_pb2.GetServersRequest(start_server_id=0)
        assert channelz_pb2_grpc.ChannelzStub(channel).GetServers(asked).server


def test_a_burst_of_calls_is_answered(server: Server) -> None:
    """They arrive while the server is stopped."""
    with contextlib.ExitStack() as stack:
        channels = [
            stack.enter_context(grpc.insecure_channel(server.target, OWN_CONNECTION))
            for _ in range(8)
        ]
        checks = [channel.unary_unary(HEALTH_CHECK) for channel in channels]
        for check in checks:
            check(b"", timeout=60)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            calls = [check.future(b"", timeout=60) for _ in range(250) for check in checks]
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert {call.code() for call in calls} == {grpc.StatusCode.OK}


def test_the_client_is_light() -> None:
    heavy = {"torch", "numba", "pydantic", "vllm", "llvmlite", "prometheus_client"}
    code = f"import sys, hotkv_client; print(sorted({heavy!r} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"[]\n"


def test_a_client_that_is_closed_says_so(server: Server) -> None:
    """gRPC itself would end the process."""
    with AdminClient(server.target) as admin, HintClient(server.target) as hints:
        pass
    for use in (admin.info, lambda: next(admin.events()), hints.outcomes):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_calls_with_id_get_one_answer(server: Server) -> None:
    """Also calls that are answered later, or have no result."""
    fd, name = memory_file(PAGE_BYTES), os.urandom(4).hex()
    space = KeySpace(name, "m", "bfloat16", (FULL,), 16)
    config = SessionConfig(server.target, name, Role.WORKER, space)
    tensors = (PageTensor(0, "kv", 0, PAGE_BYTES, PAGE_BYTES, 0),)
    layout = Layout(0, 1, (MemoryHandle("kv", PAGE_BYTES),), tensors)
    (block,), zero = hashes(1), block_ids(1)
    named = [GroupHashes(0, [block])]

    def store() -> session_pb2.ConnectRequest:
        return _wire.store("s", "s", [BlockRun(0, [block], zero)], 10, NO_OPTIONS, 0, 32)

    def load() -> session_pb2.ConnectRequest:
        return _wire.load("t", "l", [LoadRun(0, zero, zero)], 10)

    with grpc.insecure_channel(server.target) as channel:
        session = RawSession(channel, server.target, _wire.open_session(config))

        def answer(call: session_pb2.ConnectRequest) -> session_pb2.ConnectResponse:
            number = session.put(call)
            # An answer would come before that to this ping.
            told = session.answers({number, session.put(_wire.ping())})
            assert 0 not in told, "a call without an id was answered"
            assert len(told) == 2 and word_of(told[number]) in ("answered", "DUPLICATE_ID")
            return told[number]

        assert session.link({"kv": fd}) == "answered"
        answer(_wire.register_memory(layout, NO_ORDER))
        session._outbox.put(store())
        while word_of(answer(store())) != "answered":
            pass
        answer(_wire.acquire("l", named, 10, 32))
        session._outbox.put(load())
        while word_of(answer(load())) != "answered":
            pass
        for _ in range(2):
            session._outbox.put(_wire.report_use(named, 32))
            session._outbox.put(next(_sparse_wire.report_sparse({}, {})))
            assert answer(_wire.report_use(named, 32)).WhichOneof("body") == "pong"
            sparse = next(_sparse_wire.report_sparse({}, {}))
            assert answer(sparse).WhichOneof("body") == "pong"
        session.close()
    os.close(fd)

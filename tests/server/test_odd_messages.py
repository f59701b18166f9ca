"""Malformed messages, over the wire: each is answered with a reason, and nobody else suffers."""

import importlib
import os
import pkgutil
import queue
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest

import hotkv_client
import hotkv_proto
import hotkv_server
import hotkv_sparse
from demo.processes import Server
from hotkv_client import BlockRun, GroupHashes
from hotkv_client.channels import admin_target
from hotkv_client.testing import PagedEngine
from hotkv_client.wire import requests as _wire
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.v1 import (
    session_pb2,
    sparse_pb2,
    sparse_pb2_grpc,
)
from tests.robustness.raw_client import Footprint
from tests.server.refusals import fill, reason_of
from tests.server.sparse_support import HEAD_SIZE, LAYERS, RepresentationEngine, queries
from tests.server.support import hashes

Make = Callable[..., PagedEngine]
INT32 = np.int32
NONSENSE = b"\xff" * 100
NUM_AT_ONCE = 64
KEPT_BYTES = 12 << 20
"""Growth allowed to the server: allocators keep some memory of calls that have ended."""
PACKAGES = (hotkv_proto, hotkv_client, hotkv_server, hotkv_sparse)
SILENT = ("ping", "report_use", "report_sparse")
"""Bodies that are never refused, or not answered where all is well."""


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


def nonsense_in_calls(target: str, engine: PagedEngine, count: int) -> None:
    """Makes calls with as much metadata as a call may bring."""
    metadata = (("padding", "x" * 7000),)
    with grpc.insecure_channel(target) as channel:
        call = channel.unary_unary(
            "/hotkv.v1.CacheService/Lookup", request_serializer=bytes, response_deserializer=bytes
        )
        for _ in range(count // NUM_AT_ONCE):
            calls = [call.future(NONSENSE, 20, metadata) for _ in range(NUM_AT_ONCE)]
            assert {one.code() for one in calls} == {grpc.StatusCode.INVALID_ARGUMENT}


def nonsense_in_selections(target: str, engine: PagedEngine, count: int) -> None:
    """Sends messages on a stream that answers each. The first names the session, since others may
    come for some seconds only."""
    connection = engine.session._connection
    assert connection is not None
    first = sparse_pb2.SelectBlocksRequest(session_id=connection.session_id).SerializeToString()
    with grpc.insecure_channel(target) as channel:
        stream = channel.stream_stream(
            "/hotkv.v1.SparseService/SelectBlocks",
            request_serializer=bytes,
            response_deserializer=sparse_pb2.SelectBlocksResponse.FromString,
        )
        answers = list(stream(iter([first, *[NONSENSE] * count]), timeout=120))
    assert {answer.error.reason for answer in answers[1:]} == {Reason.INVALID_FIELD}
    assert len(answers) == count + 1


def nonsense_in_a_session(target: str, engine: PagedEngine, count: int) -> None:
    """Sends messages on an open session's stream, then a ping."""
    opening = _wire.open_session(engine.session.config).SerializeToString()
    ping = session_pb2.ConnectRequest(request_id=7, ping=session_pb2.Ping()).SerializeToString()
    waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with grpc.insecure_channel(target) as channel:
        stream = channel.stream_stream(
            "/hotkv.v1.SessionService/Connect",
            request_serializer=bytes,
            response_deserializer=session_pb2.ConnectResponse.FromString,
        )(iter(waiting.get, None), timeout=120)
        for message in (opening, *[NONSENSE] * count, ping):
            waiting.put(message)
        while next(stream).request_id != 7:
            pass
        waiting.put(None)
        list(stream)


@pytest.mark.parametrize(
    ("send", "count"),
    [
        (nonsense_in_calls, 4_096),
        pytest.param(nonsense_in_selections, 16_000, marks=pytest.mark.long),
        pytest.param(nonsense_in_a_session, 16_000, marks=pytest.mark.long),
    ],
)
def test_what_is_refused_leaves_nothing_in_memory(
    server: Server, engine: Make, send: Callable[[str, PagedEngine, int], None], count: int
) -> None:
    """A refusal that lived on and was raised for one caller after the other kept the frames of
    all."""
    one = engine()
    send(server.target, one, count // 2)
    first = Footprint(server.pid)
    send(server.target, one, count)
    grown_bytes = Footprint(server.pid).anonymous_bytes - first.anonymous_bytes
    print(f"grew by {grown_bytes >> 10} KiB")
    assert grown_bytes < KEPT_BYTES


def test_no_module_keeps_an_exception() -> None:
    """An exception that is raised again keeps the frames of each time before."""
    names = [
        module.name
        for package in PACKAGES
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not module.name.endswith("__main__")
    ]
    assert len(names) > 100, "the packages were not found"
    kept = [
        f"{name}.{attribute}"
        for name in names
        for attribute, value in vars(importlib.import_module(name)).items()
        if isinstance(value, BaseException)
    ]
    assert not kept


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
            future.result(60)
        except HotKVError as error:
            assert error.reason is not Reason.INTERNAL, (error, request)
    assert (
        one.session.store("s", "s", [BlockRun(0, [os.urandom(32)], np.zeros(1, INT32))], 5)
        .result(60)
        .results[0][0]
        == 1
    )


def test_selections_with_random_fields_are_answered(
    sparse_engine: Callable[..., RepresentationEngine],
) -> None:
    engine = sparse_engine()
    blocks = hashes(60)
    engine.store(blocks)
    engine.session.create_sequence("s", 0, blocks, engine.select_config(hot_blocks=30)).result(60)
    random = np.random.default_rng(11)
    connection = engine.session._connection
    assert connection is not None
    own = connection.session_id
    good = queries(1)[0].tobytes()

    def requests() -> Iterator[sparse_pb2.SelectBlocksRequest]:
        for _ in range(300):
            request = sparse_pb2.SelectBlocksRequest()
            fill(request, random, 0)
            request.session_id, request.sequence_id = own, "s"
            if random.random() < 0.7:
                request.layer_index, request.shard_index = int(random.choice(LAYERS)), 0
            if random.random() < 0.7:
                request.query = good if random.random() < 0.5 else os.urandom(4 * HEAD_SIZE * 4)
            if random.random() < 0.7:
                request.context_token_count = int(random.integers(1, 1000))
            yield request

    answers = list(sparse_pb2_grpc.SparseServiceStub(connection.channel).SelectBlocks(requests()))
    assert len(answers) == 300 and all(answer.error.reason != Reason.INTERNAL for answer in answers)
    assert sum(not answer.HasField("error") for answer in answers) > 30
    lists = [GroupHashes(0, blocks)]
    assert engine.session.lookup(lists).result(60)[0].all()

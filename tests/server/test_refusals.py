"""Bad input, over the wire: a canonical code with a reason, and nothing changed."""

import os
import queue
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from demo.processes import Server
from hotkv.errors import HotKVError, Reason
from hotkv.groups import GroupKind
from hotkv.layout import FENCE_HANDLE, FENCE_WORDS
from hotkv.order import NO_ORDER
from hotkv.results import BlockResult, TransferStatus
from hotkv.retention import NO_RETENTION
from hotkv.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    cache_pb2_grpc,
    errors_pb2,
    layout_pb2,
    session_pb2,
    session_pb2_grpc,
)
from hotkv_client import (
    BlockRun,
    EngineMemory,
    GroupHashes,
    LinkState,
    LoadRun,
    Role,
    Session,
    SessionConfig,
    _wire,
)
from hotkv_client.admin import AdminClient
from hotkv_client.channels import admin_target
from hotkv_client.link import descriptor_socket
from hotkv_client.testing import PagedEngine
from hotkv_server.rpc.errors import CODES

Make = Callable[..., PagedEngine]
INT32 = np.int32
SILENT = ("ping", "report_use", "report_sparse")
"""Bodies that are never refused, or not answered where all is well."""
VOLATILE = ("uptime_s", "age_s", "idle_s", "counters")


def state(server: Server) -> dict[str, Any]:
    """Everything that a refused call must leave as it was."""
    with AdminClient(server.target) as admin:
        answer = {
            "tiers": admin.tiers(),
            "sessions": admin.sessions(),
            "blocks": admin.blocks(page_size=1000)["blocks"],
        }
        for row in [*answer["sessions"], *answer["blocks"]]:
            for name in VOLATILE:
                row.pop(name, None)
        answer["leases"] = admin.info()["counters"]["leases"]
        return answer


def reason_of(error: grpc.RpcError) -> int:
    for key, value in error.trailing_metadata() or ():
        if key == "hotkv-error-bin":
            return int(errors_pb2.ErrorDetail.FromString(value).reason)
    raise AssertionError(f"no reason came with {error!r}")


def test_every_reason_has_a_code_and_a_number() -> None:
    assert set(CODES) == set(Reason)
    assert {r.name: int(r) for r in Reason} == {
        n.removeprefix("ERROR_REASON_"): v for n, v in errors_pb2.ErrorReason.items() if v
    }


def test_enums_have_the_numbers_of_the_wire() -> None:
    def wire(enum: Any, prefix: str) -> dict[str, int]:
        return {name.removeprefix(prefix): number for name, number in enum.items() if number}

    assert {r.name: int(r) for r in BlockResult} == wire(cache_pb2.BlockResult, "BLOCK_RESULT_")
    assert {s.name: int(s) for s in TransferStatus} == wire(
        cache_pb2.TransferStatus, "TRANSFER_STATUS_"
    )
    assert {k.name: int(k) for k in GroupKind} == wire(layout_pb2.KvGroupKind, "KV_GROUP_KIND_")
    assert {r.name: int(r) for r in Role} == wire(session_pb2.SessionRole, "SESSION_ROLE_")


@pytest.fixture
def stored(engine: Make) -> Iterator[tuple[PagedEngine, list[bytes]]]:
    """An engine with four stored blocks."""
    one = engine()
    blocks = [os.urandom(32) for _ in range(4)]
    one.session.store("s", "s", [BlockRun(0, blocks, np.arange(4, dtype=INT32))], 10).result(10)
    yield one, blocks


def refused(future: Any) -> HotKVError:
    with pytest.raises(HotKVError) as caught:
        future.result(10)
    return caught.value


def test_refusals_on_the_stream(
    server: Server, stored: tuple[PagedEngine, list[bytes]], engine: Make
) -> None:
    one, blocks = stored
    other = engine()
    session = one.session
    session.acquire("mine", [GroupHashes(0, blocks)], 60).result(5)
    before = state(server)
    at, to = np.arange(1, dtype=INT32), np.array([9], INT32)

    def run(block_ids: Any, **more: Any) -> BlockRun:
        return BlockRun(
            more.pop("group", 0),
            more.pop("hashes", [os.urandom(32)]),
            np.array(block_ids, INT32),
            **more,
        )

    cases: list[tuple[Any, Reason, str]] = [
        (session.load("a", "nobody's", [LoadRun(0, at, to)], 5), Reason.UNKNOWN_LEASE, "lease_id"),
        (
            other.session.load("a", "mine", [LoadRun(0, at, to)], 5),
            Reason.FOREIGN_LEASE,
            "lease_id",
        ),
        (session.load("", "mine", [LoadRun(0, at, to)], 5), Reason.INVALID_FIELD, "transfer_id"),
        (
            session.load("a", "mine", [LoadRun(0, np.array([4], INT32), to)], 5),
            Reason.INVALID_FIELD,
            "lease_positions",
        ),
        (
            session.load("a", "mine", [LoadRun(0, np.array([-1], INT32), to)], 5),
            Reason.INVALID_FIELD,
            "lease_positions",
        ),
        (
            session.load("a", "mine", [LoadRun(0, np.zeros(2, INT32), np.array([1, 2], INT32))], 5),
            Reason.INVALID_FIELD,
            "twice",
        ),
        (
            session.load("a", "mine", [LoadRun(0, at, to), LoadRun(0, at, to + 1)], 5),
            Reason.INVALID_FIELD,
            "lease_positions",
        ),
        (
            session.load(
                "a", "mine", [LoadRun(0, np.zeros(1 << 18, INT32), np.zeros(1 << 18, INT32))], 5
            ),
            Reason.TOO_LARGE,
            "blocks",
        ),
        (session.load("a", "mine", [LoadRun(1, at, to)], 5), Reason.INVALID_FIELD, "group_index"),
        (
            session.load("a", "mine", [LoadRun(0, at, np.array([64], INT32))], 5),
            Reason.INVALID_FIELD,
            "block_ids",
        ),
        (
            session.load("a", "mine", [LoadRun(0, at, np.array([-1], INT32))], 5),
            Reason.INVALID_FIELD,
            "block_ids",
        ),
        (
            session.load("a", "mine", [LoadRun(0, at, np.array([1, 2], INT32))], 5),
            Reason.INVALID_FIELD,
            "block_ids",
        ),
        (session.load("a", "mine", [LoadRun(0, at, to)], -5), Reason.INVALID_FIELD, "timeout_ms"),
        (session.store("a", "l", [run([64])], 5), Reason.INVALID_FIELD, "block_ids"),
        (session.store("a", "l", [run([1, 2])], 5), Reason.INVALID_FIELD, "block_ids"),
        (session.store("a", "l", [run([1], group=7)], 5), Reason.INVALID_FIELD, "group_index"),
        (session.store("a", "l", [run([1], depth=-1)], 5), Reason.INVALID_FIELD, "depth"),
        (
            session.store("a", "l", [run([1], parent_hash=b"short")], 5),
            Reason.INVALID_HASH,
            "parent_hash",
        ),
        (
            session.store("a", "l", [run([1], parent_hash=bytes(64))], 5),
            Reason.INVALID_HASH,
            "runs.parent_hash has 64 bytes",
        ),
        (session.store("a", "l", [run([1], hashes=[b"short"])], 5), Reason.INVALID_HASH, "hashes"),
        (session.store("a", "l" * 300, [run([1])], 5), Reason.TOO_LARGE, "lease_id"),
        (session.store("a" * 300, "l", [run([1])], 5), Reason.TOO_LARGE, "transfer_id"),
        (session.store("a", "", [run([1])], 5), Reason.INVALID_FIELD, "lease_id"),
        (session.store("a", "mine", [run([1])], 5), Reason.DUPLICATE_ID, "lease_id"),
        (session.acquire("mine", [GroupHashes(0, blocks[:1])]), Reason.DUPLICATE_ID, "lease_id"),
        (
            session.acquire("mine", [GroupHashes(0, [os.urandom(32) for _ in blocks])]),
            Reason.DUPLICATE_ID,
            "lease_id",
        ),
        (
            session.acquire("x", [GroupHashes(0, blocks), GroupHashes(0, blocks)]),
            Reason.INVALID_FIELD,
            "groups",
        ),
        (session.acquire("x", [GroupHashes(3, blocks)]), Reason.INVALID_FIELD, "group_index"),
        (session.acquire("x", [GroupHashes(0, blocks)], -1), Reason.INVALID_FIELD, "ttl_ms"),
        (session.lookup([GroupHashes(-1, blocks)]), Reason.INVALID_FIELD, "group_index"),
        (session.lookup([GroupHashes(0, [bytes(32)] * 300_000)]), Reason.TOO_LARGE, "blocks"),
    ]
    for future, reason, field in cases:
        error = refused(future)
        assert (error.reason, field in error.message) == (reason, True), error
    assert state(server) == before
    session.release("mine")


def test_a_scheduler_without_memory_can_not_transfer(
    server: Server, stored: tuple[PagedEngine, list[bytes]]
) -> None:
    from hotkv_client import Role, Session, SessionConfig

    one, blocks = stored
    bare = Session(SessionConfig(server.target, "bare", Role.SCHEDULER, one.key_space))
    bare.start()
    assert bare.wait_connected(10)
    bare.acquire("l", [GroupHashes(0, blocks)]).result(5)
    assert (
        refused(bare.load("t", "l", [LoadRun(0, np.zeros(1, INT32), np.zeros(1, INT32))], 5)).reason
        is Reason.NO_MEMORY_REGISTERED
    )
    bare.close()


def unary(server: Server, call: "Callable[[Channels], Any]") -> tuple[grpc.StatusCode, int]:
    with (
        grpc.insecure_channel(server.target) as users,
        grpc.insecure_channel(admin_target(server.target)) as admins,
        pytest.raises(grpc.RpcError) as caught,
    ):
        call(Channels(users, admins))
    return caught.value.code(), reason_of(caught.value)


class Channels(NamedTuple):
    users: grpc.Channel
    admins: grpc.Channel


def test_refusals_of_unary_calls(server: Server, stored: tuple[PagedEngine, list[bytes]]) -> None:
    before = state(server)
    cache, admin = cache_pb2_grpc.CacheServiceStub, admin_pb2_grpc.AdminServiceStub
    groups = [cache_pb2.GroupHashes(hashes=b"x" * 33)]
    cases: list[tuple[Callable[[Channels], Any], Reason]] = [
        (lambda c: cache(c.users).Lookup(cache_pb2.LookupRequest()), Reason.INVALID_FIELD),
        (
            lambda c: cache(c.users).Lookup(cache_pb2.LookupRequest(session_id="guess")),
            Reason.UNKNOWN_SESSION,
        ),
        (
            lambda c: cache(c.users).Lookup(cache_pb2.LookupRequest(key_space_id=999)),
            Reason.UNKNOWN_KEY_SPACE,
        ),
        (
            lambda c: cache(c.users).Lookup(cache_pb2.LookupRequest(key_space_id=-1)),
            Reason.UNKNOWN_KEY_SPACE,
        ),
        (
            lambda c: cache(c.users).Lookup(cache_pb2.LookupRequest(key_space_id=1, groups=groups)),
            Reason.INVALID_HASH,
        ),
        (
            lambda c: cache(c.users).AcquireLease(cache_pb2.AcquireLeaseRequest(lease_id="x")),
            Reason.UNKNOWN_SESSION,
        ),
        (
            lambda c: cache(c.users).ReserveBlocks(cache_pb2.ReserveBlocksRequest(session_id="y")),
            Reason.UNKNOWN_SESSION,
        ),
        (
            lambda c: cache(c.users).ReleaseLease(cache_pb2.ReleaseLeaseRequest(session_id="y")),
            Reason.UNKNOWN_SESSION,
        ),
        (lambda c: cache(c.users).Load(cache_pb2.LoadRequest()), Reason.UNKNOWN_SESSION),
        (lambda c: cache(c.users).Store(cache_pb2.StoreRequest()), Reason.UNKNOWN_SESSION),
        (
            lambda c: cache(c.users).CancelTransfer(cache_pb2.CancelTransferRequest()),
            Reason.UNKNOWN_SESSION,
        ),
        (lambda c: admin(c.admins).Evict(admin_pb2.EvictRequest()), Reason.INVALID_FIELD),
        (
            lambda c: admin(c.admins).Evict(admin_pb2.EvictRequest(hashes=b"1" * 32, all=True)),
            Reason.INVALID_FIELD,
        ),
        (
            lambda c: admin(c.admins).Evict(admin_pb2.EvictRequest(key_space_id=77, all=True)),
            Reason.UNKNOWN_KEY_SPACE,
        ),
        (
            lambda c: admin(c.admins).ListBlocks(admin_pb2.ListBlocksRequest(page_size=1 << 30)),
            Reason.INVALID_FIELD,
        ),
        (
            lambda c: admin(c.admins).ListBlocks(admin_pb2.ListBlocksRequest(page_token="../..")),
            Reason.INVALID_FIELD,
        ),
        (lambda c: admin(c.admins).Explain(admin_pb2.ExplainRequest()), Reason.INVALID_FIELD),
        (
            lambda c: admin(c.admins).Explain(
                admin_pb2.ExplainRequest(key_space_id=1, hashes=b"odd")
            ),
            Reason.INVALID_HASH,
        ),
    ]
    for call, reason in cases:
        assert unary(server, call) == (CODES[reason], int(reason))
    assert state(server) == before


def open_with(
    server: Server, opening: session_pb2.ConnectRequest
) -> tuple[grpc.StatusCode, int, str]:
    requests: queue.SimpleQueue[session_pb2.ConnectRequest | None] = queue.SimpleQueue()
    requests.put(opening)
    with grpc.insecure_channel(server.target) as channel, pytest.raises(grpc.RpcError) as caught:
        next(session_pb2_grpc.SessionServiceStub(channel).Connect(iter(requests.get, None)))
    return caught.value.code(), reason_of(caught.value), caught.value.details()


def opening(engine: PagedEngine, **changes: Any) -> session_pb2.ConnectRequest:
    request = _wire.open_session(engine.session.config)
    for path, value in changes.items():
        target: Any = request.open_session
        *parents, name = path.split("__")
        for parent in parents:
            target = target[int(parent)] if parent.isdecimal() else getattr(target, parent)
        if isinstance(value, list):
            del getattr(target, name)[:]
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    return request


def test_refusals_of_openings(server: Server, stored: tuple[PagedEngine, list[bytes]]) -> None:
    one, _ = stored
    before = state(server)
    cases: list[tuple[session_pb2.ConnectRequest, Reason, str]] = [
        (session_pb2.ConnectRequest(), Reason.INVALID_FIELD, "open_session"),
        (session_pb2.ConnectRequest(ping=session_pb2.Ping()), Reason.INVALID_FIELD, "open_session"),
        (opening(one, protocol_version=99), Reason.VERSION_MISMATCH, "protocol_version"),
        (opening(one, engine_id=""), Reason.INVALID_FIELD, "engine_id"),
        (opening(one, engine_id="e" * 1000), Reason.TOO_LARGE, "engine_id"),
        (opening(one, engine_id="e\nINFO forged"), Reason.INVALID_FIELD, "engine_id"),
        (opening(one, client_name="c\x1b[2J"), Reason.INVALID_FIELD, "client_name"),
        (opening(one, key_space__model="m" * (256 << 10)), Reason.TOO_LARGE, "key_space"),
        (opening(one, role=0), Reason.INVALID_FIELD, "role"),
        (opening(one, role=42), Reason.INVALID_FIELD, "role"),
        (opening(one, key_space__weights_identity=""), Reason.INVALID_FIELD, "weights_identity"),
        (opening(one, key_space__hash_byte_count=4), Reason.INVALID_FIELD, "hash_bytes"),
        (
            opening(one, key_space__hash_block_token_count=0),
            Reason.INVALID_FIELD,
            "hash_block_tokens",
        ),
        (
            opening(one, key_space__groups__0__block_token_count=17),
            Reason.INVALID_FIELD,
            "block_tokens",
        ),
        (opening(one, key_space__groups__0__kind=0), Reason.INVALID_FIELD, "kind"),
        (opening(one, key_space__groups__0__kind=3), Reason.INVALID_FIELD, "window_tokens"),
        (opening(one, key_space__groups__0__group_index=5), Reason.INVALID_FIELD, "group_index"),
        (
            opening(one, key_space__groups__0__shard_byte_counts=[-5]),
            Reason.INVALID_FIELD,
            "shard_bytes",
        ),
        (
            opening(one, key_space__groups__0__shard_byte_counts=[1] * 200),
            Reason.INVALID_FIELD,
            "shards",
        ),
        (
            opening(one, key_space__groups__0__shard_byte_counts=[1 << 40]),
            Reason.INVALID_FIELD,
            "does not fit",
        ),
        (opening(one, key_space__groups=[]), Reason.INVALID_FIELD, "groups"),
    ]
    for request, reason, field in cases:
        code, number, details = open_with(server, request)
        assert (code, number, field in details) == (CODES[reason], int(reason), True), (
            details,
            field,
        )
    assert state(server) == before


def change_layout(
    engine: PagedEngine, change: Callable[[layout_pb2.Layout], Any]
) -> session_pb2.ConnectRequest:
    request = _wire.register_memory(engine.layout, NO_ORDER)
    change(request.register_memory.layout)
    return request


LAYOUT_CHANGES: list[tuple[Callable[[layout_pb2.Layout], Any], Reason, str]] = [
    (lambda m: setattr(m, "shard_index", 3), Reason.INVALID_LAYOUT, "shard_index"),
    (lambda m: setattr(m, "name", "x\n"), Reason.INVALID_FIELD, "layout.name"),
    (lambda m: setattr(m, "block_count", 0), Reason.INVALID_LAYOUT, "block_count"),
    (lambda m: setattr(m, "block_count", 1 << 40), Reason.INVALID_LAYOUT, "block_count"),
    (lambda m: setattr(m, "block_count", 65), Reason.INVALID_LAYOUT, "beyond"),
    (lambda m: setattr(m.tensors[0], "handle_id", "else"), Reason.INVALID_LAYOUT, "handle_id"),
    (lambda m: setattr(m.tensors[0], "group_index", 9), Reason.INVALID_LAYOUT, "group_index"),
    (lambda m: setattr(m.tensors[0], "base_byte_offset", -4096), Reason.INVALID_LAYOUT, "negative"),
    (lambda m: setattr(m.tensors[1], "base_byte_offset", 1 << 62), Reason.INVALID_LAYOUT, "large"),
    (lambda m: setattr(m.tensors[0], "run_byte_count", 0), Reason.INVALID_LAYOUT, "run_byte_count"),
    (lambda m: setattr(m.tensors[0], "run_byte_count", 2048), Reason.INVALID_LAYOUT, "gap"),
    (
        lambda m: setattr(m.tensors[0], "shard_byte_offset", 4096),
        Reason.INVALID_LAYOUT,
        "gap or overlap",
    ),
    (
        lambda m: m.tensors[0].dims.add(count=1 << 40, stride_byte_count=1),
        Reason.INVALID_LAYOUT,
        "dims",
    ),
    (
        lambda m: m.tensors[0].dims.add(count=2, stride_byte_count=8),
        Reason.INVALID_LAYOUT,
        "overlap",
    ),
    (lambda m: m.tensors.pop(), Reason.INVALID_LAYOUT, "fill"),
    (
        lambda m: m.handles.add(
            handle_id="kv", byte_count=1, file_mapping=layout_pb2.FileMapping()
        ),
        Reason.INVALID_LAYOUT,
        "handle_id",
    ),
    (lambda m: m.handles.add(handle_id="more", byte_count=8), Reason.INVALID_LAYOUT, "source"),
    (
        lambda m: m.handles.add(
            handle_id="g", byte_count=8, cuda_ipc=layout_pb2.CudaIpc(handle=b"short")
        ),
        Reason.INVALID_LAYOUT,
        "64",
    ),
]


@pytest.mark.parametrize("number", range(len(LAYOUT_CHANGES)))
def test_refusals_of_layouts(engine: Make, number: int) -> None:
    change, reason, field = LAYOUT_CHANGES[number]
    one = engine()
    blocks = [os.urandom(32)]
    error = refused(one.session._call(lambda: change_layout(one, change)))
    assert (error.reason, field in error.message) == (reason, True), error
    # The memory registered before is still in use.
    assert (
        one.session.store("s", "s", [BlockRun(0, blocks, np.zeros(1, INT32))], 5)
        .result(5)
        .results[0][0]
        == 1
    )


def test_memory_whose_descriptor_never_came_is_refused(server: Server) -> None:
    one = PagedEngine(server.target, engine_id="no-descriptor")
    one.session._life.memory = EngineMemory(one.layout, {})
    states: list[tuple[LinkState, str]] = []
    object.__setattr__(
        one.session.config, "on_state", lambda state, why: states.append((state, why))
    )
    one.session.start()
    assert not one.session.wait_connected(2)
    assert states
    assert all(state is LinkState.ABSENT and "UNKNOWN_HANDLE" in why for state, why in states)
    one.close()


def test_memory_is_registered_once(engine: Make) -> None:
    one = engine()
    assert (
        refused(one.session._call(lambda: _wire.register_memory(one.layout, NO_ORDER))).reason
        is Reason.DUPLICATE_ID
    )
    assert (
        one.session.store("s", "s", [BlockRun(0, [os.urandom(32)], np.zeros(1, INT32))], 5)
        .result(5)
        .results[0][0]
        == 1
    )


def test_the_descriptor_socket_refuses(
    server: Server, stored: tuple[PagedEngine, list[bytes]]
) -> None:
    before = state(server)
    path = str(Path(server.target.removeprefix("unix:")).parent / "fd.sock")
    packets = [
        b"",
        b"\xff" * 100,
        os.urandom(65536),
        _wire.link_request("guess", []),
        _wire.link_request("guess", ["kv"]),
    ]
    for packet in packets:
        for fds in ([], [0], [0] * 60):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                peer.settimeout(5)
                peer.connect(path)
                if fds:
                    socket.send_fds(peer, [packet or b"\0"], fds)
                else:
                    peer.send(packet)
                if packet:
                    answer, received, _, _ = socket.recv_fds(peer, 65536, 4)
                    assert not received
                    assert session_pb2.LinkResponse.FromString(answer).HasField("error")
    assert state(server) == before


def memory_file(num_bytes: int) -> int:
    fd = os.memfd_create("test")
    os.posix_fallocate(fd, 0, num_bytes)
    return fd


def linked(
    server: Server, session_id: str, fds: dict[str, int]
) -> tuple[socket.socket, session_pb2.LinkResponse]:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(5)
    peer.connect(str(descriptor_socket(server.target)))
    socket.send_fds(peer, [_wire.link_request(session_id, list(fds))], list(fds.values()))
    answer, received, _, _ = socket.recv_fds(peer, 65536, 4)
    for fd in received:
        os.close(fd)
    return peer, session_pb2.LinkResponse.FromString(answer)


def test_the_page_of_the_link_that_holds_is_read(server: Server, engine: Make) -> None:
    """What came with a link that was refused is forgotten: the page of the link that holds is the
    one that is read."""
    one = engine()
    bare = Session(
        SessionConfig(server.target, "bare", Role.WORKER, one.key_space, use_table=False)
    )
    bare.start()
    assert bare.wait_connected(10) and bare._connection is not None
    session_id = bare._connection.session_id

    def store(fence_index: int) -> int:
        name, runs = os.urandom(4).hex(), [BlockRun(0, [os.urandom(32)], np.zeros(1, np.int32))]
        call = bare._call(
            lambda: _wire.store(name, name, runs, 5.0, NO_RETENTION, fence_index, 32),
            transfer_id=name,
        )
        return int(call.result(10).results[0][0])

    files = [
        memory_file(8),
        memory_file(8),
        memory_file(one.kv.nbytes),
        memory_file(4 * FENCE_WORDS),
        memory_file(4 * FENCE_WORDS),
    ]
    little_kv, little_fence, kv, fence, other_fence = files
    links = [linked(server, session_id, {"kv": little_kv, FENCE_HANDLE: little_fence})]
    assert links[0][1].error.reason == Reason.INVALID_LAYOUT
    links.append(linked(server, session_id, {"kv": kv, FENCE_HANDLE: fence}))
    assert links[1][1].linked, links[1][1]
    links.append(linked(server, session_id, {FENCE_HANDLE: other_fence}))
    assert links[2][1].error.reason == Reason.DUPLICATE_ID
    bare._call(lambda: _wire.register_memory(one.layout, NO_ORDER)).result(10)
    os.pwrite(fence, (1).to_bytes(4, "little"), 4 * 7)
    os.pwrite(other_fence, (1).to_bytes(4, "little"), 4 * 8)
    assert [store(index) for index in (6, 7, 8)] == [
        BlockResult.STORED,
        BlockResult.ABORTED,
        BlockResult.STORED,
    ]
    bare.close()
    for peer, _ in links:
        peer.close()
    for fd in files:
        os.close(fd)


def test_a_store_with_a_fence_index_and_no_fence_is_refused(server: Server, engine: Make) -> None:
    """A session that links its memory and no fence stores only what it never takes back."""
    one = engine()
    bare = Session(
        SessionConfig(server.target, "bare", Role.WORKER, one.key_space, use_table=False)
    )
    bare.start()
    assert bare.wait_connected(10) and bare._connection is not None
    kv = memory_file(one.kv.nbytes)
    peer, answer = linked(server, bare._connection.session_id, {"kv": kv})
    assert answer.linked
    bare._call(lambda: _wire.register_memory(one.layout, NO_ORDER)).result(10)
    runs = [BlockRun(0, [os.urandom(32)], np.zeros(1, np.int32))]
    with pytest.raises(HotKVError, match="linked no fence") as raised:
        bare._call(
            lambda: _wire.store("t", "t", runs, 5.0, NO_RETENTION, 5, 32), transfer_id="t"
        ).result(10)
    assert raised.value.reason is Reason.INVALID_FIELD
    bare.close()
    peer.close()
    os.close(kv)


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


def fill(message: Any, random: np.random.Generator, level: int) -> None:
    """Random values in random fields, edges of the types among them."""
    message.SetInParent()
    for field in message.DESCRIPTOR.fields:
        if random.random() < 0.3:
            continue
        repeated = (
            not isinstance(getattr(message, field.name), int | float | str | bytes | bool)
            and field.message_type is None
        )
        if field.message_type is not None:
            value = getattr(message, field.name)
            if hasattr(value, "add"):
                for _ in range(int(random.integers(0, 4)) if level < 4 else 0):
                    fill(value.add(), random, level + 1)
            elif level < 5:
                fill(value, random, level + 1)
            continue
        options: dict[str, list[Any]] = {
            "int": [0, 1, -1, 2**31 - 1, -(2**31), int(random.integers(0, 100))],
            "bytes": [
                b"",
                bytes(32),
                os.urandom(32),
                os.urandom(int(random.integers(0, 200))),
                bytes(64),
            ],
            "str": ["", "kv", "mine", "\u00fc" * 50],
        }
        kind = (
            "bytes"
            if field.type == field.TYPE_BYTES
            else "str"
            if field.type == field.TYPE_STRING
            else "int"
        )
        choice = options[kind][int(random.integers(0, len(options[kind])))]
        if field.enum_type is not None:
            choice = int(random.integers(0, 9))
        if kind == "int" and field.type == field.TYPE_INT64 and random.random() < 0.2:
            choice = [2**63 - 1, -(2**63)][int(random.integers(0, 2))]
        if field.type == field.TYPE_BOOL:
            choice = bool(random.integers(0, 2))
        if repeated:
            getattr(message, field.name).extend([choice] * int(random.integers(0, 3)))
        else:
            setattr(message, field.name, choice)

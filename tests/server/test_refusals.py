"""Bad input, over the wire: a canonical code with a reason, and nothing changed."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest

from demo.processes import Server
from hotkv_client import (
    BlockRun,
    EngineMemory,
    GroupHashes,
    LinkState,
    LoadRun,
    Role,
    Session,
    SessionConfig,
)
from hotkv_client.channels import admin_target
from hotkv_client.testing import PagedEngine
from hotkv_client.wire import requests as _wire
from hotkv_proto.blocks import BlockResult, TransferStatus
from hotkv_proto.errors import Reason
from hotkv_proto.groups import GroupKind
from hotkv_proto.order import NO_ORDER
from hotkv_proto.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    cache_pb2_grpc,
    errors_pb2,
    layout_pb2,
    session_pb2,
)
from hotkv_server.wire.errors import CODES
from tests.server.refusals import open_with, opening, reason_of, refused, state, stored

__all__ = ["stored"]

Make = Callable[..., PagedEngine]
INT32 = np.int32


def tell(topic: str, **filters: str) -> admin_pb2.TellRequest:
    return admin_pb2.TellRequest(topic=topic, filters=filters)


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


def test_refusals_on_the_stream(
    server: Server, stored: tuple[PagedEngine, list[bytes]], engine: Make
) -> None:
    one, blocks = stored
    other = engine()
    session = one.session
    session.acquire("mine", [GroupHashes(0, blocks)], 60).result(60)
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
        (session.acquire("x", [GroupHashes(0, [bytes(32)] * 300_000)]), Reason.TOO_LARGE, "blocks"),
    ]
    for future, reason, field in cases:
        error = refused(future)
        assert (error.reason, field in error.message) == (reason, True), error
    assert state(server) == before
    session.release("mine")


def test_a_scheduler_without_memory_can_not_transfer(
    server: Server, stored: tuple[PagedEngine, list[bytes]]
) -> None:
    from hotkv_client import Role

    one, blocks = stored
    bare = Session(SessionConfig(server.target, "bare", Role.SCHEDULER, one.key_space))
    bare.start()
    assert bare.wait_connected(10)
    bare.acquire("l", [GroupHashes(0, blocks)]).result(60)
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
            lambda c: admin(c.admins).Tell(tell("blocks", page_size=str(1 << 30))),
            Reason.INVALID_FIELD,
        ),
        (
            lambda c: admin(c.admins).Tell(tell("blocks", page_token="../..")),
            Reason.INVALID_FIELD,
        ),
        (lambda c: admin(c.admins).Tell(tell("blocks", key_space_id="-1")), Reason.INVALID_FIELD),
        (lambda c: admin(c.admins).Tell(tell("blocks", pages="1")), Reason.INVALID_FIELD),
        (lambda c: admin(c.admins).Tell(tell("secrets")), Reason.INVALID_FIELD),
        (lambda c: admin(c.admins).Tell(tell("savings", since_s="nan")), Reason.INVALID_FIELD),
        (
            lambda c: admin(c.admins).Tell(tell("blocks", key_space_id="77")),
            Reason.UNKNOWN_KEY_SPACE,
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
        .result(60)
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
        .result(60)
        .results[0][0]
        == 1
    )

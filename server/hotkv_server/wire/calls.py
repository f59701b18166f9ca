"""The calls that clients can make on a session's stream and as unary calls. Each function
returns the answer, or a task or future of it."""

import asyncio
import time
from collections.abc import Sequence

from hotkv_proto.blocks import LeaseGrant
from hotkv_proto.errors import HotKVError, Reason, check_most, invalid
from hotkv_proto.messages import arrays, cache, fields
from hotkv_proto.messages.layout import read_device_mark
from hotkv_proto.messages.report_messages import (
    MAX_REPORTS,
    read_ended,
    read_load_ends,
    read_reports,
)
from hotkv_proto.v1 import cache_pb2, session_pb2
from hotkv_server.cache.values import HashList, LoadPositions, Run
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.node import Node
from hotkv_server.node.transfers import TransferEnd
from hotkv_server.wire.errors import rights_log

SLOWEST, FASTEST = 1.0, 1e9
"""Limits of an engine's prefill speed in tokens per second; outside it counts as unknown, so
that times computed from it are finite."""


def _hash_lists(session: LiveSession, messages: Sequence[cache_pb2.GroupHashes]) -> list[HashList]:
    groups = cache.read_groups(messages, session.key_space.hash_bytes, session.group_index)
    return [HashList(*one) for one in groups]


def block_runs(session: LiveSession, messages: Sequence[cache_pb2.BlockRun]) -> list[Run]:
    """Raises HotKVError if a run is not valid."""
    named = cache.read_runs(messages, session.key_space.hash_bytes, session.group_index)
    return [Run(*one) for one in named]


def lookup(
    node: Node, session: LiveSession | None, request: cache_pb2.LookupRequest
) -> "cache_pb2.LookupResponse | asyncio.Task[cache_pb2.LookupResponse]":
    """Blocks that are ready or can be promoted. A task if the answer must wait for a tier. With
    tenants, only a session may look up, and only in its own key space.

    session: None if the request names none; it must then name a key space.
    """
    began_s = time.monotonic()
    number = request.key_space_id or (session.record.key_space_id if session else 0)
    if number == 0:
        raise invalid("key_space_id is 0 and session_id is empty; give one of them")
    # Only in its own key space has a session its own numbers for groups, because it declares
    # sketches.
    is_own = session is not None and number == session.record.key_space_id
    if node.has_tenants and not is_own:
        raise _hidden(session, number)
    group_index = session.group_index if session is not None and is_own else int
    hash_bytes = node.core.key_space(number).hash_bytes
    named = cache.read_groups(request.groups, hash_bytes, group_index)
    groups = [HashList(*one) for one in named]
    answer: cache_pb2.LookupResponse | asyncio.Task[cache_pb2.LookupResponse]
    if node.tiers is not None and is_own and node.tiers.lookups.must_ask(session, groups):
        assert session is not None
        answer = asyncio.create_task(_lookup_later(node, session, request, groups))
    else:
        answer = _lookup(node, session if is_own else None, request, number, groups)
    return node.timings.answered(node.timings.lookup_s, began_s, answer)


def _lookup(
    node: Node,
    session: LiveSession | None,
    request: cache_pb2.LookupRequest,
    key_space_id: int,
    groups: list[HashList],
) -> cache_pb2.LookupResponse:
    masks = node.core.lookup(key_space_id, groups)
    if node.tiers is not None:
        speed = session.prefill_tokens_per_s if session is not None else 0.0
        elsewhere = node.tiers.lookups.in_lower_tiers(key_space_id, groups, masks, speed)
        if session is not None and any(other.any() for other in elsewhere):
            node.tiers.fetch_ahead(session, groups, masks, elsewhere)
        masks = [ready | other for ready, other in zip(masks, elsewhere, strict=True)]
    return cache_pb2.LookupResponse(groups=cache.flag_messages(request.groups, masks))


async def _lookup_later(
    node: Node, session: LiveSession, request: cache_pb2.LookupRequest, groups: list[HashList]
) -> cache_pb2.LookupResponse:
    assert node.tiers is not None
    key_space_id = session.record.key_space_id
    await node.tiers.lookups.ask(session, key_space_id, groups)
    return _lookup(node, session, request, key_space_id, groups)


def _hidden(session: LiveSession | None, key_space_id: int) -> HotKVError:
    """Does not reveal whether the key space exists."""
    if session is None:
        return HotKVError(
            Reason.UNAUTHENTICATED,
            "session_id is empty; where there are tenants a lookup needs a session",
        )
    return HotKVError(
        Reason.UNKNOWN_KEY_SPACE,
        f"key_space_id {key_space_id} is unknown; leave it 0 for the session's own",
    )


def _of_lease(node: Node, session: LiveSession, lease_id: str, error: HotKVError) -> HotKVError:
    """With tenants, a client must not learn whether another engine has a lease: FOREIGN_LEASE
    becomes UNKNOWN_LEASE."""
    if error.reason is not Reason.FOREIGN_LEASE or not node.has_tenants:
        return error
    rights_log.warning("refused %s: %s", session.name, error)
    return HotKVError(
        Reason.UNKNOWN_LEASE,
        f"lease_id {lease_id!r} is unknown, released or expired; acquire it again",
    )


def acquire(
    node: Node, session: LiveSession, request: cache_pb2.AcquireLeaseRequest
) -> "cache_pb2.AcquireLeaseResponse | asyncio.Task[cache_pb2.AcquireLeaseResponse]":
    """Pins the blocks that are ready; may give their offsets to a client that has the arena's
    descriptor. A task if blocks must first be promoted, or compared with their checksums."""
    began_s = time.monotonic()
    if request.wants_offsets and not session.has_arena:
        raise HotKVError(
            Reason.NOT_ALLOWED,
            "wants_offsets is set, but this session was not given the arena: it has no link, "
            "or its tenant may not map it; load the blocks",
        )
    groups = _hash_lists(session, request.groups)
    lease_id = fields.identifier("lease_id", request.lease_id)
    answer: cache_pb2.AcquireLeaseResponse | asyncio.Task[cache_pb2.AcquireLeaseResponse]
    if node.tiers is not None and (
        node.tiers.must_promote(session, groups)
        or not node.tiers.generations.may_serve(session.record.key_space_id)
    ):
        answer = asyncio.create_task(_acquire_later(node, session, request, lease_id, groups))
    else:
        answer = _acquire(node, session, request, lease_id, groups)
    return node.timings.answered(node.timings.lease_s, began_s, answer)


async def _acquire_later(
    node: Node,
    session: LiveSession,
    request: cache_pb2.AcquireLeaseRequest,
    lease_id: str,
    groups: list[HashList],
) -> cache_pb2.AcquireLeaseResponse:
    """Promotes first. Pins no block if shared stores do not confirm in time that no other node
    has flushed the key space."""
    tiers = node.tiers
    assert tiers is not None
    held = await tiers.promote(session, groups)
    try:
        may_pin = await tiers.generations.wait_to_serve(session.record.key_space_id)
        acquired = _acquire(node, session, request, lease_id, groups, may_pin=may_pin)
    finally:
        tiers.unpin(held)
    return await acquired if isinstance(acquired, asyncio.Task) else acquired


def _acquire(
    node: Node,
    session: LiveSession,
    request: cache_pb2.AcquireLeaseRequest,
    lease_id: str,
    groups: list[HashList],
    *,
    may_pin: bool = True,
) -> "cache_pb2.AcquireLeaseResponse | asyncio.Task[cache_pb2.AcquireLeaseResponse]":
    """`may_pin`: if False, pins no block."""
    ttl_s = fields.seconds("ttl_ms", request.ttl_ms)
    number, now_s = session.record.number, time.monotonic()
    grant = node.core.acquire(number, lease_id, groups, ttl_s, now_s, may_pin=may_pin)
    if not request.wants_offsets:
        return cache.lease_response(request.groups, grant)
    granted = node.in_place.grant(session, lease_id)
    return (
        asyncio.create_task(_in_place_later(request, granted))
        if isinstance(granted, asyncio.Task)
        else cache.lease_response(request.groups, granted)
    )


async def _in_place_later(
    request: cache_pb2.AcquireLeaseRequest, granted: "asyncio.Task[LeaseGrant]"
) -> cache_pb2.AcquireLeaseResponse:
    return cache.lease_response(request.groups, await granted)


async def reserve(
    node: Node, session: LiveSession, request: cache_pb2.ReserveBlocksRequest
) -> cache_pb2.ReserveBlocksResponse:
    """The client's stores under the same lease write into these slots."""
    runs = block_runs(session, request.runs)
    ttl_s = fields.seconds("ttl_ms", request.ttl_ms)
    retention = cache.read_retention("retention", request.retention)
    lease_id = fields.identifier("lease_id", request.lease_id)
    values, ttl_s = await node.reserve(session, lease_id, runs, ttl_s, retention)
    return cache_pb2.ReserveBlocksResponse(
        runs=cache.result_messages([run.group_index for run in request.runs], values),
        ttl_ms=int(ttl_s * 1000),
    )


def release(
    node: Node, session: LiveSession, request: cache_pb2.ReleaseLeaseRequest
) -> cache_pb2.ReleaseLeaseResponse:
    lease_id = fields.identifier("lease_id", request.lease_id)
    try:
        released = node.core.release(session.record.number, lease_id)
    except HotKVError as error:
        if _of_lease(node, session, lease_id, error).reason is not Reason.UNKNOWN_LEASE:
            raise
        released = False
    return cache_pb2.ReleaseLeaseResponse(released=released)


def load(
    node: Node, session: LiveSession, request: cache_pb2.LoadRequest
) -> "asyncio.Future[TransferEnd]":
    """The result is done when the load has ended."""
    named, block_ids = cache.read_load_runs(request.runs, session.group_index)
    positions = [LoadPositions(*one) for one in named]
    timeout_s = fields.seconds("timeout_ms", request.timeout_ms)
    transfer_id = fields.identifier("transfer_id", request.transfer_id)
    lease_id = fields.identifier("lease_id", request.lease_id)
    try:
        return node.transfers.load(
            session,
            transfer_id,
            lease_id,
            positions,
            block_ids,
            timeout_s,
            read_device_mark(request),
            request.end_index,
            request.ByteSize(),
        )
    except HotKVError as error:
        raise _of_lease(node, session, lease_id, error) from None


async def store(
    node: Node, session: LiveSession, request: cache_pb2.StoreRequest
) -> "asyncio.Future[TransferEnd]":
    """Makes room, then starts the store. The future is done when it has ended."""
    runs = block_runs(session, request.runs)
    block_ids = [arrays.int32s("runs.block_ids", run.block_ids) for run in request.runs]
    timeout_s = fields.seconds("timeout_ms", request.timeout_ms)
    transfer_id = fields.identifier("transfer_id", request.transfer_id)
    lease_id = fields.identifier("lease_id", request.lease_id)
    contents = [cache.read_run_content(run, session.key_space) for run in request.runs]
    options = cache.read_store_options(request)
    return await node.transfers.store(
        session,
        transfer_id,
        lease_id,
        runs,
        block_ids,
        timeout_s,
        options,
        request.fence_index,
        contents,
        read_device_mark(request),
        request.end_index,
        request.ByteSize(),
    )


async def report_use(node: Node, session: LiveSession, request: session_pb2.ReportUse) -> None:
    """Records an engine's reports: blocks used from its device cache; requests scheduled and
    ended; loads ended. If one is not valid, raises TOO_LARGE or INVALID_FIELD and records
    nothing."""
    num_hashes = (
        sum(len(one.hashes) for one in request.requests)
        + sum(len(one.hashes) for one in request.ended)
    ) // session.key_space.hash_bytes
    advice = " in a message; send several"
    for name in ("requests", "ended", "loads"):
        check_most(MAX_REPORTS, len(getattr(request, name)), name + " has {} entries", advice)
    named = "requests.hashes and ended.hashes have {} hashes"
    check_most(node.core.config.max_blocks_per_call, num_hashes, named, advice)
    speed = fields.rate("prefill_tokens_per_s", request.prefill_tokens_per_s)
    if not SLOWEST <= speed <= FASTEST:
        speed = 0.0
    used = _hash_lists(session, request.groups)
    loads = read_load_ends(request.loads)
    reports = read_reports(request.requests, session.key_space.hash_bytes)
    ended = read_ended(request.ended, session.key_space.hash_bytes)
    node.reports.check(session, reports)
    node.core.touch(session.record.number, used, time.monotonic())
    session.prefill_tokens_per_s = speed or session.prefill_tokens_per_s
    try:
        await node.reports.note(session, reports)
    finally:
        node.reports.ended(session, ended, loads)


async def flush(node: Node, session: LiveSession) -> session_pb2.Flushed:
    """The session's key space, on this node and in all tiers."""
    flushed = await node.flush(session.record.key_space_id)
    return session_pb2.Flushed(block_count=flushed, pending_tiers=flushed.pending_tiers)


def cancel(
    node: Node, session: LiveSession, request: cache_pb2.CancelTransferRequest
) -> cache_pb2.CancelTransferResponse:
    return cache_pb2.CancelTransferResponse(
        found=node.transfers.cancel(session, request.transfer_id)
    )

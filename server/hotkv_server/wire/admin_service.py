"""AdminService: lists what the server holds; evicts, flushes and drains for operators."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import hotkv_proto
from hotkv_proto import table, versions
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.messages import fields
from hotkv_proto.messages.cache import packed_words, read_hashes
from hotkv_proto.messages.layout import key_space_message, order_kind, representation_message
from hotkv_proto.v1 import admin_pb2, admin_pb2_grpc, layout_pb2
from hotkv_server.cache import inspect
from hotkv_server.cache.values import DISK_TIER
from hotkv_server.events.watch import watch_requests
from hotkv_server.hints.report import explain_session, list_hints
from hotkv_server.ledger.book.columns import HOST_TIER
from hotkv_server.ledger.report import get_savings
from hotkv_server.node.node import Node
from hotkv_server.residency import told as inspect_residencies
from hotkv_server.residency.report import list_residencies
from hotkv_server.sparse import messages as sparse_convert
from hotkv_server.tiers.report import with_activity
from hotkv_server.tiers.told import places
from hotkv_server.told.stats import census, counters, gauges
from hotkv_server.wire.device_report import device_report
from hotkv_server.wire.errors import answer
from hotkv_server.wire.explain import explain
from hotkv_server.wire.session.service import ROLES

STATES = {
    table.STATE_RESERVED: admin_pb2.BLOCK_STATE_RESERVED,
    table.STATE_READY: admin_pb2.BLOCK_STATE_READY,
    table.STATE_DETACHED: admin_pb2.BLOCK_STATE_FLUSHED,
}
DEFAULT_PAGE = 100
MAX_PAGE = 10_000
SERVED_PAGE = 2000
"""Most blocks of a page, however many a client asks for: the event loop makes them one by one."""


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """See admin.proto."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def GetInfo(
        self, request: admin_pb2.GetInfoRequest, context: Any
    ) -> admin_pb2.GetInfoResponse:
        node, counted = self._node, await census(self._node)
        serving = "; ".join(filter(None, ("ready", node.memory.filling.progress())))
        problems = "; ".join(node.health.problems(time.monotonic()))
        return admin_pb2.GetInfoResponse(
            version=hotkv_proto.__version__,
            protocol_version=versions.NEWEST_VERSION,
            oldest_protocol_version=versions.OLDEST_VERSION,
            epoch=node.epoch,
            pid=os.getpid(),
            uptime_s=time.monotonic() - node.started_s,
            state=problems or ("draining" if node.core.draining else serving),
            counters=[
                admin_pb2.Counter(name=name, value=value)
                for name, value in {**counters(node), **gauges(node, counted)}.items()
            ],
            devices=device_report(node.devices),
            loop_held_by=node.lag.read().held_by,
            server_state=admin_pb2.SERVER_STATE_UNHEALTHY
            if problems
            else admin_pb2.SERVER_STATE_DRAINING
            if node.core.draining
            else admin_pb2.SERVER_STATE_READY,
        )

    async def ListTiers(
        self, request: admin_pb2.ListTiersRequest, context: Any
    ) -> admin_pb2.ListTiersResponse:
        found = {HOST_TIER: inspect.tier(self._node.core, await census(self._node))}
        if (lower := inspect.lower_tier(self._node.core)) is not None:
            found[DISK_TIER] = lower
        tiers = [admin_pb2.Tier(**places(name, figures)) for name, figures in found.items()]
        return admin_pb2.ListTiersResponse(tiers=with_activity(tiers, self._node))

    async def ListKeySpaces(
        self, request: admin_pb2.ListKeySpacesRequest, context: Any
    ) -> admin_pb2.ListKeySpacesResponse:
        counted = await census(self._node)
        return admin_pb2.ListKeySpacesResponse(
            key_spaces=[
                admin_pb2.KeySpaceInfo(
                    key_space_id=record.number,
                    fingerprint=record.key_space.fingerprint.hex(),
                    key_space=key_space_message(record.key_space),
                    block_count=record.num_blocks,
                    representations=[
                        representation_message(kind) for kind in record.representations
                    ],
                    representation_count=record.num_representations,
                )
                for record in inspect.key_spaces(self._node.core, counted)
            ]
        )

    async def ListSessions(
        self, request: admin_pb2.ListSessionsRequest, context: Any
    ) -> admin_pb2.ListSessionsResponse:
        now_s = time.monotonic()
        held = inspect.leases_of_engines(self._node.core)
        resident = inspect_residencies.counts_by_session(self._node.core)
        return admin_pb2.ListSessionsResponse(
            sessions=[
                admin_pb2.SessionInfo(
                    session_number=s.record.number,
                    engine_id=s.record.engine_id,
                    role=ROLES[s.record.role],
                    key_space_id=s.record.key_space_id,
                    age_s=now_s - s.record.opened_s,
                    lease_count=held.get(s.record.engine_id, 0),
                    transfer_count=len(s.jobs),
                    memory_byte_count=s.memory.num_bytes if s.memory else 0,
                    loaded_byte_count=s.loaded_bytes,
                    stored_byte_count=s.stored_bytes,
                    client_name=s.client_name,
                    device_allocation_count=len(s.memory.allocations) if s.memory else 0,
                    device_order=order_kind(s.memory.order.kind)
                    if s.memory
                    else layout_pb2.DEVICE_ORDER_KIND_UNSPECIFIED,
                    residency_count=resident.get(s.record.number, 0),
                    prefill_tokens_per_s=s.prefill_tokens_per_s,
                )
                for s in sorted(self._node.sessions, key=lambda s: s.record.number)
            ]
        )

    async def ListBlocks(
        self, request: admin_pb2.ListBlocksRequest, context: Any
    ) -> admin_pb2.ListBlocksResponse:
        async def call() -> admin_pb2.ListBlocksResponse:
            return await self._list_blocks(request)

        return await answer(self._node, context, call)

    async def _list_blocks(
        self, request: admin_pb2.ListBlocksRequest
    ) -> admin_pb2.ListBlocksResponse:
        if not request.page_token.isdecimal() and request.page_token:
            raise HotKVError(
                Reason.INVALID_FIELD,
                "page_token is none that this server gave out; leave it empty to begin",
            )
        if not 0 <= request.page_size <= MAX_PAGE:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"page_size is {request.page_size}; allowed are 0 (for {DEFAULT_PAGE}) to "
                f"{MAX_PAGE}",
            )
        start, size = (
            int(request.page_token or 0),
            min(request.page_size or DEFAULT_PAGE, SERVED_PAGE),
        )
        if request.key_space_id:
            self._node.core.key_space(request.key_space_id)
        entries: list[int] = []
        finding = inspect.find_blocks(self._node.core, start, size + 1, request.key_space_id)
        for entries in finding:  # noqa: B007 - each part has what was found so far
            await asyncio.sleep(0)
        now_s = time.monotonic()
        return admin_pb2.ListBlocksResponse(
            blocks=[self._block(b, now_s) for b in inspect.blocks(self._node.core, entries[:size])],
            next_page_token=str(entries[size]) if len(entries) > size else "",
        )

    def _block(self, block: inspect.BlockFigures, now_s: float) -> admin_pb2.Block:
        hash_bytes = self._node.core.key_space(block.key_space_id).hash_bytes
        idle_s = max(0.0, now_s - block.last_used_s) if block.last_used_s else 0.0
        parent = block.parent_words
        return admin_pb2.Block(
            block_hash=packed_words(block.hash_words[None], hash_bytes),
            key_space_id=block.key_space_id,
            group_index=block.group_index,
            state=STATES[block.state],
            byte_count=block.slot_bytes,
            depth=block.depth,
            pin_count=block.num_pins,
            idle_s=idle_s,
            representation_byte_count=block.representation_bytes,
            parent_hash=b"" if parent is None else packed_words(parent[None], hash_bytes),
        )

    async def Evict(self, request: admin_pb2.EvictRequest, context: Any) -> admin_pb2.EvictResponse:
        async def call() -> admin_pb2.EvictResponse:
            if request.all == bool(request.hashes):
                raise HotKVError(Reason.INVALID_FIELD, "hashes and all: give exactly one of them")
            if request.all:
                evicted, kept = await self._node.removals.evict_all(request.key_space_id)
            else:
                words = read_hashes(
                    "hashes",
                    request.hashes,
                    self._node.core.key_space(request.key_space_id).hash_bytes,
                )
                evicted, kept = await self._node.removals.evict(
                    request.key_space_id, request.group_index, words
                )
            return admin_pb2.EvictResponse(evicted_block_count=evicted, kept_block_count=kept)

        return await answer(self._node, context, call)

    async def FlushKeySpace(
        self, request: admin_pb2.FlushKeySpaceRequest, context: Any
    ) -> admin_pb2.FlushKeySpaceResponse:
        async def call() -> admin_pb2.FlushKeySpaceResponse:
            flushed = await self._node.flush(request.key_space_id)
            return admin_pb2.FlushKeySpaceResponse(
                flushed_block_count=flushed.num_blocks, pending_tiers=flushed.pending
            )

        return await answer(self._node, context, call)

    async def WatchRequests(
        self, request: admin_pb2.WatchRequestsRequest, context: Any
    ) -> AsyncIterator[admin_pb2.WatchRequestsResponse]:
        async for part in watch_requests(self._node, request, context):
            yield part

    async def Drain(self, request: admin_pb2.DrainRequest, context: Any) -> admin_pb2.DrainResponse:
        async def call() -> admin_pb2.DrainResponse:
            self._node.drain(fields.seconds("timeout_ms", request.timeout_ms) or None)
            live = inspect.counts(self._node.core)
            return admin_pb2.DrainResponse(
                lease_count=live.num_leases, transfer_count=live.num_transfers
            )

        return await answer(self._node, context, call)

    async def ListSparseLayers(
        self, request: admin_pb2.ListSparseLayersRequest, context: Any
    ) -> admin_pb2.ListSparseLayersResponse:
        return admin_pb2.ListSparseLayersResponse(
            layers=[
                admin_pb2.SparseLayer(
                    engine_id=engine_id, counters=sparse_convert.layer_counters(growth)
                )
                for engine_id, growth in self._node.sparse.figures.rows()
            ]
        )

    async def ListHints(
        self, request: admin_pb2.ListHintsRequest, context: Any
    ) -> admin_pb2.ListHintsResponse:
        async def call() -> admin_pb2.ListHintsResponse:
            return list_hints(self._node, request)

        return await answer(self._node, context, call)

    async def ExplainSession(
        self, request: admin_pb2.ExplainSessionRequest, context: Any
    ) -> admin_pb2.ExplainSessionResponse:
        async def call() -> admin_pb2.ExplainSessionResponse:
            return await explain_session(self._node, request)

        return await answer(self._node, context, call)

    async def ListResidencies(
        self, request: admin_pb2.ListResidenciesRequest, context: Any
    ) -> admin_pb2.ListResidenciesResponse:
        async def call() -> admin_pb2.ListResidenciesResponse:
            return list_residencies(self._node, request)

        return await answer(self._node, context, call)

    async def GetSavings(
        self, request: admin_pb2.GetSavingsRequest, context: Any
    ) -> admin_pb2.GetSavingsResponse:
        async def call() -> admin_pb2.GetSavingsResponse:
            return get_savings(self._node, request)

        return await answer(self._node, context, call)

    async def Explain(
        self, request: admin_pb2.ExplainRequest, context: Any
    ) -> admin_pb2.ExplainResponse:
        async def call() -> admin_pb2.ExplainResponse:
            return await explain(self._node, request)

        return await answer(self._node, context, call)

"""AdminService: lists what the server holds; evicts, flushes and drains for operators."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hotkv
from hotkv import table
from hotkv.errors import HotKVError, Reason
from hotkv.v1 import admin_pb2, admin_pb2_grpc
from hotkv_server.core.census import PART_ENTRIES
from hotkv_server.core.values import KEY_SPACE_ROWS
from hotkv_server.rpc import convert, sparse_convert
from hotkv_server.rpc.device_report import device_report
from hotkv_server.rpc.errors import answer
from hotkv_server.rpc.explain import explain
from hotkv_server.rpc.watch import watch_requests
from hotkv_server.runtime.node import Node
from hotkv_server.runtime.stats import census, counters, gauges, tier

STATES = {
    table.STATE_RESERVED: "reserved",
    table.STATE_READY: "ready",
    table.STATE_DETACHED: "flushed",
}
DEFAULT_PAGE = 100
MAX_PAGE = 10_000
SERVED_PAGE = 2000
"""Most blocks of a page, however many a client asks for: the event loop makes them one by one."""
DEFAULT_DRAIN_S = 30.0


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """See admin.proto."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def GetInfo(
        self, request: admin_pb2.GetInfoRequest, context: Any
    ) -> admin_pb2.GetInfoResponse:
        node, counted = self._node, await census(self._node)
        serving = "; ".join(filter(None, ("ready", node.memory.filling.progress())))
        return admin_pb2.GetInfoResponse(
            version=hotkv.__version__,
            protocol_version=hotkv.PROTOCOL_VERSION,
            epoch=node.epoch,
            pid=os.getpid(),
            uptime_s=time.monotonic() - node.started_s,
            state="; ".join(node.health.problems(time.monotonic()))
            or ("draining" if node.core.draining else serving),
            counters=[
                admin_pb2.Counter(name=name, value=value)
                for name, value in {**counters(node), **gauges(node, counted)}.items()
            ],
            devices=device_report(node.devices),
            loop_held_by=node.lag.read().held_by,
        )

    async def ListTiers(
        self, request: admin_pb2.ListTiersRequest, context: Any
    ) -> admin_pb2.ListTiersResponse:
        host = tier(self._node, await census(self._node))
        message = admin_pb2.Tier(
            name="host",
            capacity_byte_count=host.capacity_bytes,
            used_byte_count=host.used_bytes,
            pinned_byte_count=host.pinned_bytes,
            block_count=host.num_blocks,
            free_slab_count=host.num_free_slabs,
            slab_byte_count=host.slab_bytes,
            representation_byte_count=host.representation_bytes,
            slab_classes=[
                admin_pb2.SlabClass(
                    slot_byte_count=c.slot_bytes,
                    slab_count=c.num_slabs,
                    slot_count=c.num_slots,
                    used_slot_count=c.num_used,
                )
                for c in host.slab_classes
            ],
        )
        return admin_pb2.ListTiersResponse(tiers=[message])

    async def ListKeySpaces(
        self, request: admin_pb2.ListKeySpacesRequest, context: Any
    ) -> admin_pb2.ListKeySpacesResponse:
        counted = await census(self._node)
        return admin_pb2.ListKeySpacesResponse(
            key_spaces=[
                admin_pb2.KeySpaceInfo(
                    key_space_id=number,
                    fingerprint=record.key_space.fingerprint.hex(),
                    key_space=convert.key_space_message(record.key_space),
                    block_count=int(counted.blocks[number % KEY_SPACE_ROWS]),
                    representations=[
                        convert.representation_message(kind) for kind in record.representations
                    ],
                    representation_count=int(counted.representations[number % KEY_SPACE_ROWS]),
                )
                for number, record in sorted(self._node.core.key_spaces.items())
            ]
        )

    async def ListSessions(
        self, request: admin_pb2.ListSessionsRequest, context: Any
    ) -> admin_pb2.ListSessionsResponse:
        now_s = time.monotonic()
        held: dict[str, int] = {}
        for lease in self._node.core.leases.all():
            held[lease.engine_id] = held.get(lease.engine_id, 0) + 1
        return admin_pb2.ListSessionsResponse(
            sessions=[
                admin_pb2.SessionInfo(
                    session_number=s.record.number,
                    engine_id=s.record.engine_id,
                    role=s.record.role,
                    key_space_id=s.record.key_space_id,
                    age_s=now_s - s.record.opened_s,
                    lease_count=held.get(s.record.engine_id, 0),
                    transfer_count=len(s.jobs),
                    memory_byte_count=s.memory.num_bytes if s.memory else 0,
                    loaded_byte_count=s.loaded_bytes,
                    stored_byte_count=s.stored_bytes,
                    client_name=s.client_name,
                    device_allocation_count=len(s.memory.allocations) if s.memory else 0,
                    device_order=s.memory.order.kind.name.lower() if s.memory else "",
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
        entries = await self._listed(start, size + 1, request.key_space_id)
        # What was found first may have gone since.
        records = self._node.core.space.index.table.records
        page = entries[:size][records[entries[:size], table.W_GROUP_STATE] >> np.uint32(16) != 0]
        now_s = time.monotonic()
        used_s = self._node.core.space.policy.last_used_s(page)
        blocks = [
            self._block(int(entry), max(0.0, now_s - float(used)) if used else 0.0)
            for entry, used in zip(page, used_s, strict=True)
        ]
        return admin_pb2.ListBlocksResponse(
            blocks=blocks, next_page_token=str(int(entries[size])) if len(entries) > size else ""
        )

    async def _listed(self, start: int, most: int, key_space_id: int) -> NDArray[np.uint32]:
        """The first `most` blocks with numbers from `start` on, of one key space unless that is 0.
        Others are served meanwhile."""
        index, found = self._node.core.space.index, [np.empty(0, np.uint32)]
        while start < index.num_numbers and sum(map(len, found)) < most:
            states = index.states(start, start + PART_ENTRIES)
            wanted = states != 0
            if key_space_id:
                wanted &= (
                    index.table.records[start : start + len(states), table.W_KEY_SPACE]
                    == key_space_id
                )
            entries = start + np.flatnonzero(wanted).astype(np.uint32)
            found.append(entries[~self._node.core.space.representations.among(entries)])
            start += PART_ENTRIES
            await asyncio.sleep(0)
        return np.concatenate(found)[:most]

    def _block(self, entry: int, idle_s: float) -> admin_pb2.Block:
        index = self._node.core.space.index
        record = index.table.records[entry]
        number, group = int(record[table.W_KEY_SPACE]), int(record[table.W_GROUP_STATE] & 0xFFFF)
        hash_bytes = self._node.core.key_space(number).hash_bytes
        parent = index.table.records[int(record[table.W_PARENT])]
        follows = (
            record[table.W_PARENT]
            and parent[table.W_GROUP_STATE] >> 16
            and parent[table.W_DEPTH] + 1 == record[table.W_DEPTH]
        )
        return admin_pb2.Block(
            block_hash=convert.unpadded(record[None, :8], hash_bytes),
            key_space_id=number,
            group_index=group,
            state=STATES[int(record[table.W_GROUP_STATE] >> 16)],
            byte_count=self._node.core.key_space(number).groups[group].slot_bytes,
            depth=int(record[table.W_DEPTH]),
            pin_count=int(index.pins[entry]),
            idle_s=idle_s,
            representation_byte_count=int(index.slot_bytes(record[table.W_REPRESENTATION]))
            if record[table.W_REPRESENTATION]
            else 0,
            parent_hash=convert.unpadded(parent[None, :8], hash_bytes) if follows else b"",
        )

    async def Evict(self, request: admin_pb2.EvictRequest, context: Any) -> admin_pb2.EvictResponse:
        async def call() -> admin_pb2.EvictResponse:
            if request.all == bool(request.hashes):
                raise HotKVError(Reason.INVALID_FIELD, "hashes and all: give exactly one of them")
            if request.all:
                evicted, kept = await self._node.removals.evict_all(request.key_space_id)
            else:
                words = convert.hashes(
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
            return admin_pb2.FlushKeySpaceResponse(
                flushed_block_count=await self._node.removals.flush(request.key_space_id)
            )

        return await answer(self._node, context, call)

    async def WatchRequests(
        self, request: admin_pb2.WatchRequestsRequest, context: Any
    ) -> AsyncIterator[admin_pb2.WatchRequestsResponse]:
        async for part in watch_requests(self._node, request, context):
            yield part

    async def Drain(self, request: admin_pb2.DrainRequest, context: Any) -> admin_pb2.DrainResponse:
        async def call() -> admin_pb2.DrainResponse:
            self._node.drain(convert.seconds("timeout_ms", request.timeout_ms) or DEFAULT_DRAIN_S)
            return admin_pb2.DrainResponse(
                lease_count=len(self._node.core.leases),
                transfer_count=len(self._node.core.transfers),
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

    async def Explain(
        self, request: admin_pb2.ExplainRequest, context: Any
    ) -> admin_pb2.ExplainResponse:
        async def call() -> admin_pb2.ExplainResponse:
            return await explain(self._node, request)

        return await answer(self._node, context, call)

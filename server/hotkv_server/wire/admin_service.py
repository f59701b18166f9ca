"""AdminService: tells what the server says of itself; explains, evicts, flushes and drains for
operators."""

from collections.abc import AsyncIterator
from typing import Any

import orjson

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.messages import fields
from hotkv_proto.messages.cache import read_hashes
from hotkv_proto.v1 import admin_pb2, admin_pb2_grpc
from hotkv_proto.versions import MAX_MESSAGE_BYTES
from hotkv_server.cache import inspect
from hotkv_server.node.node import Node
from hotkv_server.node.topics import tell
from hotkv_server.told.kernel import all_topics
from hotkv_server.wire.errors import answer
from hotkv_server.wire.explain import explain
from hotkv_server.wire.watch import watch_requests

MAX_TOLD = MAX_MESSAGE_BYTES - (1 << 10)
"""Most characters of an answer: names are ASCII as nearly always."""


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """See admin.proto."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._topics = all_topics(node)

    async def Tell(self, request: admin_pb2.TellRequest, context: Any) -> admin_pb2.TellResponse:
        async def call() -> admin_pb2.TellResponse:
            told = await tell(self._topics, request.topic, request.filters)
            text = orjson.dumps(told).decode()
            if len(text) > MAX_TOLD:
                raise HotKVError(
                    Reason.TOO_LARGE,
                    f"the answer has {len(text)} characters; at most {MAX_TOLD} can be sent: "
                    "narrow it with filters, such as page_size",
                )
            return admin_pb2.TellResponse(json=text)

        return await answer(self._node, context, call)

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
                flushed_block_count=flushed, pending_tiers=flushed.pending_tiers
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

    async def Explain(
        self, request: admin_pb2.ExplainRequest, context: Any
    ) -> admin_pb2.ExplainResponse:
        async def call() -> admin_pb2.ExplainResponse:
            return await explain(self._node, request)

        return await answer(self._node, context, call)

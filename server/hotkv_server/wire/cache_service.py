"""CacheService: lookups, leases and transfers as unary calls, which name their session by its
secret id. Without tenants, a lookup needs no session."""

import asyncio
from typing import Any

from hotkv_proto.messages.cache import load_response, store_response
from hotkv_proto.v1 import cache_pb2, cache_pb2_grpc
from hotkv_server.node.node import Node
from hotkv_server.wire import calls
from hotkv_server.wire.edge import calls_of
from hotkv_server.wire.errors import answer


class CacheService(cache_pb2_grpc.CacheServiceServicer):
    def __init__(self, node: Node) -> None:
        self._node = node
        self._traceable = calls_of(node)

    async def Lookup(
        self, request: cache_pb2.LookupRequest, context: Any
    ) -> cache_pb2.LookupResponse:
        async def call() -> cache_pb2.LookupResponse:
            session = self._node.sessions.get(request.session_id) if request.session_id else None
            found = self._traceable.lookup(self._node, session, request)
            return await found if isinstance(found, asyncio.Task) else found

        return await answer(self._node, context, call)

    async def AcquireLease(
        self, request: cache_pb2.AcquireLeaseRequest, context: Any
    ) -> cache_pb2.AcquireLeaseResponse:
        async def call() -> cache_pb2.AcquireLeaseResponse:
            acquired = self._traceable.acquire(
                self._node, self._node.sessions.get(request.session_id), request
            )
            return await acquired if isinstance(acquired, asyncio.Task) else acquired

        return await answer(self._node, context, call)

    async def ReserveBlocks(
        self, request: cache_pb2.ReserveBlocksRequest, context: Any
    ) -> cache_pb2.ReserveBlocksResponse:
        async def call() -> cache_pb2.ReserveBlocksResponse:
            return await calls.reserve(
                self._node, self._node.sessions.get(request.session_id), request
            )

        return await answer(self._node, context, call)

    async def ReleaseLease(
        self, request: cache_pb2.ReleaseLeaseRequest, context: Any
    ) -> cache_pb2.ReleaseLeaseResponse:
        async def call() -> cache_pb2.ReleaseLeaseResponse:
            return calls.release(self._node, self._node.sessions.get(request.session_id), request)

        return await answer(self._node, context, call)

    async def Load(self, request: cache_pb2.LoadRequest, context: Any) -> cache_pb2.LoadResponse:
        async def call() -> cache_pb2.LoadResponse:
            end = await self._traceable.load(
                self._node, self._node.sessions.get(request.session_id), request
            )
            return load_response(end)

        return await answer(self._node, context, call)

    async def Store(self, request: cache_pb2.StoreRequest, context: Any) -> cache_pb2.StoreResponse:
        async def call() -> cache_pb2.StoreResponse:
            storing = await self._traceable.store(
                self._node, self._node.sessions.get(request.session_id), request
            )
            end = await storing
            return store_response(end, [run.group_index for run in request.runs])

        return await answer(self._node, context, call)

    async def CancelTransfer(
        self, request: cache_pb2.CancelTransferRequest, context: Any
    ) -> cache_pb2.CancelTransferResponse:
        async def call() -> cache_pb2.CancelTransferResponse:
            return calls.cancel(self._node, self._node.sessions.get(request.session_id), request)

        return await answer(self._node, context, call)

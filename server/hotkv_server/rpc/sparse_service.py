"""SparseService: the unary forms, and the stream of selections.

Selections of one stream are made one after the other, and the next request is read when the answer has been sent: a client that does not
read is not served. A refused request is answered, and the stream goes on.
"""

from collections.abc import AsyncIterator
from typing import Any

from hotkv.v1 import sparse_pb2, sparse_pb2_grpc
from hotkv_server.rpc import calls, sparse_convert
from hotkv_server.rpc.errors import answer, as_refusal, detail
from hotkv_server.rpc.interceptor import Malformed
from hotkv_server.rpc.pace import Pace
from hotkv_server.runtime.node import Node


class SparseService(sparse_pb2_grpc.SparseServiceServicer):
    """See sparse.proto."""

    def __init__(self, node: Node, pace: Pace) -> None:
        self._node = node
        self._pace = pace

    async def CreateSequence(self, request: sparse_pb2.CreateSequenceRequest, context: Any) -> sparse_pb2.CreateSequenceResponse:
        async def call() -> sparse_pb2.CreateSequenceResponse:
            return calls.create_sequence(self._node, self._node.session(request.session_id), request)

        return await answer(self._node, context, call)

    async def AppendBlocks(self, request: sparse_pb2.AppendBlocksRequest, context: Any) -> sparse_pb2.AppendBlocksResponse:
        async def call() -> sparse_pb2.AppendBlocksResponse:
            return calls.append_blocks(self._node, self._node.session(request.session_id), request)

        return await answer(self._node, context, call)

    async def DeleteSequence(self, request: sparse_pb2.DeleteSequenceRequest, context: Any) -> sparse_pb2.DeleteSequenceResponse:
        async def call() -> sparse_pb2.DeleteSequenceResponse:
            return await calls.delete_sequence(self._node, self._node.session(request.session_id), request)

        return await answer(self._node, context, call)

    async def SelectBlocks(
        self, request_iterator: AsyncIterator[sparse_pb2.SelectBlocksRequest], context: Any
    ) -> AsyncIterator[sparse_pb2.SelectBlocksResponse]:
        async for request in request_iterator:
            try:
                response = await self._select(request)
            except Exception as error:  # noqa: BLE001 The edge of the stream: every failure is an answer.
                refusal = as_refusal(self._node, error, f"peer={context.peer()}")
                response = sparse_pb2.SelectBlocksResponse(error=detail(refusal))
            yield response

    async def _select(self, request: sparse_pb2.SelectBlocksRequest | Malformed) -> sparse_pb2.SelectBlocksResponse:
        if isinstance(request, Malformed):
            await self._pace.turn()
            raise request.error
        session = self._node.session(request.session_id)
        spec = self._node.sparse.spec(session, request.sequence_id)
        selected = await self._node.sparse.select(session, request.sequence_id, sparse_convert.select_request(request, spec))
        return sparse_convert.select_response(selected)

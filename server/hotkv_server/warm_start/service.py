"""WarmStartService: ExportBlocks lists the blocks that the node would keep longest,
PrefetchBlocks promotes blocks that a client names."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from hotkv_proto.errors import check_most, invalid
from hotkv_proto.keys import KeySpace
from hotkv_proto.messages import fields
from hotkv_proto.messages.cache import packed_words, read_groups
from hotkv_proto.messages.layout import key_space_message, read_key_space
from hotkv_proto.v1 import cache_pb2, warm_pb2, warm_pb2_grpc
from hotkv_server.cache.values import HashList
from hotkv_server.node.node import Node
from hotkv_server.warm_start.drive import WarmStart, unrelated
from hotkv_server.wire.edge import of_groups, prompt_hashes
from hotkv_server.wire.errors import abort, answer, as_refusal

DEFAULT_WAIT_S, MAX_WAIT_S = 10.0, 60.0


class WarmStartService(warm_pb2_grpc.WarmStartServiceServicer):
    def __init__(self, node: Node) -> None:
        self._node = node
        self._warm = WarmStart(node.core, node.tiers)

    async def ExportBlocks(
        self, request: warm_pb2.ExportBlocksRequest, context: Any
    ) -> AsyncIterator[warm_pb2.ExportBlocksResponse]:
        try:
            if request.byte_count < 0:
                raise invalid(f"byte_count is {request.byte_count}; it is 0 for all, or positive")
            space = self._node.core.key_space(request.key_space_id)
            message = key_space_message(space)
            yield warm_pb2.ExportBlocksResponse(key_space=message)
            async for lists in self._warm.export(request.key_space_id, request.byte_count):
                groups = [_named(one, space) for one in lists]
                yield warm_pb2.ExportBlocksResponse(groups=groups)
        except Exception as error:  # noqa: BLE001 The edge of server streams: every failure is an answer.
            await abort(context, as_refusal(self._node, error, f"peer={context.peer()}"))

    async def PrefetchBlocks(
        self, request: warm_pb2.PrefetchBlocksRequest, context: Any
    ) -> warm_pb2.PrefetchBlocksResponse:
        async def call() -> warm_pb2.PrefetchBlocksResponse:
            wait_s = fields.seconds("timeout_ms", request.timeout_ms) or DEFAULT_WAIT_S
            if wait_s > MAX_WAIT_S:
                raise invalid(
                    f"timeout_ms is {request.timeout_ms}; at most {MAX_WAIT_S * 1000:.0f}"
                )
            number = await self._key_space_id(request)
            lists = await self._lists(number, request)
            found = await self._warm.prefetch(number, lists, wait_s)
            return warm_pb2.PrefetchBlocksResponse(
                present_block_count=found.num_present,
                fetched_block_count=found.num_fetched,
                lower_block_count=found.num_lower,
                absent_block_count=found.num_absent,
            )

        return await answer(self._node, context, call)

    async def _key_space_id(self, request: warm_pb2.PrefetchBlocksRequest) -> int:
        if request.HasField("key_space") == bool(request.key_space_id):
            raise invalid("key_space and key_space_id: give exactly one of them")
        if request.key_space_id:
            return request.key_space_id
        key_space = read_key_space(request.key_space)
        return await self._node.sessions.declare(key_space)

    async def _lists(self, number: int, request: warm_pb2.PrefetchBlocksRequest) -> list[HashList]:
        """Raises HotKVError if a group or hash is invalid, or no block or too many are named."""
        space = self._node.core.key_space(number)
        named = read_groups(request.groups, space.hash_bytes, lambda index: _checked(space, index))
        lists = [unrelated(*one) for one in named]
        for prompt in request.prompts:
            hashes = await asyncio.to_thread(prompt_hashes, space, prompt.hashes, prompt.token_ids)
            lists += of_groups(space, hashes)
        most = self._node.core.config.max_blocks_per_call
        num_blocks = sum(len(one.hashes) for one in lists)
        check_most(most, num_blocks, "the call names {} blocks", ": send several")
        if not num_blocks:
            raise invalid("groups and prompts name no whole block; name some")
        return lists


def _named(some: HashList, space: KeySpace) -> cache_pb2.GroupHashes:
    packed = packed_words(some.hashes, space.hash_bytes)
    return cache_pb2.GroupHashes(group_index=some.group_index, hashes=packed)


def _checked(space: KeySpace, group_index: int) -> int:
    if not 0 <= group_index < len(space.groups):
        raise invalid(
            f"groups.group_index is {group_index}; this key space has {len(space.groups)} groups"
        )
    return group_index

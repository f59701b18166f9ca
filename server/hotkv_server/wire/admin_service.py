"""AdminService: the calls of operators."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from hotkv_proto.errors import HotKVError, Reason, invalid
from hotkv_proto.groups import PREFIX_CLOSED, alignment_tokens, longest_hit, needed_blocks
from hotkv_proto.keys import KeySpace
from hotkv_proto.messages import fields
from hotkv_proto.messages.cache import packed_words, read_hashes
from hotkv_proto.table import RESERVED_FLAG
from hotkv_proto.v1 import admin_pb2, admin_pb2_grpc
from hotkv_proto.versions import MAX_MESSAGE_BYTES
from hotkv_server.cache import inspect
from hotkv_server.cache.values import DISK_TIER, Cause
from hotkv_server.monitoring.topics import all_topics
from hotkv_server.node.arena_size import DEFAULT_DEADLINE_S
from hotkv_server.node.capability import TierHolding, tell
from hotkv_server.node.event_loop import Breaks
from hotkv_server.node.node import Node
from hotkv_server.node.reports import WatchedReport
from hotkv_server.wire.edge import of_groups, prompt_hashes
from hotkv_server.wire.errors import answer, stream

# Explain: where each block of a prompt lies, whether it would hit, and if not, why. The cache is
# asked on the event loop; hashes and texts are made on a thread.


NEVER_STORED, EVICTED, REMOVED, NO_ROOM = (
    admin_pb2.BLOCK_VERDICT_NEVER_STORED,
    admin_pb2.BLOCK_VERDICT_EVICTED,
    admin_pb2.BLOCK_VERDICT_REMOVED,
    admin_pb2.BLOCK_VERDICT_NO_ROOM,
)
GONE = {
    Cause.NONE: (NEVER_STORED, "new, or removed long ago"),
    Cause.ROOM: (EVICTED, "it made room for others"),
    Cause.OPERATOR: (REMOVED, "`hotkv evict` or another call removed it"),
    Cause.FLUSH: (REMOVED, "a flush of its key space dropped it"),
    Cause.DAMAGE: (REMOVED, "its bytes were damaged"),
    Cause.HINT: (EVICTED, "a hint demoted it to a tier, which has no room for it any more"),
    Cause.EXPIRY: (NEVER_STORED, "its store did not end before its lease expired"),
    Cause.NO_ROOM: (NO_ROOM, "its store found only pinned, reserved or hotter blocks to evict"),
}
"""Why a block is not cached, by the cause of its removal."""
PERHAPS_NOT_KEPT = (
    "new, removed long ago, or not kept: engines store some blocks of this group only"
)
"""For groups in which a hit does not need all earlier blocks (sliding windows, states at
intervals): engines store only blocks that a later hit may need."""
HOST = "host"
MAX_BLOCKS = 1 << 16
"""Of one answer, over all key spaces."""


async def explain(node: Node, request: admin_pb2.ExplainRequest) -> admin_pb2.ExplainResponse:
    """In the key space of the request, or in all whose hashes can be computed from the prompt.
    If the request names a user's conversation, explains its latest prompts."""
    prompts = _of_session(node, request) if request.session_id else _of_prompt(node, request)
    response = admin_pb2.ExplainResponse()
    room, breaks = MAX_BLOCKS, Breaks()
    used = {session.record.key_space_id for session in node.sessions}
    for tenant, number, packed, token_ids in prompts:
        try:
            space = node.core.key_space(number)
            hashes = await asyncio.to_thread(prompt_hashes, space, packed, token_ids)
            # May have been forgotten meanwhile.
            node.core.key_space(number)
        except HotKVError:
            if request.key_space_id:
                raise
            continue
        room -= sum(
            len(hashes) * space.hash_block_tokens // group.block_tokens for group in space.groups
        )
        if room < 0:
            raise HotKVError(
                Reason.TOO_LARGE,
                f"the answer has more than {MAX_BLOCKS} blocks; name a key_space_id, or a "
                "shorter prompt",
            )
        lists = of_groups(space, hashes)
        try:
            locations = (
                await node.tiers.lookups.find(number, lists) if node.tiers is not None else []
            )
            node.core.key_space(number)
        except HotKVError:
            if request.key_space_id:
                raise
            continue
        num_tokens = len(hashes) * space.hash_block_tokens
        found: list[inspect.PromptBlocks] = []
        for one in lists:
            found.append(inspect.prompt_blocks(node.core, number, one.group_index, one.hashes))
            await breaks.between()
        await asyncio.to_thread(
            _explain,
            response.key_spaces.add(
                tenant=tenant, model_name=node.names.model_of(space), is_unused=number not in used
            ),
            space,
            number,
            found,
            locations,
            num_tokens,
            # An engine always computes a prompt's last token itself.
            min(num_tokens, len(token_ids) // 4 - 1) if token_ids else num_tokens,
        )
        if await asyncio.to_thread(response.ByteSize) > MAX_MESSAGE_BYTES:
            raise HotKVError(
                Reason.TOO_LARGE,
                f"the answer has more than {MAX_MESSAGE_BYTES} bytes; name a key_space_id, or a "
                "shorter prompt",
            )
    return response


Prompt = tuple[str, int, bytes, bytes]
"""Tenant of the conversation (empty without one), key space id, packed hashes, packed token ids."""


def _of_prompt(node: Node, request: admin_pb2.ExplainRequest) -> list[Prompt]:
    if not request.hashes and not request.token_ids:
        raise invalid("hashes, token_ids and session_id are empty; give one of them")
    numbers = [request.key_space_id] if request.key_space_id else sorted(node.core.key_spaces)
    return [("", number, request.hashes, request.token_ids) for number in numbers]


def _of_session(node: Node, request: admin_pb2.ExplainRequest) -> list[Prompt]:
    if request.hashes or request.token_ids:
        raise invalid("session_id: give it without a prompt")
    return [
        (tenant, number, packed_words(words, node.core.key_space(number).hash_bytes), b"")
        for tenant, number, words in node.offers.session_prompts(request.session_id, request.tenant)
        if number in node.core.key_spaces and len(words) and request.key_space_id in (0, number)
    ]


def _explain(
    explanation: admin_pb2.KeySpaceExplanation,
    space: KeySpace,
    number: int,
    found: Sequence[inspect.PromptBlocks],
    locations: Sequence[TierHolding],
    num_tokens: int,
    most_tokens: int,
) -> None:
    """Writes a verdict for each block, and a summary, into `explanation`: returning so large a
    message would copy it, which holds the GIL for long.

    found: states in host memory, for each group.
    num_tokens: in whole blocks of the prompt.
    most_tokens: of a hit.
    """
    masks, tiers = [], [_tiers(group, index, locations) for index, group in enumerate(found)]
    for index, group in enumerate(found):
        is_ready = (group.words != 0) & (group.words < RESERVED_FLAG)
        is_up = np.array([one.is_up for one in locations] + [True], np.bool_)
        masks.append(is_ready | ((tiers[index] >= 0) & is_up[tiers[index]]))
        for depth, word in enumerate(group.words):
            tier = HOST if is_ready[depth] else ""
            if tiers[index][depth] >= 0:
                one = locations[tiers[index][depth]]
                tier, verdict = one.name, admin_pb2.BLOCK_VERDICT_BELOW
                where = "on disk" if tier == DISK_TIER else f"in {tier}"
                text = "a lease brings it up" if one.is_up else "but that is down"
                text = f"{where}; {text}"
            elif word == 0:
                cause = Cause(int(group.causes[depth]))
                verdict, text = GONE[cause]
                if cause is Cause.NONE and space.groups[index].kind not in PREFIX_CLOSED:
                    text = PERHAPS_NOT_KEPT
            elif word >= RESERVED_FLAG:
                verdict, text = admin_pb2.BLOCK_VERDICT_RESERVED, "it is being written"
            else:
                verdict, text = admin_pb2.BLOCK_VERDICT_READY, ""
            packed = packed_words(group.hashes[depth : depth + 1], space.hash_bytes)
            explanation.blocks.add(
                group_index=index,
                depth=depth,
                block_hash=packed,
                verdict=verdict,
                detail=text,
                tier=tier,
            )
    hit = longest_hit(space.groups, masks, most_tokens)
    limiting, depth = _limit(space, masks, hit, most_tokens)
    explanation.key_space_id, explanation.hit_token_count, explanation.token_count = (
        number,
        hit,
        num_tokens,
    )
    explanation.limiting_group_index = limiting
    at = depth + sum(len(group.words) for group in found[: max(0, limiting)])
    missing = explanation.blocks[at] if limiting >= 0 else None
    explanation.summary = _summary(missing, hit, num_tokens)
    explanation.loads.extend(_loads(space, locations, tiers, hit))


def _tiers(
    group: inspect.PromptBlocks, index: int, locations: Sequence[TierHolding]
) -> NDArray[np.int64]:
    """[n], for the blocks of a group: the first tier that has it, as an index into `locations`;
    -1 if it is in host memory or in none. Tiers that are down come last, because lookups skip
    them."""
    first = np.full(len(group.words), -1, np.int64)
    for number, one in sorted(enumerate(locations), key=lambda each: (each[1].is_up, -each[0])):
        first[one.masks[index]] = number
    first[(group.words != 0) & (group.words < RESERVED_FLAG)] = -1
    return first


def _loads(
    space: KeySpace, locations: Sequence[TierHolding], tiers: list[NDArray[np.int64]], hit: int
) -> Iterator[admin_pb2.TierLoad]:
    """What each tier must load for the hit, and in how many seconds.

    tiers: from `_tiers`, for each group.
    """
    needed = needed_blocks(space.groups, hit)
    for number, one in enumerate(locations):
        counts = [
            int((tiers[index][blocks.start : blocks.stop] == number).sum())
            for index, blocks in enumerate(needed)
        ]
        num_bytes = sum(
            count * group.slot_bytes for count, group in zip(counts, space.groups, strict=True)
        )
        if num_bytes:
            yield admin_pb2.TierLoad(
                tier=one.name,
                block_count=sum(counts),
                byte_count=num_bytes,
                load_s=num_bytes / one.bytes_per_s if one.bytes_per_s else 0.0,
            )


def _limit(
    space: KeySpace, masks: list[NDArray[np.bool_]], hit: int, most_tokens: int
) -> tuple[int, int]:
    """Group and depth of the first missing block that the next longer hit would need
    (`alignment_tokens`). Group -1: the prompt is too short for one.

    masks: for each group, True for blocks that could be loaded.
    """
    longer = hit + alignment_tokens(space.groups)
    if longer > most_tokens:
        return -1, 0
    for index, (mask, needed) in enumerate(
        zip(masks, needed_blocks(space.groups, longer), strict=True)
    ):
        ready = mask[needed.start : needed.stop]
        if not ready.all():
            return index, needed.start + int(ready.argmin())
    raise AssertionError("a longer hit lacks a block")


def _summary(missing: admin_pb2.BlockExplanation | None, hit: int, num_tokens: int) -> str:
    if missing is None and not num_tokens:
        return "the prompt is shorter than a block: nothing of it can hit"
    if missing is None and hit < num_tokens:
        return f"{hit} of {num_tokens} tokens hit; a longer hit would need a longer prompt"
    if missing is None:
        return f"all {hit} of {num_tokens} whole-block tokens hit"
    # A block in a tier limits the hit only if the tier is down, as `detail` says.
    why = missing.detail
    if missing.verdict != admin_pb2.BLOCK_VERDICT_BELOW:
        why = f"{fields.enum_word(admin_pb2.BlockVerdict.DESCRIPTOR, missing.verdict)}: {why}"
    return (
        f"{hit} of {num_tokens} tokens hit; block {missing.depth} of group {missing.group_index} "
        f"is {why}"
    )


def watch_requests(
    node: Node, request: admin_pb2.WatchRequestsRequest, context: Any
) -> AsyncIterator[admin_pb2.WatchRequestsResponse]:
    """Streams engines' reports; those of one key space if the request names it."""

    def message(value: WatchedReport) -> admin_pb2.WatchedRequest | None:
        if request.key_space_id not in (0, value.key_space_id):
            return None
        return _watched_request(value)

    def response(
        requests: list[admin_pb2.WatchedRequest], lost: int
    ) -> admin_pb2.WatchRequestsResponse:
        return admin_pb2.WatchRequestsResponse(requests=requests, lost_request_count=lost)

    return stream(context, node, request.key_space_id, node.reports.watched, message, response)


def _watched_request(value: WatchedReport) -> admin_pb2.WatchedRequest:
    return admin_pb2.WatchedRequest(
        key_space_id=value.key_space_id,
        hashes=packed_words(value.report.hashes, value.hash_bytes),
        prompt_token_count=value.report.prompt_tokens,
        device_hit_token_count=value.report.device_hit_tokens,
        hit_token_count=value.report.hit_tokens,
        unix_time_ms=int(value.unix_time_s * 1000),
    )


# The service


MAX_TOLD = MAX_MESSAGE_BYTES - (1 << 10)
"""Of an answer of Tell, so that it fits into a message."""


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, node: Node) -> None:
        self._node = node
        self._topics = all_topics(node)

    async def Tell(self, request: admin_pb2.TellRequest, context: Any) -> admin_pb2.TellResponse:
        async def call() -> admin_pb2.TellResponse:
            told = await tell(self._topics, request.topic, request.filters)
            text = orjson.dumps(told)
            if len(text) > MAX_TOLD:
                raise HotKVError(
                    Reason.TOO_LARGE,
                    f"the answer has {len(text)} bytes; at most {MAX_TOLD} can be sent: "
                    "narrow it with filters, such as page_size",
                )
            return admin_pb2.TellResponse(json=text.decode())

        return await answer(self._node, context, call)

    async def Evict(self, request: admin_pb2.EvictRequest, context: Any) -> admin_pb2.EvictResponse:
        async def call() -> admin_pb2.EvictResponse:
            words = self._named(request)
            number, removals = request.key_space_id, self._node.removals
            if words is None:
                evicted, kept = await removals.evict_all(number)
            else:
                evicted, kept = await removals.evict(number, request.group_index, words)
            return admin_pb2.EvictResponse(evicted_block_count=evicted, kept_block_count=kept)

        return await answer(self._node, context, call)

    async def PreviewEvict(
        self, request: admin_pb2.PreviewEvictRequest, context: Any
    ) -> admin_pb2.PreviewEvictResponse:
        async def call() -> admin_pb2.PreviewEvictResponse:
            words = self._named(request)
            evicted, kept, num_bytes = await self._node.removals.would_evict(
                request.key_space_id, request.group_index, words
            )
            return admin_pb2.PreviewEvictResponse(
                evicted_block_count=evicted, kept_block_count=kept, evicted_byte_count=num_bytes
            )

        return await answer(self._node, context, call)

    def _named(
        self, request: admin_pb2.EvictRequest | admin_pb2.PreviewEvictRequest
    ) -> NDArray[np.uint32] | None:
        """Hash words of the named blocks; None for all. Raises INVALID_FIELD if both or neither
        is given."""
        if request.all == bool(request.hashes):
            raise invalid("hashes and all: give exactly one of them")
        if request.all:
            return None
        hash_bytes = self._node.core.key_space(request.key_space_id).hash_bytes
        return read_hashes("hashes", request.hashes, hash_bytes)

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
                lease_count=live.num_leases,
                transfer_count=live.num_transfers,
                timeout_ms=int(self._node.drain_timeout_s * 1000),
            )

        return await answer(self._node, context, call)

    async def Resize(
        self, request: admin_pb2.ResizeRequest, context: Any
    ) -> admin_pb2.ResizeResponse:
        async def call() -> admin_pb2.ResizeResponse:
            size = self._node.arena_size
            deadline_s = fields.seconds("timeout_ms", request.timeout_ms) or DEFAULT_DEADLINE_S
            done = await size.resize(request.arena_byte_count, deadline_s)
            return admin_pb2.ResizeResponse(
                arena_byte_count=done.arena_bytes,
                most_byte_count=size.most_bytes,
                moved_block_count=done.moved_blocks,
                evicted_block_count=done.evicted_blocks,
                holders=[
                    admin_pb2.Holder(name=name, block_count=count)
                    for name, count in done.holders.items()
                ],
            )

        return await answer(self._node, context, call)

    async def Explain(
        self, request: admin_pb2.ExplainRequest, context: Any
    ) -> admin_pb2.ExplainResponse:
        async def call() -> admin_pb2.ExplainResponse:
            return await explain(self._node, request)

        return await answer(self._node, context, call)

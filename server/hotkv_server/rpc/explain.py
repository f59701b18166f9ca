"""Explain: of each block of a prompt, would it hit, and if not, why."""

import numpy as np

from hotkv.errors import HotKVError, Reason
from hotkv.groups import needed_blocks
from hotkv.keys import token_block_hashes
from hotkv.table import RESERVED_FLAG, Words
from hotkv.v1 import admin_pb2
from hotkv_server.rpc import convert
from hotkv_server.runtime.node import Node


def explain(node: Node, request: admin_pb2.ExplainRequest) -> admin_pb2.ExplainResponse:
    """The prompt in the key space asked about, or in all whose hashes can be had."""
    numbers = [request.key_space_id] if request.key_space_id else sorted(node.core.key_spaces)
    if not request.hashes and not request.token_ids:
        raise HotKVError(Reason.INVALID_FIELD, "hashes and token_ids are empty; give one of them")
    explained = []
    for number in numbers:
        try:
            explained.append(_explain_one(node, number, request))
        except HotKVError:
            if request.key_space_id:
                raise
    return admin_pb2.ExplainResponse(key_spaces=explained)


def _prompt_hashes(node: Node, number: int, request: admin_pb2.ExplainRequest) -> Words:
    space = node.core.key_space(number)
    if request.hashes:
        return convert.hashes("hashes", request.hashes, space.hash_bytes)
    tokens = convert.int32s("token_ids", request.token_ids)
    try:
        computed = token_block_hashes(tokens.tolist(), space.hash_block_tokens, space.hash_algorithm, space.hash_seed)
    except ValueError as error:
        raise HotKVError(Reason.INVALID_FIELD, f"token_ids: {error}; give hashes instead") from error
    return convert.hashes("token_ids", b"".join(computed), space.hash_bytes)


def _explain_one(node: Node, number: int, request: admin_pb2.ExplainRequest) -> admin_pb2.KeySpaceExplanation:
    space = node.core.key_space(number)
    hashes = _prompt_hashes(node, number, request)
    num_tokens = len(hashes) * space.hash_block_tokens
    blocks: list[admin_pb2.BlockExplanation] = []
    masks = []
    for index, group in enumerate(space.groups):
        step = group.block_tokens // space.hash_block_tokens
        mine = np.ascontiguousarray(hashes[step - 1 :: step])
        words = node.core.space.index.find(number, index, mine)
        evicted = node.core.space.was_evicted(number, index, mine)
        masks.append((words != 0) & (words < RESERVED_FLAG))
        for depth, word in enumerate(words):
            if word == 0:
                verdict = "evicted" if evicted[depth] else "never stored"
                text = "it made room for others" if evicted[depth] else "or evicted long ago"
            elif word >= RESERVED_FLAG:
                verdict, text = "reserved", "it is being written"
            else:
                verdict, text = "ready", ""
            packed = convert.unpadded(mine[depth : depth + 1], space.hash_bytes)
            blocks.append(admin_pb2.BlockExplanation(group_index=index, depth=depth, block_hash=packed, verdict=verdict, detail=text))
    hit = node.core.hit_tokens(number, masks, num_tokens)
    limiting = _limiting_group(node, number, masks, hit, num_tokens)
    return admin_pb2.KeySpaceExplanation(
        key_space_id=number,
        hit_token_count=hit,
        token_count=num_tokens,
        limiting_group_index=limiting,
        blocks=blocks,
        summary=_summary(blocks, limiting, hit, num_tokens),
    )


def _limiting_group(node: Node, number: int, masks: list[np.ndarray[tuple[int], np.dtype[np.bool_]]], hit: int, num_tokens: int) -> int:
    """The first group that misses a block it would need for one aligned step more; -1 where the whole prompt hits."""
    groups = node.core.key_space(number).groups
    step = max(group.block_tokens for group in groups)
    if hit + step > num_tokens:
        return -1
    for index, (mask, needed) in enumerate(zip(masks, needed_blocks(groups, hit + step), strict=True)):
        if not mask[needed.start : needed.stop].all():
            return index
    return -1


def _summary(blocks: list[admin_pb2.BlockExplanation], limiting: int, hit: int, num_tokens: int) -> str:
    if limiting < 0:
        return f"all {hit} of {num_tokens} whole-block tokens hit"
    missing = next((b for b in blocks if b.group_index == limiting and b.verdict != "ready"), None)
    why = f"block {missing.depth} is {missing.verdict}" if missing else "a block it needs is missing"
    return f"{hit} of {num_tokens} tokens hit; group {limiting} stops there: {why}"

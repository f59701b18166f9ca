"""Calls on blocks, between wire messages and the values of the core.

Checks what a message says of itself, and names the field in the error. `space_convert`,
`event_convert` and `sparse_convert` do the same for their messages.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import KeySpace
from hotkv_proto.retention import Retention
from hotkv_proto.table import Words, hash_words
from hotkv_proto.v1 import cache_pb2
from hotkv_server.cache.values import HashList, LoadPositions, Run
from hotkv_server.dataplane.engine import Outcome
from hotkv_server.node.content import ExtraKey, RunContent
from hotkv_server.node.transfer import TransferEnd

MAX_LISTS = 1024
"""Most runs, or hash lists, in a call: each costs the event loop some 20 us."""
MAX_STORED_BLOCKS = 1 << 16
"""Most blocks that a call may reserve or store: half of what it may look up, since making room
takes longer than finding."""
MAX_LOADED_BLOCKS = 1 << 17
"""As many as a lease finds in a call."""
MAX_IDENTIFIER = 256
GroupIndex = Callable[[int], int]
"""From a group index as the session names it to the core's: `LiveSession.group_index`."""
STATUS: dict[Outcome, cache_pb2.TransferStatus.ValueType] = {
    Outcome.DONE: cache_pb2.TRANSFER_STATUS_DONE,
    Outcome.CANCELLED: cache_pb2.TRANSFER_STATUS_CANCELLED,
    Outcome.FAILED: cache_pb2.TRANSFER_STATUS_FAILED,
}


@cache
def enum_word(kind: Any, number: int) -> str:
    """An enum's value as people read it: `BLOCK_VERDICT_NEVER_STORED` as "never stored"."""
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.DESCRIPTOR.name).upper()
    return str(kind.Name(number)).removeprefix(f"{prefix}_").lower().replace("_", " ")


def hashes(field: str, packed: bytes, hash_bytes: int) -> Words:
    """Packed hashes as words [n, 8]. Raises INVALID_HASH for a length that is no multiple."""
    if len(packed) % hash_bytes:
        raise HotKVError(
            Reason.INVALID_HASH,
            (
                f"{field} has {len(packed)} bytes, which is no multiple of the {hash_bytes} of a "
                "block hash"
            ),
        )
    return hash_words(packed, hash_bytes)


def unpadded(words: Words, hash_bytes: int) -> bytes:
    """Words [n, 8] as packed hashes."""
    return np.ascontiguousarray(words).view(np.uint8).reshape(-1, 32)[:, :hash_bytes].tobytes()


def int32s(field: str, packed: bytes) -> NDArray[np.int64]:
    """Packed little-endian int32 as int64 [n]."""
    if len(packed) % 4:
        raise HotKVError(
            Reason.INVALID_FIELD, f"{field} has {len(packed)} bytes; packed int32 take 4 each"
        )
    return np.frombuffer(packed, "<i4").astype(np.int64)


def check_lists(field: str, messages: Sequence[object]) -> None:
    if len(messages) > MAX_LISTS:
        raise HotKVError(
            Reason.TOO_LARGE,
            (
                f"{field} has {len(messages)} entries; at most {MAX_LISTS} are accepted: join "
                "neighbours"
            ),
        )


def hash_lists(
    groups: Sequence[cache_pb2.GroupHashes], hash_bytes: int, group_index: GroupIndex
) -> list[HashList]:
    """Hashes per group."""
    check_lists("groups", groups)
    return [
        HashList(group_index(g.group_index), hashes("groups.hashes", g.hashes, hash_bytes))
        for g in groups
    ]


def runs(
    messages: Sequence[cache_pb2.BlockRun], hash_bytes: int, group_index: GroupIndex
) -> list[Run]:
    """Chains of blocks."""
    check_lists("runs", messages)
    num_blocks = sum(len(m.hashes) for m in messages) // hash_bytes
    if num_blocks > MAX_STORED_BLOCKS:
        raise HotKVError(
            Reason.TOO_LARGE,
            (
                f"runs name {num_blocks} blocks; at most {MAX_STORED_BLOCKS} are accepted in a "
                "call: "
                "send several"
            ),
        )
    result = []
    for m in messages:
        if m.parent_hash and len(m.parent_hash) != hash_bytes:
            raise HotKVError(
                Reason.INVALID_HASH,
                f"runs.parent_hash has {len(m.parent_hash)} bytes; a block hash has {hash_bytes}",
            )
        parent = hashes("runs.parent_hash", m.parent_hash, hash_bytes)[0] if m.parent_hash else None
        result.append(
            Run(
                group_index(m.group_index),
                hashes("runs.hashes", m.hashes, hash_bytes),
                parent,
                m.depth,
            )
        )
    return result


def run_content(message: cache_pb2.BlockRun, key_space: KeySpace) -> RunContent:
    """Token ids and extra keys of a run, whose group and hashes were checked before; none for
    representations.

    Raises INVALID_FIELD if there are not as many as its blocks need.
    """
    if message.group_index < 0:
        raise HotKVError(
            Reason.INVALID_FIELD,
            (
                f"runs.group_index is {message.group_index}; this key space has "
                f"{len(key_space.groups)} groups"
            ),
        )
    if message.group_index >= len(key_space.groups):
        return RunContent(np.empty(0, np.int32))
    num_blocks = len(message.hashes) // key_space.hash_bytes
    num_tokens = num_blocks * key_space.groups[message.group_index].block_tokens
    if message.token_ids and len(message.token_ids) != 4 * num_tokens:
        raise HotKVError(
            Reason.INVALID_FIELD,
            (
                f"runs.token_ids has {len(message.token_ids)} bytes; {num_tokens} tokens of "
                f"{num_blocks} blocks take 4 each"
            ),
        )
    if message.extra_keys and len(message.extra_keys) != num_blocks:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"runs.extra_keys has {len(message.extra_keys)} entries for {num_blocks} blocks",
        )
    return RunContent(
        np.frombuffer(message.token_ids, "<i4"),
        identifier("runs.lora_name", message.lora_name),
        tuple(tuple(_extra_key(key) for key in block.keys) or None for block in message.extra_keys),
    )


def _extra_key(message: cache_pb2.ExtraKey) -> ExtraKey:
    match message.WhichOneof("key"):
        case "text":
            return message.text
        case "digest":
            return message.digest
        case "multi_modal":
            return message.multi_modal.identifier, message.multi_modal.offset
        case _:
            raise HotKVError(
                Reason.INVALID_FIELD,
                "runs.extra_keys.keys.key is empty; give text, digest or multi_modal",
            )


def load_runs(
    messages: Sequence[cache_pb2.LoadRun], group_index: GroupIndex
) -> tuple[list[LoadPositions], list[NDArray[np.int64]]]:
    """Positions in the lease and block ids, a pair a run."""
    check_lists("runs", messages)
    num_blocks = sum(len(m.lease_positions) for m in messages) // 4
    if num_blocks > MAX_LOADED_BLOCKS:
        raise HotKVError(
            Reason.TOO_LARGE,
            (
                f"runs name {num_blocks} blocks; at most {MAX_LOADED_BLOCKS} are accepted in a "
                "call: "
                "send several"
            ),
        )
    positions = [
        LoadPositions(group_index(m.group_index), int32s("runs.lease_positions", m.lease_positions))
        for m in messages
    ]
    block_ids = [int32s("runs.block_ids", m.block_ids) for m in messages]
    for run, ids in zip(positions, block_ids, strict=True):
        if len(run.positions) != len(ids):
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"runs.block_ids has {len(ids)} ids for {len(run.positions)} lease_positions",
            )
    return positions, block_ids


def identifier(field: str, text: str) -> str:
    """Returns an id or name as it came. Raises TOO_LARGE if it is too long to keep and to repeat in
    messages."""
    if len(text) > MAX_IDENTIFIER:
        raise HotKVError(Reason.TOO_LARGE, f"{field} is longer than {MAX_IDENTIFIER} characters")
    return text


def name(field: str, text: str) -> str:
    """An identifier that is logged: nothing in it may look like a line of its own."""
    check_printable(field, text)
    return identifier(field, text)


def check_printable(field: str, text: str) -> None:
    if not text.isprintable():
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"{field} is {text[:MAX_IDENTIFIER]!r}; only printable characters are allowed",
        )


def seconds(field: str, milliseconds: int) -> float:
    """Milliseconds of a duration field."""
    if milliseconds < 0:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"{field} is {milliseconds}; durations are not negative, and 0 asks for the default",
        )
    return min(milliseconds, 1 << 40) / 1000


def rate(field: str, value: float) -> float:
    """A rate per second; 0 for one that is not known."""
    if not 0 <= value < math.inf:
        raise HotKVError(
            Reason.INVALID_FIELD, f"{field} is {value}; use a finite number from 0, 0 for unknown"
        )
    return value


def retention(field: str, message: cache_pb2.Retention) -> Retention:
    """A request's retention; the default if the message is not set."""
    try:
        return Retention(message.priority, seconds(f"{field}.ttl_ms", message.ttl_ms), message.pin)
    except ValueError as error:
        raise HotKVError(Reason.INVALID_FIELD, f"{field}: {error}") from error


def flags(
    messages: Sequence[cache_pb2.GroupHashes], masks: Sequence[NDArray[np.bool_]]
) -> list[cache_pb2.GroupFlags]:
    """One byte a hash."""
    return [
        cache_pb2.GroupFlags(group_index=m.group_index, flags=mask.tobytes())
        for m, mask in zip(messages, masks, strict=True)
    ]


def offsets(
    messages: Sequence[cache_pb2.GroupHashes], values: Sequence[NDArray[np.int64]]
) -> list[cache_pb2.GroupOffsets]:
    """Eight bytes a hash."""
    return [
        cache_pb2.GroupOffsets(group_index=m.group_index, offsets=value.astype("<i8").tobytes())
        for m, value in zip(messages, values, strict=True)
    ]


def results(
    groups: Sequence[int], values: Sequence[NDArray[np.uint8]]
) -> list[cache_pb2.RunResults]:
    """One byte a block; `groups` as the session names them."""
    return [
        cache_pb2.RunResults(group_index=group, results=value.tobytes())
        for group, value in zip(groups, values, strict=True)
    ]


def load_response(transfer_id: str, end: TransferEnd) -> cache_pb2.LoadResponse:
    """How a load ended."""
    return cache_pb2.LoadResponse(
        transfer_id=transfer_id,
        status=STATUS[end.outcome],
        byte_count=end.num_bytes,
        message=end.message,
    )


def store_response(
    transfer_id: str, groups: Sequence[int], end: TransferEnd
) -> cache_pb2.StoreResponse:
    """How a store ended. `groups`: of its runs, as the session names them."""
    return cache_pb2.StoreResponse(
        transfer_id=transfer_id,
        status=STATUS[end.outcome],
        byte_count=end.num_bytes,
        runs=results(groups, end.results),
        message=end.message,
    )

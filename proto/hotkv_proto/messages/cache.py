"""Calls on blocks (cache.proto): hashes, runs to store or load, and the answer for each block.

Engines hold hashes as bytes, the server as uint32 [n, 8]. A `GroupIndex` maps a session's group
index to the server's, and raises HotKVError for an unknown group.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.blocks import (
    NO_OPTIONS,
    NO_RETENTION,
    BlockExtraKeys,
    BlockRun,
    ExtraKey,
    GroupHashes,
    LeaseGrant,
    LoadRun,
    Retention,
    RunContent,
    StoreOptions,
    TransferResult,
    TransferStatus,
)
from hotkv_proto.errors import HotKVError, Reason, check_most, invalid
from hotkv_proto.keys import KeySpace
from hotkv_proto.messages import arrays, fields
from hotkv_proto.table import Words, hash_words
from hotkv_proto.v1 import cache_pb2

Int64s = NDArray[np.int64]
Uint8s = NDArray[np.uint8]
BoolMask = NDArray[np.bool_]
GroupIndex = Callable[[int], int]
MAX_STORED_BLOCKS = 1 << 16
"""Half of MAX_LOADED_BLOCKS, because making room takes longer than finding blocks."""
MAX_LOADED_BLOCKS = 1 << 17
"""Of a load or a lease."""
NO_CONTENT = RunContent(np.empty(0, np.int32))

# ---------------------------------------------------------------------------------------- hashes


def pack(hashes: Sequence[bytes], hash_bytes: int) -> bytes:
    """Raises INVALID_HASH if a hash has another length."""
    if hashes and set(map(len, hashes)) != {hash_bytes}:
        wrong = next(i for i, h in enumerate(hashes) if len(h) != hash_bytes)
        raise HotKVError(
            Reason.INVALID_HASH,
            f"hashes[{wrong}] has {len(hashes[wrong])} bytes; this key space uses {hash_bytes}",
        )
    return b"".join(hashes)


def pack_quickly(hashes: Sequence[bytes], hash_bytes: int) -> bytes:
    """Checks only the total length (INVALID_HASH): enough for a lookup, whose answer is a hint."""
    packed = b"".join(hashes)
    if len(packed) != len(hashes) * hash_bytes:
        raise HotKVError(
            Reason.INVALID_HASH,
            f"hashes do not all have the {hash_bytes} bytes of this key space",
        )
    return packed


def unpack(packed: bytes, hash_bytes: int) -> list[bytes]:
    return [packed[i : i + hash_bytes] for i in range(0, len(packed), hash_bytes)]


def read_hashes(field: str, packed: bytes, hash_bytes: int) -> Words:
    """uint32 [hashes, 8]. Raises INVALID_HASH if the length is no multiple of `hash_bytes`.

    field: path, for errors.
    """
    if len(packed) % hash_bytes:
        raise HotKVError(
            Reason.INVALID_HASH,
            f"{field} has {len(packed)} bytes, which is no multiple of the {hash_bytes} of a "
            "block hash",
        )
    return hash_words(packed, hash_bytes)


def packed_words(words: Words, hash_bytes: int) -> bytes:
    """words: uint32 [hashes, 8]; each is cut to `hash_bytes`."""
    return np.ascontiguousarray(words).view(np.uint8).reshape(-1, 32)[:, :hash_bytes].tobytes()


def group_messages(groups: Iterable[GroupHashes], hash_bytes: int) -> list[cache_pb2.GroupHashes]:
    """Raises INVALID_HASH if a hash has another length."""
    return [
        cache_pb2.GroupHashes(group_index=g.group_index, hashes=pack(g.hashes, hash_bytes))
        for g in groups
    ]


def read_groups(
    messages: Sequence[cache_pb2.GroupHashes], hash_bytes: int, group_index: GroupIndex
) -> Iterator[tuple[int, Words]]:
    """Group index and hashes of each list. Raises TOO_LARGE for more than MAX_LISTS,
    INVALID_HASH for bytes that are no multiple of `hash_bytes`."""
    fields.check_lists("groups", messages)
    for m in messages:
        yield group_index(m.group_index), read_hashes("groups.hashes", m.hashes, hash_bytes)


# ------------------------------------------------------------------------------- runs to be stored


def run_messages(runs: Iterable[BlockRun], hash_bytes: int) -> list[cache_pb2.BlockRun]:
    """Raises INVALID_HASH if a hash has another length."""
    return [
        cache_pb2.BlockRun(
            group_index=run.group_index,
            hashes=pack(run.hashes, hash_bytes),
            parent_hash=run.parent_hash,
            depth=run.depth,
            block_ids=arrays.packed_int32s(run.block_ids),
            token_ids=arrays.packed_int32s(run.token_ids),
            lora_name=run.lora_name,
            extra_keys=[extra_keys_message(keys) for keys in run.extra_keys],
        )
        for run in runs
    ]


def read_runs(
    messages: Sequence[cache_pb2.BlockRun], hash_bytes: int, group_index: GroupIndex
) -> Iterator[tuple[int, Words, Words | None, int]]:
    """Group index, hashes [blocks, 8], parent [8] or None, and depth of each run. Raises
    TOO_LARGE for too many runs or blocks, INVALID_HASH for a hash of a wrong length."""
    fields.check_lists("runs", messages)
    num_blocks = sum(len(m.hashes) for m in messages) // hash_bytes
    _check_blocks(num_blocks, MAX_STORED_BLOCKS)
    for m in messages:
        if m.parent_hash and len(m.parent_hash) != hash_bytes:
            raise HotKVError(
                Reason.INVALID_HASH,
                f"runs.parent_hash has {len(m.parent_hash)} bytes; a block hash has {hash_bytes}",
            )
        parent = (
            read_hashes("runs.parent_hash", m.parent_hash, hash_bytes)[0] if m.parent_hash else None
        )
        yield (
            group_index(m.group_index),
            read_hashes("runs.hashes", m.hashes, hash_bytes),
            parent,
            m.depth,
        )


def _check_blocks(num_blocks: int, most: int) -> None:
    check_most(most, num_blocks, "runs name {} blocks", " in a call: send several")


def read_run_content(message: cache_pb2.BlockRun, key_space: KeySpace) -> RunContent:
    """Empty for sketches, which have no tokens. Hashes and group index must be checked already.
    Raises INVALID_FIELD if a count does not match the run's blocks, or if an extra key is empty;
    TOO_LARGE if the LoRA name is too long."""
    has_any = message.token_ids or message.lora_name or message.extra_keys
    if not has_any or message.group_index >= len(key_space.groups):
        return NO_CONTENT
    num_blocks = len(message.hashes) // key_space.hash_bytes
    num_tokens = num_blocks * key_space.groups[message.group_index].block_tokens
    if message.token_ids and len(message.token_ids) != 4 * num_tokens:
        raise invalid(
            f"runs.token_ids has {len(message.token_ids)} bytes; {num_tokens} tokens of "
            f"{num_blocks} blocks take 4 each"
        )
    if message.extra_keys and len(message.extra_keys) != num_blocks:
        raise invalid(
            f"runs.extra_keys has {len(message.extra_keys)} entries for {num_blocks} blocks"
        )
    return RunContent(
        np.frombuffer(message.token_ids, "<i4"),
        fields.identifier("runs.lora_name", message.lora_name),
        tuple(map(read_extra_keys, message.extra_keys)),
    )


def extra_keys_message(keys: BlockExtraKeys) -> cache_pb2.BlockExtraKeys:
    message = cache_pb2.BlockExtraKeys()
    for key in keys or ():
        match key:
            case str():
                message.keys.add(text=key)
            case bytes():
                message.keys.add(digest=key)
            case (identity, offset):
                message.keys.add(
                    multi_modal=cache_pb2.MultiModalKey(identifier=identity, offset=offset)
                )
    return message


def read_extra_keys(message: cache_pb2.BlockExtraKeys) -> tuple[ExtraKey, ...] | None:
    """Raises INVALID_FIELD if one is empty."""
    return tuple(map(_extra_key, message.keys)) or None


def _extra_key(message: cache_pb2.ExtraKey) -> ExtraKey:
    match message.WhichOneof("key"):
        case "text":
            return message.text
        case "digest":
            return message.digest
        case "multi_modal":
            return message.multi_modal.identifier, message.multi_modal.offset
        case _:
            raise invalid("runs.extra_keys.keys.key is empty; give text, digest or multi_modal")


# ------------------------------------------------------------------------------ options of a store


def retention_message(value: Retention) -> cache_pb2.Retention | None:
    """None for the default."""
    if value == NO_RETENTION:
        return None
    return cache_pb2.Retention(
        priority=value.priority, ttl_ms=fields.whole_ms(value.ttl_s), pin=value.pin
    )


def read_retention(field: str, message: cache_pb2.Retention) -> Retention:
    """An unset message is the default. Raises INVALID_FIELD for a value out of range, or a pin
    without a time to live.

    field: path, for errors.
    """
    try:
        return Retention(
            message.priority, fields.seconds(f"{field}.ttl_ms", message.ttl_ms), message.pin
        )
    except ValueError as error:
        raise invalid(f"{field}: {error}") from error


def put_store_options(request: cache_pb2.StoreRequest, value: StoreOptions) -> None:
    if (kept := retention_message(value.retention)) is not None:
        request.retention.CopyFrom(kept)
    request.residency_id = value.residency_id
    request.traceparent = value.traceparent
    request.is_private = value.is_private


def read_store_options(request: cache_pb2.StoreRequest) -> StoreOptions:
    """Raises INVALID_FIELD if the retention is out of range or the residency id can't be
    printed, TOO_LARGE if the id is too long."""
    is_default = not (request.residency_id or request.traceparent or request.is_private)
    if is_default and not request.HasField("retention"):
        return NO_OPTIONS
    return StoreOptions(
        read_retention("retention", request.retention),
        fields.name("residency_id", request.residency_id),
        request.traceparent,
        request.is_private,
    )


# ------------------------------------------------------------------------------- runs to be loaded


def load_run_messages(runs: Iterable[LoadRun]) -> list[cache_pb2.LoadRun]:
    return [
        cache_pb2.LoadRun(
            group_index=run.group_index,
            lease_positions=arrays.packed_int32s(run.lease_positions),
            block_ids=arrays.packed_int32s(run.block_ids),
        )
        for run in runs
    ]


def read_load_runs(
    messages: Sequence[cache_pb2.LoadRun], group_index: GroupIndex
) -> tuple[list[tuple[int, Int64s]], list[Int64s]]:
    """Per run (group index, positions in the lease), and block ids. Raises TOO_LARGE for too
    many runs or blocks, INVALID_FIELD if the two differ in number."""
    fields.check_lists("runs", messages)
    _check_blocks(sum(len(m.lease_positions) for m in messages) // 4, MAX_LOADED_BLOCKS)
    positions, block_ids = list[tuple[int, Int64s]](), list[Int64s]()
    for m in messages:
        places = arrays.int32s("runs.lease_positions", m.lease_positions)
        ids = arrays.int32s("runs.block_ids", m.block_ids)
        if len(places) != len(ids):
            raise invalid(f"runs.block_ids has {len(ids)} ids for {len(places)} lease_positions")
        positions.append((group_index(m.group_index), places))
        block_ids.append(ids)
    return positions, block_ids


# ----------------------------------------------------------------------------------------- answers


def flag_messages(
    messages: Sequence[cache_pb2.GroupHashes], masks: Sequence[BoolMask]
) -> list[cache_pb2.GroupFlags]:
    """messages: the request's lists of hashes.
    masks: one byte per hash.
    """
    return [
        cache_pb2.GroupFlags(group_index=m.group_index, flags=mask.tobytes())
        for m, mask in zip(messages, masks, strict=True)
    ]


def read_masks(messages: Iterable[cache_pb2.GroupFlags]) -> tuple[BoolMask, ...]:
    """Masks in the order of the request."""
    return tuple(np.frombuffer(group.flags, np.bool_) for group in messages)


def lease_response(
    asked: Sequence[cache_pb2.GroupHashes], value: LeaseGrant
) -> cache_pb2.AcquireLeaseResponse:
    """asked: the request's lists of hashes."""
    offsets = zip(asked, value.offsets, strict=True) if value.offsets else ()
    return cache_pb2.AcquireLeaseResponse(
        groups=flag_messages(asked, value.pinned),
        ttl_ms=int(value.ttl_s * 1000),
        offsets=[
            cache_pb2.GroupOffsets(group_index=m.group_index, offsets=found.astype("<i8").tobytes())
            for m, found in offsets
        ],
    )


def read_lease_grant(lease_id: str, message: cache_pb2.AcquireLeaseResponse) -> LeaseGrant:
    """Raises ValueError if the offsets' bytes are no multiple of 8."""
    offsets = tuple(arrays.int64s(group.offsets) for group in message.offsets)
    return LeaseGrant(lease_id, read_masks(message.groups), message.ttl_ms / 1000, offsets)


def result_messages(
    group_indexes: Sequence[int], results: Sequence[Uint8s]
) -> list[cache_pb2.RunResults]:
    """group_indexes: per run, as in the client's call.
    results: per run, `BlockResult` values.
    """
    return [
        cache_pb2.RunResults(group_index=group, results=value.tobytes())
        for group, value in zip(group_indexes, results, strict=True)
    ]


def read_results(messages: Iterable[cache_pb2.RunResults]) -> tuple[Uint8s, ...]:
    """Results in the order of the request."""
    return tuple(np.frombuffer(run.results, np.uint8) for run in messages)


def load_response(value: TransferResult) -> cache_pb2.LoadResponse:
    return cache_pb2.LoadResponse(
        transfer_id=value.transfer_id,
        status=cache_pb2.TransferStatus.ValueType(int(value.status)),
        byte_count=value.num_bytes,
        message=value.message,
    )


def store_response(value: TransferResult, group_indexes: Sequence[int]) -> cache_pb2.StoreResponse:
    """group_indexes: per run, as in the client's call."""
    return cache_pb2.StoreResponse(
        transfer_id=value.transfer_id,
        status=cache_pb2.TransferStatus.ValueType(int(value.status)),
        byte_count=value.num_bytes,
        runs=result_messages(group_indexes, value.results),
        message=value.message,
    )


def read_transfer_result(
    message: cache_pb2.LoadResponse | cache_pb2.StoreResponse,
) -> TransferResult:
    """An unknown status, of a newer protocol, becomes FAILED: the transfer has ended in any
    case."""
    status = int(message.status)
    return TransferResult(
        message.transfer_id,
        TransferStatus(status) if status in set(TransferStatus) else TransferStatus.FAILED,
        message.byte_count,
        read_results(message.runs) if isinstance(message, cache_pb2.StoreResponse) else (),
        message.message,
    )

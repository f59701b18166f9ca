"""Calls on blocks (cache.proto): hashes, runs to store or load, and the answer for each block.

Engines hold hashes as bytes, the server holds them as uint32 [n, 8]. In messages, a group has the
index by which the session (the client's connection) numbers it. A `GroupIndex` is a function that
maps such an index to the server's group index. It raises HotKVError for an unknown group.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.blocks import (
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
from hotkv_proto.messages import fields
from hotkv_proto.table import Words, hash_words
from hotkv_proto.v1 import cache_pb2

Int64s = NDArray[np.int64]
Uint8s = NDArray[np.uint8]
BoolMask = NDArray[np.bool_]
GroupIndex = Callable[[int], int]
MAX_STORED_BLOCKS = 1 << 16
"""Largest number of blocks that a call may reserve or store. It is half of MAX_LOADED_BLOCKS,
because making room takes longer than finding blocks."""
MAX_LOADED_BLOCKS = 1 << 17
"""Largest number of blocks that a call may load, or for which a call may acquire a lease."""

# ---------------------------------------------------------------------------------------- hashes


def pack(hashes: Sequence[bytes], hash_bytes: int) -> bytes:
    """Joins hashes for the wire. Raises INVALID_HASH if a hash has another length than
    `hash_bytes`."""
    if hashes and set(map(len, hashes)) != {hash_bytes}:
        wrong = next(i for i, h in enumerate(hashes) if len(h) != hash_bytes)
        raise HotKVError(
            Reason.INVALID_HASH,
            f"hashes[{wrong}] has {len(hashes[wrong])} bytes; this key space uses {hash_bytes}",
        )
    return b"".join(hashes)


def pack_quickly(hashes: Sequence[bytes], hash_bytes: int) -> bytes:
    """Joins hashes for a lookup. Raises INVALID_HASH if the total length is wrong.

    Faster than `pack`, because it does not check each hash. That suffices for a lookup, whose
    answer is a hint.
    """
    packed = b"".join(hashes)
    if len(packed) != len(hashes) * hash_bytes:
        raise HotKVError(
            Reason.INVALID_HASH,
            f"hashes do not all have the {hash_bytes} bytes of this key space",
        )
    return packed


def unpack(packed: bytes, hash_bytes: int) -> list[bytes]:
    """Splits packed hashes into a list."""
    return [packed[i : i + hash_bytes] for i in range(0, len(packed), hash_bytes)]


def read_hashes(field: str, packed: bytes, hash_bytes: int) -> Words:
    """Reads packed hashes as uint32 words [hashes, 8]. Raises INVALID_HASH if the length is not a
    multiple of `hash_bytes`.

    field: path of the field in its message, for errors.
    """
    if len(packed) % hash_bytes:
        raise HotKVError(
            Reason.INVALID_HASH,
            f"{field} has {len(packed)} bytes, which is no multiple of the {hash_bytes} of a "
            "block hash",
        )
    return hash_words(packed, hash_bytes)


def packed_words(words: Words, hash_bytes: int) -> bytes:
    """Joins hashes that are words, uint32 [hashes, 8], for the wire. Each hash is cut to
    `hash_bytes`."""
    return np.ascontiguousarray(words).view(np.uint8).reshape(-1, 32)[:, :hash_bytes].tobytes()


def group_messages(groups: Iterable[GroupHashes], hash_bytes: int) -> list[cache_pb2.GroupHashes]:
    """Returns the protobuf message of each group's list of hashes. Raises INVALID_HASH if a hash
    has another length than `hash_bytes`."""
    return [
        cache_pb2.GroupHashes(group_index=g.group_index, hashes=pack(g.hashes, hash_bytes))
        for g in groups
    ]


def read_groups(
    messages: Sequence[cache_pb2.GroupHashes], hash_bytes: int, group_index: GroupIndex
) -> Iterator[tuple[int, Words]]:
    """Yields the group index and the hashes of each list. Raises TOO_LARGE for more than MAX_LISTS
    lists, INVALID_HASH if the bytes of a list are not a multiple of `hash_bytes`."""
    fields.check_lists("groups", messages)
    for m in messages:
        yield group_index(m.group_index), read_hashes("groups.hashes", m.hashes, hash_bytes)


# ------------------------------------------------------------------------------- runs to be stored


def run_messages(runs: Iterable[BlockRun], hash_bytes: int) -> list[cache_pb2.BlockRun]:
    """Makes the messages of runs (consecutive blocks of a group) to store. Raises INVALID_HASH if a
    hash has another length than `hash_bytes`."""
    return [
        cache_pb2.BlockRun(
            group_index=run.group_index,
            hashes=pack(run.hashes, hash_bytes),
            parent_hash=run.parent_hash,
            depth=run.depth,
            block_ids=fields.packed_int32s(run.block_ids),
            token_ids=fields.packed_int32s(run.token_ids),
            lora_name=run.lora_name,
            extra_keys=[extra_keys_message(keys) for keys in run.extra_keys],
        )
        for run in runs
    ]


def read_runs(
    messages: Sequence[cache_pb2.BlockRun], hash_bytes: int, group_index: GroupIndex
) -> Iterator[tuple[int, Words, Words | None, int]]:
    """Yields the group index, hashes, parent and depth of each run (consecutive blocks of a group).
    Raises TOO_LARGE for too many runs or blocks, INVALID_HASH for a hash of a wrong length.

    The hashes are uint32 words [blocks, 8]. The parent is the hash of the block before the run,
    words [8]; None if the run begins its context. The depth is the number of blocks before the run.
    """
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
    """Reads the token ids and extra keys of a run (consecutive blocks of one group). The result is
    empty for a run of sketches (compact forms of blocks' keys), which have no token ids.

    The caller has already checked the run's hashes and group index. Raises INVALID_FIELD if a count
    does not match the run's blocks, or if an extra key is empty; TOO_LARGE if the LoRA name is too
    long.
    """
    if message.group_index >= len(key_space.groups):
        return RunContent(np.empty(0, np.int32))
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
    """Makes the message of a block's extra keys."""
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
    """Reads a block's extra keys. Raises INVALID_FIELD if an extra key is empty."""
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
    """Makes the message of a retention; None for the default retention."""
    if value == NO_RETENTION:
        return None
    return cache_pb2.Retention(
        priority=value.priority, ttl_ms=fields.whole_ms(value.ttl_s), pin=value.pin
    )


def read_retention(field: str, message: cache_pb2.Retention) -> Retention:
    """Reads a retention. An unset message means the default retention. Raises INVALID_FIELD if a
    value is out of range, or if a pin has no time to live.

    field: path of the retention's field in its message, for errors.
    """
    try:
        return Retention(
            message.priority, fields.seconds(f"{field}.ttl_ms", message.ttl_ms), message.pin
        )
    except ValueError as error:
        raise invalid(f"{field}: {error}") from error


def put_store_options(request: cache_pb2.StoreRequest, value: StoreOptions) -> None:
    """Sets the options in the request of a store."""
    if (kept := retention_message(value.retention)) is not None:
        request.retention.CopyFrom(kept)
    request.residency_id = value.residency_id
    request.traceparent = value.traceparent
    request.is_private = value.is_private


def read_store_options(request: cache_pb2.StoreRequest) -> StoreOptions:
    """Reads the options of a store. Raises INVALID_FIELD if the retention is out of range or the
    residency id can't be printed, TOO_LARGE if the id is too long."""
    return StoreOptions(
        read_retention("retention", request.retention),
        fields.name("residency_id", request.residency_id),
        request.traceparent,
        request.is_private,
    )


# ------------------------------------------------------------------------------- runs to be loaded


def load_run_messages(runs: Iterable[LoadRun]) -> list[cache_pb2.LoadRun]:
    """Makes the messages of runs (blocks of a group) to load."""
    return [
        cache_pb2.LoadRun(
            group_index=run.group_index,
            lease_positions=fields.packed_int32s(run.lease_positions),
            block_ids=fields.packed_int32s(run.block_ids),
        )
        for run in runs
    ]


def read_load_runs(
    messages: Sequence[cache_pb2.LoadRun], group_index: GroupIndex
) -> tuple[list[tuple[int, Int64s]], list[Int64s]]:
    """Reads the runs (blocks of a group) of a load. Raises TOO_LARGE for too many runs or blocks,
    INVALID_FIELD if a run has different numbers of positions and block ids.

    Returns two lists with an item per run: (group index, positions in the lease), and block ids.
    """
    fields.check_lists("runs", messages)
    _check_blocks(sum(len(m.lease_positions) for m in messages) // 4, MAX_LOADED_BLOCKS)
    positions = [
        (group_index(m.group_index), fields.int32s("runs.lease_positions", m.lease_positions))
        for m in messages
    ]
    block_ids = [fields.int32s("runs.block_ids", m.block_ids) for m in messages]
    for (_, places), ids in zip(positions, block_ids, strict=True):
        if len(places) != len(ids):
            raise invalid(f"runs.block_ids has {len(ids)} ids for {len(places)} lease_positions")
    return positions, block_ids


# ----------------------------------------------------------------------------------------- answers


def flag_messages(
    messages: Sequence[cache_pb2.GroupHashes], masks: Sequence[BoolMask]
) -> list[cache_pb2.GroupFlags]:
    """Makes the messages of masks over lists of hashes, such as the mask of the ready blocks.

    messages: the lists of hashes in the request.
    masks: for each list a mask with a flag (one byte) per hash.
    """
    return [
        cache_pb2.GroupFlags(group_index=m.group_index, flags=mask.tobytes())
        for m, mask in zip(messages, masks, strict=True)
    ]


def read_masks(messages: Iterable[cache_pb2.GroupFlags]) -> tuple[BoolMask, ...]:
    """Reads the mask of each list of hashes, in the order of the request."""
    return tuple(np.frombuffer(group.flags, np.bool_) for group in messages)


def lease_response(
    asked: Sequence[cache_pb2.GroupHashes], value: LeaseGrant
) -> cache_pb2.AcquireLeaseResponse:
    """Makes the answer that grants a lease.

    asked: the lists of hashes in the request.
    """
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
    """Reads the answer that grants a lease. Raises ValueError if the bytes of its offsets are not a
    multiple of 8."""
    offsets = tuple(fields.int64s(group.offsets) for group in message.offsets)
    return LeaseGrant(lease_id, read_masks(message.groups), message.ttl_ms / 1000, offsets)


def result_messages(
    group_indexes: Sequence[int], results: Sequence[Uint8s]
) -> list[cache_pb2.RunResults]:
    """Makes the messages of a store's results.

    group_indexes: for each run (consecutive blocks of a group), the index of its group in the
        client's call.
    results: for each run, the `BlockResult` value of each block.
    """
    return [
        cache_pb2.RunResults(group_index=group, results=value.tobytes())
        for group, value in zip(group_indexes, results, strict=True)
    ]


def read_results(messages: Iterable[cache_pb2.RunResults]) -> tuple[Uint8s, ...]:
    """Reads the `BlockResult` values of each run (consecutive blocks of a group), in the order of
    the request."""
    return tuple(np.frombuffer(run.results, np.uint8) for run in messages)


def load_response(value: TransferResult) -> cache_pb2.LoadResponse:
    """Makes the answer to a load."""
    return cache_pb2.LoadResponse(
        transfer_id=value.transfer_id,
        status=cache_pb2.TransferStatus.ValueType(int(value.status)),
        byte_count=value.num_bytes,
        message=value.message,
    )


def store_response(value: TransferResult, group_indexes: Sequence[int]) -> cache_pb2.StoreResponse:
    """Makes the message that answers a store.

    group_indexes: for each run (consecutive blocks of a group), the index of its group in the
        client's call.
    """
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
    """Reads the end of a transfer. An unknown status, from a newer protocol, becomes FAILED,
    because the transfer has ended in any case."""
    status = int(message.status)
    return TransferResult(
        message.transfer_id,
        TransferStatus(status) if status in set(TransferStatus) else TransferStatus.FAILED,
        message.byte_count,
        read_results(message.runs) if isinstance(message, cache_pb2.StoreResponse) else (),
        message.message,
    )

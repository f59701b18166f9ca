"""Between wire messages and the values of the core. Every check of a message's own shape is here;
the field is named in the error."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotkv.errors import HotKVError, Reason
from hotkv.groups import GroupKind, GroupSpec
from hotkv.keys import MAX_GROUPS, KeySpace, Representation
from hotkv.layout import Layout, MemoryHandle, PageTensor
from hotkv.order import MAX_MARKS, DeviceMark, DeviceOrder, OrderKind
from hotkv.retention import Retention
from hotkv.table import Words, hash_words
from hotkv.v1 import admin_pb2, cache_pb2, events_pb2, layout_pb2, session_pb2
from hotkv_server.core.values import HashList, LoadPositions, Run
from hotkv_server.dataplane.engine import Outcome
from hotkv_server.runtime.events import (
    BlockExtraKeys,
    BlocksRemoved,
    BlocksStored,
    ExtraKey,
    KeySpaceCleared,
    RunContent,
    TimedEvent,
)
from hotkv_server.runtime.reports import Report, WatchedReport
from hotkv_server.runtime.transfers import TransferEnd

MAX_TENSORS = 1 << 16
MAX_LISTS = 1024
"""Most runs, or hash lists, in a call: each costs the event loop some 20 us."""
MAX_STORED_BLOCKS = 1 << 16
"""Most blocks that a call may reserve or store: half of what it may look up, since making room
takes longer than finding."""
MAX_LOADED_BLOCKS = 1 << 17
"""As many as a lease finds in a call."""
MAX_IDENTIFIER = 256
MAX_KEY_SPACE_BYTES = 32 << 10
"""Of one on the wire: layer names make most of it."""
ROLES = {
    "scheduler": session_pb2.SESSION_ROLE_SCHEDULER,
    "worker": session_pb2.SESSION_ROLE_WORKER,
    "tool": session_pb2.SESSION_ROLE_TOOL,
}
"""By the role's name in the core."""
GroupIndex = Callable[[int], int]
"""From a group index as the session names it to the core's: `LiveSession.group_index`."""
STATUS: dict[Outcome, cache_pb2.TransferStatus.ValueType] = {
    Outcome.DONE: cache_pb2.TRANSFER_STATUS_DONE,
    Outcome.CANCELLED: cache_pb2.TRANSFER_STATUS_CANCELLED,
    Outcome.FAILED: cache_pb2.TRANSFER_STATUS_FAILED,
}


def key_space(message: layout_pb2.KeySpace) -> KeySpace:
    """Raises INVALID_FIELD where the key space contradicts itself, TOO_LARGE where it is too much
    to keep."""
    if message.ByteSize() > MAX_KEY_SPACE_BYTES:
        raise HotKVError(
            Reason.TOO_LARGE,
            f"key_space has {message.ByteSize()} bytes; at most {MAX_KEY_SPACE_BYTES} are accepted",
        )
    if len(message.groups) > MAX_GROUPS:
        raise HotKVError(
            Reason.TOO_LARGE,
            (
                f"key_space.groups has {len(message.groups)} entries; at most {MAX_GROUPS} are "
                "accepted"
            ),
        )
    _check_texts(message)
    try:
        groups = []
        for position, group in enumerate(message.groups):
            if group.group_index != position:
                raise ValueError(
                    f"groups[{position}].group_index is {group.group_index}; groups are listed "
                    "in order"
                )
            if int(group.kind) not in set(GroupKind):
                raise ValueError(f"groups[{position}].kind is {group.kind}, which is unknown")
            groups.append(
                GroupSpec(
                    GroupKind(group.kind),
                    group.block_token_count,
                    tuple(group.shard_byte_counts),
                    group.window_token_count,
                    tuple(group.layer_names),
                )
            )
        return KeySpace(
            model=message.model,
            weights_identity=message.weights_identity,
            dtype=message.dtype,
            groups=tuple(groups),
            hash_block_tokens=message.hash_block_token_count,
            kv_dtype=message.kv_dtype,
            hash_algorithm=message.hash_algorithm,
            hash_seed=message.hash_seed,
            hash_bytes=message.hash_byte_count,
            parallel_shape=message.parallel_shape,
            page_format=message.page_format,
            tenant=message.tenant,
            extra=tuple(message.extra),
        )
    except ValueError as error:
        raise HotKVError(Reason.INVALID_FIELD, f"key_space.{error}") from error


KEY_SPACE_TEXTS = (
    "tenant", "model", "weights_identity", "dtype", "kv_dtype", "hash_algorithm", "hash_seed",
    "parallel_shape", "page_format",
)  # fmt: skip


def _check_texts(message: layout_pb2.KeySpace) -> None:
    """Raises INVALID_FIELD for what a log, a list for operators or a topic of events could take for
    something else."""
    for field in KEY_SPACE_TEXTS:
        _check_printable(f"key_space.{field}", getattr(message, field))
    for index, text in enumerate(message.extra):
        _check_printable(f"key_space.extra[{index}]", text)
    for index, group in enumerate(message.groups):
        for text in group.layer_names:
            _check_printable(f"key_space.groups[{index}].layer_names", text)


def key_space_message(value: KeySpace) -> layout_pb2.KeySpace:
    """The key space on the wire."""
    return layout_pb2.KeySpace(
        tenant=value.tenant,
        model=value.model,
        weights_identity=value.weights_identity,
        dtype=value.dtype,
        kv_dtype=value.kv_dtype,
        hash_algorithm=value.hash_algorithm,
        hash_seed=value.hash_seed,
        hash_byte_count=value.hash_bytes,
        hash_block_token_count=value.hash_block_tokens,
        groups=[
            layout_pb2.KvGroup(
                group_index=index,
                kind=layout_pb2.KvGroupKind.ValueType(int(group.kind)),
                block_token_count=group.block_tokens,
                window_token_count=group.window_tokens,
                shard_byte_counts=group.shard_bytes,
                layer_names=group.layer_names,
            )
            for index, group in enumerate(value.groups)
        ],
        parallel_shape=value.parallel_shape,
        page_format=value.page_format,
        extra=value.extra,
    )


def representations(messages: Iterable[layout_pb2.Representation]) -> tuple[Representation, ...]:
    """Raises INVALID_FIELD where one has a number out of range."""
    kinds = []
    for index, m in enumerate(messages):
        _check_printable(f"representations[{index}].format", m.format)
        try:
            kinds.append(
                Representation(m.group_index, m.format, m.version, tuple(m.shard_byte_counts))
            )
        except ValueError as error:
            raise HotKVError(Reason.INVALID_FIELD, f"representations[{index}].{error}") from error
    return tuple(kinds)


def representation_message(value: Representation) -> layout_pb2.Representation:
    """The kind of representation on the wire."""
    return layout_pb2.Representation(
        group_index=value.group_index,
        format=value.format,
        version=value.version,
        shard_byte_counts=value.shard_bytes,
    )


def layout(message: layout_pb2.Layout) -> Layout:
    """The layout as it came; `Layout.validate` checks it against its key space."""
    if len(message.tensors) > MAX_TENSORS or len(message.handles) > MAX_TENSORS:
        raise HotKVError(Reason.TOO_LARGE, f"layout has more than {MAX_TENSORS} tensors or handles")
    handles = []
    for index, handle in enumerate(message.handles):
        identifier(f"layout.handles[{index}].handle_id", handle.handle_id)
        match handle.WhichOneof("source"):
            case "file_mapping":
                handles.append(
                    MemoryHandle(
                        handle.handle_id, handle.byte_count, handle.file_mapping.file_byte_offset
                    )
                )
            case "cuda_ipc":
                ipc = handle.cuda_ipc
                if len(ipc.handle) != 64:
                    raise HotKVError(
                        Reason.INVALID_LAYOUT,
                        f"layout.handles[{index}].cuda_ipc.handle has {len(ipc.handle)} bytes, "
                        "not 64; send what cudaIpcGetMemHandle gives "
                        "for memory of cudaMalloc: torch puts two bytes before it, and segments "
                        "that can grow have none",
                    )
                handles.append(
                    MemoryHandle(
                        handle.handle_id,
                        handle.byte_count,
                        ipc.base_byte_offset,
                        ipc.handle,
                        ipc.device_uuid,
                    )
                )
            case _:
                raise HotKVError(
                    Reason.INVALID_LAYOUT,
                    f"layout.handles[{index}].source is empty; give file_mapping or cuda_ipc",
                )
    tensors = tuple(
        PageTensor(
            t.group_index,
            t.handle_id,
            t.base_byte_offset,
            t.block_stride_byte_count,
            t.run_byte_count,
            t.shard_byte_offset,
            tuple((dim.count, dim.stride_byte_count) for dim in t.dims),
            tuple(t.layer_names),
        )
        for t in message.tensors
    )
    return Layout(
        message.shard_index,
        message.block_count,
        tuple(handles),
        tensors,
        name("layout.name", message.name),
    )


def device_order(message: layout_pb2.DeviceOrder) -> DeviceOrder:
    """The order as it came; registering the memory checks it against its layout."""
    if len(message.event_handles) > MAX_MARKS:
        raise HotKVError(
            Reason.TOO_LARGE,
            (
                f"order.event_handles has {len(message.event_handles)} entries; at most "
                f"{MAX_MARKS} "
                "are accepted"
            ),
        )
    return DeviceOrder(
        message.device_uuid,
        tuple(message.event_handles),
        identifier("order.flags_handle_id", message.flags_handle_id),
        message.flag_count,
    )


def device_mark(request: cache_pb2.LoadRequest | cache_pb2.StoreRequest) -> DeviceMark | None:
    """The mark after which a transfer may begin; None for at once. Whether the session has such a
    mark is told when it begins."""
    return (
        DeviceMark(request.after.index, request.after.value) if request.HasField("after") else None
    )


def order_kind(kind: OrderKind) -> layout_pb2.DeviceOrderKind.ValueType:
    """How marks are made, on the wire."""
    return layout_pb2.DeviceOrderKind.ValueType(int(kind))


def memory_registered(kind: OrderKind, message: str) -> session_pb2.MemoryRegistered:
    """What was taken of a device order."""
    return session_pb2.MemoryRegistered(order=order_kind(kind), message=message)


@cache
def enum_word(kind: Any, number: int) -> str:
    """An enum's value as clients of version 1 read it: `BLOCK_VERDICT_NEVER_STORED` as
    "never stored"."""
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


def _check_lists(field: str, messages: Sequence[object]) -> None:
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
    _check_lists("groups", groups)
    return [
        HashList(group_index(g.group_index), hashes("groups.hashes", g.hashes, hash_bytes))
        for g in groups
    ]


def runs(
    messages: Sequence[cache_pb2.BlockRun], hash_bytes: int, group_index: GroupIndex
) -> list[Run]:
    """Chains of blocks."""
    _check_lists("runs", messages)
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

    Raises INVALID_FIELD where there are not as many as its blocks need.
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


def event(item: TimedEvent) -> events_pb2.Event:
    """One change on the wire."""
    value, key_space = item.event, item.key_space
    message = events_pb2.Event(
        key_space_id=value.key_space_id, unix_time_ms=int(item.unix_time_s * 1000)
    )
    match value:
        case BlocksStored(hashes=words, content=content):
            stored = message.stored
            stored.group_index, stored.depth, stored.lora_name = (
                value.group_index,
                value.depth,
                content.lora_name,
            )
            stored.hashes, stored.token_ids = (
                unpadded(words, key_space.hash_bytes),
                content.token_ids.tobytes(),
            )
            stored.parent_hash = (
                b""
                if value.parent is None
                else unpadded(value.parent.reshape(1, 8), key_space.hash_bytes)
            )
            stored.block_count = len(words)
            stored.block_token_count = key_space.groups[value.group_index].block_tokens
            stored.extra_keys.extend(_extra_keys_message(keys) for keys in content.extra_keys)
        case BlocksRemoved(hashes=words):
            message.removed.group_index, message.removed.block_count = value.group_index, len(words)
            message.removed.hashes = unpadded(words, key_space.hash_bytes)
        case KeySpaceCleared():
            message.cleared.SetInParent()
    return message


def _extra_keys_message(keys: BlockExtraKeys) -> cache_pb2.BlockExtraKeys:
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


def watched_request(value: WatchedReport) -> admin_pb2.WatchedRequest:
    """One reported request on the wire."""
    return admin_pb2.WatchedRequest(
        key_space_id=value.key_space_id,
        hashes=unpadded(value.report.hashes, value.hash_bytes),
        prompt_token_count=value.report.prompt_tokens,
        device_hit_token_count=value.report.device_hit_tokens,
        hit_token_count=value.report.hit_tokens,
        unix_time_ms=int(value.unix_time_s * 1000),
    )


def load_runs(
    messages: Sequence[cache_pb2.LoadRun], group_index: GroupIndex
) -> tuple[list[LoadPositions], list[NDArray[np.int64]]]:
    """Positions in the lease and block ids, a pair a run."""
    _check_lists("runs", messages)
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
    """An id or name as it came, if it is not too long to keep and to repeat in messages."""
    if len(text) > MAX_IDENTIFIER:
        raise HotKVError(Reason.TOO_LARGE, f"{field} is longer than {MAX_IDENTIFIER} characters")
    return text


def name(field: str, text: str) -> str:
    """An identifier that goes into the log: nothing in it may look like a line of its own."""
    _check_printable(field, text)
    return identifier(field, text)


def _check_printable(field: str, text: str) -> None:
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


def retention(field: str, message: cache_pb2.Retention) -> Retention:
    """What a request asks of eviction; the default where the message is not set."""
    try:
        return Retention(message.priority, seconds(f"{field}.ttl_ms", message.ttl_ms), message.pin)
    except ValueError as error:
        raise HotKVError(Reason.INVALID_FIELD, f"{field}: {error}") from error


def reports(messages: Iterable[session_pb2.RequestReport], hash_bytes: int) -> list[Report]:
    """Requests that an engine has scheduled."""
    return [
        Report(
            hashes("requests.hashes", m.hashes, hash_bytes),
            m.prompt_token_count,
            m.device_hit_token_count,
            m.hit_token_count,
            seconds("requests.age_ms", m.age_ms),
            retention("requests.retention", m.retention),
        )
        for m in messages
    ]


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

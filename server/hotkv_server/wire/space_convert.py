"""Key spaces, representations, memory and device order: between the wire and the core's values.

Checks what a message says of itself, and names the field; `Layout.validate` and registering check
the rest.
"""

from collections.abc import Iterable

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import MAX_GROUPS, KeySpace, Representation
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_proto.order import MAX_MARKS, DeviceMark, DeviceOrder, OrderKind
from hotkv_proto.v1 import cache_pb2, layout_pb2, session_pb2
from hotkv_server.wire.convert import check_printable, identifier, name

MAX_TENSORS = 1 << 16
MAX_KEY_SPACE_BYTES = 32 << 10
"""Of one on the wire: layer names make most of it."""
KEY_SPACE_TEXTS = (
    "tenant", "model", "weights_identity", "dtype", "kv_dtype", "hash_algorithm", "hash_seed",
    "parallel_shape", "page_format",
)  # fmt: skip
ROLES = {
    "scheduler": session_pb2.SESSION_ROLE_SCHEDULER,
    "worker": session_pb2.SESSION_ROLE_WORKER,
    "tool": session_pb2.SESSION_ROLE_TOOL,
}
"""By the role's name in the core."""


def key_space(message: layout_pb2.KeySpace) -> KeySpace:
    """The key space of a message. Raises INVALID_FIELD if it contradicts itself, TOO_LARGE if it is
    too much to keep."""
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


def _check_texts(message: layout_pb2.KeySpace) -> None:
    """Raises INVALID_FIELD for what a log, a list for operators or a topic of events could take for
    something else."""
    for field in KEY_SPACE_TEXTS:
        check_printable(f"key_space.{field}", getattr(message, field))
    for index, text in enumerate(message.extra):
        check_printable(f"key_space.extra[{index}]", text)
    for index, group in enumerate(message.groups):
        for text in group.layer_names:
            check_printable(f"key_space.groups[{index}].layer_names", text)


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
    """Kinds of representations. Raises INVALID_FIELD if one has a number out of range."""
    kinds = []
    for index, m in enumerate(messages):
        check_printable(f"representations[{index}].format", m.format)
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
    """The kind of a mark on the wire."""
    return layout_pb2.DeviceOrderKind.ValueType(int(kind))


def memory_registered(kind: OrderKind, message: str) -> session_pb2.MemoryRegistered:
    """The part of a device order that was taken, on the wire."""
    return session_pb2.MemoryRegistered(order=order_kind(kind), message=message)

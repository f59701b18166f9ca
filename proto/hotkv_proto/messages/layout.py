"""Converts key spaces, kinds of sketches, layouts and device orders to messages and back
(layout.proto).

Does not check a layout or a device order against the key space: `Layout.validate` and the
registration of memory do.
"""

from collections.abc import Iterable

from hotkv_proto.errors import HotKVError, Reason, check_most, invalid
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import MAX_GROUPS, KeySpace, Sketch
from hotkv_proto.layout import CudaBacking, Layout, MemoryHandle, PageTensor
from hotkv_proto.messages import fields
from hotkv_proto.order import MAX_MARKS, DeviceMark, DeviceOrder, OrderKind
from hotkv_proto.v1 import cache_pb2, layout_pb2

MAX_KEY_SPACE_BYTES = 32 << 10
"""On the wire, mostly layer names."""
KEY_SPACE_TEXTS = (
    "tenant", "model", "weights_identity", "dtype", "kv_dtype", "hash_algorithm", "hash_seed",
    "parallel_shape", "page_format",
)  # fmt: skip

# ------------------------------------------------------------------------------------- key spaces


def read_key_space(message: layout_pb2.KeySpace) -> KeySpace:
    """Raises INVALID_FIELD if it contradicts itself, TOO_LARGE if it is too large to store."""
    check_most(MAX_KEY_SPACE_BYTES, message.ByteSize(), "key_space has {} bytes")
    check_most(MAX_GROUPS, len(message.groups), "key_space.groups has {} entries")
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
        raise invalid(f"key_space.{error}") from error


def _check_texts(message: layout_pb2.KeySpace) -> None:
    """Logs, operators' lists and topics of events show the texts."""
    for field in KEY_SPACE_TEXTS:
        fields.check_printable(f"key_space.{field}", getattr(message, field))
    for index, text in enumerate(message.extra):
        fields.check_printable(f"key_space.extra[{index}]", text)
    for index, group in enumerate(message.groups):
        for text in group.layer_names:
            fields.check_printable(f"key_space.groups[{index}].layer_names", text)


def key_space_message(value: KeySpace) -> layout_pb2.KeySpace:
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


def read_sketches(
    messages: Iterable[layout_pb2.Sketch],
) -> tuple[Sketch, ...]:
    """Raises INVALID_FIELD if a number is out of range."""
    kinds = []
    for index, m in enumerate(messages):
        fields.check_printable(f"sketches[{index}].format", m.format)
        try:
            kinds.append(Sketch(m.group_index, m.format, m.version, tuple(m.shard_byte_counts)))
        except ValueError as error:
            raise invalid(f"sketches[{index}].{error}") from error
    return tuple(kinds)


def sketch_message(value: Sketch) -> layout_pb2.Sketch:
    return layout_pb2.Sketch(
        group_index=value.group_index,
        format=value.format,
        version=value.version,
        shard_byte_counts=value.shard_bytes,
    )


# ----------------------------------------------------------------------------------------- memory


def layout_message(value: Layout) -> layout_pb2.Layout:
    message = layout_pb2.Layout(
        shard_index=value.shard_index, block_count=value.num_blocks, name=value.name
    )
    for handle in value.handles:
        entry = message.handles.add(handle_id=handle.handle_id, byte_count=handle.num_bytes)
        if handle.backings:
            entry.cuda_range.base_byte_offset = handle.base_offset_bytes
            entry.cuda_range.device_uuid = handle.device_uuid
            for backing in handle.backings:
                entry.cuda_range.backings.add(
                    backing_id=backing.backing_id, byte_count=backing.num_bytes
                )
        elif handle.is_cuda:
            entry.cuda_ipc.handle = handle.cuda_handle
            entry.cuda_ipc.base_byte_offset = handle.base_offset_bytes
            entry.cuda_ipc.device_uuid = handle.device_uuid
        else:
            entry.file_mapping.file_byte_offset = handle.base_offset_bytes
    for tensor in value.tensors:
        message.tensors.add(
            group_index=tensor.group_index,
            handle_id=tensor.handle_id,
            base_byte_offset=tensor.base_offset_bytes,
            block_stride_byte_count=tensor.block_stride_bytes,
            run_byte_count=tensor.run_bytes,
            shard_byte_offset=tensor.shard_offset_bytes,
            layer_names=tensor.layer_names,
            dims=[
                layout_pb2.StridedDim(count=count, stride_byte_count=stride)
                for count, stride in tensor.dims
            ],
        )
    return message


def read_layout(message: layout_pb2.Layout) -> Layout:
    """Raises INVALID_LAYOUT for a handle without a valid source, TOO_LARGE for a name that is
    too long, INVALID_FIELD for one that can't be printed."""
    handles = []
    for index, handle in enumerate(message.handles):
        fields.identifier(f"layout.handles[{index}].handle_id", handle.handle_id)
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
                        "for memory of cudaMalloc: torch puts two bytes before it, and virtual "
                        "memory has none (cuda_range)",
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
            case "cuda_range":
                handles.append(_read_range(index, handle))
            case _:
                raise HotKVError(
                    Reason.INVALID_LAYOUT,
                    f"layout.handles[{index}].source is empty; give file_mapping, cuda_ipc or "
                    "cuda_range",
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
        fields.name("layout.name", message.name),
    )


def _read_range(index: int, handle: layout_pb2.MemoryHandle) -> MemoryHandle:
    source, name = handle.cuda_range, f"layout.handles[{index}].cuda_range.backings"
    if not source.backings:
        raise HotKVError(Reason.INVALID_LAYOUT, f"{name} is empty; name what lies in the range")
    backings = tuple(
        CudaBacking(fields.identifier(f"{name}[{at}].backing_id", one.backing_id), one.byte_count)
        for at, one in enumerate(source.backings)
    )
    return MemoryHandle(
        handle.handle_id,
        handle.byte_count,
        source.base_byte_offset,
        device_uuid=source.device_uuid,
        backings=backings,
    )


def device_order_message(value: DeviceOrder) -> layout_pb2.DeviceOrder:
    return layout_pb2.DeviceOrder(
        device_uuid=value.device_uuid,
        event_handles=value.event_handles,
        flags_handle_id=value.flags_handle_id,
        flag_count=value.num_flags,
    )


def read_device_order(message: layout_pb2.DeviceOrder) -> DeviceOrder:
    """Raises TOO_LARGE for more than MAX_MARKS events, or an id that is too long."""
    check_most(MAX_MARKS, len(message.event_handles), "order.event_handles has {} entries")
    return DeviceOrder(
        message.device_uuid,
        tuple(message.event_handles),
        fields.identifier("order.flags_handle_id", message.flags_handle_id),
        message.flag_count,
    )


def device_mark_message(value: DeviceMark | None) -> layout_pb2.DeviceMark | None:
    return None if value is None else layout_pb2.DeviceMark(index=value.index, value=value.value)


def read_device_mark(request: cache_pb2.LoadRequest | cache_pb2.StoreRequest) -> DeviceMark | None:
    """None if the transfer may begin at once. Whether the session has such a mark is checked
    when it begins."""
    return (
        DeviceMark(request.after.index, request.after.value) if request.HasField("after") else None
    )


def order_kind(kind: OrderKind) -> layout_pb2.DeviceOrderKind.ValueType:
    return layout_pb2.DeviceOrderKind.ValueType(int(kind))

"""Requests of sessions: typed values in, messages out. `_answers` reads what comes back.

With `_answers`, `_report_wire`, `_sparse_wire`, `_hint_wire`, `_warm_wire` and `_admin_wire` the
only modules of the client that see protobuf.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hotkv_proto
from hotkv_client.types import (
    After,
    BlockExtraKeys,
    BlockRun,
    GroupHashes,
    LoadRun,
    SessionConfig,
)
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import KeySpace
from hotkv_proto.layout import Layout
from hotkv_proto.order import DeviceOrder
from hotkv_proto.retention import NO_RETENTION, Retention
from hotkv_proto.store_options import StoreOptions
from hotkv_proto.v1 import cache_pb2, layout_pb2, residency_pb2, session_pb2, session_pb2_grpc
from hotkv_proto.versions import FEATURES, NEWEST_VERSION, OLDEST_VERSION

Request = session_pb2.ConnectRequest
Stub = session_pb2_grpc.SessionServiceStub
"""Of a channel that is open."""


def pack(hashes: Sequence[bytes], hash_bytes: int) -> bytes:
    """Hashes joined for the wire. Raises INVALID_HASH if one has another length."""
    if hashes and set(map(len, hashes)) != {hash_bytes}:
        wrong = next(i for i, h in enumerate(hashes) if len(h) != hash_bytes)
        raise HotKVError(
            Reason.INVALID_HASH,
            f"hashes[{wrong}] has {len(hashes[wrong])} bytes; this key space uses {hash_bytes}",
        )
    return b"".join(hashes)


def _int32s(values: NDArray[np.int32]) -> bytes:
    return np.ascontiguousarray(values, "<i4").tobytes()


def packed_groups(groups: Iterable[GroupHashes], hash_bytes: int) -> list[cache_pb2.GroupHashes]:
    return [
        cache_pb2.GroupHashes(group_index=g.group_index, hashes=pack(g.hashes, hash_bytes))
        for g in groups
    ]


def _runs(runs: Iterable[BlockRun], hash_bytes: int) -> list[cache_pb2.BlockRun]:
    return [
        cache_pb2.BlockRun(
            group_index=run.group_index,
            hashes=pack(run.hashes, hash_bytes),
            parent_hash=run.parent_hash,
            depth=run.depth,
            block_ids=_int32s(run.block_ids),
            token_ids=_int32s(np.asarray(run.token_ids, np.int32)),
            lora_name=run.lora_name,
            extra_keys=[_extra_keys(keys) for keys in run.extra_keys],
        )
        for run in runs
    ]


def _extra_keys(keys: BlockExtraKeys) -> cache_pb2.BlockExtraKeys:
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


def key_space_message(value: KeySpace) -> layout_pb2.KeySpace:
    """The key space on the wire."""
    groups = [
        layout_pb2.KvGroup(
            group_index=index,
            kind=layout_pb2.KvGroupKind.ValueType(int(group.kind)),
            block_token_count=group.block_tokens,
            window_token_count=group.window_tokens,
            shard_byte_counts=group.shard_bytes,
            layer_names=group.layer_names,
        )
        for index, group in enumerate(value.groups)
    ]
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
        groups=groups,
        parallel_shape=value.parallel_shape,
        page_format=value.page_format,
        extra=value.extra,
    )


def layout_message(value: Layout) -> layout_pb2.Layout:
    """The layout on the wire."""
    message = layout_pb2.Layout(
        shard_index=value.shard_index, block_count=value.num_blocks, name=value.name
    )
    for handle in value.handles:
        entry = message.handles.add(handle_id=handle.handle_id, byte_count=handle.num_bytes)
        if handle.is_cuda:
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


def open_session(config: SessionConfig, ticket: bytes = b"") -> Request:
    """First message of a stream."""
    return Request(
        open_session=session_pb2.OpenSession(
            protocol_version=OLDEST_VERSION,
            newest_protocol_version=NEWEST_VERSION,
            features=[session_pb2.Feature.ValueType(int(f)) for f in sorted(FEATURES)],
            engine_id=config.engine_id,
            role=session_pb2.SessionRole.ValueType(int(config.role)),
            key_space=key_space_message(config.key_space),
            client_name=f"{config.client_name} {hotkv_proto.__version__}",
            representations=[
                layout_pb2.Representation(
                    group_index=kind.group_index,
                    format=kind.format,
                    version=kind.version,
                    shard_byte_counts=kind.shard_bytes,
                )
                for kind in config.representations
            ],
            ticket=ticket,
            without_eviction_notices=config.on_evicted is None,
        )
    )


def register_memory(layout: Layout, order: DeviceOrder) -> Request:
    """Declares memory."""
    message = layout_pb2.DeviceOrder(
        device_uuid=order.device_uuid,
        event_handles=order.event_handles,
        flags_handle_id=order.flags_handle_id,
        flag_count=order.num_flags,
    )
    return Request(
        register_memory=session_pb2.RegisterMemory(layout=layout_message(layout), order=message)
    )


def _mark(after: After | None) -> layout_pb2.DeviceMark | None:
    return (
        None
        if after is None
        else layout_pb2.DeviceMark(index=after.mark.index, value=after.mark.value)
    )


def ping() -> Request:
    """Asks for an empty answer."""
    return Request(ping=session_pb2.Ping())


def lookup(
    groups: Sequence[GroupHashes], hash_bytes: int, traceparent: str | None = None
) -> Request:
    """Asks which blocks are ready. Checks only the total length of the hashes: the answer is a
    hint, and the call must be quick."""
    request = Request()
    for group in groups:
        packed = b"".join(group.hashes)
        if len(packed) != len(group.hashes) * hash_bytes:
            raise HotKVError(
                Reason.INVALID_HASH,
                f"hashes do not all have the {hash_bytes} bytes of this key space",
            )
        request.lookup.groups.add(group_index=group.group_index, hashes=packed)
    request.lookup.SetInParent()
    if traceparent:
        request.lookup.traceparent = traceparent
    return request


def acquire(
    lease_id: str,
    groups: Sequence[GroupHashes],
    ttl_s: float,
    hash_bytes: int,
    *,
    wants_offsets: bool = False,
    traceparent: str | None = None,
) -> Request:
    """Pins ready blocks."""
    return Request(
        acquire_lease=cache_pb2.AcquireLeaseRequest(
            lease_id=lease_id,
            groups=packed_groups(groups, hash_bytes),
            ttl_ms=int(ttl_s * 1000),
            wants_offsets=wants_offsets,
            traceparent=traceparent or "",
        )
    )


def retention_message(value: Retention) -> cache_pb2.Retention | None:
    if value == NO_RETENTION:
        return None
    return cache_pb2.Retention(priority=value.priority, ttl_ms=whole_ms(value.ttl_s), pin=value.pin)


def whole_ms(seconds: float) -> int:
    """Milliseconds; 1 for what is shorter, since 0 means none."""
    return int(seconds * 1000) or int(seconds > 0)


def reserve(
    lease_id: str, runs: Sequence[BlockRun], ttl_s: float, retention: Retention, hash_bytes: int
) -> Request:
    """Reserves slots."""
    return Request(
        reserve_blocks=cache_pb2.ReserveBlocksRequest(
            lease_id=lease_id,
            runs=_runs(runs, hash_bytes),
            ttl_ms=int(ttl_s * 1000),
            retention=retention_message(retention),
        )
    )


def release(lease_id: str) -> Request:
    """Gives a lease back."""
    return Request(release_lease=cache_pb2.ReleaseLeaseRequest(lease_id=lease_id))


def open_residency(residency_id: str, num_blocks: Mapping[int, int]) -> Request:
    """Reserves room for a request."""
    groups = [
        residency_pb2.ResidencyGroup(group_index=group, block_count=count)
        for group, count in num_blocks.items()
    ]
    return Request(
        open_residency=residency_pb2.OpenResidencyRequest(residency_id=residency_id, groups=groups)
    )


def extend_residency(
    residency_id: str,
    group_index: int,
    first_position: int,
    hashes: Sequence[bytes],
    hash_bytes: int,
) -> Request:
    """Pins blocks of a residency."""
    return Request(
        extend_residency=residency_pb2.ExtendResidencyRequest(
            residency_id=residency_id,
            group_index=group_index,
            first_position=first_position,
            hashes=pack(hashes, hash_bytes),
        )
    )


def close_residency(residency_id: str) -> Request:
    """Gives a residency back."""
    return Request(close_residency=residency_pb2.CloseResidencyRequest(residency_id=residency_id))


def load(
    transfer_id: str,
    lease_id: str,
    runs: Sequence[LoadRun],
    timeout_s: float,
    after: After | None = None,
    traceparent: str | None = None,
) -> Request:
    """Copies leased blocks into engine memory."""
    messages = [
        cache_pb2.LoadRun(
            group_index=run.group_index,
            lease_positions=_int32s(run.lease_positions),
            block_ids=_int32s(run.block_ids),
        )
        for run in runs
    ]
    timeout_ms = int(timeout_s * 1000)
    return Request(
        load=cache_pb2.LoadRequest(
            transfer_id=transfer_id,
            lease_id=lease_id,
            runs=messages,
            timeout_ms=timeout_ms,
            after=_mark(after),
            traceparent=traceparent or "",
        )
    )


def store(
    transfer_id: str,
    lease_id: str,
    runs: Sequence[BlockRun],
    timeout_s: float,
    options: StoreOptions,
    fence_index: int,
    hash_bytes: int,
    after: After | None = None,
) -> Request:
    """Copies blocks from engine memory."""
    return Request(
        store=cache_pb2.StoreRequest(
            transfer_id=transfer_id,
            lease_id=lease_id,
            runs=_runs(runs, hash_bytes),
            timeout_ms=int(timeout_s * 1000),
            fence_index=fence_index,
            retention=retention_message(options.retention),
            after=_mark(after),
            residency_id=options.residency_id,
            traceparent=options.traceparent,
        )
    )


def cancel(transfer_id: str) -> Request:
    """Asks a transfer to end early."""
    return Request(cancel_transfer=cache_pb2.CancelTransferRequest(transfer_id=transfer_id))


def flush() -> Request:
    """Forgets the key space's blocks."""
    return Request(flush=session_pb2.Flush())


def connect(
    stub: Stub,
    requests: Iterator[Request],
    metadata: Sequence[tuple[str, str | bytes]] = (),
) -> Any:
    """Opens the session stream; iterate over it for responses."""
    return stub.Connect(requests, metadata=tuple(metadata))


def link_request(session_id: str, handle_ids: Sequence[str]) -> bytes:
    """First packet on the descriptor socket."""
    return session_pb2.LinkRequest(session_id=session_id, handle_ids=handle_ids).SerializeToString()


def ticket_request() -> bytes:
    """The packet that asks for a ticket."""
    return session_pb2.LinkRequest(wants_ticket=True).SerializeToString()

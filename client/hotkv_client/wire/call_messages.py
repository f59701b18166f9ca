"""Builds the message of each call of a session; `answers` reads the answers. The methods of
`Session` with the same names explain the arguments."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import hotkv_proto
from hotkv_client.parts import PART_BLOCKS, PART_BYTES, split_messages
from hotkv_client.types import (
    After,
    BlockRun,
    EndedRequest,
    GroupHashes,
    LoadEnd,
    LoadRun,
    RequestReport,
    SessionConfig,
)
from hotkv_proto.blocks import Retention, StoreOptions
from hotkv_proto.layout import Layout
from hotkv_proto.messages import cache, fields
from hotkv_proto.messages.layout import (
    device_mark_message,
    device_order_message,
    key_space_message,
    layout_message,
    sketch_message,
)
from hotkv_proto.messages.report_messages import (
    MAX_REPORTS,
    ended_message,
    load_end_message,
    report_message,
)
from hotkv_proto.order import DeviceOrder
from hotkv_proto.v1 import (
    cache_pb2,
    events_pb2,
    hints_pb2,
    residency_pb2,
    session_pb2,
    session_pb2_grpc,
)
from hotkv_proto.versions import (
    FEATURES,
    MAX_MESSAGE_BYTES,
    MAX_PARTS,
    NEWEST_VERSION,
    OLDEST_VERSION,
)

Request = session_pb2.ConnectRequest
Stub = session_pb2_grpc.SessionServiceStub
"""Must be made while its channel is open: with a closed one gRPC crashes the process."""


def open_session(config: SessionConfig, ticket: bytes = b"") -> Request:
    return Request(
        open_session=session_pb2.OpenSession(
            protocol_version=OLDEST_VERSION,
            newest_protocol_version=NEWEST_VERSION,
            features=[session_pb2.Feature.ValueType(int(f)) for f in sorted(FEATURES)],
            engine_id=config.engine_id,
            role=session_pb2.SessionRole.ValueType(int(config.role)),
            key_space=key_space_message(config.key_space),
            client_name=f"{config.client_name} {hotkv_proto.__version__}",
            sketches=list(map(sketch_message, config.sketches)),
            ticket=ticket,
            without_eviction_notices=config.on_evicted is None,
            model_names=config.model_names,
            engine_name=config.engine_name,
        )
    )


def register_memory(layout: Layout, order: DeviceOrder) -> Request:
    return Request(
        register_memory=session_pb2.RegisterMemory(
            layout=layout_message(layout),
            order=device_order_message(order),
        )
    )


def read_events(most: int, *, begins_state: bool) -> Request:
    return Request(
        read_events=events_pb2.ReadEventsRequest(max_event_count=most, begins_state=begins_state)
    )


def ping() -> Request:
    return Request(ping=session_pb2.Ping())


def lookup(
    groups: Sequence[GroupHashes], hash_bytes: int, traceparent: str | None = None
) -> Request:
    """Checks only the total length of the hashes, to be quick: the answer is a hint."""
    request = Request()
    for group in groups:
        packed = cache.pack_quickly(group.hashes, hash_bytes)
        request.lookup.groups.add(group_index=group.group_index, hashes=packed)
    # Without groups, too, the request must say that it is a lookup.
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
    return Request(
        acquire_lease=cache_pb2.AcquireLeaseRequest(
            lease_id=lease_id,
            groups=cache.group_messages(groups, hash_bytes),
            ttl_ms=fields.whole_ms(ttl_s),
            wants_offsets=wants_offsets,
            traceparent=traceparent or "",
        )
    )


def reserve(
    lease_id: str, runs: Sequence[BlockRun], ttl_s: float, retention: Retention, hash_bytes: int
) -> Request:
    return Request(
        reserve_blocks=cache_pb2.ReserveBlocksRequest(
            lease_id=lease_id,
            runs=cache.run_messages(runs, hash_bytes),
            ttl_ms=fields.whole_ms(ttl_s),
            retention=cache.retention_message(retention),
        )
    )


def release(lease_id: str) -> Request:
    return Request(release_lease=cache_pb2.ReleaseLeaseRequest(lease_id=lease_id))


def open_residency(residency_id: str, num_blocks: Mapping[int, int]) -> Request:
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
    return Request(
        extend_residency=residency_pb2.ExtendResidencyRequest(
            residency_id=residency_id,
            group_index=group_index,
            first_position=first_position,
            hashes=cache.pack(hashes, hash_bytes),
        )
    )


def close_residency(residency_id: str) -> Request:
    return Request(close_residency=residency_pb2.CloseResidencyRequest(residency_id=residency_id))


def load(
    transfer_id: str,
    lease_id: str,
    runs: Sequence[LoadRun],
    timeout_s: float,
    after: After | None = None,
    traceparent: str | None = None,
) -> Request:
    return Request(
        load=cache_pb2.LoadRequest(
            transfer_id=transfer_id,
            lease_id=lease_id,
            runs=cache.load_run_messages(runs),
            timeout_ms=fields.whole_ms(timeout_s),
            after=device_mark_message(after.mark if after else None),
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
    """Leaves out token ids, LoRA name and extra keys, which serve only events, if the message
    would be too large."""
    request = cache_pb2.StoreRequest(
        transfer_id=transfer_id,
        lease_id=lease_id,
        runs=cache.run_messages(runs, hash_bytes),
        timeout_ms=fields.whole_ms(timeout_s),
        fence_index=fence_index,
        after=device_mark_message(after.mark if after else None),
    )
    cache.put_store_options(request, options)
    if any(run.token_ids for run in request.runs) and not _fits(request):
        for run in request.runs:
            run.ClearField("token_ids")
            run.ClearField("lora_name")
            run.ClearField("extra_keys")
    return Request(store=request)


CALL_BYTES, CALL_PARTS, RUN_PARTS = 64, 32, 10
"""Upper bounds: bytes that `ConnectRequest` adds to a store, parts (as for MAX_PARTS) of a store
without its runs, parts of a run without its extra keys."""


def _fits(request: cache_pb2.StoreRequest) -> bool:
    blocks = [block.keys for run in request.runs for block in run.extra_keys]
    num_parts = CALL_PARTS + RUN_PARTS * len(request.runs) + len(blocks)
    num_parts += sum(4 if key.HasField("multi_modal") else 2 for keys in blocks for key in keys)
    return num_parts <= MAX_PARTS and request.ByteSize() + CALL_BYTES <= MAX_MESSAGE_BYTES


def cancel(transfer_id: str) -> Request:
    return Request(cancel_transfer=cache_pb2.CancelTransferRequest(transfer_id=transfer_id))


def flush() -> Request:
    return Request(flush=session_pb2.Flush())


def report_use(groups: Sequence[GroupHashes], hash_bytes: int) -> Request:
    named = cache.group_messages(groups, hash_bytes)
    return Request(report_use=session_pb2.ReportUse(groups=named))


def report_requests(
    reports: Iterable[RequestReport[Sequence[bytes]]],
    hash_bytes: int,
    prefill_tokens_per_s: float = 0.0,
    ended: Iterable[EndedRequest[Sequence[bytes]]] = (),
    loads: Iterable[LoadEnd] = (),
) -> list[Request]:
    """Several messages if one would be too large."""
    messages = list(map(report_message, reports, repeat(hash_bytes)))
    over = list(map(ended_message, ended, repeat(hash_bytes)))
    ends = list(map(load_end_message, loads))
    whole = session_pb2.ReportUse(
        requests=messages, prefill_tokens_per_s=prefill_tokens_per_s, ended=over, loads=ends
    )
    # The server accepts PART_BLOCKS hashes in a message; with hash_bytes each, no more fit into
    # most_bytes.
    most_bytes = min(PART_BYTES, PART_BLOCKS * hash_bytes)
    if whole.ByteSize() <= most_bytes and max(len(messages), len(over), len(ends)) <= MAX_REPORTS:
        return [Request(report_use=whole)]
    parts = [session_pb2.ReportUse(prefill_tokens_per_s=prefill_tokens_per_s)]
    for part in split_messages(messages, session_pb2.RequestReport.ByteSize, most_bytes):
        parts.append(session_pb2.ReportUse(requests=part))
    for load_part in split_messages(ends, session_pb2.LoadEnd.ByteSize, most_bytes):
        parts.append(session_pb2.ReportUse(loads=load_part))
    for ended_part in split_messages(over, hints_pb2.EndedRequest.ByteSize, most_bytes):
        parts.append(session_pb2.ReportUse(ended=ended_part))
    return [Request(report_use=part) for part in parts]


def connect(
    stub: Stub,
    requests: Iterator[Request],
    metadata: Sequence[tuple[str, str | bytes]] = (),
) -> Any:
    """gRPC's call, an iterator over the server's messages."""
    return stub.Connect(requests, metadata=tuple(metadata))

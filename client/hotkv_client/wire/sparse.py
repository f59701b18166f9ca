"""Messages of the calls about sparse decode. The methods of `Session` with the same names
explain the arguments."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hotkv_client.parts import PART_BLOCKS, split_messages
from hotkv_client.types import Float32s, Int32s, SelectConfig, SelectedBlocks
from hotkv_client.wire.call_messages import Request
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.messages.arrays import packed_float32s, packed_int32s
from hotkv_proto.messages.cache import pack
from hotkv_proto.messages.errors import read_error_detail
from hotkv_proto.sparse_counters import SPARSE_COUNTERS
from hotkv_proto.v1 import sparse_pb2, sparse_pb2_grpc

SelectRequest = sparse_pb2.SelectBlocksRequest
Stub = sparse_pb2_grpc.SparseServiceStub
"""Must be made while its channel is open: with a closed one gRPC crashes the process."""


def _read_int32s(packed: bytes) -> Int32s:
    return np.frombuffer(packed, "<i4").astype(np.int32)


def _select_message(value: SelectConfig) -> sparse_pb2.SelectConfig:
    config = value.config
    message = sparse_pb2.SelectConfig(
        sketch_group_index=value.sketch_group,
        layer_indices=value.layer_indices,
        kv_head_count=value.kv_heads,
        head_size=value.head_size,
        adaptive_p=config.adaptive_p or 0.0,
        scorer=config.scorer,
        fusion=[
            sparse_pb2.FusedScorer(scorer=name, exponent=exponent)
            for name, exponent in config.fusion.items()
        ],
        sink_token_count=config.sink_tokens,
        recent_token_count=config.recent_tokens,
        max_correction_block_count=config.max_correction_blocks,
        cache_policy=config.cache_policy,
        scale=value.scale or 0.0,
        hot_block_count=value.hot_blocks,
        centres=_centre_messages(value),
    )
    if isinstance(config.sparse_topk, int):
        message.sparse_topk_token_count = config.sparse_topk
    else:
        message.sparse_topk_ratio = config.sparse_topk
    return message


def _centre_messages(value: SelectConfig) -> list[sparse_pb2.LayerCentre]:
    centres = value.centres
    if centres is None:
        return []
    messages = []
    for layer in value.layer_indices:
        if (mu_HD := centres.mu(layer)) is not None:
            biases = [(name, centres.bias(layer, name)) for name in value.config.scorers_of(layer)]
            known = [
                sparse_pb2.FormatBias(scorer=name, bias=bias)
                for name, bias in biases
                if bias is not None
            ]
            messages.append(
                sparse_pb2.LayerCentre(layer_index=layer, mu=packed_float32s(mu_HD), biases=known)
            )
    return messages


def create_sequence(
    sequence_id: str,
    group_index: int,
    hashes: Sequence[bytes],
    select: SelectConfig | None,
    hash_bytes: int,
) -> Request:
    return Request(
        create_sequence=sparse_pb2.CreateSequenceRequest(
            sequence_id=sequence_id,
            group_index=group_index,
            hashes=pack(hashes, hash_bytes),
            select=None if select is None else _select_message(select),
        )
    )


def append_blocks(
    sequence_id: str, first_position: int, hashes: Sequence[bytes], hash_bytes: int
) -> Request:
    return Request(
        append_blocks=sparse_pb2.AppendBlocksRequest(
            sequence_id=sequence_id, first_position=first_position, hashes=pack(hashes, hash_bytes)
        )
    )


def delete_sequence(sequence_id: str) -> Request:
    return Request(delete_sequence=sparse_pb2.DeleteSequenceRequest(sequence_id=sequence_id))


def report_sparse(
    positions: Mapping[str, Int32s], counters: Mapping[int, Mapping[str, float]]
) -> Iterator[Request]:
    """Several messages if there are more positions than the server accepts. Raises INVALID_FIELD
    for an unknown counter."""
    for layer, values in counters.items():
        unknown = values.keys() - set(SPARSE_COUNTERS)
        if unknown:
            raise HotKVError(
                Reason.INVALID_FIELD,
                (
                    f"counters[{layer}] has {sorted(unknown)[0]!r}; known are "
                    f"{', '.join(SPARSE_COUNTERS)}"
                ),
            )
    layers = [
        sparse_pb2.LayerCounters(layer_index=layer, **values) for layer, values in counters.items()
    ]
    messages = [
        sparse_pb2.SequenceReport(sequence_id=name, positions=packed_int32s(at))
        for name, at in positions.items()
    ]
    # So few bytes can't have more than the PART_BLOCKS positions that the server accepts.
    size, most_bytes = sparse_pb2.SequenceReport.ByteSize, 4 * PART_BLOCKS
    for part in split_messages(messages, size, most_bytes) if messages else [[]]:
        yield Request(report_sparse=sparse_pb2.ReportSparse(sequences=part, layers=layers))
        layers = []


def select_request(
    session_id: str,
    sequence_id: str,
    layer_index: int,
    query_QD: Float32s,
    context_tokens: int,
    always_log_mass_Q: Float32s | None,
    shard_index: int,
) -> SelectRequest:
    return SelectRequest(
        session_id=session_id,
        sequence_id=sequence_id,
        layer_index=layer_index,
        shard_index=shard_index,
        query=packed_float32s(query_QD),
        context_token_count=context_tokens,
        always_log_mass=b"" if always_log_mass_Q is None else packed_float32s(always_log_mass_Q),
    )


def selected(response: sparse_pb2.SelectBlocksResponse) -> SelectedBlocks:
    """Raises HotKVError if the server refused."""
    if response.HasField("error"):
        raise read_error_detail(response.error)
    return SelectedBlocks(
        _read_int32s(response.positions),
        np.frombuffer(response.weights, "<f4").astype(np.float32),
        response.estimated_mass,
        _read_int32s(response.load_positions),
        _read_int32s(response.load_slots),
        _read_int32s(response.evict_positions),
        _read_int32s(response.hot_positions),
        _read_int32s(response.hot_slots),
    )


def select_blocks(stub: Stub, requests: Iterator[SelectRequest]) -> Any:
    """gRPC's call, an iterator over the answers."""
    return stub.SelectBlocks(requests)

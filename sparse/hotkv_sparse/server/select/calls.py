"""Answers the calls of sparse decode. A refusal names the field of the message."""

import math
from collections.abc import Iterable, Sized

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.errors import HotKVError, check_most, invalid
from hotkv_proto.groups import PREFIX_CLOSED
from hotkv_proto.keys import MAX_GROUPS
from hotkv_proto.messages import arrays, fields
from hotkv_proto.messages.cache import read_hashes
from hotkv_proto.sparse_counters import SPARSE_COUNTERS
from hotkv_proto.v1 import sparse_pb2
from hotkv_server.node.live_session import LiveSession
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.server.select.book import (
    MAX_LAYERS,
    PackedCentre,
    Selected,
    SelectRequest,
    SelectSpec,
)
from hotkv_sparse.server.select.drive import MAX_SEQUENCES, SparseDecode
from hotkv_sparse.server.select.figures import LayerGrowth

I32 = NDArray[np.int32]
MAX_COUNT = 1e18
"""Growth of a counter in one report; more would make the float64 sums too inexact."""


# -------------------------------------------------------------------------------------------- calls


async def create_sequence(
    sparse: SparseDecode, session: LiveSession, request: sparse_pb2.CreateSequenceRequest
) -> sparse_pb2.CreateSequenceResponse:
    if not 0 <= request.group_index < len(session.key_space.groups):
        raise invalid(
            f"group_index is {request.group_index}; this key space has "
            f"{len(session.key_space.groups)} groups"
        )
    spec = None
    if request.HasField("select"):
        kind = session.key_space.groups[request.group_index].kind
        if kind not in PREFIX_CLOSED:
            raise invalid(
                f"group_index is {request.group_index}, a group of {kind.name}, which does not "
                "attend to its whole context; select from a group of FULL_ATTENTION or MLA"
            )
        spec = _select_spec(request.select, session, request.group_index)
        record = sparse.core.key_spaces[session.record.key_space_id]
        if (
            spec.sketch_group < MAX_GROUPS
            or record.block_group(spec.sketch_group) != request.group_index
        ):
            raise invalid(
                "select.sketch_group_index is "
                f"{request.select.sketch_group_index}; name a sketch of group "
                f"{request.group_index} that the session declares"
            )
        spec.check_slots(record.sketch(spec.sketch_group).shard_bytes)
    hashes = read_hashes("hashes", request.hashes, session.key_space.hash_bytes)
    sequence_id = fields.identifier("sequence_id", request.sequence_id)
    sequence = await sparse.create(session, sequence_id, request.group_index, hashes, spec)
    return sparse_pb2.CreateSequenceResponse(
        lease_id=sequence.lease_id, covered_block_count=len(sequence.slots)
    )


async def append_blocks(
    sparse: SparseDecode, session: LiveSession, request: sparse_pb2.AppendBlocksRequest
) -> sparse_pb2.AppendBlocksResponse:
    hashes = read_hashes("hashes", request.hashes, session.key_space.hash_bytes)
    sequence_id = fields.identifier("sequence_id", request.sequence_id)
    sequence = await sparse.append(session, sequence_id, request.first_position, hashes)
    return sparse_pb2.AppendBlocksResponse(
        block_count=len(sequence.hashes),
        lease_id=sequence.lease_id,
        covered_block_count=len(sequence.slots),
    )


async def delete_sequence(
    sparse: SparseDecode, session: LiveSession, request: sparse_pb2.DeleteSequenceRequest
) -> sparse_pb2.DeleteSequenceResponse:
    """Answers after the sequence's selections have ended."""
    return sparse_pb2.DeleteSequenceResponse(
        deleted=await sparse.delete(session, fields.identifier("sequence_id", request.sequence_id))
    )


def report_sparse(
    sparse: SparseDecode, session: LiveSession, request: sparse_pb2.ReportSparse
) -> None:
    _check_count("sequences", request.sequences, MAX_SEQUENCES)
    _check_count("layers", request.layers, MAX_LAYERS)
    used = _used(request.sequences, sparse.core.config.max_blocks_per_call)
    sparse.report(session, used, _layer_growth(request.layers))


# ----------------------------------------------------------------------------------------- messages


def _positions(field: str, packed: bytes, most: int) -> I32:
    """int32 [n] positions of blocks in a context. Raises INVALID_FIELD if one is negative,
    TOO_LARGE above `most`."""
    values = arrays.int32s(field, packed).astype(np.int32)
    _check_count(field, values, most)
    if len(values) and int(values.min()) < 0:
        raise invalid(f"{field} has {int(values.min())}; positions count blocks from 0")
    return values


def _check_count(field: str, values: Sized, most: int) -> None:
    check_most(most, len(values), field + " has {} entries")


def _check_layer(field: str, layer: int) -> None:
    if not 0 <= layer < MAX_LAYERS:
        raise invalid(f"{field} is {layer}; allowed are 0 to {MAX_LAYERS - 1}")


def _select_spec(
    message: sparse_pb2.SelectConfig, session: LiveSession, group_index: int
) -> SelectSpec:
    """The caller must then `check_slots`."""
    return SelectSpec(
        _config(message),
        session.group_index(message.sketch_group_index),
        tuple(message.layer_indices),
        message.kv_head_count,
        message.head_size,
        session.key_space.groups[group_index].block_tokens,
        session.key_space.num_shards,
        message.hot_block_count,
        message.scale or None,
        _centres(message.centres),
    )


def _centres(messages: Iterable[sparse_pb2.LayerCentre]) -> dict[int, PackedCentre]:
    centres: dict[int, PackedCentre] = {}
    for m in messages:
        if m.layer_index in centres:
            raise invalid(f"select.centres lists layer {m.layer_index} twice; give each one centre")
        bias = {of.scorer: of.bias for of in m.biases}
        if len(bias) < len(m.biases):
            raise invalid(
                f"select.centres.biases lists a scorer of layer {m.layer_index} twice; give each "
                "one bias"
            )
        centres[m.layer_index] = PackedCentre(m.mu, bias)
    return centres


def _config(message: sparse_pb2.SelectConfig) -> SparseConfig:
    fusion = {fused.scorer: fused.exponent for fused in message.fusion}
    if len(fusion) < len(message.fusion):
        raise invalid("select.fusion lists a scorer twice; give each one exponent")
    kind = message.WhichOneof("sparse_topk")
    if kind is None:
        raise invalid(
            "select.sparse_topk is missing; give a number of tokens or a share of the context"
        )
    try:
        return SparseConfig(
            sparse_topk=message.sparse_topk_token_count
            if kind == "sparse_topk_token_count"
            else message.sparse_topk_ratio,
            adaptive_p=message.adaptive_p or None,
            scorer=message.scorer,
            sink_tokens=message.sink_token_count,
            recent_tokens=message.recent_token_count,
            dense_layers=(),
            max_correction_blocks=message.max_correction_block_count,
            cache_policy=message.cache_policy,
            fusion=fusion,
        )
    except HotKVError as error:
        raise HotKVError(error.reason, error.message.replace("sparse.", "select.", 1)) from error


def select_request(message: sparse_pb2.SelectBlocksRequest, spec: SelectSpec) -> SelectRequest:
    """Not checked against the sequence; see `check_request`."""
    query = arrays.float32s("query", message.query)
    if len(query) % spec.head_size:
        raise invalid(
            f"query has {len(message.query)} bytes; float32 heads of {spec.head_size} channels "
            f"take {4 * spec.head_size} each"
        )
    log_mass = None
    if message.always_log_mass:
        log_mass = arrays.float32s("always_log_mass", message.always_log_mass)
    return SelectRequest(
        message.layer_index,
        message.shard_index,
        query.reshape(-1, spec.head_size),
        message.context_token_count,
        log_mass,
    )


def select_response(selected: Selected) -> sparse_pb2.SelectBlocksResponse:
    def packed(values: I32) -> bytes:
        return values.astype("<i4").tobytes()

    return sparse_pb2.SelectBlocksResponse(
        positions=packed(selected.selection.blocks),
        weights=selected.selection.weights.astype("<f4").tobytes(),
        estimated_mass=selected.selection.mass,
        load_positions=packed(selected.load.blocks),
        load_slots=packed(selected.load.slots),
        evict_positions=packed(selected.evicted),
        hot_positions=packed(selected.map.blocks),
        hot_slots=packed(selected.map.slots),
    )


def _used(messages: Iterable[sparse_pb2.SequenceReport], most: int) -> dict[str, I32]:
    """Positions by sequence id. Raises TOO_LARGE above `most` in total."""
    result: dict[str, I32] = {}
    for m in messages:
        values = _positions("sequences.positions", m.positions, most)
        most -= len(values)
        name = fields.identifier("sequences.sequence_id", m.sequence_id)
        result[name] = np.concatenate([result[name], values]) if name in result else values
    return result


def _layer_growth(messages: Iterable[sparse_pb2.LayerCounters]) -> list[LayerGrowth]:
    """Raises INVALID_FIELD for a wrong layer or value."""
    growth = []
    for m in messages:
        _check_layer("layers.layer_index", m.layer_index)
        for name in SPARSE_COUNTERS:
            value = getattr(m, name)
            if not (math.isfinite(value) and 0 <= value <= MAX_COUNT):
                raise invalid(f"layers.{name} is {value}; counters grow by 0 to {MAX_COUNT:.0e}")
        growth.append(
            LayerGrowth(m.layer_index, np.array([getattr(m, name) for name in SPARSE_COUNTERS]))
        )
    return growth

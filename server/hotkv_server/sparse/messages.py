"""Between the wire's messages of sparse decode and the values behind them. Every refusal names its
field."""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.messages.fields import float32s, identifier, int32s
from hotkv_proto.reports import SPARSE_COUNTERS
from hotkv_proto.v1 import sparse_pb2
from hotkv_server.node.session import LiveSession
from hotkv_server.sparse.book.figures import MAX_LAYERS, LayerGrowth
from hotkv_server.sparse.book.selection import PackedCentre, Selected, SelectRequest, SelectSpec
from hotkv_sparse.config import SparseConfig

I32 = NDArray[np.int32]
MAX_COUNT = 1e18
"""Largest growth of a counter: sums of it stay exact enough."""


def _invalid(message: str, reason: Reason = Reason.INVALID_FIELD) -> HotKVError:
    return HotKVError(reason, message)


def positions(field: str, packed: bytes, most: int) -> I32:
    """Positions of blocks in a context, int32 [n]. Raises INVALID_FIELD for negative ones,
    TOO_LARGE for more than `most`."""
    values = int32s(field, packed).astype(np.int32)
    if len(values) > most:
        raise _invalid(
            f"{field} has {len(values)} entries; at most {most} are accepted", Reason.TOO_LARGE
        )
    if len(values) and int(values.min()) < 0:
        raise _invalid(f"{field} has {int(values.min())}; positions count blocks from 0")
    return values


def _check_layer(field: str, layer: int) -> None:
    if not 0 <= layer < MAX_LAYERS:
        raise _invalid(f"{field} is {layer}; allowed are 0 to {MAX_LAYERS - 1}")


def select_spec(
    message: sparse_pb2.SelectConfig, session: LiveSession, group_index: int
) -> SelectSpec:
    """Settings of a selection from blocks of a group. `check_slots` checks them against the
    representation."""
    return SelectSpec(
        _config(message),
        session.group_index(message.representation_group_index),
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
            raise _invalid(
                f"select.centres lists layer {m.layer_index} twice; give each one centre"
            )
        bias = {of.scorer: of.bias for of in m.biases}
        if len(bias) < len(m.biases):
            raise _invalid(
                f"select.centres.biases lists a scorer of layer {m.layer_index} twice; give "
                "each "
                "one bias"
            )
        centres[m.layer_index] = PackedCentre(m.mu, bias)
    return centres


def _config(message: sparse_pb2.SelectConfig) -> SparseConfig:
    fusion = {fused.scorer: fused.exponent for fused in message.fusion}
    if len(fusion) < len(message.fusion):
        raise _invalid("select.fusion lists a scorer twice; give each one exponent")
    kind = message.WhichOneof("sparse_topk")
    if kind is None:
        raise _invalid(
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
    """One layer's query; what the sequence makes of it is for `check_request`."""
    query = float32s("query", message.query)
    if len(query) % spec.head_size:
        raise _invalid(
            f"query has {len(message.query)} bytes; float32 heads of {spec.head_size} channels "
            f"take {4 * spec.head_size} each"
        )
    log_mass = (
        float32s("always_log_mass", message.always_log_mass) if message.always_log_mass else None
    )
    return SelectRequest(
        message.layer_index,
        message.shard_index,
        query.reshape(-1, spec.head_size),
        message.context_token_count,
        log_mass,
    )


def select_response(selected: Selected) -> sparse_pb2.SelectBlocksResponse:
    """Blocks to attend to."""

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


def used(messages: Iterable[sparse_pb2.SequenceReport], most: int) -> dict[str, I32]:
    """Positions by sequence, `most` in all."""
    result: dict[str, I32] = {}
    for m in messages:
        values = positions("sequences.positions", m.positions, most)
        most -= len(values)
        name = identifier("sequences.sequence_id", m.sequence_id)
        result[name] = np.concatenate([result[name], values]) if name in result else values
    return result


def layer_growth(messages: Iterable[sparse_pb2.LayerCounters]) -> list[LayerGrowth]:
    """Growth of counters by layer."""
    growth = []
    for m in messages:
        _check_layer("layers.layer_index", m.layer_index)
        for name in SPARSE_COUNTERS:
            value = getattr(m, name)
            if not (math.isfinite(value) and 0 <= value <= MAX_COUNT):
                raise _invalid(f"layers.{name} is {value}; counters grow by 0 to {MAX_COUNT:.0e}")
        growth.append(
            LayerGrowth(m.layer_index, np.array([getattr(m, name) for name in SPARSE_COUNTERS]))
        )
    return growth

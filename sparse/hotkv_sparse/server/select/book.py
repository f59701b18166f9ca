"""Selects the blocks to which a decode step attends, for engines that can't map the arena, with the
functions that engines use too (`hotkv_sparse`).

A contradictory `SelectSpec` is refused when it is made; the error names the field of
`hotkv.v1.SelectConfig`. Sketches are not copied: row r of a view of the arena begins at byte r *
`SLOT_ALIGN` plus the layer's offset in a slot, so a slot's row is its offset / `SLOT_ALIGN`. The
caller pins the slots. Runs on worker threads.

Shapes: Q query heads, H KV heads, D channels, S shards, C covered blocks (leading blocks of the
    context whose sketches are leased).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.errors import Reason, check_most, invalid
from hotkv_proto.table import SLOT_ALIGN
from hotkv_sparse.centre import TOKEN_FORMATS
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.formats import bytes_per_block, head_bytes, needs_axes, token_scorer
from hotkv_sparse.hotset import HotMap, HotSet, SlotMoves, Step
from hotkv_sparse.selection import (
    CandidateSpan,
    Selection,
    Source,
    estimated_log_mass,
    select_layer,
    span,
)

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]
MAX_LAYERS = 256
MAX_HEAD_SIZE = 4096
MAX_KV_HEADS = 4096
MAX_CONTEXT_BLOCKS = 1 << 18
MAX_SCORES = 1 << 25
"""Query heads * blocks of a selection; 128 MiB."""
MAX_HOT_SLOTS = 1 << 22
"""Recorded for a sequence, over all layers and shards."""
MAX_CENTRE_BYTES = 4 << 20
"""Over all layers of a sequence; 128 layers with 8 KV heads of 128 channels take 512 KiB."""


@dataclass(frozen=True, slots=True)
class PackedCentre:
    """`hotkv_sparse.centre.LayerCentre` in a form that compares by value.

    mu: little-endian float32 [H of all shards, D].
    bias: by format: by how much its scores overestimate the log of a block's mass.
    """

    mu: bytes
    bias: Mapping[str, float]


@dataclass(frozen=True)
class SelectSpec:
    """Settings of a sequence's selections. Raises HotKVError if they contradict each other.

    sketch_group: group index of the sketches.
    layer_indices: ascending.
    kv_heads: of a shard.
    hot_blocks: slots of a hot set, which is recorded per layer and shard; 0: none is.
    scale: of query * key; None: 1 / sqrt(`head_size`).
    centres: by layer. The server knows only a hash of those that built the sketches, so it can't
        check them.
    """

    config: SparseConfig
    sketch_group: int
    layer_indices: tuple[int, ...]
    kv_heads: int
    head_size: int
    block_tokens: int
    num_shards: int
    hot_blocks: int = 0
    scale: float | None = None
    centres: Mapping[int, PackedCentre] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layers = self.layer_indices
        if (
            not layers
            or sorted(set(layers)) != list(layers)
            or not 0 <= layers[0] <= layers[-1] < MAX_LAYERS
        ):
            raise invalid(
                f"select.layer_indices must be layers from 0 to {MAX_LAYERS - 1}, ascending, "
                "each once, and at least one"
            )
        for name, value, most in (
            ("kv_head_count", self.kv_heads, MAX_KV_HEADS),
            ("head_size", self.head_size, MAX_HEAD_SIZE),
        ):
            if not 1 <= value <= most:
                raise invalid(f"select.{name} is {value}; allowed are 1 to {most}")
        if self.scale is not None and not (np.isfinite(self.scale) and self.scale > 0):
            raise invalid(
                f"select.scale is {self.scale}; use a number above 0, or 0 for the usual one"
            )
        least = self.config.max_always_blocks(self.block_tokens) + 1
        if self.hot_blocks and self.hot_blocks < least:
            raise invalid(
                f"select.hot_block_count is {self.hot_blocks}; what is always kept and one more "
                f"take {least}, or use 0 for none"
            )
        if not 0 <= self.hot_blocks * len(layers) * self.num_shards <= MAX_HOT_SLOTS:
            most = MAX_HOT_SLOTS // (len(layers) * self.num_shards)
            raise invalid(
                f"select.hot_block_count is {self.hot_blocks}; allowed are 0 to {most} with "
                "these layers",
                Reason.TOO_LARGE,
            )
        self._check_scorers()
        self._check_centres()

    def _check_scorers(self) -> None:
        for layer in self.layer_indices:
            for name in self.config.scorers_of(layer):
                if needs_axes(name):
                    raise invalid(
                        f"select: layer {layer} is scored by {name}, whose axes only the engine "
                        "has; select in the engine, or use another scorer"
                    )

    def _check_centres(self) -> None:
        check_most(MAX_CENTRE_BYTES, self.centre_bytes, "select.centres have {} bytes")
        shape = (self.num_shards * self.kv_heads, self.head_size)
        for layer, centre in self.centres.items():
            if layer not in self.layer_indices:
                raise invalid(
                    f"select.centres.layer_index is {layer}; layer_indices are "
                    f"{list(self.layer_indices)}"
                )
            if len(centre.mu) != 4 * shape[0] * shape[1]:
                raise invalid(
                    f"select.centres.mu of layer {layer} has {len(centre.mu)} bytes; float32 "
                    f"{list(shape)} takes {4 * shape[0] * shape[1]}"
                )
            if not np.isfinite(np.frombuffer(centre.mu, "<f4")).all():
                raise invalid(
                    f"select.centres.mu of layer {layer} has values that are not finite; "
                    "calibrate again"
                )
            for name, bias in centre.bias.items():
                if name not in TOKEN_FORMATS:
                    raise invalid(
                        f"select.centres.biases of layer {layer} name {name!r}; token formats "
                        f"are {', '.join(TOKEN_FORMATS)}"
                    )
                if not np.isfinite(bias):
                    raise invalid(
                        f"select.centres.biases of layer {layer} has {bias} for {name}; give a "
                        "finite number"
                    )

    @cached_property
    def centre_bytes(self) -> int:
        return sum(len(centre.mu) for centre in self.centres.values())

    def mu(self, layer: int, shard: int) -> F32 | None:
        """float32 [H, D]; None if the centre is 0."""
        centre = self.centres.get(layer)
        if centre is None:
            return None
        mu_SHD = np.frombuffer(centre.mu, "<f4").reshape(
            self.num_shards, self.kv_heads, self.head_size
        )
        mu_HD: F32 = mu_SHD[shard].astype(np.float32, copy=False)
        return mu_HD

    @cached_property
    def places(self) -> dict[int, dict[str, int]]:
        """Offset of each sketch in a shard's part of a slot, by layer and format."""
        places: dict[int, dict[str, int]] = {}
        at = 0
        for layer in self.layer_indices:
            places[layer] = {}
            for name in self.config.scorers_of(layer):
                places[layer][name] = at
                at += bytes_per_block(name, self.block_tokens, self.kv_heads, self.head_size)
        return places

    @cached_property
    def shard_bytes(self) -> int:
        """A shard's part of a slot."""
        names = [name for layer in self.layer_indices for name in self.config.scorers_of(layer)]
        return sum(
            bytes_per_block(name, self.block_tokens, self.kv_heads, self.head_size)
            for name in names
        )

    def check_slots(self, shard_bytes: tuple[int, ...]) -> None:
        """Raises INVALID_FIELD unless all shards have the size that this spec requires."""
        if any(size != self.shard_bytes for size in shard_bytes):
            raise invalid(
                "select: layer_indices, scorers, kv_head_count and head_size make "
                f"{self.shard_bytes} bytes a shard; the sketch is "
                f"declared with {list(shard_bytes)}"
            )

    def sources(self, arena: U8, layer: int, shard: int) -> dict[str, Source]:
        """Views of the arena, by format. Row r belongs to the slot at offset r * SLOT_ALIGN."""
        sources = {}
        mu, bias = self.mu(layer, shard), self.centres[layer].bias if layer in self.centres else {}
        for name, place in self.places[layer].items():
            size = head_bytes(name, self.block_tokens, self.head_size)
            shift = shard * self.shard_bytes + place
            num_rows = max((len(arena) - shift - self.kv_heads * size) // SLOT_ALIGN + 1, 0)
            shape, strides = (num_rows, self.kv_heads, size), (SLOT_ALIGN, size, 1)
            pool = np.lib.stride_tricks.as_strided(arena[shift:], shape, strides, writeable=False)
            sources[name] = Source(pool, mu if token_scorer(name) else None, bias.get(name))
        return sources


@dataclass(frozen=True, slots=True)
class SelectRequest:
    """A selection for one layer on one shard.

    query: float32 [Q, D].
    always_log_mass: log of the mass of sinks and recent window, float32 [Q]; None: estimated.
    """

    layer: int
    shard: int
    query: F32
    context_tokens: int
    always_log_mass: F32 | None = None


NO_BLOCKS = np.empty(0, np.int32)
NO_MAP = HotMap(0, NO_BLOCKS, NO_BLOCKS)
NO_MOVES = SlotMoves(NO_BLOCKS, NO_BLOCKS, NO_BLOCKS)


@dataclass(frozen=True, slots=True)
class Selected:
    """Without a recorded hot set, all but `selection` is empty.

    map: the hot set, with the client's slots.
    evicted: blocks whose slots the client must free before it executes `load`.
    load: blocks that the client must copy into slots.
    """

    selection: Selection
    map: HotMap = NO_MAP
    load: SlotMoves = NO_MOVES
    evicted: I32 = field(default_factory=lambda: NO_BLOCKS)


class KeptHotSet:
    """Record of a client's hot set of one layer and shard: decides the moves that the client
    executes. One thread at a time.

    `Selected.load` may name a recent block that is not in host memory yet; the client must store
    it first.
    """

    def __init__(self, config: SparseConfig, num_blocks: int) -> None:
        self._hot = HotSet(num_blocks, 0, config.cache_policy)
        self._max_loads = config.max_correction_blocks
        self._has_begun = False
        self._num_complete = 0

    def follow(self, where: CandidateSpan, num_complete: int) -> I32:
        """Extends the hot set to a longer context: new blocks get slots, also the partial one.
        Returns their victims."""
        if (where, num_complete) == (self._hot.span, self._num_complete):
            return NO_BLOCKS
        growth = self._hot.extend(where, num_complete, num_complete)
        self._hot.swapped_out(growth.swap_out, True)
        self._num_complete = num_complete
        return growth.new.victims

    def step(self, selection: Selection) -> Step:
        """The first call adds all selected blocks, later ones at most `max_correction_blocks`."""
        step = self._hot.step(
            selection, self._max_loads if self._has_begun else len(selection.blocks)
        )
        self._has_begun = True
        return step


def check_request(spec: SelectSpec, request: SelectRequest, num_covered: int) -> CandidateSpan:
    """Span of the request's context. Raises INVALID_FIELD if the request contradicts the spec or
    needs blocks that are not covered, TOO_LARGE if it needs too many scores."""
    if request.layer not in spec.places:
        raise invalid(
            f"layer_index is {request.layer}; the sequence was created with layers "
            f"{list(spec.layer_indices)}"
        )
    if not 0 <= request.shard < spec.num_shards:
        raise invalid(
            f"shard_index is {request.shard}; this key space has {spec.num_shards} shards"
        )
    if not 1 <= request.context_tokens <= MAX_CONTEXT_BLOCKS * spec.block_tokens:
        raise invalid(
            f"context_token_count is {request.context_tokens}; allowed are 1 to "
            f"{MAX_CONTEXT_BLOCKS * spec.block_tokens}"
        )
    num_heads = len(request.query)
    if not num_heads or num_heads % spec.kv_heads:
        raise invalid(
            f"query has {num_heads} heads; it must have a multiple of the {spec.kv_heads} KV heads"
        )
    if request.always_log_mass is not None and len(request.always_log_mass) != num_heads:
        raise invalid(
            f"always_log_mass has {len(request.always_log_mass)} values for {num_heads} query "
            "heads; give one each, or none"
        )
    if request.always_log_mass is not None and not (request.always_log_mass < np.inf).all():
        raise invalid(
            "always_log_mass has values that are no log mass; give finite ones, or -inf for nothing"
        )
    where = span(spec.config, request.context_tokens, spec.block_tokens)
    if num_heads * where.count > MAX_SCORES:
        raise invalid(
            f"query has {num_heads} heads for {where.count} blocks; at most {MAX_SCORES} scores "
            "are made",
            Reason.TOO_LARGE,
        )
    if not np.isfinite(request.query).all():
        raise invalid("query has values that are not finite")
    if where.first < where.last > num_covered:
        raise invalid(
            f"context_token_count is {request.context_tokens}, but only {num_covered} leading "
            "blocks are covered: store the others with "
            "their sketches and append them, or ask for less"
        )
    return where


def select(
    spec: SelectSpec,
    arena: U8,
    slots_C: NDArray[np.int64],
    request: SelectRequest,
    where: CandidateSpan,
    hot: KeptHotSet | None,
) -> Selected:
    """Selects for a checked request, and updates `hot`. Blocks, mostly without the GIL.

    slots_C: offsets of the covered blocks' sketches.
    where: result of `check_request`.
    """
    rows_C = (slots_C // SLOT_ALIGN).astype(np.int32)
    sources = spec.sources(arena, request.layer, request.shard)
    log_mass = request.always_log_mass
    if log_mass is None:
        always = where.always
        rows = rows_C[always[always < len(rows_C)]]
        log_mass = estimated_log_mass(request.query, sources, rows, spec.scale)
    evicted = (
        NO_BLOCKS if hot is None else hot.follow(where, request.context_tokens // spec.block_tokens)
    )
    selection = select_layer(
        spec.config,
        request.layer,
        request.query,
        sources,
        rows_C,
        log_mass,
        request.context_tokens,
        spec.block_tokens,
        scale=spec.scale,
    )
    if hot is None:
        return Selected(selection)
    step = hot.step(selection)
    return Selected(selection, step.map, step.load, np.concatenate([evicted, step.load.victims]))

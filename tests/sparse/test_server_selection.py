"""Compares the server's selection over sketches in the arena with the same functions on copies;
bad requests are refused."""

import re
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import hotkv_sparse
from hotkv_proto.errors import HotKVError
from hotkv_proto.table import SLOT_ALIGN
from hotkv_sparse.centre import TOKEN_FORMATS
from hotkv_sparse.selection import Source, select_layer
from hotkv_sparse.server.select.book import (
    KeptHotSet,
    PackedCentre,
    SelectRequest,
    SelectSpec,
    check_request,
    select,
)
from tests.sparse.support import F32, UNCALIBRATED

CONFIG = hotkv_sparse.SparseConfig(
    sparse_topk=0.3, sink_tokens=16, recent_tokens=20, dense_layers=()
)


class Slots:
    """An arena with sketches in random slots, else random bytes."""

    def __init__(self, spec: SelectSpec, num_blocks: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        slot_bytes = -(-spec.num_shards * spec.shard_bytes // SLOT_ALIGN) * SLOT_ALIGN
        self.arena = random.integers(0, 256, (num_blocks + 3) * slot_bytes, np.uint8)
        self.slots = random.permutation(num_blocks + 3)[:num_blocks] * slot_bytes
        self.pools: dict[tuple[int, int, str], np.ndarray[tuple[int, ...], np.dtype[np.uint8]]] = {}
        shape = (num_blocks, spec.block_tokens, spec.kv_heads, spec.head_size)
        for shard in range(spec.num_shards):
            at = shard * spec.shard_bytes
            for layer in spec.layer_indices:
                for name in spec.config.scorers_of(layer):
                    keys = random.standard_normal(shape, np.float32)
                    pool = hotkv_sparse.build(name, keys, self.mu(spec, layer, shard, name))
                    for slot, block in zip(self.slots, pool, strict=True):
                        self.arena[slot + at : slot + at + block.size] = block.ravel()
                    self.pools[layer, shard, name] = pool
                    at += pool[0].size

    def mu(self, spec: SelectSpec, layer: int, shard: int, name: str) -> F32 | None:
        """Rank `shard`'s heads of the layer's centre; None without one, or if the format codes
        no tokens."""
        if layer not in spec.centres or name not in TOKEN_FORMATS:
            return None
        mu_HD: F32 = np.frombuffer(spec.centres[layer].mu, "<f4").reshape(-1, spec.head_size)
        return np.ascontiguousarray(mu_HD[shard * spec.kv_heads : (shard + 1) * spec.kv_heads])

    def sources(self, spec: SelectSpec, layer: int, shard: int) -> dict[str, Source]:
        return {
            name: Source(
                self.pools[layer, shard, name],
                self.mu(spec, layer, shard, name),
                spec.centres[layer].bias.get(name) if layer in spec.centres else None,
            )
            for name in spec.config.scorers_of(layer)
        }


def centres(
    layers: list[int], num_heads: int, head_size: int, bias: dict[str, float], seed: int
) -> dict[int, PackedCentre]:
    random, shape = np.random.default_rng(seed), (num_heads, head_size)
    mus = {layer: random.standard_normal(shape).astype("<f4").tobytes() for layer in layers}
    return {layer: PackedCentre(mu, bias) for layer, mu in mus.items()}


@given(
    scorer=st.sampled_from(UNCALIBRATED),
    other=st.sampled_from(UNCALIBRATED),
    fusion=st.booleans(),
    layers=st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True).map(sorted),
    kv_heads=st.integers(1, 3),
    head_size=st.sampled_from([32, 64, 80, 128]),
    block_tokens=st.sampled_from([16, 32]),
    num_shards=st.integers(1, 2),
    num_blocks=st.integers(1, 40),
    seed=st.integers(0, 1 << 30),
    centred=st.booleans(),
    bias=st.dictionaries(st.sampled_from(TOKEN_FORMATS), st.floats(-3, 3)),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_selection_equals_an_engines_over_same_bytes(
    scorer: str, other: str, fusion: bool, layers: list[int], kv_heads: int, head_size: int,
    block_tokens: int, num_shards: int,
    num_blocks: int, seed: int, centred: bool, bias: dict[str, float], data: st.DataObject,
) -> None:  # fmt: skip
    fused = {scorer: 1.0, other: 0.5} if fusion else {}
    config = replace(CONFIG, scorer=scorer, fusion=fused)
    known = centres(layers[: 2 * centred], num_shards * kv_heads, head_size, bias, seed)
    sizes = (kv_heads, head_size, block_tokens, num_shards)
    spec = SelectSpec(config, 256, tuple(layers), *sizes, centres=known)
    slots = Slots(spec, num_blocks, seed)
    layer, shard = data.draw(st.sampled_from(layers)), data.draw(st.integers(0, num_shards - 1))
    shape = (kv_heads * data.draw(st.integers(1, 4)), head_size)
    query: F32 = np.random.default_rng(seed).standard_normal(shape, np.float32)
    context_tokens = data.draw(st.integers(1, num_blocks * block_tokens + block_tokens - 1))
    log_mass = np.full(len(query), data.draw(st.sampled_from([-np.inf, 0.0, 3.0])), np.float32)
    request = SelectRequest(layer, shard, query, context_tokens, log_mass)
    where = check_request(spec, request, num_blocks)
    rows, sources = np.arange(num_blocks, dtype=np.int32), slots.sources(spec, layer, shard)
    # A request without the always-kept blocks' weight has it estimated from those that the
    # context has.
    name, first = next(iter(sources.items()))
    prepared = hotkv_sparse.prepare(name, query, first.mu, None, first.bias)
    estimated = hotkv_sparse.score(prepared, first.pool, where.always[where.always < num_blocks])
    own_mass = np.logaddexp.reduce(estimated, axis=1, initial=-np.inf).astype(np.float32)
    for asked, mass in ((request, log_mass), (replace(request, always_log_mass=None), own_mass)):
        found = select(spec, slots.arena, slots.slots, asked, where, None).selection
        expected = select_layer(
            config, layer, query, sources, rows, mass, context_tokens, block_tokens
        )
        assert found.blocks.tolist() == expected.blocks.tolist()
        assert np.array_equal(found.weights, expected.weights) and found.mass == expected.mass


@given(
    seed=st.integers(0, 1 << 30),
    policy=st.sampled_from(["lru", "none"]),
    corrections=st.integers(0, 5),
)
@settings(deadline=None, max_examples=30)
def test_client_following_its_moves_holds_hot_set(seed: int, policy: str, corrections: int) -> None:
    random = np.random.default_rng(seed)
    config = replace(CONFIG, cache_policy=policy, max_correction_blocks=corrections)
    spec = SelectSpec(config, 256, (0,), 1, 32, 16, 1, hot_blocks=24)
    slots = Slots(spec, 60, seed)
    hot = KeptHotSet(config, spec.hot_blocks)
    held: dict[int, int] = {}
    context_tokens = 40 * 16
    for step in range(25):
        query: F32 = random.standard_normal((2, 32), np.float32)
        request = SelectRequest(0, 0, query, context_tokens)
        where = check_request(spec, request, 60)
        answer = select(spec, slots.arena, slots.slots, request, where, hot)
        for block in answer.evicted.tolist():
            del held[block]
        loads = dict(zip(answer.load.blocks.tolist(), answer.load.slots.tolist(), strict=True))
        candidates = [block for block in loads if where.first <= block < where.last]
        assert step == 0 or len(candidates) <= corrections
        assert not set(loads.values()) & set(held.values()) and not loads.keys() & held.keys()
        held |= loads
        mapped = dict(zip(answer.map.blocks.tolist(), answer.map.slots.tolist(), strict=True))
        # The last, unfull block is not loaded.
        fresh = mapped.keys() - held.keys()
        assert fresh <= {where.count - 1} and held.items() <= mapped.items()
        held = mapped
        assert (
            len(held) <= spec.hot_blocks
            and set(where.always.tolist()) <= held.keys()
            and max(held.values()) < spec.hot_blocks
        )
        context_tokens = int(np.clip(context_tokens + random.integers(0, 40), 1, 60 * 16))


ALWAYS = CONFIG.max_always_blocks(16)


def mu(layer: int, packed: bytes, **bias: float) -> dict[str, dict[int, PackedCentre]]:
    return {"centres": {layer: PackedCentre(packed, bias)}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_indices": ()}, "select.layer_indices"),
        ({"layer_indices": (3, 2)}, "select.layer_indices"),
        ({"layer_indices": (2, 2)}, "select.layer_indices"),
        ({"layer_indices": (-1, 2)}, "select.layer_indices"),
        ({"layer_indices": (256,)}, "select.layer_indices"),
        ({"kv_heads": 0}, "select.kv_head_count is 0"),
        ({"head_size": 1 << 20}, "select.head_size is 1048576"),
        ({"scale": 0.0}, "select.scale is 0.0"),
        ({"scale": float("nan")}, "select.scale is nan"),
        ({"hot_blocks": ALWAYS}, f"select.hot_block_count is {ALWAYS}; what is always kept"),
        ({"hot_blocks": -1}, "select.hot_block_count is -1"),
        (
            {"hot_blocks": (1 << 20) + 1, "num_shards": 2},
            "select.hot_block_count is 1048577; allowed are 0 to 1048576 with",
        ),
        (
            {"kv_heads": 4096, "head_size": 256, **mu(2, bytes(4 * 4096 * 256))},
            "select.centres.layer_index is 2",
        ),
        (mu(1, bytes(508)), "select.centres.mu of layer 1 has 508 bytes"),
        (mu(1, b"\0\0\x80\x7f" * 128), "select.centres.mu of layer 1 has values that are not"),
        (mu(1, bytes(512), mean=1.0), "select.centres.biases of layer 1 name 'mean'"),
        (mu(1, bytes(512), rot2u=float("inf")), "select.centres.biases of layer 1 has inf"),
        (
            {"kv_heads": 4096, "head_size": 257, **mu(1, bytes(4 * 4096 * 257))},
            "select.centres have 4210688 bytes",
        ),
    ],
)
def test_senseless_spec_is_refused_by_field(fields: dict[str, Any], words: str) -> None:
    good = {"layer_indices": (0, 1), "kv_heads": 2, "head_size": 64, "hot_blocks": 0, "scale": None}
    more = {"sketch_group": 256, "block_tokens": 16, "num_shards": 1}
    with pytest.raises(HotKVError, match=re.escape(words)):
        SelectSpec(config=CONFIG, **{**more, **good, **fields})


def test_a_sketch_has_the_bytes_of_its_spec() -> None:
    for hot_blocks in (ALWAYS + 1, 1 << 22):
        SelectSpec(CONFIG, 256, (0,), 1, 64, 16, 1, hot_blocks=hot_blocks)
    with pytest.raises(HotKVError, match=r"make [0-9]+ bytes a shard; .*\[7\]"):
        SelectSpec(CONFIG, 256, (0,), 1, 64, 16, 1).check_slots((7,))


def test_the_work_of_a_selection_is_bounded() -> None:
    spec = SelectSpec(CONFIG, 256, (0,), 1, 32, 16, 1)
    many = np.broadcast_to(np.zeros((1, 32), np.float32), (1 << 23, 32))
    with pytest.raises(HotKVError, match="query has 8388608 heads for 50 blocks"):
        check_request(spec, SelectRequest(0, 0, many, 800), 50)
    with pytest.raises(HotKVError, match="context_token_count is 4194305"):
        check_request(spec, SelectRequest(0, 0, many[:1], (1 << 22) + 1), 50)
    # The largest allowed: 128 heads x 2^18 blocks, a context of 2^22 tokens.
    assert check_request(spec, SelectRequest(0, 0, many[:128], 1 << 22), 1 << 18).count == 1 << 18

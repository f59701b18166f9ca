"""Tests fingerprints of key spaces, packed hashes, and block hashes, which must equal vLLM's."""

import itertools
from dataclasses import fields, replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import (
    MAX_GROUPS,
    MAX_HASH_BYTES,
    MIN_HASH_BYTES,
    KeySpace,
    Sketch,
    group_hashes,
    token_block_hashes,
)

GROUP = GroupSpec(GroupKind.SLIDING_WINDOW, 32, (4096, 4096), 64, ("layers.0",))
BASE = KeySpace("model", "revision", "bfloat16", (GROUP,), 16)

OF_GROUP: dict[str, list[object]] = {
    "kind": [GroupKind.CHUNKED_LOCAL],
    "block_tokens": [48],
    "shard_bytes": [(4096, 8192), (8192,)],
    "window_tokens": [65],
    "layer_names": [("layers.0", "layers.1")],
}
VARIANTS: dict[str, list[object]] = {
    "model": ["other", ""],
    "weights_identity": ["other"],
    "dtype": ["float16"],
    "groups": [
        (GROUP, GROUP),
        *[(replace(GROUP, **{name: value}),) for name in OF_GROUP for value in OF_GROUP[name]],
    ],
    "hash_block_tokens": [8],
    "kv_dtype": ["fp8"],
    "hash_algorithm": ["sha256_cbor"],
    "hash_seed": ["0"],
    "hash_bytes": [16],
    "parallel_shape": ["tp=2,pp=1"],
    "page_format": ["NHC"],
    "tenant": ["someone"],
    "extra": [("a",), ("a", "b"), ("ab",), ("a,b",), ("ä",)],
}


def test_the_fingerprint_changes_with_every_field() -> None:
    assert set(VARIANTS) == {f.name for f in fields(KeySpace)}, "a new field needs a variant here"
    assert set(OF_GROUP) == {f.name for f in fields(GroupSpec)}
    variants = [BASE] + [
        replace(BASE, **{name: value}) for name, values in VARIANTS.items() for value in values
    ]
    for one, two in itertools.combinations(variants, 2):
        assert one.fingerprint != two.fingerprint, (one, two)
    assert all(len(v.fingerprint) == 32 for v in variants)


def test_salts_differ_in_each_field_of_sketches() -> None:
    one = Sketch(0, "rot2u", 1, (100,))
    kinds = [
        one,
        replace(one, group_index=1),
        replace(one, format="rot3u"),
        replace(one, version=2),
        replace(one, shard_bytes=(50, 50)),
    ]
    spaces = [replace(BASE, tenant=str(number), groups=(GROUP,) * 4) for number in range(20)]
    salts = {space.sketch_salt(kind) for space in spaces for kind in kinds}
    salts |= {space.group_salt(group) for space in spaces for group in range(4)}
    assert len(salts) == 20 * 9 and all(0 <= salt < 1 << 64 for salt in salts)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"group_index": -1}, "group_index"),
        ({"group_index": MAX_GROUPS}, "group_index"),
        ({"format": ""}, "format"),
        ({"format": "x" * 65}, "format"),
        ({"version": -1}, "version"),
        ({"version": 1 << 63}, "version"),
        ({"shard_bytes": ()}, "shard_bytes"),
        ({"shard_bytes": (4, -1)}, "shard_bytes"),
        ({"shard_bytes": (0, 0)}, "shard_bytes"),
    ],
)
def test_sketches_out_of_range_are_refused(change: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        replace(Sketch(0, "rot2u", 1, (100,)), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hash_bytes": MIN_HASH_BYTES - 1}, "hash_bytes"),
        ({"hash_bytes": MAX_HASH_BYTES + 1}, "hash_bytes"),
        ({"hash_block_tokens": 0}, "hash_block_tokens"),
        ({"hash_block_tokens": 24}, "block_tokens"),
        ({"groups": ()}, "groups"),
        ({"groups": (GROUP, replace(GROUP, shard_bytes=(1,)))}, r"groups\[1\].shard_bytes"),
        ({"weights_identity": ""}, "weights_identity"),
    ],
)
def test_key_spaces_that_contradict_themselves_are_refused(
    change: dict[str, object], field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        replace(BASE, **change)


@given(num_hashes=st.integers(0, 40), step=st.integers(1, 6))
def test_group_hashes_are_those_at_last_tokens(num_hashes: int, step: int) -> None:
    hashes = [bytes([number]) for number in range(num_hashes)]
    expected = [hashes[(block + 1) * step - 1] for block in range(num_hashes // step)]
    assert list(group_hashes(hashes, 16, 16 * step)) == expected


@pytest.mark.parametrize("seed", ["", "0", "1234"])
@pytest.mark.parametrize("block_tokens", [1, 4, 16])
def test_token_hashes_are_those_of_vllm(
    seed: str, block_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`init_none_hash` reads the seed from the environment."""
    utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    hashing = pytest.importorskip("vllm.utils.hashing")
    for name in ("NONE_HASH", "_NONE_HASH_SEED"):
        monkeypatch.setattr(utils, name, getattr(utils, name, None), raising=False)
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    utils.init_none_hash(hashing.sha256)
    rng = np.random.default_rng(7)
    for num_tokens in (0, block_tokens - 1, block_tokens, 7 * block_tokens + block_tokens // 2):
        tokens = rng.integers(0, 1 << 18, num_tokens).tolist()
        expected, parent = [], None
        for start in range(0, num_tokens - block_tokens + 1, block_tokens):
            block = tokens[start : start + block_tokens]
            parent = utils.hash_block_tokens(hashing.sha256, parent, block)
            expected.append(parent)
        for one in (tokens, np.array(tokens, np.int32)):
            assert token_block_hashes(one, block_tokens, "sha256", seed) == expected


def test_algorithms_that_cannot_be_recomputed_are_refused() -> None:
    with pytest.raises(ValueError, match="hash_algorithm 'xxhash'"):
        token_block_hashes([1, 2, 3], 1, "xxhash", "")

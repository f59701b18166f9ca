"""A configuration refuses bad settings, and names field, value and fix."""

import pytest

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse.config import SparseConfig


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"sparse_topk": 95},
            r"sparse.sparse_topk is 95; use at least sink_tokens \+ recent_tokens = 96",
        ),
        ({"sparse_topk": 0}, "sparse.sparse_topk is 0"),
        ({"sparse_topk": 1.5}, "sparse.sparse_topk is 1.5"),
        ({"sparse_topk": float("nan")}, "sparse.sparse_topk is nan"),
        ({"sparse_topk": True}, "sparse.sparse_topk is True"),
        ({"adaptive_p": 1.0}, "sparse.adaptive_p is 1.0"),
        (
            {"scorer": "rot4u"},
            "sparse.scorer is 'rot4u'; use one of rot2u, rot3u, mix2, quest, mean",
        ),
        ({"fusion": {"best": 1.0}}, "sparse.fusion is 'best'"),
        ({"fusion": {"mean": 0.0}}, r"sparse.fusion\[mean\] is 0.0"),
        (
            {"scorer": "quest", "adaptive_p": 0.9},
            "sparse.scorer is 'quest'; adaptive_p needs a scorer that estimates mass",
        ),
        ({"sink_tokens": -1}, "sparse.sink_tokens is -1; use an integer from 0 up"),
        ({"recent_tokens": 0}, "sparse.recent_tokens is 0; use an integer from 1 up"),
        ({"max_correction_blocks": -1}, "sparse.max_correction_blocks is -1"),
        ({"min_context_tokens": 1.5}, "sparse.min_context_tokens is 1.5"),
        ({"dense_layers": (0, -1)}, r"sparse.dense_layers is \(0, -1\)"),
        (
            {"copy_method": "dma"},
            "sparse.copy_method is 'dma'; use one of memcpy, batch, kernel, auto",
        ),
        ({"cache_policy": "clock"}, "sparse.cache_policy is 'clock'; use one of lru, none"),
    ],
)
def test_refused_when_made(fields: dict[str, object], words: str) -> None:
    with pytest.raises(HotKVError, match=words) as caught:
        SparseConfig(**fields)  # type: ignore[arg-type]
    assert caught.value.reason is Reason.INVALID_FIELD


@pytest.mark.parametrize(
    ("fields", "num_layers", "block_tokens", "words"),
    [
        (
            {},
            1,
            16,
            r"sparse.dense_layers is \(0, 1\); the model has 1 layers; use numbers from 0 to 0",
        ),
        (
            {"sparse_topk": 256},
            30,
            128,
            "sparse.sparse_topk is 256; .* take 4 blocks of 128 tokens; use at least 512",
        ),
        (
            {"sparse_topk": 0.05},
            30,
            128,
            "sparse.sparse_topk is 0.05; .* set min_context_tokens to 10240 or more",
        ),
    ],
)
def test_refused_for_a_model(
    fields: dict[str, object], num_layers: int, block_tokens: int, words: str
) -> None:
    with pytest.raises(HotKVError, match=words):
        SparseConfig(**fields).check(num_layers, block_tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("block_tokens", [16, 32, 64, 128])
def test_the_default_fits(block_tokens: int) -> None:
    SparseConfig().check(30, block_tokens)
    SparseConfig(min_context_tokens=0, sparse_topk=4096).check(30, block_tokens)


def test_budgets() -> None:
    assert SparseConfig(sparse_topk=0.1).budget_blocks(8192, 16) == 52
    assert SparseConfig(sparse_topk=1000).budget_blocks(8192, 16) == 63
    assert SparseConfig(sparse_topk=1000).budget_blocks(100, 16) == 7
    assert SparseConfig(sparse_topk=1.0).budget_blocks(8191, 16) == 512


def test_scorers_of_layers() -> None:
    config = SparseConfig(scorer="quest", dense_layers=(0, 1))
    assert config.scorers_of(0) == {} and config.scorers_of(5) == {"quest": 1.0}
    fused = SparseConfig(fusion={"rot2u": 0.7, "mean": 0.3})
    assert fused.scorers_of(2) == {"rot2u": 0.7, "mean": 0.3}

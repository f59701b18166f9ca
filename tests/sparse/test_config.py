"""Tests that invalid sparse configurations are refused with field, value and remedy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse.config import SparseConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sparse_topk", -1),
        ("sparse_topk", 0),
        ("sparse_topk", 0.0),
        ("sparse_topk", 1.5),
        ("sparse_topk", float("nan")),
        ("sparse_topk", True),
        ("sparse_topk", (1 << 30) + 1),
        ("sparse_topk", 10**400),
        ("sink_tokens", (1 << 31) - 1),
        ("max_correction_blocks", (1 << 31) - 1),
        ("adaptive_p", 0.0),
        ("adaptive_p", 1.0),
        ("scorer", "rot4u"),
        ("fusion", {"best": 1.0}),
        ("fusion", {"mean": 0.0}),
        ("fusion", {"mean": float("nan")}),
        ("fusion", {"mean": 10**400}),
        ("sink_tokens", -1),
        ("recent_tokens", 0),
        ("max_correction_blocks", -1),
        ("min_context_tokens", 1.5),
        ("dense_layers", (0, -1)),
        ("copy_method", "dma"),
        ("cache_policy", "clock"),
        ("residency", "on"),
    ],
)
def test_refused_when_made(field: str, value: object) -> None:
    with pytest.raises(HotKVError, match=rf": sparse\.{field}\b") as caught:
        SparseConfig(**{field: value})  # type: ignore[arg-type]
    assert caught.value.reason is Reason.INVALID_FIELD


@pytest.mark.parametrize("residency", ["host", "auto"])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dense_layers": (1,)}, r"dense_layers is \(1,\); .* no layer is dense"),
        ({"sparse_topk": 0.1}, "sparse_topk is 0.1; .* the budget is a number of tokens"),
        ({"sink_tokens": 0}, "sink_tokens is 0; .* the first block stays; use 1 or more"),
    ],
)
def test_refused_with_residency(residency: str, fields: dict[str, object], words: str) -> None:
    usual: dict[str, object] = {"residency": residency, "sparse_topk": 256, "dense_layers": ()}
    SparseConfig(**usual)  # type: ignore[arg-type]
    with pytest.raises(HotKVError, match=rf": sparse\.{words}"):
        SparseConfig(**usual | fields)  # type: ignore[arg-type]


def test_share_of_mass_needs_an_estimating_scorer() -> None:
    with pytest.raises(HotKVError, match=r": sparse\.scorer is 'quest'; adaptive_p"):
        SparseConfig(scorer="quest", adaptive_p=0.9)


@pytest.mark.parametrize(
    ("fields", "num_layers", "block_tokens", "words"),
    [
        ({}, 1, 16, r"sparse.dense_layers is \(0, 1\); .* use numbers from 0 to 0"),
        ({"sparse_topk": 256}, 30, 128, "sparse.sparse_topk is 256; .* use at least 1024"),
        ({"sparse_topk": 5e-324}, 30, 128, "5e-324; .* set min_context_tokens to 1073741824"),
        ({"sparse_topk": 0.05}, 30, 128, "0.05; .* set min_context_tokens to 20480 or more"),
        ({"min_context_tokens": 0}, 30, 16, "0.2; .* set min_context_tokens to 1280 or more"),
        ({"sparse_topk": 96, "min_context_tokens": 0}, 30, 16, "is 96; .* use at least 256"),
        ({"sparse_topk": 1}, 30, 16, "is 1; .* use at least 256"),
    ],
)
def test_refused_for_a_model(
    fields: dict[str, object], num_layers: int, block_tokens: int, words: str
) -> None:
    with pytest.raises(HotKVError, match=words):
        SparseConfig(**fields).check(num_layers, block_tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("block_tokens", [16, 32, 64, 128])
def test_the_default_fits(block_tokens: int) -> None:
    SparseConfig(max_correction_blocks=0, sink_tokens=0).check(30, block_tokens)
    SparseConfig(sparse_topk=1 << 30, min_context_tokens=1 << 30).check(30, block_tokens)
    SparseConfig().check(30, block_tokens)
    SparseConfig(min_context_tokens=0, sparse_topk=4096).check(30, block_tokens)


def test_budgets() -> None:
    assert SparseConfig(sparse_topk=0.1).budget_blocks(8192, 16) == 51
    assert SparseConfig(sparse_topk=1000).budget_blocks(8192, 16) == 62
    assert SparseConfig(sparse_topk=1000).budget_blocks(1000, 16) == 63
    assert SparseConfig(sparse_topk=1000).budget_blocks(100, 16) == 7
    assert SparseConfig(sparse_topk=1.0).budget_blocks(8191, 16) == 512
    assert SparseConfig(sparse_topk=1000).selected_blocks(8192, 16) == 32
    assert SparseConfig(sparse_topk=1000, cache_policy="none").selected_blocks(8192, 16) == 62


@given(
    topk=st.one_of(st.integers(1, 5000), st.floats(0.001, 1.0)),
    policy=st.sampled_from(["lru", "none"]),
    block=st.sampled_from([16, 32, 48, 128]),
    context=st.integers(1, 20_000),
    longest=st.integers(1, 20_000),
)
def test_blocks_of_a_budget_hold_no_more_tokens(
    topk: float, policy: str, block: int, context: int, longest: int
) -> None:
    config = SparseConfig(sparse_topk=topk, cache_policy=policy)
    blocks, selected = (
        config.budget_blocks(context, block), config.selected_blocks(context, block),
    )  # fmt: skip
    allowed = topk if isinstance(topk, int) else topk * context
    assert min(blocks * block, context) <= allowed
    assert config.covers(context, block) == (context <= allowed)
    assert 0 <= selected <= blocks <= -(-context // block)
    assert context > longest or blocks <= config.most_blocks(longest, block)


def test_scorers_of_layers() -> None:
    config = SparseConfig(scorer="quest", dense_layers=(0, 1))
    assert config.scorers_of(0) == {} and config.scorers_of(5) == {"quest": 1.0}
    fused = SparseConfig(fusion={"rot2u": 0.7, "mean": 0.3})
    assert fused.scorers_of(2) == {"rot2u": 0.7, "mean": 0.3}

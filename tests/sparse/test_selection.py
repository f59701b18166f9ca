"""Tests the selection of blocks (weights, fusion, top-k, always-kept spans) against references
and what every selection must fulfil."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_proto.errors import HotKVError
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.selection import CandidateSpan, choose, floor_blocks, fuse, span, top
from tests.oracles import sparse as oracle


def test_fusion_is_the_weighted_geometric_mean_of_shares() -> None:
    always = np.array([0.0], np.float32)
    one, two = (
        np.log(np.array([[1.0, 2.0]], np.float32)),
        np.log(np.array([[4.0, 1.0]], np.float32)),
    )
    fused, kept = fuse([one, two], [3.0, 1.0], always)
    first, second = np.array([1, 1, 2]) / 4, np.array([1, 4, 1]) / 6
    expected = first**0.75 * second**0.25
    np.testing.assert_allclose(np.exp(np.concatenate([kept, fused[0]])), expected, rtol=1e-5)
    for scale in (1e-60, 1e60, 5e307):
        scaled, _ = fuse([one, two], [3 * scale, scale], always)
        np.testing.assert_allclose(scaled, fused, rtol=1e-5)
    with pytest.raises(HotKVError, match="pass one above 0 for each"):
        fuse([one, two], [1.0], always)


weight_lists = st.lists(
    st.floats(0, 1, width=32)
    | st.sampled_from([0.0, 0.25, 0.5, float(np.float32(1e-40)), float("nan"), -1.0]),
    max_size=60,
)


@given(weights=weight_lists, count=st.integers(0, 70))
def test_top_is_the_stable_order(weights: list[float], count: int) -> None:
    priority = np.array(weights, np.float32)
    expected = oracle.top(priority, count)
    assert top(priority, count).tolist() == expected.tolist()


@given(
    seed=st.integers(0, 2**32 - 1), num=st.integers(0, 60), first=st.integers(0, 3),
    recent=st.integers(0, 4), budget=st.integers(0, 80),
    p=st.none() | st.floats(0.05, 0.99),
)  # fmt: skip
def test_what_a_selection_promises(
    seed: int, num: int, first: int, recent: int, budget: int, p: float | None
) -> None:
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(num + 1, 0.2)).astype(np.float32)
    weights, always_mass = shares[1:], float(shares[0])
    where = CandidateSpan(first, first + num, first + num + recent)
    options = {"adaptive_p": p, "floor_blocks": 2}
    with np.errstate(divide="ignore"):
        scores, log_mass = np.log(weights[None]), np.log(shares[:1])
    chosen = choose(scores, log_mass, where, budget, **options)
    more = choose(scores, log_mass, where, budget + 1, **options)
    blocks = set(chosen.blocks.tolist())
    assert (np.diff(chosen.blocks) > 0).all() and set(where.always.tolist()) <= blocks
    assert len(blocks) <= max(budget, where.num_always)
    assert more.mass >= chosen.mass - 1e-6 and blocks <= set(more.blocks.tolist())
    assert (np.isinf(chosen.weights) == np.isin(chosen.blocks, where.always)).all()
    picked = np.setdiff1d(chosen.blocks, where.always) - first
    assert np.isclose(
        chosen.mass, min(always_mass + weights[picked].sum(dtype=np.float64), 1.0), atol=1e-5
    )
    if p is None:
        assert len(blocks) == max(min(budget, where.count), where.num_always)
        if budget >= where.count:
            assert blocks == set(range(where.count))
    else:
        enough = chosen.mass >= p - 1e-5
        assert enough or len(blocks) == max(min(budget, where.count), where.num_always)
        if len(picked) > 2:
            assert always_mass + np.sort(weights[picked])[1:].sum(dtype=np.float64) <= p + 1e-5


@given(
    context=st.integers(0, 2000),
    block_tokens=st.sampled_from([1, 16, 32, 128]),
    sinks=st.integers(0, 100),
    recent=st.integers(1, 200),
)
def test_span_keeps_sinks_recent_and_partial_block(
    context: int, block_tokens: int, sinks: int, recent: int
) -> None:
    config = SparseConfig(sparse_topk=1000, sink_tokens=sinks, recent_tokens=recent)
    where, tokens = span(config, context, block_tokens), np.arange(context)
    must = (tokens < sinks) | (tokens >= context - recent)
    must |= tokens >= context // block_tokens * block_tokens
    assert np.isin(tokens[must] // block_tokens, where.always).all()
    assert where.count * block_tokens >= context and 0 <= where.first <= where.last <= where.count
    assert where.num_always == len(where.always) <= config.max_always_blocks(block_tokens)
    others = list(range(where.first, where.last))
    assert sorted(where.always.tolist() + others) == list(range(where.count))


@pytest.mark.parametrize(("sinks", "recent"), [(0, 1), (1, 16), (20, 33), (32, 64), (16, 18)])
def test_the_most_always_kept_blocks_occur(sinks: int, recent: int) -> None:
    config = SparseConfig(sparse_topk=1000, sink_tokens=sinks, recent_tokens=recent)
    most = max(span(config, context, 16).num_always for context in range(300))
    assert most == config.max_always_blocks(16)


def test_floor() -> None:
    assert [floor_blocks(size) for size in (16, 48, 128, 256)] == [8, 3, 1, 1]

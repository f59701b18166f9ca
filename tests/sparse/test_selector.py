"""Tests a layer's whole selection (scores, weights, choice) against exact attention."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotkv_proto.errors import HotKVError
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.selection import (
    CandidateSpan,
    Selection,
    Source,
    choose,
    exact_log_mass,
    select_layer,
    span,
)
from hotkv_sparse.sketches import build
from tests.oracles import sparse as oracle

BLOCK, HEADS, GROUP, SIZE = 16, 2, 3, 64


class Context:
    """Random keys. Queries are sums of a few keys plus noise, so they attend mainly to a few
    tokens."""

    def __init__(self, num_tokens: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.num_tokens = num_tokens
        self.num_blocks = -(-num_tokens // BLOCK)
        self.keys = rng.standard_normal((self.num_blocks * BLOCK, HEADS, SIZE)).astype(np.float32)
        self.rng = rng

    def query(self, strength: float = 2.0) -> np.ndarray:
        around = self.keys[self.rng.integers(0, self.num_tokens, 6)].sum(axis=0)
        query = np.repeat(around, GROUP, axis=0) * strength + self.rng.standard_normal(
            (HEADS * GROUP, SIZE)
        )
        return query.astype(np.float32)

    def always(self, config: SparseConfig, query: np.ndarray) -> np.ndarray:
        where = span(config, self.num_tokens, BLOCK)
        kept = np.isin(np.arange(self.num_tokens) // BLOCK, where.always)
        return exact_log_mass(query, self.keys[: self.num_tokens][kept])

    def sources(self, name: str) -> dict[str, Source]:
        blocks = self.keys.reshape(self.num_blocks, BLOCK, HEADS, SIZE)
        counts = np.minimum(BLOCK, self.num_tokens - BLOCK * np.arange(self.num_blocks))
        return {name: Source(build(name, blocks, None, counts.astype(np.int32)), None)}

    def mass(self, query: np.ndarray, blocks: np.ndarray) -> float:
        grouped = query.reshape(HEADS, GROUP, SIZE)
        scores = np.einsum("rhd,hgd->hgr", self.keys[: self.num_tokens], grouped) / np.sqrt(SIZE)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        tokens = np.isin(np.arange(self.num_tokens) // BLOCK, blocks)
        return float(shares[:, :, tokens].sum(axis=-1).mean())


def chosen(context: Context, config: SparseConfig, query: np.ndarray, name: str) -> Selection:
    rows, always = np.arange(context.num_blocks, dtype=np.int32), context.always(config, query)
    sources = context.sources(name)
    return select_layer(config, 5, query, sources, rows, always, context.num_tokens, BLOCK)


@pytest.mark.parametrize(("scorer", "least"), [("rot3u", 0.97), ("rot2u", 0.94)])
def test_selections_hold_most_of_the_best_mass(scorer: str, least: float) -> None:
    context, config = Context(4090), SparseConfig(sparse_topk=0.1, scorer=scorer)
    where, found, best = span(config, 4090, BLOCK), 0.0, 0.0
    for _ in range(5):
        query = context.query()
        selection = chosen(context, config, query, scorer)
        assert len(selection.blocks) == config.budget_blocks(4090, BLOCK) == 25
        every = [context.mass(query, np.array([block])) for block in range(context.num_blocks)]
        middle = np.sort(every[where.first : where.last])[::-1][: 25 - where.num_always]
        best += np.array(every)[where.always].sum() + middle.sum()
        found += context.mass(query, selection.blocks)
    assert found >= least * best


@pytest.mark.parametrize(
    ("layer", "name", "words"),
    [(0, "rot2u", "layer 0 is dense"), (5, "mean", "layer 5 has no source for rot2u")],
)
def test_refusals(layer: int, name: str, words: str) -> None:
    context, rows, always = Context(500), np.arange(32, dtype=np.int32), np.zeros(6, np.float32)
    query, sources = context.query(), context.sources(name)
    with pytest.raises(HotKVError, match=words):
        select_layer(SparseConfig(), layer, query, sources, rows, always, 500, BLOCK)


@given(
    seed=st.integers(0, 2**32 - 1), num=st.integers(0, 300), heads=st.integers(1, 9),
    first=st.integers(0, 3), recent=st.integers(0, 4),
    budget=st.integers(0, 320), spread=st.sampled_from([0.0, 1.0, 30.0]),
    empty=st.sampled_from([0.0, 0.3, 1.0]),
    p=st.none() | st.floats(0.05, 0.99),
)  # fmt: skip
@example(seed=0, num=300, heads=9, first=1, recent=1, budget=9, spread=30.0, empty=0.0, p=None)
def test_choosing_in_one_kernel_equals_its_reference(
    seed: int,
    num: int,
    heads: int,
    first: int,
    recent: int,
    budget: int,
    spread: float,
    empty: float,
    p: float | None,
) -> None:
    rng = np.random.default_rng(seed)
    scores = (rng.standard_normal((heads, num)) * spread).astype(np.float32)
    if num:
        # With a wide spread, one block per head makes all other weights vanish.
        scores[range(heads), rng.integers(num, size=heads)] += spread * spread / 4
    scores[rng.random(scores.shape) < empty] = -np.inf
    always = rng.standard_normal(heads).astype(np.float32)
    where = CandidateSpan(first, first + num, first + num + recent)
    options: Any = {"adaptive_p": p, "floor_blocks": 2}
    found = choose(scores, always, where, budget, **options)
    shares = oracle.aggregate(scores, always, 1)
    expected = oracle.select(shares.shared, shares.always_shared, where, budget, **options)
    assert abs(len(found.blocks) - len(expected.blocks)) <= (p is not None)
    assert found.mass == pytest.approx(expected.mass, abs=1e-4 if p is None else 0.05)
    middle = ~np.isinf(found.weights)
    assert (np.diff(found.blocks) > 0).all()
    assert (middle == ~np.isin(found.blocks, where.always)).all()
    own = shares.shared[found.blocks[middle] - first]
    np.testing.assert_allclose(found.weights[middle], own, rtol=1e-4, atol=1e-6)
    if len(found.blocks) == len(expected.blocks):
        # Of equal weights, any may be chosen.
        weights = np.sort(found.weights), np.sort(expected.weights)
        np.testing.assert_allclose(*weights, rtol=1e-4, atol=1e-6)


def test_choosing_refuses_what_does_not_fit() -> None:
    with pytest.raises(HotKVError, match="the span has 3 candidates"):
        choose(np.zeros((2, 4), np.float32), np.zeros(2, np.float32), CandidateSpan(0, 3, 3), 2)
    with pytest.raises(HotKVError, match="always_log_mass is"):
        choose(np.zeros((2, 3), np.float32), np.zeros(3, np.float32), CandidateSpan(0, 3, 3), 2)

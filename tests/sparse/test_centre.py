"""Tests `measured_bias`, a scorer's mean error against exact attention, with and without a
centre."""

import itertools
from typing import Any

import numpy as np
import pytest

from hotkv_sparse import FORMATS, build, prepare, score
from hotkv_sparse.axes import Axes, AxesEstimate
from hotkv_sparse.centre import TOKEN_FORMATS, measured_bias
from hotkv_sparse.selection import exact_log_mass


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_size", "num_tokens", "scale"),
    [(2, 3, 16, 400, None), (1, 1, 48, 333, 0.3)],
)
def test_bias_is_the_mean_error_weighted_by_mass(
    kv_heads: int, group: int, head_size: int, num_tokens: int, scale: float | None
) -> None:
    dice, positions = np.random.default_rng(1), [30, 120, 250, num_tokens - 1]
    centre = 2 * dice.standard_normal((kv_heads, head_size))
    keys = dice.standard_normal((num_tokens, kv_heads, head_size)) + centre
    queries = 2 * dice.standard_normal((len(positions), kv_heads * group, head_size))
    keys, queries = keys.astype(np.float32), queries.astype(np.float32)
    estimate = AxesEstimate(kv_heads, head_size)
    estimate.add(keys[: len(queries)], queries)
    _, axes = estimate.axes(min_tokens=1) or pytest.fail("tokens were seen")
    for name, mu in itertools.product(TOKEN_FORMATS, (None, keys.mean(axis=0))):
        given = (name, mu, keys, queries, positions, scale, axes)
        assert measured_bias(*given) == pytest.approx(_naive_bias(*given), abs=1e-3)


def _naive_bias(
    name: str,
    mu: Any,
    keys: Any,
    queries: Any,
    positions: list[int],
    scale: float | None,
    axes: Axes,
) -> float:
    """Estimated minus exact score, block by block, weighted by attention; without the first 32 and
    the last 64 tokens.

    mu: None without a centre.
    positions: of each query.
    scale: None: 1 / sqrt(head size).
    axes: for mix2 only.
    """
    errors, masses = [], []
    for query, position in zip(queries, positions, strict=True):
        total = exact_log_mass(query, keys[: position + 1], scale)
        for first in range(32, position + 1 - 64 - 15, 16):
            block = keys[first : first + 16]
            exact = exact_log_mass(query, block, scale)
            prepared = prepare(name, query, mu, scale, bias=0.0, axes=axes)
            packed = build(name, block[None], mu, axes=axes)
            estimated = score(prepared, packed, np.zeros(1, np.int32))[:, 0]
            errors.append(estimated - exact)
            masses.append(np.exp(exact - total))
    return float(np.average(np.stack(errors), weights=np.stack(masses)))


def test_unscored_bias_is_the_formats_own() -> None:
    keys, queries = np.zeros((100, 2, 16), np.float32), np.zeros((1, 4, 16), np.float32)
    assert measured_bias("rot2u", None, keys, queries, [60]) == FORMATS["rot2u"].bias

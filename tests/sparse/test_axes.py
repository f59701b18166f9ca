"""Tests mix2: axes from sample keys and queries, the encoding, kernels against references,
scores against exact attention."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_proto.errors import HotKVError
from hotkv_sparse import axes as head_axes
from hotkv_sparse import formats
from hotkv_sparse.axes import MIN_TOKENS, Axes, AxesEstimate, run_channels
from hotkv_sparse.scores import prepare, score
from hotkv_sparse.sketches import build
from tests.oracles import sparse as oracle
from tests.sparse.support import Case, cases, rows_of

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
HEAD_SIZES = [1, 16, 40, 64, 80, 96, 128, 192, 256, 576]


@dataclass(frozen=True)
class Calibrated:
    """keys [S tokens, H KV heads, D channels], queries [S, Q query heads, D], and what comes of
    them."""

    keys: F32
    queries: F32
    mu: F32
    axes: Axes


def calibrated(
    head_size: int, kv_heads: int = 2, group: int = 3, num_tokens: int = 2000, seed: int = 0
) -> Calibrated:
    """Keys vary much along a few random directions, queries along others. `group`: query heads
    per KV head."""
    dice = np.random.default_rng(seed)
    turns = np.linalg.qr(dice.standard_normal((2, kv_heads, head_size, head_size)))[0]
    strengths = np.logspace(0.5, -1.5, head_size), np.logspace(0.3, -1.0, head_size)
    keys = dice.standard_normal((num_tokens, kv_heads, head_size)) * strengths[0]
    queries = dice.standard_normal((num_tokens, kv_heads, group, head_size)) * strengths[1]
    keys = np.einsum("shd,hde->she", keys, turns[0]) + dice.standard_normal((kv_heads, head_size))
    queries = np.einsum("shgd,hde->shge", queries, turns[1]).reshape(num_tokens, -1, head_size)
    keys, queries = keys.astype(np.float32), queries.astype(np.float32)
    estimate = AxesEstimate(kv_heads, head_size)
    estimate.add(keys, queries)
    found = estimate.axes(min_tokens=1)
    assert found is not None
    return Calibrated(keys, queries, *found)


def axes_of(case: Case, seed: int = 0) -> Axes:
    """They fit the case's shape, but come from other random keys."""
    return calibrated(case.keys.shape[3], case.kv_heads, 1, 100, seed).axes


def centre_of(case: Case) -> F32:
    return np.zeros(case.keys.shape[2:], np.float32) if case.mu is None else case.mu


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_head_has_as_many_bytes_as_rot2us(head_size: int) -> None:
    fine, coarse = run_channels(head_size)
    assert fine >= 0 and coarse > 0 and fine + coarse <= head_size
    assert formats.head_bytes("mix2", 32, head_size) == formats.head_bytes("rot2u", 32, head_size)
    assert len(head_axes.offsets_of(head_size)) >= fine + coarse


@pytest.mark.parametrize("head_size", [1, 40, 64, 128])
def test_axes_keep_products(head_size: int) -> None:
    one = calibrated(head_size)
    back = np.linalg.inv(one.axes.into.astype(np.float64)).transpose(0, 2, 1)
    query, key = one.queries[7].reshape(2, 3, head_size), one.keys[9] - one.mu
    there = np.einsum("hgd,hde,he->hg", query, back, np.einsum("hd,hde->he", key, one.axes.into))
    expected = np.einsum("hgd,hd->hg", query, key)
    np.testing.assert_allclose(there, expected, rtol=1e-3, atol=1e-2 * np.abs(expected).max())


def test_strong_channels_come_first_and_runs_are_even() -> None:
    one = calibrated(64)
    y = head_axes.channels_of(one.keys[:, None], one.mu, one.axes)[:, :, 0]
    energy = (y**2).mean(axis=1)
    fine, coarse = run_channels(64)
    runs = energy[:, :fine], energy[:, fine : fine + coarse], energy[:, fine + coarse :]
    assert (runs[0].min(axis=1) > runs[1].max(axis=1)).all()
    assert (runs[1].min(axis=1) > runs[2].max(axis=1)).all()
    # Hadamard mixing evens the energy within a run; without it, channels differ more than
    # tenfold.
    assert (runs[0].max(axis=1) < 3 * runs[0].min(axis=1)).all()
    np.testing.assert_allclose(
        one.axes.rms, [[np.sqrt(part[h].mean()) for part in runs[:2]] for h in (0, 1)], rtol=1e-3
    )


def test_moments_add_up_in_any_parts() -> None:
    one, parts = calibrated(32), AxesEstimate(2, 32)
    bounds = (0, MIN_TOKENS - 1, MIN_TOKENS, 1900, 2000)
    for first, last in itertools.pairwise(bounds):
        parts.add(one.keys[first:last], one.queries[first:last])
        assert (parts.axes() is None) == (last < MIN_TOKENS)
    broken = one.keys[:1].copy()
    broken[0, 0, 5] = np.nan
    parts.add(broken, one.queries[:1])
    assert parts.num_tokens == 2000
    mu, axes = parts.axes() or pytest.fail("enough tokens")
    np.testing.assert_allclose(mu, one.keys.mean(axis=0), atol=1e-5)
    # A principal axis' sign is arbitrary.
    np.testing.assert_allclose(axes.rms, one.axes.rms, rtol=1e-3)


def test_keys_that_are_all_alike_have_axes_too() -> None:
    estimate = AxesEstimate(1, 32)
    estimate.add(np.ones((2000, 1, 32), np.float32), np.zeros((2000, 2, 32), np.float32))
    mu, axes = estimate.axes() or pytest.fail("enough tokens")
    keys = np.random.default_rng(0).standard_normal((4, 16, 1, 32)).astype(np.float32)
    query = prepare("mix2", keys[0, :2, 0], mu, axes=axes)
    assert np.isfinite(score(query, build("mix2", keys, mu, axes=axes))).all()


@pytest.mark.parametrize("queries", [(5, 3, 16), (4, 4, 16)])
def test_moments_of_other_shapes_are_refused(queries: tuple[int, ...]) -> None:
    with pytest.raises(HotKVError, match=r"pass \[tokens, 2, 16\]"):
        AxesEstimate(2, 16).add(np.zeros((5, 2, 16), np.float32), np.zeros(queries, np.float32))


@pytest.mark.parametrize(
    ("into", "rms", "words"),
    [
        (np.ones((1, 8, 7)), np.ones((1, 2)), "not float32"),
        (np.eye(8)[None], np.ones((2, 2)), r"\[2, 2\]"),
        (np.full((1, 8, 8), np.nan), np.ones((1, 2)), "not finite"),
        (np.eye(8)[None], np.zeros((1, 2)), "not above 0"),
        (np.ones((1, 8, 8)), np.ones((1, 2)), "inverted"),
    ],
)
def test_axes_of_no_use_are_refused(into: object, rms: object, words: str) -> None:
    with pytest.raises(HotKVError, match=words):
        Axes(np.asarray(into, np.float32), np.asarray(rms, np.float32))


def test_ranks_heads_are_the_models() -> None:
    one = calibrated(32, kv_heads=4)
    part = one.axes.heads(1, 2)
    keys = one.keys[:64].reshape(4, 16, 4, 32)
    whole = build("mix2", keys, one.mu, axes=one.axes)
    mine = build("mix2", keys[:, :, 1:3].copy(), one.mu[1:3], axes=part)
    assert (whole[:, 1:3] == mine).all()
    packed = (b"", part.to_bytes(), one.axes.to_bytes())
    assert len({formats.version("mix2", 32, None, axes) for axes in packed}) == 3


@given(case=cases, seed=st.integers(0, 3))
def test_kernel_builds_what_the_reference_builds(case: Case, seed: int) -> None:
    axes, head_size = axes_of(case, seed), case.keys.shape[3]
    built = build("mix2", case.keys, case.mu, case.num_tokens, axes=axes)
    channels = head_axes.channels_of(case.keys, centre_of(case), axes)
    expected = oracle.build_axes(channels, axes, case.num_tokens)
    assert built.shape == expected.shape and built.dtype == np.uint8
    # A value halfway between two codes may be rounded either way.
    assert np.count_nonzero(built != expected) <= 1e-3 * built.size + 2
    found, wanted = (oracle.unpack_tokens("mix2", some, head_size) for some in (built, expected))
    same = (found.levels == wanted.levels).all(axis=-1)
    np.testing.assert_allclose(found.sigma[same], wanted.sigma[same], rtol=2e-3)


@given(case=cases, seed=st.integers(0, 3), data=st.data())
def test_score_kernels_equal_their_reference(case: Case, seed: int, data: st.DataObject) -> None:
    axes = axes_of(case, seed)
    packed = build("mix2", case.keys, case.mu, case.num_tokens, axes=axes)
    query, rows = prepare("mix2", case.query, case.mu, axes=axes), rows_of(data, case)
    tokens = oracle.unpack_tokens("mix2", packed[rows], case.keys.shape[3])
    expected = oracle.score_tokens(query, tokens)
    np.testing.assert_allclose(score(query, packed, rows), expected, rtol=2e-5, atol=2e-4)
    assert (np.isneginf(expected) == (case.num_tokens[rows] == 0)).all()


@given(case=cases, seed=st.integers(0, 3))
def test_the_kernel_prepares_the_queries_of_its_reference(case: Case, seed: int) -> None:
    axes, head_size = axes_of(case, seed), case.keys.shape[3]
    query = prepare("mix2", case.query, case.mu, axes=axes)
    codes = np.empty_like(query.codes)
    peak, sums = oracle.prepare_axes(case.query, axes, codes)
    # A value halfway between two codes may be rounded either way.
    assert np.abs(query.codes.astype(int) - codes).max() <= 1
    assert np.count_nonzero(query.codes != codes) <= 1e-2 * codes.size + 2
    np.testing.assert_allclose(query.factor, peak / (127 * np.sqrt(head_size)), rtol=1e-4)
    offsets = head_axes.offsets_of(head_size)
    assert (query.offsets[:, 0] == -(query.codes.astype(int) @ offsets)).all()
    assert (sums == -(codes.astype(int) @ offsets)).all()


@pytest.mark.parametrize("head_size", [64, 80, 128])
def test_scores_approach_exact_mass(head_size: int) -> None:
    one = calibrated(head_size, kv_heads=2, group=4, num_tokens=4800)
    keys = one.keys.reshape(300, 16, 2, head_size)
    case = Case(keys, np.full(300, 16, np.int32), one.queries[11], None)
    query = prepare("mix2", case.query, one.mu, bias=0.0, axes=one.axes)
    difference = score(query, build("mix2", keys, one.mu, axes=one.axes)) - case.log_mass()
    assert abs(difference.mean()) < 0.02
    assert np.abs(difference).mean() < 0.05


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda keys, axes: build("mix2", keys), "mix2 has no axes"),
        (lambda keys, axes: prepare("mix2", keys[0, 0]), "mix2 has no axes"),
        (lambda keys, axes: build("mix2", keys, axes=axes), r"needs \[2, 64\]"),
        (lambda keys, axes: prepare("mix2", keys[0, 0], axes=axes), r"needs \[2, 64\]"),
        (lambda keys, axes: prepare("mix2", keys[0, :3, 0], axes=axes), "the query has 3"),
    ],
)
def test_refusals(call: Callable[..., object], words: str) -> None:
    with pytest.raises(HotKVError, match=words):
        call(np.zeros((1, 16, 2, 64), np.float32), calibrated(32).axes)


def _turned(x: F32, positions: npt.NDArray[np.int64], frequencies: F64) -> F32:
    """Turns keys by RoPE, with complex numbers."""
    count = len(frequencies)
    z = x[..., :count] + 1j * x[..., count : 2 * count]
    z = z * np.exp(1j * positions[:, None, None] * frequencies)
    return np.concatenate([z.real, z.imag, x[..., 2 * count :]], axis=-1).astype(np.float32)


@given(seed=st.integers(0, 99), turned=st.integers(0, 8), context=st.integers(1, 100_000))
def test_moved_tokens_are_those_of_the_other_positions(
    seed: int, turned: int, context: int
) -> None:
    dice = np.random.default_rng(seed)
    x = dice.standard_normal((20, 3, 16)).astype(np.float32)
    frequencies, positions = 10.0 ** -np.linspace(0, 4, turned), dice.integers(0, context, 20)
    for turn in range(head_axes.PLACES):
        there = head_axes.places(positions, context, turn)
        assert ((there >= 0) & (there < context) & (there == np.floor(there))).all()
        shifts = there.astype(np.int64) - positions
        found = head_axes.moved(_turned(x, positions, frequencies), shifts, frequencies)
        expected = _turned(x, there.astype(np.int64), frequencies)
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_places_cover_a_context_evenly() -> None:
    found = np.concatenate([head_axes.places(np.arange(64, 2048), 8192, turn) for turn in range(4)])
    counts = np.histogram(found, bins=16, range=(0, 8192))[0]
    assert (np.abs(counts / counts.mean() - 1) < 0.05).all()


def test_axes_of_a_short_prompt_hold_longer() -> None:
    """`add_moved` turns the first 1100 of 8192 tokens by RoPE to positions spread over the
    context: nearly as good as all tokens, and far better than those 1100 by `add`.
    """
    dice, head_size, length = np.random.default_rng(3), 64, 8192
    frequencies = 10000.0 ** -np.arange(0, 1, 1 / 32)
    common = 3 * dice.standard_normal((2, head_size))
    scale = np.logspace(0, -1, head_size)
    plain = [common + dice.standard_normal((length, 2, head_size)) * scale for _ in range(2)]
    keys, queries = (_turned(x.astype(np.float32), np.arange(length), frequencies) for x in plain)
    queries = np.repeat(queries, 2, axis=1)
    errors = {}
    for name in ("short", "moved", "whole"):
        estimate = AxesEstimate(2, head_size)
        if name == "moved":
            where = np.arange(1100)
            estimate.add_moved(keys[:1100], queries[:1100], where, frequencies, length)
        else:
            count = length if name == "whole" else 1100
            estimate.add(keys[:count], queries[:count])
        mu, axes = estimate.axes() or pytest.fail("enough tokens")
        blocks = keys.reshape(-1, 16, 2, head_size)
        case = Case(blocks, np.full(len(blocks), 16, np.int32), queries[-1] / 3, None)
        query = prepare("mix2", case.query, mu, bias=0.0, axes=axes)
        errors[name] = np.std(score(query, build("mix2", blocks, mu, axes=axes)) - case.log_mass())
    assert errors["moved"] < 1.5 * errors["whole"] < 0.5 * errors["short"]

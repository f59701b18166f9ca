"""Kernels against references, and scores against exact attention."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_proto.errors import HotKVError
from hotkv_sparse import formats
from hotkv_sparse.representations import build
from hotkv_sparse.scores import prepare, score
from tests.oracles import sparse as oracle
from tests.sparse.support import SUMMARIES, TOKEN_FORMATS, UNCALIBRATED, Case, cases, make_case


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-4)


@given(case=cases, name=st.sampled_from(TOKEN_FORMATS), data=st.data())
def test_token_kernels_equal_their_reference(case: Case, name: str, data: st.DataObject) -> None:
    num_blocks, head_size = len(case.keys), case.keys.shape[3]
    packed = build(name, case.keys, case.mu, case.num_tokens)
    query = prepare(name, case.query, case.mu)
    rows = np.array(
        data.draw(st.lists(st.integers(0, num_blocks - 1), max_size=150)) if num_blocks else [],
        np.int32,
    )
    expected = oracle.score_tokens(query, oracle.unpack_tokens(name, packed[rows], head_size))
    close(score(query, packed, rows), expected)
    assert (np.isneginf(expected) == (case.num_tokens[rows] == 0)).all()


@given(case=cases, name=st.sampled_from(SUMMARIES), data=st.data())
def test_summary_kernels_equal_their_reference(case: Case, name: str, data: st.DataObject) -> None:
    num_blocks = len(case.keys)
    packed = build(name, case.keys, case.mu, case.num_tokens)
    query = prepare(name, case.query, case.mu)
    rows = np.array(
        data.draw(st.lists(st.integers(0, num_blocks - 1), max_size=150)) if num_blocks else [],
        np.int32,
    )
    expected = oracle.score_parts(query, packed[rows])
    close(score(query, packed, rows), expected)
    assert (np.isneginf(expected) == (case.num_tokens[rows] == 0)).all()


@given(case=cases, name=st.sampled_from(UNCALIBRATED))
def test_the_kernel_prepares_the_queries_of_its_reference(case: Case, name: str) -> None:
    query, form = prepare(name, case.query, case.mu), formats.FORMATS[name]
    codes = np.zeros(
        (len(case.query), max(form.parts, 1), query.codes.shape[1] // max(form.parts, 1)), np.int8
    )
    peak = oracle.prepare(form, case.query, codes)
    # A code between two integer steps may round either way.
    assert np.abs(query.codes.astype(int) - codes.reshape(query.codes.shape)).max() <= 1
    unit = 127.0 * (form.level_unit if form.bits else 1.0) * np.sqrt(case.query.shape[1])
    np.testing.assert_allclose(query.factor, peak / unit, rtol=1e-4)
    sums = query.codes.astype(int).reshape(codes.shape).sum(axis=2)
    assert (query.offsets == -formats.LEVEL_OFFSET * sums).all()


@pytest.mark.parametrize(("name", "error"), [("rot2u", 0.20), ("rot3u", 0.10)])
@pytest.mark.parametrize("head_size", [64, 80, 128])
def test_token_scores_approach_exact_mass(name: str, error: float, head_size: int) -> None:
    rng = np.random.default_rng(5)
    keys = rng.standard_normal((300, 16, 2, head_size)).astype(np.float32)
    case = Case(
        keys,
        np.full(300, 16, np.int32),
        rng.standard_normal((8, head_size)).astype(np.float32),
        None,
    )
    estimate = score(prepare(name, case.query), build(name, case.keys)) + formats.FORMATS[name].bias
    difference = estimate - case.log_mass()
    # These keys lose half as much as a model's do where attention is sharp: the estimate is high by
    # less than the format's bias.
    assert (
        -0.05 <= difference.mean() <= formats.FORMATS[name].bias
        and np.abs(difference).mean() <= error
    )
    assert (
        np.corrcoef(estimate.ravel(), case.log_mass().ravel())[0, 1]
        > {"rot2u": 0.9, "rot3u": 0.97}[name]
    )


@given(case=cases)
def test_quest_is_an_upper_bound(case: Case) -> None:
    bound = score(
        prepare("quest", case.query, case.mu), build("quest", case.keys, case.mu, case.num_tokens)
    )
    # int8 queries move a score by at most half a step per channel.
    slack = (
        np.abs(case.query).max()
        / 254
        * np.abs(case.keys).max(initial=0)
        * 3
        * np.sqrt(case.keys.shape[3])
        + 1e-3
    )
    assert (bound + slack >= case.token_scores().max(axis=-1, initial=-np.inf)).all()


def test_a_pool_may_be_any_view() -> None:
    case = make_case(8, 5, 16, 2, 3, 64, True, False)
    packed = build("rot2u", case.keys, None, case.num_tokens)
    pool = np.zeros((10, 4, packed.shape[2] + 3), np.uint8)
    pool[::2, 1:3, 3:] = packed
    view = pool[::2, 1:3, 3:]
    view.setflags(write=False)
    query = prepare("rot2u", case.query)
    assert (score(query, view) == score(query, packed)).all()


@pytest.mark.parametrize(
    ("rows", "shape", "words"),
    [
        ([3], (3, 2, 288), "rows must be from 0 to 2"),
        ([0], (3, 5, 288), "kv_heads a divisor of 4"),
        ([0], (3, 2, 300), "300 bytes a head"),
    ],
)
def test_refusals(rows: list[int], shape: tuple[int, ...], words: str) -> None:
    query = prepare("rot2u", np.ones((4, 64), np.float32))
    with pytest.raises(HotKVError, match=words):
        score(query, np.zeros(shape, np.uint8), np.array(rows, np.int32))


def test_a_centre_of_other_shape_is_refused() -> None:
    with pytest.raises(HotKVError, match="needs \\[kv_heads, 64\\]"):
        prepare("rot2u", np.ones((4, 64), np.float32), np.ones((3, 64), np.float32))


def test_a_calibrated_bias_takes_the_place_of_the_formats() -> None:
    case = make_case(9, 5, 16, 2, 3, 64, False, False)
    packed = build("rot2u", case.keys)
    usual, own = (
        score(prepare("rot2u", case.query), packed),
        score(prepare("rot2u", case.query, bias=0.1), packed),
    )
    np.testing.assert_allclose(own - usual, formats.FORMATS["rot2u"].bias - 0.1, atol=1e-4)

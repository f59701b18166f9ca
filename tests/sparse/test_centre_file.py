"""Tests the files of a model's centres: they come back unchanged; wrong ones are refused by
name."""

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse.axes import Axes
from hotkv_sparse.centre import MIN_TOKENS, TOKEN_FORMATS, Centres, LayerCentre
from hotkv_sparse.centre_file import read_centres, write_centres

Arrays = dict[str, np.ndarray[Any, Any]]
BIAS = st.dictionaries(st.sampled_from(TOKEN_FORMATS), st.floats(-10, 10, allow_nan=False))


def axes(kv_heads: int, head_size: int) -> Axes:
    dice = np.random.default_rng(kv_heads)
    turn = np.linalg.qr(dice.standard_normal((kv_heads, head_size, head_size)))[0]
    return Axes(turn.astype(np.float32), dice.uniform(0.5, 2, (kv_heads, 2)).astype(np.float32))


@st.composite
def centres_of(draw: st.DrawFn) -> Centres:
    dice = np.random.default_rng(draw(st.integers(0, 99)))
    layers = {}
    for index in draw(st.sets(st.integers(0, 200), min_size=1, max_size=5)):
        shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 40)))
        mu = dice.standard_normal(shape).astype(np.float32)
        layers[index] = LayerCentre(mu, draw(BIAS), axes(*shape) if draw(st.booleans()) else None)
    return Centres(
        draw(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))),
        draw(st.integers(MIN_TOKENS, 1 << 40)),
        layers,
    )


def example() -> Centres:
    dice, layers = np.random.default_rng(0), {}
    for index, its_axes in ((2, None), (5, axes(2, 8))):
        mu = dice.standard_normal((2, 8)).astype(np.float32)
        layers[index] = LayerCentre(mu, {"rot2u": 0.25}, its_axes)
    return Centres("some-model", 4000, layers)


def written(
    arrays: Arrays, path: Path, compression: int = zipfile.ZIP_STORED, allow_pickle: bool = False
) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, array in arrays.items():
            data = io.BytesIO()
            np.lib.format.write_array(data, array, allow_pickle=allow_pickle)
            archive.writestr(f"{name}.npy", data.getvalue())
    return path


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """Writes the example with some arrays replaced, or removed by None. `how`: as for `written`."""

    def change(*how: Any, **others: Any) -> Path:
        path = tmp_path / "a.npz"
        write_centres(path, example())
        with np.load(path, allow_pickle=False) as archive:
            arrays = dict(archive) | others
        return written({k: v for k, v in arrays.items() if v is not None}, path, *how)

    return change


@given(centres_of())
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, centres: Centres
) -> None:
    path = tmp_path_factory.mktemp("centres") / "a.npz"
    write_centres(path, centres)
    found = read_centres(path)
    assert (found.model, found.num_tokens) == (centres.model, centres.num_tokens)
    assert set(found.layers) == set(centres.layers)
    for index, layer in centres.layers.items():
        mu, mine, other = found.mu(index), found.axes(index), layer.axes
        assert mu is not None and mu.dtype == np.float32
        np.testing.assert_array_equal(mu, layer.mu)
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert mine.to_bytes() == other.to_bytes()
            np.testing.assert_array_equal(mine.weights, other.weights)
        for name in TOKEN_FORMATS:
            assert found.bias(index, name) == layer.bias.get(name)
    absent = max(centres.layers) + 1
    assert found.mu(absent) is found.axes(absent) is found.bias(absent, "rot2u") is None


def test_equal_centres_are_equal_whole_files(tmp_path: Path) -> None:
    one, other = tmp_path / "a", tmp_path / "b"
    for path in (one, other):
        write_centres(path, example())
    assert one.read_bytes() == other.read_bytes() and one.stat().st_mode & 0o777 == 0o644
    write_centres(one, Centres("another", 5000, example().layers))
    assert read_centres(str(one)).model == "another"
    (tmp_path / "taken").mkdir()
    for path in (tmp_path / "taken", tmp_path / "absent" / "a"):
        with pytest.raises(OSError):
            write_centres(path, example())
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "taken"]


def test_formats_that_are_not_known_are_ignored(changed: Callable[..., Path]) -> None:
    found = read_centres(changed(formats=np.asarray(["rot9u", "rot3u", "mix2"])))
    assert found.bias(2, "rot2u") is None and found.bias(2, "rot9u") is None
    np.testing.assert_array_equal(found.mu(2), example().layers[2].mu)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_files_are_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("centres") / "a.npz"
    write_centres(path, example())
    whole = path.read_bytes()
    way = data.draw(st.sampled_from(["cut", "flip", "insert", "any"]))
    place = data.draw(st.integers(0, len(whole) - 1))
    if way == "cut":
        broken = whole[:place]
    elif way == "flip":
        broken = bytearray(whole)
        for at in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=4)):
            broken[at] ^= data.draw(st.integers(1, 255))
    elif way == "insert":
        broken = whole[:place] + data.draw(st.binary(min_size=1, max_size=40)) + whole[place:]
    else:
        broken = data.draw(st.binary(max_size=300))
    path.write_bytes(bytes(broken))
    try:
        found = read_centres(path)
    except HotKVError as error:
        assert error.reason is Reason.INVALID_FIELD and error.message.startswith(f"{path}: ")
    else:
        # Some bytes, such as the archive's dates, mean nothing.
        assert (found.model, found.num_tokens) == ("some-model", 4000)
        for index, layer in example().layers.items():
            np.testing.assert_array_equal(found.mu(index), layer.mu)


F32, F64 = np.float32, np.float64


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("mu_5", None, "has no array 'mu_5'"),
        ("model", None, "has no array 'model'"),
        ("bias", None, "has no array 'bias'"),
        ("rms_5", None, "has no array 'rms_5'"),
        ("format_version", 3, "its format_version is 3"),
        ("format_version", "1", "its array 'format_version'"),
        ("num_tokens", 3000.0, "its array 'num_tokens'"),
        ("model", 7, "its array 'model'"),
        ("mu_2", np.zeros((2, 8), F64), "mu of layer 2 is float64 [2, 8]"),
        ("mu_2", np.zeros((2, 8), ">f4"), "mu of layer 2 is >f4 [2, 8]"),
        ("mu_2", np.zeros(8, F32), "mu of layer 2 is float32 [8]"),
        ("mu_2", np.zeros((0, 8), F32), "mu of layer 2 is float32 [0, 8]"),
        ("mu_2", np.full((2, 8), np.nan, F32), "mu of layer 2 has values that are not finite"),
        ("bias", [[0.1, 0.2, 0.3]], "its bias is [1, 3]"),
        ("bias", np.full((2, 3), np.inf), "its bias has values that are not finite"),
        ("formats", ["rot2u", "rot2u", "mix2"], "its formats ['rot2u', 'rot2u', "),
        ("rms_5", np.ones((2, 3), F32), "axes are float32 [2, 8, 8] and float32 [2, 3]"),
        ("rms_5", np.zeros((2, 2), F32), "an rms that is not above 0"),
        ("into_5", np.zeros((2, 8, 8), F32), "axes of a head cannot be inverted"),
        ("into_5", np.stack([np.eye(7, dtype=F32)] * 2), "axes of layer 5 are of [2, 7]"),
        ("layers", [2, 2], "its layers [2, 2]"),
        ("layers", [-1, 5], "has no array 'mu_-1'"),
        ("layers", [[2, 5]], "its array 'layers' is int64 [1, 2]"),
    ],
)
def test_files_that_say_other_things_are_refused(
    changed: Callable[..., Path], name: str, value: Any, problem: str
) -> None:
    path = changed(**{name: None if value is None else np.asarray(value)})
    with pytest.raises(HotKVError) as refusal:
        read_centres(path)
    assert refusal.value.reason is Reason.INVALID_FIELD
    assert refusal.value.message.startswith(f"{path}: ") and problem in refusal.value.message


def test_pickles_compression_and_absent_files_are_refused(
    changed: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(HotKVError, match="compressed"):
        read_centres(changed(zipfile.ZIP_DEFLATED))
    with pytest.raises(HotKVError, match="is no file of centres"):
        read_centres(changed(zipfile.ZIP_STORED, True, model=np.array([{}], object)))
    with pytest.raises(HotKVError, match="No such file"):
        read_centres(tmp_path / "absent")
    with pytest.raises(HotKVError, match="Is a directory"):
        read_centres(tmp_path)


def layer_of(bias: dict[str, float], index: int = 3) -> dict[int, LayerCentre]:
    return {index: LayerCentre(np.zeros((1, 4), np.float32), bias)}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model": None}, "model is NoneType"),
        ({"num_tokens": MIN_TOKENS - 1}, "num_tokens is 1023"),
        ({"layers": {}}, "layers is empty"),
        ({"layers": layer_of({}, -1)}, "layers has the number -1"),
        ({"layers": layer_of({"rot2u": float("nan")})}, "bias of layer 3 is nan for rot2u"),
        ({"layers": layer_of({"mean": 0.1})}, "bias of layer 3 is for 'mean'"),
    ],
)
def test_centres_that_make_no_sense_cannot_be_made(change: dict[str, Any], problem: str) -> None:
    good = {"model": "some-model", "num_tokens": 4000, "layers": example().layers}
    with pytest.raises(HotKVError) as refusal:
        Centres(**(good | change))
    assert problem in refusal.value.message

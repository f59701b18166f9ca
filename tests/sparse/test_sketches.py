"""Tests sketches: building, byte format, decoding, versions."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given

from hotkv_proto.errors import HotKVError
from hotkv_sparse import formats
from hotkv_sparse.rotation import passes, rotate, signs
from hotkv_sparse.sketches import build
from tests.oracles import sparse as oracle
from tests.sparse.support import TOKEN_FORMATS, UNCALIBRATED, Case, cases

HEAD_SIZES = [1, 16, 40, 64, 80, 96, 128, 192, 256, 576]


def test_signs_are_the_bits_of_sha256() -> None:
    digest = hashlib.sha256(b"hotkv-signs-1" + bytes(4)).digest()
    expected = [-1.0 if digest[i // 8] >> (i % 8) & 1 else 1.0 for i in range(128)]
    assert signs(128).tolist() == [expected]


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_rotation_keeps_products_and_mixes_every_channel(head_size: int) -> None:
    matrix = rotate(np.eye(head_size, dtype=np.float32))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(head_size), atol=1e-5)
    assert sum(size for _, size in passes(head_size)) >= head_size
    # Spread over at least half of the channels.
    assert (np.count_nonzero(np.abs(matrix) > 1e-6, axis=1) >= max(head_size // 2, 1)).all()


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [("rot2u", 34), ("rot3u", 50), ("quest", 16.5), ("mean", 8.25)],
)
def test_bytes_per_token(name: str, num_bytes: float) -> None:
    assert formats.bytes_per_block(name, 16, 8, 128) == num_bytes * 16 * 8


@pytest.mark.parametrize("name", UNCALIBRATED)
@given(case=cases)
def test_kernel_builds_what_the_reference_builds(case: Case, name: str) -> None:
    num_blocks, block_tokens, kv_heads, head_size = case.keys.shape
    mu = np.zeros((kv_heads, head_size), np.float32) if case.mu is None else case.mu
    built = build(name, case.keys, case.mu, case.num_tokens)
    expected = oracle.build(formats.FORMATS[name], case.keys, mu, case.num_tokens)
    num_bytes = formats.head_bytes(name, block_tokens, head_size)
    assert built.shape == (num_blocks, kv_heads, num_bytes) and built.dtype == np.uint8
    # A value halfway between two levels may be rounded either way.
    assert np.count_nonzero(built != expected) <= 1e-3 * built.size + 2
    if name in TOKEN_FORMATS:
        sigmas = [oracle.unpack_tokens(name, one, head_size).sigma for one in (built, expected)]
        np.testing.assert_allclose(*sigmas, rtol=2e-2)


@pytest.mark.parametrize(("name", "lost"), [("rot2u", 0.133), ("rot3u", 0.036)])
@pytest.mark.parametrize("head_size", [64, 80, 128, 576])
def test_codes_lose_what_lloyd_max_codes_lose(name: str, lost: float, head_size: int) -> None:
    x = np.random.default_rng(4).standard_normal((60, 16, 1, head_size)).astype(np.float32)
    y, z = rotate(np.moveaxis(x, 1, 2)), oracle.approximate_keys(name, build(name, x), head_size)
    assert np.mean(((y - z) ** 2).sum(-1) / (y * y).sum(-1)) == pytest.approx(lost, rel=0.1)


def test_versions_differ_when_signs_centre_or_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    mu = np.zeros((2, 64), np.float32)
    ids = [formats.version(name, 64, None) for name in formats.FORMATS]
    ids += [formats.version("rot2u", 64, mu + more) for more in (0.1, 0.2)]
    ids.append(formats.version("rot2u", 128, None))
    assert formats.version("rot2u", 64, mu) == formats.version("rot2u", 64, None)
    monkeypatch.setattr(formats, "signs", lambda head_size: -signs(head_size))
    ids.append(formats.version("rot2u", 64, None))
    assert len(set(ids)) == len(ids) and all(0 <= value < 2**63 for value in ids)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda keys: build("rot9", keys), "'rot9' is unknown"),
        (lambda keys: build("rot2u", keys.astype(np.float64)), "pass float32"),
        (lambda keys: build("rot2u", keys, np.zeros((1, 64), np.float32)), "mu is"),
        (lambda keys: build("rot2u", keys, None, np.array([17], np.int32)), "from 0 to 16"),
    ],
)
def test_refusals(call: Callable[..., object], words: str) -> None:
    with pytest.raises(HotKVError, match=words):
        call(np.zeros((1, 16, 2, 64), np.float32))

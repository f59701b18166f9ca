"""Tests the CUDA kernel `copy_runs` on the CPU, against numpy, for all sizes, alignments and
grids."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hotkv_server.device
from hotkv_server.device.cupy_runtime import copy_shares
from tests.device import cuda_on_cpu

pytestmark = cuda_on_cpu.needs_compiler

SOURCE = Path(hotkv_server.device.__file__).parent / "kernels" / "copy.cu"
BYTES = 1 << 16
MOST_COPIES = 5


def run(
    copies: list[tuple[int, int, int]], shares: int, blocks: int, threads: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the memory after the kernel, and as it should be.

    copies: (gap before its destination, gap before its source, bytes) of each.
    shares: parts into which each copy is cut.
    """
    memory = np.random.default_rng(seed).integers(0, 256, (2, BYTES), dtype=np.uint8)
    expected = memory[0].copy()
    table = np.zeros((3, max(1, len(copies))), np.int64)[:, : len(copies)].copy()
    dst = src = 0
    for i, (dst_gap, src_gap, size) in enumerate(copies):
        dst, src = dst + dst_gap, src + src_gap
        expected[dst : dst + size] = memory[1, src : src + size]
        table[:, i] = memory[0].ctypes.data + dst, memory[1].ctypes.data + src, size
        dst, src = dst + size, src + size
    module = cuda_on_cpu.compile(SOURCE)
    module.launch(
        "copy_runs", blocks, threads, (table, np.int64(len(copies)), np.int64(shares)), seed=seed
    )
    return memory[0], expected


SIZES = st.one_of(
    st.integers(0, 70), st.integers(0, 9000), st.sampled_from([4096, 8192, 12000, 4095, 4097, 512])
)
GAPS = st.one_of(st.integers(0, 40), st.sampled_from([0, 4, 8, 16, 32]))


@settings(deadline=None)
@given(
    st.lists(st.tuples(GAPS, GAPS, SIZES), max_size=MOST_COPIES),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([32, 64, 256]),
    st.integers(0, 9),
)
def test_equal_to_numpy(
    copies: list[tuple[int, int, int]], shares: int, blocks: int, threads: int, seed: int
) -> None:
    came, expected = run(copies, shares, blocks, threads, seed)
    np.testing.assert_array_equal(came, expected)


@pytest.mark.parametrize("src_by", [0, 1, 2, 4, 8, 12, 15])
def test_every_alignment(src_by: int) -> None:
    for dst_by, size in itertools.product(range(17), (0, 1, 15, 16, 17, 33, 300, 4096 + 24)):
        came, expected = run([(dst_by, src_by, size)], 2, 2, 64, 0)
        np.testing.assert_array_equal(came, expected)


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 31), st.integers(1, 1024))
def test_shares_keep_all_warps_at_work(num_copies: int, max_bytes: int, num_warps: int) -> None:
    shares = copy_shares(num_copies, max_bytes, num_warps)
    assert 1 <= shares <= max(1, -(-max_bytes // 4096))
    assert shares * num_copies >= min(8 * num_warps, num_copies * -(-max_bytes // 4096))
    assert (shares - 1) * num_copies < 8 * num_warps

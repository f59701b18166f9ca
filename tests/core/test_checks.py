"""Tests checksums: the kernel against a reference, and that they detect a changed byte, a
missing page, and another block's bytes or key."""

import os
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotkv_server.dataplane.plan import Region
from hotkv_server.integrity.checksums import sealed, strides_of
from hotkv_server.integrity.evidence import Evidence
from hotkv_server.integrity.sums import MAX_SUM_THREADS, SumThreads, add_sums, holds
from tests.oracles import sums as oracle

SLOT = 8192
ENTRIES = np.arange(4, dtype=np.uint32)
SEEDS = st.integers(0, 99)
SHARDS = st.lists(st.integers(0, 3000), min_size=1, max_size=2).filter(any)
STRIDES = st.sampled_from([1, 2, 16, 64])


class Memory:
    def __init__(self, seed: int, num_blocks: int = 4) -> None:
        rng = np.random.default_rng(seed)
        self.bytes = rng.integers(0, 256, num_blocks * SLOT, np.uint8)
        self.region = Region(self.bytes.ctypes.data, self.bytes.nbytes, "memory")
        self.offsets = np.arange(num_blocks, dtype=np.int64) * SLOT

    def evidence(self, shards: list[int], stride: int) -> Evidence:
        """Checksums, added shard by shard as stores do."""
        num_blocks, begin = len(self.offsets), 0
        sums, strides = np.zeros(num_blocks, np.uint64), np.full(num_blocks, stride)
        for shard, num_bytes in enumerate(shards):
            add_sums(self.region, self.offsets + begin, num_bytes, shard, strides, sums)
            begin += num_bytes
        keys = np.arange(1, num_blocks + 1, dtype=np.uint64) * np.uint64(0x1234_5678_9ABC_DEF1)
        return Evidence(ENTRIES, self.offsets, shards, keys, sealed(sums, keys, stride))


@given(SEEDS, st.integers(0, SLOT), STRIDES, st.integers(0, 30), st.integers(1, 5))
@example(1, SLOT, 1, 3, 3)
def test_kernel_and_threads_find_what_the_reference_finds(
    seed: int, num_bytes: int, stride: int, shift: int, num_threads: int
) -> None:
    memory = Memory(seed, 5)
    offsets, strides = memory.offsets[:4] + shift, np.full(4, stride)
    kernel, several, reference = (np.zeros(4, np.uint64) for _ in range(3))
    add_sums(memory.region, offsets, num_bytes, 1, strides, kernel)
    oracle.add_sums(memory.region, offsets, num_bytes, 1, strides, reference)
    threads = SumThreads(num_threads)
    with mock.patch("hotkv_server.integrity.sums.PART_BYTES", SLOT):
        threads.add_sums(memory.region, offsets, num_bytes, 1, strides, several)
    threads.close()
    assert kernel.tolist() == several.tolist() == reference.tolist()


def test_checksums_equal_those_of_earlier_servers() -> None:
    """After an upgrade, old blocks are compared with sums of the old server."""
    memory = Memory(0, 1)
    memory.bytes[:] = np.arange(SLOT) % 251
    checks = [int(memory.evidence([3000, 2000], stride).checks[0]) for stride in (1, 2)]
    assert checks == [0x9E6B_14C2_7055_83D1, 0xF06C_ADE3_5398_C442]


@given(SEEDS, SHARDS, st.data())
def test_any_changed_byte_is_seen_where_covered(
    seed: int, shards: list[int], data: st.DataObject
) -> None:
    memory = Memory(seed)
    whole = memory.evidence(shards, 1)
    assert holds(memory.region, whole).all()
    block, place = data.draw(st.integers(0, 3)), data.draw(st.integers(0, sum(shards) - 1))
    memory.bytes[block * SLOT + place] ^= data.draw(st.integers(1, 255))
    assert np.flatnonzero(~holds(memory.region, whole)).tolist() == [block]


@given(SEEDS, SHARDS, STRIDES)
def test_bytes_of_another_block_never_pass(seed: int, shards: list[int], stride: int) -> None:
    memory = Memory(seed)
    made = memory.evidence(shards, stride)
    assert strides_of(made.checks).tolist() == [stride] * 4
    none = np.zeros(4, np.uint64)
    for offsets, keys, checks in (
        (made.offsets[::-1].copy(), made.keys, made.checks),
        (made.offsets, made.keys[::-1].copy(), made.checks),
        (made.offsets, made.keys, none),
    ):
        assert not holds(memory.region, Evidence(ENTRIES, offsets, shards, keys, checks)).any()


@given(SEEDS, STRIDES)
def test_missing_page_is_seen_with_any_stride(seed: int, stride: int) -> None:
    memory = Memory(seed)
    made = memory.evidence([SLOT], stride)
    memory.bytes[SLOT : SLOT + 4096] = 0
    assert holds(memory.region, made).tolist() == [True, False, True, True]


def test_ranges_outside_the_memory_are_refused() -> None:
    outside, stride, sums = np.array([3 * SLOT + 1]), np.ones(1, np.int64), np.zeros(1, np.uint64)
    with pytest.raises(ValueError, match="leave memory"):
        add_sums(Memory(0).region, outside, SLOT, 0, stride, sums)


@pytest.mark.parametrize(
    ("num_processors", "num_threads"), [(1, 1), (2, 1), (4, 2), (7, 3), (1000, MAX_SUM_THREADS)]
)
def test_sums_take_half_the_processors(
    monkeypatch: pytest.MonkeyPatch, num_processors: int, num_threads: int
) -> None:
    own = set(range(num_processors))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: own if pid == 0 else set())
    assert repr(SumThreads()) == f"SumThreads({num_threads})"
    assert repr(SumThreads(5)) == "SumThreads(5)"

"""Check values: kernel and reference agree; any change of a covered byte, of the key or of the
place in the slot is seen."""

import os
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_server.dataplane.plan import Region
from hotkv_server.integrity.check_values import sealed, strides_of
from hotkv_server.integrity.evidence import Evidence
from hotkv_server.integrity.sums import (
    MAX_SUM_THREADS,
    SumThreads,
    add_sums,
    holds,
)
from tests.oracles import sums as oracle

SLOT = 8192
ENTRIES = np.arange(4, dtype=np.uint32)
SHARDS = st.lists(st.integers(0, 3000), min_size=1, max_size=2).filter(any)
STRIDES = st.sampled_from([1, 2, 16, 64])


def region(memory: np.ndarray) -> Region:
    return Region(memory.ctypes.data, memory.nbytes, "memory")


def evidence(memory: np.ndarray, shards: list[int], stride: int, num_blocks: int) -> Evidence:
    """Check values as a store makes them: shard by shard."""
    offsets, sums, begin = (
        np.arange(num_blocks, dtype=np.int64) * SLOT,
        np.zeros(num_blocks, np.uint64),
        0,
    )
    for shard, num_bytes in enumerate(shards):
        add_sums(
            region(memory), offsets + begin, num_bytes, shard, np.full(num_blocks, stride), sums
        )
        begin += num_bytes
    keys = np.arange(1, num_blocks + 1, dtype=np.uint64) * np.uint64(0x1234_5678_9ABC_DEF1)
    return Evidence(ENTRIES, offsets, shards, keys, sealed(sums, keys, stride))


def random_memory(seed: int, num_blocks: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_blocks * SLOT, np.uint8)


@given(st.integers(0, 99), st.integers(0, SLOT), STRIDES, st.integers(0, 30))
def test_kernel_and_reference_agree(seed: int, num_bytes: int, stride: int, shift: int) -> None:
    memory = random_memory(seed, 5)
    offsets = np.arange(4, dtype=np.int64) * SLOT + shift
    kernel, reference = np.zeros(4, np.uint64), np.zeros(4, np.uint64)
    add_sums(region(memory), offsets, num_bytes, 1, np.full(4, stride), kernel)
    oracle.add_sums(region(memory), offsets, num_bytes, 1, np.full(4, stride), reference)
    assert kernel.tolist() == reference.tolist()


@given(st.integers(0, 99), st.integers(1, 9), st.integers(1, 5), STRIDES)
def test_several_threads_find_what_one_finds(
    seed: int, num_slots: int, num_threads: int, stride: int
) -> None:
    memory, offsets, strides = (
        random_memory(seed, num_slots),
        np.arange(num_slots, dtype=np.int64) * SLOT,
        np.full(num_slots, stride),
    )
    one, several = np.zeros(num_slots, np.uint64), np.zeros(num_slots, np.uint64)
    add_sums(region(memory), offsets, SLOT, 0, strides, one)
    threads = SumThreads(num_threads)
    with mock.patch("hotkv_server.integrity.sums.PART_BYTES", SLOT):
        threads.add_sums(region(memory), offsets, SLOT, 0, strides, several)
    threads.close()
    assert one.tolist() == several.tolist()


@given(st.integers(0, 99), SHARDS, st.data())
def test_any_changed_byte_is_seen_where_all_are_covered(
    seed: int, shards: list[int], data: st.DataObject
) -> None:
    memory = random_memory(seed)
    whole = evidence(memory, shards, 1, 4)
    assert holds(region(memory), whole).all()
    block, place = data.draw(st.integers(0, 3)), data.draw(st.integers(0, sum(shards) - 1))
    memory[block * SLOT + place] ^= data.draw(st.integers(1, 255))
    assert np.flatnonzero(~holds(region(memory), whole)).tolist() == [block]


@given(st.integers(0, 99), SHARDS, STRIDES)
def test_bytes_of_another_block_never_pass(seed: int, shards: list[int], stride: int) -> None:
    memory = random_memory(seed)
    made = evidence(memory, shards, stride, 4)
    assert strides_of(made.checks).tolist() == [stride] * 4
    swapped = Evidence(ENTRIES, made.offsets[::-1].copy(), shards, made.keys, made.checks)
    assert not holds(region(memory), swapped).any()
    renamed = Evidence(ENTRIES, made.offsets, shards, made.keys[::-1].copy(), made.checks)
    assert not holds(region(memory), renamed).any()


@given(st.integers(0, 99), STRIDES)
def test_a_missing_page_is_seen_with_any_stride_up_to_a_page(seed: int, stride: int) -> None:
    memory = random_memory(seed)
    made = evidence(memory, [SLOT], stride, 4)
    memory[SLOT : SLOT + 4096] = 0
    assert holds(region(memory), made).tolist() == [True, False, True, True]


def test_no_check_value_never_holds() -> None:
    memory = random_memory(0)
    made = evidence(memory, [100], 1, 4)
    assert not holds(
        region(memory), Evidence(ENTRIES, made.offsets, [100], made.keys, np.zeros(4, np.uint64))
    ).any()


def test_ranges_outside_the_memory_are_refused() -> None:
    memory = random_memory(0)
    with pytest.raises(ValueError, match="leave memory"):
        add_sums(
            region(memory),
            np.array([3 * SLOT + 1]),
            SLOT,
            0,
            np.ones(1, np.int64),
            np.zeros(1, np.uint64),
        )


@pytest.mark.parametrize(
    ("num_processors", "num_threads"), [(1, 1), (2, 1), (4, 2), (7, 3), (1000, MAX_SUM_THREADS)]
)
def test_sums_take_half_the_processors(
    monkeypatch: pytest.MonkeyPatch, num_processors: int, num_threads: int
) -> None:
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: set(range(num_processors)) if pid == 0 else set()
    )
    assert repr(SumThreads()) == f"SumThreads({num_threads})"
    assert repr(SumThreads(5)) == "SumThreads(5)"

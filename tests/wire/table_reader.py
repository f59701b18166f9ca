"""The reading process of `test_table_reader`, and its writer. Every record shows whether it is
whole: hash, depth, size, owner and check value follow from the key's number and the record's offset
word (`derived`)."""

import json
import mmap
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hotkv_proto import table
from hotkv_proto.table import (
    RESERVED_FLAG,
    SLOT_ALIGN,
    BlockTable,
    TableGeometry,
    Words,
    hash_prefixes,
    hash_words,
)
from hotkv_server.cache.table.index import BlockIndex

Words64 = NDArray[np.uint64]

HASH_BYTES = 32
KEY_SPACE, GROUP, SALT = 3, 1, 0x5EED_5EED_5EED_5EED
NUM_STABLE = 64
"""Key numbers 0 to 63 are always ready. The next `NUM_MOVING` are inserted and removed. The last
`NUM_ABSENT` are never inserted."""
NUM_MOVING = 500
NUM_ABSENT = 300
BATCH = 512


def spread(values: Words64) -> Words64:
    """Returns well mixed 64-bit words (the finisher of splitmix64)."""
    mixed = (values + np.uint64(1)) * np.uint64(0x9E37_79B9_7F4A_7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return mixed ^ (mixed >> np.uint64(31))


def packed_hashes(numbers: Words64) -> bytes:
    """Returns the hashes of key numbers, 32 bytes each."""
    return np.stack(
        [spread(numbers + np.uint64(part << 32)) for part in range(4)], axis=1
    ).tobytes()


def derived(numbers: Words64, offset_words: Words64) -> Words64:
    """Returns for each record the word from which its depth, size, owner and check value follow."""
    return spread((numbers << np.uint64(32)) ^ offset_words)


def read(block_table: BlockTable, num_batches: int, seed: int) -> Counter[str]:
    """Looks up batches of random keys with `probe` and with `find`. Returns counts.

    torn: records that contradict themselves.
    wrong: answers that are never right, such as an entry for a key that is never inserted.
    generations: the highest generation seen.
    """
    rng, counts = np.random.default_rng(seed), Counter[str]()
    capacity = block_table.geometry.capacity
    for _ in range(num_batches):
        numbers = rng.integers(0, NUM_STABLE + NUM_MOVING + NUM_ABSENT, BATCH).astype(np.uint64)
        packed = packed_hashes(numbers)
        absent, stable = numbers >= NUM_STABLE + NUM_MOVING, numbers < NUM_STABLE
        probed = block_table.probe(hash_prefixes(packed, HASH_BYTES), SALT)
        found, records = block_table.find(
            hash_words(packed, HASH_BYTES), SALT, KEY_SPACE, GROUP, with_records=True
        )
        for words in (probed, found):
            counts["wrong"] += np.count_nonzero(words[absent])
            counts["wrong"] += np.count_nonzero(words[stable] >= RESERVED_FLAG)
            counts["wrong"] += np.count_nonzero((words & ~RESERVED_FLAG) > capacity)
            counts["stable_finds"] += np.count_nonzero(words[stable])
            counts["stable_misses"] += np.count_nonzero(words[stable] == 0)
        hit = found != 0
        is_ready = hit & (found < RESERVED_FLAG)
        counts["ready"] += np.count_nonzero(is_ready)
        counts["reserved"] += np.count_nonzero(hit & ~is_ready)
        counts["misses"] += np.count_nonzero(~hit)
        mine = numbers[hit]
        counts["torn"] += int(torn(records[hit], mine, packed_hashes(mine), is_ready[hit]).sum())
        generation = int(records[hit, table.W_GENERATION].max(initial=0))
        counts["generations"] = max(counts["generations"], generation)
    return counts


def torn(
    records: Words, numbers: Words64, packed: bytes, ready: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Returns which records [n] differ from the writer's for these keys."""
    offsets, group_states = records[:, table.W_OFFSET], records[:, table.W_GROUP_STATE]
    truth = derived(numbers, offsets.astype(np.uint64))
    low = (truth & np.uint64(0xFFFF_FFFF)).astype(np.uint32)
    high = (truth >> np.uint64(32)).astype(np.uint32)
    states = np.where(ready, table.STATE_READY, table.STATE_RESERVED)
    whole = np.all(records[:, :8] == hash_words(packed, HASH_BYTES), axis=1)
    whole &= records[:, table.W_KEY_SPACE] == KEY_SPACE
    whole &= group_states == (GROUP | states << 16)
    whole &= records[:, table.W_DEPTH] == low >> np.uint32(1)
    whole &= records[:, table.W_SIZE] == offsets % 7 + 1
    whole &= records[:, table.W_CHECK] == np.where(ready, low, ~low)
    whole &= records[:, table.W_CHECK + 1] == np.where(ready, high, 0)
    return ~whole


def main(path: str, num_batches: int, seed: int, reference: bool) -> None:
    """Reads the file through a read-only mapping, as a client does. Prints the counts."""
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    block_table = BlockTable.open(np.frombuffer(mapping, np.uint8))
    if reference:
        block_table._kernels = None
    print(json.dumps(read(block_table, num_batches, seed), default=int))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "reference")


NUM_BUCKETS = 90
"""Buckets of 7 ways for 564 keys: chains overflow all the time."""


@pytest.fixture
def table_path(tmp_path: Path) -> Iterator[tuple[Path, BlockIndex]]:
    geometry = TableGeometry(NUM_BUCKETS, NUM_STABLE + NUM_MOVING, 1, 1 << 40)
    path = tmp_path / "table"
    with open(path, "w+b") as file:
        file.truncate(geometry.file_bytes)
        file.write(geometry.pack())
        file.flush()
        mapping = mmap.mmap(file.fileno(), geometry.file_bytes)
    index = BlockIndex(BlockTable.open(np.frombuffer(mapping, np.uint8)))
    index.add_key_space(KEY_SPACE, [0, SALT])
    yield path, index


class Writer:
    """Inserts, publishes and removes keys, in batches of random size."""

    def __init__(self, index: BlockIndex) -> None:
        self.index = index
        self.rng = np.random.default_rng(5)
        self.changes = 0
        moving = np.arange(NUM_STABLE, NUM_STABLE + NUM_MOVING, dtype=np.uint64)
        self.absent, self.reserved, self.ready = moving, moving[:0], moving[:0]
        self.entries = np.zeros(NUM_STABLE + NUM_MOVING, np.uint32)
        self.checks = np.zeros(NUM_STABLE + NUM_MOVING, np.uint64)
        stable = np.arange(NUM_STABLE, dtype=np.uint64)
        self.insert(stable)
        self.publish(stable)

    def insert(self, numbers: np.ndarray) -> None:
        """Inserts each key with a call, because depth, size and owner depend on it."""
        offset_words = self.rng.integers(1, 1 << 32, len(numbers)).astype(np.uint64)
        truth, one = derived(numbers, offset_words), np.ones(1, np.int64)
        lists = (numbers.tolist(), offset_words.tolist(), truth.tolist())
        for number, offset, check in zip(*lists, strict=True):
            hashes = hash_words(packed_hashes(np.array([number], np.uint64)), HASH_BYTES)
            low, size = check & 0xFFFF_FFFF, (offset % 7 + 1) * SLOT_ALIGN
            place, depth, owner = one * offset * SLOT_ALIGN, one * (low >> 1), ~low & 0xFFFF_FFFF
            entries = self.index.insert(KEY_SPACE, GROUP, hashes, place, size, depth, owner)
            assert len(entries) == 1
            self.entries[number], self.checks[number] = entries[0], check

    def publish(self, numbers: np.ndarray) -> None:
        entries = self.entries[numbers]
        self.index.publish(entries, self.index.mixed(entries), self.checks[numbers])

    def step(self) -> None:
        """Publishes some reserved keys, removes some ready keys, reserves some absent keys."""
        for name in ("absent", "reserved", "ready"):
            setattr(self, name, self.rng.permutation(getattr(self, name)))
        arriving, self.absent = np.split(self.absent, [self.rng.integers(0, 9)])
        settled, self.reserved = np.split(self.reserved, [self.rng.integers(0, 40)])
        going, self.ready = np.split(self.ready, [self.rng.integers(0, 2 + len(self.ready) // 30)])
        self.insert(arriving)
        self.publish(settled)
        gone = self.entries[going]
        self.index.remove(gone, self.index.mixed(gone))
        self.absent = np.concatenate((self.absent, going))
        self.reserved = np.concatenate((self.reserved, arriving))
        self.ready = np.concatenate((self.ready, settled))
        self.changes += len(arriving) + len(settled) + len(going)

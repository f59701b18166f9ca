"""The process that reads the block table in `test_table_reader`, and its writer."""

import json
import mmap
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hotkv_proto.table import (
    RESERVED_FLAG,
    SLOT_ALIGN,
    BlockTable,
    TableGeometry,
    hash_prefixes,
    hash_words,
)
from hotkv_server.cache.table.index import BlockIndex

Words64 = NDArray[np.uint64]

HASH_BYTES = 32
KEY_SPACE, GROUP, SALT = 3, 1, 0x5EED_5EED_5EED_5EED
NUM_STABLE = 64
"""The first keys are always ready, the next NUM_MOVING come and go, the last NUM_ABSENT never
come."""
NUM_MOVING = 500
NUM_ABSENT = 300
BATCH = 512


def spread(values: Words64) -> Words64:
    """The finisher of splitmix64."""
    mixed = (values + np.uint64(1)) * np.uint64(0x9E37_79B9_7F4A_7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return mixed ^ (mixed >> np.uint64(31))


def packed_hashes(numbers: Words64) -> bytes:
    return np.stack(
        [spread(numbers + np.uint64(part << 32)) for part in range(4)], axis=1
    ).tobytes()


def read(block_table: BlockTable, num_batches: int, seed: int, how: str) -> Counter[str]:
    """Counts of answers by kind. Wrong is, for example, an entry for a key that never comes.

    how: `kernel`: the compiled `probe` of clients and `find` of the server; else the Python
        `probe`.
    """
    rng, counts = np.random.default_rng(seed), Counter[str]()
    capacity = block_table.geometry.capacity
    for _ in range(num_batches):
        numbers = rng.integers(0, NUM_STABLE + NUM_MOVING + NUM_ABSENT, BATCH).astype(np.uint64)
        packed = packed_hashes(numbers)
        absent, stable = numbers >= NUM_STABLE + NUM_MOVING, numbers < NUM_STABLE
        answers = [block_table.probe(hash_prefixes(packed, HASH_BYTES), SALT)]
        if how == "kernel":
            hashes = hash_words(packed, HASH_BYTES)
            answers.append(block_table.find(hashes, SALT, KEY_SPACE, GROUP))
        for words in answers:
            counts["wrong"] += np.count_nonzero(words[absent])
            counts["wrong"] += np.count_nonzero(words[stable] >= RESERVED_FLAG)
            counts["wrong"] += np.count_nonzero((words & ~RESERVED_FLAG) > capacity)
            counts["stable_finds"] += np.count_nonzero(words[stable])
            counts["stable_misses"] += np.count_nonzero(words[stable] == 0)
            counts["ready"] += np.count_nonzero((words != 0) & (words < RESERVED_FLAG))
            counts["reserved"] += np.count_nonzero(words >= RESERVED_FLAG)
            counts["misses"] += np.count_nonzero(words == 0)
    return counts


def main(path: str, num_batches: int, seed: int, how: str) -> None:
    """Maps the file as a client does, and prints the counts."""
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    block_table = BlockTable.open(np.frombuffer(mapping, np.uint8))
    if how == "reference":
        block_table._kernels = None
    print(json.dumps(read(block_table, num_batches, seed, how), default=int))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])


NUM_BUCKETS = 90
"""Each has room for 7 of 564 keys, so they overflow all the time."""


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
    """Inserts and removes NUM_MOVING keys in batches of random size."""

    def __init__(self, index: BlockIndex) -> None:
        self.index = index
        self.rng = np.random.default_rng(5)
        self.changes = 0
        moving = np.arange(NUM_STABLE, NUM_STABLE + NUM_MOVING, dtype=np.uint64)
        self.absent, self.reserved, self.ready = moving, moving[:0], moving[:0]
        self.entries = np.zeros(NUM_STABLE + NUM_MOVING, np.uint32)
        stable = np.arange(NUM_STABLE, dtype=np.uint64)
        self.insert(stable)
        self.publish(stable)

    def insert(self, numbers: np.ndarray) -> None:
        hashes, zeros = hash_words(packed_hashes(numbers), HASH_BYTES), np.zeros(len(numbers), int)
        places = numbers.astype(np.int64) * SLOT_ALIGN
        entries = self.index.insert(KEY_SPACE, GROUP, hashes, places, SLOT_ALIGN, zeros, 1)
        assert len(entries) == len(numbers)
        self.entries[numbers] = entries

    def publish(self, numbers: np.ndarray) -> None:
        entries = self.entries[numbers]
        checks = np.zeros(len(entries), np.uint64)
        self.index.publish(entries, self.index.mixed(entries), checks)

    def step(self) -> None:
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

"""Another process reads the shared table under a live writer: millions of probes, no torn value."""

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hotkv_proto import native
from hotkv_proto.table import SLOT_ALIGN, BlockTable, TableGeometry, hash_words
from hotkv_server.cache.table.index import BlockIndex
from tests.wire import table_reader
from tests.wire.table_reader import (
    GROUP,
    HASH_BYTES,
    KEY_SPACE,
    NUM_MOVING,
    NUM_STABLE,
    SALT,
    derived,
    packed_hashes,
)

NUM_BUCKETS = 90
"""Of 7 ways for 564 keys: chains overflow all the time."""


@pytest.fixture
def table_path(tmp_path: Path) -> Iterator[tuple[Path, BlockIndex]]:
    """A table file on tmpfs where there is one, and its writer."""
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
    """Lets keys come, become ready and go, in batches of random size."""

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
        """One call each, because depth, size and owner are the key's own."""
        offset_words = self.rng.integers(1, 1 << 32, len(numbers)).astype(np.uint64)
        truth = derived(numbers, offset_words)
        for number, offset, check in zip(
            numbers.tolist(), offset_words.tolist(), truth.tolist(), strict=True
        ):
            hashes = hash_words(packed_hashes(np.array([number], np.uint64)), HASH_BYTES)
            low = check & 0xFFFF_FFFF
            one = np.ones(1, np.int64)
            size = (offset % 7 + 1) * SLOT_ALIGN
            entries = self.index.insert(
                KEY_SPACE,
                GROUP,
                hashes,
                one * offset * SLOT_ALIGN,
                size,
                one * (low >> 1),
                ~low & 0xFFFF_FFFF,
            )
            assert len(entries) == 1
            self.entries[number], self.checks[number] = entries[0], check

    def publish(self, numbers: np.ndarray) -> None:
        entries = self.entries[numbers]
        self.index.publish(entries, self.index.mixed(entries), self.checks[numbers])

    def step(self) -> None:
        """Some reserved keys become ready, some ready ones go, some absent ones are reserved."""
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


def start_reader(path: Path, num_batches: int, seed: int, how: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(entry or os.curdir for entry in sys.path)
    }
    command = [sys.executable, table_reader.__file__, str(path), str(num_batches), str(seed), how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize(
    ("how", "num_batches"),
    [
        pytest.param(
            "kernel", 3000, marks=pytest.mark.skipif(not native.available(), reason="needs numba")
        ),
        ("reference", 60),
    ],
)
def test_a_reader_in_another_process_never_sees_a_torn_value(
    table_path: tuple[Path, BlockIndex], how: str, num_batches: int
) -> None:
    path, index = table_path
    writer = Writer(index)
    reader = start_reader(path, num_batches, 11, how)
    try:
        while reader.poll() is None:
            for _ in range(50):
                writer.step()
        output = reader.communicate()[0]
    finally:
        reader.kill()
        reader.wait()
    assert reader.returncode == 0
    counts = json.loads(output)
    print(how, counts, f"changes={writer.changes}")
    index.check_invariants()
    assert counts["torn"] == 0 and counts["wrong"] == 0
    assert counts["probes"] == counts["finds"] == num_batches * table_reader.BATCH
    assert min(counts["ready"], counts["reserved"], counts["misses"]) > 0, (
        "the reader has not seen all there is to see"
    )
    assert writer.changes > 1000 and counts["generations"] > 1, "the writer stood still"
    # A miss of a block that is there is allowed, where the writer was interrupted inside its
    # bucket, and rare.
    assert counts["stable_misses"] <= counts["stable_finds"] // 20

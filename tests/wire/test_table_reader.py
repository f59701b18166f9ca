"""Tests lookups by another process while this one writes the block table, and by
`foreign_client`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hotkv_proto import native, table
from hotkv_proto.table import BlockTable, hash_prefixes
from hotkv_server.cache.table.index import BlockIndex
from tests.wire import foreign_client, table_reader
from tests.wire.table_reader import (
    GROUP,
    HASH_BYTES,
    KEY_SPACE,
    NUM_ABSENT,
    NUM_MOVING,
    NUM_STABLE,
    SALT,
    Writer,
    packed_hashes,
    table_path,
)

__all__ = ["table_path"]


def start_reader(path: Path, num_batches: int, seed: int, how: str) -> subprocess.Popen[str]:
    python_path = os.pathsep.join(entry or os.curdir for entry in sys.path)
    command = [sys.executable, table_reader.__file__, str(path), str(num_batches), str(seed), how]
    environment = os.environ | {"PYTHONPATH": python_path}
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
def test_reader_in_another_process_gets_right_answers(
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
    assert counts["wrong"] == 0
    assert min(counts["ready"], counts["reserved"], counts["misses"]) > 0, (
        "the reader has not seen all there is to see"
    )
    assert writer.changes > 1000, "the writer stood still"
    # A block is missed only if the writer is interrupted within its bucket. If it stays stopped,
    # that is one bucket: 8 % at most.
    assert counts["stable_misses"] <= counts["stable_finds"] // 8


def test_the_foreign_clients_lookup_agrees(table_path: tuple[Path, BlockIndex]) -> None:
    """A bucket that a writer has locked is a miss."""
    path, index = table_path
    writer = Writer(index)
    numbers = np.arange(NUM_STABLE + NUM_MOVING + NUM_ABSENT, dtype=np.uint64)
    packed = packed_hashes(numbers)
    hashes = [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]
    seen = set()
    with open(path, "rb") as file:
        foreign = foreign_client.Table(file.fileno(), path.stat().st_size)
        for _ in range(3):
            for _ in range(100):
                writer.step()
            words = index.table.probe(hash_prefixes(packed, HASH_BYTES), SALT)
            assert [foreign.word(block_hash, SALT) for block_hash in hashes] == words.tolist()
            for block_hash, word in zip(hashes, words.tolist(), strict=True):
                seen.add((word != 0, word >= foreign_client.RESERVED_FLAG))
                if word:
                    record = foreign.record(word)
                    assert np.array(record[:8], "<u4").tobytes() == block_hash
                    assert (record[10], record[11] & 0xFFFF) == (KEY_SPACE, GROUP)
        assert index.table.buckets[:, table.OVERFLOW].max() > 0, "no chain has overflowed"
        index.table.buckets[:, table.SEQ] += 1
        assert foreign.word(hashes[0], SALT) == 0
    assert seen == {(False, False), (True, False), (True, True)}


def test_a_table_of_another_version_is_refused(table_path: tuple[Path, BlockIndex]) -> None:
    packed = bytearray(table_path[0].read_bytes())
    packed[8] += 1
    with pytest.raises(ValueError, match="block table has magic"):
        BlockTable.open(np.frombuffer(packed, np.uint8))

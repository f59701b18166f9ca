"""The foreign client's lookup, written from docs/wire.md, answers as the library does, in a table
whose chains overflow all the time."""

from pathlib import Path

import numpy as np
import pytest

from hotkv_proto import table
from hotkv_proto.table import BlockTable, hash_prefixes
from hotkv_server.cache.table.index import BlockIndex
from tests.wire import foreign_client
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

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "wire.md").read_text()
SECTION = PAGE.partition("\n## Block table\n")[2].partition("\n## ")[0]


def test_lookups_agree(table_path: tuple[Path, BlockIndex]) -> None:
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
    assert seen == {(False, False), (True, False), (True, True)}
    overflow = index.table.buckets[:, table.OVERFLOW]
    assert overflow.max() > 0, "no chain has overflowed"


def test_a_locked_bucket_reads_as_a_miss(table_path: tuple[Path, BlockIndex]) -> None:
    path, index = table_path
    Writer(index)
    block_hash = packed_hashes(np.zeros(1, np.uint64))
    with open(path, "rb") as file:
        foreign = foreign_client.Table(file.fileno(), path.stat().st_size)
        assert foreign.is_ready(block_hash, SALT)
        index.table.buckets[:, table.SEQ] += 1
        assert foreign.word(block_hash, SALT) == 0
        index.table.buckets[:, table.SEQ] += 1
        assert foreign.is_ready(block_hash, SALT)


@pytest.mark.parametrize(("at", "value"), [(0, b"HOTKVTB2"), (8, b"\x02")])
def test_a_table_of_another_format_is_refused(
    table_path: tuple[Path, BlockIndex],
    at: int,
    value: bytes,
) -> None:
    path, _ = table_path
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(value)
        file.flush()
        with pytest.raises(AssertionError):
            foreign_client.Table(file.fileno(), path.stat().st_size)
        with pytest.raises(ValueError):
            BlockTable.open(np.fromfile(path, np.uint8))


def test_the_page_has_the_numbers_of_the_code() -> None:
    assert f"magic `{table.MAGIC.decode()}`" in SECTION
    assert f"format version (uint32, {table.FORMAT_VERSION})" in SECTION
    assert f"0x{int(table._MULTIPLIER):X}" in SECTION
    assert f"through {table.MAX_PROBE_BUCKETS} buckets at most" in SECTION
    assert f"{table._MAX_RETRIES} attempts" in SECTION
    assert f"| header | {table.HEADER_BYTES} |" in SECTION
    assert f"| buckets | {4 * table.BUCKET_WORDS} × `num_buckets` |" in SECTION
    assert f"| records | {4 * table.RECORD_WORDS} × (`capacity` + 1) |" in SECTION
    assert f"in units of {table.SLOT_ALIGN} bytes" in SECTION
    states = (table.STATE_RESERVED, table.STATE_READY, table.STATE_DETACHED)
    assert "({} reserved, {} ready, {} detached)".format(*states) in SECTION

"""Records of the block table get memory from the first on: those reported to have memory have it,
and all have it in the end.
"""

import os
from pathlib import Path

import pytest

from demo.processes import runtime_folder
from hotkv_proto.table import RECORD_WORDS, TableGeometry
from hotkv_server.memory import arena as arena_module
from hotkv_server.memory.arena import NodeMemory, RecordsMemory

ARENA, SLAB, CAPACITY = 1 << 20, 1 << 16, 5000


def allocated_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_records_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "PIECE_ENTRIES", 2000)
    geometry = TableGeometry.for_capacity(CAPACITY, 1, ARENA)
    with runtime_folder(1 << 24) as folder:
        fd = os.open(folder / "table", os.O_RDWR | os.O_CREAT)
        os.truncate(fd, geometry.file_bytes)
        records = RecordsMemory(fd, geometry, 0)
        for expected in (2000, 4000, CAPACITY):
            assert not records.is_done
            assert next(iter(records.back_rest())) == records.num_entries == expected
            assert (
                expected * RECORD_WORDS * 4
                <= allocated_bytes(fd)
                <= (expected + 1) * RECORD_WORDS * 4 + 2 * 4096
            )
        assert records.is_done and not list(records.back_rest())
        os.close(fd)


def test_memory_that_runs_short_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    geometry = TableGeometry.for_capacity(CAPACITY, 1, ARENA)
    fd = os.open(tmp_path / "table", os.O_RDWR | os.O_CREAT)
    records = RecordsMemory(fd, geometry, 0)
    records.back(10)

    def refuse(*args: object) -> None:
        raise OSError("short")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="short"):
        next(records.back_rest())
    assert records.num_entries == 10
    records.back(5)
    assert records.num_entries == 10
    os.close(fd)


def test_a_start_brings_in_some_records_and_all_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotkv_server.memory.arena.FIRST_ENTRIES", 1000)
    with runtime_folder(1 << 24) as folder:
        memory = NodeMemory.open(folder / "arena", ARENA, SLAB, CAPACITY, 7)
        geometry = memory.table.geometry
        assert memory.records.num_entries == 1000 and memory.table_file.has_holes()
        assert (
            allocated_bytes(memory.table_file.fd)
            >= geometry.records_offset_bytes + 1000 * RECORD_WORDS * 4
        )
        assert [*memory.records.back_rest()] == [CAPACITY] and not memory.table_file.has_holes()
        memory.remove()
        lazy = NodeMemory.open(folder / "lazy", ARENA, SLAB, CAPACITY, 7, prefault=False)
        assert lazy.records.is_done, "nothing is brought in, and nothing is held back"
        lazy.remove()

"""Tests `LowerMemory`, a disk tier's records. The slab size of the first server stays, so the
next one finds the blocks."""

import errno
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from bench.policies.lru import LRU
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.room.space import Space
from hotkv_server.memory.state import KnownKeySpace, ServerState, write_state
from hotkv_server.settings.tiers import MAX_DISK_BYTES, DiskSettings, TierSettings
from hotkv_server.tiers.drive import records
from hotkv_server.tiers.drive.breaker import MAX_STALL_S
from hotkv_server.tiers.drive.records import LowerMemory
from tests.core.support import make_key_space, make_table, words_of
from tests.support.waiting import wait_for

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RETRY_S", 0.05)


@contextmanager
def opened(
    folder: Path, num_mib: int, slab_mib: int, *, reset: bool = False
) -> Iterator[LowerMemory]:
    made = LowerMemory.open(folder, num_mib * MIB, slab_mib * MIB, 100, reset=reset)
    try:
        yield made
    finally:
        made.close()


def left(folder: Path) -> None:
    """Leaves the files of a server with slabs of 4 MiB."""
    with opened(folder, 64, 4) as made:
        made.start(1, ServerState(made.slab_bytes))


def test_slabs_stay_as_large_as_they_were(tmp_path: Path) -> None:
    left(tmp_path)
    with opened(tmp_path, 70, 16) as made:
        assert made.old is not None and not made.why_empty
        assert (made.slab_bytes, made.num_bytes) == (4 * MIB, 68 * MIB)
        made.start(1, ServerState(made.slab_bytes))
    with opened(tmp_path, 70, 16, reset=True) as made:
        assert made.old is None and not made.why_empty
        assert (made.slab_bytes, made.num_bytes) == (16 * MIB, 64 * MIB)


@pytest.mark.parametrize("slab_bytes", [0, -4096, 4096 + 512, 128 * MIB])
def test_slabs_that_cannot_be_are_not_taken_over(tmp_path: Path, slab_bytes: int) -> None:
    left(tmp_path)
    write_state(tmp_path / "state.json", ServerState(slab_bytes))
    with opened(tmp_path, 64, 16) as made:
        assert made.old is None and f"slabs were of {slab_bytes} bytes" in made.why_empty
        assert made.slab_bytes == 16 * MIB
    (tmp_path / "records.new").unlink()
    (tmp_path / "records.new").mkdir()
    for match in (r"records\.new", "no regular file, so remove it: .*lock"):
        with pytest.raises(OSError, match=match):
            LowerMemory.open(tmp_path, 64 * MIB, 16 * MIB, 100)
        (tmp_path / "lock").unlink()
        os.mkfifo(tmp_path / "lock")


@pytest.mark.parametrize(
    "disk_bytes, slab_mib",
    [(16 * MIB, 4), (4 * GIB - 1, 4), (4 * GIB, 8), (100 * GIB, 128), (2000 * GIB, 256)],
)
def test_slabs_of_a_new_disk_are_large(disk_bytes: int, slab_mib: int) -> None:
    settings = TierSettings(disk=DiskSettings(bytes=disk_bytes))  # type: ignore[call-arg, arg-type]
    assert settings.slab_bytes == slab_mib * MIB


def test_disk_is_no_larger_than_its_records() -> None:
    """A record has 32 bits for a place on the disk; the settings must refuse a larger disk."""
    most = DiskSettings.model_validate({"bytes": MAX_DISK_BYTES})
    space = Space(make_table(8), most.bytes, 256 * MIB, LRU(8))
    offsets = np.array([most.bytes - SLOT_ALIGN])
    entries = space.index.insert(1, 0, words_of([1]), offsets, SLOT_ALIGN, np.zeros(1, np.int64), 1)
    assert space.index.offsets(entries) == offsets
    with pytest.raises(ValueError, match="less than or equal"):
        DiskSettings.model_validate({"bytes": MAX_DISK_BYTES + 1})


def test_file_system_without_holes_loses_no_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with opened(tmp_path, 64, 4) as made:
        made.table.records[7] = 7
        made.start(1, ServerState(made.slab_bytes))
    monkeypatch.setattr(os, "lseek", refuse)
    with opened(tmp_path, 64, 4) as again:
        assert again.old is not None and (again.old.records[7] == 7).all()


def test_changes_are_in_the_file_once_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "RETRY_S", 3600.0)
    with opened(tmp_path, 64, 4) as made:
        made.start(1, ServerState(made.slab_bytes))
        made.written().result(60)
        assert made.kept_revision == 1
        for entry, told in ((3, True), (7, False)):
            made.table.records[entry, :] = entry
            if told:
                made.changed(np.array([entry], np.uint32))
            made.keep(entry, ServerState(made.slab_bytes))
            made.written().result(60)
            assert made.kept_revision == entry and made.num_changed == made.num_saved
        assert not made.problem and made.is_alive()
        # The change must be saved without a call of `changed`.
        made.table.records[9, :] = 9
        record = made.table.records[9].tobytes()
        wait_for(lambda: record in (tmp_path / "records").read_bytes(), "it is not found")
    with opened(tmp_path, 64, 4) as again:
        assert again.old is not None
        found = again.old.records
        assert (found[3] == 3).all() and (found[7] == 7).all() and not found[5].any()


def test_file_gets_its_name_after_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, on XFS, a power loss may leave an empty file."""
    fsync, replace = os.fsync, Path.replace
    synced: set[int] = set()
    named: list[tuple[str, bool]] = []

    def noted(fd: int) -> None:
        fsync(fd)
        synced.add(os.fstat(fd).st_ino)

    def checked(self: Path, target: Path) -> Path:
        named.append((target.name, self.stat().st_ino in synced))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "replace", checked)
    left(tmp_path)
    assert named == [("records", True), ("state.json", True)]


def test_large_table_on_slow_disk_is_no_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, pwrite = os.fsync, os.pwrite
    now_s, unsynced_s, stalls = 1.0, 0.0, [0.0]

    def written(fd: int, content: bytes, at: int) -> int:
        nonlocal now_s, unsynced_s
        now_s, unsynced_s = now_s + 0.001, unsynced_s + 0.002
        return pwrite(fd, content, at)

    def synced(fd: int) -> None:
        nonlocal now_s, unsynced_s
        now_s, unsynced_s = now_s + unsynced_s, 0.0
        stalls.append(made.stalled_s(now_s))
        fsync(fd)

    monkeypatch.setattr(os, "pwrite", written)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(records, "time", SimpleNamespace(monotonic=lambda: now_s))
    made = LowerMemory.open(tmp_path, 64 * MIB, 4 * MIB, 1 << 20)
    made.table.records[:] = 1
    made.start(1, ServerState(made.slab_bytes))
    made.close()
    assert len(stalls) > 4 and max(stalls) < MAX_STALL_S


def test_a_start_moves_only_parts_with_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, preadv, num_written, num_read = os.pwrite, os.preadv, 0, 0

    def written(fd: int, content: bytes, at: int) -> int:
        nonlocal num_written
        num_written += len(content)
        return pwrite(fd, content, at)

    def read(fd: int, buffers: list[memoryview], at: int) -> int:
        nonlocal num_read
        num_read += (count := preadv(fd, buffers, at))
        return count

    monkeypatch.setattr(os, "pwrite", written)
    made = LowerMemory.open(tmp_path, 64 * MIB, 4 * MIB, 1 << 20)
    made.table.records[1 << 19] = 7
    geometry = made.table.geometry
    made.start(1, ServerState(made.slab_bytes))
    made.close()
    assert num_written <= 4 * records.PART_BYTES
    monkeypatch.setattr(os, "preadv", read)
    with opened(tmp_path, 64, 4) as again:
        assert again.old is not None and np.array_equal(again.old.records, made.table.records)
        assert 0 < num_read <= 4 * records.PART_BYTES
    path = tmp_path / records.TABLE_FILE
    content = np.fromfile(path, np.uint8)
    assert len(content) == geometry.file_bytes and np.array_equal(content, made._bytes)
    # Disk space is allocated for all records.
    assert path.stat().st_blocks * 512 >= geometry.file_bytes - geometry.records_offset_bytes


def test_long_search_of_large_table_is_no_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, stalls, digest = 1.0, [0.0], xxhash.xxh3_64_intdigest

    def slow_digest(content: Any) -> int:
        nonlocal now_s
        now_s += 0.01
        stalls.append(made.stalled_s(now_s))
        return digest(content)

    made = LowerMemory.open(tmp_path, 64 * MIB, 4 * MIB, 1 << 20)
    monkeypatch.setattr(records, "time", SimpleNamespace(monotonic=lambda: now_s))
    made.start(1, ServerState(made.slab_bytes))
    made.written().result(60)
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", slow_digest)
    made.written().result(60)
    made.close()
    assert len(stalls) > 1000 and max(stalls) < MAX_STALL_S


@pytest.mark.parametrize("number, is_usable", [(1, True), (3, True), (2, False)])
def test_killed_start_keeps_blocks_of_equal_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_usable: bool
) -> None:
    first, second = (
        KnownKeySpace(n, make_key_space(f"m{n}", SLOT_ALIGN, SLOT_ALIGN)) for n in (1, 2)
    )

    def state(*known: KnownKeySpace) -> ServerState:
        return ServerState(4 * MIB, known)

    with opened(tmp_path, 64, 4) as made:
        made.start(1, state(first, second))
    with monkeypatch.context() as killed:
        gone = threading.Event()

        def hang(*_: object, **__: object) -> None:
            gone.set()
            threading.Event().wait()

        killed.setattr(records, "write_state", hang)
        with monkeypatch.context() as at_once:
            at_once.setattr(records, "CLOSE_WAIT_S", 0.0)
            with opened(tmp_path, 64, 4) as made:
                made.start(1, state(replace(first, number=number)))
                assert gone.wait(60)
        os.close(made._lock_fd)
    with opened(tmp_path, 64, 4) as again:
        assert (again.old is not None) == is_usable


def test_records_do_not_wait_for_byte_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def lines() -> list[str]:
        """The records' lines, not those of other threads."""
        return [one.getMessage() for one in caplog.records if one.name == records.log.name]

    with opened(tmp_path, 64, 4) as made:
        made.start(1, ServerState(made.slab_bytes))
        made.written().result(60)
        (tmp_path / "written.json.new").mkdir()
        made.keep_written([(0.0, 0), (1.5, 1)])
        for entry in (3, 4, 5):
            made.table.records[entry, :] = entry
            made.changed(np.array([entry], np.uint32))
            made.written().result(60)
            assert made.num_changed == made.num_saved
        assert "written.json" in made.problem
        assert len(lines()) == 1, "more than one line for the same problem"
        (tmp_path / "written.json.new").rmdir()
        wait_for(lambda: not made.problem, "the note is not written")
        assert made.read_written() == [(0.0, 0), (1.5, 1)]
    assert [line.partition(": ")[2][:19] for line in lines()] == [
        "records not written",
        "records are written",
    ]


@pytest.mark.parametrize("raises", [False, True])
def test_records_of_a_failed_write_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    def refuse(*_: Any) -> int:
        if raises:
            raise MemoryError
        return os.pwritev(failing, [b""], -1)

    with opened(tmp_path, 64, 4) as made:
        made.start(1, ServerState(made.slab_bytes))
        made.written().result(60)
        failing = os.open(tmp_path / "records", os.O_RDONLY)
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", refuse)
            asked = made.written()
            for _ in range(3):
                made.table.records[7, :] += 7
                made.changed(np.array([7], np.uint32))
            wait_for(lambda: bool(made.problem), "the write does not fail")
            wait_for(lambda: not made._changed, "changes of a write that failed are kept")
        os.close(failing)
        asked.result(60)
        assert made.num_changed == made.num_saved == 3

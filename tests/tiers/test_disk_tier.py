"""Tests the disk tier on real files, with direct and buffered I/O: `tier_contract`; and on a
disk that fails, is slow or hangs each call ends once, after the disk has stopped using its
slots."""

import contextlib
import errno
import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.tiers.disk import calls
from hotkv_server.tiers.disk import tier as disk_tier
from hotkv_server.tiers.disk.slab_file import SlabFile
from hotkv_server.tiers.disk.tier import NUM_THREADS, DiskTier
from hotkv_server.tiers.protocol import (
    Codes,
    Int64s,
    PlacedBlocks,
    Read,
    Write,
)
from tests.contracts.tier_contract import (
    ARENA_BYTES,
    SLOT_BYTES,
    SLOTS,
    WAIT_S,
    Bench,
    TierRig,
    check_tier,
    content,
)
from tests.doubles.faulty_disk import EVERYWHERE, Fault
from tests.support.waiting import wait_for
from tests.tiers.disks import disk, memory, region, shm_folder
from tests.tiers.support import Asked

STORED, FULL, FAILED = int(Write.STORED), int(Write.FULL), int(Write.FAILED)


@pytest.mark.parametrize("num_threads", [1, 8])
@pytest.mark.parametrize("direct", [True, False])
def test_every_policy_keeps_the_contract(tmp_path: Path, direct: bool, num_threads: int) -> None:
    count = iter(range(1000))

    @contextlib.contextmanager
    def rig() -> Iterator[TierRig]:
        with contextlib.ExitStack() as stack:
            folder = tmp_path / str(next(count))
            if not direct:
                folder = stack.enter_context(shm_folder())
            made = stack.enter_context(disk(folder, direct=direct,
                                            num_threads=num_threads))  # fmt: skip
            assert made.file.is_direct == direct
            yield made.rig()

    check_tier(rig, seed=num_threads)


def test_what_was_written_outlives_the_tier(tmp_path: Path) -> None:
    with disk(tmp_path) as made:
        seals = made.stored([1, 2, 3]).seals
    with disk(tmp_path, num_bytes=2 * ARENA_BYTES) as made:
        Bench(made.rig(), seals).check_read([1, 2, 3], [7, 8, 9])
    with disk(tmp_path, num_bytes=3 * SLOT_BYTES) as made:
        bench = Bench(made.rig(), seals)
        codes = bench.read([1, 2, 3], [7, 8, 9]).tolist()
        assert codes == [Read.FOUND, Read.FOUND, Read.CORRUPT]


def test_shortened_file_loses_only_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with disk(tmp_path) as made:
        bench = made.stored([1, 2, 3])
        # In the middle of block 2, and of a sector.
        os.truncate(made.file.path, 2 * SLOT_BYTES + 777)
        codes = bench.read([1, 2, 3], [7, 8, 9]).tolist()
        assert codes == [Read.FOUND, Read.CORRUPT, Read.CORRUPT]
        assert caplog.text.count("was cut to") == 1
        assert made.file.path.stat().st_size == ARENA_BYTES
        assert not made.tier.problem()
        bench.fill([2], [5])
        assert bench.write([2], [5]).tolist() == [STORED]
        bench.check_read([1, 2], [8, 9])


def test_blocks_outside_arena_and_file_fail_alone(tmp_path: Path) -> None:
    with disk(tmp_path, num_bytes=32 * SLOT_BYTES) as made:
        bench = made.stored([0, 1, 2])
        size = made.file.path.stat().st_size
        assert bench.read([1, 2], [SLOTS, 5]).tolist() == [FAILED, Read.FOUND]
        assert bench.read([1, 2], [0, -1]).tolist() == [Read.FOUND, FAILED]
        bench.fill([40, 3], [40, 3])
        assert bench.write([40, 3], [40, 3]).tolist() == [FAILED, STORED]
        assert bench.write([3, 3], [SLOTS - 1, SLOTS]).tolist() == [STORED, FAILED]
        assert bench.answer(bench.blocks([3], [3], [0]))[0].tolist() == [FAILED]
        assert made.file.path.stat().st_size == size
        # A checksum, but never written.
        bench.seals[40] = 1
        assert bench.read([40], [5]).tolist() == [Read.CORRUPT]


def test_it_names_its_problem(tmp_path: Path) -> None:
    with disk(tmp_path, num_threads=3) as made:
        bench = made.stored([1])
        for _ in range(9):
            assert bench.read([1], [5], within_s=-1.0).tolist() == [FAILED]
        assert not made.tier.problem(), "nobody waited for these"
        made.io.writes[EVERYWHERE] = Fault(code=errno.EROFS)
        for _ in range(3):
            assert not made.tier.problem()
            assert bench.write([2], [2]).tolist() == [FAILED]
        problem = made.tier.problem()
        assert "the last 3 calls failed" in problem and "EROFS" in problem
        assert str(made.file.path) in problem
        bench.check_read([1], [5])
        assert not made.tier.problem()


HANGS = Fault(hangs=True)


@pytest.mark.parametrize(
    ("fault", "written", "read"),
    [
        *(
            (Fault(code=code), FAILED, Read.CORRUPT)
            for code in (errno.EIO, errno.EROFS, errno.EINVAL)
        ),
        *(
            (Fault(code=code), FULL, Read.CORRUPT)
            for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        ),
        *(
            (Fault(moved_bytes=moved), FAILED, Read.CORRUPT)
            for moved in (0, SLOT_ALIGN, SLOT_BYTES - SLOT_ALIGN)
        ),
    ],
)
def test_a_fault_costs_its_block_only(
    tmp_path: Path, fault: Fault, written: int, read: int
) -> None:
    with disk(tmp_path) as made:
        bench, numbers = Bench(made.rig()), [1, 2, 3]
        bench.fill(numbers, numbers)
        made.io.writes[2 * SLOT_BYTES] = fault
        codes, seals = bench.answer(bench.blocks(numbers, numbers))
        assert codes.tolist() == [STORED, written, STORED]
        assert (seals > 0).tolist() == [True, False, True]
        for _ in range(3):
            assert bench.write([2], [2]).tolist() == [written]
        assert bool(made.tier.problem()) == (written == FAILED and bool(fault.code))
        made.io.heal()
        assert bench.write(numbers, numbers).tolist() == [STORED] * 3 and not made.tier.problem()
        bench.arena[:] = 0
        # By chance slot 8 has block 2 already.
        bench.fill([2], [8])
        made.io.reads[2 * SLOT_BYTES] = fault
        assert bench.read(numbers, [7, 8, 9]).tolist() == [Read.FOUND, read, Read.FOUND]
        # The tier reads elsewhere too, to tell a bad place from a bad disk.
        assert bench.read([2], [8]).tolist() == [read]
        made.io.reads[EVERYWHERE] = made.io.reads.pop(2 * SLOT_BYTES)
        assert bench.read([2], [8]).tolist() == [FAILED if fault.code else read]
        assert np.array_equal(bench.slot(9), content(3))
        figures = made.tier.figures()
        assert (figures.written_blocks, figures.read_blocks) == (5, 2)
        assert figures.failed_blocks == 4 * (written == FAILED) + bool(fault.code)
        assert figures.corrupt_blocks == 2 + (not fault.code)
        assert figures.read_bytes == 2 * SLOT_BYTES


def test_page_cache_does_not_hide_dead_disk(tmp_path: Path) -> None:
    with disk(tmp_path, direct=False) as made:
        bench = made.stored([0, 2])
        os.fsync(made.file.fd)
        made.io.reads[EVERYWHERE] = Fault(code=errno.EIO)
        made.io.cached |= {0, ARENA_BYTES - SLOT_ALIGN}
        assert bench.read([0, 2], [5, 6]).tolist() == [Read.FOUND, FAILED]
        assert not made.io.cached, "the tier did not drop the file's pages"

        def is_dropped() -> bool:
            # The kernel keeps pages in use.
            made.io.under.drop_cached()
            try:
                os.preadv(made.file.fd, [bytearray(SLOT_ALIGN)], 0, os.RWF_NOWAIT)
            except OSError:
                return True
            return False

        wait_for(is_dropped)
        made.io.heal()
        made.io.reads[2 * SLOT_BYTES] = Fault(code=errno.EIO)
        assert bench.read([0, 2], [5, 6]).tolist() == [Read.FOUND, Read.CORRUPT]


def test_reads_go_on_while_writes_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes hang in three of four threads."""
    monkeypatch.setattr(calls, "MAX_PIECE_BYTES", SLOT_BYTES)
    with disk(tmp_path, num_threads=4) as made:
        bench = made.stored([1, 2])
        asked = Asked(bench)
        made.io.writes[EVERYWHERE] = HANGS
        asked.write("all", range(10, 30))
        made.io.wait_hung(3)
        now_s = time.monotonic()
        assert 9 <= made.tier.stalled_s(now_s + 10) < 20
        assert made.tier.stalled_s(now_s - 10) == 0
        for _ in range(20):
            bench.check_read([1, 2], [5, 6])
        assert made.io.num_hung == 3
        assert made.tier.figures().queued_bytes == 20 * SLOT_BYTES
        made.io.heal()
        assert asked.wait("all") == [STORED] * 20
        wait_for(lambda: made.tier.stalled_s(now_s + 10) == 0, "the stall did not end")
        assert made.tier.figures().queued_bytes == 0


def test_slow_disk_that_answers_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer begins the disk's stall anew."""
    monkeypatch.setattr(disk_tier, "SLOW_BYTES_PER_S", math.inf)
    with disk(tmp_path, num_threads=2) as made:
        bench = made.stored([1, 2])
        asked = Asked(bench)
        made.io.reads[SLOT_BYTES] = HANGS
        asked.read("slow", [1], [5])
        made.io.wait_hung(1)
        began_s = time.monotonic()
        assert made.tier.stalled_s(began_s + 10) >= 10
        bench.check_read([2], [6])
        assert made.tier.stalled_s(began_s + 10) < 10
        made.io.heal()
        assert asked.wait("slow") == [Read.FOUND]


def test_large_block_has_time_on_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a read of 100 s would be given up and begun again for ever."""
    with disk(tmp_path) as made:
        asked = Asked(made.stored([1]))
        monkeypatch.setattr(disk_tier, "SLOW_BYTES_PER_S", SLOT_BYTES / 100)
        made.io.reads[EVERYWHERE] = HANGS
        asked.read("large", [1], [5])
        made.io.wait_hung(1)
        now_s = time.monotonic()
        assert made.tier.stalled_s(now_s + 50) == 0
        assert made.tier.stalled_s(now_s + 150) >= 50


class NoDisk:
    """Takes 20 ms a block. `most_bytes`: under way at the same time."""

    def __init__(self) -> None:
        self._changed, self._num_bytes, self.most_bytes = threading.Lock(), 0, 0

    def read_many(self, addresses: Int64s, offsets: Int64s, sizes: Int64s) -> Int64s:
        for size in sizes.tolist():
            with self._changed:
                self._num_bytes += size
                self.most_bytes = max(self.most_bytes, self._num_bytes)
            time.sleep(0.02)
            with self._changed:
                self._num_bytes -= size
        return sizes.copy()

    write_many = read_many

    def drop_cached(self) -> None:
        pass


@pytest.mark.parametrize("is_write", [False, True])
def test_few_large_blocks_are_moved_at_a_time(tmp_path: Path, is_write: bool) -> None:
    # Else each call would take so long that a slow disk seems to hang.
    size, count, io = 8 << 20, 24, NoDisk()
    arena, ended = memory(count * size), list[Codes]()
    file = SlabFile.open(tmp_path, size)
    at, sizes, zeros = size * np.arange(count), np.full(count, size), np.zeros(count, int)
    seals = zeros.astype(np.uint64)
    blocks = PlacedBlocks([b"%d" % n for n in range(count)], at, sizes, zeros, sizes, seals)
    with contextlib.closing(DiskTier(region(arena), file, io=io)) as tier:
        if is_write:
            tier.write(blocks, lambda codes, seals: ended.append(codes))
        else:
            tier.read(blocks, time.monotonic() + WAIT_S, ended.append)
        wait_for(lambda: bool(ended), "the call did not end")
    assert io.most_bytes <= NUM_THREADS * calls.MAX_PIECE_BYTES


def test_read_ends_at_deadline_while_disk_hangs(tmp_path: Path) -> None:
    with disk(tmp_path, num_threads=1) as made:
        bench = made.stored([1, 2, 3])
        asked = Asked(bench)
        made.io.reads[SLOT_BYTES] = HANGS
        # A read that does not begin before its deadline fails.
        for begun in range(1000):
            asked.read(begun, [1], [5], within_s=0.05)
            wait_for(lambda n=begun: made.io.num_hung or n in asked.codes, "it does not begin")
            if made.io.num_hung:
                break
        asked.codes.clear()
        asked.read("queued", [2], [6], within_s=0.05)
        asked.read("patient", [3], [7])
        assert asked.wait("queued") == [FAILED]
        # The disk may still write into its slot.
        assert asked.codes.keys() == {"queued"}
        made.io.heal()
        assert asked.wait(begun) == asked.wait("patient") == [Read.FOUND]
        assert (False, 2 * SLOT_BYTES) not in made.io.begun
        assert not bench.slot(6).any()


def test_closing_is_bounded_and_ends_calls_properly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with disk(tmp_path, num_threads=1, close_wait_s=0.05) as made:
        bench = made.stored([1, 2])
        asked = Asked(bench)
        made.io.reads[SLOT_BYTES] = HANGS
        asked.read("begun", [1], [5])
        made.io.wait_hung(1)
        asked.read("queued", [2], [6])
        asked.write("written", [9])
        made.tier.close()
        assert "the disk hangs" in caplog.text
        assert asked.codes == {"queued": [FAILED], "written": [FAILED]}
        # Closed, the descriptor could become another file's.
        with pytest.raises(OSError, match="in use"):
            SlabFile.open(tmp_path, ARENA_BYTES)
        assert bench.read([2], [6]).tolist() == [FAILED]
        made.io.heal()
        assert asked.wait("begun") == [Read.FOUND]
        assert np.array_equal(bench.slot(5), content(1))
        wait_for(lambda: not made.file.is_open, "the file was not closed")
        SlabFile.open(tmp_path, ARENA_BYTES).close()


def test_senseless_call_harms_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers: list[list[int]] = []

    def fail(codes: Codes) -> None:
        raise RuntimeError("of the caller")

    with disk(tmp_path, num_threads=2) as made:
        bench = made.stored([1])
        blocks: Any = bench.blocks([1], [5])
        nowhere = replace(blocks, places=np.empty(0, np.int64))
        for _ in range(3):
            made.tier.read(blocks, time.monotonic() + WAIT_S, fail)
            made.tier.read(
                nowhere, time.monotonic() + WAIT_S, lambda codes: answers.append(codes.tolist())
            )
        wait_for(lambda: caplog.text.count("RuntimeError: of the") == 3, "not all were logged")
        wait_for(lambda: answers == [[FAILED]] * 3, "a read did not end")
        assert "a piece of 1 blocks" in caplog.text
        bench.check_read([1], [6])
        assert made.tier.figures().queued_bytes == 0

"""Disks that fail, lag and hang: each block is told what became of it, each call ends once, and no
slot is given back while the disk may touch it."""

import errno
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.testing.faulty_disk import EVERYWHERE, Fault
from hotkv_server.testing.tier_contract import (
    ARENA_BYTES,
    SLOT_BYTES,
    WAIT_S,
    Bench,
    content,
)
from hotkv_server.tiers.disk import calls
from hotkv_server.tiers.disk.slab_file import SlabFile
from hotkv_server.tiers.protocol import Codes, Read, Write
from tests.support.waiting import wait_for
from tests.tiers.disks import Disk, disk

STORED, FULL, FAILED = int(Write.STORED), int(Write.FULL), int(Write.FAILED)
HANGS = Fault(hangs=True)


def stored(made: Disk, numbers: list[int]) -> Bench:
    bench = Bench(made.rig())
    bench.fill(numbers, numbers)
    assert bench.write(numbers, numbers).tolist() == [STORED] * len(numbers)
    bench.arena[:] = 0
    made.io.begun.clear()
    return bench


class Asked:
    """Calls that are under way; `codes` by name once one has ended."""

    def __init__(self, made: Disk, bench: Bench) -> None:
        self.tier, self.bench = made.tier, bench
        self.codes: dict[str, list[list[int]]] = {}

    def write(self, name: str, numbers: list[int]) -> None:
        self.codes[name] = []
        self.tier.write(
            self.bench.blocks(numbers, numbers), lambda codes, seals: self._end(name, codes)
        )

    def read(
        self, name: str, numbers: list[int], slots: list[int], within_s: float = WAIT_S
    ) -> None:
        self.codes[name] = []
        deadline_s = time.monotonic() + within_s
        blocks = self.bench.blocks(numbers, slots)
        self.tier.read(blocks, deadline_s, lambda codes: self._end(name, codes))

    def has_ended(self, name: str) -> bool:
        return bool(self.codes[name])

    def wait(self, name: str) -> list[int]:
        wait_for(lambda: self.has_ended(name), f"{name} did not end")
        (codes,) = self.codes[name]
        return codes

    def _end(self, name: str, codes: Codes) -> None:
        self.codes[name].append(codes.tolist())


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.EINVAL, errno.ETIMEDOUT])
def test_a_read_that_fails_costs_its_block_only(tmp_path: Path, code: int) -> None:
    with disk(tmp_path) as made:
        bench = stored(made, [1, 2, 3])
        made.io.reads[2 * SLOT_BYTES] = Fault(code=code)
        assert bench.read([1, 2, 3], [7, 8, 9]).tolist() == [Read.FOUND, FAILED, Read.FOUND]
        assert np.array_equal(bench.slot(9), content(3))
        figures = made.tier.figures()
        assert (figures.read_blocks, figures.failed_blocks, figures.corrupt_blocks) == (2, 1, 0)
        assert figures.read_bytes == 2 * SLOT_BYTES and not made.tier.problem()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_without_room_is_full(tmp_path: Path, code: int) -> None:
    with disk(tmp_path) as made:
        bench = Bench(made.rig())
        bench.fill([1, 2], [1, 2])
        made.io.writes[2 * SLOT_BYTES] = Fault(code=code)
        for _ in range(5):
            assert bench.write([1, 2], [1, 2]).tolist() == [STORED, FULL]
            assert bench.write([2], [2]).tolist() == [FULL]
        figures = made.tier.figures()
        assert (figures.written_blocks, figures.failed_blocks) == (5, 0)
        assert not made.tier.problem()
        bench.check_read([1], [5])


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.EINVAL])
def test_a_write_that_fails_costs_its_block_only(tmp_path: Path, code: int) -> None:
    with disk(tmp_path) as made:
        bench = Bench(made.rig())
        bench.fill([1, 2, 3], [1, 2, 3])
        made.io.writes[2 * SLOT_BYTES] = Fault(code=code)
        answers: list[tuple[list[int], list[bool]]] = []
        made.tier.write(
            bench.blocks([1, 2, 3], [1, 2, 3]),
            lambda codes, seals: answers.append((codes.tolist(), (seals > 0).tolist())),
        )
        wait_for(lambda: bool(answers), "the write did not end")
        assert answers == [([STORED, FAILED, STORED], [True, False, True])]
        figures = made.tier.figures()
        assert (figures.written_blocks, figures.failed_blocks) == (2, 1)


@pytest.mark.parametrize("moved", [0, SLOT_ALIGN, SLOT_BYTES - SLOT_ALIGN])
def test_a_write_that_stays_short_fails(tmp_path: Path, moved: int) -> None:
    with disk(tmp_path) as made:
        bench = Bench(made.rig())
        bench.fill([1, 2], [1, 2])
        made.io.writes[SLOT_BYTES] = Fault(moved_bytes=moved)
        assert bench.write([1, 2], [1, 2]).tolist() == [FAILED, STORED]
        made.io.heal()
        bench.check_read([2], [5])


@pytest.mark.parametrize("moved", [0, SLOT_ALIGN, SLOT_BYTES - SLOT_ALIGN])
def test_a_read_that_stays_short_is_corrupt(tmp_path: Path, moved: int) -> None:
    with disk(tmp_path) as made:
        bench = stored(made, [1, 2])
        # The slot has the block's bytes already: that they were not read must count.
        bench.fill([1], [7])
        made.io.reads[SLOT_BYTES] = Fault(moved_bytes=moved)
        assert bench.read([1, 2], [7, 8]).tolist() == [Read.CORRUPT, Read.FOUND]
        assert made.tier.figures().corrupt_blocks == 1


def test_reads_go_on_while_writes_hang(tmp_path: Path) -> None:
    with disk(tmp_path, num_threads=4) as made:
        bench = stored(made, [1, 2])
        asked = Asked(made, bench)
        made.io.writes[EVERYWHERE] = HANGS
        for number in range(10, 30):
            asked.write(f"write {number}", [number])
        made.io.wait_hung(3)
        for _ in range(20):
            bench.check_read([1, 2], [5, 6])
        assert made.io.num_hung == 3 and made.tier.stalled_s(time.monotonic()) > 0
        assert made.tier.figures().queued_bytes == 20 * SLOT_BYTES
        made.io.heal()
        for number in range(10, 30):
            assert asked.wait(f"write {number}") == [STORED]
        assert made.tier.figures().queued_bytes == 0


def test_a_read_whose_deadline_passes_while_the_disk_hangs_ends_then(tmp_path: Path) -> None:
    with disk(tmp_path, num_threads=1) as made:
        bench = stored(made, [1, 2, 3])
        asked = Asked(made, bench)
        made.io.reads[SLOT_BYTES] = HANGS
        asked.read("begun", [1], [5], within_s=0.05)
        made.io.wait_hung(1)
        asked.read("queued", [2], [6], within_s=0.05)
        asked.read("patient", [3], [7])
        assert asked.wait("queued") == [FAILED]
        # The disk may still write into this one's slot.
        assert not asked.has_ended("begun") and not asked.has_ended("patient")
        made.io.heal()
        assert asked.wait("begun") == [Read.FOUND]
        assert asked.wait("patient") == [Read.FOUND]
        assert (False, 2 * SLOT_BYTES) not in made.io.begun
        assert not bench.slot(6).any()


def test_the_rest_of_a_read_is_not_begun_after_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MIN_PIECE_BYTES", SLOT_BYTES)
    monkeypatch.setattr(calls, "MAX_PIECE_BYTES", SLOT_BYTES)
    with disk(tmp_path, num_threads=1) as made:
        bench = stored(made, [1, 2, 3])
        asked = Asked(made, bench)
        made.io.reads[SLOT_BYTES] = HANGS
        asked.read("read", [1, 2, 3], [5, 6, 7], within_s=0.05)
        made.io.wait_hung(1)
        time.sleep(0.3)
        assert not asked.has_ended("read")
        made.io.heal()
        assert asked.wait("read") == [Read.FOUND, FAILED, FAILED]
        assert [offset for _, offset in made.io.begun] == [SLOT_BYTES]


def test_a_stall_is_seen_while_it_lasts(tmp_path: Path) -> None:
    with disk(tmp_path) as made:
        bench = stored(made, [1])
        asked = Asked(made, bench)
        made.io.reads[SLOT_BYTES] = HANGS
        asked.read("read", [1], [5])
        made.io.wait_hung(1)
        now_s = time.monotonic()
        assert 10 <= made.tier.stalled_s(now_s + 10) < 20
        assert made.tier.stalled_s(now_s - 10) == 0
        made.io.heal()
        asked.wait("read")
        wait_for(lambda: made.tier.stalled_s(now_s + 10) == 0, "the stall did not end")


def test_closing_does_not_wait_for_ever_and_ends_no_call_too_early(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with disk(tmp_path, num_threads=1, close_wait_s=0.05) as made:
        bench = stored(made, [1, 2])
        asked = Asked(made, bench)
        made.io.reads[SLOT_BYTES] = HANGS
        asked.read("begun", [1], [5])
        made.io.wait_hung(1)
        asked.read("queued", [2], [6])
        asked.write("written", [9])
        made.tier.close()
        assert "the disk hangs" in caplog.text
        assert asked.codes == {"begun": [], "queued": [[FAILED]], "written": [[FAILED]]}
        # The descriptor is still in use: its number must not become another file's.
        with pytest.raises(OSError, match="in use"):
            SlabFile.open(tmp_path, ARENA_BYTES)
        assert bench.read([2], [6]).tolist() == [FAILED]
        made.io.heal()
        assert asked.wait("begun") == [Read.FOUND]
        assert np.array_equal(bench.slot(5), content(1))
        wait_for(lambda: not made.file.is_open, "the file was not closed")
        SlabFile.open(tmp_path, ARENA_BYTES).close()


def test_closing_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with disk(tmp_path) as made:
        stored(made, [1])
        made.tier.close()
        assert set(threading.enumerate()) <= before


def test_a_caller_that_raises_harms_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(codes: Codes) -> None:
        raise RuntimeError("of the caller")

    with disk(tmp_path, num_threads=2) as made:
        bench = stored(made, [1])
        for _ in range(5):
            made.tier.read(bench.blocks([1], [5]), time.monotonic() + WAIT_S, fail)
        wait_for(lambda: caplog.text.count("RuntimeError: of the") == 5, "not all were logged")
        bench.check_read([1], [6])
        assert made.tier.figures().queued_bytes == 0


def test_a_call_that_makes_no_sense_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with disk(tmp_path, num_threads=2) as made:
        bench = stored(made, [1])
        blocks = bench.blocks([1], [5])
        nowhere = type(blocks)(blocks.keys, blocks.slots, blocks.num_bytes)
        answers: list[list[int]] = []
        for _ in range(3):
            made.tier.read(
                nowhere, time.monotonic() + WAIT_S, lambda codes: answers.append(codes.tolist())
            )
        wait_for(lambda: len(answers) == 3, "a read did not end")
        assert answers == [[FAILED]] * 3
        assert "a piece of 1 blocks" in caplog.text
        bench.check_read([1], [6])

"""The disk tier works on real files, direct and buffered: the contract, files cut short."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotkv_server.testing.faulty_disk import EVERYWHERE, Fault
from hotkv_server.testing.tier_contract import (
    ARENA_BYTES,
    SLOT_BYTES,
    SLOTS,
    Bench,
    Rig,
    check_tier,
)
from hotkv_server.tiers.protocol import Read, Write
from tests.tiers.disks import disk, shm_folder

STORED, FAILED = int(Write.STORED), int(Write.FAILED)


@pytest.mark.parametrize("num_threads", [1, 8])
@pytest.mark.parametrize("direct", [True, False])
def test_contract(tmp_path: Path, direct: bool, num_threads: int) -> None:
    count = iter(range(1000))

    @contextlib.contextmanager
    def rig() -> Iterator[Rig]:
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


def test_a_file_that_is_cut_short_loses_what_lay_beyond_and_is_used_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with disk(tmp_path) as made:
        bench = made.stored([1, 2, 3])
        # In the middle of block 2, between two sectors.
        os.truncate(made.file.path, 2 * SLOT_BYTES + 777)
        codes = bench.read([1, 2, 3], [7, 8, 9]).tolist()
        assert codes == [Read.FOUND, Read.CORRUPT, Read.CORRUPT]
        assert caplog.text.count("was cut to") == 1
        assert made.file.path.stat().st_size == ARENA_BYTES
        assert not made.tier.problem()
        bench.fill([2], [5])
        assert bench.write([2], [5]).tolist() == [STORED]
        bench.check_read([1, 2], [8, 9])


def test_blocks_outside_arena_and_file_fail_and_others_do_not(tmp_path: Path) -> None:
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
        # A record that has outlived its bytes.
        bench.seals[40] = 1
        assert bench.read([40], [5]).tolist() == [Read.CORRUPT]


def test_it_names_its_problem_and_says_what_it_is(tmp_path: Path) -> None:
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
        facts, answers = made.tier.facts(), list[list[int]]()
        assert facts.places and not facts.is_shared and facts.capacity_bytes == ARENA_BYTES
        made.tier.probe([b"a", b"b"], 0.0, lambda codes: answers.append(codes.tolist()))
        assert answers == [[FAILED, FAILED]]

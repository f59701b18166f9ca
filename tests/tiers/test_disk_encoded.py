"""The disk tier with encoded blocks: the same contract, fewer bytes in the file, every changed byte
of them seen, and memory for encoding that is bounded whatever the disk does."""

import contextlib
import errno
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.dataplane.plan import Region
from hotkv_server.testing.faulty_disk import EVERYWHERE, Fault
from hotkv_server.testing.tier_contract import WAIT_S, Bench, Rig, check_tier, key
from hotkv_server.tiers.compression import staged as staged_module
from hotkv_server.tiers.compression.form import encoded_key, room_bytes
from hotkv_server.tiers.compression.staged import Staged
from hotkv_server.tiers.protocol import Blocks, Codes, Read, Write
from hotkv_server.tiers.seals import seal
from tests.support.waiting import wait_for
from tests.tiers.disks import Disk, disk, shm_folder
from tests.tiers.encodings import ARENA_BYTES, ROOM_BYTES, SLOT_BYTES, compressible, mixed, noise

STORED, FAILED, UNFIT = int(Write.STORED), int(Write.FAILED), int(Write.UNFIT)


@contextlib.contextmanager
def encoding(
    folder: Path,
    *,
    staging_rooms: int = 32,
    content: Callable[[int], Any] = mixed,
    **options: Any,
) -> Iterator[tuple[Disk, Bench]]:
    """A disk over slots that can be encoded, with staging memory for so many of them, and a bench.
    All staging memory is free at the end."""

    def stages(arena: Region) -> Staged:
        return Staged(arena, staging_rooms * ROOM_BYTES)

    with disk(folder, arena_bytes=ARENA_BYTES, stages=stages, **options) as made:
        yield (
            made,
            Bench(made.rig(content=content, slot_bytes=SLOT_BYTES, encoded_bytes=room_bytes)),
        )
        made.io.heal()
        made.tier.close()
        made.staged.check_invariants()


def rigs(folder: Path, **options: Any) -> Callable[[], Any]:
    """Makes rigs of the contract, each with a file of its own."""
    count = iter(range(1000))

    @contextlib.contextmanager
    def make() -> Iterator[Rig]:
        with encoding(folder / str(next(count)), **options) as (_, bench):
            yield bench.rig

    return make


def stored(bench: Bench, numbers: list[int]) -> None:
    """Puts blocks on the disk, and nowhere else."""
    bench.fill(numbers, numbers)
    assert bench.write(numbers, numbers).tolist() == [STORED] * len(numbers)
    bench.arena[:] = 0


def on_disk(made: Disk, number: int, num_bytes: int = SLOT_BYTES) -> bytes:
    """What lies at the place of a block."""
    with open(made.file.path, "rb") as file:
        file.seek(number * SLOT_BYTES)
        return file.read(num_bytes)


@pytest.mark.parametrize("content", [compressible, noise, mixed])
@pytest.mark.parametrize("direct", [True, False])
def test_contract(tmp_path: Path, direct: bool, content: Callable[[int], Any]) -> None:
    if direct:
        check_tier(rigs(tmp_path, content=content), seed=1)
    else:
        with shm_folder() as folder:
            check_tier(rigs(folder, content=content, direct=False), seed=2)


@pytest.mark.parametrize("num_threads, staging_rooms", [(1, 2), (8, 17)])
def test_contract_with_little_staging(tmp_path: Path, num_threads: int, staging_rooms: int) -> None:
    check_tier(rigs(tmp_path, num_threads=num_threads, staging_rooms=staging_rooms), seed=3)


def test_encoded_blocks_take_fewer_bytes_and_say_so(tmp_path: Path) -> None:
    with encoding(tmp_path) as (made, bench):
        numbers = list(range(6))
        stored(bench, numbers)
        assert bench.stored_bytes == {
            number: SLOT_BYTES if number % 3 == 0 else ROOM_BYTES for number in numbers
        }
        assert on_disk(made, 3) == noise(3).tobytes()
        # Behind an encoded block its place ends: that is never written.
        assert on_disk(made, 4)[:4] == b"hkvc" and not any(on_disk(made, 4)[ROOM_BYTES:])
        assert bench.seals[3] == seal(key(3), on_disk(made, 3))
        assert bench.seals[4] == seal(encoded_key(key(4)), on_disk(made, 4, ROOM_BYTES))
        bench.check_read(numbers, [40 + number for number in numbers])
        figures = made.tier.figures()
        assert figures.written_blocks == figures.read_blocks == 6
        assert figures.written_bytes == figures.read_bytes == 4 * ROOM_BYTES + 2 * SLOT_BYTES
        assert not figures.failed_blocks and not figures.queued_bytes


def test_what_does_not_fit_is_said_and_changes_nothing(tmp_path: Path) -> None:
    with encoding(tmp_path) as (made, bench):
        bench.fill([1, 3], [1, 3])
        codes, seals = bench.answer(bench.blocks([1, 3], [1, 3]))
        assert codes.tolist() == [STORED, UNFIT] and seals[0] and not seals[1]
        assert not any(on_disk(made, 3))
        assert made.io.begun == [(True, SLOT_BYTES)]
        figures = made.tier.figures()
        assert (figures.written_blocks, figures.failed_blocks) == (1, 0)


def test_the_last_place_ends_with_the_file(tmp_path: Path) -> None:
    with encoding(tmp_path, num_bytes=2 * SLOT_BYTES + ROOM_BYTES) as (_, bench):
        stored(bench, [1, 2])
        bench.check_read([1, 2], [7, 8])
        bench.fill([4], [4])
        assert bench.write([4], [4]).tolist() == [FAILED]


def test_every_changed_byte_of_an_encoded_block_is_seen(tmp_path: Path) -> None:
    """Also those that decide no byte of the block: rests of planes, of the list and of the room."""
    with shm_folder() as folder, encoding(folder, direct=False) as (made, bench):
        copies = list(range(1, 33))
        rig = replace(bench.rig, content=lambda number: compressible(7))
        bench = Bench(rig)
        stored(bench, copies)
        slabs, rng = np.memmap(made.file.path, np.uint8, "r+"), np.random.default_rng(5)
        num_seen = 0
        for begin in range(0, ROOM_BYTES, len(copies)):
            some = copies[: min(len(copies), ROOM_BYTES - begin)]
            at = np.array([number * SLOT_BYTES + begin + i for i, number in enumerate(some)])
            masks = rng.integers(1, 256, len(some)).astype(np.uint8)
            slabs[at] ^= masks
            assert (bench.read(some, some) == Read.CORRUPT).all(), begin
            slabs[at] ^= masks
            num_seen += len(some)
        assert num_seen == ROOM_BYTES
        bench.check_read(copies, copies)


def test_a_sealed_form_that_is_none_is_corrupt(tmp_path: Path) -> None:
    """What was written as another block's bytes under the key of an encoded one, with its seal."""
    with encoding(tmp_path, content=noise) as (_, bench):
        place, size = np.array([SLOT_BYTES]), np.array([ROOM_BYTES], np.int64)
        bench.fill([1], [1])
        forged = Blocks([encoded_key(key(1))], place, size, place)
        (code,), (sealed,) = bench.answer(forged)
        assert code == STORED
        bench.seals[1], bench.stored_bytes[1] = int(sealed), ROOM_BYTES
        assert bench.read([1], [5]).tolist() == [Read.CORRUPT]
        assert bench.tier.figures().corrupt_blocks == 1


def test_a_block_is_read_only_in_the_form_it_was_stored_in(tmp_path: Path) -> None:
    with encoding(tmp_path) as (_, bench):
        stored(bench, [1, 3])
        bench.stored_bytes = {1: SLOT_BYTES, 3: ROOM_BYTES}
        assert bench.read([1, 3], [5, 6]).tolist() == [Read.CORRUPT] * 2


def test_encoded_blocks_outlive_the_tier(tmp_path: Path) -> None:
    with encoding(tmp_path) as (_, bench):
        stored(bench, [1, 2, 3])
        kept = bench.seals, bench.stored_bytes
    with encoding(tmp_path) as (_, bench):
        again = Bench(bench.rig, *kept)
        again.check_read([1, 2, 3], [7, 8, 9])


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
def test_faults_of_the_disk_cost_their_blocks_only(tmp_path: Path, code: int) -> None:
    with encoding(tmp_path, content=compressible) as (made, bench):
        bench.fill([1, 2, 3], [1, 2, 3])
        made.io.writes[2 * SLOT_BYTES] = Fault(code=code)
        assert bench.write([1, 2, 3], [1, 2, 3]).tolist() == [STORED, FAILED, STORED]
        made.io.writes.clear()
        made.io.reads[SLOT_BYTES] = Fault(code=code)
        assert bench.read([1, 3], [7, 9]).tolist() == [FAILED, Read.FOUND]
        made.io.reads[SLOT_BYTES] = Fault(moved_bytes=ROOM_BYTES - SLOT_ALIGN)
        assert bench.read([1, 3], [7, 9]).tolist() == [Read.CORRUPT, Read.FOUND]
        assert np.array_equal(bench.slot(9), compressible(3))


def test_what_does_not_fit_says_nothing_of_the_disk(tmp_path: Path) -> None:
    """Neither that it is well nor that it is not."""
    with encoding(tmp_path) as (made, bench):
        bench.fill([1, 3], [1, 3])
        made.io.writes[EVERYWHERE] = Fault(code=errno.EIO)
        for _ in range(3):
            assert bench.answer(bench.blocks([1], [1]))[0].tolist() == [FAILED]
            assert bench.answer(bench.blocks([3], [3]))[0].tolist() == [UNFIT]
        assert "the last 3 calls failed" in made.tier.problem()
        assert made.tier.figures().failed_blocks == 3


class Ended:
    """Answers of calls that are under way, by name."""

    def __init__(self) -> None:
        self.codes: dict[str, list[int]] = {}

    def of(self, name: str) -> Callable[..., None]:
        def end(codes: Codes, seals: object = None) -> None:
            assert name not in self.codes, f"{name} ended twice"
            self.codes[name] = codes.tolist()

        return end

    def wait(self, name: str) -> list[int]:
        wait_for(lambda: name in self.codes, f"{name} did not end")
        return self.codes[name]


def test_writes_that_hang_leave_staging_to_reads(tmp_path: Path) -> None:
    with encoding(tmp_path, content=compressible, staging_rooms=4, num_threads=8) as (made, bench):
        stored(bench, [1, 2])
        bench.fill(range(10, 20), range(10, 20))
        made.io.writes[EVERYWHERE] = Fault(hangs=True)
        ended = Ended()
        for number in range(10, 20):
            made.tier.write(bench.blocks([number], [number]), ended.of(str(number)))
        made.io.wait_hung(2)
        for _ in range(20):
            bench.check_read([1, 2], [5, 6])
        # Half of the memory, though six of the threads may write.
        assert made.io.num_hung == 2 and not ended.codes
        made.io.heal()
        for number in range(10, 20):
            assert ended.wait(str(number)) == [STORED]


def test_a_read_waits_for_staging_until_its_deadline_and_plain_ones_need_none(
    tmp_path: Path,
) -> None:
    with encoding(tmp_path, staging_rooms=1, num_threads=4) as (made, bench):
        stored(bench, [3])
        # One room: too little for a write, which may have half of it.
        bench.fill([1], [1])
        assert bench.answer(bench.blocks([1], [1]))[0].tolist() == [UNFIT]
    with encoding(tmp_path, staging_rooms=2, num_threads=4) as (made, bench):
        stored(bench, [1, 2, 3, 4])
        made.io.reads[SLOT_BYTES] = made.io.reads[2 * SLOT_BYTES] = Fault(hangs=True)
        ended, until_s = Ended(), time.monotonic() + WAIT_S
        for number in (1, 2):
            made.tier.read(bench.blocks([number], [20 + number]), until_s, ended.of(str(number)))
        made.io.wait_hung(2)
        bench.check_read([3], [30])
        before = bench.slot(24).copy()
        assert bench.read([4], [24], within_s=0.2).tolist() == [FAILED]
        assert np.array_equal(bench.slot(24), before)
        assert not ended.codes
        made.io.heal()
        assert ended.wait("1") == ended.wait("2") == [Read.FOUND]
        assert np.array_equal(bench.slot(22), compressible(2))
        bench.check_read([4], [24])


def test_closing_ends_what_waits_for_staging(tmp_path: Path) -> None:
    options = {"staging_rooms": 2, "num_threads": 6, "close_wait_s": 0.5}
    with encoding(tmp_path, content=compressible, **options) as (made, bench):
        stored(bench, [1, 2, 4])
        made.io.reads[SLOT_BYTES] = made.io.reads[2 * SLOT_BYTES] = Fault(hangs=True)
        ended, until_s = Ended(), time.monotonic() + WAIT_S
        for number in (1, 2):
            made.tier.read(bench.blocks([number], [20 + number]), until_s, ended.of(str(number)))
        made.io.wait_hung(2)
        made.tier.read(bench.blocks([4], [24]), until_s, ended.of("4"))
        bench.fill([5], [5])
        made.tier.write(bench.blocks([5], [5]), ended.of("5"))
        time.sleep(0.05)
        assert not ended.codes
        made.tier.close()
        assert ended.codes == {"4": [FAILED], "5": [FAILED]}
        # The disk may still write into the staging memory: it stays.
        assert made.staged._memory is not None and made.staged._memory._open
        made.io.heal()
        assert ended.wait("1") == ended.wait("2") == [Read.FOUND]
        assert np.array_equal(bench.slot(21), compressible(1))
        wait_for(lambda: made.staged._memory is None, "the staging memory was not given back")


def test_memory_is_taken_only_when_it_is_needed(tmp_path: Path) -> None:
    with encoding(tmp_path, content=compressible) as (made, bench):
        bench.stored_bytes[1] = SLOT_BYTES
        stored(bench, [1])
        bench.check_read([1], [5])
        assert "not needed yet" in repr(made.tier)
        stored(bench, [2])
        assert "bytes free" in repr(made.tier)
    with encoding(tmp_path) as (made, _):
        made.tier.prepare_encoding()
        assert "bytes free" in repr(made.tier)


def test_without_memory_encoded_blocks_are_failed_and_plain_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with encoding(tmp_path) as (_, bench):
        stored(bench, [1, 3])
        kept = bench.seals, bench.stored_bytes

    def no_memory(num_bytes: int) -> Any:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(staged_module, "open_staging", no_memory)
    with encoding(tmp_path) as (made, bench):
        again = Bench(bench.rig, *kept)
        assert again.read([1, 3], [5, 6]).tolist() == [FAILED, Read.FOUND]
        assert "no memory" in caplog.text
        with pytest.raises(OSError, match="no memory"):
            made.tier.prepare_encoding()
        monkeypatch.undo()
        again.check_read([1, 3], [5, 6])

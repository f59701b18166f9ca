"""Tests the disk tier with encoded blocks: `tier_contract`, fewer bytes of its file, and bounded
staging memory if the disk fails or hangs."""

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.dataplane.plan import Region
from hotkv_server.tiers.compression import staged as staged_module
from hotkv_server.tiers.compression.form import encoded_key, room_bytes
from hotkv_server.tiers.compression.staged import Staged
from hotkv_server.tiers.protocol import (
    PlacedBlocks,
    Read,
    Write,
)
from hotkv_server.tiers.seals import seal
from tests.contracts.tier_contract import Bench, TierRig, check_tier, key
from tests.doubles.faulty_disk import EVERYWHERE, Fault
from tests.support.waiting import wait_for
from tests.tiers.disks import Disk, disk, shm_folder
from tests.tiers.encodings import ARENA_BYTES, ROOM_BYTES, SLOT_BYTES, compressible, mixed, noise
from tests.tiers.support import Asked

STORED, FAILED, UNFIT = int(Write.STORED), int(Write.FAILED), int(Write.UNFIT)


@contextlib.contextmanager
def encoding(
    folder: Path,
    numbers: list[int] | None = None,
    *,
    staging_rooms: int = 32,
    content: Callable[[int], Any] = mixed,
    **options: Any,
) -> Iterator[tuple[Disk, Bench]]:
    """Checks at the end that all staging memory is free.

    numbers: blocks on the disk, not in the arena.
    staging_rooms: forms that fit into the staging memory.
    """

    def stages(arena: Region) -> Staged:
        return Staged(arena, staging_rooms * ROOM_BYTES)

    with disk(folder, arena_bytes=ARENA_BYTES, stages=stages, **options) as made:
        yield (
            made,
            made.stored(
                numbers or [], content=content, slot_bytes=SLOT_BYTES, encoded_bytes=room_bytes
            ),
        )
        made.io.heal()
        made.tier.close()
        made.staged.check_invariants()


def on_disk(made: Disk, number: int, num_bytes: int = SLOT_BYTES) -> bytes:
    """At the place of block `number` in the file."""
    with open(made.file.path, "rb") as file:
        file.seek(number * SLOT_BYTES)
        return file.read(num_bytes)


@pytest.mark.parametrize(
    ("direct", "options"),
    [
        *((True, {"content": content}) for content in (compressible, noise, mixed)),
        (False, {}),
        (True, {"num_threads": 1, "staging_rooms": 2}),
        (True, {"num_threads": 8, "staging_rooms": 17}),
    ],
)
def test_every_policy_keeps_the_contract(
    tmp_path: Path, direct: bool, options: dict[str, Any]
) -> None:
    count = iter(range(1000))

    @contextlib.contextmanager
    def rig() -> Iterator[TierRig]:
        place = contextlib.nullcontext(tmp_path / str(next(count))) if direct else shm_folder()
        with place as folder, encoding(folder, direct=direct, **options) as (_, bench):
            yield bench.rig

    check_tier(rig, seed=1)


def test_encoded_blocks_take_fewer_bytes_and_say_so(tmp_path: Path) -> None:
    numbers = list(range(6))
    with encoding(tmp_path, numbers) as (made, bench):
        assert bench.stored_bytes == {
            number: SLOT_BYTES if number % 3 == 0 else ROOM_BYTES for number in numbers
        }
        assert on_disk(made, 3) == noise(3).tobytes()
        # Only the encoded bytes are written; those behind stay zero.
        assert on_disk(made, 4)[:4] == b"hkvc" and not any(on_disk(made, 4)[ROOM_BYTES:])
        assert bench.seals[3] == seal(key(3), on_disk(made, 3))
        assert bench.seals[4] == seal(encoded_key(key(4)), on_disk(made, 4, ROOM_BYTES))
        bench.check_read(numbers, [40 + number for number in numbers])
        figures = made.tier.figures()
        assert figures.written_blocks == figures.read_blocks == 6
        assert figures.written_bytes == figures.read_bytes == 4 * ROOM_BYTES + 2 * SLOT_BYTES
        assert not figures.failed_blocks and not figures.queued_bytes
        # The wrong form must fail.
        bench.stored_bytes = {1: SLOT_BYTES, 3: ROOM_BYTES}
        assert bench.read([1, 3], [5, 6]).tolist() == [Read.CORRUPT] * 2


def test_oversized_call_changes_nothing_blames_no_disk(tmp_path: Path) -> None:
    with encoding(tmp_path) as (made, bench):
        bench.fill([1, 3], [1, 3])
        codes, seals = bench.answer(bench.blocks([1, 3], [1, 3]))
        assert codes.tolist() == [STORED, UNFIT] and seals[0] and not seals[1]
        assert not any(on_disk(made, 3)) and made.io.begun == [(True, SLOT_BYTES)]
        figures = made.tier.figures()
        assert (figures.written_blocks, figures.failed_blocks) == (1, 0)
        made.io.writes[EVERYWHERE] = Fault(code=errno.EIO)
        for _ in range(3):
            assert bench.answer(bench.blocks([1], [1]))[0].tolist() == [FAILED]
            assert bench.answer(bench.blocks([3], [3]))[0].tolist() == [UNFIT]
        assert "the last 3 calls failed" in made.tier.problem()
        assert made.tier.figures().failed_blocks == 3


def test_the_last_place_ends_with_the_file(tmp_path: Path) -> None:
    with encoding(tmp_path, [1, 2], num_bytes=2 * SLOT_BYTES + ROOM_BYTES) as (_, bench):
        bench.check_read([1, 2], [7, 8])
        bench.fill([4], [4])
        assert bench.write([4], [4]).tolist() == [FAILED]


def test_a_sealed_form_that_is_none_is_corrupt(tmp_path: Path) -> None:
    """Writes noise with a valid seal."""
    with encoding(tmp_path, content=noise) as (_, bench):
        place, size = np.array([SLOT_BYTES]), np.array([ROOM_BYTES], np.int64)
        bench.fill([1], [1])
        (code,), (sealed,) = bench.answer(
            PlacedBlocks([encoded_key(key(1))], place, size, place, size, np.zeros(1, np.uint64))
        )
        assert code == STORED
        bench.seals[1], bench.stored_bytes[1] = int(sealed), ROOM_BYTES
        assert bench.read([1], [5]).tolist() == [Read.CORRUPT]
        assert bench.tier.figures().corrupt_blocks == 1


def test_faults_of_the_disk_cost_their_blocks_only(tmp_path: Path) -> None:
    with encoding(tmp_path, content=compressible) as (made, bench):
        bench.fill([1, 2, 3], [1, 2, 3])
        made.io.writes[2 * SLOT_BYTES] = Fault(code=errno.EIO)
        assert bench.write([1, 2, 3], [1, 2, 3]).tolist() == [STORED, FAILED, STORED]
        made.io.reads[SLOT_BYTES] = Fault(code=errno.EIO)
        assert bench.read([1, 3], [7, 9]).tolist() == [Read.CORRUPT, Read.FOUND]
        made.io.reads[SLOT_BYTES] = Fault(moved_bytes=ROOM_BYTES - SLOT_ALIGN)
        assert bench.read([1, 3], [7, 9]).tolist() == [Read.CORRUPT, Read.FOUND]
        assert np.array_equal(bench.slot(9), compressible(3))


def test_writes_have_half_of_the_staging_memory(tmp_path: Path) -> None:
    with encoding(tmp_path, staging_rooms=1) as (_, bench):
        bench.fill([1], [1])
        assert bench.answer(bench.blocks([1], [1]))[0].tolist() == [UNFIT]


def test_calls_wait_for_staging_until_their_deadline(tmp_path: Path) -> None:
    options = {"staging_rooms": 2, "num_threads": 6, "close_wait_s": 0.5}
    with encoding(tmp_path, [1, 2, 3, 4], **options) as (made, bench):
        made.io.reads[SLOT_BYTES] = made.io.reads[2 * SLOT_BYTES] = Fault(hangs=True)
        asked = Asked(bench)
        asked.read("1", [1], [21])
        asked.read("2", [2], [22])
        made.io.wait_hung(2)
        # Plain blocks need no staging memory.
        bench.check_read([3], [30])
        before = bench.slot(24).copy()
        assert bench.read([4], [24], within_s=0.2).tolist() == [FAILED]
        assert np.array_equal(bench.slot(24), before)
        asked.read("4", [4], [24])
        bench.fill([5], [5])
        asked.write("5", [5])
        assert not asked.codes
        made.tier.close()
        # Two threads hang; `close` waits `close_wait_s` for them.
        wait_for(lambda: len(asked.codes) == 2, "calls that wait for staging memory do not end")
        assert asked.codes == {"4": [FAILED], "5": [FAILED]}
        # Hanging reads may still write there.
        assert made.staged._memory is not None and made.staged._memory._open
        made.io.heal()
        assert asked.wait("1") == asked.wait("2") == [Read.FOUND]
        assert np.array_equal(bench.slot(21), compressible(1))
        wait_for(lambda: made.staged._memory is None, "the staging memory was not given back")


def test_without_memory_only_encoded_blocks_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with encoding(tmp_path, [1, 3]) as (_, bench):
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

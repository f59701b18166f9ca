"""Tests restarts after a stop or a kill: exactly the acknowledged blocks are served."""

import signal

import numpy as np
import pytest

from hotkv_client import BlockResult, Evicted, GroupHashes, LoadRun, TransferStatus
from tests.doubles.with_constants import constant
from tests.server.places import FLAGS, NUM_BLOCKS, Place, found, load, place, spoil, store
from tests.server.support import block_ids, hashes
from tests.support import daemons
from tests.support.waiting import stop, wait_for

__all__ = ["place"]

FULL = ("--integrity.check", "full")
AT_START = constant("startup.cache.START_CHECK_S", 60)
"""All blocks are compared, also on a busy machine."""


@pytest.mark.parametrize(
    "how", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL]
)
def test_stored_blocks_are_served_until_flushed(place: Place, how: signal.Signals) -> None:
    place.start()
    engine, blocks = place.connect(), hashes(50)
    assert store(engine, blocks) == {BlockResult.STORED}
    epoch = engine.session.epoch
    place.stop(how)
    place.start()
    assert engine.session.epoch == epoch
    assert all(found(engine, blocks))
    assert store(engine, blocks[:10], 100) == {BlockResult.PRESENT}
    assert load(engine, blocks, 60) is TransferStatus.DONE
    assert np.array_equal(engine.kv[:, :50], engine.kv[:, 60:110])
    assert place.counter("restored_blocks_total") == 50
    assert not place.counter("condemned_blocks_total")
    assert store(engine, hashes(NUM_BLOCKS)) == {BlockResult.STORED}
    engine.session.acquire("held", [GroupHashes(0, blocks[:5])]).result(60)
    assert engine.session.flush().result(60) == 50 + NUM_BLOCKS
    place.stop(how)
    place.start()
    assert not any(found(engine, blocks))


def test_changed_bytes_are_found_at_first_load(place: Place) -> None:
    place.start(*FULL)
    engine, blocks = place.connect(), hashes(30)
    store(engine, blocks)
    place.stop()
    spoil(place, engine.kv[0, 7])
    place.start(*FULL, *AT_START)
    assert found(engine, blocks) == [at != 7 for at in range(30)]
    assert place.counter("condemned_blocks_total") == 1
    assert place.counter("restored_blocks_total") == 30
    place.stop()
    spoil(place, engine.kv[0, 8])
    place.start(*FULL, *constant("startup.cache.START_CHECK_S", 0))
    assert found(engine, blocks) == [at != 7 for at in range(30)]
    assert place.counter("unverified_blocks") == 29
    assert load(engine, blocks[8:10], 60) is TransferStatus.FAILED
    assert found(engine, blocks) == [at not in (7, 8) for at in range(30)]
    assert load(engine, blocks[:7] + blocks[9:], 60) is TransferStatus.DONE
    assert np.array_equal(engine.kv[:, 9:30], engine.kv[:, 67:88])
    assert place.counter("unverified_blocks") == 0


def test_bytes_that_change_are_found_in_the_background(place: Place) -> None:
    """Even under an earlier lease, the block can't be loaded."""
    evicted: list[Evicted] = []
    place.start(*FULL, "--integrity.scrub-bytes-per-s", "1GiB")
    engine, blocks = place.connect(evicted.append), hashes(30)
    store(engine, blocks)
    assert engine.session.acquire("held", [GroupHashes(0, blocks)]).result(60).pinned[0].all()
    spoil(place, engine.kv[0, 7])
    wait_for(lambda: bool(evicted))
    assert evicted[0].groups[0].hashes == [blocks[7]]
    assert found(engine, blocks) == [at != 7 for at in range(30)]
    for name, first, status in (
        ("all", 0, TransferStatus.FAILED),
        ("rest", 8, TransferStatus.DONE),
    ):
        run = LoadRun(0, block_ids(30 - first, first), block_ids(30 - first, 60))
        assert engine.session.load(name, "held", [run], 20).result(60).status is status
    engine.session.release("held")


def test_without_checksums_everything_is_trusted(place: Place) -> None:
    place.start("--integrity.check", "off")
    engine, blocks = place.connect(), hashes(5)
    store(engine, blocks)
    place.stop()
    place.start("--integrity.check", "off")
    assert all(found(engine, blocks))
    place.stop()
    place.start()
    assert not any(found(engine, blocks)), "blocks without a checksum can't be compared"
    assert not place.counter("condemned_blocks_total"), "that is no damage"


def test_what_does_not_fit_is_left_behind(place: Place) -> None:
    place.start()
    engine = place.connect()
    for is_spoilt in (True, False):
        blocks, epoch = hashes(5), engine.session.epoch
        assert store(engine, blocks) == {BlockResult.STORED}
        place.stop()
        if is_spoilt:
            (place.folder / "arena" / "state.json").write_text("[]")
        server = place.start(*() if is_spoilt else ("--reset",))
        assert not any(found(engine, blocks)) and engine.session.epoch != epoch, is_spoilt
        assert ("starting empty reason=" in server.log.read_text()) == is_spoilt


def test_earlier_blocks_keep_the_size_of_their_slabs(place: Place) -> None:
    place.start()
    engine, blocks = place.connect(), hashes(50)
    store(engine, blocks)
    place.stop()
    place.start(*constant("settings.storage.SMALLEST_SLAB", 128 << 10))
    assert load(engine, blocks, 60) is TransferStatus.DONE
    assert np.array_equal(engine.kv[:, :50], engine.kv[:, 60:110])
    store(engine, hashes(NUM_BLOCKS))
    assert load(engine, blocks, 60) is TransferStatus.DONE


def test_one_arena_has_one_server_even_hung(place: Place) -> None:
    server = place.start()
    stop(server.pid)
    arena = place.folder / "arena"
    for runtime in ("run", "other"):
        flags = ["--runtime-dir", str(place.folder / runtime), "--arena.dir", str(arena)]
        flags += ["--arena.bytes", "16MiB", "--http.port", "-1"]
        done = daemons.run("run", *FLAGS, *flags, timeout_s=60)
        said = f"in use by hotkv-server with pid {server.pid}"
        assert done.returncode == 1 and said in done.stderr
    place.stop()
    place.start()

"""After a clean stop or a kill a server serves what was acknowledged, byte for byte, and never
anything else."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from hotkv_client import BlockResult, BlockRun, Evicted, GroupHashes, LoadRun, TransferStatus
from tests.server.places import (
    FLAGS,
    NUM_BLOCKS,
    Place,
    found,
    load,
    place,
    spoil,
    store,
)
from tests.server.support import block_ids, hashes
from tests.support.waiting import wait_for

__all__ = ["place"]


@pytest.mark.parametrize(
    "how", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL]
)
def test_what_was_stored_is_served_again(place: Place, how: signal.Signals) -> None:
    place.start()
    engine = place.connect()
    blocks = hashes(50)
    assert store(engine, blocks) == {BlockResult.STORED}
    epoch = engine.session.epoch
    place.stop(how)
    place.start()
    assert engine.session.epoch == epoch
    assert all(found(engine, blocks))
    assert store(engine, blocks[:10], 100) == {BlockResult.PRESENT}
    assert load(engine, blocks, 60) is TransferStatus.DONE
    assert np.array_equal(engine.kv[:, :50], engine.kv[:, 60:110])
    assert (place.counter("restored_blocks_total"), place.counter("condemned_blocks_total")) == (
        50,
        0,
    )
    more = hashes(NUM_BLOCKS)
    assert store(engine, more) == {BlockResult.STORED}


def test_kills_in_the_middle_of_stores_lose_nothing_acknowledged(place: Place) -> None:
    """Every block that is found after a kill holds what was stored under its name; what was
    acknowledged and not evicted is found."""
    place.start()
    engine = place.connect()
    contents: dict[bytes, bytes] = {}
    acknowledged: set[bytes] = set()
    for _ in range(4):
        futures = []
        for i in range(12):
            blocks, first = hashes(20), 20 * (i % 5)
            for at, block in enumerate(blocks):
                contents[block] = engine.kv[:, first + at].tobytes()
            name = os.urandom(8).hex()
            futures.append(
                (
                    blocks,
                    engine.session.store(
                        name, name, [BlockRun(0, blocks, block_ids(20, first))], 20
                    ),
                )
            )
        time.sleep(np.random.default_rng().uniform(0.0, 0.01))
        place.stop()
        for blocks, future in futures:
            if future.exception(60) is None and future.result().status is TransferStatus.DONE:
                acknowledged.update(blocks)
        place.start()
        names = list(contents)
        mask = found(engine, names)
        there = [block for block, is_there in zip(names, mask, strict=True) if is_there]
        assert not acknowledged - set(there), (
            "an acknowledged block is gone though nothing was evicted"
        )
        for start in range(0, len(there), 20):
            part = there[start : start + 20]
            assert load(engine, part, 104) is TransferStatus.DONE
            for at, block in enumerate(part):
                assert engine.kv[:, 104 + at].tobytes() == contents[block]
        assert place.counter("evicted_blocks_total") == 0


def test_a_flush_outlives_a_kill(place: Place) -> None:
    place.start()
    engine = place.connect()
    blocks = hashes(20)
    store(engine, blocks)
    engine.session.acquire("held", [GroupHashes(0, blocks[:5])]).result(60)
    assert engine.session.flush().result(60) == 20
    place.stop()
    place.start()
    assert not any(found(engine, blocks))


def test_bytes_that_changed_are_found_at_start(place: Place) -> None:
    place.start("--integrity.check", "full")
    engine = place.connect()
    blocks = hashes(30)
    store(engine, blocks)
    place.stop()
    spoil(place, engine.kv[0, 7])
    place.start("--integrity.check", "full")
    assert found(engine, blocks) == [at != 7 for at in range(30)]
    assert (place.counter("condemned_blocks_total"), place.counter("restored_blocks_total")) == (
        1,
        30,
    )


def test_bytes_that_changed_are_found_at_the_first_load(place: Place) -> None:
    place.start("--integrity.check", "full")
    engine = place.connect()
    blocks = hashes(30)
    store(engine, blocks)
    place.stop()
    spoil(place, engine.kv[0, 7])
    place.start("--integrity.check", "full", "--integrity.start-check-s", "0")
    assert all(found(engine, blocks)) and place.counter("unverified_blocks") == 30
    assert load(engine, blocks[:10], 60) is TransferStatus.FAILED
    assert found(engine, blocks) == [at != 7 for at in range(30)]
    assert load(engine, blocks[10:], 60) is TransferStatus.DONE
    assert np.array_equal(engine.kv[:, 10:30], engine.kv[:, 60:80])
    assert place.counter("unverified_blocks") == 0


def test_bytes_that_change_are_found_in_the_background(place: Place) -> None:
    evicted: list[Evicted] = []
    place.start("--integrity.check", "full", "--integrity.scrub-bytes-per-s", "1GiB")
    engine = place.connect(evicted.append)
    blocks = hashes(30)
    store(engine, blocks)
    spoil(place, engine.kv[0, 7])
    wait_for(lambda: bool(evicted))
    assert evicted[0].groups[0].hashes == [blocks[7]]
    assert found(engine, blocks) == [at != 7 for at in range(30)]


def test_what_was_condemned_is_not_loaded_under_a_lease_from_before(place: Place) -> None:
    evicted: list[Evicted] = []
    place.start("--integrity.check", "full", "--integrity.scrub-bytes-per-s", "1GiB")
    engine = place.connect(evicted.append)
    blocks = hashes(30)
    store(engine, blocks)
    assert engine.session.acquire("held", [GroupHashes(0, blocks)]).result(60).pinned[0].all()
    spoil(place, engine.kv[0, 7])
    wait_for(lambda: bool(evicted))
    for name, ids, status in (
        ("all", np.arange(30), TransferStatus.FAILED),
        ("others", np.arange(8, 30), TransferStatus.DONE),
    ):
        run = LoadRun(0, ids.astype(np.int32), ids.astype(np.int32) + 60)
        assert engine.session.load(name, "held", [run], 20).result(60).status is status
    engine.session.release("held")


def test_without_check_values_everything_is_trusted(place: Place) -> None:
    place.start("--integrity.check", "off")
    engine = place.connect()
    blocks = hashes(5)
    store(engine, blocks)
    place.stop()
    place.start("--integrity.check", "off")
    assert all(found(engine, blocks))
    place.stop()
    place.start()
    assert not any(found(engine, blocks)), (
        "blocks without a check value can't be compared, so they are not served"
    )


@pytest.mark.parametrize(
    "change",
    [
        pytest.param("arena", marks=pytest.mark.long),
        pytest.param("slab", marks=pytest.mark.long),
        "state",
        "format",
        "table",
        "no state",
    ],
)
def test_what_does_not_fit_is_left_behind(place: Place, change: str) -> None:
    place.start()
    engine = place.connect()
    blocks = hashes(5)
    store(engine, blocks)
    epoch = engine.session.epoch
    place.stop()
    state, table_file = place.folder / "arena" / "state.json", place.folder / "arena" / "table"
    if change == "state":
        state.write_bytes(state.read_bytes()[:-20])
    elif change == "format":
        state.write_text(json.dumps({**json.loads(state.read_text()), "format": 99}))
    elif change == "table":
        table_file.write_bytes(b"HOTKVTB9" + table_file.read_bytes()[8:])
    elif change == "no state":
        state.unlink()
    flags = ("--arena.slab-bytes", "128KiB") if change == "slab" else ()
    server = place.start(*flags, arena="32MiB" if change == "arena" else "16MiB")
    assert not any(found(engine, blocks)) and engine.session.epoch != epoch
    assert "starting empty reason=" in server.log.read_text()
    assert store(engine, blocks) == {BlockResult.STORED}


def test_reset_starts_empty(place: Place) -> None:
    place.start()
    engine = place.connect()
    blocks = hashes(5)
    store(engine, blocks)
    place.stop(signal.SIGTERM)
    place.start("--reset")
    assert not any(found(engine, blocks))


@pytest.mark.parametrize("hangs", [pytest.param(False, marks=pytest.mark.long), True])
def test_one_arena_has_one_server(place: Place, *, hangs: bool) -> None:
    """Also where the runtime directories differ, and while the one that has it hangs; the refusal
    names the pid."""
    server = place.start()
    if hangs:
        os.kill(server.pid, signal.SIGSTOP)
    command = [
        sys.executable,
        "-m",
        "hotkv_server.cli",
        "run",
        "--runtime-dir",
        str(place.folder / "other"),
    ]
    command += [
        "--arena.dir",
        str(place.folder / "arena"),
        "--arena.bytes",
        "16MiB",
        "--http.port",
        "-1",
        *FLAGS,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (
        done.returncode == 1
        and f"arena.dir: {place.folder / 'arena'} is in use by hotkv-server with pid {server.pid}"
        in done.stderr
    )
    if hangs:
        place.stop()
        place.start()

"""Tests `LiveLedger` over a core: bounds, and files that are damaged or can't be written."""

import logging
import os
import time
from pathlib import Path

import numpy as np
import pytest

from bench.policies import POLICIES
from hotkv_proto.blocks import NO_RETENTION
from hotkv_proto.reports import LoadEnd, Miss, RequestReport
from hotkv_server.ledger import drive as ledger
from hotkv_server.ledger.book import pack
from hotkv_server.ledger.book.accounts import MAX_ACCOUNTS, Account, Usage
from hotkv_server.ledger.book.forecast import GIB, Forecast, Outlook
from hotkv_server.memory.clerk import Clerk
from hotkv_server.memory.state import read_file
from tests.server.ledger_world import World, key_space

HASHES = np.arange(1, 33, dtype=np.uint32).reshape(4, 8)


def test_reports_during_a_forecast_are_deferred(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, num_taken = World(), 0
    for _ in range(3):
        world.report()
    for _ in world.ledger.follow():
        num_taken += 1
        world.report()
        if num_taken == 10:
            break
    assert num_taken == 3 and world.ledger.outlook(0).prompt_tokens == 3 * 33
    assert world.followed_tokens == 6 * 33
    # A large prompt may displace those that wait.
    monkeypatch.setattr(ledger, "MAX_FOLLOWING_BLOCKS", 6)
    for _ in range(3):
        world.report()
    steps = world.ledger.follow()
    next(steps)
    world.report(num_blocks=6)
    assert len(list(steps)) == 1 and world.ledger.num_lost == 2
    assert world.followed_tokens == 7 * 33 + 97


def test_fresh_engines_hits_save_by_previous_speed() -> None:
    """A fresh engine has measured none, but an earlier one of the key space has."""
    world = World()
    world.session.prefill_tokens_per_s = 160.0
    world.ledger.report(world.session, RequestReport(HASHES, 65, 0, 0, 0.0, NO_RETENTION))
    fresh = world.open("fresh")
    world.ledger.report(fresh, RequestReport(HASHES, 65, 16, 64, 0.0, NO_RETENTION))
    assert world.ledger.savings().total.saved_s == 48 / 160


def test_loads_whose_end_never_comes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MAX_OPEN_LOADS", 2)
    now_s = [6000.0]
    monkeypatch.setattr(time, "time", lambda: now_s[0])
    world = World()
    for number, hit_tokens in ((1, 32), (2, 32), (3, 32), (4, 0), (0, 32)):
        world.report(hit_tokens=hit_tokens, report_id=number)
    now_s[0] += 60.0
    # Only 3 counts: 0 is no id, load 1 is forgotten, request 4 had no hit.
    for number in (0, 1, 4, 3):
        assert not world.ledger.savings().total.failed_loads, number
        world.ledger.load_ended(world.session, LoadEnd(number, 0.5, failed=True))
    # Load 2 fails when its own session ends, not another.
    world.ledger.session_closed(world.open("second"))
    assert world.ledger.savings().total.missed_tokens[Miss.FAILED_LOAD] == 32
    world.ledger.session_closed(world.session)
    world.ledger.load_ended(world.session, LoadEnd(2, 0.5, failed=True))
    total = world.ledger.savings().total
    assert (total.failed_loads, total.saved_s, total.waited_s) == (1, 3.0, 2.5)
    assert total.hit_tokens["host"] == 64 and total.missed_tokens[Miss.FAILED_LOAD] == 64
    # The request ended before its load: no failure.
    world.report(hit_tokens=32, report_id=5)
    world.ledger.load_ended(world.session, LoadEnd(5, 0.0, failed=True))
    total = world.ledger.savings().total
    assert (total.failed_loads, total.missed_tokens[Miss.FAILED_LOAD]) == (1, 96)
    # It is subtracted in the minutes in which it was counted.
    assert world.ledger.savings(60.0).total.hit_tokens["host"] == 0


async def turn(world: World, clerk: Clerk) -> None:
    await world.ledger.turn(clerk)
    await world.ledger.close()


@pytest.mark.parametrize("damage", ["torn", "link", "pipe"])
def test_foreign_ledger_file_begins_anew_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    world, file = World(tmp_path), tmp_path / "ledger"
    world.report()
    world.ledger.save()
    content = file.read_bytes()
    file.unlink()
    if damage == "torn":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "link":
        file.symlink_to("/dev/zero")
    else:
        os.mkfifo(file)
    world = World(tmp_path)
    assert not world.ledger.savings().total.requests
    assert caplog.text.count("ledger begins anew") == 1
    world.report()
    world.ledger.save()
    assert World(tmp_path).ledger.savings().total.requests == 1


async def test_unwritable_ledger_is_logged_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "SAVE_S", 0.0)
    folder, clerk = tmp_path / "arena", Clerk("test")
    folder.mkdir()
    world = World(folder)
    folder.rmdir()
    with caplog.at_level(logging.WARNING):
        await turn(world, clerk)
        for num_reports in range(1, 4):
            if num_reports == 3:
                folder.mkdir()
            world.report()
            await turn(world, clerk)
    written_ns = (folder / "ledger").stat().st_mtime_ns
    await turn(world, clerk)
    assert (folder / "ledger").stat().st_mtime_ns == written_ns
    assert sum("ledger not saved" in record.message for record in caplog.records) == 1
    kept = pack.unpack((folder / "ledger").read_bytes())
    assert kept.rows[0][1].total[kept.names.index("requests")] == 3
    assert World(folder).ledger.savings().total.requests == 3
    size = (folder / "ledger").stat().st_size
    assert not (folder / "ledger").stat().st_mode & 0o177
    assert len(read_file(folder / "ledger", size)) == size
    with pytest.raises(ValueError, match="more than"):
        read_file(folder / "ledger", size - 1)


def test_blocks_of_two_key_spaces_stay_apart() -> None:
    world, said = World(), RequestReport(HASHES, 64, 0, 0, 0.0, NO_RETENTION)
    for session in (world.session, world.open("second", key_space("large"))):
        world.ledger.report(session, said)
    assert world.followed_tokens == 128 and world.ledger.outlook(0).ceiling_ratio == 0.0
    world.ledger.report(world.session, said)
    assert world.followed_tokens == 192
    assert world.ledger.outlook(0).ceiling_ratio == pytest.approx(1 / 3)


def test_endless_cache_hits_no_less_than_node() -> None:
    """Some estimates, from 64 keys, are below the real hits."""
    world, num_below = World(), 0
    forecast = world.ledger.forecast = Forecast(POLICIES["lru"], 0, 64, 64)
    for _ in range(200):
        world.report(num_blocks=4, hit_tokens=48)
        list(world.ledger.follow())
        found = world.ledger.savings()
        ratio = found.total.hit_tokens["host"] / found.total.prompt_tokens
        num_below += forecast.outlook(0, GIB, forecast.sums.minute).ceiling_ratio < ratio
        assert found.outlook.ceiling_ratio >= ratio
    assert num_below


@pytest.mark.parametrize(("device_hits", "gain"), [(20, 0.05), (15, 0.1), (5, 0.15), (30, 0.0)])
def test_more_memory_gains_nothing_a_tier_has(
    monkeypatch: pytest.MonkeyPatch, device_hits: int, gain: float
) -> None:
    """Of 100 tokens, 10 hit in host memory, 25 on the disk and `device_hits` in the engine."""
    world, forecast = World(), Outlook(100, 0.6, 2 * GIB, 0.15, 0.075)
    monkeypatch.setattr(world.ledger.forecast, "outlook", lambda *_: forecast)
    hits = {"host": 10, "disk": 25}
    usage = Usage(prompt_tokens=100, device_hit_tokens=device_hits, hit_tokens=hits)
    account = Account("", "model", "key space", "engine")
    accounts = world.ledger.accounts
    accounts.add(account, accounts.columns.values(usage), int(time.time() // 60))
    found = world.ledger.outlook(0)
    assert found.gain_ratio == pytest.approx(gain)
    assert found.gib_gain_ratio == pytest.approx(gain / 2)
    assert world.ledger.savings().outlook == found


def test_what_is_exported_begins_with_the_server(tmp_path: Path) -> None:
    """Totals go on from the file; exported counters begin at 0."""
    world = World(tmp_path)
    for number in range(MAX_ACCOUNTS + 3):
        world.session = world.open(f"engine-{number}")
        world.report()
    assert world.ledger.num_folded > 0 and world.ledger.grown == world.ledger.savings().total
    world.ledger.save()
    anew = World(tmp_path).ledger
    assert anew.savings().total == world.ledger.savings().total and anew.accounts.num_folded > 0
    assert anew.num_folded == anew.grown.requests == anew.grown.saved_s == 0

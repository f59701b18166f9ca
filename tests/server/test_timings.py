"""Tests metrics of calls, transfers, event loop and ledger."""

import contextlib
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.processes import ROOT, Server
from hotkv_client import GroupHashes, LoadEnd, LoadRun, RequestReport, TransferStatus
from hotkv_client.paged_engine import PagedEngine
from hotkv_client.types import BlockResult
from hotkv_server.node import event_loop as lag
from tests.server.faulty import FaultyServer, folder
from tests.server.page_support import get
from tests.server.places import Place, place, store
from tests.server.support import block_ids, hashes, http_port
from tests.support.waiting import wait_for

__all__ = ["folder", "place"]
LAYERS, PAGE_BYTES = 2, 64 << 10
SLOT_BYTES = LAYERS * PAGE_BYTES


def read(port: int) -> dict[str, float]:
    """Values by name with labels."""
    lines = get(port, "/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("hotkv_"))
    return {name: float(value) for name, value in pairs}


def connected(server: Server) -> PagedEngine:
    return PagedEngine(server.target, layers=LAYERS, num_blocks=64, page_bytes=PAGE_BYTES).connect()


def test_calls_transfers_and_evicted_blocks_are_timed(own_server: Server) -> None:
    port, blocks = http_port(own_server), hashes(5)
    with contextlib.closing(connected(own_server)) as engine:
        before = read(port)
        names = ("load", "store", "lookup")
        assert all(before[f"hotkv_{name}_seconds_count"] == 0 for name in names)
        assert store(engine, blocks) == {BlockResult.STORED}
        groups = [GroupHashes(0, blocks)]
        assert engine.session.lookup(groups).result(60)[0].all()
        assert engine.session.acquire("l", groups).result(60).pinned[0].all()
        run = LoadRun(0, block_ids(3), block_ids(3, 10))
        assert engine.session.load("l", "l", [run], 20).result(60).status is TransferStatus.DONE
        after = read(port)
        for _ in range(8):
            store(engine, hashes(60))
        filled = read(port)
    for name in ("lookup", "lease", "load", "store"):
        assert after[f"hotkv_{name}_seconds_count"] == 1, name
        assert 0 < after[f"hotkv_{name}_seconds_sum"] < 20, name
        assert after[f'hotkv_{name}_seconds_bucket{{le="+Inf"}}'] == 1
    assert after["hotkv_copy_wait_seconds_count"] == 2
    assert after["hotkv_store_bytes_sum"] == 5 * SLOT_BYTES
    assert after["hotkv_load_bytes_sum"] == 3 * SLOT_BYTES
    assert after['hotkv_load_bytes_bucket{le="262144.0"}'] == 0
    assert after['hotkv_load_bytes_bucket{le="1048576.0"}'] == 1
    assert after["hotkv_copy_busy_seconds_total"] > 0 and after["hotkv_copy_threads"] >= 1
    lags = [after[f"hotkv_loop_lag_{name}_seconds"] for name in ("p50", "p99", "longest")]
    assert lags == sorted(lags) and lags[0] >= 0
    wait_for(lambda: read(port)["hotkv_loop_lag_longest_seconds"] > 0)
    assert "event loop late by" in own_server.cli("status")
    ended = {name: value for name, value in after.items() if "transfers_total" in name and value}
    assert ended == {
        'hotkv_transfers_total{direction="load",outcome="done"}': 1,
        'hotkv_transfers_total{direction="store",outcome="done"}': 1,
    }
    assert filled["hotkv_eviction_age_seconds_count"] == filled["hotkv_evicted_blocks_total"] > 0
    assert filled['hotkv_eviction_age_seconds_bucket{le="60.0"}'] > 0


def test_transfers_that_fail_are_counted_and_not_timed(folder: Path) -> None:
    with FaultyServer(folder, "copy", "assert") as server:
        server.wait_ready()
        with contextlib.closing(connected(server)) as engine:
            assert store(engine, hashes(2)) == {BlockResult.STORED}
            server.break_it()
            assert store(engine, hashes(2)) != {BlockResult.STORED}
            figures = read(server.port)
    assert figures['hotkv_transfers_total{direction="store",outcome="failed"}'] == 1
    assert figures['hotkv_transfers_total{direction="store",outcome="done"}'] == 1
    assert figures["hotkv_store_seconds_count"] == figures["hotkv_store_bytes_count"] == 1
    assert figures["hotkv_copy_wait_seconds_count"] == 2


def test_counters_of_the_ledger_never_fall(place: Place) -> None:
    """Prometheus would take a fall for a restart."""
    port = http_port(place.start())
    session = place.connect().session
    report = RequestReport(hashes(4), 70, 0, 48, 0.0, saved_s=2.0, report_id=1)
    session.report_requests([report], 0.0)
    session.ping(10)
    before = read(port)
    session.report_requests([], 0.0, loads=[LoadEnd(1, 0.5, failed=True)])
    session.ping(10)
    after = read(port)
    totals = {name: n for name, n in before.items() if name.partition("{")[0].endswith("_total")}
    assert totals and all(after[name] >= value for name, value in totals.items())
    assert after["hotkv_ledger_saved_seconds_total"] == 2.0
    assert after["hotkv_ledger_taken_back_seconds_total"] == 2.0
    assert after['hotkv_ledger_hit_tokens_total{tier="host"}'] == 48
    assert after['hotkv_ledger_missed_tokens_total{reason="failed_load"}'] == 48


DELAYS_S = st.lists(st.sampled_from([0.0, 0.004, 0.006, 0.3, 7.0]), max_size=40)


def made_up_lag(timers: list[Callable[[], None]], clock: list[float]) -> Any:
    """Patches the module: its time is `clock[0]`, timers go to `timers`, threads don't start."""

    def later(after_s: float, tick: Callable[[Any], None], loop: Any) -> mock.Mock:
        timers.append(partial(tick, loop))
        return mock.Mock()

    loop: Any = SimpleNamespace(call_later=later)
    patches = contextlib.ExitStack()
    for name, value in (
        ("time", SimpleNamespace(monotonic=lambda: clock[0])),
        ("asyncio.get_running_loop", lambda: loop),
        ("threading.Thread", mock.Mock()),
        ("Stacks", mock.Mock()),
    ):
        patches.enter_context(mock.patch(f"{lag.__name__}.{name}", value))
    return patches


@given(DELAYS_S, st.integers(0, 99))
def test_delay_counts_as_often_as_measured(delays: list[float], seconds: int) -> None:
    """While nothing is late, up to 16 ticks are left out. They count with the next delay."""
    clock, timers = [100.0], list[Callable[[], None]]()
    samples, num_ticks = [0.0], 1
    with made_up_lag(timers, clock):
        loop_lag = lag.LoopLag()
        loop_lag.start()
        for delay_s in [0.0] * 3 + delays:
            assert loop_lag._due_s == pytest.approx(clock[0] + num_ticks * lag.TICK_S)
            clock[0] = loop_lag._due_s + delay_s
            timers.pop()()
            samples += [delay_s] * num_ticks
            num_ticks = 1 if delay_s > 0.005 else min(2 * num_ticks, 16)
        found, last = loop_lag.read(), samples[-int(lag.WINDOW_S / lag.TICK_S) :]
        shown = (found.p50_s, found.p99_s, found.longest_s, loop_lag.longest_s(seconds))
        expected = (*np.percentile(last, (50, 99, 100)), max(last[-max(1, 50 * seconds) :]))
        assert shown == pytest.approx(expected, abs=1e-6)


HOLDS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from([0.01, 0.1, 0.5, 3.0, 30.0])),
    min_size=1,
    max_size=8,
)


HOLDS = """
import asyncio, time
from hotkv_server.node import event_loop as lag

async def hold():
    loop_lag = lag.LoopLag()
    loop_lag.start()
    await asyncio.sleep(5 * lag.TICK_S)
    frame = {"hold": time.sleep}
    for name, seconds in (("held_first", 0.3), ("held_a_while", 0.2), ("held_long", 1.0)):
        code = f"def {name}(): hold({seconds})"
        exec(compile(code, "/somewhere/hotkv_made/up.py", "exec"), frame)
    frame["held_first"]()
    await asyncio.sleep(3 * lag.TICK_S)
    frame["held_a_while"]()
    frame["held_long"]()
    await asyncio.sleep(3 * lag.TICK_S)
    loop_lag.close()
    found = loop_lag.read()
    assert found.longest_s > 0.9 and found.p50_s < 0.9
    print(found.held_by)

asyncio.run(hold())
"""
"""One function holds the loop for 0.3 s, then two for 1.2 s."""


def test_what_holds_the_loop_is_named() -> None:
    """In a process of its own: with many threads, faulthandler leaves the loop's out."""
    found = subprocess.run([sys.executable, "-c", HOLDS], capture_output=True, text=True, cwd=ROOT)
    assert found.stdout.strip() == "hotkv_made.up:held_long", found.stderr

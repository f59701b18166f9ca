"""Tests of the metrics of calls, transfers, the event loop and the ledger (which counts hits and
saved time), as a real server exports them to Prometheus."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.processes import Server
from hotkv_client import GroupHashes, LoadEnd, LoadRun, RequestReport, TransferStatus
from hotkv_client.testing import PagedEngine
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
    """Returns the values of the server's metrics at /metrics, by name with labels."""
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
    """Reports a hit, and then that its load has failed, so that the ledger subtracts the hit and
    its saved time. No exported counter may fall: Prometheus would take this for a restart at 0."""
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


@given(DELAYS_S, st.integers(0, 99), st.booleans())
def test_a_delay_counts_as_often_as_it_was_measured_for(
    delays: list[float], seconds: int, is_refused: bool
) -> None:
    """Compares `LoopLag`, which measures how late the event loop's timer fires, with a model on a
    made-up clock. While nothing is late, `LoopLag` sets its timer up to 16 times less often. A
    delay that is measured then must count once for each tick that was left out.

    is_refused: if True, the system refuses the thread in which faulthandler would write the stacks
        of a loop that hangs. The figures must be the same without it.
    """
    now_s, timers, armed_s = 100.0, list[tuple[float, Any]](), list[float]()
    samples, num_ticks = [0.0], 1

    def later(after_s: float, tick: Callable[[Any], None], loop: Any) -> mock.Mock:
        timers.append((now_s + after_s, partial(tick, loop)))
        return mock.Mock()

    loop: Any = SimpleNamespace(call_later=later)
    with (
        mock.patch.object(lag, "time", SimpleNamespace(monotonic=lambda: now_s)),
        mock.patch.object(lag.asyncio, "get_running_loop", lambda: loop),
        mock.patch.object(lag.threading, "Thread"),
        mock.patch.object(lag, "faulthandler") as handler,
    ):
        arms: Any = RuntimeError if is_refused else lambda after: armed_s.append(now_s + after)
        handler.dump_traceback_later.side_effect = arms
        loop_lag = lag.LoopLag()
        loop_lag.start()
        for delay_s in [0.0] * 3 + delays:
            ((due_s, tick),) = timers
            assert due_s == pytest.approx(now_s + num_ticks * lag.TICK_S)
            now_s = due_s + delay_s
            timers.clear()
            tick()
            samples += [delay_s] * num_ticks
            num_ticks = 1 if delay_s > 0.005 else min(2 * num_ticks, 16)
            # If the loop hangs, faulthandler writes its stacks. It must do so at least HUNG_S after
            # the last tick, and at most ARM_S later.
            latest_s = now_s + lag.HUNG_S + lag.ARM_S
            assert is_refused or now_s + lag.HUNG_S <= armed_s[-1] <= latest_s
            assert all(after - before > lag.ARM_S for before, after in pairwise(armed_s))
        found, last = loop_lag.read(), samples[-int(lag.WINDOW_S / lag.TICK_S) :]
        shown = (found.p50_s, found.p99_s, found.longest_s, loop_lag.longest_s(seconds))
        expected = (*np.percentile(last, (50, 99, 100)), max(last[-max(1, 50 * seconds) :]))
        assert shown == pytest.approx(expected, abs=1e-6)


async def test_what_holds_the_loop_is_named() -> None:
    loop_lag = lag.LoopLag()
    loop_lag.start()
    await asyncio.sleep(5 * lag.TICK_S)
    # Blocks the loop in functions of a fake hotkv module: first for 0.3 s in one of them, then for
    # 1.2 s in two. The report must name the function, the innermost frame that belongs to hotkv,
    # that blocked the loop for most of the longest delay.
    frame: dict[str, Any] = {"__name__": "hotkv_made_up", "hold": time.sleep}
    for name, seconds in (("held_first", 0.3), ("held_a_while", 0.2), ("held_long", 1.0)):
        exec(f"def {name}(): hold({seconds})", frame)
    frame["held_first"]()
    await asyncio.sleep(3 * lag.TICK_S)
    frame["held_a_while"]()
    frame["held_long"]()
    await asyncio.sleep(3 * lag.TICK_S)
    loop_lag.close()
    found = loop_lag.read()
    assert found.longest_s > 0.9 and found.p50_s < 0.9
    assert found.held_by == "hotkv_made_up:held_long"

"""The server says how late its event loop is, and names the function that held it."""

import asyncio
import time

from demo.processes import Server
from hotkv_client.admin import AdminClient
from hotkv_server.node import event_loop as lag
from tests.support.waiting import wait_for


def hold(seconds: float) -> None:
    """Keeps the loop, as a call that computes would."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        pass


def test_what_holds_the_loop_is_named() -> None:
    async def scenario() -> lag.Lag:
        loop_lag = lag.LoopLag()
        loop_lag.start()
        await asyncio.sleep(5 * lag.TICK_S)
        for seconds in (0.3, 1.0):
            frame = {"__name__": "hotkv_made_up", "hold": hold}
            exec(f"def held_{int(seconds * 10)}(): hold({seconds})", frame)
            frame[f"held_{int(seconds * 10)}"]()  # type: ignore[operator]
            await asyncio.sleep(3 * lag.TICK_S)
        loop_lag.close()
        return loop_lag.read()

    found = asyncio.run(scenario())
    # The module under test stands nearer than the one that called it.
    assert found.longest_s > 0.9 and found.p50_s < 0.9 and found.held_by == "hotkv_made_up:held_10"


def test_a_loop_that_waits_is_not_late() -> None:
    async def scenario() -> lag.Lag:
        loop_lag = lag.LoopLag()
        loop_lag.start()
        before = loop_lag.read()
        loop_lag.close()
        return before

    assert asyncio.run(scenario()) == lag.Lag(0.0, 0.0, 0.0, "")


def test_the_server_says_how_late_its_loop_is(own_server: Server) -> None:
    with AdminClient(own_server.target) as admin:
        wait_for(lambda: admin.info()["counters"]["loop_lag_longest_seconds"] > 0)
        counters = admin.info()["counters"]
        assert (
            0
            <= counters["loop_lag_p50_seconds"]
            <= counters["loop_lag_p99_seconds"]
            <= counters["loop_lag_longest_seconds"]
        )
    assert "event loop late by" in own_server.cli("status")

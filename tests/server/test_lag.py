"""The server says how late its event loop is, and names the function that held it."""

import asyncio
import time

from demo.processes import Server
from hotkv_client.admin import AdminClient
from hotkv_server.node import event_loop as lag
from tests.support.waiting import wait_for


async def test_what_holds_the_loop_is_named() -> None:
    loop_lag = lag.LoopLag()
    loop_lag.start()
    assert loop_lag.read() == lag.Lag(0.0, 0.0, 0.0, "")
    await asyncio.sleep(5 * lag.TICK_S)
    # A module under test stands nearer than the one that called it.
    frame = {"__name__": "hotkv_made_up", "hold": time.sleep}
    for seconds in (0.3, 1.0):
        name = f"held_{int(seconds * 10)}"
        exec(f"def {name}(): hold({seconds})", frame)
        frame[name]()  # type: ignore[operator]
        await asyncio.sleep(3 * lag.TICK_S)
    loop_lag.close()
    found = loop_lag.read()
    assert found.longest_s > 0.9 and found.p50_s < 0.9 and found.held_by == "hotkv_made_up:held_10"


def test_the_server_says_how_late_its_loop_is(own_server: Server) -> None:
    with AdminClient(own_server.target) as admin:
        wait_for(lambda: admin.info()["counters"]["loop_lag_longest_seconds"] > 0)
        counters = admin.info()["counters"]
    lags = [counters[f"loop_lag_{name}_seconds"] for name in ("p50", "p99", "longest")]
    assert lags == sorted(lags) and lags[0] >= 0
    assert "event loop late by" in own_server.cli("status")

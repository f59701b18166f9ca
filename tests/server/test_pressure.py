"""Pressure: which calls end, and when, if memory grows that the books do not explain."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hotkv.errors import HotKVError
from hotkv_server.rpc import pressure
from hotkv_server.rpc.guests import Guests
from hotkv_server.rpc.pressure import (
    BARE_TICK,
    GROWTH_BYTES,
    GUESTS_TICK,
    PATIENCE_TICKS,
    SILENT_TICK,
    UNEXPLAINED_BYTES,
    Pressure,
    heap_reader,
)
from hotkv_server.runtime.health import Health

MUCH = UNEXPLAINED_BYTES + (1 << 20)


class Session:
    """As much of a session as is looked at."""

    def __init__(self, number: int, silent_s: float, *, has_memory: bool) -> None:
        self.record = SimpleNamespace(number=number)
        self.heard_s = time.monotonic() - silent_s
        self.memory = object() if has_memory else None
        self.jobs: dict[str, Any] = {}
        self.num_reads = 0
        self.why: HotKVError | None = None

    def end(self, why: HotKVError) -> None:
        self.why = why


def watching(*sessions: Session) -> Pressure:
    leases = SimpleNamespace(of_session=lambda number: [])
    core = SimpleNamespace(config=SimpleNamespace(capacity=0, max_blocks_per_call=0), leases=leases)
    node: Any = SimpleNamespace(
        core=core, sessions=list(sessions), books_bytes=lambda: 0, health=Health()
    )
    return Pressure(node, Guests(9), None)


def test_those_go_first_that_lose_least() -> None:
    bare, engine, busy = (
        Session(1, 9, has_memory=False),
        Session(2, 9, has_memory=True),
        Session(3, 0, has_memory=False),
    )
    watch, ended = watching(bare, engine, busy), []
    for _ in range(SILENT_TICK):
        watch.judge(MUCH)
        ended.append([session.record.number for session in (bare, engine, busy) if session.why])
    assert ended == [[]] * (BARE_TICK - 1) + [[1]] * (SILENT_TICK - BARE_TICK) + [[1, 2]]


def test_what_passes_ends_nothing() -> None:
    """A large message that is on its way for a moment, again and again."""
    silent = Session(1, 9, has_memory=False)
    watch = watching(silent)
    for _ in range(50):
        for _ in range(GUESTS_TICK):
            watch.judge(MUCH)
        watch.judge(0)
    assert silent.why is None


def test_what_stays_is_the_servers_own_and_ends_sessions_once() -> None:
    """Else an idle engine would open its session again and again, for ever."""
    watch = watching(first := Session(1, 9, has_memory=True))
    for _ in range(SILENT_TICK):
        watch.judge(MUCH)
    assert first.why
    again = Session(2, 9, has_memory=True)
    watch._node.sessions[:] = [again]  # type: ignore[index]
    for _ in range(PATIENCE_TICKS):
        assert not watch._own_bytes
        watch.judge(MUCH)
    assert watch._own_bytes == MUCH
    for _ in range(100):
        watch.judge(0)
    assert again.why is None
    watch.judge(-MUCH)
    assert not watch._own_bytes, "what has gone still counts as the server's own"
    watch.judge(-MUCH)
    assert not watch._own_bytes


@given(st.lists(st.integers(GROWTH_BYTES + 1, 4 * GROWTH_BYTES), min_size=1, max_size=20))
def test_what_grows_on_is_ended_on(steps: list[int]) -> None:
    watch = watching()
    level = MUCH
    for step in steps:
        session = Session(1, 9, has_memory=True)
        watch._node.sessions[:] = [session]  # type: ignore[index]
        for _ in range(SILENT_TICK):
            watch.judge(level)
        assert session.why
        level += step
        watch.judge(level)
    assert not watch._own_bytes


def test_the_heap_is_read_and_a_late_request_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    read = heap_reader()
    assert read is not None
    before = read().used_bytes
    kept = bytearray(8 << 20)
    assert read().used_bytes - before >= len(kept)
    monkeypatch.setattr(pressure, "TICK_S", 0.01)

    async def scenario() -> None:
        watch = watching()
        watch.start()
        with pytest.raises(HotKVError, match="did not come whole"), watch._guests.stay(0.05):
            await asyncio.sleep(20)
        watch.stop()

    asyncio.run(scenario())

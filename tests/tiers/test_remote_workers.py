"""Tests `Workers` over fake connections: late answers, slow and failing connects, the order of
calls."""

import contextlib
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from hotkv_server.tiers.remote import calls, workers
from hotkv_server.tiers.remote.calls import Part, PartQueue, RemoteCall
from hotkv_server.tiers.remote.client import LateError, LostError, UnusableError
from hotkv_server.tiers.remote.workers import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    RemoteHealth,
    Timeouts,
    Workers,
)
from tests.support.waiting import wait_for


class Client:
    is_closed = False
    moved_s = 0.0

    def is_fresh(self) -> bool:
        return True

    def close(self) -> None:
        self.is_closed = True


class World:
    """Connecting waits for `opens`, and fails if `is_away`. `connected`: the thread of each
    connection; `ended`: calls."""

    is_away, num_tries = False, 0

    def __init__(self, connections: int, *, connects_first: bool = False) -> None:
        self.opens = threading.Event()
        self.opens.set()
        self.clients: list[Client] = []
        self.connected: list[str] = []
        self.workers = Workers(
            "a store", connections, Timeouts(60, 60), self._connect, connects_first=connects_first
        )
        self.ended: list[str] = []

    def _connect(self, until_s: float) -> Client:
        self.num_tries += 1
        assert self.opens.wait(60)
        if self.is_away:
            raise UnusableError("is away")
        self.connected.append(threading.current_thread().name)
        self.clients.append(Client())
        return self.clients[-1]

    def ask(
        self,
        name: str,
        do: Callable[[Client, float], None] = lambda client, until_s: None,
        *,
        moves_blocks: bool = True,
        within_s: float = 60,
    ) -> None:
        call = RemoteCall(1, lambda call: self.ended.append(name))
        part = Part(call, do, time.monotonic() + within_s, moves_blocks)  # type: ignore[arg-type]
        self.workers.submit(call, [part])

    def wait_for(self, *names: str) -> None:
        wait_for(lambda: set(names) <= set(self.ended), f"{names} did not end")

    def close(self) -> None:
        self.opens.set()
        self.workers.close()


def waits_until(limits: list[float], answers: threading.Event) -> Callable[[Client, float], None]:
    """A request that notes its time left in `limits` and waits for `answers`, or raises
    LateError."""

    def do(client: Client, until_s: float) -> None:
        limits.append(until_s - time.monotonic())
        if not answers.wait(until_s - time.monotonic()):
            raise LateError("has not answered in time")

    return do


def test_abandoned_read_ends_its_connection_alone() -> None:
    with contextlib.closing(World(1)) as world:
        hangs = waits_until([], threading.Event())
        wait_for(
            lambda: (
                world.ask("read", hangs, within_s=0.2)
                or any(one.is_closed for one in world.clients)
            ),
            "no connection ended",
        )
        assert not world.workers.problem


def test_a_closed_queue_gives_and_takes_no_part() -> None:
    queue, call = PartQueue(), RemoteCall(1, lambda call: None)
    parts = [
        Part(call, lambda client, until_s: None, moves_blocks=n > 0, is_write=n == 2)
        for n in range(3)
    ]
    for part in parts:
        assert queue.put([part])
    assert queue.close() == parts and queue.get(0.0) is None
    assert not queue.put(parts) and not queue.close()


def test_questions_go_before_reads() -> None:
    world, goes, limits = World(1), threading.Event(), list[float]()
    try:
        world.ask("first", waits_until(limits, goes))
        wait_for(lambda: limits, "it did not begin")
        for name in ("a", "b"):
            world.ask(name)
        world.ask("question", moves_blocks=False)
        goes.set()
        world.wait_for("a", "b", "question")
        assert world.ended == ["first", "question", "a", "b"]
    finally:
        world.close()


def test_writes_do_not_wait_for_ever_behind_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: now_s))
    queue, call = PartQueue(), RemoteCall(1, lambda call: None)
    read, write = (Part(call, lambda client, until_s: None, is_write=n > 0) for n in range(2))
    assert queue.put([read, read, write, write])
    assert queue.get(0.0) is read
    for _ in range(2):
        now_s += calls.PATIENCE_S
        assert queue.get(0.0) is read and queue.put([read])
        now_s += 0.01
        assert queue.get(0.0) is write
        # Reads go first again.
        assert queue.get(0.0) is read and queue.put([read])


def test_free_connection_is_used_before_waiting() -> None:
    world, begins = World(2, connects_first=True), threading.Barrier(3)

    def lost_by_first(client: Client, until_s: float) -> None:
        begins.wait(60)
        if threading.current_thread().name.endswith("-0"):
            raise LostError("closed the connection")
        wait_for(lambda: world.num_tries > 3, "it does not connect again")

    try:
        # Two for blocks, one for control calls.
        wait_for(lambda: len(world.clients) == 3, "it does not connect")
        world.opens.clear()
        names = ["one", "other", *map(str, range(20))]
        for name in names[:2]:
            world.ask(name, lost_by_first)
        for name in names[2:]:
            world.ask(name)
        begins.wait(60)
        world.wait_for(*names)
        assert len(world.clients) == 3 and not world.workers.stalled_s(time.monotonic() + 9)
    finally:
        world.close()


def test_all_threads_connect_after_a_problem() -> None:
    """Else a later call would have to wait for the second."""
    world, both = World(2, connects_first=True), threading.Barrier(2)

    def fail(client: Client, until_s: float) -> None:
        both.wait(60)
        raise UnusableError("is away")

    try:
        wait_for(lambda: len(world.clients) == 3, "it does not connect")
        world.is_away = True
        for name in ("one", "other"):
            world.ask(name, fail)
        world.wait_for("one", "other")
        world.opens.clear()
        world.is_away, num_tries = False, world.num_tries
        wait_for(lambda: world.num_tries > num_tries, "it is not tried again")
        world.opens.set()
        # The control calls' thread may connect too.
        wait_for(
            lambda: {"hotkv-a-0", "hotkv-a-1"} <= {*world.connected[3:]},
            "a thread does not connect",
        )
    finally:
        world.close()


def test_all_that_wait_for_a_connection_show() -> None:
    with contextlib.closing(World(2, connects_first=True)) as world:
        wait_for(lambda: len(world.clients) == 3, "it does not connect")
        world.opens.clear()
        both = threading.Barrier(2)

        def lost(client: Client, until_s: float) -> None:
            both.wait(60)
            raise LostError("closed the connection")

        for name in ("one", "other"):
            world.ask(name, lost)
        world.ask("waits")
        world.wait_for("one", "other")
        wait_for(lambda: world.workers.stalled_s(time.monotonic()) > 0, "it does not show")
        world.opens.set()
        world.wait_for("waits")


def test_the_longest_wait_shows() -> None:
    world, limits, answers = World(2), list[float](), threading.Event()
    try:
        for number, name in enumerate(("longest", "later"), 1):
            world.ask(name, waits_until(limits, answers))
            wait_for(lambda n=number: len(limits) == n, "it did not begin")
            if name == "longest":
                began_s = time.monotonic()
        now_s = time.monotonic()
        assert world.workers.stalled_s(now_s) >= now_s - began_s
        answers.set()
        world.wait_for("longest", "later")
    finally:
        world.close()


def test_an_exception_ends_the_connection_and_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(World(1)) as world:
        world.ask("odd", lambda client, until_s: 1 / 0)  # type: ignore[arg-type, return-value]
        world.ask("next")
        world.wait_for("odd", "next")
        assert "a store: ZeroDivisionError" in caplog.text and not world.workers.problem
        assert [one.is_closed for one in world.clients if one.is_closed] == [True]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_died_shows() -> None:
    def die(client: Client, until_s: float) -> None:
        raise SystemExit

    with contextlib.closing(World(2)) as world:
        assert world.workers.is_alive()
        world.ask("dies", die)
        wait_for(lambda: not world.workers.is_alive(), "it does not show")
    assert world.workers.is_alive()


def test_pauses_between_connects_double_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: now_s))
    health = RemoteHealth("a store")
    assert health.claim()
    for _ in range(2):
        expected_s = FIRST_WAIT_S
        for _ in range(30):
            health.fail("is away")
            wait_s = health.retry_at_s - now_s
            assert 0.7 * expected_s < wait_s < 1.3 * expected_s and not health.claim()
            # Another thread's failure does not change it.
            health.fail("hangs")
            assert health.retry_at_s == now_s + wait_s and health.problem == "a store hangs"
            now_s = health.retry_at_s
            assert health.claim() and not health.claim()
            expected_s = min(LONGEST_WAIT_S, 2 * expected_s)
        health.connected()
        health.worked()
        assert not health.problem and not health.claim()

"""Loads that never end, and workers without a session: a late write changes no block in use."""

import logging
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotkv_client.types import LinkState
from hotkv_vllm.link import StateLog, await_server
from hotkv_vllm.metadata import STILL_CONNECTING
from hotkv_vllm.scheduler.sharing import ABSENCE_PATIENCE_S, WorkerLinks
from hotkv_vllm.worker import rank_loads
from tests.vllm.engine_core import Core
from tests.vllm.harness import prompt

PROMPT = prompt(1, 200)


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_loads, "CANCEL_GRACE_S", 0.0)


def free_blocks(one: Any) -> int:
    count: int = one.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return count


def hang(one: Any, server: Any, name: str = "a", max_tokens: int = 4) -> Any:
    """The load's future, and a function that writes late."""
    server.hold, server.ack_cancels = {"load"}, False
    one.add(name, PROMPT, max_tokens)
    while not server.held:
        one.step()
    ((_, _, future, act),) = server.held
    server.held.clear()
    server.hold = set()
    return future, act


@pytest.mark.parametrize("way", ["pause", "sleep"])
def test_engine_pauses_and_sleeps_while_holding_blocks(engine: Any, server: Any, way: str) -> None:
    """vLLM's reset needs all blocks unused."""
    engine().fill(PROMPT)
    one = engine(extra={"load_timeout_s": 0.0, "store_timeout_s": 0.0})
    pool, core = one.scheduler.kv_cache_manager.block_pool, Core(one)
    before, num_blocks = free_blocks(one), pool.num_gpu_blocks
    future, act = hang(one, server)
    one.run(100)
    assert free_blocks(one) == before - 6 and pool.get_usage() == 0
    getattr(core, way)()
    core.wake_up()
    for index in range(4):
        one.add(f"b{index}", prompt(20 + index, 400), 20)
    for step in range(60):
        one.step()
        if step == 10:
            # Its blocks are free or, during sleep, mapped only by the server.
            future.set_result(act())
    one.run()
    one.generate("end", prompt(9, 10), 2)
    assert free_blocks(one) == before and pool.num_gpu_blocks == num_blocks
    one.hit(PROMPT)


# ----------------------------------------------------------------------------------- absent workers


def heard(monkeypatch: pytest.MonkeyPatch, level: str = "warning") -> list[str]:
    lines: list[str] = []
    logger = logging.getLogger("vllm.hotkv")
    monkeypatch.setattr(logger, level, lambda text, *values: lines.append(text % values))
    return lines


def test_refused_worker_is_logged_once_offers_nothing(
    engine: Any, server: Any, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only once the session is there, "hotkv on" is logged."""
    engine().fill(PROMPT)
    lines = heard(monkeypatch, "info")
    server.refuse_workers = "NO_DEVICE: this server has no CUDA"
    one = engine()
    server.calls.clear()
    assert [one.hit(PROMPT) for _ in range(3)] == [0, 0, 0]
    assert not {"acquire", "load", "store", "lookup"} & {kind for kind, _ in server.calls}
    (line,) = warnings
    for words in ("worker 0 has no session", server.refuse_workers, "hotkv.target"):
        assert words in line
    assert not any(text.startswith("hotkv on") for text in lines)
    server.refuse_workers = ""
    one.generate("step", prompt(9, 10), 2)
    assert one.hit(PROMPT) == 192
    assert one.counters["unserved_requests"] == 4 and "failed_loads" not in one.counters
    assert sum(text.startswith("hotkv on") for text in lines) == 1


def test_session_change_is_logged_once_with_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines: list[tuple[int, str]] = []
    logger = logging.getLogger("vllm.hotkv")
    monkeypatch.setattr(logger, "log", lambda level, text, *v: lines.append((level, text % v)))
    log = StateLog("scheduler", "host:1", logging.INFO)
    log.waited(0.0)
    assert not lines
    log.waited(1.0)
    log(LinkState.ABSENT, "no server answers")
    log.waited(1.0)
    assert log.why == "no server answers"
    log(LinkState.CONNECTED, "connected")
    log.waited(1.0)
    # The session opens just when the wait ends: no warning.
    StateLog("scheduler", "host:1", logging.INFO)(LinkState.CONNECTED, "connected")
    (warning, line), there, (level, _) = lines
    assert level == logging.DEBUG and warning == logging.WARNING and log.why == "connected"
    assert "hotkv.target host:1 (no answer within 1 s)" in line
    assert there == (logging.INFO, "hotkv scheduler: the KV cache server is there (connected)")
    # A refused socket is logged at once.
    address = str(tmp_path / "there.sock")
    with socket.create_server(address, family=socket.AF_UNIX):
        StateLog("scheduler", f"unix:{address}", logging.INFO).waited(0.0)
    assert len(lines) == 3
    os.unlink(address)
    StateLog("scheduler", f"unix:{address}", logging.INFO).waited(0.0)
    assert len(lines) == 4 and f"(there is no {address})" in lines[-1][1]
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(address)
    StateLog("scheduler", f"unix:{address}", logging.INFO).waited(0.0)
    assert len(lines) == 5 and f"({address}: Connection refused)" in lines[-1][1]


def test_start_without_patience_opens_no_session() -> None:
    session: Any = SimpleNamespace(wait_connected=lambda _: False, wait_opened=lambda _: True)
    assert [await_server(session, wait_s, 7.0) for wait_s in (0.0, 0.5)] == [False, True]


class LinksMachine(RuleBasedStateMachine):
    """`WorkerLinks` and its messages, while sessions come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.warnings, self.lines = heard(self.patch), heard(self.patch, "info")
        self.links, self.now_s = WorkerLinks(), 0.0
        self.num_streams, self.is_connected = 1, True
        self.absent: set[int] = set()
        self.warned: set[int] = set()
        # When the scheduler side first learned of an absent worker.
        self.news_s: dict[int, float] = {}

    def teardown(self) -> None:
        self.patch.undo()

    @property
    def stream(self) -> int:
        return self.num_streams if self.is_connected else 0

    @rule(seconds=st.sampled_from([0.5, ABSENCE_PATIENCE_S, 3600.0]))
    def idles(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(loses=st.booleans())
    def scheduler_connects(self, loses: bool) -> None:
        self.num_streams += 1
        self.is_connected = not loses
        self.news_s.clear()

    @rule(rank=st.integers(0, 1), why=st.sampled_from(["", "lost", STILL_CONNECTING]))
    def tells(self, rank: int, why: str) -> None:
        self.links.update({rank: why}, self.now_s, self.stream)
        if why:
            since_s = self.news_s.setdefault(rank, self.now_s)
            self.absent.add(rank)
            is_late = self.is_connected and self.now_s >= since_s + ABSENCE_PATIENCE_S
            if is_late and rank not in self.warned:
                self.warned.add(rank)
                assert f"worker {rank} has no session" in self.warnings.pop()
            return
        self.absent.discard(rank)
        self.news_s.pop(rank, None)
        if rank in self.warned:
            self.warned.remove(rank)
            assert f"worker {rank} has a session" in self.lines.pop()

    @invariant()
    def agrees(self) -> None:
        assert not self.warnings and not self.lines
        assert self.links.are_complete == (not self.absent)
        if self.is_connected:
            assert self.links.will_say(self.stream) == bool(self.absent - self.news_s.keys())


TestLinks = LinksMachine.TestCase
# A warning needs three certain rules in a row.
TestLinks.settings = settings(max_examples=200)

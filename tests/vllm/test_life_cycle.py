"""A connector from start to end: all is released, no order of calls breaks it."""

import functools
import gc
import os
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hotkv_client.session import Session
from hotkv_vllm.compat import Unsupported
from hotkv_vllm.worker import layout
from tests.doubles.fake import FakeServer
from tests.support.waiting import wait_for
from tests.vllm.harness import Engine, prompt
from tests.vllm.oracle import answer_of, audit
from tests.vllm.ordered_server import RealServer, engine_at
from tests.vllm.processes import Daemon
from tests.vllm.specs import full_model, hybrid_model, mixed_model

PROMPT, OTHER = prompt(1, 200), prompt(2, 40)
USABLE = 192
Make = Callable[..., Engine]


@pytest.fixture
def at_daemon(shared_daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    return functools.partial(engine_at, shared_daemon, tmp_path, monkeypatch)


def held(pid: int | str = "self") -> Counter[str]:
    """Of this process it counts threads and shared files too."""
    found = Counter[str]()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue
        found["fd " + re.sub(r"[:\[\d].*", "", target.replace("memfd:", "memfd "))] += 1
    for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
        if match := re.search(r"memfd:(\S+)|/dev/shm/(hotkv|torch)", line):
            found[f"map {match[1] or match[2]}"] += 1
    if pid == "self":
        names = [thread.name for thread in threading.enumerate()]
        found.update(f"thread {name}" for name in names if name.startswith("hotkv"))
        own = f"torch_{os.getpid()}_"
        found.update("file" for name in os.listdir("/dev/shm") if name.startswith(own))
    return found


ENGINES = pytest.mark.parametrize(
    ("model", "settings"),
    [
        pytest.param(full_model, {}, id="v1"),
        pytest.param(hybrid_model, {"pipelined": True}, id="async", marks=pytest.mark.long),
        pytest.param(mixed_model, {"v2": True}, id="v2-fences", marks=pytest.mark.long),
    ],
)


@pytest.mark.long
@ENGINES
def test_engines_one_after_another_leave_nothing_behind(
    shared_daemon: Daemon, at_daemon: Make, model: Any, settings: dict[str, Any]
) -> None:
    """Each engine is shut down amid transfers."""

    gc.collect()
    others = held()

    def life(name: str) -> weakref.ref[Engine]:
        one = at_daemon(specs=model(), **settings)
        assert one.generate(name, PROMPT, 4)[0] == answer_of(PROMPT, 4)
        one.drop_local()
        one.add("under way", [*PROMPT, *prompt(2, 200)], 4)
        one.steps(3)
        assert {"map hotkv-fence", "thread hotkv-session-worker"} <= (held() - others).keys()
        wait_for(lambda: len(shared_daemon.admin("sessions")) == 2, "both sessions")
        one.shutdown()
        # At once, although the engine object lives on.
        left = held() - others
        assert not [what for what in left if "hotkv" in what], left
        return weakref.ref(one)

    life("a")
    gc.collect()
    wait_for(lambda: not shared_daemon.admin("sessions"), "the end of the sessions")
    before, at_server = held(), held(shared_daemon.pid)
    for name in "bc":
        ended = life(name)
        gc.collect()
        assert ended() is None
        # The server releases a moment after a session's end.
        wait_for(lambda: not held() - before, "the release of the engine's own resources")
        wait_for(lambda: not held(shared_daemon.pid) - at_server, "the release by the server")
        wait_for(lambda: not shared_daemon.admin("sessions"), "the end of the sessions")


def test_export_breaking_midway_closes_what_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storages = {f"{number}": torch.zeros(1 << 16).untyped_storage() for number in range(3)}
    share, shared = layout._share_cpu, []

    def breaks(storage: torch.UntypedStorage) -> int:
        if len(shared) == 2:
            raise Unsupported("no room")
        shared.append(share(storage))
        return shared[-1]

    monkeypatch.setattr(layout, "_share_cpu", breaks)
    with pytest.raises(Unsupported, match="no room"):
        layout.export(layout.EngineMemoryMap(storages=storages), 1, 0, "")
    for fd in shared:
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(fd)


@pytest.mark.parametrize("worker_first", [True, False], ids=["worker first", "scheduler first"])
@pytest.mark.parametrize("pipelined", [False, True], ids=["sync", "async"])
def test_shutdown_at_any_time_and_twice(
    server: FakeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pipelined: bool,
    worker_first: bool,
) -> None:
    for num_steps in range(6):
        one = Engine(server, tmp_path / "model", monkeypatch, pipelined=pipelined)
        server.hold, server.spoil_loads = {"store", "load"}, True
        tokens = [*PROMPT, num_steps]
        one.add("a", tokens, 8)
        one.steps(num_steps)
        sides = [one.worker, one.connector] if worker_first else [one.connector, one.worker]
        for side in (*sides, *sides):
            side.shutdown()
            one.step()
        server.resume()
        rank = one.worker._worker.rank
        assert rank.memory is None and rank.session is None
        assert one.connector._scheduler.cache is None
        one.run()
        assert one.outputs["a"] == answer_of(tokens, 8) and one.finished["a"] == "length"
        one.fill(OTHER)
        assert one.hit(OTHER) == 0
        audit(server, [one])
        assert "callback_errors" not in one.counters
        assert all(session.closed for session in server.sessions)


def test_engine_without_server_waits_as_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits only at its start, and closed sessions leave no thread."""
    target = f"unix:{tmp_path}/none.sock"
    server: Any = RealServer(target)
    waits_s, threads_that_go_on, wait, close = [], [], Session.wait_connected, Session.close

    def noted_wait(session: Session, timeout_s: float) -> bool:
        waits_s.append(timeout_s)
        return wait(session, timeout_s)

    def noted_close(session: Session) -> None:
        close(session)
        threads_that_go_on.append(session._life.thread.is_alive())

    monkeypatch.setattr(Session, "wait_connected", noted_wait)
    monkeypatch.setattr(Session, "close", noted_close)
    extra = {"target": target, "weights_identity": "any", "startup_wait_s": 0.05}
    one = Engine(server, tmp_path / "model", monkeypatch, extra=extra)
    assert one.generate("a", PROMPT, 4) == (answer_of(PROMPT, 4), 0)
    one.shutdown()
    assert waits_s and max(waits_s) <= 0.05
    assert threads_that_go_on and not any(threads_that_go_on)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@ENGINES
def test_memory_that_is_registered_twice(
    engine: Any, server: FakeServer, model: Any, settings: dict[str, Any], busy: bool
) -> None:
    """The first session ends with its transfers, and another opens."""
    one = engine(specs=model(), extra={"store_timeout_s": 0.1}, **settings)
    one.fill(PROMPT)
    one.drop_local()
    server.spoil_loads = True
    longer = [*PROMPT, *prompt(3, 100)]
    if busy:
        server.hold = {"load", "store"}
        one.add("b", longer, 4)
        one.steps(3)
    before = held()
    one.worker.register_kv_caches(one.tensors)
    workers = [session for session in server.sessions if session.layout is not None]
    assert [session.closed for session in workers] == [True, False]
    # The fake server has a descriptor per session.
    assert (held() - before).total() <= 2, held() - before
    server.resume()
    one.run()
    assert one.hit(PROMPT) == USABLE
    if busy:
        assert one.outputs["b"] == answer_of(longer, 4)
    audit(server, [one])
    assert "callback_errors" not in one.counters

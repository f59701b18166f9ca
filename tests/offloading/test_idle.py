"""An engine without other work waits a moment for a hit. An engine with work does not wait."""

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from hotkv_vllm.offloading import scheduler
from hotkv_vllm.offloading.scheduler import DoorScheduler
from tests.offloading.rig import Rig, keys_of, scheduler_side
from tests.support.waiting import stop
from tests.vllm.processes import Daemon

KEYS = keys_of("idle", 30)


@pytest.fixture
def reader(rigs: Any, own_daemon: Daemon) -> Rig:
    """Returns a rig whose server has `KEYS`, stored by another rig."""
    rigs(own_daemon).store(KEYS)
    rig: Rig = rigs(own_daemon)
    return rig


def side_of(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, wait_s: float, num_replicas: int = 1
) -> DoorScheduler:
    monkeypatch.setattr(scheduler, "IDLE_WAIT_S", wait_s)
    return scheduler_side(rig.tier, monkeypatch, num_replicas=num_replicas)


def test_an_idle_engine_hits_in_the_step_that_asks(
    reader: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = side_of(reader, monkeypatch, wait_s=20.0)
    context = reader.request(KEYS)
    assert not side.promote(reader.manager), "nothing was asked for"
    assert reader.lookup_once(context, KEYS) is None
    assert side.promote(reader.manager)
    assert reader.lookup_once(context, KEYS) == len(KEYS)
    reader.load(context, KEYS)


@pytest.mark.parametrize("why", ["a request is under way", "replicas step together"])
def test_an_engine_that_has_something_else_to_do_does_not_wait(
    reader: Rig, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    has_replicas = why == "replicas step together"
    side = side_of(reader, monkeypatch, wait_s=20.0, num_replicas=2 if has_replicas else 1)
    running = SimpleNamespace(request_id="running")
    if not has_replicas:
        side.allocated(running, 0)
    context = reader.request(KEYS)
    assert reader.lookup_once(context, KEYS) is None
    assert not side.promote(reader.manager)
    assert reader.tier.transfers is not None and reader.tier.transfers.is_idle
    side.finished(running)
    assert side.promote(reader.manager) != has_replicas
    side.end_step()
    reader.load(context, KEYS[: reader.lookup(context, KEYS)])


def test_a_server_that_hangs_is_not_waited_for(
    reader: Rig, own_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = side_of(reader, monkeypatch, wait_s=0.001)
    context = reader.request(KEYS)
    stop(own_daemon.pid)
    assert reader.lookup_once(context, KEYS) is None
    assert not side.promote(reader.manager)
    side.end_step()
    assert reader.lookup_once(context, KEYS) is None
    os.kill(own_daemon.pid, signal.SIGCONT)
    reader.load(context, KEYS[: reader.lookup(context, KEYS)])

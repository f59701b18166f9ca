"""Simulated engines at a real server."""

import time
from pathlib import Path
from typing import Any

from hotkv_vllm.link import open_session
from tests.support.waiting import WAIT_S
from tests.vllm.harness import Engine, prompt
from tests.vllm.processes import Daemon


class RealServer:
    patience_s = WAIT_S

    def __init__(self, target: str) -> None:
        self.target = target
        self.open = open_session


def engine_at(daemon: Daemon, folder: Path, monkeypatch: Any, **settings: Any) -> Engine:
    """Engines of one `folder` share a key space."""
    server: Any = RealServer(daemon.target)
    extra = {
        "target": daemon.target,
        "weights_identity": folder.name,
        "lookup_timeout_s": 5.0,
        "startup_wait_s": 20.0,
    } | settings.pop("extra", {})
    return Engine(server, folder / "model", monkeypatch, extra=extra, **settings)


def finish(engine: Engine, timeout_s: float = WAIT_S) -> None:
    """Runs engine and device until all has ended."""
    until_s = time.monotonic() + timeout_s
    worker = engine.worker._worker
    number = 0
    while engine.scheduler.has_requests() or engine.queue or worker.stores or worker.loads:
        assert time.monotonic() < until_s, worker
        if not engine.scheduler.has_requests():
            number += 1
            engine.add(f"still {number}", prompt(99, 4), 1)
        engine.step()
        if engine.device is not None:
            engine.device.run()
        time.sleep(0.001)

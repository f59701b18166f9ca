"""Servers of a `World`: a double that can delay single calls, or real ones with tiers."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hotkv_client.types import RequestReport, SessionConfig
from hotkv_vllm import link
from tests.doubles.fake import FakeServer
from tests.support.waiting import WAIT_S, wait_for
from tests.vllm.harness import Engine
from tests.vllm.oracle import check_stored
from tests.vllm.other_connectors import our_connector
from tests.vllm.processes import Daemon


class Server(Protocol):
    """pace: factor for timeouts; 1.0 for the double.
    told: request reports received.
    hold: kinds of calls, such as "load", whose answers are delayed.
    late: kinds of calls that arrive late.
    """

    told: list[RequestReport]
    up: bool
    hold: set[str]
    late: set[str]
    ack_cancels: bool
    pace: float

    def open(self, config: SessionConfig, *memory: Any, **more: Any) -> Any: ...
    @property
    def is_well(self) -> bool: ...
    def settings(self, number: int) -> dict[str, Any]: ...
    def settle(self, kind: str = "") -> int: ...
    def die(self, *, empty: bool = True) -> None: ...
    def come_back(self) -> None: ...
    def until_connected(self, one: Engine) -> None: ...
    def num_blocks(self, space: bytes, number: int) -> int: ...
    def check(self, engines: Sequence[Engine], weights: Sequence[int]) -> None: ...


class Double(FakeServer):
    pace = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.told: list[RequestReport] = []

    def open(self, *arguments: Any, **named: Any) -> Any:
        return noting(super().open(*arguments, **named), self.told)

    @property
    def is_well(self) -> bool:
        """True if it would answer a flush."""
        return self.up

    def until_connected(self, one: Engine) -> None:
        """Its sessions are always connected."""

    def settings(self, number: int) -> dict[str, Any]:
        return {"startup_wait_s": 0.0}

    def num_blocks(self, space: bytes, number: int) -> int:
        return sum(key[0] == space for key in self.blocks)

    def check(self, engines: Sequence[Engine], weights: Sequence[int]) -> None:
        assert not self.leases, f"leases: {self.leases}"
        assert not self.writes.leases and not self.writes._owners
        check_stored(self, engines, weights)


class Nodes:
    """Servers for each engine, or one for all. To delay any call, SIGSTOP stops all."""

    pace = 50.0
    ack_cancels = True
    patience_s = WAIT_S

    def __init__(self, daemons: Sequence[Daemon], identity: str) -> None:
        """identity: `weights_identity` of all engines."""
        self.daemons, self._identity = daemons, identity
        self.told: list[RequestReport] = []
        self._open = link.open_session
        self.up, self._stopped = True, False
        self._held: dict[str, set[str]] = {}

    def settings(self, number: int) -> dict[str, Any]:
        waits = ("lookup_timeout_s", "load_timeout_s", "store_timeout_s", "reset_timeout_s")
        return {
            "target": self.of(number).target,
            "weights_identity": self._identity,
            "startup_wait_s": WAIT_S,
            **dict.fromkeys(waits, WAIT_S / 2),
        }

    def open(self, *arguments: Any, **named: Any) -> Any:
        return noting(self._open(*arguments, **named), self.told)

    def of(self, number: int) -> Daemon:
        return self.daemons[number % len(self.daemons)]

    @property
    def is_well(self) -> bool:
        return self.up and not self._stopped

    hold = property(lambda self: self._holds("hold"), lambda self, kinds: self._stop("hold", kinds))
    late = property(lambda self: self._holds("late"), lambda self, kinds: self._stop("late", kinds))

    def _holds(self, name: str) -> set[str]:
        return self._held.get(name, set())

    def _stop(self, name: str, kinds: set[str]) -> None:
        self._held[name] = kinds
        self._stopped = any(self._held.values())
        for daemon in self.daemons if self.up else ():
            os.kill(daemon.pid, signal.SIGSTOP if self._stopped else signal.SIGCONT)

    def settle(self, kind: str = "") -> int:
        time.sleep(1e-3)
        return 0

    def die(self, *, empty: bool = True) -> None:
        self.up = False
        for daemon in self.daemons:
            daemon.lose_arena() if empty else daemon.kill()

    def come_back(self) -> None:
        self.up, self._held = True, {}
        for daemon in self.daemons:
            daemon.start()

    def until_connected(self, one: Engine) -> None:
        sessions = [our_connector(one.connector)._scheduler.cache.session]
        sessions += [our_connector(worker)._worker.rank.session for worker in one.each_worker()]
        for session in sessions:
            assert session.wait_connected(WAIT_S), "the engine does not come back to its server"

    def num_blocks(self, space: bytes, number: int) -> int:
        return sum(
            one["block_count"]
            for one in self.of(number).admin("key_spaces")
            if one["fingerprint"] == space.hex()
        )

    def check(self, engines: Sequence[Engine], weights: Sequence[int]) -> None:
        """Engines compare the blocks that they load."""

        def is_idle() -> bool:
            sessions = [one for daemon in self.daemons for one in daemon.admin("sessions")]
            return not any(one["lease_count"] or one["transfer_count"] for one in sessions)

        wait_for(is_idle, "the end of all leases and transfers")


def noting(session: Any, told: list[RequestReport]) -> Any:
    """Also appends its request reports to `told`."""
    report = session.report_requests

    def noted(reports: Sequence[RequestReport], *arguments: Any, **named: Any) -> None:
        told.extend(reports)
        report(reports, *arguments, **named)

    session.report_requests = noted
    return session


def lose_disk(daemon: Daemon) -> None:
    flag = "--tiers.disk.path"
    if flag in daemon.flags:
        for file in Path(daemon.flags[daemon.flags.index(flag) + 1]).iterdir():
            file.unlink()

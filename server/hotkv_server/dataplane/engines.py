"""Combines all copy engines of the server: gives each plan to the engine of its device, and begins
no job before its gate has passed.

Always true: a gate is asked by one thread at a time and released when it has passed, has failed, or
its job was cancelled. While no job waits, nobody polls.
"""

import contextlib
import threading
import time
from collections.abc import Iterable, Mapping

from hotkv_server.dataplane.engine import CopyEngine, CopyJob
from hotkv_server.dataplane.plan import Plan
from hotkv_server.device.runtime import HOST, DeviceError

POLL_S = 50e-6
MAX_POLL_S = 1e-3
POLL_SHARE = 0.05
"""The pause between two looks at the gates that jobs wait for: this share of the time since one
last passed or came, within these bounds. So a wait grows by a twentieth at most (by two if a look
only begins to read a word), and during long waits the GIL is free for others.
"""


class CopyEngines:
    """See the module. `host` takes plans that touch no device, `devices` the others, by number.
    Owns all of them and closes them."""

    def __init__(self, host: CopyEngine, devices: Mapping[int, CopyEngine]) -> None:
        self._engines: dict[int, CopyEngine] = {HOST: host, **devices}
        self._changed = threading.Condition()
        self._waiting: list[CopyJob] = []
        self._closing = False
        self._begun_s = self._moved_s = 0.0
        self._thread = threading.Thread(target=self._poll, name="hotkv-copy-gates", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return (
            f"CopyEngines({len(self._waiting)} jobs wait, "
            f"{', '.join(map(repr, self._engines.values()))})"
        )

    def submit(self, job: CopyJob) -> None:
        if not self._settle(job):
            with self._changed:
                self._waiting.append(job)
                self._moved_s = time.monotonic()
                self._changed.notify()

    def close(self) -> None:
        """Ends jobs that wait for their gates as cancelled, and closes all engines."""
        with self._changed:
            self._closing = True
            for job in self._waiting:
                job.cancel()
            self._changed.notify()
        self._thread.join()
        for engine in self._engines.values():
            engine.close()

    @property
    def num_queued(self) -> int:
        """Pieces not yet begun, and jobs that wait for their gates."""
        return self.num_waiting + sum(engine.num_queued for engine in self._engines.values())

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for their gates."""
        return len(self._waiting)

    @property
    def busy_s(self) -> float:
        """Of the engine in host memory; devices have figures of their own."""
        return self._engines[HOST].busy_s

    @property
    def num_lanes(self) -> int:
        """Of the engine in host memory."""
        return self._engines[HOST].num_lanes

    def is_alive(self) -> bool:
        """False if a thread of any engine has died, or the one that asks the gates."""
        return self._thread.is_alive() and all(
            engine.is_alive() for engine in self._engines.values()
        )

    def stalled_s(self, now_s: float) -> float:
        """The longest stall of an engine, or how long a gate has not answered. Waiting for a gate
        is no stall."""
        gates_s = now_s - (self._begun_s or now_s)
        return max(gates_s, *(engine.stalled_s(now_s) for engine in self._engines.values()))

    def _poll(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                waiting = list(self._waiting)
            self._begun_s = time.monotonic()
            settled = {id(job) for job in waiting if self._settle(job)}
            self._begun_s = 0.0
            if settled:
                with self._changed:
                    self._waiting = [job for job in self._waiting if id(job) not in settled]
                    self._moved_s = time.monotonic()
            del waiting
            time.sleep(
                min(max(POLL_SHARE * (time.monotonic() - self._moved_s), POLL_S), MAX_POLL_S)
            )

    def _settle(self, job: CopyJob) -> bool:
        """Starts or ends the job if its gate has passed or failed; False if it must wait."""
        gate = job.gate
        if gate is None:
            self._start(job)
            return True
        error = ""
        try:
            if not job.cancelled and not gate.passed():
                return False
        except Exception as failure:  # noqa: BLE001 The edge of the effect executor: what can't be waited for is a failed transfer.
            error = (
                str(failure)
                if isinstance(failure, DeviceError)
                else f"{type(failure).__name__}: {failure}"
            )
        with contextlib.suppress(DeviceError):
            gate.release()
        if error:
            fail(job, error)
        elif job.cancelled:
            job.expect(0)
        else:
            self._start(job)
        return True

    def _start(self, job: CopyJob) -> None:
        groups = by_device(job.plans)
        if missing := groups.keys() - self._engines.keys():
            fail(job, f"device {min(missing)} has no copy engine")
        elif len(groups) == 1:
            self._engines[next(iter(groups))].submit(job)
        else:
            for device, part in zip(groups, job.parts(list(groups.values())), strict=True):
                self._engines[device].submit(part)


def by_device(plans: Iterable[Plan]) -> dict[int, list[Plan]]:
    """Plans by the device that they need; HOST if they need none."""
    groups: dict[int, list[Plan]] = {}
    for plan in plans:
        groups.setdefault(plan.device, []).append(plan)
    return groups


def fail(job: CopyJob, error: str) -> None:
    """Ends a job that has not begun."""
    job.expect(1)
    job.piece_done(error)

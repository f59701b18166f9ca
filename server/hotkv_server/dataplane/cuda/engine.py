"""`CudaCopyEngine`: a device's two lanes, and the calibration that chooses their methods.

Always true: a device that is lost stays lost, `problem` says why, and every job ends as failed.
Parts of the arena that are not pinned yet move by plain copies.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial

from hotkv_server.dataplane.cuda.calibration import Calibration, measure, rule_of_thumb
from hotkv_server.dataplane.cuda.lane import Lane
from hotkv_server.dataplane.cuda.values import (
    CudaCopyFigures,
    CudaCopySettings,
    Direction,
    Method,
    PinnedArena,
)
from hotkv_server.dataplane.engines import CopyJob
from hotkv_server.dataplane.plan import Plan
from hotkv_server.device.runtime import HOST, DeviceError, DeviceRuntime

log = logging.getLogger(__name__)


class CudaCopyEngine:
    """Takes plans between `device` and the host's memory. Raises DeviceError if the device can't
    even allocate its tables.

    `calibration`: measured before on this device; without one the engine measures in the background
    and gives the result to `on_calibrated`, from a thread of its own. `driver`: version to put into
    it (`calibration.driver_version`).
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        device: int,
        arena: PinnedArena,
        settings: CudaCopySettings,
        *,
        calibration: Calibration | None = None,
        driver: str = "",
        on_calibrated: Callable[[Calibration], None] = lambda calibration: None,
    ) -> None:
        self.info = next(info for info in runtime.devices() if info.number == device)
        self.settings = settings
        self.calibration = calibration
        self.problem = ""
        self._runtime, self._driver, self._on_calibrated = runtime, driver, on_calibrated
        self._closing = threading.Event()
        self._lanes: dict[Direction, Lane] = {}
        try:
            for direction in Direction:
                choose = partial(self._choose, direction)
                self._lanes[direction] = Lane(
                    runtime, device, direction, arena, settings, choose, self._lose
                )
        except DeviceError:
            for lane in self._lanes.values():
                lane.close()
            raise
        self._calibrating: threading.Thread | None = None
        if calibration is None and settings.method is None and settings.calibration_bytes:
            self._calibrating = threading.Thread(
                target=self._calibrate, name=f"hotkv-cuda{device}-calibrate", daemon=True
            )
            self._calibrating.start()

    def __repr__(self) -> str:
        lanes = ", ".join(map(repr, self._lanes.values()))
        return (
            f"CudaCopyEngine(device {self.info.number}, "
            f"{lanes}{', ' + self.problem if self.problem else ''})"
        )

    def submit(self, job: CopyJob) -> None:
        groups: dict[Direction, list[Plan]] = {}
        for plan in job.plans:
            groups.setdefault(
                Direction.LOAD if plan.dst.device != HOST else Direction.STORE, []
            ).append(plan)
        if len(groups) == 1:
            self._lanes[next(iter(groups))].submit(job)
        else:
            for direction, part in zip(groups, job.parts(list(groups.values())), strict=True):
                self._lanes[direction].submit(part)

    def close(self) -> None:
        self._closing.set()
        if self._calibrating is not None:
            self._calibrating.join()
        for lane in self._lanes.values():
            lane.close()

    @property
    def num_queued(self) -> int:
        """Pieces not yet begun, by estimate."""
        return sum(lane.num_queued for lane in self._lanes.values())

    @property
    def busy_s(self) -> float:
        """Seconds in which the device had pieces; both directions count."""
        return sum(lane.busy_s for lane in self._lanes.values())

    @property
    def num_lanes(self) -> int:
        """One for each direction."""
        return len(self._lanes)

    def is_alive(self) -> bool:
        """False if a thread has died. Not for a lost device: see `problem`."""
        return all(lane.is_alive() for lane in self._lanes.values())

    def stalled_s(self, now_s: float) -> float:
        """How long the oldest piece in flight, or a thread with one, has taken."""
        return max(lane.stalled_s(now_s) for lane in self._lanes.values())

    def figures(self) -> CudaCopyFigures:
        """Counters; from any thread."""
        lanes = list(self._lanes.values())
        return CudaCopyFigures(
            device=self.info.number,
            moved=tuple(moved for lane in lanes for moved in lane.moved()),
            num_queued=self.num_queued,
            num_in_flight=sum(lane.num_in_flight for lane in lanes),
            num_failed=sum(lane.num_failed for lane in lanes),
            busy_s={direction: lane.busy_s for direction, lane in self._lanes.items()},
            problem=self.problem,
        )

    def _choose(self, direction: Direction, page_bytes: int, run_bytes: int) -> Method:
        if self.settings.method is not None:
            return self.settings.method
        if self.calibration is None:
            return rule_of_thumb(page_bytes)
        return self.calibration.choose(direction, page_bytes, run_bytes)

    def _lose(self, why: str) -> None:
        if not self.problem:
            self.problem = why
            log.error("device lost device=%d error=%s", self.info.number, why)
        # A lane may be lost while the other is being made.
        for lane in list(self._lanes.values()):
            lane.lose(why)

    def _calibrate(self) -> None:
        try:
            found = measure(
                self._runtime,
                self.info,
                self._driver,
                self.settings.calibration_bytes,
                self._closing.is_set,
            )
        except DeviceError as error:
            log.warning("not calibrated device=%d error=%s", self.info.number, error)
            if error.is_lost:
                self._lose(f"device {self.info.number} is lost: {error}")
            return
        if found is not None:
            self.calibration = found
            log.info("calibrated device=%d %r", self.info.number, found)
            self._on_calibrated(found)

"""The copy engine of a CUDA device, with a lane (`Lane`, not the socket) for loads and one for
stores. Each piece in flight has a slot (`methods.Slot`, not one of the arena). A calibration
chooses the copy methods.

Always true: a lost device stays lost: `problem` has the reason, and every job fails. Parts of
the arena that are not pinned yet are copied by plain calls, one for each run (`methods.memcpy`).
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from hotkv_server.dataplane.cuda.calibration import Calibration, measure, rule_of_thumb
from hotkv_server.dataplane.cuda.demotion import Retries
from hotkv_server.dataplane.cuda.methods import GIVE, Slot, Slots
from hotkv_server.dataplane.cuda.pieces import Choose, Piece, pieces
from hotkv_server.dataplane.cuda.recalibration import Drift
from hotkv_server.dataplane.cuda.values import (
    CudaCopyFigures,
    CudaCopySettings,
    Direction,
    Method,
    Moved,
    PinnedArena,
)
from hotkv_server.dataplane.engines import CopyJob
from hotkv_server.dataplane.plan import BlockCopies
from hotkv_server.device.runtime import HOST, DeviceError, DeviceRuntime, Priority

# -------------------------------------------------------------------------------------------- Lanes
# A lane copies in one direction, in one stream, with three threads. `give` submits pieces and plans
# the next; a job's first is planned by who submits the job. `follow` waits for pieces, in the
# stream's order, and ends jobs. Of jobs that want to know their progress `finish` does, which may
# take a while.
#
# Always true: at most `depth` pieces are in flight, each with its own slot, which is free again
# only after the event behind its piece has passed. A job ends once: when the device has passed all
# of its pieces, or is lost and accesses no memory any more. A failure affects only its job, unless
# the device is lost.

PAGEABLE = "pageable"
"""`Moved.method` of copies with host memory that is not pinned."""
ENDED = -1
"""In place of a number of blocks."""
MAX_TRIES = 3
"""Tries to record an event or wait for it. After that the device counts as lost, though it may
still access memory."""


@dataclass(slots=True, eq=False)
class _Work:
    """A job and its progress.

    `pieces`: not yet planned.
    `ahead`: planned, not yet submitted; None if there is none, or if its planning failed.
    `bytes_left`: of both.
    `ended`: no further piece will be submitted.
    `error`: why the job fails; else empty.
    """

    job: CopyJob
    pieces: Iterator[Piece]
    bytes_left: int
    ahead: Piece | None = None
    num_in_flight: int = 0
    ended: bool = False
    error: str = ""


@dataclass(slots=True)
class _Given:
    """A piece in flight.

    `begun_s`: when it was submitted, monotonic.
    `is_recorded`: False if there is no event to wait for, because the device is lost.
    `error`: why the submission failed; else empty.
    """

    work: _Work
    slot: Slot
    piece: Piece
    begun_s: float
    is_recorded: bool
    error: str = ""


OnPiece = Callable[[CopyJob, Piece, str, float], None]


class Lane:
    """Copies in one direction. Owners take turns, a piece each, and so do the jobs of an owner.

    `choose`: returns the method for a piece.
    `on_lost`: called with the reason, and whether it holds for all devices; any thread.
    `on_piece`: called when a piece has ended, with its job, the error if it failed, and the time in
        which the lane copied it and nothing else.
    `num_failed`: jobs.
    `busy_s`: time in which pieces were in flight; a piece counts when it ends.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        device: int,
        direction: Direction,
        arena: PinnedArena,
        settings: CudaCopySettings,
        choose: Choose,
        on_lost: Callable[[str, bool], None],
        on_piece: OnPiece = lambda job, piece, error, seconds: None,
    ) -> None:
        self._runtime, self._device, self.direction, self._arena, self._settings = (
            runtime,
            device,
            direction,
            arena,
            settings,
        )
        self._choose, self._on_lost, self._on_piece = choose, on_lost, on_piece
        self._changed = threading.Condition()
        # By owner: jobs with pieces left. The owner and job whose turn is next come first.
        self._works: dict[str, deque[_Work]] = {}
        self._in_flight: deque[_Given] = deque()
        self._given: queue.SimpleQueue[_Given | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[tuple[_Work, int] | None] = queue.SimpleQueue()
        self._problem = ""
        self._closing = False
        # When the present submission, and the present report of a job's end, began; 0 if none.
        self._giving_s = self._finishing_s = 0.0
        self._moved: dict[str, list[int]] = {}
        self.num_failed = 0
        self.busy_s = self._idle_from_s = 0.0
        self._stream = runtime.new_stream(
            device, Priority.HIGH if direction is Direction.LOAD else Priority.LOW
        )
        self._slots = Slots(runtime, device, settings, direction)
        self._free = list(self._slots.all)
        self._threads = [
            threading.Thread(
                target=target, name=f"hotkv-cuda{device}-{direction.value}-{name}", daemon=True
            )
            for name, target in (
                ("give", self._give),
                ("follow", self._follow),
                ("finish", self._finish),
            )
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return (
            f"Lane({self.direction.value}, jobs of {len(self._works)} owners, "
            f"{len(self._in_flight)} pieces in flight, {self.num_failed} failed)"
        )

    # From outside

    def submit(self, job: CopyJob, method: Method | None = None) -> None:
        """All plans must have this lane's direction. `method`: for all pinned memory."""
        job.expect(1)
        choose = self._choose if self._slots.can_stage else self._plain_choice
        if method is not None:
            choose = _always(method)
        work = _Work(
            job,
            pieces(job.plans, self.direction, self._arena, self._settings, choose),
            job.total_bytes,
        )
        self._plan(work)
        with self._changed:
            self._works.setdefault(job.owner, deque()).append(work)
            self._changed.notify_all()

    def lose(self, why: str) -> None:
        """All queued and new jobs fail."""
        with self._changed:
            self._problem = self._problem or why

    @property
    def num_queued(self) -> int:
        """Estimated pieces that are not yet in flight."""
        with self._changed:
            return sum(
                -(-work.bytes_left // self._settings.piece_bytes)
                for works in self._works.values()
                for work in works
            )

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def moved(self) -> tuple[Moved, ...]:
        with self._changed:
            return tuple(
                Moved(self.direction, method, *sums) for method, sums in sorted(self._moved.items())
            )

    def is_alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def stalled_s(self, now_s: float) -> float:
        """Longest of: the oldest piece in flight, the present submission, the present report of
        a job's end. 0 if idle. `now_s`: monotonic."""
        with self._changed:
            begun = [given.begun_s for given in list(self._in_flight)[:1]]
        return now_s - min(filter(None, [*begun, self._giving_s, self._finishing_s]), default=now_s)

    def close(self) -> None:
        """Waits until all jobs have ended, and frees the slots."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        give, follow, finish = self._threads
        give.join()
        self._given.put(None)
        follow.join()
        self._finished.put(None)
        finish.join()
        self._slots.close()

    def _plain_choice(self, page_bytes: int, run_bytes: int) -> Method:
        """`choose` without staging memory."""
        method = self._choose(page_bytes, 0)
        return Method.BATCH if method is Method.STAGED else method

    def _plan(self, work: _Work) -> bool:
        """False if there is no further piece."""
        try:
            work.ahead = next(work.pieces, None)
        except Exception as failure:  # noqa: BLE001 If planning fails, only its job fails; the thread goes on.
            work.ahead, work.error = None, f"{type(failure).__name__}: {failure}"
        return work.ahead is not None

    # Thread `give`

    def _give(self) -> None:
        while (work := self._next()) is not None:
            self._giving_s = time.monotonic()
            if work.ahead is None or self._problem or work.error or work.job.cancelled:
                self._end(work, self._problem)
            else:
                self._give_piece(work, work.ahead)
                if not self._plan(work):
                    self._end(work, self._problem)
            self._giving_s = 0.0
            del work

    def _next(self) -> _Work | None:
        """Waits for a free slot and a job with pieces left. None once the lane is closed and has
        no jobs."""
        with self._changed:
            self._changed.wait_for(
                lambda: (self._works and self._free) or (self._closing and not self._works)
            )
            if not self._works:
                return None
            owner = next(iter(self._works))
            works = self._works[owner] = self._works.pop(owner)
            works.rotate(-1)
            return works[-1]

    def _give_piece(self, work: _Work, piece: Piece) -> None:
        with self._changed:
            given = _Given(work, self._free.pop(), piece, time.monotonic(), is_recorded=False)
            work.num_in_flight += 1
            work.bytes_left -= piece.total_bytes
            self._in_flight.append(given)
        work.job.piece_begun()
        try:
            GIVE[piece.method](self._runtime, self._stream, piece, given.slot)
        except Exception as failure:  # noqa: BLE001 If a call fails, the thread goes on.
            given.error = work.error = self._judge(failure)
        # Even after a failure: some copies of the piece may be in the queue.
        given.is_recorded, error = self._insist(
            partial(self._runtime.record, given.slot.event, self._stream)
        )
        given.error = given.error or error
        self._given.put(given)

    def _end(self, work: _Work, error: str) -> None:
        """Submits no further pieces; the job ends with those in flight. `error`: if the device
        is lost."""
        with self._changed:
            works = self._works[work.job.owner]
            works.remove(work)
            if not works:
                del self._works[work.job.owner]
            work.ended = True
            # A lost device fails the job, unless it was cancelled and has nothing in flight.
            work.error = work.error or (
                "" if work.job.cancelled and not work.num_in_flight else error
            )
            is_over = self._is_over(work)
        if is_over:
            self._report(work)

    # Thread `follow`

    def _follow(self) -> None:
        while (given := self._given.get()) is not None:
            error = given.error
            if given.is_recorded:
                _, failure = self._insist(partial(self._runtime.synchronize, given.slot.event))
                error = error or failure
            ended_s = time.monotonic()
            seconds = ended_s - max(given.begun_s, self._idle_from_s)
            self._on_piece(given.work.job, given.piece, error, seconds)
            with self._changed:
                self.busy_s += seconds
                self._idle_from_s = ended_s
                self._in_flight.popleft()
                self._free.append(given.slot)
                work = given.work
                work.num_in_flight -= 1
                work.error = work.error or error
                if not error:
                    sums = self._moved.setdefault(
                        given.piece.method.value if given.piece.method else PAGEABLE, [0, 0]
                    )
                    sums[0] += given.piece.total_bytes
                    sums[1] += 1
                is_over = self._is_over(work)
                # Before `give` can put the job's end.
                if work.job.progress is not None and not work.error:
                    self._finished.put((work, given.piece.num_blocks))
                self._changed.notify_all()
            if is_over:
                self._report(work)
            del given, work

    def _is_over(self, work: _Work) -> bool:
        """All of it was submitted or dropped and nothing is in flight. True once, for who then
        calls `_report`. Call with `_changed` held."""
        return work.ended and not work.num_in_flight

    def _report(self, work: _Work) -> None:
        """Ends a job, here or in `finish`."""
        self.num_failed += bool(work.error)
        if work.job.progress is None:
            work.job.piece_done(work.error)
        else:
            self._finished.put((work, ENDED))

    def _insist(self, call: Callable[[], None]) -> tuple[bool, str]:
        """Tries a call of CUDA up to MAX_TRIES times, then reports the device as lost. Returns
        whether a try succeeded, and the text of the first failure."""
        first = ""
        for _ in range(MAX_TRIES):
            try:
                call()
            except Exception as failure:  # noqa: BLE001 If a call fails, the thread goes on.
                first = first or self._judge(failure)
                if self._problem:
                    return False, first
            else:
                return True, first
        self._on_lost(f"device {self._device} can't be followed: {first}", False)
        return False, first

    def _judge(self, failure: Exception) -> str:
        """Text of a failure; reports the device if it is lost."""
        if isinstance(failure, DeviceError):
            if failure.is_lost:
                why = f"device {self._device} is lost: {failure}"
                self._on_lost(why, failure.is_everywhere)
            return str(failure)
        return f"{type(failure).__name__}: {failure}"

    # Thread `finish`

    def _finish(self) -> None:
        while (found := self._finished.get()) is not None:
            self._finishing_s = time.monotonic()
            work, num_blocks = found
            if num_blocks == ENDED:
                work.job.piece_done(work.error)
            else:
                work.job.advance(num_blocks)
            self._finishing_s = 0.0
            del found, work


def _always(method: Method) -> Choose:
    return lambda page_bytes, run_bytes: method


# --------------------------------------------------------------------------------------- The engine

log = logging.getLogger(__name__)

IDLE_WAIT_S, IDLE_POLL_S = 60.0, 0.05
"""A measurement that is made again waits so long for an idle device, else for a later slow copy."""


class CudaCopyEngine:
    """The constructor raises DeviceError if CUDA can't make streams, events or buffers.

    `calibration`: from an earlier start. None: measures in the background, unless the settings fix
        a method.
    `driver`: version, for a new calibration.
    `on_calibrated`: called from the thread that has measured.
    `problem`: why the device is lost; else empty.
    `judged`: the calibration by which methods are chosen; None: its own. Equal devices share it.
    `all_are_lost`: the same error makes every device of the process unusable.
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
        self.judged: Calibration | None = None
        self.problem = ""
        self.all_are_lost = False
        self._runtime, self._driver, self._on_calibrated = runtime, driver, on_calibrated
        self._closing = threading.Event()
        self._lanes: dict[Direction, Lane] = {}
        self._retries = Retries(device, self._give, lambda: not self.problem, time.monotonic)
        self._drift = Drift()
        self._judging = threading.Lock()
        self._calibrating: threading.Thread | None = None
        self._piece_end_s = dict.fromkeys(Direction, 0.0)
        try:
            for direction in Direction:
                choose = partial(self._choose, direction)
                self._lanes[direction] = Lane(
                    runtime,
                    device,
                    direction,
                    arena,
                    settings,
                    choose,
                    self._lose,
                    partial(self._piece_ended, direction),
                )
        except DeviceError:
            for lane in self._lanes.values():
                lane.close()
            raise
        if calibration is not None:
            self._drift.calibrated(calibration.speeds, time.monotonic())
        elif self._may_calibrate:
            self._begin_calibration(self._calibrate)

    def __repr__(self) -> str:
        lanes = ", ".join(map(repr, self._lanes.values()))
        return (
            f"CudaCopyEngine(device {self.info.number}, "
            f"{lanes}{', ' + self.problem if self.problem else ''})"
        )

    def submit(self, job: CopyJob) -> None:
        groups: dict[Direction, list[BlockCopies]] = {}
        for plan in job.plans:
            is_load = (plan.engine if plan.to_engine else plan.arena).device != HOST
            groups.setdefault(Direction.LOAD if is_load else Direction.STORE, []).append(plan)
        job.expect(len(groups))
        for direction, plans in groups.items():
            self._retries.submit(direction, job, plans)

    def _give(self, direction: Direction, job: CopyJob, method: Method | None) -> None:
        self._lanes[direction].submit(job, method)

    def close(self) -> None:
        with self._judging:
            self._closing.set()
        if self._calibrating is not None:
            self._calibrating.join()
        self._retries.close()
        for lane in self._lanes.values():
            lane.close()

    @property
    def num_queued(self) -> int:
        return sum(lane.num_queued for lane in self._lanes.values())

    @property
    def busy_s(self) -> float:
        return sum(lane.busy_s for lane in self._lanes.values())

    @property
    def num_lanes(self) -> int:
        return len(self._lanes)

    def is_alive(self) -> bool:
        """True on a lost device whose threads run."""
        return all(lane.is_alive() for lane in self._lanes.values())

    def stalled_s(self, now_s: float) -> float:
        return max(lane.stalled_s(now_s) for lane in self._lanes.values())

    def figures(self) -> CudaCopyFigures:
        """Any thread."""
        lanes = list(self._lanes.values())
        return CudaCopyFigures(
            device=self.info.number,
            moved=tuple(moved for lane in lanes for moved in lane.moved()),
            num_queued=self.num_queued,
            num_in_flight=sum(lane.num_in_flight for lane in lanes),
            num_failed=self._retries.num_failed_jobs,
            busy_s={direction: lane.busy_s for direction, lane in self._lanes.items()},
            problem=self.problem,
            failures=self._retries.figures(),
        )

    def _choose(self, direction: Direction, page_bytes: int, run_bytes: int) -> Method:
        if self.settings.method is not None:
            method = self.settings.method
        elif (calibration := self.judged or self.calibration) is None:
            method = rule_of_thumb(page_bytes)
        else:
            method = calibration.choose(direction, page_bytes, run_bytes)
        return self._retries.usable(direction, method)

    def probe(self) -> None:
        """Finds out whether the device is lost, by a call of no effect. Blocks. Another device's
        fault may have made this one unusable, which only a call shows."""
        try:
            self._runtime.passed(self._runtime.new_event(self.info.number))
        except DeviceError as error:
            if error.is_lost:
                why = f"device {self.info.number} is lost: {error}"
                self._lose(why, error.is_everywhere)

    def _lose(self, why: str, is_everywhere: bool = False) -> None:
        self.all_are_lost = self.all_are_lost or is_everywhere
        if not self.problem:
            self.problem = why
            log.error("device lost device=%d error=%s", self.info.number, why)
        # A copy: the first lane may find the device lost while the second is being added.
        for lane in list(self._lanes.values()):
            lane.lose(why)

    def choices(self) -> dict[tuple[Direction, int], Method]:
        """The methods for short runs, by direction and page bytes, of all that were measured."""
        measured = {} if self.calibration is None else self.calibration.speeds
        return {
            (direction, size): self._choose(direction, size, size)
            for direction, _, size in measured
        }

    def _piece_ended(
        self, direction: Direction, job: CopyJob, piece: Piece, error: str, seconds: float
    ) -> None:
        self._retries.piece_ended(direction, job, piece.method, error)
        now_s = self._piece_end_s[direction] = time.monotonic()
        if error or piece.method is None or not self._may_calibrate:
            return
        other = Direction.STORE if direction is Direction.LOAD else Direction.LOAD
        if self._lanes[other].num_in_flight or self._piece_end_s[other] > now_s - seconds:
            return
        num_bytes = piece.total_bytes
        page_bytes = num_bytes // len(piece.num_bytes)
        with self._judging:
            is_measuring = self._calibrating is not None and self._calibrating.is_alive()
            if (
                is_measuring
                or self._closing.is_set()
                or not self._drift.copied(
                    direction, piece.method, page_bytes, num_bytes, seconds, now_s
                )
            ):
                return
            log.warning(
                "copies are slower than measured device=%d direction=%s method=%s gb_per_s=%.1f",
                self.info.number,
                direction.value,
                piece.method.value,
                num_bytes / seconds / 1e9,
            )
            try:
                self._begin_calibration(self._calibrate_when_idle)
            except RuntimeError as refusal:
                log.warning("not measured again device=%d error=%s", self.info.number, refusal)
                self._drift.put_off()

    @property
    def _may_calibrate(self) -> bool:
        return self.settings.method is None and self.settings.calibration_bytes > 0

    def _begin_calibration(self, target: Callable[[], None]) -> None:
        name = f"hotkv-cuda{self.info.number}-calibrate"
        self._calibrating = threading.Thread(target=target, name=name, daemon=True)
        self._calibrating.start()

    def _calibrate_when_idle(self) -> None:
        """Beside transfers it would measure what they leave."""
        until_s = time.monotonic() + IDLE_WAIT_S
        while self.num_queued or any(lane.num_in_flight for lane in self._lanes.values()):
            if self._closing.wait(IDLE_POLL_S) or time.monotonic() > until_s:
                self._drift.put_off()
                return
        self._calibrate()

    def _calibrate(self) -> None:
        try:
            found = measure(
                self._runtime,
                self.info,
                self._driver,
                self.settings.calibration_bytes,
                self._closing.is_set,
                self.settings.methods,
            )
        except DeviceError as error:
            log.warning("not calibrated device=%d error=%s", self.info.number, error)
            if error.is_lost:
                self._lose(f"device {self.info.number} is lost: {error}", error.is_everywhere)
            return
        if found is not None:
            self.calibration = found
            self._drift.calibrated(found.speeds, time.monotonic())
            log.info("calibrated device=%d %r", self.info.number, found)
            self._on_calibrated(found)

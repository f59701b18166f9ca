"""The loads of one rank, from their start to the report of their end.

Always true: each load is reported exactly once, as loaded or as failed. It is reported only after
its future is resolved, or after the scheduler has said that it holds the load's blocks (`give_up`).
So vLLM never reallocates blocks that the server may still write. `take` decides before it changes
anything.

A load is cancelled if its deadline passes or its request is aborted. If the server does not answer
the cancel within `CANCEL_GRACE_S`, the load is overdue. Each report then names it until the
scheduler holds its blocks.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from hotkv_client.types import TransferResult, TransferStatus
from hotkv_vllm import link
from hotkv_vllm.costs.answer_time import AnswerTime
from hotkv_vllm.metadata import LoadJob
from hotkv_vllm.worker.device_order import Mark

logger = link.logger

CANCEL_GRACE_S = 2.0
"""Time that a server may take to answer a cancel: it first finishes the pieces (parts of transfers)
that its threads are copying."""


@dataclass(slots=True)
class ActiveLoad:
    """A load of this rank.

    after: the mark (point in the device's queue) for which the load waits.
    deadline_s: None until the device is seen to have passed `after`.
    answer: None until the load is sent.
    time: times the answer from the moment at which the device was seen to have passed `after`; None
        until then.
    cancelled_s: time of the cancel; None if the load was not cancelled.
    is_late: True if the load was cancelled at its deadline.
    is_void: True if the load counts as failed however it ends, because the engine has discarded the
        memory or its weights may have changed.
    """

    job: LoadJob
    after: Mark
    deadline_s: float | None = None
    answer: "Future[TransferResult] | None" = None
    time: AnswerTime | None = None
    cancelled_s: float | None = None
    is_late: bool = False
    is_void: bool = False

    @property
    def seconds(self) -> float:
        """Returns the time that the server has used so far, seconds; 0 if not known."""
        return self.time.seconds if self.time is not None else 0.0

    @property
    def is_over(self) -> bool:
        """Returns True if the server no longer writes the load's blocks. A load that was not sent
        is over only while it stays unsent."""
        return self.answer is None or self.answer.done()


@dataclass(frozen=True, slots=True)
class Ended:
    """A load that is over. `num_bytes` is the number of loaded bytes; None if the load failed."""

    load: ActiveLoad
    num_bytes: int | None

    @property
    def seconds(self) -> float:
        """Returns the time that the server used for a load that succeeded. Returns minus that time
        for a load that was cancelled at its deadline. 0 for other failures, or if not known."""
        if self.num_bytes is None:
            return -self.load.seconds if self.load.is_late else 0.0
        return self.load.seconds


class RankLoads:
    """Follows the loads under way, the loads in which the server hangs, and the failures to report.

    send: begins a transfer. Does not raise.
    cancel: asks the server to end the transfer with this id.
    given_up: by request, minus the seconds that a late load took until it was given up; kept until
        reported.
    """

    def __init__(
        self,
        send: "Callable[[LoadJob, Mark], Future[TransferResult]]",
        cancel: Callable[[str], None],
    ) -> None:
        self._send = send
        self._cancel = cancel
        self._active: dict[str, ActiveLoad] = {}
        self._failed: set[str] = set()
        self.given_up: dict[str, float] = {}
        self._hung: dict[str, ActiveLoad] = {}

    def __len__(self) -> int:
        return len(self._active)

    def __repr__(self) -> str:
        return (
            f"RankLoads({len(self._active)} active, {len(self._hung)} hung, {len(self._failed)} "
            "to report as failed)"
        )

    def begin(self, job: LoadJob, after: Mark) -> None:
        load = self._active[job.request_id] = ActiveLoad(job, after)
        if after.lets_send():
            self._send_now(load)

    def _send_now(self, load: ActiveLoad) -> None:
        load.answer = self._send(load.job, load.after)
        if load.after.passed():
            load.time = AnswerTime(load.answer)

    def fail(self, request_ids: Iterable[str]) -> None:
        """Reports loads as failed that were never begun and that vLLM waits for."""
        self._failed.update(request_ids)

    def fail_unbegun(self, jobs: Iterable[LoadJob], abandoned: Iterable[str]) -> None:
        """Reports the loads among `jobs` as failed that a broken hook has not begun. `abandoned`
        are further requests to report as failed."""
        self._failed |= set(abandoned)
        for job in jobs:
            load = self._active.get(job.request_id)
            if load is None or load.job is not job:
                self._failed.add(job.request_id)

    def send_waiting(self) -> None:
        """Sends the loads for which the device has passed the mark (a point in its queue)."""
        for load in self._active.values():
            if load.answer is None and load.after.passed():
                self._send_now(load)

    @property
    def answers(self) -> "list[Future[TransferResult] | None]":
        """Returns the futures of all active loads; None for a load that was not sent."""
        return [load.answer for load in self._active.values()]

    def make_void(self) -> None:
        """Cancels all loads and counts them as failed, because the engine discards its memory or
        its weights may have changed."""
        for load in self._active.values():
            load.is_void = True
            self._end_early(load)

    def cancel(self, request_id: str) -> None:
        load = self._active.get(request_id)
        if load is not None:
            self._end_early(load)

    def _end_early(self, load: ActiveLoad) -> None:
        """Asks the server to end a load early. The load's future acknowledges it."""
        if load.cancelled_s is not None:
            return
        load.cancelled_s = time.monotonic()
        if load.answer is None:
            load.answer = never_begun("cancelled")
        else:
            self._cancel(load.job.transfer_id)

    # -------------------------------------------------------------------------------------- results

    def take(self) -> tuple[set[str], set[str], list[Ended]]:
        """Returns the requests whose load is over, those whose load failed, and the ended loads."""
        if not self._active:
            failed, self._failed = self._failed, set()
            return set(failed), failed, []
        ended = [
            self._end_of(load)
            for load in self._active.values()
            if load.answer is not None and load.answer.done()
        ]
        finished, failed = self._taken(ended)
        return finished, failed, ended

    def _taken(self, ended: list[Ended]) -> tuple[set[str], set[str]]:
        failed = self._failed | {one.load.job.request_id for one in ended if one.num_bytes is None}
        finished = failed | {one.load.job.request_id for one in ended}
        self._active = {
            request_id: load
            for request_id, load in self._active.items()
            if request_id not in finished
        }
        self._failed = set()
        return finished, failed

    def take_failed(self) -> tuple[set[str], list[ActiveLoad]]:
        """Removes all loads that are over or were never sent. Returns the requests to fail, and the
        loads. For a worker whose `take` raises."""
        over = [load for load in self._active.values() if load.is_over]
        failed = self._failed | {load.job.request_id for load in over}
        self._active = {
            request_id: load
            for request_id, load in self._active.items()
            if request_id not in failed
        }
        self._failed = set()
        return failed, over

    def _end_of(self, load: ActiveLoad) -> Ended:
        """Returns how a resolved load ended. A load whose result can't be read counts as failed:
        its future is resolved, so its blocks may be freed."""
        assert load.answer is not None
        try:
            return Ended(load, None if load.is_void else _bytes_loaded(load.answer))
        except Exception:
            logger.exception(
                "hotkv: the result of a load could not be read; the load counts as failed"
            )
            return Ended(load, None)

    def watch(self, now_s: float) -> None:
        """Cancels the loads whose deadline has passed. Sets the deadlines of loads for which the
        device has passed the mark (a point in its queue)."""
        for load in self._active.values():
            if load.answer is None or load.cancelled_s is not None:
                continue
            if load.deadline_s is None:
                if load.after.passed():
                    load.deadline_s = now_s + load.job.timeout_s
                    load.time = load.time or AnswerTime(load.answer)
            elif now_s >= load.deadline_s:
                load.is_late = True
                self._end_early(load)

    # ----------------------------------------------------------------------------------- hung loads

    def overdue(self, now_s: float) -> tuple[str, ...]:
        """Returns the transfers that the server was asked to end and that have not ended within
        CANCEL_GRACE_S."""
        return tuple(
            load.job.transfer_id
            for load in self._active.values()
            if load.cancelled_s is not None
            and not load.is_over
            and now_s >= load.cancelled_s + CANCEL_GRACE_S
        )

    def give_up(self, transfer_ids: Iterable[str]) -> None:
        """Reports these loads as failed before the server has ended them. The scheduler keeps their
        blocks out of vLLM's pool, so their requests need not wait any more."""
        wanted = set(transfer_ids)
        for load in [
            load
            for load in self._active.values()
            if load.job.transfer_id in wanted and not load.is_over
        ]:
            self._end_early(load)
            self._hung[load.job.transfer_id] = load
            self._failed.add(load.job.request_id)
            if load.is_late:
                self.given_up[load.job.request_id] = -load.seconds
            del self._active[load.job.request_id]

    def settled(self, transfer_ids: Iterable[str]) -> tuple[list[str], list[ActiveLoad]]:
        """Returns which of these transfers can't write to this rank's memory any more, and the hung
        loads that are over. `transfer_ids`: transfers whose blocks the scheduler keeps out of
        vLLM's pool."""
        for load in self._active.values():
            # A load that was never sent and whose blocks are held has failed; `take` reports it.
            if load.answer is None and load.job.transfer_id in transfer_ids:
                load.answer = never_begun("its blocks are held back")
        done = [load for load in self._hung.values() if load.is_over]
        for load in done:
            del self._hung[load.job.transfer_id]
        busy = self._hung.keys() | {
            load.job.transfer_id for load in self._active.values() if not load.is_over
        }
        return [transfer_id for transfer_id in transfer_ids if transfer_id not in busy], done


def never_begun(why: str) -> "Future[TransferResult]":
    """Returns a failed future, for a transfer that was never begun."""
    failed: Future[TransferResult] = Future()
    failed.set_exception(ConnectionError(why))
    return failed


def _bytes_loaded(answer: "Future[TransferResult]") -> int | None:
    """Returns the bytes of a load that succeeded; None if it failed."""
    if answer.cancelled() or answer.exception() is not None:
        logger.debug("hotkv: a load failed: %s", None if answer.cancelled() else answer.exception())
        return None
    result = answer.result()
    if result.status is not TransferStatus.DONE:
        logger.debug("hotkv: a load ended %s: %s", result.status.name, result.message)
        return None
    return result.num_bytes

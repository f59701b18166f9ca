"""Follows the loads of one rank, from the scheduler's order to begin a load to the report of the
load's end.

Always true: each load is reported to vLLM exactly once, as loaded or as failed. It is reported only
after its future is resolved, or after the scheduler has begun to hold its blocks back from vLLM's
pool (`give_up`). So vLLM never reallocates blocks that the server may still write.

A load is cancelled if its deadline passes or its request is aborted. If the server has not ended
the load CANCEL_GRACE_S after that, the load is *overdue*. Each report to the scheduler then lists
the load, until the scheduler holds the load's blocks back. Then the load is reported to vLLM as
failed, so that its request need not wait; until the server ends it, it is a *hung* load.
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
"""Time that the server may take to end a cancelled load, seconds. The server's threads first finish
the pieces of the load that they are copying."""


@dataclass(slots=True)
class ActiveLoad:
    """A load of this rank whose end was not reported to vLLM yet.

    job: the scheduler's order to begin the load.
    after: the mark (point in the device's queue) after which the load may begin to copy.
    deadline_s: the load is cancelled at this time; None until the worker has seen that the device
        has passed `after`.
    answer: the future of the transfer; None until the load is sent.
    time: measures how long the server takes for the load, from the moment at which the worker has
        seen that the device has passed `after`; None before.
    cancelled_s: time at which the load was cancelled; None if it was not.
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
        """Returns the seconds that the server has taken for the load so far; 0 if not known."""
        return self.time.seconds if self.time is not None else 0.0

    @property
    def is_over(self) -> bool:
        """Returns True if the server can't write the load's blocks: the load's future is resolved,
        or the load was not sent so far."""
        return self.answer is None or self.answer.done()


@dataclass(frozen=True, slots=True)
class EndedLoad:
    """A load whose future is resolved.

    num_bytes: number of loaded bytes; None if the load failed.
    """

    load: ActiveLoad
    num_bytes: int | None

    @property
    def seconds(self) -> float:
        """Returns the seconds that the server took for a load that succeeded. Returns the negative
        of that time for a load that was cancelled at its deadline. Returns 0 for other failures, or
        if the time is not known."""
        if self.num_bytes is None:
            return -self.load.seconds if self.load.is_late else 0.0
        return self.load.seconds


class RankLoads:
    """Follows the rank's loads: active loads, hung loads (reported to vLLM as failed although the
    server has not ended them), and failures that are not reported yet.

    send: a function that takes a load's order and its mark (point in the device's queue), begins
        the transfer, and returns its future. Does not raise.
    cancel: a function that takes the id of a transfer, and asks the server to end it.
    given_up: times of the loads that `give_up` has given up after their deadline, by request id:
        the negative of the seconds that the load had taken until then. `RankReport` reports these
        times and clears them.
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

    @property
    def is_quiet(self) -> bool:
        """Returns True if no load is in progress and no load's end is to be reported."""
        return not (self._active or self._failed or self.given_up)

    def begin(self, job: LoadJob, after: Mark) -> None:
        load = self._active[job.request_id] = ActiveLoad(job, after)
        if after.lets_send():
            self._send_now(load)

    def _send_now(self, load: ActiveLoad) -> None:
        load.answer = self._send(load.job, load.after)
        if load.after.passed():
            load.time = AnswerTime(load.answer)

    def fail(self, request_ids: Iterable[str]) -> None:
        """Marks the loads of these requests as failed; `take` returns them, for the report to vLLM.
        The loads were never begun, but vLLM waits for the end of each load."""
        self._failed.update(request_ids)

    def fail_unbegun(self, jobs: Iterable[LoadJob], abandoned: Iterable[str]) -> None:
        """Marks loads as failed, because the callback that begins loads has raised.

        jobs: the loads of the step. Only those that were not begun are marked.
        abandoned: ids of further requests whose load must be reported as failed.
        """
        self._failed |= set(abandoned)
        for job in jobs:
            load = self._active.get(job.request_id)
            if load is None or load.job is not job:
                self._failed.add(job.request_id)

    def send_waiting(self) -> None:
        """Sends each waiting load whose mark (point in the device's queue) the device has passed by
        now."""
        for load in self._active.values():
            if load.answer is None and load.after.passed():
                self._send_now(load)

    @property
    def answers(self) -> "list[Future[TransferResult] | None]":
        """Returns the future of each active load; None in place of the future if the load was not
        sent."""
        return [load.answer for load in self._active.values()]

    def make_void(self) -> None:
        """Cancels all active loads, and makes them count as failed however they end, because the
        engine discards its memory or its weights may have changed."""
        for load in self._active.values():
            load.is_void = True
            self._end_early(load)

    def cancel(self, request_id: str) -> None:
        load = self._active.get(request_id)
        if load is not None:
            self._end_early(load)

    def _end_early(self, load: ActiveLoad) -> None:
        """Cancels a load at the server. The load has ended when its future is resolved. A load that
        was not sent fails at once."""
        if load.cancelled_s is not None:
            return
        load.cancelled_s = time.monotonic()
        if load.answer is None:
            load.answer = never_begun("cancelled")
        else:
            self._cancel(load.job.transfer_id)

    # -------------------------------------------------------------------------------------- results

    def take(self) -> tuple[set[str], set[str], list[EndedLoad]]:
        """Returns the loads whose end was not returned before, for the report to vLLM: the ids of
        the requests whose load has ended (failed or not), the ids of the requests whose load
        failed, and the ended loads."""
        if not self._active and not self._failed:
            return set(), set(), []
        ended = [
            self._end_of(load)
            for load in self._active.values()
            if load.answer is not None and load.answer.done()
        ]
        failed = self._failed | {one.load.job.request_id for one in ended if one.num_bytes is None}
        finished = failed | {one.load.job.request_id for one in ended}
        self._active = {name: load for name, load in self._active.items() if name not in finished}
        self._failed = set()
        return finished, failed, ended

    def take_failed(self) -> tuple[set[str], list[ActiveLoad]]:
        """Removes all loads that have ended or were never sent. Returns the ids of the requests
        whose load must be reported as failed, and the removed loads. Used if `take_results` of
        `HotKVWorker` has raised."""
        over = [load for load in self._active.values() if load.is_over]
        failed = self._failed | {load.job.request_id for load in over}
        # Does the same as `take` without calling the functions that `take` calls, because one of
        # them has raised.
        self._active = {name: load for name, load in self._active.items() if name not in failed}
        self._failed = set()
        return failed, over

    def _end_of(self, load: ActiveLoad) -> EndedLoad:
        """Returns the end of a load whose future is resolved. If the result can't be read, the load
        counts as failed."""
        assert load.answer is not None
        num_bytes = None
        try:
            if (error := load.answer.exception()) is not None:
                logger.debug("hotkv: a load failed: %s", error)
            elif (result := load.answer.result()).status is not TransferStatus.DONE:
                logger.debug("hotkv: a load ended %s: %s", result.status.name, result.message)
            elif not load.is_void:
                num_bytes = result.num_bytes
        except Exception:
            logger.exception(
                "hotkv: the result of a load could not be read; the load counts as failed"
            )
        return EndedLoad(load, num_bytes)

    def watch(self, now_s: float) -> None:
        """Cancels the loads whose time limit has passed. The time of a load counts from the first
        call in which the device has passed its mark (point in the device's queue)."""
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
        """Returns the transfer ids of the loads that were cancelled at least CANCEL_GRACE_S ago and
        have not ended."""
        return tuple(
            load.job.transfer_id
            for load in self._active.values()
            if load.cancelled_s is not None
            and not load.is_over
            and now_s >= load.cancelled_s + CANCEL_GRACE_S
        )

    def give_up(self, transfer_ids: Iterable[str]) -> None:
        """Cancels loads, and marks them as failed although the server has not ended them. Called
        for the loads whose blocks the scheduler holds back from vLLM's pool, so that their requests
        need not wait for the server.

        transfer_ids: ids of these loads' transfers.
        """
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
        """Returns which of `transfer_ids` can't write to this rank's memory any more, so that the
        scheduler may give their blocks back to vLLM. Also returns the hung loads (reported as
        failed before they had ended) that have ended since the last call.

        transfer_ids: ids of the loads whose blocks the scheduler holds back from vLLM's pool.
        """
        for load in self._active.values():
            # If the scheduler holds back the blocks of a load that was never sent, makes the load
            # fail, so that `take` reports it.
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
    """Returns a future that has failed with ConnectionError, for a transfer that was never begun.

    why: the reason, for the log.
    """
    failed: Future[TransferResult] = Future()
    failed.set_exception(ConnectionError(why))
    return failed

"""Follows the loads of one rank.

Always true: each load is reported to vLLM exactly once, only after its future is resolved or the
scheduler holds its blocks back from vLLM's pool (`give_up`). So vLLM never reallocates blocks that
the server may still write.

A load is cancelled at its deadline or when its request is aborted. CANCEL_GRACE_S later it is
*overdue* and listed in reports, until the scheduler holds its blocks back. Then it is reported
as failed, so that its request need not wait, and *hung* until the server ends it.
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
"""For the pieces of a cancelled load that the server's threads are copying."""


@dataclass(slots=True)
class ActiveLoad:
    """A load whose end is not reported to vLLM yet.

    deadline_s, time: None until the worker has seen that the device has passed `after`.
    answer: None until the load is sent.
    is_late: cancelled at its deadline.
    is_void: fails however it ends: memory is discarded, or weights may have changed.
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
        """0 if unknown."""
        return self.time.seconds if self.time is not None else 0.0

    @property
    def is_over(self) -> bool:
        """The server can't write the load's blocks."""
        return self.answer is None or self.answer.done()


@dataclass(frozen=True, slots=True)
class EndedLoad:
    """A load whose future is resolved.

    num_bytes: None if the load failed.
    """

    load: ActiveLoad
    num_bytes: int | None

    @property
    def seconds(self) -> float:
        """That the server took; negative if cancelled at its deadline; 0 for other failures or
        if unknown."""
        if self.num_bytes is None:
            return -self.load.seconds if self.load.is_late else 0.0
        return self.load.seconds


class RankLoads:
    """Sends and follows the loads of a rank.

    send: must not raise.
    given_up: negative seconds by request id, of loads given up after their deadline.
        `RankReporter` clears them.
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
        """Fails loads that were never begun, but for which vLLM waits."""
        self._failed.update(request_ids)

    def fail_unbegun(self, jobs: Iterable[LoadJob], abandoned: Iterable[str]) -> None:
        """Fails loads that were not begun, because the callback that begins them has raised.

        abandoned: further requests whose load fails.
        """
        self._failed |= set(abandoned)
        for job in jobs:
            load = self._active.get(job.request_id)
            if load is None or load.job is not job:
                self._failed.add(job.request_id)

    def send_waiting(self) -> None:
        for load in self._active.values():
            if load.answer is None and load.after.passed():
                self._send_now(load)

    @property
    def answers(self) -> "list[Future[TransferResult] | None]":
        """None for loads not sent."""
        return [load.answer for load in self._active.values()]

    def make_void(self) -> None:
        """They fail however they end."""
        for load in self._active.values():
            load.is_void = True
            self._end_early(load)

    def cancel(self, request_id: str) -> None:
        load = self._active.get(request_id)
        if load is not None:
            self._end_early(load)

    def _end_early(self, load: ActiveLoad) -> None:
        """Cancels a load, which ends with its future; at once if it was not sent."""
        if load.cancelled_s is not None:
            return
        load.cancelled_s = time.monotonic()
        if load.answer is None:
            load.answer = never_begun("cancelled")
        else:
            self._cancel(load.job.transfer_id)

    # -------------------------------------------------------------------------------------- results

    def take(self) -> tuple[set[str], set[str], list[EndedLoad]]:
        """New ends for vLLM: requests whose load has ended, those whose load failed, and the
        loads."""
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
        """Takes the place of `take`, because it or its caller has raised. All removed loads
        count as failed."""
        over = [load for load in self._active.values() if load.is_over]
        failed = self._failed | {load.job.request_id for load in over}
        # Calls none of the functions that `take` calls: one of them has raised.
        self._active = {name: load for name, load in self._active.items() if name not in failed}
        self._failed = set()
        return failed, over

    def _end_of(self, load: ActiveLoad) -> EndedLoad:
        """A result that can't be read is a failure."""
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
        """Cancels loads past their time limit, which counts from the first call that sees the
        mark passed."""
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
        return tuple(
            load.job.transfer_id
            for load in self._active.values()
            if load.cancelled_s is not None
            and not load.is_over
            and now_s >= load.cancelled_s + CANCEL_GRACE_S
        )

    def give_up(self, transfer_ids: Iterable[str]) -> None:
        """Fails loads that the server has not ended. The scheduler must hold their blocks back."""
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
        """Those that can't write this rank's memory any more, and the hung loads that have
        ended."""
        for load in self._active.values():
            # A held-back load that was never sent fails, so that `take` reports it.
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
    failed: Future[TransferResult] = Future()
    failed.set_exception(ConnectionError(why))
    return failed

"""Follows the stores of one rank.

Always true:
- Before a step overwrites a store's blocks, the store has ended or is revoked, or its session is
  closed.
- If it is not known what a step overwrites, `take_everything_back` revokes all stores in one call.
- No step waits for the device: a store whose blocks are overwritten before its mark is passed is
  revoked at once.
- Each store is reported to the scheduler once.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass

import numpy as np

from hotkv_client.types import BlockResult, BlockRun, TransferResult, TransferStatus
from hotkv_vllm import link
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.metadata import StoreJob
from hotkv_vllm.worker.device_order import Mark
from hotkv_vllm.worker.rank_loads import never_begun
from hotkv_vllm.worker.rank_session import RankSession

logger = link.logger

FLUSH_TIMEOUT_S = 0.1
"""How long a step waits for stores of blocks that it overwrites, before it revokes them."""
FENCE_GRACE_S = 0.5
"""How long after a store's time limit a step waits for its revocation."""


@dataclass(slots=True)
class ActiveStore:
    """A store whose end is not reported yet.

    answer: None until the store is sent.
    """

    job: StoreJob
    after: Mark
    began_s: float
    attached: tuple[BlockRun, ...] = ()
    answer: "Future[TransferResult] | None" = None


class RankStores:
    def __init__(
        self,
        rank: RankSession,
        config: ConnectorConfig,
        count: Callable[[str, float], None],
    ) -> None:
        self._rank = rank
        self._config = config
        self._count = count
        self._is_server_slow = False
        self._reports: dict[int, bytes] = {}
        self._lost: list[ActiveStore] = []
        self.active: dict[int, ActiveStore] = {}

    def __len__(self) -> int:
        return len(self.active)

    def __repr__(self) -> str:
        return f"RankStores({len(self.active)} active, {len(self._reports)} to report)"

    @property
    def is_quiet(self) -> bool:
        return not (self.active or self._reports or self._lost)

    # --------------------------------------------------------------------------------------- begin

    def begin(self, job: StoreJob, attached: tuple[BlockRun, ...], after: Mark) -> None:
        """Sends the store now, or leaves it to `send_waiting` if its mark does not allow it yet."""
        store = ActiveStore(job, self._rank.marks.use(after), time.monotonic(), attached)
        self.active[job.store_id] = store
        if after.lets_send():
            self._submit(store)

    def refuse(self, jobs: Iterable[StoreJob]) -> None:
        self._reports.update({job.store_id: b"" for job in jobs})

    def leave_to_others(self, jobs: Iterable[StoreJob]) -> None:
        """Reports them as written: another rank holds the same bytes."""
        for job in jobs:
            written = bytes([BlockResult.WRITTEN]) * sum(len(run.hashes) for run in job.runs)
            self._reports[job.store_id] = written

    def send_waiting(self) -> None:
        for store in self.active.values():
            if store.answer is None and store.after.passed():
                self._submit(store)

    def _submit(self, store: ActiveStore) -> None:
        runs = (*store.job.runs, *store.attached)
        if runs:
            store.answer = self._rank.store(store.job, runs, store.after)
            return
        # The job has only attachments, and these could not be made.
        store.answer = Future()
        store.answer.set_result(TransferResult(store.job.lease_id, TransferStatus.DONE))

    def fail_unsent(self, jobs: Iterable[StoreJob]) -> None:
        """Fails stores that were not sent, because the callback that begins them has raised."""
        for job in jobs:
            store = self.active.get(job.store_id)
            if store is None:
                self._reports.setdefault(job.store_id, b"")
            elif store.answer is None:
                store.answer = never_begun("its callback broke")

    # ---------------------------------------------------------------------------------- taking back

    def end_before_step(self, store_ids: Sequence[int]) -> None:
        """Ends stores before the step overwrites their blocks:
        1. Revokes a store at once if its mark is not passed, or if the scheduler has revoked it
           through a fence.
        2. Waits for others for at most FLUSH_TIMEOUT_S, then revokes them."""
        waiting = [self.active[store_id] for store_id in store_ids if store_id in self.active]
        if not waiting:
            return
        began_s = time.monotonic()
        for store in waiting:
            if store.answer is None:
                store.answer = never_begun(
                    "the device was not there yet when its blocks were taken back"
                )
        is_fenced = self._rank.fence is not None
        late = [store for store in waiting if is_fenced or not store.after.passed()]
        if late and not self._take_back(late):
            # The session was closed, which has ended all stores.
            return
        self._await([store for store in waiting if store.after.has_passed])
        self._count("flush_s", time.monotonic() - began_s)

    def _await(self, waiting: list[ActiveStore]) -> None:
        """Revokes stores that have not ended after a timeout. From then on without a wait, until
        one has succeeded again."""
        if _all_done(waiting, 0.0 if self._is_server_slow else FLUSH_TIMEOUT_S):
            return
        self._is_server_slow = True
        self._take_back(waiting)

    def _take_back(self, stores: list[ActiveStore]) -> bool:
        """Revokes stores and waits for their end, until FENCE_GRACE_S after the latest time
        limit. Then replaces the session, which ends all stores, and returns False."""
        for store in stores:
            if store.answer is not None and not store.answer.done():
                self._rank.cancel(store.job.lease_id)
        # With a fence a cancelled store ends at once, even if the server hangs.
        last_s = (
            max(store.began_s for store in stores) + self._config.store_timeout_s + FENCE_GRACE_S
        )
        if _all_done(stores, max(0.0, last_s - time.monotonic())):
            return True
        logger.error(
            "hotkv: the server did not end a store within its %.1f s; the session is closed",
            self._config.store_timeout_s,
        )
        self.begin_anew()
        return False

    def take_everything_back(self) -> None:
        """Sent or not. If that raises, replaces the session, so that the server aborts the
        stores."""
        rank = self._rank
        session = rank.session
        stores, self.active = self.active, {}
        self._reports.update(dict.fromkeys(stores, b""))
        self._lost += stores.values()
        if session is None:
            return
        try:
            session.revoke_stores()
        except Exception:
            self._count("callback_errors", 1)
            logger.exception("hotkv: stores could not be revoked; the session is closed")
            rank.session = None
            session.close()
            rank.begin()

    def begin_anew(self) -> None:
        """Replaces the session. Its stores fail; its loads are followed until their futures
        resolve."""
        if self._rank.leave():
            self.fail_all()
            self._rank.begin()

    def fail_all(self) -> None:
        """Fails all stores, even those that have ended."""
        for store_id, store in self.active.items():
            self._reports[store_id] = b""
            self._rank.marks.done(store.after)
        self.active.clear()

    def end_early(self) -> "list[Future[TransferResult]]":
        """Cancels all stores before the engine discards its memory. Their futures resolve at
        their end."""
        answers = []
        for store in self.active.values():
            if store.answer is None:
                store.answer = never_begun("the engine sleeps")
            elif not store.answer.done():
                self._rank.cancel(store.job.lease_id)
            answers.append(store.answer)
        return answers

    # -------------------------------------------------------------------------------------- results

    def take_reports(self) -> dict[int, bytes]:
        """Keyed by store id."""
        lost, self._lost = self._lost, []
        for store in lost:
            self._rank.marks.done(store.after)
        for store_id, store in list(self.active.items()):
            if store.answer is not None and store.answer.done():
                self._reports[store_id] = self._report(store, store.answer)
                del self.active[store_id]
                self._rank.marks.done(store.after)
        reports, self._reports = self._reports, {}
        return reports

    def _report(self, store: ActiveStore, answer: "Future[TransferResult]") -> bytes:
        """A result that can't be read is a failure."""
        if (error := answer.exception()) is not None:
            logger.debug("hotkv: a store failed: %s", error)
            return b""
        try:
            result = answer.result()
            if result.status is TransferStatus.DONE:
                self._is_server_slow = False
            self._count("store_bytes", result.num_bytes)
            blocks = result.results[: len(store.job.runs)]
            return b"".join(np.asarray(a, np.uint8).tobytes() for a in blocks)
        except Exception:
            self._count("callback_errors", 1)
            logger.exception(
                "hotkv: the result of a store could not be read; the store counts as failed"
            )
            return b""


def _all_done(waiting: Iterable[ActiveStore], timeout_s: float) -> bool:
    answers = [store.answer for store in waiting if store.answer is not None]
    # Whoever polls knows an end before its answer.
    return all(answer.done() for answer in answers) or not wait_futures(answers, timeout_s).not_done

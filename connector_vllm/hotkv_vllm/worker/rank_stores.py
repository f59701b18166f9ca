"""Follows the stores of one rank, from the scheduler's order to begin a store to the report of the
store's end.

A store must end before a step overwrites its blocks. To *revoke* a store makes it fail: the server
then discards what it has copied. A store's *mark* is the point in the device's queue after which
its blocks are computed.

Always true:
- Before a step overwrites the blocks of a store, the store has ended, or is revoked, or its session
  is closed.
- If it is not known which blocks a step overwrites, `take_everything_back` revokes all stores in
  one call.
- No step waits for the device. A store begins to read only after the device has passed the store's
  mark. If a step overwrites the store's blocks before that, the store is revoked at once.
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

FENCE_GRACE_S = 0.5
"""A step waits for the end of a revoked store at most until this many seconds after the store's
time limit (`store_timeout_s` after its begin)."""


@dataclass(slots=True)
class ActiveStore:
    """A store of this rank whose end was not reported yet.

    job: the scheduler's order to begin the store.
    after: the mark (point in the device's queue) after which the store may begin to copy.
    began_s: time at which the worker was ordered to begin the store, monotonic clock.
    sketches: runs of the sketches (compact forms of keys, for sparse attention) to
        store with the blocks.
    answer: the future of the transfer; None until the store is sent.
    """

    job: StoreJob
    after: Mark
    began_s: float
    sketches: tuple[BlockRun, ...] = ()
    answer: "Future[TransferResult] | None" = None


class RankStores:
    """Sends the stores of a rank, collects their results, and revokes stores before a step
    overwrites their blocks.

    rank: sends the transfers to the server and makes marks.
    count: takes the name of a counter and a value, and adds the value to the counter.
    active: the stores whose end was not reported yet, by store id.
    """

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
        """Returns True if no store is in progress and no store's end is to be reported."""
        return not (self.active or self._reports or self._lost)

    # --------------------------------------------------------------------------------------- begin

    def begin(self, job: StoreJob, sketches: tuple[BlockRun, ...], after: Mark) -> None:
        """Begins a store. Sends it at once if the server can find out itself when the device has
        passed the mark, or if the device has passed it; otherwise `send_waiting` sends it later.

        sketches: runs of the sketches (compact forms of keys) to store with the
            blocks.
        after: the mark (point in the device's queue) after which the store may begin to copy.
        """
        store = ActiveStore(job, self._rank.marks.use(after), time.monotonic(), sketches)
        self.active[job.store_id] = store
        if after.lets_send():
            self._submit(store)

    def refuse(self, jobs: Iterable[StoreJob]) -> None:
        """Marks stores as failed, without beginning them; `take_reports` returns them."""
        self._reports.update({job.store_id: b"" for job in jobs})

    def leave_to_others(self, jobs: Iterable[StoreJob]) -> None:
        """Marks stores as written (the result WRITTEN for each block), without beginning them,
        because another rank holds the same bytes and stores them."""
        for job in jobs:
            written = bytes([BlockResult.WRITTEN]) * sum(len(run.hashes) for run in job.runs)
            self._reports[job.store_id] = written

    def send_waiting(self) -> None:
        """Sends each waiting store whose mark (point in the device's queue) the device has passed
        by now."""
        for store in self.active.values():
            if store.answer is None and store.after.passed():
                self._submit(store)

    def _submit(self, store: ActiveStore) -> None:
        runs = (*store.job.runs, *store.sketches)
        if runs:
            store.answer = self._rank.store(store.job, runs, store.after)
            return
        # Ends the store at once: its job has only sketches (compact forms of keys), and
        # these could not be built, so there is nothing to store.
        store.answer = Future()
        store.answer.set_result(TransferResult(store.job.lease_id, TransferStatus.DONE))

    def fail_unsent(self, jobs: Iterable[StoreJob]) -> None:
        """Called if the callback (call of vLLM) that begins stores has raised. Those of `jobs` that
        were not sent count as failed, and will not be sent."""
        for job in jobs:
            store = self.active.get(job.store_id)
            if store is None:
                self._reports.setdefault(job.store_id, b"")
            elif store.answer is None:
                store.answer = never_begun("its callback broke")

    # ---------------------------------------------------------------------------------- taking back

    def end_before_step(self, store_ids: Sequence[int]) -> None:
        """Ends the stores whose blocks the step overwrites, before it does so:
        1. Revokes a store at once (makes it fail) if it can't have begun to copy, because the
           device has not passed its mark (a point in the device's queue). If the rank has a fence
           (a page through which the scheduler has already revoked these stores), revokes all of
           them at once.
        2. Waits for the other stores to end, for at most `flush_timeout_s`, and then revokes them.

        store_ids: ids of these stores, from the step's message; stores that have ended are ignored.
        """
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
            # The stores could not be revoked in time, so the session was closed, which has ended
            # all stores.
            return
        self._await([store for store in waiting if store.after.has_passed])
        self._count("flush_s", time.monotonic() - began_s)

    def _await(self, waiting: list[ActiveStore]) -> None:
        """Waits for the end of the stores up to `flush_timeout_s`, and then revokes them. After a
        timeout the server counts as slow: later calls revoke stores without waiting first, until a
        store has succeeded again."""
        if _all_done(waiting, 0.0 if self._is_server_slow else self._config.flush_timeout_s):
            return
        self._is_server_slow = True
        self._take_back(waiting)

    def _take_back(self, stores: list[ActiveStore]) -> bool:
        """Revokes stores (cancels them at the server), and waits until they have ended, so that
        their blocks may be overwritten. Returns True if the server has ended all of them in time.
        Otherwise replaces the session, which ends all stores, and returns False.

        The time limit of a store is `store_timeout_s` after its begin. The wait ends FENCE_GRACE_S
        after the latest of these time limits.
        """
        for store in stores:
            if store.answer is not None and not store.answer.done():
                self._rank.cancel(store.job.lease_id)
        # If the session shares a fence page with the server (memory in which stores are revoked), a
        # cancelled store ends at once, even if the server hangs.
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
        """Revokes all stores of this rank at once, sent or not, so that any block may be
        overwritten. The stores count as failed.

        If revoking raises, closes the session, so that the server aborts the stores, and opens
        another session.
        """
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
        """Replaces the session, because the server hangs or the key space has changed. The stores
        of the old session count as failed. Loads of the old session are still followed until their
        futures resolve."""
        if self._rank.leave():
            self.fail_all()
            self._rank.begin()

    def fail_all(self) -> None:
        """Removes all stores and marks them as failed, even stores that have ended."""
        for store_id, store in self.active.items():
            self._reports[store_id] = b""
            self._rank.marks.done(store.after)
        self.active.clear()

    def end_early(self) -> "list[Future[TransferResult]]":
        """Cancels all stores, because the engine is about to discard its memory. Returns their
        futures, which resolve when the stores have ended."""
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
        """Returns the reports of the stores that have ended since the last call, by store id."""
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
        """Returns the report of a store that has ended. A store whose result can't be read counts
        as failed."""
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
    return not wait_futures(answers, timeout_s).not_done

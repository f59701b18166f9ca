"""Executes loads and stores between vLLM's primary tier (the CPU memory of its offloading) and the
server. Each load or store is a *job* that vLLM's tiering has submitted. A load first acquires a
lease on its chunks (one or several blocks each), and then loads them under the lease.

Always true:
- Each job is reported as ended exactly once, and within a bounded time.
- A load that the server does not end in time is cancelled, and ends as failed CANCEL_GRACE_S after
  that. The server may still write into its rows, so `PrimaryRows` holds them until the server has
  answered, or its process has ended.
- If the server does not answer the call that acquires the lease in time, the load ends as failed,
  before anything was copied.
- If the server does not answer a store in time, the store is revoked (`Session.cancel`): the engine
  sets a word in shared memory, and the server discards copies of a store whose word is set. This
  works even if the server hangs.

The scheduler's thread begins jobs and collects ended jobs. The server's answers arrive in the
client's threads, which do only two things: send the load when its lease is granted, and record that
a job has ended or that a hold of rows is over.
"""

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotkv_client.session import Session
from hotkv_client.types import (
    BlockResult,
    BlockRun,
    GroupHashes,
    LeaseGrant,
    LoadRun,
    StoreOptions,
    TransferResult,
    TransferStatus,
)
from hotkv_proto.blocks import NO_OPTIONS
from hotkv_vllm.compat.primary_rows import PrimaryRows
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.link import logger
from hotkv_vllm.offloading.promotions import Key
from hotkv_vllm.worker.rank_loads import CANCEL_GRACE_S

LEASE_PATIENCE_S = 1.0
"""A load waits for its lease for at most this time, seconds, or for `hotkv.lookup_timeout_s` if
that is longer. If the server has tiers below host memory, the limit is `hotkv.load_timeout_s`
instead, because the server may have to read the chunks from a disk."""
WARN_AFTER_S = 30.0
SETTLED = (BlockResult.STORED, BlockResult.PRESENT, BlockResult.IN_FLIGHT)
"""A block with one of these results of a store need not be stored again: the server has it, or
another engine is storing it."""


@dataclass(frozen=True, slots=True)
class GroupRows:
    """The chunks (one or several blocks each) of one KV cache group that a load copies, and their
    rows in the primary tier (vLLM's CPU memory).

    group_index: hotkv's index of the group.
    keys: vLLM's key of each chunk, in any order.
    hashes: the hash of each chunk in the server.
    rows: the row of each chunk, int32 [chunks].
    """

    group_index: int
    keys: Sequence[Key]
    hashes: Sequence[bytes]
    rows: "np.ndarray[Any, np.dtype[np.int32]]"


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job (load or store) that has ended.

    job: vLLM's `TransferJob`.
    loaded: keys of the chunks (units of blocks) that were loaded into vLLM's CPU memory; empty for
        a store.
    is_complete: True if every chunk was copied, or needed no copy.
    """

    job: Any
    loaded: Collection[Key]
    is_complete: bool


@dataclass(slots=True)
class _Deadline:
    """What happens to a job if the server does not answer until `at_s`. In a reset it happens
    within `in_reset_s`."""

    at_s: float
    in_reset_s: float
    missed: Callable[[], None]


class TierTransfers:
    """Executes loads and stores (jobs of vLLM's tiering) in one session with the server.

    rows: holds the rows of loads that are given up.
    is_hung: True after the server has not answered a call in time, until it answers again.
    is_held: True while no load or store may begin, because a reset of the caches is in progress.
        `CacheReset` sets it, and the tier obeys it.
    """

    def __init__(self, session: Session, settings: ConnectorConfig, rows: PrimaryRows) -> None:
        self._session = session
        self._settings = settings
        self._rows = rows
        self._prefix = uuid.uuid4().hex[:12]
        # Several threads number transfers with this counter. `next` is atomic for
        # `itertools.count`, but not for a generator.
        self._numbers = itertools.count()
        self._settled = threading.Condition()
        self._ended: list[EndedJob] = []
        self._num_loads = 0
        self._num_stores = 0
        self._waiting: dict[str, _Deadline] = {}
        self._is_draining = False
        self.is_hung = False
        self.is_held = False

    def __repr__(self) -> str:
        hung = ", hung" if self.is_hung else ""
        return f"TierTransfers({self._num_loads} loads, {self._num_stores} stores{hung})"

    @property
    def in_flight(self) -> int:
        """Returns the number of stores in progress. A reset of the server's cache waits for 0."""
        return self._num_stores

    @property
    def is_idle(self) -> bool:
        """Returns True if no job (load or store) is in progress."""
        return not self._num_loads and not self._num_stores

    def _new_name(self) -> str:
        """Returns a new id for a lease or a transfer. Any thread may call it."""
        return f"{self._prefix}-{next(self._numbers)}"

    # ---------------------------------------------------------------------------------------- loads

    def load(self, job: Any, groups: Sequence[GroupRows]) -> None:
        """Begins a load: acquires a lease on the job's chunks (units of blocks), and then loads
        those chunks that the lease has pinned, into their rows of vLLM's CPU memory (the primary
        tier). Does not wait; `take_ended` returns the result. If the lease lacks some chunks,
        `EndedJob.is_complete` is False.

        job: vLLM's `TransferJob`.
        groups: the chunks of the job, by group.
        """
        name, session, settings = self._new_name(), self._session, self._settings
        # Each lock is acquired once and never released, so that only one caller gets it. `begun`:
        # either the copy begins, or the load is given up before. `over`: the load ends.
        begun, over = threading.Lock(), threading.Lock()
        rows = [row for group in groups for row in group.rows.tolist()]

        def finish(loaded: Collection[Key] = ()) -> bool:
            if not over.acquire(blocking=False):
                return False
            session.release(name)
            self._end(EndedJob(job, loaded, len(loaded) == len(job.keys)), is_load=True)
            return True

        def acquired(grant: LeaseGrant) -> None:
            self._answered(name)
            if not begun.acquire(blocking=False):
                session.release(name)
                return
            if self._is_draining:
                finish()
                return
            pinned = [np.flatnonzero(mask).astype(np.int32) for mask in grant.pinned]
            loaded = [
                group.keys[at] for group, ats in zip(groups, pinned, strict=True) for at in ats
            ]
            runs = [
                LoadRun(group.group_index, at, group.rows[at])
                for group, at in zip(groups, pinned, strict=True)
                if len(at)
            ]
            if runs:
                copy(runs, loaded)
            else:
                finish()

        def copy(runs: list[LoadRun], loaded: Collection[Key]) -> None:
            transfer, is_abandoned = self._new_name(), threading.Event()

            def copied(end: TransferResult) -> None:
                ended(loaded if end.status is TransferStatus.DONE else ())

            def ended(loaded: Collection[Key] = ()) -> None:
                self._answered(name)
                if not finish(loaded) and is_abandoned.is_set():
                    self._rows.over(rows)

            def cancel() -> None:
                session.cancel(transfer)
                self._wait(name, CANCEL_GRACE_S, abandon)

            def abandon() -> None:
                if not self._rows.is_bound:
                    self._wait(name, WARN_AFTER_S, abandon)
                    return
                self._rows.hold(rows)
                is_abandoned.set()
                if finish():
                    self.is_hung = True
                    logger.warning(
                        "hotkv: the server does not end a load; requests go on without it, and %d "
                        "rows of vLLM's CPU memory are out of use until the server answers or is "
                        "stopped",
                        len(rows),
                    )
                else:
                    is_abandoned.clear()
                    self._rows.release(rows)

            self._wait(name, settings.load_timeout_s, cancel, in_reset_s=0.0)
            _then(
                session.load(transfer, name, runs, settings.load_timeout_s), copied, lambda: ended()
            )

        def failed() -> None:
            self._answered(name)
            begun.acquire(blocking=False)
            finish()

        def give_up() -> None:
            if begun.acquire(blocking=False):
                self.is_hung = True
                finish()

        hashes = [GroupHashes(group.group_index, group.hashes) for group in groups]
        answer = session.acquire(name, hashes, settings.lease_ttl_s)
        # Counted after the call of `acquire`: if that raises, no load has begun.
        with self._settled:
            self._num_loads += 1
        patience_s = (
            settings.load_timeout_s
            if session.has_tiers
            else max(settings.lookup_timeout_s, LEASE_PATIENCE_S)
        )
        self._wait(name, patience_s, give_up)
        _then(answer, acquired, failed)

    # --------------------------------------------------------------------------------------- stores

    def store(self, job: Any, runs: Sequence[BlockRun], options: StoreOptions = NO_OPTIONS) -> None:
        """Begins a store: the server copies chunks (units of blocks) from their rows of vLLM's CPU
        memory (the primary tier). Does not wait; `take_ended` returns the result.

        job: vLLM's `TransferJob`.
        runs: the chunks to store, as runs of consecutive chunks.
        options: how long the server should retain the chunks, and other options of the store.
        """
        name, session, settings = self._new_name(), self._session, self._settings

        def stored(end: TransferResult) -> None:
            # The result CANCELLED does not come from the server: the future of a cancelled store
            # resolves at once, even if the server hangs.
            self._answered(name, is_alive=end.status is not TransferStatus.CANCELLED)
            settled = sum(int(np.isin(codes, SETTLED).sum()) for codes in end.results)
            is_done = end.status is TransferStatus.DONE
            is_complete = is_done and settled == sum(len(run.hashes) for run in runs)
            self._end(EndedJob(job, (), is_complete), is_load=False)

        def failed() -> None:
            self._answered(name)
            self._end(EndedJob(job, (), False), is_load=False)

        def give_up() -> None:
            session.cancel(name)
            # Sends a lookup, because the cancelled store gets no answer from the server. The
            # lookup's answer shows when the server works again.
            first = [GroupHashes(run.group_index, run.hashes[:1]) for run in runs[:1]]
            self.hangs_until(session.lookup(first))

        answer = session.store(name, self._new_name(), runs, settings.store_timeout_s, options)
        with self._settled:
            self._num_stores += 1
        # Waits longer than `store_timeout_s`, after which the server itself gives up the store.
        self._wait(name, 2 * settings.store_timeout_s, give_up, in_reset_s=settings.reset_timeout_s)
        _then(answer, stored, failed)

    # ----------------------------------------------------------------------------------------- ends

    def take_ended(self) -> list[EndedJob]:
        """Returns the jobs (loads and stores) that have ended since the last call. Overdue jobs end
        too, as incomplete: loads and stores that the server has not answered in time."""
        self._check_patience()
        with self._settled:
            ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Ends all jobs (loads and stores). Blocks at most CANCEL_GRACE_S for loads, which it
        cancels, and `hotkv.reset_timeout_s` for stores. Only before `PrimaryRows` is bound it waits
        longer for a load, and logs a warning every WARN_AFTER_S."""
        self._hurry()
        try:
            warn_at_s = time.monotonic() + WARN_AFTER_S
            while True:
                with self._settled:
                    if self._settled.wait_for(lambda: self.is_idle, 0.05):
                        return
                self._check_patience()
                if time.monotonic() > warn_at_s:
                    warn_at_s += WARN_AFTER_S
                    logger.warning(
                        "hotkv: a reset waits for %d loads and %d stores, which the server has not "
                        "ended; it must not write into rows that are used again",
                        self._num_loads,
                        self._num_stores,
                    )
        finally:
            self._is_draining = False

    def wait_for_end(self, timeout_s: float) -> bool:
        """Waits until a load or store has ended, for at most `timeout_s`. Does not wait if no load
        is in progress, even if stores are in progress. Returns True if `take_ended` would now
        return a load or store."""
        with self._settled:
            if self._num_loads:
                self._settled.wait_for(lambda: self._ended, timeout_s)
            return bool(self._ended)

    def _end(self, ended: EndedJob, *, is_load: bool) -> None:
        with self._settled:
            self._num_loads -= is_load
            self._num_stores -= not is_load
            self._ended.append(ended)
            self._settled.notify_all()

    # ------------------------------------------------------------------------------------- patience

    def _wait(
        self,
        name: str,
        patience_s: float,
        missed: Callable[[], None],
        in_reset_s: float | None = None,
    ) -> None:
        in_reset_s = CANCEL_GRACE_S if in_reset_s is None else in_reset_s
        with self._settled:
            wait_s = min(patience_s, in_reset_s) if self._is_draining else patience_s
            self._waiting[name] = _Deadline(time.monotonic() + wait_s, in_reset_s, missed)

    def _hurry(self) -> None:
        """Brings all deadlines forward, for a reset."""
        now_s = time.monotonic()
        with self._settled:
            self._is_draining = True
            for one in self._waiting.values():
                one.at_s = min(one.at_s, now_s + one.in_reset_s)

    def hangs_until(self, answer: "Future[Any]") -> None:
        """Sets `is_hung` until `answer` has come. For calls that are no jobs."""
        self.is_hung = True
        answer.add_done_callback(lambda _: self._answered(""))

    def _answered(self, name: str, is_alive: bool = True) -> None:
        with self._settled:
            self._waiting.pop(name, None)
        if is_alive:
            self.is_hung = False

    def _check_patience(self) -> None:
        now_s = time.monotonic()
        with self._settled:
            late = [name for name, one in self._waiting.items() if now_s > one.at_s]
            missed = [self._waiting.pop(name).missed for name in late]
        for one in missed:
            one()


def _then(future: "Future[Any]", done: Callable[[Any], None], failed: Callable[[], None]) -> None:
    """Once the future is resolved, calls `done` with its result. If the future holds an exception,
    or if `done` raises, calls `failed`."""

    def ended(future: "Future[Any]") -> None:
        try:
            if future.exception() is None:
                done(future.result())
                return
        except Exception:  # noqa: BLE001 - the edge of answers: a job must end whatever they hold
            logger.exception("hotkv: an answer of the server could not be handled")
        failed()

    future.add_done_callback(ended)

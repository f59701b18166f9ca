"""Executes vLLM's jobs between the primary tier and the server.

- Each job is reported as ended exactly once, in bounded time.
- A load asks for lease and copy at once if the block table has all its chunks, else for the copy
  when the lease is granted.
- A load that the server does not end in time is cancelled, and fails CANCEL_GRACE_S later; without
  a lease in time it fails at once. Rows that the server may still write are held by `PrimaryRows`
  until the server has answered or its process has ended.
- A store that is not answered in time is revoked (`Session.cancel`): the server, even a hung one,
  discards copies of a store whose word in shared memory is set.

The scheduler's thread begins and collects jobs. Answers come in the client's threads, which only
send a copy whose lease is granted or a lease after a refused copy, and record the end of a job or
of a hold of rows.
"""

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
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
from hotkv_vllm.config import LEASE_TTL_S, ConnectorConfig
from hotkv_vllm.link import logger
from hotkv_vllm.offloading.promotions import Key
from hotkv_vllm.worker.rank_loads import CANCEL_GRACE_S

LEASE_PATIENCE_S = 1.0
"""How long a load waits for its lease, or `lookup_timeout_s` if longer. With lower tiers, which
the server may have to read, it is `load_timeout_s`."""
WARN_AFTER_S = 30.0
SETTLED = (BlockResult.STORED, BlockResult.PRESENT, BlockResult.IN_FLIGHT)
"""Need not be stored again: the server has the block, or another engine is storing it."""


@dataclass(frozen=True, slots=True)
class GroupRows:
    """The chunks of one group that a load copies, in any order.

    rows: int32 [chunks].
    """

    group_index: int
    keys: Sequence[Key]
    hashes: Sequence[bytes]
    rows: "np.ndarray[Any, np.dtype[np.int32]]"


@dataclass(frozen=True, slots=True)
class EndedJob:
    """job: vLLM's `TransferJob`.
    loaded: keys; empty for a store.
    is_complete: every chunk was copied or needed no copy.
    """

    job: Any
    loaded: Collection[Key]
    is_complete: bool


class _Load:
    """A try to load a job.

    lease, transfer: their ids; `lease` also names its deadline.
    rows: that the copy writes.
    over: acquired by whoever ends the try, and never released.
    is_abandoned: `PrimaryRows` holds the rows until the copy ends.
    """

    def __init__(self, job: Any, groups: Sequence[GroupRows], lease: str, transfer: str) -> None:
        self.job = job
        self.groups = groups
        self.lease = lease
        self.transfer = transfer
        self.rows = [row for group in groups for row in group.rows.tolist()]
        self.over = threading.Lock()
        self.is_abandoned = threading.Event()

    def __repr__(self) -> str:
        return f"_Load({self.lease}, {len(self.rows)} rows)"


@dataclass(slots=True)
class _Deadline:
    """`missed` is called if the server has not answered until `at_s`; in a reset, within
    `in_reset_s`."""

    at_s: float
    in_reset_s: float
    missed: Callable[[], None]


class TierTransfers:
    """rows: holds the rows of loads that are given up.
    is_hung: the server has not answered a call in time, nor any since.
    is_held: no job may begin; set by `CacheReset` and obeyed by the tier.
    """

    def __init__(self, session: Session, settings: ConnectorConfig, rows: PrimaryRows) -> None:
        self._session = session
        self._settings = settings
        self._rows = rows
        self._prefix = uuid.uuid4().hex[:12]
        # Used by several threads: `next` is atomic for `itertools.count`, not for a generator.
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
        """Stores only: a reset of the server's cache waits for 0."""
        return self._num_stores

    @property
    def is_idle(self) -> bool:
        return not self._num_loads and not self._num_stores

    def _new_name(self) -> str:
        """Any thread."""
        return f"{self._prefix}-{next(self._numbers)}"

    # ---------------------------------------------------------------------------------------- loads

    def load(self, job: Any, groups: Sequence[GroupRows]) -> None:
        """Does not wait; `take_ended` returns the result, incomplete if the lease lacks chunks.

        job: vLLM's `TransferJob`.
        """
        # Rows can be held, so a copy may begin before the lease is answered.
        is_quick = self._rows.is_bound and self._are_ready(groups)
        with self._settled:
            self._num_loads += 1
        try:
            (self._lease_and_copy if is_quick else self._lease_then_copy)(job, groups)
        except BaseException:
            with self._settled:
                self._num_loads -= 1
            raise

    def _are_ready(self, groups: Sequence[GroupRows]) -> bool:
        """Whether the block table has all chunks."""
        masks = (self._session.probe(group.group_index, group.hashes) for group in groups)
        return all(mask is not None and mask.all() for mask in masks)

    def _acquire(self, load: "_Load") -> "Future[LeaseGrant]":
        hashes = [GroupHashes(group.group_index, group.hashes) for group in load.groups]
        return self._session.acquire(load.lease, hashes, LEASE_TTL_S)

    def _new_load(self, job: Any, groups: Sequence[GroupRows]) -> "_Load":
        return _Load(job, groups, self._new_name(), self._new_name())

    def _lease_and_copy(self, job: Any, groups: Sequence[GroupRows]) -> None:
        """Sends both calls at once. If the server refuses the copy, because the lease lacks a
        chunk or is not granted yet, leases again."""
        load, session, settings = self._new_load(job, groups), self._session, self._settings
        keys = [key for group in groups for key in group.keys]
        runs = [
            LoadRun(group.group_index, np.arange(len(group.keys), dtype=np.int32), group.rows)
            for group in groups
        ]

        def leased(_: LeaseGrant) -> None:
            self.is_hung = False
            cancel = partial(self._cancel, load)
            with self._settled:
                is_draining = self._is_draining
                if load.lease in self._waiting and not is_draining:
                    at_s = time.monotonic() + settings.load_timeout_s
                    self._waiting[load.lease] = _Deadline(at_s, 0.0, cancel)
            if is_draining:
                session.cancel(load.transfer)
            if load.over.locked():
                # Granted after the try's end, which has released nothing.
                session.release(load.lease)

        def copied(end: TransferResult) -> None:
            self._answered(load.lease)
            self._copy_ended(load, keys if end.status is TransferStatus.DONE else ())

        def refused() -> None:
            self._answered(load.lease)
            if self._is_draining or not load.over.acquire(blocking=False):
                self._copy_ended(load)
                return
            session.release(load.lease)
            self._lease_then_copy(job, groups)

        def give_up() -> None:
            session.cancel(load.transfer)
            self._abandon(load)

        answer = self._acquire(load)
        copying = session.load(load.transfer, load.lease, runs, settings.load_timeout_s)
        self._wait(load.lease, max(settings.lookup_timeout_s, LEASE_PATIENCE_S), give_up)
        _then(answer, leased, lambda: None)
        _then(copying, copied, refused)

    def _lease_then_copy(self, job: Any, groups: Sequence[GroupRows]) -> None:
        load, session, settings = self._new_load(job, groups), self._session, self._settings
        # Acquired once and never released: the copy begins, or the load is given up before.
        begun = threading.Lock()

        def acquired(grant: LeaseGrant) -> None:
            self._answered(load.lease)
            if not begun.acquire(blocking=False):
                session.release(load.lease)
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
            if runs and not self._is_draining:
                copy(runs, loaded)
            else:
                self._finish(load)

        def copy(runs: list[LoadRun], loaded: Collection[Key]) -> None:
            def copied(end: TransferResult) -> None:
                self._answered(load.lease)
                self._copy_ended(load, loaded if end.status is TransferStatus.DONE else ())

            def lost() -> None:
                self._answered(load.lease)
                self._copy_ended(load)

            cancel = partial(self._cancel, load)
            self._wait(load.lease, settings.load_timeout_s, cancel, in_reset_s=0.0)
            copying = session.load(load.transfer, load.lease, runs, settings.load_timeout_s)
            _then(copying, copied, lost)

        def failed() -> None:
            self._answered(load.lease)
            begun.acquire(blocking=False)
            self._finish(load)

        def give_up() -> None:
            if begun.acquire(blocking=False):
                self.is_hung = True
                self._finish(load)

        answer = self._acquire(load)
        patience_s = (
            settings.load_timeout_s
            if session.has_tiers
            else max(settings.lookup_timeout_s, LEASE_PATIENCE_S)
        )
        self._wait(load.lease, patience_s, give_up)
        _then(answer, acquired, failed)

    def _finish(self, load: "_Load", loaded: Collection[Key] = ()) -> bool:
        if not load.over.acquire(blocking=False):
            return False
        self._end(EndedJob(load.job, loaded, len(loaded) == len(load.job.keys)), is_load=True)
        # After the end, for which the scheduler's thread may wait.
        self._session.release(load.lease)
        return True

    def _copy_ended(self, load: "_Load", loaded: Collection[Key] = ()) -> None:
        if not self._finish(load, loaded) and load.is_abandoned.is_set():
            self._rows.over(load.rows)

    def _cancel(self, load: "_Load") -> None:
        self._session.cancel(load.transfer)
        self._wait(load.lease, CANCEL_GRACE_S, partial(self._abandon, load))

    def _abandon(self, load: "_Load") -> None:
        if not self._rows.is_bound:
            self._wait(load.lease, WARN_AFTER_S, partial(self._abandon, load))
            return
        self._rows.hold(load.rows)
        load.is_abandoned.set()
        if self._finish(load):
            self.is_hung = True
            logger.warning(
                "hotkv: the server does not end a load; requests go on without it, and %d rows of "
                "vLLM's CPU memory are out of use until the server answers or is stopped",
                len(load.rows),
            )
        else:
            load.is_abandoned.clear()
            self._rows.release(load.rows)

    # --------------------------------------------------------------------------------------- stores

    def store(self, job: Any, runs: Sequence[BlockRun], options: StoreOptions = NO_OPTIONS) -> None:
        name, session, settings = self._new_name(), self._session, self._settings

        def stored(end: TransferResult) -> None:
            # CANCELLED is not the server's: a cancelled store's future resolves at once.
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
            # The lookup's answer shows when the server works again; the store gets none.
            first = [GroupHashes(run.group_index, run.hashes[:1]) for run in runs[:1]]
            self.hangs_until(session.lookup(first))

        answer = session.store(name, self._new_name(), runs, settings.store_timeout_s, options)
        with self._settled:
            self._num_stores += 1
        # The server itself gives up after `store_timeout_s`.
        self._wait(name, 2 * settings.store_timeout_s, give_up, in_reset_s=settings.reset_timeout_s)
        _then(answer, stored, failed)

    # ----------------------------------------------------------------------------------------- ends

    def take_ended(self) -> list[EndedJob]:
        """Jobs ended since the last call; overdue ones end too, as incomplete."""
        self._check_patience()
        with self._settled:
            ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Ends all jobs. Blocks at most CANCEL_GRACE_S for loads, which it cancels, and
        `reset_timeout_s` for stores; longer only for loads before `PrimaryRows` is bound, with a
        warning every WARN_AFTER_S."""
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
        """Waits for the end of a job, but only if a load is in progress. True if `take_ended`
        has some."""
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
        now_s = time.monotonic()
        with self._settled:
            self._is_draining = True
            for one in self._waiting.values():
                one.at_s = min(one.at_s, now_s + one.in_reset_s)

    def hangs_until(self, answer: "Future[Any]") -> None:
        """For calls that are no jobs."""
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
    """Calls `done` with the future's result; `failed` if it has none or `done` raises."""

    def ended(future: "Future[Any]") -> None:
        try:
            if future.exception() is None:
                done(future.result())
                return
        except Exception:  # noqa: BLE001 - the edge of answers: a job must end whatever they hold
            logger.exception("hotkv: an answer of the server could not be handled")
        failed()

    future.add_done_callback(ended)

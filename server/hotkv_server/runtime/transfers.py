"""Loads and stores: from a call to the last byte, and to the answer.

Always true: a transfer's answer comes only when nothing touches its memory any more; what a store
wrote is kept only if its blocks were the engine's own until then, and what a load read had been
compared. Runs on the event loop; bytes are moved by the copy engine's threads.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hotkv.errors import HotKVError, Reason
from hotkv.keys import MAX_GROUPS
from hotkv.order import DeviceMark
from hotkv.retention import NO_RETENTION, Retention
from hotkv_server.core.bounds import Account
from hotkv_server.core.cache import CacheCore
from hotkv_server.core.values import LoadPositions, Run, SlotRun
from hotkv_server.dataplane.engine import CopyEngine, CopyJob, Outcome
from hotkv_server.dataplane.plan import Region, block_copies
from hotkv_server.integrity.check_values import Sums
from hotkv_server.integrity.sums import SumThreads
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.runtime.deadline import Deadline
from hotkv_server.runtime.engine_memory import EngineMemory
from hotkv_server.runtime.events import EventHub, RunContent, stored_events
from hotkv_server.runtime.health import Health
from hotkv_server.runtime.order import MarkGate
from hotkv_server.runtime.session import LiveSession

log = logging.getLogger(__name__)

MAX_TRANSFERS_OF_SESSION = 2048
"""In flight at a time. Besides, a session begins none while its transfers have as many bytes as the
arena, or these where it is small:"""
MIN_INFLIGHT_BYTES = 1 << 30
TRANSFER_BYTES, RUN_BYTES, BLOCK_BYTES = 2048, 1024, 40
"""About what is kept of a transfer until it ends, besides its message: for itself, for each run,
for each block."""
CONDEMNED_MESSAGE = "a block's bytes are not those that were stored; it is dropped"

Finish = Callable[[Outcome, int], list[NDArray[np.uint8]]]
"""Ends a transfer in the core, given how it went and the bytes moved; returns the results a run."""


@dataclass(frozen=True, slots=True)
class TransferEnd:
    """How a transfer ended. `results`: BlockResult values a run, for stores."""

    outcome: Outcome
    num_bytes: int
    message: str
    results: list[NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class _Hold:
    """What a transfer waits for, for how long, and about how many bytes are kept of it until it
    ends."""

    deadline: Deadline
    gate: MarkGate | None
    kept_bytes: int

    @staticmethod
    def of(
        memory: EngineMemory, after: DeviceMark | None, timeout_s: float, kept_bytes: int
    ) -> "_Hold":
        """Raises INVALID_FIELD for a mark that this session has not."""
        deadline = Deadline(timeout_s)
        return _Hold(
            deadline,
            None if after is None else memory.order.gate(after, deadline.mark_passed),
            kept_bytes,
        )


class Transfers:
    """All of a node. `run_effects`: carries out what the core's decisions call for."""

    def __init__(
        self,
        core: CacheCore,
        arena: Region,
        copy_engine: CopyEngine,
        verifier: Verifier,
        events: EventHub,
        health: Health,
        run_effects: Callable[[], None],
    ) -> None:
        self._core = core
        self.kept_bytes = Account(core.client_memory)
        self.loaded_bytes = 0
        self.stored_bytes = 0
        self._arena = arena
        self._copy_engine = copy_engine
        self._verifier = verifier
        self._events = events
        self._health = health
        self._run_effects = run_effects
        self._sums = SumThreads()

    def __repr__(self) -> str:
        return (
            f"Transfers({len(self._core.transfers)} under way, {self.loaded_bytes} bytes "
            f"loaded, {self.stored_bytes} stored)"
        )

    def close(self) -> None:
        """Stops its threads."""
        self._sums.close()

    def load(
        self,
        session: LiveSession,
        transfer_id: str,
        lease_id: str,
        runs: list[LoadPositions],
        block_ids: list[NDArray[np.int64]],
        timeout_s: float,
        after: DeviceMark | None = None,
        message_bytes: int = 0,
    ) -> "asyncio.Future[TransferEnd]":
        """Starts a load. The future is done when nothing is written any more. `after`: nothing is
        before this mark has passed.

        `message_bytes`: of what asked for it.
        """
        kept_bytes = message_bytes + _plan_bytes(block_ids)
        self._check_room(session, kept_bytes)
        memory = _usable_memory(session, block_ids, [run.group_index for run in runs])
        hold = _Hold.of(memory, after, timeout_s, kept_bytes)
        slots = self._core.begin_load(session.record.number, transfer_id, lease_id, runs)

        def finish(outcome: Outcome, num_bytes: int) -> list[NDArray[np.uint8]]:
            self._core.end_load(session.record.number, transfer_id, outcome is Outcome.DONE)
            session.loaded_bytes += num_bytes
            self.loaded_bytes += num_bytes
            return []

        return self._transfer(
            session, transfer_id, memory, slots, block_ids, hold, finish, to_engine=True
        )

    def store(
        self,
        session: LiveSession,
        transfer_id: str,
        lease_id: str,
        runs: list[Run],
        block_ids: list[NDArray[np.int64]],
        timeout_s: float,
        retention: Retention = NO_RETENTION,
        fence_index: int = 0,
        contents: Sequence[RunContent] = (),
        after: DeviceMark | None = None,
        message_bytes: int = 0,
    ) -> "asyncio.Future[TransferEnd]":
        """Starts a store. The future is done when the blocks are committed or refused and nothing
        is read any more.

        `contents`: one a run, for events; or none. `after`: nothing is read before this mark has
        passed. `message_bytes`: as for a load.
        """
        kept_bytes = message_bytes + _plan_bytes(block_ids)
        self._check_room(session, kept_bytes)
        memory = _usable_memory(session, block_ids, [run.group_index for run in runs])
        session.check_fence(fence_index)
        for run, ids in zip(runs, block_ids, strict=True):
            if len(ids) != len(run.hashes):
                raise HotKVError(
                    Reason.INVALID_FIELD,
                    (
                        f"runs.block_ids has {len(ids)} ids for {len(run.hashes)} hashes; give one "
                        "id a hash"
                    ),
                )
        hold = _Hold.of(memory, after, timeout_s, kept_bytes)
        ttl_s, shard_index = max(timeout_s, 0.0) * 2, memory.layout.shard_index
        slots = self._core.begin_store(
            session.record.number,
            transfer_id,
            lease_id,
            runs,
            shard_index,
            ttl_s,
            time.monotonic(),
            retention,
        )

        sums: list[Sums] = []

        def finish(outcome: Outcome, num_bytes: int) -> list[NDArray[np.uint8]]:
            kept = outcome is Outcome.DONE and not session.is_revoked(fence_index)
            results = self._core.end_store(
                session.record.number, transfer_id, kept, time.monotonic(), sums
            )
            session.stored_bytes += num_bytes
            self.stored_bytes += num_bytes
            if self._events.is_heard and contents:
                self._events.publish(
                    stored_events(
                        session.record.key_space_id, session.key_space, runs, contents, results
                    )
                )
            return results

        try:
            take_sums = partial(
                self._take_sums, session.record.key_space_id, shard_index, slots, sums
            )
            return self._transfer(
                session,
                transfer_id,
                memory,
                slots,
                block_ids,
                hold,
                finish,
                take_sums,
                to_engine=False,
            )
        finally:
            # Notices of what made room go out while the bytes move.
            self._run_effects()

    def _check_room(self, session: LiveSession, kept_bytes: int) -> None:
        """Raises OVERLOADED where the session has more under way than one alone may have."""
        owner = self._core.owner(session.record)
        if kept_bytes > self.kept_bytes.room(owner):
            raise HotKVError(
                Reason.OVERLOADED,
                (
                    f"transfer_id: {self.kept_bytes.refusal(owner, 'bytes of transfers')}; wait "
                    "for "
                    "some"
                ),
            )
        if len(session.jobs) >= MAX_TRANSFERS_OF_SESSION or session.inflight_bytes >= max(
            self._arena.num_bytes, MIN_INFLIGHT_BYTES
        ):
            raise HotKVError(
                Reason.OVERLOADED,
                (
                    f"transfer_id: the session has {len(session.jobs)} transfers of "
                    f"{session.inflight_bytes} bytes in flight; wait for some"
                ),
            )

    def _take_sums(
        self, key_space_id: int, shard_index: int, slots: Sequence[SlotRun], sums: list[Sums]
    ) -> None:
        """What a store has written, for its check values. In the copy thread that wrote last."""
        stride, record = self._core.config.check_stride, self._core.catalog.record(key_space_id)
        for run in slots if stride else ():
            shard_bytes, found = (
                record.shape(run.group_index).shard_bytes,
                np.zeros(len(run.offsets), np.uint64),
            )
            strides = np.full(len(found), stride)
            self._sums.add_sums(
                self._arena,
                run.offsets + sum(shard_bytes[:shard_index]),
                shard_bytes[shard_index],
                shard_index,
                strides,
                found,
            )
            sums.append(found)

    def cancel(self, session: LiveSession, transfer_id: str) -> bool:
        """Asks a transfer to end early; False where it has ended."""
        job = session.jobs.get(transfer_id)
        if job is None:
            return False
        job.cancel()
        return True

    def _transfer(
        self,
        session: LiveSession,
        transfer_id: str,
        memory: EngineMemory,
        slots: Sequence[SlotRun],
        block_ids: Sequence[NDArray[np.int64]],
        hold: "_Hold",
        finish: Finish,
        then: Callable[[], None] | None = None,
        *,
        to_engine: bool,
    ) -> "asyncio.Future[TransferEnd]":
        """`then`: called in a copy thread when all has been copied."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[TransferEnd] = loop.create_future()
        record = self._core.catalog.record(session.record.key_space_id)
        try:
            plans = [
                plan
                for run, ids in zip(slots, block_ids, strict=True)
                for plan in block_copies(
                    memory.layout.recipes(
                        session.named(run.group_index), record.shape(run.group_index)
                    ),
                    ids[run.positions],
                    run.offsets,
                    self._arena,
                    memory.regions,
                    to_engine=to_engine,
                )
            ]
        except BaseException:
            # The core has begun the transfer; it must not stay in its books.
            finish(Outcome.FAILED, 0)
            raise

        def ended(outcome: Outcome, message: str) -> None:
            hold.deadline.end()
            del session.jobs[transfer_id]
            session.inflight_bytes -= job.total_bytes
            self.kept_bytes.give(owner, hold.kept_bytes)
            session.settled.set()
            if self._health.breach:
                outcome, message = Outcome.FAILED, "the server ends: its books can't be trusted"
            elif not memory.is_whole():
                outcome, message = (
                    Outcome.FAILED,
                    "the file of the engine's memory has been truncated",
                )
                log.warning("memory cut short %s transfer=%r", session.name, transfer_id)
            elif to_engine and outcome is Outcome.DONE and self._verifier.is_doubtful(slots):
                outcome, message = Outcome.FAILED, CONDEMNED_MESSAGE
            moved = job.total_bytes if outcome is Outcome.DONE else 0
            results = finish(outcome, moved)
            self._run_effects()
            if not future.cancelled():
                future.set_result(
                    TransferEnd(outcome, moved, message or hold.deadline.message, results)
                )

        def on_done(outcome: Outcome, message: str) -> None:
            try:
                if then is not None and outcome is Outcome.DONE:
                    then()
            except Exception as error:  # noqa: BLE001 The edge of the effect executor: what can't be checked is not kept.
                outcome, message = Outcome.FAILED, f"{type(error).__name__}: {error}"
            loop.call_soon_threadsafe(ended, outcome, message)

        owner = self._core.owner(session.record)
        job = CopyJob(plans, on_done, hold.gate, owner)
        session.jobs[transfer_id] = job
        self.kept_bytes.take(owner, hold.kept_bytes)
        session.inflight_bytes += job.total_bytes
        hold.deadline.begin(job, has_mark=hold.gate is not None)
        cases = self._verifier.unverified(slots) if to_engine else []
        if not cases:
            self._copy_engine.submit(job)
            return future

        def judged(checking: "asyncio.Future[list[NDArray[np.bool_]]]") -> None:
            if (error := checking.exception()) is not None:
                ended(Outcome.FAILED, f"{type(error).__name__}: {error}")
            elif len(self._verifier.settle(cases, checking.result())):
                ended(Outcome.FAILED, CONDEMNED_MESSAGE)
            else:
                self._copy_engine.submit(job)

        loop.run_in_executor(None, self._verifier.judge, cases).add_done_callback(judged)
        return future


def _plan_bytes(block_ids: Sequence[NDArray[np.int64]]) -> int:
    """About what is kept of a transfer besides its message. `block_ids`: of each run."""
    return (
        TRANSFER_BYTES
        + RUN_BYTES * len(block_ids)
        + BLOCK_BYTES * sum(len(ids) for ids in block_ids)
    )


def _usable_memory(
    session: LiveSession, block_ids: Sequence[NDArray[np.int64]], groups: Sequence[int]
) -> EngineMemory:
    """The session's memory, checked against the block ids and groups of a transfer."""
    if session.closing:
        raise HotKVError(Reason.UNKNOWN_SESSION, "session_id is closing")
    if session.memory is None:
        raise HotKVError(
            Reason.NO_MEMORY_REGISTERED,
            "the session has registered no memory; send register_memory first",
        )
    session.memory.check_use(
        block_ids,
        [session.named(group_index) for group_index in groups if group_index >= MAX_GROUPS],
    )
    return session.memory

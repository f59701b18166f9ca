"""Loads and stores of a node. Each is checked, recorded in the core, copied, and ended in the core.

Always true: a store's blocks are dropped if the engine revokes it before its end. A session's
transfers are bounded in number and bytes. On the event loop; the copy engine's threads move
bytes.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.blocks import (
    NO_OPTIONS,
    BlockResult,
    RunContent,
    StoreOptions,
    TransferResult,
    TransferStatus,
)
from hotkv_proto.errors import HotKVError, Reason, invalid
from hotkv_proto.keys import MAX_GROUPS
from hotkv_proto.order import DeviceMark
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.histogram import SECONDS, SIZES_BYTES, Histogram
from hotkv_server.cache.room.shares import FairBound
from hotkv_server.cache.values import KeySpaceRecord, LoadPositions, Run, SlotRun
from hotkv_server.dataplane.engines import CopyEngine, CopyJob, Outcome
from hotkv_server.dataplane.plan import BlockCopies, Region, block_copies
from hotkv_server.integrity.checksums import Sums
from hotkv_server.integrity.sums import SumThreads
from hotkv_server.integrity.verifier import Case, Verifier
from hotkv_server.logs import Throttle
from hotkv_server.node.capability import NodeEvents, Signal, TransferTimes
from hotkv_server.node.event_loop import in_slices
from hotkv_server.node.growth import ArenaGrowth
from hotkv_server.node.health import Health
from hotkv_server.node.live_session import LiveSession, SessionMemory
from hotkv_server.node.order import MarkGate

# Timings use a fixed amount of memory. On the event loop only.


Answer = TypeVar("Answer")
LOAD, STORE = "load", "store"


class Timings:
    """Histograms for metrics, in seconds and bytes.

    lookup_s, lease_s: time to the answer; for leases with reads from tiers.
    ends: by direction (LOAD, STORE) and outcome.
    load_s, store_s: of transfers that succeeded, with all waits; of stores without making room.
    wait_s: for a copy thread or device queue, after the mark was passed.
    """

    def __init__(self) -> None:
        self.lookup_s, self.lease_s = Histogram(SECONDS), Histogram(SECONDS)
        self.load_s, self.store_s = Histogram(SECONDS), Histogram(SECONDS)
        self.load_bytes, self.store_bytes = Histogram(SIZES_BYTES), Histogram(SIZES_BYTES)
        self.wait_s = Histogram(SECONDS)
        self.ends: Counter[tuple[str, Outcome]] = Counter()

    def __repr__(self) -> str:
        return f"Timings({self.lookup_s.count} lookups, {self.ends.total()} transfers)"

    def answered(self, times: Histogram, began_s: float, answer: Answer) -> Answer:
        """Adds the time from `began_s` to now, or to the end of `answer` if that is a task."""
        if isinstance(answer, asyncio.Task):
            answer.add_done_callback(lambda done: times.add(time.monotonic() - began_s))
        else:
            times.add(time.monotonic() - began_s)
        return answer

    def moved(
        self,
        outcome: Outcome,
        num_bytes: int,
        began_s: float,
        waited_s: float | None,
        *,
        to_engine: bool,
    ) -> None:
        """began_s: of the monotonic clock; for a store, when the core had made room.
        waited_s: for a thread or a device; None if no copy began.
        """
        self.ends[LOAD if to_engine else STORE, outcome] += 1
        if waited_s is not None:
            self.wait_s.add(waited_s)
        if outcome is Outcome.DONE:
            (self.load_s if to_engine else self.store_s).add(time.monotonic() - began_s)
            (self.load_bytes if to_engine else self.store_bytes).add(num_bytes)


log = logging.getLogger(__name__)
log.addFilter(Throttle())

DEFAULT_TIMEOUT_S = 30.0
MARK_TIMEOUT_S = 600.0
"""All work that an engine queues takes far less time."""
CONDEMNED_MESSAGE = "a block's bytes are not those that were stored; it is dropped"
MAX_TRANSFERS_OF_SESSION = 2048
"""Nor may a session begin a transfer while those in flight have as many bytes as the arena, or
as MIN_INFLIGHT_BYTES if that is more."""
MIN_INFLIGHT_BYTES = 1 << 30
TRANSFERS = "transfers"
"""Their kind in the bound of clients' memory."""
TRANSFER_BYTES, RUN_BYTES, BLOCK_BYTES = 2048, 1024, 40
"""Estimated memory of a transfer beside its message: for itself, each run and each block."""


class Deadline:
    """Cancels a transfer that takes too long; then `message` says why.

    Always true: the timeout begins when the device has passed the transfer's mark, if it has
    one. A mark not passed within MARK_TIMEOUT_S cancels too. On the event loop, but for
    `mark_passed`.
    """

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: 0 for DEFAULT_TIMEOUT_S."""
        self.message = ""
        self._timeout_s = timeout_s or DEFAULT_TIMEOUT_S
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._job: CopyJob | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, job: CopyJob, *, has_mark: bool) -> None:
        self._job = job
        if has_mark:
            self._timer = self._loop.call_later(
                MARK_TIMEOUT_S, self._late, f"the mark did not pass within {MARK_TIMEOUT_S:.0f} s"
            )
        else:
            self._start()

    def mark_passed(self) -> None:
        """Any thread."""
        if threading.get_ident() == self._thread:
            self._start()
        else:
            self._loop.call_soon_threadsafe(self._start)

    def end(self) -> None:
        self._job = None
        if self._timer is not None:
            self._timer.cancel()

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._job is not None:
            self._timer = self._loop.call_later(
                self._timeout_s, self._late, f"the transfer took longer than {self._timeout_s} s"
            )

    def _late(self, message: str) -> None:
        assert self._job is not None, "the end of the job stops the timer"
        self.message = message
        self._job.cancel()


BlockIds = Sequence[NDArray[np.int64]]
"""Ids in the engine's memory, an array for each run."""
Results = list[NDArray[np.uint8]]
"""`BlockResult` values, an array for each run; none for a load."""
Finish = Callable[[Outcome, int, Sequence[Sums]], Results]
"""Ends a transfer in the core, given the bytes copied, and a store's sums as for `end_store`."""


@dataclass(frozen=True, slots=True)
class TransferEnd(TransferResult):
    """Times are of the monotonic clock.

    copy_began_s: None if no byte was copied.
    copy_ended_s: when the node learned of it.
    runs: the blocks of a store, in the order of `results`.
    is_told: the client's word says that it is done.
    """

    copy_began_s: float | None = None
    copy_ended_s: float = 0.0
    runs: Sequence[Run] = ()
    is_told: bool = False


@dataclass(frozen=True, slots=True)
class Means:
    client_memory: FairBound
    check_stride: int
    arena: Region
    copy_engine: CopyEngine
    sum_threads: SumThreads
    verifier: Verifier
    health: Health
    run_effects: Callable[[], None]
    timings: Timings
    ended: Signal[[LiveSession, TransferTimes]]


@dataclass(frozen=True, slots=True)
class TransferCall:
    """record: of the session's key space when the call came.
    changed: files of `memory` in which to look for holes.
    gate: delays the copy; None without a mark.
    kept_bytes: estimated memory until the end.
    end_index: of the client's word; 0 for none.
    came_s: of the monotonic clock.
    """

    session: LiveSession
    record: KeySpaceRecord
    transfer_id: str
    memory: SessionMemory
    changed: list[str]
    block_ids: BlockIds
    deadline: Deadline
    gate: MarkGate | None
    kept_bytes: int
    end_index: int
    came_s: float


class Transfer:
    """One load or store, from its copy plan to its answer.

    finish: called exactly once, also if the copy plan can't be made.
    tell: notifies the capabilities of a store; None for a load.
    runs: the blocks of a store; empty for a load.

    Always true: the answer comes after the last access to the engine's memory and the slots.
    Unverified blocks are compared before a load's copy. A load fails if a block is condemned
    before its end.
    """

    def __init__(
        self,
        means: Means,
        call: TransferCall,
        finish: Finish,
        tell: Callable[[Results], None] | None = None,
        *,
        to_engine: bool,
        runs: Sequence[Run] = (),
    ) -> None:
        self._runs = runs
        self._means = means
        self._call = call
        self._finish = finish
        self._tell = tell
        self._sums: StoreSums | None = None
        self._to_engine = to_engine
        self._began_s = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[TransferEnd] = self._loop.create_future()
        self._owner = call.session.record.owner
        self._slots: Sequence[SlotRun] = ()
        self._job: CopyJob | None = None
        self._thread = threading.get_ident()
        self._is_told = False

    def __repr__(self) -> str:
        word = "load" if self._to_engine else "store"
        return f"Transfer({word} {self._call.transfer_id!r}, {self._job!r})"

    def start(self, slots: Sequence[SlotRun]) -> "asyncio.Future[TransferEnd]":
        """For a transfer that the core has recorded."""
        means, call = self._means, self._call
        self._slots = slots
        try:
            groups = slot_groups(slots)
            if not self._to_engine and means.check_stride:
                self._sums = StoreSums(means, call, slots, groups)
            plans = self._plans(groups)
        except BaseException:
            # The core has recorded the begin, so record the end too.
            results = self._finish(Outcome.FAILED, 0, ())
            if self._tell is not None:
                self._tell(results)
            raise
        progress = None if self._sums is None else self._sums.take
        self._job = job = CopyJob(
            plans,
            self._copied,
            call.gate,
            self._owner,
            progress,
            is_prompt=call.memory.is_prompt,
        )
        call.session.jobs[call.transfer_id] = job
        means.client_memory.take(self._owner, call.kept_bytes, TRANSFERS)
        call.session.inflight_bytes += job.total_bytes
        call.deadline.begin(job, has_mark=call.gate is not None)
        try:
            cases = means.verifier.unverified(slots) if self._to_engine else []
            if cases or call.changed:
                judging = self._loop.run_in_executor(None, self._judge, cases)
                judging.add_done_callback(lambda done: self._judged(cases, done))
            else:
                means.copy_engine.submit(job)
        except BaseException as error:
            self._ended(Outcome.FAILED, f"{type(error).__name__}: {error}")
            raise
        return self._future

    def _plans(self, groups: dict[int, list[int]]) -> list[BlockCopies]:
        call = self._call
        # One plan for all runs of a group: each takes time of the event loop and of a thread.
        return [
            plan
            for group, places in groups.items()
            for plan in block_copies(
                call.memory.layout.recipes(call.session.named(group), call.record.shape(group)),
                joined([self._ids(at) for at in places]),
                joined([self._slots[at].offsets for at in places]),
                self._means.arena,
                call.memory.regions,
                to_engine=self._to_engine,
            )
        ]

    def _ids(self, at: int) -> NDArray[np.int64]:
        """A load copies every block of a run."""
        ids = self._call.block_ids[at]
        return ids if self._to_engine else ids[self._slots[at].positions]

    def _judge(self, cases: Sequence[Case]) -> list[NDArray[np.bool_]]:
        """Which blocks match their checksums. Raises HotKVError for a hole in a changed file. On a
        thread."""
        self._call.memory.check_holes(self._call.changed)
        return self._means.verifier.judge(cases) if cases else []

    def _judged(
        self, cases: Sequence[Case], judging: "asyncio.Future[list[NDArray[np.bool_]]]"
    ) -> None:
        """Submits the copy if all blocks match."""
        assert self._job is not None, "blocks are judged after the start"
        try:
            disagreeing = self._means.verifier.settle(cases, judging.result())
            if not len(disagreeing):
                self._means.copy_engine.submit(self._job)
        except HotKVError as refusal:
            self._ended(Outcome.FAILED, refusal.message)
            return
        except BaseException as error:
            self._ended(Outcome.FAILED, f"{type(error).__name__}: {error}")
            raise
        if len(disagreeing):
            self._ended(Outcome.FAILED, CONDEMNED_MESSAGE)

    def _copied(self, outcome: Outcome, message: str) -> None:
        """Called on a copy thread, or by `submit`."""
        try:
            if self._sums is not None and outcome is Outcome.DONE:
                self._sums.take()
            has_word = self._to_engine and self._call.end_index
            if has_word and self._verdict(outcome, message)[0] is Outcome.DONE:
                # A load's end depends on nothing that the event loop does later.
                assert self._job is not None, "what is copied has a job"
                self._is_told = self._call.session.tell_done(
                    self._call.end_index, self._job.total_bytes
                )
        except Exception as error:  # noqa: BLE001 Only the transfer fails; the copy thread goes on.
            outcome, message = Outcome.FAILED, f"{type(error).__name__}: {error}"
        is_here = threading.get_ident() == self._thread
        call_soon = self._loop.call_soon if is_here else self._loop.call_soon_threadsafe
        call_soon(self._ended, outcome, message)

    def _ended(self, outcome: Outcome, message: str) -> None:
        call, job, copy_ended_s = self._call, self._job, time.monotonic()
        assert job is not None, "a transfer ends after its start"
        if not self._is_told:
            outcome, message = self._verdict(outcome, message)
        moved = job.total_bytes if outcome is Outcome.DONE else 0
        sums = () if self._sums is None else self._sums.found
        results = self._finish(outcome, moved, sums)
        if not self._to_engine and outcome is Outcome.DONE:
            is_stored = all((one == BlockResult.STORED).all() for one in results)
            self._is_told = is_stored and call.session.tell_done(call.end_index, moved)
        call.deadline.end()
        del call.session.jobs[call.transfer_id]
        call.session.inflight_bytes -= job.total_bytes
        self._means.client_memory.give(self._owner, call.kept_bytes, TRANSFERS)
        call.session.settled.set()
        self._means.timings.moved(
            outcome, moved, self._began_s, job.waited_s, to_engine=self._to_engine
        )
        if not self._future.cancelled():
            self._future.set_result(
                TransferEnd(
                    call.transfer_id,
                    TransferStatus[outcome.name],
                    moved,
                    tuple(results),
                    message or call.deadline.message,
                    job.begun_s,
                    copy_ended_s,
                    self._runs,
                    self._is_told,
                )
            )
        # After the result is set: if a capability raises, the client still gets its answer.
        if self._tell is not None:
            self._tell(results)
        self._means.ended(call.session, self._times(job, outcome, copy_ended_s))
        self._means.run_effects()

    def _times(self, job: CopyJob, outcome: Outcome, ended_s: float) -> TransferTimes:
        queue_s, begun_s = job.waited_s or 0.0, ended_s if job.begun_s is None else job.begun_s
        return TransferTimes(
            self._to_engine,
            outcome.name.lower(),
            job.total_bytes,
            self._began_s - self._call.came_s,
            begun_s - queue_s - self._began_s,
            queue_s,
            ended_s - begun_s,
        )

    def _verdict(self, outcome: Outcome, message: str) -> tuple[Outcome, str]:
        """FAILED if an invariant is broken (`Health.breach`), the engine's file was truncated,
        or a block of the load was condemned during the copy; else as the copy job says."""
        call = self._call
        if self._means.health.breach:
            return Outcome.FAILED, "the server ends: its books can't be trusted"
        if not call.memory.is_whole():
            log.warning("memory cut short %s transfer=%r", call.session.name, call.transfer_id)
            return Outcome.FAILED, "the file of the engine's memory has been truncated"
        is_done = outcome is Outcome.DONE
        if self._to_engine and is_done and self._means.verifier.is_doubtful(self._slots):
            return Outcome.FAILED, CONDEMNED_MESSAGE
        return outcome, message


class StoreSums:
    """Sums of what a store has written, for its checksums. Begins when the first blocks are copied,
    in the order of the copy plans.

    found: for each run of `slots`.
    """

    def __init__(
        self,
        means: Means,
        call: TransferCall,
        slots: Sequence[SlotRun],
        groups: dict[int, list[int]],
    ) -> None:
        """`groups`: from `slot_groups`."""
        self.found: list[Sums] = [np.zeros(len(run.offsets), np.uint64) for run in slots]
        self._means, self._shard_index = means, call.memory.layout.shard_index
        self._num_taken = 0
        # Of each run its first block's place, the shard's offsets and size.
        self._runs: list[tuple[int, NDArray[np.int64], int, Sums]] = []
        first = 0
        for group, places in groups.items():
            shard_bytes = call.record.shape(group).shard_bytes
            begin, num_bytes = sum(shard_bytes[: self._shard_index]), shard_bytes[self._shard_index]
            for at in places:
                self._runs.append((first, slots[at].offsets + begin, num_bytes, self.found[at]))
                first += len(slots[at].offsets)
        self._num_blocks = first

    def __repr__(self) -> str:
        return f"StoreSums({self._num_taken} of {self._num_blocks} blocks)"

    def take(self, num_blocks: int | None = None) -> None:
        """Of the first `num_blocks`, which are copied; None: all. On a copy thread."""
        end = self._num_blocks if num_blocks is None else num_blocks
        stride = self._means.check_stride
        for first, offsets, num_bytes, found in self._runs:
            part = slice(max(0, self._num_taken - first), max(0, end - first))
            if len(offsets[part]):
                self._means.sum_threads.add_sums(
                    self._means.arena,
                    offsets[part],
                    num_bytes,
                    self._shard_index,
                    np.full(len(offsets[part]), stride),
                    found[part],
                )
        self._num_taken = max(self._num_taken, end)


def joined(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def slot_groups(slots: Sequence[SlotRun]) -> dict[int, list[int]]:
    """Positions of the runs by group, in the order in which they are copied."""
    groups: dict[int, list[int]] = {}
    for at, run in enumerate(slots):
        groups.setdefault(run.group_index, []).append(at)
    return groups


class Transfers:
    def __init__(
        self,
        core: CacheCore,
        growth: ArenaGrowth,
        arena: Region,
        copy_engine: CopyEngine,
        verifier: Verifier,
        events: NodeEvents,
        health: Health,
        run_effects: Callable[[], None],
        timings: Timings | None = None,
    ) -> None:
        self._core = core
        self._growth = growth
        self.loaded_bytes = 0
        self.stored_bytes = 0
        self._events = events
        self._means = Means(
            core.client_memory,
            core.config.check_stride,
            arena,
            copy_engine,
            SumThreads(),
            verifier,
            health,
            run_effects,
            timings or Timings(),
            events.transfer_ended,
        )

    def __repr__(self) -> str:
        return (
            f"Transfers({len(self._core.transfers)} under way, {self.loaded_bytes} bytes "
            f"loaded, {self.stored_bytes} stored)"
        )

    def close(self) -> None:
        self._means.sum_threads.close()

    def cancel(self, session: LiveSession, transfer_id: str) -> bool:
        """False if the session has no such transfer in flight."""
        job = session.jobs.get(transfer_id)
        if job is None:
            return False
        job.cancel()
        return True

    def load(
        self,
        session: LiveSession,
        transfer_id: str,
        lease_id: str,
        runs: list[LoadPositions],
        block_ids: BlockIds,
        timeout_s: float,
        after: DeviceMark | None = None,
        end_index: int = 0,
        message_bytes: int = 0,
    ) -> "asyncio.Future[TransferEnd]":
        """The result is done after the last write to the engine's memory.

        runs: positions in the read lease.
        timeout_s: 0 for DEFAULT_TIMEOUT_S.
        after: writes begin only after this mark.
        end_index: word that says early that it is done; 0: none.
        message_bytes: count as memory of the transfer.
        """
        groups = [run.group_index for run in runs]
        call = self._admit(
            session, transfer_id, groups, block_ids, timeout_s, after, end_index, message_bytes
        )
        slots = self._core.begin_load(session.record.number, transfer_id, lease_id, runs)

        def finish(outcome: Outcome, num_bytes: int, _: Sequence[Sums]) -> Results:
            self._core.end_load(session.record.number, transfer_id, outcome is Outcome.DONE)
            session.loaded_bytes += num_bytes
            self.loaded_bytes += num_bytes
            return []

        return Transfer(self._means, call, finish, to_engine=True).start(slots)

    async def store(
        self,
        session: LiveSession,
        transfer_id: str,
        lease_id: str,
        runs: list[Run],
        block_ids: BlockIds,
        timeout_s: float,
        options: StoreOptions = NO_OPTIONS,
        fence_index: int = 0,
        contents: Sequence[RunContent] = (),
        after: DeviceMark | None = None,
        end_index: int = 0,
        message_bytes: int = 0,
    ) -> "asyncio.Future[TransferEnd]":
        """Makes room, then starts the store. The result is done when the blocks are ready or
        refused, after the last read of the engine's memory. A flush that begins after this call
        aborts the blocks.

        lease_id: the first store with it opens the write lease; stores of other ranks join.
        timeout_s: 0 for DEFAULT_TIMEOUT_S.
        fence_index: word of the fence page that can revoke the store; 0: none.
        contents: token ids of each run, for events; may be empty.
        after: reads begin only after this mark.
        end_index: as of a load; it says that every block is stored.
        message_bytes: count as memory of the transfer.
        """
        groups = [run.group_index for run in runs]
        call = self._admit(
            session,
            transfer_id,
            groups,
            block_ids,
            timeout_s,
            after,
            end_index,
            message_bytes,
            is_store=True,
        )
        session.check_fence(fence_index)
        _check_lengths(runs, block_ids)
        ttl_s, shard_index = timeout_s * 2, call.memory.layout.shard_index
        number, key_space_id = session.record.number, session.record.key_space_id
        growth = self._growth
        has_waited = growth.is_growing and await growth.await_room(key_space_id, runs)
        num_slices = 0

        def after_slice() -> None:
            nonlocal num_slices
            num_slices += 1
            self._means.run_effects()

        beginning = self._core.begin_store(
            number,
            transfer_id,
            lease_id,
            runs,
            shard_index,
            ttl_s,
            time.monotonic(),
            options,
        )

        def finish(outcome: Outcome, num_bytes: int, sums: Sequence[Sums]) -> Results:
            # A flush aborts only leases that exist when it begins. Drop the blocks here if this
            # store's lease is younger.
            record = self._core.catalog.record(key_space_id)
            is_old = record.num_flushes != call.record.num_flushes
            kept = outcome is Outcome.DONE and not is_old and not session.is_revoked(fence_index)
            results = self._core.end_store(number, transfer_id, kept, time.monotonic(), sums)
            session.stored_bytes += num_bytes
            self.stored_bytes += num_bytes
            return results

        def tell(results: Results) -> None:
            self._events.blocks_stored(session, runs, contents, results)

        slots = await in_slices(beginning, after_slice, and_last=False)
        try:
            if has_waited or num_slices:
                # Other tasks ran while room was made, so check again.
                self._check_room(session, call.kept_bytes)
                call = replace(call, changed=_usable_memory(session, block_ids, groups)[1])
        except BaseException:
            tell(finish(Outcome.FAILED, 0, ()))
            self._means.run_effects()
            raise
        transfer = Transfer(self._means, call, finish, tell, to_engine=False, runs=runs)
        try:
            return transfer.start(slots)
        finally:
            # Behind the submission of the copy, and before other tasks run. The answer comes after
            # the copy, so it can't be this error.
            if self._core.has_effects:
                try:
                    self._means.run_effects()
                except Exception:
                    log.exception("a store's effects failed %s", session.name)

    def _admit(
        self,
        session: LiveSession,
        transfer_id: str,
        groups: Sequence[int],
        block_ids: BlockIds,
        timeout_s: float,
        after: DeviceMark | None,
        end_index: int,
        message_bytes: int,
        *,
        is_store: bool = False,
    ) -> TransferCall:
        """Reserves nothing."""
        session.check_end(end_index)
        if is_store and session.wants_evictions:
            # The answer must come behind notices of earlier evictions; a word would not.
            end_index = 0
        kept_bytes = message_bytes + _plan_bytes(block_ids)
        self._check_room(session, kept_bytes)
        memory, changed = _usable_memory(session, block_ids, groups)
        record = self._core.catalog.record(session.record.key_space_id)
        deadline = Deadline(timeout_s)
        gate = None if after is None else memory.order.gate(after, deadline.mark_passed)
        return TransferCall(
            session,
            record,
            transfer_id,
            memory,
            changed,
            block_ids,
            deadline,
            gate,
            kept_bytes,
            end_index,
            time.monotonic(),
        )

    def _check_room(self, session: LiveSession, kept_bytes: int) -> None:
        owner, memory = session.record.owner, self._core.client_memory
        if kept_bytes > memory.room(owner):
            raise HotKVError(
                Reason.OVERLOADED,
                f"transfer_id: {memory.refusal(owner, 'bytes', TRANSFERS)}; wait for some",
            )
        if len(session.jobs) >= MAX_TRANSFERS_OF_SESSION or session.inflight_bytes >= max(
            self._means.arena.num_bytes, MIN_INFLIGHT_BYTES
        ):
            raise HotKVError(
                Reason.OVERLOADED,
                f"transfer_id: the session has {len(session.jobs)} transfers of "
                f"{session.inflight_bytes} bytes in flight; wait for some",
            )


def _check_lengths(runs: Sequence[Run], block_ids: BlockIds) -> None:
    for run, ids in zip(runs, block_ids, strict=True):
        if len(ids) != len(run.hashes):
            raise invalid(
                f"runs.block_ids has {len(ids)} ids for {len(run.hashes)} hashes; give one id a "
                "hash"
            )


def _plan_bytes(block_ids: BlockIds) -> int:
    return (
        TRANSFER_BYTES
        + RUN_BYTES * len(block_ids)
        + BLOCK_BYTES * sum(len(ids) for ids in block_ids)
    )


def _usable_memory(
    session: LiveSession, block_ids: BlockIds, groups: Sequence[int]
) -> tuple[SessionMemory, list[str]]:
    """Its memory, and the files of it in which to look for holes."""
    if session.closing:
        raise HotKVError(Reason.UNKNOWN_SESSION, "session_id is closing")
    if session.memory is None:
        raise HotKVError(
            Reason.NO_MEMORY_REGISTERED,
            "the session has registered no memory; send register_memory first",
        )
    sketches = [session.named(group_index) for group_index in groups if group_index >= MAX_GROUPS]
    return session.memory, session.memory.check_use(block_ids, sketches)

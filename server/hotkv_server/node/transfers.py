"""Loads and stores of a node. Each is checked, recorded in the core (which then pins its blocks, or
reserves slots for them), copied, and ended in the core (which then makes stored blocks ready). A
call names blocks in runs; a run is a chain of consecutive blocks of one group. A call may also name
a mark: a point in the queue of the engine's device that the transfer must not precede (`order`).

Always true: the blocks of a store are dropped if the engine revokes the store before its end. A
session's transfers are bounded in number and bytes, so that other sessions find room. All methods
run on the event loop, unless their docstring says otherwise; the copy engine's threads move bytes.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.blocks import NO_OPTIONS, RunContent, StoreOptions, TransferResult, TransferStatus
from hotkv_proto.errors import HotKVError, Reason, invalid
from hotkv_proto.keys import MAX_GROUPS
from hotkv_proto.order import DeviceMark
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.histogram import SECONDS, SIZES_BYTES, Histogram
from hotkv_server.cache.room.removal import Parts
from hotkv_server.cache.room.shares import BoundShare
from hotkv_server.cache.values import LoadPositions, Run, SlotRun
from hotkv_server.dataplane.engines import CopyEngine, CopyJob, Outcome
from hotkv_server.dataplane.plan import Plan, Region, block_copies
from hotkv_server.integrity.checksums import Sums
from hotkv_server.integrity.sums import SumThreads
from hotkv_server.integrity.verifier import Case, Verifier
from hotkv_server.logs import Throttle
from hotkv_server.node.capability import Capability, tell_all
from hotkv_server.node.event_loop import in_slices
from hotkv_server.node.growth import ArenaGrowth
from hotkv_server.node.health import Health
from hotkv_server.node.live_session import LiveSession, SessionMemory
from hotkv_server.node.order import MarkGate

# Timings: histograms of the durations of calls and transfers, and of the sizes of transfers, for
# metrics.
#
# Always true: they use a fixed amount of memory. On the event loop only.


Answer = TypeVar("Answer")
LOAD, STORE = "load", "store"


class Timings:
    """Histograms of the durations and sizes of calls and transfers, in seconds and bytes.

    lookup_s, lease_s: time from a lookup, or from a call for a lease, to the answer. The time of a
        lease includes reads from tiers.
    ends: counts all transfers by direction (LOAD, STORE) and outcome.
    load_s, store_s: times from the start to the end of transfers that succeeded. They include all
        waits, for example for marks (points in the queue of the engine's device) and threads. A
        store starts when the core has made room for it.
    load_bytes, store_bytes: sizes of the same transfers.
    wait_s: how long copies waited for a copy thread or for the server's device queue, after the
        engine's device had passed their mark.
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
        """Adds the time from `began_s` until the answer is ready to the histogram `times`. If
        `answer` is a task, the answer is ready when the task ends, otherwise now. Returns
        `answer`."""
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
        """Counts a transfer that has ended.

        began_s: when the transfer was started, in seconds of the monotonic clock; for a store, when
            the core had made room for it.
        to_engine: True for a load, False for a store.
        waited_s: how long the copy waited for a thread or a device; None if no copy began.
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
"""Longest wait until an engine's device passes a mark, a point in its queue of work. All work that
an engine queues takes far less time."""
CONDEMNED_MESSAGE = "a block's bytes are not those that were stored; it is dropped"
MAX_TRANSFERS_OF_SESSION = 2048
"""Most transfers (loads and stores) that a session may have in flight. Their bytes are limited too:
a session may not begin another transfer while its transfers in flight together have as many bytes
as the arena (or as MIN_INFLIGHT_BYTES, if that is more)."""
MIN_INFLIGHT_BYTES = 1 << 30
TRANSFER_BYTES, RUN_BYTES, BLOCK_BYTES = 2048, 1024, 40
"""Estimated memory that a transfer uses until it ends, in addition to its message: TRANSFER_BYTES,
plus RUN_BYTES for each run (consecutive blocks of a group), plus BLOCK_BYTES for each block."""


class Deadline:
    """Cancels a transfer that takes too long. After that, the attribute `message` says why; before,
    it is empty.

    Always true: the timeout does not include waiting for the engine's device. The timeout begins
    when the device has passed the transfer's mark (a point in the device's queue), or at once if
    the transfer has no mark. If the device has not passed the mark within MARK_TIMEOUT_S, the
    transfer is cancelled too. On the event loop, except `mark_passed`.
    """

    def __init__(self, timeout_s: float) -> None:
        """Makes the deadline of a transfer. `timeout_s`: 0 for DEFAULT_TIMEOUT_S."""
        self.message = ""
        self._timeout_s = timeout_s or DEFAULT_TIMEOUT_S
        self._loop = asyncio.get_running_loop()
        self._job: CopyJob | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, job: CopyJob, *, has_mark: bool) -> None:
        """Begins to watch the transfer's copy job. `has_mark`: True if the job first waits until
        the engine's device passes a mark (a point in its queue). The timeout then begins with
        `mark_passed`."""
        self._job = job
        if has_mark:
            self._timer = self._loop.call_later(
                MARK_TIMEOUT_S, self._late, f"the mark did not pass within {MARK_TIMEOUT_S:.0f} s"
            )
        else:
            self._start()

    def mark_passed(self) -> None:
        """Starts the timeout, because the engine's device has passed the transfer's mark (the point
        in its queue for which the copy waited). May be called from any thread."""
        self._loop.call_soon_threadsafe(self._start)

    def end(self) -> None:
        """Stops the timer of the transfer's deadline, because the copy job has ended."""
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
"""Ids of the blocks in the engine's memory, int64, an array for each run (consecutive blocks of a
group)."""
CoreEnd = tuple[list[NDArray[np.uint8]], Callable[[], None]]
"""The result of ending a transfer in the core (the cache's records): what became of the blocks
(`BlockResult` values, an array for each run of consecutive blocks), and a function that notifies
the capabilities."""
Finish = Callable[[Outcome, int], CoreEnd]
"""Function that ends a transfer in the core (the cache's records), given the outcome and the number
of bytes copied."""


@dataclass(frozen=True, slots=True)
class TransferEnd(TransferResult):
    """The answer to a transfer: its result, and when bytes were copied. Times are of the monotonic
    clock, in seconds.

    copy_began_s: when the copy of the first byte began; None if no byte was copied.
    copy_ended_s: when the node learned that the copy has ended.
    runs: the blocks of a store, in the order of `results`.
    """

    copy_began_s: float | None = None
    copy_ended_s: float = 0.0
    runs: Sequence[Run] = ()


@dataclass(frozen=True, slots=True)
class Means:
    """The objects that all transfers of a node share.

    kept_bytes: bounds the memory that transfers use until they end.
    run_effects: function that carries out the effects of the core's decisions, for example sends
        notices of evictions.
    timings: histograms to which each transfer is added when it ends.
    """

    core: CacheCore
    arena: Region
    copy_engine: CopyEngine
    verifier: Verifier
    health: Health
    kept_bytes: BoundShare
    run_effects: Callable[[], None]
    timings: Timings


@dataclass(frozen=True, slots=True)
class TransferCall:
    """The checked arguments of a call for a transfer.

    memory: the session's registered memory.
    block_ids: ids of the blocks in this memory, an array for each run (consecutive blocks of a
        group).
    deadline: cancels the transfer when it takes too long.
    gate: delays the copy until the engine's device has passed the transfer's mark (a point in the
        device's queue); None if the transfer has no mark, so that the copy may begin at once.
    kept_bytes: estimated memory that the transfer uses until it ends.
    """

    session: LiveSession
    transfer_id: str
    memory: SessionMemory
    block_ids: BlockIds
    deadline: Deadline
    gate: MarkGate | None
    kept_bytes: int


class Transfer:
    """One load or store, from its copy plan to its answer.

    means: the objects that all transfers of the node use.
    call: the checked arguments of the call.
    finish: ends the transfer in the core (the cache's records). Called exactly once, also if the
        copy plan can't be made.
    after_copy: called in a copy thread when all bytes are copied; if it raises, the transfer fails.
    to_engine: True for a load, False for a store.
    runs: the blocks of a store; empty for a load.

    Always true: the answer comes after the last access to the engine's memory and to the slots
    (places in the arena). If blocks of a load must still be compared with their checksums
    (checksums), the comparison comes before the copy. A load fails if one of its blocks is
    condemned (dropped because it does not match) before the load ends.
    """

    def __init__(
        self,
        means: Means,
        call: TransferCall,
        finish: Finish,
        after_copy: Callable[[], None] | None = None,
        *,
        to_engine: bool,
        runs: Sequence[Run] = (),
    ) -> None:
        self._runs = runs
        self._means = means
        self._call = call
        self._finish = finish
        self._after_copy = after_copy
        self._to_engine = to_engine
        self._began_s = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[TransferEnd] = self._loop.create_future()
        self._owner = means.core.sessions.owner(call.session.record)
        self._slots: Sequence[SlotRun] = ()
        self._job: CopyJob | None = None

    def __repr__(self) -> str:
        word = "load" if self._to_engine else "store"
        return f"Transfer({word} {self._call.transfer_id!r}, {self._job!r})"

    def start(self, slots: Sequence[SlotRun]) -> "asyncio.Future[TransferEnd]":
        """Starts the copy of a transfer whose begin the core (the cache's records) has recorded.
        `slots`: the slots (places in the arena) that the core then returned. The result, a future,
        is done after the last access to the engine's memory and to the slots."""
        means, call = self._means, self._call
        self._slots = slots
        try:
            plans = self._plans()
        except BaseException:
            # The core has recorded the begin of the transfer, so also record its end there.
            self._finish(Outcome.FAILED, 0)[1]()
            raise
        self._job = job = CopyJob(plans, self._copied, call.gate, self._owner)
        call.session.jobs[call.transfer_id] = job
        means.kept_bytes.take(self._owner, call.kept_bytes)
        call.session.inflight_bytes += job.total_bytes
        call.deadline.begin(job, has_mark=call.gate is not None)
        try:
            cases = means.verifier.unverified(slots) if self._to_engine else []
            changed = call.memory.changed()
            if cases or changed:
                judging = self._loop.run_in_executor(None, self._judge, changed, cases)
                judging.add_done_callback(lambda done: self._judged(cases, done))
            else:
                means.copy_engine.submit(job)
        except BaseException as error:
            self._ended(Outcome.FAILED, f"{type(error).__name__}: {error}")
            raise
        return self._future

    def _plans(self) -> list[Plan]:
        call, core = self._call, self._means.core
        record = core.catalog.record(call.session.record.key_space_id)
        # Make one plan for all runs of a group, because each plan takes time of the event loop and
        # of a thread.
        groups: dict[int, list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = {}
        for run, ids in zip(self._slots, call.block_ids, strict=True):
            groups.setdefault(run.group_index, []).append((ids[run.positions], run.offsets))
        return [
            plan
            for group, pairs in groups.items()
            for plan in block_copies(
                call.memory.layout.recipes(call.session.named(group), record.shape(group)),
                np.concatenate([ids for ids, _ in pairs]),
                np.concatenate([offsets for _, offsets in pairs]),
                self._means.arena,
                call.memory.regions,
                to_engine=self._to_engine,
            )
        ]

    def _judge(self, changed: list[str], cases: Sequence[Case]) -> list[NDArray[np.bool_]]:
        """Returns which blocks match their checksums. Raises HotKVError if one of the `changed`
        files of the engine's memory has a hole. On a thread of the executor."""
        self._call.memory.check_holes(changed)
        return self._means.verifier.judge(cases) if cases else []

    def _judged(
        self, cases: Sequence[Case], judging: "asyncio.Future[list[NDArray[np.bool_]]]"
    ) -> None:
        """Handles the end of `_judge`. Submits the copy if all blocks match and the engine's memory
        has no holes, otherwise fails the transfer.

        cases: the blocks that were compared.
        judging: the finished comparison, whose result says which blocks match.
        """
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
        """Handles the end of the transfer's copy job. Called on a copy thread."""
        try:
            if self._after_copy is not None and outcome is Outcome.DONE:
                self._after_copy()
        except Exception as error:  # noqa: BLE001 Only the transfer fails; the copy thread goes on.
            outcome, message = Outcome.FAILED, f"{type(error).__name__}: {error}"
        self._loop.call_soon_threadsafe(self._ended, outcome, message)

    def _ended(self, outcome: Outcome, message: str) -> None:
        """Records the end of the transfer in the core, no longer counts the transfer for its
        session and its owner (tenant or engine), and sets the result of the future that `start`
        returned."""
        call, job, copy_ended_s = self._call, self._job, time.monotonic()
        assert job is not None, "a transfer ends after its start"
        call.deadline.end()
        del call.session.jobs[call.transfer_id]
        call.session.inflight_bytes -= job.total_bytes
        self._means.kept_bytes.give(self._owner, call.kept_bytes)
        call.session.settled.set()
        outcome, message = self._verdict(outcome, message)
        moved = job.total_bytes if outcome is Outcome.DONE else 0
        self._means.timings.moved(
            outcome, moved, self._began_s, job.waited_s, to_engine=self._to_engine
        )
        results, tell = self._finish(outcome, moved)
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
                )
            )
        # Notify the capabilities (optional parts of the server) after the result is set: if a
        # capability raises, the client still gets its answer.
        tell()
        self._means.run_effects()

    def _verdict(self, outcome: Outcome, message: str) -> tuple[Outcome, str]:
        """Returns the final outcome and message of the transfer, given the outcome and message of
        its copy job. The outcome becomes FAILED in three cases: the cache's state is inconsistent
        (`Health.breach`), the file of the engine's memory was truncated, or a block of a load was
        condemned (did not match its checksum) during the copy."""
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


class Transfers:
    """Starts and cancels the loads and stores of a node.

    growth: lets stores wait while the arena still gets memory.
    arena: address range of the arena.
    verifier: compares blocks with their checksums before a load.
    kept_bytes: bounds the memory that transfers use until they end.
    loaded_bytes, stored_bytes: bytes that all transfers have moved since the start.
    run_effects: function that carries out the effects of the core's decisions, for example sends
        notices of evictions.
    timings: histograms to which each transfer is added when it ends.
    """

    def __init__(
        self,
        core: CacheCore,
        growth: ArenaGrowth,
        arena: Region,
        copy_engine: CopyEngine,
        verifier: Verifier,
        capabilities: Sequence[Capability],
        health: Health,
        run_effects: Callable[[], None],
        timings: Timings | None = None,
    ) -> None:
        self._core = core
        self._growth = growth
        self.kept_bytes = BoundShare(core.client_memory)
        self.loaded_bytes = 0
        self.stored_bytes = 0
        self._capabilities = capabilities
        self._means = Means(
            core,
            arena,
            copy_engine,
            verifier,
            health,
            self.kept_bytes,
            run_effects,
            timings or Timings(),
        )
        self._sums = SumThreads()

    def __repr__(self) -> str:
        return (
            f"Transfers({len(self._core.transfers)} under way, {self.loaded_bytes} bytes "
            f"loaded, {self.stored_bytes} stored)"
        )

    def close(self) -> None:
        """Stops the threads that compute sums of stored bytes."""
        self._sums.close()

    def cancel(self, session: LiveSession, transfer_id: str) -> bool:
        """Cancels a transfer. Returns False if the session has no such transfer in flight."""
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
        message_bytes: int = 0,
    ) -> "asyncio.Future[TransferEnd]":
        """Starts a load under a read lease. The result, a future, is done after the last write to
        the engine's memory.

        transfer_id: id that the client chooses for the load, unique in the session.
        runs: the blocks, by their positions in the lease.
        block_ids: for each block of `runs`, the id of the block in the engine's memory to which it
            is copied.
        timeout_s: the load is cancelled after this time; 0 for DEFAULT_TIMEOUT_S.
        after: writes begin only after the engine's device has passed this mark (a point in the
            device's queue of work).
        message_bytes: size of the request's message, which counts as memory of the transfer.
        """
        groups = [run.group_index for run in runs]
        call = self._admit(session, transfer_id, groups, block_ids, timeout_s, after, message_bytes)
        slots = self._core.begin_load(session.record.number, transfer_id, lease_id, runs)

        def finish(outcome: Outcome, num_bytes: int) -> CoreEnd:
            self._core.end_load(session.record.number, transfer_id, outcome is Outcome.DONE)
            session.loaded_bytes += num_bytes
            self.loaded_bytes += num_bytes

            def tell() -> None:
                tell_all(self._capabilities, lambda one: one.bytes_moved(session, num_bytes, 0))

            return [], tell

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
        message_bytes: int = 0,
    ) -> "asyncio.Future[TransferEnd]":
        """Makes room for the blocks of a store, then starts it. The result, a future, is done when
        the blocks are ready or refused, after the last read of the engine's memory. The blocks are
        aborted if a flush (deletion of all blocks of their key space) begins after this call.

        transfer_id: id that the client chooses for the store, unique in the session.
        lease_id: id of the write lease. The first store with this id opens the lease; stores of
            other ranks with the same id join it.
        block_ids: for each block of `runs`, its block id in the engine's memory.
        timeout_s: the store is cancelled after this time; 0 for DEFAULT_TIMEOUT_S.
        options: how long to retain the blocks, and the residency (reserved room of a running
            request) that pins them.
        fence_index: word of the fence page by which the engine can revoke the store; 0: it can't.
        contents: token ids of each run (consecutive blocks of a group), for events; may be empty.
        after: reads begin only after the engine's device has passed this mark (a point in the
            device's queue of work).
        message_bytes: size of the request's message, which counts as memory of the transfer.
        """
        groups = [run.group_index for run in runs]
        call = self._admit(session, transfer_id, groups, block_ids, timeout_s, after, message_bytes)
        session.check_fence(fence_index)
        _check_lengths(runs, block_ids)
        ttl_s, shard_index = timeout_s * 2, call.memory.layout.shard_index
        number, key_space_id = session.record.number, session.record.key_space_id
        num_flushes = self._core.catalog.record(key_space_id).num_flushes
        sums: list[Sums] = []
        has_waited = await self._growth.await_room(key_space_id, runs)
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
        begun: list[list[SlotRun]] = []

        def begin() -> Parts[None]:
            begun.append((yield from beginning))

        def finish(outcome: Outcome, num_bytes: int) -> CoreEnd:
            # A flush aborts only the leases that exist when it begins. If this store has acquired
            # its lease later, drop its blocks here.
            is_old = self._core.catalog.record(key_space_id).num_flushes != num_flushes
            kept = outcome is Outcome.DONE and not is_old and not session.is_revoked(fence_index)
            results = self._core.end_store(number, transfer_id, kept, time.monotonic(), sums)
            session.stored_bytes += num_bytes
            self.stored_bytes += num_bytes

            def tell() -> None:
                def stored(one: Capability) -> None:
                    one.bytes_moved(session, 0, num_bytes)
                    one.blocks_stored(session, runs, contents, results)

                tell_all(self._capabilities, stored)

            return results, tell

        try:
            await in_slices(begin(), after_slice)
            if has_waited or num_slices > 1:
                # Other tasks ran while room was made: check again that the session may begin the
                # store, and that its memory is usable.
                self._check_room(session, call.kept_bytes)
                _usable_memory(session, block_ids, groups)
        except BaseException:
            # A capability (optional part of the server) may raise after the last slice. The core
            # has then recorded the begin of the store, so record its end too.
            if begun:
                finish(Outcome.FAILED, 0)[1]()
            raise
        take_sums = partial(self._take_sums, key_space_id, shard_index, begun[0], sums)
        transfer = Transfer(self._means, call, finish, take_sums, to_engine=False, runs=runs)
        return transfer.start(begun[0])

    def _admit(
        self,
        session: LiveSession,
        transfer_id: str,
        groups: Sequence[int],
        block_ids: BlockIds,
        timeout_s: float,
        after: DeviceMark | None,
        message_bytes: int,
    ) -> TransferCall:
        """Checks the arguments of a load or store, and the session's bounds. Returns the arguments,
        with the transfer's deadline and the gate that makes the copy wait for its mark. Does not
        reserve slots (places in the arena). Raises HotKVError if the session may not start the
        transfer.

        groups: group index of each run (consecutive blocks of a group).
        timeout_s: the transfer is cancelled after this time; 0 for DEFAULT_TIMEOUT_S.
        after: the mark (a point in its queue) that the engine's device must pass first; None if
            there is no mark.
        message_bytes: size of the request's message, which counts as memory of the transfer.
        """
        kept_bytes = message_bytes + _plan_bytes(block_ids)
        self._check_room(session, kept_bytes)
        memory = _usable_memory(session, block_ids, groups)
        deadline = Deadline(timeout_s)
        gate = None if after is None else memory.order.gate(after, deadline.mark_passed)
        return TransferCall(session, transfer_id, memory, block_ids, deadline, gate, kept_bytes)

    def _check_room(self, session: LiveSession, kept_bytes: int) -> None:
        """Raises OVERLOADED if the session has too many transfers or bytes in flight, or if the
        transfers of its owner (tenant or engine) would use too much memory.

        kept_bytes: memory that the new transfer would use until it ends.
        """
        owner = self._core.sessions.owner(session.record)
        if kept_bytes > self.kept_bytes.room(owner):
            raise HotKVError(
                Reason.OVERLOADED,
                f"transfer_id: {self.kept_bytes.refusal(owner, 'bytes of transfers')}; wait for "
                "some",
            )
        if len(session.jobs) >= MAX_TRANSFERS_OF_SESSION or session.inflight_bytes >= max(
            self._means.arena.num_bytes, MIN_INFLIGHT_BYTES
        ):
            raise HotKVError(
                Reason.OVERLOADED,
                f"transfer_id: the session has {len(session.jobs)} transfers of "
                f"{session.inflight_bytes} bytes in flight; wait for some",
            )

    def _take_sums(
        self, key_space_id: int, shard_index: int, slots: Sequence[SlotRun], sums: list[Sums]
    ) -> None:
        """Computes sums over the bytes that a store has written. The core makes the checksums
        (checksums) of the stored blocks from them. Does nothing if checksums are turned off.
        Runs on the copy thread that has written the last bytes.

        shard_index: number of the shard (a rank's part of a block) that the store has written.
        slots: the slots (places in the arena) that the store has written, a `SlotRun` for each run
            (consecutive blocks of a group).
        sums: gets an array for each run.
        """
        stride, record = self._core.config.check_stride, self._core.catalog.record(key_space_id)
        for run in slots if stride else ():
            shard_bytes = record.shape(run.group_index).shard_bytes
            found = np.zeros(len(run.offsets), np.uint64)
            self._sums.add_sums(
                self._means.arena,
                run.offsets + sum(shard_bytes[:shard_index]),
                shard_bytes[shard_index],
                shard_index,
                np.full(len(found), stride),
                found,
            )
            sums.append(found)


def _check_lengths(runs: Sequence[Run], block_ids: BlockIds) -> None:
    for run, ids in zip(runs, block_ids, strict=True):
        if len(ids) != len(run.hashes):
            raise invalid(
                f"runs.block_ids has {len(ids)} ids for {len(run.hashes)} hashes; give one id a "
                "hash"
            )


def _plan_bytes(block_ids: BlockIds) -> int:
    """Returns the estimated memory, in bytes, that a transfer of these blocks uses in addition to
    its message."""
    return (
        TRANSFER_BYTES
        + RUN_BYTES * len(block_ids)
        + BLOCK_BYTES * sum(len(ids) for ids in block_ids)
    )


def _usable_memory(
    session: LiveSession, block_ids: BlockIds, groups: Sequence[int]
) -> SessionMemory:
    """Returns the session's registered memory. Raises HotKVError if the session is closing or has
    no memory, or if a transfer of these block ids and groups can't use the memory
    (`SessionMemory.check_use`)."""
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

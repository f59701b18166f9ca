"""Records engines' reports about sequences, and selects blocks for engines that can't map the
arena.

Always true: reports about unknown sequences are counted and otherwise ignored. While the server
selects for a sequence, a lease pins its leading ready blocks. Event loop only; scoring runs on
other threads.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import native, table
from hotkv_proto.errors import HotKVError, Reason, invalid
from hotkv_proto.table import Words
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.histogram import Histogram
from hotkv_server.cache.leases.leases import ReadLease, read_weight
from hotkv_server.cache.values import BoolMask, HashList
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.memory.clerk import full_pool
from hotkv_server.node.capability import BlocksBelow
from hotkv_server.node.live_session import LiveSession
from hotkv_sparse.server.select.book import (
    Selected,
    SelectRequest,
    SelectSpec,
    check_request,
    select,
)
from hotkv_sparse.server.select.figures import LayerFigures, LayerGrowth
from hotkv_sparse.server.select.sequences import LiveSequence, SequenceBook

I32 = NDArray[np.int32]
MAX_SEQUENCES = 4096
"""Of a session."""
MAX_SELECTS = 256
"""Waiting or running."""
NUM_THREADS = 2
LATENCY_BOUNDS_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1.0,
)


# ---------------------------------------------------------------------------- sequences and reports


@dataclass(slots=True)
class SparseCounters:
    """Since the server's start.

    unknown_sequences: named in reports.
    used_blocks: whose use was counted for the eviction policy.
    """

    reports: int = 0
    unknown_sequences: int = 0
    used_blocks: int = 0


class SparseDecode:
    """Creates and ends sequences, leases their blocks, records reports.

    tiers: None without tiers below host memory.
    """

    def __init__(
        self,
        core: CacheCore,
        arena: NDArray[np.uint8],
        verifier: Verifier,
        tiers: BlocksBelow | None = None,
    ) -> None:
        self.core = core
        self._tiers = tiers
        self.sequences = SequenceBook(
            MAX_SEQUENCES, core.config.max_blocks_per_call // 2, core.client_memory
        )
        self.figures = LayerFigures()
        self.counters = SparseCounters()
        self.selections = Selections(core, arena, verifier, self._count_used)

    def __repr__(self) -> str:
        return f"SparseDecode({self.sequences!r}, {self.selections!r})"

    def close(self) -> None:
        """After all sessions have closed."""
        self.selections.close()

    # Sequences

    async def create(
        self,
        session: LiveSession,
        sequence_id: str,
        group_index: int,
        hashes: Words,
        spec: SelectSpec | None,
    ) -> LiveSequence:
        """Creates a sequence, or returns it if it exists. With `spec` its leading ready blocks
        are leased, unless they may be older than a flush: `_may_cover`."""
        owner = session.record.owner
        sequence, is_new = self.sequences.create(
            session.record.number, sequence_id, group_index, hashes, spec, owner
        )
        if is_new and spec is not None:
            try:
                if await self._may_cover(session, sequence):
                    self._cover(session, sequence)
            except BaseException:
                self.sequences.pop(session.record.number, sequence_id)
                raise
            self.selections.warm_up()
        return sequence

    async def append(
        self, session: LiveSession, sequence_id: str, first_position: int, hashes: Words
    ) -> LiveSequence:
        """With a spec, the lease is replaced by one of all leading blocks that are ready now.
        The old lease stays if the server drains, which grants no new ones, or if blocks may be
        older than a flush: `_may_cover`."""
        number = session.record.number
        sequence = self.sequences.append(number, sequence_id, first_position, hashes)
        is_selected = sequence.spec is not None
        if is_selected and await self._may_cover(session, sequence) and not self.core.draining:
            self._cover(session, sequence)
        return sequence

    async def _may_cover(self, session: LiveSession, sequence: LiveSequence) -> bool:
        """False if ready blocks may be older than a flush on another node, or if the sequence
        has ended. Waits, bounded, for the shared tiers to confirm the generation. Raises
        UNKNOWN_SESSION if the session closes meanwhile."""
        number, key_space_id = session.record.number, session.record.key_space_id
        serves = self._tiers is None or await self._tiers.generations.wait_to_serve(key_space_id)
        if session.closing:
            raise HotKVError(Reason.UNKNOWN_SESSION, "session_id is closing")
        return serves and self.sequences.find(number, sequence.sequence_id) is sequence

    async def delete(self, session: LiveSession, sequence_id: str) -> bool:
        """Waits until the sequence's selections have ended. False if it is unknown."""
        sequence = self.sequences.pop(session.record.number, sequence_id)
        if sequence is None:
            return False
        if sequence.lease_id:
            self.core.release(session.record.number, sequence.lease_id)
            await asyncio.sleep(0)
        if not session.closing:
            self._count_used(session, sequence, sequence.take_used(time.monotonic()))
        async with sequence.lock:
            return True

    def close_session(self, session: LiveSession, is_last: bool) -> None:
        self.sequences.drop_session(session.record.number)
        if is_last:
            self.figures.drop(session.record.engine_id)

    def _cover(self, session: LiveSession, sequence: LiveSequence) -> None:
        """Replaces the lease by one of the leading blocks that are ready with their sketches.
        Raises OVERLOADED, and changes nothing, if that exceeds a bound of the owner."""
        assert sequence.spec is not None, "the engine selects by itself: nothing is leased"
        number, key_space_id = session.record.number, session.record.key_space_id
        groups = (sequence.spec.sketch_group, sequence.group_index)
        found = [
            table.is_ready(self.core.space.index.find(key_space_id, group, sequence.hashes))
            for group in groups
        ]
        count = _leading(found)
        if count:
            # Checked first: a refused call keeps the previous lease.
            previous = self.core.leases.get(session.record.engine_id, sequence.lease_id)
            weight = read_weight(len(groups), len(groups) * count)
            owner = session.record.owner
            self.core.leases.check_replaces(previous, owner, weight)
        if sequence.lease_id:
            self.core.release(number, sequence.lease_id)
        sequence.lease_id, sequence.entries, sequence.slots = (
            "",
            np.empty(0, np.uint32),
            np.empty(0, np.int64),
        )
        while count:
            lease_id = f"sequence-{secrets.token_hex(8)}"
            grant = self.core.acquire(
                number,
                lease_id,
                [HashList(g, sequence.hashes[:count]) for g in groups],
                0,
                time.monotonic(),
            )
            if _leading(grant.pinned) == count:
                lease = self.core.leases.get(session.record.engine_id, lease_id)
                assert isinstance(lease, ReadLease), "the lease was granted"
                sequence.lease_id, sequence.entries = lease_id, lease.groups[0][1]
                sequence.slots = self.core.space.index.offsets(sequence.entries)
                return
            # Leases without a load may pin only a share of the arena, so this one may have got
            # less. Try again with the blocks pinned together with their sketches; if there is
            # none, sketches alone, which come first, used up the share: try half.
            self.core.release(number, lease_id)
            count = _leading(grant.pinned) or count // 2

    # Reports

    def report(
        self, session: LiveSession, used: Mapping[str, I32], layers: Sequence[LayerGrowth]
    ) -> None:
        """Records a report of decode steps.

        used: by sequence id, positions of the blocks that steps attended to.
        layers: growth of each layer's counters.
        """
        now_s = time.monotonic()
        self.counters.reports += 1
        for growth in layers:
            self.figures.add(session.record.engine_id, growth)
        for sequence_id, positions in used.items():
            sequence = self.sequences.find(session.record.number, sequence_id)
            if sequence is None:
                self.counters.unknown_sequences += 1
            else:
                self._count_used(session, sequence, sequence.use(positions, now_s))

    def _count_used(self, session: LiveSession, sequence: LiveSequence, positions: I32) -> None:
        """Makes the eviction policy keep these blocks longer: the sequence will use them again."""
        if len(positions):
            self.counters.used_blocks += len(positions)
            self.core.touch(
                session.record.number,
                [HashList(sequence.group_index, sequence.hashes[positions])],
                time.monotonic(),
            )


def _leading(masks: Sequence[BoolMask]) -> int:
    """Leading elements that are True in all masks."""
    everywhere = np.logical_and.reduce(masks)
    return len(everywhere) if everywhere.all() else int(np.argmin(everywhere))


# --------------------------------------------------------------------------------------- selections


CountUsed = Callable[[LiveSession, LiveSequence, NDArray[np.int32]], None]
"""Counts the blocks of a sequence at these positions as used."""


class Selections:
    """Runs selections on threads; those of one sequence in order.

    Their blocks are pinned as for a load. Sketches restored after a restart are verified before
    they are read.

    latency: in seconds.
    """

    def __init__(
        self,
        core: CacheCore,
        arena: NDArray[np.uint8],
        verifier: Verifier,
        count_used: CountUsed,
    ) -> None:
        self._core = core
        self._arena = arena
        self._verifier = verifier
        self._count_used = count_used
        self.num_served = 0
        self.latency = Histogram(LATENCY_BOUNDS_S)
        self._threads = full_pool(NUM_THREADS, "hotkv-select")
        # When each was requested.
        self._running: dict[asyncio.Task[Selected], float] = {}

    def __repr__(self) -> str:
        return f"Selections({len(self._running)} waiting or running, {self.num_served} served)"

    def __len__(self) -> int:
        """Waiting or running."""
        return len(self._running)

    def stalled_s(self, now_s: float) -> float:
        """Age of the oldest selection; 0 without any."""
        return now_s - min(self._running.values(), default=now_s)

    def warm_up(self) -> None:
        """Loads the kernels on a thread: too slow for the event loop."""
        self._threads.submit(native.require, "hotkv_sparse.all_kernels")

    def close(self) -> None:
        """After all sessions have closed."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def select(
        self, session: LiveSession, sequence: LiveSequence, request: SelectRequest, stream: int
    ) -> Selected:
        """When it returns, the selection no longer reads the arena.

        Raises INVALID_FIELD if the sequence has no spec or can't answer, OVERLOADED if too many
        selections wait, UNKNOWN_LEASE if the sequence's lease has ended.

        stream: number of the client's stream; each begins with empty hot sets.
        """
        if len(self._running) >= MAX_SELECTS:
            raise HotKVError(
                Reason.OVERLOADED, f"{MAX_SELECTS} selections are waiting; send fewer at a time"
            )
        spec = spec_of(sequence)
        began_s = time.perf_counter()
        # It reads the arena, so it must run to its end even if the client disconnects.
        task = asyncio.create_task(self._select(session, sequence, spec, request, stream))
        self._running[task] = time.monotonic()
        session.num_reads += 1

        def ended(done: asyncio.Task[Selected]) -> None:
            del self._running[done]
            session.num_reads -= 1
            session.settled.set()
            if not done.cancelled() and done.exception() is None:
                self.num_served += 1
                self.latency.add(time.perf_counter() - began_s)

        task.add_done_callback(ended)
        return await asyncio.shield(task)

    async def _select(
        self,
        session: LiveSession,
        sequence: LiveSequence,
        spec: SelectSpec,
        request: SelectRequest,
        stream: int,
    ) -> Selected:
        async with sequence.lock:
            slots = sequence.slots
            where = check_request(spec, request, len(slots))
            transfer_id = self._begin(session, sequence)
            try:
                await self._verify(sequence)
                hot = sequence.hot_set(spec, request.layer, request.shard, stream)
                loop = asyncio.get_running_loop()
                selected = await loop.run_in_executor(
                    self._threads, select, spec, self._arena, slots, request, where, hot
                )
            finally:
                if transfer_id:
                    self._core.end_load(session.record.number, transfer_id, True)
        if not session.closing:
            self._count_used(
                session, sequence, sequence.use(selected.selection.blocks, time.monotonic())
            )
        return selected

    def _begin(self, session: LiveSession, sequence: LiveSequence) -> str:
        """Renews the lease and begins a load that pins its blocks. Returns the transfer's id,
        empty without a lease. Raises HotKVError if the session is closing or the lease has
        ended."""
        if session.closing:
            raise HotKVError(Reason.UNKNOWN_SESSION, "session_id is closing")
        if not sequence.lease_id:
            return ""
        engine_id, config = session.record.engine_id, self._core.config
        until_s = time.monotonic() + config.lease_ttl_s
        if self._core.leases.renew(engine_id, sequence.lease_id, until_s) is None:
            raise HotKVError(
                Reason.UNKNOWN_LEASE,
                f"sequence_id {sequence.sequence_id!r}: its lease has ended; append its blocks "
                "again, or none, for a new one",
            )
        transfer_id = f"select-{secrets.token_hex(8)}"
        self._core.begin_load(session.record.number, transfer_id, sequence.lease_id, [])
        return transfer_id

    async def _verify(self, sequence: LiveSequence) -> None:
        """Only sketches that a restart restored and that are not verified yet. Raises
        UNKNOWN_LEASE on a mismatch."""
        if len(await self._verifier.compare(sequence.entries)):
            raise HotKVError(
                Reason.UNKNOWN_LEASE,
                f"sequence_id {sequence.sequence_id!r}: a sketch's bytes are not those "
                "that were stored; append its blocks again",
            )


def spec_of(sequence: LiveSequence) -> SelectSpec:
    """Raises INVALID_FIELD if there is none."""
    if sequence.spec is None:
        raise invalid(
            f"sequence_id {sequence.sequence_id!r} was created without select; create one with it"
        )
    return sequence.spec

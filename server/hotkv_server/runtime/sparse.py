"""Sparse decode on behalf of engines: their sequences, what they report, and selections for those
that can't map the arena.

Always true: what a selection reads is pinned until it has ended, as for a load; selections run on
threads of their own, those of one sequence one after the other, and everything else on the event
loop; what engines report is bounded, and what they report of unknown sequences is ignored and
counted.
"""

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv import native, table
from hotkv.errors import HotKVError, Reason
from hotkv.table import Words
from hotkv_server.core.bounds import Account
from hotkv_server.core.cache import CacheCore
from hotkv_server.core.leases import ReadLease
from hotkv_server.core.values import BoolMask, HashList
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.runtime.session import LiveSession
from hotkv_server.sparse.figures import Latency, LayerFigures, LayerGrowth
from hotkv_server.sparse.remembered import HotSets, Recalled, RememberedHotSets
from hotkv_server.sparse.selection import Selected, SelectRequest, SelectSpec, check_request, select
from hotkv_server.sparse.sequences import HASH_BYTES, LiveSequence, SequenceBook

I32 = NDArray[np.int32]
MAX_SEQUENCES = 4096
"""Of one session."""
MAX_SELECTS = 256
"""Selections that wait or run."""
NUM_THREADS = 2
REMEMBERED_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Created:
    """A sequence, and what is remembered for its context."""

    sequence: LiveSequence
    recalled: Recalled


@dataclass(slots=True)
class SparseCounters:
    """What has happened since the start."""

    reports: int = 0
    unknown_sequences: int = 0
    used_blocks: int = 0
    served_selects: int = 0
    recalled_hot_sets: int = 0


class SparseDecode:
    """See the module. Owned by the node."""

    def __init__(self, core: CacheCore, arena: NDArray[np.uint8], verifier: Verifier) -> None:
        self._core = core
        self._arena = arena
        self._verifier = verifier
        self.sequences = SequenceBook(
            MAX_SEQUENCES,
            core.config.max_blocks_per_call // 2,
            Account(core.client_memory, HASH_BYTES),
        )
        self.remembered = RememberedHotSets(REMEMBERED_BYTES)
        self.figures = LayerFigures()
        self.counters = SparseCounters()
        self.latency = Latency()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "hotkv-select")
        # With the time when each began.
        self._running: dict[asyncio.Task[Selected], float] = {}

    def __repr__(self) -> str:
        return (
            f"SparseDecode({self.sequences!r}, {self.remembered!r}, {self.num_selects} selections)"
        )

    @property
    def num_selects(self) -> int:
        """Selections that wait or run."""
        return len(self._running)

    def stalled_s(self, now_s: float) -> float:
        """How long the oldest selection has been waiting or running; 0 where there is none."""
        return now_s - min(self._running.values(), default=now_s)

    def close(self) -> None:
        """Ends the threads; all sessions are closed."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # Sequences

    def create(
        self,
        session: LiveSession,
        sequence_id: str,
        group_index: int,
        hashes: Words,
        spec: SelectSpec | None,
    ) -> Created:
        """A sequence over these blocks. The same call again finds the same sequence."""
        key_space_id = session.record.key_space_id
        owner = self._core.owner(session.record)
        sequence, is_new = self.sequences.create(
            session.record.number, sequence_id, group_index, hashes, spec, owner
        )
        if is_new and spec is not None:
            try:
                self._cover(session, sequence)
            except HotKVError:
                self.sequences.pop(session.record.number, sequence_id)
                raise
            # The kernels take a moment to load; not the event loop's.
            self._threads.submit(native.load, "hotkv_sparse.kernels")
        recalled = self.remembered.recall(key_space_id, group_index, hashes)
        self.counters.recalled_hot_sets += is_new and len(recalled.hot_sets) > 0
        return Created(sequence, recalled)

    def append(
        self, session: LiveSession, sequence_id: str, first_position: int, hashes: Words
    ) -> LiveSequence:
        """The sequence with these blocks as well; where the server selects, under a lease on all
        that is ready now.

        A server that drains grants no new lease, so the old one stays.
        """
        sequence = self.sequences.append(session.record.number, sequence_id, first_position, hashes)
        if sequence.spec is not None and not self._core.draining:
            self._cover(session, sequence)
        return sequence

    async def delete(self, session: LiveSession, sequence_id: str, hot_sets: HotSets) -> bool:
        """Ends a sequence; remembers its hot sets, the server's own where it kept some. False where
        there is none."""
        sequence = self.sequences.pop(session.record.number, sequence_id)
        if sequence is None:
            return False
        if sequence.lease_id:
            self._core.release(session.record.number, sequence.lease_id)
            await asyncio.sleep(0)
        if not session.closing:
            self._count_used(session, sequence, sequence.take_used(time.monotonic()))
        await asyncio.sleep(0)
        async with sequence.lock:
            kept = {at: hot.recency() for at, hot in sequence.hot_sets.items()}
        key_space_id = session.record.key_space_id
        tenant = self._core.space.tenants.number(key_space_id)
        self.remembered.remember(
            key_space_id, sequence.group_index, sequence.hashes, {**kept, **hot_sets}, tenant
        )
        return True

    def close_session(self, session: LiveSession, *, is_last: bool) -> None:
        """Ends the session's sequences, and the figures of its engine where it was the engine's
        last."""
        self.sequences.drop_session(session.record.number)
        if is_last:
            self.figures.drop(session.record.engine_id)

    def _cover(self, session: LiveSession, sequence: LiveSequence) -> None:
        """Leases the leading blocks that are ready with their representations, in place of the
        lease before."""
        assert sequence.spec is not None, "nothing is leased where the engine selects"
        number, key_space_id = session.record.number, session.record.key_space_id
        if sequence.lease_id:
            self._core.release(number, sequence.lease_id)
        sequence.lease_id, sequence.entries, sequence.slots = (
            "",
            np.empty(0, np.uint32),
            np.empty(0, np.int64),
        )
        groups = (sequence.spec.representation_group, sequence.group_index)
        found = [
            table.is_ready(self._core.space.index.find(key_space_id, group, sequence.hashes))
            for group in groups
        ]
        count = _leading(found)
        while count:
            lease_id = f"sequence-{secrets.token_hex(8)}"
            grant = self._core.acquire(
                number,
                lease_id,
                [HashList(g, sequence.hashes[:count]) for g in groups],
                0,
                time.monotonic(),
            )
            if _leading(grant.pinned) == count:
                lease = self._core.leases.get(session.record.engine_id, lease_id)
                assert isinstance(lease, ReadLease), "the lease was granted"
                sequence.lease_id, sequence.entries = lease_id, lease.groups[0][1]
                sequence.slots = self._core.space.index.offsets(sequence.entries)
                return
            # More than requests without loads may pin: fewer blocks, then.
            self._core.release(number, lease_id)
            count = _leading(grant.pinned)

    # Reports

    def report(
        self, session: LiveSession, used: Mapping[str, I32], layers: Sequence[LayerGrowth]
    ) -> None:
        """Notes what an engine's step did: positions of blocks by sequence, and growth of
        counters."""
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
        """A sequence uses the blocks at these positions, and is likely to want them again: they
        count for hotness."""
        if len(positions):
            self.counters.used_blocks += len(positions)
            self._core.touch(
                session.record.number,
                [HashList(sequence.group_index, sequence.hashes[positions])],
                time.monotonic(),
            )

    # Selections

    def spec(self, session: LiveSession, sequence_id: str) -> SelectSpec:
        """How the server selects for a sequence. Raises INVALID_FIELD where it does not."""
        spec = self.sequences.get(session.record.number, sequence_id).spec
        if spec is None:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"sequence_id {sequence_id!r} was created without select; create one with it",
            )
        return spec

    async def select(
        self, session: LiveSession, sequence_id: str, request: SelectRequest
    ) -> Selected:
        """Selects for one layer of a sequence; answers when nothing is read any more."""
        if len(self._running) >= MAX_SELECTS:
            raise HotKVError(
                Reason.OVERLOADED, f"{MAX_SELECTS} selections are waiting; send fewer at a time"
            )
        sequence, spec = (
            self.sequences.get(session.record.number, sequence_id),
            self.spec(session, sequence_id),
        )
        began_s = time.perf_counter()
        # Shielded: a client that goes away does not cut short what reads the arena.
        task = asyncio.create_task(self._select(session, sequence, spec, request))
        self._running[task] = time.monotonic()
        session.num_reads += 1

        def ended(done: asyncio.Task[Selected]) -> None:
            del self._running[done]
            session.num_reads -= 1
            session.settled.set()
            if not done.cancelled() and done.exception() is None:
                self.counters.served_selects += 1
                self.latency.add(time.perf_counter() - began_s)

        task.add_done_callback(ended)
        return await asyncio.shield(task)

    async def _select(
        self, session: LiveSession, sequence: LiveSequence, spec: SelectSpec, request: SelectRequest
    ) -> Selected:
        async with sequence.lock:
            slots = sequence.slots
            where = check_request(spec, request, len(slots))
            transfer_id = self._begin(session, sequence)
            try:
                await self._verify(sequence)
                hot = sequence.hot_set(spec, request.layer, request.shard)
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
        """Keeps what is under the sequence's lease until the transfer with the id returned ends; no
        id where nothing is leased."""
        if session.closing:
            raise HotKVError(Reason.UNKNOWN_SESSION, "session_id is closing")
        if not sequence.lease_id:
            return ""
        engine_id, config = session.record.engine_id, self._core.config
        if (
            self._core.leases.renew(
                engine_id, sequence.lease_id, time.monotonic() + config.lease_ttl_s
            )
            is None
        ):
            raise HotKVError(
                Reason.UNKNOWN_LEASE,
                (
                    f"sequence_id {sequence.sequence_id!r}: its lease has ended; append its blocks "
                    "again, or none, for a new one"
                ),
            )
        transfer_id = f"select-{secrets.token_hex(8)}"
        self._core.begin_load(session.record.number, transfer_id, sequence.lease_id, [])
        return transfer_id

    async def _verify(self, sequence: LiveSequence) -> None:
        """Compares representations that came back from an old server, as a load does, before any is
        read; nothing to do, as a rule."""
        if len(await self._verifier.compare(sequence.entries)):
            raise HotKVError(
                Reason.UNKNOWN_LEASE,
                (
                    f"sequence_id {sequence.sequence_id!r}: a representation's bytes are not those "
                    "that were stored; append its blocks again"
                ),
            )


def _leading(masks: Sequence[BoolMask]) -> int:
    """How many leading places are true in all masks."""
    everywhere = np.logical_and.reduce(masks)
    return len(everywhere) if everywhere.all() else int(np.argmin(everywhere))

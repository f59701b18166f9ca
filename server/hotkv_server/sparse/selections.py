"""Selections that the server makes for sequences whose engines can't map the arena.

Always true: a selection's blocks are pinned until it has ended, as for a load, and representations
that came back from an old server are compared before they are read. Selections run on threads of
their own, those of one sequence one after the other; everything else is on the event loop.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import native
from hotkv_proto.errors import HotKVError, Reason
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.histogram import Histogram
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.node.session import LiveSession
from hotkv_server.sparse.book.figures import LATENCY_BOUNDS_S
from hotkv_server.sparse.book.selection import (
    Selected,
    SelectRequest,
    SelectSpec,
    check_request,
    select,
)
from hotkv_server.sparse.sequences import LiveSequence

MAX_SELECTS = 256
"""Selections that wait or run."""
NUM_THREADS = 2

CountUsed = Callable[[LiveSession, LiveSequence, NDArray[np.int32]], None]
"""Counts a sequence's blocks, by position, for hotness."""


class Selections:
    """See the module. `latency`: seconds of those that were answered."""

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
        self._threads = ThreadPoolExecutor(NUM_THREADS, "hotkv-select")
        # With the time when each began.
        self._running: dict[asyncio.Task[Selected], float] = {}

    def __repr__(self) -> str:
        return f"Selections({len(self._running)} waiting or running, {self.num_served} served)"

    def __len__(self) -> int:
        """Selections that wait or run."""
        return len(self._running)

    def stalled_s(self, now_s: float) -> float:
        """How long the oldest selection has been waiting or running; 0 if there is none."""
        return now_s - min(self._running.values(), default=now_s)

    def warm_up(self) -> None:
        """Loads the kernels on a selection thread: it takes a moment, too long for the event
        loop."""
        self._threads.submit(native.require, "hotkv_sparse.kernels")

    def close(self) -> None:
        """Ends the threads, after all sessions have closed."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def select(
        self, session: LiveSession, sequence: LiveSequence, request: SelectRequest
    ) -> Selected:
        """Selects for one layer of a sequence. Answers when nothing is read any more.

        Raises INVALID_FIELD if the sequence was created without `select`, OVERLOADED,
        UNKNOWN_LEASE.
        """
        if len(self._running) >= MAX_SELECTS:
            raise HotKVError(
                Reason.OVERLOADED, f"{MAX_SELECTS} selections are waiting; send fewer at a time"
            )
        spec = spec_of(sequence)
        began_s = time.perf_counter()
        # Shielded: what reads the arena runs to its end even if the client leaves.
        task = asyncio.create_task(self._select(session, sequence, spec, request))
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
        """Begins a transfer that keeps the blocks of the sequence's lease, and returns its id;
        returns an empty id if nothing is leased."""
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
        """Compares representations that came back from an old server, as a load does; as a rule
        there are none."""
        if len(await self._verifier.compare(sequence.entries)):
            raise HotKVError(
                Reason.UNKNOWN_LEASE,
                f"sequence_id {sequence.sequence_id!r}: a representation's bytes are not those "
                "that were stored; append its blocks again",
            )


def spec_of(sequence: LiveSequence) -> SelectSpec:
    """How the server selects for a sequence. Raises INVALID_FIELD if it does not."""
    if sequence.spec is None:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"sequence_id {sequence.sequence_id!r} was created without select; create one with it",
        )
    return sequence.spec

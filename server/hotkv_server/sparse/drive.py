"""Sparse decode on behalf of engines: their sequences, and what they report of them.

Always true: reports are bounded, and reports of unknown sequences are ignored and counted; a
sequence for which the server selects has its blocks leased. On the event loop only; `selections`
selects.
"""

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import table
from hotkv_proto.errors import HotKVError
from hotkv_proto.table import Words
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.leases.leases import ReadLease
from hotkv_server.cache.room.bounds import Account
from hotkv_server.cache.values import BoolMask, HashList
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.node.session import LiveSession
from hotkv_server.sparse.book.figures import LayerFigures, LayerGrowth
from hotkv_server.sparse.book.selection import SelectSpec
from hotkv_server.sparse.selections import Selections
from hotkv_server.sparse.sequences import HASH_BYTES, LiveSequence, SequenceBook

I32 = NDArray[np.int32]
MAX_SEQUENCES = 4096
"""Of one session."""


@dataclass(slots=True)
class SparseCounters:
    """Counts since the start."""

    reports: int = 0
    unknown_sequences: int = 0
    used_blocks: int = 0


class SparseDecode:
    """See the module. Owned by the node."""

    def __init__(self, core: CacheCore, arena: NDArray[np.uint8], verifier: Verifier) -> None:
        self.core = core
        self.sequences = SequenceBook(
            MAX_SEQUENCES,
            core.config.max_blocks_per_call // 2,
            Account(core.client_memory, HASH_BYTES),
        )
        self.figures = LayerFigures()
        self.counters = SparseCounters()
        self.selections = Selections(core, arena, verifier, self._count_used)

    def __repr__(self) -> str:
        return f"SparseDecode({self.sequences!r}, {self.selections!r})"

    def close(self) -> None:
        """Ends the threads, after all sessions have closed."""
        self.selections.close()

    # Sequences

    def create(
        self,
        session: LiveSession,
        sequence_id: str,
        group_index: int,
        hashes: Words,
        spec: SelectSpec | None,
    ) -> LiveSequence:
        """Creates a sequence over these blocks. The same call again finds the same sequence."""
        owner = self.core.sessions.owner(session.record)
        sequence, is_new = self.sequences.create(
            session.record.number, sequence_id, group_index, hashes, spec, owner
        )
        if is_new and spec is not None:
            try:
                self._cover(session, sequence)
            except HotKVError:
                self.sequences.pop(session.record.number, sequence_id)
                raise
            self.selections.warm_up()
        return sequence

    def append(
        self, session: LiveSession, sequence_id: str, first_position: int, hashes: Words
    ) -> LiveSequence:
        """Appends blocks to a sequence. If the server selects for it, leases all that is ready now.

        A server that drains grants no new lease, so the old one stays.
        """
        sequence = self.sequences.append(session.record.number, sequence_id, first_position, hashes)
        if sequence.spec is not None and not self.core.draining:
            self._cover(session, sequence)
        return sequence

    async def delete(self, session: LiveSession, sequence_id: str) -> bool:
        """Ends a sequence; returns when no selection for it runs any more. False if there is no
        such sequence."""
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

    def close_session(self, session: LiveSession, *, is_last: bool) -> None:
        """Ends the session's sequences, and drops the engine's figures if this was the engine's
        last session."""
        self.sequences.drop_session(session.record.number)
        if is_last:
            self.figures.drop(session.record.engine_id)

    def _cover(self, session: LiveSession, sequence: LiveSequence) -> None:
        """Leases the leading blocks that are ready with their representations, and releases the
        lease before."""
        assert sequence.spec is not None, "the engine selects by itself: nothing is leased"
        number, key_space_id = session.record.number, session.record.key_space_id
        if sequence.lease_id:
            self.core.release(number, sequence.lease_id)
        sequence.lease_id, sequence.entries, sequence.slots = (
            "",
            np.empty(0, np.uint32),
            np.empty(0, np.int64),
        )
        groups = (sequence.spec.representation_group, sequence.group_index)
        found = [
            table.is_ready(self.core.space.index.find(key_space_id, group, sequence.hashes))
            for group in groups
        ]
        count = _leading(found)
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
            # More than requests without loads may pin: try fewer blocks.
            self.core.release(number, lease_id)
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
        """Counts the blocks at these positions for hotness: the sequence is likely to want them
        again."""
        if len(positions):
            self.counters.used_blocks += len(positions)
            self.core.touch(
                session.record.number,
                [HashList(sequence.group_index, sequence.hashes[positions])],
                time.monotonic(),
            )


def _leading(masks: Sequence[BoolMask]) -> int:
    """How many leading places are true in all masks."""
    everywhere = np.logical_and.reduce(masks)
    return len(everywhere) if everywhere.all() else int(np.argmin(everywhere))

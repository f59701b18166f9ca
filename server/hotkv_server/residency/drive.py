"""Opens, extends and closes the residencies of a node. Use on the event loop only.

`residency.book` makes the decisions. This module compares blocks first: a block that a restart has
restored is compared with its checksum before a residency pins it.

Always true: a client learns the offset of a restored block only after the block's bytes have
matched the checksum. During the comparison the blocks are pinned, and the session stays open. A
residency is closed in parts, and other tasks run between the parts.
"""

import asyncio
import time
from collections.abc import Callable, Mapping

from hotkv_proto.blocks import ResidencyOpened
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.table import Words
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import Entries, Int64s
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.node.event_loop import slices
from hotkv_server.node.live_session import LiveSession
from hotkv_server.residency.book.residencies import Residencies

Extended = tuple[Int64s, Int64s]
"""Two arrays of slot offsets in the arena, in bytes, with an item per block. First array: offset of
the block; -1 if the block is not pinned. Second array: offset of its sketch (compact form
of keys, for sparse attention); -1 if the block has no pinned sketch."""


class ResidencyDesk:
    """Opens, extends and closes the residencies of a node, on its event loop. A residency pins the
    blocks of a running request in host memory.

    tell: called after blocks have been evicted, or condemned because their bytes do not match their
        checksums. It sends notices and events about the removed blocks to clients.
    """

    def __init__(self, core: CacheCore, verifier: Verifier, tell: Callable[[], None]) -> None:
        self.residencies = Residencies(core)
        self._core = core
        self._verifier = verifier
        self._tell = tell

    def __repr__(self) -> str:
        return f"ResidencyDesk({self.residencies!r})"

    async def open(
        self, session: LiveSession, residency_id: str, num_blocks: Mapping[int, int]
    ) -> ResidencyOpened:
        """Opens a residency (reserves room for the blocks of a running request), or reserves more
        room for an open residency. First frees the slabs (pieces of the arena) that the residency
        needs, then reserves the room. Other tasks run while slabs are freed.

        num_blocks: number of blocks to reserve in total, by group.

        Raises UNKNOWN_SESSION if the session begins to close meanwhile, because later nothing would
        close the residency.
        """
        if not self._core.draining:
            making = self.residencies.make_room(session.record.number, residency_id, num_blocks)
            async for _ in slices(making):
                self._tell()
        if session.closing:
            raise HotKVError(Reason.UNKNOWN_SESSION, "session_id is closing")
        return self.residencies.open(
            session.record.number, residency_id, num_blocks, time.monotonic()
        )

    async def extend(
        self,
        session: LiveSession,
        residency_id: str,
        group_index: int,
        first_position: int,
        hashes: Words,
    ) -> Extended:
        """Pins those blocks of `hashes` that are ready and verified. Returns the offsets of their
        slots (places in the arena), and of the slots of their sketches (compact forms of
        keys, for sparse attention). Waits only if ready blocks must first be compared with their
        checksums.

        first_position: position of the first block in the request; the other blocks follow it.
        hashes: hashes of the blocks, each a row of eight uint32 words.
        """
        waiting = self.residencies.begin_comparing(
            session.record, residency_id, group_index, hashes
        )
        if len(waiting):
            session.num_reads += 1
            # Shield the comparison from cancellation: it reads the arena, and must run to its end
            # even if the client disconnects.
            await asyncio.shield(asyncio.create_task(self._compare(session, waiting)))
        if session.closing:
            raise HotKVError(Reason.UNKNOWN_SESSION, "session_id is closing")
        record, residencies = session.record, self.residencies
        offsets = residencies.extend(
            record.number, residency_id, group_index, first_position, hashes, time.monotonic()
        )
        residency = residencies.book.live(record, residency_id)
        return offsets, residencies.resident.sketch_offsets(
            residency, group_index, first_position, len(hashes)
        )

    async def _compare(self, session: LiveSession, entries: Entries) -> None:
        try:
            if len(await self._verifier.compare(entries)):
                self._tell()
        finally:
            self.residencies.resident.release_held(entries)
            session.num_reads -= 1
            session.settled.set()

    async def close(self, session: LiveSession, residency_id: str) -> bool:
        """Closes a residency: unpins its blocks, in parts between which other tasks run. Returns
        False if the residency is not open. In that case, deletes the recorded refusal of this
        residency, because its request no longer waits for room."""
        book = self.residencies.book
        residency = book.named(session.record, residency_id)
        if residency is None:
            book.settle_refusal(session.record.engine_id, residency_id)
            return False
        async for _ in slices(self.residencies.closing(residency)):
            pass
        return True

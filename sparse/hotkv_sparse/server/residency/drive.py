"""Opens, extends and closes residencies on the event loop; `residency.book` decides.

Always true: a client learns the offset of a restored block only after its checksum matched.
Meanwhile the block is pinned and the session stays open. Closing goes in parts, between which
other tasks run.
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
from hotkv_sparse.server.residency.book.residencies import Residencies

Extended = tuple[Int64s, Int64s]
"""Offsets in the arena, in bytes, of blocks and of their sketches; -1 if not pinned."""


class ResidencyDesk:
    """`tell`: called after blocks were evicted or condemned; sends notices and events of them."""

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
        """Opens a residency, or reserves more room for it. First frees slabs, in slices.
        `num_blocks`: in total, by group.

        Raises UNKNOWN_SESSION if the session begins to close meanwhile: nothing would close the
        residency.
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
        """Pins the ready blocks of `hashes` (words [n, 8]), of which the first is at
        `first_position` in the request. Waits only for checksums."""
        waiting = self.residencies.begin_comparing(
            session.record, residency_id, group_index, hashes
        )
        if len(waiting):
            session.num_reads += 1
            # It reads the arena, so it must run to its end even if the client disconnects.
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
        """Unpins in parts. False if it is not open; then drops its refusal: its request no
        longer waits."""
        book = self.residencies.book
        residency = book.named(session.record, residency_id)
        if residency is None:
            book.settle_refusal(session.record.engine_id, residency_id)
            return False
        async for _ in slices(self.residencies.closing(residency)):
            pass
        return True

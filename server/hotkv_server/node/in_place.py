"""Reading in place: a client reads leased blocks through its own mapping of the arena.

Always true: a client learns the offset of a restored block only after its bytes have matched its
checksum, which the call for offsets compares first, on a thread. A block that does not match is
condemned and not granted. Calls for the same lease share one comparison.
"""

import asyncio
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.blocks import LeaseGrant
from hotkv_proto.errors import HotKVError, Reason
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.leases.leases import ReadLease
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.node.live_session import LiveSession


class InPlace:
    """On the event loop only.

    tell: called when blocks have been condemned.
    """

    def __init__(self, core: CacheCore, verifier: Verifier, tell: Callable[[], None]) -> None:
        self._core = core
        self._verifier = verifier
        self._tell = tell
        # By lease number.
        self._comparing: dict[int, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"InPlace({len(self._comparing)} leases being compared)"

    def grant(self, session: LiveSession, lease_id: str) -> "LeaseGrant | asyncio.Task[LeaseGrant]":
        """A read lease's blocks and their offsets in the arena; a task if blocks must be
        compared first. It raises UNKNOWN_LEASE if the lease ends before that."""
        offsets = self._core.slot_offsets(session.record.number, lease_id)
        lease = self._core.leases.get(session.record.engine_id, lease_id)
        assert isinstance(lease, ReadLease), "only read leases have offsets"
        if not self._core.space.index.unverified[lease.entries()].any():
            return _granted(lease, offsets)
        return asyncio.create_task(self._compared(session, lease))

    async def _compared(self, session: LiveSession, lease: ReadLease) -> LeaseGrant:
        if lease.number not in self._comparing:
            comparing = asyncio.create_task(self._compare(lease))
            self._comparing[lease.number] = comparing
            session.num_reads += 1

            def ended(_: "asyncio.Task[None]") -> None:
                del self._comparing[lease.number]
                session.num_reads -= 1
                session.settled.set()

            comparing.add_done_callback(ended)
        # Shielded: it reads the arena, and must end even if the client leaves.
        await asyncio.shield(self._comparing[lease.number])
        if lease.released or self._core.leases.get(lease.engine_id, lease.lease_id) is not lease:
            raise HotKVError(
                Reason.UNKNOWN_LEASE,
                f"lease_id {lease.lease_id!r} was released or has expired while its blocks "
                "were compared; acquire again",
            )
        return _granted(lease, self._core.slot_offsets(session.record.number, lease.lease_id))

    async def _compare(self, lease: ReadLease) -> None:
        if len(await self._verifier.compare(lease.entries())):
            self._tell()


def _granted(lease: ReadLease, offsets: tuple[NDArray[np.int64], ...]) -> LeaseGrant:
    return LeaseGrant(
        lease.lease_id,
        tuple(found >= 0 for found in offsets),
        max(0.0, lease.expires_s - time.monotonic()),
        offsets,
    )

"""`Removals` removes blocks and key spaces (each is a model in a configuration), in slices of
time. `Effects` notifies sessions and capabilities (optional parts of the server) of every removal.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.keys import KeySpace, Sketch
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.space import keep_bounds
from hotkv_server.cache.values import EvictionNotice, TenantShare
from hotkv_server.node.capability import Capability, tell_all
from hotkv_server.node.event_loop import slices
from hotkv_server.node.live_session import LiveSession

# Effects are the notices that the core's decisions cause, for sessions and capabilities (optional
# parts of the server). An example: the core evicts a block, so all sessions get an eviction notice.
#
# Always true: notices are sent in the order of the core's decisions. On the event loop only.


NOTICE_BLOCKS = 1 << 16
"""Most blocks in an eviction notice: 2 MiB of hashes."""


class Effects:
    """Carries out the effects of the core's decisions: sends eviction notices to sessions, notifies
    capabilities of removed blocks, and reports the end of a drain (no new work, until the last
    transfer has ended).

    capabilities: optional parts of the server, which are notified.
    sessions: function that returns the open sessions.
    drained: event to set when the core is draining and its last transfer has ended.
    """

    def __init__(
        self,
        core: CacheCore,
        capabilities: Sequence[Capability],
        sessions: Callable[[], Iterable[LiveSession]],
        drained: asyncio.Event,
    ) -> None:
        self._core = core
        self._capabilities = capabilities
        self._sessions = sessions
        self._drained = drained

    def run(self, flushed_key_space_id: int = 0) -> None:
        """Fetches the new effects (notices of removed blocks) from the core and carries them out.

        flushed_key_space_id: the key space whose blocks a flush has begun to remove; 0 for none.
        """
        notices = [piece for notice in self._core.take_effects() for piece in _pieces(notice)]
        places = [one.space for one in self._core.below if one.space is not None]
        below = [notice for space in places for notice in space.removal.take_effects()]
        for notice in notices:
            for session in self._sessions():
                if (
                    session.hears_evictions
                    and session.record.key_space_id == notice.key_space_id
                    and not session.closing
                ):
                    session.notify(notice)
        if self._core.draining and not len(self._core.transfers):
            self._drained.set()
        # Notify the capabilities last: if a capability raises, the sessions have already got their
        # notices.
        if notices or below or flushed_key_space_id:
            pieces = [piece for notice in below for piece in _pieces(notice)]
            tell_all(
                self._capabilities,
                lambda one: one.blocks_removed(notices, pieces, flushed_key_space_id),
            )


def _pieces(notice: EvictionNotice) -> Iterator[EvictionNotice]:
    """Splits an eviction notice into notices of at most NOTICE_BLOCKS blocks, which fit into a
    message."""
    for start in range(0, len(notice.hashes), NOTICE_BLOCKS):
        yield replace(notice, hashes=notice.hashes[start : start + NOTICE_BLOCKS])


# Removals of blocks and key spaces take long, so they run in slices of time.
#
# Always true: other tasks run between two slices. By then, sessions and capabilities (optional
# parts of the server) have been notified of all earlier removals. On the event loop only.


log = logging.getLogger(__name__)

MAX_FORGOTTEN = 64
"""Most unused key spaces that the server forgets (removes from its list) at one turn of the timer;
also most that it forgets to make room for one new key space."""
KEEPING_S = 0.1
KEEP_EVERY_S = 1.0


class Removals:
    """Removes blocks and key spaces: evicts blocks, flushes a key space (deletes all blocks of a
    model in a configuration), forgets key spaces, and evicts blocks of tenants that exceed their
    bounds.

    run_effects: `Effects.run`, which carries out the effects of the core's decisions. Its argument
        is the key space whose blocks a flush has begun to remove, or 0.
    """

    def __init__(
        self,
        core: CacheCore,
        capabilities: Sequence[Capability],
        run_effects: Callable[[int], None],
    ) -> None:
        self._core = core
        self._capabilities = capabilities
        self._run_effects = run_effects
        self._keeping: Iterator[None] | None = None
        self._keep_at_s = 0.0
        # The numbers of released pins and of stored blocks, as they were when `keep_bounds` last
        # began to examine all blocks. While both are unchanged, another pass would find nothing: no
        # other block can have become evictable.
        self._seen: tuple[int, int] | None = None

    async def evict(
        self, key_space_id: int, group_index: int, hashes: NDArray[np.uint32]
    ) -> tuple[int, int]:
        """Evicts the blocks with these hashes of a group, except pinned blocks. Returns how many
        blocks were evicted, and how many stayed because they were pinned or reserved.

        hashes: a row of eight uint32 words for each block.
        """
        return await self._evicted(self._core.evict(key_space_id, group_index, hashes))

    async def evict_all(self, key_space_id: int) -> tuple[int, int]:
        """Evicts all blocks of a key space (a model in a configuration; 0: of all key spaces),
        except pinned blocks. Returns how many blocks were evicted, and how many stayed because they
        were pinned."""
        return await self._evicted(self._core.evict_all(key_space_id))

    async def would_evict(
        self, key_space_id: int, group_index: int = 0, hashes: NDArray[np.uint32] | None = None
    ) -> tuple[int, int, int]:
        """Predicts the result of `evict`, or of `evict_all` if `hashes` is None. Changes nothing.
        Returns three numbers: blocks that would be evicted, blocks that would stay, and bytes that
        would become free.

        key_space_id: 0 for all key spaces, if `hashes` is None.
        hashes: hashes of the blocks to evict, in the group `group_index`, each a row of eight
            uint32 words. None: all blocks.
        """
        dropped = kept = num_bytes = 0
        async for counts, _ in slices(self._core.would_evict(key_space_id, group_index, hashes)):
            for part_dropped, part_kept, part_bytes in counts:
                dropped, kept = dropped + part_dropped, kept + part_kept
                num_bytes += part_bytes
        return dropped, kept, num_bytes

    async def _evicted(self, evicting: Iterator[tuple[int, int]]) -> tuple[int, int]:
        dropped = kept = 0
        async for counts, _ in slices(evicting):
            dropped, kept = (
                dropped + sum(count for count, _ in counts),
                kept + sum(count for _, count in counts),
            )
            self._run_effects(0)
        return dropped, kept

    async def flush(self, key_space_id: int, *, elsewhere: bool = False) -> int:
        """Removes all blocks of a key space (a model in a configuration) from host memory, so
        that no lookup finds them. Notifies the capabilities (optional parts of the server). Returns
        the number of removed blocks.

        May also remove blocks that sessions store during the call.

        elsewhere: True if another node has requested the flush.
        """
        num_blocks = await self._empty(key_space_id)
        tell_all(
            self._capabilities,
            lambda one: one.key_space_flushed(key_space_id, elsewhere=elsewhere),
        )
        log.info("key space flushed key_space=%d blocks=%d", key_space_id, num_blocks)
        return num_blocks

    def flushed_elsewhere(self, key_space_id: int) -> None:
        """Notifies the capabilities (optional parts of the server) that another node has flushed a
        key space (a model in a configuration) of which this node has no block."""
        self._run_effects(key_space_id)
        tell_all(
            self._capabilities, lambda one: one.key_space_flushed(key_space_id, elsewhere=True)
        )

    async def _empty(self, key_space_id: int) -> int:
        """Removes all blocks of a key space (a model in a configuration) from host memory.
        Returns the number of removed blocks."""
        self._run_effects(0)
        num_blocks, cleared = 0, key_space_id
        async for counts, _ in slices(self._core.flush(key_space_id)):
            num_blocks += sum(counts)
            # Report the removals now: after this slice, sessions may store the same blocks again.
            self._run_effects(cleared)
            cleared = 0
        return num_blocks

    def share_out(self, shares: Mapping[str, TenantShare]) -> None:
        """Sets each tenant's share of the arena and of the catalog of key spaces (each is a model
        in a configuration).

        Evicts nothing itself: later, the timer calls `keep_bounds`, which evicts blocks of tenants
        that exceed their new bounds. Raises INVALID_FIELD if the shares are not possible
        (`TenantBook.check_shares`).
        """
        self._core.space.tenants.share_out(shares)
        self._core.catalog.share_out(len(shares))
        self._keeping, self._keep_at_s, self._seen = None, 0.0, None

    async def keep_bounds(self, now_s: float) -> None:
        """Called at each turn of the timer: evicts blocks of tenants that exceed their burst bound
        (the most bytes that a tenant may use).

        Works for at most KEEPING_S in a turn; the next turn continues. A pass over all blocks
        begins at most every KEEP_EVERY_S, and only if pins were released or blocks were stored
        since the last pass began.
        """
        space = self._core.space
        if self._keeping is None:
            freed = (space.index.num_unpins, self._core.counters.stored_blocks)
            if now_s < self._keep_at_s or freed == self._seen or not space.tenants.over_bound():
                return
            self._keep_at_s, self._seen = now_s + KEEP_EVERY_S, freed
            self._keeping = keep_bounds(space.books, space.removal)
        keeping, ends_s = self._keeping, time.monotonic() + KEEPING_S
        async for _, has_more in slices(keeping):
            self._run_effects(0)
            if self._keeping is not keeping:
                return
            if not has_more:
                self._keeping = None
            elif time.monotonic() >= ends_s:
                return

    async def forget_for(self, key_space: KeySpace, sketches: tuple[Sketch, ...]) -> None:
        """Forgets key spaces (each is a model in a configuration) and their blocks, to make
        room for a new key space. Stops when `key_space` can be registered with these kinds of
        sketches (compact forms of blocks' keys, for sparse attention).

        May forget too few key spaces, because it forgets at most MAX_FORGOTTEN, and the other key
        spaces may be in use. Registering `key_space` then raises OVERLOADED.
        """
        # Key spaces that this call has already tried to forget. Such a key space stays if a tier
        # that hangs uses its slots. Then another key space must be chosen.
        tried = set[int]()
        for _ in range(0 if self._core.draining else MAX_FORGOTTEN):
            number = self._core.catalog.surplus(key_space, sketches, tried)
            if not number:
                return
            tried.add(number)
            if self._core.catalog.has_blocks(number):
                await self._empty(number)
            # `forget` does nothing if another task has meanwhile forgotten the key space, or opened
            # a session of it.
            self.forget(number)

    def forget_outlived(self, now_s: float) -> None:
        """Forgets key spaces (each is a model in a configuration) that have no blocks and have
        had no session for FORGET_S (ten minutes)."""
        for number in list(itertools.islice(self._core.catalog.outlived(now_s), MAX_FORGOTTEN)):
            self.forget(number)

    def forget(self, key_space_id: int) -> bool:
        """Forgets a key space (a model in a configuration): removes it from the registered key
        spaces, and notifies the capabilities. Returns False, and does nothing, if the key space has
        a session or a block."""
        if not self._core.catalog.forget(key_space_id):
            return False
        tell_all(self._capabilities, lambda one: one.key_space_forgotten(key_space_id))
        log.info(
            "key space forgotten key_space=%d known=%d", key_space_id, len(self._core.key_spaces)
        )
        return True

"""Carries out what the core's decisions call for: eviction notices, what capabilities are told, the
end of a drain.

Always true: notices go out in the order of the decisions, and before anything that is decided
later. On the event loop only.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import EvictionNotice
from hotkv_server.node.capability import Capability
from hotkv_server.node.session import LiveSession

NOTICE_BLOCKS = 1 << 16
"""Most blocks of one eviction notice: 2 MiB of hashes."""


class Effects:
    """See the module. `sessions` returns the open ones; `drained` is set when a draining node has
    no transfer left."""

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
        """Takes the core's effects and carries them out. `flushed_key_space_id`: a key space of
        which nothing is left."""
        notices = [piece for notice in self._core.take_effects() for piece in _pieces(notice)]
        places = [one.space for one in self._core.below if one.space is not None]
        below = [notice for space in places for notice in space.removal.take_effects()]
        if notices or below or flushed_key_space_id:
            pieces = [piece for notice in below for piece in _pieces(notice)]
            for one in self._capabilities:
                one.blocks_removed(notices, pieces, flushed_key_space_id)
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


def _pieces(notice: EvictionNotice) -> Iterator[EvictionNotice]:
    """The notice in parts that fit a message."""
    for start in range(0, len(notice.hashes), NOTICE_BLOCKS):
        yield replace(notice, hashes=notice.hashes[start : start + NOTICE_BLOCKS])

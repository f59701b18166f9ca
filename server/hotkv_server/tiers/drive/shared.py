"""A tier that other nodes share and that places blocks by itself: what is stored here is copied
there, and a lookup asks it for what host memory lacks.

Always true: no block is read or written unless the store has confirmed the epoch of its key space
lately, see `epochs`; what is written agrees with its check value. On the event loop only; the tier
answers on threads.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import numpy as np

from hotkv_proto.keys import MAX_GROUPS
from hotkv_server.cache.arrays import rows
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import BoolMask, HashList, Int64s
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.tiers.book.books import books_of
from hotkv_server.tiers.book.moves import Move
from hotkv_server.tiers.drive.breaker import Breaker
from hotkv_server.tiers.drive.copies import TierCopies
from hotkv_server.tiers.drive.epochs import Epochs
from hotkv_server.tiers.drive.reads import TierReads
from hotkv_server.tiers.drive.tasks import (
    TierTasks,
    blocks_of,
    future,
    on_loop,
    tier_keys,
)
from hotkv_server.tiers.protocol import (
    Blocks,
    Codes,
    Read,
    Seals,
    SharedTier,
)

log = logging.getLogger(__name__)

MAX_PROBED = 1 << 13
"""Blocks of one lookup that the store is asked for."""
MAX_FOUND = 1 << 16
"""Blocks that are remembered to be there, until they are read."""
FOUND_S = 10.0


class TierShared:
    """See the module. `epochs`: of all tiers that nodes share. `moving_bytes`: most that may be on
    their way there. `below`: of the tier below, if there is one."""

    def __init__(
        self,
        core: CacheCore,
        tier: SharedTier,
        verifier: Verifier,
        epochs: Epochs,
        moving_bytes: int,
    ) -> None:
        self.tier = tier
        self.breaker = Breaker(tier)
        self.reads = TierReads()
        self.name = tier.facts().name
        self.num_fetched = 0
        self.below: Breaker | None = None
        self.out = TierCopies(core, tier, self.breaker, epochs, verifier, moving_bytes)
        self._epochs = epochs
        self._core = core
        self._books = books_of(core)
        self._found: dict[bytes, float] = {}

    def __repr__(self) -> str:
        return f"TierShared({self.tier!r})"

    def start(self, tasks: TierTasks, tell: Callable[[], None]) -> None:
        """Starts copying."""
        self.out.start(tasks, tell)

    # In

    async def look(self, key_space_id: int, groups: list[HashList], until_s: float) -> None:
        """Asks which of the blocks that host memory lacks are there, as far as nobody knows."""
        if not self.breaker.lets_pass:
            return
        if not await self._epochs.confirm(self.name, key_space_id, until_s):
            return
        keys = [
            key
            for keys in self._keys(key_space_id, groups, self._absent(key_space_id, groups))
            for key in keys
            if self._found.get(key, 0.0) <= until_s
        ][:MAX_PROBED]
        if not keys or not self.breaker.take_turn():
            return
        ended: asyncio.Future[tuple[Codes]] = future()
        expected = self._epochs.expected(self.name, key_space_id)
        self.tier.probe(keys, until_s, on_loop(ended), expected)
        await asyncio.wait([ended], timeout=max(0.0, until_s - time.monotonic()))
        if ended.done():
            self._remember(
                [
                    key
                    for key, code in zip(keys, ended.result()[0].tolist(), strict=True)
                    if code == Read.FOUND
                ]
            )

    def has_some(self, key_space_id: int, groups: list[HashList]) -> bool:
        """Returns whether a block of these lists is not in host memory: it may be there."""
        return any(map(len, self._absent(key_space_id, groups)))

    def wanted(self, key_space_id: int, groups: list[HashList]) -> list[Int64s]:
        """Positions of the blocks, one array a list, that were found there, and are not in host
        memory."""
        absent, now_s = self._absent(key_space_id, groups), time.monotonic()
        if not self._epochs.is_confirmed(self.name, key_space_id):
            return [at[:0] for at in absent]
        return [
            at[[self._found.get(key, 0.0) > now_s for key in keys]] if keys else at[:0]
            for at, keys in zip(absent, self._keys(key_space_id, groups, absent), strict=True)
        ]

    def lies_here(self, key_space_id: int, groups: list[HashList]) -> list[BoolMask]:
        """Which blocks were found there, one mask a list."""
        masks = [np.zeros(len(one.hashes), np.bool_) for one in groups]
        for mask, positions in zip(masks, self.wanted(key_space_id, groups), strict=True):
            mask[positions] = True
        return masks

    def begin_up(self, key_space_id: int, groups: list[HashList], now_s: float) -> Move | None:
        """Reserves slots for what was found there, as far as there is room."""
        record, wanted = self._core.catalog.record(key_space_id), self.wanted(key_space_id, groups)
        for keys in self._keys(key_space_id, groups, wanted):
            for key in keys:
                self._found.pop(key, None)
        return self._books.arrivals.begin(
            key_space_id, groups, wanted, lambda group: record.shape(group).slot_bytes
        )

    def blocks(self, move: Move) -> Blocks:
        """Returns the rows of a move as the tier takes them."""
        number = move.key_space_id
        prefix = self._epochs.prefix(self.name, number)
        expected = self._epochs.expected(self.name, number)
        return blocks_of(self._core, move.entries, prefix, expected)

    def end_up(self, move: Move, codes: Codes, checks: Seals, now_s: float) -> int:
        """The tier has read; returns how many blocks came damaged. One that is not there any more
        is no loss."""
        came = self._books.arrivals.end(move, codes == Read.FOUND, checks, now_s)
        self.num_fetched += len(came)
        return int((codes == Read.CORRUPT).sum())

    def _absent(self, key_space_id: int, groups: list[HashList]) -> list[Int64s]:
        """Positions of blocks that neither host memory nor the tier below has, or host memory
        alone while that tier is passed by."""
        absent = self._books.arrivals.absent(key_space_id, groups)
        lower = self._books.lower
        if lower is None or (self.below is not None and not self.below.lets_pass):
            return absent
        return [
            at[lower.up.find(key_space_id, one, at) == 0] if len(at) else at
            for one, at in zip(groups, absent, strict=True)
        ]

    def _keys(
        self, key_space_id: int, groups: list[HashList], positions: list[Int64s]
    ) -> list[list[bytes]]:
        prefix = self._epochs.prefix(self.name, key_space_id)
        return [
            tier_keys(prefix, [one.group_index] * len(at), rows(one.hashes, at))
            if one.group_index < MAX_GROUPS
            else []
            for one, at in zip(groups, positions, strict=True)
        ]

    def _remember(self, keys: list[bytes]) -> None:
        now_s = time.monotonic()
        for key in keys:
            self._found.pop(key, None)
            self._found[key] = now_s + FOUND_S
        while len(self._found) > MAX_FOUND:
            del self._found[next(iter(self._found))]

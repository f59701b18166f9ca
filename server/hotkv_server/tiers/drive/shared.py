"""A tier that other nodes share and that places blocks itself. Blocks stored here are copied to it;
lookups ask it for blocks that host memory lacks.

Always true: blocks are read and written only if the store has lately confirmed the epoch of their
key space, see `epochs`. Written blocks agree with their check values. Runs on the event loop; the
tier answers on threads.
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
"""Most blocks of a lookup to ask the store for."""
MAX_FOUND = 1 << 16
"""Most found blocks to remember until they are read."""
FOUND_S = 10.0


class TierShared:
    """Drives a shared tier; see the module.

    `epochs`: of all shared tiers.
    `moving_bytes`: most bytes on their way there.
    `below`: the breaker of the disk tier; None without a disk.
    """

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
        """Asks the tier for blocks that host memory lacks, except those that were found lately."""
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
        # An answer that is too late for this lookup serves the next.
        ended.add_done_callback(lambda answer: self._heard(keys, answer))
        self.tier.probe(keys, until_s, on_loop(ended), expected)
        await asyncio.wait([ended], timeout=max(0.0, until_s - time.monotonic()))

    def has_some(self, key_space_id: int, groups: list[HashList]) -> bool:
        """Returns whether host memory lacks a block of these lists, so that it may be in the
        tier."""
        return any(map(len, self._absent(key_space_id, groups)))

    def wanted(self, key_space_id: int, groups: list[HashList]) -> list[Int64s]:
        """Returns the positions of blocks that were found there and are not in host memory, an
        array per list."""
        absent, now_s = self._absent(key_space_id, groups), time.monotonic()
        if not self._epochs.is_confirmed(self.name, key_space_id):
            return [at[:0] for at in absent]
        return [
            at[[self._found.get(key, 0.0) > now_s for key in keys]] if keys else at[:0]
            for at, keys in zip(absent, self._keys(key_space_id, groups, absent), strict=True)
        ]

    def lies_here(self, key_space_id: int, groups: list[HashList]) -> list[BoolMask]:
        """Returns a mask per list of the blocks that were found there."""
        masks = [np.zeros(len(one.hashes), np.bool_) for one in groups]
        for mask, positions in zip(masks, self.wanted(key_space_id, groups), strict=True):
            mask[positions] = True
        return masks

    def begin_up(self, key_space_id: int, groups: list[HashList], now_s: float) -> Move | None:
        """Reserves slots for the blocks that were found there, as far as there is room."""
        record, wanted = self._core.catalog.record(key_space_id), self.wanted(key_space_id, groups)
        for keys in self._keys(key_space_id, groups, wanted):
            for key in keys:
                self._found.pop(key, None)
        return self._books.arrivals.begin(
            key_space_id, groups, wanted, lambda group: record.shape(group).slot_bytes
        )

    def blocks(self, move: Move) -> Blocks:
        """Returns the rows of a move in the form that the tier wants."""
        number = move.key_space_id
        prefix = self._epochs.prefix(self.name, number)
        expected = self._epochs.expected(self.name, number)
        return blocks_of(self._core, move.entries, prefix, expected)

    def end_up(self, move: Move, codes: Codes, checks: Seals, now_s: float) -> int:
        """Ends a move after the tier has read it. Returns the number of damaged blocks; a block
        that the tier has evicted is not damaged."""
        came = self._books.arrivals.end(move, codes == Read.FOUND, checks, now_s)
        self.num_fetched += len(came)
        return int((codes == Read.CORRUPT).sum())

    def _absent(self, key_space_id: int, groups: list[HashList]) -> list[Int64s]:
        """Returns the positions of blocks that are neither in host memory nor in the disk tier, an
        array per list. The disk tier is ignored while lookups skip it."""
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

    def _heard(self, keys: list[bytes], answer: "asyncio.Future[tuple[Codes]]") -> None:
        """Remembers the blocks that an answer to a probe names."""
        if not answer.cancelled():
            (codes,) = answer.result()
            self._remember(
                [key for key, code in zip(keys, codes.tolist(), strict=True) if code == Read.FOUND]
            )

    def _remember(self, keys: list[bytes]) -> None:
        now_s = time.monotonic()
        for key in keys:
            self._found.pop(key, None)
            self._found[key] = now_s + FOUND_S
        while len(self._found) > MAX_FOUND:
            del self._found[next(iter(self._found))]

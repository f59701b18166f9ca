"""A tier that other nodes share and that places blocks by itself: what is stored here is copied
there, and a lookup asks it for what host memory lacks.

Always true: no block is read or written while the epoch of its key space is not known, see
`shared_epochs`; what is written agrees with its check value. On the event loop only; the tier
answers on threads.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import numpy as np

from hotkv.keys import MAX_GROUPS
from hotkv_server.core.arrays import rows
from hotkv_server.core.cache import CacheCore
from hotkv_server.core.copies import Copies
from hotkv_server.core.moves import Move
from hotkv_server.core.values import BoolMask, HashList, Int64s
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.memory.epoch_notes import EpochNotes
from hotkv_server.runtime.breaker import Breaker
from hotkv_server.runtime.moved_events import OnReady, nobody
from hotkv_server.runtime.shared_epochs import EpochRelay, Flush, SharedEpochs
from hotkv_server.runtime.tier_reads import TierReads
from hotkv_server.runtime.tier_tasks import (
    TierTasks,
    agreeing,
    blocks_of,
    future,
    on_loop,
    tier_keys,
)
from hotkv_server.tiers.protocol import (
    NO_EPOCH,
    Blocks,
    Codes,
    Epochs,
    Medium,
    Read,
    Seals,
    SharedTier,
    Write,
)

log = logging.getLogger(__name__)

PAUSE_S = 0.05
LINGER_S, LARGE_LINGER_S = 1.0, 5.0
"""Longest wait for more blocks to write with those that wait; the second for a tier that wants
LARGE_BATCH_BYTES at a time, as its calls cost money."""
LARGE_BATCH_BYTES = 8 << 20
MAX_OUT_BYTES = 64 << 20
"""Most bytes on their way there: their slots can't be evicted meanwhile."""
MAX_PROBED = 1 << 13
"""Blocks of one lookup that the store is asked for."""
MAX_FOUND = 1 << 16
"""Blocks that are remembered to be there, until they are read."""
FOUND_S = 10.0
LEARN_S = 1.0
"""Longest wait for the epoch of what is to be written."""


class TierShared:
    """See the module. `relay`: what the tier was given as `on_epoch`. `moving_bytes`: most that may
    be on their way there. `notes`: None to begin without any, and to leave none."""

    def __init__(
        self,
        core: CacheCore,
        tier: SharedTier,
        verifier: Verifier,
        relay: EpochRelay,
        moving_bytes: int,
        notes: EpochNotes | None = None,
    ) -> None:
        self.tier = tier
        self.breaker = Breaker(tier)
        self.reads = TierReads()
        self.name = tier.facts().name
        self.num_copied = self.num_refused = self.num_fetched = 0
        self.epochs = SharedEpochs(core, tier, self.breaker, relay, notes or EpochNotes())
        self._core = core
        self._copies = Copies(core.moves)
        core.copies.append(self._copies)
        self._verifier = verifier
        self._most_bytes = min(MAX_OUT_BYTES, moving_bytes)
        self._out_bytes = 0
        self._found: dict[bytes, float] = {}
        self.on_ready: OnReady = nobody

    def __repr__(self) -> str:
        return f"TierShared({self.tier!r}, {self.epochs!r})"

    @property
    def num_waiting(self) -> int:
        """Blocks that wait to be copied."""
        return len(self._copies.waiting)

    def start(
        self,
        tasks: TierTasks,
        tell: Callable[[], None],
        flush: Flush,
    ) -> None:
        """Starts copying. `flush`: of a key space in this node alone."""
        tasks.spawn(self._copy(tasks, tell))
        self.epochs.start(tasks, flush)

    # Out

    async def _copy(self, tasks: TierTasks, tell: Callable[[], None]) -> None:
        batch_bytes, last_s = self.tier.facts().batch_bytes, time.monotonic()
        async for _ in tasks.turns(PAUSE_S):
            waiting = self._copies.waiting
            linger_s = LINGER_S if batch_bytes < LARGE_BATCH_BYTES else LARGE_LINGER_S
            is_due = time.monotonic() >= last_s + linger_s or waiting.num_bytes >= batch_bytes
            if not len(waiting) or not is_due or not self.breaker.take_turn():
                continue
            last_s = time.monotonic()
            entries = self._copies.take(self._most_bytes - self._out_bytes)
            for move in self._copies.begin(entries) if len(entries) else ():
                tasks.spawn(self._write(move, tell))

    async def _write(self, move: Move, tell: Callable[[], None]) -> None:
        """Writes those blocks of a move that agree with their check values."""
        num_bytes = int(self._core.space.index.slot_bytes(move.entries).sum())
        self._out_bytes += num_bytes
        try:
            good = await agreeing(self._core, self._verifier, move.entries, tell)
            if await self.epochs.learn(move.key_space_id, time.monotonic() + LEARN_S):
                ended: asyncio.Future[tuple[Codes, Seals]] = future()
                is_meant = good & ~move.is_void
                blocks = self._blocks(move, is_meant)
                self.tier.write(blocks, on_loop(ended))
                codes, _ = await ended
                is_there = np.isin(codes, (Write.STORED, Write.PRESENT))
                self.num_copied += int(is_there.sum())
                self.num_refused += int((~is_there).sum())
                is_there &= ~move.is_void[is_meant]
                self.on_ready(move.entries[is_meant][is_there], Medium.REMOTE, self.name)
            else:
                self.num_refused += len(move)
        finally:
            self._out_bytes -= num_bytes
            self._copies.end(move)

    # In

    async def look(self, key_space_id: int, groups: list[HashList], until_s: float) -> None:
        """Asks which of the blocks that host memory lacks are there, as far as nobody knows."""
        if not self.breaker.lets_pass or not await self.epochs.learn(key_space_id, until_s):
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
        self.tier.probe(keys, until_s, on_loop(ended), self._epochs(key_space_id))
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
        """Whether a block of these lists is not in host memory: it may be there."""
        return any(map(len, self._absent(key_space_id, groups)))

    def wanted(self, key_space_id: int, groups: list[HashList]) -> list[Int64s]:
        """Positions of the blocks, one array a list, that were found there, and are not in host
        memory."""
        absent, now_s = self._absent(key_space_id, groups), time.monotonic()
        if self.epochs.get(key_space_id) == NO_EPOCH:
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
        return self._core.arrivals.begin(
            key_space_id, groups, wanted, lambda group: record.shape(group).slot_bytes
        )

    def blocks(self, move: Move) -> Blocks:
        """The rows of a move as the tier takes them."""
        return self._blocks(move, np.ones(len(move), np.bool_))

    def end_up(self, move: Move, codes: Codes, checks: Seals, now_s: float) -> int:
        """The tier has read; returns how many blocks came damaged. One that is not there any more
        is no loss."""
        came = self._core.arrivals.end(move, codes == Read.FOUND, checks, now_s)
        self.num_fetched += len(came)
        return int((codes == Read.CORRUPT).sum())

    def _absent(self, key_space_id: int, groups: list[HashList]) -> list[Int64s]:
        """Positions of blocks that neither host memory nor the tier below has."""
        absent = self._core.arrivals.absent(key_space_id, groups)
        if (lower := self._core.lower) is None:
            return absent
        return [
            at[lower.up.find(key_space_id, one, at) == 0] if len(at) else at
            for one, at in zip(groups, absent, strict=True)
        ]

    def _keys(
        self, key_space_id: int, groups: list[HashList], positions: list[Int64s]
    ) -> list[list[bytes]]:
        prefix = self._prefix(key_space_id)
        return [
            tier_keys(prefix, [one.group_index] * len(at), rows(one.hashes, at))
            if one.group_index < MAX_GROUPS
            else []
            for one, at in zip(groups, positions, strict=True)
        ]

    def _prefix(self, key_space_id: int) -> bytes:
        fingerprint = self.epochs.fingerprint(key_space_id).encode()
        return b"hotkv/1/%s/%d" % (fingerprint, self.epochs.get(key_space_id))

    def _epochs(self, key_space_id: int) -> Epochs:
        """What the store must still have when blocks have been read."""
        return {self.epochs.fingerprint(key_space_id): self.epochs.get(key_space_id)}

    def _blocks(self, move: Move, is_meant: BoolMask) -> Blocks:
        number = move.key_space_id
        entries = move.entries[is_meant]
        return blocks_of(self._core, entries, self._prefix(number), self._epochs(number))

    def _remember(self, keys: list[bytes]) -> None:
        now_s = time.monotonic()
        for key in keys:
            self._found.pop(key, None)
            self._found[key] = now_s + FOUND_S
        while len(self._found) > MAX_FOUND:
            del self._found[next(iter(self._found))]

"""A tier that other nodes share and that places blocks by itself: what is stored here is copied
there, and a lookup asks it for what host memory lacks.

Always true: no block is read or written while the epoch of its key space is not known; from the
moment in which a flush begins here, until the store has raised the epoch, nothing of the key space
is read from there. When another node has raised it, the key space is flushed here too: at once if a
read tells of it, else within POLL_S. On the event loop only; the tier answers on threads.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import numpy as np

from hotkv.keys import MAX_GROUPS
from hotkv_server.core.arrays import rows
from hotkv_server.core.cache import CacheCore
from hotkv_server.core.moves import Move
from hotkv_server.core.values import BoolMask, HashList, Int64s
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.runtime.breaker import Breaker
from hotkv_server.runtime.tier_tasks import (
    TierTasks,
    agreeing,
    blocks_of,
    future,
    on_loop,
    tier_keys,
)
from hotkv_server.tiers.protocol import NO_EPOCH, Blocks, Codes, Read, Seals, SharedTier, Write

log = logging.getLogger(__name__)

PAUSE_S = 0.05
LINGER_S = 1.0
"""Longest wait for more blocks to write with those that wait."""
MAX_OUT_BYTES = 64 << 20
"""Most bytes on their way there: their slots can't be evicted meanwhile."""
POLL_S = 1.0
"""Between two looks at the epochs of the key spaces that sessions have."""
MAX_POLLED = 256
"""Key spaces that are looked at in a turn."""
MAX_PROBED = 1 << 13
"""Blocks of one lookup that the store is asked for."""
MAX_FOUND = 1 << 16
"""Blocks that are remembered to be there, until they are read."""
FOUND_S = 10.0
FLUSH_WAIT_S = 2.0
"""How long a flush waits for the store; it is told later else."""
RETRY_S = 1.0


class EpochRelay:
    """Given to a tier before there is a loop: passes on what it hears of epochs."""

    def __init__(self) -> None:
        self.hear: Callable[[str, int], None] = lambda fingerprint, epoch: None

    def __call__(self, fingerprint: str, epoch: int) -> None:
        self.hear(fingerprint, epoch)


class TierShared:
    """See the module. `relay`: what the tier was given as `on_epoch`. `moving_bytes`: most that may
    be on their way there."""

    def __init__(
        self,
        core: CacheCore,
        tier: SharedTier,
        verifier: Verifier,
        relay: EpochRelay,
        moving_bytes: int,
    ) -> None:
        self.tier = tier
        self.breaker = Breaker(tier)
        self.name = tier.facts().name
        self.num_copied = self.num_refused = self.num_fetched = 0
        self._core = core
        self._copies = core.add_copies()
        self._verifier = verifier
        self._relay = relay
        self._most_bytes = min(MAX_OUT_BYTES, moving_bytes)
        self._out_bytes = 0
        self._epochs: dict[int, int] = {}
        self._raising: set[int] = set()
        self._found: dict[bytes, float] = {}

    def __repr__(self) -> str:
        return f"TierShared({self.tier!r}, {len(self._epochs)} epochs)"

    @property
    def num_waiting(self) -> int:
        """Blocks that wait to be copied."""
        return len(self._copies.waiting)

    def start(
        self,
        tasks: TierTasks,
        tell: Callable[[], None],
        flush: Callable[[int], Awaitable[int]],
    ) -> None:
        """Starts copying. `flush`: of a key space in this node alone."""
        loop = asyncio.get_running_loop()

        def hear(fingerprint: str, epoch: int) -> None:
            try:
                loop.call_soon_threadsafe(self._hear, fingerprint, epoch, tasks, flush)
            except RuntimeError:
                # The loop has ended.
                return

        self._relay.hear = hear
        tasks.spawn(self._copy(tasks, tell))
        tasks.spawn(self._poll(tasks, flush))

    # Epochs

    def _fingerprint(self, key_space_id: int) -> str:
        return self._core.key_space(key_space_id).fingerprint.hex()

    async def _learn(self, key_space_id: int, until_s: float) -> int | None:
        """Asks the store for the epoch of a key space; None if it has not answered."""
        ended: asyncio.Future[tuple[int | None]] = future()
        self.tier.epoch(self._fingerprint(key_space_id), until_s, on_loop(ended))
        await asyncio.wait([ended], timeout=max(0.0, until_s - time.monotonic()))
        return ended.result()[0] if ended.done() else None

    async def _knows(self, key_space_id: int, until_s: float) -> bool:
        """Whether the epoch is known by then."""
        if key_space_id not in self._epochs and key_space_id not in self._raising:
            epoch = await self._learn(key_space_id, until_s)
            if epoch and key_space_id not in self._raising:
                self._epochs.setdefault(key_space_id, epoch)
        return key_space_id in self._epochs

    def _hear(
        self,
        fingerprint: str,
        epoch: int,
        tasks: TierTasks,
        flush: Callable[[int], Awaitable[int]],
    ) -> None:
        """Another epoch than ours was seen: another node has flushed, or the store has lost it."""
        for key_space_id, known in list(self._epochs.items()):
            if key_space_id not in self._core.key_spaces:
                del self._epochs[key_space_id]
            elif epoch != known and self._fingerprint(key_space_id) == fingerprint:
                log.info("tier=%s has a new epoch key_space=%d", self.name, key_space_id)
                # Not known until all is gone here.
                del self._epochs[key_space_id]
                self._raising.add(key_space_id)
                tasks.spawn(self._follow(key_space_id, epoch, flush))

    async def _follow(
        self, key_space_id: int, epoch: int, flush: Callable[[int], Awaitable[int]]
    ) -> None:
        await flush(key_space_id)
        self._raising.discard(key_space_id)
        if epoch != NO_EPOCH:
            self._epochs[key_space_id] = epoch

    async def _poll(self, tasks: TierTasks, flush: Callable[[int], Awaitable[int]]) -> None:
        async for _ in tasks.turns(POLL_S):
            if not self.breaker.lets_pass:
                continue
            used = {one.key_space_id for one in self._core.sessions.records.values()}
            for key_space_id in sorted(used)[:MAX_POLLED]:
                known = self._epochs.get(key_space_id)
                epoch = await self._learn(key_space_id, time.monotonic() + POLL_S)
                is_old = self._epochs.get(key_space_id) != known
                if epoch is None or is_old or key_space_id not in self._core.key_spaces:
                    continue
                if known is not None:
                    self._hear(self._fingerprint(key_space_id), epoch, tasks, flush)
                elif key_space_id not in self._raising and epoch != NO_EPOCH:
                    self._epochs[key_space_id] = epoch

    async def raise_epoch(self, key_space_id: int, tasks: TierTasks) -> bool:
        """A flush has begun here: nothing of the key space is read from the store any more, and it
        is told. False if it has not answered within FLUSH_WAIT_S; it is told later then."""
        self._epochs.pop(key_space_id, None)
        self._raising.add(key_space_id)
        raising = tasks.spawn(self._raise(key_space_id, self._fingerprint(key_space_id), tasks))
        done, _ = await asyncio.wait([raising], timeout=FLUSH_WAIT_S)
        if not done:
            log.warning(
                "tier=%s has not heard of the flush of key_space=%d; it is told as soon as it "
                "answers, other nodes may find old blocks until then",
                self.name,
                key_space_id,
            )
        return bool(done)

    async def _raise(self, key_space_id: int, fingerprint: str, tasks: TierTasks) -> None:
        while not tasks.is_closing:
            ended: asyncio.Future[tuple[int | None]] = future()
            self.tier.raise_epoch(fingerprint, on_loop(ended))
            (epoch,) = await ended
            if epoch is not None:
                self._raising.discard(key_space_id)
                if epoch != NO_EPOCH and key_space_id in self._core.key_spaces:
                    self._epochs[key_space_id] = epoch
                return
            await asyncio.sleep(RETRY_S)

    # Out

    async def _copy(self, tasks: TierTasks, tell: Callable[[], None]) -> None:
        batch_bytes, last_s = self.tier.facts().batch_bytes, time.monotonic()
        async for _ in tasks.turns(PAUSE_S):
            waiting = self._copies.waiting
            is_due = time.monotonic() >= last_s + LINGER_S or waiting.num_bytes >= batch_bytes
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
            if await self._knows(move.key_space_id, time.monotonic() + POLL_S):
                ended: asyncio.Future[tuple[Codes, Seals]] = future()
                blocks = self._blocks(move, good & ~move.is_void)
                self.tier.write(blocks, on_loop(ended))
                codes, _ = await ended
                num_there = int(np.isin(codes, (Write.STORED, Write.PRESENT)).sum())
                self.num_copied += num_there
                self.num_refused += len(blocks) - num_there
            else:
                self.num_refused += len(move)
        finally:
            self._out_bytes -= num_bytes
            self._copies.end(move)

    # In

    async def look(self, key_space_id: int, groups: list[HashList], until_s: float) -> None:
        """Asks which of the blocks that host memory lacks are there, as far as nobody knows."""
        if not self.breaker.lets_pass or not await self._knows(key_space_id, until_s):
            return
        keys = [
            key
            for keys in self._keys(key_space_id, groups, self._absent(key_space_id, groups))
            for key in keys
            if key not in self._found
        ][:MAX_PROBED]
        if not keys or not self.breaker.take_turn():
            return
        ended: asyncio.Future[tuple[Codes]] = future()
        fingerprint = self._fingerprint(key_space_id)
        epochs = {fingerprint: self._epochs[key_space_id]}
        self.tier.probe(keys, until_s, on_loop(ended), epochs)
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
        if key_space_id not in self._epochs:
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
        epoch = self._epochs.get(key_space_id, NO_EPOCH)
        return b"hotkv/1/%s/%d" % (self._fingerprint(key_space_id).encode(), epoch)

    def _blocks(self, move: Move, is_meant: BoolMask) -> Blocks:
        number = move.key_space_id
        epochs = {self._fingerprint(number): self._epochs.get(number, NO_EPOCH)}
        return blocks_of(self._core, move.entries[is_meant], self._prefix(number), epochs)

    def _remember(self, keys: list[bytes]) -> None:
        now_s = time.monotonic()
        for key in keys:
            self._found.pop(key, None)
            self._found[key] = now_s + FOUND_S
        while len(self._found) > MAX_FOUND:
            del self._found[next(iter(self._found))]

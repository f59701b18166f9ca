"""Copies blocks to a shared tier: just stored ones soon, *old* ones (from the disk, an earlier
server, or a failed copy) at a limited rate.

Always true: a block is written only if it matches its checksum and the store has just confirmed
its generation. Before old blocks are written, the tier is asked which it lacks. While the tier
has a problem, copying pauses.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import Entries, Int64s, Medium
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.node.capability import OnReady, Tracer, nobody
from hotkv_server.node.event_loop import in_slices
from hotkv_server.tiers.book.books import books_of
from hotkv_server.tiers.book.copies import OLD, STORED, Copies
from hotkv_server.tiers.book.moves import Move
from hotkv_server.tiers.drive.breaker import Breaker
from hotkv_server.tiers.drive.flushes import FlushDriver
from hotkv_server.tiers.drive.tasks import (
    TierTasks,
    agreeing,
    future,
    on_loop,
    shared_blocks,
    tier_keys,
)
from hotkv_server.tiers.protocol import Codes, Read, Seals, SharedTier, Write

if TYPE_CHECKING:
    from hotkv_proto.traces import Span

PAUSE_S = 0.05
"""Between two checks for blocks to copy."""
MAX_OUT_BYTES = 64 << 20
"""Most bytes in copies at a time, which can't be evicted."""
LEARN_S = 1.0
"""Longest wait of a write for the store's confirmation."""
PROBE_S = 2.0
"""Longest wait for the answer which old blocks the tier has."""
OLD_BYTES_PER_S = 64 << 20
"""Mean rate of old blocks. Protects the store if many nodes start at once."""
MIN_OLD_BYTES = 8 << 20
"""Least batch of old blocks, unless `moving_bytes` is less."""
AGAIN_S = 1.0
"""Pause after a failed copy; doubles with each failure of the same blocks."""
WALKED_ENTRIES = 1 << 16
"""Entries that `_offer_left` searches in a turn."""


class TierCopies:
    """See the module.

    `moving_bytes`: most bytes in copies at a time, below MAX_OUT_BYTES.
    `num_copied`: blocks written to the tier, or found there.
    `num_refused`: blocks given up: tier full, all tries failed, flushed, or wrong checksum.
    """

    def __init__(
        self,
        core: CacheCore,
        tier: SharedTier,
        breaker: Breaker,
        generations: FlushDriver,
        verifier: Verifier,
        moving_bytes: int,
    ) -> None:
        self.num_copied = self.num_refused = 0
        self.on_ready: OnReady = nobody
        self.tracing: Tracer | None = None
        self._core = core
        self._tier = tier
        self._name = tier.facts().name
        self._breaker = breaker
        self._generations = generations
        self._verifier = verifier
        books = books_of(core)
        self._copies = Copies(books.moves)
        books.copies.append(self._copies)
        self._wake = asyncio.Event()
        self._copies.on_stored = self._wake.set
        self._most_bytes = min(MAX_OUT_BYTES, moving_bytes)
        self._out_bytes = 0
        self._old_at_s = 0.0
        # Bytes that the present batch of old blocks has sent, even if refused.
        self._sent_old_bytes = 0
        # Key spaces with an earlier server's blocks that are not queued yet, and the entries to
        # search for them.
        self._left = deque(core.key_spaces)
        self._num_left = core.space.index.num_numbers

    def __repr__(self) -> str:
        return f"TierCopies({self._copies!r})"

    @property
    def num_waiting(self) -> int:
        return self._copies.num_waiting

    def start(self, tasks: TierTasks, tell: Callable[[], None]) -> None:
        tasks.spawn(self._copy_stored(tasks, tell))
        tasks.spawn(self._copy_old(tasks, tell))
        tasks.spawn(self._offer_left(tasks))

    def offer_old(self, key_space_id: int, entries: Entries) -> None:
        """Queues old blocks, unless a flush may be on its way to a store."""
        if self._generations.may_offer(self._name, key_space_id):
            self._copies.add_old(entries)

    async def _copy_stored(self, tasks: TierTasks, tell: Callable[[], None]) -> None:
        facts, last_s, wake = self._tier.facts(), time.monotonic(), self._wake
        async for _ in tasks.turns(f"the copies to {self._name}", PAUSE_S, wake):
            waiting = self._copies.lanes[STORED]
            waited_s = time.monotonic() - last_s
            is_due = waited_s >= facts.linger_s or waiting.num_bytes >= facts.batch_bytes
            if not len(waiting) or not is_due or self._breaker.is_open:
                continue
            last_s = time.monotonic()
            taking = self._copies.take(self._most_bytes - self._out_bytes)
            entries = await in_slices(taking, tell)
            for move in self._copies.begin(entries) if len(entries) else ():
                tasks.spawn(self._write(move, STORED, tell))

    async def _copy_old(self, tasks: TierTasks, tell: Callable[[], None]) -> None:
        """One batch at a time, in what new blocks leave of the limit."""
        batch_bytes = min(max(MIN_OLD_BYTES, self._tier.facts().batch_bytes), self._most_bytes)
        batch: asyncio.Task[None] | None = None
        async for _ in tasks.turns(f"the later copies to {self._name}", PAUSE_S):
            lane = self._copies.lane_to_do()
            is_busy = batch is not None and not batch.done()
            if lane is None or is_busy:
                continue
            if time.monotonic() < self._old_at_s or self._breaker.is_open:
                continue
            left_bytes = self._most_bytes - self._out_bytes
            taking = self._copies.take(min(batch_bytes, left_bytes), lane)
            entries = await in_slices(taking, tell)
            # Pin them now, not in the task: they may be evicted before it runs.
            if len(entries) and (moves := self._copies.begin(entries, lane)):
                batch = tasks.spawn(self._write_old(moves, lane, tell))

    async def _write_old(self, moves: Sequence[Move], lane: int, tell: Callable[[], None]) -> None:
        self._sent_old_bytes, waiting = 0, deque(moves)
        try:
            while waiting:
                await self._write(waiting.popleft(), lane, tell)
        finally:
            for move in waiting:
                self._copies.end(move, np.ones(len(move), np.bool_))
        self._wait_with_old(self._sent_old_bytes / OLD_BYTES_PER_S)

    def _wait_with_old(self, wait_s: float) -> None:
        self._old_at_s = max(self._old_at_s, time.monotonic() + wait_s)

    async def _offer_left(self, tasks: TierTasks) -> None:
        """Queues an earlier server's blocks, a part each turn."""
        first = 0
        async for _ in tasks.turns(f"the blocks of before for {self._name}", PAUSE_S):
            if not self._left:
                return
            key_space_id = self._left[0]
            if key_space_id not in self._core.key_spaces:
                self._left.popleft()
                first = 0
            elif not self._generations.may_offer(self._name, key_space_id):
                self._left.rotate()
                first = 0
            elif not len(self._copies.lanes[OLD]):
                end = min(first + WALKED_ENTRIES, self._num_left)
                self.offer_old(
                    key_space_id, self._core.space.index.ready_blocks(key_space_id, first, end)
                )
                first = end
                if end == self._num_left:
                    self._left.popleft()
                    first = 0

    async def _write(self, move: Move, lane: int, tell: Callable[[], None]) -> None:
        """Writes a move's blocks, except old ones that the tier has and those with a wrong
        checksum."""
        num_bytes = int(self._core.space.index.slot_bytes(move.entries).sum())
        self._out_bytes += num_bytes
        codes = np.zeros(len(move), np.uint8)
        try:
            if lane != STORED:
                codes[:] = await self._probed(move)
            at = np.flatnonzero(codes == 0)
            at = at[await agreeing(self._core, self._verifier, move.entries[at], tell)]
            # After the probe, as a flush may have begun meanwhile.
            until_s = time.monotonic() + LEARN_S
            if not await self._generations.confirm(self._name, move.key_space_id, until_s):
                codes[at] = Write.FAILED
            elif len(at := at[~move.is_void[at]]):
                if lane != STORED:
                    sent = self._core.space.index.slot_bytes(move.entries[at])
                    self._sent_old_bytes += int(sent.sum())
                codes[at] = await self._written(move, at)
                is_new = np.isin(codes[at], (Write.STORED, Write.PRESENT)) & ~move.is_void[at]
                self.on_ready(move.entries[at[is_new]], Medium.REMOTE, self._name)
        except Exception:
            codes[codes == 0] = Write.FAILED
            raise
        finally:
            self._out_bytes -= num_bytes
            self._wake.set()
            has_failed = codes == Write.FAILED
            num_given_up = self._copies.end(move, has_failed)
            if has_failed.any():
                self._wait_with_old(AGAIN_S * 2 ** max(0, lane - OLD))
        is_there = np.isin(codes, (Write.STORED, Write.PRESENT))
        self.num_copied += int(is_there.sum())
        num_again = int(has_failed.sum()) - num_given_up
        self.num_refused += len(move) - int(is_there.sum()) - num_again

    async def _probed(self, move: Move) -> Codes:
        """For each block: PRESENT, 0 if the tier lacks it, FAILED without an answer."""
        codes = np.full(len(move), Write.FAILED, np.uint8)
        until_s = time.monotonic() + PROBE_S
        if await self._generations.confirm(self._name, move.key_space_id, until_s):
            ended: asyncio.Future[tuple[Codes]] = future()
            _, groups, hashes = self._core.space.index.keys(move.entries)
            prefix = self._generations.prefix(self._name, move.key_space_id)
            keys = tier_keys(prefix, groups.tolist(), hashes)
            expected = self._generations.expected(self._name, move.key_space_id)
            self._tier.probe(keys, until_s, on_loop(ended), expected)
            (found,) = await ended
            codes[found == Read.FOUND] = Write.PRESENT
            codes[found == Read.ABSENT] = 0
        return codes

    async def _written(self, move: Move, at: Int64s) -> Codes:
        number, ended = move.key_space_id, future()
        prefix = self._generations.prefix(self._name, number)
        expected = self._generations.expected(self._name, number)
        blocks = shared_blocks(self._core, move.entries[at], prefix, expected)
        spans: list[Span] = []
        if self.tracing is not None:
            hashes = self._core.space.index.keys(move.entries[at])[2]
            spans = self.tracing.begin_writes(hashes, self._name)
        self._tier.write(blocks, on_loop(ended))
        answer: tuple[Codes, Seals] = await ended
        for span in spans:
            span.end()
        return answer[0]

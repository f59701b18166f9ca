"""Copies blocks from host memory to a tier that other nodes share. Blocks that an engine has just
stored on this node are copied soon. *Old* blocks are copied at a limited rate. Old blocks are:
blocks from the disk, blocks of an earlier server, and blocks whose copy has failed.

Always true: a block is written only if its bytes match its checksum. In addition, the
store must have confirmed its key space's generation (a number that each flush raises) in the last
1.5 s. Before old blocks are written, the tier is asked which of them it has already; only the
blocks that it lacks are written. While the tier has a known problem, copying pauses.

Runs on the event loop; the tier calls `on_done` on its own threads.
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
    blocks_of,
    future,
    on_loop,
    tier_keys,
)
from hotkv_server.tiers.protocol import Codes, Read, Seals, SharedTier, Write

if TYPE_CHECKING:
    from hotkv_proto.traces import Span

PAUSE_S = 0.05
"""Time between two checks for blocks to copy."""
MAX_OUT_BYTES = 64 << 20
"""Most bytes of blocks that are being copied at a time. These blocks can't be evicted from host
memory."""
LEARN_S = 1.0
"""Longest time that a write waits, before it begins, for the store to confirm the generation
(number that each flush raises) of the blocks' key space."""
PROBE_S = 2.0
"""Longest wait until the tier has answered which of the old blocks it has."""
OLD_BYTES_PER_S = 64 << 20
"""Limit on the mean rate at which old blocks are written. It protects the store if many nodes start
at the same time, and so copy their old blocks at the same time."""
MIN_OLD_BYTES = 8 << 20
"""Least size of a batch of old blocks, unless `moving_bytes` is less."""
AGAIN_S = 1.0
"""Wait before the next copy of old blocks, after a copy has failed. The wait doubles with each
further failure of the same blocks."""
WALKED_ENTRIES = 1 << 16
"""Number of entries that the task `_offer_left` searches in one turn for blocks of an earlier
server."""


class TierCopies:
    """Copies blocks from host memory to a tier that other nodes share; see the module.

    `breaker`: knows whether the tier is broken.
    `generations`: knows whether the store has confirmed a key space's generation (a number that
        each flush raises).
    `verifier`: compares blocks with their checksums.
    `moving_bytes`: most bytes that may be copied at a time; more than MAX_OUT_BYTES has no effect.
    `num_copied`: number of blocks that were written to the tier, or were in it already.
    `num_refused`: number of blocks that were not copied and are not tried again: the tier was full,
        all tries failed, a flush removed them, or their bytes did not match their checksums.
    `on_ready`: called after blocks were copied, with their entries in host memory, the medium
        (`Medium.REMOTE`) and the tier's name.
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
        # The earliest time to copy the next batch of old blocks.
        self._old_at_s = 0.0
        # Bytes of the old blocks that the present batch has sent to the tier, also of blocks that
        # the tier has refused.
        self._sent_old_bytes = 0
        # Key spaces in which an earlier server left blocks that are not queued yet, and the number
        # of entries to search for these blocks.
        self._left = deque(core.key_spaces)
        self._num_left = core.space.index.num_numbers

    def __repr__(self) -> str:
        return f"TierCopies({self._copies!r})"

    @property
    def num_waiting(self) -> int:
        """Number of blocks that wait to be copied."""
        return self._copies.num_waiting

    def start(self, tasks: TierTasks, tell: Callable[[], None]) -> None:
        """Starts the tasks that copy blocks.

        `tasks`: runs the tasks.
        `tell`: sends the core's notices and events about removed blocks. Called after blocks may
            have been condemned (dropped, because their bytes did not match their checksums).
        """
        tasks.spawn(self._copy_stored(tasks, tell))
        tasks.spawn(self._copy_old(tasks, tell))
        tasks.spawn(self._offer_left(tasks))

    def offer_old(self, key_space_id: int, entries: Entries) -> None:
        """Queues old blocks of host memory (blocks from the disk or from an earlier server) to be
        copied to the tier. Does nothing unless `FlushDriver.may_offer` allows it: among other
        things, no flush may be on its way to a store."""
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
        """Copies old blocks to the tier, one batch at a time, until the tiers close. (Old blocks
        are blocks from the disk, blocks of an earlier server, and blocks whose copy has failed.)
        Newly stored blocks go first: a batch of old blocks uses only the part of the limit
        `moving_bytes` that copies of newly stored blocks leave free."""
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
            # Pin the blocks now (`begin` does so), not in the task: other calls run before the
            # task, and may evict unpinned blocks.
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
        """Queues the blocks that an earlier server left in host memory, a part in each turn. Queues
        the blocks of a key space (a model in a configuration) only once `FlushDriver.may_offer`
        allows
        it: among other things, no flush may be on its way to a store."""
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
        """Writes the blocks of a move to the tier, then ends the move. Skips old blocks that the
        tier already has, and blocks whose bytes do not match their checksums.

        `lane`: number of the queue from which the blocks were taken (`book.copies`).
        `tell`: sends the core's notices and events about removed blocks (see `start`).
        """
        num_bytes = int(self._core.space.index.slot_bytes(move.entries).sum())
        self._out_bytes += num_bytes
        codes = np.zeros(len(move), np.uint8)
        try:
            if lane != STORED:
                codes[:] = await self._probed(move)
            at = np.flatnonzero(codes == 0)
            at = at[await agreeing(self._core, self._verifier, move.entries[at], tell)]
            # Confirm the generation (number that each flush raises) only after the probe: a flush
            # may have begun during the probe.
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
        """Asks the tier which of a move's blocks it has. Returns a code for each block: PRESENT if
        the tier has it, 0 if the tier lacks it, FAILED if the tier did not answer."""
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
        """Writes the blocks at positions `at` of a move to the tier. Returns their results, values
        of `Write` (STORED, PRESENT, …)."""
        number, ended = move.key_space_id, future()
        prefix = self._generations.prefix(self._name, number)
        expected = self._generations.expected(self._name, number)
        blocks = blocks_of(self._core, move.entries[at], prefix, expected)
        spans: list[Span] = []
        if self.tracing is not None:
            hashes = self._core.space.index.keys(move.entries[at])[2]
            spans = self.tracing.begin_writes(hashes, self._name)
        self._tier.write(blocks, on_loop(ended))
        answer: tuple[Codes, Seals] = await ended
        for span in spans:
            span.end()
        return answer[0]

"""Drives a tier that other nodes share: copies blocks that are stored on this node to the tier, and
asks the tier for blocks that this node lacks.

Always true: blocks are read and written only if the store has confirmed the generation of their key
space in the last 1.5 s. (A generation is a number that each flush raises; see `drive.generations`.)
Written blocks match their checksums. Runs on the event loop; the tier calls `on_done` on its
own threads.
"""

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.table import Words
from hotkv_server.cache.arrays import rows
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import BoolMask, HashList, Int64s
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.tiers.book.books import books_of
from hotkv_server.tiers.book.moves import Move
from hotkv_server.tiers.drive.breaker import Breaker
from hotkv_server.tiers.drive.copies import TierCopies
from hotkv_server.tiers.drive.flushes import FlushDriver
from hotkv_server.tiers.drive.reads import TierReads
from hotkv_server.tiers.drive.tasks import blocks_of, future, on_loop
from hotkv_server.tiers.protocol import Blocks, Codes, Read, Seals, SharedTier

MAX_PROBED = 1 << 13
"""Most blocks that a lookup asks the tier for."""
MAX_FOUND = 1 << 16
"""Most blocks that are remembered as found in the tier."""
NUM_BUCKETS = 16 * MAX_FOUND
"""Number of buckets of `FoundBlocks`. There are so many that few other blocks share a bucket with a
remembered block."""
PROBE_S = 0.2
"""Least time until the deadline of a probe (a question to the tier which blocks it has). If a
lookup waits less, the answer to its probe serves the next lookup."""
FOUND_S = 10.0
"""Time for which a block is remembered as found in the tier, unless it is read earlier."""


class FoundBlocks:
    """Remembers the blocks that probes (questions which blocks the tier has) have found in the
    tier. The key of a block in the tier consists of a `head`, which is the same for all blocks of a
    group of a key space, and the block's hash. Methods name blocks by their `head` and `hashes`.

    Remembers at most MAX_FOUND blocks. If there are more, forgets blocks, first the blocks of the
    `head` that has got no new block for the longest time.

    Always true: `among` makes Python objects only for blocks that are probably remembered. The
    reason is speed: a lookup may name 131,072 blocks.
    """

    def __init__(self) -> None:
        self._until_s: dict[bytes, dict[bytes, float]] = {}
        # The number of remembered blocks in each bucket (see `_buckets`). A change costs time only
        # for the changed blocks, however many blocks are remembered.
        self._counts = np.zeros(NUM_BUCKETS, np.int32)
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __repr__(self) -> str:
        return f"FoundBlocks({len(self)} of {len(self._until_s)} heads)"

    def among(self, head: bytes, hashes: Words, at_s: float) -> BoolMask:
        """Returns a mask [n]: True for each of the n blocks that is remembered until after `at_s`,
        a time of time.monotonic. `head`, `hashes`: the two parts of the blocks' keys."""
        mask = np.zeros(len(hashes), np.bool_)
        if (known := self._until_s.get(head)) is None:
            return mask
        buckets = _buckets(hashes.view(np.uint64)[:, 0])
        for row in np.flatnonzero(self._counts[buckets]).tolist():
            mask[row] = known.get(hashes[row].tobytes(), 0.0) > at_s
        return mask

    def add(self, head: bytes, hashes: Iterable[bytes], until_s: float) -> None:
        """Remembers blocks as found in the tier, until `until_s`, a time of time.monotonic. `head`,
        `hashes`: the two parts of the blocks' keys."""
        until = dict.fromkeys(hashes, until_s)
        known = self._until_s.pop(head, {})
        self._count([one for one in until if one not in known], 1)
        known.update(until)
        if known:
            self._until_s[head] = known
        while self._num_blocks > MAX_FOUND:
            oldest, left = next(iter(self._until_s.items()))
            self.drop(oldest, [*itertools.islice(left, self._num_blocks - MAX_FOUND)])

    def drop(self, head: bytes, hashes: Iterable[bytes]) -> None:
        """Forgets that the blocks with these keys (`head` and `hashes`) were found in the tier.
        Called when a read of the blocks begins, and if too many blocks are remembered."""
        if (known := self._until_s.get(head)) is None:
            return
        self._count([one for one in hashes if known.pop(one, None) is not None], -1)
        if not known:
            del self._until_s[head]

    def _count(self, hashes: list[bytes], change: int) -> None:
        begins = np.frombuffer(b"".join(one[:8] for one in hashes), np.uint64)
        np.add.at(self._counts, _buckets(begins), change)
        self._num_blocks += change * len(hashes)


def _buckets(begins: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the number of each block's bucket. `FoundBlocks` counts its blocks by bucket: a block
    whose bucket is empty is not remembered, which is found out fast. `begins`: the first 8 bytes of
    the blocks' hashes."""
    return begins % np.uint64(NUM_BUCKETS)


class TierShared:
    """Copies blocks of this node to a tier that other nodes share, and loads blocks from this tier;
    see the module. In its methods, `groups` has a list of block hashes for each KV cache group.

    `verifier`: compares blocks with their checksums.
    `generations`: knows which generations (numbers that flushes raise) the stores of shared tiers
        have confirmed.
    `moving_bytes`: most bytes that may be copied to the tier at a time (see `TierCopies`).
    `out`: copies blocks to the tier.
    `below`: the breaker of the disk tier, which knows whether lookups skip the disk; None without a
        disk.
    `num_fetched`: number of blocks loaded from the tier since the start.
    """

    def __init__(
        self,
        core: CacheCore,
        tier: SharedTier,
        verifier: Verifier,
        generations: FlushDriver,
        moving_bytes: int,
    ) -> None:
        self.tier = tier
        self.breaker = Breaker(tier)
        self.reads = TierReads()
        self.name = tier.facts().name
        self.num_fetched = 0
        self.below: Breaker | None = None
        self.out = TierCopies(core, tier, self.breaker, generations, verifier, moving_bytes)
        self._generations = generations
        self._core = core
        self._books = books_of(core)
        self._found = FoundBlocks()

    def __repr__(self) -> str:
        return f"TierShared({self.tier!r})"

    # In

    async def look(self, key_space_id: int, groups: list[HashList], until_s: float) -> None:
        """Asks the tier (`probe`) which of the blocks it has, and remembers the answer. Leaves out
        blocks in host memory, on the disk, or found before. Waits for the answer at most until
        `until_s`, a time of time.monotonic. Does nothing while the tier is broken, or while its
        store does not confirm that the key space was not flushed."""
        if not self.breaker.lets_pass:
            return
        if not await self._generations.confirm(self.name, key_space_id, until_s):
            return
        lists: list[tuple[bytes, Words]] = []
        for head, one, at in self._named(key_space_id, groups):
            hashes = rows(one.hashes, at)
            lists.append((head, hashes[~self._found.among(head, hashes, until_s)]))
        num_blocks = max(MAX_PROBED, sum(len(hashes) for _, hashes in lists))
        keys: list[bytes] = []
        asked: list[tuple[bytes, list[bytes]]] = []
        for head, hashes in lists:
            # If there are too many blocks, ask for the same share of each list: a hit needs blocks
            # of all groups.
            hashes = hashes[: len(hashes) * MAX_PROBED // num_blocks]
            if len(hashes):
                asked.append((head, [words.tobytes() for words in hashes]))
                keys += [b"%s/%s" % (head, block_hash) for block_hash in asked[-1][1]]
        if not keys or not self.breaker.take_turn():
            return
        ended: asyncio.Future[tuple[Codes]] = future()
        expected = self._generations.expected(self.name, key_space_id)
        # An answer that is too late for this lookup still serves the next lookup.
        ended.add_done_callback(lambda answer: self._heard(asked, answer))
        deadline_s = max(until_s, time.monotonic() + PROBE_S)
        self.tier.probe(keys, deadline_s, on_loop(ended), expected)
        await asyncio.wait([ended], timeout=max(0.0, until_s - time.monotonic()))

    def has_some(self, key_space_id: int, groups: list[HashList]) -> bool:
        """Returns True if a block of these lists of hashes is neither in host memory nor on the
        disk, so that asking the tier may be of use."""
        return any(map(len, self._absent(key_space_id, groups)))

    def wanted(self, key_space_id: int, groups: list[HashList]) -> list[Int64s]:
        """Returns, for each list of block hashes in `groups`, the positions of the blocks to load
        from this tier: blocks that were found in the tier in the last FOUND_S, and are neither in
        host memory nor on the disk. Returns no positions unless the store has confirmed, a short
        time ago, that the key space was not flushed."""
        now_s = time.monotonic()
        wanted = [np.empty(0, np.int64) for _ in groups]
        if not self._generations.is_confirmed(self.name, key_space_id) or not len(self._found):
            return wanted
        for number, (head, one, at) in enumerate(self._named(key_space_id, groups)):
            wanted[number] = at[self._found.among(head, rows(one.hashes, at), now_s)]
        return wanted

    def lies_here(self, key_space_id: int, groups: list[HashList]) -> list[BoolMask]:
        """Returns, for each list of block hashes in `groups`, a mask: True for each block to load
        from this tier, as `wanted` chooses them."""
        masks = [np.zeros(len(one.hashes), np.bool_) for one in groups]
        for mask, positions in zip(masks, self.wanted(key_space_id, groups), strict=True):
            mask[positions] = True
        return masks

    def begin_up(self, key_space_id: int, groups: list[HashList], now_s: float) -> Move | None:
        """Begins to load the blocks that `wanted` returns: reserves slots in host memory, for as
        many blocks as there is room for. Returns None if no block gets a slot (place in the arena).
        Blocks without a slot stay remembered as found."""
        record, wanted = self._core.catalog.record(key_space_id), self.wanted(key_space_id, groups)
        move = self._books.arrivals.begin(
            key_space_id, groups, wanted, lambda group: record.shape(group).slot_bytes
        )
        if move is not None:
            prefix = self._generations.prefix(self.name, key_space_id)
            _, moving, hashes = self._core.space.index.keys(move.entries)
            for group in np.unique(moving).tolist():
                of_group = (words.tobytes() for words in hashes[moving == group])
                self._found.drop(b"%s/%d" % (prefix, group), of_group)
        return move

    def blocks(self, move: Move) -> Blocks:
        """Describes the blocks of a move. The result is the argument of `Tier.read`."""
        number = move.key_space_id
        prefix = self._generations.prefix(self.name, number)
        expected = self._generations.expected(self.name, number)
        return blocks_of(self._core, move.entries, prefix, expected)

    def end_promotion(self, move: Move, codes: Codes, checks: Seals, now_s: float) -> int:
        """Ends a move of n blocks up to host memory, after the tier has read the blocks. Returns
        the number of damaged blocks; blocks that the tier has evicted don't count.

        `codes`: the result of each block's read, a value of `Read`, uint8 [n].
        `checks`: the checksums of the blocks, uint64 [n]; zeros if the server
            computes no checksums.
        """
        came = self._books.arrivals.end(move, codes == Read.FOUND, checks, now_s)
        self.num_fetched += len(came)
        return int((codes == Read.CORRUPT).sum())

    def _absent(self, key_space_id: int, groups: list[HashList]) -> list[Int64s]:
        """Returns, for each list of block hashes in `groups`, the positions of the blocks that are
        neither in host memory nor on the disk. Blocks on the disk count as absent too while they
        can't be loaded from the disk: while lookups skip the disk, and while a shared store has not
        confirmed that the key space was not flushed. (A read from this tier needs such a
        confirmation only from this tier's own store.)"""
        absent = self._books.arrivals.absent(key_space_id, groups)
        lower, breaker = self._books.lower, self.below
        skips_disk = breaker is not None and not breaker.lets_pass
        if lower is None or skips_disk or not self._generations.are_all_confirmed(key_space_id):
            return absent
        return [
            at[lower.up.find(key_space_id, one, at) == 0] if len(at) else at
            for one, at in zip(groups, absent, strict=True)
        ]

    def _named(
        self, key_space_id: int, groups: list[HashList]
    ) -> Iterator[tuple[bytes, HashList, Int64s]]:
        """Yields three values for each list of block hashes in `groups`: the beginning of its
        blocks' keys in the tier (all but the block's hash), the list, and the positions that
        `_absent` returns for it."""
        prefix = self._generations.prefix(self.name, key_space_id)
        for one, at in zip(groups, self._absent(key_space_id, groups), strict=True):
            yield b"%s/%d" % (prefix, one.group_index), one, at

    def _heard(
        self, asked: list[tuple[bytes, list[bytes]]], answer: "asyncio.Future[tuple[Codes]]"
    ) -> None:
        """Called when the tier has answered a probe (a question which blocks it has). Remembers the
        blocks that the tier has.

        `asked`: the blocks of the probe, as pairs: the part of the keys before the block's hash,
            and the hashes of all blocks whose keys begin with this part.
        `answer`: has the tier's answer: a code for each block, in the order of `asked`. Cancelled
            if the node has closed.
        """
        if answer.cancelled():
            return
        (codes,) = answer.result()
        until_s, begin = time.monotonic() + FOUND_S, 0
        for head, hashes in asked:
            of_head = codes[begin : begin + len(hashes)].tolist()
            begin += len(hashes)
            found = [one for one, code in zip(hashes, of_head, strict=True) if code == Read.FOUND]
            self._found.add(head, found, until_s)

"""Drives a shared tier: asks it for blocks that this node lacks, and loads them; `out` copies
blocks to it.

Always true: blocks are read and written only if the store has just confirmed their generation
(`drive.flushes`), and written only if they match their checksums.
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
from hotkv_server.tiers.drive.tasks import future, on_loop, shared_blocks
from hotkv_server.tiers.protocol import Codes, Read, Seals, SharedBlocks, SharedTier

MAX_PROBED = 1 << 13
"""Most blocks of a lookup that the tier is asked for."""
MAX_FOUND = 1 << 16
"""Most blocks remembered as found."""
NUM_BUCKETS = 16 * MAX_FOUND
"""Of `FoundBlocks`: so many that few other blocks share a bucket with a remembered one."""
PROBE_S = 0.2
"""Least time a probe has. If a lookup waits less, the answer serves the next one."""
FOUND_S = 10.0
"""A block is remembered as found for this time, or until it is read."""


class FoundBlocks:
    """Blocks that probes have found in the tier. A block's key is a `head`, which all blocks of a
    group in a key space share, and its hash. Beyond MAX_FOUND blocks, those of the head that has
    gone longest without a new one are forgotten first.

    Always true: `among` makes Python objects only for blocks that are probably remembered, as a
    lookup may name 131,072.
    """

    def __init__(self) -> None:
        self._until_s: dict[bytes, dict[bytes, float]] = {}
        # Remembered blocks per bucket.
        self._counts = np.zeros(NUM_BUCKETS, np.int32)
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __repr__(self) -> str:
        return f"FoundBlocks({len(self)} of {len(self._until_s)} heads)"

    def among(self, head: bytes, hashes: Words, at_s: float) -> BoolMask:
        """Mask [n] of the blocks remembered beyond `at_s`."""
        mask = np.zeros(len(hashes), np.bool_)
        if (known := self._until_s.get(head)) is None:
            return mask
        buckets = _buckets(hashes.view(np.uint64)[:, 0])
        for row in np.flatnonzero(self._counts[buckets]).tolist():
            mask[row] = known.get(hashes[row].tobytes(), 0.0) > at_s
        return mask

    def add(self, head: bytes, hashes: Iterable[bytes], until_s: float) -> None:
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
    """Bucket of each block, from the first 8 bytes of its hash. A block in an empty bucket is
    not remembered."""
    return begins % np.uint64(NUM_BUCKETS)


class TierShared:
    """See the module.

    `below`: the disk's breaker; None without a disk.
    `num_fetched`: blocks loaded since the start.
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
        """Probes the tier for blocks that are neither here nor already found, and waits for the
        answer until `until_s`. Does nothing if the tier is broken or its store does not confirm."""
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
            # The same share of each list: a hit needs blocks of all groups.
            hashes = hashes[: len(hashes) * MAX_PROBED // num_blocks]
            if len(hashes):
                asked.append((head, [words.tobytes() for words in hashes]))
                keys += [b"%s/%s" % (head, block_hash) for block_hash in asked[-1][1]]
        if not keys or not self.breaker.take_turn():
            return
        ended: asyncio.Future[tuple[Codes]] = future()
        expected = self._generations.expected(self.name, key_space_id)
        ended.add_done_callback(lambda answer: self._heard(asked, answer))
        deadline_s = max(until_s, time.monotonic() + PROBE_S)
        self.tier.probe(keys, deadline_s, on_loop(ended), expected)
        await asyncio.wait([ended], timeout=max(0.0, until_s - time.monotonic()))

    def must_promote(self, key_space_id: int, groups: list[HashList]) -> bool:
        """Asking the tier may be of use."""
        return any(map(len, self._absent(key_space_id, groups)))

    def wanted(self, key_space_id: int, groups: list[HashList]) -> list[Int64s]:
        """For each list, positions of the blocks to load: those found in the tier and absent
        here; none unless the store has recently confirmed the key space's generation."""
        now_s = time.monotonic()
        wanted = [np.empty(0, np.int64) for _ in groups]
        if not self._generations.is_confirmed(self.name, key_space_id) or not len(self._found):
            return wanted
        for number, (head, one, at) in enumerate(self._named(key_space_id, groups)):
            wanted[number] = at[self._found.among(head, rows(one.hashes, at), now_s)]
        return wanted

    def lies_here(self, key_space_id: int, groups: list[HashList]) -> list[BoolMask]:
        """`wanted` as masks."""
        masks = [np.zeros(len(one.hashes), np.bool_) for one in groups]
        for mask, positions in zip(masks, self.wanted(key_space_id, groups), strict=True):
            mask[positions] = True
        return masks

    def begin_up(self, key_space_id: int, groups: list[HashList], now_s: float) -> Move | None:
        """Reserves slots for the blocks of `wanted`, as far as there is room; None if there is
        none. The others stay remembered."""
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

    def blocks(self, move: Move) -> SharedBlocks:
        number = move.key_space_id
        prefix = self._generations.prefix(self.name, number)
        expected = self._generations.expected(self.name, number)
        return shared_blocks(self._core, move.entries, prefix, expected)

    def end_promotion(self, move: Move, codes: Codes, checks: Seals, now_s: float) -> int:
        """Ends a move that the tier has read; returns how many blocks were damaged. Blocks that
        the tier has evicted do not count. `checks`: from `tasks.checksums`."""
        came = self._books.arrivals.end(move, codes == Read.FOUND, checks, now_s)
        self.num_fetched += len(came)
        return int((codes == Read.CORRUPT).sum())

    def _absent(self, key_space_id: int, groups: list[HashList]) -> list[Int64s]:
        """For each list, positions of the blocks neither in host memory nor on the disk. Blocks
        on the disk count as absent while it is skipped, or while a shared store has not
        confirmed: a read from this tier needs only this store's confirmation.
        """
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
        """Each list with the head of its keys and its `_absent` positions."""
        prefix = self._generations.prefix(self.name, key_space_id)
        for one, at in zip(groups, self._absent(key_space_id, groups), strict=True):
            yield b"%s/%d" % (prefix, one.group_index), one, at

    def _heard(
        self, asked: list[tuple[bytes, list[bytes]]], answer: "asyncio.Future[tuple[Codes]]"
    ) -> None:
        """Remembers what a probe has found. `answer`: codes in the order of `asked`; cancelled
        if the node has closed."""
        if answer.cancelled():
            return
        (codes,) = answer.result()
        until_s, begin = time.monotonic() + FOUND_S, 0
        for head, hashes in asked:
            of_head = codes[begin : begin + len(hashes)].tolist()
            begin += len(hashes)
            found = [one for one, code in zip(hashes, of_head, strict=True) if code == Read.FOUND]
            self._found.add(head, found, until_s)

"""Decides which blocks are written to the disk tier, under a budget of bytes per day.

Disks wear, and most blocks are never requested again. So the gate (`WriteGate`) admits only a share
of the chains. A chain is the blocks of a sequence; it is admitted whole, because a hit ends at the
first missing block. The gate computes the share from the rate of offered bytes and the rest of the
budget. It reads the hash of one of the chain's first blocks (EARLY_TOKENS) as a number from 0 to 1,
and admits the chain if the number is below the share. So all chains that begin with the same blocks
are admitted or refused together. A block that was refused is admitted when it is offered again,
unless such blocks alone would already spend the budget too fast.

Always true:
- in any 24 hours the gate admits at most the budget, except for two small excesses: the blocks of
  one chain in one call, and the bytes by which blocks exceeded their estimated size (`add`). The
  writes of earlier servers count too, as far as they were saved (`written`, `recall`);
- the gate leaves no gaps: when a block is offered for the first time, the gate refuses it if the
  block before it in the chain is in host memory, but neither on the disk nor admitted.

Why the gate admits a share of the chains: on the traces of docs/tiers.md ("What is written to the
disk"), another kind of gate, which admits blocks only when they are offered for the second time,
lost up to 40 % of the hits.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.table import Words
from hotkv_server.cache.table.index import Keys
from hotkv_server.cache.values import BoolMask, Int64s

DAY_S = 86_400.0
SLOT_S = 300.0
"""Length of the time slots in which `_Day` counts written bytes."""
SPENDING_S = 6 * 3600.0
"""`WriteGate` spends the rest of the budget as if it had to last for this time."""
DEMAND_S = 600.0
"""Time constant of the exponentially weighted rates of offered bytes (`_Rate`)."""
EARLY_TOKENS = 8192
"""The hash of the block that contains a chain's token 8192 decides whether the chain is admitted.
In a shorter chain, the hash of the last block decides. So chains that differ only after token 8192
and its block get the same answer."""
MAX_REMEMBERED = 1 << 22
"""Most refused blocks that a `WriteGate` with a budget remembers, at 4 bytes each."""


@dataclass(frozen=True, slots=True)
class Offered:
    """The n blocks that are offered to `WriteGate`, which decides which of them are written to the
    disk. Blocks of the same chain (sequence of blocks) follow each other.

    `keys` uint64 [n]: the blocks' keys in the index. A key includes the number of the KV cache
        group.
    `hashes` uint32 [n, 8]: the block hashes.
    `num_bytes` [n]: sizes of the blocks' places on the disk.
    `ends_tokens` [n]: number of tokens in the chain up to the end of the block.
    `begins` [n]: True if the block does not continue the chain of the block in the row before.

    `follows` and `has_gap` are valid only in rows with `begins`. They describe the block before
    this block in its chain, and are both False if host memory does not have that block:

    `follows` [n]: True if that block is on the disk, is being moved there, or was admitted shortly
        before.
    `has_gap` [n]: True if host memory has that block, but `follows` is False.
    """

    keys: Keys
    hashes: Words
    num_bytes: Int64s
    ends_tokens: Int64s
    begins: BoolMask
    follows: BoolMask
    has_gap: BoolMask


class WriteGate:
    """Decides which blocks are written to the disk, so that a budget of bytes per day lasts; see
    the module.

    `bytes_per_day`: the budget; None: no limit, so all blocks are admitted.
    """

    def __init__(self, bytes_per_day: int | None) -> None:
        self._written = _Day()
        # The rates at which two kinds of bytes are offered. `_sampled`: bytes of blocks that a hash
        # admitted or refused. `_sure`: bytes of blocks that were admitted without regard to their
        # hash.
        self._sampled, self._sure = _Rate(), _Rate()
        self.set_budget(bytes_per_day)

    def set_budget(self, bytes_per_day: int | None) -> None:
        """Changes the budget of bytes per day; None for no limit. The writes of the last 24 hours
        count in the new budget. The gate forgets which blocks it has refused."""
        self._budget = math.inf if bytes_per_day is None else bytes_per_day
        size = 1 if bytes_per_day is None else MAX_REMEMBERED
        self._refused = np.zeros(size, np.uint32)

    def __repr__(self) -> str:
        return f"WriteGate({self._budget} bytes a day, {self._written.total} written)"

    @property
    def budget_bytes(self) -> int:
        """Most bytes that may be written to the disk in 24 hours; 0 for no limit."""
        return 0 if math.isinf(self._budget) else int(self._budget)

    def left_bytes(self, now_s: float) -> float:
        """Returns the bytes that may still be written to the disk now: the budget minus the writes
        of the last 24 hours. Infinite without a budget."""
        self._written.forget(now_s)
        return max(0.0, self._budget - self._written.total)

    def add(self, num_bytes: int, now_s: float) -> None:
        """Counts written bytes that `admit` has not counted, because the blocks needed larger
        places than `admit` assumed. A negative `num_bytes` means that `admit` has counted bytes
        that are not written after all; they are subtracted from the newest time slot."""
        self._written.add(num_bytes, now_s)

    def written(self, now_s: float) -> list[tuple[float, int]]:
        """Returns the writes of the last 24 hours, the oldest first, as pairs of age and bytes. The
        age is in seconds. It is counted from the start of a time slot, so it may be up to SLOT_S
        too high."""
        self._written.forget(now_s)
        return [(now_s - begun_s, num_bytes) for begun_s, num_bytes in self._written.slots]

    def recall(self, written: Iterable[tuple[float, int]], now_s: float) -> None:
        """Adds the writes of an earlier server to the count. `written`: pairs of age and bytes, as
        the method `written` returned them in that server. If the clock was set back, an age may be
        negative (a time in the future); it counts as 0."""
        self._written.recall([(now_s - max(0.0, age_s), size) for age_s, size in written])
        self._written.forget(now_s)

    def share(self, now_s: float) -> float:
        """Returns the share of new chains (sequences of blocks) that are admitted for writing to
        the disk at present, 0 to 1. Call it only if the writes per day are limited."""
        wanted = self._wanted_per_s(now_s) - self._sure.per_s(now_s)
        sampled = self._sampled.per_s(now_s)
        return min(1.0, max(0.0, wanted) / sampled) if sampled > 0 else 1.0

    def _wanted_per_s(self, now_s: float) -> float:
        """Returns the rate at which the budget of disk writes should be spent now, in bytes per
        second."""
        return self.left_bytes(now_s) / SPENDING_S

    def admit(self, offered: Offered, now_s: float) -> BoolMask:
        """Decides which of the n offered blocks to write to the disk. Returns a mask [n] of the
        blocks to write, and counts their bytes as written."""
        if math.isinf(self._budget):
            self._written.add(int(offered.num_bytes.sum()), now_s)
            return np.ones(len(offered.keys), np.bool_)
        admitted = np.zeros(len(offered.keys), np.bool_)
        at, tags = self._tags(offered.keys)
        is_again: BoolMask = self._refused[at] == tags
        parts = np.append(np.flatnonzero(offered.begins), len(offered.keys)).tolist()
        for begin, end in pairwise(parts):
            if self.left_bytes(now_s) <= 0:
                break
            rows = slice(begin, end)
            taken = slice(begin, begin + self._num_taken(offered, rows, is_again[rows], now_s))
            admitted[taken] = True
            self._written.add(int(offered.num_bytes[taken].sum()), now_s)
        self._refused[at[~admitted]] = tags[~admitted]
        return admitted

    def _num_taken(self, offered: Offered, rows: slice, is_again: BoolMask, now_s: float) -> int:
        """Returns how many of the offered blocks of a chain (blocks of a sequence) to admit,
        counted from the first offered block. If the chain is admitted, these are all its blocks.
        Otherwise these are the leading blocks that the gate has refused before; none if such blocks
        would spend the budget too fast.

        `rows`: the rows of these blocks in `offered`.
        `is_again`: for each row, True if the gate has refused the block before.
        """
        ends, sizes = offered.ends_tokens[rows], offered.num_bytes[rows]
        num_rows, num_again = len(ends), 0
        if self._sure.per_s(now_s) <= self._wanted_per_s(now_s):
            num_again = num_rows if is_again.all() else int(np.argmin(is_again))
        goes_on = num_again > 0 or bool(offered.follows[rows.start])
        if num_again == num_rows or (offered.has_gap[rows.start] and not goes_on):
            taken = sure = num_again
        elif goes_on and ends[num_again] > EARLY_TOKENS:
            taken = sure = num_rows
        else:
            early = min(int(np.searchsorted(ends, EARLY_TOKENS)), num_rows - 1)
            self._sampled.add(int(sizes[num_again:].sum()), now_s)
            # The hash as a number in [0, 1). Over all hashes it is uniformly distributed; equal
            # hashes give equal numbers.
            number = int(offered.hashes[rows.start + early, :2].view(np.uint64)[0]) / 2.0**64
            is_chosen = number < self.share(now_s)
            taken, sure = num_rows if is_chosen else num_again, num_again
        self._sure.add(int(sizes[:sure].sum()), now_s)
        return taken

    def _tags(self, keys: Keys) -> tuple[Keys, NDArray[np.uint32]]:
        """Returns, for each key, its index in the table of refused blocks, and the tag that
        represents the key in this table (never 0)."""
        places: Keys = keys & np.uint64(len(self._refused) - 1)
        return places, (keys >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


class _Day:
    """Counts the bytes written in the last 24 hours, in time slots of SLOT_S seconds. A slot begins
    with its first write.

    `slots`: pairs of the time when a slot began and the bytes written in it; the oldest first.
    """

    def __init__(self) -> None:
        self.slots: deque[tuple[float, int]] = deque()
        self.total = 0

    def add(self, num_bytes: int, now_s: float) -> None:
        if not self.slots or (num_bytes >= 0 and now_s >= self.slots[-1][0] + SLOT_S):
            self.slots.append((now_s, 0))
        begun_s, before = self.slots.pop()
        # Bytes of a time slot must not be negative: the next server would refuse the saved counts
        # (`recall`).
        num_bytes = max(num_bytes, -before)
        self.slots.append((begun_s, before + num_bytes))
        self.total += num_bytes

    def recall(self, slots: list[tuple[float, int]]) -> None:
        """Adds time slots in which an earlier server has counted written bytes, in the form of
        `slots`."""
        self.slots = deque(sorted([*self.slots, *slots]))
        self.total += sum(num_bytes for _, num_bytes in slots)

    def forget(self, now_s: float) -> None:
        """Drops the time slots (with their counts of written bytes) in which all writes are older
        than a day."""
        while self.slots and self.slots[0][0] + SLOT_S + DAY_S <= now_s:
            self.total -= self.slots.popleft()[1]


class _Rate:
    """The exponentially weighted rate of bytes that are offered for writing to the disk, with the
    time constant DEMAND_S."""

    def __init__(self) -> None:
        self._sum = self._begun_s = self._last_s = 0.0

    def add(self, num_bytes: int, now_s: float) -> None:
        if not self._sum:
            self._begun_s = self._last_s = now_s
        self._sum = self._sum * math.exp((self._last_s - now_s) / DEMAND_S) + num_bytes
        self._last_s = now_s

    def per_s(self, now_s: float) -> float:
        """Returns the rate in bytes per second. Soon after the first bytes (long before DEMAND_S
        have passed), the rate is about the mean since the first bytes, but at least over a minute.
        """
        age_s = max(60.0, now_s - self._begun_s)
        left = self._sum * math.exp((self._last_s - now_s) / DEMAND_S)
        return left / (DEMAND_S * -math.expm1(-age_s / DEMAND_S))

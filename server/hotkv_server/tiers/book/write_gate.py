"""Decides which blocks are written to the disk tier, under a budget of bytes per day.

Disks wear, and most blocks are never requested again. The gate admits whole chains (the blocks of a
sequence), because a chain is useful only up to its first missing block. The hash of an early block
decides, so all chains with that block get the same answer. A refused block is admitted the second
time that it is offered. The share of admitted chains is computed from the rate of offered bytes and
the rest of the budget.

Always true:
- in any 24 hours the gate admits at most the budget and one batch of one chain, plus the bytes by
  which blocks exceeded their estimate (`add`). Writes of earlier servers count if they were noted
  (`written`, `recall`);
- a block is refused the first time that it is offered if the block before it in its sequence is in
  host memory but not on the disk.

Source of the rule: measurements in docs/tiers.md ("What is written"). Admission by second touch
alone loses up to .4 of the hits there.
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
"""The bytes written in a day are counted in slots of this length."""
SPENDING_S = 6 * 3600.0
"""The gate spends the rest of the budget as if it had to last for this time."""
DEMAND_S = 600.0
"""Time constant for the rates of offered bytes."""
EARLY_TOKENS = 8192
"""The last block of a chain that ends within its first 8192 tokens decides for the chain. So chains
that differ only after it get the same answer."""
MAX_REMEMBERED = 1 << 22
"""Most refused blocks to remember, at 4 bytes each."""


@dataclass(frozen=True, slots=True)
class Offered:
    """The n blocks for which the gate decides whether to write them to the disk. The blocks of a
    chain follow each other.

    `keys` uint64 [n]: the blocks' keys in the index. A key includes the number of the KV cache
        group.
    `hashes` uint32 [n, 8]: the block hashes.
    `num_bytes` [n]: sizes of the blocks' places on the disk.
    `ends_tokens` [n]: number of tokens of the chain up to the end of the block.
    `begins` [n]: True if the row does not continue the chain of the row before.

    Valid only in rows with `begins`:

    `follows` [n]: True if the block before it in its chain is on the disk.
    `has_gap` [n]: True if the block before it in its chain is known and not on the disk.
    """

    keys: Keys
    hashes: Words
    num_bytes: Int64s
    ends_tokens: Int64s
    begins: BoolMask
    follows: BoolMask
    has_gap: BoolMask


class WriteGate:
    """Decides which blocks are written to the disk; see the module.

    `bytes_per_day`: the budget; None for no limit.
    `capacity`: most blocks that the tier can hold.
    """

    def __init__(self, bytes_per_day: int | None, capacity: int) -> None:
        self._written = _Day()
        # Bytes whose admission was random, and bytes that were admitted without chance.
        self._sampled, self._sure = _Rate(), _Rate()
        self._num_remembered = min(MAX_REMEMBERED, 1 << max(10, (2 * capacity - 1).bit_length()))
        self.set_budget(bytes_per_day)

    def set_budget(self, bytes_per_day: int | None) -> None:
        """Sets the budget; None for no limit. The writes of the last 24 hours count in it. The gate
        forgets which blocks it has refused."""
        self._budget = math.inf if bytes_per_day is None else bytes_per_day
        size = 1 if bytes_per_day is None else self._num_remembered
        self._refused = np.zeros(size, np.uint32)

    def __repr__(self) -> str:
        return f"WriteGate({self._budget} bytes a day, {self._written.total} written)"

    @property
    def budget_bytes(self) -> int:
        """Bytes of the budget for 24 hours; 0 for no limit."""
        return 0 if math.isinf(self._budget) else int(self._budget)

    def left_bytes(self, now_s: float) -> float:
        """Returns the bytes of the budget that were not spent in the last 24 hours; infinite
        without a budget."""
        self._written.forget(now_s)
        return max(0.0, self._budget - self._written.total)

    def add(self, num_bytes: int, now_s: float) -> None:
        """Counts bytes that were written beyond the size with which `admit` counted the blocks."""
        self._written.add(num_bytes, now_s)

    def written(self, now_s: float) -> list[tuple[float, int]]:
        """Returns the writes of the last 24 hours, the oldest first: their age in seconds, at most
        SLOT_S too high, and their bytes."""
        self._written.forget(now_s)
        return [(now_s - begun_s, num_bytes) for begun_s, num_bytes in self._written.slots]

    def recall(self, written: Iterable[tuple[float, int]], now_s: float) -> None:
        """Also counts the writes of an earlier server, as its `written` returned them. Writes with
        a time in the future count as of now."""
        self._written.recall([(now_s - max(0.0, age_s), size) for age_s, size in written])
        self._written.forget(now_s)

    def share(self, now_s: float) -> float:
        """Returns the share of new chains that is admitted now, 0 to 1."""
        if math.isinf(self._budget):
            return 1.0
        wanted = self._wanted_per_s(now_s) - self._sure.per_s(now_s)
        sampled = self._sampled.per_s(now_s)
        return min(1.0, max(0.0, wanted) / sampled) if sampled > 0 else 1.0

    def _wanted_per_s(self, now_s: float) -> float:
        """Returns the rate at which to spend the budget, in bytes per second."""
        return self.left_bytes(now_s) / SPENDING_S

    def admit(self, offered: Offered, now_s: float) -> BoolMask:
        """Returns a mask [n] of the blocks to write, and counts their bytes as written."""
        if math.isinf(self._budget):
            self._written.add(int(offered.num_bytes.sum()), now_s)
            return np.ones(len(offered.keys), np.bool_)
        admitted = np.zeros(len(offered.keys), np.bool_)
        is_again = self._is_remembered(offered.keys)
        parts = np.append(np.flatnonzero(offered.begins), len(offered.keys)).tolist()
        for begin, end in pairwise(parts):
            if self.left_bytes(now_s) <= 0:
                break
            rows = slice(begin, end)
            taken = slice(begin, begin + self._num_taken(offered, rows, is_again[rows], now_s))
            admitted[taken] = True
            self._written.add(int(offered.num_bytes[taken].sum()), now_s)
        self._remember(offered.keys[~admitted])
        return admitted

    def _num_taken(self, offered: Offered, rows: slice, is_again: BoolMask, now_s: float) -> int:
        """Returns how many blocks of a part of a chain to admit, from the first on: either all, or
        only the first blocks that are offered for the second time.

        `rows`: the part's rows in `offered`. `is_again`: mask of the blocks offered again.
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
            is_chosen = _uniform(offered.hashes[rows.start + early]) < self.share(now_s)
            taken, sure = num_rows if is_chosen else num_again, num_again
        self._sure.add(int(sizes[:sure].sum()), now_s)
        return taken

    def _is_remembered(self, keys: Keys) -> BoolMask:
        at, tags = self._tags(keys)
        remembered: BoolMask = self._refused[at] == tags
        return remembered

    def _remember(self, keys: Keys) -> None:
        at, tags = self._tags(keys)
        self._refused[at] = tags

    def _tags(self, keys: Keys) -> tuple[Keys, NDArray[np.uint32]]:
        """Returns for each key its index in the table of refused blocks, and the tag that stands
        for the key in the table (never 0)."""
        places: Keys = keys & np.uint64(len(self._refused) - 1)
        return places, (keys >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


class _Day:
    """Counts the bytes written in the last 24 hours, in slots of SLOT_S seconds. A slot begins at
    its first write.

    `slots`: pairs of the begin of a slot and its bytes.
    """

    def __init__(self) -> None:
        self.slots: deque[tuple[float, int]] = deque()
        self.total = 0

    def add(self, num_bytes: int, now_s: float) -> None:
        if not self.slots or now_s >= self.slots[-1][0] + SLOT_S:
            self.slots.append((now_s, 0))
        begun_s, before = self.slots.pop()
        self.slots.append((begun_s, before + num_bytes))
        self.total += num_bytes

    def recall(self, slots: list[tuple[float, int]]) -> None:
        """Adds slots, as pairs of their begin and their bytes, to those counted already."""
        self.slots = deque(sorted([*self.slots, *slots]))
        self.total += sum(num_bytes for _, num_bytes in slots)

    def forget(self, now_s: float) -> None:
        """Drops slots whose writes are all older than a day."""
        while self.slots and self.slots[0][0] + SLOT_S + DAY_S <= now_s:
            self.total -= self.slots.popleft()[1]


class _Rate:
    """An exponentially weighted rate of bytes, with the time constant DEMAND_S."""

    def __init__(self) -> None:
        self._sum = self._begun_s = self._last_s = 0.0

    def add(self, num_bytes: int, now_s: float) -> None:
        if not self._sum:
            self._begun_s = self._last_s = now_s
        self._sum = self._sum * math.exp((self._last_s - now_s) / DEMAND_S) + num_bytes
        self._last_s = now_s

    def per_s(self, now_s: float) -> float:
        """Returns the rate in bytes per second. Soon after a start, the rate is the mean since the
        start, over at least one minute."""
        age_s = max(60.0, now_s - self._begun_s)
        left = self._sum * math.exp((self._last_s - now_s) / DEMAND_S)
        return left / (DEMAND_S * -math.expm1(-age_s / DEMAND_S))


def _uniform(words: Words) -> float:
    """Returns a number in [0, 1) computed from a block hash, uint32 [8]."""
    return float(int(words[0]) | int(words[1]) << 32) / 2.0**64

"""Decides which blocks are written to the disk, under a budget of bytes per day.

Disks wear, and most blocks are never requested again. So a share of the *chains*, a prompt's
blocks, is admitted: whole, as a hit ends at the first missing block. One early block's hash, read
as a number from 0 to 1, is compared with the share, so chains with the same beginning agree. A
refused block is admitted when offered again, unless such blocks alone spend the budget too fast.
(Admitting only these lost up to 40 % of the hits: docs/tiers.md.)

Always true:
- in 24 hours at most the budget is written, by earlier servers too, except for a chain in one call
  and blocks above their estimated size (`add`);
- no gaps: a new block is refused if its parent is in host memory, but neither on the disk nor
  admitted.
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
"""Length of `_Day`'s time slots."""
SPENDING_S = 6 * 3600.0
"""The rest of the budget is spent over this time."""
DEMAND_S = 600.0
"""Time constant of `_Rate`."""
EARLY_TOKENS = 8192
"""The block with this token of the chain decides, or the last if it is shorter."""
MAX_REMEMBERED = 1 << 22
"""Refused blocks, at 4 bytes each."""


@dataclass(frozen=True, slots=True)
class Offered:
    """n blocks, those of a chain in a row.

    `keys` [n]: in the index, with the group.
    `hashes` [n, 8]: block hashes.
    `num_bytes` [n]: of the places.
    `ends_tokens` [n]: tokens of the chain up to the block's end.
    `begins` [n]: the row does not continue the one before. The next two are valid only then:
    `follows` [n]: the parent is on the disk, moving there, or just admitted.
    `has_gap` [n]: the parent is in host memory, but does not follow.
    """

    keys: Keys
    hashes: Words
    num_bytes: Int64s
    ends_tokens: Int64s
    begins: BoolMask
    follows: BoolMask
    has_gap: BoolMask


class WriteGate:
    """See the module. `bytes_per_day`: None: all blocks are admitted."""

    def __init__(self, bytes_per_day: int | None) -> None:
        self._written = _Day()
        # Rates of offered bytes: judged by a hash, and admitted whatever the hash.
        self._sampled, self._sure = _Rate(), _Rate()
        self.set_budget(bytes_per_day)

    def set_budget(self, bytes_per_day: int | None) -> None:
        """Past writes count in the new budget; refusals are forgotten."""
        self._budget = math.inf if bytes_per_day is None else bytes_per_day
        size = 1 if bytes_per_day is None else MAX_REMEMBERED
        self._refused = np.zeros(size, np.uint32)

    def __repr__(self) -> str:
        return f"WriteGate({self._budget} bytes a day, {self._written.total} written)"

    @property
    def budget_bytes(self) -> int:
        """0 for no limit."""
        return 0 if math.isinf(self._budget) else int(self._budget)

    def left_bytes(self, now_s: float) -> float:
        """What may still be written now; infinite without a budget."""
        self._written.forget(now_s)
        return max(0.0, self._budget - self._written.total)

    def add(self, num_bytes: int, now_s: float) -> None:
        """Corrects `admit`; negative for bytes that are not written."""
        self._written.add(num_bytes, now_s)

    def written(self, now_s: float) -> list[tuple[float, int]]:
        """(age in seconds, bytes) of the last 24 hours' writes, oldest first. An age is up to
        SLOT_S too high."""
        self._written.forget(now_s)
        return [(now_s - begun_s, num_bytes) for begun_s, num_bytes in self._written.slots]

    def recall(self, written: Iterable[tuple[float, int]], now_s: float) -> None:
        """Counts an earlier server's `written`. A negative age, of a clock set back, is 0."""
        self._written.recall([(now_s - max(0.0, age_s), size) for age_s, size in written])
        self._written.forget(now_s)

    def share(self, now_s: float) -> float:
        """Share of new chains admitted at present, 0 to 1. Only with a budget."""
        wanted = self._wanted_per_s(now_s) - self._sure.per_s(now_s)
        sampled = self._sampled.per_s(now_s)
        return min(1.0, max(0.0, wanted) / sampled) if sampled > 0 else 1.0

    def _wanted_per_s(self, now_s: float) -> float:
        return self.left_bytes(now_s) / SPENDING_S

    def admit(self, offered: Offered, now_s: float) -> BoolMask:
        """Mask [n] of the blocks to write, whose bytes count as written."""
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
        """Blocks of a chain to admit, from the first: all, those refused before, or none.
        `is_again`: refused before, for each of `rows`.
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
            # The hash as a number in [0, 1), uniform over all hashes.
            number = int(offered.hashes[rows.start + early, :2].view(np.uint64)[0]) / 2.0**64
            is_chosen = number < self.share(now_s)
            taken, sure = num_rows if is_chosen else num_again, num_again
        self._sure.add(int(sizes[:sure].sum()), now_s)
        return taken

    def _tags(self, keys: Keys) -> tuple[Keys, NDArray[np.uint32]]:
        """Each key's index in the table of refused blocks, and its tag there, never 0."""
        places: Keys = keys & np.uint64(len(self._refused) - 1)
        return places, (keys >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


class _Day:
    """Bytes written in the last 24 hours.

    `slots`: (time of its first write, bytes) of each time slot, oldest first.
    """

    def __init__(self) -> None:
        self.slots: deque[tuple[float, int]] = deque()
        self.total = 0

    def add(self, num_bytes: int, now_s: float) -> None:
        if not self.slots or (num_bytes >= 0 and now_s >= self.slots[-1][0] + SLOT_S):
            self.slots.append((now_s, 0))
        begun_s, before = self.slots.pop()
        # The next server would refuse to `recall` negative bytes.
        num_bytes = max(num_bytes, -before)
        self.slots.append((begun_s, before + num_bytes))
        self.total += num_bytes

    def recall(self, slots: list[tuple[float, int]]) -> None:
        self.slots = deque(sorted([*self.slots, *slots]))
        self.total += sum(num_bytes for _, num_bytes in slots)

    def forget(self, now_s: float) -> None:
        while self.slots and self.slots[0][0] + SLOT_S + DAY_S <= now_s:
            self.total -= self.slots.popleft()[1]


class _Rate:
    """Exponentially weighted rate of bytes."""

    def __init__(self) -> None:
        self._sum = self._begun_s = self._last_s = 0.0

    def add(self, num_bytes: int, now_s: float) -> None:
        if not self._sum:
            self._begun_s = self._last_s = now_s
        self._sum = self._sum * math.exp((self._last_s - now_s) / DEMAND_S) + num_bytes
        self._last_s = now_s

    def per_s(self, now_s: float) -> float:
        """Soon after the first bytes, their mean over at least a minute."""
        age_s = max(60.0, now_s - self._begun_s)
        left = self._sum * math.exp((self._last_s - now_s) / DEMAND_S)
        return left / (DEMAND_S * -math.expm1(-age_s / DEMAND_S))

"""Decides which blocks are written to a tier below, under a budget of bytes a day.

Disks wear, and most blocks are never asked for again. The gate admits whole chains, because a chain
is useful up to its first gap. The hash of an early block decides, so all chains with that block get
the same answer; a refused block is admitted when it is offered a second time. The admitted share
follows from the offered bytes and the rest of the budget.

Always true:
- in any 24 hours the gate admits at most the budget and one batch of one chain, plus the bytes by
  which blocks exceeded their estimate (`add`). Writes of earlier servers count as far as they were
  noted (`written`, `recall`);
- a block whose predecessor is not below is refused, unless it was offered before.

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
"""The written bytes of a day are kept in slots of this length."""
SPENDING_S = 6 * 3600.0
"""What is left of the budget would last so long if it were spent evenly."""
DEMAND_S = 600.0
"""Time constant of the rates at which bytes are offered."""
EARLY_TOKENS = 8192
"""Chains that part later than this are taken or refused together: the last block up to here
decides."""
MAX_REMEMBERED = 1 << 22
"""Most refused blocks that are remembered, at 4 bytes each."""


@dataclass(frozen=True, slots=True)
class Offered:
    """Blocks that might be written, one row each, those of a chain one after the other.

    `keys` uint64 [n]: of the index, mixed with the group. `hashes` [n, 8]: words. `num_bytes` [n]:
    of their places. `ends_tokens` [n]: tokens of the chain up to the end of the block. `begins`
    [n]: whether the row before is not the block before it. For such rows: `follows` [n]: whether
    the block before lies below; `has_gap` [n]: whether it is known, and does not.
    """

    keys: Keys
    hashes: Words
    num_bytes: Int64s
    ends_tokens: Int64s
    begins: BoolMask
    follows: BoolMask
    has_gap: BoolMask


class WriteGate:
    """See the module. `bytes_per_day`: the budget; None for no limit. `capacity`: blocks that the
    tier may have."""

    def __init__(self, bytes_per_day: int | None, capacity: int) -> None:
        self._written = _Day()
        # Bytes that were offered and left to chance, and bytes that were taken without.
        self._sampled, self._sure = _Rate(), _Rate()
        self._num_remembered = min(MAX_REMEMBERED, 1 << max(10, (2 * capacity - 1).bit_length()))
        self.set_budget(bytes_per_day)

    def set_budget(self, bytes_per_day: int | None) -> None:
        """Has this budget from now on. What was written in the last 24 hours counts; what was
        refused is forgotten."""
        self._budget = math.inf if bytes_per_day is None else bytes_per_day
        size = 1 if bytes_per_day is None else self._num_remembered
        self._refused = np.zeros(size, np.uint32)

    def __repr__(self) -> str:
        return f"WriteGate({self._budget} bytes a day, {self._written.total} written)"

    @property
    def budget_bytes(self) -> int:
        """The budget of 24 hours; 0 for no limit."""
        return 0 if math.isinf(self._budget) else int(self._budget)

    def left_bytes(self, now_s: float) -> float:
        """What is left of the budget of the last 24 hours; infinite without one."""
        self._written.forget(now_s)
        return max(0.0, self._budget - self._written.total)

    def add(self, num_bytes: int, now_s: float) -> None:
        """Counts bytes that blocks take more than they were admitted with."""
        self._written.add(num_bytes, now_s)

    def written(self, now_s: float) -> list[tuple[float, int]]:
        """What was written in the last 24 hours, the oldest first: bytes, each with its age in
        seconds, at most SLOT_S too high."""
        self._written.forget(now_s)
        return [(now_s - begun_s, num_bytes) for begun_s, num_bytes in self._written.slots]

    def recall(self, written: Iterable[tuple[float, int]], now_s: float) -> None:
        """Counts what an earlier server has written as well, as `written` gave it. What seems to be
        of later counts as of now."""
        self._written.recall([(now_s - max(0.0, age_s), size) for age_s, size in written])
        self._written.forget(now_s)

    def share(self, now_s: float) -> float:
        """Returns the share of new chains that is taken now."""
        if math.isinf(self._budget):
            return 1.0
        wanted = self._wanted_per_s(now_s) - self._sure.per_s(now_s)
        sampled = self._sampled.per_s(now_s)
        return min(1.0, max(0.0, wanted) / sampled) if sampled > 0 else 1.0

    def _wanted_per_s(self, now_s: float) -> float:
        """How fast the budget is spent, in bytes per second."""
        return self.left_bytes(now_s) / SPENDING_S

    def admit(self, offered: Offered, now_s: float) -> BoolMask:
        """Which blocks [n] are to be written. Counts their bytes as written."""
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
        """Returns how many blocks to take of one part of a chain, from its first on: those that
        come again, or all."""
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
        """Where keys are remembered, and as what: never 0."""
        places: Keys = keys & np.uint64(len(self._refused) - 1)
        return places, (keys >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


class _Day:
    """Bytes of the last 24 hours, in slots that begin with the first of them."""

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
        """Counts these slots as well."""
        self.slots = deque(sorted([*self.slots, *slots]))
        self.total += sum(num_bytes for _, num_bytes in slots)

    def forget(self, now_s: float) -> None:
        """Drops slots whose last byte may be no younger than a day."""
        while self.slots and self.slots[0][0] + SLOT_S + DAY_S <= now_s:
            self.total -= self.slots.popleft()[1]


class _Rate:
    """A rate that forgets with the time constant DEMAND_S."""

    def __init__(self) -> None:
        self._sum = self._begun_s = self._last_s = 0.0

    def add(self, num_bytes: int, now_s: float) -> None:
        if not self._sum:
            self._begun_s = self._last_s = now_s
        self._sum = self._sum * math.exp((self._last_s - now_s) / DEMAND_S) + num_bytes
        self._last_s = now_s

    def per_s(self, now_s: float) -> float:
        """Bytes per second. After a start: over the time since then, a minute at least."""
        age_s = max(60.0, now_s - self._begun_s)
        left = self._sum * math.exp((self._last_s - now_s) / DEMAND_S)
        return left / (DEMAND_S * -math.expm1(-age_s / DEMAND_S))


def _uniform(words: Words) -> float:
    """Returns a number in [0, 1) that a hash [8] decides."""
    return float(int(words[0]) | int(words[1]) << 32) / 2.0**64

"""What an eviction policy is: an order of coldness over ready entries.

Always true: a policy never decides whether an entry may be evicted (pins do) and never touches the
index. Entries of one call are in chain order, each at most once; the head of a chain is the hotter,
so that leaves are evicted first. Keys are 64-bit and outlive entry numbers: by its key a policy
knows a block that comes back. No clock: `now_s` is passed in and never goes back.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.blocks import NO_RETENTION, Retention

Entries = NDArray[np.uint32]
Keys = NDArray[np.uint64]
Evictable = Callable[[Entries], NDArray[np.bool_]]


class Policy(Protocol):
    """Order of eviction over entry numbers. `keys` uint64 [n] belong to `entries` uint32 [n]."""

    def admit(
        self, entries: Entries, keys: Keys, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        """Blocks became ready: a miss of each that is now answered."""

    def touch(
        self, entries: Entries, keys: Keys, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        """Notes a use of ready entries."""

    def refresh(self, entries: Entries, now_s: float) -> None:
        """Blocks after these in their chain came in. These count as in use, though nobody used
        them."""

    def decline(
        self, keys: Keys, depth: int, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        """Blocks of a chain, in its order, were not stored, since `victims` kept others: a miss of
        each. `depth`: blocks of the chain before them."""

    def allow_keeping(self, allowed: bool) -> None:
        """Whether `victims` may keep anything from now on; at first it may. A policy that may not
        turns at once to what serves best without."""

    def demote(self, entries: Entries, keys: Keys, now_s: float) -> None:
        """Nobody is expected to use these entries again: they are evicted before all others, until
        they are used or refreshed. Skips entries that were never admitted."""

    def forget(self, entries: Entries, keys: Keys, *, evicted: bool) -> None:
        """Entries were removed: `evicted` to make room, or dropped for another reason. Skips
        entries that were never admitted."""

    def sweep(self, slot_bytes: int, count: int, evictable: Evictable) -> Iterator[None]:
        """Does in parts what the next call of `victims` with these arguments would do at once, if
        that is long. May do nothing."""

    def victims(
        self, slot_bytes: int, count: int, evictable: Evictable, *, keep_at_s: float | None = None
    ) -> Entries:
        """Up to `count` evictable entries, coldest first; as many as there are.

        `slot_bytes`: names a queue of its own for each slot size. `evictable`: which of some
        entries may be evicted, of that size. `keep_at_s`: the time now, if the policy
        may name fewer, because it expects that others are used again before the blocks that they
        would make room for; None if it may not.
        """

    def heat(self, entries: Entries) -> NDArray[np.float64]:
        """Orders entries by coldness across slot sizes: the lowest is evicted first. Finite."""

    def last_used_s(self, entries: Entries) -> NDArray[np.float64]:
        """When entries were last used, in seconds of `now_s`."""

    def figures(self) -> dict[str, float]:
        """What the policy has adapted itself to, by names for metrics."""

    def check_invariants(self) -> None:
        """Raises AssertionError if books disagree. Linear in capacity."""

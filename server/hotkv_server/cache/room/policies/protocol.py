"""The interface of an eviction policy: an order of coldness over ready entries.

Always true: a policy never decides whether an entry may be evicted (pins do) and never accesses the
index. Entries of a call are in chain order, each at most once. The head of a chain is hotter, so
that leaves are evicted first. Keys are 64-bit and outlive entry numbers: a policy recognizes a
returning block by its key. No clock: `now_s` is passed in and never goes back.
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
        """Adds blocks that became ready. Counts as a use of each block, because a block is stored
        after a request has missed it."""

    def touch(
        self, entries: Entries, keys: Keys, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        """Records a use of ready entries."""

    def refresh(self, entries: Entries, now_s: float) -> None:
        """Marks entries as in use without counting a use, because blocks after them in their chain
        became ready."""

    def decline(
        self, keys: Keys, depth: int, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        """Records a miss of blocks that were not stored because they found no room; `victims` may
        have held other blocks back. The blocks are in chain order. `depth`: number of blocks before
        them in the chain."""

    def allow_keeping(self, allowed: bool) -> None:
        """Sets whether `victims` may return fewer entries than can be evicted; at first `victims`
        may. If `allowed` is False, the policy switches at once to its best rule without holding."""

    def demote(self, entries: Entries, keys: Keys, now_s: float) -> None:
        """Marks entries as not expected to be used again. Demoted entries are evicted before all
        others until they are used or refreshed. Skips entries that were never admitted."""

    def hold(self, entries: Entries, until_s: float) -> None:
        """Marks entries as expected to be used by `until_s`. Until then, `victims` with a
        `keep_at_s` does not return them, even if it then returns too few entries. May do
        nothing."""

    def forget(self, entries: Entries, keys: Keys, *, evicted: bool) -> None:
        """Removes entries that were evicted to make room (`evicted`) or dropped for another reason.
        Skips entries that were never admitted."""

    def sweep(self, slot_bytes: int, count: int, evictable: Evictable) -> Iterator[None]:
        """Prepares the next call of `victims` with these arguments: each step of the returned
        iterator does a part of the long work that `victims` would otherwise do at once. The
        iterator may be empty."""

    def victims(
        self, slot_bytes: int, count: int, evictable: Evictable, *, keep_at_s: float | None = None
    ) -> Entries:
        """Returns up to `count` evictable entries, coldest first; fewer only if fewer entries are
        evictable, or if `keep_at_s` allows it.

        slot_bytes: selects a queue; each slot size has its own.
        evictable: tells which entries may be evicted and have that size.
        keep_at_s: the current time, if the policy may hold entries back that it expects to be used
            before the blocks that would replace them. None if the policy may not hold entries back.
        """

    def heat(self, entries: Entries) -> NDArray[np.float64]:
        """Returns values that order entries across slot sizes: the lowest is evicted first.
        Finite."""

    def last_used_s(self, entries: Entries) -> NDArray[np.float64]:
        """Returns when entries were last used, in seconds of `now_s`."""

    def figures(self) -> dict[str, float]:
        """Returns the values that the policy has adapted, by metric name."""

    def check_invariants(self) -> None:
        """Raises AssertionError if books disagree. Takes time linear in the capacity."""

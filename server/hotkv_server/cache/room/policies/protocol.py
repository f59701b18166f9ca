"""The interface of an eviction policy: it orders ready entries by how soon they should be evicted.

Always true: a policy only orders entries (blocks, by their numbers in the block table). Whether an
entry may be evicted depends on its pins; the caller passes a function that decides this
(`Evictable`). A policy never accesses the index. The entries of a call are in the order of their
prompt, each at most once. The first block of a prompt is hotter than the last, so that the end of a
prompt is evicted first. Keys have 64 bits and stay valid after an eviction, unlike entry numbers:
if a block was evicted and is stored again, the policy recognizes the block by its key. No clock:
callers pass the current time as `now_s`, which never goes back.

A policy may hold entries back: it then refuses to evict entries that it expects to be used soon,
so that a new block finds no room and is not stored.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.blocks import NO_RETENTION, Retention

Entries = NDArray[np.uint32]
Keys = NDArray[np.uint64]
Evictable = Callable[[Entries], NDArray[np.bool_]]
"""Function that gets entries (blocks, by their numbers) and returns a mask of those that may be
evicted."""


class Policy(Protocol):
    """Orders entries (blocks) for eviction.

    Arguments of several methods: `keys` (uint64) are the keys of `entries` (uint32). `retention` is
    the request's wish to retain the blocks: to count a use as 2^`priority` uses, and to count the
    blocks as in use for `ttl_s` seconds. A policy may ignore it. `now_s` is the current time.
    """

    def admit(
        self, entries: Entries, keys: Keys, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        """Adds entries (blocks) that became ready, and records a use of each block: the use by the
        request for which the block was computed."""

    def touch(
        self, entries: Entries, keys: Keys, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        """Records a use of each of these entries (ready blocks)."""

    def refresh(self, entries: Entries, now_s: float) -> None:
        """Makes entries (blocks) count as used just now, but does not raise their number of uses.
        Called when a block became ready, for the blocks before it in its prompt."""

    def decline(
        self, keys: Keys, depth: int, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        """Records that a request used blocks which were not stored, because there was no room for
        them. One reason can be that the policy's method `victims` offered too few blocks for
        eviction.

        keys: the blocks, in the order of the prompt.
        depth: number of blocks before the first of these blocks in the prompt.
        """

    def allow_keeping(self, allowed: bool) -> None:
        """Sets whether `victims` may hold entries (blocks) back from eviction, that is, return
        fewer entries than can be evicted. It may until the first call of this method. If `allowed`
        is False, the policy switches at once to its best rule that holds no entries back."""

    def demote(self, entries: Entries, keys: Keys, now_s: float) -> None:
        """Marks entries (blocks) that will probably not be used again. Marked entries are evicted
        before all other entries. The mark ends when the entry is used or refreshed. Skips entries
        that were never admitted."""

    def hold(self, entries: Entries, until_s: float) -> None:
        """Marks entries (blocks) as expected to be used before the time `until_s`. Until that time,
        `victims` holds these entries back (does not return them) if its argument `keep_at_s` allows
        that. A policy that holds no entries back does nothing."""

    def forget(self, entries: Entries, keys: Keys, *, evicted: bool) -> None:
        """Removes entries (blocks) that leave the cache. Skips entries that were never admitted.
        `evicted`: True if they were evicted, to make room or by an operator; the policy may then
        remember their keys. False if they were flushed (deleted with all blocks of their key space)
        or dropped."""

    def sweep(self, slot_bytes: int, count: int, evictable: Evictable) -> Iterator[None]:
        """Prepares the next call of `victims` with these arguments. Each step of the returned
        iterator does a part of the long work that `victims` would otherwise do at once. The
        iterator may be empty."""

    def victims(
        self, slot_bytes: int, count: int, evictable: Evictable, *, keep_at_s: float | None = None
    ) -> Entries:
        """Returns up to `count` entries to evict, coldest first; fewer only if fewer entries are
        evictable, or if `keep_at_s` allows it.

        slot_bytes: the slot size of the entries; 0 for any size. A policy may have a queue for each
            value.
        evictable: function that returns which entries may be evicted and have this slot size.
        keep_at_s: the current time, if the policy may hold back entries that it expects to be used
            before the blocks that would replace them. None if the policy may not hold entries back.
        """

    def heat(self, entries: Entries) -> NDArray[np.float64]:
        """Returns the heat of each entry (block), a finite number. It orders entries across slot
        sizes: the entry with the lowest heat is evicted first."""

    def last_used_s(self, entries: Entries) -> NDArray[np.float64]:
        """Returns the time of each entry's last use, in seconds of `now_s`; the end of its time to
        live (`Retention.ttl_s`) if that is later."""

    def figures(self) -> dict[str, float]:
        """Returns figures of the policy by metric name, for example the parameters that it has
        chosen for the present traffic."""

    def check_invariants(self) -> None:
        """Raises AssertionError if the policy's arrays and counts disagree. Takes time linear in
        the capacity."""

"""The interface of an eviction policy: it orders ready blocks, by entry number.

Always true: the caller decides whether an entry may go (`Evictable`); a policy never accesses the
index. The entries of a call are in prompt order, each at most once; a prompt's first block is
hotter than its last. Keys, unlike entry numbers, stay valid after an eviction: a policy recognizes
blocks that return. `now_s` never goes back.

A policy may *hold back* entries that it expects to be used soon; a new block is then not stored.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.blocks import NO_RETENTION, Retention

Entries = NDArray[np.uint32]
Keys = NDArray[np.uint64]
Evictable = Callable[[Entries], NDArray[np.bool_]]
"""Mask of the entries that may go."""


class Policy(Protocol):
    """`retention` is a wish that a policy may ignore: a use counts as 2^`priority` uses, and the
    blocks as in use for `ttl_s`."""

    def admit(
        self, entries: Entries, keys: Keys, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        """Entries that became ready, with a first use."""

    def touch(
        self, entries: Entries, keys: Keys, now_s: float, retention: Retention = NO_RETENTION
    ) -> None: ...

    def refresh(self, entries: Entries, now_s: float) -> None:
        """Counts as used now, without one more use: for the blocks before one that became ready."""

    def decline(
        self, keys: Keys, depth: int, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        """A request used blocks that found no room, perhaps because `victims` held others back.
        `depth`: of the first.
        """

    def allow_keeping(self, allowed: bool) -> None:
        """Whether entries may be held back, as they may until the first call."""

    def demote(self, entries: Entries, keys: Keys, now_s: float) -> None:
        """These go first, until used or refreshed. Skips what was never admitted."""

    def hold(self, entries: Entries, until_s: float) -> None:
        """May hold these back until `until_s`."""

    def forget(self, entries: Entries, keys: Keys, *, evicted: bool) -> None:
        """Skips what was never admitted. `evicted`: the policy may remember the keys; False if
        flushed or dropped."""

    def sweep(self, slot_bytes: int, count: int, evictable: Evictable) -> Iterator[None]:
        """Does, in parts, the long work of `victims` with these arguments. May be empty."""

    def victims(
        self,
        slot_bytes: int,
        count: int,
        evictable: Evictable,
        *,
        refusable_at_s: float | None = None,
    ) -> Entries:
        """Coldest first; fewer than `count` only if no more are evictable, or if some are held
        back.

        slot_bytes: 0 for any. `evictable` compares it; a policy may have a queue for each.
        refusable_at_s: `now_s` if entries may be held back, None if not.
        """

    def heat(self, entries: Entries) -> NDArray[np.float64]:
        """Finite; the lowest goes first, across slot sizes."""

    def last_used_s(self, entries: Entries) -> NDArray[np.float64]:
        """The end of `Retention.ttl_s` if that is later."""

    def figures(self) -> dict[str, float]:
        """By metric name."""

    def check_invariants(self) -> None: ...

"""Ghosts: what is remembered of blocks that were evicted.

A table of fixed size over 64-bit keys; each ghost carries 64 bits that its policy chooses. Always
true: a key has at most one ghost; the oldest are dropped first. Chains of blocks become ghosts
together and should be forgotten together, since a block that is forgotten alone breaks its chain;
so the table has twice the room, and few buckets are full before a ghost's time is over. Two keys of
one bucket with equal tags are taken for each other: one in 2^31, at the cost of a wrong guess of
heat.
"""

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import native
from hotkv_server.cache.room.policies.protocol import Keys

WAYS = 8
ROOM = 2
"""Places for each ghost."""
MULTIPLIER = np.uint64(0x9E37_79B9_7F4A_7C15)
Values = NDArray[np.uint64]


def spread(keys: Keys) -> Keys:
    """Mixes all bits of keys: the high half chooses a bucket, the low half is tag and sample."""
    mixed: Keys = (keys ^ (keys >> np.uint64(31))) * MULTIPLIER
    return mixed ^ (mixed >> np.uint64(29))


class GhostTable:
    """The last `num_ghosts` that were remembered. `tags` [buckets, WAYS] 0 for none, `values` and
    `ages` alike; an age is the number of ghosts before it. `is_lasting`: no ghost is too old, and
    only a full bucket drops its oldest."""

    def __init__(self, num_ghosts: int, *, is_lasting: bool = False) -> None:
        buckets = max(1, -(-ROOM * num_ghosts // WAYS))
        self.num_ghosts = num_ghosts
        self._is_lasting = is_lasting
        self.tags = np.zeros((buckets, WAYS), np.uint32)
        self.values = np.zeros((buckets, WAYS), np.uint64)
        self._ages = np.zeros((buckets, WAYS), np.uint32)
        self._next_age = 1
        self._kernels = native.require("hotkv_server.cache.room.policies.kernels")

    def __len__(self) -> int:
        return int((self.tags != 0).sum())

    def __repr__(self) -> str:
        return f"GhostTable({len(self)}/{self.tags.size} ghosts)"

    def remember(self, keys: Keys, values: Values) -> Values:
        """Adds ghosts, in order; returns the values of those that were dropped for them."""
        if self._next_age + len(keys) >= 1 << 32:
            self._begin_anew()
        gone = np.zeros(len(keys), np.uint64)
        num_gone = int(
            self._kernels.remember(
                self.tags, self.values, self._ages, keys, values, self._next_age, gone
            )
        )
        self._next_age += len(keys)
        return gone[:num_gone]

    def take(self, keys: Keys) -> tuple[NDArray[np.bool_], Values]:
        """Which keys [n] had a ghost, and its value; removes those ghosts."""
        found, values = np.zeros(len(keys), np.bool_), np.zeros(len(keys), np.uint64)
        self._kernels.take(
            self.tags,
            self.values,
            self._ages,
            keys,
            0 if self._is_lasting else self._next_age - self.num_ghosts,
            found,
            values,
        )
        return found, values

    def drop_from(self, tag: int) -> None:
        """Forgets ghosts whose tags are this or higher."""
        gone = self.tags >= tag
        self.tags[gone] = 0
        self._ages[gone] = 0

    def put_back(self, places: NDArray[np.int64], tags: NDArray[np.uint32]) -> None:
        """Takes over tags from the same places of another table, as the oldest ghosts. Ignores
        places that this table has not."""
        known = places < self.tags.size
        self.tags.reshape(-1)[places[known]] = tags[known]
        self._ages.reshape(-1)[places[known]] = 1

    def _begin_anew(self) -> None:
        """Counts ages from the oldest ghost that still matters, once per four thousand million
        ghosts. Lasting ones that are older are the oldest from then on."""
        base = self._next_age - self.num_ghosts - 1
        oldest = (self.tags != 0) & self._is_lasting
        self._ages[:] = np.where(self._ages > base, self._ages - np.uint32(base), oldest)
        self._next_age -= base

    def check_invariants(self) -> None:
        """Raises AssertionError if a tag is twice in a bucket."""
        for bucket in self.tags:
            tags = bucket[bucket != 0]
            assert len(np.unique(tags)) == len(tags), "a key has two ghosts"

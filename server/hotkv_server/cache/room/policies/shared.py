"""Parts that the policies share: ghosts of evicted blocks, queues of victims, demoted entries."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import native
from hotkv_server.cache.room.policies.protocol import Entries, Evictable, Keys

# Ghosts: records of evicted blocks.
#
# A table of fixed size over 64-bit keys; each ghost carries 64 bits that its policy chooses. Always
# true: a key has at most one ghost; the oldest ghosts are dropped first. Chains of blocks become
# ghosts together. They should be dropped together, since dropping a single ghost breaks its chain.
# So the table has twice the room, and few buckets fill up before their ghosts expire. Two keys of
# one bucket with equal tags are mistaken for each other, with odds of 1 in 2^31; the cost is a
# wrong estimate of heat.


WAYS = 8
ROOM = 2
"""Places in the table for each ghost that it should hold."""
MULTIPLIER = np.uint64(0x9E37_79B9_7F4A_7C15)
Values = NDArray[np.uint64]


def spread(keys: Keys) -> Keys:
    """Mixes all bits of keys: the high half selects a bucket, the low half is tag and sample."""
    mixed: Keys = (keys ^ (keys >> np.uint64(31))) * MULTIPLIER
    return mixed ^ (mixed >> np.uint64(29))


class GhostTable:
    """The last `num_ghosts` ghosts: evicted blocks by key, each with a 64-bit value of its policy.

    tags: [buckets, WAYS]; 0 for an empty place.
    values: uint64 [buckets, WAYS].

    `_ages` [buckets, WAYS]: running number of each ghost; higher is newer, 0 for an empty place.
    `is_lasting`: True if ghosts never expire; only a full bucket drops its oldest.
    """

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
        """Adds ghosts in order. Returns the values of the ghosts that were dropped for them."""
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
        """Removes the ghosts of keys. Returns which keys [n] had a ghost, and its value."""
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
        """Drops ghosts with this tag or a higher tag."""
        gone = self.tags >= tag
        self.tags[gone] = 0
        self._ages[gone] = 0

    def put_back(self, places: NDArray[np.int64], tags: NDArray[np.uint32]) -> None:
        """Adds ghosts of an earlier table, given their tags and places (flat indices), as the
        oldest ghosts. Ignores places that this table does not have."""
        known = places < self.tags.size
        self.tags.reshape(-1)[places[known]] = tags[known]
        self._ages.reshape(-1)[places[known]] = 1

    def _begin_anew(self) -> None:
        """Rebases ages to the oldest ghost that still counts; runs once per four thousand million
        ghosts. Lasting ghosts that are older become the oldest."""
        base = self._next_age - self.num_ghosts - 1
        oldest = (self.tags != 0) & self._is_lasting
        self._ages[:] = np.where(self._ages > base, self._ages - np.uint32(base), oldest)
        self._next_age -= base

    def check_invariants(self) -> None:
        """Raises AssertionError if a bucket has a tag twice."""
        for bucket in self.tags:
            tags = bucket[bucket != 0]
            assert len(np.unique(tags)) == len(tags), "a key has two ghosts"


# Queues: victims in rising order of heat, without sorting all entries.
#
# A refill scans entries by number from the place at which the last refill stopped. It ends when it
# has seen enough evictable entries, and queues the coldest share, sorted. A victim costs amortised
# constant work. If a slot size is rare among many entries, a refill scans far: a tenth of a second
# over ten million entries, once for many victims; `sweep` does it in parts before. An entry that
# was used since it was queued has another state and is skipped, so a touch writes only its entry's
# state. An entry that was added later, or was used and is still the coldest, waits for the next
# refill.


SHARE = 16
"""A refill queues the coldest 1/16 of the entries it has seen."""
MIN_QUEUED = 4
"""A refill queues at least this many. Small, because a colder block that comes later waits until
these are evicted."""
SWEEP_ENTRIES = 1 << 17
"""Entry numbers that each part examines."""

Heat = Callable[[Entries], NDArray[np.float64]]
Members = Callable[[int, int], Entries]
"""Returns the entries that belong to a queue in a range of entry numbers (first, stop)."""


class Highest:
    """The highest entry number so far; sweeps end at it."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0

    def add(self, entries: Entries) -> None:
        if len(entries):
            self.number = max(self.number, int(entries.max()))


class ColdQueue:
    """The coldest of the entries that `members(first, stop)` returns, in order of eviction. `state`
    [capacity + 1]: the policy's 64 bits for each entry, which change whenever the entry is used or
    removed."""

    def __init__(
        self, state: NDArray[np.uint64], highest: Highest, members: Members, heat: Heat
    ) -> None:
        self._state = state
        self._highest = highest
        self._members = members
        self._heat = heat
        self._hand = 0
        self._entries: Entries = np.empty(0, np.uint32)
        self._states = np.empty(0, np.uint64)
        # True if a sweep has just found all entries that there are to find.
        self._is_swept = False

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Empties the queue, because the meaning of heat has changed."""
        self._entries, self._states = self._entries[:0], self._states[:0]

    def sweep(self, count: int, evictable: Evictable) -> Iterator[None]:
        """Refills the queue in parts if it has too few entries for `take` with these arguments, so
        that `take` need not refill."""
        head = self._entries[: 4 * count]
        if (
            np.count_nonzero((self._state[head] == self._states[: len(head)]) & evictable(head))
            < count
        ):
            yield from self._refill(count, evictable, [])
        # If it found enough, other calls may have evicted or used some of them between two parts.
        self._is_swept = len(self._entries) < count

    def take(self, count: int, evictable: Evictable, held: Evictable | None = None) -> Entries:
        """Returns the coldest evictable entries, at most `count`. Pinned entries are skipped until
        the next refill.

        held: tells which entries to hold back. Held entries keep their places, and the search ends
            at the first held entry.
        """
        chosen: list[Entries] = []
        missing, refilled, self._is_swept = count, self._is_swept, False
        while missing > 0:
            if len(self._entries) < missing and not refilled:
                # The rest of the queue holds the coldest entries again.
                for _ in self._refill(missing, evictable, chosen):
                    pass
                refilled = True
            head = self._entries[: 2 * missing]
            if not len(head):
                break
            usable = (self._state[head] == self._states[: len(head)]) & evictable(head)
            if held is not None and (staying := usable & held(head)).any():
                places = (usable & ~staying).nonzero()[0][:missing]
                chosen.append(head[places])
                usable[places] = False
                left = np.append(usable, np.ones(len(self._entries) - len(head), np.bool_))
                self._entries, self._states = self._entries[left], self._states[left]
                break
            places = usable.nonzero()[0][:missing]
            chosen.append(head[places])
            # An entry leaves the queue only if it was examined and skipped, or returned.
            used = len(head) if len(places) < missing else int(places[-1]) + 1
            self._entries, self._states = self._entries[used:], self._states[used:]
            missing -= len(places)
        if len(chosen) == 1:
            return chosen[0]
        return np.concatenate(chosen) if chosen else np.empty(0, np.uint32)

    def _refill(self, count: int, evictable: Evictable, chosen: list[Entries]) -> Iterator[None]:
        end = self._highest.number + 1
        parts: list[Entries] = []
        # Use a local hand: another refill may run between two parts, and no entry may be seen
        # twice.
        num_seen, walked, hand = 0, 0, self._hand if self._hand < end else 0
        while walked < end and num_seen < SHARE * count:
            stop = min(hand + SWEEP_ENTRIES, end, hand + end - walked)
            seen, found = self._coldest_of(self._members(hand, stop), count, evictable)
            parts.append(found)
            num_seen += seen
            walked += stop - hand
            hand = stop if stop < end else 0
            yield
        self._hand = hand
        entries = np.concatenate(parts) if len(parts) > 1 else parts[0]
        if chosen:
            entries = entries[~np.isin(entries, np.concatenate(chosen))]
        entries, heat = self._coldest(entries, _kept(num_seen, count))
        self._entries = entries[heat.argsort(kind="stable")]
        self._states = self._state[self._entries]

    def _coldest_of(
        self, entries: Entries, count: int, evictable: Evictable
    ) -> tuple[int, Entries]:
        """Returns how many entries were compared, and the coldest of them that may be evicted."""
        keep = _kept(len(entries), count)
        if len(entries) > 4 * keep:
            # Checks hotter entries only if the colder ones may not be evicted.
            coldest, _ = self._coldest(entries, 2 * keep)
            found = coldest[evictable(coldest)]
            if len(found) >= keep:
                return len(entries), found
        found = entries[evictable(entries)]
        return len(found), found

    def _coldest(self, entries: Entries, count: int) -> tuple[Entries, NDArray[np.float64]]:
        """Returns the `count` coldest of the entries and their heat, in no order."""
        heat = self._heat(entries)
        if len(entries) <= count:
            return entries, heat
        places = heat.argpartition(count)[:count]
        return entries[places], heat[places]


def _kept(num_seen: int, count: int) -> int:
    return max(MIN_QUEUED, count, num_seen // SHARE)


# Demoted entries: evicted before all others until they are used again.
#
# A policy marks a demoted entry in its state and adds it to a `DemotedEntries`, which its `victims`
# asks first. A use writes the state anew and thereby undoes the demotion. Always true: `take` never
# returns an entry whose state has changed since, nor the same entry twice. Memory is bounded by the
# capacity, whatever is demoted and used in turn. A call examines only the entries it was given and
# a few parts of PART_ENTRIES.


LOOKED_ENTRIES = 1 << 14
"""Most entries that a `take` examines. After that many, the skipped entries (pinned, or of other
slot sizes) move behind the other demoted entries."""
PART_ENTRIES = 1 << 12
COMPACTED_PARTS = 2
"""Parts that are compacted for each part that is added, so that old parts shrink faster than new
parts come."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Entries [n], at most PART_ENTRIES, with their states and numbers at the time of their
    addition."""

    entries: Entries
    states: NDArray[np.uint64]
    numbers: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.entries)

    def at(self, chosen: NDArray[np.bool_]) -> "_Part":
        return _Part(self.entries[chosen], self.states[chosen], self.numbers[chosen])

    def __add__(self, other: "_Part") -> "_Part":
        return _Part(
            np.concatenate((self.entries, other.entries)),
            np.concatenate((self.states, other.states)),
            np.concatenate((self.numbers, other.numbers)),
        )


class DemotedEntries:
    """Demoted entries with their states, in order of demotion. `state` [capacity + 1]: the policy's
    64 bits for each entry, which change whenever the entry is used or removed."""

    def __init__(self, state: NDArray[np.uint64]) -> None:
        self._state = state
        # By entry: the number of its last addition. A page gets memory with the first demotion of
        # an entry on it.
        self._last = np.zeros(len(state), np.uint32)
        self._num_added = 0
        self._parts: deque[_Part] = deque()
        # The part to compact next.
        self._next = 0

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def add(self, entries: Entries) -> None:
        """Adds entries whose state marks them as demoted, in the order of their eviction. An entry
        that is listed twice stands at its first place. An entry that was added before moves to its
        new place."""
        for start in range(0, len(entries), PART_ENTRIES):
            some = entries[start : start + PART_ENTRIES]
            numbers = np.arange(self._num_added, self._num_added + len(some)).astype(np.uint32)
            self._num_added += len(some)
            # For an entry that is listed twice, numpy keeps the last assignment.
            self._last[some[::-1]] = numbers[::-1]
            self._append(self._valid(_Part(some, self._state[some], numbers)))

    def _append(self, part: _Part) -> None:
        if self._parts and len(self._parts[-1]) + len(part) <= PART_ENTRIES:
            self._parts[-1] += part
            return
        self._parts.append(part)
        for _ in range(COMPACTED_PARTS):
            self._compact_next()

    def _compact_next(self) -> None:
        """Removes entries from a part that were used, removed or added again since. Joins the part
        with the part before if they fit together."""
        at = self._next if self._next < len(self._parts) else 0
        part = self._parts[at] = self._valid(self._parts[at])
        if at and len(self._parts[at - 1]) + len(part) <= PART_ENTRIES:
            self._parts[at - 1] += part
            del self._parts[at]
            at -= 1
        self._next = at + 1

    def _valid(self, part: _Part) -> _Part:
        """Returns the entries of a part that are still demoted and were not added again."""
        is_last = self._last[part.entries] == part.numbers
        return part.at(is_last & (self._state[part.entries] == part.states))

    def take(self, count: int, evictable: Evictable) -> Entries:
        """Removes and returns up to `count` evictable entries that are still demoted, whether or
        not they are evicted."""
        chosen: list[Entries] = [np.empty(0, np.uint32)]
        passed: list[_Part] = []
        num_looked = 0
        while self._parts and count and num_looked < LOOKED_ENTRIES:
            part = self._parts.popleft()
            num_looked += len(part)
            part = self._valid(part)
            places = np.flatnonzero(evictable(part.entries))[:count]
            count -= len(places)
            chosen.append(part.entries[places])
            left = np.ones(len(part), np.bool_)
            left[places] = False
            if left.any():
                passed.append(part.at(left))
        if num_looked < LOOKED_ENTRIES:
            self._parts.extendleft(reversed(passed))
        else:
            self._parts.extend(passed)
        return np.concatenate(chosen)


def others(evictable: Evictable, chosen: Entries) -> Evictable:
    """Returns a function that tells which entries are `evictable` and not in `chosen`."""
    if not len(chosen):
        return evictable
    return lambda entries: evictable(entries) & ~np.isin(entries, chosen)

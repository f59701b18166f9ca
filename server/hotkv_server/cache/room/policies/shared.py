"""What several policies use: `GhostTable`, `ColdQueue` and `DemotedEntries`."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import native
from hotkv_server.cache.room.policies.protocol import Entries, Evictable, Keys
from hotkv_server.cache.room.slabs import MAX_SIZES

# Ghosts, in a hash table of fixed size by 64-bit key.
#
# Always true: a key has at most one; the oldest are dropped first. There are twice as many
# places as ghosts, so that few buckets are full before their oldest expire: a chain's ghosts,
# which come together, should go together. Two keys of a bucket are mistaken for each other with
# odds of 1 in 2^31, which costs a wrong heat.


WAYS = 8
ROOM = 2
"""Places for each ghost."""
MULTIPLIER = np.uint64(0x9E37_79B9_7F4A_7C15)
Values = NDArray[np.uint64]


def spread(keys: Keys) -> Keys:
    """The high half of the mixed bits selects a bucket; the low half is the tag there, and
    decides whether a `Duel` samples the key."""
    mixed: Keys = (keys ^ (keys >> np.uint64(31))) * MULTIPLIER
    return mixed ^ (mixed >> np.uint64(29))


class GhostTable:
    """The newest `num_ghosts`. Rows are buckets of WAYS places.

    tags: uint32, 31 bits of the mixed key and the lowest bit set; 0 if empty.
    values: uint64, of the policy.
    _ages: running number, higher is newer; 0 if empty.

    `is_lasting`: dropped only from a full bucket.
    """

    def __init__(self, num_ghosts: int, *, is_lasting: bool = False) -> None:
        buckets = max(1, -(-ROOM * num_ghosts // WAYS))
        self.num_ghosts = num_ghosts
        self._is_lasting = is_lasting
        self.tags = np.zeros((buckets, WAYS), np.uint32)
        self.values = np.zeros((buckets, WAYS), np.uint64)
        self._ages = np.zeros((buckets, WAYS), np.uint32)
        self._next_age = 1
        self._kernels = native.require("hotkv_server.cache.room.policies.queue_kernels")

    def __len__(self) -> int:
        return int((self.tags != 0).sum())

    def __repr__(self) -> str:
        return f"GhostTable({len(self)}/{self.tags.size} ghosts)"

    def remember(self, keys: Keys, values: Values) -> Values:
        """Adds a ghost for each key, in order. Returns the values of the ghosts that gave way."""
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
        """Removes the keys' ghosts. For each key, whether it had one, and its value."""
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
        """Drops ghosts with tags of `tag` or more, to keep a sample of all keys."""
        gone = self.tags >= tag
        self.tags[gone] = 0
        self._ages[gone] = 0

    def put_back(self, places: NDArray[np.int64], tags: NDArray[np.uint32]) -> None:
        """Adds saved ghosts, as the oldest. `places`: in the flattened `tags`; unknown ones are
        ignored."""
        known = places < self.tags.size
        self.tags.reshape(-1)[places[known]] = tags[known]
        self._ages.reshape(-1)[places[known]] = 1

    def _begin_anew(self) -> None:
        """Lowers all `_ages`, to stay below 2^32. Expired ghosts go; lasting ones get the
        lowest."""
        base = self._next_age - self.num_ghosts - 1
        oldest = (self.tags != 0) & self._is_lasting
        self._ages[:] = np.where(self._ages > base, self._ages - np.uint32(base), oldest)
        self._next_age -= base

    def check_invariants(self) -> None:
        for bucket in self.tags:
            tags = bucket[bucket != 0]
            assert len(np.unique(tags)) == len(tags), "a key has two ghosts"


# A `ColdQueue` returns the coldest entries in order, without sorting all.
#
# A refill scans numbers from where the last one stopped, until it has seen enough evictable
# entries, and queues the coldest 1/SHARE: constant work for each eviction on average. If few
# have the wanted slot size, ten million take a tenth of a second; `sweep` does that in parts
# beforehand. A use changes only the entry's state: the queue skips it, a later refill finds it
# again.


SHARE = 16
"""A refill queues the coldest 1/16 of what it scanned."""
MIN_QUEUED = 4
"""A refill queues at least so many; few, because colder entries that come later wait behind
them."""
SWEEP_ENTRIES = 1 << 17
"""Entry numbers that a part of a refill examines."""

Heat = Callable[[Entries], NDArray[np.float64]]
"""The lowest is the coldest."""
Members = Callable[[int, int], Entries]
"""Those from `first` to `stop` - 1 that belong into the queue."""


class Highest:
    """The highest entry number ever added."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0

    def add(self, entries: Entries) -> None:
        if len(entries):
            self.number = max(self.number, int(entries.max()))


class ColdQueue:
    """state: 64 bits of the policy by entry number, which change with each use or removal; 0 if
        unknown.
    highest: up to which to scan.
    """

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
        # A sweep has just found too few in all entries.
        self._is_swept = False

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """For a new order: the next `take` refills."""
        self._entries, self._states = self._entries[:0], self._states[:0]

    def sweep(self, count: int, evictable: Evictable) -> Iterator[None]:
        """Refills the queue, in parts, if such a `take` would have to."""
        head = self._entries[: 4 * count]
        if (
            np.count_nonzero((self._state[head] == self._states[: len(head)]) & evictable(head))
            < count
        ):
            yield from self._refill(count, evictable, [])
        # After a full scan with too few, the next `take` need not scan. Else it may: queued
        # entries may have gone or been used meanwhile.
        self._is_swept = len(self._entries) < count

    def take(self, count: int, evictable: Evictable, held: Evictable | None = None) -> Entries:
        """Removes and returns up to `count` of the coldest evictable entries. Pinned ones leave
        the queue too, and return with the next refill. One of `held` stays and ends the search."""
        chosen: list[Entries] = []
        missing, refilled, self._is_swept = count, self._is_swept, False
        while missing > 0:
            if len(self._entries) < missing and not refilled:
                # Replaces what is left in the queue.
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
            # What was returned, or examined and skipped, leaves the queue.
            used = len(head) if len(places) < missing else int(places[-1]) + 1
            self._entries, self._states = self._entries[used:], self._states[used:]
            missing -= len(places)
        if len(chosen) == 1:
            return chosen[0]
        return np.concatenate(chosen) if chosen else np.empty(0, np.uint32)

    def _refill(self, count: int, evictable: Evictable, chosen: list[Entries]) -> Iterator[None]:
        end = self._highest.number + 1
        parts: list[Entries] = []
        # A local copy: another refill may run meanwhile, and this one must see no entry twice.
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
        # Removed meanwhile (state 0): the number may be a sketch's by now.
        entries = entries[self._state[entries] != 0]
        if chosen:
            entries = entries[~np.isin(entries, np.concatenate(chosen))]
        entries, heat = self._coldest(entries, _kept(num_seen, count))
        self._entries = entries[heat.argsort(kind="stable")]
        self._states = self._state[self._entries]

    def _coldest_of(
        self, entries: Entries, count: int, evictable: Evictable
    ) -> tuple[int, Entries]:
        """Candidates of one part: its evictable entries, of a large part only the coldest if
        they are enough. Returns the number to count as scanned, and these."""
        keep = _kept(len(entries), count)
        if len(entries) > 4 * keep:
            coldest, _ = self._coldest(entries, 2 * keep)
            found = coldest[evictable(coldest)]
            if len(found) >= keep:
                return len(entries), found
        found = entries[evictable(entries)]
        return len(found), found

    def _coldest(self, entries: Entries, count: int) -> tuple[Entries, NDArray[np.float64]]:
        """Unsorted, with their heat."""
        heat = self._heat(entries)
        if len(entries) <= count:
            return entries, heat
        places = heat.argpartition(count)[:count]
        return entries[places], heat[places]


class ColdQueues:
    """By slot size. At MAX_SIZES all are dropped; new ones refill themselves."""

    def __init__(
        self, state: NDArray[np.uint64], highest: Highest, members: Members, heat: Heat
    ) -> None:
        self._made = partial(ColdQueue, state, highest, members, heat)
        self._queues: dict[int, ColdQueue] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def of(self, slot_bytes: int) -> ColdQueue:
        """0 for any size."""
        if slot_bytes not in self._queues:
            if len(self._queues) >= MAX_SIZES:
                self._queues.clear()
            self._queues[slot_bytes] = self._made()
        return self._queues[slot_bytes]

    def clear(self) -> None:
        for queue in self._queues.values():
            queue.clear()


def _kept(num_seen: int, count: int) -> int:
    return max(MIN_QUEUED, count, num_seen // SHARE)


# Demoted entries go before all others, until they are used, which changes their state.
#
# Always true: `take` returns an entry at most once, and never if its state has changed. Memory
# is bounded by the capacity. A call examines only its own entries and a few parts.


LOOKED_ENTRIES = 1 << 14
"""After so many, `DemotedEntries.take` stops; what it skipped, pinned or of other sizes, moves
to the end."""
PART_ENTRIES = 1 << 12
COMPACTED_PARTS = 2
"""Old parts compacted for each new one, which bounds their number."""


@dataclass(frozen=True, slots=True)
class _Part:
    """At most PART_ENTRIES; state and running number are those when added."""

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
    """In the order of demotion. `state`: as in `ColdQueue`."""

    def __init__(self, state: NDArray[np.uint64]) -> None:
        self._state = state
        # Number of each entry's last addition: an older place is invalid. The kernel allocates a
        # page with its first demotion.
        self._last = np.zeros(len(state), np.uint32)
        self._num_added = 0
        self._parts: deque[_Part] = deque()
        # Part to compact next.
        self._next = 0

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def add(self, entries: Entries) -> None:
        """In the order in which they should go. Of repetitions the first place counts; what was
        added before moves here."""
        for start in range(0, len(entries), PART_ENTRIES):
            some = entries[start : start + PART_ENTRIES]
            numbers = np.arange(self._num_added, self._num_added + len(some)).astype(np.uint32)
            self._num_added += len(some)
            # Reversed: numpy keeps the last assignment, which must be the first place.
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
        """Drops what is invalid from the next part, and joins it with the one before if both
        fit."""
        at = self._next if self._next < len(self._parts) else 0
        part = self._parts[at] = self._valid(self._parts[at])
        if at and len(self._parts[at - 1]) + len(part) <= PART_ENTRIES:
            self._parts[at - 1] += part
            del self._parts[at]
            at -= 1
        self._next = at + 1

    def _valid(self, part: _Part) -> _Part:
        """Without what is no longer demoted, or was added again."""
        is_last = self._last[part.entries] == part.numbers
        return part.at(is_last & (self._state[part.entries] == part.states))

    def take(self, count: int, evictable: Evictable) -> Entries:
        """Removes and returns evictable entries, which do not come back if they are not evicted."""
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
    """`evictable`, but not in `chosen`."""
    if not len(chosen):
        return evictable
    return lambda entries: evictable(entries) & ~np.isin(entries, chosen)

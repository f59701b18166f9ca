"""Parts that several policies use: `GhostTable` (records of evicted blocks), `ColdQueue` (the next
blocks to evict) and `DemotedEntries`."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import native
from hotkv_server.cache.room.policies.protocol import Entries, Evictable, Keys
from hotkv_server.cache.room.slabs import MAX_SIZES

# Ghosts: records of evicted blocks.
#
# A `GhostTable` is a hash table of fixed size. It stores a ghost by the 64-bit key of its block;
# each ghost carries 64 bits that the policy chooses. Always true: a key has at most one ghost; the
# oldest ghosts are dropped first.
#
# The blocks of a chain become ghosts together. Their ghosts should also be dropped together,
# because a chain from which a ghost is missing is of little use. So the table has twice as many
# places as ghosts: few buckets are then full before their oldest ghosts expire. Two keys of one
# bucket with equal tags are mistaken for each other, with odds of 1 in 2^31; the cost is a wrong
# estimate of heat.


WAYS = 8
ROOM = 2
"""A `GhostTable` has this many places for each ghost (record of an evicted block) that it should
hold."""
MULTIPLIER = np.uint64(0x9E37_79B9_7F4A_7C15)
Values = NDArray[np.uint64]


def spread(keys: Keys) -> Keys:
    """Mixes all bits of keys, and returns 64 bits for each key. In a `GhostTable` (records of
    evicted blocks), the high half selects the bucket, and the low half is the tag there. The low
    half also decides whether the key is in the sample of a `Duel` (comparison of settings by
    simulation)."""
    mixed: Keys = (keys ^ (keys >> np.uint64(31))) * MULTIPLIER
    return mixed ^ (mixed >> np.uint64(29))


class GhostTable:
    """The newest `num_ghosts` ghosts: records of evicted blocks by key, each with a 64-bit value
    that the policy chooses.

    tags: uint32, a row for each bucket, with WAYS places: 31 bits of each ghost's mixed key
        (`spread`), and the lowest bit set; 0 for an empty place.
    values: uint64, value of the ghost in each place.

    `_ages`: running number of the ghost in each place; higher is newer, 0 for an empty place.
    `is_lasting`: True if ghosts never expire, and are dropped only when their bucket is full.
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
        """Adds a ghost (record of an evicted block) for each key, in order. Returns the values of
        the older ghosts that were dropped because their bucket was full or they had the same
        key."""
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
        """Removes the ghosts (records of evicted blocks) of these keys. Returns for each key
        whether it had a ghost, and the ghost's value."""
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
        """Drops the ghosts (records of evicted blocks) with high tags: `tag` or higher. A ghost's
        tag consists of bits of its mixed key (see `tags`). So this method can reduce the ghosts to
        a sample of all keys."""
        gone = self.tags >= tag
        self.tags[gone] = 0
        self._ages[gone] = 0

    def put_back(self, places: NDArray[np.int64], tags: NDArray[np.uint32]) -> None:
        """Adds ghosts (records of evicted blocks) that were saved from an earlier table. They
        become the oldest ghosts of this table. Ignores places that this table does not have.

        places: positions of the ghosts in the flattened array `tags`.
        tags: the tags of the ghosts.
        """
        known = places < self.tags.size
        self.tags.reshape(-1)[places[known]] = tags[known]
        self._ages.reshape(-1)[places[known]] = 1

    def _begin_anew(self) -> None:
        """Subtracts a constant from the running numbers (`_ages`) of all ghosts (records of evicted
        blocks), so that the numbers stay below 2^32. Runs once per about 2^32 new ghosts. Expired
        ghosts, whose numbers would fall below 1, are removed. If ghosts never expire
        (`is_lasting`), they stay, with the lowest number."""
        base = self._next_age - self.num_ghosts - 1
        oldest = (self.tags != 0) & self._is_lasting
        self._ages[:] = np.where(self._ages > base, self._ages - np.uint32(base), oldest)
        self._next_age -= base

    def check_invariants(self) -> None:
        """Raises AssertionError if a bucket has the same tag twice."""
        for bucket in self.tags:
            tags = bucket[bucket != 0]
            assert len(np.unique(tags)) == len(tags), "a key has two ghosts"


# A `ColdQueue` returns the coldest entries (blocks to evict first) in order, without sorting all
# entries.
#
# The queue is refilled when it has too few entries. A refill scans entries by number, from the
# place at which the last refill stopped, until it has seen enough evictable entries. It queues the
# coldest 1/SHARE of them, sorted, so the work for each evicted entry is constant on average. If few
# of the entries have the wanted slot size, a refill must scan many: ten million entries take a
# tenth of a second. So that `take` need not do this at once, `sweep` refills the queue before, in
# parts.
#
# A use of an entry does not change the queue; it changes only the entry's state in the policy. So
# the queue skips an entry if its state has changed since it was queued. A later refill queues such
# an entry again if it is still among the coldest. A later refill also queues entries that were
# added since.


SHARE = 16
"""A refill of a `ColdQueue` queues the coldest 1/16 of the entries (blocks) that it has scanned:
those to be evicted first."""
MIN_QUEUED = 4
"""A refill of a `ColdQueue` (the next blocks to evict) queues at least this many entries. The
number is small, because a colder block that is added after the refill is evicted only after the
queued entries."""
SWEEP_ENTRIES = 1 << 17
"""Number of entry numbers (of blocks) that each part of a refill of a `ColdQueue` examines. Other
calls can run between two parts."""

Heat = Callable[[Entries], NDArray[np.float64]]
"""Function that returns the heat of each entry; the entry with the lowest heat is the coldest."""
Members = Callable[[int, int], Entries]
"""Function with the arguments `first` and `stop`. Returns those entries (blocks), among the entry
numbers from `first` to `stop` - 1, that belong into a `ColdQueue`: for example the blocks of one
list of the policy ARC."""


class Highest:
    """The highest entry number (index of a block's record) that was ever added. A `ColdQueue`
    (queue of the next blocks to evict) is refilled by a scan of all entry numbers up to this one.
    """

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0

    def add(self, entries: Entries) -> None:
        if len(entries):
            self.number = max(self.number, int(entries.max()))


class ColdQueue:
    """A queue that returns entries in order of eviction, the coldest first.

    members: function that returns which entries of a range of entry numbers belong to the queue.
    state: for each entry number, 64 bits of the policy's state. They change when the entry is used
        or removed. 0 for an entry that the policy does not know.
    highest: the highest entry number to scan.
    heat: function that returns the heat of entries; the lowest heat is the coldest.
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
        # True if a sweep has just scanned all entries and found too few evictable entries.
        self._is_swept = False

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Empties the queue, so that the next call of `take` refills it. Called when the order of
        eviction has changed."""
        self._entries, self._states = self._entries[:0], self._states[:0]

    def sweep(self, count: int, evictable: Evictable) -> Iterator[None]:
        """Refills the queue if a `take` with the same arguments would find too few entries (blocks)
        in it. Then that `take` need not refill the queue. Yields after each part. `evictable`:
        function that returns which entries may be evicted."""
        head = self._entries[: 4 * count]
        if (
            np.count_nonzero((self._state[head] == self._states[: len(head)]) & evictable(head))
            < count
        ):
            yield from self._refill(count, evictable, [])
        # If all entries were scanned and too few can be evicted, the next `take` need not scan
        # again. Otherwise `take` may still have to: between two parts of this refill, other calls
        # may have evicted or used some of the queued entries.
        self._is_swept = len(self._entries) < count

    def take(self, count: int, evictable: Evictable, held: Evictable | None = None) -> Entries:
        """Removes the coldest evictable entries from the queue and returns them, at most `count`.
        Also removes entries that are not evictable (pinned); they return with the next refill.

        held: function that returns which entries to hold back. If one of the examined entries is
            held back, it stays in the queue, and the queue is not searched further.
        """
        chosen: list[Entries] = []
        missing, refilled, self._is_swept = count, self._is_swept, False
        while missing > 0:
            if len(self._entries) < missing and not refilled:
                # The refill replaces what is left in the queue.
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
            # An entry leaves the queue only if it was returned, or examined and skipped.
            used = len(head) if len(places) < missing else int(places[-1]) + 1
            self._entries, self._states = self._entries[used:], self._states[used:]
            missing -= len(places)
        if len(chosen) == 1:
            return chosen[0]
        return np.concatenate(chosen) if chosen else np.empty(0, np.uint32)

    def _refill(self, count: int, evictable: Evictable, chosen: list[Entries]) -> Iterator[None]:
        end = self._highest.number + 1
        parts: list[Entries] = []
        # Use a local copy of the scan's position: another refill may run between two parts, and
        # this refill must not see an entry twice.
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
        # Drop entries that were removed between two parts (state 0). Their numbers may belong to
        # sketches (compact forms of blocks' keys) by now, which a policy does not know.
        entries = entries[self._state[entries] != 0]
        if chosen:
            entries = entries[~np.isin(entries, np.concatenate(chosen))]
        entries, heat = self._coldest(entries, _kept(num_seen, count))
        self._entries = entries[heat.argsort(kind="stable")]
        self._states = self._state[self._entries]

    def _coldest_of(
        self, entries: Entries, count: int, evictable: Evictable
    ) -> tuple[int, Entries]:
        """Selects candidates for a refill of the queue from one part of all entries (blocks): the
        evictable entries of the part. From a large part, selects only evictable entries among its
        coldest, if there are enough of them. Returns two results: the number of entries to count
        as scanned, and the candidates.

        count: number of entries that the refill should queue at least.
        """
        keep = _kept(len(entries), count)
        if len(entries) > 4 * keep:
            # Check only the coldest entries first. Check all entries only if too few of these may
            # be evicted.
            coldest, _ = self._coldest(entries, 2 * keep)
            found = coldest[evictable(coldest)]
            if len(found) >= keep:
                return len(entries), found
        found = entries[evictable(entries)]
        return len(found), found

    def _coldest(self, entries: Entries, count: int) -> tuple[Entries, NDArray[np.float64]]:
        """Returns the `count` entries (blocks) with the lowest heat, which are evicted first.
        Returns them unsorted, together with their heat."""
        heat = self._heat(entries)
        if len(entries) <= count:
            return entries, heat
        places = heat.argpartition(count)[:count]
        return entries[places], heat[places]


class ColdQueues:
    """A `ColdQueue` for each slot size; the arguments of the constructor are those of `ColdQueue`.
    If there are MAX_SIZES queues, all queues are dropped before another queue is made. A new queue
    refills itself, so nothing is lost."""

    def __init__(
        self, state: NDArray[np.uint64], highest: Highest, members: Members, heat: Heat
    ) -> None:
        self._made = partial(ColdQueue, state, highest, members, heat)
        self._queues: dict[int, ColdQueue] = {}

    def __len__(self) -> int:
        """Number of queued entries."""
        return sum(map(len, self._queues.values()))

    def of(self, slot_bytes: int) -> ColdQueue:
        """Returns the queue of the coldest entries (blocks to evict first) for this slot size; 0
        for any size."""
        if slot_bytes not in self._queues:
            if len(self._queues) >= MAX_SIZES:
                self._queues.clear()
            self._queues[slot_bytes] = self._made()
        return self._queues[slot_bytes]

    def clear(self) -> None:
        """Empties all queues. Called when the policy's formula of heat has changed, because the
        queues are ordered by heat (the entry with the lowest heat is evicted first)."""
        for queue in self._queues.values():
            queue.clear()


def _kept(num_seen: int, count: int) -> int:
    return max(MIN_QUEUED, count, num_seen // SHARE)


# Demoted entries are evicted before all others, until they are used again.
#
# To demote an entry (a block's record), a policy marks the entry in its state and adds it to a
# `DemotedEntries`. The policy's method `victims` evicts these entries first. A use changes the
# entry's state and thereby undoes the demotion. Always true: `take` returns an entry at most once,
# and never if the entry's state has changed since it was demoted. Memory is bounded by the
# capacity, however often entries are demoted and used in turn. A call examines only the entries
# that it was given and a few parts of PART_ENTRIES.


LOOKED_ENTRIES = 1 << 14
"""`DemotedEntries.take` stops when it has examined this many entries. The entries that it skipped
(because they are pinned or of other slot sizes) then move behind the other demoted entries (marked
to be evicted first)."""
PART_ENTRIES = 1 << 12
COMPACTED_PARTS = 2
"""For each part that is added to `DemotedEntries`, entries that are no longer demoted are removed
from this many old parts (`_compact_next`). So the number of parts stays bounded."""


@dataclass(frozen=True, slots=True)
class _Part:
    """At most PART_ENTRIES demoted entries (marked to be evicted first). `states` and `numbers`:
    the state and the running number of each entry (block) when it was added."""

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
    """Demoted entries (marked to be evicted before all others), in the order in which they were
    demoted. `state`: for each entry number, 64 bits of the policy's state. They change when the
    entry is used or removed, which ends the demotion."""

    def __init__(self, state: NDArray[np.uint64]) -> None:
        self._state = state
        # For each entry number: the running number that the entry got when it was last added to
        # this object. It shows whether an older place of the entry is still valid. This array uses
        # little memory at first: the kernel allocates a page of it when an entry on this page is
        # first demoted.
        self._last = np.zeros(len(state), np.uint32)
        self._num_added = 0
        self._parts: deque[_Part] = deque()
        # Index of the part to compact next.
        self._next = 0

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def add(self, entries: Entries) -> None:
        """Adds entries whose state marks them as demoted, in the order in which they should be
        evicted. If an entry is listed twice, its first place counts. An entry that was added by an
        earlier call moves to its new place."""
        for start in range(0, len(entries), PART_ENTRIES):
            some = entries[start : start + PART_ENTRIES]
            numbers = np.arange(self._num_added, self._num_added + len(some)).astype(np.uint32)
            self._num_added += len(some)
            # Assign in reversed order: if an entry is listed twice, numpy keeps the last
            # assignment, and this must be the entry's first place.
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
        """Compacts the next part of the demoted entries: removes the entries (blocks) of the part
        that are no longer valid (`_valid`). Joins the part with the part before it if both together
        are small enough."""
        at = self._next if self._next < len(self._parts) else 0
        part = self._parts[at] = self._valid(self._parts[at])
        if at and len(self._parts[at - 1]) + len(part) <= PART_ENTRIES:
            self._parts[at - 1] += part
            del self._parts[at]
            at -= 1
        self._next = at + 1

    def _valid(self, part: _Part) -> _Part:
        """Drops the entries (blocks) of a part of this object that are no longer demoted, or that
        were added again later. Returns the rest of the part."""
        is_last = self._last[part.entries] == part.numbers
        return part.at(is_last & (self._state[part.entries] == part.states))

    def take(self, count: int, evictable: Evictable) -> Entries:
        """Removes up to `count` evictable entries (blocks) that are still demoted (marked to be
        evicted first) from this object, and returns them. If the caller does not evict such an
        entry, this object does not return the entry again."""
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
    """Returns a function that returns a mask of entries: True for each entry (block) that
    `evictable` accepts and that is not in `chosen`."""
    if not len(chosen):
        return evictable
    return lambda entries: evictable(entries) & ~np.isin(entries, chosen)

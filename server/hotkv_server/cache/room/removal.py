"""`Books` is the state of a tier. `Removal` removes entries from it: by eviction, by a flush
(deletion of all blocks of a key space) or by a drop (of entries that never became ready).

A slab is a piece of the arena that is lent to one slot size: divided into slots of this size.
`Rebalancer` empties slabs, so that they can be lent to another slot size. Slabs are lent in runs:
ranges of adjacent slabs that are lent, and returned, together.

Always true: an entry of the index owns exactly one slot (place for a block) of the pool, and no two
entries own the same bytes. The bytes of every slot in use count for its key space and tenant. A
pinned or reserved entry is never evicted. Entries are blocks or sketches (compact summaries
of a block's attention keys, for sparse attention).
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import table
from hotkv_proto.table import Words
from hotkv_server.cache.arrays import distinct
from hotkv_server.cache.histogram import AGES_S, Histogram
from hotkv_server.cache.room.policies.protocol import Policy
from hotkv_server.cache.room.removed import Causes, RemovedKeys
from hotkv_server.cache.room.shares import Payers, TenantBook
from hotkv_server.cache.room.slabs import ABSENT, FREE, SlabPool
from hotkv_server.cache.table.index import BlockIndex, Keys, Sketches
from hotkv_server.cache.values import BoolMask, Cause, Entries, EvictionNotice, Int64s

T = TypeVar("T")
Parts = Generator[None, None, T]
"""Type of a generator that does long work in parts: it yields after each part, and returns its
result at the end. Any other method may be called between two parts."""


def finished(parts: Parts[T], between: Callable[[], object] = lambda: None) -> T:
    """Runs a generator, which does long work in parts, to its end at once. Returns the generator's
    result. `between`: called after each part."""
    while True:
        try:
            next(parts)
            between()
        except StopIteration as end:
            result: T = end.value
            return result


PART_ENTRIES = 1 << 16
"""Number of entry numbers (row numbers of the block table) that each part of long work examines. A
part takes a few milliseconds."""
EVICTED_PER_PART = 1 << 12
"""Most entries that each part of long work removes."""


class Books:
    """The state of a tier: index, pool of slots (places for blocks), tenants, eviction policy and
    sketches (compact summaries of blocks' attention keys, for sparse attention)."""

    def __init__(
        self, index: BlockIndex, pool: SlabPool, tenants: TenantBook, policy: Policy
    ) -> None:
        self.index = index
        self.pool = pool
        self.tenants = tenants
        self.policy = policy
        self.sketches = Sketches(index, self.free_slots)

    def __repr__(self) -> str:
        return f"Books({self.index!r}, {self.pool!r})"

    def free_slots(self, parts: list[Words]) -> None:
        """Frees the slots (places for blocks) of removed entries. `parts`: the records that the
        entries had; each array has records of one key space (a model in a configuration) and
        slot size (`BlockIndex.parts`)."""
        for rows in parts:
            slot_bytes = int(rows[0, table.W_SIZE]) * table.SLOT_ALIGN
            offsets = rows[:, table.W_OFFSET].astype(np.int64) * table.SLOT_ALIGN
            self.tenants.count(int(rows[0, table.W_KEY_SPACE]), -len(rows) * slot_bytes)
            self.pool.free(slot_bytes, offsets)

    def free_numbers(self) -> int:
        """Returns how many more entries (records in the block table) the index can have."""
        return self.index.limit - self.index.num_entries

    def owners(self, entries: Entries) -> Int64s:
        """Returns the tenant number of each entry (block or sketch)."""
        return self.tenants.of(self.index.table.records[entries, table.W_KEY_SPACE])

    def heat(self, entries: Entries) -> NDArray[np.float64]:
        """Returns the heat of each entry: entries (records in the block table) with the lowest heat
        are evicted first. A sketch (compact summary of a block's attention keys, for sparse
        attention) has the heat of its block."""
        return self.policy.heat(self.sketches.blocks_of(entries))

    def walk(self) -> Iterator[Entries]:
        """Yields all entries (blocks and sketches) that are not free, in parts. Each part
        examines the next PART_ENTRIES entry numbers."""
        for start in range(0, self.index.num_numbers, PART_ENTRIES):
            yield (start + np.flatnonzero(self.index.states(start, start + PART_ENTRIES))).astype(
                np.uint32
            )

    def check_invariants(self) -> None:
        """Raises AssertionError if index, pool, policy and counts of bytes disagree. Takes time
        linear in the capacity."""
        self.index.check_invariants()
        self.pool.check_invariants()
        self.policy.check_invariants()
        self.sketches.check_invariants()
        live = np.flatnonzero(self.index.states()).astype(np.uint32)
        key_spaces, sizes = self.index.keys(live)[0], self.index.slot_bytes(live)
        used = {
            number: int(sizes[key_spaces == number].sum())
            for number in np.unique(key_spaces).tolist()
        }
        self.tenants.check(used)
        offsets = self.index.offsets(live)
        order = np.argsort(offsets)
        ends = offsets[order] + sizes[order]
        assert np.all(ends[:-1] <= offsets[order][1:]), "two entries share bytes of the arena"
        assert sum(s.num_used for s in self.pool.stats()) == len(live), (
            "slots used and entries differ"
        )
        assert np.all(self.pool.slab_owner()[self.pool.slab_of(offsets)] == sizes), (
            "entry in a slab of another size"
        )


# Removing entries (records of blocks), with the notices that this causes. There are three ways:
# eviction, flush (deletion of all blocks of a key space), and drop (of entries that never became
# ready).
#
# `Removal` owns the eviction notices that were not returned yet, and the keys of the blocks that
# were removed last. Always true: a pinned or reserved entry is never evicted. Every evicted or
# flushed block has a notice; a dropped block has none. A pinned block that is flushed becomes
# detached: lookups can't find it, and it keeps its slot until `reap`.


class Removal:
    """Removes entries (blocks and sketches) of a tier.

    effects: eviction notices that `take_effects` has not returned yet.
    now_s: approximately the current time: `CacheCore` sets it when a client connects and when
        leases expire. 0 before that.
    ages_s: histogram of the seconds between the last use of a block that was evicted to make room
        and its eviction. Not counted while `now_s` is 0.
    """

    def __init__(self, books: Books) -> None:
        self.evicted_blocks = 0
        self.effects: list[EvictionNotice] = []
        self.now_s = 0.0
        self.ages_s = Histogram(AGES_S)
        self._books = books
        self.index = books.index
        self._sketches = books.sketches
        self._removed = RemovedKeys()

    def __repr__(self) -> str:
        return f"Removal({self.evicted_blocks} evicted, {len(self.effects)} notices not taken)"

    def take_effects(self) -> list[EvictionNotice]:
        """Returns the eviction notices that were added since the last call."""
        effects, self.effects = self.effects, []
        return effects

    def going(self, entries: Entries) -> Entries:
        """Returns the given entries (blocks or sketches) that `evict` would evict: entries
        that are ready and not pinned."""
        return entries[self.index.evictable(entries)]

    def evict(self, entries: Entries, cause: Cause = Cause.ROOM) -> int:
        """Evicts the given entries (records in the block table) that are ready and not pinned.
        Returns how many it evicted. Adds an eviction notice for the evicted blocks, but not for the
        evicted sketches (compact summaries of attention keys). `cause`: remembered as the
        reason of the removal (`causes`)."""
        going = self.going(entries)
        alone = self._sketches.among(going)
        count = self.evict_blocks(going[~alone], cause)
        # `evict_blocks` has removed some sketches (compact forms of keys) together with
        # their blocks: evict the remaining sketches.
        rest = going[alone]
        rest = rest[self.index.evictable(rest)]
        self._sketches.drop(rest)
        return count + len(rest)

    def evict_blocks(self, entries: Entries, cause: Cause = Cause.ROOM) -> int:
        """Evicts blocks and adds an eviction notice for them. The caller has checked that the
        blocks are ready and not pinned. Returns how many blocks it evicted. `cause`: remembered as
        the reason of the removal (`causes`)."""
        if len(entries):
            keys = self.index.mixed(entries)
            if self.now_s and cause is Cause.ROOM:
                used_s = self._books.policy.last_used_s(entries)
                self.ages_s.add_all(np.maximum(self.now_s - used_s, 0.0))
            self._books.policy.forget(entries, keys, evicted=True)
            parts = self.index.remove(entries, keys)
            self._give_notice(parts, keys, cause)
            self._books.free_slots(parts)
            self._sketches.follow(parts)
            self.evicted_blocks += len(entries)
        return len(entries)

    def flush(self, entries: Entries, cause: Cause = Cause.FLUSH) -> None:
        """Removes ready blocks, even if they are pinned, and adds an eviction notice for them. A
        pinned block becomes detached: lookups miss it, but it keeps its slot (place for a block)
        until `reap` frees the slot. `cause`: remembered as the reason of the removal (`causes`)."""
        keys = self.index.mixed(entries)
        parts = self.index.parts(self.index.table.records[entries])
        self._give_notice(parts, keys, cause)
        self._books.policy.forget(entries, keys, evicted=False)
        is_pinned = self.index.pins[entries] > 0
        self._books.free_slots(self.index.remove(entries[~is_pinned], keys[~is_pinned]))
        self.index.detach(entries[is_pinned])
        self._sketches.follow(parts)

    def drop(self, entries: Entries, cause: Cause = Cause.NONE) -> None:
        """Removes reserved entries (blocks or sketches) that will not be written, without an
        eviction notice. `cause`: remembered as the reason of the removal, so that `causes` returns
        it; NONE is not remembered."""
        keys = self.index.mixed(entries)
        if cause is not Cause.NONE:
            self._removed.add(keys, cause)
        self._books.policy.forget(entries, keys, evicted=False)
        self._books.free_slots(self.index.remove(entries, keys))

    def forsake(self, entries: Entries) -> None:
        """Detaches entries (records in the block table) that are reserved and pinned, without an
        eviction notice: lookups and stores no longer find the entries, and their slots (places for
        blocks) stay in use until `reap` frees them. Called if a tier hangs while it reads blocks
        into these slots, or if these blocks are flushed (deleted with all blocks of their key
        space) meanwhile: the tier may still write to the slots."""
        self._books.policy.forget(entries, self.index.mixed(entries), evicted=False)
        self.index.detach(entries)

    def reap(self, entries: Entries) -> None:
        """Frees the slots (places for blocks) of those given entries (records in the block table)
        that are detached (removed by `flush` or `forsake` while pinned) and have no pin any more.
        Skips all other entries."""
        if not len(entries):
            return
        detached = (
            self.index.table.records[entries, table.W_GROUP_STATE] >> 16 == table.STATE_DETACHED
        )
        if detached.any():
            gone = np.unique(entries[detached & (self.index.pins[entries] == 0)])
            # Work in small parts, so that the copied records stay in the processor's cache.
            for start in range(0, len(gone), EVICTED_PER_PART):
                part = gone[start : start + EVICTED_PER_PART]
                rows = self.index.table.records[part]
                self.index.remove_detached(part)
                self._books.free_slots(self.index.parts(rows))

    def causes(self, key_space_id: int, group_index: int, hashes: Words) -> Causes:
        """Returns for each block the `Cause` of its last removal; NONE if no removal of the block
        is remembered."""
        return self._removed.causes(self.index.mixed_hashes(key_space_id, group_index, hashes))

    def remember(self, keys: Keys, cause: Cause) -> None:
        """Remembers `cause` as the reason why blocks with these keys were removed, so that `causes`
        returns it. Used for blocks that were removed from another tier."""
        self._removed.add(keys, cause)

    def _give_notice(self, parts: Sequence[Words], keys: Keys, cause: Cause) -> None:
        """Adds an eviction notice for each array in `parts`, which has records of one key space and
        group. Also remembers `cause` for the blocks of all records, whose keys are `keys`."""
        for rows in parts:
            key_space_id = int(rows[0, table.W_KEY_SPACE])
            group_index = int(rows[0, table.W_GROUP_STATE]) & 0xFFFF
            self.effects.append(
                EvictionNotice(key_space_id, group_index, np.ascontiguousarray(rows[:, :8]))
            )
        self._removed.add(keys, cause)


# Emptying slabs


WINDOWS_PER_PART = 64
"""Most windows (ranges of adjacent slabs of the arena, to be emptied for another slot size) that
each part of `choose_windows` chooses."""
HOT_SHARE = 0.25
"""A slab (piece of the arena) may be emptied for another slot size although some of its blocks are
hotter than the coldest blocks of that size: at most this share of its blocks. If the share were 0
and every slab had a few hot blocks, no slab could be emptied. An evicted hot block is soon stored
again."""


# The following functions choose the slabs (pieces of the arena) to empty for a slot size. They
# compute with arrays that have a value for each slab. A run is a range of adjacent slabs that get a
# slot size together. A window is a range of as many slabs as a run of that size needs. The cost of
# a window is the highest cost of its slabs. A slab that can't be emptied costs inf; a free slab
# costs -inf.


def dearest_in_windows(cost: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """Returns the highest cost in each window of `length` adjacent slabs (pieces of the arena). The
    windows overlap: one begins at each slab. `cost`: cost of emptying each slab."""
    highest, width = cost, 1
    while width < length:
        step = min(width, length - width)
        highest = np.maximum(highest[: len(highest) - step], highest[step:])
        width += step
    return highest


def choose_windows(
    cost: NDArray[np.float64],
    length: int,
    limits: NDArray[np.float64],
    chosen: BoolMask,
    *,
    skips_free: bool = False,
) -> Parts[int]:
    """Chooses the windows (ranges of `length` adjacent slabs of the arena) to empty for another
    slot size, the cheapest first. A window costs as much as the most costly of its slabs. Stops
    when the i-th window would cost `limits[i]` or more. Marks the slabs of chosen windows in
    `chosen` and sets their `cost` to inf. Yields after each part; returns how many windows were
    chosen.

    cost: cost of emptying each slab; inf if the slab can't be emptied, -inf if it is free.
    limits: for each window to choose, in order, the cost that it must not reach (`limits_of`).
    chosen: mask over the slabs, to which the chosen slabs are added.
    skips_free: ignores windows in which all slabs are free already.
    """
    if length == 1 and not skips_free:
        order = np.argsort(cost, kind="stable")[: len(limits)]
        is_cheap = np.append(cost[order] < limits[: len(order)], False)
        order = order[: int(np.argmin(is_cheap))]
        chosen[order], cost[order] = True, np.inf
        return len(order)
    if length > len(cost):
        return 0
    highest = dearest_in_windows(cost, length)
    if skips_free:
        highest[highest == -np.inf] = np.inf
    for number, limit in enumerate(limits.tolist()):
        start = int(np.argmin(highest))
        if not highest[start] < limit:
            return number
        chosen[start : start + length] = True
        cost[start : start + length] = np.inf
        highest[max(0, start - length + 1) : start + length] = np.inf
        if number % WINDOWS_PER_PART == WINDOWS_PER_PART - 1:
            yield
    return len(limits)


def limits_of(own: NDArray[np.float64], num_slots: int, slots_per_run: int) -> NDArray[np.float64]:
    """Returns the limits for `choose_windows`: the i-th window that is chosen must cost less than
    the i-th limit. A window is a range of adjacent slabs (pieces of the arena). The cache can empty
    it to make room for slots of one size, the receiving size.

    Instead of emptying a window, the cache can evict blocks of the receiving size. Each emptied
    window spares `slots_per_run` of these blocks, the coldest first. So the limit of a window is
    the heat of the coldest block that the windows before it have not spared. If too few blocks of
    the receiving size can be evicted, the limit is inf: emptying any window is better than refusing
    the slots.

    own: heats of the coldest blocks of the receiving size, in rising order.
    num_slots: number of slots to make room for.
    slots_per_run: slots of the receiving size for which each window has room.
    """
    spared = np.arange(0, num_slots, slots_per_run)
    next_own = np.append(own, np.inf)[np.minimum(spared, max(0, len(own) - 1))]
    limits: NDArray[np.float64] = np.where(len(own) >= num_slots - spared, next_own, np.inf)
    return limits


def blocks_in(first: Int64s, last: Int64s, counted: BoolMask, num_slabs: int) -> Int64s:
    """Counts, for each slab (piece of the arena), the blocks that lie in the slab wholly or in
    part. Leaves out blocks for which `counted` is False. Block i lies in the slabs from `first[i]`
    to `last[i]`."""
    starts, ends = (
        np.bincount(at[counted] + after, minlength=num_slabs + 1)
        for at, after in ((first, 0), (last, 1))
    )
    blocks: Int64s = np.cumsum(starts - ends)[:-1]
    return blocks


Ranked = tuple[Int64s, Int64s, Entries]
"""Entries from cold to hot, as three arrays. First: a rank for each entry, which rises with its
heat (`ranks_of`). Second: how many bytes are freed if the first 0, 1, 2… of the entries are
removed. Third: the entries."""


def ranks_of(heat: NDArray[np.float64]) -> Int64s:
    """Converts heats (floats, by which entries are ordered for eviction) to integers that sort in
    the same order."""
    bits = heat.view(np.int64)
    # Read as integers, the bits of negative floats fall while the floats rise: flip them.
    ranks: Int64s = bits ^ (bits >> 63 & np.iinfo(np.int64).max)
    return ranks


def coldest(parts: Sequence[Ranked], most_bytes: int) -> Iterator[Entries]:
    """Finds the coldest entries (records in the block table) of all `parts` together. Stops before
    they would free more than `most_bytes`. Yields an empty array after each step of the search. At
    the end, yields for each part an array of the entries found in it."""

    def bytes_below(rank: int) -> int:
        return sum(int(sums[np.searchsorted(ranks, rank)]) for ranks, sums, _ in parts)

    low = int(min(ranks[0] for ranks, _, _ in parts))
    high = int(max(ranks[-1] for ranks, _, _ in parts)) + 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if bytes_below(middle) <= most_bytes else (low, middle - 1)
        yield np.empty(0, np.uint32)
    # Choose all entries colder than the rank `low`. The entries with exactly this rank would free
    # too many bytes together: choose as many of them as fit.
    left_bytes = most_bytes - bytes_below(low)
    for ranks, sums, entries in parts:
        begin, end = np.searchsorted(ranks, (low, low + 1))
        more = sums[begin + 1 : end + 1] - sums[begin]
        count = begin + np.searchsorted(more, left_bytes, "right")
        left_bytes -= int(sums[count] - sums[begin])
        yield entries[:count]


MayGo = Callable[[Entries], BoolMask]
"""Function that returns a mask of the entries that may be evicted."""


class Rebalancer:
    """Makes room for slots of one size, the receiving size: empties slabs (pieces of the arena)
    that are divided into slots of other sizes, so that they can be divided into slots of the
    receiving size. Holds no state between two calls.

    Always true: a slab with a pinned or reserved entry is not chosen. `TenantBook` decides whose
    entries may be evicted for a tenant. A slab is emptied if its blocks are colder than the blocks
    of the receiving size that would otherwise be evicted, or if too few blocks of that size can be
    evicted. A run (range of slabs that get a slot size together) is emptied as a whole, so each of
    its slabs costs the heat of the run's hottest block. A sketch (compact summary of a
    block's attention keys, for sparse attention) has the heat of its block.
    """

    def __init__(self, books: Books, removal: Removal) -> None:
        self._books = books
        self.index = books.index
        self._pool = books.pool
        self._removal = removal

    def __repr__(self) -> str:
        return f"Rebalancer({self._pool!r})"

    def take_until(
        self,
        slot_bytes: int,
        num_slots: int,
        taker: int,
        payers: Sequence[Payers],
        *,
        is_enough: Callable[[], bool] | None = None,
    ) -> Parts[None]:
        """Empties slabs (pieces of the arena) of other sizes until `num_slots` slots of this size
        are free, or no slab is worth emptying. Yields after each part of the work.

        taker: number of the tenant that needs the slots.
        payers: groups of blocks that may be evicted, tried in this order (`Payers`).
        is_enough: if given, the work ends when `is_enough` returns True, not when the slots are
            free.
        """

        def has_free_slots() -> bool:
            return self._pool.available_slots(slot_bytes) >= num_slots

        is_enough = is_enough or has_free_slots
        slab_bytes = self._pool.slab_bytes
        shortest = (-(-slot_bytes // slab_bytes), max(1, slab_bytes // slot_bytes))
        for paying in payers:
            # A run is a range of adjacent slabs (pieces of the arena) that get a slot size
            # together. Choose the slabs to empty in three ways, each only if the ways before it
            # freed too few slots:
            # - room for runs of full length, which have the fewest useless bytes behind their last
            #   slot;
            # - room for the shortest runs, because pinned blocks may leave only short gaps;
            # - room for the shortest runs, but not where all slabs are free already. Such slabs may
            #   lie in gaps that are too short for a slot; emptying further slabs lengthens a gap.
            whole = self._pool.run_of(slot_bytes)
            ways = [(whole, False)] if whole == shortest else [
                (whole, False), (shortest, False), (shortest, True)
            ]  # fmt: skip
            for run, skips_free in ways:
                # Repeat: choosing a slab empties its whole run, so other slabs of the run are free
                # now, and the next choice costs less.
                while not is_enough():
                    taking = self._take(slot_bytes, num_slots, run, taker, paying, skips_free)
                    if not (yield from taking):
                        break

    def _take(
        self, slot_bytes: int, num_slots: int, run: tuple[int, int], taker: int, paying: Payers,
        skips_free: bool,
    ) -> Parts[int]:  # fmt: skip
        """Empties slabs (pieces of the arena) with slots of other sizes than `slot_bytes`, to make
        room for `num_slots` slots. Yields after each part; returns how many entries (records in the
        block table) were evicted.

        First chooses slabs whose blocks are all colder than the coldest blocks of this size. If
        these are too few, also chooses slabs in which at most the share `HOT_SHARE` of the blocks
        is hotter.

        run: number of slabs, and number of slots, of the run (range of slabs that get a slot size
            together) to make room for.
        taker: number of the tenant that needs the slots.
        paying: which blocks may be evicted for this tenant.
        skips_free: True if ranges of slabs that are free already may not be chosen.
        """
        if skips_free:
            num_slots = max(1, num_slots - self._pool.available_slots(slot_bytes))
        may_go = yield from self._may_go(taker, paying)
        cost, own = yield from self._costs(slot_bytes, num_slots, may_go)
        chosen = np.zeros(self._pool.num_slabs, np.bool_)
        length, slots_per_run = run
        limits = limits_of(own, num_slots, slots_per_run)
        num_chosen = yield from choose_windows(cost, length, limits, chosen, skips_free=skips_free)
        if num_chosen < len(limits) and len(own):
            cost = yield from self._hot_blocks(cost, float(own[0]), may_go)
            rest = np.full(len(limits) - num_chosen, np.inf)
            yield from choose_windows(cost, length, rest, chosen, skips_free=skips_free)
        return (yield from self._empty(chosen, may_go))

    def _may_go(self, taker: int, paying: Payers) -> Parts[MayGo]:
        """Finds the entries (records in the block table) that may be evicted for the tenant
        `taker`. Returns a function that takes entries and returns a mask of them: True if the entry
        may be evicted. It is valid only for entries that exist now. Yields after each part of the
        work.

        If another tenant has a guarantee (bytes that it is assured of), so that it may lose only
        some entries, these are its coldest entries.

        paying: whose blocks may be evicted (`Payers`).
        """
        books = self._books
        if not books.tenants.is_used or paying is Payers.ANYBODY:
            return self.index.evictable
        allowed = np.zeros(self.index.capacity + 1, np.bool_)
        others: dict[int, list[Ranked]] = {}
        for live in books.walk():
            going = live[self.index.evictable(live)]
            owners = books.owners(going)
            allowed[going[owners == taker]] = paying is Payers.ALL
            yield
            for owner in distinct(owners[owners != taker]).tolist():
                mine = going[owners == owner]
                # Leave out entries that other calls have pinned or evicted since the last yield.
                if len(mine := mine[self.index.evictable(mine)]):
                    others.setdefault(owner, []).append(self._ranked(mine))
                yield
        for owner, parts in others.items():
            for entries in coldest(parts, books.tenants.spare_bytes(owner)):
                allowed[entries] = True
                yield
        return lambda entries: self.index.evictable(entries) & allowed[entries]

    def _ranked(self, entries: Entries) -> Ranked:
        heat = self._books.heat(entries)
        order = np.argsort(heat, kind="stable")
        sizes = self._books.sketches.bytes_with(entries[order])
        return ranks_of(heat[order]), np.append(0, np.cumsum(sizes)), entries[order]

    def _costs(
        self, slot_bytes: int, num_slots: int, may_go: MayGo
    ) -> Parts[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Returns two arrays: the cost of emptying each slab (piece of the arena), and the heats of
        the `num_slots` coldest blocks of this slot size in rising order. (Blocks with the lowest
        heat are evicted first.) Yields after each part.

        The cost of a slab is the heat of the hottest block in its run, the slabs that are emptied
        together. A free slab costs -inf. A slab costs inf if it can't be emptied, has no memory or
        already has slots of this size.

        may_go: returns a mask of the entries (records in the block table) that may be evicted.
        """
        cost, own = np.full(self._pool.num_slabs, -np.inf), np.empty(0)
        for live in self._books.walk():
            heat, (first, last) = self._heat(live, may_go), self._slabs_of(live)
            for step in range(int((last - first).max(initial=0)) + 1):
                spans = first + step <= last
                np.maximum.at(cost, first[spans] + step, heat[spans])
            mine = heat[
                (self.index.slot_bytes(live) == slot_bytes)
                & (heat < np.inf)
                & ~self._books.sketches.linked(live)
            ]
            own = np.append(own, mine)
            if len(own) > 2 * num_slots + PART_ENTRIES:
                own = np.partition(own, num_slots)[:num_slots]
            yield
        owner = self._pool.slab_owner()
        cost[(owner == slot_bytes) | (owner == ABSENT)] = np.inf
        cost = self._of_runs(np.maximum, cost)
        self._keep_floors(cost, owner, slot_bytes)
        return self._of_runs(np.maximum, cost), np.sort(own)[:num_slots]

    def _of_runs(self, put_together: np.ufunc, of_slabs: NDArray[Any]) -> NDArray[Any]:
        """Combines the values of all slabs of a run (range of adjacent slabs of the arena). Returns
        for each slab the combined value of its run.

        of_slabs: a value for each slab.
        put_together: the ufunc that combines two values, for example np.maximum.
        """
        heads = self._pool.slab_head()
        of_runs = of_slabs.copy()
        is_later = heads != np.arange(len(heads))
        put_together.at(of_runs, heads[is_later], of_slabs[is_later])
        return of_runs[heads]

    def _keep_floors(self, cost: NDArray[np.float64], owner: Int64s, slot_bytes: int) -> None:
        """Sets `cost` to inf for slabs (pieces of the arena) that must not be emptied or used for
        this slot size, because slots of other sizes were promised (`SlabFloors`). For each of these
        other sizes, protects as many of its slabs as its promised slots need, the most costly
        first. If it has too few slabs, protects free slabs too.

        cost: cost of emptying each slab; changed in place.
        owner: for each slab, the size of its slots, FREE or ABSENT.
        slot_bytes: the slot size that needs slabs; the slots promised of this size do not count.
        """
        floors = self._pool.floors
        for size in floors.sizes():
            if size != slot_bytes:
                theirs = np.flatnonzero(owner == size)
                order = np.argsort(cost[theirs], kind="stable")
                cost[theirs[order[floors.surplus(size) :]]] = np.inf
        kept = floors.kept_for_others(slot_bytes)
        cost[np.flatnonzero(owner == FREE)[:kept]] = np.inf

    def _hot_blocks(
        self, cost: NDArray[np.float64], own_heat: float, may_go: MayGo
    ) -> Parts[NDArray[np.float64]]:
        """Returns, for each slab (piece of the arena), the number of hot blocks in its run (the
        slabs that are emptied together). A block is hot if it is at least as hot as the coldest
        block of the size that needs the slabs, or if it may not be evicted. The value is inf in two
        cases: more than `HOT_SHARE` of the run's blocks are hot, or the slab can't be emptied (its
        `cost` is inf). Yields after each part.

        own_heat: heat of that coldest block.
        """
        num_slabs = self._pool.num_slabs
        hot, blocks = np.zeros(num_slabs, np.int64), np.zeros(num_slabs, np.int64)
        for live in self._books.walk():
            first, last = self._slabs_of(live)
            hot += blocks_in(first, last, self._heat(live, may_go) >= own_heat, num_slabs)
            blocks += blocks_in(first, last, np.ones(len(live), np.bool_), num_slabs)
            yield
        hot, blocks = self._of_runs(np.add, hot), self._of_runs(np.add, blocks)
        return np.where((cost < np.inf) & (hot <= HOT_SHARE * blocks), hot, np.inf)

    def _empty(self, chosen: BoolMask, may_go: MayGo) -> Parts[int]:
        """Evicts all entries (records in the block table) in the chosen slabs, slab by slab, except
        entries for which `may_go` returns False. Slabs that belong to the same run (range of
        adjacent slabs of the arena) are emptied together. Yields after each part; returns how many
        entries it evicted.

        chosen: mask over all slabs; a run is emptied if one of its slabs is chosen.
        """
        chosen = self._of_runs(np.logical_or, chosen)
        emptied = np.concatenate(([0], np.cumsum(chosen)))

        def lies_there(entries: Entries) -> BoolMask:
            first, last = self._slabs_of(entries)
            there: BoolMask = emptied[last + 1] > emptied[first]
            return there

        found, slabs = [np.empty(0, np.uint32)], [np.empty(0, np.int64)]
        for live in self._books.walk():
            going = live[lies_there(live)]
            found.append(going)
            slabs.append(self._slabs_of(going)[0])
            yield
        going = np.concatenate(found)[np.argsort(np.concatenate(slabs), kind="stable")]
        count = 0
        for start in range(0, len(going), EVICTED_PER_PART):
            # Between two parts an entry number may be reused. The new entry is evicted too if it
            # lies in a chosen slab, and skipped otherwise.
            part = going[start : start + EVICTED_PER_PART]
            part = part[may_go(part)]
            count += self._removal.evict(part[lies_there(part)])
            if start + EVICTED_PER_PART < len(going):
                yield
        return count

    def _slabs_of(self, entries: Entries) -> tuple[Int64s, Int64s]:
        """Returns the first and the last slab (piece of the arena) that each entry's slot
        touches."""
        offsets = self.index.offsets(entries)
        ends = offsets + self.index.slot_bytes(entries) - 1
        return self._pool.slab_of(offsets), self._pool.slab_of(ends)

    def _heat(self, entries: Entries, may_go: MayGo) -> NDArray[np.float64]:
        """Returns the heat of each entry (record in the block table); the entry with the lowest
        heat is evicted first. The heat of an entry that may not be evicted (`may_go` returns False)
        is inf."""
        return np.where(may_go(entries), self._books.heat(entries), np.inf)

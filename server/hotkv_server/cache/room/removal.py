"""`Books` is the state of a tier. `Removal` removes entries: by eviction, flush, or drop (of
entries that never became ready). `Rebalancer` empties slabs for another slot size; runs as in
`slabs`.

Always true: an entry owns exactly one slot, and no two entries share bytes. Slots in use count
for their key space and tenant. A pinned or reserved entry is never evicted.
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
"""Yields after each part of long work, returns the result. Other methods may be called in
between."""


def finished(parts: Parts[T], between: Callable[[], object] = lambda: None) -> T:
    """Runs `parts` to the end; `between` is called after each."""
    while True:
        try:
            next(parts)
            between()
        except StopIteration as end:
            result: T = end.value
            return result


PART_ENTRIES = 1 << 16
"""Entry numbers that a part examines, in a few milliseconds."""
EVICTED_PER_PART = 1 << 12


class Books:
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
        """`parts`: records of removed entries, from `BlockIndex.parts`."""
        for rows in parts:
            slot_bytes = int(rows[0, table.W_SIZE]) * table.SLOT_ALIGN
            offsets = rows[:, table.W_OFFSET].astype(np.int64) * table.SLOT_ALIGN
            self.tenants.count(int(rows[0, table.W_KEY_SPACE]), -len(rows) * slot_bytes)
            self.pool.free(slot_bytes, offsets)

    def free_numbers(self) -> int:
        """Entries that the index can still take."""
        return self.index.limit - self.index.num_entries

    def owners(self, entries: Entries) -> Int64s:
        """Tenant numbers."""
        return self.tenants.of(self.index.table.records[entries, table.W_KEY_SPACE])

    def heat(self, entries: Entries) -> NDArray[np.float64]:
        """A sketch has its block's."""
        return self.policy.heat(self.sketches.blocks_of(entries))

    def walk(self) -> Iterator[Entries]:
        """All entries that are not free, PART_ENTRIES numbers at a time."""
        for start in range(0, self.index.num_numbers, PART_ENTRIES):
            yield (start + np.flatnonzero(self.index.states(start, start + PART_ENTRIES))).astype(
                np.uint32
            )

    def check_invariants(self) -> None:
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


# Removal.
#
# Always true: every evicted or flushed block has a notice, a dropped one has none. A pinned
# block that is flushed becomes detached until `reap`: lookups can't find it.


class Removal:
    """now_s: about now: `CacheCore` sets it when a client connects and when leases expire.
    ages_s: from last use to eviction for room; not counted while `now_s` is 0.
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
        effects, self.effects = self.effects, []
        return effects

    def going(self, entries: Entries) -> Entries:
        """Those that `evict` would evict."""
        return entries[self.index.evictable(entries)]

    def evict(self, entries: Entries, cause: Cause = Cause.ROOM) -> int:
        """Evicts what is ready and unpinned, with notices for blocks but not for sketches.
        Returns how many."""
        going = self.going(entries)
        alone = self._sketches.among(going)
        count = self.evict_blocks(going[~alone], cause)
        # Some sketches have gone with their blocks.
        rest = going[alone]
        rest = rest[self.index.evictable(rest)]
        self._sketches.drop(rest)
        return count + len(rest)

    def evict_blocks(self, entries: Entries, cause: Cause = Cause.ROOM) -> int:
        """As `evict`, for blocks checked to be ready and unpinned."""
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
        """Removes ready blocks; pinned ones become detached."""
        keys = self.index.mixed(entries)
        parts = self.index.parts(self.index.table.records[entries])
        self._give_notice(parts, keys, cause)
        self._books.policy.forget(entries, keys, evicted=False)
        is_pinned = self.index.pins[entries] > 0
        self._books.free_slots(self.index.remove(entries[~is_pinned], keys[~is_pinned]))
        self.index.detach(entries[is_pinned])
        self._sketches.follow(parts)

    def drop(self, entries: Entries, cause: Cause = Cause.NONE) -> None:
        """Removes reserved entries without a notice. NONE is not remembered."""
        keys = self.index.mixed(entries)
        if cause is not Cause.NONE:
            self._removed.add(keys, cause)
        self._books.policy.forget(entries, keys, evicted=False)
        self._books.free_slots(self.index.remove(entries, keys))

    def forsake(self, entries: Entries) -> None:
        """Detaches reserved, pinned entries without a notice: for a tier that hangs while it
        reads into their slots, or whose blocks are flushed meanwhile. It may still write there."""
        self._books.policy.forget(entries, self.index.mixed(entries), evicted=False)
        self.index.detach(entries)

    def reap(self, entries: Entries) -> None:
        """Frees the slots of those that are detached and no longer pinned."""
        if not len(entries):
            return
        detached = (
            self.index.table.records[entries, table.W_GROUP_STATE] >> 16 == table.STATE_DETACHED
        )
        if detached.any():
            gone = np.unique(entries[detached & (self.index.pins[entries] == 0)])
            # Small parts: the copied records stay in the processor's cache.
            for start in range(0, len(gone), EVICTED_PER_PART):
                part = gone[start : start + EVICTED_PER_PART]
                rows = self.index.table.records[part]
                self.index.remove_detached(part)
                self._books.free_slots(self.index.parts(rows))

    def causes(self, key_space_id: int, group_index: int, hashes: Words) -> Causes:
        """NONE if not remembered."""
        return self._removed.causes(self.index.mixed_hashes(key_space_id, group_index, hashes))

    def remember(self, keys: Keys, cause: Cause) -> None:
        """For blocks removed from another tier, or not stored."""
        self._removed.add(keys, cause)

    def _give_notice(self, parts: Sequence[Words], keys: Keys, cause: Cause) -> None:
        """`parts`: records, each array of one key space and group; `keys`: of all."""
        for rows in parts:
            key_space_id = int(rows[0, table.W_KEY_SPACE])
            group_index = int(rows[0, table.W_GROUP_STATE]) & 0xFFFF
            self.effects.append(
                EvictionNotice(key_space_id, group_index, np.ascontiguousarray(rows[:, :8]))
            )
        self._removed.add(keys, cause)


# Emptying slabs


WINDOWS_PER_PART = 64
HOT_SHARE = 0.25
"""Share of a slab's blocks that may be hotter than the coldest of the receiving size. With 0, a
few hot blocks would keep a slab; they are soon stored again."""


# Choosing slabs to empty for the *receiving* slot size. Arrays are by slab. A *window* is as
# many adjacent slabs as a run of that size; it costs as much as its dearest slab. A slab that
# can't be emptied costs inf, a free one -inf.


def dearest_in_windows(cost: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """Cost of the window that begins at each slab."""
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
    """Chooses the cheapest windows, until the i-th would cost `limits[i]`; returns how many.
    Chosen slabs are added to `chosen` and cost inf from then on. `skips_free`: not windows in
    which all slabs are free."""
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
    """Costs that the windows must not reach. Each spares `slots_per_run` of the coldest blocks of
    the receiving size, which would go instead: its limit is the heat of the coldest not spared yet;
    inf if too few can go, because emptying is better than refusing slots.

    own: heats of the coldest blocks of the receiving size, rising.
    num_slots: to make room for.
    """
    spared = np.arange(0, num_slots, slots_per_run)
    next_own = np.append(own, np.inf)[np.minimum(spared, max(0, len(own) - 1))]
    limits: NDArray[np.float64] = np.where(len(own) >= num_slots - spared, next_own, np.inf)
    return limits


def blocks_in(first: Int64s, last: Int64s, counted: BoolMask, num_slabs: int) -> Int64s:
    """Blocks in each slab, wholly or in part, that are `counted`. Block i lies in `first[i]` to
    `last[i]`."""
    starts, ends = (
        np.bincount(at[counted] + after, minlength=num_slabs + 1)
        for at, after in ((first, 0), (last, 1))
    )
    blocks: Int64s = np.cumsum(starts - ends)[:-1]
    return blocks


Ranked = tuple[Int64s, Int64s, Entries]
"""Entries from cold to hot: `ranks_of` their heats; bytes freed with the first 0, 1, 2… of them;
the entries."""


def ranks_of(heat: NDArray[np.float64]) -> Int64s:
    """Integers in the order of the heats."""
    bits = heat.view(np.int64)
    # As integers, the bits of negative floats fall while the floats rise: flip them.
    ranks: Int64s = bits ^ (bits >> 63 & np.iinfo(np.int64).max)
    return ranks


def coldest(parts: Sequence[Ranked], most_bytes: int) -> Iterator[Entries]:
    """The coldest entries of all `parts` that free at most `most_bytes`. Yields an empty array
    after each step of a bisection, then the entries found in each part."""

    def bytes_below(rank: int) -> int:
        return sum(int(sums[np.searchsorted(ranks, rank)]) for ranks, sums, _ in parts)

    low = int(min(ranks[0] for ranks, _, _ in parts))
    high = int(max(ranks[-1] for ranks, _, _ in parts)) + 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if bytes_below(middle) <= most_bytes else (low, middle - 1)
        yield np.empty(0, np.uint32)
    # All colder than rank `low`; of those with just this rank, as many as fit.
    left_bytes = most_bytes - bytes_below(low)
    for ranks, sums, entries in parts:
        begin, end = np.searchsorted(ranks, (low, low + 1))
        more = sums[begin + 1 : end + 1] - sums[begin]
        count = begin + np.searchsorted(more, left_bytes, "right")
        left_bytes -= int(sums[count] - sums[begin])
        yield entries[:count]


MayGo = Callable[[Entries], BoolMask]
"""Mask of the entries that may be evicted."""


class Rebalancer:
    """Empties slabs of other sizes for slots of the receiving size.

    Always true: a slab with a pinned or reserved entry is not chosen. A slab is emptied if its
    blocks are colder than those of the receiving size that would go instead, or if too few of
    those can go. Runs are emptied as a whole: a slab costs the heat of its run's hottest block.
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
        """Empties slabs until `num_slots` slots are free, or `is_enough` if given, or no slab is
        worth it, for each of `payers` in turn."""

        def has_free_slots() -> bool:
            return self._pool.available_slots(slot_bytes) >= num_slots

        is_enough = is_enough or has_free_slots
        slab_bytes = self._pool.slab_bytes
        shortest = (-(-slot_bytes // slab_bytes), max(1, slab_bytes // slot_bytes))
        for paying in payers:
            # Three ways, each only if those before it freed too few slots: runs of full length,
            # which lose the fewest bytes; shortest runs, because pinned blocks may leave only
            # short gaps; and shortest runs, but not where all slabs are free: gaps too short for
            # a slot become longer.
            whole = self._pool.run_of(slot_bytes)
            ways = [(whole, False)] if whole == shortest else [
                (whole, False), (shortest, False), (shortest, True)
            ]  # fmt: skip
            for run, skips_free in ways:
                # Choosing a slab empties its whole run, so the next choice costs less.
                while not is_enough():
                    taking = self._take(slot_bytes, num_slots, run, taker, paying, skips_free)
                    if not (yield from taking):
                        break

    def _take(
        self, slot_bytes: int, num_slots: int, run: tuple[int, int], taker: int, paying: Payers,
        skips_free: bool,
    ) -> Parts[int]:  # fmt: skip
        """Returns how many entries went. First from slabs whose blocks are all colder than the
        coldest of this size, then from those in which at most HOT_SHARE is hotter. `run`: slabs
        and slots of a run."""
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
        """Valid only for entries that exist now. Of a tenant with a guarantee, its coldest may
        go."""
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
                # Some may have been pinned or evicted since the last yield.
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
        """Cost of each slab, and heats of the `num_slots` coldest blocks of this size, rising.
        inf also for a slab that has no memory or this size already."""
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
        """Combines the values of each run's slabs with a ufunc."""
        heads = self._pool.slab_head()
        of_runs = of_slabs.copy()
        is_later = heads != np.arange(len(heads))
        put_together.at(of_runs, heads[is_later], of_slabs[is_later])
        return of_runs[heads]

    def _keep_floors(self, cost: NDArray[np.float64], owner: Int64s, slot_bytes: int) -> None:
        """Makes `cost` inf for slabs that floors of other sizes need: of each size the dearest,
        then free ones."""
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
        """By slab, the hot blocks in its run: at least as hot as `own_heat`, the coldest of the
        receiving size, or not to be evicted. inf above HOT_SHARE, or if `cost` is."""
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
        """Evicts what may go in the runs of chosen slabs, slab by slab; returns how many."""
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
            # A reused entry number goes too, if its new entry lies in a chosen slab.
            part = going[start : start + EVICTED_PER_PART]
            part = part[may_go(part)]
            count += self._removal.evict(part[lies_there(part)])
            if start + EVICTED_PER_PART < len(going):
                yield
        return count

    def _slabs_of(self, entries: Entries) -> tuple[Int64s, Int64s]:
        """First and last slab that each slot touches."""
        offsets = self.index.offsets(entries)
        ends = offsets + self.index.slot_bytes(entries) - 1
        return self._pool.slab_of(offsets), self._pool.slab_of(ends)

    def _heat(self, entries: Entries, may_go: MayGo) -> NDArray[np.float64]:
        """inf for what may not go."""
        return np.where(may_go(entries), self._books.heat(entries), np.inf)

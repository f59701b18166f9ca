"""Making room: evicting until the slots that are asked for are free.

Always true: an entry that is pinned or reserved is never evicted; nothing is evicted while there is
room, nor for slots that the arena's growth brings within moments; a tenant with a burst bound makes
room within its own blocks. Blocks of the same slot size are evicted, coldest first, unless slabs of
other sizes are colder (`Rebalancer`). A representation is evicted alone only if a block needs its
room. Long work goes in parts, and others may take free slots between two: what is missing is
counted anew.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hotkv_server.cache.room.books import EVICTED_PER_PART, PART_ENTRIES, Books, Parts
from hotkv_server.cache.room.removal import Removal
from hotkv_server.cache.room.slabs import ABSENT, FREE
from hotkv_server.cache.room.tenants import Payers
from hotkv_server.cache.values import BoolMask, Entries, Int64s

RUNS_PER_PART = 8
"""Runs of several slabs that one part chooses."""
HOT_SHARE = 0.25
"""Of the blocks in a slab that is taken, most that may be hotter than what its taker would evict
itself. A few hot blocks in every slab must not hold all of them; a hot block comes back, and then
lies beside others."""
REBALANCE_SHARE = 64
"""A slot size is compared with the others each time room for 1/64 of the arena was made for it; one
that grows, more often."""


# Which slabs to empty for a slot size: arithmetic over arrays with one value per slab. A run is as
# many neighbouring slabs as one slot needs; it costs what its dearest slab costs, and a slab that
# cannot be emptied costs inf.


def cheapest_run(cost: NDArray[np.float64], length: int) -> tuple[int, float]:
    """Start and cost of the cheapest run of `length` slabs; inf if there is none."""
    if length > len(cost):
        return 0, np.inf
    highest = (
        cost if length == 1 else np.lib.stride_tricks.sliding_window_view(cost, length).max(axis=1)
    )
    start = int(np.argmin(highest))
    return start, float(highest[start])


def choose_runs(
    cost: NDArray[np.float64], length: int, limits: NDArray[np.float64], chosen: BoolMask
) -> Parts[int]:
    """Marks the cheapest runs one by one, the i-th while it costs less than `limits[i]`; returns
    how many. Their `cost` becomes inf."""
    if length == 1:
        order = np.argsort(cost, kind="stable")[: len(limits)]
        is_cheap = np.append(cost[order] < limits[: len(order)], False)
        order = order[: int(np.argmin(is_cheap))]
        chosen[order], cost[order] = True, np.inf
        return len(order)
    for number, limit in enumerate(limits.tolist()):
        start, highest = cheapest_run(cost, length)
        if not highest < limit:
            return number
        chosen[start : start + length] = True
        cost[start : start + length] = np.inf
        if number % RUNS_PER_PART == RUNS_PER_PART - 1:
            yield
    return len(limits)


def limits_of(own: NDArray[np.float64], num_slots: int, slots_per_slab: int) -> NDArray[np.float64]:
    """What each further run may cost, float64 [runs that `num_slots` slots need].

    `own`: heat of the size's own coldest blocks, rising. A run that spares the first i of them may
    cost as much as the next one; inf if there are too few: any slab is better than a refusal.
    """
    spared = np.arange(0, num_slots, slots_per_slab)
    next_own = np.append(own, np.inf)[np.minimum(spared, max(0, len(own) - 1))]
    limits: NDArray[np.float64] = np.where(len(own) >= num_slots - spared, next_own, np.inf)
    return limits


def blocks_in(first: Int64s, last: Int64s, counted: BoolMask, num_slabs: int) -> Int64s:
    """Per slab, how many of the counted blocks lie in it, wholly or in part. Block i lies in slabs
    `first[i]` to `last[i]`."""
    starts, ends = (
        np.bincount(at[counted] + after, minlength=num_slabs + 1)
        for at, after in ((first, 0), (last, 1))
    )
    blocks: Int64s = np.cumsum(starts - ends)[:-1]
    return blocks


MayGo = Callable[[Entries], BoolMask]


class Rebalancer:
    """Empties slabs that are lent to one slot size for another. Keeps nothing between two calls.

    Always true: a slab with an entry that is pinned or reserved is not chosen; whose entries may be
    evicted for whom is as `tenants` says. A slab is taken if it is colder than what the taker would
    evict of its own size, or if that size has not enough to evict. The cost of a slab is the heat
    of its hottest block; a representation is as hot as its block.
    """

    def __init__(self, books: Books, removal: Removal) -> None:
        self._books = books
        self.index = books.index
        self._pool = books.pool
        self._removal = removal

    def __repr__(self) -> str:
        return f"Rebalancer({self._pool!r})"

    def take_until(
        self, slot_bytes: int, num_slots: int, taker: int, payers: Sequence[Payers]
    ) -> Parts[None]:
        """Takes slabs of other sizes until `num_slots` slots are free, or none is worth taking.

        `payers`: whose blocks may be evicted, tried in this order.
        """
        for paying in payers:
            # In turns: if slots span slabs, emptying the chosen ones empties others too, and the
            # next choice costs less.
            while self._pool.available_slots(slot_bytes) < num_slots:
                if not (yield from self._take(slot_bytes, num_slots, taker, paying)):
                    break

    def _take(self, slot_bytes: int, num_slots: int, taker: int, paying: Payers) -> Parts[int]:
        """Empties slabs that are lent to other sizes; returns how many entries were evicted.

        First slabs that are wholly colder than the size's own coldest blocks, then those that are
        but for `HOT_SHARE` of their blocks. Free slabs count as chosen.
        """
        may_go = yield from self._may_go(taker, paying)
        cost, own = yield from self._costs(slot_bytes, num_slots, may_go)
        chosen = np.zeros(self._pool.num_slabs, np.bool_)
        slots_per_slab = max(1, self._pool.slab_bytes // slot_bytes)
        length = -(-slot_bytes // self._pool.slab_bytes)
        limits = limits_of(own, num_slots, slots_per_slab)
        num_runs = yield from choose_runs(cost, length, limits, chosen)
        if num_runs < len(limits) and len(own):
            cost = yield from self._hot_blocks(cost, float(own[0]), may_go)
            yield from choose_runs(cost, length, np.full(len(limits) - num_runs, np.inf), chosen)
        return (yield from self._empty(chosen, may_go))

    def _may_go(self, taker: int, paying: Payers) -> Parts[MayGo]:
        """Which entries may be evicted, coldest first, when a tenant takes slabs.

        The answer is about entries that are there now.
        """
        books = self._books
        if not books.tenants.is_used or paying is Payers.ANYBODY:
            return self.index.evictable
        found = [np.empty(0, np.uint32)]
        for live in books.walk():
            mine = self.index.evictable(live)
            if paying is Payers.OTHERS:
                mine &= books.owners(live) != taker
            found.append(live[mine])
            yield
        going = np.concatenate(found)
        going = going[np.argsort(books.heat(going), kind="stable")]
        sizes = books.representations.bytes_with(going)
        allowed = np.zeros(self.index.capacity + 1, np.bool_)
        allowed[going[books.tenants.within(books.owners(going), sizes, taker)]] = True
        return lambda entries: self.index.evictable(entries) & allowed[entries]

    def _costs(
        self, slot_bytes: int, num_slots: int, may_go: MayGo
    ) -> Parts[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Cost of each slab, and the heat of the `num_slots` coldest blocks of this size, rising.

        A free slab costs -inf. A slab costs inf if it cannot be emptied, has no memory or is lent
        to this size.
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
                & ~self._books.representations.linked(live)
            ]
            own = np.append(own, mine)
            if len(own) > 2 * num_slots + PART_ENTRIES:
                own = np.partition(own, num_slots)[:num_slots]
            yield
        owner = self._pool.slab_owner()
        cost[(owner == slot_bytes) | (owner == ABSENT)] = np.inf
        self._keep_floors(cost, owner, slot_bytes)
        return cost, np.sort(own)[:num_slots]

    def _keep_floors(self, cost: NDArray[np.float64], owner: Int64s, slot_bytes: int) -> None:
        """Makes slabs cost inf that other sizes were promised: the dearest of each down to its
        floor, and as many free ones as they are short of."""
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
        """Per slab the number of its blocks that are no colder than `own_heat`; inf beyond
        `HOT_SHARE` of them, or if its `cost` is inf."""
        num_slabs = self._pool.num_slabs
        hot, blocks = np.zeros(num_slabs, np.int64), np.zeros(num_slabs, np.int64)
        for live in self._books.walk():
            first, last = self._slabs_of(live)
            hot += blocks_in(first, last, self._heat(live, may_go) >= own_heat, num_slabs)
            blocks += blocks_in(first, last, np.ones(len(live), np.bool_), num_slabs)
            yield
        return np.where((cost < np.inf) & (hot <= HOT_SHARE * blocks), hot, np.inf)

    def _empty(self, chosen: BoolMask, may_go: MayGo) -> Parts[int]:
        """Evicts the entries of the chosen slabs, slab by slab; returns how many."""
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
            # An entry that came to the slab meanwhile under one of these numbers is evicted too; a
            # number whose entry now lies elsewhere is left alone.
            part = going[start : start + EVICTED_PER_PART]
            part = part[may_go(part)]
            count += self._removal.evict(part[lies_there(part)])
            if start + EVICTED_PER_PART < len(going):
                yield
        return count

    def _slabs_of(self, entries: Entries) -> tuple[Int64s, Int64s]:
        """The first and last slab in which each entry lies."""
        first = self._pool.slab_of(self.index.offsets(entries))
        return first, first + (self.index.slot_bytes(entries) - 1) // self._pool.slab_bytes

    def _heat(self, entries: Entries, may_go: MayGo) -> NDArray[np.float64]:
        """Heat of entries; inf for those that may not go."""
        return np.where(may_go(entries), self._books.heat(entries), np.inf)


class Room:
    """Makes room in one tier. `coming_bytes`: of the arena, what gets memory within moments, less
    what was refused for it. `may_keep`: False for a tier, and above one:
    tiers get only what had room here."""

    def __init__(self, books: Books, removal: Removal) -> None:
        self.coming_bytes = 0
        self.may_keep = True
        self._books, self._pool, self._tenants = books, books.pool, books.tenants
        self._removal = removal
        self._rebalancer = Rebalancer(books, removal)
        # Per slot size, bytes that room was made for since it was compared with the others. A size
        # that is not in here is due, and so is one that grows.
        self._pressure_bytes: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"Room({self._pool!r}, {self.coming_bytes} B coming)"

    def make(
        self,
        size: int,
        count: int,
        taker: int,
        *,
        is_block: bool,
        has_promise: bool = False,
        keep_at_s: float | None = None,
    ) -> Parts[None]:
        """Makes room for `count` slots of a tenant, as far as something may be evicted for it.

        `is_block`: other representations may go for it; so they may if it `has_promise`.
        `keep_at_s`: as in `Policy.victims`. Nothing is kept from a tenant within its guarantee; nor
        while others would pay for it: several slot sizes, representations, or tiers.
        """
        shares = self._books.representations.declared or self._pool.is_shared(size)
        self._books.policy.allow_keeping(self.may_keep and not shares)
        for wanted in self._tenants.portions(taker, size, count):
            if self._pool.available_slots(size) < wanted:
                is_due = shares or self._tenants.may_claim(taker, wanted * size)
                yield from self._make_slots(size, wanted, taker, None if is_due else keep_at_s)
        if is_block or has_promise:
            yield from self._drop_representations(
                size, lambda: count - self._pool.available_slots(size), taker
            )

        def missing_numbers() -> int:
            return min(count, self._pool.available_slots(size)) - self._books.free_numbers()

        yield from self._evict_coldest(0, missing_numbers, taker)
        if is_block:
            yield from self._drop_representations(0, missing_numbers, taker)

    def make_floors(self, more: Mapping[int, int], taker: int) -> Parts[None]:
        """Frees slabs until so many slots more by size could be promised to a tenant, as far as
        something may be evicted for it. What was promised meanwhile is not given to others."""
        floors = self._pool.floors
        for size, count in more.items():
            floors.add(size, count)
        try:
            for size in more:
                missing = floors.missing(size)
                if missing and floors.shortfall:
                    slots = max(1, self._pool.slab_bytes // size) * missing
                    wanted = self._pool.free_slots(size) + -(-slots // self._spans(size))
                    payers = self._payers(taker, missing * self._pool.slab_bytes)
                    yield from self._rebalancer.take_until(size, wanted, taker, payers)
        finally:
            for size, count in more.items():
                floors.add(size, -count)

    def _spans(self, size: int) -> int:
        return -(-size // self._pool.slab_bytes)

    def coming_slots(self, size: int, count: int) -> int:
        """How many of `count` slots the arena's growth makes room for within moments."""
        if not self.coming_bytes:
            return 0
        missing = count - self._pool.available_slots(size)
        return max(0, min(missing, self.coming_bytes // size))

    def refuse_coming(self, size: int, count: int) -> int:
        """As `coming_slots`, and counts them as refused: their bytes are not coming any more."""
        refused = self.coming_slots(size, count)
        self.coming_bytes -= refused * size
        return refused

    def within_bound(self, taker: int, size: int, count: int) -> int:
        """How many of `count` slots a tenant may have under its burst bound, after its own coldest
        blocks have made room for them."""
        if not self._tenants.is_used:
            return count
        count = min(count, self._tenants.burst_bytes(taker) // size)
        for slot_bytes in (size, 0):
            while (short := count - self._tenants.room_bytes(taker) // size) > 0:
                if not self._evict_for(taker, slot_bytes, short, lambda owners: owners == taker):
                    break
        return min(count, self._tenants.room_bytes(taker) // size)

    def _make_slots(
        self, slot_bytes: int, num_slots: int, taker: int, keep_at_s: float | None
    ) -> Parts[None]:
        """Evicts until `num_slots` slots of this size are free, or nothing more may be evicted for
        the tenant."""
        # Taken now: the tenant gets no new claim by evicting its own blocks.
        payers = self._payers(taker, num_slots * slot_bytes)
        shared = self._pool.is_shared(slot_bytes)
        if shared:
            yield from self._compare(slot_bytes, num_slots, taker)
        yield from self._evict_coldest(
            slot_bytes, lambda: num_slots - self._pool.available_slots(slot_bytes), taker, keep_at_s
        )
        if shared:
            yield from self._rebalancer.take_until(slot_bytes, num_slots, taker, payers)

    def _compare(self, slot_bytes: int, num_slots: int, taker: int) -> Parts[None]:
        """Takes colder slabs of other sizes, if this size is due.

        Comparing looks at every entry, so it makes room for a share of the arena at a time.
        """
        share_bytes = self._pool.capacity_bytes // REBALANCE_SHARE
        missing_bytes = (num_slots - self._pool.available_slots(slot_bytes)) * slot_bytes
        pressure_bytes = self._pressure_bytes.get(slot_bytes, share_bytes) + missing_bytes
        if pressure_bytes >= share_bytes:
            wanted = max(num_slots, share_bytes // slot_bytes)
            yield from self._rebalancer.take_until(
                slot_bytes, wanted, taker, self._payers(taker, wanted * slot_bytes)[:1]
            )
            grew = self._pool.available_slots(slot_bytes) >= wanted
            pressure_bytes = share_bytes if grew else 0
        self._pressure_bytes[slot_bytes] = pressure_bytes

    def _payers(self, taker: int, more_bytes: int) -> tuple[Payers, ...]:
        """Whose blocks are evicted first, and whose if that is not enough."""
        return (
            (Payers.OTHERS, Payers.ALL, Payers.ANYBODY)
            if self._tenants.may_claim(taker, more_bytes)
            else (Payers.ALL,)
        )

    def _evict_coldest(
        self,
        slot_bytes: int,
        missing: Callable[[], int],
        taker: int,
        keep_at_s: float | None = None,
    ) -> Parts[None]:
        """Evicts the coldest blocks of a slot size (0: of any) that may be evicted for this tenant,
        until none is missing."""
        while (count := missing()) > 0:
            part = min(count, EVICTED_PER_PART)
            if not self._tenants.is_used:
                evicted = yield from self._evict_any(slot_bytes, part, keep_at_s)
            else:
                evicted = 0
                if self._tenants.may_claim(taker, part * slot_bytes):
                    evicted = self._evict_for(
                        taker, slot_bytes, part, lambda owners: owners != taker, keep_at_s
                    )
                evicted += self._evict_for(
                    taker, slot_bytes, part - evicted, lambda owners: owners >= 0, keep_at_s
                )
            if evicted < part:
                return
            if missing() > 0:
                yield

    def _evict_any(self, slot_bytes: int, count: int, keep_at_s: float | None) -> Parts[int]:
        """Evicts up to `count` of the coldest blocks, whoever's; returns how many."""
        policy = self._books.policy

        def may_go(entries: Entries) -> BoolMask:
            return self._books.index.evictable(entries, slot_bytes)

        yield from policy.sweep(slot_bytes, count, may_go)
        return self._removal.evict_blocks(
            policy.victims(slot_bytes, count, may_go, keep_at_s=keep_at_s)
        )

    def _evict_for(
        self,
        taker: int,
        slot_bytes: int,
        count: int,
        may_pay: Callable[[Int64s], BoolMask],
        keep_at_s: float | None = None,
    ) -> int:
        """Evicts up to `count` of the coldest blocks of those tenants that `may_pay`, none below
        its guarantee; returns how many."""
        books, evicted = self._books, 0

        def evictable(entries: Entries) -> BoolMask:
            owners = books.owners(entries)
            mask: BoolMask = books.index.evictable(entries, slot_bytes) & may_pay(owners)
            sizes = books.representations.bytes_with(entries)
            return mask & self._tenants.may_give(owners, sizes, taker)

        while evicted < count:
            victims = books.policy.victims(
                slot_bytes, count - evicted, evictable, keep_at_s=keep_at_s
            )
            # Each of them may be evicted, but perhaps not all.
            sizes = books.representations.bytes_with(victims)
            victims = victims[self._tenants.within(books.owners(victims), sizes, taker)]
            if not self._removal.evict_blocks(victims):
                break
            evicted += len(victims)
        return evicted

    def _drop_representations(
        self, slot_bytes: int, missing: Callable[[], int], taker: int
    ) -> Parts[None]:
        """Drops representations of the coldest blocks, of one slot size (0: of any), until none is
        missing; the blocks stay."""
        books, representations = self._books, self._books.representations
        if not representations.declared or missing() <= 0:
            return
        found = [np.empty(0, np.uint32)]
        for live in books.walk():
            mine = live[representations.among(live)]
            found.append(mine[books.index.evictable(mine, slot_bytes)])
            yield
        entries = np.concatenate(found)
        entries = entries[np.argsort(books.heat(entries), kind="stable")]
        if self._tenants.is_used:
            sizes = books.index.slot_bytes(entries)
            entries = entries[self._tenants.within(books.owners(entries), sizes, taker)]
        for start in range(0, len(entries), EVICTED_PER_PART):
            # Between two parts an entry may be removed, and its number given to another.
            part = entries[start : start + EVICTED_PER_PART]
            part = part[representations.among(part)]
            part = part[books.index.evictable(part, slot_bytes)]
            representations.drop(part[: max(0, missing())])
            if missing() <= 0:
                return
            yield

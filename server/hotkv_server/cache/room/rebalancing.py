"""Rebalancing: slabs that are lent to one slot size are emptied for another.

Always true: a slab with an entry that is pinned or reserved is not chosen; whose entries may be
evicted for whom is as `tenants` says. A slab is taken if it is colder than what the taker would
evict of its own size, or if that size has not enough to evict. The cost of a slab is the heat of
its hottest block; a representation is as hot as its block.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hotkv_server.cache.room.books import EVICTED_PER_PART, PART_ENTRIES, Books, Parts
from hotkv_server.cache.room.removal import Removal
from hotkv_server.cache.room.slab_choice import blocks_in, choose_runs, limits_of
from hotkv_server.cache.room.slabs import ABSENT, FREE
from hotkv_server.cache.room.tenants import Payers
from hotkv_server.cache.values import BoolMask, Entries, Int64s

HOT_SHARE = 0.25
"""Of the blocks in a slab that is taken, most that may be hotter than what its taker would evict
itself. A few hot blocks in every slab must not hold all of them; a hot block comes back, and then
lies beside others."""
MayGo = Callable[[Entries], BoolMask]


class Rebalancer:
    """Takes slabs from slot sizes for others. It keeps nothing between two calls."""

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

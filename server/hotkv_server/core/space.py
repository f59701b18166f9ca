"""Slots, index and policy together: reserving, publishing, evicting.

Always true: an entry of the index owns exactly one slot of the pool and no slot is owned twice; an
entry that is pinned or reserved is never evicted; what is evicted is reported as an effect. Evict
on allocate: room is made only when it is needed, and not for what the arena's growth makes room for
within moments. Making room can take long, so it goes in parts (`make_room`): who can't wait for all
of it asks for it before it inserts (`makes_room` False), else `insert` does it in one go.
Representations are entries too, but nothing is decided by them: see `representations`.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hotkv import table
from hotkv.keys import MAX_GROUPS
from hotkv.retention import NO_RETENTION, Retention
from hotkv.table import BlockTable, Words
from hotkv_server.core.index import BlockIndex, Keys
from hotkv_server.core.policies.protocol import Policy
from hotkv_server.core.representations import Representations
from hotkv_server.core.slabs import ABSENT, SlabPool, aligned
from hotkv_server.core.tenants import Payers, TenantBook
from hotkv_server.core.values import BoolMask, Entries, EvictionNotice, Int64s, TenantShare

_NO_SHARES: Mapping[str, TenantShare] = {}
T = TypeVar("T")
Parts = Generator[None, None, T]
"""Long work: what it yields between is its parts, what it returns its result. Between two parts
anything else may be called."""

GHOST_KEYS = 1 << 16
"""Evicted keys remembered for `explain`."""
REBALANCE_SHARE = 64
"""A slot size is compared with the others each time room for 1/64 of the arena had to be made for
it; one that grows, more often."""
HOT_SHARE = 0.25
"""Of the blocks in a slab that is taken, most that may be hotter than what its taker would evict
itself. A few hot blocks in every slab must not hold all of them; what is hot comes back, and then
lies together."""


def _cheapest_run(cost: NDArray[np.float64], length: int) -> tuple[int, float]:
    """Start and highest cost of the `length` neighbours whose highest cost is lowest; inf where
    there are none."""
    if length > len(cost):
        return 0, np.inf
    highest = (
        cost if length == 1 else np.lib.stride_tricks.sliding_window_view(cost, length).max(axis=1)
    )
    start = int(np.argmin(highest))
    return start, float(highest[start])


def _choose_runs(
    cost: NDArray[np.float64], length: int, limits: NDArray[np.float64], chosen: NDArray[np.bool_]
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
        start, highest = _cheapest_run(cost, length)
        if not highest < limit:
            return number
        chosen[start : start + length] = True
        cost[start : start + length] = np.inf
        if number % RUNS == RUNS - 1:
            yield
    return len(limits)


PART_ENTRIES = 1 << 16
"""Entry numbers that are looked at in one part of something long: in a few milliseconds."""
EVICTED = 1 << 12
"""Entries that go in one part."""
RUNS = 8
"""Runs of slabs that are chosen in one part."""
REFRESH_S = 1.0
"""How much older the last use of a block may be than that of any block after it."""
MAX_REFRESHED = 1 << 14


class Space:
    """All slots of one tier and the entries that own them. `is_backed`: as in `SlabPool`; where it
    is False `grow` is to be called."""

    def __init__(
        self, block_table: BlockTable, arena_bytes: int, slab_bytes: int, policy: Policy,
        shares: Mapping[str, TenantShare] = _NO_SHARES,
        *, is_backed: bool = True, makes_room: bool = True,
    ) -> None:  # fmt: skip
        self.makes_room = makes_room
        self.index = BlockIndex(block_table)
        self.pool = SlabPool(arena_bytes, slab_bytes, is_backed=is_backed)
        self.tenants = TenantBook(shares, self.pool.num_slabs * slab_bytes)
        self.tenants.capacity_bytes = self.pool.capacity_bytes
        self.policy = policy
        self.representations = Representations(self.index, self._free_slots)
        self.evicted_blocks = 0
        self.effects: list[EvictionNotice] = []
        self._ghosts = np.zeros(GHOST_KEYS, np.uint64)
        self._next_ghost = 0
        # Sorted when somebody asks, and kept until the next eviction: a question may be about
        # thousands of groups.
        self._sorted_ghosts: NDArray[np.uint64] | None = None
        # Per slot size, what room was made for since it was compared with the others; sizes
        # unknown, and those that grow, are due.
        self._pressure_bytes: dict[int, int] = {}
        self._coming_bytes = 0

    def __repr__(self) -> str:
        return f"Space({self.index!r}, {self.pool!r})"

    def grow(self, num_bytes: int, coming_bytes: int) -> None:
        """The first `num_bytes` of the arena have memory now. `coming_bytes`: about how much more
        gets some within moments.

        Until the next call, calls are refused as many bytes as that, which would else cost blocks:
        who stores them is better off without than others without theirs, as there is room for both
        soon. What is wanted beyond that evicts as ever.
        """
        self.pool.back(num_bytes)
        self.tenants.capacity_bytes = self.pool.capacity_bytes
        self._coming_bytes = coming_bytes

    def insert(
        self,
        key_space_id: int,
        group_index: int,
        hashes: Words,
        slot_bytes: int,
        depths: Int64s,
        lease: int,
    ) -> Entries:
        """Reserves slots for keys that are not in the index, evicting where it must; as many as
        possible, from the first on.

        While the arena grows, fewer: see `grow`. Without `makes_room` nothing is evicted, but for
        what a burst bound asks.
        """
        size, taker = aligned(slot_bytes), self.tenants.number(key_space_id)
        hashes = hashes[: len(hashes) - self._awaited(size, len(hashes))]
        hashes = hashes[: self._within_bound(taker, size, len(hashes))]
        if self.makes_room:
            for _ in self._make_room(size, len(hashes), taker, is_block=group_index < MAX_GROUPS):
                pass
        offsets = self.pool.allocate(size, min(len(hashes), self._free_numbers()))
        n = len(offsets)
        entries = self.index.insert(
            key_space_id, group_index, hashes[:n], offsets, size, depths[:n], lease
        )
        self.pool.free(size, offsets[len(entries) :])
        self.tenants.count(key_space_id, len(entries) * size)
        return entries

    def make_room(
        self, key_space_id: int, group_index: int, slot_bytes: int, count: int
    ) -> Iterator[None]:
        """Makes room for an `insert` of so many keys, in parts; no part where there is room, or
        little is to be done."""
        size, taker = aligned(slot_bytes), self.tenants.number(key_space_id)
        count -= self._coming_slots(size, count)
        return self._make_room(
            size, self._within_bound(taker, size, count), taker, is_block=group_index < MAX_GROUPS
        )

    def _make_room(self, size: int, count: int, taker: int, *, is_block: bool) -> Parts[None]:
        for wanted in self.tenants.portions(taker, size, count):
            if self.pool.available_slots(size) < wanted:
                yield from self._make_slots(size, wanted, taker)
        if is_block:
            yield from self._drop_representations(
                size, lambda: count - self.pool.available_slots(size), taker
            )

        def missing_numbers() -> int:
            return min(count, self.pool.available_slots(size)) - self._free_numbers()

        yield from self._evict_coldest(0, missing_numbers, taker)
        if is_block:
            yield from self._drop_representations(0, missing_numbers, taker)

    def _coming_slots(self, size: int, count: int) -> int:
        """For how many of `count` slots no room is made, as the arena's growth will make it within
        moments."""
        return (
            max(0, min(count - self.pool.available_slots(size), self._coming_bytes // size))
            if self._coming_bytes
            else 0
        )

    def _awaited(self, size: int, count: int) -> int:
        """The same; they count as given."""
        awaited = self._coming_slots(size, count)
        self._coming_bytes -= awaited * size
        return awaited

    def _within_bound(self, taker: int, size: int, count: int) -> int:
        """How many slots a tenant may have under its burst bound, after its own coldest blocks have
        made room for them."""
        if not self.tenants.is_used:
            return count
        count = min(count, self.tenants.burst_bytes(taker) // size)
        for slot_bytes in (size, 0):
            while (short := count - self.tenants.room_bytes(taker) // size) > 0:
                if not self._evict_for(taker, slot_bytes, short, lambda owners: owners == taker):
                    break
        return min(count, self.tenants.room_bytes(taker) // size)

    def _free_numbers(self) -> int:
        return self.index.limit - self.index.num_entries

    def _drop_representations(
        self, slot_bytes: int, count: Callable[[], int], taker: int
    ) -> Parts[None]:
        """Drops up to `count()` representations of the coldest blocks, of one slot size unless that
        is 0; the blocks stay."""
        if not self.representations.declared or count() <= 0:
            return
        found = [np.empty(0, np.uint32)]
        for live in self._walk():
            mine = live[self.representations.among(live)]
            found.append(mine[self.index.evictable(mine, slot_bytes)])
            yield
        entries = np.concatenate(found)
        entries = entries[
            np.argsort(self.policy.heat(self.representations.blocks_of(entries)), kind="stable")
        ]
        if self.tenants.is_used:
            entries = entries[
                self.tenants.within(self._owners(entries), self.index.slot_bytes(entries), taker)
            ]
        for start in range(0, len(entries), EVICTED):
            # Some may have gone since, and their numbers have other entries.
            part = entries[start : start + EVICTED]
            part = part[self.representations.among(part)]
            part = part[self.index.evictable(part, slot_bytes)]
            self.representations.drop(part[: max(0, count())])
            if count() <= 0:
                return
            yield

    def _walk(self) -> Iterator[Entries]:
        """All entries that are not free, a part at a time."""
        for start in range(0, self.index.num_numbers, PART_ENTRIES):
            yield (start + np.flatnonzero(self.index.states(start, start + PART_ENTRIES))).astype(
                np.uint32
            )

    def publish(
        self,
        entries: Entries,
        now_s: float,
        retention: Retention = NO_RETENTION,
        checks: Keys | None = None,
        keys: Keys | None = None,
    ) -> None:
        """Makes reserved entries, in chain order, ready and used. `checks` uint64 [n]: their check
        values, none if not given.

        `keys`: of `BlockIndex.mixed`, if the caller has them.
        """
        keys = self.index.mixed(entries) if keys is None else keys
        self.index.publish(
            entries, keys, np.zeros(len(entries), np.uint64) if checks is None else checks
        )
        self.policy.admit(entries, keys, now_s, retention)

    def touch(self, entries: Entries, now_s: float, retention: Retention = NO_RETENTION) -> None:
        """Notes a use of ready entries, in chain order."""
        self.policy.touch(entries, self.index.mixed(entries), now_s, retention)

    def refresh_ancestors(self, entry: int, now_s: float) -> None:
        """What comes before a block in its chain counts as in use with it, lest the chain lose its
        head first."""
        chain = self.index.ancestors(entry, MAX_REFRESHED)
        if not len(chain):
            return
        with_block = np.append(chain, np.uint32(entry))
        heat = self.policy.heat(with_block)
        if self.policy.last_used_s(chain).min() < now_s - REFRESH_S or heat[:-1].min() <= heat[-1]:
            self.policy.refresh(with_block, now_s)

    def drop(self, entries: Entries) -> None:
        """Removes entries and frees their slots, without a notice: reserved ones that will not be
        written."""
        keys = self.index.mixed(entries)
        self.policy.forget(entries, keys, evicted=False)
        self._free_slots(self.index.remove(entries, keys))

    def _free_slots(self, parts: list[Words], *, for_reuse: bool = False) -> None:
        """Frees the slots of records that are gone, given in parts of one slot size."""
        for rows in parts:
            offsets = rows[:, table.W_OFFSET].astype(np.int64) * table.SLOT_ALIGN
            self.tenants.count(
                int(rows[0, table.W_KEY_SPACE]),
                -len(rows) * int(rows[0, table.W_SIZE]) * table.SLOT_ALIGN,
            )
            self.pool.free(
                int(rows[0, table.W_SIZE]) * table.SLOT_ALIGN, offsets, for_reuse=for_reuse
            )

    def evict(self, entries: Entries) -> int:
        """Removes ready entries that are not pinned, blocks with a notice; returns how many that
        were."""
        going = entries[self.index.evictable(entries)]
        alone = self.representations.among(going)
        count = self._evict_checked(going[~alone])
        # Some of the representations have gone with their blocks.
        rest = going[alone]
        rest = rest[self.index.evictable(rest)]
        self.representations.drop(rest)
        return count + len(rest)

    def flush(self, entries: Entries) -> None:
        """Removes ready blocks, with a notice. Pinned ones can't be found any more and keep their
        slots until they are reaped."""
        keys = self.index.mixed(entries)
        parts = self.index.parts(self.index.table.records[entries])
        self._give_notice(parts, keys)
        self.policy.forget(entries, keys, evicted=False)
        is_pinned = self.index.pins[entries] > 0
        self._free_slots(self.index.remove(entries[~is_pinned], keys[~is_pinned]))
        self.index.detach(entries[is_pinned])
        self.representations.follow(parts)

    def reap(self, entries: Entries) -> None:
        """Frees the slots of those among the entries that are detached and not pinned any more."""
        detached = (
            self.index.table.records[entries, table.W_GROUP_STATE] >> 16 == table.STATE_DETACHED
        )
        if detached.any():
            gone = np.unique(entries[detached & (self.index.pins[entries] == 0)])
            # Not all in one go: copies of a few records stay in the processor's cache.
            for start in range(0, len(gone), EVICTED):
                part = gone[start : start + EVICTED]
                rows = self.index.table.records[part]
                self.index.remove_detached(part)
                self._free_slots(self.index.parts(rows))

    def _evict_checked(self, entries: Entries, *, for_reuse: bool = False) -> int:
        if len(entries):
            keys = self.index.mixed(entries)
            self.policy.forget(entries, keys, evicted=True)
            parts = self.index.remove(entries, keys)
            self._give_notice(parts, keys)
            self._free_slots(parts, for_reuse=for_reuse)
            self.representations.follow(parts)
            self.evicted_blocks += len(entries)
        return len(entries)

    def _give_notice(self, parts: list[Words], keys: Keys) -> None:
        """Tells the sessions which blocks go, by their records in parts of one owner, and remembers
        their keys."""
        for rows in parts:
            key_space_id, group_index = (
                int(rows[0, table.W_KEY_SPACE]),
                int(rows[0, table.W_GROUP_STATE]) & 0xFFFF,
            )
            self.effects.append(
                EvictionNotice(key_space_id, group_index, np.ascontiguousarray(rows[:, :8]))
            )
        last = keys[-GHOST_KEYS:]
        at = self._next_ghost
        self._next_ghost = (at + len(last)) % GHOST_KEYS
        self._sorted_ghosts = None
        fitting = min(len(last), GHOST_KEYS - at)
        self._ghosts[at : at + fitting] = last[:fitting]
        self._ghosts[: len(last) - fitting] = last[fitting:]

    def was_evicted(self, key_space_id: int, group_index: int, hashes: Words) -> NDArray[np.bool_]:
        """Which keys [n] are among the last evicted."""
        keys = self.index.mixed_hashes(key_space_id, group_index, hashes)
        if self._sorted_ghosts is None:
            self._sorted_ghosts = np.sort(self._ghosts)
        places = np.minimum(np.searchsorted(self._sorted_ghosts, keys), GHOST_KEYS - 1)
        evicted: NDArray[np.bool_] = self._sorted_ghosts[places] == keys
        return evicted

    def used_bytes(self) -> int:
        """Bytes in slots that are reserved or ready."""
        return sum(s.slot_bytes * s.num_used for s in self.pool.stats())

    def _make_slots(self, slot_bytes: int, num_slots: int, taker: int) -> Parts[None]:
        """Evicts until a tenant can have `num_slots` slots of this size, or nothing more may go for
        it."""
        # What goes of its own blocks meanwhile gives it no claim that it did not have.
        shared, payers = (
            self.pool.is_shared(slot_bytes),
            self._payers(taker, num_slots * slot_bytes),
        )
        if shared:
            # Comparing with other sizes looks at every entry; so it is done for a share of the
            # arena at a time.
            share_bytes = self.pool.capacity_bytes // REBALANCE_SHARE
            missing_bytes = (num_slots - self.pool.available_slots(slot_bytes)) * slot_bytes
            pressure_bytes = self._pressure_bytes.get(slot_bytes, share_bytes) + missing_bytes
            if pressure_bytes >= share_bytes:
                wanted = max(num_slots, share_bytes // slot_bytes)
                yield from self._take_until(
                    slot_bytes, wanted, taker, self._payers(taker, wanted * slot_bytes)[:1]
                )
                pressure_bytes = (
                    share_bytes if self.pool.available_slots(slot_bytes) >= wanted else 0
                )
            self._pressure_bytes[slot_bytes] = pressure_bytes
        yield from self._evict_coldest(
            slot_bytes, lambda: num_slots - self.pool.available_slots(slot_bytes), taker
        )
        if shared:
            yield from self._take_until(slot_bytes, num_slots, taker, payers)

    def _payers(self, taker: int, more_bytes: int) -> tuple[Payers, ...]:
        """Whose blocks go first, and whose where that is not enough."""
        return (
            (Payers.OTHERS, Payers.ALL, Payers.ANYBODY)
            if self.tenants.may_claim(taker, more_bytes)
            else (Payers.ALL,)
        )

    def _take_until(
        self, slot_bytes: int, num_slots: int, taker: int, payers: Sequence[Payers]
    ) -> Parts[None]:
        """Takes slabs of other sizes until there is room, or none is worth taking."""
        for paying in payers:
            # Again, because what is emptied is more than what was chosen where slots span slabs.
            while self.pool.available_slots(slot_bytes) < num_slots:
                if not (yield from self._take_cold_slabs(slot_bytes, num_slots, taker, paying)):
                    break

    def _evict_coldest(
        self, slot_bytes: int, missing: Callable[[], int], taker: int
    ) -> Parts[None]:
        """Evicts the coldest blocks of a slot size (0: of any) that may go for this tenant, until
        none is missing.

        Others may take what is free between two parts, so it is counted anew.
        """
        while (count := missing()) > 0:
            part = min(count, EVICTED)
            if not self.tenants.is_used:

                def may_go(entries: Entries) -> BoolMask:
                    return self.index.evictable(entries, slot_bytes)

                yield from self.policy.sweep(slot_bytes, part, may_go)
                evicted = self._evict_checked(
                    self.policy.victims(slot_bytes, part, may_go),
                    for_reuse=self.makes_room and slot_bytes > 0,
                )
            else:
                evicted = 0
                if self.tenants.may_claim(taker, part * slot_bytes):
                    evicted = self._evict_for(
                        taker, slot_bytes, part, lambda owners: owners != taker
                    )
                evicted += self._evict_for(
                    taker, slot_bytes, part - evicted, lambda owners: owners >= 0
                )
            if evicted < part:
                return
            if missing() > 0:
                yield

    def _evict_for(
        self, taker: int, slot_bytes: int, count: int, may_pay: Callable[[Int64s], BoolMask]
    ) -> int:
        """Evicts up to `count` of the coldest blocks of those tenants that `may_pay`, none below
        its guarantee; returns how many."""
        evicted = 0

        def evictable(entries: Entries) -> BoolMask:
            owners = self._owners(entries)
            mask: BoolMask = self.index.evictable(entries, slot_bytes) & may_pay(owners)
            return mask & self.tenants.may_give(
                owners, self.representations.bytes_with(entries), taker
            )

        while evicted < count:
            victims = self.policy.victims(slot_bytes, count - evicted, evictable)
            # Each of them may go, but perhaps not all of them.
            victims = victims[
                self.tenants.within(
                    self._owners(victims), self.representations.bytes_with(victims), taker
                )
            ]
            if not self._evict_checked(victims, for_reuse=self.makes_room and slot_bytes > 0):
                break
            evicted += len(victims)
        return evicted

    def _owners(self, entries: Entries) -> Int64s:
        """The tenants that entries belong to."""
        return self.tenants.of(self.index.table.records[entries, table.W_KEY_SPACE])

    def _may_go(self, taker: int, paying: Payers) -> Parts[Callable[[Entries], BoolMask]]:
        """Which entries may go, coldest first, when a tenant takes slabs: says so of any of those
        that are there now."""
        if not self.tenants.is_used or paying is Payers.ANYBODY:
            return self.index.evictable
        found = [np.empty(0, np.uint32)]
        for live in self._walk():
            mine = self.index.evictable(live)
            if paying is Payers.OTHERS:
                mine &= self._owners(live) != taker
            found.append(live[mine])
            yield
        going = np.concatenate(found)
        going = going[
            np.argsort(self.policy.heat(self.representations.blocks_of(going)), kind="stable")
        ]
        allowed = np.zeros(self.index.capacity + 1, np.bool_)
        allowed[
            going[
                self.tenants.within(
                    self._owners(going), self.representations.bytes_with(going), taker
                )
            ]
        ] = True
        return lambda entries: self.index.evictable(entries) & allowed[entries]

    def _take_cold_slabs(
        self, slot_bytes: int, num_slots: int, taker: int, paying: Payers
    ) -> Parts[int]:
        """Empties slabs lent to other sizes: where they are colder than what this size would evict
        itself, or it has not enough of that.

        First slabs that are wholly colder, then those that are but for `HOT_SHARE` of their blocks.
        Counts slabs that are free already; returns how many entries went. A representation is as
        hot as its block, and goes without it.
        """
        may_go = yield from self._may_go(taker, paying)
        cost, own = yield from self._emptying_costs(slot_bytes, num_slots, may_go)
        chosen = np.zeros(self.pool.num_slabs, np.bool_)
        per_run, length = (
            max(1, self.pool.slab_bytes // slot_bytes),
            -(-slot_bytes // self.pool.slab_bytes),
        )
        # Against own blocks that would go otherwise; where there are not enough of them, any slab
        # is better than refusing.
        spared = np.arange(0, num_slots, per_run)
        limits = np.where(
            len(own) >= num_slots - spared,
            np.append(own, np.inf)[np.minimum(spared, max(0, len(own) - 1))],
            np.inf,
        )
        num_runs = yield from _choose_runs(cost, length, limits, chosen)
        if num_runs < len(limits) and len(own):
            hot, blocks = (
                np.zeros(self.pool.num_slabs, np.int64),
                np.zeros(self.pool.num_slabs, np.int64),
            )
            for live in self._walk():
                first, last = self._slabs_of(live)
                hot += self._blocks_in(first, last, self._heat_of(live, may_go) >= own[0])
                blocks += self._blocks_in(first, last, np.ones(len(live), np.bool_))
                yield
            cost = np.where((cost < np.inf) & (hot <= HOT_SHARE * blocks), hot, np.inf)
            yield from _choose_runs(cost, length, np.full(len(limits) - num_runs, np.inf), chosen)
        return (yield from self._empty(chosen, may_go))

    def _empty(
        self, chosen: NDArray[np.bool_], may_go: Callable[[Entries], BoolMask]
    ) -> Parts[int]:
        """Evicts what lies in the chosen slabs, slab by slab; returns how many entries went."""
        emptied = np.concatenate(([0], np.cumsum(chosen)))

        def lies_there(entries: Entries) -> BoolMask:
            first, last = self._slabs_of(entries)
            there: BoolMask = emptied[last + 1] > emptied[first]
            return there

        found, slabs = [np.empty(0, np.uint32)], [np.empty(0, np.int64)]
        for live in self._walk():
            going = live[lies_there(live)]
            found.append(going)
            slabs.append(self._slabs_of(going)[0])
            yield
        going = np.concatenate(found)[np.argsort(np.concatenate(slabs), kind="stable")]
        count = 0
        for start in range(0, len(going), EVICTED):
            # What has come to the slab meanwhile goes with it; a number that has an entry elsewhere
            # by now stays.
            part = going[start : start + EVICTED]
            part = part[may_go(part)]
            count += self.evict(part[lies_there(part)])
            if start + EVICTED < len(going):
                yield
        return count

    def _slabs_of(self, entries: Entries) -> tuple[Int64s, Int64s]:
        """The first and last slab in which each entry lies."""
        first = self.pool.slab_of(self.index.offsets(entries))
        return first, first + (self.index.slot_bytes(entries) - 1) // self.pool.slab_bytes

    def _heat_of(
        self, entries: Entries, may_go: Callable[[Entries], BoolMask]
    ) -> NDArray[np.float64]:
        """Heat of entries, that of its block for a representation; inf for those that may not
        go."""
        return np.where(
            may_go(entries), self.policy.heat(self.representations.blocks_of(entries)), np.inf
        )

    def _blocks_in(self, first: Int64s, last: Int64s, counted: NDArray[np.bool_]) -> Int64s:
        """Per slab, how many of the counted blocks lie in it, wholly or in part."""
        starts, ends = (
            np.bincount(at[counted] + after, minlength=self.pool.num_slabs + 1)
            for at, after in ((first, 0), (last, 1))
        )
        blocks: Int64s = np.cumsum(starts - ends)[:-1]
        return blocks

    def _emptying_costs(
        self, slot_bytes: int, num_slots: int, may_go: Callable[[Entries], BoolMask]
    ) -> Parts[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Per slab, the heat of the hottest block in it; -inf for free ones, inf if it can't be
        emptied, has no memory, is this size's.

        And the heat of the `num_slots` coldest blocks of this size, in rising order.
        """
        cost, own = np.full(self.pool.num_slabs, -np.inf), np.empty(0)
        for live in self._walk():
            heat, (first, last) = self._heat_of(live, may_go), self._slabs_of(live)
            for step in range(int((last - first).max(initial=0)) + 1):
                spans = first + step <= last
                np.maximum.at(cost, first[spans] + step, heat[spans])
            mine = heat[
                (self.index.slot_bytes(live) == slot_bytes)
                & (heat < np.inf)
                & ~self.representations.linked(live)
            ]
            own = np.append(own, mine)
            if len(own) > 2 * num_slots + PART_ENTRIES:
                own = np.partition(own, num_slots)[:num_slots]
            yield
        owner = self.pool.slab_owner()
        cost[(owner == slot_bytes) | (owner == ABSENT)] = np.inf
        return cost, np.sort(own)[:num_slots]

    def keep_bounds(self) -> None:
        """Brings tenants back within burst bounds that are other than they were."""
        for tenant, excess_bytes in self.tenants.over_bound():
            blocks = self.index.ready_blocks()
            mine = blocks[self._owners(blocks) == tenant]
            mine = mine[np.argsort(self.policy.heat(mine), kind="stable")]
            count = int(np.searchsorted(np.cumsum(self.index.slot_bytes(mine)), excess_bytes)) + 1
            self.evict(mine[:count])

    def check_invariants(self) -> None:
        """Raises AssertionError where index and pool disagree. Linear in capacity."""
        self.index.check_invariants()
        self.pool.check_invariants()
        self.policy.check_invariants()
        self.representations.check_invariants()
        live = np.flatnonzero(self.index.states()).astype(np.uint32)
        key_spaces, sizes = self.index.keys(live)[0], self.index.slot_bytes(live)
        self.tenants.check(
            {
                number: int(sizes[key_spaces == number].sum())
                for number in np.unique(key_spaces).tolist()
            }
        )
        offsets, sizes = self.index.offsets(live), self.index.slot_bytes(live)
        order = np.argsort(offsets)
        ends = offsets[order] + sizes[order]
        assert np.all(ends[:-1] <= offsets[order][1:]), "two entries share bytes of the arena"
        assert sum(s.num_used for s in self.pool.stats()) == len(live), (
            "slots used and entries differ"
        )
        assert np.all(self.pool.slab_owner()[self.pool.slab_of(offsets)] == sizes), (
            "entry in a slab of another size"
        )

"""All slots of a tier and the entries that own them (`Space`), and making room for new ones
(`Room`).

Blocks are evicted only for room, in parts: by `make_room_ahead` for the reserve, between calls, and
by `make_room` right before the `insert` that needs more. Policies do not know sketches (see
`Sketches`).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_proto.keys import MAX_GROUPS
from hotkv_proto.table import SLOT_ALIGN, BlockTable, Words
from hotkv_server.cache.room.policies.protocol import Policy
from hotkv_server.cache.room.removal import EVICTED_PER_PART, Books, Parts, Rebalancer, Removal
from hotkv_server.cache.room.reserve import Reserve
from hotkv_server.cache.room.shares import NOBODY, Payers, TenantBook
from hotkv_server.cache.room.slabs import ANY_PART, MAX_SIZES, SlabPool
from hotkv_server.cache.table.index import BlockIndex, Chains, Keys
from hotkv_server.cache.values import BoolMask, Cause, Entries, Int64s, TenantShare

# Making room.
#
# Always true: no pinned or reserved entry goes, and none while enough slots are free or soon
# will be (`coming_bytes`). A tenant at its burst bound pays with its own blocks. The coldest
# blocks of the same slot size go, unless slabs of other sizes are colder (`Rebalancer`). A
# sketch goes without its block only if a block needs its room. Calls between two parts may use
# free slots, so each part counts anew.


REBALANCE_SHARE = 64
"""`Room._compare` is due once calls have lacked slots of a size worth 1/64 of the arena; at
once, if the last one made enough room."""


class Room:
    """coming_bytes: will have memory within about a second. Slots that need it are refused, and
        subtracted here (`Space.insert`).
    may_refuse: the policy may refuse room to new blocks for old ones. False below host memory, and
        above other tiers, which a refused block would never reach.
    """

    def __init__(self, books: Books, removal: Removal) -> None:
        self.coming_bytes = 0
        self.may_refuse = True
        self._books, self._pool, self._tenants = books, books.pool, books.tenants
        self._removal = removal
        self._rebalancer = Rebalancer(books, removal)
        # Bytes of slots lacked since the last comparison; a size not in here is due.
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
        refusable_at_s: float | None = None,
    ) -> Parts[None]:
        """Frees `count` slots and as many entry numbers for the taker, or fewer.

        is_block: the slots are for blocks, for which sketches may go.
        has_promise: the room is reserved for a residency, for which sketches may go too.
        refusable_at_s: as in `Policy.victims`. Ignored for a tenant within its guarantee, and while
            `may_keep_at` is False.
        """
        # Before any eviction of its own blocks, by which the tenant could seem within its
        # guarantee.
        is_some_due = self._tenants.may_claim(taker, size)
        for wanted in self._tenants.portions(taker, size, count):
            if self._pool.available_slots(size) < wanted:
                is_due = self._tenants.may_claim(taker, wanted * size)
                yield from self._make_slots(size, wanted, taker, None if is_due else refusable_at_s)
        if is_block or has_promise:
            yield from self._drop_sketches(
                size, lambda: count - self._pool.available_slots(size), taker
            )

        def missing_numbers() -> int:
            return min(count, self._pool.available_slots(size)) - self._books.free_numbers()

        refusable_at_s = None if is_some_due else refusable_at_s
        yield from self._evict_coldest(0, missing_numbers, taker, refusable_at_s)
        if is_block:
            yield from self._drop_sketches(0, missing_numbers, taker)

    def may_keep_at(self, slot_bytes: int) -> bool:
        """Not if slots of other sizes or sketches would go instead."""
        shares = self._books.sketches.declared or self._pool.is_shared(slot_bytes)
        return self.may_refuse and not shares

    def make_floors(self, more: Mapping[int, int], taker: int) -> Parts[None]:
        """Frees slabs for slots to be promised (`more`, by size), as far as possible. They count
        as promised meanwhile, so that no other call gets their slabs."""
        floors = self._pool.floors
        for size, count in more.items():
            floors.add(size, count)
        try:
            for size in more:
                missing_bytes = floors.missing(size) * self._pool.slab_bytes
                if missing_bytes and floors.shortfall:
                    # More slots than the missing slabs have, so that enough are chosen;
                    # `is_enough` ends the work before.
                    wanted = self._pool.free_slots(size) + missing_bytes // size + 1
                    payers = self._payers(taker, missing_bytes)
                    yield from self._rebalancer.take_until(
                        size, wanted, taker, payers, is_enough=lambda: not floors.shortfall
                    )
        finally:
            for size, count in more.items():
                floors.add(size, -count)

    def coming_slots(self, size: int, count: int) -> int:
        """How many of `count` slots will be free in about a second, without evictions."""
        missing = count - self._pool.available_slots(size)
        return max(0, min(missing, self.coming_bytes // size))

    def within_bound(
        self,
        taker: int,
        size: int,
        count: int,
        beside_bytes: int,
        refusable_at_s: float | None,
        *,
        is_ahead: bool = False,
    ) -> Parts[int]:
        """Evicts the taker's own coldest blocks until `count` more slots fit its burst bound;
        returns how many do.

        beside_bytes: what it needs there besides.
        is_ahead: another tenant may take the slots, so blocks within the guarantee stay.
        """
        tenants = self._tenants
        if not tenants.is_used:
            return count
        count = min(count, tenants.burst_bytes(taker) // size)

        def missing() -> int:
            return count - max(0, tenants.room_bytes(taker) - beside_bytes) // size

        for slot_bytes in (size, 0):
            while missing() > 0 and (
                yield from self._evict(
                    slot_bytes,
                    EVICTED_PER_PART,
                    missing,
                    NOBODY if is_ahead else taker,
                    lambda owners: owners == taker,
                    refusable_at_s,
                )
            ):
                yield
        return count - max(0, missing())

    def _make_slots(
        self, slot_bytes: int, num_slots: int, taker: int, refusable_at_s: float | None
    ) -> Parts[None]:
        # Before any eviction, as in `make`.
        payers = self._payers(taker, num_slots * slot_bytes)
        shared = self._pool.is_shared(slot_bytes)
        if shared:
            yield from self._compare(slot_bytes, num_slots, taker)
        yield from self._evict_coldest(
            slot_bytes,
            lambda: num_slots - self._pool.available_slots(slot_bytes),
            taker,
            refusable_at_s,
        )
        if shared:
            yield from self._rebalancer.take_until(slot_bytes, num_slots, taker, payers)

    def _compare(self, slot_bytes: int, num_slots: int, taker: int) -> Parts[None]:
        """Empties slabs of other sizes that are colder than this one's blocks, if due. It
        examines every entry, so it makes room for 1/64 of the arena at once."""
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
        if slot_bytes not in self._pressure_bytes and len(self._pressure_bytes) >= MAX_SIZES:
            self._pressure_bytes.clear()
        self._pressure_bytes[slot_bytes] = pressure_bytes

    def _payers(self, taker: int, more_bytes: int) -> tuple[Payers, ...]:
        """In the order in which to evict from them."""
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
        refusable_at_s: float | None = None,
    ) -> Parts[None]:
        """Of this slot size (0: of any), until `missing` is 0 or no more may go. `missing`:
        slots or entry numbers to free."""
        while (count := missing()) > 0:
            part, evicted = min(count, EVICTED_PER_PART), 0
            if self._tenants.may_claim(taker, part * slot_bytes):
                evicted = yield from self._evict(
                    slot_bytes, part, missing, taker, lambda owners: owners != taker, refusable_at_s
                )
            evicted += yield from self._evict(
                slot_bytes,
                part - evicted,
                missing,
                taker,
                lambda owners: owners >= 0,
                refusable_at_s,
            )
            if evicted < part:
                return
            if missing() > 0:
                yield

    def _evict(
        self,
        slot_bytes: int,
        count: int,
        missing: Callable[[], int],
        taker: int,
        may_pay: Callable[[Int64s], BoolMask],
        refusable_at_s: float | None,
    ) -> Parts[int]:
        """At most `count` for the taker, while `missing` is above 0; returns how many.
        `may_pay`: tenants that may lose blocks, down to their guarantees; ignored without
        tenants.
        """
        books, tenants, evicted = self._books, self._tenants, 0

        def may_go(entries: Entries) -> BoolMask:
            mask: BoolMask = books.index.evictable(entries, slot_bytes)
            if tenants.is_used:
                owners, sizes = books.owners(entries), books.sketches.bytes_with(entries)
                mask &= may_pay(owners) & tenants.may_give(owners, sizes, taker)
            return mask

        while (left := min(count - evicted, missing())) > 0:
            yield from books.policy.sweep(slot_bytes, left, may_go)
            # Other calls may have freed slots during the sweep.
            left = max(0, min(left, missing()))
            victims = books.policy.victims(slot_bytes, left, may_go, refusable_at_s=refusable_at_s)
            if tenants.is_used:
                # `may_go` judged each alone; together they could leave a tenant below its
                # guarantee.
                sizes = books.sketches.bytes_with(victims)
                victims = victims[tenants.within(books.owners(victims), sizes, taker)]
            evicted += self._removal.evict_blocks(victims)
            if not (tenants.is_used and len(victims)):
                break
        return evicted

    def _drop_sketches(
        self, slot_bytes: int, missing: Callable[[], int], taker: int
    ) -> Parts[None]:
        """Of this slot size (0: of any), of the coldest blocks first, until `missing` is 0. The
        blocks stay."""
        books, sketches = self._books, self._books.sketches
        if not sketches.declared or missing() <= 0:
            return
        found = [np.empty(0, np.uint32)]
        for live in books.walk():
            mine = live[sketches.among(live)]
            found.append(mine[books.index.evictable(mine, slot_bytes)])
            yield
        entries = np.concatenate(found)
        entries = entries[np.argsort(books.heat(entries), kind="stable")]
        if self._tenants.is_used:
            sizes = books.index.slot_bytes(entries)
            entries = entries[self._tenants.within(books.owners(entries), sizes, taker)]
        for start in range(0, len(entries), EVICTED_PER_PART):
            # An entry's number may have gone to another block since the search.
            part = entries[start : start + EVICTED_PER_PART]
            part = part[sketches.among(part)]
            part = part[books.index.evictable(part, slot_bytes)]
            sketches.drop(part[: max(0, missing())])
            if missing() <= 0:
                return
            yield


# Burst bounds, which new shares or a restart may have lowered. Each part counts the excess anew.


def keep_bounds(books: Books, removal: Removal) -> Parts[None]:
    """Evicts the coldest blocks of tenants above their bounds, no more than necessary."""
    for tenant in books.tenants.over_bound():
        while books.tenants.excess_bytes(tenant) > 0:
            if not (yield from _evict_excess(books, removal, tenant)):
                break
            yield


def _evict_excess(books: Books, removal: Removal, tenant: int) -> Parts[int]:
    """At most EVICTED_PER_PART of one tenant; returns how many."""
    count = min(EVICTED_PER_PART, -(-books.tenants.excess_bytes(tenant) // SLOT_ALIGN))

    def may_go(entries: Entries) -> BoolMask:
        mask: BoolMask = books.index.evictable(entries) & (books.owners(entries) == tenant)
        return mask

    yield from books.policy.sweep(0, count, may_go)
    # Other calls may have evicted some during the sweep.
    if (excess_bytes := books.tenants.excess_bytes(tenant)) <= 0:
        return 0
    victims = books.policy.victims(0, count, may_go)
    freed = np.cumsum(books.sketches.bytes_with(victims))
    return removal.evict_blocks(victims[: int(np.searchsorted(freed, excess_bytes)) + 1])


# The space


_NO_SHARES: Mapping[str, TenantShare] = {}
REFRESH_S = 1.0
"""A store refreshes its chain if an earlier block was last used longer ago."""
MAX_REFRESHED = 1 << 14
"""Blocks before a stored one that are refreshed at most, and stay while room is made."""


class Space:
    """Sizes of slots are multiples of SLOT_ALIGN.

    origins: by entry number, the tier (from 1) that a ready block was promoted from, until its
        first hit was credited to it; else 0.
    homes: by key space, the part of the arena in which its slots should lie; others lie in all.

    `shares`: by tenant name; without them the tier is one tenant's. `is_backed` False: `grow`
        reports how much of the arena has memory.
    """

    def __init__(
        self, block_table: BlockTable, arena_bytes: int, slab_bytes: int, policy: Policy,
        shares: Mapping[str, TenantShare] = _NO_SHARES,
        *, is_backed: bool = True, part_starts: Sequence[int] = (0,),
    ) -> None:  # fmt: skip
        self.index = BlockIndex(block_table)
        self.origins = np.zeros(block_table.geometry.capacity + 1, np.uint8)
        self.pool = SlabPool(arena_bytes, slab_bytes, is_backed=is_backed, part_starts=part_starts)
        self.homes: dict[int, int] = {}
        self.tenants = TenantBook(shares, self.pool.num_slabs * slab_bytes)
        self.tenants.grow(self.pool.capacity_bytes)
        self.policy = policy
        self.chains = Chains(self.index)
        self.books = Books(self.index, self.pool, self.tenants, policy)
        self.sketches = self.books.sketches
        self.removal = Removal(self.books)
        self.room = Room(self.books, self.removal)
        self.reserve = Reserve(self.pool, self.tenants)

    def __repr__(self) -> str:
        return f"Space({self.index!r}, {self.pool!r})"

    def grow(self, num_bytes: int, coming_bytes: int) -> None:
        """The first `num_bytes` of the arena have memory, `coming_bytes` more will within about
        a second. Until the next call, stores are refused up to `coming_bytes` of slots instead
        of evicting: soon there is room for old and new blocks."""
        self.pool.back(num_bytes)
        barred = self.pool.bar_start * self.pool.slab_bytes
        self.tenants.grow(min(self.pool.capacity_bytes, barred))
        self.room.coming_bytes = coming_bytes

    def has_room(self, slot_bytes: int, count: int) -> bool:
        """Of slots and entry numbers."""
        free = min(self.pool.available_slots(slot_bytes), self.books.free_numbers())
        return free >= count

    def needs_room(self, slot_bytes: int, count: int) -> bool:
        """True if `make_room` must run before `insert`. If False, its other work is done: the
        policy knows whether it may hold back."""
        if self.tenants.is_used or not self.has_room(slot_bytes, count):
            return True
        self.policy.allow_keeping(self.room.may_keep_at(slot_bytes))
        return False

    def insert(
        self,
        key_space_id: int,
        group_index: int,
        hashes: Words,
        slot_bytes: int,
        depths: Int64s,
        lease: int,
        *,
        has_promise: bool = False,
    ) -> Entries:
        """Reserves slots for keys without an entry, in order, until room ends. Evicts nothing:
        `make_room` has run. While the arena is being prefaulted, refuses some (`grow`) unless
        `has_promise`. The keys without a slot are for `decline`. `lease`: number of the owner, a
        write lease or a move."""
        size, taker = slot_bytes, self.tenants.number(key_space_id)
        if self.room.coming_bytes and not has_promise:
            num_refused = self.room.coming_slots(size, len(hashes))
            self.room.coming_bytes -= num_refused * size
            hashes = hashes[: len(hashes) - num_refused]
        if self.tenants.is_used:
            hashes = hashes[: self.tenants.room_bytes(taker) // size]
        part = self.homes.get(key_space_id, ANY_PART)
        offsets = self.pool.allocate(size, min(len(hashes), self.books.free_numbers()), part)
        n = len(offsets)
        entries = self.index.insert(
            key_space_id, group_index, hashes[:n], offsets, size, depths[:n], lease
        )
        self.pool.free(size, offsets[len(entries) :])
        self.tenants.count(key_space_id, len(entries) * size)
        return entries

    def make_room(
        self,
        key_space_id: int,
        group_index: int,
        slot_bytes: int,
        count: int,
        *,
        has_promise: bool = False,
        refusable_at_s: float | None = None,
        beside_bytes: int = 0,
    ) -> Parts[None]:
        """For an `insert` of `count` keys. Does not yield if there is little to do. Arguments as
        in `Room.make` and `Room.within_bound`."""
        size, taker = slot_bytes, self.tenants.number(key_space_id)
        if self.room.coming_bytes and not has_promise:
            count -= self.room.coming_slots(size, count)
        self.policy.allow_keeping(self.room.may_keep_at(size))
        count = yield from self.room.within_bound(taker, size, count, beside_bytes, refusable_at_s)
        is_block = group_index < MAX_GROUPS
        yield from self.room.make(
            size,
            count,
            taker,
            is_block=is_block,
            has_promise=has_promise,
            refusable_at_s=refusable_at_s,
        )

    def make_room_ahead(self, now_s: float) -> Parts[None]:
        """Begins a turn of the reserve and frees the slots that it lacks, as far as a store without
        promise or retention might that is nobody's."""
        self.reserve.turn(now_s)
        if self.room.coming_bytes:
            return
        slots, beside_bytes = Counter[int](), Counter[int]()
        for (tenant, size), wanted in self.reserve.wanted.items():
            self.policy.allow_keeping(self.room.may_keep_at(size))
            count = yield from self.room.within_bound(
                tenant, size, wanted, beside_bytes[tenant], now_s, is_ahead=True
            )
            slots[size] += count
            beside_bytes[tenant] += count * size
        for size, count in slots.items():
            self.policy.allow_keeping(self.room.may_keep_at(size))
            yield from self.room.make(size, count, NOBODY, is_block=False, refusable_at_s=now_s)

    def publish(
        self,
        entries: Entries,
        now_s: float,
        retention: Retention = NO_RETENTION,
        checks: Keys | None = None,
        keys: Keys | None = None,
    ) -> None:
        """Makes reserved entries, in prompt order, ready, with a first use.

        checks: all 0 if not given.
        keys: `BlockIndex.mixed`; computed if not given.
        """
        keys = self.index.mixed(entries) if keys is None else keys
        self.origins[entries] = 0
        self.index.publish(
            entries, keys, np.zeros(len(entries), np.uint64) if checks is None else checks
        )
        self.policy.admit(entries, keys, now_s, retention)

    def decline(
        self,
        key_space_id: int,
        group_index: int,
        hashes: Words,
        depth: int,
        now_s: float,
        retention: Retention = NO_RETENTION,
    ) -> None:
        """Tells the policy of blocks, in prompt order, that found no room, and remembers why.
        `depth`: of the first.
        """
        keys = self.index.mixed_hashes(key_space_id, group_index, hashes)
        self.removal.remember(keys, Cause.NO_ROOM)
        self.policy.decline(keys, depth, now_s, retention)

    def touch(self, entries: Entries, now_s: float, retention: Retention = NO_RETENTION) -> None:
        """Records a use of ready entries, in prompt order."""
        self.policy.touch(entries, self.index.mixed(entries), now_s, retention)

    def refresh_ancestors(self, entry: int, now_s: float) -> None:
        """Refreshes a block and those before it, so that the end of a prompt goes first; unless
        they were used within REFRESH_S and are hotter than it."""
        chain = self.chains.ancestors(entry, MAX_REFRESHED)
        if not len(chain):
            return
        with_block = np.append(chain, np.uint32(entry))
        heat = self.policy.heat(with_block)
        if self.policy.last_used_s(chain).min() < now_s - REFRESH_S or heat[:-1].min() <= heat[-1]:
            self.policy.refresh(with_block, now_s)

    def used_bytes(self) -> int:
        """Of reserved, ready and flushed blocks."""
        return sum(s.slot_bytes * s.num_used for s in self.pool.stats())

    def check_invariants(self) -> None:
        self.books.check_invariants()
        self.reserve.check_invariants()

"""`Space`: all slots (places for blocks) of a tier and the entries (records in the block table)
that own them. `Room` makes room for new entries.

Always true: an entry of the index owns exactly one slot of the pool, and no slot has two owners.
Blocks are evicted only when their room is needed: `make_room` evicts right before the `insert` that
needs the slots. Making room can take long, so it runs in parts, between which other calls may run.
Sketches (compact summaries of a block's attention keys, for sparse attention) are entries
too, but the eviction policy does not know them (see `Sketches`).
"""

from collections.abc import Callable, Mapping

import numpy as np

from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_proto.keys import MAX_GROUPS
from hotkv_proto.table import SLOT_ALIGN, BlockTable, Words
from hotkv_server.cache.room.policies.protocol import Policy
from hotkv_server.cache.room.removal import EVICTED_PER_PART, Books, Parts, Rebalancer, Removal
from hotkv_server.cache.room.shares import Payers, TenantBook
from hotkv_server.cache.room.slabs import MAX_SIZES, SlabPool, aligned
from hotkv_server.cache.table.index import BlockIndex, Chains, Keys
from hotkv_server.cache.values import BoolMask, Cause, Entries, Int64s, TenantShare

# Making room: evicting entries until the requested slots are free.
#
# Always true: a pinned or reserved entry is never evicted. No entry is evicted while enough slots
# are free. While the arena is being prefaulted, no entry is evicted for slots that get memory
# within about a second (`coming_bytes`). A tenant that has reached its burst bound (the most bytes
# that it may use) gets room only by evicting its own blocks. The coldest blocks of the same slot
# size are evicted, unless slabs (pieces of the arena) of other sizes are colder (`Rebalancer`). A
# sketch (compact form of a block's keys) is evicted without its block only if a block needs
# its room. Long work runs in parts. Other calls may use free slots between two parts, so each part
# counts the missing slots again.


REBALANCE_SHARE = 64
"""`Room._compare` compares the blocks of a slot size with the slabs (pieces of the arena) of other
sizes, and empties slabs that are colder. It does so when calls have lacked slots of this size, in
total 1/64 of the arena. If the last comparison made enough room, it does so again when the next
slot is lacking."""


class Room:
    """Makes room in a tier: frees slots of a size by evicting entries (blocks or sketches).

    coming_bytes: bytes of the arena that get memory within about a second. A call that needs this
        memory for slots is refused these slots, and their bytes are subtracted here
        (`refuse_coming`).
    may_keep: True if the policy may refuse room to a new block, so that older blocks stay. False in
        a tier below host memory. Also False in host memory if there are tiers below it: a new block
        that host memory refused would never reach them.
    """

    def __init__(self, books: Books, removal: Removal) -> None:
        self.coming_bytes = 0
        self.may_keep = True
        self._books, self._pool, self._tenants = books, books.pool, books.tenants
        self._removal = removal
        self._rebalancer = Rebalancer(books, removal)
        # For each slot size: how many bytes of slots it has lacked since its blocks were last
        # compared with the slabs (pieces of the arena) of other sizes. Once there are enough
        # (REBALANCE_SHARE), the next comparison is due. It is also due for a slot size that is not
        # in this dict.
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
        """Frees `count` slots (places for blocks) of `size` bytes, and as many entry numbers, for
        the tenant with number `taker`; fewer if no more entries (records in the block table) may be
        evicted for that tenant. Yields after each part of the work.

        is_block: True if the slots are for blocks. Sketches (compact summaries of blocks'
            attention keys) may then be dropped to make room; their blocks stay.
        has_promise: True if the room was reserved for a residency (a request whose KV stays in host
            memory). Sketches may then be dropped too, even if `is_block` is False.
        keep_at_s: the current time, if the policy may refuse to evict entries that it expects to be
            used soon; None if it may not. Ignored for a tenant within its guarantee (the bytes that
            it is assured of), and while `may_keep_at` returns False.
        """
        # Decide now, before any eviction, whether the new block lies within the tenant's guarantee.
        # After evictions of the tenant's own blocks, it could wrongly seem to lie within it.
        is_some_due = self._tenants.may_claim(taker, size)
        for wanted in self._tenants.portions(taker, size, count):
            if self._pool.available_slots(size) < wanted:
                is_due = self._tenants.may_claim(taker, wanted * size)
                yield from self._make_slots(size, wanted, taker, None if is_due else keep_at_s)
        if is_block or has_promise:
            yield from self._drop_sketches(
                size, lambda: count - self._pool.available_slots(size), taker
            )

        def missing_numbers() -> int:
            return min(count, self._pool.available_slots(size)) - self._books.free_numbers()

        keep_at_s = None if is_some_due else keep_at_s
        yield from self._evict_coldest(0, missing_numbers, taker, keep_at_s)
        if is_block:
            yield from self._drop_sketches(0, missing_numbers, taker)

    def may_keep_at(self, slot_bytes: int) -> bool:
        """Returns True if the policy may refuse a slot of this size to a new block, so that older
        blocks stay. This requires that `may_keep` is True, that the arena has no slots of other
        sizes, and that it has no sketches (compact summaries of attention keys). Otherwise
        blocks of other sizes, or sketches, would be evicted in place of blocks of this
        size."""
        shares = self._books.sketches.declared or self._pool.is_shared(aligned(slot_bytes))
        return self.may_keep and not shares

    def make_floors(self, more: Mapping[int, int], taker: int) -> Parts[None]:
        """Frees slabs (pieces of the arena) for slots that are to be promised to the tenant
        `taker`: until the slots in `more` (numbers by slot size) would have room, or no more
        entries (records in the block table) may be evicted for the tenant. Yields after each part.
        While the generator runs, the slots count as promised already, so that no other call gets
        their slabs."""
        floors = self._pool.floors
        for size, count in more.items():
            floors.add(size, count)
        try:
            for size in more:
                missing_bytes = floors.missing(size) * self._pool.slab_bytes
                if missing_bytes and floors.shortfall:
                    # Ask for more slots than the missing slabs have, so that enough slabs are
                    # chosen. The work ends before that number, as soon as all promised slots have
                    # slabs (`is_enough`).
                    wanted = self._pool.free_slots(size) + missing_bytes // size + 1
                    payers = self._payers(taker, missing_bytes)
                    yield from self._rebalancer.take_until(
                        size, wanted, taker, payers, is_enough=lambda: not floors.shortfall
                    )
        finally:
            for size, count in more.items():
                floors.add(size, -count)

    def coming_slots(self, size: int, count: int) -> int:
        """Returns how many of `count` slots of this size must wait for memory. They are not free
        now. In about a second, when more of the arena has memory, they will be free without
        evictions."""
        if not self.coming_bytes:
            return 0
        missing = count - self._pool.available_slots(size)
        return max(0, min(missing, self.coming_bytes // size))

    def refuse_coming(self, size: int, count: int) -> int:
        """Returns how many of `count` slots (places for blocks) the caller must refuse at the
        moment, because these slots will be free soon without evictions (`coming_slots`). Subtracts
        their bytes from `coming_bytes`."""
        refused = self.coming_slots(size, count)
        self.coming_bytes -= refused * size
        return refused

    def within_bound(
        self, taker: int, size: int, count: int, beside_bytes: int, keep_at_s: float | None
    ) -> Parts[int]:
        """Makes room for `count` more slots (places for blocks) within the burst bound of the
        tenant `taker` (the most bytes that it may use). If the slots would exceed the bound, evicts
        the tenant's own coldest blocks. Returns how many of the slots then fit within the bound.
        Yields after each part.

        beside_bytes: bytes that the tenant needs within the bound in addition to these slots.
        keep_at_s: see `make`.
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
                    taker,
                    lambda owners: owners == taker,
                    keep_at_s,
                )
            ):
                yield
        return count - max(0, missing())

    def _make_slots(
        self, slot_bytes: int, num_slots: int, taker: int, keep_at_s: float | None
    ) -> Parts[None]:
        """Evicts entries (records in the block table) until `num_slots` slots (places for blocks)
        of this size are free, or no more entries may be evicted for the tenant `taker`.
        `keep_at_s`: the current time, if the policy may refuse to evict entries that it expects to
        be used soon; None if it may not."""
        # Decide now, before any eviction, whether the new blocks lie within the tenant's guarantee.
        # After evictions of the tenant's own blocks, they could wrongly seem to lie within it.
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
        """Empties slabs (pieces of the arena) with slots of other sizes if their blocks are colder
        than the blocks of this size. Yields after each part.

        Does nothing unless this comparison is due. It is due in three cases: this size had no
        comparison yet; the last comparison made enough room; or the slots of this size that were
        missing in calls since then add up to 1/64 of the arena (REBALANCE_SHARE). A comparison is
        slow, because it examines every entry (record in the block table). Therefore it makes room
        for 1/64 of the arena at once.

        taker: number of the tenant that needs the slots.
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
        if slot_bytes not in self._pressure_bytes and len(self._pressure_bytes) >= MAX_SIZES:
            self._pressure_bytes.clear()
        self._pressure_bytes[slot_bytes] = pressure_bytes

    def _payers(self, taker: int, more_bytes: int) -> tuple[Payers, ...]:
        """Returns sets of blocks (`Payers`) that may be evicted to make room for `more_bytes` more
        bytes of the tenant `taker`, in the order in which to evict from them. Blocks of a set are
        evicted only if evicting the sets before it was not enough."""
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
        """Evicts the coldest blocks of a slot size (0: of any size) that may be evicted for the
        tenant `taker`, until `missing` returns 0 or no more may be evicted. Yields after each part.

        missing: function that returns how many slots (places for blocks) or entry numbers are still
            to be freed.
        keep_at_s: the current time, if the policy may refuse to evict entries that it expects to be
            used soon; None if it may not.
        """
        while (count := missing()) > 0:
            part, evicted = min(count, EVICTED_PER_PART), 0
            if self._tenants.may_claim(taker, part * slot_bytes):
                evicted = yield from self._evict(
                    slot_bytes, part, missing, taker, lambda owners: owners != taker, keep_at_s
                )
            evicted += yield from self._evict(
                slot_bytes, part - evicted, missing, taker, lambda owners: owners >= 0, keep_at_s
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
        keep_at_s: float | None,
    ) -> Parts[int]:
        """Evicts the coldest blocks of the tenants that `may_pay` accepts. Stops after `count`
        blocks, or when `missing` returns 0. The blocks make room for the tenant `taker`. A block of
        another tenant is evicted only if that tenant then still has its guarantee. Yields after
        each part. Returns how many blocks it evicted.

        slot_bytes: slot size of the blocks; 0 for any size.
        missing: function that returns how many slots (places for blocks) or entry numbers are still
            to be freed.
        may_pay: function that takes tenant numbers, and returns a mask of the tenants whose blocks
            may be evicted. Ignored without tenants.
        keep_at_s: the current time, if the policy may refuse to evict blocks that it expects to be
            used soon; None if it may not.
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
            # Compute the number of missing slots again: other calls may have freed slots between
            # two parts of the sweep.
            left = max(0, min(left, missing()))
            victims = books.policy.victims(slot_bytes, left, may_go, keep_at_s=keep_at_s)
            if tenants.is_used:
                # `may_go` judged each victim (block to evict) as if it were the only one. If all
                # victims were evicted, a tenant might have less than its guarantee, so leave out
                # some.
                sizes = books.sketches.bytes_with(victims)
                victims = victims[tenants.within(books.owners(victims), sizes, taker)]
            evicted += self._removal.evict_blocks(victims)
            if not (tenants.is_used and len(victims)):
                break
        return evicted

    def _drop_sketches(
        self, slot_bytes: int, missing: Callable[[], int], taker: int
    ) -> Parts[None]:
        """Drops the sketches (compact summaries of attention keys) of the coldest blocks
        until `missing` returns 0. The blocks stay. Yields after each part.

        slot_bytes: drops only sketches of this slot size; 0: of any size.
        missing: function that returns how many slots (places for blocks) or entry numbers are still
            to be freed.
        taker: number of the tenant for which they are freed.
        """
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
            # Check the entries again: since the search, an entry may have been removed and its
            # number reused for another block.
            part = entries[start : start + EVICTED_PER_PART]
            part = part[sketches.among(part)]
            part = part[books.index.evictable(part, slot_bytes)]
            sketches.drop(part[: max(0, missing())])
            if missing() <= 0:
                return
            yield


# Burst bounds (the most bytes that each tenant may use): evicts blocks of tenants that use more.
# New shares, or a restart with other settings, may have lowered the bounds.
#
# Always true: a tenant's coldest blocks are evicted first, no pinned or reserved block is evicted,
# and no more blocks are evicted than necessary. Any other method may be called between two parts,
# so each part counts the excess again.


def keep_bounds(books: Books, removal: Removal) -> Parts[None]:
    """Evicts blocks of tenants that exceed their burst bounds (the most bytes that a tenant may
    use). Stops for a tenant when it is within its bound, or when its remaining blocks can't be
    evicted (they are pinned or reserved). Yields after each part of the work.

    books: the state of the tier.
    removal: removes entries (records in the block table) of the tier.
    """
    for tenant in books.tenants.over_bound():
        while books.tenants.excess_bytes(tenant) > 0:
            if not (yield from _evict_excess(books, removal, tenant)):
                break
            yield


def _evict_excess(books: Books, removal: Removal, tenant: int) -> Parts[int]:
    """Evicts the coldest blocks of a tenant that exceeds its burst bound (the most bytes that it
    may use), at most EVICTED_PER_PART blocks. Returns how many it evicted."""
    count = min(EVICTED_PER_PART, -(-books.tenants.excess_bytes(tenant) // SLOT_ALIGN))

    def may_go(entries: Entries) -> BoolMask:
        mask: BoolMask = books.index.evictable(entries) & (books.owners(entries) == tenant)
        return mask

    yield from books.policy.sweep(0, count, may_go)
    # Other calls may have evicted blocks of the tenant between two parts of the sweep.
    if (excess_bytes := books.tenants.excess_bytes(tenant)) <= 0:
        return 0
    victims = books.policy.victims(0, count, may_go)
    freed = np.cumsum(books.sketches.bytes_with(victims))
    return removal.evict_blocks(victims[: int(np.searchsorted(freed, excess_bytes)) + 1])


# The space


_NO_SHARES: Mapping[str, TenantShare] = {}
REFRESH_S = 1.0
"""When a block is stored, `Space.refresh_ancestors` marks its chain as in use if an earlier block
of the chain was last used longer ago than this, in seconds."""
MAX_REFRESHED = 1 << 14
"""When a block is stored, at most this many blocks before it in its chain are marked as in use
(`Space.refresh_ancestors`), and are protected from eviction while room is made for the block."""


class Space:
    """All slots of a tier and the entries (blocks and sketches) that own them: inserts
    entries, makes them ready, records their uses, and makes room for them.

    index, pool: the block table with the entries, and the pool that allocates slots.
    chains: links each block with the block before it in its prompt.
    origins: by entry number, the number (from 1) of the tier below from which a ready block was
        promoted. 0 for a block that an engine stored. Set to 0 when the first hit of a promoted
        block has been credited to the tier.

    Arguments of the constructor: `policy` decides which blocks are evicted. `shares` are the
    tenants' shares, by tenant name; without shares, the whole tier counts as one tenant's.
    `is_backed` is True if the whole arena has memory; if False, `grow` reports how much of it has
    memory.
    """

    def __init__(
        self, block_table: BlockTable, arena_bytes: int, slab_bytes: int, policy: Policy,
        shares: Mapping[str, TenantShare] = _NO_SHARES,
        *, is_backed: bool = True,
    ) -> None:  # fmt: skip
        self.index = BlockIndex(block_table)
        self.origins = np.zeros(block_table.geometry.capacity + 1, np.uint8)
        self.pool = SlabPool(arena_bytes, slab_bytes, is_backed=is_backed)
        self.tenants = TenantBook(shares, self.pool.num_slabs * slab_bytes)
        self.tenants.grow(self.pool.capacity_bytes)
        self.policy = policy
        self.chains = Chains(self.index)
        self.books = Books(self.index, self.pool, self.tenants, policy)
        self.sketches = self.books.sketches
        self.removal = Removal(self.books)
        self.room = Room(self.books, self.removal)

    def __repr__(self) -> str:
        return f"Space({self.index!r}, {self.pool!r})"

    def grow(self, num_bytes: int, coming_bytes: int) -> None:
        """Records that the first `num_bytes` of the arena have memory now, and that about
        `coming_bytes` more get memory within about a second.

        Until the next call of `grow`, a store that would need an eviction gets no slots, for up to
        `coming_bytes` of slots in total. The reason: a second later there is room for both the old
        and the new blocks. For slots beyond `coming_bytes`, blocks are evicted as usual.
        """
        self.pool.back(num_bytes)
        self.tenants.grow(self.pool.capacity_bytes)
        self.room.coming_bytes = coming_bytes

    def has_room(self, slot_bytes: int, count: int) -> bool:
        """Returns True if `count` slots (places for blocks) of this size are free, and as many rows
        of the block table."""
        free = min(self.pool.available_slots(aligned(slot_bytes)), self.books.free_numbers())
        return free >= count

    def needs_room(self, slot_bytes: int, count: int) -> bool:
        """Returns True if the caller must call `make_room` before it inserts `count` blocks,
        because too few slots are free, or because tenants are configured. If it returns False, it
        has also done the other work of `make_room`: it has set whether the eviction policy may
        refuse to evict blocks."""
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
        """Reserves slots for keys that have no entry (record in the block table), in order, until
        there is no more room. Returns the new entries, one for each of the first keys.

        The caller has called `make_room` before; `insert` itself evicts nothing. While the arena is
        still being prefaulted, fewer slots may be reserved (`grow`). The caller passes the keys
        that got no slot to `decline`.

        depths: number of blocks before each block in its prompt.
        lease: number of the write lease, or of the move between tiers, that owns the entries.
        has_promise: True if the room was reserved for a residency (a request whose KV stays in host
            memory). Then no slots are refused because the arena is still being prefaulted.
        """
        size, taker = aligned(slot_bytes), self.tenants.number(key_space_id)
        if not has_promise:
            hashes = hashes[: len(hashes) - self.room.refuse_coming(size, len(hashes))]
        if self.tenants.is_used:
            hashes = hashes[: self.tenants.room_bytes(taker) // size]
        offsets = self.pool.allocate(size, min(len(hashes), self.books.free_numbers()))
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
        keep_at_s: float | None = None,
        beside_bytes: int = 0,
    ) -> Parts[None]:
        """Makes room for an `insert` of `count` keys. Yields after each part of the work; does not
        yield if there is room already or if the work is short.

        group_index: a group of blocks, or a kind of sketch (compact summary of a block's
            attention keys).
        has_promise: True if the room was reserved for a residency (a request whose KV stays in host
            memory).
        keep_at_s: the current time, if the policy may refuse to evict entries (records in the block
            table) that it expects to be used soon; None if it may not. Ignored while
            `Room.may_keep_at` returns False.
        beside_bytes: bytes that the caller's other `insert` calls need within the tenant's burst
            bound (the most bytes that the tenant may use).
        """
        size, taker = aligned(slot_bytes), self.tenants.number(key_space_id)
        if not has_promise:
            count -= self.room.coming_slots(size, count)
        self.policy.allow_keeping(self.room.may_keep_at(size))
        count = yield from self.room.within_bound(taker, size, count, beside_bytes, keep_at_s)
        is_block = group_index < MAX_GROUPS
        yield from self.room.make(
            size, count, taker, is_block=is_block, has_promise=has_promise, keep_at_s=keep_at_s
        )

    def publish(
        self,
        entries: Entries,
        now_s: float,
        retention: Retention = NO_RETENTION,
        checks: Keys | None = None,
        keys: Keys | None = None,
    ) -> None:
        """Makes reserved entries (blocks or sketches) ready and records a use of each. The
        entries are in the order of their prompt.

        retention: the wish of the request to retain the blocks, for the eviction policy.
        checks: the entries' checksums, uint64; all 0 if not given.
        keys: the entries' keys from `BlockIndex.mixed`; computed if not given.
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
        """Notifies the policy of blocks that were not stored because `insert` found no room for
        them, and remembers why they are absent.

        hashes: the blocks' hashes, in the order of their prompt.
        depth: number of blocks before the first of these blocks in the prompt.
        retention: the wish of the request to retain the blocks.
        """
        keys = self.index.mixed_hashes(key_space_id, group_index, hashes)
        self.removal.remember(keys, Cause.NO_ROOM)
        self.policy.decline(keys, depth, now_s, retention)

    def touch(self, entries: Entries, now_s: float, retention: Retention = NO_RETENTION) -> None:
        """Records a use of ready entries (records in the block table), given in the order of their
        prompt. `retention`: the wish of the request to retain the blocks; its priority decides how
        much the use counts."""
        self.policy.touch(entries, self.index.mixed(entries), now_s, retention)

    def refresh_ancestors(self, entry: int, now_s: float) -> None:
        """Marks this entry (a block) and the blocks before it in its prompt as in use, so that the
        first blocks of the prompt are not evicted before the last. Does nothing if all blocks
        before the entry (record in the block table) were used within REFRESH_S and are hotter than
        the entry."""
        chain = self.chains.ancestors(entry, MAX_REFRESHED)
        if not len(chain):
            return
        with_block = np.append(chain, np.uint32(entry))
        heat = self.policy.heat(with_block)
        if self.policy.last_used_s(chain).min() < now_s - REFRESH_S or heat[:-1].min() <= heat[-1]:
            self.policy.refresh(with_block, now_s)

    def used_bytes(self) -> int:
        """Returns the bytes of all slots (places for blocks) in use: of blocks that are reserved,
        ready or detached (flushed while pinned)."""
        return sum(s.slot_bytes * s.num_used for s in self.pool.stats())

    def check_invariants(self) -> None:
        """Raises AssertionError if the tier's index, slots (places for blocks), policy and counts
        disagree. Takes time linear in the capacity."""
        self.books.check_invariants()

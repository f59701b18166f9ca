"""All slots of one tier: reserving, publishing and using the entries that own them.

Always true: an entry of the index owns exactly one slot of the pool and no slot is owned twice. The
parts are modules of their own, over the same `books`: `removal` evicts and flushes, `room` decides
what is evicted for whom, `rebalancing` moves slabs between slot sizes. Evict on allocate: room is
made only when it is needed, by `make_room`, right before the `insert` that needs it. Making room
can take long, so it goes in parts. Representations are entries too, but nothing is decided by them:
see `representations`.
"""

from collections.abc import Mapping

import numpy as np

from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_proto.keys import MAX_GROUPS
from hotkv_proto.table import BlockTable, Words
from hotkv_server.cache.room.books import Books, Parts
from hotkv_server.cache.room.making import Room
from hotkv_server.cache.room.policies.protocol import Policy
from hotkv_server.cache.room.removal import Removal
from hotkv_server.cache.room.slabs import SlabPool, aligned
from hotkv_server.cache.room.tenants import TenantBook
from hotkv_server.cache.table.chains import Chains
from hotkv_server.cache.table.index import BlockIndex, Keys
from hotkv_server.cache.values import Entries, Int64s, TenantShare

_NO_SHARES: Mapping[str, TenantShare] = {}
REFRESH_S = 1.0
"""How much older the last use of a block may be than that of any block after it."""
MAX_REFRESHED = 1 << 14
"""Blocks of a chain that count as used with one of its blocks, at most."""


class Space:
    """All slots of one tier and the entries that own them.

    `origins` [capacity + 1]: the tier that a ready entry came up from and was not credited to yet,
    by its number from 1 on; 0 for a block that an engine stored, or whose hit was counted.
    `is_backed`: as in `SlabPool`; if False, `grow` says how much of the arena has memory.
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
        self.tenants.capacity_bytes = self.pool.capacity_bytes
        self.policy = policy
        self.chains = Chains(self.index)
        self.books = Books(self.index, self.pool, self.tenants, policy)
        self.representations = self.books.representations
        self.removal = Removal(self.books)
        self.room = Room(self.books, self.removal)

    def __repr__(self) -> str:
        return f"Space({self.index!r}, {self.pool!r})"

    def grow(self, num_bytes: int, coming_bytes: int) -> None:
        """The first `num_bytes` of the arena have memory now, and about `coming_bytes` more get
        some within moments.

        Until the next call, that many bytes are refused rather than evicted for: both the blocks
        that would be evicted and those that come fit soon. Beyond that, blocks are evicted as ever.
        """
        self.pool.back(num_bytes)
        self.tenants.capacity_bytes = self.pool.capacity_bytes
        self.room.coming_bytes = coming_bytes

    def may_keep(self, slot_bytes: int) -> bool:
        """Whether the policy may keep blocks and refuse room for slots of this size. Not while
        several slot sizes or representations share the arena, since those would pay for it; nor if
        there are tiers, which get only what had room here."""
        has_others = self.books.representations.declared or self.pool.is_shared(aligned(slot_bytes))
        return self.room.may_keep and not has_others

    def has_room(self, slot_bytes: int, count: int) -> bool:
        """Whether so many slots of this size, and entry numbers, are free."""
        free = min(self.pool.available_slots(aligned(slot_bytes)), self.books.free_numbers())
        return free >= count

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
        """Reserves slots for keys that are not in the index; as many as find room, from the first
        on.

        Evicts only if the tenant's burst bound asks for it: `make_room` comes before. While the
        arena grows, fewer are reserved: see `grow`; not if `has_promise`, for blocks that a
        residency was promised room for. Tell `decline` of the keys that are left out.
        """
        size, taker = aligned(slot_bytes), self.tenants.number(key_space_id)
        if not has_promise:
            hashes = hashes[: len(hashes) - self.room.refuse_coming(size, len(hashes))]
        hashes = hashes[: self.room.within_bound(taker, size, len(hashes))]
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
    ) -> Parts[None]:
        """Makes room for an `insert` of `count` keys, in parts; no part if there is room already or
        little to do. `keep_at_s`: as in `Policy.victims`, if the policy `may_keep`."""
        size, taker = aligned(slot_bytes), self.tenants.number(key_space_id)
        if not has_promise:
            count -= self.room.coming_slots(size, count)
        count = self.room.within_bound(taker, size, count)
        is_block = group_index < MAX_GROUPS
        if not self.may_keep(size):
            keep_at_s = None
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
        """Makes reserved entries, in chain order, ready and used.

        `checks` uint64 [n]: their check values; none if not given. `keys`: of `BlockIndex.mixed`,
        if the caller has them.
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
        """Tells the policy of blocks, in chain order, for which `insert` found no room; `depth`:
        blocks of the chain before them."""
        if len(hashes):
            keys = self.index.mixed_hashes(key_space_id, group_index, hashes)
            self.policy.decline(keys, depth, now_s, retention)

    def touch(self, entries: Entries, now_s: float, retention: Retention = NO_RETENTION) -> None:
        """Notes a use of ready entries, in chain order."""
        self.policy.touch(entries, self.index.mixed(entries), now_s, retention)

    def refresh_ancestors(self, entry: int, now_s: float) -> None:
        """Counts the blocks before this one in its chain as used with it, lest the chain lose its
        head first."""
        chain = self.chains.ancestors(entry, MAX_REFRESHED)
        if not len(chain):
            return
        with_block = np.append(chain, np.uint32(entry))
        heat = self.policy.heat(with_block)
        if self.policy.last_used_s(chain).min() < now_s - REFRESH_S or heat[:-1].min() <= heat[-1]:
            self.policy.refresh(with_block, now_s)

    def used_bytes(self) -> int:
        """Bytes of slots that are reserved, ready or detached."""
        return sum(s.slot_bytes * s.num_used for s in self.pool.stats())

    def check_invariants(self) -> None:
        """Raises AssertionError if the books disagree. Linear in capacity."""
        self.books.check_invariants()

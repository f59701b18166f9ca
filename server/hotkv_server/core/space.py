"""Slots, index and policy together: reserving, publishing, evicting.

Always true: an entry of the index owns exactly one slot of the pool and no slot is owned twice; an entry that is pinned or
reserved is never evicted; what is evicted is reported as an effect. Evict on allocate: room is made only when it is needed.
"""

import numpy as np
from numpy.typing import NDArray

from hotkv import table
from hotkv.table import BlockTable, Words
from hotkv_server.core.index import BlockIndex
from hotkv_server.core.policy import Policy
from hotkv_server.core.slabs import SlabPool, aligned
from hotkv_server.core.values import Entries, EvictionNotice, Int64s

GHOST_KEYS = 1 << 16
"""Evicted keys remembered for `explain`."""


class Space:
    """All slots of one tier and the entries that own them."""

    def __init__(self, block_table: BlockTable, arena_bytes: int, slab_bytes: int, policy: Policy) -> None:
        self.index = BlockIndex(block_table)
        self.pool = SlabPool(arena_bytes, slab_bytes)
        self.policy = policy
        self.evicted_blocks = 0
        self.effects: list[EvictionNotice] = []
        self._ghosts = np.zeros(GHOST_KEYS, np.uint64)
        self._next_ghost = 0

    def __repr__(self) -> str:
        return f"Space({self.index!r}, {self.pool!r})"

    def insert(self, key_space_id: int, group_index: int, hashes: Words, slot_bytes: int, depths: Int64s, lease: int) -> Entries:
        """Reserves slots for keys that are not in the index, evicting where it must; as many as possible, from the first on."""
        size = aligned(slot_bytes)
        offsets = self.pool.allocate(size, len(hashes))
        if len(offsets) < len(hashes):
            self._make_room(size, len(hashes) - len(offsets))
            offsets = np.concatenate((offsets, self.pool.allocate(size, len(hashes) - len(offsets))))
        if len(offsets) > self.index.capacity - self.index.num_entries:
            self._evict_coldest(0, len(offsets) - (self.index.capacity - self.index.num_entries))
        n = len(offsets)
        entries = self.index.insert(key_space_id, group_index, hashes[:n], offsets, size, depths[:n], lease)
        self.pool.free(size, offsets[len(entries) :])
        return entries

    def publish(self, entries: Entries, now_s: float) -> None:
        """Makes reserved entries ready and the most recently used."""
        self.index.publish(entries, np.zeros(len(entries), np.uint64))
        self.policy.touch(entries, now_s)

    def drop(self, entries: Entries) -> None:
        """Removes entries and frees their slots, without a notice: reserved ones that will not be written."""
        sizes, offsets = self.index.slot_bytes(entries), self.index.offsets(entries)
        self.index.remove(entries)
        self.policy.forget(entries)
        for size in np.unique(sizes):
            self.pool.free(int(size), offsets[sizes == size])

    def evict(self, entries: Entries) -> int:
        """Removes ready entries that are not pinned, with a notice; returns how many that were."""
        free_to_go = entries[self._evictable(entries)]
        key_spaces, groups, hashes = self.index.keys(free_to_go)
        self.drop(free_to_go)
        self.evicted_blocks += len(free_to_go)
        for key_space_id, group_index in np.unique(np.stack((key_spaces, groups)), axis=1).T:
            mine = hashes[(key_spaces == key_space_id) & (groups == group_index)]
            self.effects.append(EvictionNotice(int(key_space_id), int(group_index), mine))
            self._remember(int(key_space_id), int(group_index), mine)
        return len(free_to_go)

    def was_evicted(self, key_space_id: int, group_index: int, hashes: Words) -> NDArray[np.bool_]:
        """Which keys [n] are among the last evicted."""
        return np.isin(self._ghost_keys(key_space_id, group_index, hashes), self._ghosts)

    def used_bytes(self) -> int:
        """Bytes in slots that are reserved or ready."""
        return sum(s.slot_bytes * s.num_used for s in self.pool.stats())

    def pinned_bytes(self) -> int:
        """Bytes in slots that are pinned."""
        pinned = np.flatnonzero(self.index.pins).astype(np.uint32)
        return int(self.index.slot_bytes(pinned).sum())

    def _evictable(self, entries: Entries) -> NDArray[np.bool_]:
        states = self.index.table.records[entries, table.W_GROUP_STATE] >> 16
        evictable: NDArray[np.bool_] = (states == table.STATE_READY) & (self.index.pins[entries] == 0)
        return evictable

    def _make_room(self, slot_bytes: int, num_slots: int) -> None:
        """Evicts until `num_slots` more slots of this size can be had, or nothing more may go."""
        if self._others_hold_slabs(slot_bytes):
            self._take_cold_slabs(slot_bytes, num_slots)
            num_slots -= self.pool.available_slots(slot_bytes)
        if num_slots > 0:
            self._evict_coldest(slot_bytes, num_slots)

    def _evict_coldest(self, slot_bytes: int, count: int) -> None:
        victims = self.policy.victims(slot_bytes, count, lambda: self.index.ready_entries(slot_bytes), self._evictable)
        self.evict(victims)

    def _others_hold_slabs(self, slot_bytes: int) -> bool:
        return any(s.slot_bytes != slot_bytes for s in self.pool.stats())

    def _take_cold_slabs(self, slot_bytes: int, num_slots: int) -> None:
        """Empties slabs lent to other sizes where their hottest block is colder than what this size would evict itself."""
        states = self.index.states()
        live = np.flatnonzero(states).astype(np.uint32)
        used_s = self.policy.last_used_s(live)
        held = (states[live] == table.STATE_RESERVED) | (self.index.pins[live] > 0)
        heat_s = np.full(self.pool.num_slabs, -np.inf)
        slabs = self.pool.slab_of(self.index.offsets(live))
        np.maximum.at(heat_s, slabs, np.where(held, np.inf, used_s))
        own = np.sort(used_s[(self.index.slot_bytes(live) == slot_bytes) & ~held])
        owners = self.pool.slab_owner()
        foreign = np.flatnonzero((owners > 0) & (owners != slot_bytes) & np.isfinite(heat_s))
        foreign = foreign[np.argsort(heat_s[foreign])]
        if slot_bytes > self.pool.slab_bytes:
            chosen = self._cold_runs(slot_bytes, num_slots, foreign, heat_s, own)
        else:
            chosen = self._cold_slabs(slot_bytes, num_slots, foreign, heat_s, own)
        self.evict(live[np.isin(slabs, chosen)])

    def _cold_slabs(
        self, slot_bytes: int, num_slots: int, foreign: Int64s, heat_s: NDArray[np.float64], own: NDArray[np.float64]
    ) -> Int64s:
        """The coldest slabs, as long as they are colder than the own blocks that would have to go instead."""
        wanted = self.pool.slabs_for(slot_bytes, num_slots)
        rivals = np.full(wanted, np.inf)
        at = np.arange(wanted) * (self.pool.slab_bytes // slot_bytes)
        rivals[at < len(own)] = own[at[at < len(own)]]
        best = foreign[:wanted]
        return best[heat_s[best] < rivals[: len(best)]]

    def _cold_runs(self, slot_bytes: int, num_slots: int, foreign: Int64s, heat_s: NDArray[np.float64], own: NDArray[np.float64]) -> Int64s:
        """As `_cold_slabs` for slots that span slabs: runs of neighbours, free or to be emptied."""
        length = -(-slot_bytes // self.pool.slab_bytes)
        cost = np.full(self.pool.num_slabs, np.inf)
        cost[foreign] = heat_s[foreign]
        cost[self.pool.slab_owner() < 0] = -np.inf
        chosen: list[Int64s] = []
        num_own = 0
        while len(chosen) + num_own < num_slots and length <= len(cost):
            hottest = np.lib.stride_tricks.sliding_window_view(cost, length).max(axis=1)
            start = int(np.argmin(hottest))
            rival = own[num_own] if num_own < len(own) else np.inf
            if hottest[start] < rival:
                chosen.append(np.arange(start, start + length))
                cost[start : start + length] = np.inf
            elif num_own < len(own):
                num_own += 1
            else:
                break
        return np.concatenate(chosen) if chosen else np.empty(0, np.int64)

    def _ghost_keys(self, key_space_id: int, group_index: int, hashes: Words) -> NDArray[np.uint64]:
        return table.mix(hashes, (key_space_id << 16 | group_index) * 0x9E37_79B9)

    def _remember(self, key_space_id: int, group_index: int, hashes: Words) -> None:
        keys = self._ghost_keys(key_space_id, group_index, hashes[-GHOST_KEYS:])
        self._ghosts[(self._next_ghost + np.arange(len(keys))) % GHOST_KEYS] = keys
        self._next_ghost = (self._next_ghost + len(keys)) % GHOST_KEYS

    def check_invariants(self) -> None:
        """Raises AssertionError where index and pool disagree. Linear in capacity."""
        self.index.check_invariants()
        self.pool.check_invariants()
        live = np.flatnonzero(self.index.states()).astype(np.uint32)
        offsets, sizes = self.index.offsets(live), self.index.slot_bytes(live)
        order = np.argsort(offsets)
        ends = offsets[order] + sizes[order]
        assert np.all(ends[:-1] <= offsets[order][1:]), "two entries share bytes of the arena"
        assert sum(s.num_used for s in self.pool.stats()) == len(live), "slots used and entries differ"
        assert np.all(self.pool.slab_owner()[self.pool.slab_of(offsets)] == sizes), "entry in a slab of another size"

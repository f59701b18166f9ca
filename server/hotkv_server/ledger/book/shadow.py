"""Simulates a cache of a given size under an eviction policy, with keys only.

A request first uses the keys that are held, then stores the others, as in
`hotkv_server.simulate`. Always true: a key is held once; all held blocks fit into the limit of
the last `serve`; a request does not evict its own keys, and the policy is told of keys that
found no room.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hotkv_server.cache.room.policies.protocol import Entries, Keys, Policy

MakePolicy = Callable[[int], Policy]
"""Takes the most blocks; the policy knows them by entry numbers from 1."""
QUEUE = 1
"""For `Policy.victims` in place of a slot size: one queue for all keys, whatever their size."""


class Shadow:
    def __init__(self, make_policy: MakePolicy, max_keys: int) -> None:
        self.used_bytes = 0
        self._policy = make_policy(max_keys)
        self._entries: dict[int, int] = {}
        self._keys = np.zeros(max_keys + 1, np.uint64)
        # By entry.
        self._bytes = np.zeros(max_keys + 1, np.int64)
        self._is_pinned = np.zeros(max_keys + 1, np.bool_)
        self._free = list(range(max_keys, 0, -1))

    def __repr__(self) -> str:
        return f"Shadow({len(self)} keys, {self.used_bytes} bytes)"

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def keys(self) -> Keys:
        return np.fromiter(self._entries, np.uint64, len(self._entries))

    def serve(
        self,
        keys: Keys,
        key_bytes: int,
        limit_bytes: int,
        now_s: float,
        *,
        may_refuse: bool = False,
    ) -> int:
        """Simulates a request. Returns the number of keys held before the first miss.

        keys: distinct, in order [n].
        key_bytes: of a block.
        may_refuse: the policy may keep other keys instead.
        """
        names = keys.tolist()
        found = np.array([self._entries.get(name, 0) for name in names], np.uint32)
        held = found[found != 0]
        if len(held):
            self._policy.touch(held, self._keys[held], now_s)
        absent = np.flatnonzero(found == 0)
        num_hits = int(absent[0]) if len(absent) else len(keys)
        self._is_pinned[held] = True
        refusable_at_s = now_s if may_refuse else None
        self._make_room(len(absent) * key_bytes, key_bytes, limit_bytes, refusable_at_s)
        self._is_pinned[held] = False
        room = max(0, limit_bytes - self.used_bytes) // key_bytes
        num_stored = min(room, len(self._free), len(absent))
        self._store(keys[absent[:num_stored]], key_bytes, now_s)
        if num_hits and num_stored:
            self._renew(found[:num_hits], self._entries[names[num_hits]], now_s)
        if num_stored < len(absent):
            self._policy.decline(keys[absent[num_stored:]], len(held) + num_stored, now_s)
        return num_hits

    def drop(self, keys: Keys) -> None:
        """Removes `keys`, which are held."""
        gone = np.array([self._entries[key] for key in keys.tolist()], np.uint32)
        self._remove(gone, evicted=False)

    def _make_room(
        self, more_bytes: int, key_bytes: int, limit_bytes: int, refusable_at_s: float | None
    ) -> None:
        """Evicts until `more_bytes` fit, or nothing can be evicted.

        refusable_at_s: now, if the policy may hold back what it expects to be used soon; else None.
        """

        def evictable(entries: Entries) -> NDArray[np.bool_]:
            return ~self._is_pinned[entries]

        while self._entries:
            over_bytes = max(0, self.used_bytes + more_bytes - limit_bytes)
            num_slots = max(0, more_bytes // key_bytes - len(self._free))
            # Ask as if all blocks had the mean size; evict no more than needed, and ask again if
            # they were too few.
            count = max(-(-over_bytes * len(self) // self.used_bytes), num_slots)
            if not count:
                return
            victims = self._policy.victims(QUEUE, count, evictable, refusable_at_s=refusable_at_s)
            if not len(victims):
                return
            freed_bytes = np.cumsum(self._bytes[victims])
            enough = int(np.searchsorted(freed_bytes, over_bytes)) + 1
            self._remove(victims[: max(enough, num_slots)], evicted=True)

    def _store(self, keys: Keys, key_bytes: int, now_s: float) -> None:
        if not len(keys):
            return
        entries = np.array([self._free.pop() for _ in range(len(keys))], np.uint32)
        self._keys[entries], self._bytes[entries] = keys, key_bytes
        self._entries.update(zip(keys.tolist(), entries.tolist(), strict=True))
        self.used_bytes += len(keys) * key_bytes
        self._policy.admit(entries, keys, now_s)

    def _renew(self, hits: Entries, stored: int, now_s: float) -> None:
        """Renews hits together with the first stored entry behind them, so that stored blocks
        don't outlive the blocks that they need; as `Space.refresh_ancestors` does."""
        chain = np.append(hits, np.uint32(stored))
        heat = self._policy.heat(chain)
        if heat[:-1].min() <= heat[-1]:
            self._policy.refresh(chain, now_s)

    def _remove(self, entries: Entries, *, evicted: bool) -> None:
        keys = self._keys[entries]
        self._policy.forget(entries, keys, evicted=evicted)
        for key in keys.tolist():
            del self._entries[key]
        self._free.extend(entries.tolist())
        self.used_bytes -= int(self._bytes[entries].sum())

    def check_invariants(self) -> None:
        entries = np.array(list(self._entries.values()), np.int64)
        assert len(set(entries.tolist())) == len(entries), "two keys have one entry"
        assert not set(self._free) & set(entries.tolist()), "a free entry is held"
        assert self.used_bytes == int(self._bytes[entries].sum()), "bytes miscounted"
        assert self._keys[entries].tolist() == list(self._entries), "an entry has another key"
        self._policy.check_invariants()

"""Keys of blocks whose load failed."""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from hotkv_client.types import BoolMask

MAX_HIDDEN_KEYS = 1 << 16
HIDDEN_FOR_S = 60.0
"""An engine that stores nothing (kv_role `kv_consumer`) never learns that a block was stored
again, so it offers hidden keys after this time."""


class HiddenKeys:
    """Keys (group, block hash) of blocks whose load failed: no hits, and stored again."""

    def __init__(self, *, stores: bool = True) -> None:
        self._keys: dict[tuple[int, bytes], None] = {}
        self._stores = stores
        self._epoch = self._period = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"HiddenKeys({len(self._keys)})"

    def set_epoch(self, epoch: int, now_s: float) -> None:
        """Unhides all keys if the server's epoch has changed; without stores, also every
        HIDDEN_FOR_S."""
        period = 0 if self._stores else int(now_s // HIDDEN_FOR_S)
        if (epoch, period) != (self._epoch, self._period):
            self._epoch, self._period = epoch, period
            self._keys.clear()

    def hide(self, group: int, hashes: Iterable[bytes]) -> None:
        self._keys.update(((group, h), None) for h in hashes)
        excess = len(self._keys) - MAX_HIDDEN_KEYS
        for key in list(itertools.islice(self._keys, max(0, excess))):
            del self._keys[key]

    def clear(self, group: int, block_hash: bytes) -> None:
        self._keys.pop((group, block_hash), None)

    def clear_all(self) -> None:
        self._keys.clear()

    def has(self, group: int, hashes: Sequence[bytes]) -> bool:
        return any((group, h) in self._keys for h in hashes)

    def mask(self, group: int, hashes: Sequence[bytes], ready: BoolMask) -> BoolMask:
        if not self._keys:
            return ready
        return ready & np.fromiter(
            ((group, h) not in self._keys for h in hashes), np.bool_, len(hashes)
        )

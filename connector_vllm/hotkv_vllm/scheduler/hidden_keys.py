"""Keys whose load failed. They are not offered, and are stored again, until the server has answered
for them or has a new epoch."""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from hotkv_vllm.link import BoolMask

MAX_HIDDEN_KEYS = 1 << 16
"""The oldest are forgotten beyond that."""


class HiddenKeys:
    """See the module. A key is (group, block hash)."""

    def __init__(self) -> None:
        self._keys: dict[tuple[int, bytes], None] = {}
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"HiddenKeys({len(self._keys)})"

    def set_epoch(self, epoch: int) -> None:
        """Notes the server's epoch. A new one clears everything."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._keys.clear()

    def hide(self, group: int, hashes: Iterable[bytes]) -> None:
        """Adds keys whose load failed."""
        self._keys.update(((group, h), None) for h in hashes)
        excess = len(self._keys) - MAX_HIDDEN_KEYS
        for key in list(itertools.islice(self._keys, max(0, excess))):
            del self._keys[key]

    def clear(self, group: int, block_hash: bytes) -> None:
        """Removes a key: the server has it anew."""
        self._keys.pop((group, block_hash), None)

    def clear_all(self) -> None:
        """Removes all keys."""
        self._keys.clear()

    def mask(self, group: int, hashes: Sequence[bytes], ready: BoolMask) -> BoolMask:
        """Returns `ready` without the hidden keys."""
        if not self._keys:
            return ready
        return ready & np.fromiter(
            ((group, h) not in self._keys for h in hashes), np.bool_, len(hashes)
        )

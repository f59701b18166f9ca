"""A shared tier in this process's memory whose faults are chosen.

Several over one `MemoryStore` are those of several nodes.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from hotkv_server.cache.values import Medium
from hotkv_server.dataplane.plan import Region
from hotkv_server.testing.memory_tier import MemoryStore, MemoryTier
from hotkv_server.tiers.epoch_numbers import RAISES, begun
from hotkv_server.tiers.protocol import (
    NO_EPOCH,
    NO_EPOCHS,
    Blocks,
    Codes,
    Epochs,
    OnEpoch,
    OnEpochs,
    OnProbe,
    OnRead,
    Read,
    Shown,
)

_fresh = itertools.count(begun(1 << 51), RAISES)


class SharedMemoryTier(MemoryTier):
    """See the module and `SharedTier`. `on_epoch`: as of `ValkeyTier`."""

    def __init__(
        self,
        arena: Region,
        store: MemoryStore,
        *,
        on_epoch: Callable[[str, int], None] = lambda fingerprint, epoch: None,
        is_manual: bool = False,
    ) -> None:
        assert not store.places, "a shared tier places by itself"
        self._on_epoch = on_epoch
        super().__init__(arena, store, medium=Medium.REMOTE, is_manual=is_manual, name="shared")

    def probe(
        self,
        keys: Sequence[bytes],
        deadline_s: float,
        on_done: OnProbe,
        epochs: Epochs = NO_EPOCHS,
    ) -> None:
        """See `SharedTier`."""
        super().probe(keys, deadline_s, self._checked(epochs, on_done))

    def read(self, blocks: Blocks, deadline_s: float, on_done: OnRead) -> None:
        """See `Tier`."""
        super().read(blocks, deadline_s, self._checked(blocks.epochs, on_done))

    def epochs(self, fingerprints: Sequence[str], deadline_s: float, on_done: OnEpochs) -> None:
        """See `SharedTier`."""

        def do() -> None:
            if self.faults.problem:
                on_done(None)
                return
            epochs = self._store.epochs
            for name in fingerprints:
                epochs.setdefault(name, next(_fresh))
            shown = {name: epochs[name] for name in fingerprints}
            on_done(Shown(shown, self._store.restored_below))

        self._add(do, lambda: on_done(None), 0)

    def raise_epoch(self, fingerprint: str, floor: int, on_done: OnEpoch) -> None:
        """See `SharedTier`."""

        def do() -> None:
            if self.faults.problem:
                on_done(None)
                return
            epoch = max(self._store.epochs.get(fingerprint, 0) + 1, floor + 1, next(_fresh))
            self._store.epochs[fingerprint] = epoch
            on_done(epoch)

        self._add(do, lambda: on_done(None), 0)

    def _checked(self, epochs: Epochs, on_done: OnRead) -> OnRead:
        """Looks at the epochs once all blocks have been read."""

        def done(codes: Codes) -> None:
            stored = self._store.epochs
            changed = {name for name, known in epochs.items() if stored.get(name) != known}
            if changed and not np.all(codes == Read.FAILED):
                for name in changed:
                    self._on_epoch(name, stored.get(name, NO_EPOCH))
                codes[:] = Read.ABSENT
            on_done(codes)

        return done

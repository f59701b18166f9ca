"""The tier whose faults are chosen keeps the contract that it stands in for."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from hotkv_server.dataplane.plan import Region
from hotkv_server.testing.memory_tier import MemoryStore, MemoryTier
from hotkv_server.testing.tier_contract import ARENA_BYTES, Rig, check_tier


@contextlib.contextmanager
def rig(places: bool) -> Iterator[Rig]:
    memory = np.zeros(ARENA_BYTES, np.uint8)
    arena = Region(memory.ctypes.data, ARENA_BYTES, "arena")
    store = MemoryStore(places, ARENA_BYTES)
    tier = MemoryTier(arena, store)

    @contextlib.contextmanager
    def breaks() -> Iterator[None]:
        tier.faults.problem = "broken"
        yield
        tier.faults.problem = ""

    try:
        yield Rig(tier, arena, lambda key, at: store.damage(at if places else key, 5), breaks)
    finally:
        tier.close()


@pytest.mark.parametrize("places", [True, False])
@pytest.mark.parametrize("seed", [1, 2])
def test_contract(places: bool, seed: int) -> None:
    check_tier(lambda: rig(places), seed=seed)

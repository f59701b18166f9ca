"""How old evicted blocks were: since their last use, as the core knows the time."""

import pytest

from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_server.cache import inspect
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.histogram import AGES_S
from hotkv_server.cache.room.policies import POLICIES
from hotkv_server.cache.values import CoreConfig, HashList, Run
from tests.core.support import begin_store, expire, make_table, words_of

SLOT_BYTES, SLOTS = 1 << 14, 4
GROUPS = (GroupSpec(GroupKind.FULL_ATTENTION, 16, (SLOT_BYTES,)),)


class Ages:
    """A core with room for SLOTS blocks, and one session."""

    def __init__(self, policy: str, began_s: float) -> None:
        config = CoreConfig(SLOTS * SLOT_BYTES, SLOT_BYTES, 64)
        table = make_table(64, arena_bytes=config.arena_bytes)
        self.core = CacheCore(config, table, POLICIES[policy](64))
        key_space = KeySpace("m", "w", "bfloat16", GROUPS, 16)
        self.session = self.core.open_session("engine", "worker", key_space, began_s)

    def store(self, numbers: range, now_s: float) -> None:
        """Each block begins a chain of its own."""
        for number in numbers:
            name, run = str(number), Run(0, words_of([number]))
            begin_store(self.core, self.session.number, name, name, [run], 0, 60.0, now_s)
            self.core.end_store(self.session.number, name, True, now_s)

    def use(self, numbers: range, now_s: float) -> None:
        for number in numbers:
            self.core.touch(self.session.number, [HashList(0, words_of([number]))], now_s)


@pytest.mark.parametrize("policy", ["lru", "hotness", "arc"])
def test_an_age_is_the_time_since_the_last_use(policy: str) -> None:
    ages = Ages(policy, 900.0)
    ages.store(range(SLOTS), 1000.0)
    ages.use(range(2), 1050.0)
    expire(ages.core, 1110.0)
    ages.store(range(10, 12), 1110.0)
    counted = inspect.eviction_ages(ages.core)
    assert counted.count == ages.core.space.removal.evicted_blocks == 2
    assert counted.sum == pytest.approx(2 * 110.0, abs=0.1)
    assert counted.counts[AGES_S.index(300.0)] == 2
    expire(ages.core, 1111.0)
    ages.store(range(20, 20 + SLOTS), 1111.0)
    assert counted.count == ages.core.space.removal.evicted_blocks == 2 + SLOTS
    assert counted.counts[AGES_S.index(1.0)] >= 2, "those of the same second"


def test_no_age_is_counted_before_the_core_knows_the_time() -> None:
    ages = Ages("lru", 0.0)
    ages.store(range(SLOTS + 2), 10.0)
    assert ages.core.space.removal.evicted_blocks == 2
    assert not inspect.eviction_ages(ages.core).count


def test_a_session_that_opens_tells_the_time() -> None:
    ages = Ages("lru", 900.0)
    ages.store(range(SLOTS), 500.0)
    ages.store(range(10, 13), 900.0)
    counted = inspect.eviction_ages(ages.core)
    assert (counted.count, counted.sum) == (3, pytest.approx(3 * 400.0, abs=0.1))

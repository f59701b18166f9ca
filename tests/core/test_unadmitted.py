"""How much leases of a tenant may pin before a load has started under them."""

from dataclasses import replace

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies import LRU
from hotkv_server.cache.values import CoreConfig, HashList, Run, TenantShare
from tests.core.support import begin_store, make_key_space, make_table, words_of

NUM_SLOTS = 32


def test_each_tenant_has_a_budget_of_what_is_surely_its_own() -> None:
    """A quarter of the half of the arena that each is guaranteed; `test_cache` states what a budget
    allows."""
    share = TenantShare(NUM_SLOTS * SLOT_ALIGN // 2)
    config = CoreConfig(
        NUM_SLOTS * SLOT_ALIGN,
        4 * SLOT_ALIGN,
        100,
        unadmitted_share=0.25,
        tenants={"a": share, "b": share},
    )
    core = CacheCore(config, make_table(100), LRU(100))
    blocks = words_of(range(8))
    for tenant in "ab":
        key_space = replace(make_key_space("m", SLOT_ALIGN, SLOT_ALIGN), tenant=tenant)
        session = core.open_session(tenant, "rank", key_space, 0.0).number
        begin_store(core, session, "s", "s", [Run(0, blocks)], 0, 0.0, 0.0)
        core.end_store(session, "s", True, 0.0)
        (mask,) = core.acquire(session, "l", [HashList(0, blocks)], 100.0, 1.0).pinned
        assert mask.tolist() == [True] * 4 + [False] * 4

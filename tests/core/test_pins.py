"""Tests `RetentionPins` against a dict."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hotkv_proto.blocks import Retention
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.leases import retentions as holds_module
from hotkv_server.cache.leases.retentions import RetentionPins
from hotkv_server.cache.room.shares import TenantBook
from hotkv_server.cache.table.index import BlockIndex
from hotkv_server.cache.values import Entries, HashList, TenantShare
from tests.core.support import World, evict, expire, make_table, words_of

NUM_ENTRIES = 24
SIZES = [SLOT_ALIGN, 3 * SLOT_ALIGN]
PLACES = st.lists(st.integers(0, NUM_ENTRIES - 1), max_size=14)


class HoldsMachine(RuleBasedStateMachine):
    """Two tenants share a budget; one also has a bound. An entry's pin ends at the latest of the
    requested times."""

    @initialize(
        budget_bytes=st.sampled_from([0, SLOT_ALIGN, 10 * SLOT_ALIGN + 7, 1 << 40]),
        seed=st.integers(0, 1000),
    )
    def start(self, budget_bytes: int, seed: int) -> None:
        index = BlockIndex(make_table(NUM_ENTRIES))
        self.bounds = [min(budget_bytes, 5 * SLOT_ALIGN), budget_bytes]
        tenants = TenantBook({"a": TenantShare(0, 5 * SLOT_ALIGN)}, budget_bytes)
        for tenant, name in enumerate("ab"):
            index.add_key_space(tenant, [11])
            tenants.add_key_space(tenant, name)
        each = np.arange(NUM_ENTRIES // len(SIZES))
        entries = np.concatenate(
            [
                index.insert(tenant, 0, words_of(each.tolist()), each * SLOT_ALIGN, size, each, 1)
                for tenant, size in enumerate(SIZES)
            ]
        )
        index.publish(entries, index.mixed(entries), np.zeros(len(entries), np.uint64))
        self.size_of = dict(zip(entries.tolist(), index.slot_bytes(entries).tolist(), strict=True))
        # Numbers in any order, as in an index in use.
        self.numbers = np.random.default_rng(seed).permutation(entries)
        # Other owners pin some too.
        index.pin(self.numbers[: NUM_ENTRIES // 3], 1)
        self.others = index.pins.copy()
        self.index, self.holds = index, RetentionPins(index, tenants, 1.0)
        self.now_s = 0.0
        self.until_s: dict[int, float] = {}

    def entries(self, places: list[int]) -> Entries:
        return self.numbers[places].astype(np.uint32)

    def held_bytes(self, size: int = 0) -> int:
        """Bytes of pinned blocks; with `size`, only of that size."""
        sizes = [self.size_of[held] for held in self.until_s]
        return sum(one for one in sizes if size in (0, one))

    @rule(
        places=PLACES,
        tenant=st.sampled_from([0, 1]),
        ttl_s=st.sampled_from([0.5, 3.0, 20.0, 86_400.0]),
    )
    def hold(self, places: list[int], tenant: int, ttl_s: float) -> None:
        """After an entry beyond the budget, no later one is pinned: a chain is useless without
        its head."""
        until_s, num_held, full = self.now_s + ttl_s, 0, False
        size = SIZES[tenant]
        entries = [one for one in self.entries(places).tolist() if self.size_of[one] == size]
        for entry in dict.fromkeys(entries):
            if entry in self.until_s:
                self.until_s[entry] = max(self.until_s[entry], until_s)
                num_held += 1
                continue
            full |= size > min(
                self.holds.budget_bytes - self.held_bytes(),
                self.bounds[tenant] - self.held_bytes(size),
            )
            if not full:
                self.until_s[entry] = until_s
                num_held += 1
        assert self.holds.hold(np.array(entries, np.uint32), until_s) == num_held

    @rule(passed_s=st.sampled_from([0.0, 0.5, 3.0, 19.0, 1e5]))
    def expire(self, passed_s: float) -> None:
        self.now_s += passed_s
        for _ in self.holds.expire(self.now_s):
            pass
        self.until_s = {
            entry: until_s for entry, until_s in self.until_s.items() if until_s > self.now_s
        }

    @rule(places=PLACES)
    def unpin(self, places: list[int]) -> None:
        gone = self.entries(places)
        self.holds.unpin(gone)
        for entry in gone.tolist():
            self.until_s.pop(entry, None)

    @invariant()
    def agree(self) -> None:
        self.holds.check_invariants()
        assert self.holds.entries().tolist() == sorted(self.until_s) and len(self.holds) == len(
            self.until_s
        )
        assert self.holds.held_bytes == self.held_bytes() <= self.holds.budget_bytes
        pins = self.index.pins - self.others
        assert {int(entry): int(pins[entry]) for entry in np.flatnonzero(pins)} == dict.fromkeys(
            self.until_s, 1
        )


TestHoldsMachine = HoldsMachine.TestCase


def test_pins_made_during_expiry_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds_module, "PART_ENTRIES", 2)
    machine = HoldsMachine()
    machine.start(1 << 40, 0)
    for tenant in (0, 1):
        machine.hold(list(range(8)), tenant, 0.5)
    machine.now_s = 0.5
    ending = machine.holds.expire(machine.now_s)
    for _ in range(3):
        next(ending)
    # Entry 2 is in a finished part, entry 20 in a later one.
    for entry, until_s in ((2, 2.0), (20, 3.0)):
        machine.holds.hold(np.array([entry], np.uint32), until_s)
        machine.holds.check_invariants()
    for _ in ending:
        machine.holds.check_invariants()
    assert machine.holds.entries().tolist() == [2, 20]
    assert not list(machine.holds.expire(1.9))
    for _ in machine.holds.expire(2.0):
        pass
    assert machine.holds.entries().tolist() == [20]
    for _ in machine.holds.expire(3.0):
        pass
    assert not len(machine.holds) and machine.holds.held_bytes == 0


def test_a_later_pin_does_not_shorten_an_earlier() -> None:
    world = World()
    session = world.open()
    world.store(session, [1, 2])
    for number, ttl_s in ((1, 50.0), (1, 5.0), (2, 10.0)):
        blocks, retention = HashList(0, words_of([number])), Retention(ttl_s=ttl_s, pin=True)
        for _ in world.core.use(session.number, blocks, 2.0, retention):
            pass
    for now_s, kept in ((12.0, (0, 1)), (51.9, (0, 1)), (52.0, (1, 0))):
        expire(world.core, now_s)
        assert evict(world.core, 1, 0, words_of([1])) == kept

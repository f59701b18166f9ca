"""Key spaces come and go: what is known, what is forgotten first, and that none in use ever is."""

import ctypes
import mmap
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace, Representation
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies import POLICIES
from hotkv_server.cache.sessions import FORGET_S, MAX_KEY_SPACES, weight_bytes
from hotkv_server.cache.values import KEY_SPACE_ROWS, CoreConfig, HashList, Run, TenantShare
from tests.core.support import begin_store, flush, make_table, words_of

ARENA, SLAB = 1 << 20, 1 << 16
GROUPS = (GroupSpec(GroupKind.FULL_ATTENTION, 16, (4096,)),)
KINDS = tuple(Representation(0, "centre", version, (4096,)) for version in range(8))
MOST = 3


def named(name: str, tenant: str = "a") -> KeySpace:
    return KeySpace(name, "revision", "bfloat16", GROUPS, 16, tenant=tenant)


def make_core(*tenants: str) -> CacheCore:
    config = CoreConfig(ARENA, SLAB, 200, tenants={name: TenantShare() for name in tenants})
    core = CacheCore(config, make_table(200), POLICIES["lru"](200))
    core.catalog.max_of_tenant = MOST
    return core


def make_room(
    core: CacheCore, key_space: KeySpace, kinds: tuple[Representation, ...] = ()
) -> list[int]:
    """As the node does; the numbers that were forgotten."""
    gone = []
    while number := core.catalog.surplus(key_space, kinds):
        flush(core, number)
        assert core.catalog.forget(number)
        gone.append(number)
    return gone


def store(core: CacheCore, session: int, numbers: range) -> None:
    begin_store(core, session, "t", "l", [Run(0, words_of(numbers))], 0, 0.0, 0.0)
    core.end_store(session, "t", True, 0.0)


class CatalogMachine(RuleBasedStateMachine):
    """Sessions of two tenants over more key spaces than each may have; the model knows who left
    what when."""

    def __init__(self) -> None:
        super().__init__()
        self.core = make_core("a", "b")
        self.now_s = 0.0
        self.highest = 0
        self.numbers: dict[KeySpace, int] = {}
        self.sessions: list[tuple[int, KeySpace]] = []
        self.left: list[KeySpace] = []
        self.blocks: dict[KeySpace, set[int]] = {}

    @rule(tenant=st.sampled_from("ab"), name=st.sampled_from("uvwxyz"), num_kinds=st.integers(0, 2))
    def open(self, tenant: str, name: str, num_kinds: int) -> None:
        key_space, kinds = named(name, tenant), KINDS[:num_kinds]
        mine = [one for one in self.numbers if one.tenant == tenant]
        going: list[KeySpace] = []
        if key_space not in mine and len(mine) == MOST:
            unused = [one for one in self.left if one.tenant == tenant]
            going = sorted(unused, key=lambda one: bool(self.blocks.get(one)))[:1]
        gone = make_room(self.core, key_space, kinds)
        assert gone == [self.numbers.pop(one) for one in going]
        for one in going:
            self.left.remove(one)
            self.blocks.pop(one, None)
        if key_space not in mine and len(mine) == MOST and not going:
            with pytest.raises(HotKVError) as refused:
                self.core.open_session("engine", "tool", key_space, self.now_s, kinds)
            assert refused.value.reason is Reason.OVERLOADED
            return
        record = self.core.open_session("engine", "tool", key_space, self.now_s, kinds)
        if key_space not in mine:
            assert record.key_space_id > self.highest, "a number was given away anew"
            self.highest = self.numbers[key_space] = record.key_space_id
        assert record.key_space_id == self.numbers[key_space]
        self.sessions.append((record.number, key_space))
        if key_space in self.left:
            self.left.remove(key_space)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.now_s += 1.0
        number, key_space = self.sessions.pop(data.draw(st.integers(0, len(self.sessions) - 1)))
        self.core.close_session(number, self.now_s)
        if all(other != key_space for _, other in self.sessions):
            self.left.append(key_space)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), first=st.integers(0, 5))
    def store(self, data: st.DataObject, first: int) -> None:
        session, key_space = data.draw(st.sampled_from(self.sessions))
        store(self.core, session, range(first, first + 3))
        self.blocks.setdefault(key_space, set()).update(range(first, first + 3))

    @precondition(lambda self: self.numbers)
    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        key_space = data.draw(st.sampled_from(list(self.numbers)))
        assert flush(self.core, self.numbers[key_space]) == len(self.blocks.pop(key_space, ()))

    @rule(wait_s=st.sampled_from([1.0, FORGET_S / 2, FORGET_S]))
    def wait(self, wait_s: float) -> None:
        self.now_s += wait_s
        before = set(self.core.key_spaces)
        for number in list(self.core.catalog.outlived(self.now_s)):
            assert self.core.catalog.forget(number)
        for key_space in list(self.left):
            number = self.numbers[key_space]
            if number in before - set(self.core.key_spaces):
                assert not self.blocks.get(key_space), "forgotten with a block"
                self.left.remove(key_space)
                del self.numbers[key_space]

    @invariant()
    def agrees(self) -> None:
        assert {number: record.key_space for number, record in self.core.key_spaces.items()} == {
            n: ks for ks, n in self.numbers.items()
        }
        for key_space, number in self.numbers.items():
            (found,) = self.core.lookup(number, [HashList(0, words_of(range(8)))])
            assert set(found.nonzero()[0].tolist()) == self.blocks.get(key_space, set())
        self.core.check_invariants()


TestCatalog = CatalogMachine.TestCase


def test_what_may_not_be_known_costs_nothing() -> None:
    """A key space that would be refused all the same makes no room for itself."""
    core = make_core()
    for name in "uvw":
        core.close_session(core.open_session("engine", "tool", named(name), 0.0).number, 1.0)
    huge = replace(named("huge"), groups=(GroupSpec(GroupKind.FULL_ATTENTION, 16, (2 * ARENA,)),))
    with pytest.raises(HotKVError, match="does not fit"):
        core.catalog.surplus(huge, ())
    assert len(core.key_spaces) == 3


def test_heavy_key_spaces_count_by_their_weight() -> None:
    """However few they are; kinds of representations count too."""
    core = make_core()
    core.catalog.max_of_tenant = 100
    core.catalog.max_weight_bytes = (
        4 * weight_bytes(named("one")) + weight_bytes(named("one"), KINDS[:4]) - 1
    )
    for number in range(4):
        core.close_session(
            core.open_session("engine", "tool", named(f"{number}xx"), 0.0).number, float(number)
        )
    assert make_room(core, named("new"), KINDS[:4]) == [1]
    session = core.open_session("engine", "tool", named("new"), 9.0, KINDS[:4])
    core.open_session("engine", "tool", named("1xx"), 9.0)
    assert make_room(core, named("1xx"), KINDS) == [3]
    core.close_session(session.number, 10.0)
    core.check_invariants()


def resident_bytes(array: np.ndarray) -> int:
    """How much of an array has memory, by the page."""
    page = mmap.PAGESIZE
    begin = array.ctypes.data // page * page
    length = array.ctypes.data + array.nbytes - begin
    found = (ctypes.c_ubyte * -(-length // page))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(length), found)
    return sum(one & 1 for one in found) * page


def test_key_spaces_that_come_and_go_leave_no_memory_behind() -> None:
    """Twice as many as there are rows. What there is of salts belongs to groups, not to key spaces:
    each of the few that are in use has a page, which may be a huge one."""
    core = make_core()
    core.catalog.max_of_tenant = MAX_KEY_SPACES
    for number in range(2 * KEY_SPACE_ROWS):
        found, _ = core.catalog.register(named(str(number)), KINDS[:1], 0.0)
        assert core.catalog.forget(found)
    salts = core.space.index._salts
    assert resident_bytes(salts) <= salts.nbytes // 2
    core.check_invariants()


def test_rows_stay_apart_while_numbers_grow() -> None:
    """Many more key spaces than there are rows, one of which stays: no other one ever has its
    row."""
    core = make_core()
    core.catalog.max_of_tenant = MAX_KEY_SPACES
    stays = core.open_session("engine", "tool", named("stays"), 0.0)
    store(core, stays.number, range(5))
    for number in range(KEY_SPACE_ROWS + 3):
        session = core.open_session("engine", "tool", named(str(number)), 0.0)
        if number > KEY_SPACE_ROWS - 3:
            store(core, session.number, range(2))
            flush(core, session.key_space_id)
        core.close_session(session.number, 0.0)
        assert core.catalog.forget(session.key_space_id)
    assert session.key_space_id > KEY_SPACE_ROWS + 3
    (found,) = core.lookup(stays.key_space_id, [HashList(0, words_of(range(6)))])
    assert found.tolist() == [True] * 5 + [False]
    core.check_invariants()

"""Tests the bounded catalog of key spaces: it forgets unused ones, first those without blocks,
then those unused for longest."""

import ctypes
import mmap
import sys
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hotkv_proto.errors import Reason
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace, Sketch
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.sessions import FORGET_S, MAX_KEY_SPACES, weight_bytes
from hotkv_server.cache.values import KEY_SPACE_ROWS, SessionRecord, TenantShare
from tests.core.support import World, flush, reason_of

GROUPS = (GroupSpec(GroupKind.FULL_ATTENTION, 16, (4096,)),)
KINDS = tuple(Sketch(0, "centre", version, (4096,)) for version in range(8))
MOST = 3


def named(name: str, tenant: str = "a") -> KeySpace:
    return KeySpace(name, "revision", "bfloat16", GROUPS, 16, tenant=tenant)


def make_world(*tenants: str, most: int = MOST) -> World:
    world = World(16, 200, tenants={name: TenantShare() for name in tenants})
    world.core.catalog.max_of_tenant = most
    return world


def opened(
    world: World, key_space: KeySpace, now_s: float = 0.0, kinds: tuple[Sketch, ...] = ()
) -> SessionRecord:
    return world.core.open_session("engine", "tool", key_space, now_s, kinds)


def make_room(core: CacheCore, key_space: KeySpace, kinds: tuple[Sketch, ...] = ()) -> list[int]:
    """Numbers of the key spaces that the server would forget."""
    gone = []
    while number := core.catalog.surplus(key_space, kinds):
        flush(core, number)
        assert core.catalog.forget(number)
        gone.append(number)
    return gone


class CatalogMachine(RuleBasedStateMachine):
    """Two tenants open more key spaces than each may have."""

    def __init__(self) -> None:
        super().__init__()
        self.world = make_world("a", "b")
        self.core = self.world.core
        self.now_s = 0.0
        self.highest = 0
        self.revisions: dict[int, dict[int, tuple[Sketch, ...]]] = {}
        self.numbers: dict[KeySpace, int] = {}
        self.sessions: list[tuple[SessionRecord, KeySpace]] = []
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
            refusal = reason_of(lambda: opened(self.world, key_space, self.now_s, kinds))
            assert refusal is Reason.OVERLOADED
            return
        record = opened(self.world, key_space, self.now_s, kinds)
        if key_space not in mine:
            assert record.key_space_id > self.highest, "a number was given away anew"
            self.highest = self.numbers[key_space] = record.key_space_id
        assert record.key_space_id == self.numbers[key_space]
        self.sessions.append((record, key_space))
        if key_space in self.left:
            self.left.remove(key_space)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.now_s += 1.0
        session, key_space = self.sessions.pop(data.draw(st.integers(0, len(self.sessions) - 1)))
        self.core.close_session(session.number, self.now_s)
        if all(other != key_space for _, other in self.sessions):
            self.left.append(key_space)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), first=st.integers(0, 5))
    def store(self, data: st.DataObject, first: int) -> None:
        session, key_space = data.draw(st.sampled_from(self.sessions))
        self.world.store(session, range(first, first + 3))
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
        saved = {n: record.sketches for n, record in self.core.key_spaces.items()}
        assert self.revisions.setdefault(self.core.catalog.revision, saved) == saved
        assert {number: record.key_space for number, record in self.core.key_spaces.items()} == {
            n: ks for ks, n in self.numbers.items()
        }
        for key_space, number in self.numbers.items():
            found = self.world.found(range(8), number)
            assert set(found) == self.blocks.get(key_space, set())
        self.core.check_invariants()


TestCatalog = CatalogMachine.TestCase
TestCatalog.settings = settings(max_examples=80, deadline=None)


def test_what_may_not_be_known_costs_nothing() -> None:
    """A refused request must not make a full catalog forget any."""
    world = make_world()
    for name in "uvw":
        world.core.close_session(opened(world, named(name)).number, 1.0)
    huge = replace(named("huge"), groups=(GroupSpec(GroupKind.FULL_ATTENTION, 16, (1 << 30,)),))
    assert reason_of(lambda: world.core.catalog.surplus(huge, ())) is Reason.INVALID_FIELD
    assert len(world.core.key_spaces) == 3


def test_heavy_key_spaces_count_by_their_weight() -> None:
    """A weight includes strings and kinds of sketches."""
    texts = tuple(map(str, range(500)))
    for key_space in (
        replace(named("one"), groups=(replace(GROUPS[0], layer_names=texts),)),
        replace(named("one"), groups=(replace(GROUPS[0], shard_bytes=(1,) * 500),)),
        replace(named("one"), extra=texts),
    ):
        assert weight_bytes(key_space) > sum(map(sys.getsizeof, texts))
    long = weight_bytes(replace(named("one"), extra=("x" * 100_000,)))
    assert 300_000 < long < 310_000
    world = make_world(most=100)
    core = world.core
    light, heavy = weight_bytes(named("one")), weight_bytes(named("one"), KINDS[:4])
    core.catalog.max_weight_bytes = 4 * light + heavy - 1
    for number in range(4):
        core.close_session(opened(world, named(f"{number}xx")).number, float(number))
    assert make_room(core, named("new"), KINDS[:4]) == [1]
    session = opened(world, named("new"), 9.0, KINDS[:4])
    opened(world, named("1xx"), 9.0)
    assert make_room(core, named("1xx"), KINDS) == [3]
    core.close_session(session.number, 10.0)
    core.check_invariants()


def resident_bytes(array: np.ndarray) -> int:
    """Bytes in physical memory, in whole pages."""
    page = mmap.PAGESIZE
    begin = array.ctypes.data // page * page
    length = array.ctypes.data + array.nbytes - begin
    found = (ctypes.c_ubyte * -(-length // page))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(length), found)
    return sum(one & 1 for one in found) * page


def test_passing_key_spaces_leave_no_memory() -> None:
    """The index has a row of hash salts per key space; at most half of the rows may be in
    physical memory."""
    world = make_world(most=MAX_KEY_SPACES)
    core = world.core
    stays = opened(world, named("stays"))
    world.store(stays, range(5))
    for number in range(2 * KEY_SPACE_ROWS):
        if number % KEY_SPACE_ROWS > KEY_SPACE_ROWS - 3:
            session = opened(world, named(str(number)))
            found = session.key_space_id
            world.store(session, range(2))
            flush(core, found)
            core.close_session(session.number, 0.0)
        else:
            found, _ = core.catalog.register(named(str(number)), KINDS[:1], 0.0)
        assert core.catalog.forget(found)
    assert found > 2 * KEY_SPACE_ROWS
    assert world.found(range(6), stays.key_space_id) == list(range(5))
    salts = core.space.index._salts
    assert resident_bytes(salts) <= salts.nbytes // 2
    core.check_invariants()

"""Long work in parts: whatever is called between two parts, the books agree after each, and the
promise of the work holds at its end.
"""

from collections.abc import Callable, Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hotkv_proto import native
from hotkv_proto.blocks import BlockResult
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import MAX_GROUPS, Representation
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache import core as core_module
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room import removal, space
from hotkv_server.cache.room.policies import LRU, POLICIES
from hotkv_server.cache.room.policies.shared import ColdQueue, Highest
from hotkv_server.cache.room.removal import finished
from hotkv_server.cache.values import CoreConfig, HashList, LoadPositions, Run
from tests.core.support import begin_store, make_key_space, make_table, words_of

NUM_SLOTS = 32
MEDDLING = st.lists(
    st.tuples(
        st.sampled_from(["store", "begin", "end", "lease", "release", "touch", "other", "nothing"]),
        st.integers(0, 30),
    ),
    max_size=40,
)


@pytest.fixture(autouse=True, scope="module")
def small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_module, "BLOCKS", 3)
        patch.setattr(core_module, "SCANNED_ENTRIES", 11)
        patch.setattr(core_module, "LEASED_BLOCKS", 1)
        patch.setattr(removal, "PART_ENTRIES", 5)
        for module in (removal, space):
            patch.setattr(module, "EVICTED_PER_PART", 3)
        patch.setattr(removal, "RUNS_PER_PART", 1)
        yield


class Meddler:
    """A core, and calls that come between. `began`: the turn in which the last store of a block of
    the first key space began."""

    def __init__(self, policy: str = "lru", num_slots: int = NUM_SLOTS) -> None:
        config = CoreConfig(
            num_slots * SLOT_ALIGN,
            4 * SLOT_ALIGN,
            100,
            unadmitted_share=1.0,
            held_share=1.0,
        )
        self.core = CacheCore(config, make_table(100), POLICIES[policy](100))
        self.session = self.core.open_session(
            "engine", "rank", make_key_space("one", SLOT_ALIGN, 2 * SLOT_ALIGN), 0.0
        ).number
        self.other = self.core.open_session(
            "other", "rank", make_key_space("two", SLOT_ALIGN, SLOT_ALIGN), 0.0
        ).number
        self.turn = 0
        self.began: dict[int, int] = {}
        self.writing: dict[str, list[int]] = {}
        self.num_calls = 0

    def begin(self, numbers: list[int]) -> str:
        self.num_calls += 1
        name = f"store {self.num_calls}"
        run = [Run(0, words_of(numbers))]
        (slots,) = begin_store(
            self.core, self.session, name, name, run, 0, 0.0, float(self.num_calls)
        )
        self.writing[name] = [numbers[at] for at in slots.positions.tolist()]
        for number in self.writing[name]:
            self.began[number] = self.turn
        return name

    def end(self, name: str) -> list[int]:
        results = self.core.end_store(self.session, name, True, float(self.num_calls))[0]
        del self.writing[name]
        return [int(result) for result in results]

    def call(self, what: str, number: int) -> None:
        core, hashes = self.core, [HashList(0, words_of([number, number + 1]))]
        match what:
            case "store":
                self.end(self.begin([number, number + 1]))
            case "begin":
                self.begin([number, number + 1])
            case "end" if self.writing:
                self.end(next(iter(self.writing)))
            case "lease" if core.leases.get("engine", f"lease {number}") is None:
                core.acquire(self.session, f"lease {number}", hashes, 0.0, 1.0)
            case "release":
                core.release(self.session, f"lease {number}")
            case "touch":
                core.touch(self.session, hashes, float(self.num_calls))
            case "other":
                name = f"other {self.num_calls} {number} {self.turn}"
                begin_store(core, self.other, name, name, [Run(0, words_of([number]))], 0, 0.0, 1.0)
                core.end_store(self.other, name, True, 1.0)
        core.take_effects()

    def found(self, numbers: list[int], key_space_id: int = 1) -> list[int]:
        mask = self.core.lookup(key_space_id, [HashList(0, words_of(numbers))])[0]
        return [number for number, ready in zip(numbers, mask.tolist(), strict=True) if ready]


@given(before=MEDDLING, between=MEDDLING, num_calls=st.integers(1, 3))
def test_a_flush_in_parts_leaves_nothing_of_before(
    before: list[tuple[str, int]], between: list[tuple[str, int]], num_calls: int
) -> None:
    """Nothing that was stored or being stored when it was asked is found when it answers, whatever
    comes between; others keep theirs."""
    world = Meddler(num_slots=12)
    for what, number in before:
        world.call(what, number)
    leased = {
        lease.lease_id: world.core.slot_offsets(world.session, lease.lease_id)[0].tolist()
        for lease in world.core.leases.all()
        if lease.lease_id.startswith("lease")
    }
    others = world.found(list(range(40)), 2)
    world.turn = 1
    calls = iter(between)
    meddled_with_others = any(what in ("store", "begin", "other") for what, _ in between)
    for _ in world.core.flush(1):
        world.core.check_invariants()
        for _, (what, number) in zip(range(num_calls), calls, strict=False):
            world.call(what, number)
            world.core.check_invariants()
    assert all(world.began[number] == 1 for number in world.found(list(range(40)))), (
        "something of before is found"
    )
    while world.writing:
        world.end(next(iter(world.writing)))
        world.core.check_invariants()
    assert all(world.began[number] == 1 for number in world.found(list(range(40)))), (
        "something became ready that was reserved before"
    )
    assert meddled_with_others or world.found(list(range(40)), 2) == others
    for lease_id, offsets in leased.items():
        if (
            world.core.leases.get("engine", lease_id) is not None
            and ("release", int(lease_id.split()[1])) not in between
        ):
            positions = np.flatnonzero(np.array(offsets) >= 0)
            (slots,) = world.core.begin_load(
                world.session, "load", lease_id, [LoadPositions(0, positions)]
            )
            assert slots.offsets.tolist() == [offset for offset in offsets if offset >= 0], (
                "a leased block has moved"
            )
            world.core.end_load(world.session, "load", True)


@given(between=MEDDLING, group=st.integers(0, 1), count=st.integers(1, 12))
def test_whatever_comes_between_there_is_room_in_the_end(
    between: list[tuple[str, int]], group: int, count: int
) -> None:
    """As long as not too much is pinned or being written: a quarter of the slots is asked for, and
    calls between take few."""
    world = Meddler(num_slots=4 * NUM_SLOTS)
    for start in range(0, 90, 9):
        world.end(world.begin(list(range(start + 200, start + 209))))
    world.core.take_effects()
    calls = iter([(what, number) for what, number in between if what not in ("begin", "other")])
    run = [Run(group, words_of(list(range(100, 100 + count))))]

    def meddle() -> None:
        world.core.check_invariants()
        for _, (what, number) in zip(range(2), calls, strict=False):
            world.call(what, number)

    reserving = world.core.reserve(world.session, "new", run, 0.0, 50.0)
    (results,) = finished(reserving, meddle).results
    assert set(results.tolist()) == {BlockResult.RESERVED}
    world.core.check_invariants()


def test_what_is_swept_is_not_refilled() -> None:
    """Also where a sweep finds less than is asked for: nothing more is there."""
    looked_at: list[tuple[int, int]] = []

    def members(first: int, stop: int) -> np.ndarray:
        looked_at.append((first, stop))
        return np.arange(max(first, 1), stop, dtype=np.uint32)

    highest, state = Highest(), np.arange(101, dtype=np.uint64)
    highest.number = 100
    queue = ColdQueue(state, highest, members, lambda entries: entries.astype(np.float64))
    rare = {7, 50, 99}

    def evictable(entries: np.ndarray) -> np.ndarray:
        return np.isin(entries, list(rare))

    for _ in queue.sweep(10, evictable):
        pass
    num_looked_at = len(looked_at)
    assert num_looked_at
    assert queue.take(10, evictable).tolist() == [7, 50, 99]
    assert len(looked_at) == num_looked_at
    queue.take(10, evictable)
    assert len(looked_at) > num_looked_at, "a take without a sweep looks for itself"


def test_slots_in_slabs_are_found() -> None:
    kernels = native.require("hotkv_server.cache.table.kernels")
    random = np.random.default_rng(0)
    for slab_bytes in (SLOT_ALIGN, 3 * SLOT_ALIGN, 1 << 22, (1 << 22) + SLOT_ALIGN):
        offsets, slabs = random.integers(0, 50 * slab_bytes, 300), random.random(50) < 0.5
        found = np.empty(300, np.bool_)
        kernels.lie_in(offsets, slab_bytes, slabs, found)
        assert np.array_equal(found, slabs[offsets // slab_bytes])


def test_entries_without_memory_are_not_used() -> None:
    """A table whose records come behind holds as many entries as have memory, and more when more
    have."""
    core = CacheCore(
        CoreConfig(NUM_SLOTS * SLOT_ALIGN, 4 * SLOT_ALIGN, 100), make_table(100), LRU(100)
    )
    core.space.index.back(5)
    session = core.open_session(
        "engine", "rank", make_key_space("one", SLOT_ALIGN, SLOT_ALIGN), 0.0
    ).number
    for limit, name in ((5, "a"), (8, "b")):
        core.space.index.back(limit)
        run = [Run(0, words_of(list(range(limit * 100, limit * 100 + 12))))]
        begin_store(core, session, name, name, run, 0, 0.0, 1.0)
        results = core.end_store(session, name, True, 1.0)[0].tolist()
        assert (
            results.count(BlockResult.STORED) == limit and core.space.index.num_numbers <= limit + 1
        )
        core.check_invariants()


def test_room_for_representations_keeps_their_blocks() -> None:
    """Of those that are there already: one whose block goes while it is kept would keep its slot
    for ever."""
    core = CacheCore(CoreConfig(8 * SLOT_ALIGN, 4 * SLOT_ALIGN, 100), make_table(100), LRU(100))
    kind = Representation(0, "rot2u", 1, (SLOT_ALIGN,))
    session = core.open_session(
        "engine", "rank", make_key_space("one", SLOT_ALIGN, SLOT_ALIGN), 0.0, (kind,)
    ).number
    begin_store(
        core,
        session,
        "t",
        "l",
        [Run(group, words_of(range(4))) for group in (0, MAX_GROUPS)],
        0,
        0.0,
        0.0,
    )
    core.end_store(session, "t", True, 0.0)
    runs = [Run(MAX_GROUPS, words_of(range(4))), Run(0, words_of(range(10, 14)))]
    for _ in core.reserve(session, "new", runs, 0.0, 0.0):
        core.check_invariants()
    core.check_invariants()
    assert core.lookup(1, [HashList(0, words_of(range(4)))])[0].all()


def reserving_in_parts(between: Callable[[Meddler], object]) -> list[int]:
    """Results of a call for blocks 100 to 111 in a full cache; `between` comes after its first
    part."""
    world = Meddler()
    for number in range(0, NUM_SLOTS, 2):
        world.call("store", number)
    reserving = world.core.reserve(
        world.session, "new", [Run(0, words_of(range(100, 112)))], 0.0, 50.0
    )
    next(reserving)
    between(world)
    (results,) = finished(reserving).results
    world.core.check_invariants()
    return [int(result) for result in results]


def test_what_others_did_between_two_parts_counts() -> None:
    assert reserving_in_parts(lambda world: None) == [BlockResult.RESERVED] * 12
    stored = reserving_in_parts(lambda world: world.call("store", 100))
    assert stored == [BlockResult.PRESENT] * 2 + [BlockResult.RESERVED] * 10
    begun = reserving_in_parts(lambda world: world.call("begin", 100))
    assert begun == [BlockResult.IN_FLIGHT] * 2 + [BlockResult.RESERVED] * 10


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda world: setattr(world.core, "draining", True), Reason.DRAINING),
        (lambda world: world.core.close_session(world.session, 1.0), Reason.UNKNOWN_SESSION),
        (
            lambda world: world.core.acquire(world.session, "new", [], 0.0, 1.0),
            Reason.DUPLICATE_ID,
        ),
    ],
    ids=["drain", "close", "lease"],
)
def test_a_call_may_be_refused_after_its_last_part(
    between: Callable[[Meddler], object], reason: Reason
) -> None:
    with pytest.raises(HotKVError) as refused:
        reserving_in_parts(between)
    assert refused.value.reason is reason

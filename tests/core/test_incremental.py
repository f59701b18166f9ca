"""Tests operations in parts, with other calls in between. After each part the core must be
consistent."""

from collections.abc import Callable, Iterator, Sequence
from unittest.mock import Mock

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hotkv_proto import native
from hotkv_proto.blocks import BlockResult
from hotkv_proto.errors import Reason
from hotkv_proto.keys import MAX_GROUPS, Sketch
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache import core as core_module
from hotkv_server.cache.room import removal, space
from hotkv_server.cache.room.policies import shared
from hotkv_server.cache.room.removal import coldest, finished, ranks_of
from hotkv_server.cache.values import HashList, LoadPositions, Run, TenantShare
from tests.core.support import World, begin_store, evict, reason_of, reserve, words_of

NUM_SLOTS = 32
CALLS = ["store", "begin", "end", "lease", "release", "touch", "other", "nothing"]
MEDDLING = st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 30)), max_size=40)


@pytest.fixture(autouse=True, scope="module")
def small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_module, "BLOCKS", 3)
        patch.setattr(core_module, "SCANNED_ENTRIES", 11)
        patch.setattr(core_module, "LEASED_BLOCKS", 1)
        patch.setattr(removal, "PART_ENTRIES", 5)
        for module in (removal, space):
            patch.setattr(module, "EVICTED_PER_PART", 3)
        patch.setattr(shared, "SWEEP_ENTRIES", 20)
        patch.setattr(removal, "WINDOWS_PER_PART", 1)
        yield


class Meddler(World):
    """Makes any one call between two parts.

    turn: number of the part.
    began: the turn in which a block's last store began.
    """

    def __init__(self, num_slabs: int = NUM_SLOTS // 4) -> None:
        super().__init__(num_slabs, unadmitted_share=1.0, held_share=1.0)
        self.session = self.open("engine", "one", (SLOT_ALIGN, 2 * SLOT_ALIGN)).number
        self.other = self.open("other", "two")
        self.turn = 0
        self.began: dict[int, int] = {}
        self.writing: list[str] = []

    def begin(self, numbers: Sequence[int]) -> str:
        self.num_calls += 1
        name, now_s = f"store {self.num_calls}", float(self.num_calls)
        runs = [Run(0, words_of(numbers))]
        (slots,) = begin_store(self.core, self.session, name, name, runs, 0, 0.0, now_s)
        self.began |= {numbers[at]: self.turn for at in slots.positions.tolist()}
        self.writing.append(name)
        return name

    def end(self, name: str) -> None:
        self.writing.remove(name)
        self.core.end_store(self.session, name, True, float(self.num_calls))

    def call(self, what: str, number: int) -> None:
        core, hashes = self.core, [HashList(0, words_of([number, number + 1]))]
        match what:
            case "store":
                self.end(self.begin([number, number + 1]))
            case "begin":
                self.begin([number, number + 1])
            case "end" if self.writing:
                self.end(self.writing[number % len(self.writing)])
            case "lease" if core.leases.get("engine", f"lease {number}") is None:
                core.acquire(self.session, f"lease {number}", hashes, 0.0, 1.0)
            case "release":
                core.release(self.session, f"lease {number}")
            case "touch":
                core.touch(self.session, hashes, float(self.num_calls))
            case "other":
                self.store(self.other, [number])
        core.take_effects()

    def found_are_new(self) -> bool:
        return all(self.began[number] == 1 for number in self.found(range(40)))


@given(before=MEDDLING, between=MEDDLING, num_calls=st.integers(1, 3))
def test_a_flush_in_parts_leaves_nothing_of_before(
    before: list[tuple[str, int]], between: list[tuple[str, int]], num_calls: int
) -> None:
    """Blocks that were being stored must be gone too."""
    world = Meddler(num_slabs=3)
    core = world.core
    for what, number in before:
        world.call(what, number)
    leased = {
        lease.lease_id: core.slot_offsets(world.session, lease.lease_id)[0]
        for lease in core.leases.all()
        if lease.lease_id.startswith("lease")
    }
    others = world.found(range(40), 2)
    world.turn = 1
    calls = iter(between)
    for _ in core.flush(1):
        core.check_invariants()
        for _, (what, number) in zip(range(num_calls), calls, strict=False):
            world.call(what, number)
            core.check_invariants()
    assert world.found_are_new(), "something of before is found"
    while world.writing:
        world.end(world.writing[0])
        core.check_invariants()
    assert world.found_are_new(), "something became ready that was reserved before"
    has_taken_room = any(what in ("store", "begin", "other") for what, _ in between)
    assert has_taken_room or world.found(range(40), 2) == others
    for lease_id, offsets in leased.items():
        if ("release", int(lease_id.split()[1])) not in between:
            positions = [LoadPositions(0, np.flatnonzero(offsets >= 0))]
            (slots,) = core.begin_load(world.session, "load", lease_id, positions)
            assert np.array_equal(slots.offsets, offsets[offsets >= 0]), "a leased block has moved"
            core.end_load(world.session, "load", True)


@given(between=MEDDLING, group=st.integers(0, 1), count=st.integers(1, 12))
def test_there_is_room_after_whatever_came_between(
    between: list[tuple[str, int]], group: int, count: int
) -> None:
    world = Meddler(num_slabs=NUM_SLOTS)
    for start in range(0, 135, 9):
        world.end(world.begin(range(start + 200, start + 209)))
    world.core.take_effects()
    calls = iter([(what, number) for what, number in between if what not in ("begin", "other")])
    run = [Run(group, words_of(range(100, 100 + count)))]

    def meddle() -> None:
        world.core.check_invariants()
        for _, (what, number) in zip(range(2), calls, strict=False):
            world.call(what, number)

    reserving = world.core.reserve(world.session, "new", run, 0.0, 50.0)
    (results,) = finished(reserving, meddle).results
    assert set(results.tolist()) == {BlockResult.RESERVED}
    world.core.check_invariants()


@pytest.mark.parametrize(
    "slab_bytes", [SLOT_ALIGN, 3 * SLOT_ALIGN, 1 << 22, (1 << 22) + SLOT_ALIGN]
)
def test_slots_in_slabs_are_found(slab_bytes: int) -> None:
    kernels = native.require("hotkv_server.cache.table.table_kernels")
    random = np.random.default_rng(0)
    offsets, slabs = random.integers(0, 50 * slab_bytes, 300), random.random(50) < 0.5
    found = np.empty(300, np.bool_)
    kernels.lie_in(offsets, slab_bytes, slabs, found)
    assert np.array_equal(found, slabs[offsets // slab_bytes])


def test_entries_without_memory_are_not_used() -> None:
    world = World(NUM_SLOTS // 4)
    session, index = world.open(), world.core.space.index
    for limit in (5, 8):
        index.back(limit)
        results = world.store(session, range(limit * 100, limit * 100 + 12))
        assert results.count(BlockResult.STORED) == limit and index.num_numbers <= limit + 1
        world.core.check_invariants()


def test_room_for_sketches_keeps_their_blocks() -> None:
    """The slot of a sketch without a block would never be freed."""
    world = World(2)
    session = world.open(kinds=(Sketch(0, "rot2u", 1, (SLOT_ALIGN,)),))
    for group in (0, MAX_GROUPS):
        world.store(session, range(4), group=group)
    runs = [Run(MAX_GROUPS, words_of(range(4))), Run(0, words_of(range(10, 14)))]
    for _ in world.core.reserve(session.number, "new", runs, 0.0, 0.0):
        world.core.check_invariants()
    world.core.check_invariants()
    assert world.found(range(4)) == list(range(4))
    # Group 7 does not exist.
    beside = [HashList(group, words_of(range(4))) for group in (0, 7, MAX_GROUPS)]
    unknown = [Run(0, words_of([9])), Run(7, words_of([9]))]
    assert not list(world.core.make_room_above(1, unknown, beside, 1.0))
    assert world.found(range(4)) == list(range(4))


def test_reused_number_of_a_sketch_is_kept() -> None:
    """Between two parts, an entry to evict is freed, and its number goes to a new sketch."""
    world = World(NUM_SLOTS // 4)
    core, session = world.core, world.open(kinds=(Sketch(0, "rot2u", 1, (SLOT_ALIGN,)),))
    for number in range(NUM_SLOTS):
        world.store(session, [number], float(number))
    reserving = core.reserve(session.number, "new", [Run(0, words_of(range(100, 103)))], 0.0, 50.0)
    next(reserving)
    evict(core, 1, 0, words_of([0]))
    world.store(session, [31], 51.0, group=MAX_GROUPS)
    finished(reserving)
    core.check_invariants()
    assert world.found([31]) == [31]


def reserving_in_parts(between: Callable[[Meddler], object]) -> list[int]:
    """Reserves blocks 100 to 111 in a full cache; `between` runs after the first part. Their
    results."""
    world = Meddler()
    for number in range(0, NUM_SLOTS, 2):
        world.call("store", number)
    runs = [Run(0, words_of(range(100, 112)))]
    reserving = world.core.reserve(world.session, "new", runs, 0.0, 50.0)
    next(reserving)
    between(world)
    (results,) = finished(reserving).results
    world.core.check_invariants()
    return [int(result) for result in results]


@pytest.mark.parametrize(
    ("what", "result"),
    [
        ("nothing", BlockResult.RESERVED),
        ("store", BlockResult.PRESENT),
        ("begin", BlockResult.IN_FLIGHT),
    ],
)
def test_what_others_did_between_two_parts_counts(what: str, result: BlockResult) -> None:
    results = reserving_in_parts(lambda world: world.call(what, 100))
    assert results == [result] * 2 + [BlockResult.RESERVED] * 10


def test_slots_freed_meanwhile_are_not_evicted_again() -> None:
    worlds: list[Meddler] = []

    def free(world: Meddler) -> None:
        evict(world.core, 1, 0, words_of(range(12)))
        worlds.append(world)

    assert reserving_in_parts(free) == [BlockResult.RESERVED] * 12
    assert worlds[0].found(range(12, NUM_SLOTS)) == list(range(12, NUM_SLOTS))


def test_bounded_tenant_finds_its_few_blocks() -> None:
    """A search looks at all records, so there must be one per call, not per run."""
    bound = TenantShare(0, 6 * SLOT_ALIGN)
    world = World(24, tenants={"large": TenantShare(), "small": bound})
    space, sizes = world.core.space, (SLOT_ALIGN, 2 * SLOT_ALIGN)
    large, small = (world.open(name, name, sizes, tenant=name) for name in ("large", "small"))
    world.store(large, range(80))
    world.store(small, range(6))
    runs = [*(Run(0, words_of([n])) for n in range(50, 54)), Run(1, words_of([50]))]
    searches = Mock(side_effect=space.policy.victims)
    space.policy.victims = searches  # type: ignore[method-assign]
    assert len(list(world.core.reserve(small.number, "new", runs, 0.0, 50.0))) >= 4
    assert not world.found(range(6), small.key_space_id)
    assert space.tenants.used.tolist() == [80 * SLOT_ALIGN, 6 * SLOT_ALIGN]
    more = [Run(0, words_of([n])) for n in range(60, 90)]
    searches.reset_mock()
    assert not any(map(np.any, reserve(world.core, small.number, "more", more, 0.0, 51.0).entries))
    assert searches.call_count <= 4


@pytest.mark.parametrize("at", range(4))
def test_tenants_blocks_may_be_pinned_during_choice(at: int) -> None:
    """A lease comes between the parts `at` and `at` + 1. That is lack of room, not an error."""
    shares = {"large": TenantShare(), "small": TenantShare()}
    world, sizes = World(4, tenants=shares, unadmitted_share=1.0), (SLOT_ALIGN, 2 * SLOT_ALIGN)
    large, small = (world.open(name, name, sizes, tenant=name) for name in shares)
    world.store(large, range(16))
    reserving = world.core.reserve(small.number, "new", [Run(1, words_of([50]))], 0.0, 50.0)
    for _ in range(at + 1):
        next(reserving)
    world.core.acquire(large.number, "all", [HashList(0, words_of(range(16)))], 0.0, 50.0)
    assert finished(reserving).results[0].tolist() == [BlockResult.NO_SPACE]
    world.core.check_invariants()


HEATS = st.sampled_from([-np.inf, -7.5, -0.25, 0.0, 0.5, 1e9])
BLOCKS = st.tuples(HEATS, st.integers(1, 3)).map(np.array)


@given(st.lists(st.lists(BLOCKS, min_size=1), min_size=1), st.integers(-1, 30))
def test_the_coldest_blocks_of_all_parts_go(parts: list[list[np.ndarray]], most: int) -> None:
    """At most `most` bytes may go. Of equally cold blocks, the first that still fit go."""
    blocks = []
    for rows in map(np.array, parts):
        heat, sizes = rows[np.argsort(rows[:, 0])].T
        blocks.append((heat, np.append(0, np.cumsum(sizes)), np.arange(len(rows), dtype=np.uint32)))
    found = [*coldest([(ranks_of(h), s, e) for h, s, e in blocks], most)]
    going = found[-len(parts) :]
    assert not any(map(len, found[: -len(parts)]))
    used = sum(sums[len(one)] for one, (_, sums, _) in zip(going, blocks, strict=True))
    left = [
        (h[len(g)], s[len(g) + 1] - s[len(g)])
        for g, (h, s, _) in zip(going, blocks, strict=True)
        if len(g) < len(h)
    ]
    coldest_left = min((heat for heat, _ in left), default=np.inf)
    assert used <= max(0, most)
    assert all(
        (h[: len(g)] <= coldest_left).all() for g, (h, _, _) in zip(going, blocks, strict=True)
    )
    assert all(used + size > most for heat, size in left if heat == coldest_left)


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
def test_call_may_be_refused_after_its_last_part(
    between: Callable[[Meddler], object], reason: Reason
) -> None:
    assert reason_of(lambda: reserving_in_parts(between)) is reason

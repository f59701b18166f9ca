"""Tests what `cache.inspect` reads for operators: it must agree with the core, and be a copy."""

import math
import re
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import hotkv_server
from hotkv_proto.keys import MAX_GROUPS, Sketch
from hotkv_proto.table import SLOT_ALIGN, STATE_READY, STATE_RESERVED
from hotkv_server.cache import inspect
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.histogram import AGES_S, SECONDS, SIZES_BYTES, Histogram
from hotkv_server.cache.room.slabs import ABSENT, FREE
from hotkv_server.cache.values import Cause, HashList, Run
from hotkv_server.integrity.evidence import condemn
from tests.core.support import (
    SLAB,
    World,
    begin_store,
    evict,
    evict_all,
    expire,
    flush,
    reserve,
    words_of,
)


class Cache(World):
    def __init__(self) -> None:
        super().__init__(4, 60, "hotness")
        kinds = (Sketch(0, "min-max", 1, (SLOT_ALIGN,)),)
        self.session = self.open(sizes=(SLOT_ALIGN, 2 * SLOT_ALIGN), kinds=kinds)

    def begin(self, lease_id: str, run: Run) -> None:
        begin_store(self.core, self.session.number, lease_id, lease_id, [run], 0, 0.0, 1.0)

    def listed(self) -> list[inspect.BlockFigures]:
        *_, entries = inspect.find_blocks(self.core, 0, 100, 1)
        return inspect.blocks(self.core, entries)


def census(core: CacheCore) -> inspect.Census:
    *_, whole = inspect.census(core)
    return whole


def test_counts_and_tier_are_those_of_the_books() -> None:
    cache = Cache()
    core = cache.core
    cache.store(cache.session, [1, 2, 3])
    cache.begin("open", Run(1, words_of([1])))
    core.acquire(cache.session.number, "r", [HashList(0, words_of([1, 2]))], 0.0, 1.0)
    assert inspect.counts(core) == inspect.Counts(2, 1, 0, SLAB)
    assert inspect.leases_of_engines(core) == {"engine": 2}
    tier = inspect.tier(core, census(core))
    assert (tier.capacity_bytes, tier.full_capacity_bytes) == (4 * SLAB, 4 * SLAB)
    assert (tier.used_bytes, tier.pinned_bytes) == (5 * SLOT_ALIGN, 2 * SLOT_ALIGN)
    assert (tier.num_blocks, tier.num_free_slabs, tier.sketch_bytes) == (3, 2, 0)
    assert inspect.counters(core)["stored_blocks"] == 3


def test_largest_key_spaces_come_first() -> None:
    cache = Cache()
    for model, count in (("two", 0), ("three", 3), ("four", 1)):
        cache.store(cache.open(model=model), range(count))
    counted = census(cache.core)
    told = inspect.key_spaces(cache.core, counted, 2)
    assert [(one.number, one.num_blocks) for one in told] == [(3, 3), (4, 1)]
    assert [one.number for one in inspect.key_spaces(cache.core, counted)] == [1, 2, 3, 4]


def test_block_shows_its_parent_and_sketch() -> None:
    cache = Cache()
    cache.store(cache.session, [1, 2], 7.0, depth=5)
    cache.store(cache.session, [2], 7.0, group=MAX_GROUPS)
    cache.begin("open", Run(1, words_of([3])))
    head, tail, reserved = cache.listed()
    assert head.hash_words.tolist() == words_of([1])[0].tolist() and head.parent_words is None
    assert tail.parent_words is not None and np.array_equal(tail.parent_words, head.hash_words)
    assert (head.depth, tail.depth) == (5, 6)
    assert head.last_used_s == pytest.approx(7.0) and not reserved.last_used_s
    assert (head.sketch_bytes, tail.sketch_bytes) == (0, SLOT_ALIGN)
    assert (head.state, reserved.state) == (STATE_READY, STATE_RESERVED)
    assert (reserved.group_index, reserved.slot_bytes) == (1, 2 * SLOT_ALIGN)


def test_blocks_are_found_in_parts_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache()
    cache.store(cache.session, range(7))
    monkeypatch.setattr(inspect, "PART_ENTRIES", 3)
    assert inspect.census_parts(cache.core) == len(list(inspect.census(cache.core))) == 3
    parts = list(inspect.find_blocks(cache.core, 0, 100, 0))
    assert parts[-1] == [1, 2, 3, 4, 5, 6, 7]
    assert all(part == parts[-1][: len(part)] for part in parts)
    for start, most, key_space_id, found in (
        (0, 4, 1, [1, 2, 3, 4]),
        (5, 100, 1, [5, 6, 7]),
        (0, 100, 2, []),
    ):
        assert list(inspect.find_blocks(cache.core, start, most, key_space_id))[-1] == found


@pytest.mark.parametrize("most", [1, 3, 6, 100])
def test_hottest_blocks_are_the_last_to_evict(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """A block evicted between two parts must not be listed."""
    cache = Cache()
    core, other = cache.core, cache.open(model="other")
    for number in range(1, 6):
        cache.store(cache.session, [number], 100.0 * number)
    cache.store(other, [6, 7], 600.0)
    for number in (4, 1):
        uses = [HashList(0, words_of([number]))]
        core.acquire(cache.session.number, f"{number}", uses, 60.0, 700.0 + number)
        core.release(cache.session.number, f"{number}")
    monkeypatch.setattr(inspect, "PART_ENTRIES", 3)
    for key_space_id in (0, cache.session.key_space_id, other.key_space_id):
        ready = core.space.index.ready_blocks(key_space_id)
        heat = dict(zip(ready.tolist(), core.space.policy.heat(ready).tolist(), strict=True))
        (*_, found) = inspect.hottest_blocks(core, most, key_space_id)
        assert len(set(found)) == len(found)
        assert [heat[one] for one in found] == sorted(heat.values(), reverse=True)[:most]
    parts = inspect.hottest_blocks(core, most, 0)
    (gone,) = next(parts)[:1]
    evict(core, 1, 0, core.space.index.keys(np.array([gone], np.uint32))[2])
    (*_, found) = parts
    assert found and gone not in found


def test_blocks_are_found_by_first_hash_digits() -> None:
    cache = Cache()
    cache.store(cache.session, range(7))
    hashes = [words_of([number])[0].tobytes().hex() for number in range(7)]
    for wanted, length in ((0, 64), (3, 17), (6, 1), (2, 2), (5, 63)):
        digits = hashes[wanted][:length]
        fits = [at + 1 for at, one in enumerate(hashes) if one.startswith(digits)]
        for prefix in (inspect.HashPrefix(digits), inspect.HashPrefix(digits.upper())):
            assert list(inspect.find_blocks(cache.core, 0, 100, 0, prefix))[-1] == fits
    for wrong in ("", "0" * 65, "0g", "00 00"):
        with pytest.raises(ValueError):
            inspect.HashPrefix(wrong)


def test_an_answer_stays_as_it_is() -> None:
    cache = Cache()
    cache.store(cache.session, [1, 2])
    blocks = cache.listed()
    hashes = [block.hash_words.tolist() for block in blocks]
    prompt = inspect.prompt_blocks(cache.core, 1, 0, words_of([1, 2, 3]))
    counters = inspect.counters(cache.core)
    assert evict(cache.core, 1, 0, words_of([1, 2])) == (2, 0)
    cache.store(cache.session, [8, 9])
    assert [block.hash_words.tolist() for block in blocks] == hashes
    assert (prompt.words != 0).tolist() == [True, True, False] and not prompt.causes.any()
    assert counters["stored_blocks"] == 2
    later = inspect.prompt_blocks(cache.core, 1, 0, words_of([1, 2, 3]))
    assert not later.words.any() and later.causes.tolist() == [Cause.OPERATOR, Cause.OPERATOR, 0]
    assert inspect.blocks(cache.core, [30]) == []
    # Block 9's number now belongs to a sketch.
    _, number = cache.entries([8, 9]).tolist()
    evict(cache.core, 1, 0, words_of([9]))
    cache.store(cache.session, [8], group=MAX_GROUPS)
    assert cache.entries([8], group=MAX_GROUPS).tolist() == [number]
    assert inspect.blocks(cache.core, [number]) == []


def test_why_a_block_is_missing_is_told() -> None:
    cache = Cache()
    core = cache.core

    def why(block: int) -> Cause:
        return Cause(int(inspect.prompt_blocks(core, 1, 0, words_of([block])).causes[0]))

    cache.store(cache.session, [1, 2, 3, 4])
    for block, act in (
        (1, lambda: evict(core, 1, 0, words_of([1]))),
        (2, lambda: condemn(core, core.space.index.find(1, 0, words_of([2])))),
        (3, lambda: evict_all(core, 1)),
    ):
        assert why(block) is Cause.NONE
        act()
    assert [why(block) for block in (1, 2, 3, 4, 5)] == [
        Cause.OPERATOR,
        Cause.DAMAGE,
        Cause.OPERATOR,
        Cause.OPERATOR,
        Cause.NONE,
    ]
    cache.store(cache.session, [4])
    flush(core, 1)
    assert (why(3), why(4)) == (Cause.OPERATOR, Cause.FLUSH)
    # Expiry ends the lease of block 6; the engine releases that of 7.
    for lease_id, block in (("late", 6), ("left", 7)):
        reserve(core, cache.session.number, lease_id, [Run(0, words_of([block]))], 10.0, 1.0)
    core.release(cache.session.number, "left")
    list(core.expire(100.0))
    assert (why(6), why(7)) == (Cause.EXPIRY, Cause.NONE)


def test_a_story_is_told_of_any_number() -> None:
    cache = Cache()
    cache.store(cache.session, [1])
    cache.core.acquire(cache.session.number, "r", [HashList(0, words_of([1]))], 0.0, 1.0)
    index = cache.core.space.index
    assert inspect.story(index, 1).startswith("entry=1 state=ready key_space=1 group=0 hash=")
    flush(cache.core, 1)
    assert "state=flushed" in inspect.story(index, 1)
    assert "state=free" in inspect.story(index, 60)
    assert inspect.story(index, 61) == "entry=61 is none of the 60"
    assert inspect.story(index, 0) == "entry=0 is none of the 60"


REACHES = re.compile(r"core\.(?:_|(?!config\.)\w+\.)\w+|= [\w.]+\b_?core$", re.MULTILINE)
"""A private attribute of the core, one of its parts but the settings, or another name for it."""


@pytest.mark.parametrize("part", ["wire", "monitoring"])
def test_no_outer_part_reaches_into_the_books(part: str) -> None:
    for path in Path(hotkv_server.__file__).parent.joinpath(part).rglob("*.py"):
        assert not REACHES.findall(path.read_text()), path


# The map of the arena


NUM_SLABS = 11
END_S = 1000.0


class NaiveMap:
    """Computes the map from each entry and slab."""

    def __init__(self, core: CacheCore, slabs_per_cell: int) -> None:
        num_cells = math.ceil(core.space.pool.num_slabs / slabs_per_cell)
        self.used, self.ready = [0.0] * num_cells, [0.0] * num_cells
        self.idle = [math.nan] * num_cells
        index, policy = core.space.index, core.space.policy
        sums = [0.0] * num_cells
        for entry in np.flatnonzero(index.states()).astype(np.uint32)[:, None]:
            begin, size = int(index.offsets(entry)[0]), int(index.slot_bytes(entry)[0])
            is_block = not core.space.sketches.among(entry)[0]
            is_ready = index.states()[entry[0]] == STATE_READY and is_block
            age_s = END_S - float(policy.last_used_s(entry)[0])
            for at in range(begin, begin + size, SLOT_ALIGN):
                cell = at // SLAB // slabs_per_cell
                self.used[cell] += SLOT_ALIGN
                if is_ready:
                    self.ready[cell] += SLOT_ALIGN
                    sums[cell] += SLOT_ALIGN * math.log1p(age_s)
        owners = core.space.pool.slab_owner().tolist()
        self.owners = []
        for cell, ready in enumerate(self.ready):
            if ready:
                self.idle[cell] = math.expm1(sums[cell] / ready)
            mine = owners[cell * slabs_per_cell : (cell + 1) * slabs_per_cell]
            lent = [owner for owner in mine if owner >= 0]
            self.owners.append(lent[0] if lent else FREE if FREE in mine else ABSENT)
            self.used[cell] /= len(mine) * SLAB


@pytest.mark.parametrize("policy", ["hotness", "lru"])
@given(
    sizes=st.sampled_from([(1, 2), (3, 1), (5, 1), (9, 2)]),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["store", "reserve", "touch", "evict", "represent"]),
            st.integers(0, 1),
            st.lists(st.integers(0, 15), min_size=1, max_size=6, unique=True),
        ),
        max_size=12,
    ),
    most_cells=st.sampled_from([1, 2, 4, 11, 64]),
    backed=st.integers(0, NUM_SLABS),
)
@settings(max_examples=25)
def test_a_map_is_what_each_entry_says(
    policy: str,
    sizes: tuple[int, int],
    steps: list[tuple[str, int, list[int]]],
    most_cells: int,
    backed: int,
) -> None:
    world = World(NUM_SLABS, 60, policy, is_backed=False)
    core = world.core
    core.space.grow(backed * SLAB, 0)
    kind = Sketch(0, "min-max", 1, (SLOT_ALIGN,))
    session = world.open(sizes=(sizes[0] * SLOT_ALIGN, sizes[1] * SLOT_ALIGN), kinds=(kind,))
    for now, (what, group, numbers) in enumerate(steps):
        now_s, words = float(now * now), words_of(numbers)
        match what:
            case "touch":
                core.touch(session.number, [HashList(group, words)], now_s)
            case "evict":
                evict(core, session.key_space_id, group, words)
            case "reserve":
                begin_store(
                    core, session.number, f"{now}", f"{now}", [Run(group, words)], 0, 0.0, now_s
                )
            case _:
                group = session.sketches[0] if what == "represent" else group
                world.store(session, numbers, now_s, group=group)
        core.take_effects()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "MAX_CELLS", most_cells)
        patch.setattr(inspect, "MAP_PART_ENTRIES", 7)
        *parts, found = inspect.arena_map(core, END_S)
    assert found is not None and parts == [None] * len(parts)
    assert len(found.used_ratios) == len(found.idle_s) == len(found.slot_bytes) <= most_cells
    assert found.slabs_per_cell == -(-NUM_SLABS // most_cells)
    expected = NaiveMap(core, found.slabs_per_cell)
    assert np.allclose(found.used_ratios, expected.used)
    assert found.slot_bytes.tolist() == expected.owners
    assert np.allclose(found.idle_s, expected.idle, rtol=1e-6, equal_nan=True)


# Histograms


VALUES = st.lists(
    st.one_of(st.floats(0, 1e6), st.sampled_from([*SECONDS, *AGES_S])), min_size=0, max_size=40
)


@given(VALUES, VALUES, st.sampled_from([SECONDS, AGES_S, SIZES_BYTES]))
def test_it_counts_as_a_plain_search_does(
    single: list[float], many: list[float], bounds: tuple[float, ...]
) -> None:
    counted, every = Histogram(bounds), [*single, *many]
    for value in single:
        counted.add(value)
    counted.add_all(np.array(many))
    assert counted.count == len(every) and math.isclose(counted.sum, math.fsum(every))
    assert counted.cumulative() == [
        *((str(bound), float(sum(value <= bound for value in every))) for bound in bounds),
        ("+Inf", float(len(every))),
    ]


@pytest.mark.parametrize("policy", ["lru", "hotness", "arc"])
def test_age_is_time_since_the_last_use(policy: str) -> None:
    """The core learns the time when a session opens and at each tick."""
    world = World(1, policy=policy)
    core, session = world.core, world.open(now_s=900.0)
    counted = inspect.eviction_ages(core)

    def store(numbers: range, now_s: float) -> None:
        for number in numbers:
            world.store(session, [number], now_s)

    store(range(4), 500.0)
    store(range(10, 14), 900.0)
    assert (counted.count, counted.sum) == (4, pytest.approx(4 * 400.0, abs=0.1))
    for number in (12, 13):
        core.touch(session.number, [HashList(0, words_of([number]))], 1050.0)
    expire(core, 1110.0)
    store(range(20, 22), 1110.0)
    assert counted.count == core.space.removal.evicted_blocks == 6
    assert counted.sum == pytest.approx(4 * 400.0 + 2 * 210.0, abs=0.1)
    assert counted.counts[AGES_S.index(300.0)] == 2
    expire(core, 1111.0)
    store(range(30, 34), 1111.0)
    assert counted.count == core.space.removal.evicted_blocks == 10
    assert counted.counts[AGES_S.index(1.0)] >= 2, "those of the same second"
    assert evict(core, session.key_space_id, 0, words_of([32, 33]))[0] == 2
    assert counted.count == 10, "an operator's eviction says nothing about the arena's size"


def test_no_age_before_the_core_knows_time() -> None:
    world = World(1)
    session = world.open()
    for number in range(6):
        world.store(session, [number], 10.0)
    assert world.core.space.removal.evicted_blocks == 2
    assert not inspect.eviction_ages(world.core).count

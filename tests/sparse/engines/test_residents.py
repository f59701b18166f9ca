"""`ResidentRequests` with vLLM's real block pool: all that left the device can be read, no room
is reserved twice, every request ends."""

import itertools
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hotkv_client.types import ResidencyOpened, ResidentBlocks
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.messages import fields
from hotkv_sparse.vllm.scheduler import resident_requests
from hotkv_sparse.vllm.scheduler.calls import ASK_AGAIN_S, TURN_S
from hotkv_sparse.vllm.scheduler.moves import BlockDemand, Relief, to_move
from hotkv_sparse.vllm.scheduler.resident_requests import MAX_LOSSES, MAX_WAITING_WITH_ROOM, PARK_S
from hotkv_vllm.scheduler.request import Phase
from tests.sparse.engines.resident_engine import LONGEST, POOL, STEP_S, TIMEOUT_S, ResidentEngine
from tests.vllm.parts import TOKENS

CALLS = ["open_residency", "extend_residency"]
SMALL_POOL = 40
"""Smaller than the longest context."""
QUANTUM_BLOCKS = 4
"""Contexts outgrow their room often."""


@pytest.fixture(autouse=True, scope="module")
def _small_quantum() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resident_requests, "QUANTUM_TOKENS", QUANTUM_BLOCKS * TOKENS)
        yield


# ------------------------------------------------------------------------------------- the decision

RELIEFS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(Relief, st.integers(-20, 40), st.integers(0, 40)),
    max_size=6,
)
DEMANDS = st.builds(
    BlockDemand,
    st.integers(0, 60),
    st.integers(0, 40),
    st.integers(0, 20),
    st.none() | st.integers(0, 60),
)


@given(DEMANDS, RELIEFS)
def test_no_more_is_moved_than_is_needed(demand: BlockDemand, reliefs: dict[str, Relief]) -> None:
    chosen = to_move(demand, reliefs)
    assert len(set(chosen)) == len(chosen) and (demand.is_short or not chosen)
    free, spare, moved = demand.free, demand.free - demand.promised, set[str]()
    for name in chosen:
        if free >= demand.running:
            most = spare + sum(max(0, reliefs[n].total) for n in reliefs if n not in moved)
            assert demand.first is not None and spare < demand.first <= most, "moved in vain"
        moved.add(name)
        had = free
        free, spare = free + reliefs[name].freed, spare + reliefs[name].total
        assert free >= min(had, demand.running)
    left = [relief for name, relief in reliefs.items() if name not in chosen]
    if free < demand.running:
        assert all(relief.freed <= 0 for relief in left), "the running requests come first"
        return
    if demand.first is not None and spare < demand.first:
        able = [one for one in left if one.total > 0 and free + one.freed >= demand.running]
        most = spare + sum(max(0, one.total) for one in left)
        assert not able or most < demand.first


def test_greatest_giver_goes_first_ties_by_age() -> None:
    reliefs = {"a": Relief(3), "b": Relief(9, 1), "c": Relief(9, 5)}
    assert to_move(BlockDemand(0, 0, 4, None), reliefs) == ["b"]
    assert to_move(BlockDemand(0, 0, 0, 4), reliefs) == ["c"]
    assert to_move(BlockDemand(0, 0, 20, None), reliefs) == ["b", "c", "a"]
    assert to_move(BlockDemand(5, 0, 4, 40), reliefs) == [], "the first could not begin even then"
    assert to_move(BlockDemand(0, 0, 0, 4), {"a": Relief(3), "b": Relief(-2)}) == []
    assert to_move(BlockDemand(0, 0, 0, 4), {"a": Relief(-2, 6)}) == [], (
        "its hot slots find no room"
    )


# -------------------------------------------------------------------------------------- the machine


ASKED = st.tuples(
    st.integers(1, 6) | st.integers(LONGEST // 3, LONGEST - 20),
    st.integers(1, 300),
    st.sampled_from("ab"),
    st.sampled_from([LONGEST, LONGEST, 0, 7]),
    st.sampled_from([True, True, False]),
    st.sampled_from([False, False, True]),
)
"""Arguments of `ResidentEngine.arrive`."""


class Residents(RuleBasedStateMachine):
    """Requests come, run and are aborted, while the server is late, full, hung, dead and back."""

    @initialize(
        residency=st.sampled_from(["host", "auto"]),
        pool=st.sampled_from([POOL, POOL, SMALL_POOL]),
        most_blocks=st.sampled_from([None, 48, 70, 100]),
        returns=st.sampled_from([True, True, False]),
        has_windows=st.booleans(),
        asked=st.lists(ASKED, min_size=2, max_size=5),
    )
    def begin(
        self,
        residency: str,
        pool: int,
        most_blocks: int | None,
        returns: bool,
        has_windows: bool,
        asked: list[tuple[int, int, str, int, bool, bool]],
    ) -> None:
        self.engine = ResidentEngine(residency, most_blocks, pool, has_windows=has_windows)
        self.returns = returns
        self.were_moved: set[tuple[str, int]] = set()
        for one in asked:
            self.engine.arrive(*one)

    @property
    def resident(self) -> list[str]:
        return [
            one.request_id for one in self.engine.running if self.engine.books.keeps(one.request_id)
        ]

    @precondition(lambda self: len(self.engine.requests) < 8)
    @rule(asked=ASKED)
    def arrives(self, asked: tuple[int, int, str, int, bool, bool]) -> None:
        self.engine.arrive(*asked)

    @rule(steps=st.integers(1, 60))
    def steps(self, steps: int) -> None:
        self.engine.run(steps)

    @rule(steps=st.integers(1, 12))
    def steps_while_nothing_is_stored(self, steps: int) -> None:
        self.engine.run(steps, stores=False)

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def is_stored(self, data: st.DataObject) -> None:
        self.engine.begin_store(data.draw(st.sampled_from(self.resident)))

    @rule(are_taken=st.booleans())
    def stores_end(self, are_taken: bool) -> None:
        self.engine.end_stores(are_taken)

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def is_aborted(self, data: st.DataObject) -> None:
        self.engine.end(data.draw(st.sampled_from(sorted(self.engine.requests))))

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def loses_bytes(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.resident))
        self.engine.excused.add(name)
        self.engine.lose([name])

    @rule()
    def adapters_become_known_or_unknown(self) -> None:
        self.engine.adapters.are_known = not self.engine.adapters.are_known

    @rule()
    def vllm_preempts_all(self) -> None:
        self.engine.reset_running()

    @rule()
    def resets_the_cache(self) -> None:
        """Nothing may stay pinned for a request without blocks on the device."""
        self.engine.device.distrust()
        for name, one in self.engine.requests.items():
            if self.engine.books.keeps(name):
                self.engine.books.reset(name)
                pinned = self.engine.pinned(one)
                assert pinned is None or not pinned.names or self.engine.device.has_blocks(name)

    @rule()
    def distrusts_the_device(self) -> None:
        self.engine.distrust()

    @precondition(lambda self: self.engine.requests and not self.engine.excused)
    @rule(data=st.data())
    def server_refuses(self, data: st.DataObject) -> None:
        self.engine.refuse(data.draw(st.sampled_from(sorted(self.engine.requests))))

    @rule(kinds=st.sets(st.sampled_from(CALLS)))
    def server_hangs(self, kinds: set[str]) -> None:
        self.engine.server.hold = kinds
        self.engine.server.settle()

    @rule(empty=st.booleans())
    def server_dies(self, empty: bool) -> None:
        if self.engine.server.up:
            self.engine.die(empty=empty)

    @precondition(lambda self: not self.engine.server.up)
    @rule()
    def server_comes_back(self) -> None:
        self.engine.server.come_back()

    @precondition(lambda self: self.engine.server.residencies.open)
    @rule(data=st.data())
    def server_closes_a_residency(self, data: st.DataObject) -> None:
        """Others may get the room, so the request may fail."""
        residencies = self.engine.server.residencies.open
        engine_id, residency_id = data.draw(st.sampled_from(sorted(residencies)))
        del residencies[engine_id, residency_id]
        self.engine.excused.add(residency_id.rpartition("-")[2])

    @invariant()
    def what_left_the_device_is_known_to_be_stored_and_whole_requests_lack_nothing(self) -> None:
        manager, spec = self.engine.manager, self.engine.spec
        for one in self.engine.running:
            name, blocks = one.request_id, manager.req_to_blocks[one.request_id]
            away = [place for place, block in enumerate(blocks) if block.is_null]
            window = one.num_computed_tokens - spec.recent_tokens
            assert all((place + 1) * TOKENS <= window for place in away)
            if manager.begins_whole(name) and name not in manager.moved:
                assert not away and name not in manager.hot
            elif away:
                assert len(manager.hot[name]) == spec.hot_blocks
                assert away == list(range(spec.sink_blocks, manager.freed_blocks[name]))

    @invariant()
    def what_was_moved_stays_moved_until_it_is_preempted(self) -> None:
        running = {(one.request_id, one.begun) for one in self.engine.running}
        moved = {one for one in running if one[0] in self.engine.manager.moved}
        assert len(moved) == len(self.engine.manager.moved)
        assert self.were_moved & running <= moved
        self.were_moved = moved

    @invariant()
    def each_block_has_the_owners_that_it_counts(self) -> None:
        manager, pool = self.engine.manager, self.engine.pool
        tables = itertools.chain(*(one.req_to_blocks.values() for one in self.engine.managers))
        held = Counter(
            block.block_id
            for blocks in (*tables, *manager.hot.values())
            for block in blocks
            if not block.is_null
        )
        for block in pool.blocks:
            if not block.is_null:
                assert block.ref_cnt == held[block.block_id]
        assert len(held) + pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        for block in itertools.chain(*manager.hot.values()):
            assert block.ref_cnt == 1 and block.block_hash is None

    @invariant()
    def the_server_has_no_residency_of_a_request_that_has_ended(self) -> None:
        server, books = self.engine.server, self.engine.books
        if server.up and not server.held:
            known = {books.kept_as(name) for name in self.engine.requests}
            known |= {one.residency_id for one in books._residents.values()}
            told = {*server.residencies.open, *server.residencies.refused}
            assert {name for _, name in told} <= known

    def teardown(self) -> None:
        """All requests end, even with a server that never returns."""
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.server.hold = set()
        engine.server.settle()
        if self.returns and not engine.server.up:
            engine.server.come_back()
        if not self.returns and engine.server.up:
            engine.die(empty=False)
        for _ in range(400):
            if not engine.requests:
                break
            engine.run(10)
        assert not engine.requests, (engine.running, engine.waiting)
        assert not engine.manager.moved and not engine.manager.whole
        assert not engine.manager._begins_moved
        assert not engine.manager.lost and not engine.books._residents
        assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
        assert not self.returns or not engine.server.residencies.open


TestResidents = Residents.TestCase
TestResidents.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


# ---------------------------------------------------------------------------- requests and the pool


def test_fitting_request_stays_outgrowing_moves_once() -> None:
    engine = ResidentEngine()
    engine.arrive(600, 50)
    engine.run(75)
    assert not engine.manager.moved and not engine.requests
    engine = ResidentEngine()
    for family in "ab":
        engine.arrive(450, 200, family)
    engine.run(130)
    assert engine.count("moved_residencies") == 1 and not engine.preempted
    engine.run(300)
    assert not engine.requests and not engine.preempted
    assert engine.count("moved_residencies") <= 2


def test_hit_begins_whole_or_as_if_moved() -> None:
    engine = ResidentEngine()
    for family in "ab":
        engine.arrive(600, 1, family)
        engine.run(25)
    engine.device.distrust()
    first, second = engine.arrive(500, 60, "a"), engine.arrive(600, 60, "b")
    engine.run(3)
    first_blocks, blocks = (engine.manager.req_to_blocks[name] for name in (first, second))
    assert not any(block.is_null for block in first_blocks) and engine.manager.moved == {second}
    assert sum(block.is_null for block in blocks) > 20


def test_a_hit_on_the_device_takes_no_room_and_no_move() -> None:
    """Three contexts of 38 blocks in a pool of 59. Then others, of which some must move; the shared
    blocks leave the device with the last that has them."""
    engine = ResidentEngine()
    engine.arrive(600, 1)
    engine.run(25)
    names = [engine.arrive(600, 90) for _ in range(3)]
    engine.run(3)
    manager, shared = engine.manager, 600 // TOKENS
    assert len(engine.running) == 3 and not engine.count("moved_residencies")
    tables = [[block.block_id for block in manager.req_to_blocks[name]] for name in names]
    assert tables[0][:shared] == tables[1][:shared] == tables[2][:shared]
    engine.arrive(400, 90, "b")
    engine.run(200)
    assert not engine.requests and not engine.failed


def test_partly_pinned_hit_is_used_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server has to fetch the other half from a tier."""
    engine, hits = ResidentEngine("host"), list[int]()
    engine.arrive(40 * TOKENS, 1)
    engine.run(25)
    engine.device.distrust()
    monkeypatch.setattr(engine, "has", lambda _: True)
    name = engine.arrive(40 * TOKENS + 5, 9)
    missing = bytes(engine.requests[name].block_hashes[20])
    del engine.server.blocks[engine.parts.space, 0, missing]
    allocate = engine._allocate

    def records(
        one: Any, new: int, hit: int = 0, found: Any = ((),), is_first: bool = False
    ) -> bool:
        hits.append(hit)
        return allocate(one, new, hit, found, is_first)

    monkeypatch.setattr(engine, "_allocate", records)
    engine.run(100)
    assert not engine.requests and max(hits) == 20 * TOKENS


def test_without_server_requests_preempt_and_end() -> None:
    """Only one that outgrows the pool ends with an error."""
    engine = ResidentEngine(pool=SMALL_POOL)
    engine.die(empty=True)
    for family in "abc":
        engine.arrive(200, 350, family)
    engine.run(1500)
    engine.arrive(TOKENS * (SMALL_POOL - 1) - 4, 4)
    engine.run(100)
    assert not engine.requests and engine.preempted
    assert not {"moved_residencies", "failed_residencies"} & engine.parts.stats.data.keys()
    engine.excused.add(engine.arrive(500, 200))
    engine.run(500)
    assert not engine.requests and engine.count("failed_residencies") == 1


def test_waiting_begins_once_a_request_moved() -> None:
    engine = ResidentEngine()
    first = engine.arrive(700, 30)
    engine.run(25)
    assert engine.manager.moved == set()
    kept = engine.books.kept_tokens(first)
    whole = engine.device.relief(first, kept)
    engine.requests[first].num_in_flight_tokens = 2 * TOKENS
    assert engine.device.relief(first, kept) == replace(whole, freed=whole.freed - 2)
    engine.requests[first].num_in_flight_tokens = 0
    engine.arrive(500, 10, "b")
    engine.run(1)
    assert engine.manager.moved >= {first} and len(engine.running) == 2


# -------------------------------------------------------------------------- requests and the server


def test_device_requests_move_once_server_is_back() -> None:
    engine = ResidentEngine("host")
    engine.die(empty=True)
    engine.arrive(500, 200)
    engine.run(20)
    assert engine.manager.whole and not engine.manager.moved
    engine.server.come_back()
    engine.arrive(500, 200, "b")
    engine.run(60)
    assert engine.manager.moved and not engine.preempted
    engine.run(400)
    assert not engine.requests and not engine.count("failed_residencies")


def test_nothing_moves_to_a_doubtful_server() -> None:
    """After a reconnect it is not known for a while which blocks the server still has."""
    engine = ResidentEngine("auto")
    name = engine.arrive(600, 200)
    engine.run(20)
    assert engine.books.kept_tokens(name)
    engine.die(empty=True)
    engine.run(2)
    engine.server.come_back()
    engine.server.hold = {"extend_residency"}
    engine.arrive(600, 10, "b")
    engine.run(10, stores=False)
    assert engine.books.has_room(name) and not engine.manager.moved
    engine.server.resume()
    engine.run(60)
    assert engine.manager.moved and not engine.preempted and not engine.count("lost_residencies")


def test_blocks_possibly_lost_stay_on_the_device() -> None:
    engine = ResidentEngine("host")
    name = engine.arrive(600, 100)
    engine.run(4)
    engine.run(1, stores=False)
    engine.die(empty=False)
    num_freed = engine.device.num_freed(name)
    engine.server.come_back()
    engine.server.hold = {"extend_residency"}
    for _ in range(4):
        engine.run(1, stores=False)
        assert engine.device.num_freed(name) == num_freed
    engine.server.resume()
    engine.run(10)
    assert engine.device.num_freed(name) > num_freed


def test_last_of_all_held_gives_up_room() -> None:
    """Not while a step of it reads the arena. vLLM preempts only what it schedules, so one with
    lost bytes is never held."""
    engine = ResidentEngine("host", most_blocks=60)
    first, second = (engine.arrive(400, 200, family) for family in "ab")
    # A step of it still reads the arena.
    engine.requests[second].num_in_flight_tokens = 1
    engine.run(200)
    assert engine.books.held(engine.now_s) == [first, second]
    engine.books._residents[first].is_lost = True
    assert engine.books.held(engine.now_s) == [second]
    engine.books._residents[first].is_lost = False
    assert not engine.count("parked_residencies")
    engine.requests[second].num_in_flight_tokens = 0
    while not engine.count("parked_residencies"):
        engine.run(1)
        assert engine.now_s < 200.0
    assert {one.request_id for one in engine.running} <= {first}
    later = engine.arrive(400, 20, "c")
    while not engine.device.has_blocks(second):
        engine.run(1)
        assert not engine.device.has_blocks(later)
    engine.run(400)
    assert not engine.requests and not engine.count("failed_residencies")


def test_least_priority_gives_its_room_up() -> None:
    engine = ResidentEngine("host", most_blocks=60)
    first, second = (engine.arrive(400, 200, family) for family in "ab")
    engine.requests[first].priority = 1
    while not engine.count("parked_residencies"):
        engine.run(1)
        assert engine.now_s < 200.0
    assert {one.request_id for one in engine.running} <= {second}
    later = engine.arrive(480, 20, "c")
    while not engine.device.has_blocks(later):
        engine.run(1)
        assert not engine.device.has_blocks(first)
    engine.run(400)
    assert not engine.requests and not engine.count("failed_residencies")


def test_unbegun_request_gives_room_to_running_ones() -> None:
    """While the second runs, the first may pause only briefly."""
    engine = ResidentEngine("host", most_blocks=92)
    engine.scheduler.max_num_active_reqs = 2
    first, second = engine.arrive(64, 400, "a"), engine.arrive(640, 64, "b")
    waiting = [engine.arrive(300, 9, family) for family in "cd"]
    held_steps = 0
    while second in engine.requests:
        engine.run(1)
        held_steps += engine.books._residents[first].is_held
    assert engine.count("parked_residencies") and held_steps < PARK_S / STEP_S
    assert not engine.preempted and engine.requests.keys() >= {first, *waiting}
    engine.run(600)
    assert not engine.requests and not engine.count("failed_residencies")


def test_release_before_beginning_happens_at_once() -> None:
    """With asynchronous scheduling a step is always under way, but not of those that have not
    begun."""
    engine = ResidentEngine("host", most_blocks=100)
    for family in "cd":
        engine.arrive(400, 1, family)
    engine.run(40)
    engine.scheduler.max_num_active_reqs = 1
    running = engine.arrive(320, 320, "a")
    engine.run(2)
    waiting = [engine.arrive(480, 9, family) for family in "cd"]
    engine.run(2)
    for name in waiting:
        assert engine._hit(engine.requests[name], 0) is None
    engine.run(1)
    assert all(engine.books.kept_tokens(name) for name in waiting)
    engine.scheduler.sched_step_seq, engine.scheduler.processed_step_seq = 1, 0
    while running in engine.requests:
        engine.scheduler.sched_step_seq += 1
        engine.run(1)
        engine.scheduler.processed_step_seq += 1
        engine.books.step_ended()
        assert engine.count("parked_residencies") <= 1
    assert engine.count("parked_residencies") and engine.requests.keys() == {*waiting}


def test_vllm_waits_for_no_unneeded_device_blocks() -> None:
    """The request waits for the server, and would free nothing."""
    engine = ResidentEngine("host")
    engine.arrive(640, 1)
    engine.run(25)
    engine.server.hold = {"extend_residency"}
    name = engine.arrive(660, 9)
    engine.run(3)
    assert engine.books._residents[name].asked and not engine.device.has_blocks(name)
    assert not engine.books.is_freeing(engine.now_s)
    engine.server.hold = set()
    engine.server.settle()
    engine.run(40)
    assert not engine.requests


def test_queued_requests_leave_room_to_other_engines() -> None:
    engine = ResidentEngine("host")
    for number in range(12):
        engine.arrive(400, 30, f"family {number} ")
    while engine.requests:
        engine.run(1)
        assert len(engine.server.residencies.open) <= len(engine.running) + MAX_WAITING_WITH_ROOM
    assert not engine.count("failed_residencies") and not engine.preempted


def test_loading_during_reset_uses_nothing_before_it() -> None:
    """The load is cancelled, so the request computes."""
    engine = ResidentEngine("host")
    engine.arrive(640, 1)
    engine.run(25)
    name = engine.arrive(660, 9)
    while not engine.running:
        engine.run(1, stores=False)
    assert engine.books.kept_tokens(name)
    engine.states[name].hit.phase = Phase.LOADING
    engine.books.reset(name)
    assert engine.pinned(engine.requests[name]) is None and not engine.books.kept_tokens(name)


def test_server_accepts_any_request_ids_residency() -> None:
    """vLLM reads them from X-Request-Id."""
    books = ResidentEngine("host").books
    for request_id in ("r" * 300, "a\u00a0b\n", ""):
        first, second = (books._new_id(request_id) for _ in range(2))
        assert fields.name("residency_id", first) == first != second


def test_request_awaiting_its_load_isnt_lost() -> None:
    """vLLM preempts only running requests: this one would wait for ever."""
    engine = ResidentEngine("host")
    name = engine.arrive(640, 300)
    engine.run(60)
    one = engine.running.pop()
    engine.scheduler.kv_holding_waiting.append(one)
    table = {block.block_id for block in engine.manager.req_to_blocks[name]}
    engine.device.lose(name)
    engine.device.lose_blocks(table)
    engine.run(1)
    assert engine._allocate(one, 1)
    engine.running.append(engine.scheduler.kv_holding_waiting.pop())
    engine.device.lose_blocks(table)
    engine.run(1)
    assert engine.preempted == [name]


@pytest.mark.parametrize("exact_blocks", [400 // TOKENS, LONGEST])
def test_preempted_between_steps_resumes_with_hit(exact_blocks: int) -> None:
    """exact_blocks: only these can be hit."""
    engine = ResidentEngine("host")
    name = engine.arrive(400, 200, exact_blocks=exact_blocks)
    engine.run(60)
    engine.reset_running()
    while not engine.running:
        engine.run(1)
    assert engine.device.has_away(name)
    engine.run(400)
    assert not engine.requests and not engine.count("lost_residencies")


@pytest.mark.parametrize("num_blocks", [14, 18])
def test_request_may_fill_all_possible_room(num_blocks: int) -> None:
    """The request asks for more than the server's 20 blocks, and the refusal is late."""
    engine, most = ResidentEngine("host", most_blocks=1000), 20
    add = engine.server.residencies.add

    def limited(name: tuple[str, str], asked: dict[int, int]) -> ResidencyOpened:
        if asked[0] > most:
            raise HotKVError(Reason.RESIDENCY_TOO_LARGE, "told to refuse")
        return add(name, asked)

    engine.server.residencies.add = limited  # type: ignore[method-assign]
    request_id = engine.arrive(num_blocks * TOKENS, 600)
    engine.requests[request_id].goal = most * TOKENS - 1
    resident = engine.books._residents[request_id]
    while engine.requests:
        engine.server.hold = {"open_residency"}
        engine.run(1)
        if resident.is_held or not resident.room:
            engine.server.settle()
    assert not engine.count("failed_residencies")


def test_long_waiting_request_precedes_later_ones() -> None:
    engine = ResidentEngine("host", most_blocks=56)
    running, first = (engine.arrive(400, 300, family) for family in "ab")
    engine.run(2)
    early = engine.arrive(120, 9, "d")
    engine.run(int(TURN_S / STEP_S))
    assert early in {one.request_id for one in engine.running}, "the first had not waited long"
    later = engine.arrive(120, 9, "c")
    while running in engine.requests:
        engine.run(1)
        assert later not in {one.request_id for one in engine.running}
    engine.run(int(4 * ASK_AGAIN_S / STEP_S))
    assert engine.running[0].request_id == first


@pytest.mark.parametrize("passed_s", [STEP_S, 60.0])
def test_blocks_the_server_refuses_end_the_request(passed_s: float) -> None:
    """A step counts as a second at most."""
    engine = ResidentEngine("host")
    engine.device._num_blocks = 0
    name = engine.arrive(400, 300)
    engine.excused.add(name)
    engine.run(1, stores=False)
    num_steps = 0
    while name in engine.requests:
        engine.now_s += passed_s - STEP_S
        engine.run(1, stores=False)
        num_steps += 1
    assert num_steps >= TIMEOUT_S / min(passed_s, 1.0) - 1
    assert engine.count("failed_residencies") == 1


def test_request_that_lost_room_at_restart_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ResidentEngine("host", most_blocks=48, pool=60)
    engine.device._num_blocks = 0
    monkeypatch.setattr(resident_requests, "QUANTUM_TOKENS", LONGEST * TOKENS)
    first, second = engine.arrive(1, 300), engine.arrive(684, 60)
    engine.server.die(empty=False)
    engine.run(10, stores=False)
    engine.server.come_back()
    engine.run(int(TIMEOUT_S / STEP_S) + 2)
    assert engine.preempted == [first]
    while second in engine.requests:
        engine.run(1)
    engine.run(340)
    assert not engine.requests and not engine.count("failed_residencies")


def test_reset_ends_the_stores_of_other_groups() -> None:
    """Their blocks have no private names; after a preemption they are new."""
    engine = ResidentEngine("host")
    name = engine.arrive(400, 300)
    engine.run(10)
    store = engine.states[name].store
    store.stored_blocks.append(4)
    engine.books.reset(name)
    assert store.stored_blocks[1] > LONGEST
    engine.reset_running()
    engine.run(1)
    assert store.stored_blocks[1] == 0


def test_lost_store_report_costs_half_the_patience() -> None:
    engine = ResidentEngine("host")
    name = engine.arrive(640, 300)
    engine.run(4)
    engine.run(1, stores=False)
    engine.begin_store(name)
    engine.end_stores(are_reported=False)
    kept = engine.books.kept_tokens(name)
    engine.run(int(TIMEOUT_S / STEP_S * 0.45), stores=False)
    assert engine.books.kept_tokens(name) == kept
    assert engine.books.is_freeing(engine.now_s), "vLLM waits for the store"
    engine.run(int(TIMEOUT_S / STEP_S * 0.15), stores=False)
    assert engine.books.kept_tokens(name) > kept
    assert not engine.books.is_freeing(engine.now_s), "its report is given up"
    engine.begin_store(name)
    assert engine.books.is_freeing(engine.now_s)
    engine.device.lose(name)
    assert not engine.books.is_freeing(engine.now_s), "the request is preempted anyway"


def test_recomputation_beyond_the_device_needs_the_server() -> None:
    """The server has all blocks, and is gone."""
    engine = ResidentEngine("host", pool=SMALL_POOL)
    name = engine.arrive(640, 60)
    engine.run(30)
    assert engine.books.kept_tokens(name) >= 36 * TOKENS
    engine.excused.add(name)
    engine.die(empty=True)
    engine.reset_running()
    engine.run(int(2 * TIMEOUT_S / STEP_S))
    assert not engine.requests and engine.count("failed_residencies") == 1


def test_outgrowing_requests_hot_slots_count_before_the_step() -> None:
    """A request that the device holds whole moves for those of one that is about to outgrow its
    window."""
    engine = ResidentEngine("host")
    engine.die(empty=True)
    whole = engine.arrive(600, 150)
    engine.run(30)
    engine.server.come_back()
    engine.run(20)
    assert whole in engine.manager.whole and engine.books.keeps(whole)
    short = engine.arrive(7 * TOKENS - 20, 60, "b")
    engine.run(3)
    assert short not in engine.manager.hot
    while engine.pool.get_num_free_blocks() > 10:
        engine.pool.get_new_blocks(1)
    while short not in engine.manager.hot:
        engine.run(1)
    assert not engine.preempted and engine.manager.moved == {whole}


def test_bytes_lost_repeatedly_end_the_request() -> None:
    """It ends after MAX_LOSSES in a row; a token between resets the count."""
    engine = ResidentEngine("host")
    name = engine.arrive(400, 300)
    engine.excused.add(name)
    for _ in range(2 * MAX_LOSSES):
        engine.run(12)
        engine.lose([name])
    assert name in engine.requests
    for _ in range(MAX_LOSSES):
        engine.run(1)
        engine.lose([name])
    engine.run(2)
    assert not engine.requests and engine.count("failed_residencies") == 1


@pytest.mark.parametrize("length", [2, 7])
def test_answer_about_other_blocks_keeps_none(length: int) -> None:
    """The device's copies of pinned blocks are freed."""
    engine = ResidentEngine("host")
    name = engine.arrive(400, 300)
    places = np.arange(length, dtype=np.int64)
    answer: Future[ResidentBlocks] = Future()
    answer.set_result(ResidentBlocks(places, places))
    engine.parts.session.extend_residency = lambda *_: answer  # type: ignore[method-assign]
    for _ in range(3):
        engine.run(4, stores=False)
        engine.begin_store(name)
        engine.end_stores()
    assert engine.requests[name].num_computed_tokens > 8 * TOKENS
    assert engine.books.kept_tokens(name) == 0


@pytest.mark.parametrize(
    ("residency", "waits", "num_lost"), [("host", False, 1), ("host", True, 1), ("auto", False, 0)]
)
def test_empty_server_costs_only_off_device_blocks(
    residency: str, waits: bool, num_lost: int
) -> None:
    """With "auto" the request is whole on the device.

    waits: preempted before.
    """
    engine = ResidentEngine(residency)
    engine.arrive(400, 300)
    engine.run(20)
    if waits:
        engine.reset_running()
    engine.die(empty=True)
    engine.run(1)
    engine.server.come_back()
    engine.run(5)
    assert engine.count("lost_residencies") == len(engine.preempted) == num_lost

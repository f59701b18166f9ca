"""Requests that stay on the device as a whole until it lacks room: which are moved, and when, over
vLLM's real pool, a scheduler that plans as vLLM's does, and a server that stores what it likes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec

from hotkv_sparse import SparseConfig
from hotkv_vllm.compat.residency import DevicePool, ResidentManager, ResidentSpec, check_residency
from hotkv_vllm.config import ConfigError
from hotkv_vllm.residency.moves import Demand, Relief, to_move
from hotkv_vllm.residency.resident_requests import ResidentRequests
from hotkv_vllm.stats import HotKVStats

TOKENS = 32
CHUNK = 64
LONGEST = 1500
POOL = 60
"""Blocks, with vLLM's own: a request of the longest context has 47, and holds 23 once moved."""
CONFIG = SparseConfig(
    sparse_topk=128,
    min_context_tokens=160,
    dense_layers=(),
    sink_tokens=32,
    recent_tokens=32,
    residency="auto",
)


# ------------------------------------------------------------------------------------- the decision

RELIEFS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(Relief, st.integers(-20, 40), st.integers(0, 40)),
    max_size=6,
)
DEMANDS = st.builds(
    Demand,
    st.integers(0, 60),
    st.integers(0, 40),
    st.integers(0, 20),
    st.none() | st.integers(0, 60),
)


@given(DEMANDS, RELIEFS)
def test_no_more_is_moved_than_is_needed(demand: Demand, reliefs: dict[str, Relief]) -> None:
    chosen = to_move(demand, reliefs)
    assert len(set(chosen)) == len(chosen) and (demand.is_short or not chosen)
    free, spare = demand.free, demand.free - demand.promised
    for name in chosen:
        lacks = free < demand.running or (demand.first is not None and spare < demand.first)
        assert lacks, "it was enough before"
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


def test_the_one_that_gives_most_goes_first_and_of_equals_the_first() -> None:
    reliefs = {"a": Relief(3), "b": Relief(9, 1), "c": Relief(9, 5)}
    assert to_move(Demand(0, 0, 4, None), reliefs) == ["b"]
    assert to_move(Demand(0, 0, 0, 4), reliefs) == ["c"]
    assert to_move(Demand(0, 0, 20, None), reliefs) == ["b", "c", "a"]


def test_nobody_is_moved_for_a_request_that_could_not_begin_even_then() -> None:
    assert to_move(Demand(5, 0, 4, 40), {"a": Relief(30)}) == []


# --------------------------------------------------------------------------------------- the engine


def spec() -> ResidentSpec:
    plain = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32)
    vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=CHUNK), max_in_flight_tokens=CHUNK
    )
    return ResidentSpec.of(plain, CONFIG, vllm_config)


def test_what_a_setting_lacks_is_said_with_its_value() -> None:
    groups = [SimpleNamespace(kv_cache_spec=spec())]
    transfer = SimpleNamespace(is_kv_producer=False, kv_role="kv_consumer")
    with pytest.raises(ConfigError, match=r"residency = 'auto': with kv_role 'kv_consumer'"):
        check_residency(
            SimpleNamespace(kv_transfer_config=transfer),
            SimpleNamespace(kv_cache_groups=groups, num_blocks=POOL),
            CONFIG,
        )


class Waiting(list[Any]):
    """vLLM's queue."""

    def peek_request(self) -> Any:
        return self[0]


class Engine:
    """vLLM's scheduler, as far as it matters here: requests take turns in one step after the other,
    and the last is preempted if another lacks a block.

    stored: by request, the tokens that the server has pinned.
    is_served: whether the server has room for all of them.
    """

    def __init__(self) -> None:
        self.pool = BlockPool(POOL, False, TOKENS)
        self.manager = ResidentManager(
            spec(),
            block_pool=self.pool,
            enable_caching=False,
            kv_cache_group_id=0,
            scheduler_block_size=TOKENS,
        )
        group = SimpleNamespace(kv_cache_spec=self.manager.spec)
        config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=LONGEST))
        kv_config = SimpleNamespace(kv_cache_groups=[group], num_blocks=POOL)
        self.device = DevicePool(config, kv_config)
        self.device._manager = self.manager
        self.running: list[Any] = []
        self.waiting = Waiting()
        self.requests: dict[str, Any] = {}
        self.device._scheduler = SimpleNamespace(
            running=self.running,
            waiting=self.waiting,
            kv_holding_waiting=Waiting(),
            requests=self.requests,
            max_num_running_reqs=4,
            max_num_scheduled_tokens=CHUNK,
        )
        self.stored: dict[str, int] = {}
        self.is_served = True
        self.manager.stored_tokens = lambda name: self.stored.get(name, 0)
        self.manager.has_room = self.has_room
        self.stats = HotKVStats()
        self.preempted: list[str] = []
        self.number = 0

    # What `ResidentRequests.make_room` uses.

    @property
    def _pool(self) -> DevicePool:
        return self.device

    @property
    def _residents(self) -> dict[str, Any]:
        return self.requests

    @property
    def _stats(self) -> HotKVStats:
        return self.stats

    def has_room(self, name: str) -> bool:
        return self.is_served

    def kept_tokens(self, name: str) -> int:
        return self.stored.get(name, 0)

    def _may_move(self, one: Any) -> bool:
        return self.is_served

    def arrive(self, prompt: int, answer: int, hit: int = 0) -> str:
        name, self.number = f"r{self.number}", self.number + 1
        request = SimpleNamespace(
            request_id=name,
            num_tokens=prompt,
            goal=min(LONGEST, prompt + answer),
            num_computed_tokens=0,
            num_output_placeholders=0,
            num_in_flight_tokens=0,
            hit=min(hit * TOKENS, (prompt - 1) // TOKENS * TOKENS),
        )
        self.requests[name] = request
        self.waiting.append(request)
        return name

    def allocate(self, one: Any, new: int, external: int = 0, is_first: bool = False) -> bool:
        """As `KVCacheManager.allocate_slots` of a request without a hit of its own."""
        manager, done = self.manager, one.num_computed_tokens
        name, total = one.request_id, done + external
        free = self.pool.get_num_free_blocks
        if is_first:
            full = manager.get_num_blocks_to_allocate(
                name, one.num_tokens, [], total, 0, one.num_tokens, apply_admission_cap=True
            )
            if full > free():
                return False
        manager.remove_skipped_blocks(name, total, one.num_tokens)
        count = manager.get_num_blocks_to_allocate(name, total + new, [], total, done, total + new)
        if count > free():
            return False
        before = free()
        if external:
            manager.num_cached_block[name] = 0
            manager.allocate_external_computed_blocks(name, done, external)
        manager.allocate_new_blocks(name, total + new, total + new)
        manager.num_cached_block[name] = 0
        assert before - free() <= count
        return True

    def step(self) -> None:
        """Plans a step, and ends it."""
        demand = self.device.demand(self.has_room)
        held = set(self.manager.moved)
        ResidentRequests.make_room(self)  # type: ignore[arg-type]
        if self.manager.moved - held:
            assert demand is not None and demand.is_short
        budget, planned, was_preempted = CHUNK, [], False
        for one in list(self.running):
            new = min(one.num_tokens - one.num_computed_tokens, budget)
            while new and one in self.running:
                if self.allocate(one, new):
                    planned.append((one, new))
                    budget -= new
                    break
                was_preempted = True
                self._preempt(self.running[-1], planned)
        if not was_preempted:
            self._admit(budget, planned)
        for one, new in planned:
            one.num_computed_tokens += new
            if one.num_computed_tokens == one.num_tokens:
                one.num_tokens += 1
            if one.num_tokens > one.goal:
                self.end(one.request_id)

    def _preempt(self, last: Any, planned: list[Any]) -> None:
        if self.is_served:
            for one in self.running:
                name = one.request_id
                relief = self.device.relief(name, self.stored.get(name, 0))
                assert relief is None or relief.freed <= 0, "it could have been moved"
        self.preempted.append(last.request_id)
        self.running.remove(last)
        planned[:] = [(one, new) for one, new in planned if one is not last]
        self.manager.free(last.request_id)
        last.num_computed_tokens, last.hit = 0, self.stored.get(last.request_id, 0)
        last.hit = min(last.hit, (last.num_tokens - 1) // TOKENS * TOKENS)
        self.stored[last.request_id] = last.hit
        self.waiting.insert(0, last)

    def _admit(self, budget: int, planned: list[Any]) -> None:
        while budget and self.waiting and len(self.running) < 4:
            one = self.waiting[0]
            if not self.device.stays_whole(one) and not self.is_served:
                return
            # A hit counts as loaded in the step that admits it.
            new = min(one.num_tokens - one.hit, budget)
            if one.hit:
                self.stored[one.request_id] = one.hit if self.is_served else 0
            if not self.allocate(one, new, one.hit, is_first=True):
                return
            self.waiting.pop(0)
            self.running.append(one)
            one.num_computed_tokens = one.hit
            planned.append((one, new))
            budget -= new

    def end(self, name: str) -> None:
        one = self.requests.pop(name)
        if one in self.running:
            self.running.remove(one)
            self.manager.free(name)
        else:
            self.waiting.remove(one)
        self.device.forget(name)
        self.stored.pop(name, None)

    def store(self, name: str) -> None:
        """The server stores and pins all that is computed."""
        if self.is_served:
            complete = self.requests[name].num_computed_tokens // TOKENS * TOKENS
            self.stored[name] = max(self.stored.get(name, 0), complete)


class Moves(RuleBasedStateMachine):
    """Requests of all lengths, aborts, a server that lags, and one that has no room at times."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine()
        self.were_moved: set[str] = set()

    @precondition(lambda self: len(self.engine.requests) < 8)
    @rule(prompt=st.integers(1, 1400), answer=st.integers(1, 200), hit=st.integers(0, 40))
    def arrives(self, prompt: int, answer: int, hit: int) -> None:
        self.engine.arrive(prompt, answer, hit)

    @rule(steps=st.integers(1, 12), stores=st.booleans())
    def steps(self, steps: int, stores: bool) -> None:
        for _ in range(steps):
            self.engine.step()
            for one in self.engine.running if stores else ():
                self.engine.store(one.request_id)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def is_stored(self, data: st.DataObject) -> None:
        names = [one.request_id for one in self.engine.running]
        self.engine.store(data.draw(st.sampled_from(names)))

    @rule()
    def server_fills_or_empties(self) -> None:
        self.engine.is_served = not self.engine.is_served

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def is_aborted(self, data: st.DataObject) -> None:
        self.engine.end(data.draw(st.sampled_from(sorted(self.engine.requests))))

    @invariant()
    def what_left_the_device_is_stored_and_whole_requests_lack_nothing(self) -> None:
        manager = self.engine.manager
        for one in self.engine.running:
            name, blocks = one.request_id, manager.req_to_blocks[one.request_id]
            away = [place for place, block in enumerate(blocks) if block.is_null]
            assert all((place + 1) * TOKENS <= self.engine.stored.get(name, 0) for place in away)
            if name not in manager.moved:
                assert not away and name not in manager.hot
            elif away:
                assert len(manager.hot[name]) == manager.spec.hot_blocks
                assert away == list(range(manager.spec.sink_blocks, manager.freed_blocks[name]))

    @invariant()
    def what_was_moved_stays_moved_to_its_end(self) -> None:
        alive = self.engine.requests.keys()
        assert self.were_moved & alive <= self.engine.manager.moved <= alive
        self.were_moved = set(self.engine.manager.moved)

    @invariant()
    def no_block_has_two_owners_or_none(self) -> None:
        manager = self.engine.manager
        held = [
            block.block_id
            for blocks in (*manager.req_to_blocks.values(), *manager.hot.values())
            for block in blocks
            if not block.is_null
        ]
        assert len(held) == len(set(held))
        assert len(held) + self.engine.pool.get_num_free_blocks() == POOL - 1

    def teardown(self) -> None:
        """With a server that has room and keeps up, all requests end."""
        engine = self.engine
        engine.is_served = True
        for _ in range(3000):
            if not engine.requests:
                break
            engine.step()
            for one in engine.running:
                engine.store(one.request_id)
        assert not engine.requests, (engine.running, engine.waiting)
        assert not engine.manager.moved and not engine.manager._begins_moved
        assert engine.pool.get_num_free_blocks() == POOL - 1


TestMoves = Moves.TestCase
TestMoves.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def run(engine: Engine, steps: int, *, stores: bool = True) -> None:
    for _ in range(steps):
        engine.step()
        for one in engine.running if stores else ():
            engine.store(one.request_id)


def test_a_request_that_fits_stays_whole_and_one_that_outgrows_the_pool_moves_once() -> None:
    engine = Engine()
    engine.arrive(1200, 100)
    run(engine, 130)
    assert not engine.manager.moved and not engine.requests
    engine = Engine()
    for _ in range(2):
        engine.arrive(900, 400)
    run(engine, 250)
    assert engine.stats.data == {"moved_residencies": 1} and not engine.preempted
    run(engine, 600)
    assert not engine.requests and not engine.preempted
    assert engine.stats.data["moved_residencies"] <= 2


def test_a_hit_begins_as_a_whole_if_there_is_room_and_else_as_if_moved() -> None:
    engine = Engine()
    first = engine.arrive(1000, 50, hit=31)
    engine.step()
    second = engine.arrive(1200, 50, hit=37)
    engine.step()
    manager = engine.manager
    blocks = manager.req_to_blocks[first]
    assert not any(block.is_null for block in blocks) and first not in manager.moved
    assert sum(block.is_null for block in manager.req_to_blocks[second]) > 25
    assert manager.moved == {second} and len(manager.hot[second]) == manager.spec.hot_blocks


def test_a_hit_is_not_loaded_whole_where_others_wait_for_that_room() -> None:
    """It would be moved for them; what has to be computed gains from being whole until then."""
    for hit in (31, 0):
        engine = Engine()
        first, *others = engine.arrive(1000, 50, hit), *(engine.arrive(900, 9) for _ in range(2))
        engine.step()
        assert (first in engine.manager.moved) == bool(hit)
        assert engine.manager.awaited.keys() == {first, *others}


def test_without_a_server_requests_are_preempted_as_in_vllm_and_end() -> None:
    engine = Engine()
    engine.is_served = False
    for _ in range(3):
        engine.arrive(800, 300)
    run(engine, 2500)
    assert not engine.requests and engine.preempted and not engine.stats.data


def test_what_waits_begins_once_a_running_request_has_moved() -> None:
    """It needs fewer blocks than the running one gives."""
    engine = Engine()
    first = engine.arrive(1400, 60)
    run(engine, 25)
    assert engine.manager.moved == set()
    engine.arrive(1000, 20)
    run(engine, 1)
    assert engine.manager.moved >= {first} and len(engine.running) == 2

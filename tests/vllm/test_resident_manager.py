"""The manager of blocks of a resident engine, over vLLM's real pool: what it gives back the server
has, what it holds is bounded, and nothing of the pool is lost."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec

from hotkv_sparse import SparseConfig
from hotkv_sparse.formats import bytes_per_block
from hotkv_vllm.compat.residency import (
    ResidentManager,
    ResidentSpec,
    check_residency,
)
from hotkv_vllm.config import ConfigError
from hotkv_vllm.residency import totals

TOKENS = 32
POOL = 240
CHUNK = 64
CONFIG = SparseConfig(
    sparse_topk=128,
    min_context_tokens=160,
    dense_layers=(),
    sink_tokens=32,
    recent_tokens=32,
    residency="host",
)


def spec() -> ResidentSpec:
    plain = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32)
    vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=CHUNK), max_in_flight_tokens=CHUNK
    )
    return ResidentSpec.of(plain, CONFIG, vllm_config)


def test_specs_of_other_kinds_do_not_merge() -> None:
    """vLLM's own spec takes subclasses, and makes full attention of them."""
    plain = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32)
    with pytest.raises(AssertionError):
        ResidentSpec.merge([spec(), plain])
    assert ResidentSpec.merge([spec(), spec()]) == spec()


def test_an_engine_that_stores_nothing_can_not_have_residency() -> None:
    """Its long requests would fill the device and wait for ever."""
    transfer = SimpleNamespace(is_kv_producer=False, kv_role="kv_consumer")
    groups = [SimpleNamespace(kv_cache_spec=spec())]
    with pytest.raises(ConfigError, match="set kv_role to 'kv_both'"):
        check_residency(
            SimpleNamespace(kv_transfer_config=transfer),
            SimpleNamespace(kv_cache_groups=groups, num_blocks=POOL),
            CONFIG,
        )


def test_an_engine_starts_only_with_the_memory_that_it_is_going_to_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = spec()
    vllm_config = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(max_model_len=3000),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    group = SimpleNamespace(kv_cache_spec=one, layer_names=["a", "b", "c"])
    kv_config = SimpleNamespace(kv_cache_groups=[group], num_blocks=POOL)
    config: Any = SimpleNamespace(sparse=CONFIG, is_resident=True)
    row = 3 * bytes_per_block("rot2u", TOKENS, 1, 32)
    pool, staging = 3 * POOL * one.page_size_bytes, 2 * 94 * one.page_size_bytes
    found = totals.totals(CONFIG, vllm_config, kv_config)
    assert found == totals.Totals(pool, POOL * row, 1024 * row, staging)
    monkeypatch.setattr(totals, "free_bytes", lambda: found.total)
    totals.check_memory(vllm_config, kv_config, config)
    monkeypatch.setattr(totals, "free_bytes", lambda: found.total - 1)
    with pytest.raises(ConfigError, match=r"this rank needs .* \(pool .*, staging .*max_num_seqs"):
        totals.check_memory(vllm_config, kv_config, config)


class Requests(RuleBasedStateMachine):
    """Requests that are allocated for as vLLM's `allocate_slots` does, and a server that stores
    what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(POOL, False, TOKENS)
        self.manager = ResidentManager(
            spec(),
            block_pool=self.pool,
            enable_caching=False,
            kv_cache_group_id=0,
            scheduler_block_size=TOKENS,
        )
        self.stored: dict[str, int] = {}
        self.manager.stored_tokens = lambda request_id: self.stored.get(request_id, 0)
        self.computed: dict[str, int] = {}
        self.goal: dict[str, int] = {}
        self.number = 0

    def allocate(self, name: str, computed: int, new: int, external: int = 0) -> bool:
        """As `KVCacheManager.allocate_slots` of a request without a hit of its own."""
        manager, total = self.manager, computed + external
        manager.remove_skipped_blocks(name, total, self.goal[name])
        count = manager.get_num_blocks_to_allocate(
            name, total + new, [], total, computed, total + new
        )
        if count > self.pool.get_num_free_blocks():
            return False
        if external:
            manager.num_cached_block[name] = 0
            manager.allocate_external_computed_blocks(name, computed, external)
        before = self.pool.get_num_free_blocks()
        manager.allocate_new_blocks(name, total + new, total + new)
        manager.num_cached_block[name] = 0
        assert before - self.pool.get_num_free_blocks() <= count
        return True

    @rule(goal=st.integers(1, 1500), hit=st.integers(0, 40))
    def arrives(self, goal: int, hit: int) -> None:
        name, self.number = f"r{self.number}", self.number + 1
        self.goal[name] = goal
        external = min(hit * TOKENS, (goal - 1) // TOKENS * TOKENS)
        self.stored[name] = external
        full: Any = self.manager.get_num_blocks_to_allocate(
            name, goal, [], external, 0, goal, apply_admission_cap=True
        )
        if full > self.pool.get_num_free_blocks():
            return
        new = min(CHUNK, goal - external)
        if self.allocate(name, 0, 0 if external else new, external):
            self.computed[name] = external or new

    @precondition(lambda self: self.computed)
    @rule(data=st.data(), new=st.integers(1, CHUNK))
    def steps(self, data: st.DataObject, new: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.computed)))
        if self.allocate(name, self.computed[name], new):
            self.computed[name] += new

    @precondition(lambda self: self.computed)
    @rule(data=st.data())
    def is_stored(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.computed)))
        self.stored[name] = max(self.stored[name], self.computed[name] // TOKENS * TOKENS)

    @precondition(lambda self: self.computed)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.computed)))
        self.manager.free(name)
        del self.computed[name]
        assert name not in self.manager.hot and name not in self.manager.freed_blocks

    @invariant()
    def what_was_given_back_is_stored(self) -> None:
        for name, computed in self.computed.items():
            blocks = self.manager.req_to_blocks[name]
            away = [place for place, block in enumerate(blocks) if block.is_null]
            freed = self.manager.freed_blocks.get(name, 0)
            assert away == list(range(self.manager.spec.sink_blocks, freed)) or not freed
            assert all((place + 1) * TOKENS <= self.stored[name] for place in away)
            assert all((place + 1) * TOKENS <= computed - CONFIG.recent_tokens for place in away)
            if away:
                assert len(self.manager.hot[name]) == self.manager.spec.hot_blocks

    @invariant()
    def no_block_has_two_owners_or_none(self) -> None:
        held = [
            block.block_id
            for name in self.computed
            for block in (*self.manager.req_to_blocks[name], *self.manager.hot.get(name, ()))
            if not block.is_null
        ]
        assert len(held) == len(set(held))
        assert len(held) + self.pool.get_num_free_blocks() == POOL - 1


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_request_whose_stores_end_at_once_stays_within_the_bound() -> None:
    """Long requests of which everything is stored as soon as it is computed."""
    machine = Requests()
    machine.arrives(goal=1400, hit=0)
    most = machine.manager.spec.device_blocks(1400)
    while machine.computed["r0"] < 1400:
        machine.stored["r0"] = machine.computed["r0"] // TOKENS * TOKENS
        assert machine.allocate("r0", machine.computed["r0"], CHUNK)
        machine.computed["r0"] += CHUNK
    assert machine.manager.most_held <= most


def test_a_lost_request_gets_no_block() -> None:
    machine = Requests()
    machine.arrives(goal=100, hit=0)
    machine.manager.lost.add("r0")
    assert not machine.allocate("r0", 64, 1)
    machine.manager.free("r0")
    machine.arrives(goal=100, hit=0)
    assert not machine.manager.lost


def test_hits_allocate_sinks_and_window() -> None:
    machine = Requests()
    machine.arrives(goal=1300, hit=40)
    blocks = machine.manager.req_to_blocks["r0"]
    held = sum(not block.is_null for block in blocks)
    assert len(blocks) == 40 and held == 1 + CONFIG.recent_tokens // TOKENS
    # What a lease leaves out is what no block is allocated for.
    assert [at for at, block in enumerate(blocks) if block.is_null] == [
        *machine.manager.spec.gap(40 * TOKENS)
    ]


@pytest.mark.parametrize("tokens", [64, 1300])
def test_what_outgrows_the_device_gets_no_block_before_room_is_reserved(tokens: int) -> None:
    """vLLM asks no connector about requests that want no prefix hit."""
    manager = Requests().manager
    asked = []
    manager.has_room = lambda request_id: bool(asked.append(request_id))
    num_blocks = manager.get_num_blocks_to_allocate(
        "r9", tokens, [], 0, 0, tokens, apply_admission_cap=True
    )
    is_long = -(-tokens // TOKENS) > manager.spec.whole_blocks
    assert (num_blocks > manager.block_pool.num_gpu_blocks) == is_long == bool(asked)
    assert is_long == (tokens > 64)
    manager.has_room = lambda request_id: True
    assert 0 < manager.get_num_blocks_to_allocate("r9", tokens, [], 0, 0, tokens) < 200

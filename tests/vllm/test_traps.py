"""Mistakes that vLLM's connector API makes easy. `test_stress` combines them."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import CircularBufferSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from hotkv_client.types import LinkState
from hotkv_vllm import link
from hotkv_vllm.scheduler import hidden_keys
from hotkv_vllm.scheduler.load.load_room import LoadRoom
from hotkv_vllm.scheduler.store import stores
from tests.vllm.harness import Engine, prompt
from tests.vllm.oracle import answer_of, audit, check_stored
from tests.vllm.specs import SIZES, full_model, full_spec, hybrid_model, states_and_full_model
from tests.vllm.tiny import BLOCK_TOKENS

PROMPT, OTHER = prompt(1, 200), prompt(2, 40)
USABLE = 192
MODELS = pytest.mark.parametrize("model", [full_model, hybrid_model])
SHARES_WITH_LBHNC = {"LBHNC": True, "BLHNC": True, "LHBNC": True, "BHLNC": True, "LBNHC": False}


@pytest.mark.parametrize("v2", [True, False])
def test_engine_of_either_runner_hits_the_other(engine: Any, v2: bool) -> None:
    engine(v2=v2).fill(PROMPT)
    assert engine(v2=False).hit(PROMPT) == USABLE


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_layouts_share_exactly_where_pages_are_equal(engine: Any, layout: KVCacheLayout) -> None:
    """Distances between pages don't count."""
    engine(layout=layout).fill(PROMPT)
    assert engine(layout=layout).hit(PROMPT) == USABLE
    if (equal := SHARES_WITH_LBHNC.get(layout.name)) is not None:
        assert engine().hit(PROMPT) == USABLE * equal


@pytest.mark.parametrize("pipelined", [False, True])
def test_block_is_stored_with_its_filling_step(engine: Any, server: Any, pipelined: bool) -> None:
    """With asynchronous scheduling a block's last token is known a step later."""
    one = engine(max_tokens_per_step=BLOCK_TOKENS, pipelined=pipelined)
    one.add("a", prompt(1, 200), 1)
    stored = []
    for _ in range(3):
        one.step()
        stored.append(len(server.blocks))
    assert stored == [1, 2, 3]
    one.run()
    server.blocks.clear()
    # The answer completes the second block.
    answer = one.fill(prompt(3, 60), 5)
    assert len(server.blocks) == 2
    assert engine().hit(prompt(3, 60) + answer[:4] + [9] * 10) == 2 * BLOCK_TOKENS


@pytest.mark.parametrize(("table", "num_again"), [(True, 0), (False, 6)])
def test_ready_blocks_are_not_stored_again(
    engine: Any, server: Any, table: bool, num_again: int
) -> None:
    """Without the table, blocks hit on the device are stored again."""
    engine().fill(PROMPT)
    server.calls.clear()
    server.table = table
    one = engine()
    one.generate("a", PROMPT, 4)
    assert not server.count("store")
    one.generate("b", PROMPT + prompt(8, 40), 1)
    stored = [runs for kind, runs in server.calls if kind == "store"]
    assert sum(len(run.hashes) for runs in stored for run in runs) == 1 + num_again


@pytest.mark.parametrize("how", ["never admitted", "not taken", "skips", "salted"])
def test_unused_hit_leaves_no_lease(engine: Any, server: Any, how: str) -> None:
    engine().fill(PROMPT)
    one = engine()
    request = one.add("a", PROMPT, **{"cache_salt": "other"} if how == "salted" else {})
    if how in ("skips", "salted"):
        request.skip_reading_prefix_cache = how == "skips"
        one.run()
        assert one.external["a"] == 0 and server.count("acquire") == 0
        return
    assert one.connector.get_num_new_matched_tokens(request, 0) == (192, True)
    assert len(server.leases) == 1
    if how == "never admitted":
        one.abort("a")
    else:
        nothing = one.scheduler.kv_cache_manager.empty_kv_cache_blocks
        one.connector.update_state_after_alloc(request, nothing, 0)
    assert not server.leases


@pytest.mark.parametrize("why", ["stores nothing", "lost its session"])
def test_keys_of_failed_loads_are_offered_again(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """An engine that stores nothing waits a minute; after a lost session it must not."""
    monkeypatch.setattr(hidden_keys, "HIDDEN_FOR_S", 1e-6)
    engine().fill(PROMPT)
    role = "kv_consumer" if why == "stores nothing" else "kv_both"
    one = engine(within=lambda ours: ours | {"kv_role": role})
    server.hold, server.fail_loads = {"load"}, True
    one.add("a", PROMPT, 4)
    while not server.held:
        one.step()
    server.refuse_workers = "lost" * (why == "lost its session")
    server.resume()
    one.run()
    server.fail_loads, server.refuse_workers = False, ""
    one.generate("reports", prompt(5, 10))
    assert one.hit(PROMPT) == USABLE


def test_failed_keys_hide_until_stored_again(engine: Any, server: Any) -> None:
    engine().fill(PROMPT)
    one = engine()
    server.fail_loads, server.hold = True, {"store"}
    hidden = one.connector._scheduler.cache.finder.hidden
    for name in "ab":
        one.generate(name, PROMPT, 4)
        assert len(hidden) == 6 and server.count("load") == 1
        one.drop_local()
    # "Present" is enough to find them again.
    server.fail_loads = False
    server.resume()
    one.generate("c", prompt(5, 10))
    assert len(hidden) == 0
    assert one.hit(PROMPT) == USABLE
    hidden.hide(0, [b"a"])
    server.epoch += 1
    one.generate("e", prompt(6, 40))
    assert len(hidden) == 0


def test_engine_runs_while_servers_come_and_go(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("vllm.hotkv"),
        "log",
        lambda level, text, *values: lines.append(text % values) if level >= logging.INFO else None,
    )
    server.up, server.why_absent = False, "VERSION_MISMATCH: the server speaks version 9"
    one = engine()
    assert one.hit(PROMPT) == 0 and server.count("store") == 0
    assert len(lines) == 1 and "VERSION_MISMATCH" in lines[0]
    for _ in range(2):
        server.come_back()
        assert [one.hit(PROMPT) for _ in range(2)] == [0, 192]
        server.die()
        assert one.hit(PROMPT) == 0
        server.sessions[-1].tell(LinkState.ABSENT, "still not")
    # Each change once.
    assert len(lines) == 5, lines
    assert one.counters["unserved_requests"] == 5


def test_request_waiting_over_a_restart_hits(engine: Any, server: Any) -> None:
    one = engine()
    one.fill(PROMPT)
    one.drop_local()
    server.hold = {"acquire"}
    one.add("b", PROMPT, 4)
    one.step()
    server.resume()
    server.die(empty=False)
    server.come_back()
    one.run()
    assert one.external["b"] == 192 and "failed_loads" not in one.counters


def test_state_of_a_reassigned_block_is_not_stored(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine(specs=states_and_full_model())
    manager = one.scheduler.kv_cache_manager
    names = [[], ["a"]]

    def offered() -> Any:
        """By step 2 the next state has overwritten it."""
        step = names.pop(0) if names else ()
        return {name: [(1, manager.get_block_ids(name)[1][1], BLOCK_TOKENS)] for name in step}

    monkeypatch.setattr(manager, "take_boundary_state_offloads", offered)
    one.generate("a", prompt(1, 40), 4)
    one.generate("end", prompt(2, 10), 3)
    assert not names and {group for _, group, _ in server.blocks} == {0}


class RingEngine(Engine):
    """Its second group is a ring of one block, which each step overwrites."""

    def _attention_groups(self) -> Iterator[tuple[int, Any]]:
        yield next(super()._attention_groups())

    def _write(self, name: str, computed: int, count: int) -> None:
        super()._write(name, computed, count)
        self._cells("layer.1")[self.tables[name][1]] = -1


def test_hits_ring_block_is_not_stored(make: Any, server: Any) -> None:
    specs = {"layer.0": full_spec(), "layer.1": CircularBufferSpec(**SIZES)}
    one = make(RingEngine, specs=specs, blocks=9)
    one.generate("a", PROMPT[:100])
    server.hold = {"store"}
    one.generate("stored", prompt(2, 100))
    one.add("hit", PROMPT[:140])
    one.run()
    assert one.local["hit"] == 3 * BLOCK_TOKENS
    server.resume()
    check_stored(server, [one])


@pytest.mark.parametrize("seed_set", [True, False])
def test_random_hash_seed_turns_sharing_off(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch, seed_set: bool
) -> None:
    pytest.importorskip("xxhash")
    if seed_set:
        monkeypatch.setenv("PYTHONHASHSEED", "7")
    one = engine(prefix_caching_hash_algo="xxhash")
    one.generate("a", PROMPT, 1)
    assert bool(server.blocks) == seed_set


@pytest.mark.parametrize("settle_at_once", [True, False])
def test_failed_loads_dont_block_each_others_memory(
    engine: Any, server: Any, settle_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`LoadRoom` does not help if another connector fills the device."""
    monkeypatch.setattr(LoadRoom, "has_room", lambda room, request: True)
    long_prompts = {"a": prompt(1, 306), "b": prompt(2, 297)}
    answers = {
        name: engine(specs=hybrid_model()).generate(name, tokens, 4)[0]
        for name, tokens in long_prompts.items()
    }
    one = engine(specs=hybrid_model(), blocks=40, max_tokens_per_step=128)
    server.fail_loads, server.hold = True, {"load"}
    for name, tokens in long_prompts.items():
        one.add(name, tokens, 4)
    one.steps(6)
    assert server.count("load") == 2
    if not settle_at_once:
        server.held[0][2].set_result(server.held.pop(0)[3]())
        one.step()
        one.step()
    server.settle()
    server.hold = set()
    one.run()
    assert one.outputs == answers


@MODELS
def test_failed_load_costs_no_request_under_any_policy(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    said: list[str] = []
    monkeypatch.setattr(link.logger, "info", lambda text, *parts: said.append(text % parts))
    policy = {"kv_load_failure_policy": "fail"}
    first, one = (engine(specs=model(), within=lambda ours: ours | policy) for _ in range(2))
    assert sum("kv_load_failure_policy is set to 'recompute'" in text for text in said) == 2
    first.fill(PROMPT)
    server.fail_loads = server.spoil_loads = True
    assert one.generate("b", PROMPT, 4) == (answer_of(PROMPT, 4), 0)
    assert one.counters["failed_loads"] and one.finished["b"] == "length"
    audit(server, [first, one])


@MODELS
def test_request_vllm_ends_leaves_nothing_behind(engine: Any, server: Any, model: Any) -> None:
    """This happens if hotkv can't change the policy
    (`test_multi_connector.test_policy_out_of_reach_is_said`)."""
    first, one = engine(specs=model()), engine(specs=model())
    first.generate("a", PROMPT, 4)
    one.scheduler.recompute_kv_load_failures = False
    pool = one.scheduler.kv_cache_manager.block_pool
    num_free = pool.get_num_free_blocks()
    server.fail_loads = server.spoil_loads = True
    one.generate("b", PROMPT, 4)
    assert one.finished["b"] == "error" and not one.outputs["b"]
    one.generate("end", OTHER, 1)
    requests = one.connector._scheduler.requests
    assert pool.get_num_free_blocks() == num_free and not server.leases
    assert not requests.states and not requests.loads.awaited and not requests.failed_loads
    server.fail_loads = False
    one.fill(PROMPT)
    assert one.hit(PROMPT) == USABLE
    audit(server, [first, one])


@MODELS
def test_step_of_very_many_blocks_stores_in_parts(
    monkeypatch: Any, engine: Any, server: Any, model: Any
) -> None:
    monkeypatch.setattr(stores, "STORE_BLOCKS", 3)
    first, second = engine(specs=model()), engine(specs=model())
    first.add("a", PROMPT, 2)
    first.add("b", OTHER, 2)
    first.run()
    assert second.hit(PROMPT) == USABLE
    found = audit(server, [first, second])
    assert found.num_stored > 2 * 3 and first.counters["stores"] >= found.num_stored / 3

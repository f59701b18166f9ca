"""The traps of vLLM's connector API, one test each: real scheduler and cache manager, the cache's
double, faults on demand."""

import logging
import time
from typing import Any

import pytest
from vllm.v1.kv_cache_layout import KVCacheLayout

from hotkv_client.types import LinkState
from hotkv_vllm.scheduler.loads import LoadRoom
from tests.vllm.harness import prompt
from tests.vllm.specs import WINDOW, hybrid_model
from tests.vllm.tiny import BLOCK_TOKENS
from tests.vllm.traps import PROMPT, filled


def test_second_engine_hits_what_the_first_stored(engine: Any, server: Any) -> None:
    answer = filled(engine)
    again, external = engine().generate("a", PROMPT, 4)
    assert again == answer and external == 6 * BLOCK_TOKENS


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 96, 100])
def test_a_hit_leaves_a_token_to_compute(engine: Any, length: int) -> None:
    one = engine()
    answer, _ = one.generate("a", prompt(2, length), 3)
    one.drop_local()
    again, external = one.generate("b", prompt(2, length), 3)
    assert again == answer and external == (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_blocks_that_fill_during_decode_are_stored(engine: Any, server: Any) -> None:
    one = engine()
    answer, _ = one.generate("a", prompt(3, 20), 80)
    assert len(server.blocks) == 3
    again, external = engine().generate("b", prompt(3, 20) + answer[:60], 20)
    assert again == answer[60:] and external == 2 * BLOCK_TOKENS


@pytest.mark.parametrize("pipelined", [False, True])
def test_last_block_is_stored_when_its_hash_comes_late(
    engine: Any, server: Any, pipelined: bool
) -> None:
    """With asynchronous scheduling a block's last token is known only after the step that computed
    it."""
    one = engine(pipelined=pipelined)
    one.generate("a", prompt(3, 60), 5)
    one.generate("b", prompt(4, 10), 1)
    assert len(server.blocks) == 2


def test_miss_by_hint_makes_no_call(engine: Any, server: Any) -> None:
    one = engine()
    one.generate("a", PROMPT, 2)
    assert server.count("acquire") == server.count("lookup") == server.count("load") == 0


def test_without_a_table_lookups_begin_when_the_request_arrives(engine: Any, server: Any) -> None:
    server.table = False
    filled(engine)
    one = engine()
    server.calls.clear()
    one.add("a", PROMPT)
    assert server.count("lookup") == 1 and server.count("acquire") == 0
    one.run()
    assert one.external["a"] == 192 and server.count("lookup") == 1


def test_unanswered_lease_is_a_miss_and_given_back(engine: Any, server: Any) -> None:
    filled(engine)
    one = engine(extra={"lookup_timeout_s": 0.01})
    server.hold = {"acquire"}
    # Nobody answers before `settle`, so that it ends shows that it does not wait for the answer.
    assert one.generate("a", PROMPT, 2)[1] == 0 and not server.leases
    # While that answer is overdue nobody else waits.
    one.drop_local()
    calls = server.count("acquire")
    assert one.generate("b", PROMPT, 2)[1] == 0 and server.count("acquire") == calls
    server.settle()
    assert not server.leases
    one.drop_local()
    time.sleep(0.06)
    server.hold = set()
    assert one.generate("c", PROMPT, 2)[1] == 192


def test_short_grant_shrinks_the_hit(engine: Any, server: Any) -> None:
    answer = filled(engine)
    server.grant_limit = 2
    again, external = engine().generate("a", PROMPT, 4)
    assert again == answer and external == 2 * BLOCK_TOKENS


def test_request_never_admitted_gives_its_lease_back(engine: Any, server: Any) -> None:
    filled(engine)
    one = engine()
    request = one.add("a", PROMPT)
    while one.connector.get_num_new_matched_tokens(request, 0)[0] is None:
        pass
    assert len(server.leases) == 1
    one.abort("a")
    assert not server.leases


def test_lease_is_renewed_when_admission_takes_long(engine: Any, server: Any) -> None:
    filled(engine)
    one = engine(extra={"lease_ttl_s": 0.04})
    request = one.add("a", PROMPT)
    ask = one.connector.get_num_new_matched_tokens
    assert ask(request, 0) == (192, True)
    first = set(server.leases)
    time.sleep(0.03)
    assert ask(request, 0) == (192, True)
    assert len(server.leases) == 1 and not first & set(server.leases)


def test_skip_reading_prefix_cache_takes_nothing(engine: Any, server: Any) -> None:
    filled(engine)
    one = engine()
    request = one.add("a", PROMPT)
    request.skip_reading_prefix_cache = True
    one.run()
    assert one.external["a"] == 0 and server.count("acquire") == 0 and not server.leases


def test_zero_after_a_hit_gives_the_lease_back(engine: Any, server: Any) -> None:
    """Whatever made vLLM not use the hit, `update_state_after_alloc(…, 0)` ends the lease."""
    filled(engine)
    one = engine()
    request = one.add("a", PROMPT)
    ask = one.connector.get_num_new_matched_tokens
    assert ask(request, 0) == (192, True)
    one.connector.update_state_after_alloc(
        request, one.scheduler.kv_cache_manager.empty_kv_cache_blocks, 0
    )
    assert not server.leases


def test_window_blocks_outside_the_window_are_neither_leased_nor_loaded(
    engine: Any, server: Any
) -> None:
    long_prompt = prompt(1, 420)
    answer, _ = engine(specs=hybrid_model()).generate("a", long_prompt, 4)
    one = engine(specs=hybrid_model())
    server.calls.clear()
    again, external = one.generate("b", long_prompt, 4)
    assert again == answer and external == 416
    (leased,) = [groups for kind, groups in server.calls if kind == "acquire"]
    (loaded,) = [runs for kind, runs in server.calls if kind == "load"]
    sizes = sorted(len(group.hashes) for group in leased)
    window_blocks = -(-(WINDOW - 1) // BLOCK_TOKENS)
    assert sizes[-1] == 13 and set(sizes[:-1]) <= {window_blocks, window_blocks + 1}
    assert sorted(len(run.block_ids) for run in loaded) == sizes


def test_a_hit_goes_on_where_the_engines_own_ends(engine: Any, server: Any) -> None:
    """The server has lost the begin of the prompt, the engine has it."""
    answer = filled(engine)
    one = engine()
    one.generate("a", PROMPT[: 3 * BLOCK_TOKENS + 4], 1)
    for block_hash in one.requests["a"].block_hashes[:3]:
        del server.blocks[one.connector._scheduler.cache.session.space, 0, block_hash]
    assert one.generate("b", PROMPT, 4) == (answer, 3 * BLOCK_TOKENS)


def test_a_hole_that_the_hint_does_not_see_shrinks_the_hit(engine: Any, server: Any) -> None:
    long_prompt = prompt(1, 500)
    answer, _ = engine(blocks=80).generate("a", long_prompt, 4)
    one = engine(blocks=80)
    hashes = one.add("x", long_prompt).block_hashes
    one.abort("x")
    for place in range(1, 14):
        kept = dict(server.blocks)
        del server.blocks[one.connector._scheduler.cache.session.space, 0, hashes[place]]
        one.drop_local()
        server.hold = {"store"}
        assert one.generate(f"b{place}", long_prompt, 4) == (answer, place * BLOCK_TOKENS)
        one.generate(f"c{place}", prompt(9, 4), 3)
        server.hold, server.held, server.blocks = set(), [], kept
        for store in one.worker._worker.stores.active.values():
            store.answer.cancel()
        one.generate(f"d{place}", prompt(9, 4), 3)


def test_hit_needs_every_group(engine: Any, server: Any) -> None:
    long_prompt = prompt(1, 420)
    answer, _ = engine(specs=hybrid_model()).generate("a", long_prompt, 4)
    one = engine(specs=hybrid_model())
    window_group = next(
        i
        for i, spec in enumerate(one.connector._scheduler.cache.finder.groups.specs)
        if spec.window_tokens
    )
    hashes = one.connector._scheduler.cache.finder.groups.hashes(
        one.add("x", long_prompt), window_group
    )
    one.abort("x")
    space = one.connector._scheduler.cache.session.space
    del server.blocks[space, window_group, hashes[12]]
    again, external = one.generate("b", long_prompt, 4)
    assert again == answer and external == 12 * BLOCK_TOKENS


def test_cache_salt_separates(engine: Any) -> None:
    filled(engine)
    one = engine()
    one.add("a", PROMPT, 2, cache_salt="other")
    one.run()
    assert one.external["a"] == 0


def test_both_runner_generations(engine: Any) -> None:
    answer = filled(engine, v2=True)
    again, external = engine(v2=False).generate("a", PROMPT, 4)
    assert again == answer and external == 192


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_every_layout(engine: Any, layout: KVCacheLayout) -> None:
    answer, _ = engine(layout=layout).generate("a", PROMPT, 40)
    again, external = engine(layout=layout).generate("b", PROMPT, 40)
    assert again == answer and external == 192


def test_layouts_share_exactly_where_pages_are_equal(engine: Any) -> None:
    """Outer strides do not matter, the order inside a page does."""
    answer, _ = engine(layout=KVCacheLayout.LBHNC).generate("a", PROMPT, 4)
    for layout in (KVCacheLayout.BLHNC, KVCacheLayout.LHBNC, KVCacheLayout.BHLNC):
        assert engine(layout=layout).generate("b", PROMPT, 4) == (answer, 192)
    assert engine(layout=KVCacheLayout.LBNHC).generate("c", PROMPT, 4) == (answer, 0)


def test_engine_runs_without_a_server_and_with_one_that_comes_and_goes(
    engine: Any, server: Any
) -> None:
    server.up = False
    one = engine()
    answer, external = one.generate("a", PROMPT, 4)
    assert external == 0 and server.count("store") == 0
    server.come_back()
    one.drop_local()
    assert one.generate("b", PROMPT, 4) == (answer, 0)
    one.drop_local()
    assert one.generate("c", PROMPT, 4) == (answer, 192)
    server.die()
    one.drop_local()
    assert one.generate("d", PROMPT, 4) == (answer, 0)
    server.come_back()
    one.drop_local()
    assert one.generate("e", PROMPT, 4) == (answer, 0)
    one.drop_local()
    assert one.generate("f", PROMPT, 4) == (answer, 192)


@pytest.mark.parametrize("held", ["acquire", "load", "store"])
def test_server_dies_in_the_middle(engine: Any, server: Any, held: str) -> None:
    answer = filled(engine)
    one = engine()
    server.hold = {held}
    one.add("a", PROMPT + [5] * 40, 1)
    one.add("b", PROMPT, 4)
    for _ in range(5):
        one.step()
    server.die(empty=False)
    one.run()
    assert one.outputs["b"] == answer
    server.hold = set()
    server.come_back()
    one.drop_local()
    one.generate("c", PROMPT, 4)
    one.drop_local()
    assert one.generate("d", PROMPT, 4) == (answer, 192)


def test_state_changes_are_logged_once_each(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    logger = logging.getLogger("vllm.hotkv")
    monkeypatch.setattr(
        logger,
        "log",
        lambda level, text, *values: lines.append(text % values) if level >= logging.INFO else None,
    )
    one = engine()
    server.die()
    for index in range(5):
        one.generate(f"r{index}", PROMPT, 1)
        server.sessions[-1].tell(LinkState.ABSENT, "still not")
    server.come_back()
    assert len(lines) == 3, lines


def test_nothing_per_layer(engine: Any) -> None:
    one = engine()
    one.worker.wait_for_layer_load("layer.0")
    one.worker.save_kv_layer("layer.0", one.tensors["layer.0"], None)
    assert not one.worker.requires_piecewise_for_cudagraph({})
    assert not {"wait_for_layer_load", "save_kv_layer"} & set(one.worker.clock.by_hook)


def test_a_block_is_stored_with_the_step_that_fills_it(engine: Any, server: Any) -> None:
    """Also where it is filled to its last token: the store does not wait for a token of the next
    block."""
    one = engine(max_tokens_per_step=BLOCK_TOKENS)
    one.add("a", prompt(1, 200), 1)
    stored = []
    for _ in range(3):
        one.step()
        stored.append(len(server.blocks))
    assert stored == [1, 2, 3]


def test_retried_hit_of_a_preempted_request(engine: Any, server: Any) -> None:
    """A preempted request may hit what it stored itself before, answered tokens included."""
    one = engine(blocks=64)
    one.add("a", prompt(1, 100), 60)
    for _ in range(50):
        one.step()
    time.sleep(0.06)
    assert one.scheduler.reset_prefix_cache(reset_running_requests=True)
    one.run()
    one.generate("end", prompt(9, 10))
    assert one.outputs["a"] == engine().generate("b", prompt(1, 100), 60)[0]
    assert one.counters["loads"] == 1 and one.preemptions == 1
    assert one.connector._scheduler.requests.states == {}


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


def test_blocks_reused_before_their_late_store_are_not_stored(engine: Any, server: Any) -> None:
    """A finished request's last block is stored with the next step, unless that step hands the
    block to somebody else."""
    one = engine(pipelined=True, blocks=6)
    one.add("a", prompt(3, 60), 5)
    one.add("b", prompt(4, 120), 1)
    one.run()
    answer = one.outputs["a"]
    # The harness checks every value: had b's KV been stored under a's hash, this would load it.
    again, external = engine().generate("c", prompt(3, 60) + answer[:4] + [9] * 10, 1)
    assert again and external == BLOCK_TOKENS


@pytest.mark.parametrize("settle_at_once", [True, False])
def test_failed_loads_do_not_block_each_other_for_memory(
    engine: Any, server: Any, settle_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two failed loads, room for one of the requests at a time: vLLM alone would wait for ever for
    blocks that nobody gives back. `LoadRoom` doesn't help where a connector beside this one fills
    the device, so here it allows all."""
    monkeypatch.setattr(LoadRoom, "has_room", lambda room, request_id: True)
    long_prompts = {"a": prompt(1, 306), "b": prompt(2, 297)}
    answers = {
        name: engine(specs=hybrid_model()).generate(name, tokens, 4)[0]
        for name, tokens in long_prompts.items()
    }
    one = engine(specs=hybrid_model(), blocks=40, max_tokens_per_step=128)
    server.fail_loads, server.hold = True, {"load"}
    for name, tokens in long_prompts.items():
        one.add(name, tokens, 4)
    for _ in range(6):
        one.step()
    assert server.count("load") == 2
    if settle_at_once:
        server.settle()
    else:
        server.held[0][2].set_result(server.held.pop(0)[3]())
        one.step()
        one.step()
        server.settle()
    server.hold = set()
    one.run()
    assert one.outputs == answers


def test_server_of_another_version_is_an_absent_server(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    logger = logging.getLogger("vllm.hotkv")
    monkeypatch.setattr(
        logger,
        "log",
        lambda level, text, *values: lines.append(text % values) if level >= logging.INFO else None,
    )
    server.up, server.why_absent = False, "VERSION_MISMATCH: the server speaks version 9"
    one = engine()
    assert one.generate("a", PROMPT, 2)[1] == 0
    assert len(lines) == 1 and "VERSION_MISMATCH" in lines[0]

"""Loads leave room for a request to run. Requests with a common prefix load it once."""

import random
import time
from types import SimpleNamespace
from typing import Any

import pytest

from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.scheduler import failed_loads
from hotkv_vllm.scheduler.load.load_room import Holder
from tests.vllm.harness import Engine, prompt
from tests.vllm.lora_manager import lora, with_adapters
from tests.vllm.oracle import answer_of
from tests.vllm.other_connectors import our_connector
from tests.vllm.specs import HYBRIDS, full_model, hybrid_model

LONGEST = 505
MODELS = pytest.mark.parametrize("model", HYBRIDS)


def blocks_for_one(one: Engine, num_tokens: int = LONGEST) -> int:
    """The most blocks that it holds at once."""
    managers = one.scheduler.kv_cache_manager.coordinator.single_type_managers
    return sum(
        min(
            -(-num_tokens // manager.block_size),
            manager.max_admission_blocks_per_request or LONGEST,
        )
        for manager in managers
    )


def stored(
    engine: Any, model: Any, prompts: dict[str, list[int]]
) -> tuple[Engine, dict[str, list[int]]]:
    roomy = engine(specs=model(), max_tokens_per_step=128, blocks=400)
    return roomy, {name: roomy.fill(tokens, 2) for name, tokens in prompts.items()}


@pytest.mark.parametrize("num_tokens", [91, 92, 93])
def test_request_needs_the_blocks_vllm_reserves(engine: Any, num_tokens: int) -> None:
    """vLLM's count is right while the request holds nothing; drafts are included."""
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    one = engine(specs=hybrid_model(), blocks=96, speculative_config=ngram)
    room = one.connector._scheduler.requests.room
    request = one.add("a", prompt(1, num_tokens))
    room.comes(request)
    room.admitted("a", one.scheduler.kv_cache_manager.empty_kv_cache_blocks)
    assert room.holders["a"].need == one.scheduler._request_remaining_blocks(request)


@pytest.mark.parametrize(("held", "need", "beside"), [(6, 6, 0), (7, 6, 0), (4, 6, 2)])
def test_load_may_take_the_last_spare_block(engine: Any, held: int, need: int, beside: int) -> None:
    """held, need: of the other request.
    beside: what it still lacks.
    """
    one = engine(specs=hybrid_model(), blocks=96)
    room = one.connector._scheduler.requests.room
    request = one.add("a", prompt(1, 92))
    room.comes(request)
    room.holders["other"] = Holder(held, need)
    # One is vLLM's null block.
    fitting = room._needs["a"] + held + beside + 1
    for blocks, has_room in ((fitting, True), (fitting - 1, False)):
        room._manager.block_pool.num_gpu_blocks = blocks
        assert room.has_room(request) is has_room


@MODELS
def test_requests_that_load_together_all_end(engine: Any, server: Any, model: Any) -> None:
    settings = {"specs": model(), "max_tokens_per_step": 128}
    roomy, num_loads = engine(blocks=400, **settings), 0
    for seed in range(6):
        dice = random.Random(seed)
        prompts = {
            f"{seed}-{number}": prompt(10 * seed + number, dice.randrange(200, LONGEST))
            for number in range(6)
        }
        for tokens in prompts.values():
            roomy.fill(tokens[: dice.randrange(100, len(tokens))], 2)
        tight = engine(blocks=1 + blocks_for_one(roomy) + dice.randrange(12), **settings)
        for name, tokens in prompts.items():
            tight.add(name, tokens, 3)
        tight.run()
        num_loads += tight.counters["loads"]
        answers = {name: roomy.generate(name, tokens, 3)[0] for name, tokens in prompts.items()}
        assert tight.outputs == answers
    assert num_loads > 6


@pytest.mark.parametrize("fails", [False, True])
@MODELS
def test_fitting_loads_go_together_failures_make_room(
    engine: Any, server: Any, model: Any, fails: bool
) -> None:
    prompts = {f"{number}": prompt(number, LONGEST) for number in range(3)}
    roomy, answers = stored(engine, model, prompts)
    blocks = 1 + (2 if fails else 3) * blocks_for_one(roomy)
    one = engine(specs=model(), blocks=blocks, max_tokens_per_step=128)
    server.fail_loads, server.hold = fails, set() if fails else {"load"}
    for name, tokens in prompts.items():
        one.add(name, tokens, 2)
    if fails:
        while server.count("load") < 2:
            one.step()
    else:
        one.steps(6)
        assert server.count("load") == 3
    server.fail_loads = False
    server.resume()
    one.run()
    assert one.outputs == answers


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_only_vllms_preferred_requests_pass_room_waiters(
    engine: Any, server: Any, policy: str
) -> None:
    """Only the small ones fit together; with "priority" the late one precedes the large one."""
    prompts = {"small": prompt(1, 140), "large": prompt(2, LONGEST), "late": prompt(3, 140)}
    roomy, answers = stored(engine, hybrid_model, prompts)
    blocks = blocks_for_one(roomy) + blocks_for_one(roomy, 140)
    settings = {"max_tokens_per_step": 128, "scheduling_policy": policy}
    tight = engine(specs=hybrid_model(), blocks=blocks, **settings)
    server.hold = {"load"}
    for priority, name in ((1, "small"), (2, "large"), (0, "late")):
        tight.add(name, prompts[name], 2, priority=priority)
        tight.steps(6)
    assert server.count("load") == (2 if policy == "priority" else 1)
    server.settle()
    tight.steps(6)
    assert server.count("load") == (3 if policy == "priority" else 2)
    server.resume()
    tight.run()
    assert tight.outputs == answers


def test_unasked_request_delays_no_load(engine: Any, server: Any) -> None:
    """vLLM skips the delayed one for its adapter."""
    prompts = {"small": prompt(1, 140), "large": prompt(2, LONGEST), "late": prompt(3, 140)}
    adapters = {"large": lora(2, "b", "/b")}
    roomy = engine(specs=hybrid_model(), max_tokens_per_step=128, blocks=400)
    blocks = blocks_for_one(roomy) + blocks_for_one(roomy, 140)
    tight = engine(specs=hybrid_model(), max_tokens_per_step=128, blocks=blocks)
    for one in (roomy, tight):
        with_adapters(one, {"/a": 1, "/b": 2})
    for name, tokens in prompts.items():
        roomy.add(name, tokens, 2, lora_request=adapters.get(name))
        roomy.run()
    roomy.fill(prompt(9, 10))
    tight.scheduler.lora_config = SimpleNamespace(max_loras=1)
    server.hold = {"load"}
    for name in ("small", "large"):
        tight.add(name, prompts[name], 2, lora_request=adapters.get(name))
        tight.steps(6)
    tight.add("runs", prompt(4, 20), 60, lora_request=lora(1, "a", "/a"))
    tight.steps(6)
    assert server.count("load") == 1 and tight.outputs["runs"]
    server.hold = set()
    server.resume()
    tight.steps(6)
    tight.add("late", prompts["late"], 2)
    tight.steps(8)
    assert tight.finished.keys() == {"small", "late"} and server.count("load") == 2
    tight.run()
    assert all(tight.outputs[name] == roomy.outputs[name] for name in prompts)
    assert server.count("load") == 3


@pytest.mark.parametrize("model", [full_model, hybrid_model])
@pytest.mark.parametrize("how", ["well", "fails", "late", "aborted", "no prefix cache"])
def test_requests_with_a_common_prefix_load_it_once(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch, model: Any, how: str
) -> None:
    """Others then hit on the device, load after a failure, or compute at the time limit. Without
    a prefix cache none waits."""
    monkeypatch.setattr(failed_loads, "ADMISSION_PATIENCE_S", 60.0)
    prefix = prompt(1, 192)
    caches = how != "no prefix cache"
    one = engine(specs=model(), blocks=200, enable_prefix_caching=caches)
    one.fill(prefix)
    one.drop_local_if_idle()
    ends = [prompt(2 + number * (model is full_model), 7) for number in range(3)]
    prompts = {name: prefix + end for name, end in zip("abc", ends, strict=True)}
    server.hold, server.fail_loads = {"load"}, how == "fails"
    for name, tokens in prompts.items():
        one.add(name, tokens, 4)
    one.steps(4)
    assert server.count("load") == (1 if caches else 3)
    # A wait for room is no wait for vLLM's admission.
    state = our_connector(one.connector)._scheduler.requests.states["b"]
    granted_s = state.hit.granted_s
    one.steps(1)
    assert (state.hit.granted_s > granted_s) == caches
    if how == "aborted":
        one.abort("a")
        one.steps(4)
    elif how == "fails":
        server.settle()
        one.steps(4)
    elif how == "late":
        late_s = time.monotonic() + ConnectorConfig().load_timeout_s + 0.1
        monkeypatch.setattr(time, "monotonic", lambda: late_s)
        one.steps(4)
    assert server.count("load") == (1 if how in ("well", "late") else 3)
    server.resume()
    one.run()
    prompts.pop("a" if how == "aborted" else "", None)
    assert {name: one.outputs[name] for name in prompts} == {
        name: answer_of(tokens, 4) for name, tokens in prompts.items()
    }
    hits = {name: (one.external[name], one.local[name]) for name in prompts}
    if how == "well":
        assert hits == {"a": (192, 0), "b": (0, 192), "c": (0, 192)}


def test_no_waiting_for_windows_vllm_drops(engine: Any, server: Any) -> None:
    """vLLM would have to keep the prefix's windows."""
    one = engine(specs=hybrid_model(), blocks=200)
    one.fill(prompt(1, 192))
    one.drop_local()
    server.hold = {"load"}
    for seed in (2, 3):
        one.add(f"{seed}", prompt(1, 192) + prompt(seed, 40), 4)
    one.steps(4)
    assert server.count("load") == 2
    server.resume()
    one.run()

"""Scenarios of vLLM's own connector tests, in the harness: failed loads and large steps.
`test_stress` has failures and aborts in any order."""

from typing import Any

import pytest

from hotkv_vllm.scheduler import stores
from tests.vllm.harness import prompt
from tests.vllm.oracle import answer_of, audit
from tests.vllm.specs import full_model, hybrid_model

PROMPT, OTHER = prompt(1, 200), prompt(2, 40)
USABLE = 192
MODELS = pytest.mark.parametrize("model", [full_model, hybrid_model])


@MODELS
def test_a_failed_load_costs_no_request_whatever_the_policy(
    engine: Any, server: Any, model: Any
) -> None:
    """vLLM's default is "fail"; hotkv sets "recompute" in its place."""
    engines = [
        engine(specs=model(), within=lambda ours: ours | {"kv_load_failure_policy": "fail"})
        for _ in range(2)
    ]
    engines[0].fill(PROMPT)
    server.fail_loads = server.spoil_loads = True
    assert engines[1].generate("b", PROMPT, 4) == (answer_of(PROMPT, 4), 0)
    assert engines[1].counters["failed_loads"] and engines[1].finished["b"] == "length"
    audit(server, engines)


@MODELS
def test_a_request_that_vllm_ends_because_its_load_failed_leaves_nothing_behind(
    engine: Any, server: Any, model: Any
) -> None:
    """The policy may be out of hotkv's reach; see
    `test_multi_connector.test_policy_out_of_reach_is_said`."""
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
    for name in "cd":
        one.drop_local()
        assert one.generate(name, PROMPT, 4)[0] == answer_of(PROMPT, 4)
    assert one.external["d"] == USABLE
    audit(server, [first, one])


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
@MODELS
def test_a_step_of_very_many_blocks_is_stored_in_parts(
    monkeypatch: Any, engine: Any, server: Any, model: Any, v2: bool
) -> None:
    """Includes two requests in a step, and a chain of blocks too long for one store."""
    monkeypatch.setattr(stores, "STORE_BLOCKS", 3)
    first, second = engine(specs=model(), v2=v2), engine(specs=model(), v2=v2)
    first.add("a", PROMPT, 2)
    first.add("b", OTHER, 2)
    first.run()
    assert second.generate("c", PROMPT, 2)[1] == USABLE
    found = audit(server, [first, second])
    assert found.num_stored > 2 * 3 and first.counters["stores"] >= found.num_stored / 3

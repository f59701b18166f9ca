"""What vLLM's own connector tests ask, over the harness: failed loads, aborted requests, one prefix
by many at once. `test_stress` has them in any order."""

from typing import Any

import pytest

from hotkv_vllm import link
from hotkv_vllm.scheduler import stores
from tests.vllm.harness import prompt
from tests.vllm.oracle import answer_of, audit
from tests.vllm.specs import full_model, hybrid_model, mixed_model

PROMPT, OTHER = prompt(1, 200), prompt(2, 40)
USABLE = 192
MODELS = pytest.mark.parametrize("model", [full_model, hybrid_model])
RUNNERS = pytest.mark.parametrize(
    ("model", "v2"),
    [(full_model, False), (hybrid_model, True), (mixed_model, False), (mixed_model, True)],
)


@MODELS
def test_a_failed_load_costs_no_request_whatever_the_policy(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    """vLLM's default is "fail"; hotkv sets "recompute" in its place and says so."""
    said: list[str] = []
    monkeypatch.setattr(link.logger, "info", lambda text, *parts: said.append(text % parts))
    engine(specs=model(), within=lambda ours: ours | {"kv_load_failure_policy": "recompute"})
    assert not any("kv_load_failure_policy" in text for text in said)
    engines = [
        engine(specs=model(), within=lambda ours: ours | {"kv_load_failure_policy": "fail"})
        for _ in range(2)
    ]
    assert sum("kv_load_failure_policy is set to 'recompute'" in text for text in said) == 2
    engines[0].generate("a", PROMPT, 4)
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
    assert not requests.states and not requests.loads.awaited and requests.failed_loads.is_empty
    server.fail_loads = False
    for name in "cd":
        one.drop_local()
        assert one.generate(name, PROMPT, 4)[0] == answer_of(PROMPT, 4)
    assert one.external["d"] == USABLE
    audit(server, [first, one])


@pytest.mark.parametrize("pipelined", [False, True], ids=["sync", "async"])
@MODELS
@pytest.mark.parametrize("fails", [False, True], ids=["well", "failing"])
def test_one_prefix_loaded_by_many_at_once(
    engine: Any, server: Any, model: Any, pipelined: bool, fails: bool
) -> None:
    first = engine(specs=model())
    answer, _ = first.generate("a", PROMPT, 4)
    server.spoil_loads = True
    engines = [engine(specs=model(), pipelined=pipelined, blocks=96) for _ in range(2)]
    server.hold = {"load", "acquire"}
    for one in engines:
        for number in range(4):
            one.add(f"b{number}", [*PROMPT, *prompt(number, 30)] if number else PROMPT, 4)
    for _ in range(4):
        for one in engines:
            one.step()
        server.settle("acquire")
    loads = [(id(one), job) for one in engines for meta in one.metas for job in meta.loads]
    written = [(one, int(b)) for one, job in loads for run in job.runs for b in run.block_ids]
    assert len(loads) > 2 and len(written) == len(set(written)), "two loads write one block"
    server.fail_loads = fails
    server.settle("load")
    server.fail_loads, server.hold = False, set()
    server.settle()
    for one in engines:
        one.run()
        assert one.outputs["b0"] == answer and list(one.finished.values()) == ["length"] * 4
        one.generate("end", OTHER, 2)
    audit(server, [first, *engines])
    assert not server.leases and not server.held


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
@MODELS
def test_a_step_of_very_many_blocks_is_stored_in_parts(
    monkeypatch: Any, engine: Any, server: Any, model: Any, v2: bool
) -> None:
    """With two requests in a step, and one chain longer than the server takes in a call."""
    monkeypatch.setattr(stores, "STORE_BLOCKS", 3)
    first, second = engine(specs=model(), v2=v2), engine(specs=model(), v2=v2)
    first.add("a", PROMPT, 2)
    first.add("b", OTHER, 2)
    first.run()
    assert second.generate("c", PROMPT, 2)[1] == USABLE
    found = audit(server, [first, second])
    assert found.num_stored > 2 * 3 and first.counters["stores"] >= found.num_stored / 3

"""What vLLM's own connector tests ask, over the harness: failed loads, aborted and preempted requests, one prefix by many at once."""

import random
from typing import Any

import numpy as np
import pytest

from tests.vllm.harness import Engine, _layer, _value, full_model, hybrid_model, prompt

PROMPT, OTHER = prompt(1, 200), prompt(2, 40)
GARBAGE = 0x5A5A


def audited(server: Any, engines: list[Engine], hashes: dict[bytes, list[int]]) -> int:
    """Compares every stored block with what the model computes for the tokens of its hash; returns how many there are."""
    space = engines[0].connector._scheduler.session.config.key_space
    block_tokens = {index: group.block_tokens for index, group in enumerate(space.groups)}
    for (_, group, block_hash), shards in server.blocks.items():
        tokens = hashes[block_hash]
        values = np.array(_value(tokens)[-block_tokens[group] :], np.int16)
        layers = space.groups[group].layer_names
        pages = np.frombuffer(shards[0], np.int16).reshape(len(layers), 2, block_tokens[group], -1)
        for layer, page in zip(layers, pages, strict=True):
            assert (page == (values ^ _layer(layer))[None, :, None]).all(), f"group {group}: a block is not what its hash says"
    return len(server.blocks)


@pytest.mark.parametrize("pipelined", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("model", [full_model, hybrid_model])
def test_stored_blocks_are_what_their_hashes_say(engine: Any, server: Any, model: Any, pipelined: bool) -> None:
    """Requests are aborted wherever they stand, preempted, cut short, and lose loads and stores."""
    dice = random.Random(5)
    blocks = 40 if model is hybrid_model else 18
    engines = [engine(specs=model(), pipelined=pipelined, blocks=blocks, max_tokens_per_step=128) for _ in range(2)]
    hashes: dict[bytes, list[int]] = {}
    requests: list[tuple[Engine, str]] = []
    for turn in range(60):
        one = dice.choice(engines)
        name = f"r{turn}"
        one.add(name, prompt(dice.randrange(2), dice.randrange(20, 300)), dice.randrange(1, 40))
        requests.append((one, name))
        server.fail_loads, server.fail_stores = dice.random() < 0.2, dice.random() < 0.1
        server.hold = set(dice.sample(["store", "load", "acquire"], dice.randrange(3)))
        for _ in range(dice.randrange(6)):
            dice.choice(engines).step()
        if dice.random() < 0.3:
            other, running = dice.choice(requests)
            other.abort(running)
        server.settle()
        if dice.random() < 0.2:
            one.scheduler.reset_prefix_cache()
    server.hold.clear()
    server.settle()
    for one in engines:
        one.run()
        one.generate("end", OTHER, 2)
    for one, name in [*requests, *((one, "end") for one in engines)]:
        request = one.requests[name]
        size = one.kv_config.hash_block_size or one.vllm_config.cache_config.block_size
        for place, block_hash in enumerate(request.block_hashes):
            hashes[block_hash] = list(request.all_token_ids[: (place + 1) * size])
    assert audited(server, engines, hashes) > 20 and not server.leases
    assert any(one.preemptions for one in engines) and not any("hook_errors" in one.counters for one in engines)


@pytest.mark.parametrize("model", [full_model, hybrid_model])
def test_blocks_of_a_failed_load_are_in_nobodys_cache(engine: Any, server: Any, model: Any) -> None:
    """The server has written a part of them, and rubbish, before it failed."""
    engine(specs=model()).generate("a", PROMPT, 4)
    one = engine(specs=model())
    server.hold = {"load"}
    one.add("b", PROMPT, 4)
    for _ in range(5):
        one.step()
    (job,) = [job for meta in one.metas for job in meta.loads]
    for run in job.runs:
        for layer in one.kv_config.kv_cache_groups[run.group_index].layer_names:
            one._cells(layer)[run.block_ids[::2]] = GARBAGE
    server.fail_loads, server.hold = True, set()
    server.settle()
    # While the first is computed anew, another one asks for the same.
    one.add("c", [*PROMPT, 5, 6], 4)
    one.run()
    assert one.counters["failed_loads"] >= 1 and set(one.finished.values()) == {"length"}
    server.fail_loads = False
    assert one.generate("d", PROMPT, 4)[0] == one.outputs["b"]


@pytest.mark.parametrize("pipelined", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("model", [full_model, hybrid_model])
@pytest.mark.parametrize("fails", [False, True], ids=["well", "failing"])
def test_one_prefix_loaded_by_many_at_once(engine: Any, server: Any, model: Any, pipelined: bool, fails: bool) -> None:
    answer, _ = engine(specs=model()).generate("a", PROMPT, 4)
    engines = [engine(specs=model(), pipelined=pipelined, blocks=96) for _ in range(2)]
    server.hold = {"load", "acquire"}
    for one in engines:
        for number in range(4):
            one.add(f"b{number}", [*PROMPT, *prompt(number, 30)] if number else PROMPT, 4)
    for _ in range(4):
        for one in engines:
            one.step()
        server.settle("acquire")
    loads = [job for one in engines for meta in one.metas for job in meta.loads]
    written = [(id(one), int(b)) for one in engines for meta in one.metas for job in meta.loads for run in job.runs for b in run.block_ids]
    assert len(loads) > 2 and len(written) == len(set(written)), "two loads write one block"
    server.fail_loads = fails
    server.settle("load")
    server.fail_loads, server.hold = False, set()
    server.settle()
    for one in engines:
        one.run()
        assert one.outputs["b0"] == answer and len(one.finished) == 4 and set(one.finished.values()) == {"length"}
        one.generate("end", OTHER, 2)
    assert not server.leases and not server.held


def test_shutdown_at_any_time_and_twice(server: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for num_steps in range(4):
        one = Engine(server, tmp_path / "model", monkeypatch)
        server.hold = {"store", "load"}
        one.add("a", PROMPT, 8)
        for _ in range(num_steps):
            one.step()
        for _ in range(2):
            one.worker.shutdown()
            one.connector.shutdown()
        server.hold = set()
        server.settle()
        assert one.worker._worker._memory is None and one.worker._worker.session is None
        # The engine may go on without the connector's parts.
        one.run()
        assert one.finished["a"] == "length"

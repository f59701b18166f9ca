"""Loads never fill the device so far that none of their requests can run, though vLLM counts too
few blocks for sliding windows and chunks."""

import random
from typing import Any

import pytest

from tests.vllm.harness import Engine, prompt
from tests.vllm.specs import HYBRIDS

LONGEST = 505


def blocks_for_one(one: Engine) -> int:
    """Most blocks that a prompt of LONGEST tokens holds at once."""
    managers = one.scheduler.kv_cache_manager.coordinator.single_type_managers
    return sum(
        min(-(-LONGEST // manager.block_size), manager.max_admission_blocks_per_request or LONGEST)
        for manager in managers
    )


def stored(roomy: Engine, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """Returns the answers of an engine with room, which stores all that it computes."""
    answers = {name: roomy.generate(name, tokens, 2)[0] for name, tokens in prompts.items()}
    roomy.generate("end", prompt(1000, 3), 2)
    return answers


@pytest.mark.parametrize("model", HYBRIDS)
def test_requests_that_load_together_all_end(engine: Any, server: Any, model: Any) -> None:
    settings = {"specs": model(), "max_tokens_per_step": 128}
    roomy, num_loads = engine(blocks=400, **settings), 0
    for seed in range(12):
        dice = random.Random(seed)
        prompts = {
            f"{seed}-{number}": prompt(10 * seed + number, dice.randrange(200, LONGEST))
            for number in range(6)
        }
        for tokens in prompts.values():
            roomy.generate("before", tokens[: dice.randrange(100, len(tokens))], 2)
        roomy.generate("end", prompt(1000, 3), 2)
        tight = engine(blocks=1 + blocks_for_one(roomy) + dice.randrange(12), **settings)
        for name, tokens in prompts.items():
            tight.add(name, tokens, 3)
        tight.run()
        num_loads += tight.counters["loads"]
        answers = {name: roomy.generate(name, tokens, 3)[0] for name, tokens in prompts.items()}
        assert tight.outputs == answers
    assert num_loads > 12


@pytest.mark.parametrize("model", HYBRIDS)
def test_loads_that_fit_together_go_on_together(engine: Any, server: Any, model: Any) -> None:
    one = engine(specs=model(), blocks=400, max_tokens_per_step=128)
    prompts = {f"{number}": prompt(number, LONGEST) for number in range(3)}
    stored(one, prompts)
    one.drop_local()
    server.hold = {"load"}
    for name, tokens in prompts.items():
        one.add(f"again {name}", tokens, 2)
    for _ in range(6):
        one.step()
    assert server.count("load") == 3
    server.hold = set()
    server.settle()
    one.run()


@pytest.mark.parametrize("model", HYBRIDS)
def test_requests_whose_loads_failed_make_room_for_each_other(
    engine: Any, server: Any, model: Any
) -> None:
    settings = {"specs": model(), "max_tokens_per_step": 128}
    roomy = engine(blocks=400, **settings)
    prompts = {f"{number}": prompt(number, LONGEST) for number in range(3)}
    answers = stored(roomy, prompts)
    tight = engine(blocks=1 + 2 * blocks_for_one(roomy), extra={"max_load_retries": 3}, **settings)
    server.fail_loads = True
    for name, tokens in prompts.items():
        tight.add(name, tokens, 2)
    while server.count("load") < 2:
        tight.step()
    server.fail_loads = False
    tight.run()
    assert tight.outputs == answers


@pytest.mark.parametrize("model", HYBRIDS)
def test_who_waits_for_room_is_not_passed_by_smaller_ones(
    engine: Any, server: Any, model: Any
) -> None:
    settings = {"specs": model(), "max_tokens_per_step": 128}
    roomy = engine(blocks=400, **settings)
    prompts = {"small": prompt(1, 140), "large": prompt(2, LONGEST), "late": prompt(3, 140)}
    answers = stored(roomy, prompts)
    tight = engine(blocks=1 + blocks_for_one(roomy), **settings)
    server.hold = {"load"}
    for name, tokens in prompts.items():
        tight.add(name, tokens, 2)
    for _ in range(6):
        tight.step()
    assert server.count("load") == 1
    server.settle()
    for _ in range(6):
        tight.step()
    assert server.count("load") == 2
    server.hold = set()
    server.settle()
    tight.run()
    assert tight.outputs == answers

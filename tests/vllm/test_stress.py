"""Random requests, aborts, preemptions and server faults in any order: no wrong KV, no lost
request, nothing left behind."""

import random
from typing import Any

import pytest

from tests.vllm.harness import prompt
from tests.vllm.specs import HYBRIDS, full_model


@pytest.mark.parametrize("pipelined", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("model", [full_model, *HYBRIDS])
@pytest.mark.parametrize(
    "table",
    [pytest.param(True, id="table"), pytest.param(False, id="rpc", marks=pytest.mark.long)],
)
def test_random_faults(engine: Any, server: Any, pipelined: bool, model: Any, table: bool) -> None:
    dice = random.Random(0)
    server.table = table
    settings = {"lookup_timeout_s": 0.002, "reset_timeout_s": 0.002}
    one = engine(
        specs=model(), pipelined=pipelined, blocks=40, max_tokens_per_step=128, extra=settings
    )
    live: list[str] = []
    expected: dict[str, list[int]] = {}
    alone: dict[tuple[int, int], list[int]] = {}
    for turn in range(150):
        roll = dice.random()
        if roll < 0.3 and len(live) < 6:
            family, length = dice.randrange(2), dice.randrange(20, 400)
            name = f"r{turn}"
            one.add(name, prompt(family, length), 40)
            live.append(name)
            expected[name] = _answer(alone, family, length)
        elif roll < 0.34 and live:
            name = live.pop(dice.randrange(len(live)))
            one.abort(name)
            expected.pop(name, None)
        elif roll < 0.42:
            server.hold = set(
                dice.sample(
                    ["store", "load", "acquire", "lookup", "flush"], dice.choice([0, 0, 1, 2])
                )
            )
        elif roll < 0.55:
            server.settle(dice.choice(["", "store", "load", "acquire"]))
        elif roll < 0.56:
            server.die(empty=dice.random() < 0.5)
        elif roll < 0.66 and not server.up:
            server.come_back()
        elif roll < 0.68:
            server.fail_loads, server.fail_stores = dice.random() < 0.3, dice.random() < 0.2
        elif roll < 0.70:
            server.grant_limit = dice.choice([1, 3, 1 << 30, 1 << 30])
        elif roll < 0.72:
            server.ack_cancels = dice.random() < 0.7
        elif roll < 0.85 and server.blocks:
            for key in dice.sample(list(server.blocks), min(len(server.blocks), 8)):
                del server.blocks[key]
        elif roll < 0.9 and not one.queue:
            one.scheduler.reset_prefix_cache(reset_connector=dice.random() < 0.5)
        for _ in range(dice.randrange(4)):
            one.step()
            if not server.ack_cancels:
                server.settle()
        live = [name for name in live if name not in one.finished]
    server.hold.clear()
    server.ack_cancels = True
    server.settle()
    server.come_back()
    one.run()
    for name, tokens in expected.items():
        assert one.outputs[name] == tokens, name
    # Stores of the last step are reported with the next one.
    one.generate("last", prompt(9, 50))
    one.generate("very last", prompt(9, 50))
    planner = one.connector._scheduler.cache.planner
    assert (
        len(planner.in_flight) == 0
        and not planner.in_flight.reading
        and planner.in_flight.num_bytes == 0
    )
    assert not one.worker._worker.loads and not one.worker._worker.stores
    assert not server.leases and not one.connector._scheduler.requests.states
    assert "hook_errors" not in one.counters
    print(f"preemptions {one.preemptions}", one.counters)


def _answer(alone: dict[tuple[int, int], list[int]], family: int, length: int) -> list[int]:
    """What the arithmetic model says without any cache."""
    from tests.vllm.harness import _value

    if (family, length) not in alone:
        tokens = prompt(family, length)
        for _ in range(40):
            tokens.append(3 + _value(tokens)[-1] % 1000)
        alone[family, length] = tokens[length:]
    return alone[family, length]

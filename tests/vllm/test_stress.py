"""Random requests, aborts, preemptions and faults."""

import random
from typing import Any

import pytest

from hotkv_vllm.worker import rank_loads
from tests.vllm.harness import Engine, prompt
from tests.vllm.oracle import answer_of, audit, check_nothing_left
from tests.vllm.specs import HYBRIDS, full_model, mixed_model, states_and_windows_model

CALLS = ["store", "load", "acquire", "lookup", "flush"]


def change(dice: random.Random, server: Any, one: Engine) -> None:
    """Changes the server, or resets the engine's own cache."""
    roll = dice.random()
    if roll < 0.10:
        server.hold = set(dice.sample(CALLS, dice.choice([0, 0, 1, 2])))
    elif roll < 0.40:
        server.settle(dice.choice(["", "store", "load", "acquire"]))
    elif roll < 0.42:
        server.die(empty=dice.random() < 0.3)
    elif roll < 0.60 and not server.up:
        server.come_back()
    elif roll < 0.65:
        server.fail_loads, server.fail_stores = dice.random() < 0.3, dice.random() < 0.2
        server.spoil_loads = dice.random() < 0.5
    elif roll < 0.68:
        server.grant_limit = dice.choice([1, 3, 1 << 30, 1 << 30])
    elif roll < 0.71:
        server.ack_cancels = not server.ack_cancels
    elif roll < 0.80:
        for key in dice.sample(list(server.blocks), min(len(server.blocks), 4)):
            del server.blocks[key]
    elif not one.queue:
        one.scheduler.reset_prefix_cache(reset_connector=dice.random() < 0.05)


WAYS: dict[str, dict[str, bool]] = {
    "sync": {"pipelined": False},
    "async": {"pipelined": True},
    "v2": {"v2": True},
}


MODELS = (full_model, mixed_model, states_and_windows_model, *HYBRIDS[1:])
BY_RPC = dict(zip(MODELS, ["sync", "async", "v2", "sync", "async", "async", "v2"], strict=True))
"""`long` cases by RPC, which together run every line."""


def marks(model: Any, way: str, table: bool) -> list[pytest.MarkDecorator]:
    """Every day: each model asynchronously and `full_model` in each way, by table."""
    if table:
        return [] if way == "async" or model is full_model else [pytest.mark.long]
    return [pytest.mark.long if BY_RPC[model] == way else pytest.mark.campaign]


@pytest.mark.parametrize(
    ("model", "way", "table"),
    [
        pytest.param(
            model,
            WAYS[way],
            table,
            id=f"{'table' if table else 'rpc'}-{model.__name__}-{way}",
            marks=marks(model, way, table),
        )
        for table in (True, False)
        for model in MODELS
        for way in WAYS
    ],
)
def test_random_faults(
    engine: Any,
    server: Any,
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    way: dict[str, bool],
    table: bool,
) -> None:
    """Loads are given up at once and may be written late."""
    monkeypatch.setattr(rank_loads, "CANCEL_GRACE_S", 0.0)
    dice = random.Random(0)
    server.table = table
    extra = {"lookup_timeout_s": 0.002, "reset_timeout_s": 0.002, "load_timeout_s": 0.0}
    settings = {"specs": model(), "max_tokens_per_step": 128, **way}
    # Asynchronous scheduling reserves windows for two steps.
    several = (56, 60) if way.get("pipelined") else (40, 44)
    num_blocks = (18, 24) if model is full_model else several
    engines = [engine(blocks=blocks, extra=extra, **settings) for blocks in num_blocks]
    live: list[tuple[Engine, str]] = []
    asked: dict[tuple[Engine, str], list[int]] = {}
    for turn in range(200):
        one = dice.choice(engines)
        if dice.random() < 0.4 and len(live) < 8:
            tokens = prompt(dice.randrange(2), dice.randrange(20, 400))
            one.add(f"r{turn}", tokens, 40)
            live.append((one, f"r{turn}"))
            asked[live[-1]] = tokens
        elif dice.random() < 0.06 and live:
            one, name = live.pop(dice.randrange(len(live)))
            one.abort(name)
            del asked[one, name]
        else:
            change(dice, server, one)
        for _ in range(dice.randrange(8)):
            dice.choice(engines).step()
            if not server.ack_cancels:
                # Cancels are not confirmed, so a step would wait for the store.
                server.settle("store")
        live = [(one, name) for one, name in live if name not in one.finished]
    server.hold.clear()
    server.ack_cancels, server.fail_stores, server.grant_limit = True, False, 1 << 30
    server.settle()
    server.come_back()
    for one in engines:
        one.run()
    for (one, name), tokens in asked.items():
        assert one.outputs[name] == answer_of(tokens, 40), name
    for one in engines:
        # Results of the last stores come with the next request.
        one.generate("last", prompt(9, 50))
        one.generate("very last", prompt(9, 50))
        check_nothing_left(one)
    found = audit(server, engines)
    assert found.num_stored and found.num_cached and not server.leases
    assert any(one.preemptions for one in engines) or any(
        "loads" in one.counters for one in engines
    )

"""Transfers of a real server that wait for a fake device's words."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_cache_layout import KVCacheLayout

from hotkv_proto.order import OrderKind
from tests.vllm.device import ScriptedDevice
from tests.vllm.harness import Engine, prompt
from tests.vllm.ordered_server import engine_at, finish
from tests.vllm.processes import Daemon
from tests.vllm.specs import full_model, hybrid_model

Make = Callable[..., Engine]


@pytest.fixture
def make(shared_daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Engine] = []

    def start(**settings: Any) -> Engine:
        made.append(engine_at(shared_daemon, tmp_path, monkeypatch, **settings))
        return made[-1]

    yield start
    for one in made:
        one.shutdown()


def test_server_reads_words_and_says_its_order(make: Make) -> None:
    """Without a device the server chooses words."""
    for settings, kind, why in (
        ({"device": ScriptedDevice()}, OrderKind.FLAGS, ""),
        ({"device": ScriptedDevice(), "extra": {"device_order": "host"}}, OrderKind.HOST, ""),
        (
            {"device": ScriptedDevice(), "extra": {"device_order": "events"}},
            OrderKind.HOST,
            "events",
        ),
        ({}, OrderKind.HOST, ""),
    ):
        session = make(**settings).worker._worker.rank.session
        assert session.order_kind is kind
        assert why in session.order_message and bool(session.order_message) == bool(why)


@pytest.mark.parametrize(
    ("order", "model", "layout"),
    [
        ("host", full_model, KVCacheLayout.BLHNC),
        ("flags", full_model, KVCacheLayout.LBHNC),
        ("flags", hybrid_model, KVCacheLayout.LBHNC),
    ],
)
def test_random_lag_leaves_kv_right(
    make: Make, order: str, model: Any, layout: KVCacheLayout
) -> None:
    """Blocks are reallocated during transfers."""
    chance, device = random.Random(f"{order}{model}{layout.name}"), ScriptedDevice()
    one = make(
        device=device,
        specs=model(),
        layout=layout,
        blocks=22 if model is full_model else 44,
        max_tokens_per_step=128,
        pipelined=True,
        v2=True,
        extra={"device_order": order},
    )
    prompts = [prompt(seed, length) for seed in range(5) for length in (40, 150, 230)]
    for number in range(25):
        one.add(f"r{number}", chance.choice(prompts), chance.choice((1, 3, 20)))
        for _ in range(300):
            if len(one.scheduler.requests) <= chance.choice((0, 1, 3)):
                break
            one.step()
            device.run(chance.choice((0, 3, 10, 1000)))
    finish(one)
    one.drop_local()
    for number, seed in enumerate(range(5)):
        one.add(f"again {number}", prompt(seed, 150), 2)
    finish(one)
    assert one.counters["loads"] and one.counters["stores"]
    assert not {"callback_errors", "failed_loads"} & one.counters.keys()

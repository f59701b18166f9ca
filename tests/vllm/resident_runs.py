"""Engines whose requests are longer than their pool."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import wait_for
from tests.vllm.processes import Daemon, EngineProcess, Engines
from tests.vllm.runs import NOISE, difference
from tests.vllm.tiny import VOCAB, write_model

Start = Callable[..., EngineProcess]
SPARSE: dict[str, Any] = {
    "sparse_topk": 256,
    "min_context_tokens": 512,
    "dense_layers": [],
    "sink_tokens": 32,
    "recent_tokens": 64,
}
RESIDENT = SPARSE | {"residency": "host"}
AUTO = SPARSE | {"residency": "auto"}
CHUNK = 128
POOL_BLOCKS = 64
"""2,048 tokens on the device."""
CONTEXT = 8192


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Returns True if two engines gave the same answer, up to rounding: chunks of a prompt may
    begin at other tokens, which changes the order of sums."""
    return bool(found["tokens"] == expected["tokens"]) and difference(found, expected) < NOISE


def until_stored(daemon: Daemon, num_blocks: int) -> None:
    """Waits until the server has stored that many blocks."""

    def are_stored() -> bool:
        return bool(daemon.admin("info")["counters"]["stored_blocks_total"] >= num_blocks)

    wait_for(are_stored, "the blocks of a prompt")


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


@pytest.fixture
def start(engines: Engines, tmp_path: Path) -> Start:
    def make(
        sparse: dict[str, Any] | None,
        *,
        target: str | None = None,
        connector_settings: dict[str, Any] | None = None,
        **settings: Any,
    ) -> EngineProcess:
        """Returns an engine with the connector; its server is absent unless `target` names it. A
        resident engine reserves room block by block."""
        layers = {"num_hidden_layers": 4, "max_position_embeddings": 2 * CONTEXT}
        settings = {
            "load_format": "random",
            "dtype": "float32",
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": CONTEXT,
            "max_num_batched_tokens": CHUNK,
            "max_num_seqs": 4,
            "hf_overrides": layers,
            "quantum": 0,
        } | settings
        connector = {"weights_identity": tmp_path.name, "sparse_recall_steps": 0}
        connector |= {"tenant": "own"} if target is None else {}
        connector |= {} if target else {"startup_wait_s": 0.0}
        connector |= {} if sparse is None else {"sparse": sparse}
        connector |= connector_settings or {}
        return engines.start(
            write_model(tmp_path / "llama", "llama"),
            target or f"unix:{tmp_path}/none.sock",
            connector=connector,
            driver="sparse_driver.py",
            **settings,
        )

    return make


EXACT = RESIDENT | {"sparse_topk": 1024}
"""The hot set covers contexts of up to 2,048 tokens, so tokens are always those of dense
attention."""
EXACT_POOL = 100
"""Number of blocks: a request holds at most 89, of which 72 are hot slots."""

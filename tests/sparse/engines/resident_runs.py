"""Real engines whose contexts exceed the device."""

import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sparse.engines.sparse_runs import References, Start, begin
from tests.support.waiting import wait_for
from tests.vllm.processes import Daemon, Engines
from tests.vllm.runs import same
from tests.vllm.tiny import VOCAB

__all__ = ["Start", "same"]
SPARSE: dict[str, Any] = {
    "scorer": "rot2u",
    "sparse_topk": 512,
    "min_context_tokens": 512,
    "dense_layers": [],
    "sink_tokens": 32,
    "recent_tokens": 64,
}
REFERENCE = {"sparse": SPARSE}
"""Sparse, with all blocks on the device."""
RESIDENT = SPARSE | {"residency": "host"}
AUTO = SPARSE | {"residency": "auto"}
CHUNK = 128
POOL_BLOCKS = 64
"""2,048 tokens."""
CONTEXT = 8192


def until_stored(daemon: Daemon, num_blocks: int) -> None:
    def are_stored() -> bool:
        return bool(daemon.admin("info")["counters"]["stored_blocks_total"] >= num_blocks)

    wait_for(are_stored, "the blocks of a prompt")


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


SETTINGS: dict[str, Any] = {
    "max_model_len": CONTEXT,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 4,
    "hf_overrides": {"num_hidden_layers": 4, "max_position_embeddings": 2 * CONTEXT},
    "quantum": 0,
}
""""quantum" 0: room is reserved block by block."""


@pytest.fixture
def start(engines: Engines, tmp_path: Path) -> Start:
    return functools.partial(begin, engines, tmp_path, **SETTINGS)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    """Engines with all blocks on the device."""
    folder = tmp_path_factory.mktemp("references")
    engines = Engines(folder)
    yield References(functools.partial(begin, engines, folder, **SETTINGS))
    engines.stop()


SCHEDULING = pytest.mark.parametrize(
    "is_async",
    [pytest.param(True, id="async"), pytest.param(False, id="sync", marks=pytest.mark.campaign)],
)
EXACT = RESIDENT | {"sparse_topk": 2048}
"""The hot set covers 2,048 tokens: dense attention."""
EXACT_POOL = 100
"""A request holds 89, of which 72 are hot slots."""

"""Settings, prompts and fixtures for real engines with resident requests: the KV of their long
contexts stays in host memory, because it exceeds the device's block pool."""

import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import wait_for
from tests.vllm.processes import Daemon, Engines
from tests.vllm.runs import same
from tests.vllm.sparse_runs import References, Start, begin
from tests.vllm.tiny import VOCAB

__all__ = ["Start", "same"]
SPARSE: dict[str, Any] = {
    "sparse_topk": 512,
    "min_context_tokens": 512,
    "dense_layers": [],
    "sink_tokens": 32,
    "recent_tokens": 64,
}
REFERENCE = {"sparse": SPARSE}
"""Settings of an engine of `references` that decodes sparsely, with all blocks on its device."""
RESIDENT = SPARSE | {"residency": "host"}
AUTO = SPARSE | {"residency": "auto"}
CHUNK = 128
POOL_BLOCKS = 64
"""Number of device blocks, which hold 2,048 tokens."""
CONTEXT = 8192


def until_stored(daemon: Daemon, num_blocks: int) -> None:
    """Waits until the server has stored at least `num_blocks` blocks."""

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
"""Settings of engines. With "quantum" 0, a resident engine reserves room in the server block by
block."""


@pytest.fixture
def start(engines: Engines, tmp_path: Path) -> Start:
    """Returns a function that starts engines with `sparse_runs.begin` and SETTINGS."""
    return functools.partial(begin, engines, tmp_path, **SETTINGS)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    """Yields the expected answers for the tests of a file. They come from engines that hold all
    blocks on the device. These attend to the whole context, or decode sparsely if a test passes
    sparse settings in the argument `engine` of `References.ask`."""
    folder = tmp_path_factory.mktemp("references")
    engines = Engines(folder)
    yield References(functools.partial(begin, engines, folder, **SETTINGS))
    engines.stop()


SCHEDULING = pytest.mark.parametrize(
    "is_async",
    [pytest.param(True, id="async"), pytest.param(False, id="sync", marks=pytest.mark.campaign)],
)
"""Both ways of scheduling."""
EXACT = RESIDENT | {"sparse_topk": 2048}
"""With these settings the hot set (blocks in device slots) covers contexts of up to 2,048 tokens,
so tokens are always those of dense attention."""
EXACT_POOL = 100
"""Number of device blocks: a request holds at most 89, of which 72 are hot slots (for copies of
blocks in host memory)."""

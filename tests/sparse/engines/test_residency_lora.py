"""Residency with adapters in real vLLM on CPU."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.sparse.engines.resident_runs import (
    POOL_BLOCKS,
    RESIDENT,
    SETTINGS,
    SPARSE,
    prompts,
    same,
)
from tests.sparse.engines.sparse_runs import begin
from tests.vllm.adapters import LORA, adapter, write_adapter
from tests.vllm.processes import Daemon, EngineProcess, Engines
from tests.vllm.runs import difference, settled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENGTH = 3001
"""1.5 times the pool. The answer begins another block."""


class Two(NamedTuple):
    """`one` keeps contexts in the server's memory, `reference` on its device."""

    one: EngineProcess
    reference: EngineProcess
    folder: Path


@pytest.fixture(scope="module", params=["host", pytest.param("auto", marks=pytest.mark.long)])
def two(
    request: pytest.FixtureRequest,
    shared_daemon: Daemon,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("resident-lora")
    made = Engines(folder)
    start = functools.partial(
        begin,
        made,
        folder,
        **SETTINGS | {"hf_overrides": {}, "max_model_len": 4096} | LORA,
    )
    one = start(
        RESIDENT | {"residency": request.param},
        target=shared_daemon.target,
        num_gpu_blocks_override=POOL_BLOCKS,
    )
    reference = start(SPARSE)
    yield Two(one, reference, folder)
    made.stop()


def ask(engine: EngineProcess, tokens: list[int], path: Path) -> dict[str, Any]:
    answer: dict[str, Any] = engine.ask(
        "generate", prompts=[tokens], max_tokens=12, adapter=adapter(path)
    )
    return answer


def test_adapters_context_in_host_memory_hits(two: Two) -> None:
    a, b = (write_adapter(two.folder / name, seed) for seed, name in enumerate("ab"))
    (prompt,) = prompts(1, LENGTH)
    expected, other = (ask(two.reference, prompt, path) for path in (a, b))
    assert difference(expected, other) > 0.01, "the adapters do not differ"
    assert same(ask(two.one, prompt, a), expected)
    settled(two.one)
    again = ask(two.one, prompt, a)
    assert again["cached"][0] > LENGTH // 2 and same(again, expected)
    first_of_b = ask(two.one, prompt, b)
    assert first_of_b["cached"] == [0] and same(first_of_b, other)


def test_unshared_adapter_still_outgrows_the_device(two: Two) -> None:
    path = write_adapter(two.folder / "live", 6)
    short, long = prompts(2, 40, LENGTH)
    ask(two.one, short, path)
    ask(two.one, short, write_adapter(two.folder / "evicts", 7))
    write_adapter(path, 8)
    expected = ask(two.reference, long, write_adapter(two.folder / "copy", 8))
    for _ in range(2):
        found = ask(two.one, long, path)
        assert found["cached"] == [0] and same(found, expected)
    assert f"requests of LoRA adapter 'live' ({path}) do not use" in two.one.log()
    totals = two.one.ask("stats")["totals"]
    assert not {"failed_residencies", "callback_errors"} & totals.keys()

"""Representations go with blocks from engine to engine: real vLLM, a real daemon, one engine after
the other."""

from typing import Any

import pytest

from tests.vllm.processes import Daemon
from tests.vllm.runs import difference, settled
from tests.vllm.sparse_runs import NOISE, SMALL, prompts
from tests.vllm.sparse_sharing import (
    SPARSE_LAYERS,
    Start,
    growth,
    start,
)
from tests.vllm.tiny import BLOCK_TOKENS

__all__ = ["start"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENGTHS = (700, 1100)
ANSWER = 40
HIT_BLOCKS = sum((length - 1) // BLOCK_TOKENS for length in LENGTHS)
ALL_BLOCKS = sum((length + ANSWER - 1) // BLOCK_TOKENS for length in LENGTHS)
"""Blocks of both prompts and answers that are complete at the last step."""
STEPS = (
    "sparse_selects",
    "sparse_selected_blocks",
    "sparse_attended_blocks",
    "sparse_estimated_mass",
    "sparse_hit_blocks",
)
"""What equal representations decide."""


def kept(one: Daemon) -> tuple[int, int, int]:
    """Blocks and representations that the server has of the one key space, and kinds that were
    declared."""
    (row,) = one.admin("key_spaces")
    return row["block_count"], row["representation_count"], len(row["representations"])


@pytest.mark.long
def test_a_hit_brings_representations_and_nothing_is_built_again(
    start: Start, daemon: Daemon
) -> None:
    batch = prompts(4, LENGTHS)

    def ask() -> dict[str, Any]:
        return engine.ask("generate", prompts=batch, max_tokens=ANSWER)

    # An engine without sparse decode stores blocks as ever.
    engine = start(None)
    ask()
    settled(engine)
    num_blocks = kept(daemon)[0]
    assert num_blocks >= ALL_BLOCKS - 2 and kept(daemon)[1:] == (0, 0)

    # They come alone, their representations are built, and given to the server for whoever comes
    # next.
    engine = start(SMALL)
    first, counted = growth(engine, ask)
    assert first["cached"] == [672, 1088]
    assert (
        counted["sparse_built_blocks"] == SPARSE_LAYERS * ALL_BLOCKS
        and "sparse_loaded_blocks" not in counted
    )
    assert engine.ask("pool")["wrong"] == 0
    assert kept(daemon)[1] >= HIT_BLOCKS and kept(daemon)[2] == 1

    # They come along. Before, other tokens were in the same blocks.
    engine = start(SMALL)
    engine.ask("generate", prompts=prompts(5, (900, 1000)), max_tokens=ANSWER)
    engine.ask("reset")
    second, with_them = growth(engine, ask)
    assert (
        second["cached"] == first["cached"]
        and second["tokens"] == first["tokens"]
        and difference(second, first) < NOISE
    )
    assert with_them["sparse_loaded_blocks"] == SPARSE_LAYERS * HIT_BLOCKS
    assert with_them["sparse_built_blocks"] == SPARSE_LAYERS * (ALL_BLOCKS - HIT_BLOCKS)
    assert engine.ask("pool")["wrong"] == 0
    # The same without them: the same selections.
    engine.ask("reset")
    engine.ask("come_alone")
    third, alone = growth(engine, ask)
    assert (
        third["cached"] == first["cached"]
        and third["tokens"] == second["tokens"]
        and third["logprobs"] == second["logprobs"]
    )
    assert (
        alone.get("sparse_loaded_blocks", 0) == 0
        and alone["sparse_built_blocks"] == SPARSE_LAYERS * ALL_BLOCKS
    )
    assert [alone[name] for name in STEPS] == pytest.approx(
        [with_them[name] for name in STEPS], rel=1e-9
    )
    assert (
        "failed_loads" not in alone and "hook_errors" not in alone and "sparse_faults" not in alone
    )

    # Another version finds none and puts its own in their place.
    engine = start(SMALL | {"scorer": "quest"})
    other, counted = growth(engine, ask)
    assert other["cached"] == first["cached"]
    assert (
        counted.get("sparse_loaded_blocks", 0) == 0
        and counted["sparse_built_blocks"] == SPARSE_LAYERS * ALL_BLOCKS
    )
    assert engine.ask("pool")["wrong"] == 0
    assert kept(daemon)[2] == 2

    # So they are lost to the first one, which builds them again.
    engine = start(SMALL)
    last, counted = growth(engine, ask)
    assert last["tokens"] == first["tokens"] and difference(last, first) < NOISE
    assert (
        counted.get("sparse_loaded_blocks", 0) == 0
        and counted["sparse_built_blocks"] == SPARSE_LAYERS * ALL_BLOCKS
    )
    # In the same engine once more, whose prefix cache is emptied: now they are there.
    engine.ask("reset")
    again, counted = growth(engine, ask)
    assert again["cached"] == first["cached"]
    assert counted.get("sparse_loaded_blocks") == SPARSE_LAYERS * HIT_BLOCKS, counted


@pytest.mark.long
def test_blocks_that_another_connector_loads(start: Start) -> None:
    """Sparse decode within vLLM's MultiConnector: what the other one loads into blocks makes their
    representations void."""
    batch = prompts(7, LENGTHS)
    engine = start(SMALL, beside=True)
    cold = engine.ask("generate", prompts=batch, max_tokens=ANSWER)
    engine.ask("generate", prompts=prompts(8, (900, 1000)), max_tokens=ANSWER)
    settled(engine)
    engine.ask("reset")
    warm, counted = growth(engine, lambda: engine.ask("generate", prompts=batch, max_tokens=ANSWER))
    assert (
        warm["cached"] == [672, 1088]
        and warm["tokens"] == cold["tokens"]
        and difference(cold, warm) < NOISE
    )
    assert (
        counted["sparse_selects"] > 0
        and counted["sparse_built_blocks"] == SPARSE_LAYERS * ALL_BLOCKS
    )
    assert engine.ask("pool")["wrong"] == 0
    assert "sparse_faults" not in counted and "hook_errors" not in counted

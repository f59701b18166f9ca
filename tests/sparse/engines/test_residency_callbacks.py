"""Each function of residency raises in a real engine: tokens are right or the request ends with
an error."""

import random
import re

import pytest

from tests.sparse.engines.resident_runs import EXACT, EXACT_POOL, Start, prompts, references, start
from tests.sparse.engines.sparse_runs import References
from tests.vllm.processes import Daemon

__all__ = ["references", "start"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TOKENS = 6
"""The first answer begins another block."""
EVERY = 6
MODULES = [
    *(
        f"hotkv_sparse.vllm.{name}"
        for name in (
            "block_manager",
            "cpu.resident_pages",
            "cpu.resident_sequences",
            "cpu.resident_worker",
            "scheduler.calls",
            "scheduler.companion",
            "scheduler.moves",
            "scheduler.resident",
            "scheduler.resident_requests",
            "step",
            "worker.companion",
            "worker.resident_book",
        )
    ),
    "hotkv_vllm.scheduler.admission",
    "hotkv_vllm.scheduler.side",
    "hotkv_vllm.scheduler.step_planner",
]
CALLED_BY_VLLM = {"ResidentManager", "ResidentSpec", "_blocks", "num_shared"}
"""vLLM calls them without callbacks."""


FORMS = {"async-later": (True, True, 0), "sync-first": (False, False, 0), "moves": (True, True, 5)}
"""By name: asynchronous; at a later call than the first; steps between moves (0: none)."""


@pytest.mark.parametrize(
    ("is_async", "later", "moves", "first"),
    [
        pytest.param(
            *form,
            first,
            id=f"{name}-{first}",
            marks=pytest.mark.long if first == 2 * number else pytest.mark.campaign,
        )
        for number, (name, form) in enumerate(FORMS.items())
        for first in range(EVERY)
    ],
)
def test_whatever_breaks_no_token_is_wrong(
    start: Start,
    shared_daemon: Daemon,
    references: References,
    is_async: bool,
    later: bool,
    moves: int,
    first: int,
) -> None:
    """later: at the first call after some steps.
    moves: steps between moves; 0: requests begin in host memory.
    """
    one = start(
        EXACT | ({"residency": "auto"} if moves else {}),
        target=shared_daemon.target,
        num_gpu_blocks_override=2 * EXACT_POOL,
        async_scheduling=is_async,
        connector_settings={"residency_timeout_s": 10.0},
    )
    one.ask("wait", connected=True, timeout_s=60.0)
    one.ask("rewrite_always")
    if moves:
        one.ask("move", every=moves)
    (base, other) = prompts(21, 764, 640)
    batches = [[base, other], [[*base, *other[:80]]]]
    expected = [references.ask(prompts=batch, max_tokens=TOKENS) for batch in batches]
    known = one.ask("called", modules=MODULES, prompts=batches, max_tokens=TOKENS)
    names = [name for name in known["names"] if not CALLED_BY_VLLM & {*re.split("[:.]", name)}]
    assert len(names) > 60 and known["steps"] > 3 * TOKENS, known
    wrong, num_strikes, dice = [], 0, random.Random(0)
    for number, name in enumerate(names[first::EVERY]):
        found = one.ask(
            "break_once",
            name=name,
            after_steps=dice.randrange(known["steps"]) if later else 0,
            prompts=batches,
            max_tokens=TOKENS,
            salt=str(number),
        )
        num_strikes += found["strikes"]
        for answer, wanted in zip(found["answers"], expected, strict=True):
            for at, ended in enumerate(answer["ended"]):
                same = answer["tokens"][at] == wanted["tokens"][at]
                if not same and ended != "error":
                    wrong.append(f"{name}: request {at} says something else, and ended {ended}")
        again = one.ask("generate", prompts=[other], max_tokens=TOKENS, salt=f"{number}+")
        if again["tokens"][0] != expected[0]["tokens"][1]:
            wrong.append(f"{name}: a request afterwards is wrong, and ended {again['ended']}")
    assert not wrong, "\n".join(wrong)
    assert num_strikes > len(names) / (2 * EVERY)

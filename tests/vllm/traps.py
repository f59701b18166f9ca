"""A cache filled for vLLM's traps."""

from typing import Any

from tests.vllm.harness import prompt

PROMPT = prompt(1, 200)


def filled(engine: Any, **settings: Any) -> list[int]:
    """Stores PROMPT's blocks through an engine; returns its answer of 4 tokens."""
    answer, external = engine(**settings).generate("first", PROMPT, 4)
    assert external == 0
    return answer

"""Requests whose keys change."""

from typing import Any

import pytest
import torch

from tests.vllm.changing_weights import may_load, show_weights
from tests.vllm.harness import prompt


@pytest.fixture
def updated(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Engines whose model has `load_weights`; what it writes is in every KV value."""
    may_load(monkeypatch)

    def make(**settings: Any) -> Any:
        torch.manual_seed(0)
        one = engine(**settings)
        show_weights(one)
        return one

    return make


PROMPT, OTHER = prompt(1, 200), prompt(2, 40)

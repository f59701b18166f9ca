"""Engines whose weights, and so their keys, change."""

from typing import Any

import pytest
import torch

from tests.vllm.changing_weights import may_load, show_weights
from tests.vllm.harness import prompt


@pytest.fixture
def updated(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes engines whose model has `load_weights`; the loaded weights change every KV value."""
    may_load(monkeypatch)

    def make(**settings: Any) -> Any:
        torch.manual_seed(0)
        one = engine(**settings)
        show_weights(one)
        return one

    return make


PROMPT, OTHER = prompt(1, 200), prompt(2, 40)

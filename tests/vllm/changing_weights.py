"""Helpers that change the weights of running simulated engines (`harness.Engine`). With
`show_weights`, each KV value depends on the weights that computed it."""

from typing import Any

import numpy as np
import torch


def may_load(monkeypatch: Any) -> None:
    """Adds the method `load_weights`, which hotkv watches, to the model class of simulated
    engines."""
    monkeypatch.setattr(
        torch.nn.Linear, "load_weights", torch.nn.Module.load_state_dict, raising=False
    )


def load(engine: Any, seed: int, *, quietly: bool = False) -> None:
    """Loads other random weights into a running engine.

    seed: decides the weights.
    quietly: bypasses the model's `load_weights`, so that hotkv notices no call.
    """
    torch.manual_seed(seed)
    write = engine.model.load_state_dict if quietly else engine.model.load_weights
    write({name: torch.randn_like(value) for name, value in engine.model.state_dict().items()})


def weights_of(engine: Any) -> int:
    """Returns the number by which the engine's weights change each KV value."""
    return int(engine.model.weight.abs().sum() * 1000) & 0x7FF


def show_weights(engine: Any) -> None:
    """Makes the KV values that the engine writes depend on its weights from now on."""
    values_at = engine._values_at
    engine._values_at = lambda *which: values_at(*which) ^ np.int16(weights_of(engine))


class FakeWatch:
    """A fake of `WeightsWatch`, which notices changes of an engine's weights. Here the weights are
    a single number."""

    def __init__(self) -> None:
        self.weights = 0
        self.touched = False
        self.original = self.digest()

    def write(self, weights: int, *, quietly: bool = False) -> None:
        self.weights = weights
        self.touched = self.touched or not quietly

    def digest(self) -> str:
        self.touched = False
        return f"digest of {self.weights}"

    def forget_original(self) -> None:
        self.original, self.touched = "", True

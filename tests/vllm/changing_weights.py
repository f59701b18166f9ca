"""Changes weights of simulated engines."""

from typing import Any

import numpy as np
import torch


def may_load(monkeypatch: Any) -> None:
    """Gives the model the method that hotkv watches."""
    monkeypatch.setattr(
        torch.nn.Linear, "load_weights", torch.nn.Module.load_state_dict, raising=False
    )


def load(engine: Any, seed: int, *, quietly: bool = False) -> None:
    """quietly: bypasses `load_weights`."""
    torch.manual_seed(seed)
    write = engine.model.load_state_dict if quietly else engine.model.load_weights
    write({name: torch.randn_like(value) for name, value in engine.model.state_dict().items()})


def weights_of(engine: Any) -> int:
    """The number by which the weights change KV values."""
    return int(engine.model.weight.abs().sum() * 1000) & 0x7FF


def show_weights(engine: Any) -> None:
    values_at = engine._values_at
    engine._values_at = lambda *which: values_at(*which) ^ np.int16(weights_of(engine))


class FakeWatch:
    """Its weights are one number."""

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

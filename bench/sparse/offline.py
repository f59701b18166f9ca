"""The decode of `bench.sparse` with the settings of an engine, for comparison with that engine."""

from collections.abc import Sequence

import torch

from bench.sparse.calibration import Calibration, Own
from bench.sparse.decode import Decode, Outcome
from bench.sparse.engine import CALIBRATING, Setup
from bench.sparse.llama import Dense, Llama, dense_pass
from bench.sparse.variants import CENTRED, LRU, Variant
from hotkv_sparse.centre import LayerCentre
from hotkv_sparse.centre_file import read_centres


class Offline:
    """Calibrated, as an engine is, by the first text that it sees, or by the file of the settings.

    The engine sees all of that text, since it computes a prompt in one step; here its beginning
    counts."""

    def __init__(self, model: Llama) -> None:
        self._model = model
        self._first: Sequence[LayerCentre] | None = None

    def dense(self, tokens: Sequence[int], num_compared: int, setup: Setup) -> Dense:
        """The dense pass over a text."""
        dense = dense_pass(self._model, torch.tensor(tokens)[:-1], num_compared, setup.dense_layers)
        if self._first is None:
            self._first = Own.of(dense).moved_L
        return dense

    def decoded(
        self, dense: Dense, tokens: Sequence[int], setups: Sequence[Setup]
    ) -> list[Outcome]:
        """Sparse decode of a text's last tokens in each of the settings, which have the same dense
        layers and file."""
        assert self._first is not None
        centres: Sequence[LayerCentre | None] = self._first
        if file := setups[0].centres:
            layers, first_layer = read_centres(file).layers, dense.first_layer
            centres = [layers.get(first_layer + layer) for layer in range(len(dense.keys_LHSD))]
        variants = [
            Variant(
                f"{setup.scorer}{CENTRED}first"
                if setup.centres or setup.scorer == CALIBRATING
                else setup.scorer,
                setup.budget,
                setup.block_tokens,
                True,
                LRU,
                setup.corrections,
            )
            for setup in setups
        ]
        given = torch.tensor(tokens)
        return Decode(self._model, dense, given, Calibration({"first": centres}), variants).run()

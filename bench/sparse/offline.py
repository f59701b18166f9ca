"""The decode of `bench.sparse` with the settings of an engine, for comparison with that engine."""

from collections.abc import Sequence

import torch

from bench.sparse.calibration import Calibration
from bench.sparse.decode import Decode, Outcome
from bench.sparse.engine import Setup
from bench.sparse.llama import Llama, dense_pass
from bench.sparse.variants import CENTRED, LRU, Variant
from hotkv_sparse.centre_file import read_centres

DENSE_LAYERS = 2


def decoded(model: Llama, tokens: Sequence[int], num_compared: int, setup: Setup) -> Outcome:
    """Dense pass and sparse decode of a text's last tokens."""
    given = torch.tensor(tokens)
    dense = dense_pass(model, given[:-1], num_compared, DENSE_LAYERS)
    scorer, centres = setup.scorer, {}
    if setup.centres:
        file = read_centres(setup.centres)
        scorer = f"{scorer}{CENTRED}file"
        centres = {
            "file": [file.layers.get(DENSE_LAYERS + layer) for layer in range(len(dense.keys_LHSD))]
        }
    variant = Variant(scorer, setup.budget_ratio, setup.block_tokens, True, LRU, setup.corrections)
    return Decode(model, dense, given, Calibration(centres), [variant]).run()[0]

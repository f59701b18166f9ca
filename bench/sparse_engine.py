"""Compares sparse decode in real vLLM on CPU with the same decode without an engine (offline), in
the forward pass of `bench.sparse`. Both have the same text, window, budget (tokens to which a step
attends), scorer, and limit of blocks that a step may load.

Decodes the last 127 tokens of a text of 8192 tokens, teacher-forced. Compares the engine's KL(dense
|| sparse) per token in nats with the value that `bench.sparse` computes in float32. The engine
calibrates the scorer `mix2` from the first text. The engine's KL must be at most 1.5 times the
offline KL (`ratio`). With `--dense-layers 0` and a budget of 0.2, it must also be at most the KL
that is allowed for residency (contexts in host memory, all layers sparse).

Prints a row per text and scorer and, with `--json`, `{"model", "setup", "seconds", "rows",
"worst_ratio"}`.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from bench.report import at_most, bounds_json, parser, print_json, rows_table, say
from bench.sparse.engine import Engine, Setup
from bench.sparse.texts import Text, add_model, add_texts, encoder, texts
from tools.smollm2 import prepare

CONTEXT_TOKENS = 8192
COMPARED_TOKENS = 127
RATIO_BOUND = 1.5
RESIDENT_KL = {"prose": 0.010, "gpl3": 0.020}
"""Upper limits of the KL(dense || sparse), by text, for residency (contexts in host memory, all
layers sparse) with a budget of 20 %. For the copy text, whose end quotes itself, the rise of NLL
must be at most 0."""


@dataclass(frozen=True, slots=True)
class Row:
    """Results for a text and scorer, in nats per token, in the engine and without an engine
    (offline). Offline values are None if only the engine was run."""

    text: str
    scorer: str
    engine_kl: float
    engine_delta_nll: float
    offline_kl: float | None
    offline_delta_nll: float | None

    @property
    def ratio(self) -> float | None:
        """Returns the engine's KL divided by the offline KL."""
        return None if self.offline_kl is None else self.engine_kl / self.offline_kl


def mean_kl(dense_NW: torch.Tensor, other_NW: torch.Tensor) -> float:
    """Returns KL(dense || other) as the mean over tokens."""
    return float((dense_NW.exp() * (dense_NW - other_NW)).sum(dim=-1).mean())


def mean_loss(log_probs_NW: torch.Tensor, tokens: Sequence[int]) -> float:
    """Returns the mean NLL of the tokens."""
    return -float(log_probs_NW.gather(1, torch.tensor(tokens)[:, None]).mean())


def in_engine(engine: Engine, text: Text, setups: Sequence[Setup]) -> list[Row]:
    """Prefills a text in the engine, then decodes its last tokens with dense attention and with
    each of the settings. Returns a row of results for each of the settings."""
    begin, last = time.monotonic(), text.tokens[-COMPARED_TOKENS:]
    engine.calibrate(text.tokens[: -COMPARED_TOKENS - 1])
    engine.use(None)
    dense, rows = engine.run(text.tokens, COMPARED_TOKENS), []
    for setup in setups:
        engine.use(setup)
        sparse = engine.run(text.tokens, COMPARED_TOKENS)
        loss = mean_loss(sparse, last) - mean_loss(dense, last)
        rows.append(Row(text.name, setup.scorer, mean_kl(dense, sparse), loss, None, None))
    say(f"{text.name}: engine {time.monotonic() - begin:.0f} s")
    return rows


def rows_of(
    folder: Path, found: Sequence[Text], setups: Sequence[Setup], *, offline: bool
) -> list[Row]:
    """Measures all texts with all settings, first in the engine, then without an engine (offline).
    Returns the rows of results. The engine must come first, because numba must not be loaded before
    vLLM."""
    engine = Engine(folder, CONTEXT_TOKENS, setups[0])
    measured = [in_engine(engine, text, setups) for text in found]
    engine.close()
    if not offline:
        return [row for rows in measured for row in rows]
    from bench.sparse.decode import Offline
    from bench.sparse.llama import Llama

    beside, rows = Offline(Llama(folder)), []
    for text, inside in zip(found, measured, strict=True):
        begin = time.monotonic()
        dense = beside.dense(text.tokens, COMPARED_TOKENS, setups[0])
        outcomes = beside.decoded(dense, text.tokens, setups)
        say(f"{text.name}: offline {time.monotonic() - begin:.0f} s")
        rows += [
            replace(row, offline_kl=outside.kl, offline_delta_nll=outside.delta_nll)
            for row, outside in zip(inside, outcomes, strict=True)
        ]
    return rows


def missed(row: Row, setup: Setup) -> str:
    """Returns the targets that a row of results misses, as text; empty if it misses none."""
    found = []
    if row.ratio is not None and row.ratio > RATIO_BOUND:
        found.append(f"ratio > {RATIO_BOUND:g}")
    if not setup.dense_layers and setup.budget == 0.2:
        bound = RESIDENT_KL.get(row.text)
        if bound is not None and row.engine_kl > bound:
            found.append(f"KL > {bound:g}")
        if row.text == "repeat" and row.engine_delta_nll > 0:
            found.append("ΔNLL > 0")
    return ", ".join(found)


def budget(text: str) -> int | float:
    """Parses a budget of the command line: a whole number counts tokens, another number is a share
    of the context."""
    return int(text) if text.isdecimal() else float(text)


def options() -> argparse.Namespace:
    """Returns the options of the command line."""
    usual = Setup()
    flags = parser("Sparse decode in vLLM on CPU against the same decode offline.")
    add_model(flags)
    add_texts(flags)
    flags.add_argument(
        "--budget", type=budget, default=usual.budget, help="share of the context, or tokens"
    )
    flags.add_argument(
        "--corrections",
        type=int,
        default=usual.corrections,
        help="blocks that may join a hot set with the fresh query",
    )
    flags.add_argument("--scorers", nargs="+", default=["rot2u", "mix2"])
    flags.add_argument(
        "--dense-layers",
        type=int,
        default=usual.dense_layers,
        help="so many layers from the first on; residency has none",
    )
    flags.add_argument("--dtype", default=usual.dtype, help="of the engine, as vLLM's --dtype")
    flags.add_argument("--no-offline", action="store_true", help="the engine alone")
    return flags.parse_args()


def main() -> int:
    chosen, begin = options(), time.monotonic()
    folder = chosen.model or prepare()
    usual = Setup(
        budget=chosen.budget,
        corrections=chosen.corrections,
        dense_layers=chosen.dense_layers,
        dtype=chosen.dtype,
        centres=chosen.centres,
    )
    setups = [replace(usual, scorer=scorer) for scorer in chosen.scorers]
    encode = encoder(AutoTokenizer.from_pretrained(folder))

    try:
        found = texts(chosen.texts, encode, CONTEXT_TOKENS, COMPARED_TOKENS + 1)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    with torch.inference_mode():
        rows = rows_of(folder, found, setups, offline=not chosen.no_offline)
    ratios = [row.ratio for row in rows if row.ratio is not None]
    report: dict[str, Any] = {
        "model": folder.name,
        "setup": asdict(usual) | {"centres": str(usual.centres or ""), "scorer": chosen.scorers},
        "seconds": time.monotonic() - begin,
        "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
        "worst_ratio": max(ratios, default=None),
        **bounds_json({"worst_ratio": at_most(RATIO_BOUND)}),
    }
    rows_of_table = [
        {**one, "missed": missed(row, usual)} for one, row in zip(report["rows"], rows, strict=True)
    ]
    print(rows_table(rows_of_table))
    print_json(report, chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

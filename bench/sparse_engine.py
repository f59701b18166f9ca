"""Compares sparse decode in real vLLM on CPU with the same decode without an engine
(`bench.sparse`): same text, window, budget, scorer, and blocks that a step may load.

The last 127 of 8192 tokens, teacher-forced, in nats of KL(dense || sparse) per token; offline in
float32. The engine calibrates `mix2` from the first text. Its KL must be at most 1.5 times the
offline one (`ratio`) and, with `--dense-layers 0` and a budget of 0.2, at most residency's bound.

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
"""Bounds for residency at a budget of 20 %. On the copy text NLL must not rise."""


@dataclass(frozen=True, slots=True)
class Row:
    """Nats per token. Offline: None if only the engine was run."""

    text: str
    scorer: str
    engine_kl: float
    engine_delta_nll: float
    offline_kl: float | None
    offline_delta_nll: float | None

    @property
    def ratio(self) -> float | None:
        return None if self.offline_kl is None else self.engine_kl / self.offline_kl


def mean_kl(dense_NW: torch.Tensor, other_NW: torch.Tensor) -> float:
    """KL(dense || other)."""
    return float((dense_NW.exp() * (dense_NW - other_NW)).sum(dim=-1).mean())


def mean_loss(log_probs_NW: torch.Tensor, tokens: Sequence[int]) -> float:
    """Mean NLL."""
    return -float(log_probs_NW.gather(1, torch.tensor(tokens)[:, None]).mean())


def in_engine(engine: Engine, text: Text, setups: Sequence[Setup]) -> list[Row]:
    """Runs dense decode and each of the setups."""
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
    """The engine first: numba must not be loaded before vLLM."""
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
    """The targets that a row misses, as text."""
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
    """A whole number counts tokens, another is a share of the context."""
    return int(text) if text.isdecimal() else float(text)


def options() -> argparse.Namespace:
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

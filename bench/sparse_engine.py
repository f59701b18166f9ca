"""Sparse decode in real vLLM on CPU against the same decode offline: the same text, window, budget,
scorer and corrections.

A text of 8192 tokens, of which the last 127 are decoded teacher-forced. KL(dense || sparse) per
token in nats, if both sides are the engine's, in bfloat16, beside the same of `bench.sparse`'s
own forward pass in float32. Bound: `ratio` = engine / offline <= 1.5.

Prints a row per text and, with `--json`, `{"model", "setup", "seconds", "rows", "worst_ratio"}`.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer

from bench.report import parser, print_report
from bench.sparse.engine import Engine, Setup
from bench.sparse.texts import Text, texts
from tools.smollm2 import prepare

CONTEXT_TOKENS = 8192
COMPARED_TOKENS = 127
DENSE_LAYERS = 2
RATIO_BOUND = 1.5


@dataclass(frozen=True, slots=True)
class Row:
    """A text. Nats per token."""

    text: str
    engine_kl: float
    engine_delta_nll: float
    offline_kl: float
    offline_delta_nll: float

    @property
    def ratio(self) -> float:
        """Engine over offline."""
        return self.engine_kl / self.offline_kl


def mean_kl(dense_NW: torch.Tensor, other_NW: torch.Tensor) -> float:
    """KL(dense || other), mean over tokens."""
    return float((dense_NW.exp() * (dense_NW - other_NW)).sum(dim=-1).mean())


def mean_loss(log_probs_NW: torch.Tensor, tokens: Sequence[int]) -> float:
    """NLL of the tokens, mean."""
    return -float(log_probs_NW.gather(1, torch.tensor(tokens)[:, None]).mean())


@dataclass(frozen=True, slots=True)
class InEngine:
    """The engine's results for a text, nats per token."""

    kl: float
    delta_nll: float


def in_engine(engine: Engine, text: Text) -> InEngine:
    """Prefill, then dense and sparse decode of the same tokens."""
    begin, last = time.monotonic(), text.tokens[-COMPARED_TOKENS:]
    engine.prefill(text.tokens[: -COMPARED_TOKENS - 1])
    dense, sparse = (
        engine.run(text.tokens, COMPARED_TOKENS, sparse=sparse) for sparse in (False, True)
    )
    print(f"{text.name}: engine {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return InEngine(mean_kl(dense, sparse), mean_loss(sparse, last) - mean_loss(dense, last))


def rows_of(folder: Path, found: Sequence[Text], setup: Setup) -> list[Row]:
    """All texts, first in the engine, then offline: numba may not be loaded before vLLM."""
    engine = Engine(folder, CONTEXT_TOKENS, setup)
    measured = [in_engine(engine, text) for text in found]
    engine.close()
    from bench.sparse.llama import Llama
    from bench.sparse.offline import decoded

    model, rows = Llama(folder), []
    for text, inside in zip(found, measured, strict=True):
        begin = time.monotonic()
        outside = decoded(model, text.tokens, COMPARED_TOKENS, setup)
        print(f"{text.name}: offline {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        rows.append(Row(text.name, inside.kl, inside.delta_nll, outside.kl, outside.delta_nll))
    return rows


def options() -> argparse.Namespace:
    """The command line."""
    usual = Setup()
    flags = parser("Sparse decode in vLLM on CPU against the same decode offline.")
    flags.add_argument(
        "--model",
        type=Path,
        help="a Llama model folder (default: SmolLM2-135M-Instruct, prepared once)",
    )
    flags.add_argument(
        "--texts",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="long plain texts (default: what the system has)",
    )
    flags.add_argument(
        "--centres",
        type=Path,
        metavar="FILE",
        help="centres of this model (hotkv_vllm.sparse.calibrate)",
    )
    flags.add_argument(
        "--budget", type=float, default=usual.budget_ratio, help="share of the context"
    )
    flags.add_argument(
        "--corrections",
        type=int,
        default=usual.corrections,
        help="blocks that may join a hot set with the fresh query",
    )
    flags.add_argument("--scorer", default=usual.scorer)
    return flags.parse_args()


def main() -> int:
    """Command line."""
    chosen, begin = options(), time.monotonic()
    folder = chosen.model or prepare()
    setup = Setup(
        budget_ratio=chosen.budget,
        scorer=chosen.scorer,
        corrections=chosen.corrections,
        centres=chosen.centres,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, verbose=False)["input_ids"])

    try:
        found = texts(chosen.texts, encode, CONTEXT_TOKENS, COMPARED_TOKENS + 1)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    with torch.inference_mode():
        rows = rows_of(folder, found, setup)
    report = {
        "model": folder.name,
        "setup": asdict(setup) | {"centres": str(setup.centres or "")},
        "seconds": time.monotonic() - begin,
        "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
        "worst_ratio": max(row.ratio for row in rows),
    }
    cells = [
        (
            row.text,
            f"{row.engine_kl:.4f}",
            f"{row.engine_delta_nll:+.3f}",
            f"{row.offline_kl:.4f}",
            f"{row.offline_delta_nll:+.3f}",
            f"{row.ratio:.2f}" + (" missed" if row.ratio > RATIO_BOUND else ""),
        )
        for row in rows
    ]
    headers = (
        "text",
        "KL engine",
        "ΔNLL engine",
        "KL offline",
        "ΔNLL offline",
        f"ratio (<= {RATIO_BOUND})",
    )
    print_report(headers, cells, report, as_json=chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

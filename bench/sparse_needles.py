"""Measures whether sparse decode still finds a fact in a long text: a real model in real vLLM on
CPU, dense and with every scorer at several budgets, over the same prompts and KV.

Prompts of 3600 tokens hide one fact or four (`bench.sparse.needles`). Every token of the answer is
decoded, greedily; right is what begins with the number. All layers are sparse, as in residency,
unless `--dense-layers` says otherwise; `mix2` is calibrated from another text. Target: scorers of
`HELD_SCORERS` answer at most one prompt fewer than dense decode.

Prints a row per scorer and budget and, with `--json`, `{"model", "setup", "seconds", "rows",
"missed"}`.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import AutoTokenizer

from bench.report import at_most, bounds_json, parser, print_json, rows_table, say
from bench.sparse.engine import Engine, Setup
from bench.sparse.needles import TASKS, Prompt, haystack, prompts
from bench.sparse.texts import add_model, encoder
from bench.sparse_engine import budget
from tools.smollm2 import prepare

PROMPT_TOKENS = 3600
ANSWER_TOKENS = 12
"""Seven digits, each a token in many vocabularies, and what may precede them."""
HELD_SCORERS = ("rot2u", "mix2")
BUDGETS = (0.2, 512)
SCORERS = ("mix2", "rot3u", "rot2u", "quest", "mean")


@dataclass(frozen=True, slots=True)
class Row:
    """Right answers by task. setup: None: dense."""

    setup: Setup | None
    num_right: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.num_right.values())


def measure(
    engine: Engine, asked: Sequence[Prompt], setups: Sequence[Setup], tokenizer: AutoTokenizer
) -> list[Row]:
    """Each prompt is answered densely first."""
    rows = [Row(setup, dict.fromkeys(TASKS, 0)) for setup in (None, *setups)]
    for number, prompt in enumerate(asked, 1):
        begin = time.monotonic()
        engine.prefill(prompt.tokens[:-1])
        prefill_s = time.monotonic() - begin
        for row in rows:
            engine.use(row.setup)
            said = engine.answer(prompt.tokens, ANSWER_TOKENS)
            text = tokenizer.decode(said)
            row.num_right[prompt.task] += prompt.is_answered_by(text)
        say(
            f"prompt {number} of {len(asked)}: prefill {prefill_s:.0f} s of "
            f"{time.monotonic() - begin:.0f} s; right so far {[row.total for row in rows]}"
        )
    return rows


def missed(rows: Sequence[Row]) -> list[str]:
    """Scorers of HELD_SCORERS over one answer short of dense."""
    dense = next(row.total for row in rows if row.setup is None)
    return [
        f"{row.setup.scorer} at {row.setup.budget}"
        for row in rows
        if row.setup is not None and row.setup.scorer in HELD_SCORERS and row.total < dense - 1
    ]


def options() -> argparse.Namespace:
    flags = parser("Accuracy of sparse decode in vLLM on CPU at finding facts in a long text.")
    add_model(flags)
    flags.add_argument("--prompts", type=int, default=20, help="of each task")
    flags.add_argument("--tokens", type=int, default=PROMPT_TOKENS, help="of a prompt")
    flags.add_argument("--scorers", nargs="+", default=list(SCORERS))
    flags.add_argument(
        "--budgets",
        type=budget,
        nargs="+",
        default=list(BUDGETS),
        help="shares of the context, or tokens",
    )
    flags.add_argument("--dense-layers", type=int, default=0, help="so many, from the first on")
    flags.add_argument("--dtype", default="auto", help="of the engine, as vLLM's --dtype")
    flags.add_argument("--seed", type=int, default=0, help="of the prompts")
    return flags.parse_args()


def main() -> int:
    chosen, begin = options(), time.monotonic()
    folder = chosen.model or prepare()
    usual = Setup(
        dense_layers=chosen.dense_layers,
        dtype=chosen.dtype,
        min_tokens=1024,
    )
    setups = [
        replace(usual, scorer=scorer, budget=some)
        for some in chosen.budgets
        for scorer in chosen.scorers
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encode = encoder(tokenizer)

    try:
        asked = [
            prompt
            for task in TASKS
            for prompt in prompts(task, chosen.prompts, chosen.tokens, encode, chosen.seed)
        ]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    # No prompt contains the haystack's end.
    first = encode(haystack()[-8 * chosen.tokens :])[-chosen.tokens :]
    with torch.inference_mode():
        engine = Engine(folder, chosen.tokens + ANSWER_TOKENS + 8, usual)
        engine.calibrate(first)
        rows = measure(engine, asked, setups, tokenizer)
        engine.close()
    behind = missed(rows)
    report: dict[str, Any] = {
        "model": folder.name,
        "setup": asdict(usual) | {"centres": "", "prompts": len(asked), "tokens": chosen.tokens},
        "seconds": time.monotonic() - begin,
        "rows": [
            {
                "scorer": "dense" if row.setup is None else row.setup.scorer,
                "budget": None if row.setup is None else row.setup.budget,
                "right": row.num_right,
                "accuracy": row.total / len(asked),
            }
            for row in rows
        ],
        "missed": behind,
        "missed_count": len(behind),
        **bounds_json({"missed_count": at_most(0)}),
    }
    print(rows_table(report["rows"]))
    print(f"more than one prompt behind dense: {', '.join(behind) or 'none'}")
    print_json(report, chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

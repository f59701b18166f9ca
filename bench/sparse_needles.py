"""Measures whether sparse decode still finds what a long text hides: a real model in real vLLM on
CPU, dense and with every scorer at several budgets, over the same prompts and KV.

Prompts of 3600 tokens hide a number, besides up to 15 others (`bench.sparse.needles`); other tasks
ask for what is scattered over the text (`bench.sparse.scattered`). The right answer is decoded,
teacher-forced: a word of it counts as right if decode would have chosen all its tokens, so a model
that errs early still shows whether it finds the rest. All layers are sparse, as in residency,
unless `--dense-layers` says otherwise; `mix2` is calibrated from another text; `oracle` selects by
exact attention. Target: scorers of `HELD_SCORERS` are right in at most one prompt fewer than dense
decode, over the tasks `NEEDLES`.

Prints a row per task, scorer and budget and, with `--json`, `{"model", "setup", "seconds", "rows",
"missed"}`. A row has the share of right words, and their tokens' NLL and KL(dense || sparse), in
nats.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import AutoTokenizer

from bench.report import at_most, bounds_json, parser, print_json, rows_table, say
from bench.sparse import needles, scattered
from bench.sparse.engine import EXACT, Engine, Setup
from bench.sparse.needles import Encode, Prompt
from bench.sparse.texts import add_model, encoder
from bench.sparse_engine import budget, mean_kl, mean_loss
from tools.smollm2 import prepare

PROMPT_TOKENS = 3600
REPLY_TOKENS = 64
"""At most."""
HELD_SCORERS = ("rot2u", "mix2")
BUDGETS = (0.2, 512)
SCORERS = ("mix2", "rot3u", "rot2u", "quest", "mean", EXACT)
NEEDLES = ("single", "multikey")
TASKS: dict[str, Callable[[int, int, Encode, int], list[Prompt]]] = {
    **{task: partial(needles.prompts, task) for task in needles.TASKS},
    "variables": scattered.variables,
    "words": scattered.words,
}
Reply = tuple[list[int], list[slice]]
"""As `Prompt.forced` returns it."""


@dataclass(slots=True)
class Row:
    """Means over a task's prompts. setup: None: dense.

    right: share of right words.
    loss, kl: of the words' tokens.
    """

    task: str
    setup: Setup | None
    num_prompts: int = 0
    right: float = 0.0
    loss: float = 0.0
    kl: float = 0.0

    def add(self, log_probs_NW: torch.Tensor, dense_NW: torch.Tensor, reply: Reply) -> None:
        tokens, words = torch.tensor(reply[0]), reply[1]
        is_hit = log_probs_NW.argmax(dim=-1) == tokens
        asked = torch.cat([torch.arange(len(tokens))[word] for word in words])
        found = (
            sum(bool(is_hit[word].all()) for word in words) / len(words),
            mean_loss(log_probs_NW[asked], tokens[asked].tolist()),
            mean_kl(dense_NW[asked], log_probs_NW[asked]),
        )
        self.num_prompts += 1
        for name, one in zip(("right", "loss", "kl"), found, strict=True):
            before = getattr(self, name)
            setattr(self, name, before + (one - before) / self.num_prompts)


def measure(
    engine: Engine, asked: Sequence[Prompt], setups: Sequence[Setup], encode: Encode
) -> list[Row]:
    """Each prompt is answered densely first."""
    tasks = dict.fromkeys(prompt.task for prompt in asked)
    rows = [Row(task, setup) for task in tasks for setup in (None, *setups)]
    for number, prompt in enumerate(asked, 1):
        begin, reply = time.monotonic(), prompt.forced(encode)
        tokens = [*prompt.tokens, *reply[0]]
        engine.prefill(prompt.tokens[:-1])
        prefill_s = time.monotonic() - begin
        dense: torch.Tensor | None = None
        answering = [row for row in rows if row.task == prompt.task]
        for row in answering:
            engine.use(row.setup)
            found = engine.run(tokens, len(reply[0]))
            dense = found if dense is None else dense
            row.add(found, dense, reply)
        say(
            f"prompt {number} of {len(asked)}: prefill {prefill_s:.0f} s of "
            f"{time.monotonic() - begin:.0f} s; {prompt.task} right so far "
            f"{[round(row.right, 2) for row in answering]}"
        )
    return rows


def missed(rows: Sequence[Row]) -> list[str]:
    """Scorers of HELD_SCORERS over one answer short of dense."""
    num_right: dict[Setup | None, float] = defaultdict(float)
    for row in rows:
        num_right[row.setup] += row.right * row.num_prompts if row.task in NEEDLES else 0.0
    return [
        f"{setup.scorer} at {setup.budget}"
        for setup, count in num_right.items()
        # Sums of means are not exact.
        if setup is not None and setup.scorer in HELD_SCORERS and count < num_right[None] - 1 - 1e-6
    ]


def options() -> argparse.Namespace:
    flags = parser("Accuracy of sparse decode in vLLM on CPU at finding facts in a long text.")
    add_model(flags)
    flags.add_argument("--tasks", nargs="+", choices=TASKS, default=list(NEEDLES))
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
    encode = encoder(AutoTokenizer.from_pretrained(folder))

    try:
        asked = [
            prompt
            for task in chosen.tasks
            for prompt in TASKS[task](chosen.prompts, chosen.tokens, encode, chosen.seed)
        ]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    # No prompt contains the haystack's end.
    first = encode(needles.haystack()[-8 * chosen.tokens :])[-chosen.tokens :]
    with torch.inference_mode():
        engine = Engine(folder, chosen.tokens + REPLY_TOKENS, usual)
        engine.calibrate(first)
        rows = measure(engine, asked, setups, encode)
        engine.close()
    behind = missed(rows)
    report: dict[str, Any] = {
        "model": folder.name,
        "setup": asdict(usual) | {"centres": "", "prompts": len(asked), "tokens": chosen.tokens},
        "seconds": time.monotonic() - begin,
        "rows": [
            {
                "task": row.task,
                "scorer": "dense" if row.setup is None else row.setup.scorer,
                "budget": None if row.setup is None else row.setup.budget,
                "right": row.right,
                "loss": row.loss,
                "kl": row.kl,
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

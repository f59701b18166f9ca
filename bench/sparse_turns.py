"""Measures what an answer of sparse steps is worth to the next turn of a session, in real vLLM on
CPU: its KV kept as the steps made it (`kept`), or computed anew from its tokens (`anew`), as
hotkv does.

- KL(dense || sparse) of the 128 tokens that follow an answer of 128, teacher-forced.
- Facts that only the answer has (`bench.sparse.needles`): right answers to a question about them
  in the next turn.
- The cost of computing anew: processor time of the answer's prefill (after a hit of what is before
  it), over that of its decode.

`--dense-layers 0` is residency. Prints tables and, with `--json`, `{"model", "setup", "seconds",
"rows", "needles", "anew_over_decode"}`.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from transformers import AutoTokenizer

from bench.report import parser, print_json, rows_table, say
from bench.sparse.engine import Engine, Setup
from bench.sparse.needles import ANSWER, FACT, QUESTION, Encode, Prompt, prompts
from bench.sparse.texts import Text, add_model, add_texts, encoder, texts
from bench.sparse_engine import budget, mean_kl
from tools.smollm2 import prepare

CONTEXT_TOKENS = 8192
ANSWER_TOKENS = 128
NEXT_TOKENS = 128
FILLER_TOKENS = 60
SAID_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Row:
    """Nats per token."""

    text: str
    scorer: str
    budget: int | float
    kept_kl: float
    anew_kl: float


@dataclass(frozen=True, slots=True)
class Needles:
    """Right answers."""

    scorer: str
    budget: int | float
    asked: int
    dense: int
    kept: int
    anew: int


@dataclass(frozen=True, slots=True)
class Turns:
    """answer: has a fact that nothing before it has. question: asks for it."""

    context: tuple[int, ...]
    answer: tuple[int, ...]
    question: tuple[int, ...]
    number: str

    def is_answered_by(self, said: str) -> bool:
        return said.strip().startswith(self.number)


def turns_of(prompt: Prompt, filler: Sequence[int], encode: Encode, dice: random.Random) -> Turns:
    number = str(dice.randrange(10**6, 10**7))
    note = encode("\n" + FACT.format(name="purple lantern", number=number) + "\n")
    half = len(filler) // 2
    answer = [*encode(f"{prompt.reply[1]}.\n"), *filler[:half], *note, *filler[half:]]
    asked = QUESTION + ANSWER
    question = encode(asked.format(name="purple lantern"))
    return Turns(prompt.tokens, tuple(answer), tuple(question), number)


def measure_kl(engine: Engine, text: Text, setups: Sequence[Setup]) -> list[Row]:
    engine.calibrate(text.tokens[: -ANSWER_TOKENS - NEXT_TOKENS - 1])
    engine.use(None)
    dense, rows = engine.run(text.tokens, NEXT_TOKENS), []
    for setup in setups:
        engine.use(setup)
        kept = engine.run(text.tokens, ANSWER_TOKENS + NEXT_TOKENS)[ANSWER_TOKENS:]
        engine.prefill(text.tokens[: -NEXT_TOKENS - 1])
        anew = engine.run(text.tokens, NEXT_TOKENS)
        found = mean_kl(dense, kept), mean_kl(dense, anew)
        rows.append(Row(text.name, setup.scorer, setup.budget, *found))
    return rows


def measure_needles(
    engine: Engine, asked: Sequence[Turns], setup: Setup, tokenizer: AutoTokenizer
) -> Needles:
    right = {"dense": 0, "kept": 0, "anew": 0}
    for one in asked:
        before = [*one.context, *one.answer]
        for name in right:
            engine.use(None if name == "dense" else setup)
            exact = len(one.context) if name == "kept" else len(before)
            engine.prefill(before[:exact])
            tokens = [*before, *one.question]
            said = engine.answer(tokens, SAID_TOKENS, num_prompt=exact)
            right[name] += one.is_answered_by(tokenizer.decode(said))
        say(f"{setup.scorer} at {setup.budget}: right so far {right}")
    return Needles(setup.scorer, setup.budget, len(asked), **right)


def cost(engine: Engine, tokens: Sequence[int], setup: Setup, rounds: int = 3) -> float:
    """Medians of processor time: an answer's prefill over its decode."""
    engine.use(setup)
    ratios = []
    for number in range(rounds):
        # Another answer each time: the last one is in vLLM's own prefix cache.
        answer = [(token + number) % 1000 + 10 for token in tokens[-ANSWER_TOKENS:]]
        context = tokens[:-ANSWER_TOKENS]
        engine.prefill(context)
        begin_s = time.process_time()
        engine.run([*context, *answer], ANSWER_TOKENS - 1)
        decode_s = time.process_time() - begin_s
        begin_s = time.process_time()
        engine.prefill([*context, *answer])
        ratios.append((time.process_time() - begin_s) / decode_s)
    return sorted(ratios)[rounds // 2]


def options() -> argparse.Namespace:
    flags = parser("What an answer of sparse steps is worth to the next turn.")
    add_model(flags)
    add_texts(flags)
    flags.add_argument("--scorers", nargs="+", default=["mix2", "rot2u"])
    flags.add_argument("--budgets", type=budget, nargs="+", default=[0.2, 512])
    flags.add_argument("--dense-layers", type=int, default=0)
    flags.add_argument("--no-kl", action="store_true", help="needles and cost alone")
    flags.add_argument("--prompts", type=int, default=20, help="of the needle task")
    flags.add_argument("--tokens", type=int, default=3600, help="of a needle prompt")
    return flags.parse_args()


def main() -> int:
    chosen, begin_s = options(), time.monotonic()
    folder: Path = chosen.model or prepare()
    usual = Setup(dense_layers=chosen.dense_layers, min_tokens=1024, centres=chosen.centres)
    setups = [
        replace(usual, scorer=scorer, budget=some)
        for scorer in chosen.scorers
        for some in chosen.budgets
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encode = encoder(tokenizer)
    try:
        found = texts(chosen.texts, encode, CONTEXT_TOKENS, NEXT_TOKENS + 1)
        hidden = prompts("single", chosen.prompts, chosen.tokens, encode)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    dice = random.Random("turns")
    filler = found[-1].tokens
    asked = [
        turns_of(one, filler[at * FILLER_TOKENS :][:FILLER_TOKENS], encode, dice)
        for at, one in enumerate(hidden)
    ]
    engine = Engine(folder, CONTEXT_TOKENS, usual)
    rows: list[Row] = []
    for text in found if not chosen.no_kl else ():
        rows += measure_kl(engine, text, setups) if not text.copy else []
    if chosen.no_kl:
        engine.calibrate(found[0].tokens[: CONTEXT_TOKENS // 2])
    else:
        print(rows_table([asdict(row) for row in rows]))
    needles = [measure_needles(engine, asked, setup, tokenizer) for setup in setups]
    print(rows_table([asdict(one) for one in needles]))
    ratio = cost(engine, found[0].tokens[: CONTEXT_TOKENS // 2], setups[0])
    print(f"prefill of an answer over its decode: {ratio:.3f}")
    engine.close()
    report = {
        "model": folder.name,
        "setup": asdict(usual) | {"centres": str(usual.centres or "")},
        "seconds": time.monotonic() - begin_s,
        "rows": [asdict(row) for row in rows],
        "needles": [asdict(one) for one in needles],
        "anew_over_decode": ratio,
    }
    print_json(report, chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures requests while the server becomes slow: SmolLM2 on vLLM's CPU build; an engine with
hotkv and one without answer the same prompt in turns, each with an empty prefix cache of its own.

The server runs normally (`well`); then each copy takes `--times` times as long, each lookup and
lease 50 ms more (`slow`); then normally again. Where prefill is slow, a hit may win even at 200
times; a larger number shows what happens when it does not.

Prints a table; `--json` prints a JSON object last:

- `slow_over_plain`: seconds of all requests while the server is slow, but the first `FEW`, divided
  by those without hotkv.
- `slow_worst`: seconds of the slowest of these, divided by the median without hotkv.
- `well_over_plain`: median seconds of a request while the server runs normally, divided by the
  median without hotkv.
- `found_slow_after`: requests until a hit is first computed instead of loaded.
  `found_well_after`: until one is loaded again.
"""

import contextlib
import sys
import tempfile
from pathlib import Path

from bench.report import at_most, median, parser, print_figures
from bench.servers import MIB, serving
from demo import prompts
from demo.processes import Answer, ChildError, Engine, EngineSettings, prepare_model
from tests.doubles import faults

BOUNDS = {"slow_over_plain": at_most(1.05)}
TIMES, WAIT_S = 200.0, 0.05
PROMPT_TOKENS, ANSWER_TOKENS = 600, 2
FEW = 3
ARENA_BYTES = 512 * MIB
Pair = tuple[Answer, Answer]


def measure(model: Path, num_well: int, num_slow: int, times: float) -> dict[str, list[Pair]]:
    """Pairs of answers, with and without hotkv, by phase. times: by which copies take longer."""
    with contextlib.ExitStack() as stack:
        below = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotkv-bench-")))
        slow = below / "slow"
        command = faults.command("slow-down", slow, times, WAIT_S)
        server = stack.enter_context(serving(ARENA_BYTES, command=command))
        ours, plain = (
            stack.enter_context(Engine(name, EngineSettings(str(model), target), below))
            for name, target in (("hotkv", server.target), ("plain", ""))
        )
        for engine in (ours, plain):
            engine.wait_ready()
            for seed in (1, 2, 3):
                engine.generate(prompts.token_ids(model, seed, PROMPT_TOKENS), ANSWER_TOKENS)
        prompt = prompts.token_ids(model, 4, PROMPT_TOKENS)
        ours.generate(prompt, ANSWER_TOKENS)
        server.wait_for_stores()

        def pair() -> Pair:
            answers = []
            for engine in (ours, plain):
                engine.reset_prefix_cache()
                answers.append(engine.generate(prompt, ANSWER_TOKENS))
            return answers[0], answers[1]

        phases = {"well": [pair() for _ in range(num_well)]}
        slow.touch()
        phases["slow"] = [pair() for _ in range(num_slow)]
        slow.unlink()
        phases["well again"] = [pair() for _ in range(num_slow)]
        return phases


def first(pairs: list[Pair], *, hits: bool) -> int:
    """Requests before the first that hits or, with `hits=False`, misses."""
    return next(
        (at for at, (one, _) in enumerate(pairs) if bool(one.hit_tokens) == hits), len(pairs)
    )


def main() -> int:
    flags = parser("Requests beside a server that becomes slow.")
    flags.add_argument("--well", type=int, default=8, help="requests while the server is well")
    flags.add_argument("--slow", type=int, default=25, help="requests while it is slow")
    flags.add_argument("--times", type=float, default=TIMES, help="how much slower copies become")
    options = flags.parse_args()
    try:
        phases = measure(prepare_model(), options.well, options.slow, options.times)
    except ChildError as error:
        print(error, file=sys.stderr)
        return 1
    late = phases["slow"][FEW:]
    figures: dict[str, object] = {
        "slow_over_plain": sum(one.total_s for one, _ in late)
        / sum(other.total_s for _, other in late),
        "slow_worst": max(one.total_s for one, _ in late)
        / median([other.total_s for _, other in late]),
        "well_over_plain": median([one.total_s for one, _ in phases["well"]])
        / median([other.total_s for _, other in phases["well"]]),
        "found_slow_after": first(phases["slow"], hits=False),
        "found_well_after": first(phases["well again"], hits=True),
    }
    for name, pairs in phases.items():
        print(name, " ".join(f"{a.total_s:.2f}/{b.total_s:.2f}" for a, b in pairs))
    print_figures(figures, BOUNDS, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

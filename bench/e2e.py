"""Measures whole requests: SmolLM2 on vLLM's CPU build, prompts of 4k tokens (fewer on a slow
processor, by `demo.machine`), three engines in turns.

Every prompt is new, the order alternates, medians count. The cases:

- `miss`: with the connector, new prompts.
- `plain`: without it, as many new prompts.
- `warm`: a second engine with the connector, on the prompt that `miss` has just stored.
- `apc`: `plain` again on its last prompt: a hit in vLLM's own prefix cache.

Prints a table; `--json` prints a JSON object last:

- `warm_over_cold`: time to first token of `warm`, divided by that of `miss`.
- `warm_over_apc`: of `warm`, divided by that of `apc`.
- `hook_share`: time in the connector's callbacks, divided by that of engine steps, in `miss`.
- `miss_overhead`: a whole request's time in `miss`, divided by its neighbour's in `plain`;
  median.
"""

import contextlib
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.report import at_most, median, parser, print_figures
from bench.servers import GIB, serving
from demo import prompts
from demo.machine import warm_up
from demo.processes import Answer, ChildError, Engine, EngineSettings, prepare_model

BOUNDS = {
    "warm_over_cold": at_most(0.1),
    "warm_over_apc": at_most(1.15),
    "hook_share": at_most(0.01),
    "miss_overhead": at_most(1.05),
}
MOST_PROMPT_TOKENS = 4050
ANSWER_TOKENS = 32
ARENA_BYTES = 2 * GIB
WARM_UPS = 2
FIRST_SEED = 1000
SETTLE_S = 0.6


@dataclass(frozen=True, slots=True)
class Round:
    miss: Answer
    plain: Answer
    warm: Answer
    apc: Answer


CALLBACKS = re.compile(
    r"hotkv ([\w-]+): ([\d.]+) s in callbacks over \d+ steps(?: of ([\d.]+) s)?, longest"
)


def hook_share(path: Path) -> float:
    """Of scheduler and worker together. `path`: log of an engine that has ended."""
    found = CALLBACKS.findall(path.read_text())
    sides = {side: (float(own_s), float(steps_s or 0)) for side, own_s, steps_s in found}
    if len(sides) < 2:
        raise RuntimeError(f"{path.name} has figures of {sorted(sides)} only")
    return sum(own_s for own_s, _ in sides.values()) / max(steps_s for _, steps_s in sides.values())


def alone(engine: Engine, tokens: list[int]) -> Answer:
    """Waits first: the previous engine's OpenMP threads spin a while."""
    time.sleep(SETTLE_S)
    return engine.generate(tokens, ANSWER_TOKENS)


def measure(model: Path, num_rounds: int) -> tuple[list[Round], float]:
    """The rounds, and `hook_share` of `miss`."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(ARENA_BYTES))
        folder = server.log.parent
        miss = stack.enter_context(
            Engine("miss", EngineSettings(str(model), server.target), folder)
        )
        plain = stack.enter_context(Engine("plain", EngineSettings(str(model)), folder))
        warm = stack.enter_context(
            Engine("warm", EngineSettings(str(model), server.target), folder)
        )
        seed = FIRST_SEED
        miss.wait_ready()
        num_tokens = warm_up(miss, model, 1, MOST_PROMPT_TOKENS)
        for engine in (miss, plain, warm):
            engine.wait_ready()
            for _ in range(WARM_UPS):
                seed += 1
                engine.generate(prompts.token_ids(model, seed, num_tokens), ANSWER_TOKENS)

        rounds = []
        for number in range(num_rounds):
            prompt, other = (
                prompts.token_ids(model, seed + offset, num_tokens) for offset in (1, 2)
            )
            seed += 2
            turns = [(miss, prompt), (plain, other)]
            answers = {
                engine: alone(engine, tokens)
                for engine, tokens in (turns if number % 2 else turns[::-1])
            }
            server.wait_for_stores()
            again = [(warm, prompt), (plain, other)]
            answers_again = {
                engine: alone(engine, tokens)
                for engine, tokens in (again if number % 2 else again[::-1])
            }
            rounds.append(
                Round(answers[miss], answers[plain], answers_again[warm], answers_again[plain])
            )
            last = rounds[-1]
            if (
                last.miss.hit_tokens
                or last.plain.hit_tokens
                or not (last.warm.hit_tokens and last.apc.hit_tokens)
            ):
                said = "\n".join(
                    line
                    for line in warm.log.read_text().splitlines()
                    if "KV Transfer metrics" in line or " hotkv " in line
                )
                raise ChildError(
                    f"round {number + 1} hits are not as meant; the warm engine said:\n{said}"
                )
            print(
                f"round {number + 1}: TTFT {last.miss.ttft_s:.2f} s cold, {last.warm.ttft_s:.3f} "
                f"s warm ({last.warm.hit_tokens} hit), "
                f"{last.apc.ttft_s:.3f} s from vLLM's own cache ({last.apc.hit_tokens}); "
                f"whole request {last.miss.total_s:.2f} s, without connector "
                f"{last.plain.total_s:.2f} s",
                flush=True,
            )
        miss.close()
        return rounds, hook_share(miss.log)


def main() -> int:
    flags = parser("vLLM with hotkv against vLLM without, end to end.")
    flags.add_argument("--rounds", type=int, default=7)
    options = flags.parse_args()
    try:
        rounds, share = measure(prepare_model(), options.rounds)
    except ChildError as error:
        print(error, file=sys.stderr)
        return 1
    warm_s = median([one.warm.ttft_s for one in rounds])
    figures = {
        "warm_over_cold": warm_s / median([one.miss.ttft_s for one in rounds]),
        "warm_over_apc": warm_s / median([one.apc.ttft_s for one in rounds]),
        "hook_share": share,
        "miss_overhead": median([one.miss.total_s / one.plain.total_s for one in rounds]),
    }
    print_figures(figures, BOUNDS, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

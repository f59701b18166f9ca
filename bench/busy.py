"""Measures hits in a busy engine: SmolLM2 on vLLM's CPU build, a prompt that the server has, while
another request decodes.

Prints a table; `--json` prints a JSON object last:

- `busy_steps`: tokens that the other request gets from the prompt's arrival to its first token;
  median.
- `busy_over_apc`: seconds to the first token, divided by those of a hit in vLLM's own prefix
  cache.
"""

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.report import median, parser, print_figures
from bench.servers import GIB, serving
from demo import prompts
from demo.machine import warm_up
from demo.processes import ChildError, Engine, EngineSettings, prepare_model

MOST_PROMPT_TOKENS, OTHER_TOKENS = 2000, 40


@dataclass(frozen=True, slots=True)
class Hit:
    """Seconds, and steps of the other request, to the first token."""

    ttft_s: float
    steps: int
    hit_tokens: int


def measure(
    model: Path, num_rounds: int, environments: Mapping[str, dict[str, str]]
) -> dict[str, list[tuple[Hit, Hit]]]:
    """An engine for each environment, in turns. Per engine and round: a hit in the server, and
    one in vLLM's own cache."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(GIB))
        engines = {
            name: stack.enter_context(
                Engine(
                    name,
                    EngineSettings(str(model), server.target, environment=environment),
                    server.log.parent,
                )
            )
            for name, environment in environments.items()
        }
        for number, engine in enumerate(engines.values()):
            engine.wait_ready()
            num_tokens = warm_up(engine, model, 10 + 2 * number, MOST_PROMPT_TOKENS)
        prompt = prompts.token_ids(model, 9, num_tokens)
        engine.generate(prompt, 2)
        server.wait_for_stores()

        def hit(engine: Engine, seed: int) -> Hit:
            other = prompts.token_ids(model, seed, OTHER_TOKENS)
            found = Hit(**engine.ask({"op": "busy", "token_ids": prompt, "other": other}))
            if not found.hit_tokens:
                raise ChildError("the prompt does not hit")
            return found

        rounds: dict[str, list[tuple[Hit, Hit]]] = {name: [] for name in engines}
        for number in range(num_rounds):
            for name, engine in engines.items():
                engine.reset_prefix_cache()
                rounds[name].append((hit(engine, 100 + number), hit(engine, 500 + number)))
        return rounds


def main() -> int:
    flags = parser("Hits in a busy engine.")
    flags.add_argument("--rounds", type=int, default=20)
    options = flags.parse_args()
    try:
        rounds = measure(prepare_model(), options.rounds, {"hotkv": {}})["hotkv"]
    except ChildError as error:
        print(error, file=sys.stderr)
        return 1
    figures = {
        "busy_steps": median([ours.steps for ours, _ in rounds]),
        "busy_over_apc": median([ours.ttft_s / own.ttft_s for ours, own in rounds]),
    }
    print_figures(figures, {}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

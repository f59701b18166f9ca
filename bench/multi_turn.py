"""Measures conversations of several turns with each available cache: SmolLM2 on vLLM's CPU build,
in the shape of vLLM's `benchmarks/multi_turn`.

In `large`, the conversations' KV is `LARGER` times the device's cache, and clients cycle through
them: when one continues, others have filled the device. In `fits`, the device holds all. The
variants take turns, with new conversations in each round:

- `none`: no cache. `vllm`: vLLM's prefix cache. `offload`: vLLM's CPU offloading.
- `roomy`, in `large`: vLLM's prefix cache on a device that holds all. No cache outside can be
  faster.
- `hotkv`. `lmcache`: LMCache's server, in `large`, with `--lmcache PYTHON`, an interpreter with
  vLLM and LMCache 0.5.6.

Prints a table; `--json` prints a JSON object last:

- By case and variant: `..._turns_per_s` (median of rounds), `..._ttft_p50_s`, `..._ttft_p90_s`,
  `..._hit_share` (of prompt tokens).
- `large_hotkv_over_vllm`, `large_roomy_over_vllm`, `large_hotkv_over_roomy`,
  `large_hotkv_over_lmcache` and `fits_hotkv_over_vllm`: ratios of turns per second, median over
  rounds.
- `left_out`: variants that do not run here, and why.
"""

import contextlib
import json
import re
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.load.conversations import UPSTREAM, Shape, as_json, conversations
from bench.load.lmcache_server import LMCacheServer
from bench.report import at_least, bounds_json, parser, percentile, print_report
from bench.servers import GIB, serving
from demo.engine_process import kv_transfer_config
from demo.processes import (
    VLLM_SETTINGS,
    Child,
    ChildError,
    Engine,
    Server,
    prepare_model,
)

BOUNDS = {
    "large_hotkv_over_vllm": at_least(1.5),
    "large_hotkv_over_roomy": at_least(0.95),
    "fits_hotkv_over_vllm": at_least(0.99),
}
LARGER = 3
KV_TOKEN_BYTES = 30 * 2 * 3 * 64 * 2
"""SmolLM2: keys and values, 30 layers, 3 heads of 64, bfloat16."""
BLOCK_TOKENS = 32
MAX_TOKENS = 4096
UPSTREAM_MAX_TOKENS, UPSTREAM_DEVICE_TOKENS = 6144, 7_000
CLIENTS = 2
WARM_UP_TOKENS = 1500
ARENA_GIB = 4
CHAT_ENGINE = Path(__file__).parent / "load" / "chat_engine.py"


class ChatEngine(Engine):
    """Runs `bench.load.chat_engine` by the interpreter `python`."""

    def __init__(self, name: str, arguments: dict[str, Any], folder: Path, python: str) -> None:
        self.name, self.vllm_version = name, ""
        command = [python, str(CHAT_ENGINE), json.dumps(arguments)]
        self._child = Child(name, command, folder / f"{name}.log", VLLM_SETTINGS, pipes=True)


@dataclass(frozen=True, slots=True)
class Case:
    """num_tokens: of all conversations.
    device_tokens: that the device's cache holds.
    max_tokens: of a conversation.
    """

    name: str
    num_tokens: int
    device_tokens: int
    variants: tuple[str, ...]
    shape: Shape
    max_tokens: int

    def arguments(
        self, model: Path, variant: str, server: Server, lmcache: LMCacheServer | None
    ) -> dict[str, Any]:
        """Arguments of `vllm.LLM`."""
        own: dict[str, dict[str, Any]] = {
            "none": {"enable_prefix_caching": False},
            "offload": {"kv_offloading_size": float(ARENA_GIB)},
            "hotkv": {
                "kv_transfer_config": kv_transfer_config(
                    {"target": server.target, "extra_config": {}}
                )
            },
        }
        if lmcache is not None:
            own["lmcache"] = {"kv_transfer_config": lmcache.transfer_config()}
        device_tokens = 2 * self.num_tokens if variant == "roomy" else self.device_tokens
        return {
            "model": str(model),
            "max_model_len": self.max_tokens,
            "enforce_eager": True,
            "disable_log_stats": False,
            "seed": 0,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": (device_tokens + BLOCK_TOKENS) * KV_TOKEN_BYTES,
            **own.get(variant, {}),
        }


@dataclass(slots=True)
class Results:
    """turns_per_s: of each round.
    first_s: to the first token, of each turn.
    prompt_tokens, hit_tokens: of all prompts.
    """

    turns_per_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    hit_tokens: int = 0

    def add(self, reply: dict[str, Any]) -> None:
        self.turns_per_s.append(len(reply["turns"]) / reply["seconds"])
        for first_s, prompt_tokens, hit_tokens, _ in reply["turns"]:
            self.first_s.append(first_s)
            self.prompt_tokens += prompt_tokens
            self.hit_tokens += hit_tokens


def measure(
    case: Case, model: Path, server: Server, num_rounds: int, python: str, left_out: dict[str, str]
) -> dict[str, Results]:
    """A variant that does not start goes to `left_out`. Raises ChildError if `vllm` or `hotkv`
    does not. python: has LMCache; empty: without it."""
    with contextlib.ExitStack() as stack:
        below = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotkv-bench-")))
        lmcache = stack.enter_context(LMCacheServer(python, below, ARENA_GIB)) if python else None
        if lmcache is not None:
            try:
                lmcache.wait_ready()
            except ChildError:
                left_out["lmcache"], lmcache = first_error(lmcache.log), None
        begun, engines = {}, {}
        for variant in (*case.variants, *(["lmcache"] if lmcache else [])):
            engine = ChatEngine(
                variant,
                case.arguments(model, variant, server, lmcache),
                below,
                python if variant == "lmcache" else sys.executable,
            )
            begun[variant] = stack.enter_context(engine)
        for variant, engine in begun.items():
            try:
                engine.wait_ready()
            except ChildError:
                if variant in ("vllm", "hotkv"):
                    raise
                left_out[variant] = first_error(engine.log)
                engine.close()
                continue
            engines[variant] = engine
        found = {variant: Results() for variant in engines}
        for engine in engines.values():
            hold(engine, case, "warm-up", WARM_UP_TOKENS)
        for number in range(num_rounds):
            order = list(engines)[:: -1 if number % 2 else 1]
            for variant in order:
                reply = hold(engines[variant], case, str(number), case.num_tokens)
                found[variant].add(reply)
        return found


def first_error(log: Path) -> str:
    """vLLM logs the cause first, and then its consequences."""
    found = re.search(r"\w*Error: .*", log.read_text(errors="replace"))
    return found[0] if found else "it ended"


def hold(engine: Engine, case: Case, name: str, num_tokens: int) -> dict[str, Any]:
    """Rounds need different names, as the server holds the KV of earlier ones; equal names give
    equal conversations."""
    some = conversations(f"{case.name} {name}", num_tokens, case.shape)
    return engine.ask({"conversations": as_json(some), "clients": CLIENTS})


def main() -> int:
    flags = parser("Conversations of several turns, with each cache that there is.")
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--device-tokens", type=int, help="that the device holds")
    flags.add_argument("--upstream", action="store_true", help="the shape of vLLM's own generator")
    flags.add_argument("--only", choices=("large", "fits"), help="one case")
    flags.add_argument("--lmcache", default="", metavar="PYTHON", help="that has LMCache and vLLM")
    options = flags.parse_args()
    shape, max_tokens, device = Shape(), MAX_TOKENS, 5_000
    if options.upstream:
        shape, max_tokens, device = UPSTREAM, UPSTREAM_MAX_TOKENS, UPSTREAM_DEVICE_TOKENS
    device = options.device_tokens or device
    large = ("none", "vllm", "offload", "hotkv", "roomy")
    cases = [
        Case("large", LARGER * device, device, large, shape, max_tokens),
        Case("fits", device, 2 * device, ("vllm", "hotkv"), shape, max_tokens),
    ]
    figures: dict[str, Any] = {"left_out": {}}
    rows = []
    try:
        with contextlib.ExitStack() as stack:
            model, server = prepare_model(), stack.enter_context(serving(ARENA_GIB * GIB))
            for case in cases:
                if options.only not in (None, case.name):
                    continue
                python = options.lmcache if case.name == "large" else ""
                found = measure(case, model, server, options.rounds, python, figures["left_out"])
                rows += [row(case.name, variant, one, figures) for variant, one in found.items()]
                for one, other in (
                    ("hotkv", "vllm"),
                    ("roomy", "vllm"),
                    ("hotkv", "roomy"),
                    ("hotkv", "lmcache"),
                ):
                    if one in found and other in found:
                        figures[f"{case.name}_{one}_over_{other}"] = ratio(found[one], found[other])
    except ChildError as error:
        print(error, file=sys.stderr)
        return 1
    for name, bound in BOUNDS.items():
        if name in figures:
            missed = "" if bound.is_met(figures[name]) else "missed"
            rows.append((name, f"{figures[name]:.3f}", str(bound), "", missed))
    figures |= bounds_json({name: bound for name, bound in BOUNDS.items() if name in figures})
    if "large_roomy_over_vllm" in figures:
        rows.append(
            ("large_roomy_over_vllm", f"{figures['large_roomy_over_vllm']:.3f}", "the most", "", "")
        )
    headers = ("", "turns/s", "first token p50 s", "p90 s", "hit")
    print_report(headers, rows, figures, as_json=options.json)
    for variant, why in figures["left_out"].items():
        print(f"{variant} does not run here: {why}", file=sys.stderr)
    return 0


def ratio(one: Results, other: Results) -> float:
    """Median of the rounds' ratios."""
    rounds = zip(one.turns_per_s, other.turns_per_s, strict=True)
    return statistics.median(ours / theirs for ours, theirs in rounds)


def row(case: str, variant: str, one: Results, figures: dict[str, Any]) -> tuple[str, ...]:
    """Also adds the row's values to `figures`."""
    values = {
        "turns_per_s": statistics.median(one.turns_per_s),
        "ttft_p50_s": percentile(one.first_s, 0.5),
        "ttft_p90_s": percentile(one.first_s, 0.9),
        "hit_share": one.hit_tokens / one.prompt_tokens,
    }
    figures.update({f"{case}_{variant}_{name}": value for name, value in values.items()})
    return (f"{case}: {variant}", *(f"{value:.3f}" for value in values.values()))


if __name__ == "__main__":
    sys.exit(main())

"""Compares vLLM engines that differ in their KV cache alone: the same prompts in turns, with new
prompts (zero hits) and with hits.

`python -m bench.gpu.rivals [--json] [--engines NAME...] [--lengths LENGTH...] [--graphs GRAPHS]`,
with a GPU and vLLM. `--cpu` runs it with a tiny model and a sixteenth of each length, without a
GPU. The model has the sizes of Llama-3.1-8B and random weights. The engines, each as its users run
it:

- `none`: no cache but vLLM's own on the device.
- `native`: vLLM's `OffloadingConnector`.
- `own`: `HotKVConnector`, which loads every hit.
- `second`: `HotKVOffloadingConnector`.
- `pegaflow`: PegaFlow's server and connector.
- `resident`: `own` with residency: KV in host memory, a step attends to at most SPARSE_TOKENS.
- `locks`: LOCKS, which attends to as many tokens of KV on the device.
- `sleeping`: `own` in an engine with `enable_sleep_mode`.

Engines share the device in groups: `none`, `native` and `own`; then the others one by one, each in
turns with `own`. What `second` has stored hits in a second such engine, as vLLM's own tier would
answer in the first. An engine that does not start is left out, with the reason. Graphs: `eager`;
`decode`, CUDA graphs of decode steps; `compiled`, vLLM's default.

Per length and engine: seconds to the first token of a new prompt and of a hit, tokens hit,
milliseconds per token of a new prompt, share of the hit's tokens before the first that differs
from the computed one, the same for the computed one and that of `none`.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu import random_weights
from bench.gpu.facts import facts, told
from bench.gpu.figures import Figure, print_figures
from bench.gpu.resident_engine import equal_share, graphs, step_s
from bench.load.pegaflow_server import PegaFlowServer, is_installed
from bench.offloading import CPU, Place, on_gpu
from bench.report import median, parser, say
from bench.servers import GIB, serving
from demo.processes import Answer, ChildError, Engine, EngineSettings, Server
from demo.random_llama import Shape, write_config
from hotkv_client.command.tables import table

LLAMA_8B = Shape(32, 4096, 14_336, 32, 8, 128, 128_256, "bfloat16")
LENGTHS = {"4k": 4000, "32k": 32_000, "100k": 100_000, "128k": 128_000, "256k": 256_000}
CPU_SHARE = 16
ROUNDS = {"4k": 3, "32k": 2}
"""1 for longer prompts."""
ANSWER_TOKENS = 64
TOGETHER = ("none", "native", "own")
ALONE = ("second", "pegaflow", "resident", "locks", "sleeping")
READER = "second-reader"
THROUGH_SERVER = ("own", "second", "resident")
SPARSE_TOKENS = 4096
LOCKS_PAGE_TOKENS = 16
SETTLE_S = 0.3
"""For stores of connectors that do not say when they end."""
GPU = Place(
    LLAMA_8B,
    settle_s=0.05,
    arena_bytes=28 * GIB,
    engine_args={"gpu_memory_utilization": 0.1},
    device="cuda",
)
GRAPHS: Mapping[str, Mapping[str, Any]] = {
    "eager": {"enforce_eager": True},
    "decode": graphs(1),
    "compiled": {"enforce_eager": False},
}
FIRST_TARGET, TOKEN_TARGET, HIT_TARGET = 1.01, 1.01, 1.1
"""Of `own`: first token and time per token over those of `none`, a hit's first token over that of
`native`."""


# -------------------------------------------------------------------------------------- The engines


@dataclass(frozen=True, slots=True)
class Setup:
    """What all engines share.

    max_tokens: of a request.
    engine_args: of `vllm.LLM`.
    offload_tokens: whose KV vLLM's offloading holds; 0: a prompt and a quarter, as a load needs
        room for the whole prompt, and /dev/shm holds two of them beside the arena.
    """

    place: Place
    max_tokens: int
    folder: Path
    target: str
    engine_args: Mapping[str, Any]
    offload_tokens: int = 0

    @property
    def prompt_bytes(self) -> int:
        """Of the longest prompt's KV."""
        return self.max_tokens * self.place.shape.kv_token_bytes

    @property
    def offload_bytes(self) -> int:
        tokens = self.offload_tokens or self.max_tokens * 5 // 4
        return tokens * self.place.shape.kv_token_bytes


@dataclass(frozen=True, slots=True)
class Kind:
    """How an engine differs. plugins: vLLM's, by name."""

    transfer: Mapping[str, Any] | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    plugins: str = ""


def connector(name: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def own(setup: Setup, more: Mapping[str, Any] | None = None) -> Kind:
    extra = {
        "hotkv.target": setup.target,
        "hotkv.weights_identity": random_weights.NAME,
        "hotkv.load": "always",
        **(more or {}),
    }
    return Kind(connector("HotKVConnector", **extra), plugins="hotkv")


def native_extra(setup: Setup) -> dict[str, Any]:
    on_cpu = setup.place.offloading if setup.place.device == "cpu" else {}
    return {"cpu_bytes_to_use": setup.offload_bytes, **on_cpu}


def second(setup: Setup) -> Kind:
    extra = {
        "hotkv.target": setup.target,
        "hotkv.weights_identity": random_weights.NAME,
        **native_extra(setup),
    }
    return Kind(connector("HotKVOffloadingConnector", **extra), plugins="hotkv")


def resident(setup: Setup) -> Kind:
    sparse = {
        "residency": "host", "sparse_topk": SPARSE_TOKENS, "min_context_tokens": 512,
        "dense_layers": [],
    }  # fmt: skip
    extra: dict[str, Any] = {"hotkv.sparse": sparse, "hotkv.lookup_timeout_s": 10.0}
    arguments: dict[str, Any] = {
        "max_num_seqs": 1,
        "max_num_batched_tokens": SPARSE_TOKENS,
        "kv_cache_memory_bytes": 4 * SPARSE_TOKENS * setup.place.shape.kv_token_bytes,
    }
    if setup.place.device == "cuda":
        extra |= {"hotkv.allow_sparse_cuda": True, "hotkv.sketch_tokens": setup.max_tokens + 1024}
        arguments["attention_backend"] = "FLASH_ATTN"
    return replace(own(setup, extra), engine_args=arguments)


def locks(setup: Setup) -> Kind:
    """Selected pages, and one page each of sinks and of the recent window."""
    budget = SPARSE_TOKENS // LOCKS_PAGE_TOKENS - 2
    config = f'{{"variant": "fast", "budget_pages": {budget}, "sink_pages": 1, "window_pages": 1}}'
    arguments = {"block_size": LOCKS_PAGE_TOKENS, "attention_backend": "FLASH_ATTN"}
    return Kind(None, arguments, {"LOCKS_CONFIG": config}, "locks")


KINDS: Mapping[str, Callable[[Setup], Kind]] = {
    "none": lambda setup: Kind(),
    "native": lambda setup: Kind(connector("OffloadingConnector", **native_extra(setup))),
    "own": own,
    "second": second,
    READER: second,
    "resident": resident,
    "locks": locks,
    "sleeping": lambda setup: replace(own(setup), engine_args={"enable_sleep_mode": True}),
}
"""Without `pegaflow`, which has a server of its own."""


def arguments_of(setup: Setup, kind: Kind) -> tuple[dict[str, Any], dict[str, str]]:
    """Arguments of `vllm.LLM`, and the environment."""
    arguments: dict[str, Any] = {
        "model": str(setup.folder / "model"),
        "load_format": random_weights.NAME,
        "skip_tokenizer_init": True,
        "dtype": setup.place.shape.dtype,
        "max_model_len": setup.max_tokens,
        "kv_cache_memory_bytes": setup.prompt_bytes + 1024 * setup.place.shape.kv_token_bytes,
        "max_num_batched_tokens": 8192,
        **setup.engine_args,
        **kind.engine_args,
    }
    if kind.transfer:
        arguments["kv_transfer_config"] = kind.transfer
    environment = random_weights.plugged_in(setup.folder, kind.plugins)
    return arguments, {**environment, **kind.environment}


@contextlib.contextmanager
def engine_of(name: str, setup: Setup) -> Iterator[Engine]:
    """Not yet ready."""
    with contextlib.ExitStack() as stack:
        if name == "pegaflow":
            server = PegaFlowServer(setup.folder, setup.offload_bytes)
            stack.enter_context(server).wait_ready()
            kind = Kind(server.transfer_config(), plugins="pegaflow")
        else:
            kind = KINDS[name](setup)
        arguments, environment = arguments_of(setup, kind)
        settings = EngineSettings(
            arguments.pop("model"), engine_args=arguments, environment=environment
        )
        yield stack.enter_context(Engine(name, settings, setup.folder))


# ---------------------------------------------------------------------------------- The measurement


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt: computed, and hit after the device's own cache was emptied."""

    computed: Answer
    hit: Answer


@dataclass(slots=True)
class Found:
    """turns: by length and engine. beside: `own` again, in turns with a rival; by the rival.
    left_out: why, by engine. server: `facts`."""

    turns: dict[str, dict[str, list[Turn]]] = field(default_factory=dict)
    beside: dict[str, dict[str, list[Turn]]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """lengths: prompts' tokens, by name. until_s: no further prompt begins."""

    lengths: Mapping[str, int]
    answer_tokens: int
    until_s: float


def take_turns(
    engines: Sequence[Engine], reader: Engine | None, setup: Setup, plan: Plan, server: Server
) -> dict[str, dict[str, list[Turn]]]:
    """By length and engine. The engines' order rotates. reader: hits in place of the last."""
    found: dict[str, dict[str, list[Turn]]] = {}
    shared, seed = {engines[-1].name: reader}, " ".join(one.name for one in engines)
    for one in filter(None, (*engines, reader)):
        one.generate(setup.place.prompt(f"warm {seed}", 600), 8)
    for length, num_tokens in plan.lengths.items():
        for number in range(ROUNDS.get(length, 1)):
            if time.monotonic() > plan.until_s:
                say(f"{length}, round {number + 1}: no time left")
                return found
            prompt = setup.place.prompt(f"{number} {seed}", num_tokens)
            order = [*engines[number % len(engines) :], *engines[: number % len(engines)]]

            def ask(one: Engine, prompt: list[int] = prompt) -> Answer:
                time.sleep(setup.place.settle_s)
                return one.generate(prompt, plan.answer_tokens)

            computed = {one.name: ask(one) for one in order}
            if any(one.name in THROUGH_SERVER for one in order):
                server.wait_for_stores()
            time.sleep(SETTLE_S)
            for one in order:
                one.reset_prefix_cache()
            for one in order:
                # `none` computes again: what rounding alone changes.
                turn = Turn(computed[one.name], ask(shared.get(one.name) or one))
                found.setdefault(length, {}).setdefault(one.name, []).append(turn)
                say(
                    f"{length}, round {number + 1}, {one.name}: first token "
                    f"{turn.computed.ttft_s:.3f} s, hit {turn.hit.ttft_s:.4f} s "
                    f"({turn.hit.hit_tokens} tokens), {1e3 * step_s(turn.computed):.2f} ms a token"
                )
    return found


def begun(name: str, setup: Setup, found: Found, stack: contextlib.ExitStack) -> list[Engine]:
    """Empty if `left_out`."""
    if setup.place.device == "cpu" and name in ("pegaflow", "locks"):
        found.left_out[name] = "needs a GPU"
    elif name == "pegaflow" and not is_installed():
        found.left_out[name] = "is not installed"
    else:
        try:
            return [stack.enter_context(engine_of(name, setup))]
        except ChildError as error:
            found.left_out[name] = last_line(error)
    return []


def ready(engines: Sequence[Engine], found: Found) -> list[Engine]:
    """Those that start; the others are `left_out`."""
    those = []
    for one in engines:
        try:
            one.wait_ready()
            those.append(one)
        except ChildError as error:
            say(str(error))
            found.left_out[one.name] = last_line(error)
    return those


def last_line(error: ChildError) -> str:
    return str(error).strip().splitlines()[-1].strip(" |")


def measure(
    names: Sequence[str], setup: Setup, plan: Plan, server: Server, told: Callable[[Found], None]
) -> None:
    """`told`: called after each group, because a time limit may end the next."""
    found = Found()
    with contextlib.ExitStack() as whole:
        kept: list[Engine] = []
        with contextlib.ExitStack() as group:
            engines = []
            for name in TOGETHER:
                if name in names:
                    stack = whole if name == "own" else group
                    engines += begun(name, setup, found, stack)
            engines = ready(engines, found)
            kept = [one for one in engines if one.name == "own"]
            if engines:
                found.turns = take_turns(engines, None, setup, plan, server)
            found.server = facts(server)
            told(found)
            close(one for one in engines if one not in kept)
        for name in ALONE:
            if name not in names:
                continue
            if time.monotonic() > plan.until_s:
                found.left_out[name] = "no time left"
                continue
            with contextlib.ExitStack() as group:
                both = [name, READER] if name == "second" else [name]
                rivals = [one for each in both for one in begun(each, setup, found, group)]
                rivals = ready(rivals, found)
                if len(rivals) == len(both):
                    reader = rivals[1] if name == "second" else None
                    turns = take_turns([*kept, rivals[0]], reader, setup, plan, server)
                    for length, by_name in turns.items():
                        found.turns.setdefault(length, {})[name] = by_name[name]
                        if kept:
                            found.beside.setdefault(length, {})[name] = by_name["own"]
                found.server = facts(server)
                told(found)
                close(rivals)


def close(engines: Iterable[Engine]) -> None:
    """At the same time: each may take seconds."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(Engine.close, engines))


# --------------------------------------------------------------------------------------- The report

HEADERS = (
    "prompt", "engine", "first token s", "hit s", "hit tokens", "ms a token", "hit equal",
    "equal to none",
)  # fmt: skip


def row(length: str, name: str, turns: list[Turn], none: list[Turn]) -> tuple[object, ...]:
    equal = min(equal_share(turn.hit, turn.computed) for turn in turns)
    # Prompts are the same in one group of engines alone.
    pairs = list(zip(turns, none, strict=True)) if name in TOGETHER and none else []
    as_none = min((equal_share(one.computed, other.computed) for one, other in pairs), default=None)
    return (
        length,
        name,
        f"{first_s(turns):.3f}",
        "" if name in ("none", "locks") else f"{hit_s(turns):.4f}",
        min(turn.hit.hit_tokens for turn in turns),
        f"{token_ms(turns):.2f}",
        f"{equal:.2f}",
        "" if as_none is None else f"{as_none:.2f}",
    )


def first_s(turns: list[Turn]) -> float:
    return median([turn.computed.ttft_s for turn in turns])


def hit_s(turns: list[Turn]) -> float:
    return median([turn.hit.ttft_s for turn in turns])


def token_ms(turns: list[Turn]) -> float:
    return 1e3 * median([step_s(turn.computed) for turn in turns])


def figures_of(found: Found) -> list[Figure]:
    figures = []
    for length, by_name in found.turns.items():
        mine, none, native = (by_name.get(name) for name in ("own", "none", "native"))
        for name, turns in by_name.items():
            figures += [
                Figure(f"{length}: {name}, first token s", first_s(turns)),
                Figure(f"{length}: {name}, ms a token", token_ms(turns)),
            ]
            if name not in ("none", "locks"):
                figures.append(Figure(f"{length}: {name}, first token of a hit s", hit_s(turns)))
        if mine and none:
            first, token = first_s(mine) / first_s(none), token_ms(mine) / token_ms(none)
            figures += [
                Figure(f"{length}: first token, own / none", first, FIRST_TARGET, True),
                Figure(f"{length}: time a token, own / none", token, TOKEN_TARGET, True),
            ]
        if mine and native:
            ratio = hit_s(mine) / hit_s(native)
            figures.append(Figure(f"{length}: hit, own / native", ratio, HIT_TARGET, True))
        for rival, turns in found.beside.get(length, {}).items():
            ratio = hit_s(turns) / hit_s(by_name[rival])
            if rival != "locks":
                figures.append(Figure(f"{length}: hit, own / {rival}", ratio))
            ratio = token_ms(by_name[rival]) / token_ms(turns)
            figures.append(Figure(f"{length}: time a token, {rival} / own", ratio))
    return figures


def report(more: dict[str, object], as_json: bool, found: Found) -> None:
    rows = [
        row(length, name, turns, by_name.get("none", []))
        for length, by_name in found.turns.items()
        for name, turns in by_name.items()
    ]
    print(table(HEADERS, rows))
    for name, why in found.left_out.items():
        print(f"{name}: left out: {why}")
    if found.server:
        print(told(found.server))
    details = {"left_out": found.left_out, "server": found.server, **more}
    print_figures(figures_of(found), details, as_json=as_json)


def options_of(title: str) -> argparse.ArgumentParser:
    """Options that the comparisons of engines share."""
    flags = parser(title)
    flags.add_argument(
        "--engines", nargs="+", choices=(*TOGETHER, *ALONE), default=[*TOGETHER, "second"]
    )
    flags.add_argument("--graphs", choices=GRAPHS, default="decode")
    flags.add_argument("--seconds", type=float, default=3600, help="begin no more after so long")
    flags.add_argument("--cpu", action="store_true", help="on a CPU, with a tiny model")
    return flags


def setup_of(options: argparse.Namespace, max_tokens: int, server: Server) -> Setup:
    """Writes the model's configuration."""
    place = CPU if options.cpu else GPU
    folder = server.log.parent
    write_config(folder / "model", max_tokens, place.shape)
    # Blocks of 32 tokens on a CPU: vLLM's are longer than these prompts.
    more = {"block_size": 32, **GRAPHS["eager"]} if options.cpu else GRAPHS[options.graphs]
    return Setup(place, max_tokens, folder, server.target, {**place.engine_args, **more})


def serving_for(options: argparse.Namespace) -> contextlib.AbstractContextManager[Server]:
    return serving(CPU.arena_bytes) if options.cpu else on_gpu(GPU)


def main() -> int:
    begin_s = time.monotonic()
    flags = options_of("vLLM engines that differ in their KV cache alone.")
    flags.add_argument("--lengths", nargs="+", choices=LENGTHS, default=["4k", "32k", "100k"])
    options = flags.parse_args()
    share = CPU_SHARE if options.cpu else 1
    lengths = {name: LENGTHS[name] // share for name in options.lengths}
    answer_tokens = ANSWER_TOKENS // (4 if options.cpu else 1)
    plan = Plan(lengths, answer_tokens, begin_s + options.seconds)
    with serving_for(options) as server:
        setup = setup_of(options, max(lengths.values()) + answer_tokens + 608, server)
        more: dict[str, object] = {"graphs": options.graphs, "cpu": options.cpu}
        measure(options.engines, setup, plan, server, partial(report, more, options.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares contexts beyond device memory with contexts wholly on the device, in real vLLM on CPU
with a real server: the same requests, weights and settings, in turns.

SmolLM2 (bfloat16) and a random Llama of 4 layers (float32), blocks of 32 tokens, one thread each. A
step attends to up to `sparse_topk` tokens in every layer, with the scorer `rot2u`. The pool is the
device's memory for blocks. Times are processor times of engine and server together; `_wall`: wall
times.

`--json` prints an object last:

- Over all compared requests: `tokens_equal` (share of requests), `max_logprob_diff`, `preemptions`,
  `lost` (computed again, as their KV in host memory was lost). `context_over_pool`: the largest
  context with equal tokens, in pools.
- `concurrency_gain`, `throughput_gain`: requests that decode at once, and throughput, over those of
  dense vLLM with as many bytes for its pool; 16k tokens, prompts that the server has.
  `throughput_gain_decode`: decode steps alone; `throughput_gain_cold`: computed prompts.
- `step_over_resident`: a decode step beyond the pool, over that of sparse decode on the device.
  `step_over_dense_32k`: over that of dense decode, at 32k tokens.
- `prefill_overhead`: of a prefill, over a dense one on the device, at four times the pool.
- Of a hit of 32k tokens: `hit_bytes_share`: loaded bytes, of its KV. `hit_representations_share`:
  bytes of a block's sketches, of its KV. `hit_staged_share`: pages copied to a buffer on the
  device, for the rest of the prompt to attend to.
- `hit_first_token_share`: time to a hit's first token, over that of computing.
  `hit_over_connector`: over that of the same hit in a dense engine with hotkv and room for it.
- `representations_overhead`: building sketches, over the prefill. `..._hit`: share of a hit's
  sketches that were built again.
- `auto_over_host`, `auto_over_dense`: throughput of mixed traffic if contexts move to host memory
  only when the pool runs short (`auto`), over that with all of them there (`host`), and over dense
  vLLM (`dense`). `_wall`: by wall time; `_cold`, `_warm`: new, and repeated, prompts only.
  `auto_over_dense_roomy`: in a pool that holds all contexts.
- `memory`, and the rows behind all figures.

`--long` adds 131,072 tokens in a pool of 6,144, some ten minutes. `--quick` has small sizes,
whose figures mean little.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.report import (
    at_least,
    at_most,
    bounds_json,
    median,
    parser,
    print_json,
    rows_table,
    say,
)
from bench.resident_cases import (
    BLOCK_TOKENS,
    PROCESSOR,
    WALL,
    Exact,
    Held,
    Mixed,
    Round,
    Shape,
    Together,
    exactness,
    llama,
    memory,
    mixed,
    sketch_bytes,
    smollm,
    times,
    together,
)
from demo.processes import ChildError, ends_cleanly, runtime_folder
from hotkv_client.command.tables import table

ARENA = "1GiB"
LONG_ARENA = "512MiB"
BATCH_ARENA, BATCH_ARENA_BYTES = "1GiB", 1 << 30
"""Holds the batch's contexts, which stay pinned: at most the share `residency.share` of an
arena."""
CASES = ("smollm2", "llama", "exact", "memory", "together", "mixed", "long")


TARGETS = {
    "tokens_equal": at_least(1.0),
    "max_logprob_diff": at_most(0.0),
    "preemptions": at_most(0.0),
    "lost": at_most(0.0),
    "context_over_pool": at_least(20.0),
    "concurrency_gain": at_least(5.0),
    "throughput_gain": at_least(3.0),
    "step_over_resident": at_most(1.10),
    "step_over_dense_32k": at_most(0.40),
    "prefill_overhead": at_most(1.10),
    "hit_bytes_share": at_most(0.05),
    "hit_representations_share": at_most(0.08),
    "hit_first_token_share": at_most(0.10),
    "hit_over_connector": at_most(1.2),
    "representations_overhead": at_most(0.03),
    "representations_overhead_hit": at_most(0.0),
    "auto_over_host": at_least(1.0),
    "auto_over_dense": at_least(1.3),
    "auto_over_dense_roomy": at_least(0.99),
}


@dataclass(slots=True)
class Found:
    """exact: answers against engines with everything on the device.
    rounds: by model and context.
    held: most memory of a request.
    together: batches in a small pool.
    mixed, roomy: mixed traffic, in a small pool and in one that holds all contexts.
    """

    exact: list[Exact]
    rounds: dict[str, tuple[Shape, list[Round]]]
    held: list[Held]
    together: list[Together]
    mixed: list[Mixed]
    roomy: list[Mixed]


@dataclass(frozen=True, slots=True)
class Sizes:
    """In tokens; `…pool` are small pools.

    smollm, llama, short: contexts of the cases `smollm2`, `llama` and `exact`.
    llama_chunk: of a prefill step.
    batch, num_batch, answer: contexts, requests and answers of `together`.
    steps, rounds: decode steps of a round, and rounds.
    mixed, mixed_answer: contexts and answers of `mixed`.
    held: contexts of `memory`.
    """

    smollm: int = 6144
    smollm_pool: int = 1536
    llama: int = 32768
    llama_pool: int = 8192
    llama_chunk: int = 1024
    short: int = 8192
    short_pool: int = 1536
    batch: int = 16384
    num_batch: int = 9
    answer: int = 256
    steps: int = 64
    rounds: int = 3
    mixed: tuple[int, ...] = (12288, 2048, 768, 6144, 1024, 3072, 768, 8192, 1536, 4096, 1024, 2048)
    mixed_pool: int = 16384
    mixed_answer: int = 128
    held: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)


QUICK = Sizes(
    smollm=3072,
    smollm_pool=1536,
    llama=4096,
    llama_pool=2048,
    llama_chunk=256,
    short=4096,
    batch=4096,
    num_batch=4,
    answer=32,
    steps=32,
    rounds=1,
    mixed=(2048, 768, 1536, 1024),
    mixed_pool=3072,
    mixed_answer=32,
    held=(1024, 4096),
)
LONG_TOKENS, LONG_POOL = 131072, 6144


def run(sizes: Sizes, chosen: Sequence[str], folder: Path) -> Found:
    found = Found([], {}, [], [], [], [])

    def timed(shape: Shape, context: int, rounds: int) -> None:
        name = f"{shape.model.name} {context}"
        outcome = times(shape, context, rounds, sizes.steps, folder / name.replace(" ", "-"), ARENA)
        found.rounds[name] = shape, outcome[0]
        found.exact += outcome[1]
        found.held += outcome[2]

    def slowest_model() -> None:
        shape = Shape(smollm(), sizes.smollm + 64, 256, 512, sizes.smollm_pool)
        timed(shape, sizes.smollm, sizes.rounds)

    tiny = llama(folder, 2 * LONG_TOKENS)

    def long_context() -> None:
        timed(
            Shape(tiny, sizes.llama + 64, sizes.llama_chunk, 512, sizes.llama_pool),
            sizes.llama,
            sizes.rounds,
        )

    def exact() -> None:
        shape = Shape(tiny, sizes.llama + 64, 128, 512, sizes.short_pool)
        alone = [("one", [sizes.short - 40]), ("one long", [sizes.llama - 40])]
        found.exact.extend(exactness(shape, alone, 40, folder / "alone", ARENA))
        half = sizes.short // 2
        pair = [("two mixed, asynchronous", [sizes.short - 40, sizes.short - half // 2 - 40])]
        found.exact.extend(
            exactness(
                replace(shape, max_seqs=2, pool_tokens=2 * sizes.short_pool),
                [*pair, ("one long, asynchronous", [sizes.llama - 40])],
                40,
                folder / "own-core",
                ARENA,
                async_scheduling=True,
                in_process=False,
            )
        )

    def lengths() -> None:
        shape = Shape(tiny, max(sizes.held) + 64, 256, 512, sizes.llama_pool)
        found.held.extend(memory(shape, sizes.held, folder / "memory", ARENA))

    def batch() -> None:
        shape = Shape(tiny, sizes.batch, 128, 512, sizes.batch + BLOCK_TOKENS, sizes.num_batch)
        found.together.extend(
            together(
                shape, sizes.batch, sizes.num_batch, sizes.answer, folder / "batch", BATCH_ARENA
            )
        )

    def mixture() -> None:
        for rows, pool, ways in (
            (found.mixed, sizes.mixed_pool, ("dense", "host", "auto")),
            (found.roomy, sum(sizes.mixed) + 1024, ("dense", "auto")),
        ):
            shape = Shape(tiny, max(sizes.mixed), 256, 512, pool + BLOCK_TOKENS, len(sizes.mixed))
            rows += mixed(
                shape,
                sizes.mixed,
                sizes.mixed_answer,
                sizes.rounds,
                folder / "mixed",
                BATCH_ARENA,
                ways,
            )

    def longest() -> None:
        shape = Shape(tiny, LONG_TOKENS + 64, 1024, 512, LONG_POOL)
        cases = [("long", [LONG_TOKENS - 16])]
        found.exact.extend(exactness(shape, cases, 16, folder / "long", LONG_ARENA))

    work: dict[str, Callable[[], None]] = dict(
        zip(
            CASES,
            (slowest_model, long_context, exact, lengths, batch, mixture, longest),
            strict=True,
        )
    )
    for name in chosen:
        say(f"== {name}")
        work[name]()
    return found


def ratios(rounds: Sequence[Round], over: str, under: str, clock: int) -> float:
    """Median over rounds of `over` / `under`. clock: WALL or PROCESSOR."""
    return median([getattr(one, over)[clock] / getattr(one, under)[clock] for one in rounds])


def middle(rounds: Sequence[Round], name: str) -> float:
    """Median of a field's processor times."""
    return median([getattr(one, name)[PROCESSOR] for one in rounds])


def figures(found: Found) -> dict[str, float]:
    """Named as in the module's docstring."""
    named: dict[str, float] = {}
    if found.exact:
        named["tokens_equal"] = min(one.tokens_equal for one in found.exact)
        named["max_logprob_diff"] = max(one.max_logprob_diff for one in found.exact)
        named["preemptions"] = sum(one.preemptions for one in found.exact)
        named["lost"] = sum(one.lost for one in found.exact)
        equal = [one.context_over_pool for one in found.exact if one.tokens_equal == 1.0]
        named["context_over_pool"] = max(equal, default=0.0)
    named |= {
        f"{name}{suffix}": value
        for model, (shape, rounds) in found.rounds.items()
        for name, value in of_rounds(shape, rounds).items()
        for suffix in suffixes(model, name, list(found.rounds))
    }
    if found.together:
        dense, resident = found.together
        named["concurrency_gain"] = resident.most_decoding / dense.most_decoding
        named["throughput_gain"] = dense.cpu_s / resident.cpu_s
        named["throughput_gain_decode"] = resident.decode_rate / dense.decode_rate
        named["throughput_gain_wall"] = dense.warm_s / resident.warm_s
        named["throughput_gain_cold"] = dense.cold_s / resident.cold_s
        named["preemptions"] = named.get("preemptions", 0.0) + resident.preemptions
    roomy = {f"{name}_roomy": value for name, value in of_mixed(found.roomy).items()}
    return named | of_mixed(found.mixed) | roomy


def of_mixed(rows: Sequence[Mixed]) -> dict[str, float]:
    """Throughput of `auto` over `host` and `dense`; medians."""
    by_round: dict[int, dict[str, Mixed]] = {}
    for row in rows:
        by_round.setdefault(row.round, {})[row.way] = row
    takes: dict[str, Callable[[Mixed], float]] = {
        "": lambda one: one.seconds(PROCESSOR),
        "_wall": lambda one: one.seconds(WALL),
        "_cold": lambda one: one.cold_s[PROCESSOR],
        "_warm": lambda one: one.warm_s[PROCESSOR],
    }
    return {
        f"auto_over_{way}{suffix}": median(
            [takes_s(ways[way]) / takes_s(ways["auto"]) for ways in by_round.values()]
        )
        for way in ("host", "dense")
        for suffix, takes_s in takes.items()
        if any(way in ways for ways in by_round.values())
    }


RATIOS = {
    "step_over_resident": ("resident_step_s", "sparse_step_s"),
    "step_over_dense_32k": ("resident_step_s", "dense_step_s"),
    "prefill_overhead": ("resident_prefill_s", "dense_prefill_s"),
    "prefill_over_sparse": ("resident_prefill_s", "sparse_prefill_s"),
    "hit_first_token_share": ("hit_first_s", "resident_prefill_s"),
    "hit_over_connector": ("hit_first_s", "connector_hit_first_s"),
}
"""Numerator and denominator, fields of a `Round`."""
OF_THE_LLAMA = ("step_over_dense_32k", "hit_")
"""Figures whose target is for the Llama with 32k tokens; others are for SmolLM2, if it was run."""


def suffixes(model: str, name: str, models: Sequence[str]) -> list[str]:
    """The model's label, and none if the figure's target is for it. models: all that were run."""
    label = "_" + model.replace(" ", "_")
    wanted = "llama" if name.startswith(OF_THE_LLAMA) else "smollm2"
    stands = model.startswith(wanted) or not any(one.startswith(wanted) for one in models)
    return [label, ""] if stands else [label]


def of_rounds(shape: Shape, rounds: Sequence[Round]) -> dict[str, float]:
    """Figures of one model and context length."""
    model, first = shape.model, rounds[0]
    whole = first.hit_tokens * model.kv_token_bytes
    heads = (3, 64) if model.name == "smollm2" else (2, 32)
    per_block = sketch_bytes(model, *heads)
    named = {
        f"{name}{suffix}": ratios(rounds, over, under, clock)
        for clock, suffix in ((PROCESSOR, ""), (WALL, "_wall"))
        for name, (over, under) in RATIOS.items()
    }
    pages = whole / model.block_bytes * model.layers
    return named | {
        "hit_bytes_share": median([one.hit_load_bytes for one in rounds]) / whole,
        "hit_representations_share": per_block / model.block_bytes,
        "hit_staged_share": median([one.hit_staged_pages for one in rounds]) / pages,
        "representations_overhead": median(
            [one.build_s / one.resident_prefill_s[WALL] for one in rounds]
        ),
        "representations_overhead_hit": median([built_of_hit(one, model.layers) for one in rounds])
        / pages,
        "pulled_pages_per_step": median([one.pulled_pages / one.num_steps for one in rounds]),
        **{
            f"{way}_step_ms": 1e3 * middle(rounds, f"{way}_step_s")
            for way in ("dense", "sparse", "resident")
        },
        **{f"{way}_prefill_s": middle(rounds, f"{way}_prefill_s") for way in ("dense", "resident")},
    }


def built_of_hit(one: Round, num_layers: int) -> float:
    """Sketches built for a hit's blocks: 0 as they are loaded. Those of blocks completed after
    the hit are subtracted; the last token has no KV."""
    complete = (one.context_tokens - 1) // BLOCK_TOKENS - one.hit_tokens // BLOCK_TOKENS
    return max(0.0, one.hit_built_blocks - complete * num_layers)


def report(found: Found, named: dict[str, float]) -> str:
    rows: list[Sequence[object]] = []
    for name, value in named.items():
        target = TARGETS.get(name) or TARGETS.get(name.removesuffix("_wall"))
        bare = name in TARGETS
        missed = "missed" if bare and target is not None and not target.is_met(value) else ""
        rows.append((name, f"{value:.4g}", str(target) if bare else "", missed))
    parts = [table(("figure", "value", "target", ""), rows)]
    parts += [
        rows_table([asdict(one) for one in rows_of_case])
        for rows_of_case in (found.exact, found.held, found.together, found.mixed, found.roomy)
        if rows_of_case
    ]
    return "\n\n".join(parts)


def options() -> argparse.Namespace:
    flags = parser("Contexts beyond device memory against everything on the device.")
    flags.add_argument("--quick", action="store_true", help="small sizes")
    flags.add_argument("--long", action="store_true", help="131,072 tokens too")
    flags.add_argument("--only", nargs="+", choices=CASES, help="some of the cases")
    flags.add_argument("--rounds", type=int, help="of the cases that are timed")
    return flags.parse_args()


def main() -> int:
    chosen, begin_s = options(), time.monotonic()
    sizes = QUICK if chosen.quick else Sizes()
    if chosen.rounds:
        sizes = replace(sizes, rounds=chosen.rounds)
    names = chosen.only or [name for name in CASES if name != "long" or chosen.long]
    try:
        with ends_cleanly(), runtime_folder(BATCH_ARENA_BYTES + (1 << 28)) as folder:
            found = run(sizes, names, folder)
    except ChildError as error:
        print(error, file=sys.stderr)
        return 1
    named = figures(found)
    print(report(found, named))
    rows = {
        "exact": [asdict(one) for one in found.exact],
        "memory": [asdict(one) for one in found.held],
        "together": [asdict(one) for one in found.together],
        "mixed": [asdict(one) for one in found.mixed],
        "roomy": [asdict(one) for one in found.roomy],
        "rounds": {
            name: [asdict(one) for one in rounds] for name, (_, rounds) in found.rounds.items()
        },
        "seconds": time.monotonic() - begin_s,
    }
    print_json(named | rows | bounds_json(TARGETS), chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares vLLM engines with residency with one that has the whole context on the GPU: equal
tokens, and times.

`python -m bench.gpu.resident_engine [--json] [--quick] [--graphs]`, with a GPU and vLLM (20 GB of
device memory, 10 GiB of host memory). `--graphs` replays decode steps as CUDA graphs; `--cpu` runs
it with a tiny model without a GPU. The engines have the model of `bench.offloading --gpu` and
answer the same prompts, one engine after the other:

- `dense`: no hotkv. Answers each prompt a second time, a hit in vLLM's own prefix cache.
- `resident`: a budget of 4096 tokens; the device has space for 8192, a quarter of the context.
- `resident-again`: a second such engine, which hits what `resident` has stored.
- `covered`: a budget that covers the context, so its tokens should equal those of `dense`; it hits
  what `resident` has stored.

The figures:

- `covered_equal`: share of the tokens of `covered` before the first that differs from a hit in
  `dense`. `covered_logprob_difference`: largest difference of logprobs up to it. With bf16's
  rounding, tokens may differ although nothing is wrong.
- `dense_equal`, `dense_logprob_difference`: the same for `dense`'s hits and computed answers: what
  rounding alone changes.
- `resident_step_over_dense`, `resident_first_over_dense`: time per token, and to the first, of
  `resident`, divided by that of `dense`.
- `hit_first_over_dense`: time to the first token of `resident-again`, divided by that of `dense`.
- `longest_close_s`: longest end of an idle engine; one that does not react to SIGTERM is killed
  after 40 s.
"""

import argparse
import contextlib
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from bench.offloading import CPU, GPU, Place, on_gpu
from bench.report import median, parser, print_figures, say
from bench.servers import serving
from demo.processes import Answer, Engine, EngineSettings, Server, largest_logprob_difference
from demo.random_llama import write_model

BLOCK_TOKENS = 32
ROUNDS = 2
ON_CUDA = "contexts beyond device memory on CUDA"
"""An engine with residency logs this on a GPU."""


def graphs(*rows: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM`: a CUDA graph for each decode step of `rows` requests, none for
    prefill, no torch compiler."""
    compilation = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": list(rows),
    }
    return {"enforce_eager": False, "compilation_config": compilation}


@dataclass(frozen=True, slots=True)
class Sizes:
    """In tokens. pool: the device's blocks; chunk: of a prefill."""

    context: int = 32_768
    pool: int = 8192
    budget: int = 4096
    chunk: int = 1024
    answer: int = 64


QUICK = Sizes(8192, 3072, 1024, 512, 16)


def settings(place: Place, sizes: Sizes, model: str, target: str, budget: int) -> EngineSettings:
    """budget: 0: without hotkv. Unless it is `sizes.budget`, the device has memory for two
    contexts."""
    context = sizes.context + BLOCK_TOKENS
    pool = sizes.pool if budget == sizes.budget else 2 * context
    arguments = {
        "load_format": "auto",
        "skip_tokenizer_init": True,
        "dtype": place.shape.dtype,
        "max_model_len": context,
        "block_size": BLOCK_TOKENS,
        "kv_cache_memory_bytes": pool * place.shape.kv_token_bytes,
        "max_num_batched_tokens": sizes.chunk,
        "max_num_seqs": 1,
        **place.engine_args,
    }
    sparse = {
        "residency": "host", "sparse_topk": budget, "min_context_tokens": 512, "dense_layers": [],
    }  # fmt: skip
    extra = {"hotkv.sparse": sparse, "hotkv.lookup_timeout_s": 10.0}
    if place.device == "cuda":
        extra |= {
            "hotkv.allow_sparse_cuda": True,
            "hotkv.sketch_tokens": 2 * context,
        }
    return EngineSettings(model, target if budget else "", extra, engine_args=arguments)


def answers(engine: Engine, place: Place, sizes: Sizes, times: int = 1) -> list[list[Answer]]:
    """ROUNDS prompts, `times` times in a row each, after an unmeasured one. The answers of each
    time."""
    found: list[list[Answer]] = [[] for _ in range(times)]
    for number in range(ROUNDS + 1):
        prompt = place.prompt(number, sizes.context - sizes.answer)
        for turn in range(times):
            answer = engine.generate(prompt, sizes.answer)
            if len(answer.token_ids) != sizes.answer:
                raise RuntimeError(f"{engine.name}'s answer ended early; see {engine.log}")
            say(
                f"{engine.name}, prompt {number}: first token {answer.ttft_s:.3f} s, per token "
                f"{1e3 * step_s(answer):.1f} ms, hit {answer.hit_tokens}"
            )
            found[turn].append(answer)
    return [each[1:] for each in found]


def closed_s(engine: Engine) -> float:
    begin_s = time.monotonic()
    engine.close()
    return time.monotonic() - begin_s


def step_s(answer: Answer) -> float:
    """Time per token, from the second on."""
    return (answer.total_s - answer.ttft_s) / (len(answer.token_ids) - 1)


def equal_share(one: Answer, other: Answer) -> float:
    """Share of the tokens of `one` before the first difference."""
    pairs = list(zip(one.token_ids, other.token_ids, strict=True))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs)) / len(pairs)


def measure(place: Place, sizes: Sizes, server: Server) -> dict[str, float]:
    """The module's figures."""
    folder = server.log.parent
    model = write_model(folder / "model", sizes.context + 64, place.shape, place.device)
    # `covered` would store the prompts that `resident` must compute, so it comes last.
    budgets = {
        "dense": 0,
        "resident": sizes.budget,
        "resident-again": sizes.budget,
        "covered": sizes.context,
    }
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(
                Engine(name, settings(place, sizes, str(model), server.target, budget), folder)
            )
            for name, budget in budgets.items()
        ]
        for engine in engines:
            engine.wait_ready()
            is_resident = place.device == "cuda" and engine.name != "dense"
            if is_resident and ON_CUDA not in engine.log.read_text():
                raise RuntimeError(f"{engine.name} has no residency; see {engine.log}")
        dense, dense_hit = answers(engines[0], place, sizes, 2)
        resident, again, covered = (answers(one, place, sizes)[0] for one in engines[1:])
        close_s = [closed_s(engine) for engine in engines]
    dense_first_s = median([one.ttft_s for one in dense])
    step_ratio = median([step_s(one) for one in resident]) / median([step_s(one) for one in dense])
    pairs = list(zip(dense_hit, covered, strict=True))
    control = list(zip(dense_hit, dense, strict=True))
    return {
        "covered_equal": min(equal_share(*pair) for pair in pairs),
        "covered_logprob_difference": max(largest_logprob_difference(*pair) for pair in pairs),
        "dense_equal": min(equal_share(*pair) for pair in control),
        "dense_logprob_difference": max(largest_logprob_difference(*pair) for pair in control),
        "resident_step_over_dense": step_ratio,
        "resident_first_over_dense": median([one.ttft_s for one in resident]) / dense_first_s,
        "hit_first_over_dense": median([one.ttft_s for one in again]) / dense_first_s,
        "longest_close_s": max(close_s),
        "context_over_pool": sizes.context / sizes.pool,
    }


def options_of(title: str) -> argparse.Namespace:
    flags = parser(title)
    flags.add_argument("--quick", action="store_true", help="shorter contexts")
    flags.add_argument("--graphs", action="store_true", help="decode in CUDA graphs")
    flags.add_argument("--cpu", action="store_true", help="on a CPU, with a tiny model")
    return flags.parse_args()


def serving_on(place: Place) -> contextlib.AbstractContextManager[Server]:
    return serving(place.arena_bytes) if place.device == "cpu" else on_gpu(place)


def main() -> int:
    options = options_of("Residency in real vLLM on a GPU.")
    place = CPU if options.cpu else GPU
    if not options.cpu:
        arguments = {**place.engine_args, "attention_backend": "FLASH_ATTN"}
        arguments |= graphs(1) if options.graphs else {}
        place = replace(place, engine_args=arguments)
    sizes = QUICK if options.quick else Sizes()
    with serving_on(place) as server:
        print_figures(measure(place, sizes, server), {}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares vLLM engines that keep old blocks only in host memory (residency) with an engine that
has the whole context on the GPU: are the tokens equal, and how long do they take?

`python -m bench.gpu.resident_engine [--json] [--quick] [--graphs]`, on a machine with a GPU and
vLLM (about 20 GB of device memory, 10 GiB of host memory). `--graphs` replays decode steps as CUDA
graphs. `--cpu` runs all of this without a GPU, with a tiny model. The engines have the model of
`bench.offloading --gpu` and answer the same prompts, one engine after the other:

- `dense`: no hotkv; the whole context is on the device. It answers each prompt a second time, which
  hits vLLM's own prefix cache.
- `resident`: residency; a step attends to 4096 tokens (the budget), and the device has
  space for 8192 tokens, a quarter of the context.
- `resident-again`: the same in a second engine, which hits the prompts that `resident` has stored.
- `covered`: residency with so large a budget that each step attends to the whole context, so its
  tokens should equal those of `dense`. It also hits the prompts that `resident` has stored.

The figures:

- `covered_equal`: share of the tokens of `covered` that come before the first that differs from
  those of a hit in `dense`. `covered_logprob_difference`: the largest difference of logprobs up to
  that token. Numbers in bf16 are rounded, so tokens may differ although nothing is wrong.
- `dense_equal`, `dense_logprob_difference`: the same for the hits of `dense` and its computed
  answers: how much rounding alone changes.
- `resident_step_over_dense`, `resident_first_over_dense`: time per token, and time to the first
  token, of `resident`, divided by that of `dense`.
- `hit_first_over_dense`: time to the first token of `resident-again`, divided by that of `dense`.
- `longest_close_s`: the longest time that an idle engine took to end. An engine that does not react
  to SIGTERM is killed after 40 s.
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
"""A text that an engine with residency (contexts in host memory) logs on a GPU, by which the
benchmark checks that residency is on."""


def graphs(*rows: int) -> dict[str, Any]:
    """Returns the arguments of `vllm.LLM` by which a CUDA graph replays each decode step. Prefill
    runs without graphs, and no step through torch's compiler.

    rows: the numbers of requests of the steps for which graphs are captured.
    """
    compilation = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": list(rows),
    }
    return {"enforce_eager": False, "compilation_config": compilation}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of tokens: of a context, of the small pool (device memory for blocks), of a budget
    (tokens to which a step attends), of a prefill chunk and of an answer."""

    context: int = 32_768
    pool: int = 8192
    budget: int = 4096
    chunk: int = 1024
    answer: int = 64


QUICK = Sizes(8192, 3072, 1024, 512, 16)


def settings(place: Place, sizes: Sizes, model: str, target: str, budget: int) -> EngineSettings:
    """Returns the settings of an engine.

    place: the device (GPU or CPU).
    model: folder of the model.
    target: address of the server.
    budget: tokens to which a step attends; 0 for an engine without hotkv. An engine whose budget is
        not `sizes.budget` has device memory for two contexts.
    """
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
    """Lets the engine answer each of `ROUNDS` prompts `times` times in a row, after an unmeasured
    first prompt. Returns the answers of each time."""
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
    """Ends the engine, and returns how many seconds this took."""
    begin_s = time.monotonic()
    engine.close()
    return time.monotonic() - begin_s


def step_s(answer: Answer) -> float:
    """Returns the seconds per token of an answer, from its second token on."""
    return (answer.total_s - answer.ttft_s) / (len(answer.token_ids) - 1)


def equal_share(one: Answer, other: Answer) -> float:
    """Returns the share of the tokens of answer `one` that come before its first difference from
    `other`."""
    pairs = list(zip(one.token_ids, other.token_ids, strict=True))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs)) / len(pairs)


def measure(place: Place, sizes: Sizes, server: Server) -> dict[str, float]:
    """Starts the engines, lets each answer all prompts, and returns the figures of the module's
    docstring."""
    folder = server.log.parent
    model = write_model(folder / "model", sizes.context + 64, place.shape, place.device)
    # The engines with residency share their KV in the server. `resident` must compute the prompts,
    # so `covered`, which would store them too, answers last.
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
    """Returns the options of a benchmark of engines with residency. `title`: its description."""
    flags = parser(title)
    flags.add_argument("--quick", action="store_true", help="shorter contexts")
    flags.add_argument("--graphs", action="store_true", help="decode in CUDA graphs")
    flags.add_argument("--cpu", action="store_true", help="on a CPU, with a tiny model")
    return flags.parse_args()


def serving_on(place: Place) -> contextlib.AbstractContextManager[Server]:
    """Starts a server for the engines of `place`."""
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

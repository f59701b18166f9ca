"""Runs four long requests at once with residency, and in vLLM alone, which has more of the device's
memory.

`python -m bench.gpu.together [--json] [--quick] [--graphs]`, with a GPU, vLLM, and 56 GiB in
/dev/shm. `--graphs` replays decode steps as CUDA graphs; `--cpu` runs it with a tiny model without
a GPU.

Prompts have 70,006 tokens. The model has random weights and gemma-3-4b's sizes, but full attention
in every layer: residency on CUDA has no sliding windows. The engines take turns:

- `dense`: vLLM alone, `gpu_memory_utilization = 0.28`; requests wait if memory is short.
- `resident`: a step selects 2048 tokens, the device has blocks for 40,960 of all requests (5.3 GiB,
  and 2.6 GiB for sketches and staging). Its second batch hits the same prompts in the server.

The figures: `dense_s`, `resident_s` and `again_s`, seconds from the first prompt to the last
answer; the same divided by those of `dense`; `dense_step_ms` and `resident_step_ms`, median of
the steps that decode the most requests; `dense_at_once` and `resident_at_once`, the most that
decoded at once.
"""

import sys
from dataclasses import dataclass, replace
from typing import Any

from bench.gpu.resident_engine import BLOCK_TOKENS, ON_CUDA, graphs, options_of, serving_on
from bench.offloading import CPU, GPU, Place
from bench.report import print_figures, say
from bench.servers import GIB
from demo.processes import EngineSettings, Server
from demo.random_llama import Shape, write_model
from demo.watched import Batch, Watched

GEMMA = Shape(34, 2560, 10_240, 8, 4, 256, 32_000, "bfloat16")
DEVICE_SHARE = 0.28
REQUESTS = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """In tokens. pool: the device's blocks with residency; chunk: of a prefill."""

    prompt: int = 70_006
    pool: int = 40_960
    budget: int = 4096
    chunk: int = 8192
    answer: int = 64

    @property
    def context(self) -> int:
        return self.prompt + self.answer


QUICK = Sizes(8198, 12_288, 1024, 1024, 16)
TINY = Sizes(2054, 4096, 512, 512, 16)


def settings(place: Place, sizes: Sizes, model: str, target: str) -> EngineSettings:
    """With residency if there is a `target`."""
    kv_bytes = sizes.pool * place.shape.kv_token_bytes
    arguments = {
        "load_format": "auto",
        "dtype": place.shape.dtype,
        "max_model_len": sizes.context + BLOCK_TOKENS,
        "block_size": BLOCK_TOKENS,
        "max_num_batched_tokens": sizes.chunk,
        "max_num_seqs": REQUESTS,
        **place.engine_args,
    }
    if target or place.device == "cpu":
        arguments["kv_cache_memory_bytes"] = kv_bytes
    sparse = {
        "residency": "host",
        "sparse_topk": sizes.budget,
        "min_context_tokens": 512,
        "dense_layers": [],
    }
    extra = {"hotkv.sparse": sparse, "hotkv.lookup_timeout_s": 10.0}
    if place.device == "cuda":
        extra |= {
            "hotkv.allow_sparse_cuda": True,
            "hotkv.sketch_tokens": REQUESTS * (sizes.context + BLOCK_TOKENS),
        }
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if place.device == "cpu":
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return EngineSettings(model, target, extra, engine_args=arguments, environment=environment)


def told(name: str, batch: Batch) -> Batch:
    """Prints a line about the batch."""
    firsts = ", ".join(f"{wall_s:.2f}" for wall_s, _ in batch.first_s)
    say(
        f"{name}: {batch.steps[-1][0]:.2f} s, first tokens after {firsts} s, hits {batch.cached}, "
        f"{batch.most_decoding} at once, step {step_ms(batch):.1f} ms, "
        f"{batch.counters.get('preemptions', 0):.0f} preemptions, "
        f"{batch.pinned_bytes / GIB:.1f} GiB pinned"
    )
    return batch


def step_ms(batch: Batch) -> float:
    """Median of the steps that decode the most requests."""
    most = max(tokens for _, _, tokens in batch.steps)
    return 1e3 * most / batch.decode_rate(0)


def measure(place: Place, sizes: Sizes, server: Server) -> dict[str, float]:
    """The module's figures."""
    folder = server.log.parent
    model = str(write_model(folder / "model", sizes.context + 64, place.shape, place.device))
    prompts = [place.prompt(number, sizes.prompt) for number in range(REQUESTS)]
    warm = [place.prompt(99, 2 * sizes.chunk)]
    with Watched("dense", settings(place, sizes, model, ""), folder) as engine:
        engine.wait_ready()
        engine.batch(warm, 4)
        dense = told("dense", engine.batch(prompts, sizes.answer))
    target = server.target
    with Watched("resident", settings(place, sizes, model, target), folder, server) as engine:
        engine.wait_ready()
        if place.device == "cuda" and ON_CUDA not in engine.log.read_text():
            raise RuntimeError(f"the engine has no residency; see {engine.log}")
        engine.batch(warm, 4)
        resident = told("resident", engine.batch(prompts, sizes.answer))
        server.wait_for_stores()
        engine.forget()
        again = told("resident, hits", engine.batch(prompts, sizes.answer))
    dense_s, resident_s, again_s = (one.steps[-1][0] for one in (dense, resident, again))
    return {
        "dense_s": dense_s,
        "resident_s": resident_s,
        "again_s": again_s,
        "resident_over_dense": resident_s / dense_s,
        "again_over_dense": again_s / dense_s,
        "dense_step_ms": step_ms(dense),
        "resident_step_ms": step_ms(resident),
        "dense_at_once": dense.most_decoding,
        "resident_at_once": resident.most_decoding,
    }


def main() -> int:
    options = options_of("Four long requests at once in vLLM, with residency and without.")
    sizes = TINY if options.cpu else QUICK if options.quick else Sizes()
    place = CPU
    if not options.cpu:
        arguments: dict[str, Any] = {"attention_backend": "FLASH_ATTN"}
        arguments["gpu_memory_utilization"] = DEVICE_SHARE
        arguments |= graphs(*range(1, REQUESTS + 1)) if options.graphs else {}
        place = replace(GPU, shape=GEMMA, arena_bytes=48 * GIB, engine_args=arguments)
    with serving_on(place) as server:
        print_figures(measure(place, sizes, server), {}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

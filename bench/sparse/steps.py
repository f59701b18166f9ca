"""Times prefills and decode steps of one model in a real vLLM engine on CPU, dense and sparse, and
what the machine can do in between: `python -m bench.sparse.steps FOLDER …`, one JSON object as the
last line.

A child of `bench.estimate`: an engine in this process, one request at a time. With one thread the
clock is the process's own processor time, so other programs cost a run little but their share of
caches and memory; with more it is the wall's.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.report import median
from bench.sparse.engine import KV_CACHE_BYTES, Setup
from hotkv_sparse.estimate import Mode
from hotkv_sparse.estimate.here import copy_bandwidth, product_flops

MIN_CONTEXT_TOKENS = 1600
"""Shorter contexts stay dense: a tenth of them is little more than what is always kept."""
SETTLING_STEPS = 4
"""First steps of a decode, which complete its hot sets."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One request. `mode`: a `Mode`'s value. `prefill_s`: None if its prompt was in the prefix
    cache. `step_s`: median of its decode steps. `bandwidth`, `flops`: the machine's, just before.
    """

    context_tokens: int
    mode: str
    prefill_s: float | None
    step_s: float
    bandwidth: float
    flops: float


class Steps:
    """An engine whose steps are timed."""

    def __init__(
        self, folder: Path, context_tokens: int, chunk_tokens: int, clock: Callable[[], float]
    ) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM

        extra = Setup().extra_config()
        extra["hotkv.sparse"]["min_context_tokens"] = MIN_CONTEXT_TOKENS
        extra["hotkv.sparse_recall_steps"] = 0
        self._clock = clock
        self._engine: Any = LLM(
            str(folder),
            block_size=Setup().block_tokens,
            max_model_len=context_tokens,
            max_num_seqs=1,
            max_num_batched_tokens=chunk_tokens,
            enforce_eager=True,
            skip_tokenizer_init=True,
            load_format="auto" if any(folder.glob("*.safetensors")) else "dummy",
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            kv_transfer_config={
                "kv_connector": "HotKVConnector",
                "kv_connector_module_path": "hotkv_vllm.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            },
        ).llm_engine
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector: Any = get_kv_transfer_group()
        self._worker: Any = connector._worker.sparse.worker
        self._attend = self._worker.attend
        self._num_requests = 0

    def run(self, prompt: list[int], num_steps: int, *, sparse: bool) -> tuple[float, float]:
        """Seconds to the first token, and the median of the decode steps that follow."""
        from vllm import SamplingParams

        self._worker.attend = self._attend if sparse else _everything
        self._num_requests += 1
        parameters = SamplingParams(
            temperature=0, max_tokens=num_steps + 1, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(str(self._num_requests), {"prompt_token_ids": prompt}, parameters)
        first_s, steps_s, began_s = 0.0, [], self._clock()
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            ended_s = self._clock()
            if outputs and first_s:
                steps_s.append(ended_s - began_s)
            if outputs or first_s:
                first_s, began_s = first_s or ended_s - began_s, ended_s
        return first_s, median(steps_s[SETTLING_STEPS:-1])

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def _everything(*_: Any) -> None:
    """In place of `SparseWorker.attend`: nothing is left out."""


def timed(
    engine: Steps, chosen: argparse.Namespace, clock: Callable[[], float], round_number: int
) -> list[Timed]:
    """All contexts, dense and sparse in turns; the first of the two computes the prompt.

    Residency joins here as a third way: `Mode.RESIDENT`, in an engine with a server.
    """
    found = []
    for context in chosen.contexts:
        prompt = random.Random(f"{context} {round_number}").choices(
            range(100, chosen.vocab), k=context - chosen.steps
        )
        ways = [Mode.DENSE] if context < MIN_CONTEXT_TOKENS else [Mode.DENSE, Mode.SPARSE]
        if round_number % 2:
            ways.reverse()
        for place, mode in enumerate(ways):
            bandwidth, flops = copy_bandwidth(clock), product_flops(clock)
            first_s, step_s = engine.run(prompt, chosen.steps, sparse=mode is Mode.SPARSE)
            prefill_s = None if place else first_s
            found.append(Timed(context, mode.value, prefill_s, step_s, bandwidth, flops))
            print(found[-1], file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Command line."""
    flags = argparse.ArgumentParser(description="Times steps of one model in vLLM on CPU.")
    flags.add_argument("folder", type=Path, help="of the model; without weights they are random")
    flags.add_argument("--contexts", type=int, nargs="+", required=True)
    flags.add_argument("--vocab", type=int, required=True)
    flags.add_argument("--steps", type=int, default=24)
    flags.add_argument("--rounds", type=int, default=2)
    flags.add_argument("--chunk-tokens", type=int, default=2048)
    flags.add_argument("--threads", type=int, default=1)
    chosen = flags.parse_args()
    clock = time.process_time if chosen.threads == 1 else time.perf_counter
    longest = max(*chosen.contexts, MIN_CONTEXT_TOKENS) + 128
    engine = Steps(chosen.folder, longest, chosen.chunk_tokens, clock)
    # Kernels are compiled at their first use.
    engine.run(list(range(100, 100 + MIN_CONTEXT_TOKENS + 64)), 8, sparse=True)
    found = [one for number in range(chosen.rounds) for one in timed(engine, chosen, clock, number)]
    engine.close()
    print(json.dumps([asdict(one) for one in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

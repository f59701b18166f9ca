"""A vLLM engine as a child process that reports each step, for `demo.watched.Watched`.

Requests: `batch` (`prompts`, `max_tokens`): tokens, times, blocks in use. `mode` (`dense`):
    dense or sparse attention. `reset`: empties vLLM's own prefix cache. `device_blocks`,
    `memory`: sizes. Modes, processor time and blocks in use need vLLM's engine core in this
    process.
"""

import json
import os
import sys
import time
from typing import Any

from demo.engine_process import SHUTDOWN_TIMEOUT_S, end_with_parent, kv_transfer_config
from hotkv_vllm.counter_help import every_counter, exported

NAMES = {f"vllm:hotkv_{exported(name)}": name for name in every_counter()}
NAMES["vllm:num_preemptions"] = "preemptions"
"""Metrics in vLLM to names in `Batch.counters`."""


class Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        import vllm

        from demo.machine import dtype_for

        extra = kv_transfer_config(settings)
        usual = {
            "model": settings["model"],
            "dtype": dtype_for(settings["model"]),
            "block_size": 32,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
            "seed": 0,
            "kv_transfer_config": extra,
        }
        self.llm = vllm.LLM(**usual | settings["engine_args"])
        self._num_requests = 0
        self._attend: Any = None
        core = self.llm.llm_engine.engine_core
        self._core: Any = getattr(core, "engine_core", None)

    def device_blocks(self, num_tokens: int) -> dict[str, Any]:
        """At most for a request, as vLLM's block manager computes it."""
        manager = self._core.scheduler.kv_cache_manager
        spec = manager.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        return {"blocks": spec.device_blocks(num_tokens)}

    def memory(self) -> dict[str, Any]:
        """Bytes besides the pool: staging, and rows of sketches."""
        worker = _worker()
        rows = sum(rows.nbytes for rows in worker._kept._rows.values())
        return {"staging": worker._pages.staging.num_bytes, "rows": rows}

    def mode(self, dense: bool) -> dict[str, Any]:
        worker = _worker()
        self._attend = self._attend or worker.attend
        worker.attend = _everything if dense else self._attend
        return {}

    def reset(self) -> dict[str, Any]:
        return {"done": self.llm.reset_prefix_cache()}

    def batch(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Times count from before the requests are added."""
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=1, detokenize=False
        )
        engine, before = self.llm.llm_engine, self._counters()
        names = [str(self._num_requests + place) for place in range(len(prompts))]
        self._num_requests += len(prompts)
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
        found: dict[str, Any] = {}
        first_s: dict[str, tuple[float, float]] = {}
        steps: list[tuple[float, float, int]] = []
        most_held = most_decoding = 0
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now_s, now_cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
            most_held = max(most_held, self._held())
            for output in outputs:
                found[output.request_id] = output
                first_s.setdefault(output.request_id, (now_s, now_cpu_s))
            decoding = [one for one in found.values() if not one.finished]
            most_decoding = max(most_decoding, len(decoding), len(outputs))
            if outputs or first_s:
                steps.append((now_s, now_cpu_s, len(outputs)))
        ordered = [found[name] for name in names]
        after = self._counters()
        return {
            "tokens": [list(one.outputs[0].token_ids) for one in ordered],
            "logprobs": [
                [
                    step[token].logprob
                    for token, step in zip(
                        one.outputs[0].token_ids, one.outputs[0].logprobs, strict=True
                    )
                ]
                for one in ordered
            ],
            "cached": [one.num_cached_tokens or 0 for one in ordered],
            "ended": [str(one.outputs[0].finish_reason) for one in ordered],
            "first_s": [first_s[name] for name in names],
            "steps": steps,
            "most_held": most_held,
            "most_decoding": most_decoding,
            "counters": {name: after[name] - before.get(name, 0.0) for name in after},
        }

    def _held(self) -> int:
        """Device blocks that requests use now."""
        if self._core is None:
            return 0
        pool = self._core.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def _counters(self) -> dict[str, float]:
        """With preemptions. From the connector if it is in this process: vLLM's metrics round
        down."""
        metrics = (one for one in self.llm.get_metrics() if one.name in NAMES)
        found = {NAMES[one.name]: float(one.value) for one in metrics}
        connector = None if self._core is None else self._core.scheduler.connector
        if connector is None:
            return found
        side = connector._scheduler
        for name in found.keys() & every_counter().keys():
            found[name] = float(side.totals.data.get(name, 0) + side.stats.data.get(name, 0))
        return found


def _worker() -> Any:
    """The connector's part for sparse decode."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    return connector._worker.companion.worker


def _everything(*_: Any) -> None:
    """In place of `SparseWorker.attend`: attention includes all blocks."""


def main() -> int:
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    end_with_parent()
    import torch
    import vllm

    # Compiling vLLM's sampler takes longer than most benchmarks.
    torch.compiler.set_stance("force_eager")
    engine = Engine(settings)
    dtype = str(engine.llm.model_config.dtype).removeprefix("torch.")
    print(json.dumps({"ready": True, "vllm": vllm.__version__, "dtype": dtype}), file=answers)
    operations = {
        name: getattr(engine, name)
        for name in ("device_blocks", "memory", "mode", "reset", "batch")
    }
    for line in sys.stdin:
        request = json.loads(line)
        reply = operations[request.pop("op")](**request)
        print(json.dumps(reply), file=answers)
    engine.llm.llm_engine.engine_core.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())

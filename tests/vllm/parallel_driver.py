"""`engine_driver` for engines of several ranks. Another command: `ranks` (process ids of the ranks
in order).

Ranks are forked, where vLLM's CPU platform starts them anew: each would import vLLM once more, for
twenty seconds. Nothing is compiled: vLLM compiles part of its sampler at the first step even when
it is told to be eager, for up to ten seconds. A pipeline is warmed up, which vLLM skips for eager
engines on CPU: its later stages would lack the buffers of what they receive.
"""

import multiprocessing
from typing import Any

import engine_driver
import torch
from vllm.v1.executor import multiproc_executor
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker


def ranks(llm: Any) -> dict[str, Any]:
    return {
        "pids": [
            worker.proc.pid
            for worker in llm.llm_engine.engine_core.engine_core.model_executor.workers
        ]
    }


torch.compiler.set_stance("force_eager")
multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
CPUWorker._should_warm_up_model = lambda self: self.parallel_config.pipeline_parallel_size > 1
CPUModelRunner.warming_up_model = lambda self: self.profile_run()
engine_driver.OPERATIONS |= {"ranks": ranks}

if __name__ == "__main__":
    engine_driver.main()

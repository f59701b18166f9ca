"""`engine_driver` for several ranks.

A pipeline's ranks warm up, which vLLM skips for eager CPU engines: later stages would lack
buffers.
"""

from typing import Any

import engine_driver
from nursery import fork_engines
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker


def ranks(llm: Any) -> dict[str, Any]:
    workers = llm.llm_engine.engine_core.engine_core.model_executor.workers
    return {"pids": [worker.proc.pid for worker in workers]}


fork_engines()
CPUWorker._should_warm_up_model = lambda self: self.parallel_config.pipeline_parallel_size > 1
CPUModelRunner.warming_up_model = lambda self: self.profile_run()
engine_driver.OPERATIONS |= {"ranks": ranks}

if __name__ == "__main__":
    engine_driver.main()

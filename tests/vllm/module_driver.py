"""Runs a module as `python -m` would, in a process that has imported vLLM already.

First line of standard input: `module`, `arguments`, `environment` (variables to set). What the
module prints goes to the log; when it has ended, one line of standard output says its exit status
(`status`). Processes that vLLM starts for its engines are forked, where its CPU platform would
start them anew, and nothing is compiled: as in `parallel_driver`.
"""

import json
import multiprocessing
import os
import runpy
import signal
import sys

from nursery import end_with_the_parent


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    order = json.loads(sys.stdin.readline())
    # vLLM's engine process outlives a server that is killed, and goes with one that is asked to
    # stop.
    end_with_the_parent(signal.SIGTERM)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | order["environment"]
    import torch
    from vllm.v1.engine import coordinator, utils
    from vllm.v1.executor import multiproc_executor

    torch.compiler.set_stance("force_eager")
    for module in (coordinator, utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    sys.argv = [order["module"], *order["arguments"]]
    try:
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    answers.write(json.dumps({"status": status}) + "\n")


if __name__ == "__main__":
    main()

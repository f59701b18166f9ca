"""Runs a module as `python -m` would, in a child process forked from one that has already imported
vLLM.

The first line of stdin is JSON with `module`, `arguments` and `environment` (variables to set). The
module's output goes to the log. At the end, a line on stdout has the module's exit status
(`status`). vLLM forks its engine processes instead of spawning them, and compiles nothing, to save
time.
"""

import json
import os
import runpy
import signal
import sys

from nursery import fork_engines

from tests.support.waiting import end_with_the_parent


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    order = json.loads(sys.stdin.readline())
    # If the parent dies, vLLM's HTTP server gets SIGTERM, and ends its engine process. If the
    # server were killed, its engine process would live on.
    end_with_the_parent(signal.SIGTERM)
    os.environ |= order["environment"]
    fork_engines()
    sys.argv = [order["module"], *order["arguments"]]
    try:
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    answers.write(json.dumps({"status": status}) + "\n")


if __name__ == "__main__":
    main()

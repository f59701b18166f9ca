"""Runs a module as `python -m`, in a child of the nursery.

Stdin has `module`, `arguments` and `environment` as JSON, stdout gets `status`. vLLM forks and
compiles nothing.
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
    # On SIGTERM vLLM's HTTP server ends its engine.
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

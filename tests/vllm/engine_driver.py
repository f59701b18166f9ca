"""A vLLM engine in a process of its own, driven by JSON lines: commands on stdin, one answer each on stdout.

First line: arguments of `LLM`. Commands: `generate` (prompts, max_tokens, transfer: their `kv_transfer_params`), `reset` (connector: its
cache too), `stats`, `wait` (connected, timeout_s), `freeze` (stop the process `pid` just after the connector's next `call`, load or
store, was sent), `stop`. Logs go to stderr.
"""

import json
import os
import signal
import sys
import time
from typing import Any


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    arguments = json.loads(sys.stdin.readline())
    from vllm import LLM

    if arguments["load_format"] == "random":
        import random_weights  # noqa: F401 - registers the load format

    began_s = time.monotonic()
    llm = LLM(**arguments)
    answers.write(json.dumps({"ready_s": time.monotonic() - began_s, "pid": os.getpid()}) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        operation = command.pop("op")
        if operation == "stop":
            break
        try:
            answer = OPERATIONS[operation](llm, **command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    llm.llm_engine.engine_core.shutdown()


def generate(llm: Any, prompts: list[list[int]], max_tokens: int, transfer: dict[str, Any] | None = None) -> dict[str, Any]:
    from vllm import SamplingParams

    extra = None if transfer is None else {"kv_transfer_params": transfer}
    parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=1, extra_args=extra)
    began_s = time.monotonic()
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
    return {
        "seconds": time.monotonic() - began_s,
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "logprobs": [[p[t].logprob for t, p in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)] for o in outputs],
        "cached": [o.num_cached_tokens for o in outputs],
    }


def reset(llm: Any, connector: bool = False) -> dict[str, Any]:
    return {"done": llm.reset_prefix_cache(reset_connector=connector)}


def _scheduler_side(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler


def _worker_side(_: Any) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


def stats(llm: Any) -> dict[str, Any]:
    side = _scheduler_side(llm)
    totals = dict(side.totals.data)
    for name, value in side.stats.data.items():
        totals[name] = totals.get(name, 0) + value
    return {"totals": totals, "connected": side.session is not None and side.session.connected}


def wait(llm: Any, connected: bool, timeout_s: float) -> dict[str, Any]:
    sessions = [_scheduler_side(llm).session, _worker_side(llm).session]
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s and any(s.connected != connected for s in sessions):
        time.sleep(0.02)
    return {"connected": [s.connected for s in sessions]}


def freeze(llm: Any, call: str, pid: int) -> dict[str, Any]:
    session = _worker_side(llm).session
    original = getattr(session, call)

    def frozen(*arguments: Any) -> Any:
        setattr(session, call, original)
        os.kill(pid, signal.SIGSTOP)
        return original(*arguments)

    setattr(session, call, frozen)
    return {"armed": call}


OPERATIONS = {"generate": generate, "reset": reset, "stats": stats, "wait": wait, "freeze": freeze}

if __name__ == "__main__":
    main()

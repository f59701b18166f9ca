"""A vLLM engine as a child process: a JSON request per line from stdin, a JSON answer per line to
stdout; vLLM's own output goes to stderr.

Its argument is JSON of `demo.processes.EngineSettings`. It ends with stdin.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any

from demo.processes import group_members

SHUTDOWN_TIMEOUT_S = 40.0
SETTLING_TOKENS = 8


def kv_transfer_config(settings: dict[str, Any]) -> dict[str, Any] | None:
    """None if the settings name no server."""
    if not settings["target"]:
        return None
    return {
        "kv_connector": "HotKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "hotkv.target": settings["target"],
            **settings["extra_config"],
        },
    }


def answer(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Greedy. Logprobs: id to logprob for each generated token."""
    from vllm import SamplingParams

    transfer = request["transfer"]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=request["max_tokens"],
        ignore_eos=True,
        logprobs=5,
        extra_args={"kv_transfer_params": transfer} if transfer else None,
    )
    begin = time.perf_counter()
    output = llm.generate([{"prompt_token_ids": request["token_ids"]}], params, use_tqdm=False)[0]
    total_s = time.perf_counter() - begin
    completion = output.outputs[0]
    return {
        "ttft_s": output.metrics.first_token_latency,
        "total_s": total_s,
        "hit_tokens": output.num_cached_tokens or 0,
        "token_ids": list(completion.token_ids),
        "logprobs": [
            {token: value.logprob for token, value in step.items()} for step in completion.logprobs
        ],
        "text": completion.text,
    }


def busy(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Runs `token_ids` while another request decodes `other`: from arrival to first token, the
    seconds and the other's tokens; and the tokens hit."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    endless = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)
    names = [f"{name}-{time.monotonic_ns()}" for name in ("other", "asked")]
    other, asked = names
    made = {other: 0, asked: 0}
    hit_tokens = 0
    engine.add_request(other, {"prompt_token_ids": request["other"]}, endless)
    begin_s = begin_tokens = 0.0
    while not made[asked]:
        if not begin_s and made[other] >= SETTLING_TOKENS:
            begin_s, begin_tokens = time.perf_counter(), made[other]
            engine.add_request(asked, {"prompt_token_ids": request["token_ids"]}, endless)
        for output in engine.step():
            made[output.request_id] = len(output.outputs[0].token_ids)
            if output.request_id == asked:
                hit_tokens = output.num_cached_tokens or 0
    found = {
        "ttft_s": time.perf_counter() - begin_s,
        "steps": made[other] - begin_tokens,
        "hit_tokens": hit_tokens,
    }
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return found


def end_with_parent() -> None:
    """A thread kills this process and vLLM's once the parent has ended; the kernel's signal
    would reach this process alone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        own = os.getpid()
        for pid in [*(set(group_members(own)) - {own}), own]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main() -> int:
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    end_with_parent()

    import vllm

    from demo.machine import dtype_for

    extra: dict[str, Any] = {}
    if config := kv_transfer_config(settings):
        extra["kv_transfer_config"] = config
    usual = {
        "model": settings["model"],
        "dtype": dtype_for(settings["model"]),
        "max_model_len": 8192,
        "enforce_eager": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    llm = vllm.LLM(**usual | extra | settings["engine_args"])
    dtype = str(llm.model_config.dtype).removeprefix("torch.")
    print(json.dumps({"ready": True, "vllm": vllm.__version__, "dtype": dtype}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "generate":
            reply = answer(llm, request)
        elif request["op"] == "busy":
            reply = busy(llm, request)
        elif request["op"] == "reset_prefix_cache":
            reply = {"done": llm.reset_prefix_cache()}
        else:
            reply = {"error": f"unknown op {request['op']!r}"}
        print(json.dumps(reply), file=answers)
    # vLLM's default of 5 s is too short on a busy machine.
    llm.llm_engine.engine_core.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())

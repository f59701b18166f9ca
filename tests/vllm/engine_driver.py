"""A vLLM engine in a process of its own, driven by JSON lines: commands on stdin, one answer each
on stdout.

First line: arguments of `LLM`, and `config_overrides`: values by path in vLLM's config, set when it
is complete; `environment`: variables of the process. Commands: `generate` (prompts, max_tokens,
transfer: their `kv_transfer_params`, salt: their `cache_salt`, adapter: fields of their
`LoRARequest`), `hinted` (prompt, max_tokens, hints: its `kv_hints`, session: its id), `traced`
(prompt, max_tokens, headers: its `trace_headers`), `add_adapter` (adapter), `reload` (path: weights
to load in place, as vLLM's RPC does), `reset` (connector: its cache too), `stats`, `wait`
(connected, timeout_s), `freeze` (stop the process `pid` just after the connector's next `call`,
load or store, was sent), `stop`. Logs go to stderr.
"""

import enum
import functools
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
    override(arguments.pop("config_overrides", {}))
    os.environ.update(arguments.pop("environment", {}))
    if arguments.pop("despite_vllm", False):
        from hotkv_vllm.compat import reuse

        reuse.why_forbidden = lambda *_: ""
    import torch
    from vllm import LLM

    # Compiling vLLM's sampler takes longer than most tests.
    torch.compiler.set_stance("force_eager")
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


def override(values: dict[str, Any]) -> None:
    """Sets fields of vLLM's config, whatever vLLM's own arguments would allow. A member of an
    enumeration is given by its name."""
    if not values:
        return
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config

    def overridden(*arguments: Any, **more: Any) -> Any:
        config = create(*arguments, **more)
        for path, value in values.items():
            *parents, name = path.split(".")
            owner = functools.reduce(getattr, parents, config)
            old = getattr(owner, name, None)
            owner.__dict__[name] = type(old)[value] if isinstance(old, enum.Enum) else value
        return config

    EngineArgs.create_engine_config = overridden


def generate(
    llm: Any,
    prompts: list[list[int]],
    max_tokens: int,
    transfer: dict[str, Any] | None = None,
    salt: str | None = None,
    adapter: dict[str, Any] | None = None,
) -> dict[str, Any]:
    from vllm import SamplingParams

    extra = None if transfer is None else {"kv_transfer_params": transfer}
    parameters = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=1, extra_args=extra
    )
    salted = {} if salt is None else {"cache_salt": salt}
    began_s = time.monotonic()
    lora = None if adapter is None else lora_request(adapter)
    outputs = llm.generate(
        [{"prompt_token_ids": p} | salted for p in prompts],
        parameters,
        use_tqdm=False,
        lora_request=lora,
    )
    return {
        "seconds": time.monotonic() - began_s,
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "logprobs": [
            [
                p[t].logprob
                for t, p in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)
            ]
            for o in outputs
        ],
        "cached": [o.num_cached_tokens for o in outputs],
        "ended": [str(o.outputs[0].finish_reason) for o in outputs],
    }


def hinted(
    llm: Any, prompt: list[int], max_tokens: int, hints: dict[str, Any], session: str | None = None
) -> dict[str, Any]:
    import msgspec
    from vllm import SamplingParams
    from vllm.v1.kv_hints import KvHintsEnvelope

    parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    llm.llm_engine.add_request(
        f"hinted-{time.monotonic_ns()}",
        {"prompt_token_ids": prompt},
        parameters,
        session_id=session,
        kv_hints=msgspec.convert(hints, KvHintsEnvelope),
    )
    outputs: list[Any] = []
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step() or outputs
    return {"tokens": list(outputs[-1].outputs[0].token_ids)}


def traced(llm: Any, prompt: list[int], max_tokens: int, headers: dict[str, str]) -> dict[str, Any]:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    asked = {"prompt_token_ids": prompt}
    name = f"traced-{time.monotonic_ns()}"
    llm.llm_engine.add_request(name, asked, parameters, trace_headers=headers)
    outputs: list[Any] = []
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step() or outputs
    return {"tokens": list(outputs[-1].outputs[0].token_ids)}


def lora_request(adapter: dict[str, Any]) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(**adapter)


def add_adapter(llm: Any, adapter: dict[str, Any]) -> dict[str, Any]:
    return {"added": llm.llm_engine.add_lora(lora_request(adapter))}


def reload(llm: Any, path: str) -> dict[str, Any]:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
    return {}


def reset(llm: Any, connector: bool = False) -> dict[str, Any]:
    return {"done": llm.reset_prefix_cache(reset_connector=connector)}


def _ours(connector: Any) -> Any:
    """hotkv's connector, which may be one of several in a MultiConnector."""
    return next(
        one
        for one in getattr(connector, "sub_connectors", [connector])
        if type(one).__name__ == "HotKVConnector"
    )


def _scheduler_side(llm: Any) -> Any:
    return _ours(llm.llm_engine.engine_core.engine_core.scheduler.connector)._scheduler


def _worker_side(_: Any) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return _ours(get_kv_transfer_group())._worker


def stats(llm: Any) -> dict[str, Any]:
    side = _scheduler_side(llm)
    totals = dict(side.totals.data)
    for name, value in side.stats.data.items():
        totals[name] = totals.get(name, 0) + value
    return {
        "totals": totals,
        "connected": side.sharing.is_connected,
        "shares": side.sharing.may_offer and side.sharing.is_connected,
    }


def wait(llm: Any, connected: bool, timeout_s: float) -> dict[str, Any]:
    sessions = [_scheduler_side(llm).cache.session, _worker_side(llm).rank.session]
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s and any(s.connected != connected for s in sessions):
        time.sleep(0.02)
    return {"connected": [s.connected for s in sessions]}


def freeze(llm: Any, call: str, pid: int) -> dict[str, Any]:
    session = _worker_side(llm).rank.session
    original = getattr(session, call)

    def frozen(*arguments: Any) -> Any:
        setattr(session, call, original)
        os.kill(pid, signal.SIGSTOP)
        return original(*arguments)

    setattr(session, call, frozen)
    return {"armed": call}


OPERATIONS = {
    "generate": generate,
    "hinted": hinted,
    "traced": traced,
    "add_adapter": add_adapter,
    "reload": reload,
    "reset": reset,
    "stats": stats,
    "wait": wait,
    "freeze": freeze,
}

if __name__ == "__main__":
    main()

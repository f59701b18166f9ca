"""A vLLM engine in a child process: JSON commands on stdin, answers on stdout, the log on stderr.

The first line has the arguments of `LLM` and may have:

environment: variables to set.
config_overrides: by path, set after vLLM has completed its config.
constants: values of constants, by full name.
quantum: tokens for which a resident request reserves room ahead.
despite_vllm: use hotkv even where vLLM forbids reuse.

A command has `op` and its arguments.
"""

import enum
import functools
import importlib
import json
import os
import signal
import sys
import time
from typing import Any


def set_constants(values: dict[str, Any]) -> None:
    for name, value in values.items():
        module, _, constant = name.rpartition(".")
        setattr(importlib.import_module(module), constant, value)


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    arguments = json.loads(sys.stdin.readline())
    override(arguments.pop("config_overrides", {}))
    os.environ.update(arguments.pop("environment", {}))
    set_constants(arguments.pop("constants", {}))
    quantum = arguments.pop("quantum", None)
    if quantum is not None:
        from hotkv_sparse.vllm.scheduler import resident_requests

        resident_requests.QUANTUM_TOKENS = quantum
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
    """Sets them after vLLM has checked its arguments.

    values: by path; enum members by name.
    """
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


def prompt_of(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """`request` has `tokens` or `embeds`, the rest is optional.

    embeds: seed and length.
    images: a seed for each.
    """
    if "embeds" in request:
        import torch

        seed, length = request["embeds"]
        size = llm.model_config.get_hidden_size()
        values = torch.randn((length, size), generator=torch.Generator().manual_seed(seed)) * 0.05
        made: dict[str, Any] = {"prompt_embeds": values.to(llm.model_config.dtype)}
    else:
        made = {"prompt_token_ids": request["tokens"]}
    if "salt" in request:
        made["cache_salt"] = request["salt"]
    if "images" in request:
        made["multi_modal_data"] = {"image": [image(seed) for seed in request["images"]]}
        made["mm_processor_kwargs"] = request.get("processor", {})
    if "uuids" in request:
        made["multi_modal_uuids"] = {"image": request["uuids"]}
    return made


def image(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 255, (56, 56, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def logprobs(tokens: Any, chosen: Any) -> list[float]:
    if not chosen:
        return []
    return [one[token].logprob for token, one in zip(tokens, chosen, strict=True)]


def answer_of(outputs: list[Any]) -> dict[str, Any]:
    """`cached` and `transfer` have an entry per request, others one per sample."""
    samples = [sample for output in outputs for sample in output.outputs]
    return {
        "tokens": [list(one.token_ids) for one in samples],
        "logprobs": [logprobs(one.token_ids, one.logprobs) for one in samples],
        "text": [one.text for one in samples],
        "ended": [str(one.finish_reason) for one in samples],
        "cached": [one.num_cached_tokens for one in outputs],
        "transfer": [one.kv_transfer_params for one in outputs],
    }


def sample(
    llm: Any,
    requests: list[dict[str, Any]],
    params: dict[str, Any] | None = None,
    structured: dict[str, Any] | None = None,
    adapter: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """params: arguments of SamplingParams.
    structured: arguments of StructuredOutputsParams.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    settings = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 1}
    settings |= params or {}
    if structured is not None:
        settings["structured_outputs"] = StructuredOutputsParams(**structured)
        settings["ignore_eos"] = False
    began_s = time.monotonic()
    outputs = llm.generate(
        [prompt_of(llm, one) for one in requests],
        SamplingParams(**settings),
        use_tqdm=False,
        lora_request=None if adapter is None else lora_request(adapter),
    )
    seconds = time.monotonic() - began_s
    of_prompts = [
        logprobs(one.prompt_token_ids[1:], (one.prompt_logprobs or [])[1:]) for one in outputs
    ]
    return answer_of(outputs) | {"prompt_logprobs": of_prompts, "seconds": seconds}


def generate(
    llm: Any,
    prompts: list[list[int]],
    max_tokens: int,
    transfer: dict[str, Any] | None = None,
    salt: str | None = None,
    adapter: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """transfer: `kv_transfer_params`."""
    salted = {} if salt is None else {"salt": salt}
    extra = None if transfer is None else {"kv_transfer_params": transfer}
    requests = [{"tokens": tokens} | salted for tokens in prompts]
    return sample(llm, requests, {"max_tokens": max_tokens, "extra_args": extra}, None, adapter)


def hinted(
    llm: Any,
    prompt: list[int],
    max_tokens: int,
    hints: dict[str, Any] | None = None,
    session: str | None = None,
    headers: dict[str, str] | None = None,
) -> dict[str, Any]:
    """`LLM.generate` does not take these."""
    import msgspec
    from vllm import SamplingParams
    from vllm.v1.kv_hints import KvHintsEnvelope

    llm.llm_engine.add_request(
        f"hinted-{time.monotonic_ns()}",
        {"prompt_token_ids": prompt},
        SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        session_id=session,
        kv_hints=None if hints is None else msgspec.convert(hints, KvHintsEnvelope),
        trace_headers=headers,
    )
    outputs: list[Any] = []
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step() or outputs
    return {"tokens": list(outputs[-1].outputs[0].token_ids)}


def embed(llm: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    outputs = llm.embed([prompt_of(llm, one) for one in requests], use_tqdm=False)
    vectors = [one.outputs.embedding for one in outputs]
    return {"vectors": vectors, "cached": [one.num_cached_tokens for one in outputs]}


def token_embed(llm: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Numbers of token vectors and cached tokens."""
    prompts = [prompt_of(llm, one) for one in requests]
    outputs = llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
    lengths = [len(one.outputs.data) for one in outputs]
    return {"lengths": lengths, "cached": [one.num_cached_tokens for one in outputs]}


def beam(llm: Any, tokens: list[int], width: int, max_tokens: int) -> dict[str, Any]:
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
    (output,) = llm.beam_search([{"prompt_token_ids": tokens}], params)
    found = output.sequences
    return {"tokens": [list(one.tokens) for one in found], "scores": [s.cum_logprob for s in found]}


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


def pause(llm: Any) -> dict[str, Any]:
    core = llm.llm_engine.engine_core.engine_core
    core.pause_scheduler(mode="abort")
    core.resume_scheduler()
    # Both caches of images must have the same.
    llm.llm_engine.reset_mm_cache()
    return {}


def _counted(llm: Any, name: str) -> float:
    return sum(one.value for one in llm.get_metrics() if one.name == f"vllm:{name}")


def preempted(llm: Any) -> dict[str, Any]:
    return {"requests": _counted(llm, "num_preemptions")}


def drafted(llm: Any) -> dict[str, Any]:
    return {"tokens": _counted(llm, "spec_decode_num_draft_tokens")}


def _ours(connector: Any) -> Any:
    """Also in a MultiConnector."""
    several = getattr(connector, "sub_connectors", [connector])
    return next(one for one in several if type(one).__name__ == "HotKVConnector")


def _scheduler_side(llm: Any) -> Any:
    return _ours(llm.llm_engine.engine_core.engine_core.scheduler.connector)._scheduler


def _worker_side(_: Any) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return _ours(get_kv_transfer_group())._worker


def version(llm: Any) -> dict[str, Any]:
    import vllm

    return {"version": vllm.__version__}


def block_size(llm: Any) -> dict[str, Any]:
    return {"tokens": llm.llm_engine.vllm_config.cache_config.block_size}


def stats(llm: Any) -> dict[str, Any]:
    side = _scheduler_side(llm)
    totals = dict(side.totals.data)
    for name, value in side.stats.data.items():
        totals[name] = totals.get(name, 0) + value
    planner = None if side.cache is None else side.cache.planner
    return {
        "totals": totals,
        "shares": side.sharing.may_offer and side.sharing.is_connected,
        "stores": 0 if planner is None else len(planner.in_flight) + len(planner.tails.waiting),
    }


def _door(llm: Any) -> Any:
    """Also in a MultiConnector; None without one."""
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    several = getattr(connector, "sub_connectors", [connector])
    doors = [one for one in several if type(one).__name__ == "HotKVOffloadingConnector"]
    return doors[0] if doors else None


def offloaded(llm: Any) -> dict[str, Any]:
    door = _door(llm)
    is_pending = door.scheduler.manager.has_pending_work()
    return {"all": door._door._tier.transfers.is_idle and not is_pending}


def wait(llm: Any, connected: bool, timeout_s: float) -> dict[str, Any]:
    """A door has no session before its key space is known."""
    door = _door(llm)

    def states() -> list[bool]:
        if door is None:
            sessions = [_scheduler_side(llm).cache.session, _worker_side(llm).rank.session]
        else:
            sessions = [door._door._tier.session]
        return [session is not None and session.connected for session in sessions]

    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s and set(states()) != {connected}:
        time.sleep(0.02)
    return {"connected": states()}


def freeze(llm: Any, call: str, pid: int) -> dict[str, Any]:
    """Stops the server just before the next `call` of `Session`."""
    door = _door(llm)
    session = _worker_side(llm).rank.session if door is None else door._door._tier.session
    original = getattr(session, call)

    def frozen(*arguments: Any, **named: Any) -> Any:
        setattr(session, call, original)
        os.kill(pid, signal.SIGSTOP)
        return original(*arguments, **named)

    setattr(session, call, frozen)
    return {"armed": call}


REQUESTS = (sample, generate, hinted, embed, token_embed, beam)
ENGINE = (add_adapter, reload, reset, pause, preempted, drafted, version, block_size)
CONNECTOR = (stats, offloaded, wait, freeze)
OPERATIONS = {one.__name__: one for one in (*REQUESTS, *ENGINE, *CONNECTOR)}

if __name__ == "__main__":
    main()

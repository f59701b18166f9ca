"""Two data-parallel engines behind one front end, driven as `engine_driver`: `generate` names the
engine (`rank`) that answers.

Engines and their ranks are forked, and nothing is compiled, as in `parallel_driver`.
"""

import asyncio
import json
import multiprocessing
import os
import sys
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    arguments = json.loads(sys.stdin.readline())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    import torch
    from vllm.v1.engine import coordinator, utils
    from vllm.v1.executor import multiproc_executor

    torch.compiler.set_stance("force_eager")
    for module in (coordinator, utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    asyncio.run(serve(arguments, answers))


async def serve(arguments: dict[str, Any], answers: Any) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    answers.write(json.dumps({"pid": os.getpid()}) + "\n")
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        if command.pop("op") == "stop":
            break
        try:
            answer = await generate(llm, **command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    llm.shutdown()


async def generate(
    llm: Any, prompts: list[list[int]], max_tokens: int, rank: int
) -> dict[str, Any]:
    from vllm import SamplingParams

    async def one(number: int, prompt: list[int]) -> Any:
        parameters = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=1
        )
        name = f"{rank}-{number}-{os.urandom(4).hex()}"
        async for output in llm.generate(
            {"prompt_token_ids": prompt}, parameters, name, data_parallel_rank=rank
        ):
            last = output
        return last

    outputs = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
    return {
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "logprobs": [
            [
                p[t].logprob
                for t, p in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)
            ]
            for o in outputs
        ],
        "cached": [o.num_cached_tokens for o in outputs],
    }


if __name__ == "__main__":
    main()

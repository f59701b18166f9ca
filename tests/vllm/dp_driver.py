"""Two data-parallel engines in a child process, with `constants` and commands as of
`engine_driver`; `rank` chooses the engine. All is forked and nothing compiled, to save time."""

import asyncio
import json
import os
import sys
from typing import Any

from engine_driver import answer_of, set_constants
from nursery import fork_engines


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    arguments = json.loads(sys.stdin.readline())
    # The engines are forked, and have them too.
    set_constants(arguments.pop("constants", {}))
    fork_engines()
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


async def generate(llm: Any, prompts: list[list[int]], max_tokens: int, rank: int) -> Any:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=1)

    async def one(number: int, tokens: list[int]) -> Any:
        name = f"{rank}-{number}-{os.urandom(4).hex()}"
        asked = {"prompt_token_ids": tokens}
        async for output in llm.generate(asked, parameters, name, data_parallel_rank=rank):
            last = output
        return last

    return answer_of(await asyncio.gather(*(one(*each) for each in enumerate(prompts))))


if __name__ == "__main__":
    main()

"""A vLLM engine that holds conversations: `python chat_engine.py SETTINGS` (arguments of `vllm.LLM`
as JSON).

Reads a JSON request per line: `conversations` (as in `bench.load.conversations`) and `clients`,
a number; answers with a JSON line. Each client takes the conversation that has waited longest,
sends its next turn, and puts it back. Imports nothing of hotkv: it also runs in other caches'
environments.
"""

import json
import os
import sys
import time
from collections import deque
from typing import Any


def hold(llm: Any, conversations: list[dict[str, Any]], num_clients: int) -> dict[str, Any]:
    """The seconds in all; per turn: seconds to the first token, tokens of the prompt, of them
    cached, tokens of the answer; and `gaps_s` between two tokens of an answer."""
    from vllm import SamplingParams

    engine, began_s = llm.llm_engine, time.perf_counter()
    histories = [list(one["prefix"]) for one in conversations]
    next_turn = [0] * len(conversations)
    waiting, asked, turns = deque(range(len(conversations))), dict[str, int](), []
    last_s, gaps_s = dict[str, float](), list[float]()
    while waiting or asked:
        while waiting and len(asked) < num_clients:
            index = waiting.popleft()
            turn = conversations[index]["turns"][next_turn[index]]
            histories[index] += turn["tokens"]
            params = SamplingParams(
                temperature=0.0, max_tokens=turn["answer_tokens"], ignore_eos=True
            )
            name = f"{began_s}-{index}-{next_turn[index]}"
            engine.add_request(name, {"prompt_token_ids": list(histories[index])}, params)
            asked[name] = index
            next_turn[index] += 1
        for output in engine.step():
            now_s = time.perf_counter()
            if output.request_id in last_s:
                gaps_s.append(now_s - last_s[output.request_id])
            last_s[output.request_id] = now_s
            if not output.finished:
                continue
            index = asked.pop(output.request_id)
            answer = list(output.outputs[0].token_ids)
            prompt_tokens = len(histories[index])
            histories[index] += answer
            first_s = output.metrics.first_token_latency
            turns.append([first_s, prompt_tokens, output.num_cached_tokens or 0, len(answer)])
            if next_turn[index] < len(conversations[index]["turns"]):
                waiting.append(index)
    return {"seconds": time.perf_counter() - began_s, "turns": turns, "gaps_s": gaps_s}


def main() -> int:
    """Reports when it is ready, and ends with stdin."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import vllm

    llm = vllm.LLM(**json.loads(sys.argv[1]))
    print(json.dumps({"vllm": vllm.__version__}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        llm.reset_prefix_cache()
        reply = hold(llm, request["conversations"], request["clients"])
        print(json.dumps(reply), file=answers)
    llm.llm_engine.engine_core.shutdown(timeout=40.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())

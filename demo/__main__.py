"""The demo: two vLLM engines, one after the other, share one cache through hotkv-server.

Engine A computes a long prompt and ends; the server keeps the KV. Engine B, another process,
answers the same prompt at once. At the end no process is left, and no file but the model in the
cache folder.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from demo import prompts
from demo.machine import WARM_UP_TOKENS, warm_up
from demo.processes import (
    Answer,
    ChildError,
    Engine,
    EngineSettings,
    Server,
    ends_cleanly,
    largest_logprob_difference,
    prepare_model,
    runtime_folder,
)
from demo.progress import step
from hotkv_client.command.tables import human_bytes

MOST_PROMPT_TOKENS = 4050
ANSWER_TOKENS = 16
# A quarter of the arena may be pinned by a lease before its load: 4,050 tokens in float32 fit.
ARENA = "768MiB"
ARENA_BYTES = 768 << 20


def table(
    num_tokens: int, cold: Answer, own: Answer, warm: Answer, stored_bytes: float, loaded: float
) -> str:
    """`loaded`: bytes."""
    rows = [
        ("", "engine A, cold", "A's own cache", "engine B, hotkv"),
        ("time to first token", *(f"{answer.ttft_s:.2f} s" for answer in (cold, own, warm))),
        ("against cold", "1", *(f"{answer.ttft_s / cold.ttft_s:.3f}" for answer in (own, warm))),
        ("prompt tokens", *(str(num_tokens) for _ in range(3))),
        ("tokens hit", *(str(answer.hit_tokens) for answer in (cold, own, warm))),
        (
            "bytes moved",
            f"{human_bytes(stored_bytes)} stored",
            "0",
            f"{human_bytes(loaded)} loaded",
        ),
        (
            "largest logprob difference",
            "",
            *(f"{largest_logprob_difference(cold, answer):.3f}" for answer in (own, warm)),
        ),
    ]
    return "\n".join(
        f"  {name:<28}" + "".join(f"{cell:>20}" for cell in cells) for name, *cells in rows
    )


@contextlib.contextmanager
def engine(
    name: str, server: Server, model: Path, folder: Path, seed: int
) -> Iterator[tuple[Engine, int]]:
    """Yields it with a prompt's length for this machine, once it has loaded the model and run
    other prompts."""
    with Engine(name, EngineSettings(str(model), server.target), folder) as running:
        with step(f"{name}: loading vLLM and the model"):
            running.wait_ready()
        with step(f"{name}: warming up on {WARM_UP_TOKENS} other tokens"):
            num_tokens = warm_up(running, model, seed, MOST_PROMPT_TOKENS)
        yield running, num_tokens
        with step(f"{name}: ending"):
            running.close()


def run(folder: Path) -> int:
    """Exit status: 0 if engine B hit."""
    with step("SmolLM2-135M: preparing it, once"):
        model = prepare_model()
    with Server(folder, ARENA) as server:
        with step(f"hotkv-server: starting with {ARENA}"):
            server.wait_ready()

        with engine("engine A", server, model, folder, seed=2) as (first, num_tokens):
            prompt = prompts.token_ids(model, seed=1, num_tokens=num_tokens)
            stored_before = server.counter("stored_bytes_total")
            with step(f"engine A: {num_tokens} tokens nobody has seen"):
                cold = first.generate(prompt, ANSWER_TOKENS)
            with step("engine A: the same again, from vLLM's own cache"):
                own = first.generate(prompt, ANSWER_TOKENS)
            server.wait_for_stores()
            stored_bytes = server.counter("stored_bytes_total") - stored_before

        with engine("engine B", server, model, folder, seed=4) as (second, _):
            loaded_before = server.counter("loaded_bytes_total")
            with step(f"engine B, another process: the {num_tokens} tokens engine A has seen"):
                warm = second.generate(prompt, ANSWER_TOKENS)
            loaded_bytes = server.counter("loaded_bytes_total") - loaded_before
            status = server.cli("status")

        print(
            f"\nvLLM {second.vllm_version} on CPU, eager, {second.dtype}\n"
            f"{table(num_tokens, cold, own, warm, stored_bytes, loaded_bytes)}\n"
        )
        print(
            f"the answers are {'equal' if warm.token_ids == cold.token_ids else 'different'}: "
            f"{warm.text.strip()!r}\n"
        )
        print(f"$ hotkv status\n{status}")
    return 0 if warm.hit_tokens else 1


def main() -> int:
    try:
        with ends_cleanly(), runtime_folder(2 * ARENA_BYTES) as folder:
            code = run(folder)
        print("engines and server have ended; nothing is left running")
        return code
    except KeyboardInterrupt:
        print("\nstopped; nothing is left running")
        return 130
    except ChildError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

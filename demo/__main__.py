"""The demo: two vLLM engines, one after the other, share one cache through hotkv-server.

Engine A computes a long prompt and ends, but the server keeps the computed KV. Engine B, another
process, answers the same prompt at once. At the end all processes have ended, and no file remains
except the model in the cache folder."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from demo import prompts
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

PROMPT_TOKENS = 4050
WARM_UP_TOKENS = 600
ANSWER_TOKENS = 16
ARENA = "512MiB"
ARENA_BYTES = 512 << 20


def table(cold: Answer, own: Answer, warm: Answer, stored_bytes: float, loaded_bytes: float) -> str:
    """Returns the result as a readable table."""
    rows = [
        ("", "engine A, cold", "A's own cache", "engine B, hotkv"),
        ("time to first token", *(f"{answer.ttft_s:.2f} s" for answer in (cold, own, warm))),
        ("against cold", "1", *(f"{answer.ttft_s / cold.ttft_s:.3f}" for answer in (own, warm))),
        ("prompt tokens", *(str(PROMPT_TOKENS) for _ in range(3))),
        ("tokens hit", *(str(answer.hit_tokens) for answer in (cold, own, warm))),
        (
            "bytes moved",
            f"{human_bytes(stored_bytes)} stored",
            "0",
            f"{human_bytes(loaded_bytes)} loaded",
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
def engine(name: str, server: Server, model: Path, folder: Path, seed: int) -> Iterator[Engine]:
    """Starts an engine, and yields it once it has loaded the model and run another prompt, so that
    vLLM's one-time work does not slow down later prompts."""
    with Engine(name, EngineSettings(str(model), server.target), folder) as running:
        with step(f"{name}: loading vLLM and the model"):
            running.wait_ready()
        with step(f"{name}: warming up on {WARM_UP_TOKENS} other tokens"):
            running.warm_up(prompts.token_ids(model, seed, WARM_UP_TOKENS))
        yield running
        with step(f"{name}: ending"):
            running.close()


def run(folder: Path) -> int:
    """Runs the demo with files in `folder`. Returns the exit status: 0 if engine B hit."""
    with step("SmolLM2-135M: preparing it, once"):
        model = prepare_model()
    prompt = prompts.token_ids(model, seed=1, num_tokens=PROMPT_TOKENS)
    with Server(folder, ARENA) as server:
        with step(f"hotkv-server: starting with {ARENA}"):
            server.wait_ready()

        with engine("engine A", server, model, folder, seed=2) as first:
            stored_before = server.counter("stored_bytes_total")
            with step(f"engine A: {PROMPT_TOKENS} tokens nobody has seen"):
                cold = first.generate(prompt, ANSWER_TOKENS)
            with step("engine A: the same again, from vLLM's own cache"):
                own = first.generate(prompt, ANSWER_TOKENS)
            server.wait_for_stores()
            stored_bytes = server.counter("stored_bytes_total") - stored_before

        with engine("engine B", server, model, folder, seed=3) as second:
            loaded_before = server.counter("loaded_bytes_total")
            with step(f"engine B, another process: the {PROMPT_TOKENS} tokens engine A has seen"):
                warm = second.generate(prompt, ANSWER_TOKENS)
            loaded_bytes = server.counter("loaded_bytes_total") - loaded_before
            status = server.cli("status")

        print(
            f"\nvLLM {second.vllm_version} on CPU, "
            f"eager\n{table(cold, own, warm, stored_bytes, loaded_bytes)}\n"
        )
        print(
            f"the answers are {'equal' if warm.token_ids == cold.token_ids else 'different'}: "
            f"{warm.text.strip()!r}\n"
        )
        print(f"$ hotkv status\n{status}")
    return 0 if warm.hit_tokens else 1


def main() -> int:
    """Runs the demo as a command."""
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

"""The second door beside the first: time to the first token of a hit in an engine with hotkv
behind its offloading (docs/doors.md).

Engines of a small model with random weights take turns on the same new prompts. `own` and `door`
compute and store, each through its connector. `own-reader` and `door-reader` are other processes,
which hit from the server. `primary` is vLLM's offloading alone, which hits in its own primary tier
once its device cache was emptied. On a CPU a memcpy stands in for the copy between device and
primary tier (`hotkv_vllm.testing.host_copies`).

Prints a table; `--json` prints a JSON object last:
- `tokens_equal`: all answers of a prompt are equal.
- `door_over_own`, `door_over_primary`, `door_over_compute`: first token of a hit through the door,
  over a hit through hotkv's own connector, over a hit in vLLM's primary tier, and over computing.
- the same with `_32k`, for prompts of 32,000 tokens.
- `tenth_hit_tokens`, `tenth_over_compute`, `tenth_tokens_equal`: a prompt of 131,072 tokens through
  a primary tier of a tenth of it.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import Bound, at_least, at_most, median, parser, print_figures, say
from bench.servers import GIB, serving
from demo.processes import Answer, Engine, EngineSettings, Server
from demo.random_llama import KV_TOKEN_BYTES, VOCAB, write_model

BOUNDS: Mapping[str, Bound] = {
    "tokens_equal": at_least(1),
    "door_over_own": at_most(1.25),
    "door_over_primary": at_most(1.4),
    "door_over_own_32k": at_most(1.25),
    "door_over_primary_32k": at_most(1.4),
}
LONG_TOKENS = 131_072
BLOCK_TOKENS = 32
ANSWER_TOKENS = 8
SETTLE_S = 1.3
"""Pause between two engines. A worker of vLLM's polls its queue for a second after its last step,
on the core to which all of the engines are bound (`SpinCondition.busy_loop_s`)."""
COPIES = {
    "spec_name": "HostTieringSpec",
    "spec_module_path": "hotkv_vllm.testing.host_copies",
}


@dataclass(frozen=True, slots=True)
class Round:
    """The answers to a prompt."""

    computed: Answer
    own: Answer
    door: Answer
    primary: Answer

    @property
    def are_equal(self) -> bool:
        answers = {one.token_ids for one in (self.computed, self.own, self.door, self.primary)}
        return len(answers) == 1


class Engines:
    """Starts engines of the same model over the same server."""

    def __init__(
        self, model: Path, max_tokens: int, server: Server, folder: Path, chunk_blocks: int = 1
    ) -> None:
        self._model, self._max_tokens, self._chunk_blocks = model, max_tokens, chunk_blocks
        self._server, self._folder = server, folder

    @contextlib.contextmanager
    def engine(self, name: str, connector: str, primary_bytes: int = 0) -> Iterator[Engine]:
        """Starts an engine. `primary_bytes`: its primary tier, if it offloads."""
        extra: dict[str, Any] = {}
        if connector.startswith("HotKV"):
            extra["hotkv.target"] = self._server.target
        if primary_bytes:
            extra |= {"cpu_bytes_to_use": primary_bytes, "offload_prompt_only": False, **COPIES}
            extra["blocks_per_chunk"] = self._chunk_blocks
        else:
            extra["hotkv.load"] = "always"
        arguments = {
            "load_format": "auto",
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "max_model_len": self._max_tokens,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": (self._max_tokens + 1024) * KV_TOKEN_BYTES,
            "max_num_batched_tokens": 8192,
            "kv_transfer_config": {
                "kv_connector": connector,
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            },
        }
        settings = EngineSettings(str(self._model), engine_args=arguments)
        with Engine(name, settings, self._folder) as one:
            one.wait_ready()
            yield one


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Returns token ids by chance."""
    import random

    return random.Random(seed).choices(range(10, VOCAB), k=num_tokens)


def compare(engines: Engines, server: Server, num_tokens: int, num_rounds: int) -> list[Round]:
    """Returns rounds of all engines over prompts of `num_tokens`."""
    primary_bytes = 2 * (num_tokens + 1024) * KV_TOKEN_BYTES + (8 << 20)
    rounds: list[Round] = []
    with contextlib.ExitStack() as stack:
        own, own_reader = (
            stack.enter_context(engines.engine(name, "HotKVConnector"))
            for name in ("own", "own-reader")
        )
        door, door_reader = (
            stack.enter_context(engines.engine(name, "HotKVOffloadingConnector", primary_bytes))
            for name in ("door", "door-reader")
        )
        alone = stack.enter_context(engines.engine("primary", "OffloadingConnector", primary_bytes))
        everyone = (own, own_reader, door, door_reader, alone)
        for one in everyone:
            one.warm_up(prompt(99, num_tokens))
        for number in range(num_rounds):
            tokens = prompt(1000 + number, num_tokens)
            computed = alone_on_the_machine(own, tokens)
            alone_on_the_machine(door, tokens)
            alone_on_the_machine(alone, tokens)
            alone.reset_prefix_cache()
            server.wait_for_stores()
            readers = [own_reader, door_reader, alone]
            turns = readers if number % 2 else readers[::-1]
            said = {one.name: alone_on_the_machine(one, tokens) for one in turns}
            rounds.append(Round(computed, said["own-reader"], said["door-reader"], said["primary"]))
            last = rounds[-1]
            say(
                f"{num_tokens} tokens, round {number + 1}: computed {last.computed.ttft_s:.3f} s, "
                f"own {last.own.ttft_s:.4f} ({last.own.hit_tokens}), "
                f"door {last.door.ttft_s:.4f} ({last.door.hit_tokens}), "
                f"primary {last.primary.ttft_s:.4f} ({last.primary.hit_tokens})"
            )
            for name in ("own", "door", "primary"):
                if getattr(last, name).token_ids != computed.token_ids:
                    say(f"{name} answers {getattr(last, name).token_ids}, not {computed.token_ids}")
    return rounds


def alone_on_the_machine(engine: Engine, tokens: list[int]) -> Answer:
    """Returns the engine's answer, once the engine before has stopped polling."""
    time.sleep(SETTLE_S)
    return engine.generate(tokens, ANSWER_TOKENS)


def through_a_tenth(engines: Engines, server: Server) -> dict[str, float]:
    """Returns figures of a prompt that is ten times as large as the primary tier."""
    tokens = prompt(7, LONG_TOKENS - 64)
    with engines.engine(
        "long", "HotKVOffloadingConnector", 2 * LONG_TOKENS * KV_TOKEN_BYTES
    ) as one:
        computed = one.generate(tokens, ANSWER_TOKENS)
        server.wait_for_stores()
    tenth = LONG_TOKENS * KV_TOKEN_BYTES // 10
    with engines.engine("tenth", "HotKVOffloadingConnector", tenth) as one:
        hit = one.generate(tokens, ANSWER_TOKENS)
    say(f"{len(tokens)} tokens: computed {computed.ttft_s:.2f} s, through a tenth {hit.ttft_s:.2f}")
    return {
        "tenth_hit_tokens": hit.hit_tokens,
        "tenth_over_compute": hit.ttft_s / computed.ttft_s,
        "tenth_tokens_equal": int(hit.token_ids == computed.token_ids),
    }


def figures_of(rounds: list[Round], suffix: str = "") -> dict[str, float]:
    """Returns the figures of rounds over prompts of the same length."""
    door_s = median([one.door.ttft_s for one in rounds])
    return {
        f"door_over_own{suffix}": door_s / median([one.own.ttft_s for one in rounds]),
        f"door_over_primary{suffix}": door_s / median([one.primary.ttft_s for one in rounds]),
        f"door_over_compute{suffix}": door_s / median([one.computed.ttft_s for one in rounds]),
    }


def main() -> int:
    flags = parser("The second door beside the first, and beside vLLM's own offloading.")
    flags.add_argument("--rounds", type=int, default=7)
    flags.add_argument("--only", choices=("4k", "32k", "tenth"), help="one part of it")
    flags.add_argument(
        "--chunk-blocks", type=int, default=1, help="blocks of a chunk of vLLM's offloading"
    )
    options = flags.parse_args()
    figures: dict[str, float] = {}
    equal = True
    with serving(3 * GIB) as server:
        folder = server.log.parent
        for name, num_tokens, suffix in (("4k", 4000, ""), ("32k", 32_000, "_32k")):
            if options.only in (None, name):
                model = write_model(folder / name, num_tokens + 64)
                engines = Engines(model, num_tokens + 64, server, folder, options.chunk_blocks)
                rounds = compare(engines, server, num_tokens, options.rounds)
                equal &= all(one.are_equal for one in rounds)
                figures |= figures_of(rounds, suffix)
        if options.only in (None, "tenth"):
            engines = Engines(
                write_model(folder / "long", LONG_TOKENS), LONG_TOKENS, server, folder
            )
            figures |= through_a_tenth(engines, server)
    figures = {"tokens_equal": int(equal), **figures}
    print_figures(figures, {k: v for k, v in BOUNDS.items() if k in figures}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares the time to a hit's first token through hotkv's two connectors: HotKVConnector (`own`),
and HotKVOffloadingConnector (`door`), behind vLLM's own offloading (docs/doors.md).

Engines with random weights take turns on the same new prompts. `own` and `door` compute and store;
`own-reader` and `door-reader`, other processes, hit in the server; `primary`, vLLM's offloading
alone, hits in its primary tier after its device cache was emptied. On a CPU a memcpy stands for the
copy between device and primary tier (`tests.doubles.host_copies`). `--gpu`: the first GPU, 1.1
billion parameters, copies through CUDA IPC for `own`.

Prints a table; `--json` prints a JSON object last:

- `tokens_equal`: 1 if all answers to each prompt are equal, else 0.
- `largest_logprob_difference`: between hits and computed answers.
- With `--gpu`: `own_equal` is 1 if `own-reader`'s tokens are the computed ones, `door_equal` if
  `door-reader`'s are those of `primary`.
- `door_over_own`, `door_over_primary`, `door_over_compute`: time to first token of a hit through
  HotKVOffloadingConnector, divided by that through HotKVConnector, in the primary tier, and of
  computing.
- `own_over_compute`: of a hit through HotKVConnector, divided by that of computing.
- the same with `_32k`: prompts of 32,000 tokens.
- `tenth_hit_tokens`, `tenth_over_compute`, `tenth_tokens_equal`: a hit of 131,072 tokens whose
  KV is ten times the primary tier.
"""

import contextlib
import itertools
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.report import Bound, at_least, at_most, median, parser, print_figures, say
from bench.servers import GIB, serving
from demo.processes import Answer, Engine, EngineSettings, Server, largest_logprob_difference
from demo.random_llama import TINY, Shape, write_model

BOUNDS: Mapping[str, Bound] = {
    "tokens_equal": at_least(1),
    "door_over_own": at_most(1.25),
    "door_over_primary": at_most(1.4),
    "door_over_own_32k": at_most(1.25),
    "door_over_primary_32k": at_most(1.4),
}
LONG_TOKENS = 131_072
BLOCK_TOKENS, CHUNK_BLOCKS = 32, 2
"""Chunks of 64 tokens, HotKVOffloadingConnector's default."""
ANSWER_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Place:
    """settle_s: between two engines' requests.
    offloading: settings of vLLM's.
    engine_args: of `vllm.LLM`.
    device: where torch draws the weights.
    """

    shape: Shape
    settle_s: float
    arena_bytes: int
    offloading: Mapping[str, str] = field(default_factory=dict)
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"

    def prompt(self, seed: int | str, num_tokens: int) -> list[int]:
        """Prompts of different lengths differ from the first token on."""
        return random.Random(f"{seed} {num_tokens}").choices(
            range(10, self.shape.vocab), k=num_tokens
        )


CPU = Place(
    TINY,
    # vLLM's worker polls its queue for a second after a step (`SpinCondition.busy_loop_s`), on
    # the core that all share.
    settle_s=1.3,
    arena_bytes=3 * GIB,
    offloading={
        "spec_name": "HostTieringSpec",
        "spec_module_path": "tests.doubles.host_copies",
    },
)
GPU = Place(
    Shape(16, 2048, 8192, 32, 8, 64, 32_000, "bfloat16"),
    settle_s=0.1,
    arena_bytes=8 * GIB,
    offloading={"spec_name": "TieringOffloadingSpec"},
    # KV memory is set in bytes, not by this share.
    engine_args={"gpu_memory_utilization": 0.15},
    device="cuda",
)


@dataclass(frozen=True, slots=True)
class Round:
    """One prompt, computed and hit in three ways: HotKVConnector, HotKVOffloadingConnector,
    vLLM's primary tier."""

    computed: Answer
    own: Answer
    door: Answer
    primary: Answer

    @property
    def are_equal(self) -> bool:
        answers = {one.token_ids for one in (self.computed, self.own, self.door, self.primary)}
        return len(answers) == 1

    @property
    def largest_logprob_difference(self) -> float:
        return max(
            largest_logprob_difference(self.computed, one)
            for one in (self.own, self.door, self.primary)
        )


class Engines:
    """They share a model and a server."""

    def __init__(
        self,
        place: Place,
        max_tokens: int,
        server: Server,
        folder: Path,
        chunk_blocks: int = CHUNK_BLOCKS,
    ) -> None:
        self.place, self._max_tokens, self._chunk_blocks = place, max_tokens, chunk_blocks
        self._server, self._folder = server, folder
        self._model = write_model(
            folder / f"model-{max_tokens}", max_tokens, place.shape, place.device
        )

    def bytes_of(self, num_tokens: int) -> int:
        return num_tokens * self.place.shape.kv_token_bytes

    @contextlib.contextmanager
    def engine(self, name: str, connector: str, primary_bytes: int = 0) -> Iterator[Engine]:
        """Not yet ready.

        connector: the class.
        primary_bytes: 0: without vLLM's offloading.
        """
        extra: dict[str, Any] = {}
        if connector.startswith("HotKV"):
            extra["hotkv.target"] = self._server.target
        if primary_bytes:
            extra |= {"cpu_bytes_to_use": primary_bytes, "offload_prompt_only": False}
            extra |= self.place.offloading
            extra["blocks_per_chunk"] = self._chunk_blocks
        else:
            extra["hotkv.load"] = "always"
        arguments = {
            "load_format": "auto",
            "skip_tokenizer_init": True,
            "dtype": self.place.shape.dtype,
            "max_model_len": self._max_tokens,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": self.bytes_of(self._max_tokens + 1024),
            "max_num_batched_tokens": 8192,
            "kv_transfer_config": {
                "kv_connector": connector,
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            },
            **self.place.engine_args,
        }
        settings = EngineSettings(str(self._model), engine_args=arguments)
        with Engine(name, settings, self._folder) as one:
            yield one

    def alone_on_the_machine(self, engine: Engine, tokens: list[int]) -> Answer:
        """Waits first: the previous engine polls its queue."""
        time.sleep(self.place.settle_s)
        return engine.generate(tokens, ANSWER_TOKENS)


LENGTHS = {"4k": (4000, ""), "32k": (32_000, "_32k")}
"""A prompt's tokens, and the suffix of its figures."""


def compare(
    engines: Engines, server: Server, lengths: Sequence[int], num_rounds: int
) -> dict[int, list[Round]]:
    """Returns rounds by length in tokens."""
    primary_bytes = engines.bytes_of(2 * (max(lengths) + 1024)) + (8 << 20)
    rounds: dict[int, list[Round]] = {}
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
            one.wait_ready()
        for number, num_tokens in itertools.product(range(num_rounds), lengths):
            if number == 0:
                for one in everyone:
                    one.generate(engines.place.prompt(99, num_tokens), max_tokens=4)
            tokens = engines.place.prompt(1000 + number, num_tokens)
            computed = engines.alone_on_the_machine(own, tokens)
            engines.alone_on_the_machine(door, tokens)
            engines.alone_on_the_machine(alone, tokens)
            alone.reset_prefix_cache()
            server.wait_for_stores()
            readers = [own_reader, door_reader, alone]
            turns = readers if number % 2 else readers[::-1]
            said = {one.name: engines.alone_on_the_machine(one, tokens) for one in turns}
            last = Round(computed, said["own-reader"], said["door-reader"], said["primary"])
            rounds.setdefault(num_tokens, []).append(last)
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


def through_a_tenth(engines: Engines, server: Server) -> dict[str, float]:
    """A hit whose KV is ten times the primary tier."""
    tokens = engines.place.prompt(7, LONG_TOKENS - 64)
    whole = engines.bytes_of(LONG_TOKENS)
    with engines.engine("long", "HotKVOffloadingConnector", 2 * whole) as one:
        one.wait_ready()
        computed = one.generate(tokens, ANSWER_TOKENS)
        server.wait_for_stores()
    with engines.engine("tenth", "HotKVOffloadingConnector", whole // 10) as one:
        one.wait_ready()
        hit = one.generate(tokens, ANSWER_TOKENS)
    say(f"{len(tokens)} tokens: computed {computed.ttft_s:.2f} s, through a tenth {hit.ttft_s:.2f}")
    return {
        "tenth_hit_tokens": hit.hit_tokens,
        "tenth_over_compute": hit.ttft_s / computed.ttft_s,
        "tenth_tokens_equal": int(hit.token_ids == computed.token_ids),
    }


def figures_of(rounds: list[Round], suffix: str = "") -> dict[str, float]:
    """The rounds have prompts of one length."""
    own_s, door_s, computed_s = (
        median([getattr(one, name).ttft_s for one in rounds])
        for name in ("own", "door", "computed")
    )
    return {
        f"door_over_own{suffix}": door_s / own_s,
        f"door_over_primary{suffix}": door_s / median([one.primary.ttft_s for one in rounds]),
        f"door_over_compute{suffix}": door_s / computed_s,
        f"own_over_compute{suffix}": own_s / computed_s,
    }


def on_gpu(place: Place) -> contextlib.AbstractContextManager[Server]:
    """Begins once the arena is pinned and copies are measured: full speed."""
    from bench.gpu.engine import find_side, settled

    return settled(find_side(made_up=False), place.arena_bytes)


def main() -> int:
    flags = parser("The second door beside the first, and beside vLLM's own offloading.")
    flags.add_argument("--rounds", type=int, default=7)
    flags.add_argument("--only", nargs="+", choices=(*LENGTHS, "tenth"), help="parts of it")
    flags.add_argument(
        "--chunk-blocks",
        type=int,
        default=CHUNK_BLOCKS,
        help="blocks of a chunk of vLLM's offloading, in all engines",
    )
    flags.add_argument("--gpu", action="store_true", help="engines on the first GPU")
    flags.add_argument(
        "--attention", default="", help="vLLM's attention backend, such as TRITON_ATTN"
    )
    options = flags.parse_args()
    place = GPU if options.gpu else CPU
    if options.attention:
        arguments = {**place.engine_args, "attention_backend": options.attention}
        place = replace(place, engine_args=arguments)
    figures: dict[str, float] = {}
    equal = own = door = True
    differ = 0.0
    with on_gpu(place) if options.gpu else serving(place.arena_bytes) as server:
        folder = server.log.parent
        lengths = [LENGTHS[name] for name in options.only or LENGTHS if name in LENGTHS]
        if lengths:
            longest = max(num_tokens for num_tokens, _ in lengths)
            engines = Engines(place, longest + 64, server, folder, options.chunk_blocks)
            found = compare(engines, server, [num for num, _ in lengths], options.rounds)
            for num_tokens, suffix in lengths:
                rounds = found[num_tokens]
                equal &= all(one.are_equal for one in rounds)
                own &= all(one.own.token_ids == one.computed.token_ids for one in rounds)
                door &= all(one.door.token_ids == one.primary.token_ids for one in rounds)
                differ = max([differ, *(one.largest_logprob_difference for one in rounds)])
                figures |= figures_of(rounds, suffix)
        if not options.only or "tenth" in options.only:
            engines = Engines(place, LONG_TOKENS, server, folder)
            figures |= through_a_tenth(engines, server)
    figures = {"tokens_equal": int(equal), "largest_logprob_difference": differ, **figures}
    bounds = {k: v for k, v in BOUNDS.items() if k in figures}
    if options.gpu:
        # bfloat16: a hit's tokens may differ from computed ones by rounding, so these replace
        # `tokens_equal`.
        figures |= {"own_equal": int(own), "door_equal": int(door)}
        bounds |= {"own_equal": at_least(1), "door_equal": at_least(1)}
        del bounds["tokens_equal"]
    print_figures(figures, bounds, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

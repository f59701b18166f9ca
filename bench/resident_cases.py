"""The cases of `bench.residency`: each starts its engines, lets them take turns over the same
requests, and returns rows."""

import contextlib
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.report import median, say
from demo import random_llama
from demo.machine import dtype_for
from demo.processes import EngineSettings, Server
from demo.watched import Batch, Watched, processor_s
from tools import smollm2

# ------------------------------------------------------------------------------------------ Engines
# The same weights and settings, with the whole KV cache on the device, and with a small pool and
# the server. One thread each; figures are processor times of engine and server together, which
# other programs hardly change; wall times beside them.

BLOCK_TOKENS = 32
NO_SERVER = "unix:/nonexistent/hotkv.sock"
SPARSE: dict[str, Any] = {
    "min_context_tokens": 512,
    "scorer": "rot2u",
    "dense_layers": [],
    "sink_tokens": 32,
    "recent_tokens": 64,
}


@dataclass(frozen=True, slots=True)
class Model:
    """words: token ids of prompts."""

    name: str
    folder: Path
    dtype: str
    layers: int
    kv_token_bytes: int
    words: range

    @property
    def block_bytes(self) -> int:
        """A block in all layers."""
        return BLOCK_TOKENS * self.kv_token_bytes

    def prompt(self, seed: str, num_tokens: int) -> list[int]:
        """Equal seeds give equal tokens."""
        return random.Random(seed).choices(self.words, k=num_tokens)


def llama(folder: Path, max_tokens: int) -> Model:
    """A random Llama of 4 layers."""
    made = random_llama.write_model(folder / f"llama-{max_tokens}", max_tokens)
    words = range(3, random_llama.VOCAB)
    return Model("llama", made, "float32", random_llama.LAYERS, random_llama.KV_TOKEN_BYTES, words)


def smollm() -> Model:
    """SmolLM2-135M-Instruct: 30 layers, 3 KV heads of 64 channels; bfloat16 if the processor has
    it."""
    folder = smollm2.prepare()
    dtype = dtype_for(str(folder)).replace("auto", "bfloat16")
    token_bytes = 30 * 2 * 3 * 64 * (4 if dtype == "float32" else 2)
    return Model("smollm2", folder, dtype, 30, token_bytes, range(20, 49000))


@dataclass(frozen=True, slots=True)
class Shape:
    """What both engines of a case share.

    max_tokens: largest context.
    chunk_tokens: of a prefill step.
    topk_tokens: that a step attends to, per sequence and layer.
    pool_tokens: of the small pool, the device's memory for blocks.
    max_seqs: in a step.
    extra: arguments of `vllm.LLM`.
    """

    model: Model
    max_tokens: int
    chunk_tokens: int
    topk_tokens: int
    pool_tokens: int
    max_seqs: int = 1
    extra: dict[str, Any] = field(default_factory=dict)

    def sparse(self, residency: str) -> dict[str, Any]:
        """Value of the setting `hotkv.sparse`."""
        return SPARSE | {"sparse_topk": self.topk_tokens, "residency": residency}

    def settings(
        self,
        pool_tokens: int,
        target: str,
        sparse: dict[str, Any] | None,
        *,
        in_process: bool = True,
        **more: Any,
    ) -> EngineSettings:
        """One block more than `pool_tokens`: vLLM's own.

        target: of the server, or NO_SERVER.
        sparse: `hotkv.sparse`; None: dense attention.
        in_process: vLLM's engine core is in the child that makes requests.
        more: arguments of `vllm.LLM`.
        """
        num_bytes = (pool_tokens // BLOCK_TOKENS + 1) * self.model.block_bytes
        connector: dict[str, Any] = {
            "hotkv.weights_identity": f"bench-{self.model.name}",
            "hotkv.lookup_timeout_s": 10.0,
        }
        connector |= {"hotkv.startup_wait_s": 0.0} if target == NO_SERVER else {}
        connector |= {} if sparse is None else {"hotkv.sparse": sparse}
        arguments = {
            "dtype": self.model.dtype,
            "max_model_len": self.max_tokens,
            "max_num_batched_tokens": self.chunk_tokens,
            "max_num_seqs": self.max_seqs,
            "kv_cache_memory_bytes": num_bytes,
            "async_scheduling": False,
        }
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        environment = threads | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        return EngineSettings(
            str(self.model.folder),
            target,
            connector,
            engine_args=arguments | self.extra | more,
            environment=environment,
        )

    def everything(self) -> EngineSettings:
        """Sparse decode with all blocks on the device, without a server."""
        room = self.max_seqs * (self.max_tokens + BLOCK_TOKENS)
        return self.settings(room, NO_SERVER, self.sparse("off"))

    def connected(self, server: Server) -> EngineSettings:
        """Dense, with room for all blocks on the device and the server's prefix cache."""
        room = self.max_seqs * (self.max_tokens + BLOCK_TOKENS)
        return self.settings(room, server.target, None)

    def resident(self, server: Server, **more: Any) -> EngineSettings:
        """Sparse, old blocks in the server, the small pool."""
        return self.settings(self.pool_tokens, server.target, self.sparse("host"), **more)


# ------------------------------------------------------------------------------------- Measurements

WALL, PROCESSOR = 0, 1
SKETCH = "rot2u"


@dataclass(frozen=True, slots=True)
class Exact:
    """A batch in a small pool with residency, against everything on the device.

    context_tokens: of all requests.
    tokens_equal: share of requests.
    max_logprob_diff: up to the first different token, included.
    lost: requests computed again, as their KV in host memory was lost.
    """

    case: str
    model: str
    context_tokens: int
    pool_tokens: int
    tokens_equal: float
    max_logprob_diff: float
    preemptions: float
    lost: float

    @property
    def context_over_pool(self) -> float:
        return self.context_tokens / self.pool_tokens


@dataclass(frozen=True, slots=True)
class Round:
    """One prompt in three ways: `dense_…`, `sparse_…` (all on the device), `resident_…` (old blocks
    in host memory). Pairs are wall and processor seconds.

    build_s: of sketches, in the resident prefill. hit_…: a second request, which hits: time to
        first token, tokens and bytes, pages copied to the device for the rest's prefill, sketches
        built. connector_hit_first_s: of the same hit in a dense engine with hotkv.
    pulled_pages: from host memory, in `num_steps` steps.
    """

    context_tokens: int
    dense_prefill_s: tuple[float, float]
    sparse_prefill_s: tuple[float, float]
    resident_prefill_s: tuple[float, float]
    build_s: float
    hit_first_s: tuple[float, float]
    connector_hit_first_s: tuple[float, float]
    hit_tokens: int
    hit_load_bytes: float
    hit_staged_pages: float
    hit_built_blocks: float
    dense_step_s: tuple[float, float]
    sparse_step_s: tuple[float, float]
    resident_step_s: tuple[float, float]
    pulled_pages: float
    num_steps: int


@dataclass(frozen=True, slots=True)
class Held:
    """Most bytes of a request, on the device and in the arena.

    expected_…: from the sizes of blocks and sketches.
    staging_bytes: where a prefill assembles its context.
    row_bytes: the engine's sketches; like staging, not in the pool.
    whole_bytes: the whole context's.
    """

    context_tokens: int
    device_bytes: float
    expected_device_bytes: float
    arena_bytes: float
    expected_arena_bytes: float
    staging_bytes: float
    row_bytes: float
    whole_bytes: float


@dataclass(frozen=True, slots=True)
class Together:
    """A batch in a small pool.

    way: `dense` (vLLM with a server) or `resident`.
    most_decoding: at once.
    cold_s: wall seconds with new prompts.
    warm_s, cpu_s: wall and processor seconds with prompts that the server has.
    decode_rate: tokens per processor second, in steps that decode the most requests.
    """

    way: str
    pool_tokens: int
    num_requests: int
    context_tokens: int
    answer_tokens: int
    most_decoding: int
    preemptions: float
    cold_s: float
    warm_s: float
    cpu_s: float
    decode_rate: float


@contextlib.contextmanager
def made(folder: Path) -> Iterator[None]:
    """Removed after the case: arenas of several cases never take memory at once."""
    folder.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def running(
    shape: Shape, folder: Path, arena: str, *resident: dict[str, object]
) -> Iterator[tuple[Server, Watched, list[Watched]]]:
    """Yields the server, the engine with everything on the device, and for each of `resident`
    (more settings) one with the small pool."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(made(folder))
        server = stack.enter_context(Server(folder, arena))
        server.wait_ready(600.0)
        whole = stack.enter_context(Watched("everything on the device", shape.everything(), folder))
        small = [
            stack.enter_context(
                Watched(f"resident {place}", shape.resident(server, **more), folder, server)
            )
            for place, more in enumerate(resident)
        ]
        for engine in (whole, *small):
            engine.wait_ready()
        yield server, whole, small


def compared(
    case: str, model: Model, pool_tokens: int, context_tokens: int, found: Batch, wanted: Batch
) -> Exact:
    """`found`: in the small pool; `wanted`: everything on the device. The tokens are only
    reported."""
    same = [one == other for one, other in zip(found.tokens, wanted.tokens, strict=True)]
    return Exact(
        case,
        model.name,
        context_tokens,
        pool_tokens,
        sum(same) / len(same),
        largest_difference(found, wanted),
        found.counter("preemptions"),
        found.counter("lost_residencies"),
    )


def largest_difference(found: Batch, wanted: Batch) -> float:
    """Of logprobs, up to the first token of an answer that differs, included."""
    largest = 0.0
    for ours, theirs, mine, others in zip(
        found.tokens, wanted.tokens, found.logprobs, wanted.logprobs, strict=True
    ):
        for token, other, one, its in zip(ours, theirs, mine, others, strict=True):
            largest = max(largest, abs(one - its))
            if token != other:
                break
    return largest


# ---------------------------------------------------------------------------------------- Exactness


def exactness(
    shape: Shape,
    cases: Sequence[tuple[str, Sequence[int]]],
    answer_tokens: int,
    folder: Path,
    arena: str,
    **more: object,
) -> list[Exact]:
    """cases: (name, lengths of prompts). more: settings of the engine with the small pool."""
    found = []
    with running(shape, folder, arena, more) as (_, whole, (small,)):
        for case, lengths in cases:
            prompts = [
                shape.model.prompt(f"{case} {place}", length)
                for place, length in enumerate(lengths)
            ]
            wanted = whole.batch(prompts, answer_tokens)
            got = small.batch(prompts, answer_tokens)
            tokens = sum(lengths) + len(lengths) * answer_tokens
            found.append(compared(case, shape.model, shape.pool_tokens, tokens, got, wanted))
            say(f"{found[-1]}")
    return found


# -------------------------------------------------------------------------------------------- Times


def _pair(batch: Batch) -> tuple[float, float]:
    """Wall and processor seconds to the first token of the batch's one request."""
    return batch.first_s[0][WALL], batch.prefill_cpu_s


def _steps(batch: Batch) -> tuple[float, float]:
    return batch.step_s(WALL), batch.step_s(PROCESSOR)


def times(
    shape: Shape, context_tokens: int, num_rounds: int, num_steps: int, folder: Path, arena: str
) -> tuple[list[Round], list[Exact], list[Held], Shape]:
    """A prompt a round. Returns the rounds, their comparisons with everything on the device, the
    first request's memory, and the shape.

    num_steps: decode steps of a round.
    """
    rounds: list[Round] = []
    exact: list[Exact] = []
    held: list[Held] = []
    num_prompt = context_tokens - num_steps
    with contextlib.ExitStack() as stack:
        server, whole, (small,) = stack.enter_context(running(shape, folder, arena, {}))
        connected = stack.enter_context(
            Watched("dense with the server", shape.connected(server), folder, server)
        )
        connected.wait_ready()
        warm = shape.model.prompt("warm", max(1024, shape.chunk_tokens))
        for engine in (whole, small, connected):
            engine.batch([warm], 8)
        for number in range(num_rounds):
            prompt = [shape.model.prompt(f"{context_tokens} {number}", num_prompt)]

            def computed(engine: Watched) -> Batch:
                settled(server)
                return engine.batch(prompt, num_steps)  # noqa: B023 - called in this round

            def dense() -> Batch:
                whole.dense(True)
                whole.forget()
                batch = computed(whole)
                whole.dense(False)
                return batch

            def sparse() -> Batch:
                whole.forget()
                return computed(whole)

            if number % 2:
                resident, kept, plain = computed(small), sparse(), dense()
            else:
                plain, kept, resident = dense(), sparse(), computed(small)
            sparse_again = computed(whole)
            whole.dense(True)
            plain_again, plain_more = computed(whole), computed(whole)
            whole.dense(False)
            connected.forget()
            # The first finds the blocks of the engine with residency: they share a key space.
            connected_hits = []
            for _ in range(2):
                connected_hits.append(_pair(computed(connected)))
                connected.forget()
            hit = computed(small)
            more = computed(small)
            exact.append(
                compared(
                    f"{context_tokens} in {shape.pool_tokens}",
                    shape.model,
                    shape.pool_tokens,
                    context_tokens,
                    resident,
                    kept,
                )
            )
            rounds.append(
                Round(
                    context_tokens,
                    _pair(plain),
                    _pair(kept),
                    _pair(resident),
                    resident.counter("sparse_build_s"),
                    _least(_pair(hit), _pair(more)),
                    _least(*connected_hits),
                    hit.cached[0],
                    hit.counter("load_bytes"),
                    hit.counter("resident_staged_pages"),
                    hit.counter("sparse_built_blocks"),
                    _least(_steps(plain_again), _steps(plain_more)),
                    _least(_steps(sparse_again), _steps(kept)),
                    _least(_steps(hit), _steps(more)),
                    hit.counter("resident_pulled_pages"),
                    num_steps,
                )
            )
            if not held:
                held.append(held_by(small, shape, resident, context_tokens))
            say(f"{rounds[-1]}")
            say(f"{exact[-1]}")
    return rounds, exact, held, shape


def _least(*pairs: tuple[float, float]) -> tuple[float, float]:
    """The smallest wall time and the smallest processor time."""
    return min(pair[WALL] for pair in pairs), min(pair[PROCESSOR] for pair in pairs)


def settled(server: Server, quiet_s: float = 0.4, most_s: float = 20.0) -> None:
    """Until the server has used little processor time for `quiet_s`: its work for one run must
    not count in the next."""
    until_s = time.monotonic() + most_s
    before = processor_s(server.pid)
    while time.monotonic() < until_s:
        time.sleep(quiet_s)
        now = processor_s(server.pid)
        if now - before < 0.1 * quiet_s:
            return
        before = now


# ------------------------------------------------------------------------------------------- Memory


def sketch_bytes(model: Model, kv_heads: int, head_size: int) -> int:
    """A block's sketches in all layers."""
    from hotkv_sparse.formats import head_bytes

    return model.layers * kv_heads * head_bytes(SKETCH, BLOCK_TOKENS, head_size)


def held_by(small: Watched, shape: Shape, batch: Batch, num_tokens: int) -> Held:
    """`small` has run the batch."""
    model = shape.model
    heads = (3, 64) if model.name == "smollm2" else (2, 32)
    beside = small.memory()
    blocks = num_tokens // BLOCK_TOKENS
    per_block = model.block_bytes + sketch_bytes(model, *heads)
    is_whole = small.device_blocks(num_tokens) == -(-num_tokens // BLOCK_TOKENS)
    return Held(
        num_tokens,
        batch.most_held * model.block_bytes,
        small.device_blocks(num_tokens) * model.block_bytes,
        batch.pinned_bytes,
        0 if is_whole else blocks * per_block,
        beside["staging"],
        beside["rows"],
        -(-num_tokens // BLOCK_TOKENS) * model.block_bytes,
    )


def memory(shape: Shape, contexts: Sequence[int], folder: Path, arena: str) -> list[Held]:
    """A request of each length, in the small pool."""
    found = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(made(folder))
        server = stack.enter_context(Server(folder, arena))
        server.wait_ready(600.0)
        small = stack.enter_context(Watched("resident", shape.resident(server), folder, server))
        small.wait_ready()
        for context in contexts:
            settled(server)
            batch = small.batch([shape.model.prompt(f"held {context}", context - 24)], 24)
            found.append(held_by(small, shape, batch, context))
            say(f"{found[-1]}")
    return found


# ----------------------------------------------------------------------------------------- Together


def together(
    shape: Shape,
    context_tokens: int,
    num_requests: int,
    answer_tokens: int,
    folder: Path,
    arena: str,
) -> list[Together]:
    """Pools of equal bytes; first new prompts, then the same, which the server has. No shared
    prefix."""
    found = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(made(folder))
        server = stack.enter_context(Server(folder, arena))
        server.wait_ready(600.0)
        engines = {
            "dense": Watched(
                "dense",
                shape.settings(shape.pool_tokens, server.target, None),
                folder,
                server,
            ),
            "resident": Watched("resident", shape.resident(server), folder, server),
        }
        for engine in engines.values():
            stack.enter_context(engine)
        for engine in engines.values():
            engine.wait_ready()
            engine.batch([shape.model.prompt("warm", 2048)], 8)
        cold: dict[str, Batch] = {}
        warm: dict[str, list[Batch]] = {way: [] for way in engines}
        prompts = {
            way: [
                shape.model.prompt(f"{way} {place}", context_tokens - answer_tokens)
                for place in range(num_requests)
            ]
            for way in engines
        }
        for way, engine in engines.items():
            settled(server)
            cold[way] = engine.batch(prompts[way], answer_tokens)
            say(f"{way}, cold: {cold[way].steps[-1][:2]}")
        for _ in range(2):
            for way, engine in engines.items():
                settled(server)
                engine.forget()
                warm[way].append(engine.batch(prompts[way], answer_tokens))
                say(f"{way}, warm: {warm[way][-1].steps[-1][:2]}")
        for way in engines:
            found.append(
                Together(
                    way,
                    shape.pool_tokens,
                    num_requests,
                    context_tokens,
                    answer_tokens,
                    max(batch.most_decoding for batch in (cold[way], *warm[way])),
                    sum(batch.counter("preemptions") for batch in (cold[way], *warm[way])),
                    cold[way].steps[-1][WALL],
                    median([batch.steps[-1][WALL] for batch in warm[way]]),
                    median(
                        [batch.steps[-1][PROCESSOR] + batch.server_cpu_s for batch in warm[way]]
                    ),
                    median([batch.decode_rate(PROCESSOR) for batch in warm[way]]),
                )
            )
            say(f"{found[-1]}")
    return found


# -------------------------------------------------------------------------------------------- Mixed


@dataclass(frozen=True, slots=True)
class Mixed:
    """One engine in a round: requests of all lengths, computed (cold), then repeated (warm).

    way: `dense` (vLLM), `host` (contexts in host memory), `auto` (there only if the pool runs
        short).
    cold_s, warm_s: wall and processor seconds, with the server's.
    moved: running requests whose context moved to host memory.
    most_decoding: at once.
    """

    way: str
    round: int
    pool_tokens: int
    context_tokens: int
    cold_s: tuple[float, float]
    warm_s: tuple[float, float]
    preemptions: float
    moved: float
    most_decoding: int

    def seconds(self, clock: int) -> float:
        """Cold and warm together. clock: WALL or PROCESSOR."""
        return self.cold_s[clock] + self.warm_s[clock]


def mixed(
    shape: Shape,
    contexts: Sequence[int],
    answer_tokens: int,
    num_rounds: int,
    folder: Path,
    arena: str,
    ways: Sequence[str],
) -> list[Mixed]:
    """With pools of equal bytes, in turns, without a shared prefix. ways: as `Mixed.way`."""
    found = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(made(folder))
        server = stack.enter_context(Server(folder, arena))
        server.wait_ready(600.0)
        engines = {}
        for way in ways:
            sparse = None if way == "dense" else shape.sparse(way)
            settings = shape.settings(shape.pool_tokens, server.target, sparse)
            engines[way] = stack.enter_context(Watched(way, settings, folder, server))
        for engine in engines.values():
            engine.wait_ready()
            engine.batch([shape.model.prompt("warm", 2048)], 8)
        for number in range(num_rounds):
            for place in range(len(ways)):
                way = ways[(number + place) % len(ways)]
                prompts = [
                    shape.model.prompt(f"{way} {number} {one}", context - answer_tokens)
                    for one, context in enumerate(contexts)
                ]
                cold, warm = (_again(engines[way], server, prompts, answer_tokens) for _ in "12")
                found.append(
                    Mixed(
                        way,
                        number,
                        shape.pool_tokens,
                        sum(contexts),
                        _taken(cold),
                        _taken(warm),
                        cold.counter("preemptions") + warm.counter("preemptions"),
                        cold.counter("moved_residencies") + warm.counter("moved_residencies"),
                        max(cold.most_decoding, warm.most_decoding),
                    )
                )
                say(f"{found[-1]}")
    return found


def _again(
    engine: Watched, server: Server, prompts: Sequence[Sequence[int]], answer_tokens: int
) -> Batch:
    settled(server)
    engine.forget()
    return engine.batch(prompts, answer_tokens)


def _taken(batch: Batch) -> tuple[float, float]:
    wall_s, processor_s, _ = batch.steps[-1]
    return wall_s, processor_s + batch.server_cpu_s

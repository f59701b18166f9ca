"""The cases of `bench.residency`, which compares contexts beyond device memory (old blocks only in
host memory) with contexts that are wholly on the device. Each function starts the engines of a
case, lets them take turns over the same requests, and returns rows of figures."""

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
# Engines that the cases of `bench.residency` run: the same weights and settings, once with the
# whole KV cache on the device and once with a small pool and the server.
#
# Each engine has a single thread. Figures are processor times of engine and server together, on
# which other programs of the machine have little effect. Wall times are reported beside them.

BLOCK_TOKENS = 32
NO_SERVER = "unix:/nonexistent/hotkv.sock"
SPARSE: dict[str, Any] = {
    "min_context_tokens": 512,
    "dense_layers": [],
    "sink_tokens": 32,
    "recent_tokens": 64,
}


@dataclass(frozen=True, slots=True)
class Model:
    """A model folder with the model's sizes.

    kv_token_bytes: bytes of a token's keys and values in all layers.
    words: the token ids from which prompts are drawn.
    """

    name: str
    folder: Path
    dtype: str
    layers: int
    kv_token_bytes: int
    words: range

    @property
    def block_bytes(self) -> int:
        """Returns the bytes of a block's keys and values in all layers."""
        return BLOCK_TOKENS * self.kv_token_bytes

    def prompt(self, seed: str, num_tokens: int) -> list[int]:
        """Returns random tokens. Equal seeds give equal tokens."""
        return random.Random(seed).choices(self.words, k=num_tokens)


def llama(folder: Path, max_tokens: int) -> Model:
    """Writes a random Llama of 4 layers to `folder` and returns it."""
    made = random_llama.write_model(folder / f"llama-{max_tokens}", max_tokens)
    words = range(3, random_llama.VOCAB)
    return Model("llama", made, "float32", random_llama.LAYERS, random_llama.KV_TOKEN_BYTES, words)


def smollm() -> Model:
    """Returns SmolLM2-135M-Instruct: 30 layers of 3 KV heads with 64 channels, in bfloat16 if the
    processor has it."""
    folder = smollm2.prepare()
    dtype = dtype_for(str(folder)).replace("auto", "bfloat16")
    token_bytes = 30 * 2 * 3 * 64 * (4 if dtype == "float32" else 2)
    return Model("smollm2", folder, dtype, 30, token_bytes, range(20, 49000))


@dataclass(frozen=True, slots=True)
class Shape:
    """Settings that are equal in both engines of a case. The pool is an engine's device memory for
    blocks: one engine has a small pool, the other a pool for everything.

    max_tokens: largest context.
    chunk_tokens: tokens of a prefill step.
    topk_tokens: the most tokens to which a step attends, per sequence and layer.
    pool_tokens: size of the small pool.
    max_seqs: most requests in a step.
    extra: more arguments of `vllm.LLM`.
    """

    model: Model
    max_tokens: int
    chunk_tokens: int
    topk_tokens: int
    pool_tokens: int
    max_seqs: int = 1
    extra: dict[str, Any] = field(default_factory=dict)

    def sparse(self, residency: str) -> dict[str, Any]:
        """Returns the value of the setting `hotkv.sparse`, with this value of its field
        `residency`."""
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
        """Returns the settings of an engine whose pool (device memory for blocks) holds
        `pool_tokens`. Adds one block to the pool, which vLLM reserves for itself.

        target: address of the server, or NO_SERVER.
        sparse: the setting `hotkv.sparse`; None: dense attention.
        in_process: whether vLLM's engine core runs in the child process that makes requests,
            instead of another process.
        more: more arguments of `vllm.LLM`.
        """
        num_bytes = (pool_tokens // BLOCK_TOKENS + 1) * self.model.block_bytes
        connector: dict[str, Any] = {
            "hotkv.sparse_recall_steps": 0,
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
        """Returns the settings of the engine with sparse decode that has the whole KV cache on the
        device, and no server."""
        room = self.max_seqs * (self.max_tokens + BLOCK_TOKENS)
        return self.settings(room, NO_SERVER, self.sparse("off"))

    def resident(self, server: Server, **more: Any) -> EngineSettings:
        """Returns the settings of the engine with sparse decode that keeps old blocks in host
        memory (in the server), with a pool of `pool_tokens` on the device."""
        return self.settings(self.pool_tokens, server.target, self.sparse("host"), **more)


# ------------------------------------------------------------------------------------- Measurements

WALL, PROCESSOR = 0, 1
SKETCH = "rot2u"


@dataclass(frozen=True, slots=True)
class Exact:
    """The comparison of a batch of requests in two engines: one has a small pool (device memory for
    blocks) and keeps old blocks in host memory; the other has everything on the device.

    context_tokens: sum over all requests.
    tokens_equal: share of the requests with equal tokens.
    max_logprob_diff: largest difference of logprobs, up to and including the first different token.
    lost: requests that were computed again because their KV in host memory was lost.
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
        """Returns the size of the contexts as a multiple of the small pool."""
        return self.context_tokens / self.pool_tokens


@dataclass(frozen=True, slots=True)
class Round:
    """The measurements of one prompt, which is computed and answered in three ways: with dense
    attention (`dense_…`), with sparse decode and everything on the device (`sparse_…`), and with
    old blocks in host memory (`resident_…`). Times are in seconds; a pair has the wall time and the
    processor time.

    …_prefill_s, …_step_s: time of the prefill, and of a decode step.
    build_s: time to build sketches (compact forms of blocks' keys) in the resident prefill.
    hit_…: a second request with the same prompt, which hits: time to the first token, tokens and
        bytes of the hit, pages copied to the device for the prefill of the rest, and
        sketches built.
    pulled_pages: pages that decode steps copied from host memory, in `num_steps` steps.
    """

    context_tokens: int
    dense_prefill_s: tuple[float, float]
    sparse_prefill_s: tuple[float, float]
    resident_prefill_s: tuple[float, float]
    build_s: float
    hit_first_s: tuple[float, float]
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
    """The most memory that a request occupied, in bytes: on the device and in the server's arena.

    expected_…: computed from the sizes of blocks and sketches (compact forms of keys).
    staging_bytes: buffer in which a prefill assembles its context on the device.
    row_bytes: the engine's sketches. Like the buffer, they are not part of the pool of
        blocks.
    whole_bytes: device memory that the whole context would take.
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
    """The results of a batch of requests that decode together in a small pool (device memory for
    blocks).

    way: `dense` (vLLM with dense attention and a server), or `resident` (old blocks only in host
        memory).
    most_decoding: the most requests that decoded at once.
    cold_s: wall seconds of the whole batch with new prompts.
    warm_s: wall seconds with prompts that the server has.
    cpu_s: processor seconds with prompts that the server has.
    decode_rate: decoded tokens per second of processor time, in those steps in which the most
        requests decode.
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
    """Creates a folder for a case's server and logs, and removes it after the case, so that the
    arenas of several cases never occupy memory at once."""
    folder.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def running(
    shape: Shape, folder: Path, arena: str, *resident: dict[str, object]
) -> Iterator[tuple[Server, Watched, list[Watched]]]:
    """Runs a server, an engine that holds everything on the device, and for each of `resident` an
    engine with a small pool, which keeps old blocks in host memory. Yields the server, the first
    engine and the list of the others.

    resident: settings of such an engine in addition to the shape's settings.
    """
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
    """Compares the answers of a batch of requests (`found`, from the engine with the small pool)
    with those of the same batch in an engine that has everything on the device (`wanted`).

    pool_tokens, context_tokens: size of the small pool, and tokens of all contexts; only reported.
    """
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
    """Returns the largest difference of logprobs between the answers of two batches, up to and
    including the first token of an answer that differs."""
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
    """Runs the prompts of each case (name, lengths of prompts in tokens) as a batch in two engines.
    One has everything on the device; the other has the small pool and the additional settings
    `more`. Returns a comparison of the answers for each case."""
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
    """Returns the wall and processor seconds to the first token of a batch that has one request."""
    return batch.first_s[0][WALL], batch.prefill_cpu_s


def _steps(batch: Batch) -> tuple[float, float]:
    return batch.step_s(WALL), batch.step_s(PROCESSOR)


def times(
    shape: Shape, context_tokens: int, num_rounds: int, num_steps: int, folder: Path, arena: str
) -> tuple[list[Round], list[Exact], list[Held], Shape]:
    """Measures prompts of `context_tokens`, one in each round, in the ways of `Round`. Returns the
    rounds; for each round, the comparison of the answers of the engine with the small pool with
    those of the engine that has everything on the device; the most memory that the first request
    occupied; and the shape.

    num_steps: decode steps of a round.
    folder, arena: the server's folder, and the size of its arena.
    """
    rounds: list[Round] = []
    exact: list[Exact] = []
    held: list[Held] = []
    num_prompt = context_tokens - num_steps
    with running(shape, folder, arena, {}) as (server, whole, (small,)):
        warm = shape.model.prompt("warm", max(1024, shape.chunk_tokens))
        for engine in (whole, small):
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
                    _pair(hit),
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
    """Returns the smallest of several times, separately for wall and processor time."""
    return min(pair[WALL] for pair in pairs), min(pair[PROCESSOR] for pair in pairs)


def settled(server: Server, quiet_s: float = 0.4, most_s: float = 20.0) -> None:
    """Waits until the server is idle, so that its work for one run does not count in the next run:
    until it has used little processor time for `quiet_s`, but at most `most_s`."""
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
    """Returns the bytes of a block's sketches (compact forms of its keys) in all layers."""
    from hotkv_sparse.formats import head_bytes

    return model.layers * kv_heads * head_bytes(SKETCH, BLOCK_TOKENS, head_size)


def held_by(small: Watched, shape: Shape, batch: Batch, num_tokens: int) -> Held:
    """Returns the most memory that the request of a batch occupied, measured and as expected for a
    context of `num_tokens`.

    small: the engine with the small pool, which ran the batch.
    """
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
    """Runs a request of each context length in an engine with the small pool. Returns the most
    memory that each of them occupied."""
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
    """Runs the same batch of requests in two engines whose pools (device memory for blocks) have
    equally many bytes: vLLM with dense attention and a server, and an engine with residency (old
    blocks in host memory). Each runs the batch first with new prompts, and then with prompts that
    the server has. Requests share no prefix; the engines take turns. Returns the results of
    each."""
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

WAYS = ("dense", "host", "auto")


@dataclass(frozen=True, slots=True)
class Mixed:
    """The results of one engine in a round of mixed traffic: requests of all lengths, which are
    computed (cold) and then repeated (warm).

    way: `dense` (vLLM with dense attention), `host` (contexts in host memory), or `auto` (in host
        memory only if the pool runs short).
    cold_s, warm_s: pairs of wall seconds and processor seconds. The processor seconds include those
        of the server.
    moved: number of running requests whose context moved to host memory.
    most_decoding: the most requests that decoded at once.
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
        """Returns the seconds of the round, cold and warm together: wall or processor time, as
        `clock` says."""
        return self.cold_s[clock] + self.warm_s[clock]


def mixed(
    shape: Shape,
    contexts: Sequence[int],
    answer_tokens: int,
    num_rounds: int,
    folder: Path,
    arena: str,
) -> list[Mixed]:
    """Runs rounds of mixed traffic (requests of all lengths in `contexts`) in three engines whose
    pools have equally many bytes: vLLM with a server (`dense`), contexts always in host memory
    (`host`), and contexts that move to host memory only if the pool runs short (`auto`). Returns
    the results of each engine and round. Engines take turns, and their prompts share no prefix."""
    found = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(made(folder))
        server = stack.enter_context(Server(folder, arena))
        server.wait_ready(600.0)
        engines = {}
        for way in WAYS:
            sparse = None if way == "dense" else shape.sparse(way)
            settings = shape.settings(shape.pool_tokens, server.target, sparse)
            engines[way] = stack.enter_context(Watched(way, settings, folder, server))
        for engine in engines.values():
            engine.wait_ready()
            engine.batch([shape.model.prompt("warm", 2048)], 8)
        for number in range(num_rounds):
            for place in range(len(WAYS)):
                way = WAYS[(number + place) % len(WAYS)]
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

"""Engines that the cases of `bench.residency` run: the same weights and settings, once with the
whole KV cache on the device and once with a small pool and the server.

Engines have one thread each. Times are processor time, the server's included, so that other
programs on the machine cost a run little; wall times stand beside them.
"""

import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.report import median
from demo import random_llama
from demo.processes import Engine, EngineSettings, Server
from hotkv.errors import HotKVError
from hotkv_client.admin import AdminClient
from tools import smollm2

BLOCK_TOKENS = 32
SETTLING_STEPS = 4
"""First steps of a decode, which complete its hot sets."""
NO_SERVER = "unix:/nonexistent/hotkv.sock"
POLL_S = 0.2
READY_S = 600.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
SPARSE: dict[str, Any] = {
    "min_context_tokens": 512,
    "dense_layers": [],
    "sink_tokens": 32,
    "recent_tokens": 64,
}


@dataclass(frozen=True, slots=True)
class Model:
    """A model folder. `kv_token_bytes`: keys and values of a token in all layers. Prompts have
    tokens of `words`."""

    name: str
    folder: Path
    dtype: str
    layers: int
    kv_token_bytes: int
    words: range

    @property
    def block_bytes(self) -> int:
        """Keys and values of a block in all layers."""
        return BLOCK_TOKENS * self.kv_token_bytes

    def prompt(self, seed: str, num_tokens: int) -> list[int]:
        """Random tokens, the same for the same seed."""
        return random.Random(seed).choices(self.words, k=num_tokens)


def llama(folder: Path, max_tokens: int) -> Model:
    """A random Llama of 4 layers, made in `folder`."""
    made = random_llama.write_model(folder / f"llama-{max_tokens}", max_tokens)
    words = range(3, random_llama.VOCAB)
    return Model("llama", made, "float32", random_llama.LAYERS, random_llama.KV_TOKEN_BYTES, words)


def smollm() -> Model:
    """SmolLM2-135M-Instruct: 30 layers of 3 KV heads of 64, in bfloat16."""
    return Model(
        "smollm2", smollm2.prepare(), "bfloat16", 30, 30 * 2 * 3 * 64 * 2, range(20, 49000)
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """Settings that both engines of a case share. `topk_tokens`: the budget of a sequence and
    layer. `pool_tokens`: of the engine with the small pool; the other one holds everything."""

    model: Model
    max_tokens: int
    chunk_tokens: int
    topk_tokens: int
    pool_tokens: int
    max_seqs: int = 1
    extra: dict[str, Any] = field(default_factory=dict)

    def sparse(self, residency: str) -> dict[str, Any]:
        """`hotkv.sparse`."""
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
        """Settings of an engine with a pool of so many tokens; vLLM keeps one block for itself."""
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
        """Sparse decode with the whole KV cache on the device, and no server."""
        room = self.max_seqs * (self.max_tokens + BLOCK_TOKENS)
        return self.settings(room, NO_SERVER, self.sparse("off"))

    def resident(self, server: Server, **more: Any) -> EngineSettings:
        """The same with old blocks in host memory."""
        return self.settings(self.pool_tokens, server.target, self.sparse("host"), **more)


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that ran together. `first_s`: of each, wall and processor seconds to its first
    token. `steps`: wall seconds, processor seconds and tokens of each step from the first token
    on. `most_held`: blocks of the pool at most. `pinned_bytes`: of the arena, at most."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    cached: list[int]
    ended: list[str]
    first_s: list[tuple[float, float]]
    steps: list[tuple[float, float, int]]
    most_held: int
    most_decoding: int
    counters: dict[str, float]
    server_cpu_s: float
    pinned_bytes: float

    def step_s(self, clock: int) -> float:
        """Median of the decode steps; `clock` 0: the wall's, 1: of processor time."""
        ends = [step[clock] for step in self.steps[SETTLING_STEPS:]]
        return median([after - before for before, after in pairwise(ends)])

    @property
    def prefill_cpu_s(self) -> float:
        """Processor seconds to the first token of a single request, the server's included."""
        return self.first_s[0][1] + self.server_cpu_s

    def counter(self, name: str) -> float:
        """Growth of one of the connector's counters."""
        return self.counters.get(name, 0.0)


class Runner(Engine):
    """An engine whose steps are timed. `server`: the one that it uses, if any."""

    MODULE = "bench.resident.engine_process"

    def __init__(
        self, name: str, settings: EngineSettings, folder: Path, server: Server | None = None
    ) -> None:
        super().__init__(name, settings, folder)
        self._server = server

    def batch(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Batch:
        """Runs requests together. Raises ChildError if one ends with an error."""
        server = self._server
        cpu_s = 0.0 if server is None else processor_s(server.pid)
        with _Pinned(server) as pinned:
            reply = self.ask({"op": "batch", "prompts": prompts, "max_tokens": max_tokens})
        took_s = 0.0 if server is None else processor_s(server.pid) - cpu_s
        found = Batch(**reply, server_cpu_s=took_s, pinned_bytes=pinned.most_bytes)
        if "error" in found.ended:
            raise self._child.error("a request ended with an error")
        return found

    def dense(self, is_dense: bool) -> None:
        """Attends to everything from now on, or sparsely again."""
        self.ask({"op": "mode", "dense": is_dense})

    def forget(self) -> None:
        """Empties vLLM's own prefix cache."""
        self.ask({"op": "reset"})

    def device_blocks(self, num_tokens: int) -> int:
        """Blocks that a request of so many tokens holds at most, by the engine's arithmetic."""
        return int(self.ask({"op": "device_blocks", "num_tokens": num_tokens})["blocks"])

    def memory(self) -> dict[str, float]:
        """Bytes beside the pool: staging area and rows of representations."""
        return {name: float(value) for name, value in self.ask({"op": "memory"}).items()}


class _Pinned:
    """Watches how much of the arena residencies pin, in a thread of its own."""

    def __init__(self, server: Server | None) -> None:
        self._server = server
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.most_bytes = 0.0

    def __enter__(self) -> "_Pinned":
        if self._server is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._server is not None:
            self._thread.join()

    def _watch(self) -> None:
        assert self._server is not None
        with AdminClient(self._server.target, 10.0) as admin:
            while not self._done.wait(POLL_S):
                try:
                    pinned = float(admin.info()["counters"]["residency_pinned_bytes"])
                except HotKVError:
                    continue
                self.most_bytes = max(self.most_bytes, pinned)


def processor_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    # After the name in brackets: state, then ten numbers, user and system time.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S

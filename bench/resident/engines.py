"""Engines that the cases of `bench.residency` run: the same weights and settings, once with the
whole KV cache on the device and once with a small pool and the server.

Engines have one thread each. Times are processor time, the server's included, so that other
programs on the machine cost a run little; wall times stand beside them.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo import random_llama
from demo.processes import EngineSettings, Server
from tools import smollm2

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

"""Computes a rank's memory before vLLM allocates its KV pool. If less is free, the engine does not
start.

Always true: the sum covers vLLM's KV pool and all that hotkv allocates for one request of the
longest context, but not the arena.
"""

from dataclasses import dataclass, fields
from typing import Any

from hotkv_client.command.tables import human_bytes
from hotkv_proto import limits
from hotkv_sparse import SparseConfig
from hotkv_sparse.formats import bytes_per_block
from hotkv_sparse.vllm.block_manager import layers_in_pool, resident_layers, resident_spec
from hotkv_sparse.vllm.cpu.resident_pages import AREAS
from hotkv_sparse.vllm.cpu.resident_sequences import MORE_ROWS, num_rows_for
from hotkv_sparse.vllm.settings import SPARSE, SparseSettings
from hotkv_vllm.config import ConfigError
from hotkv_vllm.link import logger


@dataclass(frozen=True, slots=True)
class Totals:
    """Bytes of one rank.

    pool: vLLM's KV cache with the hot slots.
    sketches: of the pool; on CUDA of `hotkv.sketch_tokens`.
    rows: of `KeptRows`; 0 on CUDA.
    staging: of the longest context, two on CPUs, one on CUDA.
    tables: on CUDA, with scratch memory of kernels.
    """

    pool: int
    sketches: int
    rows: int
    staging: int
    tables: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, one.name) for one in fields(self))

    def __str__(self) -> str:
        parts = [f"{one.name} {human_bytes(getattr(self, one.name))}" for one in fields(self)]
        return f"{human_bytes(self.total)} ({', '.join(parts)})"


def check_memory(vllm_config: Any, kv_cache_config: Any, config: SparseSettings) -> None:
    """Raises ConfigError if less is free. Must be called before vLLM allocates its pool."""
    if not config.is_resident:
        return
    if vllm_config.device_config.device_type == "cuda":
        # It imports vLLM's backend for CUDA.
        from hotkv_sparse.vllm.cuda import setup as cuda_setup

        found = cuda_setup.totals(config.sparse, config.sketch_tokens, vllm_config, kv_cache_config)
        free = cuda_setup.free_bytes()
    else:
        found = totals(config.sparse, vllm_config, kv_cache_config)
        free = limits.available_bytes()
    if found.total > free:
        raise ConfigError(
            f"{SPARSE}.residency = {config.sparse.residency!r}: this rank needs {found}, and "
            f"{human_bytes(free)} are free: lower kv_cache_memory_bytes or "
            "gpu_memory_utilization, max_model_len "
            f"({vllm_config.model_config.max_model_len}) or max_num_seqs "
            f"({vllm_config.scheduler_config.max_num_seqs})"
        )
    logger.info(
        "hotkv: with one request of %d tokens this rank takes %s; the server's arena comes on top",
        vllm_config.model_config.max_model_len,
        found,
    )


def totals(config: SparseConfig, vllm_config: Any, kv_cache_config: Any) -> Totals:
    spec = resident_spec(kv_cache_config)
    assert spec is not None, "not a resident engine"
    num_layers = len(resident_layers(kv_cache_config))
    row_bytes = sum(
        bytes_per_block(name, spec.block_size, spec.num_kv_heads, spec.head_size)
        for layer in range(num_layers)
        for name in config.scorers_of(layer)
    )
    longest = -(-int(vllm_config.model_config.max_model_len) // spec.block_size)
    num_blocks = int(kv_cache_config.num_blocks)
    return Totals(
        num_blocks * layers_in_pool(kv_cache_config) * spec.page_size_bytes,
        num_blocks * row_bytes,
        num_rows_for(longest + MORE_ROWS) * row_bytes,
        AREAS * longest * spec.page_size_bytes,
    )

"""Where a rank stands among the ranks of its engine.

Reads the parallel sizes of `ParallelConfig`, `KVCacheConfig.kv_tp_replicas`, and vLLM's process
groups.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank's shard lies. Of ranks that hold the same KV only the first writes. `rank`
    counts the engine's ranks, `stage` those of its pipeline.
    """

    rank: int
    num_shards: int
    shard_index: int
    is_writer: bool
    stage: int = 0


def rank_place(vllm_config: Any, kv_cache_config: Any) -> RankPlace:
    """This worker's place among the shards of a slot, if all stages hold as many copies as this one
    does."""
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

    parallel = vllm_config.parallel_config
    tp_size, pp_size, replicas = (
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        kv_cache_config.kv_tp_replicas,
    )
    rank = get_tensor_model_parallel_rank() if tp_size > 1 else 0
    stage = get_pp_group().rank_in_group if pp_size > 1 else 0
    per_stage = tp_size // replicas
    return RankPlace(
        stage * tp_size + rank,
        pp_size * per_stage,
        stage * per_stage + rank // replicas,
        rank % replicas == 0,
        stage,
    )


def num_ranks(vllm_config: Any) -> int:
    """Workers of this engine; another data-parallel rank is another engine."""
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)

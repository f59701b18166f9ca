"""What hotkv asks about an engine, or sets in it, before and while it runs.

Reads `ParallelConfig` (context-parallel sizes, `nnodes_within_dp`, `distributed_executor_backend`),
`KVCacheConfig.needs_kv_cache_zeroing`, `VllmConfig.use_v2_model_runner`,
`MultiModalConfig.mm_processor_cache_gb`, `CacheConfig.enable_prefix_caching`, `current_platform`,
and the names of functions on the call stack (`is_pausing`). Sets
`KVTransferConfig.kv_load_failure_policy`, and registers the connector by name.
"""

import sys
from types import FrameType
from typing import Any

from hotkv_vllm.compat import Unsupported
from hotkv_vllm.link import logger


def check_ranks(vllm_config: Any) -> None:
    """Raises Unsupported where hotkv can't keep the KV of all ranks together, whatever the ranks
    find."""
    parallel = vllm_config.parallel_config
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise Unsupported("prefill context parallelism is not supported yet")
    if getattr(parallel, "nnodes_within_dp", 1) > 1:
        raise Unsupported(
            "the engine's ranks are on several machines (nnodes); hotkv keeps KV of engines "
            "that "
            "are on one"
        )
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise Unsupported(
            "with the external launcher each rank has a scheduler of its own, and their hits "
            "could differ"
        )


def writes_before_it_tells(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether the runner overwrites blocks before it tells the connector's worker side, so that
    only the scheduler can revoke in time.

    Source: `GPUModelRunner.execute_model` of the V2 runner in vLLM 0.32: new blocks are zeroed,
    blocks copied and recurrent states moved before `pre_forward` calls `handle_preemptions`. The V1
    runner calls it first.
    """
    return bool(
        kv_cache_config.needs_kv_cache_zeroing
        and getattr(vllm_config, "use_v2_model_runner", False)
    )


def counts_media(vllm_config: Any) -> bool:
    """Whether vLLM names images and other media by a counter of its process, so that block hashes
    do not cover their content.

    Source: `BaseRenderer._process_mm_uuids` in vLLM 0.32: it skips hashing them where neither of
    its own caches needs a name.
    """
    media = vllm_config.model_config.multimodal_config
    return (
        media is not None
        and media.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
    )


def is_pausing() -> bool:
    """Whether vLLM resets its caches because the engine pauses, sleeps or gives back KV memory, not
    because somebody asked for a reset.

    Connectors get the same call for both, without arguments, and see no pause state, so the callers
    are looked at. Source: in vLLM 0.32 and 0.33 `EngineCore._reset_caches` makes the call for
    pauses only. Without such a caller it is taken for a reset.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (
            frame.f_code.co_name == "_reset_caches"
            and frame.f_globals.get("__name__") == "vllm.v1.engine.core"
        ):
            return True
        frame = frame.f_back
    return False


def preferred_layout() -> str | None:
    """The KV cache layout to ask vLLM for: blocks outermost on CUDA, so that a block of all layers
    is one run; elsewhere none."""
    from vllm.platforms import current_platform

    return "BLHNC" if current_platform.is_cuda() else None


def use_recompute_policy(configs: tuple[Any, ...], is_child: bool) -> None:
    """Makes vLLM compute what could not be loaded: sets the policy for failed loads to `recompute`.
    Must run before vLLM's scheduler reads it.

    `configs`: those that the scheduler may read, as `multi.outer_configs`; `is_child`: of a
    MultiConnector.
    """
    if None in configs:
        logger.warning(
            "hotkv can't set kv_load_failure_policy in this MultiConnector; set it to "
            "'recompute' beside kv_connector MultiConnector, "
            "or a failed load ends its request as an error"
        )
    transfers = [config.kv_transfer_config for config in configs if config is not None]
    others = [one for one in transfers if one.kv_load_failure_policy != "recompute"]
    for transfer in others:
        transfer.kv_load_failure_policy = "recompute"
    if others:
        logger.info(
            "hotkv: kv_load_failure_policy is set to 'recompute'%s, so that a failed load "
            "costs time, not the request",
            ", for all connectors of this engine" if is_child else "",
        )


def name_connector(name: str, module: str) -> None:
    """Makes the connector known to vLLM by name, unless it is. Its MultiConnector wants that of all
    it holds, module path or not."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(name, module, name)
    except ValueError:
        # It is known already.
        return

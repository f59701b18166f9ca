"""Answers questions about an engine from vLLM's configuration, the process's environment and the
call stack. Also changes the few settings of vLLM that hotkv must change.

Parts of vLLM that this module reads: `ParallelConfig` (context-parallel sizes, `nnodes_within_dp`,
`distributed_executor_backend`, `pipeline_parallel_size`), `ModelConfig.runner_type`,
`KVCacheConfig.needs_kv_cache_zeroing`, `VllmConfig.use_v2_model_runner`,
`KVCacheConfig.kv_tp_replicas`, vLLM's process groups, `MultiModalConfig.mm_processor_cache_gb`,
`CacheConfig.enable_prefix_caching`, `current_platform`, and functions on the call stack
(`is_pausing`, `outer_configs`). Sets `KVTransferConfig.kv_load_failure_policy`, and registers the
connector by name in `KVConnectorFactory._registry`, which also lists vLLM's own connectors by name.
"""

import itertools
import os
import socket
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

from hotkv_vllm.compat import Unsupported
from hotkv_vllm.config import ConfigError, cuda_settings
from hotkv_vllm.link import logger

# --------------------------------------------------------------------------------------- the engine


def check_ranks(vllm_config: Any) -> None:
    """Raises Unsupported if the engine runs its ranks in a way that hotkv does not support: with
    prefill context parallelism, on several machines, or with a scheduler in each rank. Reads only
    the configuration."""
    parallel = vllm_config.parallel_config
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise Unsupported("prefill context parallelism is not supported yet")
    if getattr(parallel, "nnodes_within_dp", 1) > 1:
        raise Unsupported(
            "the engine's ranks are on several machines (nnodes); hotkv keeps KV of engines that "
            "are on one"
        )
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise Unsupported(
            "with the external launcher each rank has a scheduler of its own, and their hits "
            "could differ"
        )


def check_pooling(vllm_config: Any) -> None:
    """Raises ConfigError for a pooling model that the V1 runner runs with pipeline parallelism.
    With any KV connector such an engine would crash at its first request.

    Source: `KVOutputAggregator.aggregate` in vLLM 0.32 and 0.33 needs an output of each rank. With
    pooling, the V1 runner returns an output in the last pipeline stage only.
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if (
        vllm_config.model_config.runner_type == "pooling"
        and stages > 1
        and not getattr(vllm_config, "use_v2_model_runner", False)
    ):
        raise ConfigError(
            f"pooling with pipeline_parallel_size = {stages}: vLLM's model runner V1 ends at the "
            "first request if there is a KV connector; leave out kv_transfer_config"
        )


def writes_before_it_tells(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Returns True if vLLM's model runner overwrites blocks before it notifies the connector's
    worker side. In such an engine only the scheduler side can revoke stores in time.

    Source: `GPUModelRunner.execute_model` of the V2 runner in vLLM 0.32: this runner zeroes new
    blocks, copies blocks and moves recurrent states before `pre_forward` calls
    `handle_preemptions`. The V1 runner calls `handle_preemptions` first.
    """
    return bool(
        kv_cache_config.needs_kv_cache_zeroing
        and getattr(vllm_config, "use_v2_model_runner", False)
    )


def counts_media(vllm_config: Any) -> bool:
    """Returns True, and logs a warning, if vLLM identifies images and other media by a counter of
    its process, so that block hashes do not cover the content of media.

    Source: `BaseRenderer._process_mm_uuids` in vLLM 0.32: vLLM does not hash media if none of its
    own caches needs the hash.
    """
    media = vllm_config.model_config.multimodal_config
    is_counted = (
        media is not None
        and media.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
    )
    if is_counted:
        logger.warning(
            "hotkv: requests with images or other media do not use the shared cache: vLLM names "
            "media by a counter where mm_processor_cache_gb is 0 and prefix caching is off; turn "
            "one of them on"
        )
    return is_counted


def is_pausing() -> bool:
    """Returns True if vLLM is resetting its caches because the engine pauses, sleeps or frees KV
    memory; False if a user has asked for the reset.

    In both cases vLLM calls the connector's `reset_cache` without arguments, so the call itself
    does not show the reason. Therefore this function looks for `EngineCore._reset_caches` on the
    call stack. Source: in vLLM 0.32 and 0.33 only pauses call `_reset_caches`. If it is not on the
    call stack, the reset counts as a user's.
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


def is_device_empty(kv_cache_manager: Any) -> bool:
    """Returns True if no request uses a device block. Only then does a reset of vLLM's prefix
    cache empty the device. Returns False if this can't be determined.

    Source: `BlockPool.reset_prefix_cache` succeeds only if no block but the null block is in use.
    """
    pool = getattr(kv_cache_manager, "block_pool", None)
    return pool is not None and pool.num_gpu_blocks - pool.get_num_free_blocks() == 1


def model_names(vllm_config: Any) -> tuple[str, ...]:
    """Returns the names by which requests address the model, as far as the engine knows the names.
    If there are several names, vLLM passes only the first to the engine. The name is shortened as
    `shown_name` does.

    Source: `get_served_model_name` in vLLM 0.32.
    """
    name = shown_name(str(vllm_config.model_config.served_model_name or ""))
    return (name,) if name else ()


MAX_NAME_CHARS = 200
"""A model's name, and a pod's name in an engine's name, have at most this many characters."""


def shown_name(text: str) -> str:
    """Returns the printable characters of a name, at most MAX_NAME_CHARS. The server refuses names
    with other characters, and names of more than 256 characters."""
    return "".join(filter(str.isprintable, text))[:MAX_NAME_CHARS]


def engine_name(engine_id: str) -> str:
    """Returns a readable name of the engine: the name of its pod, or `host:pid` of this process if
    it does not run in a pod.

    In Kubernetes the pod's name is the variable POD_NAME (set by the downward API). If the variable
    is not set, the host name is used; with `hostNetwork` this is the node's name. The name of a
    data-parallel replica ends with the replica's number.

    Source: vLLM 0.32 appends `_dp` and the replica's number to `engine_id`.
    """
    pod = os.environ.get("POD_NAME", "").strip()
    if not pod and "KUBERNETES_SERVICE_HOST" in os.environ:
        pod = os.environ.get("HOSTNAME") or socket.gethostname()
    pod = shown_name(pod)
    if not pod:
        return f"{socket.gethostname()}:{os.getpid()}"
    _, is_replica, replica = engine_id.rpartition("_dp")
    return f"{pod}/dp{replica}" if is_replica and replica.isdecimal() else pod


def publishes_events(vllm_config: Any) -> bool:
    """Returns True if vLLM's settings make the engine publish KV events."""
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def preferred_layout(vllm_config: Any) -> str | None:
    """Returns the KV cache layout that hotkv prefers, by vLLM's name for it; None on platforms
    other than CUDA. In the layout BLHNC, all layers' pages of a block are contiguous. In an engine
    with residency (contexts beyond device memory) the layout is LBHNC: all blocks' pages of a layer
    are contiguous, because its kernels need this. Raises ConfigError if a setting is wrong."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    return "BLHNC" if cuda_settings(extra) is None else "LBHNC"


def use_recompute_policy(configs: tuple[Any, ...], is_child: bool) -> None:
    """Sets vLLM's `kv_load_failure_policy` to `recompute`, so that vLLM computes the tokens of a
    failed load instead of failing the request. Must be called before vLLM's scheduler reads the
    policy.

    configs: the configurations from which the scheduler may read the policy. An entry is None if
        the configuration was not found; then a warning is logged.
    is_child: True if hotkv is in a MultiConnector.
    """
    if None in configs:
        logger.warning(
            "hotkv can't set kv_load_failure_policy in this MultiConnector; set it to 'recompute' "
            "beside kv_connector MultiConnector, or a failed load ends its request as an error"
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
    """Registers a connector's name with vLLM, unless it is registered already. Needed because
    MultiConnector looks up its children by name, even if their module path is configured.

    name: name of the connector and of its class.
    module: the module of the class.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(name, module, name)
    except ValueError:
        # vLLM raises ValueError if the name is registered already, for example by hotkv's plugin.
        return


# ---------------------------------------------------------------------------------------- its ranks


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's position in the engine, and the position of its shard (its part of a block) in a
    slot of the server (the memory of one block).

    rank: number of the rank in the engine.
    num_shards: number of shards in a slot.
    shard_index: index of this rank's shard in a slot.
    is_writer: True if this rank stores its shard. If several ranks hold the same KV, only the first
        of these ranks stores it.
    stage: number of the rank's pipeline stage.
    """

    rank: int
    num_shards: int
    shard_index: int
    is_writer: bool
    stage: int = 0


def rank_place(vllm_config: Any, kv_cache_config: Any) -> RankPlace:
    """Returns the position of this worker in the engine, and the position of its shard in a slot.
    Assumes that every pipeline stage has the same number of ranks, and that in every stage the same
    number of ranks hold a copy of the same KV."""
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

    parallel = vllm_config.parallel_config
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    replicas = kv_cache_config.kv_tp_replicas
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
    """Returns the number of workers of this engine. Each data-parallel replica is an engine of its
    own."""
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)


# ------------------------------------------------------------------------------- its MultiConnector

MULTI_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"


def outer_configs() -> tuple[Any, ...]:
    """Returns the configuration of each MultiConnector that contains hotkv's connector, innermost
    first. An entry is None if the configuration was not found. The result is empty if hotkv is not
    in a MultiConnector. Must be called while the MultiConnector constructs or calls hotkv's
    connector, because this function looks for MultiConnectors on the call stack. It keeps no
    reference to a frame.

    vLLM does not tell a connector whether it is a child of a MultiConnector. The connector must
    know this for three reasons:
    - A child gets a copy of the engine's configuration. vLLM does not see changes that the child
      makes in this copy.
    - MultiConnector forwards the handshake of only one child, to all children.
    - MultiConnector raises if two children ask for different KV cache layouts.
    """
    multi: type | None = getattr(sys.modules.get(MULTI_CONNECTOR), "MultiConnector", None)
    found: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and multi is not None:
        names = frame.f_locals
        owner = names.get("self", names.get("cls"))
        if owner is not None and issubclass(
            owner if isinstance(owner, type) else type(owner), multi
        ):
            found.append(next((value for value in names.values() if _has_children(value)), None))
        frame = frame.f_back
    return tuple(found)


MOVE_WITH_THE_CACHE = {
    "DecodeBenchConnector",
    "ExampleConnector",
    "ExampleHiddenStatesConnector",
    "HotKVOffloadingConnector",
}
"""Names of the connectors that still work after hotkv has moved the KV cache to other addresses,
because they access the cache through its tensors in each step."""


def earlier_connectors(outer: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the names of the connectors in the same MultiConnector (or in an outer
    MultiConnector) that register the KV cache before hotkv's connector does: those that precede it
    in the configured list.

    outer: the configurations of these MultiConnectors, innermost first: the result of
        `outer_configs` in the constructor of hotkv's connector.
    """
    found: list[str] = []
    path = "HotKVConnector"
    for config in filter(None, outer):
        children = config.kv_transfer_config.kv_connector_extra_config["connectors"]
        names = [child["kv_connector"] for child in children]
        found += itertools.takewhile(path.__ne__, names)
        path = "MultiConnector"
    return tuple(found)


def check_earlier(earlier: tuple[str, ...], device_type: str) -> None:
    """Raises Unsupported if another connector has registered the addresses of the KV cache earlier.
    hotkv is about to move the KV cache of a CPU engine to shared memory, so these addresses would
    become invalid. Connectors in MOVE_WITH_THE_CACHE are allowed, because they keep no addresses.
    For a connector that is not in vLLM's registry, only logs a warning, because it is not known
    whether this connector keeps addresses. Does nothing in an engine on another device, because
    hotkv moves the KV cache only on CPUs.

    earlier: the result of `earlier_connectors`.
    device_type: type of the device that holds the KV cache, such as `cpu`.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in earlier if device_type == "cpu" else ():
        why = (
            f"{name} comes before HotKVConnector in its MultiConnector. On a CPU engine hotkv "
            "moves the KV cache to shared memory, and addresses that were registered earlier lead "
            "nowhere; name HotKVConnector first in kv_connector_extra_config.connectors"
        )
        if name in KVConnectorFactory._registry and name not in MOVE_WITH_THE_CACHE:
            raise Unsupported(why)
        if name not in MOVE_WITH_THE_CACHE:
            logger.warning("hotkv: %s, if it keeps addresses", why)


def _has_children(config: Any) -> bool:
    transfer = getattr(config, "kv_transfer_config", None)
    return transfer is not None and "connectors" in transfer.kv_connector_extra_config


def others_state_a_layout(connector: type, outer: tuple[Any, ...]) -> bool:
    """Returns True if another child of the MultiConnector asks for a KV cache layout, or if this
    can't be determined.

    connector: the class of hotkv's connector.
    outer: the result of `outer_configs`.
    """
    if len(outer) != 1 or outer[0] is None:
        # Don't ask the other children if MultiConnectors are nested: an inner MultiConnector would
        # ask hotkv's connector again, without end.
        return True
    multi = sys.modules[MULTI_CONNECTOR].MultiConnector
    return any(
        child.get_required_kvcache_layout(config) is not None
        for child, config in multi._get_connector_classes_and_configs(outer[0])
        if child is not connector
    )

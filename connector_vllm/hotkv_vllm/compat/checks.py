"""Answers questions about an engine from vLLM's configuration, the environment and the call stack.

Of vLLM it changes `KVTransferConfig.kv_load_failure_policy` and `KVConnectorFactory._registry`.
"""

import itertools
import os
import socket
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

from hotkv_vllm.compat import Unsupported
from hotkv_vllm.config import ConfigError, ConnectorConfig
from hotkv_vllm.link import logger

# --------------------------------------------------------------------------------------- the engine


def check_ranks(vllm_config: Any) -> None:
    """Raises Unsupported for prefill context parallelism, several machines, or a scheduler in
    each rank."""
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
    """Raises ConfigError for a pooling model with pipeline parallelism in the V1 runner, which
    would crash at its first request with any KV connector: `KVOutputAggregator.aggregate` (vLLM
    0.32, 0.33) needs each rank's output, and only the last stage has one."""
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
    """Whether vLLM's runner overwrites blocks before it notifies the connector's worker side, so
    that only the scheduler side can revoke stores in time.

    `GPUModelRunner.execute_model` of the V2 runner (vLLM 0.32) zeroes and copies blocks and
    moves recurrent states before `pre_forward` calls `handle_preemptions`. V1 calls that first.
    """
    return bool(
        kv_cache_config.needs_kv_cache_zeroing
        and getattr(vllm_config, "use_v2_model_runner", False)
    )


def counts_media(vllm_config: Any) -> bool:
    """Whether vLLM names media by a counter, so that block hashes do not cover them; warns if
    so. It does so if none of its caches needs their hash (`BaseRenderer._process_mm_uuids`, vLLM
    0.32)."""
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
    """Whether vLLM resets its caches because the engine pauses, sleeps or frees KV memory, not
    for a user: looks for `EngineCore._reset_caches` on the call stack, which in vLLM 0.32 and
    0.33 only pauses call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (
            frame.f_code.co_name == "_reset_caches"
            and frame.f_globals.get("__name__") == "vllm.v1.engine.core"
        ):
            return True
        frame = frame.f_back
    return False


def tells_of_sleep(vllm_config: Any) -> bool:
    """Whether vLLM has KV memory withdrawn (`unregister_kv_caches`, new in 0.33) before it unmaps
    it for a sleep."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return hasattr(KVConnectorBase_V1, "unregister_kv_caches") or not getattr(
        vllm_config.model_config, "enable_sleep_mode", False
    )


def is_device_empty(kv_cache_manager: Any) -> bool:
    """Whether no request uses a device block, so that a reset of vLLM's prefix cache empties the
    device (`BlockPool.reset_prefix_cache`). False if unknown."""
    pool = getattr(kv_cache_manager, "block_pool", None)
    return pool is not None and pool.num_gpu_blocks - pool.get_num_free_blocks() == 1


def model_names(vllm_config: Any) -> tuple[str, ...]:
    """Names by which requests address the model: vLLM passes the engine only the first
    (`get_served_model_name`, vLLM 0.32)."""
    name = shown_name(str(vllm_config.model_config.served_model_name or ""))
    return (name,) if name else ()


MAX_NAME_CHARS = 200


def shown_name(text: str) -> str:
    """The server refuses unprintable characters, and names of more than 256."""
    return "".join(filter(str.isprintable, text))[:MAX_NAME_CHARS]


def engine_name(engine_id: str) -> str:
    """Name of the engine's pod, or `host:pid`.

    In Kubernetes this is POD_NAME (downward API), else the host name, with `hostNetwork` the
    node's. A replica's ends with its number, which vLLM 0.32 appends to `engine_id` after `_dp`.
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
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def preferred_layout(vllm_config: Any) -> str | None:
    """None but on CUDA. BLHNC: all layers' pages of a block are contiguous. A companion may need
    another. Raises ConfigError."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    companion = ConnectorConfig.from_extra_config(extra).companion
    return (companion and companion.cuda_layout) or "BLHNC"


def use_recompute_policy(configs: tuple[Any, ...], is_child: bool) -> None:
    """Makes vLLM compute the tokens of a failed load instead of failing the request. Before its
    scheduler reads the policy.

    configs: from which it may read it; None (warned of) for one that was not found.
    is_child: in a MultiConnector.
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
    """Registers a connector unless it is: MultiConnector looks up its children by name, whatever
    their module path."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(name, module, name)
    except ValueError:
        # Registered already, as by hotkv's plugin.
        return


# ---------------------------------------------------------------------------------------- its ranks


@dataclass(frozen=True, slots=True)
class RankPlace:
    """shard_index: in a slot, of `num_shards`.
    is_writer: stores its shard: the first of the ranks with the same KV.
    stage: of the pipeline.
    """

    rank: int
    num_shards: int
    shard_index: int
    is_writer: bool
    stage: int = 0


def rank_place(vllm_config: Any, kv_cache_config: Any) -> RankPlace:
    """Of this worker. Assumes equally many ranks in each stage, and equally many copies of the
    same KV."""
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
    """Each data-parallel replica is an engine of its own."""
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)


# ------------------------------------------------------------------------------- its MultiConnector

MULTI_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"


def outer_configs() -> tuple[Any, ...]:
    """Configurations of the MultiConnectors around hotkv's connector, innermost first; None for one
    that was not found. Call while MultiConnector constructs or calls the connector: it is found on
    the call stack.

    vLLM does not tell a child that it is one, but
    - its configuration is a copy, whose changes vLLM does not see;
    - MultiConnector forwards one child's handshake, to all;
    - it raises if children ask for different layouts.
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
"""Still work when hotkv has moved the KV cache: they use its tensors in each step."""


def earlier_connectors(outer: tuple[Any, ...]) -> tuple[str, ...]:
    """Those that register the KV cache before hotkv's.

    outer: result of `outer_configs` in the constructor of hotkv's connector.
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
    """Raises Unsupported if another connector has registered addresses of a CPU engine's KV
    cache, which hotkv is about to move to shared memory. Warns of connectors that vLLM's
    registry lacks."""
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
    """True if unknown."""
    if len(outer) != 1 or outer[0] is None:
        # A nested MultiConnector would ask hotkv's connector again, without end.
        return True
    multi = sys.modules[MULTI_CONNECTOR].MultiConnector
    return any(
        child.get_required_kvcache_layout(config) is not None
        for child, config in multi._get_connector_classes_and_configs(outer[0])
        if child is not connector
    )

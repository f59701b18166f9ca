"""What the connector reads out of vLLM beyond its public base classes; with `layout` the only
module that does.

Everything that may change with vLLM's version is here: kinds of KV cache groups, the hash seed, ISA
packing, parallel shape, weights and config identity, newly allocated blocks. `Unsupported` means:
run without the cache and say why.
"""

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    resolve_dcp_kv_block_size,
    resolve_none_hash_seed,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import KVCacheSpecKind, get_kv_cache_spec_kind, iter_layer_specs

from hotkv.errors import HotKVError
from hotkv.groups import GroupKind, GroupSpec, check_context_parallel
from hotkv.keys import KeySpace
from hotkv_sparse import SparseConfig
from hotkv_sparse.centre import Centres
from hotkv_vllm.config import CENTRE, SPARSE, ConfigError, ConnectorConfig
from hotkv_vllm.fingerprint import digest, draft_model, key_space_factors
from hotkv_vllm.weights import changed_since, files_identity, is_commit, process_start_s
from hotkv_vllm.worker.exported import Unsupported as Unsupported

NULL_BLOCK = 0
"""Id of the block that stands for 'nothing here' in block tables."""


_KINDS: dict[KVCacheSpecKind, GroupKind] = {
    KVCacheSpecKind.FULL_ATTENTION: GroupKind.FULL_ATTENTION,
    KVCacheSpecKind.MLA_ATTENTION: GroupKind.MLA,
    KVCacheSpecKind.SLIDING_WINDOW: GroupKind.SLIDING_WINDOW,
    KVCacheSpecKind.SLIDING_WINDOW_MLA: GroupKind.SLIDING_WINDOW,
    KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION: GroupKind.CHUNKED_LOCAL,
    KVCacheSpecKind.MAMBA: GroupKind.MAMBA,
}


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One prefix-cacheable group as the connector sees it.

    `vllm_group`: its id in vLLM; its index in hotkv is its place in the list. `states_by_handoff`:
    Mamba "align" mode, where only blocks that vLLM hands over (`boundary_state_offloads`) hold a
    state that can be stored. `is_draft`: layers of a drafter, whose last block may change while
    decoding.
    """

    vllm_group: int
    kind: GroupKind
    block_tokens: int
    window_tokens: int = 0
    states_by_handoff: bool = False
    is_draft: bool = False


def cache_groups(vllm_config: Any, kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    """The groups hotkv keeps. Raises Unsupported where a hit could not restore all the engine
    needs."""
    parallel = vllm_config.parallel_config
    pcp_size = getattr(parallel, "prefill_context_parallel_size", 1)
    # Only the stage that holds a drafter's layers knows which group they are in.
    all_are_draft = parallel.pipeline_parallel_size > 1 and _drops_last_block(vllm_config)
    groups = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if group_id not in kv_cache_config.prefix_cacheable_group_ids:
            if spec.prefix_cacheable:
                raise Unsupported(f"KV cache group {group_id} may not be transferred")
            continue
        found = _cache_group(group_id, group, parallel.decode_context_parallel_size, pcp_size)
        groups.append(
            replace(found, is_draft=True)
            if all_are_draft and found.kind is not GroupKind.MAMBA
            else found
        )
    check_ranks(vllm_config)
    if not groups:
        raise Unsupported("the model has no KV cache group that prefix caching could use")
    return tuple(groups)


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


def _cache_group(group_id: int, group: Any, dcp_size: int, pcp_size: int) -> CacheGroup:
    spec = group.kv_cache_spec
    kind = get_kv_cache_spec_kind(spec)
    layers = list(iter_layer_specs(spec))
    if kind not in _KINDS or any(type(layer).__name__ == "RSWASpec" for layer in layers):
        raise Unsupported(
            f"KV cache group {group_id} is of kind {type(spec).__name__}, which is not supported"
        )
    first = layers[0]
    window = 0
    if _KINDS[kind] is GroupKind.SLIDING_WINDOW:
        window = max(layer.sliding_window + layer.extra_retained_tokens for layer in layers)
    elif _KINDS[kind] is GroupKind.CHUNKED_LOCAL:
        window = first.attention_chunk_size
    mamba_mode = getattr(first, "mamba_cache_mode", "")
    if mamba_mode == "none":
        raise Unsupported(
            f"KV cache group {group_id} keeps no states at block boundaries "
            "(mamba_cache_mode is "
            "'none')"
        )
    block_tokens = resolve_dcp_kv_block_size(spec, dcp_size)
    try:
        check_context_parallel(
            _KINDS[kind],
            block_tokens,
            is_sharded=spec.dcp_sharded,
            decode_ranks=dcp_size,
            prefill_ranks=pcp_size,
        )
    except ValueError as error:
        raise Unsupported(f"KV cache group {group_id}: {error}") from None
    return CacheGroup(
        group_id,
        _KINDS[kind],
        block_tokens,
        window,
        mamba_mode == "align",
        bool(group.is_eagle_group),
    )


def hit_alignment_tokens(kv_cache_config: Any, groups: tuple[CacheGroup, ...]) -> int:
    """Hits are multiples of this: vLLM's own granularity, and whole blocks of every group."""
    return math.lcm(
        kv_cache_config.cache_hit_alignment_tokens or 1, *(group.block_tokens for group in groups)
    )


def draft_groups(vllm_config: Any, groups: tuple[CacheGroup, ...]) -> frozenset[int]:
    """Indices of groups whose KV of a token depends on the token after it, so that a hit must know
    that one too.

    Source: the EAGLE last-block drop of `HybridKVCacheCoordinator` in vLLM 0.32; all groups where
    none is marked, states never.
    """
    if not _drops_last_block(vllm_config):
        return frozenset()
    marked = frozenset(index for index, group in enumerate(groups) if group.is_draft)
    return marked or frozenset(
        index for index, group in enumerate(groups) if group.kind is not GroupKind.MAMBA
    )


def _drops_last_block(vllm_config: Any) -> bool:
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(speculative.use_eagle_block_drop())


def shared_prefix_boundary(request: Any) -> int:
    """Tokens of a prefix that vLLM saw shared by others and keeps a state for; 0 for none."""
    return int(getattr(request, "shared_prefix_boundary", 0))


def event_extra_keys(
    request: Any, blocks: range, block_tokens: int
) -> tuple[tuple[Any, ...] | None, ...]:
    """What is hashed into each block besides tokens, as vLLM's events name it; nothing where no
    block has any.

    Source: `BlockPool.cache_full_blocks` in vLLM 0.32.
    """
    if not (request.mm_features or request.cache_salt or request.prompt_embeds is not None):
        return ()
    keys: list[tuple[Any, ...] | None] = []
    place = 0
    for block in blocks:
        extra, place = generate_block_hash_extra_keys(
            request, block * block_tokens, (block + 1) * block_tokens, place
        )
        keys.append(extra)
    return tuple(to_event_extra_keys(keys) or ()) if any(keys) else ()


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


def use_recompute_policy(vllm_config: Any) -> bool:
    """Sets the policy for failed loads to `recompute`; must run before the scheduler reads it. True
    if that changed something."""
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy == "recompute":
        return False
    transfer.kv_load_failure_policy = "recompute"
    return True


def fresh_block_ids(scheduler_output: Any, tokens_per_block: tuple[int, ...]) -> set[int]:
    """Blocks that this step may write for the first time. `tokens_per_block`: per vLLM group; 0
    takes all blocks of the group.

    Source: `SchedulerOutput` in vLLM 0.32. Blocks of a local prefix hit are not among them.
    """
    fresh: set[int] = set()
    for new in scheduler_output.scheduled_new_reqs:
        for tokens, ids in zip(tokens_per_block, new.block_ids, strict=False):
            fresh.update(ids[new.num_computed_tokens // tokens if tokens else 0 :])
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, computed, new_ids in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=False
    ):
        if new_ids is None:
            continue
        resumed = request_id in cached.resumed_req_ids
        for tokens, ids in zip(tokens_per_block, new_ids, strict=False):
            fresh.update(ids[computed // tokens :] if resumed and tokens else ids)
    fresh.update(copy.dst_block_id for copy in scheduler_output.kv_cache_block_copies or ())
    # Among them those of requests that were preempted in the same call.
    fresh.update(scheduler_output.new_block_ids_to_zero or ())
    fresh.discard(NULL_BLOCK)
    return fresh


def group_block_tokens(vllm_config: Any, kv_cache_config: Any) -> tuple[int, ...]:
    """Tokens in a block per vLLM group, for `fresh_block_ids`; 0 for states, which need not follow
    token order."""
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    return tuple(
        0
        if get_kv_cache_spec_kind(g.kv_cache_spec) is KVCacheSpecKind.MAMBA
        else resolve_dcp_kv_block_size(g.kv_cache_spec, dcp)
        for g in kv_cache_config.kv_cache_groups
    )


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


def key_space(
    vllm_config: Any,
    kv_cache_config: Any,
    config: ConnectorConfig,
    groups: tuple[CacheGroup, ...],
    shard_bytes: tuple[int, ...],
    num_shards: int,
    page_format: str,
) -> KeySpace:
    """All that decides the bytes of a block. `shard_bytes`: per group, of this rank; the ranks'
    shards are equally large.

    Raises Unsupported where an identity can't be had, OSError where the weights can't be read.
    """
    model, cache, parallel = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
    )
    algorithm = cache.prefix_caching_hash_algo
    hash_bytes = _hash_bytes(algorithm)
    if getattr(cache, "calculate_kv_scales", False):
        raise Unsupported(
            "calculate_kv_scales finds scales of its own at every start, so no other engine "
            "could read its KV; leave it out"
        )
    names = [tuple(kv_cache_config.kv_cache_groups[g.vllm_group].layer_names) for g in groups]
    return KeySpace(
        model=_model_name(model),
        weights_identity=config.weights_identity or weights_identity(vllm_config),
        dtype=str(model.dtype).removeprefix("torch."),
        groups=tuple(
            GroupSpec(
                group.kind,
                group.block_tokens,
                (size,) * num_shards,
                group.window_tokens,
                layer_names,
            )
            for group, size, layer_names in zip(groups, shard_bytes, names, strict=True)
        ),
        hash_block_tokens=kv_cache_config.hash_block_size or groups[0].block_tokens,
        kv_dtype=str(cache.cache_dtype),
        hash_algorithm=algorithm,
        hash_seed=_hash_seed(algorithm),
        hash_bytes=hash_bytes,
        parallel_shape=_parallel_shape(parallel),
        page_format=page_format,
        tenant=config.tenant,
        extra=key_space_factors(vllm_config, layer_specs(kv_cache_config)),
    )


def _model_name(model: Any) -> str:
    """What people read. A folder's name is the user's choice, and must not keep engines apart:
    there the architecture has to do."""
    if not Path(model.model).exists():
        return str(model.model)
    return str(
        next(
            iter(getattr(model.hf_config, "architectures", None) or ()), model.hf_config.model_type
        )
    )


def layer_specs(kv_cache_config: Any) -> dict[str, Any]:
    """KV cache spec of each layer of this worker, by the layer's name."""
    return {
        name: getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
        for group in kv_cache_config.kv_cache_groups
        for name in group.layer_names
    }


def _parallel_shape(parallel: Any) -> str:
    dcp_size = parallel.decode_context_parallel_size
    # Decides which of a block's tokens a rank has.
    interleave = f",interleave={parallel.cp_kv_cache_interleave_size}" if dcp_size > 1 else ""
    shape = f"tp={parallel.tensor_parallel_size},pp={parallel.pipeline_parallel_size}"
    return f"{shape},dcp={dcp_size}{interleave}"


def _hash_bytes(algorithm: str) -> int:
    from vllm.utils.hashing import get_hash_fn_by_name

    return len(get_hash_fn_by_name(algorithm)("hotkv"))


def _hash_seed(algorithm: str) -> str:
    """The seed of the engine's block hashes. Raises Unsupported where it is drawn anew in every
    process."""
    from vllm.utils.hashing import get_hash_fn_by_name

    hash_function = get_hash_fn_by_name(algorithm)
    seed: str = resolve_none_hash_seed(hash_function)
    if seed != resolve_none_hash_seed(hash_function):
        raise Unsupported(
            f"prefix_caching_hash_algo {algorithm} draws a seed per process; set "
            "PYTHONHASHSEED, "
            "or use sha256"
        )
    return seed


def weights_identity(vllm_config: Any) -> str:
    """Identity of the weights, those of a draft model included: commit, content digest, or (random
    weights) config and seed.

    Raises Unsupported, OSError.
    """
    return "+draft:".join(_model_identity(model, load) for model, load in _models(vllm_config))


def weights_may_be_older(vllm_config: Any) -> bool:
    """Whether files that `weights_identity` reads have changed since this process began: it may
    have loaded what they were before. True also if that can't be seen.
    """
    paths = [
        _weights_path(model) for model, load in _models(vllm_config) if load.load_format != "dummy"
    ]
    try:
        began_s = process_start_s()
        return any(path.exists() and changed_since(path, began_s) for path in paths)
    except OSError:
        return True


def _models(vllm_config: Any) -> list[tuple[Any, Any]]:
    """Configs of the models whose weights decide KV bytes, each with how it is loaded."""
    target, draft = vllm_config.model_config, draft_model(vllm_config)
    models = [(target, vllm_config.load_config)]
    if draft is not None and draft.model != target.model:
        models.append(
            (draft, vllm_config.speculative_config.draft_load_config or vllm_config.load_config)
        )
    return models


def _weights_path(model: Any) -> Path:
    return Path(getattr(model, "model_weights", "") or model.model)


def _model_identity(model: Any, load: Any) -> str:
    if load.load_format == "dummy":
        return f"dummy:{digest(model.hf_config)}:{model.seed}"
    path = _weights_path(model)
    if not path.exists():
        return _hub_identity(str(model.model), model.revision)
    try:
        return files_identity(path)
    except ValueError as error:
        raise Unsupported(f"{error}; set hotkv.weights_identity") from None


def _hub_identity(repo: str, revision: Any) -> str:
    commit = getattr(revision, "commit_hash", None) or revision
    if commit and is_commit(str(commit)):
        return f"hub:{repo}@{commit}"
    try:
        from huggingface_hub import snapshot_download

        folder = Path(
            snapshot_download(
                repo, revision=revision, local_files_only=True, allow_patterns=["config.json"]
            )
        )
    except (ImportError, OSError, ValueError) as error:
        raise Unsupported(
            f"the revision of {repo} is not known ({error}); set hotkv.weights_identity"
        ) from None
    if not is_commit(folder.name):
        raise Unsupported(f"the revision of {repo} is not known; set hotkv.weights_identity")
    return f"hub:{repo}@{folder.name}"


def packing(
    vllm_config: Any, kv_cache_config: Any, groups: tuple[CacheGroup, ...], device_type: str
) -> str:
    """How the engine packs K and V inside a page: attention backend, and on CPU the instruction
    set."""
    parts = []
    for group in groups:
        names = kv_cache_config.kv_cache_groups[group.vllm_group].layer_names
        if not names:
            # Another stage of the pipeline has them.
            continue
        parts.append(_backend_name(vllm_config, names))
        spec = next(
            iter(iter_layer_specs(kv_cache_config.kv_cache_groups[group.vllm_group].kv_cache_spec))
        )
        quant = getattr(spec, "kv_quant_mode", None)
        if quant:
            parts.append(f"quant={quant}")
        if device_type == "cpu" and hasattr(spec, "head_size"):
            parts.append(_isa(vllm_config, spec))
    return "+".join(dict.fromkeys(parts))


def _backend_name(vllm_config: Any, layer_names: list[str]) -> str:
    layer = vllm_config.compilation_config.static_forward_context.get(layer_names[0])
    backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else None
    return backend.get_name() if backend is not None else "unknown"


def _isa(vllm_config: Any, spec: Any) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(
        vllm_config.model_config.dtype,
        spec.block_size,
        spec.head_size,
        vllm_config.cache_config.cache_dtype,
    )
    return f"{isa}/{torch.backends.cpu.get_cpu_capability()}"


def name_connector(name: str, module: str) -> None:
    """Makes the connector known to vLLM by name, unless it is. Its MultiConnector wants that of all
    it holds, module path or not."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(name, module, name)
    except ValueError:
        # It is known already.
        return


# ------------------------------------------------------------------------------------ sparse decode


def override_cpu_attention(class_path: str) -> None:
    """Puts `class_path` in place of vLLM's CPU attention backend, unless somebody else has done
    so."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CPU_ATTN.is_overridden():
        register_backend(AttentionBackendEnum.CPU_ATTN, class_path)


def check_sparse(vllm_config: Any, kv_cache_config: Any, config: SparseConfig) -> None:
    """Refuses (ConfigError) what sparse decode can't do in this engine, and settings that do not
    fit the model."""
    parallel = vllm_config.parallel_config
    why = ""
    if vllm_config.device_config.device_type != "cpu":
        why = (
            "it works in CPU engines only, and this one runs on "
            f"{vllm_config.device_config.device_type}"
        )
    elif vllm_config.speculative_config is not None:
        why = "it does not work with speculative decoding; leave out speculative_config"
    elif str(vllm_config.cache_config.cache_dtype).startswith("fp8"):
        why = (
            f"it can't read keys of kv_cache_dtype {vllm_config.cache_config.cache_dtype}; use auto"
        )
    elif parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        why = "it does not work with pipeline or context parallelism"
    if why:
        raise ConfigError(f"{SPARSE}: {why}; or leave out {SPARSE}")
    try:
        for _, block_tokens in sparse_groups(kv_cache_config):
            config.check(vllm_config.model_config.get_total_num_hidden_layers(), block_tokens)
    except HotKVError as error:
        raise ConfigError(f"hotkv.{error.message}") from None


def check_centres(vllm_config: Any, kv_cache_config: Any, centres: Centres) -> None:
    """Refuses (ConfigError) centres of another model than this worker's."""
    from vllm.model_executor.models.utils import extract_layer_index

    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    if max(centres.layers) >= num_layers:
        raise ConfigError(
            f"{CENTRE}: it has a centre of layer {max(centres.layers)}, the model has "
            f"{num_layers} layers; calibrate with this model"
        )
    num_shards = vllm_config.parallel_config.tensor_parallel_size // kv_cache_config.kv_tp_replicas
    for group_index, _ in sparse_groups(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[group_index]
        for name in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            index, needed = (
                extract_layer_index(name),
                (spec.num_kv_heads * num_shards, spec.head_size),
            )
            mu_HD = centres.mu(index)
            if mu_HD is not None and mu_HD.shape != needed:
                raise ConfigError(
                    f"{CENTRE}: its centre of layer {index} is {list(mu_HD.shape)}, the model's "
                    f"layer has {needed[0]} KV heads of size "
                    f"{needed[1]}; calibrate with this model"
                )


def sparse_groups(kv_cache_config: Any) -> tuple[tuple[int, int], ...]:
    """(group, block tokens) of the KV cache groups whose layers may be sparse: plain full
    attention."""
    return tuple(
        (index, group.kv_cache_spec.block_size)
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        if get_kv_cache_spec_kind(group.kv_cache_spec) is KVCacheSpecKind.FULL_ATTENTION
    )


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """A layer that could be sparse: causal full attention over its own keys, without ALiBi. `index`
    counts the model's layers."""

    name: str
    index: int
    group: int
    block_tokens: int
    impl: Any
    isa: str


def full_attention_layers(vllm_config: Any, kv_cache_config: Any) -> tuple[AttentionLayer, ...]:
    """The layers that could be sparse, in the model's order. Windows, chunks, ALiBi and keys shared
    with other layers are left out."""
    from vllm.model_executor.models.utils import extract_layer_index

    found = []
    context = vllm_config.compilation_config.static_forward_context
    for group_index, block_tokens in sparse_groups(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[group_index]
        for name in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            layer = context[name]
            impl = getattr(layer, "impl", None)
            if (
                impl is not None
                and _is_plain(impl)
                and not (spec.sliding_window or spec.attention_chunk_size or spec.non_causal)
            ):
                found.append(
                    AttentionLayer(
                        name,
                        extract_layer_index(name),
                        group_index,
                        block_tokens,
                        impl,
                        getattr(layer, "isa", ""),
                    )
                )
    return tuple(sorted(found, key=lambda layer: layer.index))


def _is_plain(impl: Any) -> bool:
    """Whether a layer is a decoder's, attends to all tokens before, without ALiBi, and has keys of
    its own."""
    shape = (impl.attn_type, impl.sliding_window, impl.kv_sharing_target_layer_name)
    return shape == ("decoder", -1, None) and impl.alibi_slopes is None

"""What works over one key space on the scheduler side. Once the ranks agree it is made, and made
anew for another key space."""

import logging
import uuid
from dataclasses import dataclass, field
from typing import Any

from hotkv_client.types import Role, SessionConfig
from hotkv_vllm import link
from hotkv_vllm.compat import kv_groups
from hotkv_vllm.compat.device_pool import DevicePool
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.costs.prefill_speed import PrefillSpeed
from hotkv_vllm.identity.adapters import Adapters
from hotkv_vllm.identity.agreement import Agreement
from hotkv_vllm.identity.exactness import Exactness
from hotkv_vllm.residency.calls import ResidencyCalls
from hotkv_vllm.residency.resident_requests import ResidentRequests
from hotkv_vllm.scheduler.failed_loads import FailedLoads
from hotkv_vllm.scheduler.fence import Fence
from hotkv_vllm.scheduler.groups import CachedGroups
from hotkv_vllm.scheduler.hits import HitFinder
from hotkv_vllm.scheduler.reports import UseReports
from hotkv_vllm.scheduler.representation_planner import RepresentationPlanner
from hotkv_vllm.scheduler.reset import CacheReset
from hotkv_vllm.scheduler.stores import StorePlanner
from hotkv_vllm.sparse.sequences import SparseGroup, SparseSequences, Streams
from hotkv_vllm.stats import HotKVStats
from hotkv_vllm.tracing.requests import RequestTraces, open_traces


@dataclass(frozen=True, slots=True)
class Engine:
    """What lasts as long as the engine, whatever its key space. `counts_media`: block hashes do not
    cover the content of images and other media. `learnt_prefill`: what hits are weighed against;
    None if all are to be taken, as where contexts live in host memory. `traces`: None without
    tracing."""

    vllm_config: Any
    kv_cache_config: Any
    config: ConnectorConfig
    stats: HotKVStats
    adapters: Adapters
    exactness: Exactness
    counts_media: bool
    pool: DevicePool
    prefill: PrefillSpeed = field(init=False)
    learnt_prefill: PrefillSpeed | None = field(init=False)
    failed_loads: FailedLoads = field(init=False)
    traces: RequestTraces | None = field(init=False)

    def __post_init__(self) -> None:
        prefill = PrefillSpeed(self.stats)
        weighs = self.config.load == "auto" and self.pool.spec is None
        object.__setattr__(self, "prefill", prefill)
        object.__setattr__(self, "learnt_prefill", prefill if weighs else None)
        object.__setattr__(self, "failed_loads", FailedLoads())
        object.__setattr__(self, "traces", open_traces(self.config))


@dataclass(frozen=True, slots=True)
class Assembly:
    """See the module. `cache_groups`: as vLLM numbers them. `memory`: None without sparse
    decode. `residencies`: None where the whole context stays on the device."""

    cache_groups: tuple[kv_groups.CacheGroup, ...]
    session: link.CacheSession
    finder: HitFinder
    planner: StorePlanner
    reports: UseReports
    reset: CacheReset
    memory: SparseSequences | None
    residencies: ResidentRequests | None


def assemble(engine: Engine, agreement: Agreement) -> Assembly:
    """Begins the scheduler's session and makes what works over it. Whatever it raises, no session
    is left behind."""
    config = engine.config
    engine_id = str(engine.vllm_config.kv_transfer_config.engine_id)
    cache_groups = kv_groups.cache_groups(engine.vllm_config, engine.kv_cache_config)
    streams = Streams(link.log_state("scheduler", logging.INFO))
    session = link.open_session(
        SessionConfig(
            target=config.target,
            engine_id=engine_id,
            role=Role.SCHEDULER,
            key_space=agreement.space,
            representations=agreement.kinds,
            client_name="hotkv-vllm scheduler",
            use_table=config.use_table,
            credentials=config.credentials,
            on_state=streams,
        )
    )
    prefix = f"{engine_id[:8]}-{uuid.uuid4().hex[:8]}"
    try:
        return _over(session, engine, agreement, cache_groups, streams, prefix)
    except BaseException:
        session.close()
        raise


def _over(
    session: link.CacheSession,
    engine: Engine,
    agreement: Agreement,
    cache_groups: tuple[kv_groups.CacheGroup, ...],
    streams: Streams,
    prefix: str,
) -> Assembly:
    space, config, stats = agreement.space, engine.config, engine.stats
    groups = CachedGroups(
        space.groups,
        space.hash_block_tokens,
        kv_groups.hit_alignment_tokens(engine.kv_cache_config, cache_groups),
        kv_groups.draft_groups(engine.vllm_config, cache_groups),
        engine.adapters,
        engine.counts_media,
    )
    representations = RepresentationPlanner(len(space.groups), agreement.kinds)
    finder = HitFinder(
        session,
        groups,
        config,
        stats,
        prefix,
        representations,
        engine.pool.left_out,
        engine.failed_loads,
    )
    residencies = None
    if engine.pool.spec is not None:
        residencies = ResidentRequests(
            ResidencyCalls(session, streams, stats),
            groups,
            engine.exactness,
            engine.pool,
            stats,
            config.residency_timeout_s,
        )
    planner = StorePlanner(
        session,
        finder,
        cache_groups,
        engine.vllm_config.parallel_config.world_size,
        config,
        stats,
        prefix,
        Fence(agreement.revocations),
        engine.exactness,
        residencies,
    )
    reports = UseReports(
        session,
        space.hash_block_tokens,
        stats,
        groups.keys,
        engine.prefill,
        tells_speed=engine.learnt_prefill is not None,
    )
    sparse_groups = _sparse_groups(agreement, cache_groups)
    memory = None
    if config.sparse is not None and sparse_groups:
        min_tokens = config.sparse.min_context_tokens
        memory = SparseSequences(session, streams, sparse_groups, groups.hashes, min_tokens, prefix)
    reset = CacheReset(session, planner)
    return Assembly(cache_groups, session, finder, planner, reports, reset, memory, residencies)


def _sparse_groups(
    agreement: Agreement, cache_groups: tuple[kv_groups.CacheGroup, ...]
) -> list[SparseGroup]:
    """The groups that have layers which decode sparsely."""
    sparse = {number for _, number in agreement.sparse_layers}
    return [
        SparseGroup(index, group.block_tokens)
        for index, group in enumerate(cache_groups)
        if group.vllm_group in sparse
    ]

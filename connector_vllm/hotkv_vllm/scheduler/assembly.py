"""What the scheduler side is made of once the ranks agree: all of it belongs to one key space, and
is made anew for another."""

import logging
import uuid
from dataclasses import dataclass
from typing import Any

from hotkv.keys import KeySpace, Representation
from hotkv_client.fence import Revocations
from hotkv_client.types import Role, SessionConfig
from hotkv_vllm import link
from hotkv_vllm.adapters import Adapters
from hotkv_vllm.compat import kv_groups
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.scheduler.exactness import Exactness
from hotkv_vllm.scheduler.hits import HitFinder
from hotkv_vllm.scheduler.reports import UseReports
from hotkv_vllm.scheduler.representation_planner import RepresentationPlanner
from hotkv_vllm.scheduler.reset import CacheReset
from hotkv_vllm.scheduler.stores import StorePlanner
from hotkv_vllm.sparse.memory import SparseGroup, SparseMemory, Streams
from hotkv_vllm.stats import HotKVStats


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks have said. `sparse_layers`: (layer, vLLM's group). `revocations`: None if
    workers revoke their stores."""

    space: KeySpace
    kinds: tuple[Representation, ...]
    sparse_layers: tuple[tuple[int, int], ...]
    revocations: Revocations | None


@dataclass(frozen=True, slots=True)
class Engine:
    """What lasts as long as the engine, whatever its key space."""

    vllm_config: Any
    kv_cache_config: Any
    config: ConnectorConfig
    groups: tuple[kv_groups.CacheGroup, ...]
    stats: HotKVStats
    adapters: Adapters
    exactness: Exactness


@dataclass(frozen=True, slots=True)
class Parts:
    """See the module. `memory`: None without sparse decode."""

    session: link.CacheSession
    finder: HitFinder
    planner: StorePlanner
    reports: UseReports
    reset: CacheReset
    memory: SparseMemory | None


def open_parts(engine: Engine, agreement: Agreement) -> Parts:
    """Begins the scheduler's session and makes what works over it. Whatever it raises, no session
    is left behind."""
    config = engine.config
    engine_id = str(engine.vllm_config.kv_transfer_config.engine_id)
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
    try:
        return _parts(
            engine, agreement, session, streams, f"{engine_id[:8]}-{uuid.uuid4().hex[:8]}"
        )
    except BaseException:
        session.close()
        raise


def _parts(
    engine: Engine, agreement: Agreement, session: link.CacheSession, streams: Streams, prefix: str
) -> Parts:
    space, config, groups = agreement.space, engine.config, engine.groups
    finder = HitFinder(
        session,
        space.groups,
        space.hash_block_tokens,
        kv_groups.hit_alignment_tokens(engine.kv_cache_config, groups),
        config,
        engine.stats,
        prefix,
        kv_groups.draft_groups(engine.vllm_config, groups),
        RepresentationPlanner(len(space.groups), agreement.kinds),
        engine.adapters,
    )
    num_ranks = engine.vllm_config.parallel_config.world_size
    planner = StorePlanner(
        session,
        finder,
        groups,
        num_ranks,
        config,
        engine.stats,
        prefix,
        agreement.revocations,
        engine.exactness,
    )
    reports = UseReports(session, space.hash_block_tokens, engine.stats, finder.keys)
    sparse_groups = [
        SparseGroup(index, group.block_tokens, layers)
        for index, group in enumerate(groups)
        if (
            layers := frozenset(
                layer
                for layer, vllm_group in agreement.sparse_layers
                if vllm_group == group.vllm_group
            )
        )
    ]
    memory = None
    if config.sparse is not None and sparse_groups:
        memory = SparseMemory(
            session, streams, sparse_groups, finder.hashes, config.sparse.min_context_tokens, prefix
        )
    return Parts(session, finder, planner, reports, CacheReset(session, planner), memory)

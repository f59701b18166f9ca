"""`HotKVOffloadingConnector`: vLLM's OffloadingConnector with hotkv as a tier below.

It completes the settings, so that users need only the connector's name and `cpu_bytes_to_use`,
and tells hotkv's tier what vLLM tells connectors but not tiers. Exceptions of vLLM's code reach
vLLM, those of hotkv's code do not (`callbacks`). If hotkv is off with this vLLM, its offloading
runs alone.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from hotkv_vllm import versions
from hotkv_vllm.config import PREFIX, ConfigError, ConnectorConfig, flat
from hotkv_vllm.link import logger

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )

    from hotkv_vllm.compat import checks, steps
    from hotkv_vllm.compat.kv_groups import group_block_tokens
    from hotkv_vllm.offloading.messages import DoorMetadata, DoorReport, PageFormat
    from hotkv_vllm.offloading.scheduler import DoorScheduler
    from hotkv_vllm.offloading.tier import BY_CONNECTOR, HotKVTier, settings_of
    from hotkv_vllm.offloading.worker import DoorWorker
except ImportError as error:
    raise ImportError(versions.why_not_imported(error, versions.OFFLOADING)) from error

from hotkv_vllm.callbacks import CallbackEdge
from hotkv_vllm.scheduler.request import is_fetched_elsewhere
from hotkv_vllm.stats import CallbackClock, HotKVStats

SPEC = "TieringOffloadingSpec"
CHUNK_TOKENS = 64
"""Of a chunk by default, or one larger block. Most of a hit's cost is vLLM's work per chunk."""


class HotKVOffloadingConnector(OffloadingConnector):
    """Each callback does what vLLM's class does, and also calls `DoorScheduler` or `DoorWorker`.
    The constructor raises ConfigError."""

    # For objects made without `__init__`, as in vLLM's own tests.
    _door: DoorScheduler | None = None
    _door_worker: DoorWorker | None = None
    _is_child = False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        settings = complete(transfer.kv_connector_extra_config)
        checks.check_pooling(vllm_config)
        self._is_child = bool(checks.outer_configs())
        if settings is not None:
            choose_chunks(transfer.kv_connector_extra_config, vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        if settings is None:
            if role is KVConnectorRole.SCHEDULER:
                logger.warning("hotkv is off: %s; vLLM's offloading runs without it", why_off({}))
            return
        is_scheduler = role is KVConnectorRole.SCHEDULER
        who = "scheduler" if is_scheduler else f"worker-{vllm_config.parallel_config.rank}"
        tiers = self._tiers() if is_scheduler else []
        stats = tiers[0].stats if tiers else HotKVStats()
        edge = CallbackEdge(CallbackClock(who), stats.add)
        if not is_scheduler:
            assert self.connector_worker is not None
            offloading = self.connector_worker.spec.config
            self._door_worker = DoorWorker(
                vllm_config, kv_cache_config, offloading, settings, edge, stats, self._is_child
            )
        elif tiers:
            self._door = door = DoorScheduler(
                vllm_config, kv_cache_config, settings, tiers[0], edge
            )
            steps.fail_stores(self.scheduler.manager, door.spoilt)
            steps.before_stores(
                self.scheduler, lambda step: door.leave_out_holes(step, self.scheduler)
            )

    def _tiers(self) -> list[HotKVTier]:
        tiers = getattr(self.scheduler.manager, "secondary_tiers", ())
        return [tier for tier in tiers if isinstance(tier, HotKVTier)]

    # ------------------------------------------------------------------------ worker callbacks

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        if self._door_worker is not None:
            self._door_worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """The rank's `PageFormat`. None in a MultiConnector, which would pass it to other
        connectors; there the scheduler side asks for it in a step's message."""
        return None if self._door_worker is None else self._door_worker.handshake()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        meta = kv_connector_metadata
        if self._door_worker is not None and isinstance(meta, DoorMetadata):
            self._door_worker.before_step(meta)
        super().handle_preemptions(meta)

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        theirs = super().build_connector_worker_meta()
        if self._door_worker is None:
            return theirs
        meta = self._connector_metadata
        ours = self._door_worker.report(meta if isinstance(meta, DoorMetadata) else None)
        ours.theirs = theirs
        # Joining an object of vLLM's own class with other ranks' reports would drop hotkv's part
        # of them.
        return None if ours.is_empty else DoorReport.of({next(self._door_worker.report_ids): ours})

    # --------------------------------------------------------------------- scheduler callbacks

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        if self._door is not None:
            self._door.connect([one for one in metadata.values() if isinstance(one, PageFormat)])

    def on_new_request(self, request: Any) -> None:
        if self._door is not None:
            self._door.arrived(request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._door is None:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._door.comes(request, self._kv_cache_manager)
        answer: tuple[int | None, bool] = None, False
        if not self._door.awaits(request, num_computed_tokens, self.scheduler.manager):
            answer = self._match(request, num_computed_tokens)
            if answer[0] is None and self._door.promote(self.scheduler.manager):
                answer = self._match(request, num_computed_tokens)
            if answer[0] and not self._door.has_room(request):
                answer = None, False
        self._door.matched(request, num_computed_tokens, answer[0])
        return answer

    def _match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """vLLM's own answer, but "no hit" if another connector is to fetch the blocks, and "ask
        again" if computing the hit has begun a promotion, which may have evicted a chunk of it."""
        if self._is_child and is_fetched_elsewhere(request):
            with steps.no_loads(self.scheduler, request.request_id):
                return super().get_num_new_matched_tokens(request, num_computed_tokens)
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if answer[0] and steps.promotes(self.scheduler.manager, request.request_id):
            return None, False
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._door is not None:
            self._door.allocated(request, num_external_tokens)
            self._door.got_blocks(request, blocks, self.scheduler)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._door is None:
            return super().build_connector_meta(scheduler_output)
        timed_step = self._door.begin_step(scheduler_output)
        self._door.tell_written(scheduler_output, self.scheduler)
        step = steps.without_loading(scheduler_output, self.scheduler)
        theirs = super().build_connector_meta(step)
        self._door.planned(theirs, self.scheduler)
        self._door.end_step(theirs)
        return DoorMetadata.beside(theirs, self._door.order, self._door.wants_formats, timed_step)

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if self._door is not None:
            ours = DoorReport()
            if isinstance(meta, DoorReport):
                ours = DoorReport.fresh(meta, self._door.seen)
                connector_output.kv_connector_worker_meta = ours
            self._door.update(ours, connector_output.finished_recving or ())
            if connector_output.invalid_block_ids:
                self._door.load_failed(connector_output.invalid_block_ids, self.scheduler)
        super().update_connector_output(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._door is not None:
            self._door.finished(request)
            self._door.stop_at_computed(request, self.scheduler)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._door is not None:
            self._door.finished(request)
            self._door.stop_at_computed(request, self.scheduler)
        return super().request_finished_all_groups(request, block_ids)

    def reset_cache(self) -> bool | None:
        """Also flushes the key space, unless the engine only pauses. False if vLLM or a
        connected server did not."""
        done = super().reset_cache()
        if self._door is None:
            return done
        return self._door.reset(checks.is_device_empty(self._kv_cache_manager)) and done

    def take_events(self) -> Iterable[Any]:
        """vLLM's events; also those of the server's blocks, if the server's setting
        `events.identity` is `engine`."""
        theirs = super().take_events()
        if self._door is None:
            return theirs
        manager = self.scheduler.manager
        return self._door.take_events([*theirs], self._kv_cache_manager, manager)

    def has_pending_push_work(self) -> bool:
        theirs = super().has_pending_push_work()
        return theirs or (self._door is not None and self._door.wants_steps())

    # ----------------------------------------------------------------------------------------- both

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        # The frontend's process, which constructs no connector, calls this too.
        complete(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return super().build_prom_metrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )


def why_off(extra: Mapping[str, Any]) -> str:
    """Empty if hotkv is on with this vLLM."""
    return versions.why_off(versions.OFFLOADING, bool(extra.get("hotkv.allow_untested_vllm")))


def complete(extra: dict[str, Any]) -> ConnectorConfig | None:
    """Adds missing settings to `extra`: vLLM's tiering, hotkv's tier with the settings `hotkv.…`,
    and offloading of answers. Idempotent; keeps what the user has set.

    None if hotkv is off with this vLLM. Raises ConfigError.
    """
    config = settings_of(extra)
    extra.setdefault("spec_name", SPEC)
    # vLLM's default stores only prompts: a conversation's next turn would miss the answers.
    extra.setdefault("offload_prompt_only", False)
    tiers = extra.setdefault("secondary_tiers", [])
    own = {key: value for key, value in flat(extra).items() if key.startswith(PREFIX)}
    if why_off(own):
        return None
    if extra["spec_name"] != SPEC and "spec_module_path" not in extra:
        raise ConfigError(
            f"spec_name = {extra['spec_name']!r}: it has no tiers, so hotkv could not be one; "
            f"leave it out, or set {SPEC}"
        )
    named = next((tier for tier in tiers if tier.get("type") == HotKVTier.__name__), None)
    if named is None:
        named = {"type": HotKVTier.__name__, "module_path": HotKVTier.__module__}
        tiers.append(named)
    for name, value in flat(named).items():
        if name.startswith(PREFIX) and own.get(name) != value:
            raise ConfigError(
                f"{name} = {value!r} in secondary_tiers: with this connector write hotkv's "
                "settings beside cpu_bytes_to_use"
            )
    named |= {BY_CONNECTOR: True, **own}
    return config


def choose_chunks(extra: dict[str, Any], vllm_config: Any, kv_cache_config: Any) -> None:
    """Sets `blocks_per_chunk` to chunks of CHUNK_TOKENS, unless the user has chosen chunks.

    Engines share only chunks of one size, so it depends on the model and its block size; and on a
    retention interval, of which vLLM wants chunks to be a part. One block with recurrent states:
    vLLM then also offloads a part of a block.
    """
    if "blocks_per_chunk" in extra or "block_size" in extra:
        return
    sizes = group_block_tokens(vllm_config, kv_cache_config)
    has_states = 0 in sizes
    per_chunk = 1 if has_states else max(1, CHUNK_TOKENS // max(sizes))
    interval = vllm_config.cache_config.prefix_cache_retention_interval or 0
    extra["blocks_per_chunk"] = per_chunk
    if any(interval % (per_chunk * size) for size in sizes if size):
        extra["blocks_per_chunk"] = 1
    elif per_chunk > 1 and checks.publishes_events(vllm_config):
        logger.warning(
            "hotkv: KV events are about chunks of %d blocks; a router that knows only blocks needs "
            "blocks_per_chunk = 1, which must then be set for all engines that share KV",
            per_chunk,
        )


# MultiConnector looks up the class of each connector by name, also in the frontend's process.
checks.name_connector(HotKVOffloadingConnector.__name__, __name__)

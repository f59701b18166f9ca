"""The connector's scheduler side: `HotKVScheduler` creates the parts that live as long as the
engine.

After the start only three calls may block: a reset, vLLM's question for a hit (as long as
`hits.Patience` allows), and the planning of a step after the weights have changed. While the
engine does not share KV, all calls return at once.
"""

import time
from collections.abc import Iterable
from typing import Any

from hotkv_vllm.callbacks import CallbackEdge
from hotkv_vllm.companion import SchedulerCompanion
from hotkv_vllm.compat import checks, kv_groups
from hotkv_vllm.compat.events import DeviceClears
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.identity.adapters import Adapters
from hotkv_vllm.identity.exactness import Exactness
from hotkv_vllm.link import logger
from hotkv_vllm.metadata import HotKVHandshake, HotKVWorkerMetadata, StepReport
from hotkv_vllm.report_ids import SeenReports
from hotkv_vllm.scheduler.admission import Admission
from hotkv_vllm.scheduler.events import SharedEvents
from hotkv_vllm.scheduler.sharing import Assembly, Engine, Sharing
from hotkv_vllm.scheduler.step_planner import StepPlanner
from hotkv_vllm.stats import HotKVStats


class HotKVScheduler:
    """The engine runs without hotkv until `connect`. Fallbacks of callbacks are `*_broke`.

    stats: growth since vLLM last collected it.
    totals: what vLLM has collected.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        config: ConnectorConfig,
        edge: CallbackEdge,
        *,
        is_child: bool = False,
    ) -> None:
        self._config = config
        self.edge = edge
        self.stats = HotKVStats()
        self.totals = HotKVStats()
        self._adapters = Adapters(
            vllm_config.parallel_config.world_size, lambda text: logger.warning("hotkv: %s", text)
        )
        block_tokens = kv_groups.group_block_tokens(vllm_config, kv_cache_config)
        doubtful_tokens = kv_groups.doubtful_tokens(vllm_config, block_tokens)
        self._exactness = exactness = Exactness(
            block_tokens, kv_cache_config.num_blocks, doubtful_tokens
        )
        self.companion: SchedulerCompanion | None = None
        if config.companion is not None:
            self.companion = config.companion.scheduler(
                vllm_config, kv_cache_config, self.stats, exactness, edge
            )
        counts_media = checks.counts_media(vllm_config)
        engine = Engine(
            vllm_config,
            kv_cache_config,
            config,
            self.stats,
            self._adapters,
            exactness,
            counts_media,
            self.companion,
            is_child,
        )
        self.sharing = Sharing(engine)
        self._seen = SeenReports()
        self.events, self._device_clears = SharedEvents(), DeviceClears()
        self.requests = Admission(engine, self.sharing)
        self.steps = StepPlanner(engine, self.sharing, self.requests)

    def __repr__(self) -> str:
        return f"HotKVScheduler({self.sharing}, {self.requests})"

    @property
    def cache(self) -> Assembly | None:
        return self.sharing.cache

    def count(self, name: str) -> None:
        self.stats.add(name)

    def take_stats(self) -> HotKVStats:
        taken, self.stats.data = HotKVStats(data=self.stats.data), {}
        self.totals.aggregate(taken)
        return taken

    def take_events(self) -> list[object]:
        cache, now_s = self.sharing.cache, time.monotonic()
        if self._device_clears.since_last(self.steps.manager):
            self.events.device_was_cleared()
        if cache is None:
            return self.events.take(None, (), now_s)
        return self.events.take(cache.session, cache.cache_groups, now_s)

    def connect(self, found: Iterable[Any]) -> None:
        """If handshakes differ from earlier ones, running requests go on without hotkv."""
        handshakes = [one for one in found if isinstance(one, HotKVHandshake)]
        if self.sharing.replaces(handshakes):
            self._leave()
        awaiting = self.sharing.joining
        self.sharing.connect(handshakes)
        if awaiting is not None and self.sharing.joining is None:
            for request in awaiting.requests.values():
                self.requests.arrived(request)

    def turn_off(self) -> None:
        self._leave()
        self.sharing.turn_off()

    def _leave(self) -> None:
        self.requests.cancel_loads()
        for state in self.requests.states.values():
            state.leave()
        self.requests.states.clear()
        self.requests.short.clear()

    def bind_manager(self, manager: Any) -> None:
        self.requests.loads.quarantine.pool = manager.block_pool
        self.steps.manager = manager
        if self.companion is not None:
            self.companion.bind(manager)
        if self.companion is None or not self.companion.frees_blocks:
            self.requests.room.bind(manager)

    def is_freeing(self) -> bool:
        return self.companion is not None and self.companion.is_freeing()

    def update(self, output: Any) -> None:
        """output: vLLM's `KVConnectorOutput`."""
        sharing, loads, now_s = self.sharing, self.requests.loads, time.monotonic()
        said, cache = output.kv_connector_worker_meta, sharing.cache
        companion = self.companion
        if not (said or output.finished_recving or output.invalid_block_ids or companion):
            self.steps.prefill.last_end_s = now_s
            return
        report = StepReport()
        if isinstance(said, HotKVWorkerMetadata):
            report = said.joined(self._seen)
        if report.timed_step:
            self.steps.prefill.end_step(report.timed_step, now_s)
        self.steps.prefill.last_end_s = now_s
        for name, value in report.counters.items():
            self.stats.add(name, value)
        sharing.links.update(report.links, now_s, sharing.stream)
        if sharing.weights.reported(report.weights, now_s):
            # The loads in progress bring KV of the old weights.
            self.requests.cancel_loads()
        if output.invalid_block_ids and companion is not None:
            companion.lost(output.invalid_block_ids)
        # Before vLLM frees the blocks of the loads that this step reports as failed.
        num_hung = loads.quarantine.overdue(report.overdue_loads) if report.overdue_loads else 0
        if num_hung:
            self.stats.add("hung_loads", num_hung)
        loads.quarantine.settled(report.settled_loads)
        if report.settled_step:
            self.requests.others.settled(report.settled_step, not output.invalid_block_ids)
        if sharing.joining is not None:
            for request in sharing.join(report):
                self.requests.arrived(request)
        cache, failed = sharing.cache, output.failed_recving or ()
        if cache is None:
            if report.adapters is not None:
                self._adapters.reported(report.adapters)
            return
        if report.load_seconds:
            self.requests.answers.choice.update(self.requests.states, report.load_seconds)
        for request_id in loads.ended(output.finished_recving or ()):
            self.requests.answers.common.ended(request_id)
            state = self.requests.states.get(request_id)
            if state is not None:
                if request_id in failed:
                    self.stats.add("failed_loads")
                late = self.requests.answers.choice.end(state, request_id in failed)
                if late:
                    self.requests.answers.load_was_late(request_id, self.requests.states.values())
                cache.reports.load_ended(state, request_id in failed, is_late=late)
                is_excused = late or not sharing.links.are_complete
                ended = cache.finder.end_load(state, request_id in failed, is_excused)
                cache.planner.loaded(state, ended)
        cache.planner.reported(report)
        if report.adapters is not None:
            self._adapters.reported(report.adapters)
            if report.adapters.changed:
                # Tails and loads may belong to the adapters' old bytes.
                cache.planner.tails.forget()
                self.requests.cancel_loads(of_refused=True)
        if companion is not None:
            companion.reported(report.companion)

    # ---------------------------------------------------------------------------------------- reset

    def reset_cache(self) -> bool | None:
        """Empties the shared cache of this key space, for all engines. Blocks for at most
        `reset_timeout_s`.

        False only if a connected server did not flush. True at once without handshakes: the
        flush follows them, before anything is loaded or stored. vLLM also calls this when the
        engine pauses or sleeps: the cache then stays, but vLLM may discard the KV memory, so
        blocks whose store has not begun are never stored.
        """
        # Until the ranks have checked their weights, steps store nothing and drop tails.
        has_paused = checks.is_pausing()
        self.sharing.weights.suspect(has_paused)
        cache = self.sharing.cache
        if cache is None:
            self.sharing.owes_flush |= not has_paused
            return True
        self.sharing.choose_media()
        self.requests.cancel_loads()
        for state in self.requests.states.values():
            cache.finder.forget(state)
            cache.planner.reset(state)
        if has_paused:
            return True
        if not checks.is_device_empty(self.steps.manager):
            # Requests may hit blocks from before the reset that the device still has.
            self._exactness.distrust_all()
        self.stats.add("resets")
        cache.finder.hidden.clear_all()
        return cache.reset.begin(self._config.reset_timeout_s)

    # ------------------------------------------------------------------ fallbacks of callbacks

    def update_broke(self, output: Any) -> None:
        """Loads whose end `update` has not handled count as failed, reported stores as ended.
        Shares little code with `update`, which the same fault could break."""
        if output.invalid_block_ids and self.companion is not None:
            self.companion.lost_broke(output.invalid_block_ids)
        said, cache = output.kv_connector_worker_meta, self.sharing.cache
        if cache is not None and isinstance(said, HotKVWorkerMetadata):
            for report in said.reports.values():
                cache.planner.in_flight.account(report)
        loads = self.requests.loads
        for request_id in loads.awaited.intersection(output.finished_recving or ()):
            loads.awaited.discard(request_id)
            self.requests.answers.common.loads.pop(request_id, None)
            loads.quarantine.loading.pop(request_id, None)
            state = self.requests.states.get(request_id)
            if state is not None and cache is not None:
                cache.finder.give_up(state)

    def reset_broke(self) -> bool:
        """Stops loads and stores until a flush is confirmed. Present requests get no hits; neither
        their blocks nor any on the device are stored.

        True if the engine pauses or sleeps, which False would make fail.
        """
        if self.sharing.cache is not None:
            self.sharing.cache.reset.hold()
        for request_id, state in self.requests.states.items():
            if state.is_loading:
                self.requests.loads.cancelled.append(request_id)
                state.hit.is_cancelled = True
            # The lease may pin old blocks: expired, its load never begins.
            state.hit.has_failed = True
            state.hit.lease_ends_s = 0.0
            state.store.may_store = False
        self._exactness.distrust_all()
        return checks.is_pausing()

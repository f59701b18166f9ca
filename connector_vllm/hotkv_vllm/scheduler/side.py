"""The connector's scheduler side: answers vLLM's scheduler and plans each step's loads and stores.

`HotKVScheduler` holds the parts that live as long as the engine:
- `sharing` decides whether the engine uses the shared cache, and in which key space.
- `requests` holds the state of each request.
- `steps` plans the workers' part of each step.
- `events` publishes the blocks of the shared cache as KV events of this engine.
- `residents` manages requests that outgrow the device.

Runs in the scheduler's thread. After the start only three calls may block:
- a reset of the cache,
- vLLM's question for a request's hit (as long as `hits.Patience` allows),
- the planning of a step after the engine's weights have changed.

While the engine does not share KV, all calls return at once.
"""

import time
from collections.abc import Iterable
from typing import Any

from hotkv_vllm.compat import checks, kv_groups
from hotkv_vllm.compat.events import DeviceClears
from hotkv_vllm.compat.residency import DevicePool
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.hooks import HookEdge
from hotkv_vllm.identity.adapters import Adapters
from hotkv_vllm.identity.exactness import Exactness
from hotkv_vllm.link import logger
from hotkv_vllm.metadata import HotKVHandshake, HotKVWorkerMetadata, StepReport
from hotkv_vllm.report_ids import HeardReports
from hotkv_vllm.residency.side import ResidentSide
from hotkv_vllm.scheduler.admission import Admission
from hotkv_vllm.scheduler.events import SharedEvents
from hotkv_vllm.scheduler.hits import NEVER_AGAIN
from hotkv_vllm.scheduler.sharing import Assembly, Engine, Sharing
from hotkv_vllm.scheduler.step_planner import StepPlanner
from hotkv_vllm.stats import HotKVStats


class HotKVScheduler:
    """The connector's scheduler side. The engine runs without hotkv until `connect` receives the
    workers' handshakes. If a hook (a method that vLLM calls) raises, its fallback `*_broke` runs.

    edge: records the time and the exceptions of the hooks.
    is_child: True if the connector is in a MultiConnector.
    stats: the counters' growth since vLLM last collected it.
    totals: the sum of all growth that vLLM has collected.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        config: ConnectorConfig,
        edge: HookEdge,
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
        self._pool = pool = DevicePool(vllm_config, kv_cache_config)
        counts_media = checks.counts_media(vllm_config)
        engine = Engine(
            vllm_config,
            kv_cache_config,
            config,
            self.stats,
            self._adapters,
            exactness,
            counts_media,
            pool,
            is_child,
        )
        self.sharing = Sharing(engine)
        self._heard = HeardReports()
        self.events, self._device_clears = SharedEvents(), DeviceClears()
        self.residents = ResidentSide(pool, self.sharing, edge)
        self.requests = Admission(engine, self.sharing, edge)
        self.steps = StepPlanner(engine, self.sharing, self.requests, edge)

    def __repr__(self) -> str:
        return f"HotKVScheduler({self.sharing}, {self.requests})"

    @property
    def cache(self) -> Assembly | None:
        """Returns the objects for the present key space (a model in a configuration); None
        while the engine runs without hotkv."""
        return self.sharing.cache

    def count(self, name: str) -> None:
        """Increments a counter of `counter_help.COUNTERS`."""
        self.stats.add(name)

    def take_stats(self) -> HotKVStats:
        """Returns the growth of the counters since the last call, for vLLM's metrics."""
        taken, self.stats.data = HotKVStats(data=self.stats.data), {}
        self.totals.aggregate(taken)
        return taken

    def take_events(self) -> list[object]:
        """Returns events about blocks of the shared cache, which vLLM publishes as events of this
        engine (`SharedEvents`)."""
        cache, now_s = self.sharing.cache, time.monotonic()
        if self._device_clears.since_last(self.steps.manager):
            self.events.device_was_cleared()
        if cache is None:
            return self.events.take(None, (), now_s)
        return self.events.take(cache.session, cache.cache_groups, now_s)

    def connect(self, found: Iterable[Any]) -> None:
        """Receives the ranks' handshakes and opens the session of their key space (a model in a
        configuration). If the handshakes differ from earlier handshakes, running requests continue
        without hotkv.

        found: handshakes from vLLM; handshakes of other connectors are ignored.
        """
        handshakes = [one for one in found if isinstance(one, HotKVHandshake)]
        if self.sharing.replaces(handshakes):
            self._leave()
        awaiting = self.sharing.joining
        self.sharing.connect(handshakes)
        if awaiting is not None and self.sharing.joining is None:
            for request in awaiting.requests.values():
                self.requests.arrived(request)

    def turn_off(self) -> None:
        """Closes the session. From then on the engine runs without hotkv, until `connect` opens
        another session."""
        self._leave()
        self.sharing.turn_off()

    def _leave(self) -> None:
        """Cancels the loads of all current requests, and forgets these requests: they continue
        without hotkv."""
        self.requests.cancel_loads()
        for state in self.requests.states.values():
            state.leave()
        self.requests.states.clear()
        self.requests.short.clear()

    def bind_manager(self, manager: Any) -> None:
        """Passes vLLM's block manager to the parts that use it or its block pool."""
        self.requests.loads.quarantine.pool = manager.block_pool
        self.steps.manager = manager
        self.residents.bind(manager)
        if self._pool.spec is None:
            self.requests.room.bind(manager)

    def update(self, output: Any) -> None:
        """Processes the results of a step: the ranks' reports that were not processed before, and
        the ends of loads.

        output: vLLM's `KVConnectorOutput`.
        """
        sharing, loads, now_s = self.sharing, self.requests.loads, time.monotonic()
        said, cache = output.kv_connector_worker_meta, sharing.cache
        is_resident = cache is not None and cache.residencies is not None
        if not (said or output.finished_recving or output.invalid_block_ids or is_resident):
            self.steps.prefill.last_end_s = now_s
            return
        report = StepReport()
        if isinstance(said, HotKVWorkerMetadata):
            report = said.joined(self._heard)
        if report.timed_step:
            self.steps.prefill.end_step(report.timed_step, now_s)
        self.steps.prefill.last_end_s = now_s
        for name, value in report.counters.items():
            self.stats.add(name, value)
        sharing.links.told(report.links, now_s, sharing.stream)
        if sharing.weights.reported(report.weights, now_s):
            # The weights may have changed. The loads in progress load KV of the old weights, so
            # they are useless.
            self.requests.cancel_loads()
        if output.invalid_block_ids:
            self.residents.lost(output.invalid_block_ids)
        # `overdue` keeps the blocks of hung loads out of vLLM's pool, so it must run before vLLM
        # frees the blocks of the requests whose load this step reports as failed.
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
            self.requests.choice.told(self.requests.states, report.load_seconds)
        for request_id in loads.ended(output.finished_recving or ()):
            self.requests.common.ended(request_id)
            state = self.requests.states.get(request_id)
            if state is not None:
                if request_id in failed:
                    self.stats.add("failed_loads")
                late = self.requests.choice.end(state, request_id in failed)
                if late:
                    self.requests.load_was_late(request_id)
                cache.reports.load_ended(state, request_id in failed, is_late=late)
                is_excused = late or not sharing.links.are_complete
                ended = cache.finder.end_load(state, request_id in failed, is_excused)
                cache.planner.loaded(state, ended)
        cache.planner.reported(report)
        if cache.residencies is not None:
            cache.residencies.step_ended()
        if report.adapters is not None:
            self._adapters.reported(report.adapters)
            if report.adapters.changed:
                # The bytes of LoRA adapters have changed in the workers. So drop all tails (last
                # blocks of ended requests, which wait to be stored) and cancel the loads for
                # requests with these adapters: both may belong to the old bytes.
                cache.planner.tails.forget()
                self.requests.cancel_loads(of_refused=True)
        if cache.memory is not None and report.sparse is not None:
            cache.memory.reported(report.sparse)

    # ---------------------------------------------------------------------------------------- reset

    def reset_cache(self) -> bool | None:
        """Empties the shared cache of this key space (a model in a configuration), for all
        engines. Also discards everything that the scheduler side knows about the cache's contents.

        Returns False only if a connected server did not flush. Blocks for at most
        `hotkv.reset_timeout_s`. Returns True at once if the ranks' handshakes have not arrived yet.
        The flush is then sent after the handshakes, before anything is loaded or stored.

        vLLM also calls this method when the engine pauses or sleeps. Then this method does not
        empty the shared cache. But vLLM may discard the KV memory, so blocks that were computed
        before the pause and are not being stored yet are never stored.
        """
        # `suspect` makes the ranks check their weights. Until they have answered, steps store
        # nothing, and drop the tails (last blocks) of ended requests.
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
            # The device still has blocks from before the reset, and requests may hit them. So all
            # its KV counts as inexact and is not stored.
            self._exactness.distrust_all()
        self.stats.add("resets")
        cache.finder.hidden.clear_all()
        return cache.reset.begin(self._config.reset_timeout_s)

    # -------------------------------------------------------------------- fallbacks of broken hooks

    def update_broke(self, output: Any) -> None:
        """Handles the results of a step if `update` raised. Loads whose end `update` has not
        handled count as failed. Stores that the workers' report lists count as ended. Shares as
        little code as possible with `update`, because the same fault could raise again.

        output: vLLM's `KVConnectorOutput`.
        """
        if output.invalid_block_ids:
            self.residents.lost_broke(output.invalid_block_ids)
        said, cache = output.kv_connector_worker_meta, self.sharing.cache
        if cache is not None and isinstance(said, HotKVWorkerMetadata):
            for report in said.reports.values():
                cache.planner.in_flight.account(report)
        loads = self.requests.loads
        for request_id in loads.awaited.intersection(output.finished_recving or ()):
            loads.awaited.discard(request_id)
            self.requests.common.loads.pop(request_id, None)
            loads.quarantine.loading.pop(request_id, None)
            state = self.requests.states.get(request_id)
            if state is not None and cache is not None:
                cache.finder.give_up(state)

    def reset_broke(self) -> bool:
        """Handles a reset if `reset_cache` raised. Stops all loads and stores until the server has
        confirmed a flush. The blocks of present requests, and all blocks that are on the device
        now, are never stored. Present requests get no hits any more.

        Returns False, so that vLLM reports that the reset has failed. Returns True if the engine
        pauses or sleeps, because with False vLLM's pause would fail.
        """
        if self.sharing.cache is not None:
            self.sharing.cache.reset.hold()
        for request_id, state in self.requests.states.items():
            if state.is_loading:
                self.requests.loads.cancelled.append(request_id)
                state.hit.is_cancelled = True
            # A lease from before the reset may still pin old blocks. Marks the lease as expired, so
            # that its load never begins.
            state.hit.failed_loads = NEVER_AGAIN
            state.hit.lease_ends_s = 0.0
            state.store.may_store = False
        self._exactness.distrust_all()
        return checks.is_pausing()

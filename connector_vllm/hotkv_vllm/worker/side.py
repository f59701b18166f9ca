"""Carries out the loads and stores of each step in one rank.

Methods wait only for stores whose blocks the step overwrites; for the server when the engine's
memory is registered or discarded; and for a moment after weights have changed.

The KV memory is exported when vLLM registers it, withdrawn before a sleep, and exported again
afterwards.

A device computes a step after Python has queued it, so every transfer has a mark. It is sent at
once if the server can test the mark, otherwise in the first callback that sees it passed. Time
limits count from the mark.

A block's attachments are made before its store begins, unless they were loaded. A block without is
stored and loaded all the same.
"""

import time
from concurrent.futures import wait as wait_futures
from dataclasses import replace
from typing import Any

import numpy as np

from hotkv_client.types import BlockRun
from hotkv_vllm.callbacks import CallbackEdge
from hotkv_vllm.companion import RankCompanion
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.identity.rekeying import RECONNECT_S
from hotkv_vllm.link import OPENING_S, logger
from hotkv_vllm.metadata import HotKVHandshake, HotKVMetadata, HotKVWorkerMetadata
from hotkv_vllm.worker.device_order import Mark
from hotkv_vllm.worker.rank_loads import EndedLoad, RankLoads
from hotkv_vllm.worker.rank_session import RankSession
from hotkv_vllm.worker.rank_stores import FENCE_GRACE_S, RankStores
from hotkv_vllm.worker.report import RankReporter


class HotKVWorker:
    """One rank's part of the connector. Does nothing until `register`. The methods `*_broke` are
    called if a callback raised."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        config: ConnectorConfig,
        edge: CallbackEdge,
    ) -> None:
        self._config = config
        self._num_blocks = int(kv_cache_config.num_blocks)
        self.companion: RankCompanion | None = None
        if config.companion is not None:
            # First, as it raises if the settings don't fit.
            self.companion = config.companion.worker(
                vllm_config, kv_cache_config, lambda: self.rank.arena(), edge
            )
        self.rank = RankSession(vllm_config, kv_cache_config, config)
        self.loads = RankLoads(self.rank.load, self.rank.cancel)
        number = vllm_config.parallel_config.rank
        self.report = RankReporter(self.rank, number, self.companion, edge)
        self.stores = RankStores(self.rank, config, self.report.count)
        self._kv_caches: dict[str, Any] = {}
        self._is_unregistered = False
        self._loads_after: Mark | None = None
        self._started: HotKVMetadata | None = None
        # False if no transfer is in progress or to be reported.
        self._is_busy = True
        self._watches_adapters = False

    def __repr__(self) -> str:
        return f"HotKVWorker({self.rank}, {self.loads}, {self.stores})"

    def count(self, name: str) -> None:
        self._is_busy = True
        self.report.count(name)

    def handshake(self) -> HotKVHandshake | None:
        note = None if self.companion is None else self.companion.note
        return replace(self.rank.handshake, companion=note)

    # --------------------------------------------------------------------------------------- memory

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Exports the memory, hands it to the companion and opens the session."""
        self._kv_caches = kv_caches
        # The export comes first: it moves CPU memory, and the companion must read the new
        # addresses. The session comes last: it registers everything.
        self._export()
        why_off = "" if self.companion is None else self.companion.register(kv_caches)
        if why_off:
            self.rank.turn_off(why_off)
            return
        self._open(self._config.startup_wait_s, OPENING_S)

    def _open(self, wait_s: float, opening_s: float = 0.0) -> None:
        self.rank.open(self.companion, wait_s, opening_s)
        if self.companion is not None:
            self.companion.opened()

    def unregister(self) -> None:
        """Withdraws the memory, which vLLM is about to discard for a sleep."""
        self._is_unregistered = self.rank.has_agreed
        if self.rank.memory is not None:
            self._withdraw()
            if self.companion is not None:
                self.companion.will_write(np.arange(self._num_blocks, dtype=np.int32))

    def unregister_broke(self) -> None:
        """Closes everything: no transfer may reach discarded memory."""
        self.rank.shutdown()

    def restore(self) -> None:
        """Exports the memory after a sleep, which has lost its contents. A rank in which hotkv
        is off tells the others why: they wait for it (`ranks.agree`)."""
        if self._is_unregistered:
            self._is_unregistered = False
            self._export()
            self.rank.open(self.companion, self._config.startup_wait_s, OPENING_S)

    def memory_broke(self, what: str) -> None:
        """Turns hotkv off. `what` could not be done with the memory."""
        self.rank.turn_off(f"its memory could not be {what}; see the engine's log")

    def shutdown(self) -> None:
        self._kv_caches = {}
        self.rank.shutdown()

    def _export(self) -> None:
        """Withdraws memory that was exported before, and exports the present one."""
        if self.rank.memory is not None:
            self._withdraw()
        self.rank.export(self._kv_caches)

    def _withdraw(self) -> None:
        """Ends transfers and session before the engine unmaps the memory. Waits at most as long
        as a store may take. A hanging server may write later, but only to the old memory, which
        it has mapped itself. A load that it has not ended is not reported, so vLLM retains its
        blocks."""
        self.loads.make_void()
        answers = [answer for answer in self.loads.answers if answer is not None]
        answers += self.stores.end_early()
        if wait_futures(answers, self._config.store_timeout_s + FENCE_GRACE_S).not_done:
            logger.error(
                "hotkv: the server did not end all transfers before the engine sleeps; its session "
                "is closed"
            )
            self.stores.fail_all()
        self.rank.shutdown(keeps_fence=True)

    # ---------------------------------------------------------------------------------------- steps

    def rests(self, meta: HotKVMetadata) -> bool:
        """The step has nothing for this rank, and this rank nothing to send or report: its other
        methods need not be called."""
        rank, session = self.rank, self.rank.session
        if meta.is_quiet and self._is_busy:
            self._watches_adapters = rank.adapters.is_watching
            self._is_busy = not (
                self.loads.is_quiet
                and self.stores.is_quiet
                and self.report.is_quiet
                and rank.adapters.is_quiet
            )
        return (
            meta.is_quiet
            and not self._is_busy
            and session is not None
            and session.connected == rank.reported_link
            and (rank.weights is None or not rank.weights.held)
            and (not self._watches_adapters or rank.adapters.is_quiet)
        )

    def before_step(self, meta: HotKVMetadata) -> None:
        """Ends the stores that read blocks which the step writes."""
        self._is_busy = True
        if meta.lost_track:
            self.distrust()
        self.rank.adapters.before_step(meta.adapters)
        if self.rank.follow(meta.weights):
            was_connected = self.rank.is_connected
            self.stores.begin_anew()
            if self.rank.session is not None and was_connected:
                self.rank.session.wait_connected(min(self._config.startup_wait_s, RECONNECT_S))
        elif self.rank.weights_were_read():
            self._open(min(self._config.startup_wait_s, RECONNECT_S))
        elif self.rank.lacks_session:
            self.rank.begin()
        self._send_waiting()
        if meta.flush_stores:
            self.stores.end_before_step(meta.flush_stores)
        if self.companion is not None:
            self.companion.begin_step(meta)

    def distrust(self) -> None:
        """Revokes all stores: it is not known which blocks the step overwrites."""
        try:
            self.stores.take_everything_back()
        finally:
            if self.companion is not None and not self.companion.distrust():
                # It is not known which attachments are valid: blocks go without from here on.
                self.rank.has_attachments = False

    def before_forward(self, meta: HotKVMetadata) -> None:
        """Makes the mark of loads that need one, after vLLM has zeroed blocks, so that they
        overlap the forward pass. A device runs it after it is queued, so `start_loads` comes in
        time; a CPU at once, so the loads start here."""
        if not self.rank.marks.is_on_device:
            self.start_loads(meta)
        elif not all(job.at_once for job in meta.loads):
            self._loads_after = self.rank.mark()

    def start_loads(self, meta: HotKVMetadata) -> None:
        """Begins, cancels and fails loads, once per step. Does not wait."""
        if meta is self._started:
            return
        self._started = meta
        after, self._loads_after = self._loads_after, None
        if self.companion is not None:
            for run in (run for job in meta.loads for run in job.runs):
                self.companion.will_write(run.block_ids)
        self.report.asked = meta
        self.loads.fail(meta.abandoned_loads)
        if not self.rank.is_trusted:
            self.loads.fail([job.request_id for job in meta.loads])
        elif meta.loads:
            if after is None and not all(job.at_once for job in meta.loads):
                after = self.rank.mark()
            for job in meta.loads:
                if after is None or job.at_once:
                    self.loads.begin(job, Mark())
                else:
                    self.loads.begin(job, self.rank.marks.use(after))
        if after is not None:
            self.rank.marks.done(after)
        for request_id in meta.cancel_loads:
            self.loads.cancel(request_id)
        if meta.held_loads:
            self.loads.give_up(meta.held_loads)

    def loads_broke(self, meta: HotKVMetadata) -> None:
        """Fails loads that were not begun, because `before_forward` or `start_loads` has raised.
        The step's stores are still carried out."""
        self._started = meta
        self.loads.fail_unbegun(meta.loads, meta.abandoned_loads)

    def save(self, meta: HotKVMetadata) -> None:
        """Begins the stores, after the step's blocks are computed. Does not wait."""
        self._send_waiting()
        if not meta.stores:
            return
        if not self.rank.is_trusted:
            self.stores.refuse(meta.stores)
            return
        if not self.rank.place.is_writer:
            self.stores.leave_to_others(meta.stores)
            return
        jobs = meta.stores
        if self.companion is not None:
            lost = self.companion.find_lost(job.request_id for job in jobs if job.request_id)
            # Their KV is wrong, and must not be stored.
            self.stores.refuse([job for job in jobs if job.request_id in lost])
            jobs = tuple(job for job in jobs if job.request_id not in lost)
        after = self.rank.mark()
        for job in jobs:
            self.stores.begin(job, self._attached(job.attached), after)
        self.rank.marks.done(after)

    def stores_broke(self, meta: HotKVMetadata) -> None:
        self.stores.fail_unsent(meta.stores)

    def _attached(self, runs: tuple[BlockRun, ...]) -> tuple[BlockRun, ...]:
        """Makes the missing attachments of a store. Returns none of `runs` if that fails: the
        blocks go without them."""
        companion = self.companion
        if not (runs and companion and self.rank.has_attachments and self.rank.is_connected):
            return ()
        return runs if companion.build(runs) else ()

    # -------------------------------------------------------------------------------------- results

    def take_results(self) -> tuple[set[str], set[str]]:
        """Returns the requests whose load has ended, and those whose load failed. Each end is
        returned once, even if code here raises."""
        if self.loads:
            if self.rank.weights is not None and self.rank.weights.held:
                self.loads.make_void()
            self._send_waiting()
        finished, failed, ended = self.loads.take()
        try:
            for one in ended:
                self._load_ended(one)
            self.loads.watch(time.monotonic())
        except Exception:  # noqa: BLE001 - callback edge: the requests are told all the same
            self.count("callback_errors")
            logger.exception("hotkv: what follows the end of loads broke")
        return finished, failed

    def take_failed_results(self) -> set[str]:
        """Fails all loads that have ended or were never sent, because `take_results` has raised."""
        failed, over = self.loads.take_failed()
        self.report.over += over
        return failed

    def _load_ended(self, one: EndedLoad) -> None:
        load = one.load
        self.rank.marks.done(load.after)
        self.report.timed({load.job.request_id: one.seconds})
        if one.num_bytes is None:
            return
        self.report.count("load_bytes", one.num_bytes)
        if self.companion is not None and self.rank.has_attachments:
            for run in load.job.attached:
                self.companion.loaded(run.group_index, run.block_ids)

    def take_lost(self) -> set[int]:
        return set() if self.companion is None else self.companion.take_lost()

    def lost_broke(self) -> set[int]:
        return set() if self.companion is None else self.companion.lost_broke()

    def take_report(self, meta: HotKVMetadata | None) -> HotKVWorkerMetadata | None:
        """None if it is empty."""
        return self.report.take(meta, self.loads, self.stores, self.handshake)

    def _send_waiting(self) -> None:
        self.loads.send_waiting()
        self.stores.send_waiting()

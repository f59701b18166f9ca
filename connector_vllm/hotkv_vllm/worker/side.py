"""The connector's worker side: carries out each step's loads and stores.

Holds the rank's memory and session, its loads and its stores (`session`, `rank_loads`,
`rank_stores` have their own rules). It waits only for stores that a step must wait for, and for the
server when the engine's memory is registered or discarded.

The memory is exported to the server when vLLM registers it, withdrawn before vLLM unmaps it (a
sleep), and exported again when it is mapped again.

Every transfer has a mark in the device's queue (`device_order`) and begins after it. If the server
can test the mark, the transfer is sent at once. Otherwise it is sent by the first hook that sees
the mark passed. Deadlines of a transfer run from its mark.

With sparse decode, representations (compact forms of the blocks' keys) are stored and loaded with
blocks. They are built before their block's store begins, and marked as built when a load has
succeeded. A fault in building or loading them only leaves blocks without representations.
"""

import time
from concurrent.futures import wait as wait_futures
from dataclasses import replace
from typing import Any

from hotkv_client.types import BlockRun
from hotkv_sparse.centre import Centres
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.hooks import HookEdge
from hotkv_vllm.identity.rekeying import RECONNECT_S
from hotkv_vllm.link import logger
from hotkv_vllm.metadata import HotKVHandshake, HotKVMetadata, HotKVWorkerMetadata
from hotkv_vllm.sparse.rank import SparseRank
from hotkv_vllm.worker.rank_loads import Ended, RankLoads
from hotkv_vllm.worker.rank_stores import FENCE_GRACE_S, RankStores
from hotkv_vllm.worker.report import RankReport
from hotkv_vllm.worker.session import RankSession


class HotKVWorker:
    """The connector's worker side. Idle until the memory was exported and a session opened. The
    methods `*_broke` are the fallbacks of hooks that raised."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        config: ConnectorConfig,
        centres: Centres | None,
        edge: HookEdge,
    ) -> None:
        self._config = config
        self.rank = RankSession(vllm_config, kv_cache_config, config)
        self.sparse = SparseRank(
            vllm_config, kv_cache_config, config, centres, edge, self.rank.arena
        )
        self.loads = RankLoads(self.rank.load, self.rank.cancel)
        number = vllm_config.parallel_config.rank
        self.report = RankReport(self.rank, number, self.sparse, edge)
        self.stores = RankStores(self.rank, config, self.report.count)
        self._kv_caches: dict[str, Any] = {}
        self._is_unregistered = False

    def __repr__(self) -> str:
        return f"HotKVWorker({self.rank}, {self.loads}, {self.stores})"

    def count(self, name: str) -> None:
        """Increments a counter of `counter_help.COUNTERS`."""
        self.report.count(name)

    def handshake(self) -> HotKVHandshake | None:
        """Returns this rank's handshake for the scheduler."""
        return replace(self.rank.handshake, sparse_layers=self.sparse.layers)

    # --------------------------------------------------------------------------------------- memory

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Exports the KV caches that vLLM has allocated, and opens the session. `kv_caches` has a
        tensor per layer."""
        self._kv_caches = kv_caches
        # Export first, because it moves the memory. Sparse attention then reads the new addresses.
        # The session registers everything with the server at once.
        self._export()
        self.sparse.install_sparse(kv_caches)
        if self.sparse.lacks_residency:
            self.rank.turn_off("its layers can't attend to blocks in host memory; see its log")
            return
        self.rank.open(self.sparse.worker, self.sparse.centres)
        self.sparse.opened()

    def unregister(self) -> None:
        """Closes the session and withdraws the memory: vLLM is about to discard it."""
        if self.rank.session is None:
            return
        self._is_unregistered = True
        self._let_go()
        self.sparse.will_write_all()

    def unregister_broke(self) -> None:
        """Closes everything, because transfers may still reach the discarded memory."""
        self.rank.shutdown()

    def restore(self) -> None:
        """Exports the KV memory again, after a sleep. The memory's contents are new."""
        if self._is_unregistered:
            self._is_unregistered = False
            self._export()
            self.rank.open(self.sparse.worker, self.sparse.centres)

    def memory_broke(self, what: str) -> None:
        """Turns the rank off. `what` says what could not be done with the rank's memory, for the
        log."""
        self.rank.turn_off(f"its memory could not be {what}; see the engine's log")

    def shutdown(self) -> None:
        """Closes the session and the export."""
        self._kv_caches = {}
        self.rank.shutdown()

    def _export(self) -> None:
        """Withdraws memory that was exported before, and exports the present memory."""
        if self.rank.memory is not None:
            self._let_go()
        self.rank.export(self._kv_caches)

    def _let_go(self) -> None:
        """Ends all transfers, the session and the export of memory that the engine is about to
        unmap.

        Waits for the server as long as for the end of a store. A hung server has its own mappings,
        so its later writes can't reach memory that the engine gets afterwards. A load that the
        server has not ended stays unreported, and vLLM retains the load's blocks.
        """
        if self.rank.session is not None:
            self.loads.make_void()
            answers = [answer for answer in self.loads.answers if answer is not None]
            answers += self.stores.end_early()
            if wait_futures(answers, self._config.store_timeout_s + FENCE_GRACE_S).not_done:
                logger.error(
                    "hotkv: the server did not end all transfers before the engine sleeps; its "
                    "session is closed"
                )
                self.stores.fail_all()
        self.rank.shutdown(keeps_fence=True)

    # ---------------------------------------------------------------------------------------- steps

    def before_step(self, meta: HotKVMetadata) -> None:
        """Prepares for the step, before it writes blocks. Ends or revokes the stores that read
        these blocks, forgets the blocks' representations (compact forms of keys), and carries out
        the orders about adapters and weights."""
        if meta.lost_track:
            self.distrust()
        self.rank.adapters.before_step(meta.adapters)
        if self.rank.follow(meta.weights):
            was_connected = self.rank.is_connected
            self.stores.begin_anew()
            if self.rank.session is not None and was_connected:
                self.rank.session.wait_connected(min(self._config.startup_wait_s, RECONNECT_S))
        self._send_waiting()
        if meta.flush_stores:
            self.stores.end_before_step(meta.flush_stores)
        self.sparse.begin_step(meta)

    def distrust(self) -> None:
        """Revokes all stores and forgets all representations (compact forms of keys), because it is
        not known which blocks the step overwrites."""
        try:
            self.stores.take_everything_back()
        finally:
            if not self.sparse.distrust():
                # Blocks travel without representations from here on: it is not known which
                # representations are valid.
                self.rank.shared = None

    def start_loads(self, meta: HotKVMetadata) -> None:
        """Begins a step's loads. Does not wait for them."""
        for run in (run for job in meta.loads for run in job.runs):
            self.sparse.will_write(run.block_ids)
        self.report.asked = meta
        self.loads.fail(meta.abandoned_loads)
        if not self.rank.is_trusted:
            self.loads.fail([job.request_id for job in meta.loads])
        elif meta.loads:
            after = self.rank.mark()
            for job in meta.loads:
                self.loads.begin(job, self.rank.marks.use(after))
            self.rank.marks.done(after)
        for request_id in meta.cancel_loads:
            self.loads.cancel(request_id)
        if meta.held_loads:
            self.loads.give_up(meta.held_loads)

    def loads_broke(self, meta: HotKVMetadata) -> None:
        """Fails the loads of a step that were not begun. The step's stores are still handled."""
        self.loads.fail_unbegun(meta.loads, meta.abandoned_loads)

    def save(self, meta: HotKVMetadata) -> None:
        """Begins a step's stores. Does not wait for them."""
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
        if lost := self.sparse.find_lost(job.request_id for job in jobs if job.request_id):
            # These requests computed wrong KV, under the names of the right KV.
            self.stores.refuse([job for job in jobs if job.request_id in lost])
            jobs = tuple(job for job in jobs if job.request_id not in lost)
        after = self.rank.mark()
        for job in jobs:
            self.stores.begin(job, self._built(job.representations), after)
        self.rank.marks.done(after)

    def stores_broke(self, meta: HotKVMetadata) -> None:
        """Fails the stores of a step that were not sent."""
        self.stores.fail_unsent(meta.stores)

    def _built(self, runs: tuple[BlockRun, ...]) -> tuple[BlockRun, ...]:
        """Builds the representations (compact forms of keys, by which sparse attention selects
        blocks) that a store sends beside its blocks, and returns the runs.

        Returns an empty tuple if building fails, if this worker has no connection, or if the server
        does not map the worker's representations.

        runs: consecutive blocks of a group, whose representations are to be stored.
        """
        if not runs or self.rank.shared is None or not self.rank.is_connected:
            return ()
        built = self.sparse.build(self.rank.shared, runs, self.rank.shared_group)
        if built is None:
            self.count("sparse_faults")
            return ()
        return built

    # -------------------------------------------------------------------------------------- results

    def take_results(self) -> tuple[set[str], set[str]]:
        """Returns the requests whose load has ended, and the requests whose load failed. Each load
        is reported once, even if this method raises."""
        if self.loads:
            if self.rank.weights is not None and self.rank.weights.held:
                self.loads.make_void()
            self._send_waiting()
        finished, failed, ended = self.loads.take()
        try:
            for one in ended:
                self._load_ended(one)
            self.loads.watch(time.monotonic())
        except Exception:  # noqa: BLE001 - hook edge: the requests are told all the same
            self.count("hook_errors")
            logger.exception("hotkv: what follows the end of loads broke")
        return finished, failed

    def take_failed_results(self) -> set[str]:
        """Returns the requests whose load is over. All these loads count as failed."""
        failed, over = self.loads.take_failed()
        self.report.give_marks_back(over)
        return failed

    def _load_ended(self, one: Ended) -> None:
        load = one.load
        self.rank.marks.done(load.after)
        self.report.timed({load.job.request_id: one.seconds})
        if one.num_bytes is None:
            return
        self.report.count("load_bytes", one.num_bytes)
        if self.rank.shared is not None:
            for run in load.job.representations:
                group = self.rank.shared_group(run.group_index)
                self.rank.shared.loaded(group, run.block_ids)

    def take_report(self, meta: HotKVMetadata | None) -> HotKVWorkerMetadata | None:
        """Returns the report of this step to the scheduler; None if it is empty."""
        return self.report.take(meta, self.loads, self.stores, self.handshake)

    def _send_waiting(self) -> None:
        """Sends transfers that could not be sent before, and for which the device has now passed
        the mark (a point in its queue)."""
        self.loads.send_waiting()
        self.stores.send_waiting()

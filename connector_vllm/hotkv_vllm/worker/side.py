"""The connector's worker side: carries out the loads and stores of each step in one rank.

`HotKVWorker` holds the rank's memory and session (`session`), its loads (`rank_loads`) and its
stores (`rank_stores`). Its methods wait only in three cases: for stores whose blocks the step
overwrites; for the server, when the engine's memory is registered or discarded; and for a moment
after the engine's weights have changed.

The KV memory is exported to the server when vLLM registers it, withdrawn before vLLM unmaps it (a
sleep), and exported again when vLLM has mapped it again.

The device computes a step after Python has queued its work, so a transfer (load or store) must not
begin at once. Every transfer has a *mark*, a point in the device's queue (`device_order`): the
server begins to copy after the device has done all work before the mark. If the server can test
this, the transfer is sent at once. Otherwise the worker sends the transfer in the first callback
(call of vLLM) in which it sees that the device has passed the mark. The time limit of a transfer
begins when the device has passed its mark.

With sparse decode, sketches (compact forms of keys) are stored and loaded with blocks. The
worker builds a block's sketch before the block's store begins. If the sketch was
loaded with its block, it counts as built. If it can't be built or loaded, the block is stored or
loaded without it.
"""

import time
from concurrent.futures import wait as wait_futures
from dataclasses import replace
from typing import Any

from hotkv_client.types import BlockRun
from hotkv_sparse.centre import Centres
from hotkv_vllm.callbacks import CallbackEdge
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.identity.rekeying import RECONNECT_S
from hotkv_vllm.link import OPENING_S, logger
from hotkv_vllm.metadata import HotKVHandshake, HotKVMetadata, HotKVWorkerMetadata
from hotkv_vllm.sparse.rank import SparseRank
from hotkv_vllm.worker.device_order import Mark
from hotkv_vllm.worker.rank_loads import EndedLoad, RankLoads
from hotkv_vllm.worker.rank_session import RankSession
from hotkv_vllm.worker.rank_stores import FENCE_GRACE_S, RankStores
from hotkv_vllm.worker.report import RankReporter


class HotKVWorker:
    """The connector's worker side. Does nothing until `register` has exported the KV memory and
    opened a session. The methods `*_broke` are called if a callback (method that vLLM calls)
    raised.

    centres: the model's mean keys, by which sketches (compact forms of keys) are computed;
        None without them.
    edge: measures the callbacks, and records their exceptions.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        config: ConnectorConfig,
        centres: Centres | None,
        edge: CallbackEdge,
    ) -> None:
        self._config = config
        self.rank = RankSession(vllm_config, kv_cache_config, config)
        self.sparse = SparseRank(
            vllm_config, kv_cache_config, config, centres, edge, self.rank.arena
        )
        self.loads = RankLoads(self.rank.load, self.rank.cancel)
        number = vllm_config.parallel_config.rank
        self.report = RankReporter(self.rank, number, self.sparse, edge)
        self.stores = RankStores(self.rank, config, self.report.count)
        self._kv_caches: dict[str, Any] = {}
        self._is_unregistered = False
        self._loads_after: Mark | None = None
        self._started: HotKVMetadata | None = None
        # False if no transfer is in progress and no result is to be reported.
        self._is_busy = True
        self._watches_adapters = False

    def __repr__(self) -> str:
        return f"HotKVWorker({self.rank}, {self.loads}, {self.stores})"

    def count(self, name: str) -> None:
        """Increments a counter of `counter_help.COUNTERS`."""
        self._is_busy = True
        self.report.count(name)

    def handshake(self) -> HotKVHandshake | None:
        """Returns this rank's message to the scheduler at the start: its key space, or why it runs
        without hotkv."""
        return replace(self.rank.handshake, sparse_layers=self.sparse.layers)

    # --------------------------------------------------------------------------------------- memory

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Exports the KV caches that vLLM has allocated, installs sparse attention if it is
        configured, and opens the session.

        kv_caches: the tensor of each layer, by layer name.
        """
        self._kv_caches = kv_caches
        # The export comes first, because it moves CPU memory: sparse attention must read the new
        # addresses. The session comes last, because it registers everything with the server.
        self._export()
        self.sparse.install_sparse(kv_caches)
        if self.sparse.lacks_residency:
            self.rank.turn_off("its layers can't attend to blocks in host memory; see its log")
            return
        self._open(self._config.startup_wait_s, OPENING_S)

    def _open(self, wait_s: float, opening_s: float = 0.0) -> None:
        self.rank.open(self.sparse.worker, self.sparse.centres, wait_s, opening_s)
        self.sparse.opened()

    def unregister(self) -> None:
        """Closes the session and withdraws the memory, because vLLM is about to discard it (for a
        sleep)."""
        self._is_unregistered = self.rank.has_agreed
        if self.rank.memory is not None:
            self._withdraw()
            self.sparse.will_write_all()

    def unregister_broke(self) -> None:
        """Closes session and memory if `unregister` raised, so that no transfer reaches discarded
        memory."""
        self.rank.shutdown()

    def restore(self) -> None:
        """Exports the KV memory again after a sleep, and opens a session. The memory has lost its
        old contents. A rank in which hotkv is off only notifies the other ranks of the reason,
        because they wait for it (`ranks.agree`)."""
        if self._is_unregistered:
            self._is_unregistered = False
            self._export()
            self.rank.open(
                self.sparse.worker, self.sparse.centres, self._config.startup_wait_s, OPENING_S
            )

    def memory_broke(self, what: str) -> None:
        """Turns hotkv off in this rank, because `register` or `restore` raised.

        what: what could not be done with the rank's memory, for the log.
        """
        self.rank.turn_off(f"its memory could not be {what}; see the engine's log")

    def shutdown(self) -> None:
        """Closes the session and withdraws the memory from the server."""
        self._kv_caches = {}
        self.rank.shutdown()

    def _export(self) -> None:
        """Exports the engine's present KV memory to the server. If memory was exported before,
        withdraws it first."""
        if self.rank.memory is not None:
            self._withdraw()
        self.rank.export(self._kv_caches)

    def _withdraw(self) -> None:
        """Ends all transfers, closes the session and withdraws the memory, because the engine is
        about to unmap the memory.

        Waits for the server at most as long as a store may take. If the server hangs, it may still
        write later, but only to the old memory, which it has mapped itself. A load that the server
        has not ended is not reported to vLLM, so vLLM retains the load's blocks.
        """
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
        """Returns True if a step has nothing for this rank, and this rank has nothing to send and
        nothing to report. The step's other methods then need not be called.

        meta: the step's message from the scheduler.
        """
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
        """Prepares for a step before the step writes blocks. Ends or revokes the stores that read
        these blocks, discards the blocks' sketches (compact forms of keys), and carries out
        the scheduler's orders to check LoRA adapters and weights.

        meta: the step's message from the scheduler.
        """
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
        self.sparse.begin_step(meta)

    def distrust(self) -> None:
        """Revokes all stores and discards all sketches (compact forms of keys), because it
        is not known which blocks the step overwrites."""
        try:
            self.stores.take_everything_back()
        finally:
            if not self.sparse.distrust():
                # It is not known which sketches (compact forms of keys) are valid, so from
                # here on blocks are stored and loaded without sketches.
                self.rank.shared = None

    def before_forward(self, meta: HotKVMetadata) -> None:
        """Makes the mark of the step's loads, so that they overlap the step's forward pass. Called
        in a step with loads, after vLLM has zeroed blocks and before the forward pass.

        A device runs the forward pass after vLLM has queued it, so `start_loads` comes in time,
        and does not delay the pass. A CPU runs the pass at once, so the loads start here.
        """
        self._loads_after = self.rank.mark()
        if self._loads_after.event is None:
            self.start_loads(meta)

    def start_loads(self, meta: HotKVMetadata) -> None:
        """Carries out the scheduler's orders about loads in the step's message: begins loads,
        cancels loads, and marks loads as failed, which the next results report. Does nothing if
        the step has called it before. Does not wait for loads."""
        if meta is self._started:
            return
        self._started = meta
        after, self._loads_after = self._loads_after, None
        for run in (run for job in meta.loads for run in job.runs):
            self.sparse.will_write(run.block_ids)
        self.report.asked = meta
        self.loads.fail(meta.abandoned_loads)
        if not self.rank.is_trusted:
            self.loads.fail([job.request_id for job in meta.loads])
        elif meta.loads:
            after = after or self.rank.mark()
            for job in meta.loads:
                self.loads.begin(job, self.rank.marks.use(after))
        if after is not None:
            self.rank.marks.done(after)
        for request_id in meta.cancel_loads:
            self.loads.cancel(request_id)
        if meta.held_loads:
            self.loads.give_up(meta.held_loads)

    def loads_broke(self, meta: HotKVMetadata) -> None:
        """Marks each load of the step that was not begun as failed. Called if `before_forward` or
        `start_loads` has raised. The stores of the step are still carried out."""
        self._started = meta
        self.loads.fail_unbegun(meta.loads, meta.abandoned_loads)

    def save(self, meta: HotKVMetadata) -> None:
        """Begins the stores of a step, after the step has computed its blocks. Does not wait for
        stores."""
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
            # For these requests attention has read blocks in the server's memory that were no
            # longer pinned. So the KV that it has computed is wrong, and must not be stored.
            self.stores.refuse([job for job in jobs if job.request_id in lost])
            jobs = tuple(job for job in jobs if job.request_id not in lost)
        after = self.rank.mark()
        for job in jobs:
            self.stores.begin(job, self._built(job.sketches), after)
        self.rank.marks.done(after)

    def stores_broke(self, meta: HotKVMetadata) -> None:
        """Marks the stores of the step that `save` has not sent as failed. Called if `save` has
        raised."""
        self.stores.fail_unsent(meta.stores)

    def _built(self, runs: tuple[BlockRun, ...]) -> tuple[BlockRun, ...]:
        """Builds the missing sketches (compact forms of blocks' keys) of a store, and
        returns `runs`. Returns an empty tuple if building fails, if this worker is not connected,
        or if its sketches are not exported: the blocks are then stored without
        sketches.

        runs: the store's runs of sketches (`StoreJob.sketches`).
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
        """Returns the ids of the requests whose load has ended since the last call (failed or not),
        and the ids of the requests whose load failed. The end of each load is returned once, even
        if code of this method raises."""
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
        """Returns the ids of the requests whose load has ended or was never sent, if `take_results`
        has raised. All these loads count as failed."""
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
        if self.rank.shared is not None:
            for run in load.job.sketches:
                group = self.rank.shared_group(run.group_index)
                self.rank.shared.loaded(group, run.block_ids)

    def take_report(self, meta: HotKVMetadata | None) -> HotKVWorkerMetadata | None:
        """Returns this rank's report to the scheduler; None if it is empty.

        meta: the step's message from the scheduler.
        """
        return self.report.take(meta, self.loads, self.stores, self.handshake)

    def _send_waiting(self) -> None:
        """Sends each waiting transfer whose mark (point in the device's queue) the device has
        passed by now."""
        self.loads.send_waiting()
        self.stores.send_waiting()

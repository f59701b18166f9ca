"""The connector's worker side: shows the engine's memory to the server, and carries out each step's loads and stores.

Owns the worker's session, the exported memory and all transfers of this rank. What is always true: a load is reported ended (well or
failed) exactly once, and only after its future is resolved, so that nobody writes its blocks any more; a store that a step must wait
for has ended, or is revoked, or its session is closed, before the step goes on. Nothing else here waits.

Every transfer lies behind a mark in the device's queue (`device_order`). Where the server can ask for the mark the transfer is sent at
once, else in the hook that sees it passed. No step waits for the device: a store behind a mark that has not passed has read nothing yet,
and is taken back at once where a step overwrites its blocks. Deadlines of a transfer run from its mark on.

With sparse decode, representations go with blocks: built before their block's store begins, and marked as built when a load has ended
well. What goes wrong with them leaves blocks without, and no more.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotkv.keys import KeySpace, Representation
from hotkv.order import NO_ORDER, OrderKind
from hotkv.sparse.centre import Centres
from hotkv_client.fence import SharedFence
from hotkv_client.types import BlockResult, BlockRun, Role, SessionConfig, TransferResult, TransferStatus
from hotkv_vllm import compat, link
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.device_order import Mark, Marks, marks_for
from hotkv_vllm.exported import ExportedMemory
from hotkv_vllm.layout import describe, export
from hotkv_vllm.metadata import HotKVHandshake, HotKVMetadata, HotKVWorkerMetadata, LoadJob, StoreJob, StoreReport
from hotkv_vllm.sparse.shared import HANDLE, shared_pool
from hotkv_vllm.sparse.worker import SparseWorker
from hotkv_vllm.stores import report_of

logger = link.logger

FENCE_GRACE_S = 0.5
"""How long after a store's deadline its end is still waited for."""


@dataclass(slots=True)
class ActiveLoad:
    """A load of this rank. `answer` is None until it is sent. `deadline_s`: None until the device is seen to have passed `after`."""

    job: LoadJob
    after: Mark
    deadline_s: float | None = None
    answer: "Future[TransferResult] | None" = None
    cancelled: bool = False


@dataclass(slots=True)
class ActiveStore:
    """A store of this rank. `answer` is None until it is sent. `representations`: runs whose rows are built."""

    job: StoreJob
    after: Mark
    began_s: float
    representations: tuple[BlockRun, ...] = ()
    answer: "Future[TransferResult] | None" = None


class HotKVWorker:
    """Worker side. Idle until `export` has found the memory exportable and `open` has begun a session."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: ConnectorConfig) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._place = compat.RankPlace(0, 1, 0, True)
        self._loads: dict[str, ActiveLoad] = {}
        self._stores: dict[int, ActiveStore] = {}
        self._failed_now: set[str] = set()
        self._report = HotKVWorkerMetadata()
        self._server_slow = False
        self._said_build = False
        self._marks = Marks()
        self._fence: SharedFence | None = None
        self._said_order: tuple[OrderKind, str] | None = None
        self._memory: ExportedMemory | None = None
        self._space: KeySpace | None = None
        self._groups: tuple[compat.CacheGroup, ...] = ()
        self._sparse: SparseWorker | None = None
        self._session_config: SessionConfig | None = None
        self.session: link.CacheSession | None = None
        self.handshake = HotKVHandshake(None, "the worker registered no KV cache")

    def __repr__(self) -> str:
        return f"HotKVWorker(loads={len(self._loads)}, stores={len(self._stores)}, session={self.session})"

    # ------------------------------------------------------------------------------------------------------------ start

    def export(self, kv_caches: Mapping[str, Any]) -> None:
        """Finds out what the memory is and makes it one that the server can map. Where that can't be, the engine runs without hotkv and
        says why once. CPU memory moves; views of the tensors follow.
        """
        try:
            self._export(kv_caches)
        except (compat.Unsupported, OSError, ValueError) as error:
            logger.warning("hotkv is off in this worker: %s", error)
            self.handshake = HotKVHandshake(None, str(error))

    def _export(self, kv_caches: Mapping[str, Any]) -> None:
        groups = self._groups = compat.cache_groups(self._vllm_config, self._kv_cache_config)
        self._place = compat.rank_place(self._vllm_config, self._kv_cache_config)
        found = describe(kv_caches, self._kv_cache_config, groups)
        device = next(iter(found.storages.values())).device
        page_format = f"{found.page_format};{compat.packing(self._vllm_config, self._kv_cache_config, groups, device.type)}"
        space = compat.key_space(
            self._vllm_config, self._kv_cache_config, self._config, groups, tuple(found.shard_bytes), self._place.num_shards, page_format
        )
        name = str(getattr(self._kv_cache_config, "kv_cache_layout", "") or "")
        memory = export(found, self._kv_cache_config.num_blocks, self._place.shard_index, name)
        try:
            memory.layout.validate(space.groups)
        except ValueError:
            memory.close()
            raise
        self._marks = marks_for(device, self._config.device_order)
        self._memory, self._space = self._marks.beside(memory), space

    def open(self, sparse: SparseWorker | None = None, centres: Centres | None = None) -> None:
        """Opens the session over the exported memory, with the representations of `sparse` beside it; nothing where none was exported.

        Where those can't be shared, blocks go without them, and it is said once.
        """
        if self._memory is None or self._space is None:
            return
        kinds: tuple[Representation, ...] = ()
        if sparse is not None:
            try:
                kinds = self._share(sparse, centres)
            except (compat.Unsupported, OSError, ValueError) as error:
                logger.warning("hotkv: representations are built in this engine and not shared: %s", error)
        try:
            self._open(self._space, kinds)
        except (OSError, ValueError) as error:
            logger.warning("hotkv is off in this worker: %s", error)
            self.handshake = HotKVHandshake(None, str(error))
            return
        self.handshake = HotKVHandshake(self._space, representations=kinds, fence=None if self._fence is None else self._fence.place)
        # A step that came before the server knows this memory would lose its stores.
        if self.session is not None:
            self.session.wait_connected(self._config.startup_wait_s)

    def _share(self, sparse: SparseWorker, centres: Centres | None) -> tuple[Representation, ...]:
        """Puts the pool beside the exported memory; the kinds that lie in it."""
        assert self._memory is not None and self._space is not None
        pool = shared_pool(sparse.representations, list(sparse.layers.values()), self._groups, self._place.num_shards, centres)
        num_groups = len(self._space.groups)
        memory = pool.beside(self._memory, num_groups)
        try:
            memory.layout.validate(self._space.groups, {num_groups + place: kind for place, kind in enumerate(pool.kinds)})
        except ValueError:
            os.close(memory.fds[HANDLE])
            raise
        self._memory, self._sparse = memory, sparse
        return pool.kinds

    def _open(self, space: KeySpace, kinds: tuple[Representation, ...]) -> None:
        self._session_config = SessionConfig(
            target=self._config.target,
            engine_id=self._engine_id,
            role=Role.WORKER,
            key_space=space,
            representations=kinds,
            client_name=f"hotkv-vllm worker {self._place.rank}",
            use_table=False,
            credentials=self._config.credentials,
            on_state=link.log_state(f"worker {self._place.rank}", logging.DEBUG),
        )
        if compat.writes_before_it_tells(self._vllm_config, self._kv_cache_config):
            self._fence = SharedFence()
        self.session = self._new_session()

    def _new_session(self) -> link.CacheSession:
        assert self._session_config is not None and self._memory is not None
        return link.open_session(self._session_config, self._memory.layout, self._memory.fds, self._marks.order, self._fence)

    # ------------------------------------------------------------------------------------------------------------ steps

    def before_step(self, meta: HotKVMetadata) -> None:
        """Waits for the stores whose source blocks this step overwrites, or takes the blocks back. Those that the scheduler has revoked
        are not waited for.
        """
        self._submit_waiting()
        waiting = [store for store_id in meta.flush_stores if (store := self._stores.get(store_id)) is not None]
        if not waiting:
            return
        began_s = time.monotonic()
        for store in waiting:
            if store.answer is None:
                store.answer = _never_begun("the device was not there yet when its blocks were taken back")
        late = [store for store in waiting if self._fence is not None or not store.after.passed()]
        if late and not self._take_back(late):
            # The session was closed with all its stores.
            return
        self._await_stores([store for store in waiting if store.after.has_passed])
        self._count("flush_s", time.monotonic() - began_s)

    def _await_stores(self, waiting: list[ActiveStore]) -> None:
        """Waits a moment, then takes the blocks back. While the server is slow there is no moment."""
        if self._all_done(waiting, 0.0 if self._server_slow else self._config.flush_timeout_s):
            return
        self._server_slow = True
        self._take_back(waiting)

    def _take_back(self, stores: list[ActiveStore]) -> bool:
        """Ends stores so that their blocks may be overwritten. False where that took the session."""
        if self.session is None:
            return True
        for store in stores:
            if store.answer is not None and not store.answer.done():
                self.session.cancel(self._transfer_id(store.job))
        # Where the session shares a fence page with the server, a cancelled store has ended by now, whatever the server does.
        last_s = max(store.began_s for store in stores) + self._config.store_timeout_s + FENCE_GRACE_S
        if self._all_done(stores, max(0.0, last_s - time.monotonic())):
            return True
        logger.error("hotkv: the server did not end a store within its %.1f s; the session is closed", self._config.store_timeout_s)
        self._reopen()
        return False

    @staticmethod
    def _all_done(waiting: Iterable[ActiveStore], timeout_s: float) -> bool:
        answers = [store.answer for store in waiting if store.answer is not None]
        return not wait_futures(answers, timeout_s).not_done

    def _reopen(self) -> None:
        """A new session in place of one whose server hangs. Its stores count as failed; its loads go on waiting for their end."""
        if self.session is None or self._session_config is None or self._memory is None:
            return
        # Closing waits for the server; the futures of what it still copies keep to their promise without us.
        threading.Thread(target=self.session.close, name="hotkv-close", daemon=True).start()
        for store_id, store in self._stores.items():
            self._report.stores[store_id] = StoreReport([b""])
            self._marks.done(store.after)
        self._stores.clear()
        self.session = self._new_session()

    def start_loads(self, meta: HotKVMetadata) -> None:
        """Begins this step's loads; does not wait for them."""
        self._failed_now.update(meta.abandoned_loads)
        if meta.loads:
            after = self._mark()
            for job in meta.loads:
                load = ActiveLoad(job, self._marks.use(after))
                self._loads[job.request_id] = load
                if after.lets_send():
                    self._submit_load(load)
            self._marks.done(after)
        for request_id in meta.cancel_loads:
            self._cancel(self._loads.get(request_id))

    def _mark(self) -> Mark:
        """What all that this hook begins lies behind."""
        if self.session is None:
            return self._marks.make(OrderKind.HOST)
        if self._marks.order != NO_ORDER and self.session.connected:
            taken = (self.session.order_kind, self.session.order_message)
            if taken != self._said_order:
                self._said_order = taken
                why = f" ({taken[1]})" if taken[1] else ""
                logger.info("hotkv worker %d: the server follows the device by %s%s", self._place.rank, taken[0].name.lower(), why)
        return self._marks.make(self.session.order_kind)

    def save(self, meta: HotKVMetadata) -> None:
        """Submits this step's stores; does not wait for them."""
        self._submit_waiting()
        if not meta.stores:
            return
        if not self._place.is_writer:
            self._report.stores.update({job.store_id: _nothing_to_write(job) for job in meta.stores})
            return
        after = self._mark()
        for job in meta.stores:
            store = ActiveStore(job, self._marks.use(after), time.monotonic(), self._built(job.representations))
            self._stores[job.store_id] = store
            if after.lets_send():
                self._submit_store(store)
        self._marks.done(after)

    def _built(self, runs: tuple[BlockRun, ...]) -> tuple[BlockRun, ...]:
        """The runs, their representations all built; none where they can't be, or nobody would take them."""
        if not runs or self._sparse is None or self.session is None or not self.session.connected:
            return ()
        try:
            for run in runs:
                self._sparse.build(self._sparse_group(run.group_index), run.block_ids)
        except Exception:
            # Blocks are stored whatever becomes of their representations.
            self._count("sparse_faults", 1)
            if not self._said_build:
                self._said_build = True
                logger.exception("hotkv: representations could not be built; their blocks are stored without (said once)")
            return ()
        return runs

    def _sparse_group(self, group_index: int) -> int:
        """vLLM's group of the blocks whose representations have this index in the session."""
        assert self._session_config is not None
        config = self._session_config
        return self._groups[config.representations[group_index - len(config.key_space.groups)].group_index].vllm_group

    def take_results(self) -> tuple[set[str], set[str]]:
        """Requests whose load has ended, and those of them whose load failed."""
        finished, failed = self._failed_now, set(self._failed_now)
        self._failed_now = set()
        if not self._loads:
            return finished, failed
        self._submit_waiting()
        now_s = time.monotonic()
        for request_id, load in list(self._loads.items()):
            if load.answer is None:
                continue
            if load.answer.done():
                del self._loads[request_id]
                self._marks.done(load.after)
                finished.add(request_id)
                if not self._load_went_well(load.answer):
                    failed.add(request_id)
                elif self._sparse is not None:
                    for run in load.job.representations:
                        self._sparse.loaded(self._sparse_group(run.group_index), run.block_ids)
            elif load.deadline_s is None:
                load.deadline_s = now_s + load.job.timeout_s if load.after.passed() else None
            elif now_s >= load.deadline_s:
                self._cancel(load)
        return finished, failed

    def take_report(self) -> HotKVWorkerMetadata | None:
        """Stores that ended, and counters, since the last call."""
        for store_id, store in list(self._stores.items()):
            if store.answer is not None and store.answer.done():
                del self._stores[store_id]
                self._marks.done(store.after)
                self._report.stores[store_id] = self._store_report(store, store.answer)
        if self._report.is_empty():
            return None
        report, self._report = self._report, HotKVWorkerMetadata()
        return report

    def fail_all(self, meta: HotKVMetadata) -> None:
        """The hook that should have begun these transfers broke: whatever was not begun has failed."""
        self._failed_now.update(meta.abandoned_loads)
        for job in meta.loads:
            load = self._loads.get(job.request_id)
            if load is None or load.job is not job:
                self._failed_now.add(job.request_id)
        for store in meta.stores:
            if store.store_id not in self._stores:
                self._report.stores.setdefault(store.store_id, StoreReport([b""]))

    def shutdown(self) -> None:
        if self.session is not None:
            self.session.close()
            self.session = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    # -------------------------------------------------------------------------------------------------------- transfers

    def _transfer_id(self, job: StoreJob) -> str:
        return f"{job.lease_id}-k{self._place.rank}"

    def _submit_waiting(self) -> None:
        """Sends transfers that were not yet to be sent and whose mark has passed."""
        for load in self._loads.values():
            if load.answer is None and load.after.passed():
                self._submit_load(load)
        for store in self._stores.values():
            if store.answer is None and store.after.passed():
                self._submit_store(store)

    def _submit_load(self, load: ActiveLoad) -> None:
        job = load.job
        transfer_id = f"{job.transfer_id}-k{self._place.rank}"
        runs = job.runs if self._sparse is None else (*job.runs, *job.representations)
        load.answer = self._begun(lambda s: s.load(transfer_id, job.lease_id, runs, job.timeout_s, load.after.after))

    def _submit_store(self, store: ActiveStore) -> None:
        job = store.job
        transfer_id = self._transfer_id(job)
        runs = (*job.runs, *store.representations)
        if not runs:
            # Nothing but representations, and they could not be built.
            store.answer = Future()
            store.answer.set_result(TransferResult(transfer_id, TransferStatus.DONE))
            return
        timeout_s = self._config.store_timeout_s
        store.answer = self._begun(
            lambda s: s.store(transfer_id, job.lease_id, runs, timeout_s, job.retention, store.after.after, job.fence_index)
        )

    def _begun(self, begin: Any) -> "Future[TransferResult]":
        """The transfer's future; a failed one where it could not be begun."""
        if self.session is None or not self.session.connected:
            return _never_begun("no server")
        try:
            begun: Future[TransferResult] = begin(self.session)
        except Exception as error:  # noqa: BLE001 - hook edge: a transfer that was not begun has failed, whatever the cause
            return _never_begun(f"{type(error).__name__}: {error}")
        return begun

    def _cancel(self, load: ActiveLoad | None) -> None:
        """Asks to end a load early; its future's end is the acknowledgement."""
        if load is None or load.cancelled:
            return
        load.cancelled = True
        if load.answer is None:
            load.answer = _never_begun("cancelled")
        elif self.session is not None:
            self.session.cancel(f"{load.job.transfer_id}-k{self._place.rank}")

    def _load_went_well(self, answer: "Future[TransferResult]") -> bool:
        if answer.cancelled() or answer.exception() is not None:
            logger.debug("hotkv: a load failed: %s", None if answer.cancelled() else answer.exception())
            return False
        result = answer.result()
        if result.status is not TransferStatus.DONE:
            logger.debug("hotkv: a load ended %s: %s", result.status.name, result.message)
            return False
        self._count("load_bytes", result.num_bytes)
        return True

    def _store_report(self, store: ActiveStore, answer: "Future[TransferResult]") -> StoreReport:
        if answer.cancelled() or answer.exception() is not None:
            logger.debug("hotkv: a store failed: %s", None if answer.cancelled() else answer.exception())
            return StoreReport([b""])
        result = answer.result()
        if result.status is TransferStatus.DONE:
            self._server_slow = False
        self._count("store_bytes", result.num_bytes)
        return report_of(result.results[: len(store.job.runs)])

    def _count(self, name: str, value: float) -> None:
        self._report.counters[name] = self._report.counters.get(name, 0) + value


def _never_begun(why: str) -> "Future[TransferResult]":
    """The end of a transfer that nobody works at."""
    failed: Future[TransferResult] = Future()
    failed.set_exception(ConnectionError(why))
    return failed


def _nothing_to_write(job: StoreJob) -> StoreReport:
    """The report of a rank that holds a copy of what another rank writes."""
    return report_of([np.full(sum(len(run.hashes) for run in job.runs), BlockResult.WRITTEN, np.uint8)])

"""The connector's worker side: shows the engine's memory to the server, and carries out each step's
loads and stores.

Owns the worker's session, the exported memory and all transfers of this rank (`loads` has its own
rules). What is always true: a store that a step must wait for has ended, or is revoked, or its
session is closed, before the step goes on. Nothing else here waits. Where a step's blocks are not
known, `take_everything_back` revokes all stores by one call that needs none of this module's books.

Every transfer lies behind a mark in the device's queue (`device_order`). Where the server can ask
for the mark the transfer is sent at once, else in the hook that sees it passed. No step waits for
the device: a store behind a mark that has not passed has read nothing yet, and is taken back at
once where a step overwrites its blocks. Deadlines of a transfer run from its mark on.

With sparse decode, representations go with blocks: built before their block's store begins, and
marked as built when a load has ended well. What goes wrong with them leaves blocks without, and no
more.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass, replace
from typing import Any

from hotkv.keys import KeySpace, Representation
from hotkv.order import NO_ORDER, OrderKind
from hotkv_client.fence import SharedFence
from hotkv_client.types import BlockRun, Role, SessionConfig, TransferResult, TransferStatus
from hotkv_sparse.centre import Centres
from hotkv_vllm import link
from hotkv_vllm.compat import Unsupported, checks, kv_groups, model_weights, places
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.metadata import (
    HotKVHandshake,
    HotKVMetadata,
    HotKVWorkerMetadata,
    LoadJob,
    StoreJob,
    StoreReport,
)
from hotkv_vllm.rekeying import RECONNECT_S, RankWeights, WeightsOrder
from hotkv_vllm.scheduler.stores import nothing_to_write, report_of
from hotkv_vllm.sparse.reporter import SparseReport
from hotkv_vllm.sparse.shared import HANDLE, shared_pool
from hotkv_vllm.sparse.worker import SparseWorker
from hotkv_vllm.worker import ranks
from hotkv_vllm.worker.adapter_watch import AdapterWatch, watch_adapters
from hotkv_vllm.worker.device_order import Mark, Marks, marks_for
from hotkv_vllm.worker.exported import ExportedMemory
from hotkv_vllm.worker.loads import ActiveLoad, Loads, never_begun
from hotkv_vllm.worker.own_memory import find_own
from hotkv_vllm.worker.weights_watch import watch_callers

logger = link.logger

FENCE_GRACE_S = 0.5
"""How long after a store's deadline its end is still waited for."""


@dataclass(slots=True)
class ActiveStore:
    """A store of this rank. `answer` is None until it is sent. `representations`: runs whose rows
    are built."""

    job: StoreJob
    after: Mark
    began_s: float
    representations: tuple[BlockRun, ...] = ()
    answer: "Future[TransferResult] | None" = None


class HotKVWorker:
    """Worker side. Idle until `export` has found the memory exportable and `open` has begun a
    session."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: ConnectorConfig) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._place = places.RankPlace(0, 1, 0, True)
        self._loads = Loads(self._send_load, self._cancel_load)
        self._stores: dict[int, ActiveStore] = {}
        self._lost: list[ActiveLoad | ActiveStore] = []
        self._held: tuple[str, ...] = ()
        self._asks_links = False
        self._logged_link = True
        self._state_log: link.StateLog | None = None
        self._report = HotKVWorkerMetadata()
        self._server_slow = False
        self._logged_build = False
        self._marks = Marks()
        self._fence: SharedFence | None = None
        self._logged_order: tuple[OrderKind, str] | None = None
        self._memory: ExportedMemory | None = None
        self._space: KeySpace | None = None
        self._own_space: KeySpace | None = None
        self._weights: RankWeights | None = None
        self._groups: tuple[kv_groups.CacheGroup, ...] = ()
        self._sparse: SparseWorker | None = None
        self.adapters = AdapterWatch(None, vllm_config.parallel_config.rank)
        self._session_config: SessionConfig | None = None
        self.session: link.CacheSession | None = None
        self.handshake = HotKVHandshake(None, "the worker registered no KV cache")

    def __repr__(self) -> str:
        return (
            f"HotKVWorker(loads={len(self._loads)}, stores={len(self._stores)}, "
            f"session={self.session})"
        )

    # ---------------------------------------------------------------------------------------- start

    def export(self, kv_caches: Mapping[str, Any]) -> None:
        """Finds out what the memory is and makes it one that the server can map. Where that can't
        be, the engine runs without hotkv and says why once. CPU memory moves; views of the tensors
        follow. Lets go of memory that was exported before.
        """
        if self._memory is not None:
            self.let_go()
        try:
            self._export(kv_caches)
            if not self.adapters.is_watching:
                self.adapters = watch_adapters(self._vllm_config)
        except (Unsupported, OSError, ValueError) as error:
            logger.warning("hotkv is off in this worker: %s", error)
            self.handshake = HotKVHandshake(None, str(error))

    def _export(self, kv_caches: Mapping[str, Any]) -> None:
        """After a sleep the memory is described and exported anew; what it holds and what orders
        transfers stay."""
        checks.check_ranks(self._vllm_config)
        place = self._place = places.rank_place(self._vllm_config, self._kv_cache_config)
        own = find_own(
            kv_caches,
            self._vllm_config,
            self._kv_cache_config,
            self._config,
            place,
            self._own_space,
        )
        memory = own.memory
        try:
            space, self._place = ranks.agree(
                own.note, places.num_ranks(self._vllm_config), self._engine_id
            )
            assert memory is not None, "the ranks agreed, although this one has no memory to show"
            memory.layout = replace(memory.layout, shard_index=self._place.shard_index)
            memory.layout.validate(space.groups)
            self._groups = own.groups
            if self._own_space is None:
                self._own_space, self._marks = (
                    own.note.space,
                    marks_for(own.device, self._config.device_order),
                )
        except Exception:
            if memory is not None:
                memory.close()
            raise
        if self._weights is None:
            in_doubt = not self._config.weights_identity and model_weights.weights_may_be_older(
                self._vllm_config
            )
            self._weights = RankWeights(watch_callers(in_doubt), space.weights_identity)
        self._memory, self._space = (
            self._marks.beside(memory),
            replace(space, weights_identity=self._weights.identity),
        )

    def open(self, sparse: SparseWorker | None = None, centres: Centres | None = None) -> None:
        """Opens the session over the exported memory, with the representations of `sparse` beside
        it; nothing where none was exported.

        Where those can't be shared, blocks go without them, and it is said once.
        """
        if self._memory is None or self._space is None:
            return
        kinds: tuple[Representation, ...] = ()
        if sparse is not None:
            try:
                kinds = self._share(sparse, centres)
            except (Unsupported, OSError, ValueError) as error:
                logger.warning(
                    "hotkv: representations are built in this engine and not shared: %s", error
                )
        try:
            self._open(self._space, kinds)
        except (OSError, ValueError) as error:
            logger.warning("hotkv is off in this worker: %s", error)
            self.turn_off(str(error))
            return
        fence = None if self._fence is None else self._fence.place
        in_doubt = self._weights is not None and self._weights.held
        self.handshake = HotKVHandshake(
            self._space,
            representations=kinds,
            fence=fence,
            host=ranks.this_host(),
            rank=self._place.rank,
            weights_in_doubt=in_doubt,
        )
        # A step that came before the server knows this memory would lose its stores.
        if self.session is not None and not self.session.wait_connected(
            self._config.startup_wait_s
        ):
            self._logged_link = False
            self.handshake = replace(self.handshake, absent=self._why_absent())

    def turn_off(self, why: str) -> None:
        """The memory could not be shown: this rank, and with it the engine, runs without hotkv."""
        self.handshake = HotKVHandshake(None, why, rank=self._place.rank)
        self.shutdown()

    def _share(self, sparse: SparseWorker, centres: Centres | None) -> tuple[Representation, ...]:
        """Puts the pool beside the exported memory; the kinds that lie in it."""
        assert self._memory is not None and self._space is not None
        pool = shared_pool(
            sparse.representations,
            list(sparse.layers.values()),
            self._groups,
            self._place.num_shards,
            centres,
        )
        num_groups = len(self._space.groups)
        memory = pool.beside(self._memory, num_groups)
        try:
            memory.layout.validate(
                self._space.groups,
                {num_groups + place: kind for place, kind in enumerate(pool.kinds)},
            )
        except ValueError:
            os.close(memory.fds[HANDLE])
            raise
        self._memory, self._sparse = memory, sparse
        return pool.kinds

    def _open(self, space: KeySpace, kinds: tuple[Representation, ...]) -> None:
        self._state_log = link.log_state(f"worker {self._place.rank}", logging.DEBUG)
        self._session_config = SessionConfig(
            target=self._config.target,
            engine_id=self._engine_id,
            role=Role.WORKER,
            key_space=space,
            representations=kinds,
            client_name=f"hotkv-vllm worker {self._place.rank}",
            use_table=False,
            credentials=self._config.credentials,
            on_state=self._state_log,
        )
        if self._fence is None and checks.writes_before_it_tells(
            self._vllm_config, self._kv_cache_config
        ):
            self._fence = SharedFence()
        self.session = self._new_session()

    def _new_session(self) -> link.CacheSession:
        assert self._session_config is not None and self._memory is not None
        return link.open_session(
            self._session_config,
            self._memory.layout,
            self._memory.fds,
            self._marks.order,
            self._fence,
        )

    def let_go(self) -> None:
        """Ends all transfers, the session and the export of memory that the engine is about to
        unmap; `export` and `open` begin anew.

        Waits for the server as long as for the end of a store. A hung server keeps mappings of its
        own, so what it still writes reaches no memory that the engine gets afterwards; a load that
        it has not ended stays unreported, and vLLM keeps its blocks.
        """
        fence = self._fence
        if self.session is not None:
            self._end_transfers(self.session)
        self.shutdown()
        # The next session goes on with the page that the scheduler knows.
        self._fence = fence

    def _end_transfers(self, session: link.CacheSession) -> None:
        self._loads.make_void()
        for store in self._stores.values():
            if store.answer is None:
                store.answer = never_begun("the engine sleeps")
            elif not store.answer.done():
                session.cancel(self._transfer_id(store.job))
        answers = self._loads.answers + [store.answer for store in self._stores.values()]
        if wait_futures(
            [answer for answer in answers if answer is not None],
            self._config.store_timeout_s + FENCE_GRACE_S,
        ).not_done:
            logger.error(
                "hotkv: the server did not end all transfers before the engine sleeps; its "
                "session is closed"
            )
            self._fail_stores()

    def _fail_stores(self) -> None:
        """Counts all stores as failed, ended or not."""
        for store_id, store in self._stores.items():
            self._report.stores[store_id] = StoreReport([b""])
            self._marks.done(store.after)
        self._stores.clear()

    # ---------------------------------------------------------------------------------------- steps

    def before_step(self, meta: HotKVMetadata) -> None:
        """Waits for the stores whose source blocks this step overwrites, or takes the blocks back.
        Those that the scheduler has revoked are not waited for.
        """
        self.adapters.before_step(meta.adapters)
        self._follow(meta.weights)
        self._submit_waiting()
        waiting = [
            store
            for store_id in meta.flush_stores
            if (store := self._stores.get(store_id)) is not None
        ]
        if not waiting:
            return
        began_s = time.monotonic()
        for store in waiting:
            if store.answer is None:
                store.answer = never_begun(
                    "the device was not there yet when its blocks were taken back"
                )
        late = [store for store in waiting if self._fence is not None or not store.after.passed()]
        if late and not self._take_back(late):
            # The session was closed with all its stores.
            return
        self._await_stores([store for store in waiting if store.after.has_passed])
        self.count("flush_s", time.monotonic() - began_s)

    def _follow(self, order: WeightsOrder | None) -> None:
        """Takes in what the scheduler says of weights that may have changed; opens a session of
        their key space."""
        weights, config = self._weights, self._session_config
        if weights is None or not weights.obey(order) or config is None or self._space is None:
            return
        self._space = replace(self._space, weights_identity=weights.identity)
        self._session_config = replace(config, key_space=self._space)
        self.handshake = replace(self.handshake, key_space=self._space)
        was_connected = self.session is not None and self.session.connected
        self._reopen()
        if self.session is not None and was_connected:
            self.session.wait_connected(min(self._config.startup_wait_s, RECONNECT_S))

    @property
    def is_trusted(self) -> bool:
        """Whether what this rank holds is what the scheduler's plans and the session's key space
        rest on."""
        return self.adapters.is_trusted and (self._weights is None or not self._weights.held)

    def _await_stores(self, waiting: list[ActiveStore]) -> None:
        """Waits a moment, then takes the blocks back. While the server is slow there is no
        moment."""
        if self._all_done(waiting, 0.0 if self._server_slow else self._config.flush_timeout_s):
            return
        self._server_slow = True
        self._take_back(waiting)

    def _take_back(self, stores: list[ActiveStore]) -> bool:
        """Ends stores so that their blocks may be overwritten. False where that took the
        session."""
        if self.session is None:
            return True
        for store in stores:
            if store.answer is not None and not store.answer.done():
                self.session.cancel(self._transfer_id(store.job))
        # Where the session shares a fence page with the server, a cancelled store has ended by now,
        # whatever the server does.
        last_s = (
            max(store.began_s for store in stores) + self._config.store_timeout_s + FENCE_GRACE_S
        )
        if self._all_done(stores, max(0.0, last_s - time.monotonic())):
            return True
        logger.error(
            "hotkv: the server did not end a store within its %.1f s; the session is closed",
            self._config.store_timeout_s,
        )
        self._reopen()
        return False

    @staticmethod
    def _all_done(waiting: Iterable[ActiveStore], timeout_s: float) -> bool:
        answers = [store.answer for store in waiting if store.answer is not None]
        return not wait_futures(answers, timeout_s).not_done

    def take_everything_back(self) -> None:
        """Ends all stores of this rank at once, sent or not, so that any block may be overwritten.
        Needs no list of them.

        Where they can't all be revoked the session is closed, so that the server aborts them, and
        another one opened.
        """
        session = self.session
        stores, self._stores = self._stores, {}
        self._report.stores.update({store_id: StoreReport([b""]) for store_id in stores})
        self._lost += stores.values()
        if session is None:
            return
        try:
            session.revoke_stores()
        except Exception:
            self.count("hook_errors")
            logger.exception("hotkv: stores could not be revoked; the session is closed")
            self.session = None
            session.close()
            self.session = self._new_session()

    def _reopen(self) -> None:
        """A new session in place of one whose server hangs. Its stores count as failed; its loads
        go on waiting for their end."""
        if self.session is None or self._session_config is None or self._memory is None:
            return
        # Nothing more goes to the old session, whatever becomes of the new one: it may be of
        # another key space.
        session, self.session = self.session, None
        # Closing waits for the server; the futures of what it still copies keep to their promise
        # without us.
        threading.Thread(target=session.close, name="hotkv-close", daemon=True).start()
        self._fail_stores()
        self.session = self._new_session()

    def start_loads(self, meta: HotKVMetadata) -> None:
        """Begins this step's loads; does not wait for them."""
        self._held, self._asks_links = meta.held_loads, meta.asks_links
        self._loads.fail(meta.abandoned_loads)
        if not self.is_trusted:
            self._loads.fail([job.request_id for job in meta.loads])
        elif meta.loads:
            after = self._mark()
            for job in meta.loads:
                self._loads.begin(job, self._marks.use(after))
            self._marks.done(after)
        for request_id in meta.cancel_loads:
            self._loads.cancel(request_id)
        if meta.held_loads:
            self._loads.give_up(meta.held_loads)

    def _mark(self) -> Mark:
        """What all that this hook begins lies behind."""
        if self.session is None:
            return self._marks.make(OrderKind.HOST)
        if self._marks.order != NO_ORDER and self.session.connected:
            taken = (self.session.order_kind, self.session.order_message)
            if taken != self._logged_order:
                self._logged_order = taken
                why = f" ({taken[1]})" if taken[1] else ""
                logger.info(
                    "hotkv worker %d: the server follows the device by %s%s",
                    self._place.rank,
                    taken[0].name.lower(),
                    why,
                )
        return self._marks.make(self.session.order_kind)

    def save(self, meta: HotKVMetadata) -> None:
        """Submits this step's stores; does not wait for them."""
        self._submit_waiting()
        if not meta.stores:
            return
        if not self.is_trusted:
            self._report.stores.update({job.store_id: StoreReport([b""]) for job in meta.stores})
            return
        if not self._place.is_writer:
            self._report.stores.update({job.store_id: nothing_to_write(job) for job in meta.stores})
            return
        after = self._mark()
        for job in meta.stores:
            store = ActiveStore(
                job, self._marks.use(after), time.monotonic(), self._built(job.representations)
            )
            self._stores[job.store_id] = store
            if after.lets_send():
                self._submit_store(store)
        self._marks.done(after)

    def _built(self, runs: tuple[BlockRun, ...]) -> tuple[BlockRun, ...]:
        """The runs, their representations all built; none where they can't be, or nobody would take
        them."""
        if not runs or self._sparse is None or self.session is None or not self.session.connected:
            return ()
        try:
            for run in runs:
                self._sparse.build(self._sparse_group(run.group_index), run.block_ids)
        except Exception:
            # Blocks are stored whatever becomes of their representations.
            self.count("sparse_faults", 1)
            if not self._logged_build:
                self._logged_build = True
                logger.exception(
                    "hotkv: representations could not be built; their blocks are stored "
                    "without "
                    "(said once)"
                )
            return ()
        return runs

    def _sparse_group(self, group_index: int) -> int:
        """vLLM's group of the blocks whose representations have this index in the session."""
        assert self._session_config is not None
        config = self._session_config
        return self._groups[
            config.representations[group_index - len(config.key_space.groups)].group_index
        ].vllm_group

    def take_results(self) -> tuple[set[str], set[str]]:
        """Requests whose load has ended, and those of them whose load failed. Whatever breaks here,
        a load is reported once."""
        if self._loads:
            if self._weights is not None and self._weights.held:
                self._loads.make_void()
            self._submit_waiting()
        finished, failed, ended = self._loads.take()
        try:
            for one in ended:
                self._load_ended(one.load, one.num_bytes)
            self._loads.watch(time.monotonic())
        except Exception:
            # The requests are told all the same.
            self.count("hook_errors")
            logger.exception("hotkv: what follows the end of loads broke")
        return finished, failed

    def take_failed_results(self) -> set[str]:
        """Requests whose load is over, all of which count as failed: where `take_results`
        breaks."""
        failed, over = self._loads.take_failed()
        self._lost += over
        return failed

    def _load_ended(self, load: ActiveLoad, num_bytes: int | None) -> None:
        self._marks.done(load.after)
        if num_bytes is None:
            return
        self.count("load_bytes", num_bytes)
        if self._sparse is not None:
            for run in load.job.representations:
                self._sparse.loaded(self._sparse_group(run.group_index), run.block_ids)

    def take_report(self) -> HotKVWorkerMetadata | None:
        """Stores that ended, and counters, since the last call."""
        self._forget_lost()
        for store_id, store in list(self._stores.items()):
            if store.answer is not None and store.answer.done():
                self._report.stores[store_id] = self._store_report(store, store.answer)
                del self._stores[store_id]
                self._marks.done(store.after)
        self._report.adapters = self.adapters.take_report()
        if self._report.is_empty():
            return None
        report, self._report = self._report, HotKVWorkerMetadata()
        return report

    def note_step(self, handshake: HotKVHandshake | None, settled_step: int) -> None:
        """For the next report: this rank's handshake, if it was asked for, and the number of the
        step that has run."""
        self._report.handshakes = () if handshake is None else (handshake,)
        self._report.settled_step = settled_step

    def note_state(self) -> None:
        """Puts into the next report how hung loads and the session are now."""
        report = self._report
        report.overdue_loads, report.settled_loads, report.links = (), {}, {}
        report.overdue_loads, report.links = (
            self._loads.overdue(time.monotonic()),
            self._link_report(),
        )
        weights = self._weights.take_report() if self._weights is not None else None
        if weights is not None:
            report.weights = {self._vllm_config.parallel_config.rank: weights}
        if self._held:
            settled, over = self._loads.settled(self._held)
            report.settled_loads = dict.fromkeys(settled, 1)
            self._lost += over

    def note_sparse(self, counters: Mapping[str, float], sparse: SparseReport | None) -> None:
        """The same of sparse decode."""
        for name, value in counters.items():
            self.count(name, value)
        if sparse is not None:
            self._report.sparse = (
                sparse if self._report.sparse is None else self._report.sparse.join(sparse)
            )

    def _forget_lost(self) -> None:
        """Frees the marks of transfers that nobody reports any more."""
        lost, self._lost = self._lost, []
        for transfer in lost:
            self._marks.done(transfer.after)

    def _link_report(self) -> dict[int, str]:
        """Whether this rank has a session: when that has changed, and when it was asked."""
        if self._session_config is None:
            return {}
        is_connected = self.session is not None and self.session.connected
        if is_connected == self._logged_link and not self._asks_links:
            return {}
        self._logged_link = is_connected
        return {self._place.rank: "" if is_connected else self._why_absent()}

    def _why_absent(self) -> str:
        return (self._state_log is not None and self._state_log.why) or "not connected yet"

    def fail_loads(self, meta: HotKVMetadata) -> None:
        """The hook that should have begun a step's loads broke: whatever it has not begun has
        failed. Its stores are still to come."""
        self._loads.fail_unbegun(meta.loads, meta.abandoned_loads)

    def fail_stores(self, meta: HotKVMetadata) -> None:
        """The hook that should have begun a step's stores broke: whatever it has not sent has
        failed, and is not sent any more."""
        for job in meta.stores:
            store = self._stores.get(job.store_id)
            if store is None:
                self._report.stores.setdefault(job.store_id, StoreReport([b""]))
            elif store.answer is None:
                store.answer = never_begun("its hook broke")

    def without_representations(self) -> None:
        """From now on blocks go without theirs, for good: it is not known any more which of them
        hold."""
        self._sparse = None

    def shutdown(self) -> None:
        """Closes the session, the memory and the fence. Waits for the server, 5 seconds at most; a
        load that it does not end then writes to memory that nobody reads.
        """
        session, self.session = self.session, None
        memory, self._memory = self._memory, None
        self._fence = None
        try:
            if session is not None:
                session.close()
        finally:
            if memory is not None:
                memory.close()

    # ------------------------------------------------------------------------------------ transfers

    def _transfer_id(self, job: StoreJob) -> str:
        return f"{job.lease_id}-k{self._place.rank}"

    def _submit_waiting(self) -> None:
        """Sends transfers that were not yet to be sent and whose mark has passed."""
        self._loads.send_waiting()
        for store in self._stores.values():
            if store.answer is None and store.after.passed():
                self._submit_store(store)

    def _send_load(self, job: LoadJob, mark: Mark) -> "Future[TransferResult]":
        runs = job.runs if self._sparse is None else (*job.runs, *job.representations)
        return self._begun(
            lambda s: s.load(
                self._load_id(job.transfer_id), job.lease_id, runs, job.timeout_s, mark.after
            )
        )

    def _cancel_load(self, transfer_id: str) -> None:
        if self.session is not None:
            self.session.cancel(self._load_id(transfer_id))

    def _load_id(self, transfer_id: str) -> str:
        return f"{transfer_id}-k{self._place.rank}"

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
            lambda s: s.store(
                transfer_id,
                job.lease_id,
                runs,
                timeout_s,
                job.retention,
                store.after.after,
                job.fence_index,
            )
        )

    def _begun(self, begin: Any) -> "Future[TransferResult]":
        """The transfer's future; a failed one where it could not be begun."""
        if self.session is None or not self.session.connected:
            return never_begun("no server")
        if not self.is_trusted:
            return never_begun("weights or adapters have changed")
        try:
            begun: Future[TransferResult] = begin(self.session)
        except Exception as error:  # noqa: BLE001 - hook edge: a transfer that was not begun has failed, whatever the cause
            return never_begun(f"{type(error).__name__}: {error}")
        return begun

    def _store_report(self, store: ActiveStore, answer: "Future[TransferResult]") -> StoreReport:
        """A store whose result can't be read has failed."""
        if answer.cancelled() or answer.exception() is not None:
            logger.debug(
                "hotkv: a store failed: %s", None if answer.cancelled() else answer.exception()
            )
            return StoreReport([b""])
        try:
            result = answer.result()
            if result.status is TransferStatus.DONE:
                self._server_slow = False
            self.count("store_bytes", result.num_bytes)
            return report_of(result.results[: len(store.job.runs)])
        except Exception:
            self.count("hook_errors")
            logger.exception(
                "hotkv: the result of a store could not be read; the store counts as failed"
            )
            return StoreReport([b""])

    def count(self, name: str, value: float = 1) -> None:
        """Adds to a counter of `stats.COUNTERS`; it goes out with the next report."""
        self._report.counters[name] = self._report.counters.get(name, 0) + value

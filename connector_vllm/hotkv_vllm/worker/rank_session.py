"""Holds a rank's exported memory and its session with the server. Exports the tensors that vLLM
registers, opens a session with this memory, and sends the rank's transfers.

Always true:
- A session exists only with memory that the server can map, and for a key space on which all ranks
  have agreed. The session is closed before the engine unmaps the memory.
- No transfer (load or store) is sent without a server. None is sent while this rank's weights or
  adapters may differ from those for which the scheduler has planned the step.
- A transfer that could not be begun counts as failed.
- `RankSession.handshake` is what the scheduler must know about this rank: its key space, or why it
  runs without hotkv.
"""

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from hotkv_client.arena import Arena
from hotkv_client.fence import SharedFence
from hotkv_client.session import Session
from hotkv_client.types import BlockRun, LinkState, Role, SessionConfig, TransferResult
from hotkv_proto.keys import KeySpace, Sketch
from hotkv_proto.order import NO_ORDER, OrderKind
from hotkv_sparse.centre import Centres
from hotkv_vllm import link
from hotkv_vllm.compat import Unsupported, checks, kv_groups, model_weights
from hotkv_vllm.compat.model_weights import UNREAD
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.identity import ranks
from hotkv_vllm.identity.adapter_watch import AdapterWatch, watch_adapters
from hotkv_vllm.identity.rekeying import RankWeights, WeightsOrder
from hotkv_vllm.identity.weights_watch import watch_callers
from hotkv_vllm.metadata import STILL_CONNECTING, HotKVHandshake, LoadJob, StoreJob
from hotkv_vllm.sparse.shared import HANDLE, shared_pool
from hotkv_vllm.sparse.worker import SparseWorker
from hotkv_vllm.worker.device_order import Mark, Marks, marks_for
from hotkv_vllm.worker.layout import ExportedMemory, OwnMemory, find_own
from hotkv_vllm.worker.rank_loads import never_begun

logger = link.logger


class RankSession:
    """Owns a rank's exported memory and its session, and sends its transfers.

    place: the rank's position in the engine, and the index of its shard (part of each block) in a
        slot of the server's arena.
    memory: the exported memory; None if none is exported.
    marks: makes marks (points in the device's queue) for which transfers wait.
    fence: the shared page in which the scheduler revokes stores (makes them fail); None if only
        workers revoke them.
    weights: watches this rank's weights; None before the first export.
    adapters: watches this rank's LoRA adapters.
    shared: the sparse worker whose sketches (compact forms of keys, for sparse attention)
        are stored and loaded with blocks; None if blocks are stored without sketches.
    session: the session with the server; None if no session was opened or the session is closed.
    reported_link: True if the scheduler was last told that the session is connected.
    has_agreed: True once all ranks may have agreed on a key space. From then on each rank takes
        part in every later agreement, even if it has turned off, because the other ranks wait for
        it.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: ConnectorConfig) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._earlier = checks.earlier_connectors(checks.outer_configs())
        self._reading = model_weights.begin_reading(vllm_config, config.weights_identity)
        self._space: KeySpace | None = None
        self._own_space: KeySpace | None = None
        self._groups: tuple[kv_groups.CacheGroup, ...] = ()
        self._session_config: SessionConfig | None = None
        self._state_log: link.StateLog | None = None
        self.reported_link = True
        self._logged_order: tuple[OrderKind, str] | None = None
        self.place = checks.RankPlace(0, 1, 0, True)
        self.memory: ExportedMemory | None = None
        self.marks = Marks()
        self.fence: SharedFence | None = None
        self.weights: RankWeights | None = None
        self.adapters = AdapterWatch(None, vllm_config.parallel_config.rank)
        self.shared: SparseWorker | None = None
        self.session: Session | None = None
        self.has_agreed = False
        self._why_off = ""
        self.handshake = HotKVHandshake(None, "the worker registered no KV cache")

    def __repr__(self) -> str:
        trusted = "trusted" if self.is_trusted else "not trusted"
        return f"RankSession({self.session}, {self.place}, {trusted}, {self.adapters})"

    @property
    def is_connected(self) -> bool:
        return self.session is not None and self.session.connected

    @property
    def lacks_session(self) -> bool:
        """Returns True if an attempt to open the session has failed, so that it must be opened
        again."""
        is_ready = self.memory is not None and self._session_config is not None
        return self.session is None and is_ready

    # --------------------------------------------------------------------------------------- memory

    def export(self, kv_caches: Mapping[str, Any]) -> None:
        """Exports the engine's KV memory, so that a server can map it. If the memory can't be
        exported or the ranks do not agree on a key space, the engine runs without hotkv, and the
        log says why. CPU memory is moved into a shared file; the tensors and their views stay
        valid.

        kv_caches: the tensor of each layer, by layer name.
        """
        try:
            self._export(kv_caches)
        except (Unsupported, OSError, ValueError) as error:
            logger.warning("hotkv is off in this worker: %s", error)
            self.handshake = HotKVHandshake(None, str(error))
            if isinstance(error, ranks.MissingNoteError):
                # The ranks agree on a key space by notes that they exchange. This rank lacks a
                # note, but other ranks may have all notes, and after a sleep they will wait for
                # this rank's note again. So this rank must still take part then.
                self.has_agreed, self._why_off = True, str(error)
            return
        if not self.adapters.is_watching:
            self.adapters = watch_adapters(self._vllm_config)

    def _export(self, kv_caches: Mapping[str, Any]) -> None:
        """Exports this rank's memory, and lets the ranks agree on the key space. After a sleep,
        only the memory's description and the export are made anew; this rank's own key space and
        `marks` stay. Raises Unsupported, OSError or ValueError."""
        checks.check_ranks(self._vllm_config)
        place = self.place = checks.rank_place(self._vllm_config, self._kv_cache_config)
        vllm, kv_cache = self._vllm_config, self._kv_cache_config
        if self._why_off:
            own = OwnMemory(ranks.RankNote(place, ranks.this_host(), None, why_off=self._why_off))
        else:
            own = find_own(
                kv_caches,
                vllm,
                kv_cache,
                self._config,
                place,
                self._own_space,
                self._earlier,
                self._reading,
            )
        memory = own.memory
        try:
            num_ranks = checks.num_ranks(self._vllm_config)
            space, self.place = ranks.agree(own.note, num_ranks, self._engine_id)
            self.has_agreed = True
            assert memory is not None, "the ranks agreed, although this one has no memory to show"
            memory.layout = replace(memory.layout, shard_index=self.place.shard_index)
            memory.layout.validate(space.groups)
            self._groups = own.groups
            if self._own_space is None:
                self.marks = marks_for(own.device, self._config.device_order)
                self._own_space = own.note.space
        except Exception:
            if memory is not None:
                memory.close()
            raise
        if self.weights is None:
            # The models are found on the call stack, so the watch begins here, even if the weights
            # get their identity later.
            self.weights = RankWeights(watch_callers())
        self.memory = self.marks.beside(memory)
        self._space = space
        if space.weights_identity != UNREAD:
            self._identify(space.weights_identity)

    def _identify(self, identity: str) -> None:
        """Completes the key space by the identity of the weights that the engine has loaded, or of
        those to which it has changed since.

        identity: of the weights' files.
        """
        assert self.weights is not None and self._space is not None
        if not self.weights.identity:
            in_doubt = not self._config.weights_identity and model_weights.weights_may_be_older(
                self._vllm_config
            )
            self.weights.begin(identity, in_doubt)
        self._space = replace(self._space, weights_identity=self.weights.identity)

    def weights_were_read(self) -> bool:
        """Returns True once, if the weights' files were still being read when the memory was
        exported, and have been read since: the session can be opened now. If they can't be read,
        turns this rank off."""
        space = self._space
        is_awaited = space is not None and space.weights_identity == UNREAD
        if self.memory is None or not is_awaited or not self._reading.done():
            return False
        try:
            self._identify(self._reading.result())
        except (Unsupported, OSError) as error:
            logger.warning("hotkv is off in this worker: %s", error)
            self.turn_off(str(error))
            return False
        return True

    def _share(self, sparse: SparseWorker, centres: Centres | None) -> tuple[Sketch, ...]:
        """Adds the file with the sketches (compact forms of keys, for sparse attention) to
        the exported memory. Returns the kinds of sketches in it: one per KV cache group with
        sparse layers."""
        assert self.memory is not None and self._space is not None
        pool = shared_pool(
            sparse.sketches,
            list(sparse.layers.values()),
            self._groups,
            self.place.num_shards,
            centres,
        )
        num_groups = len(self._space.groups)
        memory = pool.beside(self.memory, num_groups)
        try:
            memory.layout.validate(
                self._space.groups,
                {num_groups + place: kind for place, kind in enumerate(pool.kinds)},
            )
        except ValueError:
            os.close(memory.fds[HANDLE])
            raise
        self.memory = memory
        self.shared = sparse
        return pool.kinds

    def arena(self) -> Arena | None:
        """Returns the server's arena, mapped for reading; None if there is no session, or if the
        session may not map the arena."""
        return None if self.session is None else self.session.arena()

    def shared_group(self, group_index: int) -> int:
        """Returns vLLM's number of the KV cache group to whose blocks sketches (compact
        forms of keys) belong.

        group_index: the group index under which the session stores these sketches.
        """
        assert self._session_config is not None
        config = self._session_config
        kind = config.sketches[group_index - len(config.key_space.groups)]
        return self._groups[kind.group_index].vllm_group

    # -------------------------------------------------------------------------------------- session

    def open(
        self,
        sparse: SparseWorker | None,
        centres: Centres | None,
        wait_s: float,
        opening_s: float = 0.0,
    ) -> None:
        """Opens a session for the exported memory. Waits for the server up to `wait_s`, and up to
        `opening_s` longer if the server has answered but has not opened the session yet. Does
        nothing if no memory was exported, or while the weights' files are being read.

        sparse: the worker whose sketches (compact forms of keys) are stored with blocks. If
            they can't be exported, blocks are stored and loaded without sketches, and the
            log says why.
        centres: the mean keys by which the sketches are computed; None without mean keys.
        """
        if self.memory is None or self._space is None:
            return
        if self._space.weights_identity == UNREAD:
            self.handshake = HotKVHandshake(
                None, "the weights are being read", rank=self.place.rank, is_reading=True
            )
            return
        kinds: tuple[Sketch, ...] = ()
        if sparse is not None:
            try:
                kinds = self._share(sparse, centres)
            except (Unsupported, OSError, ValueError) as error:
                logger.warning("hotkv: sketches are built in this engine and not shared: %s", error)
        try:
            self._open(self._space, kinds)
        except (OSError, ValueError) as error:
            logger.warning("hotkv is off in this worker: %s", error)
            self.turn_off(str(error))
            return
        self.handshake = HotKVHandshake(
            self._space,
            sketches=kinds,
            fence=None if self.fence is None else self.fence.place,
            host=ranks.this_host(),
            rank=self.place.rank,
            weights_in_doubt=self.weights is not None and self.weights.held,
        )
        # Waits for the server, because until the server has mapped the memory, stores of the first
        # steps would fail.
        if self.session is None or not link.await_server(self.session, wait_s, opening_s):
            self.reported_link = False
            self.handshake = replace(self.handshake, absent=self._why_absent())

    def _open(self, space: KeySpace, kinds: tuple[Sketch, ...]) -> None:
        self._state_log = link.StateLog(
            f"worker {self.place.rank}", self._config.target, logging.DEBUG
        )
        self._session_config = SessionConfig(
            target=self._config.target,
            engine_id=self._engine_id,
            role=Role.WORKER,
            key_space=space,
            sketches=kinds,
            client_name=f"hotkv-vllm worker {self.place.rank}",
            use_table=False,
            credentials=self._config.credentials,
            on_state=self._state_log,
        )
        if self.fence is None and checks.writes_before_it_tells(
            self._vllm_config, self._kv_cache_config
        ):
            self.fence = SharedFence()
        self.begin()

    def begin(self) -> None:
        """Opens a session for the exported memory and the present key space, without waiting for
        the server. If the operating system refuses a thread or a file, logs this and opens no
        session."""
        assert self._session_config is not None and self.memory is not None
        try:
            self.session = link.open_session(
                self._session_config,
                self.memory.layout,
                self.memory.fds,
                self.marks.order,
                self.fence,
            )
        except (OSError, RuntimeError) as error:
            assert self._state_log is not None
            self._state_log(LinkState.ABSENT, str(error))

    def leave(self) -> bool:
        """Closes the session in another thread, without waiting for the server. Returns False if
        there is no session."""
        session, self.session = self.session, None
        if session is None:
            return False
        # Transfers in flight need no attention here: the client resolves their futures when it
        # closes the session.
        link.close_aside(session)
        return True

    def follow(self, order: WeightsOrder | None) -> bool:
        """Carries out the scheduler's order to check weights that may have changed. Returns True if
        the key space has changed with the weights, so that the session must be replaced.

        order: None if the step has no such order.
        """
        weights, config = self.weights, self._session_config
        if weights is None or not weights.obey(order) or config is None or self._space is None:
            return False
        self._space = replace(self._space, weights_identity=weights.identity)
        self._session_config = replace(config, key_space=self._space)
        self.handshake = replace(self.handshake, key_space=self._space)
        return True

    def turn_off(self, why: str) -> None:
        """Turns this rank off, so that the whole engine runs without hotkv. Closes the session and
        the exported memory.

        why: the reason, which the scheduler gets in `handshake`.
        """
        self._why_off = why
        self.handshake = HotKVHandshake(None, why, rank=self.place.rank)
        self.shutdown()

    def shutdown(self, keeps_fence: bool = False) -> None:
        """Closes the session, the exported memory and the fence. Waits for the server for at most 5
        seconds. A load that has not ended by then writes only to memory that the engine does not
        use any more.

        keeps_fence: True keeps the fence (the shared page in which the scheduler revokes stores)
            for the next session.
        """
        session, self.session = self.session, None
        memory, self.memory = self.memory, None
        if not keeps_fence:
            self.fence = None
        try:
            if session is not None:
                session.close()
        finally:
            if memory is not None:
                memory.close()

    # ------------------------------------------------------------------------------------ transfers

    @property
    def is_trusted(self) -> bool:
        """Returns True if transfers may be sent: this rank surely has the weights for which the
        session was opened, and the adapters for which the scheduler has planned the step."""
        return self.adapters.is_trusted and (self.weights is None or not self.weights.held)

    def load(self, job: LoadJob, mark: Mark) -> "Future[TransferResult]":
        """Begins a load. The server copies after the device has passed the mark (a point in the
        device's queue). Returns the future of the transfer. Never raises."""
        runs = job.runs if self.shared is None else (*job.runs, *job.sketches)
        return self._begun(
            lambda session: session.load(
                self._name(job.transfer_id),
                job.lease_id,
                runs,
                job.timeout_s,
                mark.after,
                job.traceparent,
            )
        )

    def store(
        self, job: StoreJob, runs: tuple[BlockRun, ...], mark: Mark
    ) -> "Future[TransferResult]":
        """Begins a store. The server copies after the device has passed the mark (a point in the
        device's queue). Returns the future of the transfer. Never raises.

        runs: the runs of blocks and of sketches (compact forms of keys) to store.
        """
        return self._begun(
            lambda session: session.store(
                self._name(job.lease_id),
                job.lease_id,
                runs,
                self._config.store_timeout_s,
                job.options,
                mark.after,
                job.fence_index,
            )
        )

    def cancel(self, transfer_id: str) -> None:
        """Asks the server to end a transfer early. The transfer has ended when its future is
        resolved."""
        if self.session is not None:
            self.session.cancel(self._name(transfer_id))

    def _name(self, transfer_id: str) -> str:
        """Returns the id under which the server knows this rank's part of a transfer. The id is
        made from `transfer_id`, which is the same in all ranks."""
        return f"{transfer_id}-k{self.place.rank}"

    def _begun(
        self, begin: "Callable[[Session], Future[TransferResult]]"
    ) -> "Future[TransferResult]":
        """Begins a transfer and returns its future. Returns a failed future if the transfer can't
        be begun.

        begin: a function that gets the session, begins the transfer and returns its future.
        """
        if self.session is None or not self.session.connected:
            return never_begun("no server")
        if not self.is_trusted:
            return never_begun("weights or adapters have changed")
        try:
            return begin(self.session)
        except Exception as error:  # noqa: BLE001 - callback edge: a transfer that was not begun has failed, whatever the cause
            return never_begun(f"{type(error).__name__}: {error}")

    # ---------------------------------------------------------------------------------------- state

    def mark(self) -> Mark:
        """Makes a mark (a point in the device's queue) for the transfers that the caller begins:
        the server copies only after the device has passed it. Logs how the server finds that out,
        each time it has changed."""
        if self.session is None:
            return self.marks.make(OrderKind.HOST)
        if self.marks.order != NO_ORDER and self.session.connected:
            taken = (self.session.order_kind, self.session.order_message)
            if taken != self._logged_order:
                self._logged_order = taken
                logger.info(
                    "hotkv worker %d: the server follows the device by %s%s",
                    self.place.rank,
                    taken[0].name.lower(),
                    f" ({taken[1]})" if taken[1] else "",
                )
        return self.marks.make(self.session.order_kind)

    def link_report(self, is_asked: bool) -> dict[int, str]:
        """Returns this rank's part of the report that says which ranks are connected to the server:
        {rank: why it is not connected}, with an empty text if it is. Returns an empty dict if this
        has not changed since the last report, unless the scheduler asks.

        is_asked: True if the scheduler asks whether the rank is connected.
        """
        if self._session_config is None or (
            self.is_connected == self.reported_link and not is_asked
        ):
            return {}
        self.reported_link = self.is_connected
        return {self.place.rank: "" if self.reported_link else self._why_absent()}

    def _why_absent(self) -> str:
        return (self._state_log is not None and self._state_log.why) or STILL_CONNECTING

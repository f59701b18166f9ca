"""Holds a rank's exported memory and its session, and sends the rank's transfers.

Always true:
- A session exists only with memory that the server can map, and for a key space on which all ranks
  have agreed. It is closed before the engine unmaps the memory.
- No transfer is sent while this rank's weights or adapters may differ from those for which the
  scheduler has planned the step.
- A transfer that could not be begun counts as failed.
- `RankSession.handshake` tells the scheduler this rank's key space, or why it runs without
  hotkv.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from hotkv_client.arena import Arena
from hotkv_client.fence import SharedFence
from hotkv_client.session import Session
from hotkv_client.types import BlockRun, LinkState, Role, SessionConfig, TransferResult
from hotkv_proto.keys import KeySpace
from hotkv_proto.order import NO_ORDER, OrderKind
from hotkv_vllm import link
from hotkv_vllm.companion import Attachment, RankCompanion
from hotkv_vllm.compat import Unsupported, checks, kv_groups, model_weights
from hotkv_vllm.compat.model_weights import UNREAD
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.identity import ranks
from hotkv_vllm.identity.adapter_watch import AdapterWatch, watch_adapters
from hotkv_vllm.identity.rekeying import RankWeights, WeightsOrder
from hotkv_vllm.identity.weights_watch import watch_callers
from hotkv_vllm.metadata import STILL_CONNECTING, HotKVHandshake, LoadJob, StoreJob
from hotkv_vllm.worker.device_order import Mark, Marks, marks_for
from hotkv_vllm.worker.layout import ExportedMemory, OwnMemory, find_own
from hotkv_vllm.worker.rank_loads import never_begun

logger = link.logger


class RankSession:
    """Owns a rank's exported memory and its session.

    place: position in the engine, and index of the rank's shard in a slot.
    fence: in which the scheduler revokes stores; None if only workers revoke them.
    weights: None before the first export.
    has_attachments: the companion's are stored and loaded with blocks.
    reported_link: whether the scheduler was last told that the session is connected.
    has_agreed: ranks may have agreed on a key space. From then on this one takes part in every
        later agreement, even if it has turned off, because the others wait for it.
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
        self.has_attachments = False
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
        """Opening it has failed, and must be repeated."""
        is_ready = self.memory is not None and self._session_config is not None
        return self.session is None and is_ready

    # --------------------------------------------------------------------------------------- memory

    def export(self, kv_caches: Mapping[str, Any]) -> None:
        """Exports the engine's memory. If that fails, or the ranks do not agree on a key space,
        the engine runs without hotkv, and the log says why. CPU memory moves into a shared file;
        tensors and views stay valid."""
        try:
            self._export(kv_caches)
        except (Unsupported, OSError, ValueError) as error:
            logger.warning("hotkv is off in this worker: %s", error)
            self.handshake = HotKVHandshake(None, str(error))
            if isinstance(error, ranks.MissingNoteError):
                # This rank lacks a note of another, but the others may have all notes. After a
                # sleep they will wait for this rank's note, so it must take part.
                self.has_agreed, self._why_off = True, str(error)
            return
        if not self.adapters.is_watching:
            self.adapters = watch_adapters(self._vllm_config)

    def _export(self, kv_caches: Mapping[str, Any]) -> None:
        """Keeps this rank's own key space and `marks` after a sleep. Raises Unsupported, OSError
        or ValueError."""
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
            # The models are found on the call stack, so the watch begins here, even if the
            # weights' identity comes later.
            self.weights = RankWeights(watch_callers())
        self.memory = self.marks.beside(memory)
        self._space = space
        if space.weights_identity != UNREAD:
            self._identify(space.weights_identity)

    def _identify(self, identity: str) -> None:
        """Adds the identity of the loaded weights, or of those to which the engine has changed,
        to the key space."""
        assert self.weights is not None and self._space is not None
        if not self.weights.identity:
            in_doubt = not self._config.weights_identity and model_weights.weights_may_be_older(
                self._vllm_config
            )
            self.weights.begin(identity, in_doubt)
        self._space = replace(self._space, weights_identity=self.weights.identity)

    def weights_were_read(self) -> bool:
        """True once, when files that were being read at the export have been read: the session
        can be opened. Turns this rank off if they can't be read."""
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

    def arena(self) -> Arena | None:
        """None if the session is missing or may not map it."""
        return None if self.session is None else self.session.arena()

    # -------------------------------------------------------------------------------------- session

    def open(
        self,
        companion: RankCompanion | None,
        wait_s: float,
        opening_s: float = 0.0,
    ) -> None:
        """Opens a session. Waits for the server up to `wait_s`, and `opening_s` longer if it has
        answered but not opened the session. Does nothing without exported memory, or while the
        weights' files are being read.

        companion: without its attachments if they can't be exported; the log says why.
        """
        if self.memory is None or self._space is None:
            return
        if self._space.weights_identity == UNREAD:
            self.handshake = HotKVHandshake(
                None, "the weights are being read", rank=self.place.rank, is_reading=True
            )
            return
        attachments: tuple[Attachment, ...] = ()
        if companion is not None:
            found = companion.attach(self.memory, self._space, self._groups, self.place.num_shards)
            if found is not None:
                self.memory, attachments = found
                self.has_attachments = True
        try:
            self._open(self._space, attachments)
        except (OSError, ValueError) as error:
            logger.warning("hotkv is off in this worker: %s", error)
            self.turn_off(str(error))
            return
        self.handshake = HotKVHandshake(
            self._space,
            attachments=attachments,
            fence=None if self.fence is None else self.fence.place,
            host=ranks.this_host(),
            rank=self.place.rank,
            weights_in_doubt=self.weights is not None and self.weights.held,
        )
        # Until the server has mapped the memory, stores would fail.
        if self.session is None or not link.await_server(self.session, wait_s, opening_s):
            self.reported_link = False
            self.handshake = replace(self.handshake, absent=self._why_absent())

    def _open(self, space: KeySpace, attachments: tuple[Attachment, ...]) -> None:
        self._state_log = link.StateLog(
            f"worker {self.place.rank}", self._config.target, logging.DEBUG
        )
        self._session_config = SessionConfig(
            target=self._config.target,
            engine_id=self._engine_id,
            role=Role.WORKER,
            key_space=space,
            sketches=attachments,
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
        """Opens a session without waiting. If the operating system refuses a thread or a file,
        logs it and opens none."""
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
        """Closes the session in another thread. False if there is none."""
        session, self.session = self.session, None
        if session is None:
            return False
        # The client resolves the futures of transfers in flight.
        link.close_aside(session)
        return True

    def follow(self, order: WeightsOrder | None) -> bool:
        """Adopts ordered weights. True if the key space has changed, so that the session must be
        replaced."""
        weights, config = self.weights, self._session_config
        if weights is None or not weights.obey(order) or config is None or self._space is None:
            return False
        self._space = replace(self._space, weights_identity=weights.identity)
        self._session_config = replace(config, key_space=self._space)
        self.handshake = replace(self.handshake, key_space=self._space)
        return True

    def turn_off(self, why: str) -> None:
        """Closes all. The whole engine then runs without hotkv."""
        self._why_off = why
        self.handshake = HotKVHandshake(None, why, rank=self.place.rank)
        self.shutdown()

    def shutdown(self, keeps_fence: bool = False) -> None:
        """Closes session, memory and fence. Waits for at most 5 seconds: a load that has not ended
        by then writes only to memory that the engine does not use any more.

        keeps_fence: for the next session.
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
        """This rank surely has the weights of the session, and the adapters for which the step
        was planned."""
        return self.adapters.is_trusted and (self.weights is None or not self.weights.held)

    def load(self, job: LoadJob, mark: Mark) -> "Future[TransferResult]":
        """Never raises."""
        runs = (*job.runs, *job.attached) if self.has_attachments else job.runs
        return self._begun(
            lambda session: session.load(
                self._name(job.transfer_id),
                job.lease_id,
                runs,
                job.timeout_s,
                mark.after,
                job.traceparent,
                polls=True,
            )
        )

    def store(
        self, job: StoreJob, runs: tuple[BlockRun, ...], mark: Mark
    ) -> "Future[TransferResult]":
        """Never raises."""
        return self._begun(
            lambda session: session.store(
                self._name(job.lease_id),
                job.lease_id,
                runs,
                self._config.store_timeout_s,
                job.options,
                mark.after,
                job.fence_index,
                polls=True,
            )
        )

    def cancel(self, transfer_id: str) -> None:
        if self.session is not None:
            self.session.cancel(self._name(transfer_id))

    def _name(self, transfer_id: str) -> str:
        """The id of this rank's part; `transfer_id` is the same in all ranks."""
        return f"{transfer_id}-k{self.place.rank}"

    def _begun(
        self, begin: "Callable[[Session], Future[TransferResult]]"
    ) -> "Future[TransferResult]":
        """Returns a failed future if the transfer can't be begun."""
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
        """Logs how the server tests it, each time this has changed."""
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
        """{rank: why it is not connected, or empty}; {} if unchanged and not asked for."""
        if self._session_config is None or (
            self.is_connected == self.reported_link and not is_asked
        ):
            return {}
        self.reported_link = self.is_connected
        return {self.place.rank: "" if self.reported_link else self._why_absent()}

    def _why_absent(self) -> str:
        return (self._state_log is not None and self._state_log.why) or STILL_CONNECTING

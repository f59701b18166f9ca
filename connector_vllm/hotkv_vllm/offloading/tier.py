"""Implements a secondary tier of vLLM's KV offloading, which keeps its chunks in hotkv-server. A
*chunk* is one or several consecutive blocks that vLLM offloads as one unit. vLLM's *primary tier*
is its CPU memory for offloading; each chunk there has a *row*. vLLM asks this tier to copy chunks
from rows to the server (store) and from the server to rows (load, also called promotion).

The tier runs in the scheduler's process, in one thread of vLLM. Only its methods `drain_jobs`,
`shutdown` and `open` block.

Always true:
- In three cases lookups do not hit and chunks are not stored: without a server, while the weights
  may have changed, and while a reset of the caches is in progress. The answer to a lookup is then
  "miss", or, for a short time, "ask again".
- Every job (load or store) that vLLM submits is reported as ended exactly once, within a bounded
  time. vLLM reuses no row to which the server still has access (`PrimaryRows`).
- A lookup answers "ask again" for a bounded time.
- No exception of hotkv reaches vLLM. If a method raises, the exception is logged once, and vLLM
  gets a safe answer such as a miss.

`HotKVOffloadingConnector` creates the tier, and passes it information that vLLM does not give to
tiers: the key space, the requests, and whether the weights may have changed. A user can also name
the tier in vLLM's setting `secondary_tiers`, without the connector. Then the setting
`hotkv.weights_identity` must stand for the model and all settings that decide KV bytes, and the
tier can't distinguish requests with LoRA adapters from others.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import (
    JobResult,
    ParentManager,
    SecondaryTierManager,
    TransferJob,
)

from hotkv_client.session import Session
from hotkv_client.types import BlockRun, GroupHashes, Role, SessionConfig, StoreOptions
from hotkv_proto import native
from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_proto.keys import KeySpace
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_proto.reports import Miss
from hotkv_vllm import link, versions
from hotkv_vllm.callbacks import CallbackEdge, callback, nothing
from hotkv_vllm.compat import checks, steps
from hotkv_vllm.compat.primary_rows import PrimaryRows
from hotkv_vllm.config import SPARSE, TRACING, ConfigError, ConnectorConfig
from hotkv_vllm.counter_help import COUNTERS
from hotkv_vllm.hints.hint_reader import HintReader
from hotkv_vllm.link import logger
from hotkv_vllm.offloading.key_space import stated_key_space
from hotkv_vllm.offloading.promotions import PromotionRoom, Promotions
from hotkv_vllm.offloading.region import NoRegion, PrimaryRegion, region_of
from hotkv_vllm.offloading.transfers import EndedJob, GroupRows, TierTransfers
from hotkv_vllm.stats import CallbackClock, HotKVStats

CLIENT_NAME = "hotkv-offloading"
BY_CONNECTOR = "opened_by_connector"
"""Name of a setting that `HotKVOffloadingConnector` adds to the tier's settings. It tells the tier
not to open a session by itself, because the connector does that (`HotKVTier.open`)."""
HANDLE = "primary"
CALLBACK_ERRORS = "vllm:hotkv_offloading_callback_errors"
"""Name of the metric that counts exceptions in hotkv's callbacks (methods that vLLM calls). It
differs from the metric of `HotKVConnector`, because both connectors may be in one MultiConnector,
and vLLM registers a name only once."""
PROBE_AGAIN_S = 0.25
"""Time after which the server's table of ready blocks is read again for a request's chunks,
seconds. The result may be outdated without harm: a load copies only chunks that its lease has
pinned."""
ROOM_PATIENCE_S = 2.0
"""Longest time that a request waits for rows of the primary tier (vLLM's CPU memory), seconds. It
waits while promotions (copies from the server into rows) of other requests use too many rows."""
HELD_STEPS = 3
"""Number of steps after a reset in which no promotion (copy from the server into rows of vLLM's CPU
memory) begins. In these steps the workers may still copy into rows that the reset has freed. vLLM
0.33 delays promotions for the same reason."""
OWED_S = 600.0
"""Time after a failed store in which vLLM is asked to offer all chunks of each new request to the
tiers again (so that they store them), seconds. Normally vLLM offers a chunk (unit of blocks) to its
tiers only once, so the server would never get the chunks that were computed while it was away."""


@dataclass(slots=True)
class RequestInTier:
    """The tier's record of one request of vLLM, from the request's arrival to its end.

    A *chunk* is one or several blocks that vLLM offloads as one unit; `OffloadKey` is its key. A
    *probe* reads the server's table of ready blocks in shared memory. A *lookup* is a call to the
    server, which also finds chunks in tiers below host memory. A *promotion* copies chunks from the
    server into vLLM's primary tier (the CPU memory of its offloading).

    promotions: counts and limits the request's promotions.
    request: vLLM's `Request`; None if the connector has not passed it to the tier.
    is_excluded: True if the request must not use hotkv, because its hashes do not cover everything
        that decides its KV.
    retention: how the server should retain the request's blocks, according to its hints.
    ready: by chunk, True if the server has it; set by the last probe and by lookups after it.
    probed_s: time of the last probe (`time.monotonic`).
    probed_wave: number of promotions that vLLM had submitted for the request by the last probe.
        With more promotions, the chunks are probed again.
    probed_step: number of the engine step of the last probe.
    answer: future of the lookup of all chunks of the request; None if no lookup was sent.
    asked_keys: by group, the chunks in this lookup; empty once its answer was processed.
    answer_until_s: time until which the request waits for this answer; 0 if it does not wait. It
        waits only for the answer to its first lookup.
    waited_step: the last engine step in which vLLM was answered "ask again" because it was not yet
        known whether the server had a chunk of the request.
    room_until_s: time until which the request waits for free rows of the primary tier; 0 before it
        has to wait.
    miss: reason of the last miss that vLLM was answered; NOT_ASKED before the first.
    """

    promotions: Promotions = field(default_factory=Promotions)
    request: Any = None
    is_excluded: bool = False
    retention: Retention = NO_RETENTION
    ready: dict[OffloadKey, bool] = field(default_factory=dict)
    probed_s: float = -math.inf
    probed_wave: int = -1
    probed_step: int = -1
    answer: "Future[Any] | None" = None
    asked_keys: list[list[OffloadKey]] = field(default_factory=list)
    answer_until_s: float = 0.0
    waited_step: int = -1
    room_until_s: float = 0.0
    miss: Miss = Miss.NOT_ASKED


class HotKVTier(SecondaryTierManager):
    """Implements the tier interface that vLLM's `TieringOffloadingManager` calls. vLLM calls the
    constructor, which raises ConfigError if a setting is wrong, or can't be used with vLLM's
    offloading.

    settings: hotkv's settings (`config.ConnectorConfig`).
    row_bytes: bytes of a row of the primary tier (vLLM's CPU memory; a row holds one chunk).
    may_load: True if the engine's role allows loads.
    may_store: True if the engine's role allows stores.
    may_repeat: True if the tier may repeat stores that have failed: for OWED_S seconds after a
        failed store, it asks vLLM to offer all chunks of each new request to the tier again. A
        reset that has left blocks on the device sets this to False, because these blocks must not
        be stored. The next reset that leaves no blocks on the device sets it to True.
    model_names: names by which requests address the model.
    is_held: True while the tier must neither look up nor store chunks, for example during a reset
        of the caches. The connector sets it.
    makes_wait: a function that returns True while vLLM must be answered "ask again" to every
        lookup, because the ranks are about to report whether their weights have changed.
    """

    medium = Medium.CPU

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.config = offloading_spec.config
        self.settings = settings_of(settings)
        self.row_bytes = self.block_size_bytes
        self.stats = HotKVStats()
        self.edge = CallbackEdge(CallbackClock("tier", str(self.config.engine_id)), self.stats.add)
        self.may_load = self.may_store = self.may_repeat = True
        self.model_names: tuple[str, ...] = (str(self.config.model.name),)
        self.is_held = False
        self.makes_wait: Callable[[], bool] = lambda: False
        self._view = primary_kv_view
        self._room = PromotionRoom(len(primary_kv_view))
        self._rows = PrimaryRows()
        self._group_of = {group.group_id: i for i, group in enumerate(self.config.groups)}
        self._chunk_tokens = [
            group.tokens_per_block * self.config.cache.blocks_per_chunk
            for group in self.config.groups
        ]
        self._hints = HintReader(self.stats)
        self._told: dict[str, RequestInTier] = {}
        self._region: PrimaryRegion | None = None
        self._session: Session | None = None
        self._transfers: TierTransfers | None = None
        self._said_on = False
        self._left: list[EndedJob] = []
        self._step = 0
        self._held_until_step = 0
        self._owed_until_s = 0.0
        if not settings.get(BY_CONNECTOR):
            self._open_stated()

    def __repr__(self) -> str:
        return f"HotKVTier({self._session}, {self._transfers}, {self._room})"

    # ---------------------------------------------------------------------------------- the session

    @property
    def session(self) -> Session | None:
        """Returns the session with the server; None while hotkv is off."""
        return self._session

    @property
    def transfers(self) -> TierTransfers | None:
        """Returns the object that executes loads and stores; None while hotkv is off."""
        return self._transfers

    def _open_stated(self) -> None:
        """Opens the session of a tier that a user has named in vLLM's setting `secondary_tiers`,
        without `HotKVOffloadingConnector`."""
        why = versions.why_off(versions.OFFLOADING, self.settings.allow_untested_vllm)
        if not why and not self.settings.weights_identity:
            why = (
                "a tier in secondary_tiers does not see the model, so it needs "
                "hotkv.weights_identity, a name that stands for the weights and all settings that "
                "decide KV; or use kv_connector HotKVOffloadingConnector, which needs none"
            )
        if why:
            logger.warning("hotkv is off: %s; vLLM's offloading runs without it", why)
            return
        space = stated_key_space(self.config, self.row_bytes, self.settings)
        try:
            self.open(space, self.settings.startup_wait_s, link.OPENING_S)
        except (OSError, RuntimeError) as error:
            logger.warning("hotkv is off: %s; vLLM's offloading runs without it", error)

    def open(self, space: KeySpace, wait_s: float, opening_s: float = 0.0) -> Session | None:
        """Opens a session with the server for a key space, and waits for the server
        (`link.await_server`). Closes the present session; no load or store may be in progress.
        Returns None if hotkv is off; the log says why. Raises OSError or RuntimeError, and keeps
        the present session, if the operating system refuses a thread or a file.

        wait_s: how long to wait for a server to answer; 0: do not wait.
        opening_s: how much longer to wait if a server has answered but has not opened the session
            yet.
        """
        try:
            if not self.settings.target.startswith("unix:"):
                raise NoRegion("hotkv.target must be a unix: socket, which passes descriptors")
            self._region = self._region or region_of(self._view)
        except (NoRegion, OSError) as error:
            logger.warning("hotkv is off: %s; vLLM's offloading runs without it", error)
            return None
        native.load("hotkv_proto.table_reading")
        region = self._region
        handle = MemoryHandle(HANDLE, region.num_bytes, region.offset)
        rows = tuple(
            PageTensor(group, HANDLE, 0, self.row_bytes, self.row_bytes, 0)
            for group in range(len(space.groups))
        )
        state_log = link.StateLog("offloading", self.settings.target, logging.INFO)
        session = link.open_session(
            SessionConfig(
                target=self.settings.target,
                engine_id=str(self.config.engine_id),
                role=Role.WORKER,
                key_space=space,
                client_name=CLIENT_NAME,
                engine_name=checks.engine_name(str(self.config.engine_id)),
                model_names=self.model_names,
                use_table=self.settings.use_table,
                credentials=self.settings.credentials,
                on_state=state_log,
            ),
            Layout(0, region.num_rows, (handle,), rows, "rows"),
            {HANDLE: region.fd},
        )
        self._leave()
        self._session, self._transfers = session, TierTransfers(session, self.settings, self._rows)
        if link.await_server(session, wait_s, opening_s):
            # Reads the server's block table once, so that Linux maps its memory now, and the first
            # request need not wait for that.
            for group in range(len(space.groups)):
                session.probe(group, [bytes(space.hash_bytes)])
        else:
            state_log.waited(wait_s)
        self._said_on = False
        self._say_on()
        logger.info(
            "hotkv: key space %s, %d rows of %d bytes",
            space.fingerprint.hex()[:12],
            region.num_rows,
            region.row_bytes,
        )
        return session

    def _say_on(self) -> None:
        """Logs that hotkv is on, once for each session, when the session is connected."""
        if not self._said_on and self._session is not None and self._session.connected:
            self._said_on = True
            link.say_on(self._session, self.settings.target)

    def _leave(self) -> None:
        """Closes the session in another thread. All jobs (loads and stores) of the session must
        have ended before."""
        session, self._session = self._session, None
        transfers, self._transfers = self._transfers, None
        if transfers is not None:
            self._left += transfers.take_ended()
        if session is not None:
            link.close_aside(session)

    @property
    def is_usable(self) -> bool:
        """Returns True if the tier may look up and store chunks (units of blocks) now."""
        return (
            self._session is not None
            and self._session.connected
            and self._transfers is not None
            and not self._transfers.is_hung
            and not self._transfers.is_held
            and not self.is_held
        )

    # ---------------------------------------------------------------------- what a connector says

    def tell(self, request: Any, retention: Retention, *, is_excluded: bool) -> None:
        """Passes a new request (vLLM's `Request`) to the tier. Must be called before vLLM calls
        `on_new_request` for it.

        is_excluded: True if the request must not use hotkv, because its hashes do not cover
            everything that decides its KV.
        """
        self._told[request.request_id] = RequestInTier(
            request=request, retention=retention, is_excluded=is_excluded
        )

    def exclude(self, request_ids: Iterable[str]) -> None:
        """Excludes requests from hotkv: from then on the tier neither looks up nor stores their
        blocks."""
        for request_id in request_ids:
            if request_id in self._told:
                self._told[request_id].is_excluded = True

    @property
    def has_offers(self) -> bool:
        """Returns True if vLLM was answered "hit" to a lookup in this step, so that vLLM is about
        to promote chunks (copy them from the server into its CPU memory)."""
        return self._room.has_offers

    def miss_of(self, request_id: str) -> Miss:
        """Returns the reason of the request's last miss; NOT_ASKED if it had none."""
        known = self._told.get(request_id)
        return Miss.NOT_ASKED if known is None else known.miss

    def first_loaded(self, request_id: str, groups: Collection[int]) -> int | None:
        """Returns where the part of the prompt begins that was loaded from the server: the
        beginning of the first chunk (unit of blocks) that was loaded for the request, in tokens.
        Returns None if no chunk was loaded.

        groups: hotkv's indices of the KV cache groups; chunks of other groups are ignored.
        """
        known = self._told.get(request_id)
        promotions = Promotions() if known is None else known.promotions
        starts = [
            end - self._chunk_tokens[group]
            for key, end in promotions.promoted.items()
            if key not in promotions.failed
            and (group := self._group_of[get_offload_group_idx(key)]) in groups
        ]
        return min(starts, default=None)

    # -------------------------------------------------------------------------------------- lookups

    @callback(lambda *_: RequestOffloadingContext(), of="tier")
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        known = self._told.get(req_context.req_id)
        if known is None:
            now_s = time.monotonic()
            retention = self._hints.read(req_context.kv_transfer_params, now_s)
            known = self._told[req_context.req_id] = RequestInTier(retention=retention)
        is_owed = self.may_repeat and time.monotonic() < self._owed_until_s
        if is_owed and self.may_store and not known.is_excluded:
            return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext()

    @callback(lambda *_: LookupResult.MISS, of="tier")
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        known = self._told.get(req_context.req_id)
        if known is None or known.is_excluded or not self.may_load:
            return _missed(known, Miss.NOT_ASKED)
        if self.makes_wait():
            return LookupResult.RETRY
        if not self.is_usable or self._step < self._held_until_step:
            return _missed(known, Miss.NO_SERVER)
        end_tokens = req_context.get_offload_key_position(key) or 0
        if not known.promotions.may_promote(key, end_tokens):
            is_failed = key in known.promotions.failed
            return _missed(known, Miss.REFUSED if is_failed else Miss.NOT_ASKED)
        is_ready = self._is_ready(key, req_context, known)
        if is_ready is None:
            return LookupResult.RETRY
        if not is_ready:
            return LookupResult.MISS
        if not self._room.offer(req_context.req_id):
            return self._without_room(known)
        return LookupResult.HIT

    def _is_ready(
        self, key: OffloadKey, req_context: ReqContext, known: RequestInTier
    ) -> bool | None:
        """Returns True if the server has the chunk (unit of blocks) with this key, and False if
        not. Both may be outdated. Returns None while the server's answer to a lookup is awaited.
        vLLM asks for one chunk at a time; this method looks up all chunks of the request at the
        first question, because single lookups would take ten times as long."""
        assert self._session is not None
        now_s, wave = time.monotonic(), known.promotions.waves
        is_old = known.probed_wave != wave or now_s > known.probed_s + PROBE_AGAIN_S
        if key not in known.ready:
            if known.probed_step == self._step:
                return self._is_late_ready(self._session, key, known)
            known.answer, known.asked_keys, is_old = None, [], True
        if is_old and not known.asked_keys:
            known.probed_s, known.probed_wave, known.probed_step = now_s, wave, self._step
            self._probe(self._session, key, req_context, known)
        if self._waits_for_answer(known, now_s):
            return None
        return known.ready[key] or self._is_answered(key, known)

    def _is_late_ready(
        self, session: Session, key: OffloadKey, known: RequestInTier
    ) -> bool | None:
        """Returns the same as `_is_ready`, for a chunk that vLLM adds to the request's chunks after
        they were all looked up in this step. With vLLM's setting `prefix_match_unit` there are many
        such late chunks, because a hit may end at many places within a block.

        Reads the server's table of ready blocks for this chunk only. If that does not decide (the
        table lacks the chunk, but the server has tiers below host memory; or there is no table),
        returns None, so that vLLM asks again in a later step. That step looks up all late chunks at
        once. The request's other late chunks in this step then get None too."""
        group = self._group_of[get_offload_group_idx(key)]
        waits = known.waited_step == self._step
        mask = None if waits else session.probe(group, [get_offload_block_hash(key)])
        if mask is None or (session.has_tiers and not mask[0]):
            known.waited_step = self._step
            return None
        known.ready[key], known.miss = bool(mask[0]), Miss.ABSENT
        return known.ready[key]

    def _waits_for_answer(self, known: RequestInTier, now_s: float) -> bool:
        """Returns True if the request waits for the server's answer to its lookup.

        vLLM asks for the request's chunks one after the other. If the request waits at one of these
        questions, it also waits at the others of the same step, even if the server's answer arrives
        meanwhile. Otherwise the request's first promotion (copy from the server into vLLM's CPU
        memory) might lack the chunks of the earlier questions. And later promotions may reach no
        further in the prompt than the first (`Promotions`)."""
        answer = known.answer
        if answer is not None and not answer.done():
            if now_s <= known.answer_until_s:
                known.waited_step = self._step
            elif known.answer_until_s and self._transfers is not None:
                # Until the answer, lookups miss at once.
                self._transfers.hangs_until(answer)
        return known.waited_step == self._step

    def _probe(
        self, session: Session, key: OffloadKey, req_context: ReqContext, known: RequestInTier
    ) -> None:
        """Finds out which chunks (units of blocks) the server has, and records them in
        `known.ready`: for `key` and for all chunks of the request that may be promoted (copied from
        the server into vLLM's primary tier).

        Reads the server's table of ready blocks, if there is one. Also sends the server a lookup
        call for these chunks, without waiting for the answer, in two cases:
        - There is no block table.
        - The block table lacks some of the chunks, the server has tiers below host memory, and the
          request has no promotion yet.

        The request waits only for the answer to its first lookup call. Later calls of this method
        send another one only if there is no block table and the request has no promotion yet.

        After a lookup call, a chunk that was found stays in `known.ready` even if the block table
        lacks it: it may be in a tier below host memory, which the table does not show.
        """
        ends = _ends_of(req_context)
        keys = [one for one, end in ends.items() if known.promotions.may_promote(one, end)]
        by_group = self._by_group(keys if key in ends else [*keys, key])
        answered = () if known.answer is None else [one for one in known.ready if known.ready[one]]
        known.ready = {}
        has_table = True
        for group, own in by_group.items():
            mask = session.probe(group, [get_offload_block_hash(one) for one in own])
            has_table &= mask is not None
            found = [False] * len(own) if mask is None else mask.tolist()
            known.ready.update(zip(own, found, strict=True))
        known.ready.update(dict.fromkeys(answered, True))
        if known.answer is not None and (has_table or known.promotions.waves):
            return
        may_be_lower = session.has_tiers and not all(known.ready.values())
        if has_table and (not may_be_lower or known.promotions.waves):
            return
        known.asked_keys = list(by_group.values())
        wait_until_s = time.monotonic() + self.settings.lookup_timeout_s
        known.answer_until_s = wait_until_s if known.answer is None else 0.0
        known.answer = session.lookup(self._named(by_group))

    def _is_answered(self, key: OffloadKey, known: RequestInTier) -> bool:
        """Returns True if the server has the chunk (unit of blocks), according to its answer to the
        request's lookup call. Returns False if the answer is late or an error, or if no call was
        sent."""
        known.miss = Miss.ABSENT
        answer = known.answer
        if answer is None:
            return False
        if not answer.done():
            known.miss = Miss.LATE if known.answer_until_s else Miss.ABSENT
            return False
        if answer.exception() is not None:
            known.miss = Miss.REFUSED
        elif known.asked_keys:
            for keys, mask in zip(known.asked_keys, answer.result(), strict=True):
                found = [one for one, is_there in zip(keys, mask, strict=True) if is_there]
                known.ready.update(dict.fromkeys(found, True))
        known.asked_keys = []
        return known.ready[key]

    def _without_room(self, known: RequestInTier) -> LookupResult:
        """Returns what vLLM is answered for a chunk (unit of blocks) that the server has but that
        can't be promoted (copied from the server into vLLM's CPU memory) now, because promotions
        already use all rows there that they may use. A request without any promotion waits for up
        to ROOM_PATIENCE_S: the answer is "ask again", because vLLM would not ask again after a
        miss. In all other cases the answer is a miss."""
        now_s = time.monotonic()
        known.room_until_s = known.room_until_s or now_s + ROOM_PATIENCE_S
        if now_s < known.room_until_s and not known.promotions.waves:
            return LookupResult.RETRY
        return _missed(known, Miss.NOT_ASKED)

    # ----------------------------------------------------------------------------------------- jobs

    @callback(lambda self, job_metadata: self._end_unbegun(job_metadata), of="tier")
    def submit_load(self, job_metadata: TransferJob) -> None:
        job, context = job_metadata, job_metadata.req_context
        known = self._told.get(context.req_id)
        self._room.begin(context.req_id, len(job.keys))
        ends = {key: context.get_offload_key_position(key) or 0 for key in job.keys}
        if known is not None:
            known.promotions.submitted(ends)
        if known is None or not self.is_usable or self._transfers is None:
            self._end_unbegun(job)
            return
        rows = dict(zip(job.keys, job.chunk_ids.tolist(), strict=True))
        groups = [
            GroupRows(
                group,
                keys,
                [get_offload_block_hash(key) for key in keys],
                np.array([rows[key] for key in keys], np.int32),
            )
            for group, keys in self._by_group(rows).items()
        ]
        self._transfers.load(job, groups)

    @callback(lambda self, job_metadata: self._end_unbegun(job_metadata), of="tier")
    def submit_store(self, job_metadata: TransferJob) -> None:
        job, context = job_metadata, job_metadata.req_context
        known = self._told.get(context.req_id)
        if known is None or known.is_excluded or not self.may_store:
            self._end_unbegun(job, is_complete=True)
            return
        if not self.is_usable or self._session is None or self._transfers is None:
            self._end_unbegun(job)
            return
        rows = dict(zip(job.keys, job.chunk_ids.tolist(), strict=True))
        runs = self._runs(self._session, rows, context, known)
        if runs:
            self._transfers.store(job, runs, StoreOptions(retention=known.retention))
        else:
            self._end_unbegun(job, is_complete=True)

    def _end_unbegun(self, job: TransferJob, is_complete: bool = False) -> None:
        self._left.append(EndedJob(job, (), is_complete))

    def _runs(
        self,
        session: Session,
        rows: Mapping[OffloadKey, int],
        context: ReqContext,
        known: RequestInTier,
    ) -> list[BlockRun]:
        """Returns the chunks (units of blocks) to store: those of `rows` that the server's table of
        ready blocks lacks (all, if there is no table), as runs of consecutive chunks.

        rows: by key, the chunk's row in vLLM's CPU memory. vLLM passes the keys in any order; this
            method orders them by their positions in the prompt.
        """
        ends = _ends_of(context)
        at = {(get_offload_group_idx(key), end): key for key, end in ends.items()}
        runs: list[BlockRun] = []
        for group, keys in self._by_group(sorted(rows, key=lambda key: ends.get(key, 0))).items():
            mask = session.probe(group, [get_offload_block_hash(key) for key in keys])
            if mask is not None:
                keys = [key for key, is_there in zip(keys, mask, strict=True) if not is_there]
            size = self._chunk_tokens[group]
            chain: list[OffloadKey] = []
            for number, key in enumerate(keys):
                chain.append(key)
                following = keys[number + 1] if number + 1 < len(keys) else None
                if following is not None and ends.get(following, 0) == ends.get(key, 0) + size:
                    continue
                runs.append(self._run(session, group, chain, rows, ends, at, known))
                chain = []
        return runs

    def _run(
        self,
        session: Session,
        group: int,
        chain: list[OffloadKey],
        rows: Mapping[OffloadKey, int],
        ends: Mapping[OffloadKey, int],
        at: Mapping[tuple[int, int], OffloadKey],
        known: RequestInTier,
    ) -> BlockRun:
        """Returns the argument of a store call for consecutive chunks (units of blocks) of one KV
        cache group.

        group: hotkv's index of the group.
        chain: the keys of the chunks, in the order of the prompt.
        rows: by key, the chunk's row in vLLM's CPU memory.
        ends: by key, the end of the chunk in the prompt, in tokens.
        at: the inverse of `ends` for all chunks of the request: by vLLM's number of the group and
            the end of the chunk, its key. Used to find the chunk before the first of `chain`.
        """
        size = self._chunk_tokens[group]
        start_tokens = max(0, ends.get(chain[0], 0) - size)
        parent = at.get((get_offload_group_idx(chain[0]), start_tokens))
        first = start_tokens // size
        run = BlockRun(
            group,
            [get_offload_block_hash(key) for key in chain],
            np.array([rows[key] for key in chain], np.int32),
            get_offload_block_hash(parent) if parent is not None else b"",
            first,
        )
        # If the first chunk does not begin at a multiple of the chunk size (which can happen with
        # recurrent states), the chunks are stored without token ids.
        if not session.wants_token_ids or known.request is None or start_tokens % size:
            return run
        stop = first + len(chain)
        return replace(
            run,
            token_ids=known.request.all_token_ids[first * size : stop * size],
            extra_keys=steps.event_extra_keys(known.request, range(first, stop), size),
        )

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Returns the results of the jobs (loads and stores) that have ended since the last
        call."""
        self._collect_rows()
        ended, self._left = self._left, []
        if self._transfers is not None:
            ended += self._transfers.take_ended()
        for one in ended:
            self._note_end(one)
        return [self._result(one) for one in ended]

    @callback(nothing, of="tier", is_part=True)
    def _collect_rows(self) -> None:
        self._rows.collect()

    @callback(nothing, of="tier", is_part=True)
    def _note_end(self, one: EndedJob) -> None:
        request_id = one.job.req_context.req_id
        if one.job.is_promotion:
            self._room.end(request_id, len(one.job.keys))
            if known := self._told.get(request_id):
                known.promotions.ended(one.job.keys, one.loaded)
        elif not one.is_complete:
            self._owed_until_s = time.monotonic() + OWED_S

    def _result(self, one: EndedJob) -> JobResult:
        is_load = one.job.is_promotion
        num_moved = len(one.loaded) if is_load else len(one.job.keys) * one.is_complete
        return JobResult(
            one.job.job_id,
            one.is_complete,
            one.loaded,
            time.monotonic() - one.job.submit_time,
            num_moved * self.row_bytes,
        )

    def drain_jobs(self) -> None:
        """Ends all loads and stores (`TierTransfers.drain`). Also prevents promotions in the next
        HELD_STEPS steps, because the workers may still copy into rows that are now freed. vLLM
        calls this method in a reset of its caches."""
        self._held_until_step = self._step + HELD_STEPS
        if self._transfers is not None:
            self._transfers.drain()

    # ----------------------------------------------------------------------------- steps and ends

    @callback(nothing, of="tier")
    def serve_external_requests(self, parent: ParentManager) -> None:
        """Binds `PrimaryRows`: vLLM gives a tier its manager nowhere else."""
        if not self._rows.is_bound:
            self._rows.bind(parent)

    @callback(nothing, of="tier")
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._step += 1
        self._say_on()
        self._room.end_step()

    @callback(nothing, of="tier")
    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forgets a request that has ended, and reports to the server which chunks the request has
        used without loading them from the server, because it hit them on the device or in vLLM's
        CPU memory. Without this report the server would think that nobody uses these chunks, and
        evict them too early. Reports nothing if `HotKVOffloadingConnector` reports the request."""
        known = self._told.pop(req_context.req_id, None)
        if known is None or known.is_excluded or known.request is not None:
            # If `HotKVOffloadingConnector` has passed the request to the tier (`tell`), it reports
            # the request itself.
            return
        if self._session is None or not self._session.connected:
            return
        used = [key for key in _ends_of(req_context) if key not in known.promotions.promoted]
        if used:
            self._session.report_use(self._named(self._by_group(used)))

    @callback(nothing, of="tier")
    def shutdown(self) -> None:
        """Closes the session and the file of the primary tier (vLLM's CPU memory). The server ends
        the session's transfers."""
        session, self._session, self._transfers = self._session, None, None
        try:
            if session is not None:
                session.close()
        finally:
            region, self._region = self._region, None
            if region is not None:
                region.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: Any) -> dict[str, Any]:
        """Returns the definition of the counter that `get_stats` counts."""
        return {CALLBACK_ERRORS: OffloadingCounterMetadata(COUNTERS["callback_errors"])}

    @callback(nothing, of="tier")
    def get_stats(self) -> OffloadingConnectorStats | None:
        """Returns how many exceptions in hotkv's callbacks (methods that vLLM calls) were counted
        since the last call; None if there were none."""
        count = self.stats.data.pop("callback_errors", 0)
        if not count:
            return None
        stats = OffloadingConnectorStats()
        stats.increase_counter(CALLBACK_ERRORS, count)
        return stats

    # ---------------------------------------------------------------------------------------- names

    def _by_group(self, keys: Iterable[OffloadKey]) -> dict[int, list[OffloadKey]]:
        """Returns the keys of chunks by hotkv's index of their KV cache group, each list in the
        order of `keys`."""
        found: dict[int, list[OffloadKey]] = {}
        for key in keys:
            found.setdefault(self._group_of[get_offload_group_idx(key)], []).append(key)
        return found

    def _named(self, by_group: Mapping[int, Collection[OffloadKey]]) -> list[GroupHashes]:
        return [
            GroupHashes(group, [get_offload_block_hash(key) for key in keys])
            for group, keys in by_group.items()
        ]


def settings_of(extra: Mapping[str, Any]) -> ConnectorConfig:
    """Returns the settings `hotkv.…` in `extra` (`kv_connector_extra_config`). Raises ConfigError
    for a setting that is wrong, or that can't be used with vLLM's offloading."""
    config = ConnectorConfig.from_extra_config(extra)
    if config.sparse is not None:
        raise ConfigError(
            f"{SPARSE}: vLLM's offloading keeps whole contexts on the device; sparse decode and "
            "residency need kv_connector HotKVConnector"
        )
    if config.tracing:
        raise ConfigError(
            f"{TRACING} = {config.tracing!r}: vLLM's offloading makes no spans of requests; leave "
            "it out, or use kv_connector HotKVConnector"
        )
    return config


def _missed(known: RequestInTier | None, why: Miss) -> LookupResult:
    if known is not None:
        known.miss = why
    return LookupResult.MISS


def _ends_of(req_context: ReqContext) -> Mapping[OffloadKey, int]:
    """Returns, by key, the end of each of the request's chunks in its prompt, in tokens."""
    return req_context._offload_key_positions

"""A secondary tier of vLLM's KV offloading that keeps its chunks in hotkv-server.

It runs in the scheduler's process, in one thread of vLLM. Only `drain_jobs`, `shutdown` and `open`
block.

- Without a server, while the weights may have changed and during a reset, nothing is stored, and a
  lookup misses or, for a bounded time, asks again.
- Every job is reported as ended exactly once, in bounded time. vLLM reuses no row that the server
  may still access (`PrimaryRows`).
- No exception of hotkv reaches vLLM: it is logged once, and vLLM gets a safe answer.

`HotKVOffloadingConnector` creates the tier and tells it what vLLM does not tell tiers. A user
can also name it in vLLM's `secondary_tiers`, without the connector: `hotkv.weights_identity`
must then stand for all that decides KV bytes, and LoRA requests look like others.
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
from hotkv_vllm.companion import SETTINGS
from hotkv_vllm.compat import checks, steps
from hotkv_vllm.compat.primary_rows import PrimaryRows
from hotkv_vllm.config import PREFIX, TRACING, ConfigError, ConnectorConfig
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
"""Setting by which `HotKVOffloadingConnector` opens the tier's session itself."""
HANDLE = "primary"
CALLBACK_ERRORS = "vllm:hotkv_offloading_callback_errors"
"""Not the metric of `HotKVConnector`: both may be in one MultiConnector, and vLLM registers a
name once."""
PROBE_AGAIN_S = 0.25
"""When the block table is read again for a request's chunks. An old result is harmless: a load
copies only what its lease has pinned."""
ROOM_PATIENCE_S = 2.0
"""How long a request waits while others' promotions use too many rows."""
HELD_STEPS = 3
"""Steps after a reset without promotions: workers may still copy into freed rows. vLLM 0.33
delays promotions for the same reason."""
OWED_S = 600.0
"""How long after a failed store vLLM is asked to offer all chunks of new requests. It offers a
chunk once, so those that were computed without a server would never be stored."""


@dataclass(slots=True)
class RequestInTier:
    """A *probe* reads the block table; a *lookup* is a call, which also finds chunks in lower
    tiers.

    request: vLLM's; None if the connector has not passed it.
    is_excluded: its hashes don't cover all that decides its KV.
    ready: by chunk, from the last probe and lookups since.
    probed_wave: number of promotions at the last probe; with more, it is probed again.
    answer: of the lookup of all its chunks.
    asked_keys: by group, the chunks in it; empty once it was processed.
    answer_until_s: until when it is waited for; 0: not. Only the first lookup is.
    waited_step: the last step in which vLLM was answered "ask again".
    room_until_s: until when it waits for free rows; 0 before.
    miss: why the last miss; NOT_ASKED before the first.
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
    """What `TieringOffloadingManager` calls. The constructor raises ConfigError.

    row_bytes: of the primary tier.
    may_load, may_store: by the engine's role.
    may_repeat: for OWED_S after a failed store, vLLM is asked to offer chunks again. False from a
        reset that has left blocks on the device, which must not be stored, until one that has not.
    is_held: the connector lets the tier neither look up nor store.
    makes_wait: every lookup is answered "ask again", because the ranks are about to report their
        weights.
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
        self.edge = CallbackEdge(CallbackClock("tier"), self.stats.add)
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
        """None while hotkv is off."""
        return self._session

    @property
    def transfers(self) -> TierTransfers | None:
        return self._transfers

    def _open_stated(self) -> None:
        """For a tier named in `secondary_tiers`, without `HotKVOffloadingConnector`."""
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
        """Replaces the session, waiting as `link.await_server`; no job may be in progress. None
        if hotkv is off; the log says why. Raises OSError or RuntimeError, and keeps the session,
        if the system refuses a thread or a file."""
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
            # Takes the table's page faults before the first request.
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
        if not self._said_on and self._session is not None and self._session.connected:
            self._said_on = True
            link.say_on(self._session, self.settings.target)

    def _leave(self) -> None:
        """All jobs of the session must have ended."""
        session, self._session = self._session, None
        transfers, self._transfers = self._transfers, None
        if transfers is not None:
            self._left += transfers.take_ended()
        if session is not None:
            link.close_aside(session)

    @property
    def is_usable(self) -> bool:
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
        """Before vLLM's `on_new_request`. `is_excluded` as in `RequestInTier`."""
        self._told[request.request_id] = RequestInTier(
            request=request, retention=retention, is_excluded=is_excluded
        )

    def exclude(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_id in self._told:
                self._told[request_id].is_excluded = True

    @property
    def has_offers(self) -> bool:
        """vLLM was answered "hit" in this step, so it is about to promote."""
        return self._room.has_offers

    def miss_of(self, request_id: str) -> Miss:
        known = self._told.get(request_id)
        return Miss.NOT_ASKED if known is None else known.miss

    def first_loaded(self, request_id: str, groups: Collection[int]) -> int | None:
        """Beginning in the prompt, in tokens, of the first chunk that was loaded; None if none was.

        groups: hotkv's indices of those that count.
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
        """Whether the server has the chunk, maybe outdated; None while a lookup is awaited. vLLM
        asks for one chunk at a time; the first question looks up all of the request's, ten times
        as fast."""
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
        """`_is_ready` for a chunk that vLLM adds after the others were looked up in this step, as
        its `prefix_match_unit` does.

        If the block table does not decide, None: a later step looks up all such chunks at once,
        and those of this step get None too.
        """
        group = self._group_of[get_offload_group_idx(key)]
        waits = known.waited_step == self._step
        mask = None if waits else session.probe(group, [get_offload_block_hash(key)])
        if mask is None or (session.has_tiers and not mask[0]):
            known.waited_step = self._step
            return None
        known.ready[key], known.miss = bool(mask[0]), Miss.ABSENT
        return known.ready[key]

    def _waits_for_answer(self, known: RequestInTier, now_s: float) -> bool:
        """A request that waits at one of a step's questions waits at the others too, even if the
        answer comes: its first promotion, which limits the others, might lack the earlier
        chunks."""
        answer = known.answer
        if answer is not None and not answer.done():
            if now_s <= known.answer_until_s:
                known.waited_step = self._step
            elif known.answer_until_s and self._transfers is not None:
                self._transfers.hangs_until(answer)
        return known.waited_step == self._step

    def _probe(
        self, session: Session, key: OffloadKey, req_context: ReqContext, known: RequestInTier
    ) -> None:
        """Records in `known.ready` which chunks the server has, of `key` and all that may be
        promoted.

        Also sends a lookup, without waiting, if there is no block table, or it lacks some, lower
        tiers may have them and the request has no promotion. Only the first one's answer is
        waited for; another is sent only without a table and without a promotion. What a lookup
        found stays ready, because it may be in a lower tier, which the table does not show.
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
        """False if the answer is late, an error or never asked for."""
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
        """For a ready chunk that finds no row. A request without promotions waits
        ROOM_PATIENCE_S: after a miss, vLLM would not ask again.
        """
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
        """Those of `rows` that the block table lacks (all without a table), as runs of consecutive
        chunks.

        rows: by key, in any order.
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
        """chain: keys in the order of the prompt.
        ends: by key, the chunk's end in tokens.
        at: the inverse, by (vLLM group, end), for all chunks of the request; finds the parent.
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
        # With recurrent states the first chunk may begin between multiples of the size: no token
        # ids.
        if not session.wants_token_ids or known.request is None or start_tokens % size:
            return run
        stop = first + len(chain)
        return replace(
            run,
            token_ids=known.request.all_token_ids[first * size : stop * size],
            extra_keys=steps.event_extra_keys(known.request, range(first, stop), size),
        )

    def get_finished_jobs(self) -> Iterable[JobResult]:
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
        """In a reset of vLLM's caches."""
        self._held_until_step = self._step + HELD_STEPS
        if self._transfers is not None:
            self._transfers.drain()

    # ----------------------------------------------------------------------------- steps and ends

    @callback(nothing, of="tier")
    def serve_external_requests(self, parent: ParentManager) -> None:
        """vLLM gives a tier its manager nowhere else."""
        if not self._rows.is_bound:
            self._rows.bind(parent)

    @callback(nothing, of="tier")
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._step += 1
        self._say_on()
        self._room.end_step()

    @callback(nothing, of="tier")
    def on_request_finished(self, req_context: ReqContext) -> None:
        """Reports the chunks that the request has hit on the device or in the primary tier,
        which the server would evict as unused."""
        known = self._told.pop(req_context.req_id, None)
        if known is None or known.is_excluded or known.request is not None:
            # `HotKVOffloadingConnector` reports the requests that it has passed.
            return
        if self._session is None or not self._session.connected:
            return
        used = [key for key in _ends_of(req_context) if key not in known.promotions.promoted]
        if used:
            self._session.report_use(self._named(self._by_group(used)))

    @callback(nothing, of="tier")
    def shutdown(self) -> None:
        """The server ends the session's transfers."""
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
        return {CALLBACK_ERRORS: OffloadingCounterMetadata(COUNTERS["callback_errors"])}

    @callback(nothing, of="tier")
    def get_stats(self) -> OffloadingConnectorStats | None:
        """Since the last call; None if there were none."""
        count = self.stats.data.pop("callback_errors", 0)
        if not count:
            return None
        stats = OffloadingConnectorStats()
        stats.increase_counter(CALLBACK_ERRORS, count)
        return stats

    # ---------------------------------------------------------------------------------------- names

    def _by_group(self, keys: Iterable[OffloadKey]) -> dict[int, list[OffloadKey]]:
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
    """Raises ConfigError for a setting that is wrong, or can't be used with vLLM's offloading."""
    config = ConnectorConfig.from_extra_config(extra)
    if config.companion is not None:
        raise ConfigError(
            f"{PREFIX}{SETTINGS[0]}: vLLM's offloading keeps whole contexts on the device; this "
            "needs kv_connector HotKVConnector"
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
    """By key, the chunk's end in tokens."""
    return req_context._offload_key_positions

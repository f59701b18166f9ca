"""The scheduler side of `HotKVOffloadingConnector` (in the code also "the door"). It does what
hotkv's tier (`tier.HotKVTier`) can't do, because vLLM gives a tier too little information.

`DoorScheduler` opens the tier's session for the engine's key space, checks whether the weights have
changed, carries out resets of the caches, and reports requests to the server. A promotion is a copy
of a chunk (one or several blocks) from the server into vLLM's primary tier, the CPU memory of its
offloading.

Always true:
- The tier has a session only if every rank has sent its page format, and all ranks can use hotkv.
- From the moment the weights may have changed, the tier looks up and stores no chunk until all
  ranks have reported their weights.
- If weights were written, the tier looks up and stores no chunk until vLLM has emptied the device
  and the primary tier. Both may hold blocks of the old weights under the same keys.

Scheduler thread only. `DoorScheduler` waits for the server at the start, after a change of weights,
and in a reset. It also waits up to `IDLE_WAIT_S` in a step in which all requests of the engine wait
for their hits.
"""

import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext, make_offload_key

from hotkv_proto.blocks import NO_RETENTION
from hotkv_proto.groups import PREFIX_CLOSED
from hotkv_proto.keys import KeySpace
from hotkv_proto.reports import Miss
from hotkv_vllm.callbacks import CallbackEdge, callback, nothing
from hotkv_vllm.compat import Unsupported, checks, events, model_weights, steps
from hotkv_vllm.compat.kv_groups import (
    CacheGroup,
    doubtful_tokens,
    group_block_tokens,
    hit_block_tokens,
)
from hotkv_vllm.compat.model_weights import READ_WAIT_S, UNREAD
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.costs.prefill_speed import LEAST_STEP_TOKENS, PrefillSpeed
from hotkv_vllm.hints.hint_reader import HintReader
from hotkv_vllm.identity.exactness import EVERYTHING, Exactness
from hotkv_vllm.identity.rekeying import RECONNECT_S, Rekeying, WeightsOrder
from hotkv_vllm.link import OPENING_S, logger
from hotkv_vllm.offloading.awaited import AwaitedChunks
from hotkv_vllm.offloading.key_space import full_key_space
from hotkv_vllm.offloading.messages import DoorReport, PageFormat
from hotkv_vllm.offloading.tier import HotKVTier
from hotkv_vllm.report_ids import SeenReports
from hotkv_vllm.scheduler.events import SharedEvents
from hotkv_vllm.scheduler.load_room import LoadRoom
from hotkv_vllm.scheduler.prefill_wait import PrefillWait
from hotkv_vllm.scheduler.reports import UseReports
from hotkv_vllm.scheduler.request import Phase, RequestState, StoreState
from hotkv_vllm.scheduler.reset import CacheReset
from hotkv_vllm.scheduler.written_blocks import WrittenBlocks
from hotkv_vllm.sparse.rows import sparse_rows

IDLE_WAIT_S = 0.01
"""Longest wait for promotions (copies from the server into vLLM's CPU memory) in a step in which
the engine has nothing to compute, seconds. Without this wait vLLM would ask for the hit again every
millisecond. This would use processor time and the GIL, which the threads that execute the promotion
need, and make a hit a third slower."""


class DoorScheduler:
    """The scheduler side of the connector. It controls one `HotKVTier`. The engine runs without
    hotkv until `connect` has received the page formats of all ranks (how each packs K and V inside
    pages). The parameter `offloading` of its methods is vLLM's `OffloadingConnectorScheduler`.

    tier: hotkv's tier below vLLM's CPU tier.
    edge: measures the callbacks (methods that vLLM calls), and records their exceptions.
    wants_formats: True while page formats of ranks are missing.
    seen: the ranks' reports that were handled.
    spoilt: keys of the chunks of stores in progress whose KV is wrong; vLLM's offloading is made to
        treat these stores as failed.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        config: ConnectorConfig,
        tier: HotKVTier,
        edge: CallbackEdge,
    ) -> None:
        self.edge = edge
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._tier = tier
        self._num_ranks = vllm_config.parallel_config.world_size
        # An idle engine may wait for an answer, but not a data-parallel replica: replicas may step
        # together, so the wait would delay busy replicas.
        self._may_wait = vllm_config.parallel_config.data_parallel_size == 1
        self._counts_media = checks.counts_media(vllm_config)
        publishes_events = checks.publishes_events(vllm_config)
        self._events = SharedEvents() if publishes_events else None
        self._clears = events.DeviceClears()
        # By vLLM's number of the group: the hashes of the blocks in the server's host memory, as
        # they stand in vLLM's KV events.
        self._published: dict[int, set[Any]] = {}
        self._hints = HintReader(tier.stats)
        self._prefill = PrefillSpeed(tier.stats)
        self._space: KeySpace | None = None
        # The ranks' page formats, while the weights' files are being read; otherwise empty.
        self._unread_formats: tuple[PageFormat, ...] = ()
        self._reading = model_weights.begin_reading(vllm_config, config.weights_identity)
        # The key space, if opening its first session has failed because the operating system has
        # refused a thread or a file (each step tries again); otherwise None.
        self._agreed: KeySpace | None = None
        self._reports: UseReports | None = None
        self._reset: CacheReset | None = None
        # True if a reset of the cache was requested before the first session. The server then
        # deletes the key space's blocks (a flush) once the session is opened.
        self._owes_flush = False
        # While the server must still delete the key space's blocks (a flush): time until which vLLM
        # is made to plan steps even if the engine is idle. The ranks send their page formats (how
        # they pack KV) with steps, and these are needed to open the session.
        self._steps_until_s = 0.0
        self._states: dict[str, RequestState] = {}
        self._admitted: set[str] = set()
        self._block_tokens = group_block_tokens(vllm_config, kv_cache_config)
        self._written = WrittenBlocks(hit_block_tokens(vllm_config, kv_cache_config))
        self._room = LoadRoom(vllm_config)
        self._num_drafts = int(vllm_config.num_speculative_tokens)
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._exactness = Exactness(
            self._block_tokens,
            kv_cache_config.num_blocks,
            doubtful_tokens(vllm_config, self._block_tokens),
        )
        self._weights = Rekeying(self._num_ranks)
        self._is_clean = True
        # True if the engine's caches (on the device and in CPU memory) have no blocks. Set to True
        # at the start and by a reset that has emptied the caches. Set to False when the engine
        # computes tokens, when the last check of the weights ends, or when a callback raises. (In a
        # step, the ranks answer a check before they compute blocks.)
        self._is_empty = True
        # Id of the present check of the weights, and whether the caches were empty when it began.
        self._question = 0
        self._was_empty = True
        self._said_unclean = False
        self.wants_formats = True
        self._formats: dict[int, PageFormat] = {}
        self.seen = SeenReports()
        self.spoilt: set[Any] = set()
        tier.makes_wait = self._makes_wait
        tier.model_names = checks.model_names(vllm_config)
        transfer = vllm_config.kv_transfer_config
        tier.may_load, tier.may_store = transfer.is_kv_consumer, transfer.is_kv_producer
        self._wait = PrefillWait(self._prefill, tier.stats, decodes_only=not tier.may_store)

    def __repr__(self) -> str:
        clean = "" if self._is_clean else ", blocks of other weights"
        return f"DoorScheduler({self._tier}, {self._weights}{clean})"

    def _makes_wait(self) -> bool:
        """Returns True while lookups should wait, because the ranks are about to report whether
        their weights have changed. Returns False without a server, because lookups then miss in any
        case."""
        if self._space is None:
            return False
        # `waits` is called even without a server, because it begins a check of the weights that is
        # due.
        waits = self._weights.waits(time.monotonic())
        return waits and self._tier.session is not None and self._tier.session.connected

    # ---------------------------------------------------------------------------------------- start

    @callback(nothing, of="door")
    def connect(self, formats: Collection[PageFormat]) -> None:
        """Opens the tier's session for the engine's key space, if `formats` has the page formats of
        all ranks (how each packs K and V inside pages). Waits for the server up to
        `startup_wait_s`, and up to OPENING_S longer if the server has answered but has not opened
        the session yet. While the weights' files are being read, a later step opens it. If a rank
        can't use hotkv, or if it is not known which weights the ranks have loaded, logs why and
        leaves hotkv off."""
        if not self.wants_formats or len(formats) < self._num_ranks:
            return
        self.wants_formats = False
        self._agree(tuple(formats), READ_WAIT_S, self._config.startup_wait_s, OPENING_S)

    def _agree(
        self,
        formats: tuple[PageFormat, ...],
        read_wait_s: float,
        wait_s: float = 0.0,
        opening_s: float = 0.0,
    ) -> None:
        was_late, self._unread_formats = bool(self._unread_formats), ()
        try:
            why = next((one.why_off for one in formats if one.why_off), "")
            if why:
                raise Unsupported(why)
            identity = model_weights.read_by(self._reading, read_wait_s)
            if identity == UNREAD:
                logger.info(model_weights.SAYS_UNREAD)
                self._unread_formats = formats
                return
            space = full_key_space(
                self._vllm_config,
                self._kv_cache_config,
                self._tier.config,
                self._tier.row_bytes,
                formats,
                self._config,
                identity,
            )
            # If the session is opened late, the weights may have been written since the ranks have
            # sent their page formats.
            in_doubt = was_late or any(one.weights_in_doubt for one in formats)
            is_named = bool(self._config.weights_identity)
            # The ranks have checked before their warm-up whether the files are newer than the
            # loaded weights; the files may have been read later.
            if not (
                any(one.weights_in_doubt for one in formats) or is_named
            ) and model_weights.weights_may_be_older(self._vllm_config):
                raise Unsupported(
                    "files of the model have changed while the engine started, so it is not known "
                    "which weights it has; start it again, or set hotkv.weights_identity"
                )
        except (Unsupported, OSError, ValueError) as error:
            logger.warning("hotkv is off: %s; vLLM's offloading runs without it", error)
            return
        self._weights.begin(space.weights_identity, in_doubt)
        self._tier.is_held |= self._weights.under_way
        self._agreed = space
        self._open_agreed(wait_s, opening_s)

    def _agree_late(self) -> None:
        """Opens the session if the weights' files have been read since `connect`."""
        if self._unread_formats and self._reading.done():
            self._agree(self._unread_formats, 0.0, min(self._config.startup_wait_s, RECONNECT_S))

    def _open_agreed(self, wait_s: float, opening_s: float = 0.0) -> None:
        """Opens the first session, for the key space in `_agreed`. If the operating system refuses
        the session a thread or a file, the next step calls this method again."""
        space, self._agreed = self._agreed, None
        assert space is not None
        try:
            self._open(space, wait_s, opening_s)
        except (OSError, RuntimeError):
            self._agreed = space
            self.edge.broke("door.connect")

    def _open(self, space: KeySpace, wait_s: float, opening_s: float = 0.0) -> None:
        session = self._tier.open(space, wait_s, opening_s)
        if session is None or self._tier.transfers is None:
            return
        self._space, self._reset = space, CacheReset(session, self._tier.transfers)
        if self._owes_flush:
            self._owes_flush = False
            self._reset.hold(self._config.reset_timeout_s)
        self._reports = UseReports(
            session, space.hash_block_tokens, self._tier.stats, self._keys, self._prefill
        )

    # ------------------------------------------------------------------------------------- requests

    def _is_excluded(self, request: Any) -> bool:
        """Returns True if the request must not use hotkv, because vLLM's block hashes do not cover
        everything that decides its KV, so that two different blocks could have the same hash:
        - The hashes identify LoRA adapters by path, not by content.
        - They may identify media (images, audio) by a counter, and do not cover the weights that
          have encoded the media.
        - They may not cover the positions of prompt embeddings (`steps.covers_embeddings`)."""
        leaves_media_out = self._counts_media or self._weights.media_are_old
        return (
            request.lora_request is not None
            or bool(leaves_media_out and request.mm_features)
            or not steps.covers_embeddings(request)
        )

    def _keys(self, request: Any) -> Any:
        return () if self._is_excluded(request) else request.block_hashes

    @callback(
        lambda self, request: self._tier.tell(request, NO_RETENTION, is_excluded=True), of="door"
    )
    def arrived(self, request: Any) -> None:
        """Registers a new request and passes it to the tier."""
        self._agree_late()
        now_s = time.monotonic()
        state = RequestState(request, StoreState([], 0), arrived_s=now_s)
        state.ask(self._hints.asked(request, now_s))
        self._states[request.request_id] = state
        self._tier.tell(request, state.retention, is_excluded=self._is_excluded(request))

    @callback(lambda *_: False, of="door")
    def awaits(self, request: Any, device_hit_tokens: int, manager: Any) -> bool:
        """Returns True while the request should wait for chunks that another engine computes
        (`PrefillWait`). Meanwhile the tier must not look up the request's chunks: that could begin
        a promotion (copy into vLLM's CPU memory) of the chunks that are already stored, and later
        promotions of the request may reach no further in its prompt than the first.

        Such a request also waits while the ranks check their weights. The server is not asked
        during this check, so `PrefillWait` would end the request's wait.

        device_hit_tokens: length of the hit in vLLM's own prefix cache.
        manager: vLLM's `TieringOffloadingManager`.
        """
        state, space = self._states.get(request.request_id), self._space
        may_read = self._tier.may_load and not request.skip_reading_prefix_cache
        if state is None or space is None or not may_read or self._is_excluded(request):
            return False
        is_open = state.wait is None or not state.wait.is_over
        if is_open and self._wait.is_meant(request) and self._makes_wait():
            return True
        chunks = AwaitedChunks(self._tier, space, manager.primary_tier)
        return self._wait.goes_on(chunks, state, device_hit_tokens, time.monotonic())

    @callback(nothing, of="door")
    def comes(self, request: Any, kv_cache_manager: Any) -> None:
        """Notifies `LoadRoom` (which limits loads to the device's free blocks) that vLLM asks for
        the request's hit. Must be called each time that vLLM asks, even if hotkv loads nothing:
        another connector of a MultiConnector may load the hit. And if vLLM asks again after a
        failed load, the request no longer holds the blocks that `LoadRoom` counts for it.

        kv_cache_manager: vLLM's `KVCacheManager`; None if it is not known yet.
        """
        if kv_cache_manager is not None:
            self._room.bind(kv_cache_manager)
        self._room.comes(request)

    @callback(lambda *_: True, of="door")
    def has_room(self, request: Any) -> bool:
        """Returns True if the device has enough free blocks for a load of this request beside the
        loads of other requests (`LoadRoom`). `comes` must have been called for the request."""
        return self._room.has_room(request)

    @callback(nothing, of="door")
    def matched(self, request: Any, device_hit_tokens: int, answer: int | None) -> None:
        """Records how long the request's hit is, each time that vLLM asks for it, for the report
        about the request to the server.

        device_hit_tokens: length of the hit in vLLM's own prefix cache.
        answer: number of tokens that vLLM's offloading can load; None for "ask again".
        """
        self._written.matched(request.request_id, device_hit_tokens)
        self._exactness.matched(request.request_id, device_hit_tokens, request.resumable)
        state = self._states.get(request.request_id)
        if state is None or self._reports is None:
            return
        self._reports.matched(state, device_hit_tokens)
        may_read = not request.skip_reading_prefix_cache and self._tier.may_load
        may_read = may_read and not self._is_excluded(request)
        self._reports.answered(state, answer is None, None if may_read else Miss.NOT_ASKED)
        state.hit.miss = self._tier.miss_of(request.request_id)

    @callback(nothing, of="door")
    def allocated(self, request: Any, external_tokens: int) -> None:
        """Records that the engine has admitted a request, and reports its hit to the server. Tokens
        that were already in vLLM's primary tier (CPU memory) count as a hit in the engine's own
        cache, not in the server.

        external_tokens: number of tokens that vLLM's offloading loads.
        """
        self._admitted.add(request.request_id)
        self._exactness.loads(request.request_id, external_tokens)
        state = self._states.get(request.request_id)
        if state is not None and self._reports is not None:
            device_hit_tokens = state.use.device_hit_tokens
            loaded_tokens = self._loaded_tokens(request, device_hit_tokens, external_tokens)
            own_tokens = device_hit_tokens + external_tokens - loaded_tokens
            self._reports.matched(state, own_tokens)
            self._reports.admitted(state, loaded_tokens)
            state.hit.phase = Phase.LOADING if loaded_tokens else Phase.IDLE

    def _loaded_tokens(self, request: Any, device_hit_tokens: int, external_tokens: int) -> int:
        """Returns how many tokens of the request's hit count as loaded from the server, for the
        report: from the beginning of the first chunk (unit of blocks) that was copied from the
        server into vLLM's CPU memory to the end of the hit.

        device_hit_tokens: length of the hit in vLLM's own prefix cache.
        external_tokens: number of tokens that vLLM's offloading loads.
        """
        assert self._space is not None
        closed = [at for at, one in enumerate(self._space.groups) if one.kind in PREFIX_CLOSED]
        groups = closed or range(len(self._space.groups))
        first = self._tier.first_loaded(request.request_id, groups)
        if first is None:
            return 0
        # Without a group of full attention, the hit needs only its last chunks. If these came from
        # the server, the tokens before them count as loaded from the server too.
        begin = max(first, device_hit_tokens) if closed else device_hit_tokens
        return max(0, device_hit_tokens + external_tokens - begin)

    def _share_nothing(self, *_: Any) -> None:
        """Stops all lookups and stores of the tier until vLLM has emptied its caches. This is
        called if a callback (method that vLLM calls) raises whose task is to prevent that wrong KV
        is
        stored: from then on wrong KV might be in vLLM's caches."""
        self._tier.is_held = True
        self._is_clean = False

    @callback(_share_nothing, of="door")
    def got_blocks(self, request: Any, blocks: Any, offloading: Any) -> None:
        """Records the blocks that vLLM has allocated to a request. Also excludes the request from
        hotkv if it must not use hotkv any more (`_is_excluded`). This may change during a request:
        with streamed input, a later turn may contain the request's first image.

        offloading: vLLM's `OffloadingConnectorScheduler`.
        """
        if self._is_excluded(request):
            self._tier.exclude([request.request_id])
        steps.forget_blocks(offloading, request)
        self._written.allocated(request, blocks)
        self._room.admitted(request.request_id, blocks)

    @callback(_share_nothing, of="door")
    def tell_written(self, scheduler_output: Any, offloading: Any) -> None:
        """Informs vLLM's offloading about the step: which blocks the step writes (see
        `steps.tell_written`), which recurrent states must not be stored (`steps.withdraw_states`),
        and how many leading tokens of each request may be stored. Must be called before vLLM's
        offloading plans the stores of the step.

        A request's tokens may be stored up to its first unsafe block. A block is unsafe if its KV
        is from before a reset, or if a token in it was decoded with sparse attention (by another
        connector of a MultiConnector), so that its KV is not exact. Once there may be such inexact
        blocks in this engine, a block that another connector has loaded is unsafe too.

        scheduler_output: vLLM's `SchedulerOutput` of the step.
        """
        self._written.step(scheduler_output)
        written = self._written.of_step()
        steps.tell_written(offloading, written)
        rows = sparse_rows(self._engine_id, scheduler_output)
        self._exactness.is_watching |= rows is not None
        if self._exactness.is_watching:
            named = () if rows is None else rows.request_ids
            self._exactness.step(scheduler_output, written, named)
            for request_id in scheduler_output.num_scheduled_tokens:
                exact_tokens = self._exactness.exact_tokens(request_id)
                if exact_tokens < EVERYTHING:
                    steps.limit_stores(offloading, request_id, exact_tokens)
        groups = self._kv_cache_config.kv_cache_groups
        sizes = [group.kv_cache_spec.block_size for group in groups]
        block_state = scheduler_output.kv_connector_block_state
        steps.withdraw_states(block_state, written, sizes, self._num_drafts, offloading)
        self._written.take()

    @callback(_share_nothing, of="door")
    def load_failed(self, invalid_blocks: Collection[int], offloading: Any) -> None:
        """Handles that another connector of a MultiConnector has failed to load blocks. KV that was
        computed from these blocks is wrong, so stores of it to vLLM's primary tier (CPU memory) are
        made to fail, and it does not get to the server.

        invalid_blocks: ids of the blocks that were not loaded.
        """
        self.spoilt |= steps.give_up_stores(offloading, invalid_blocks)

    @callback(_share_nothing, of="door")
    def leave_out_holes(self, scheduler_output: Any, offloading: Any) -> None:
        """Prevents that vLLM's offloading stores chunks of several blocks wrongly: a chunk without
        one of the blocks that a hit needs, or with a block in the place of another
        (`steps.leave_out_holes`)."""
        steps.leave_out_holes(offloading, scheduler_output)

    @callback(_share_nothing, of="door")
    def planned(self, meta: Any, offloading: Any) -> None:
        """Makes stores fail whose blocks the step may overwrite before vLLM has copied them to its
        CPU memory. vLLM waits for the end of such copies when the workers' connector receives the
        step's message. With model runner V2 the step may have written blocks by then
        (`checks.writes_before_it_tells`).

        meta: the step's message of vLLM's offloading (`OffloadingConnectorMetadata`).
        """
        if meta.jobs_to_flush and checks.writes_before_it_tells(
            self._vllm_config, self._kv_cache_config
        ):
            self.spoilt |= steps.flushed_stores(offloading, meta)

    @callback(_share_nothing, of="door")
    def stop_at_computed(self, request: Any, offloading: Any) -> None:
        """Prevents vLLM's offloading from storing blocks of an ended request that the request has
        not computed, or that vLLM has freed.

        Source: vLLM 0.32 and 0.33. `_build_store_jobs` assumes that all tokens but the last of a
        finished request were computed, unless the request was aborted. With asynchronous scheduling
        a request may also end after vLLM has preempted it and freed its blocks.

        For an aborted prompt, this method also prevents stores of those chunks of sliding-window
        groups that end after the last whole chunk of the full-attention group. No hit needs these
        chunks, because every hit ends with a chunk of full attention.
        """
        steps.limit_stores(offloading, request.request_id, steps.written_tokens(request))

    @callback(nothing, of="door")
    def finished(self, request: Any) -> None:
        """Forgets a request that has finished or was aborted, and reports its end."""
        self._admitted.discard(request.request_id)
        self._written.ended(request.request_id)
        self._room.ended(request.request_id)
        self._exactness.ended(request.request_id)
        state = self._states.pop(request.request_id, None)
        if state is not None and self._reports is not None:
            self._reports.ended(state)

    # ---------------------------------------------------------------------------------------- steps

    @property
    def order(self) -> WeightsOrder | None:
        """Returns the order to check the weights that this step's message carries to the ranks.
        Returns None before the first check, or without a key space."""
        return self._weights.order() if self._space is not None else None

    def _hold(self, *_: Any, **__: Any) -> int:
        """Stops all lookups and stores of the tier until the ranks have reported their weights.
        Called if `begin_step` or `update` raises, because these two methods process the ranks'
        reports."""
        self._tier.is_held = True
        self._weights.suspect()
        # Assumes that the step computes tokens, so that the caches don't count as empty: it may
        # compute blocks before the next check of the weights begins.
        self._passed(1)
        return 0

    @callback(_hold, of="door", last=0)
    def begin_step(self, scheduler_output: Any) -> int:
        """Advances the tasks that span several steps: checks of the weights, resets of the caches,
        reports to the server. Returns an id of the step, which the ranks send back with the step's
        output, so that the scheduler can measure the speed of prefill. Returns 0 if this step is
        too small to be measured."""
        now_s, num_tokens = time.monotonic(), scheduler_output.total_num_scheduled_tokens
        self._room.has_refused = False
        if self._room.holders:
            self._room.ran(scheduler_output.num_scheduled_tokens)
        self._agree_late()
        if self._agreed is not None:
            self._open_agreed(0.0)
        if self._space is None or self._reports is None or self._reset is None:
            self._passed(num_tokens)
            return 0
        identity = self._weights.step(num_tokens > 0, now_s)
        order = self._weights.order()
        if order is not None and order.question != self._question:
            self._question, self._was_empty = order.question, self._is_empty
        transfers = self._tier.transfers
        # If the weights have changed while a reset has not yet deleted the old key space's blocks
        # in the server, the engine changes to the new key space only after that.
        is_owed = self._reset.under_way and identity != self._weights.identity
        is_idle = transfers is not None and transfers.is_idle
        if identity is not None and is_idle and not is_owed:
            self._adopt(identity)
        self._passed(num_tokens)
        self._reset.step(now_s)
        self._reports.send(now_s)
        self._tier.is_held = self._weights.under_way or not self._is_clean
        if num_tokens < LEAST_STEP_TOKENS:
            return 0
        return self._prefill.begin_step(steps.scheduled_rows(scheduler_output), now_s)

    def _passed(self, num_tokens: int) -> None:
        """Records that the step computes `num_tokens` tokens. If it computes any, the engine's
        caches no longer count as empty."""
        if num_tokens:
            self._is_empty = False
            self._weights.is_fresh = False

    @property
    def _is_idle(self) -> bool:
        """Returns True if the engine has nothing to compute, so that waiting for a promotion (copy
        from the server into vLLM's CPU memory) delays nothing else."""
        return self._may_wait and not self._admitted

    @callback(lambda *_: False, of="door")
    def promote(self, manager: Any) -> bool:
        """Makes vLLM begin at once the promotions (copies from the server into vLLM's CPU memory)
        that this step's lookups ask for. Then waits up to IDLE_WAIT_S until one of them has ended.
        Returns True if a promotion has ended: the caller should then look its request up again.
        Does nothing and returns False if the engine has something to compute.

        Without this call vLLM would begin these promotions at the end of the step, and look the
        chunks up again in the next step.

        manager: vLLM's `TieringOffloadingManager`.
        """
        transfers = self._tier.transfers
        if transfers is None or not self._is_idle or not self._tier.has_offers:
            return False
        manager.on_schedule_end(ScheduleEndContext((), ()))
        return transfers.wait_for_end(IDLE_WAIT_S)

    @callback(nothing, of="door")
    def end_step(self, meta: Any) -> None:
        """Records the step's synchronous loads as ended: vLLM 0.33 waits for such loads within the
        step, and does not report their end. Then, if the engine has nothing to compute, waits for
        the end of a promotion in progress (a copy from the server into vLLM's CPU memory), for
        IDLE_WAIT_S at most.

        meta: the step's message of vLLM's offloading (`OffloadingConnectorMetadata`).
        """
        self._loads_ended(
            job.req_id for job in meta.load_jobs.values() if getattr(job, "sync", False)
        )
        if self._tier.transfers is not None and self._is_idle:
            self._tier.transfers.wait_for_end(IDLE_WAIT_S)

    def _adopt(self, identity: str) -> None:
        """Ends a check of the weights: records the weights that all ranks have reported. If they
        differ from the present weights, opens a session for the key space of the new weights. If
        the operating system refuses the session a thread or a file, the check stays open, and the
        next step calls this method again.

        identity: identifies the reported weights by their content.
        """
        assert self._space is not None
        is_other = identity != self._weights.identity
        if (is_other or self._weights.were_written) and not self._was_empty:
            # The caches have blocks from before the check. These may be of the old weights.
            self._become_unclean()
        if is_other:
            is_connected = self._tier.session is not None and self._tier.session.connected
            wait_s = min(self._config.startup_wait_s, RECONNECT_S) if is_connected else 0.0
            try:
                self._open(replace(self._space, weights_identity=identity), wait_s)
            except (OSError, RuntimeError):
                self.edge.broke("door.begin_step")
                return
            logger.info(
                "hotkv: the engine's weights have changed; from now on it shares KV with engines "
                "that have the same (%s)",
                identity,
            )
        self._weights.adopt(identity)
        # From here on the tier may load chunks, so the caches do not count as empty any more,
        # unless another check of the weights is due.
        self._is_empty &= self._weights.under_way
        states = self._states.items()
        self._tier.exclude([name for name, state in states if self._is_excluded(state.request)])

    @callback(_hold, of="door")
    def update(self, report: DoorReport, finished_loads: Collection[str]) -> None:
        """Processes those reports of ranks that were not handled before. Must be called before
        vLLM's offloading processes the step's results, and so before it passes stored chunks to the
        tier.

        finished_loads: ids of the requests whose load has ended.
        """
        now_s = time.monotonic()
        for rank, one in report.parts:
            self._tier.stats.add("callback_errors", one.callback_errors)
            if one.format is not None:
                self._formats[rank] = one.format
        if self.wants_formats:
            self.connect(list(self._formats.values()))
        if self._space is None and self._agreed is None:
            # While the weights' files are being read, a rank repeats its notice of a write.
            return
        for rank, one in report.parts:
            if one.weights is not None:
                if not one.weights.question:
                    # A report without the id of a check (`question`) comes from a rank that has
                    # noticed a write to its weights by itself.
                    self._become_unclean()
                self._weights.reported({rank: one.weights}, now_s)
        self._tier.is_held |= self._weights.under_way
        for _, one in report.parts:
            if one.timed_step:
                self._prefill.end_step(one.timed_step, now_s)
        self._prefill.last_end_s = now_s
        self._loads_ended(finished_loads)

    def _loads_ended(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            state = self._states.get(request_id)
            # Skips loads that needed nothing from the server, and loads of another connector.
            if state is not None and state.is_loading and self._reports is not None:
                state.hit.phase = Phase.IDLE
                self._reports.load_ended(state, failed=False)

    def _become_unclean(self) -> None:
        """Records that the engine's caches (the device, and the primary tier in CPU memory) may
        have blocks of other weights. Until both are emptied, hotkv's tier must not store or look up
        chunks. Logs this once until the next reset. Does nothing if a reset has emptied both and no
        step has computed blocks since."""
        if self._is_empty and self._weights.under_way:
            return
        self._is_clean = False
        if not self._said_unclean:
            self._said_unclean = True
            logger.warning(
                "hotkv: weights were written while blocks of before are cached; this engine "
                "shares nothing until its caches are emptied (reset_prefix_cache with "
                "reset_connector)"
            )

    @callback(lambda _, theirs, *__: theirs, of="door")
    def take_events(self, theirs: list[Any], kv_cache_manager: Any, manager: Any) -> list[Any]:
        """Returns the events of vLLM's offloading (`theirs`), and the events about blocks in the
        server, which vLLM publishes as events of this engine (`SharedEvents`).

        For routers, vLLM's primary tier (its CPU memory) and the server's host memory are the same
        medium ("CPU"). If a block is removed from one of the two while the other has it, the event
        of the removal is left out; otherwise routers would forget the block.

        kv_cache_manager: vLLM's `KVCacheManager`, or None.
        manager: vLLM's `TieringOffloadingManager`.
        """
        if self._events is None:
            return theirs
        if self._clears.since_last(kv_cache_manager):
            self._events.device_was_cleared()
            self._published.clear()
        space, groups = self._space, self._tier.config.groups
        primary = manager.primary_tier
        found = self._events.take(
            self._tier.session,
            [
                CacheGroup(group.group_id, spec.kind, spec.block_tokens, spec.window_tokens)
                for group, spec in zip(groups, space.groups if space else (), strict=False)
            ],
            time.monotonic(),
            lambda group, block_hash: (
                primary.lookup(make_offload_key(block_hash, group.vllm_group), None)
                is LookupResult.HIT
            ),
        )
        events.note_host_blocks(self._published, found)
        kept = {id(event) for event in self._events.kept}
        ours = [event for event in found if id(event) not in kept]
        return [*events.without_removals(theirs, self._published), *ours]

    # ---------------------------------------------------------------------------------------- reset

    def _reset_broke(self, *_: Any, **__: Any) -> bool:
        """Stops all lookups and stores of the tier until a later reset succeeds. Called if `reset`
        raises. Returns False, so that vLLM reports that the reset has failed. Returns True if the
        engine pauses or sleeps, because with False vLLM's pause would fail."""
        self._share_nothing()
        if self._reset is not None:
            self._reset.hold()
        return checks.is_pausing()

    @callback(_reset_broke, of="door", last=False)
    def reset(self, is_device_empty: bool) -> bool:
        """Makes the server delete the blocks of this key space (a flush), unless the engine only
        pauses. Returns False if a connected server did not do so. Blocks for at most
        `reset_timeout_s`.

        Must be called after vLLM's offloading was reset: then the primary tier is empty, and no job
        (load or store of the tier) is in progress. If there is no session yet, returns True: the
        flush follows once the session is opened, before the tier looks up or stores chunks.

        is_device_empty: True if the device has no blocks from before the reset.
        """
        is_pausing = checks.is_pausing()
        self._weights.suspect(is_pausing)
        self._tier.is_held = self._space is not None
        self._is_empty = is_device_empty
        # `spoilt` has keys of stores in progress that must fail. The reset of vLLM's offloading has
        # removed all stores.
        self.spoilt.clear()
        if is_device_empty:
            self._is_clean, self._said_unclean = True, False
        # If the device is not empty, its blocks are from before the reset, and must not be stored.
        self._tier.may_repeat = is_device_empty
        if not is_device_empty:
            self._tier.exclude(self._states)
        if self._reset is None or is_pausing:
            self._owes_flush |= not is_pausing
            self._steps_until_s = time.monotonic() + self._config.reset_timeout_s
            return True
        if not is_device_empty:
            self._exactness.distrust_all()
        self._tier.stats.add("resets")
        return self._reset.begin(self._config.reset_timeout_s)

    @callback(lambda _: False, of="door")
    def wants_steps(self) -> bool:
        """Returns True if vLLM must plan steps even if the engine is idle. There are two reasons:
        - A reset is not finished (`CacheReset.wants_steps`).
        - A reset was requested before the ranks' page formats had arrived. Its flush (deleting the
          key space's blocks in the server) can only be sent after they have arrived, and they
          arrive with a step. Without such a step the flush would be sent with the engine's first
          request, and would delete blocks that other engines have stored since the reset."""
        if self._reset is not None:
            return self._reset.wants_steps()
        is_near = self.wants_formats or (bool(self._unread_formats) and self._reading.done())
        is_due = self._owes_flush and is_near
        return is_due and time.monotonic() < self._steps_until_s

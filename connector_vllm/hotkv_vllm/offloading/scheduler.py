"""The scheduler side of `HotKVOffloadingConnector`: does what `tier.HotKVTier` can't, because vLLM
tells a tier too little.

- The tier has a session only if every rank has sent its page format and can use hotkv.
- While the weights may have changed, the tier looks up and stores nothing.
- If weights were written, it waits until vLLM has emptied the device and the primary tier: both may
  hold blocks of the old weights under the same keys.

Scheduler thread only. Waits for the server at the start, after a change of weights, in a reset,
and up to IDLE_WAIT_S in a step in which all requests wait for their hits.
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
from hotkv_vllm.identity.exactness import EVERYTHING, Exactness, inexact_requests
from hotkv_vllm.identity.rekeying import RECONNECT_S, Rekeying, WeightsOrder
from hotkv_vllm.link import OPENING_S, logger
from hotkv_vllm.offloading.awaited import AwaitedChunks
from hotkv_vllm.offloading.key_space import full_key_space
from hotkv_vllm.offloading.messages import DoorReport, PageFormat
from hotkv_vllm.offloading.tier import HotKVTier
from hotkv_vllm.report_ids import SeenReports
from hotkv_vllm.scheduler.events import SharedEvents
from hotkv_vllm.scheduler.find.prefill_wait import PrefillWait
from hotkv_vllm.scheduler.load.load_room import LoadRoom
from hotkv_vllm.scheduler.reports import UseReports
from hotkv_vllm.scheduler.request import Phase, RequestState, StoreState
from hotkv_vllm.scheduler.reset import CacheReset
from hotkv_vllm.scheduler.written_blocks import WrittenBlocks

IDLE_WAIT_S = 0.01
"""How long a step with nothing to compute waits for promotions. Without it vLLM would ask every
ms, and take from the promoting threads the processor and the GIL: a hit would be a third slower."""


class DoorScheduler:
    """Controls one `HotKVTier`. The engine runs without hotkv until `connect` has all ranks' page
    formats. `offloading` is vLLM's `OffloadingConnectorScheduler`.

    spoilt: keys of chunks of stores in progress whose KV is wrong; vLLM sees these stores fail.
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
        # Data-parallel replicas may step together: the wait would delay busy ones.
        self._may_wait = vllm_config.parallel_config.data_parallel_size == 1
        self._counts_media = checks.counts_media(vllm_config)
        publishes_events = checks.publishes_events(vllm_config)
        self._events = SharedEvents() if publishes_events else None
        self._clears = events.DeviceClears()
        # By vLLM group, the hashes of blocks in the server's host memory, as in vLLM's KV
        # events.
        self._published: dict[int, set[Any]] = {}
        self._hints = HintReader(tier.stats)
        self._prefill = PrefillSpeed(tier.stats)
        self._space: KeySpace | None = None
        # Only while the weights' files are being read.
        self._unread_formats: tuple[PageFormat, ...] = ()
        self._reading = model_weights.begin_reading(vllm_config, config.weights_identity)
        # Set if the system has refused its session a thread or a file; each step tries again.
        self._agreed: KeySpace | None = None
        self._reports: UseReports | None = None
        self._reset: CacheReset | None = None
        # A reset came before the first session, so the flush follows it.
        self._owes_flush = False
        # Until when an idle engine takes steps for an owed flush: the page formats come with
        # steps.
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
        # The caches, device and primary tier, have no blocks: at the start, or since a reset.
        # Ends when the engine computes, a check of the weights ends, or a callback raises. (In a
        # step the ranks answer a check before they compute.)
        self._is_empty = True
        # The present check of the weights, and whether the caches were empty when it began.
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
        """Whether lookups wait for the ranks to report their weights; not without a server,
        where they miss."""
        if self._space is None:
            return False
        # Called even without a server, because it begins a check that is due.
        waits = self._weights.waits(time.monotonic())
        return waits and self._tier.session is not None and self._tier.session.connected

    # ---------------------------------------------------------------------------------------- start

    @callback(nothing, of="door")
    def connect(self, formats: Collection[PageFormat]) -> None:
        """Opens the tier's session if `formats` has all ranks. Waits up to `startup_wait_s` for
        a server, and OPENING_S more if it has answered. While the weights' files are read, a
        later step opens it. If a rank can't use hotkv, or which weights are loaded is unknown,
        logs why."""
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
            # The weights may have been written since the ranks sent their formats.
            in_doubt = was_late or any(one.weights_in_doubt for one in formats)
            is_named = bool(self._config.weights_identity)
            # The ranks checked before their warm-up; the files may have been read later.
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
        if self._unread_formats and self._reading.done():
            self._agree(self._unread_formats, 0.0, min(self._config.startup_wait_s, RECONNECT_S))

    def _open_agreed(self, wait_s: float, opening_s: float = 0.0) -> None:
        """If the system refuses a thread or a file, the next step tries again."""
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
        """Whether vLLM's hashes don't cover all that decides the KV: they name LoRA adapters by
        path, may number media and don't cover the weights that encoded them, and may not cover
        the positions of prompt embeddings (`steps.covers_embeddings`)."""
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
        self._agree_late()
        now_s = time.monotonic()
        state = RequestState(request, StoreState([], 0), arrived_s=now_s)
        state.ask(self._hints.asked(request, now_s))
        self._states[request.request_id] = state
        self._tier.tell(request, state.retention, is_excluded=self._is_excluded(request))

    @callback(lambda *_: False, of="door")
    def awaits(self, request: Any, device_hit_tokens: int, manager: Any) -> bool:
        """Whether the request waits for chunks that another engine computes (`PrefillWait`), or
        meanwhile for a check of the weights. It must not be looked up: a promotion of the first
        chunks would limit the later ones."""
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
        """Whenever vLLM asks, even if hotkv loads nothing: another connector may load, and after
        a failed load the request holds none of the blocks that `LoadRoom` counts."""
        if kv_cache_manager is not None:
            self._room.bind(kv_cache_manager)
        self._room.comes(request)

    @callback(lambda *_: True, of="door")
    def has_room(self, request: Any) -> bool:
        return self._room.has_room(request)

    @callback(nothing, of="door")
    def matched(self, request: Any, device_hit_tokens: int, answer: int | None) -> None:
        """answer: tokens that vLLM's offloading can load; None for "ask again"."""
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
        """Tokens that were already in the primary tier count as a hit of the engine's own cache.

        external_tokens: that vLLM's offloading loads.
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
        """Tokens that count as loaded from the server: from the first promoted chunk to the end
        of the hit."""
        assert self._space is not None
        closed = [at for at, one in enumerate(self._space.groups) if one.kind in PREFIX_CLOSED]
        groups = closed or range(len(self._space.groups))
        first = self._tier.first_loaded(request.request_id, groups)
        if first is None:
            return 0
        # Without full attention the hit needs only its last chunks: the tokens before count too.
        begin = max(first, device_hit_tokens) if closed else device_hit_tokens
        return max(0, device_hit_tokens + external_tokens - begin)

    def _share_nothing(self, *_: Any) -> None:
        """Stops the tier until the caches are emptied: they may hold wrong KV, because a
        callback raised that prevents it."""
        self._tier.is_held = True
        self._is_clean = False

    @callback(_share_nothing, of="door")
    def got_blocks(self, request: Any, blocks: Any, offloading: Any) -> None:
        """Also excludes the request if its next turn has brought its first image."""
        if self._is_excluded(request):
            self._tier.exclude([request.request_id])
        steps.forget_blocks(offloading, request)
        self._written.allocated(request, blocks)
        self._room.admitted(request.request_id, blocks)

    @callback(_share_nothing, of="door")
    def tell_written(self, scheduler_output: Any, offloading: Any) -> None:
        """Tells vLLM's offloading which blocks the step writes, which recurrent states must not be
        stored (`steps.withdraw_states`), and how many leading tokens may be. Before it plans the
        stores.

        Tokens may be stored up to the first block whose KV is from before a reset or not exact:
        computed so by another connector, or, once there are such blocks, loaded by another
        connector.
        """
        self._written.step(scheduler_output)
        written = self._written.of_step()
        steps.tell_written(offloading, written)
        inexact = inexact_requests(self._engine_id, scheduler_output)
        self._exactness.is_watching |= inexact is not None
        if self._exactness.is_watching:
            self._exactness.step(scheduler_output, written, inexact or ())
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
        """Another connector has failed to load `invalid_blocks`: KV computed from them is wrong,
        so its stores to the primary tier fail."""
        self.spoilt |= steps.give_up_stores(offloading, invalid_blocks)

    @callback(_share_nothing, of="door")
    def leave_out_holes(self, scheduler_output: Any, offloading: Any) -> None:
        steps.leave_out_holes(offloading, scheduler_output)

    @callback(_share_nothing, of="door")
    def planned(self, meta: Any, offloading: Any) -> None:
        """Fails the stores whose blocks the step may overwrite before vLLM has copied them. vLLM
        waits for such copies when the workers get the message; model runner V2 may have written
        by then: `checks.writes_before_it_tells`."""
        if meta.jobs_to_flush and checks.writes_before_it_tells(
            self._vllm_config, self._kv_cache_config
        ):
            self.spoilt |= steps.flushed_stores(offloading, meta)

    @callback(_share_nothing, of="door")
    def stop_at_computed(self, request: Any, offloading: Any) -> None:
        """Prevents stores of blocks that an ended request has not computed, or that vLLM has freed:
        vLLM 0.32 and 0.33 assume in `_build_store_jobs` that all tokens but the last were computed
        unless the request was aborted, and with asynchronous scheduling a preempted request may
        end.

        For an aborted prompt it also omits chunks of sliding windows behind the last whole chunk
        of full attention, which no hit needs.
        """
        steps.limit_stores(offloading, request.request_id, steps.written_tokens(request))

    @callback(nothing, of="door")
    def finished(self, request: Any) -> None:
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
        """None before the first check, or without a key space."""
        return self._weights.order() if self._space is not None else None

    def _hold(self, *_: Any, **__: Any) -> int:
        """Stops the tier until the ranks have reported their weights."""
        self._tier.is_held = True
        self._weights.suspect()
        # Assumes that the step computes tokens, maybe before the next check of the weights.
        self._passed(1)
        return 0

    @callback(_hold, of="door", last=0)
    def begin_step(self, scheduler_output: Any) -> int:
        """Id of the step, by which its prefill speed is measured; 0 if it is too small."""
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
        # A reset first flushes the old key space.
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
        if num_tokens:
            self._is_empty = False
            self._weights.is_fresh = False

    @property
    def _is_idle(self) -> bool:
        return self._may_wait and not self._admitted

    @callback(lambda *_: False, of="door")
    def promote(self, manager: Any) -> bool:
        """Begins this step's promotions at once, if the engine is idle, and waits up to
        IDLE_WAIT_S for one to end. True: look the request up again."""
        transfers = self._tier.transfers
        if transfers is None or not self._is_idle or not self._tier.has_offers:
            return False
        manager.on_schedule_end(ScheduleEndContext((), ()))
        return transfers.wait_for_end(IDLE_WAIT_S)

    @callback(nothing, of="door")
    def end_step(self, meta: Any) -> None:
        """Ends the step's synchronous loads, whose end vLLM 0.33 does not report. An idle engine
        then waits up to IDLE_WAIT_S for a promotion."""
        self._loads_ended(
            job.req_id for job in meta.load_jobs.values() if getattr(job, "sync", False)
        )
        if self._tier.transfers is not None and self._is_idle:
            self._tier.transfers.wait_for_end(IDLE_WAIT_S)

    def _adopt(self, identity: str) -> None:
        """Ends a check of the weights; other weights get a session of their own. If the system
        refuses a thread or a file for it, the check stays open and the next step tries again."""
        assert self._space is not None
        is_other = identity != self._weights.identity
        if (is_other or self._weights.were_written) and not self._was_empty:
            # Blocks from before the check may be of the old weights.
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
        # From here on the tier may load, so the caches do not count as empty, unless another
        # check is due.
        self._is_empty &= self._weights.under_way
        states = self._states.items()
        self._tier.exclude([name for name, state in states if self._is_excluded(state.request)])

    @callback(_hold, of="door")
    def update(self, report: DoorReport, finished_loads: Collection[str]) -> None:
        """Processes the ranks' new reports, before vLLM's offloading processes the step's results
        and passes stored chunks to the tier.

        finished_loads: request ids.
        """
        now_s = time.monotonic()
        for rank, one in report.parts:
            self._tier.stats.add("callback_errors", one.callback_errors)
            if one.format is not None:
                self._formats[rank] = one.format
        if self.wants_formats:
            self.connect(list(self._formats.values()))
        if self._space is None and self._agreed is None:
            # Meanwhile a rank repeats its notice of a write.
            return
        for rank, one in report.parts:
            if one.weights is not None:
                if not one.weights.question:
                    # The rank has noticed a write by itself.
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
            # Not loads that needed nothing from the server, or of another connector.
            if state is not None and state.is_loading and self._reports is not None:
                state.hit.phase = Phase.IDLE
                self._reports.load_ended(state, failed=False)

    def _become_unclean(self) -> None:
        """The caches may have blocks of other weights: nothing is shared until both are emptied.
        Nothing if a reset has emptied them and no step has computed since."""
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
        """vLLM's own events (`theirs`) with those of the server's blocks (`SharedEvents`).

        Routers see the primary tier and the server's host memory as one medium ("CPU"): the
        removal from one is left out while the other has the block.
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
        """Stops the tier until a later reset succeeds. False: the reset has failed. True if the
        engine pauses or sleeps, which False would make fail."""
        self._share_nothing()
        if self._reset is not None:
            self._reset.hold()
        return checks.is_pausing()

    @callback(_reset_broke, of="door", last=False)
    def reset(self, is_device_empty: bool) -> bool:
        """Flushes the key space unless the engine only pauses. False if a connected server did not.
        Blocks for at most `reset_timeout_s`.

        After the reset of vLLM's offloading: the primary tier is empty, no job is in progress. True
        without a session: the flush follows it, before the tier works.

        is_device_empty: of blocks from before the reset.
        """
        is_pausing = checks.is_pausing()
        self._weights.suspect(is_pausing)
        self._tier.is_held = self._space is not None
        self._is_empty = is_device_empty
        # The reset has removed all stores.
        self.spoilt.clear()
        if is_device_empty:
            self._is_clean, self._said_unclean = True, False
        # The device's old blocks must not be stored.
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
        """Whether an idle engine must take steps for a reset, or for page formats that a reset
        waits for: a flush with its first request would delete what other engines have stored
        since."""
        if self._reset is not None:
            return self._reset.wants_steps()
        is_near = self.wants_formats or (bool(self._unread_formats) and self._reading.done())
        is_due = self._owes_flush and is_near
        return is_due and time.monotonic() < self._steps_until_s

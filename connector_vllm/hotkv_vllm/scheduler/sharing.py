"""Decides whether this engine shares KV now, and in which key space (a model in a configuration).

Each rank sends the scheduler a handshake (`HotKVHandshake`), which contains the rank's key space,
or why the rank runs without hotkv. The scheduler and each rank then have a session (a connection to
the server for one key space).

Always true:
- `Sharing.cache` exists only while the ranks of the engine agree on a key space. The key space
  belongs to the weights that the ranks last reported.
- Hits and stores are off while a rank has no session, while the weights may have changed, or while
  a reset is under way.

Scheduler thread only. Waits for the server only at the start and after the weights have changed.

`Sharing` is the entry point. It uses the other parts of the file: `WorkerLinks` (which workers have
a session), `Joining` (delays requests if handshakes come late), `agree` (compares the ranks'
handshakes) and `Assembly` (the scheduler side's objects for one key space).
"""

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from hotkv_client.fence import Revocations
from hotkv_client.session import Session
from hotkv_client.types import LinkState, Role, SessionConfig
from hotkv_proto import native
from hotkv_proto.keys import KeySpace, Sketch
from hotkv_vllm import link
from hotkv_vllm.compat import Unsupported, checks, kv_groups, model_weights
from hotkv_vllm.compat.residency import DevicePool
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.costs.prefill_speed import PrefillSpeed
from hotkv_vllm.identity.adapters import Adapters
from hotkv_vllm.identity.exactness import Exactness
from hotkv_vllm.identity.ranks import this_host
from hotkv_vllm.identity.rekeying import RECONNECT_S, Rekeying
from hotkv_vllm.link import logger
from hotkv_vllm.metadata import STILL_CONNECTING, HotKVHandshake, StepReport
from hotkv_vllm.residency.calls import ResidencyCalls
from hotkv_vllm.residency.resident_requests import ResidentRequests
from hotkv_vllm.scheduler.groups import CachedGroups, SketchPlanner
from hotkv_vllm.scheduler.hits import HitFinder
from hotkv_vllm.scheduler.loads import FailedLoads
from hotkv_vllm.scheduler.reports import UseReports
from hotkv_vllm.scheduler.reset import CacheReset
from hotkv_vllm.scheduler.stores import StorePlanner
from hotkv_vllm.scheduler.stores_in_flight import StoreFence
from hotkv_vllm.sparse.sequences import SparseGroup, SparseSequences, StreamCount
from hotkv_vllm.stats import HotKVStats
from hotkv_vllm.tracing.request_traces import RequestTraces, open_traces

# -------------------------------------------------------------------------- sessions of the workers

NO_NEWS = (-1, 0.0)
ABSENCE_PATIENCE_S = 5.0
"""Seconds that a worker may be without a session before a warning is logged. After a restart of the
server the sessions of an engine reconnect by themselves, one after the other."""


class WorkerLinks:
    """Tracks which of the engine's workers have a session (connection to the server), from their
    reports. Scheduler thread only.

    Always true: while a worker has no session, hits and stores are off, because that worker could
    neither load nor store. A worker reports when it gets or loses its session. While a worker has
    no session, each step also asks all workers to report.

    A warning is logged if a worker still reports no session ABSENCE_PATIENCE_S after its first such
    report. Only reports during the scheduler's present connection to the server count. The warning
    is delayed for two reasons: registering a worker's memory takes seconds, and reports arrive only
    with steps, which an idle engine does not make. When the worker reports a session, another log
    line says that the warning no longer holds.

    are_complete: True if every worker has a session, according to the last reports.
    """

    def __init__(self) -> None:
        self.are_complete = True
        self._absent: dict[int, str] = {}
        # For each worker without a session: the number of the scheduler's connection during which
        # it last reported this, and the time of its first such report during that connection.
        self._news: dict[int, tuple[int, float]] = {}
        self._said: set[int] = set()

    def __repr__(self) -> str:
        return f"WorkerLinks(absent: {self._absent})"

    def will_say(self, stream: int) -> bool:
        """Returns True if a worker may soon report that it has a session: in its last report it had
        no session, and this report is older than the scheduler's present connection to the server.

        stream: number of the scheduler's present connection.
        """
        return any(self._news.get(rank, NO_NEWS)[0] != stream for rank in self._absent)

    def update(self, links: Mapping[int, str], now_s: float, stream: int) -> None:
        """Processes the workers' reports about their sessions.

        links: by rank, why the rank has no session; empty if the rank has a session.
        stream: number of the scheduler's own connection, from 1; 0 while the scheduler has no
            connection.
        """
        for rank, why in links.items():
            if why:
                self._absent[rank] = why
                if self._news.get(rank, NO_NEWS)[0] != stream:
                    self._news[rank] = (stream, now_s)
                # Does not warn if the scheduler has no connection either: its own session then logs
                # that there is no server.
                if stream and now_s >= self._news[rank][1] + ABSENCE_PATIENCE_S:
                    self._warn(rank)
                continue
            self._absent.pop(rank, None)
            self._news.pop(rank, None)
            if rank in self._said:
                self._said.discard(rank)
                logger.info(
                    "hotkv: worker %d has a session with the KV cache server now; the warning "
                    "that it has none no longer holds",
                    rank,
                )
        self.are_complete = not self._absent

    def check_start(self) -> None:
        """Logs a warning for each worker that has no session, unless it is still connecting. Called
        when the scheduler's session has connected at the engine's start."""
        for rank, why in self._absent.items():
            if why != STILL_CONNECTING:
                self._warn(rank)

    def _warn(self, rank: int) -> None:
        if rank in self._said:
            return
        self._said.add(rank)
        logger.warning(
            "hotkv: worker %d has no session with the KV cache server (%s), so this engine neither "
            "loads nor stores; the server must run on the worker's node, answer at hotkv.target "
            "and be able to map its memory (a unix: target; for CUDA a server with the same GPU). "
            "The worker goes on trying",
            rank,
            self._absent[rank],
        )


# ------------------------------------------------------------------------ handshakes that come late

JOINING_PATIENCE_S = 5.0


class Joining:
    """Delays the engine's first requests until all ranks have sent their handshakes. Used if vLLM
    does not forward the handshakes to the scheduler (MultiConnector). The handshakes then arrive
    with the workers' reports of a step.

    Until then the scheduler side neither loads nor stores. It answers "ask again" for each request,
    so vLLM runs a step without requests, which returns the reports within milliseconds. A rank that
    never answers delays only the first requests, by at most `JOINING_PATIENCE_S`.

    It is used too while the ranks read the weights' files to identify them. Requests are delayed
    only when the files have been read.

    requests: by id, the unfinished requests that have arrived meanwhile, in the order of arrival.
    was_late: True once JOINING_PATIENCE_S has passed; requests are no longer delayed.
    reading: the reading of the weights' files by the scheduler, which ends when the ranks' does;
        None if the ranks have not said that they read them.
    """

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.reading: Future[str] | None = None
        self._until_s: float | None = None
        self.was_late = False

    def __repr__(self) -> str:
        return f"Joining(requests={len(self.requests)}, late={self.was_late})"

    @property
    def asks_workers(self) -> bool:
        """Returns True if a step shall ask the workers for their handshakes."""
        return self.reading is None or self.reading.done()

    def asks_again(self, now_s: float) -> bool:
        """Returns True while requests must be answered "ask again", because handshakes may still
        arrive. Returns False, and logs a warning once, when JOINING_PATIENCE_S has passed since the
        first call, or the first after the weights' files have been read."""
        if not self.asks_workers:
            return False
        if self._until_s is None:
            self._until_s = now_s + JOINING_PATIENCE_S
        was_late, self.was_late = self.was_late, now_s >= self._until_s
        if self.was_late and not was_late:
            logger.warning(
                "hotkv is off until all ranks have told the scheduler what they store; the engine "
                "runs without it"
            )
        return not self.was_late


# ----------------------------------------------------------------------------- the ranks' agreement


@dataclass(frozen=True, slots=True)
class Agreement:
    """The key space (a model in a configuration) and settings on which all ranks agree.

    kinds: the kinds of sketch (compact forms of keys, for sparse attention) that the ranks
        store; empty if the ranks do not all have the same kinds.
    sparse_layers: each layer with sparse attention, as (layer number, number of its vLLM group).
    revocations: the pages (fences) that the ranks share with the scheduler, on which it revokes
        stores; None if only workers revoke stores.
    """

    space: KeySpace
    kinds: tuple[Sketch, ...]
    sparse_layers: tuple[tuple[int, int], ...]
    revocations: Revocations | None


def agree(
    handshakes: Sequence[HotKVHandshake], vllm_config: Any, kv_cache_config: Any
) -> Agreement:
    """Checks that the ranks' handshakes agree, and returns the key space (a model in a
    configuration) and settings in them. Also maps the page (fence) of each rank on which the
    scheduler revokes stores, if the engine needs such pages (`checks.writes_before_it_tells`) or a
    rank has one.

    Raises Unsupported, with the reason for the engine's log, unless every rank has reported, all
    ranks are on the scheduler's machine, and all ranks have the same key space.
    """
    num_ranks = vllm_config.parallel_config.world_size
    space = _key_space(handshakes, num_ranks)
    revocations = None
    # If a rank has such a page (fence), it accepts only stores that can be revoked there. So all
    # ranks must have one.
    if checks.writes_before_it_tells(vllm_config, kv_cache_config) or any(
        h.fence is not None for h in handshakes
    ):
        try:
            places = [h.fence for h in handshakes if h.fence is not None]
            if len(places) != num_ranks:
                raise ValueError(f"{len(places)} of {num_ranks} ranks have named one")
            revocations = Revocations(places)
        except (OSError, ValueError) as error:
            raise Unsupported(
                "model runner V2 writes blocks of this model before it tells connectors' workers "
                f"that they change hands, and the scheduler can't reach the workers' fences "
                f"({error}); set VLLM_USE_V2_MODEL_RUNNER=0"
            ) from None
    kinds = handshakes[0].sketches
    if any(h.sketches != kinds for h in handshakes):
        logger.warning("hotkv: the ranks do not agree on sketches; each rank builds its own")
        kinds = ()
    return Agreement(space, kinds, handshakes[0].sparse_layers, revocations)


def _key_space(handshakes: Sequence[HotKVHandshake], num_ranks: int) -> KeySpace:
    """Returns the key space (a model in a configuration) that all ranks have. Raises
    Unsupported if a rank has no key space or another key space, has not reported, or runs on
    another machine than the scheduler.

    num_ranks: number of the engine's ranks.
    """
    spaces = [h.key_space for h in handshakes if h.key_space is not None]
    if len(spaces) < len(handshakes):
        why_off = next(h.why_off for h in handshakes if h.key_space is None)
        raise Unsupported(why_off or "the ranks do not agree on the key space")
    if any(space.fingerprint != spaces[0].fingerprint for space in spaces):
        raise Unsupported("the ranks do not agree on the key space")
    if len(handshakes) < num_ranks:
        # Without all ranks hotkv is useless: the missing ranks have no session, so no store would
        # ever have the shards of all ranks.
        raise Unsupported(f"{len(handshakes)} of {num_ranks} ranks have said what they found")
    if any(h.host not in ("", this_host()) for h in handshakes):
        raise Unsupported(
            "the scheduler and the engine's ranks are on different machines; hotkv keeps KV of "
            "engines that are on one"
        )
    return spaces[0]


# ----------------------------------------------------------------------- the parts over a key space


@dataclass(frozen=True, slots=True)
class Engine:
    """The scheduler side's objects that live as long as the engine, even if the key space (a model
    in a configuration) changes.

    stats: the counters' growth since vLLM last collected it.
    adapters: computes the block keys of requests with LoRA adapters.
    exactness: tracks which KV on the device is exact, and so may be stored.
    counts_media: True if vLLM numbers images and other media instead of hashing them, so that block
        hashes do not cover their content.
    pool: gives residency (contexts beyond device memory) access to vLLM's blocks on the device.
    is_child: True if hotkv is in a MultiConnector. hotkv then offers no hit to a request whose
        blocks another connector is to fetch. MultiConnector loads a request from one connector
        only, so a short hit in hotkv would keep the other connector from fetching the rest.
    prefill: measures the engine's prefill speed.
    learnt_prefill: the same object as `prefill` if hits are loaded only when loading is faster than
        computing. None if every hit is loaded: with `load = "always"`, and with residency.
    failed_loads: requests whose load failed.
    traces: the traces of requests; None if the setting `tracing` is empty.
    """

    vllm_config: Any
    kv_cache_config: Any
    config: ConnectorConfig
    stats: HotKVStats
    adapters: Adapters
    exactness: Exactness
    counts_media: bool
    pool: DevicePool
    is_child: bool = False
    prefill: PrefillSpeed = field(init=False)
    learnt_prefill: PrefillSpeed | None = field(init=False)
    failed_loads: FailedLoads = field(init=False)
    traces: RequestTraces | None = field(init=False)

    def __post_init__(self) -> None:
        prefill = PrefillSpeed(self.stats)
        weighs = self.config.load == "auto" and self.pool.spec is None
        object.__setattr__(self, "prefill", prefill)
        object.__setattr__(self, "learnt_prefill", prefill if weighs else None)
        object.__setattr__(self, "failed_loads", FailedLoads())
        object.__setattr__(self, "traces", open_traces(self.config))


@dataclass(frozen=True, slots=True)
class Assembly:
    """The scheduler side's objects for one key space (a model in a configuration), and their
    session. Created when the ranks agree on a key space, and again when the key space changes.

    cache_groups: the KV cache groups of the key space, each with its number in vLLM.
    session: the connection to the server for this key space.
    state_log: logs changes of the session's state.
    streams: counts the session's connections to the server (it reconnects by itself).
    finder: finds the hits of requests and leases them.
    planner: plans the stores of requests.
    reports: reports admitted requests to the server.
    reset: empties the server's cache of the key space when vLLM asks for it.
    memory: reports to the server which contexts decode sparsely; None without sparse decode.
    residencies: the requests whose old blocks may be only in the server's memory; None if the
        engine has no residency.
    state_block_tokens: tokens of a block, by number of each vLLM group whose recurrent states vLLM
        offers for storing (`CacheGroup.states_by_handoff`). Computed here once, because each step
        needs it.
    """

    cache_groups: tuple[kv_groups.CacheGroup, ...]
    session: Session
    state_log: link.StateLog
    streams: StreamCount
    finder: HitFinder
    planner: StorePlanner
    reports: UseReports
    reset: CacheReset
    memory: SparseSequences | None
    residencies: ResidentRequests | None
    state_block_tokens: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        sizes = {
            group.vllm_group: group.block_tokens
            for group in self.cache_groups
            if group.states_by_handoff
        }
        object.__setattr__(self, "state_block_tokens", sizes)


def assemble(engine: Engine, agreement: Agreement) -> Assembly:
    """Opens the scheduler's session, and creates the objects that use it. If this function raises,
    it has closed the session."""
    config = engine.config
    engine_id = str(engine.vllm_config.kv_transfer_config.engine_id)
    cache_groups = kv_groups.cache_groups(engine.vllm_config, engine.kv_cache_config)
    state_log = link.StateLog("scheduler", config.target, logging.INFO)
    streams = StreamCount(state_log)
    session = link.open_session(
        SessionConfig(
            target=config.target,
            engine_id=engine_id,
            role=Role.SCHEDULER,
            key_space=agreement.space,
            sketches=agreement.kinds,
            client_name="hotkv-vllm scheduler",
            engine_name=checks.engine_name(engine_id),
            model_names=checks.model_names(engine.vllm_config),
            use_table=config.use_table,
            credentials=config.credentials,
            on_state=streams,
        )
    )
    prefix = f"{engine_id[:8]}-{uuid.uuid4().hex[:8]}"
    try:
        return _over(session, engine, agreement, cache_groups, state_log, streams, prefix)
    except BaseException:
        session.close()
        raise


def _over(
    session: Session,
    engine: Engine,
    agreement: Agreement,
    cache_groups: tuple[kv_groups.CacheGroup, ...],
    state_log: link.StateLog,
    streams: StreamCount,
    prefix: str,
) -> Assembly:
    space, config, stats = agreement.space, engine.config, engine.stats
    groups = CachedGroups(
        space.groups,
        space.hash_block_tokens,
        kv_groups.hit_alignment_tokens(engine.kv_cache_config, cache_groups),
        kv_groups.draft_groups(engine.vllm_config, cache_groups),
        engine.adapters,
        engine.counts_media,
    )
    sketches = SketchPlanner(len(space.groups), agreement.kinds)
    finder = HitFinder(
        session,
        groups,
        config,
        stats,
        prefix,
        sketches,
        engine.pool.left_out,
        engine.failed_loads,
        stores=engine.vllm_config.kv_transfer_config.is_kv_producer,
        connection=lambda: streams.number,
    )
    residencies = None
    if engine.pool.spec is not None:
        residencies = ResidentRequests(
            ResidencyCalls(session, streams, stats),
            groups,
            engine.exactness,
            engine.pool,
            stats,
            config.residency_timeout_s,
        )
    planner = StorePlanner(
        session,
        finder,
        cache_groups,
        engine.vllm_config.parallel_config.world_size,
        config,
        stats,
        prefix,
        StoreFence(agreement.revocations),
        engine.exactness,
        residencies,
        kv_groups.unfinished_tokens(engine.vllm_config),
    )
    reports = UseReports(
        session,
        space.hash_block_tokens,
        stats,
        groups.keys,
        engine.prefill,
        tells_speed=engine.learnt_prefill is not None,
    )
    sparse = {number for _, number in agreement.sparse_layers}
    sparse_groups = [
        SparseGroup(index, group.block_tokens)
        for index, group in enumerate(cache_groups)
        if group.vllm_group in sparse
    ]
    memory = None
    if config.sparse is not None and sparse_groups:
        min_tokens = config.sparse.min_context_tokens
        memory = SparseSequences(session, streams, sparse_groups, groups.hashes, min_tokens, prefix)
    reset = CacheReset(session, planner)
    return Assembly(
        cache_groups,
        session,
        state_log,
        streams,
        finder,
        planner,
        reports,
        reset,
        memory,
        residencies,
    )


# ------------------------------------------------------------------------- whether there is a cache

LINKS_PATIENCE_S = 0.25
"""After the server has come back, a request waits until the workers have reported their sessions
(connections to the server), but at most until this time after its arrival, seconds."""


class Sharing:
    """Decides whether this engine shares KV. Opens and closes the session of its key space (a
    model in a configuration).

    cache: the objects for the present key space; None while the engine runs without hotkv.
    joining: delays the first requests until the handshakes arrive and the session can be opened;
        None afterwards.
    links: tracks which workers have a session.
    weights: checks whether the engine's weights have changed, and holds the identity of the present
        weights.
    seen_changes: the number of changes of the session's state at the last call of `say_on`.
    owes_flush: True if a reset of the cache was asked for while `cache` was None. The flush (the
        deletion of the key space's blocks) then follows once the session is opened.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_ranks = engine.vllm_config.parallel_config.world_size
        self._handshakes: list[HotKVHandshake] = []
        self._agreement: Agreement | None = None
        self.cache: Assembly | None = None
        self.joining: Joining | None = None
        self.links = WorkerLinks()
        self.weights = Rekeying(self._num_ranks)
        self.owes_flush = False
        self._has_said_on = False
        self.seen_changes = 0

    def __repr__(self) -> str:
        return f"Sharing({'on' if self.cache else 'off'}, {self.weights}, {self.links})"

    @property
    def is_connected(self) -> bool:
        return self.cache is not None and self.cache.session.connected

    @property
    def stream(self) -> int:
        """Returns the number of the scheduler's present connection, from 1; 0 while the scheduler
        is not connected."""
        return self.cache.streams.number if self.cache is not None and self.is_connected else 0

    @property
    def lacks_sparse_layers(self) -> bool:
        """Returns True if the ranks' handshakes have arrived, and no rank has a layer that may
        attend sparsely. (Ranks on CUDA name no such layers.)"""
        return bool(self._handshakes) and not any(one.sparse_layers for one in self._handshakes)

    @property
    def may_offer(self) -> bool:
        """Returns True if hits may be offered to requests now: all workers have a session, and
        neither a reset of the cache nor a check of the weights is in progress."""
        cache = self.cache
        return (
            cache is not None
            and self.links.are_complete
            and not cache.reset.under_way
            and not self.weights.under_way
        )

    def wants_steps(self) -> bool:
        """Returns True if vLLM must plan steps, even if the engine is idle: a reset of the cache is
        not finished (`CacheReset.wants_steps`), or it was requested before the ranks' handshakes,
        which arrive with a step; or the weights' files have been read, so that the handshakes are
        complete now."""
        if self.cache is not None:
            return self.cache.reset.under_way and self.cache.reset.wants_steps()
        joining = self.joining
        if joining is None or not (self.owes_flush or joining.reading is not None):
            return False
        return joining.asks_again(time.monotonic())

    def makes_wait(self, arrived_s: float, now_s: float) -> bool:
        """Returns True if a request must be answered "ask again", because workers are about to
        report their sessions or their weights.

        arrived_s: time at which the request arrived.
        """
        if not self.is_connected:
            # The result is ignored. The call begins a check of weights that may have changed.
            self.weights.waits(now_s)
            return False
        if self.links.will_say(self.stream) and now_s < arrived_s + LINKS_PATIENCE_S:
            return True
        return self.weights.waits(now_s)

    # ---------------------------------------------------------------------------------------- start

    def replaces(self, handshakes: list[HotKVHandshake]) -> bool:
        """Returns True if `connect` with these handshakes would replace `cache`, because `cache`
        was created from handshakes with other contents. Returns False if there is no cache or no
        handshake."""
        return (
            bool(handshakes) and self.cache is not None and _lasting(handshakes) != self._handshakes
        )

    def connect(self, handshakes: list[HotKVHandshake]) -> None:
        """Opens the session for the key space (a model in a configuration) on which all ranks
        agree. Waits for the server up to `startup_wait_s`, and up to OPENING_S longer if the server
        has answered but has not opened the session yet. Also loads numba's kernels, so that the
        first request need not wait a second for them. If the ranks do not agree, logs a warning and
        leaves hotkv off. If the operating system refuses to start a thread or open a file, the next
        steps call this method again (`joining`).

        handshakes: the ranks' handshakes. If empty, the first steps ask the workers for them
            (`joining`). vLLM 0.33 also calls this method after each wake-up: the session then
            continues if the handshakes are the same as before.
        """
        if not handshakes:
            if self.cache is None:
                native.load("hotkv_proto.table_reading")
                self.joining = Joining()
            return
        joining, self.joining = self.joining, None
        if any(h.is_reading for h in handshakes):
            self._await_weights(joining or Joining())
            return
        # `stream=0` stands for no connection: the ranks made their handshakes before the scheduler
        # had a connection.
        self.links.update({h.rank: h.absent for h in handshakes}, time.monotonic(), stream=0)
        if self.cache is not None:
            if not self.replaces(handshakes):
                if any(h.weights_in_doubt for h in handshakes):
                    self.weights.suspect()
                return
            self.turn_off()
        self._handshakes = _lasting(handshakes)
        try:
            agreement = agree(handshakes, self._engine.vllm_config, self._engine.kv_cache_config)
        except Unsupported as why:
            logger.warning("hotkv is off: %s; the engine runs without it", why)
            return
        in_doubt = any(h.weights_in_doubt for h in handshakes)
        self.weights.begin(agreement.space.weights_identity, in_doubt)
        # Loads the kernels before the first request arrives, because numba takes a second to load
        # and some kernels must be compiled.
        native.load("hotkv_proto.table_reading")
        try:
            self._start(agreement, self._engine.config.startup_wait_s, link.OPENING_S)
        except (OSError, RuntimeError) as error:
            if self.cache is not None:
                raise
            if joining is None:
                logger.warning("hotkv: %s; the engine's next steps try again", error)
            self.joining = joining or Joining()

    def _await_weights(self, joining: Joining) -> None:
        self.joining = joining
        if joining.reading is not None:
            return
        native.load("hotkv_proto.table_reading")
        config = self._engine.config
        joining.reading = model_weights.begin_reading(
            self._engine.vllm_config, config.weights_identity
        )
        logger.info(model_weights.SAYS_UNREAD)

    def _start(self, agreement: Agreement, wait_s: float, opening_s: float = 0.0) -> None:
        """Opens the session for the key space on which the ranks agree, creates the objects that
        use it (`assemble`), and waits for the server (`link.await_server`). Closes the session of
        the earlier key space, if there is one.

        wait_s: how long to wait for a server to answer; 0: do not wait.
        opening_s: how much longer to wait if a server has answered but has not opened the session
            yet.
        """
        cache = assemble(self._engine, agreement)
        if self.cache is not None:
            link.close_aside(self.cache.session)
        self._agreement = agreement
        self.cache = cache
        if self.owes_flush:
            self.owes_flush = False
            cache.reset.hold(wait_s + opening_s + self._engine.config.reset_timeout_s)
        self.choose_media()
        if not link.await_server(cache.session, wait_s, opening_s):
            cache.state_log.waited(wait_s)
        else:
            self.links.check_start()
            self.say_on()
            # Looks up a block of each group in the mapped block table, so that the first request
            # does not have to wait for page faults.
            for index in range(len(agreement.space.groups)):
                cache.session.probe(index, [bytes(agreement.space.hash_bytes)])

    # ---------------------------------------------------------------------------------------- steps

    def say_on(self) -> None:
        """Logs that hotkv is on, if the scheduler and all workers have a session. Called in a step
        after each change of the session's state; logs again only after a session has ended and all
        sessions have been opened again."""
        # Read first, so that a change of the session's state from now on is seen in a later step.
        self.seen_changes = 0 if self.cache is None else self.cache.streams.num_changes
        is_on = self.is_connected and self.links.are_complete
        if is_on and not self._has_said_on and self.cache is not None:
            link.say_on(self.cache.session, self._engine.config.target)
        self._has_said_on = is_on

    def is_other(self, identity: str) -> bool:
        """Returns True if weights with this identity differ from the present weights, so that
        `adopt` would change to another key space (a model in a configuration)."""
        return self.cache is not None and identity != self.weights.identity

    def adopt(self, identity: str) -> None:
        """Adopts the weights that all ranks have reported. If they differ from the present weights,
        opens a session of their key space (a model in a configuration) in place of the present
        session. If the operating system refuses to start a thread or open a file for this session,
        the check of the weights stays open, and the next step tries again.

        identity: identifies the weights by their content.
        """
        agreement = self._agreement
        if self.cache is not None and agreement is not None and self.is_other(identity):
            # After a change of weights the step waits a moment, so that the first request can hit.
            # Without a server it does not wait.
            is_there = self.is_connected
            wait_s = min(self._engine.config.startup_wait_s, RECONNECT_S) if is_there else 0.0
            space = replace(agreement.space, weights_identity=identity)
            try:
                self._start(replace(agreement, space=space), wait_s)
            except (OSError, RuntimeError) as error:
                self.cache.state_log(LinkState.ABSENT, str(error))
                return
            self._handshakes = [replace(h, key_space=space) for h in self._handshakes]
            logger.info(
                "hotkv: the engine's weights have changed; from now on it shares KV with engines "
                "that have the same (%s)",
                identity,
            )
        self.weights.adopt(identity)
        self.choose_media()

    def choose_media(self) -> None:
        """Decides whether requests with images or other media share KV
        (`CachedGroups.leaves_media_out`)."""
        if self.cache is not None:
            is_old = self.weights.media_are_old
            self.cache.finder.groups.leaves_media_out = self._engine.counts_media or is_old

    def join(self, report: StepReport) -> list[Any]:
        """Calls `connect` once a report contains the handshakes of all ranks, and returns the
        requests that have arrived while handshakes were missing (`Joining.requests`). Returns an
        empty list while handshakes are missing, or if `connect` must be called again."""
        joining = self.joining
        if joining is None or len(report.handshakes) < self._num_ranks:
            return []
        self.connect(list(report.handshakes.values()))
        return [] if self.joining is not None else list(joining.requests.values())

    # ------------------------------------------------------------------------------------------ end

    def turn_off(self) -> None:
        """Closes the session. From then on the engine runs without hotkv, until `connect` opens
        another session."""
        cache, self.cache, self._agreement = self.cache, None, None
        if cache is not None:
            cache.session.close()
        if self._engine.traces is not None:
            self._engine.traces.flush()


def _lasting(handshakes: list[HotKVHandshake]) -> list[HotKVHandshake]:
    """Returns the handshakes without the two fields that change during an engine's life: why a
    rank has no session at the moment (`absent`), and whether its weights must be checked
    (`weights_in_doubt`; True in each handshake after a wake-up)."""
    return [replace(h, absent="", weights_in_doubt=False) for h in handshakes]

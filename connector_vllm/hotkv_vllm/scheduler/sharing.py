"""Decides whether this engine shares KV now, and in which key space.

- `Sharing.cache` exists only while the ranks agree on a key space: that of the weights that they
  last reported.
- Hits and stores are off while a rank has no session, the weights may have changed, or a reset is
  under way.

Waits for the server only at the start and after the weights have changed.
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
from hotkv_proto.keys import KeySpace
from hotkv_vllm import link
from hotkv_vllm.companion import Attachment, SchedulerCompanion
from hotkv_vllm.compat import Unsupported, checks, kv_groups, model_weights
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.costs.prefill_speed import PrefillSpeed
from hotkv_vllm.identity.adapters import Adapters
from hotkv_vllm.identity.exactness import Exactness
from hotkv_vllm.identity.ranks import this_host
from hotkv_vllm.identity.rekeying import RECONNECT_S, Rekeying
from hotkv_vllm.link import logger
from hotkv_vllm.metadata import STILL_CONNECTING, HotKVHandshake, StepReport
from hotkv_vllm.scheduler.failed_loads import FailedLoads
from hotkv_vllm.scheduler.find.hits import HitFinder
from hotkv_vllm.scheduler.groups import Attachments, CachedGroups
from hotkv_vllm.scheduler.reports import UseReports
from hotkv_vllm.scheduler.reset import CacheReset
from hotkv_vllm.scheduler.store.stores import StorePlanner
from hotkv_vllm.scheduler.store.stores_in_flight import StoreFence
from hotkv_vllm.stats import HotKVStats
from hotkv_vllm.tracing.request_traces import RequestTraces, open_traces

# -------------------------------------------------------------------------- sessions of the workers

NO_NEWS = (-1, 0.0)
ABSENCE_PATIENCE_S = 5.0
"""After a restart of the server the sessions reconnect one after the other."""


class WorkerLinks:
    """Which workers have a session.

    While one has none, hits and stores are off, and each step asks all workers to report.

    A worker without one for ABSENCE_PATIENCE_S of the scheduler's present connection is warned
    of, as registering memory takes seconds and reports come only with steps. A later line takes
    this back.
    """

    def __init__(self) -> None:
        self.are_complete = True
        self._absent: dict[int, str] = {}
        # By worker without a session: the scheduler's connection during which it last reported
        # so, and its first such report during that connection.
        self._news: dict[int, tuple[int, float]] = {}
        self._said: set[int] = set()

    def __repr__(self) -> str:
        return f"WorkerLinks(absent: {self._absent})"

    def will_say(self, stream: int) -> bool:
        """Whether a worker without a session has not yet reported during the scheduler's
        connection `stream`."""
        return any(self._news.get(rank, NO_NEWS)[0] != stream for rank in self._absent)

    def update(self, links: Mapping[int, str], now_s: float, stream: int) -> None:
        """links: by rank, why it has no session; empty if it has one.
        stream: the scheduler's own connection, from 1; 0 without.
        """
        for rank, why in links.items():
            if why:
                self._absent[rank] = why
                if self._news.get(rank, NO_NEWS)[0] != stream:
                    self._news[rank] = (stream, now_s)
                # Without a connection the scheduler's own session logs that there is no server.
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
        """When the scheduler's session has connected at the start."""
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
    """Delays the first requests until all handshakes have come with the workers' reports, if vLLM
    does not forward them (MultiConnector).

    Each request is answered "ask again", so vLLM runs a step without requests, which brings the
    reports within ms. A rank that never answers costs JOINING_PATIENCE_S. While ranks read the
    weights' files no request is delayed.

    requests: unfinished, in the order of their arrival.
    reading: the scheduler's own, of the files, which ends when the ranks' does.
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
        return self.reading is None or self.reading.done()

    def asks_again(self, now_s: float) -> bool:
        """Warns once when the time, from the first call after the files were read, has passed."""
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
    """attachments: empty if the ranks differ.
    notes: of the ranks' companions.
    revocations: the ranks' fences; None if only workers revoke stores.
    """

    space: KeySpace
    attachments: tuple[Attachment, ...]
    notes: tuple[Any, ...]
    revocations: Revocations | None


def agree(
    handshakes: Sequence[HotKVHandshake], vllm_config: Any, kv_cache_config: Any
) -> Agreement:
    """Raises Unsupported, with the reason for the log, unless every rank has reported the same
    key space from the scheduler's machine. Maps the ranks' fences, if the engine needs them
    (`checks.writes_before_it_tells`) or a rank has one."""
    num_ranks = vllm_config.parallel_config.world_size
    space = _key_space(handshakes, num_ranks)
    revocations = None
    # A rank with a fence accepts only stores that can be revoked there, so all ranks must have
    # one.
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
    attachments = handshakes[0].attachments
    if any(h.attachments != attachments for h in handshakes):
        logger.warning("hotkv: the ranks do not agree on attachments; each rank makes its own")
        attachments = ()
    return Agreement(space, attachments, tuple(h.companion for h in handshakes), revocations)


def _key_space(handshakes: Sequence[HotKVHandshake], num_ranks: int) -> KeySpace:
    spaces = [h.key_space for h in handshakes if h.key_space is not None]
    if len(spaces) < len(handshakes):
        why_off = next(h.why_off for h in handshakes if h.key_space is None)
        raise Unsupported(why_off or "the ranks do not agree on the key space")
    if any(space.fingerprint != spaces[0].fingerprint for space in spaces):
        raise Unsupported("the ranks do not agree on the key space")
    if len(handshakes) < num_ranks:
        # No store would ever have the shards of the missing ranks.
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
    """What lives as long as the engine, across key spaces.

    counts_media: vLLM numbers media instead of hashing them.
    is_child: in a MultiConnector, which loads a request from one connector only: hotkv offers no
        hit to a request that another is to fetch, as a short hit would prevent that.
    companion: None without one.
    weighs_loads: False if every hit is loaded.
    traces: None if the setting `tracing` is empty.
    """

    vllm_config: Any
    kv_cache_config: Any
    config: ConnectorConfig
    stats: HotKVStats
    adapters: Adapters
    exactness: Exactness
    counts_media: bool
    companion: SchedulerCompanion | None = None
    is_child: bool = False
    prefill: PrefillSpeed = field(init=False)
    weighs_loads: bool = field(init=False)
    failed_loads: FailedLoads = field(init=False)
    traces: RequestTraces | None = field(init=False)

    def __post_init__(self) -> None:
        prefill = PrefillSpeed(self.stats)
        frees_blocks = self.companion is not None and self.companion.frees_blocks
        weighs_loads = self.config.load == "auto" and not frees_blocks
        object.__setattr__(self, "prefill", prefill)
        object.__setattr__(self, "weighs_loads", weighs_loads)
        object.__setattr__(self, "failed_loads", FailedLoads())
        object.__setattr__(self, "traces", open_traces(self.config))


@dataclass(frozen=True, slots=True)
class Assembly:
    """What lives as long as one key space, and its session.

    state_block_tokens: by vLLM group with `CacheGroup.states_by_handoff`; each step needs it.
    """

    cache_groups: tuple[kv_groups.CacheGroup, ...]
    session: Session
    state_log: link.StateLog
    streams: link.StreamCount
    finder: HitFinder
    planner: StorePlanner
    reports: UseReports
    reset: CacheReset
    state_block_tokens: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        sizes = {
            group.vllm_group: group.block_tokens
            for group in self.cache_groups
            if group.states_by_handoff
        }
        object.__setattr__(self, "state_block_tokens", sizes)


def assemble(engine: Engine, agreement: Agreement) -> Assembly:
    """Opens the session and creates what uses it; closes it if that raises."""
    config = engine.config
    engine_id = str(engine.vllm_config.kv_transfer_config.engine_id)
    cache_groups = kv_groups.cache_groups(engine.vllm_config, engine.kv_cache_config)
    state_log = link.StateLog("scheduler", config.target, logging.INFO)
    streams = link.StreamCount(state_log)
    session = link.open_session(
        SessionConfig(
            target=config.target,
            engine_id=engine_id,
            role=Role.SCHEDULER,
            key_space=agreement.space,
            sketches=agreement.attachments,
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
    streams: link.StreamCount,
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
    attachments = Attachments(len(space.groups), agreement.attachments)
    companion = engine.companion
    finder = HitFinder(
        session,
        groups,
        config,
        stats,
        prefix,
        attachments,
        (lambda hit_tokens: range(0)) if companion is None else companion.left_out,
        engine.failed_loads,
        stores=engine.vllm_config.kv_transfer_config.is_kv_producer,
        connection=lambda: streams.number,
    )
    keeper = None
    if companion is not None:
        keeper = companion.join(session, streams, groups, cache_groups, agreement.notes)
        groups.kept = 0 if keeper is None else keeper.group
    planner = StorePlanner(
        session,
        groups,
        attachments,
        finder.hidden,
        cache_groups,
        engine.vllm_config.parallel_config.world_size,
        config,
        stats,
        prefix,
        StoreFence(agreement.revocations),
        engine.exactness,
        keeper,
        kv_groups.unfinished_tokens(engine.vllm_config),
    )
    reports = UseReports(
        session,
        space.hash_block_tokens,
        stats,
        groups.keys,
        engine.prefill,
        tells_speed=engine.weighs_loads,
    )
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
    )


# ------------------------------------------------------------------------- whether there is a cache

LINKS_PATIENCE_S = 0.25
"""After the server has come back: a request waits so long from its arrival for the workers'
reports."""


class Sharing:
    """cache: None while the engine runs without hotkv.
    joining: until the session can be opened.
    seen_changes: of the session's state, at the last `say_on`.
    owes_flush: a reset was asked for without `cache`: the flush follows the session.
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
        """Number of the scheduler's connection, from 1; 0 without."""
        return self.cache.streams.number if self.cache is not None and self.is_connected else 0

    @property
    def may_offer(self) -> bool:
        cache = self.cache
        return (
            cache is not None
            and self.links.are_complete
            and not cache.reset.under_way
            and not self.weights.under_way
        )

    def wants_steps(self) -> bool:
        """Whether an idle engine must take steps: for a reset; for handshakes that a reset waits
        for; or because the weights' files have been read, which completes the handshakes."""
        if self.cache is not None:
            return self.cache.reset.under_way and self.cache.reset.wants_steps()
        joining = self.joining
        if joining is None or not (self.owes_flush or joining.reading is not None):
            return False
        return joining.asks_again(time.monotonic())

    def makes_wait(self, arrived_s: float, now_s: float) -> bool:
        if not self.is_connected:
            # The call begins a check of weights that may have changed.
            self.weights.waits(now_s)
            return False
        if self.links.will_say(self.stream) and now_s < arrived_s + LINKS_PATIENCE_S:
            return True
        return self.weights.waits(now_s)

    # ---------------------------------------------------------------------------------------- start

    def replaces(self, handshakes: list[HotKVHandshake]) -> bool:
        """Whether `connect` would replace `cache`, which other handshakes created."""
        return (
            bool(handshakes) and self.cache is not None and _lasting(handshakes) != self._handshakes
        )

    def connect(self, handshakes: list[HotKVHandshake]) -> None:
        """Waits up to `startup_wait_s` for a server, and OPENING_S more if it has answered. Without
        agreement, warns and leaves hotkv off. If the system refuses a thread or a file, the next
        steps call again (`joining`).

        handshakes: if empty, the first steps ask for them. vLLM 0.33 also calls after each
            wake-up: with the same handshakes the session goes on.
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
        # The ranks made their handshakes before the scheduler had a connection.
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
        # numba takes a second to load, and some kernels must be compiled.
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
        """Closes the session of an earlier key space. Parameters as for `link.await_server`."""
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
            # Takes the table's page faults before the first request.
            for index in range(len(agreement.space.groups)):
                cache.session.probe(index, [bytes(agreement.space.hash_bytes)])

    # ---------------------------------------------------------------------------------------- steps

    def say_on(self) -> None:
        """Logs that hotkv is on once all have a session, and again only after one has ended."""
        # Read first: a change from now on is seen in a later step.
        self.seen_changes = 0 if self.cache is None else self.cache.streams.num_changes
        is_on = self.is_connected and self.links.are_complete
        if is_on and not self._has_said_on and self.cache is not None:
            link.say_on(self.cache.session, self._engine.config.target)
        self._has_said_on = is_on

    def is_other(self, identity: str) -> bool:
        """Whether `adopt` would change the key space."""
        return self.cache is not None and identity != self.weights.identity

    def adopt(self, identity: str) -> None:
        """Other weights get a session of their own. If the system refuses a thread or a file for
        it, the next step tries again."""
        agreement = self._agreement
        if self.cache is not None and agreement is not None and self.is_other(identity):
            # The step waits a moment, so that the first request can hit; not without a server.
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
        if self.cache is not None:
            is_old = self.weights.media_are_old
            self.cache.finder.groups.leaves_media_out = self._engine.counts_media or is_old

    def join(self, report: StepReport) -> list[Any]:
        """The requests that have waited; empty while handshakes are missing, or if `connect`
        must be called again."""
        joining = self.joining
        if joining is None or len(report.handshakes) < self._num_ranks:
            return []
        self.connect(list(report.handshakes.values()))
        return [] if self.joining is not None else list(joining.requests.values())

    # ------------------------------------------------------------------------------------------ end

    def turn_off(self) -> None:
        cache, self.cache, self._agreement = self.cache, None, None
        if self._engine.companion is not None:
            self._engine.companion.leave()
        if cache is not None:
            cache.session.close()
        if self._engine.traces is not None:
            self._engine.traces.flush()


def _lasting(handshakes: list[HotKVHandshake]) -> list[HotKVHandshake]:
    """Without `absent` and `weights_in_doubt` (True after each wake-up), which change during an
    engine's life."""
    return [replace(h, absent="", weights_in_doubt=False) for h in handshakes]

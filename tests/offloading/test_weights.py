"""Tests an engine with `HotKVOffloadingConnector` whose weights change in place. A state machine
changes weights, resets caches and runs steps in any order. Blocks may be stored and looked up only
in the key space of the weights that computed them.

hotkv's scheduler side and the worker sides of two ranks are real; the tier and its session are test
doubles. The state machine records which weights computed the blocks that vLLM caches.
"""

import hashlib
from concurrent.futures import Future
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from hotkv_client import Flushed
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_vllm.callbacks import CallbackEdge
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.identity import rekeying
from hotkv_vllm.identity.rekeying import RankWeights
from hotkv_vllm.offloading import scheduler, worker
from hotkv_vllm.offloading.connector import HotKVOffloadingConnector
from hotkv_vllm.offloading.messages import DoorMetadata, DoorRankReport, DoorReport, PageFormat
from hotkv_vllm.report_ids import report_ids
from hotkv_vllm.sparse.rows import SparseRows
from hotkv_vllm.stats import CallbackClock, HotKVStats
from tests.offloading.rig import scheduler_side
from tests.vllm.changing_weights import FakeWatch
from tests.vllm.desks import blocks
from tests.vllm.parts import admission

NUM_RANKS = 2
WEIGHTS = range(3)
"""Weights are numbers; each engine starts with 0."""


def _identity(weights):
    digests = "\0".join([f"digest of {weights}"] * NUM_RANKS)
    return f"updated:{hashlib.sha256(digests.encode()).hexdigest()}"


class Session:
    """A fake session (connection to the server) whose flush (deletion of the engine's blocks)
    succeeds if `can_flush`, and fails otherwise."""

    connected = True
    can_flush = True

    def flush(self):
        answer: Future[Flushed] = Future()
        answer.set_result(Flushed(0)) if self.can_flush else answer.set_exception(OSError("no"))
        return answer

    def report_requests(self, *_):
        """Does nothing: reports are not checked."""


class Tier:
    """A test double of hotkv's tier, with the attributes that `DoorScheduler` (the scheduler side)
    uses."""

    def __init__(self):
        self.stats, self.config, self.row_bytes = HotKVStats(), None, 4096
        self.session, self.transfers = None, None
        self.is_held, self.may_repeat, self.space = False, True, None
        self.makes_wait = lambda: False
        self.told: dict[str, bool] = {}
        self.is_refused = False

    def open(self, space, *_):
        if self.is_refused:
            raise RuntimeError("can't start new thread")
        self.space, self.session = space, Session()
        self.transfers = SimpleNamespace(is_idle=True, in_flight=0, is_held=False)
        return self.session

    def tell(self, request, _, *, is_excluded):
        self.told[request.request_id] = is_excluded

    def exclude(self, request_ids):
        self.told.update(dict.fromkeys(request_ids, True))

    def miss_of(self, _):
        return 0

    def first_loaded(self, *_):
        return None

    @property
    def serves(self):
        return self.space and not (self.is_held or self.transfers.is_held or self.makes_wait())


def rank_of(number, weights):
    """Returns the connector of a rank with only those parts that report to the scheduler side. Only
    rank 0 reports that a job of vLLM's offloading has ended.

    number: the rank.
    weights: its `RankWeights`, which identifies the rank's weights.
    """
    one = object.__new__(HotKVOffloadingConnector)
    ended = None if number else OffloadingWorkerMetadata({7: 1})
    one.connector_worker = SimpleNamespace(build_connector_worker_meta=lambda: ended)
    one._connector_metadata = None

    def report(_):
        return DoorRankReport(weights=weights.take_report(), callback_errors=number)

    one._door_worker = SimpleNamespace(report=report, report_ids=report_ids(number))
    return one


def joined(ranks):
    """Returns the reports of all ranks about a step, as vLLM aggregates them into one."""
    reports = [one.build_connector_worker_meta() for one in ranks]
    outputs = [
        ModelRunnerOutput(
            [], {}, kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=it)
        )
        for it in reports
    ]
    output = KVOutputAggregator(NUM_RANKS).aggregate(outputs)
    report = output.kv_connector_output.kv_connector_worker_meta
    assert report.completed_jobs == {7: 1}
    return report if isinstance(report, DoorReport) else DoorReport()


def request_of(name, **more):
    told = {"lora_request": None, "kv_transfer_params": None, "mm_features": ()}
    return SimpleNamespace(request_id=name, **told | {"prompt_is_token_ids": None} | more)


def space_of(identity="files"):
    group = GroupSpec(GroupKind.FULL_ATTENTION, 16, (4096,))
    return KeySpace("m", identity, "bfloat16", (group,), 16)


def made(patch, *, is_reset=False, is_refused=False):
    """Returns a scheduler side whose ranks have connected, and its tier.

    is_reset: if True, a reset and a step come before the handshakes, by which the ranks describe
        their KV.
    is_refused: if True, the session (connection to the server) can't be opened, because the system
        refuses to start a thread.
    """
    patch.setattr(scheduler, "full_key_space", lambda *_: space_of())
    patch.setattr(scheduler.model_weights, "weights_may_be_older", lambda _: False)
    patch.setattr(scheduler.checks, "is_pausing", lambda: False)
    tier = Tier()
    tier.is_refused = is_refused
    side = scheduler_side(tier, patch, num_ranks=NUM_RANKS)
    if is_reset:
        side.reset(is_device_empty=True)
        side.begin_step(SimpleNamespace(total_num_scheduled_tokens=100))
    side.connect([PageFormat(rank, "page") for rank in range(NUM_RANKS)])
    return side, tier


def test_other_engines_request_waits_during_weights_check(monkeypatch):
    """Another engine computes the request's prompt. If the wait ended during the check, the request
    would compute the prompt itself."""
    side, tier = made(monkeypatch)
    tier.may_load = True
    tier.tell = Mock()
    remote = {"kv_transfer_params": {"do_remote_prefill": True}}
    request = request_of("r", block_hashes=(), skip_reading_prefix_cache=False, **remote)
    monkeypatch.setattr(scheduler.steps, "covers_embeddings", lambda _: True)
    monkeypatch.setattr(side._wait, "goes_on", lambda *_: False)
    side.arrived(request)
    for is_checked in (True, False):
        monkeypatch.setattr(side, "_makes_wait", lambda is_checked=is_checked: is_checked)
        assert side.awaits(request, 0, Mock()) == is_checked
    assert not side.edge.broken


class WeightsMachine(RuleBasedStateMachine):
    """A state machine of an engine that runs steps while its weights are written and its caches are
    reset.

    cached: the weights that computed the blocks on the device or in the primary tier (vLLM's CPU
        tier).
    computed: the weights that computed the blocks that wait to be stored.
    """

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(rekeying, "ASK_AGAIN_S", 0.0)
        self.watches = [FakeWatch() for _ in range(NUM_RANKS)]
        self.ranks = [RankWeights(watch) for watch in self.watches]
        self.connectors = [rank_of(number, rank) for number, rank in enumerate(self.ranks)]
        self.cached: set[int] = set()
        self.computed: int | None = None
        self.identities = {"files": 0} | {_identity(weights): weights for weights in WEIGHTS}
        """For each key space's identity: the weights that it stands for."""

    @initialize(is_reset=st.booleans(), is_refused=st.booleans())
    def start(self, is_reset=False, is_refused=False):
        self.side, self.tier = made(self.patch, is_reset=is_reset, is_refused=is_refused)

    def teardown(self):
        self.patch.undo()

    @rule()
    def the_system_has_threads_again(self):
        """Lets the system start threads again, so that a session (connection to the server) can be
        opened. The scheduler side must open it in the next step."""
        self.tier.is_refused = False
        self.run_nothing()
        assert self.tier.session

    @rule()
    def a_callback_breaks(self):
        self.side.begin_step(None)

    @rule(
        weights=st.sampled_from(WEIGHTS),
        noticing=st.sets(st.sampled_from(range(NUM_RANKS)), min_size=1),
    )
    def write(self, weights, noticing):
        for number, watch in enumerate(self.watches):
            watch.write(weights, quietly=number not in noticing)

    def step(self, num_tokens, is_lost=False):
        now = self.watches[0].weights
        self.side.begin_step(SimpleNamespace(total_num_scheduled_tokens=num_tokens))
        self.check()
        orders = DoorMetadata({}, {}, weights=self.side.order)
        for rank in self.ranks:
            rank.obey(orders.weights)
        if num_tokens:
            self.cached.add(now)
        before, report = self.tier.stats.data.get("callback_errors", 0), joined(self.connectors)
        if not is_lost:
            self.side.update(report, ())
            assert self.tier.stats.data["callback_errors"] == before + sum(range(NUM_RANKS))
            # With this report, vLLM counts the blocks that the previous step computed as stored in
            # the primary tier.
            if self.computed is not None and self.tier.serves:
                assert self.weights_of_space() == self.computed, "stored under other weights"
        self.computed = now if num_tokens else None

    @rule(is_lost=st.booleans())
    def run(self, is_lost=False):
        self.step(100, is_lost)

    @rule()
    def run_nothing(self):
        self.step(0)

    @precondition(lambda self: self.tier.session)
    @rule(is_device_empty=st.booleans(), can_flush=st.booleans())
    def reset(self, is_device_empty, can_flush):
        self.tier.session.can_flush = can_flush
        self.side.reset(is_device_empty)
        # vLLM's reset always empties the primary tier and drops stores that have not begun.
        self.computed = None
        if is_device_empty:
            self.cached.clear()
        assert not self.tier.serves or can_flush

    @precondition(lambda self: self.tier.session)
    @rule(weights=st.sampled_from(WEIGHTS))
    def write_after_a_lost_check(self, weights):
        """Resets the caches, after which the ranks check their weights. Their first answer gets
        lost, so they are asked again, but the weights have been written in the meantime."""
        self.reset(is_device_empty=True, can_flush=True)
        self.run(is_lost=True)
        self.write(weights, range(NUM_RANKS))
        self.run()

    @precondition(lambda self: self.tier.session)
    @rule(weights=st.sampled_from(WEIGHTS))
    def share_again(self, weights=0):
        """Empties the caches, writes other weights, and runs three steps. Whatever happened before,
        the engine must then store and look up blocks again (`tier.serves`)."""
        self.reset(is_device_empty=True, can_flush=True)
        self.write(weights, range(NUM_RANKS))
        self.run_nothing()
        for _ in range(3):
            self.run()
        assert self.tier.serves

    @precondition(lambda self: self.tier.session)
    @rule(weights=st.sampled_from(WEIGHTS))
    def write_while_the_system_refuses_threads(self, weights):
        self.write(weights, range(NUM_RANKS))
        self.tier.is_refused = True
        for _ in range(3):
            self.run()
        self.tier.is_refused = False
        self.share_again()

    @precondition(lambda self: self.tier.session)
    @rule()
    def server_flushes_again(self):
        self.tier.session.can_flush = True

    @precondition(lambda self: not any(watch.touched for watch in self.watches))
    @rule()
    def looks_up(self):
        self.check()

    def check(self):
        """Checks that the tier uses the key space of the engine's weights, and that the caches hold
        only blocks of these weights. Checks nothing while the tier neither stores nor looks up, or
        between a write of weights and the next step, which notices it."""
        if not self.tier.serves or any(watch.touched for watch in self.watches):
            return
        now = self.watches[0].weights
        assert self.weights_of_space() == now, "loaded under other weights"
        assert self.cached <= {now}, "blocks of other weights are cached"

    def weights_of_space(self):
        return self.identities[self.tier.space.weights_identity]


TestWeights = WeightsMachine.TestCase


def begun(**settings):
    one = WeightsMachine()
    one.start(**settings)
    return one


def test_owed_flush_precedes_adopting_other_weights():
    one = begun()
    old = one.tier.session
    old.connected = False
    one.reset(is_device_empty=True, can_flush=False)
    one.write(1, range(NUM_RANKS))
    for _ in range(4):
        one.run()
    assert one.tier.session is old and not one.tier.serves
    old.connected = old.can_flush = True
    one.run()
    assert one.tier.session is old and one.side._reset.under_way, "the flush is sent"
    one.run()
    assert not one.side._reset.under_way
    one.run()
    assert one.tier.session is not old and one.weights_of_space() == 1
    one.teardown()


def test_reset_before_handshakes_is_made_good():
    """In a MultiConnector the scheduler side learns its engine's key space only in the first step,
    from the ranks' handshakes. Resets the cache before that. The reset must be carried out after
    the handshakes, before the tier serves lookups."""
    one = begun(is_reset=True)
    assert one.side._reset.under_way and not one.tier.serves
    for _ in range(3):
        one.run()
    assert not one.side._reset.under_way and one.tier.serves
    one.teardown()


def test_check_finds_blocks_before_an_unnoticed_write():
    """A reset leaves blocks on the device. Then the weights change, and no rank notices it. But
    after the reset the ranks check their weights: they are not those of the blocks, so the tier
    must not serve lookups."""
    one = begun()
    one.run()
    one.reset(is_device_empty=False, can_flush=True)
    one.write(1, ())
    for _ in range(4):
        one.run()
    one.check()
    one.teardown()


def test_repeated_check_before_computing_finds_nothing_old():
    one = begun()
    one.run()
    one.reset(is_device_empty=True, can_flush=True)
    one.write(1, range(NUM_RANKS))
    assert one.tier.makes_wait()
    one.step(0, is_lost=True)
    for _ in range(3):
        one.run()
    assert one.tier.serves
    one.teardown()


def test_write_after_ranks_answer_voids_it():
    """After a reset, ranks are asked for their weights. The next step is planned before their
    answers have arrived (asynchronous scheduling), and the weights change in between. The answers
    describe the old weights, so they must not count."""
    one, idle = begun(), SimpleNamespace(total_num_scheduled_tokens=0)
    one.patch.setattr(rekeying, "ASK_AGAIN_S", 60.0)
    one.run()
    one.reset(is_device_empty=True, can_flush=True)
    assert one.tier.makes_wait()
    reports = []
    for weights in (0, 1):
        one.side.begin_step(idle)
        if weights:
            one.write(weights, {0})
        for rank in one.ranks:
            rank.obey(one.side.order)
        reports.append(joined(one.connectors))
    for report in reports:
        one.side.update(report, ())
    one.side.begin_step(idle)
    assert not one.tier.serves
    for _ in range(3):
        one.run()
    assert one.tier.serves and one.weights_of_space() == 1
    one.teardown()


def test_ranks_with_unreadable_weights_share_nothing():
    """The ranks can't read their weights, so they would not notice a change. A reset deletes the
    blocks in the server, but blocks stay on the device, perhaps from other weights. The tier must
    not serve lookups any more."""
    one = begun()
    for rank in one.ranks:
        rank._watch = None
    one.run()
    one.reset(is_device_empty=False, can_flush=True)
    for _ in range(4):
        one.run()
    assert not one.tier.serves
    one.teardown()


@pytest.mark.parametrize(("name", "is_in_doubt"), [("", True), ("mine", False)])
def test_weights_older_than_files_doubt_their_name(monkeypatch, name, is_in_doubt):
    for used in ("check_reuse", "cache_groups", "packing", "rank_factors"):
        monkeypatch.setattr(worker, used, lambda *_: "rows")
    monkeypatch.setattr(worker.model_weights, "weights_may_be_older", lambda _: True)
    monkeypatch.setattr(worker, "watch_callers", lambda: None)
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0))
    config = ConnectorConfig(weights_identity=name)
    stats = HotKVStats()
    edge = CallbackEdge(CallbackClock("test", "engine"), stats.add)
    side = worker.DoorWorker(vllm_config, None, None, config, edge, stats, is_child=False)
    side.register({"layer": torch.empty(1)})
    assert side.handshake() == PageFormat(0, "cpu/rows", "", is_in_doubt, "rows")
    assert not side.report(None).callback_errors
    side.before_step(None)
    assert [side.report(None).callback_errors for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("media", ["named", "counted", "old", "new"])
@pytest.mark.parametrize("has_adapter", [False, True])
@pytest.mark.parametrize("has_media", [False, True])
def test_requests_beyond_vllms_hashes_are_left_out(monkeypatch, media, has_adapter, has_media):
    """Sends requests whose block hashes do not cover everything that decides their KV. vLLM hashes
    an adapter only by its path. Media may be hashed by a counter, or may have been encoded with old
    weights. Token id 0 may stand for an embedding. The connector must leave out these requests, and
    no others.

    media: how the engine's media are hashed ("named": by content; "counted": by a counter) or
        encoded ("old": with old weights; "new": with the current ones).
    has_adapter, has_media: whether the request has an adapter, and media.
    """
    side, tier = made(monkeypatch)
    side._counts_media = media == "counted"
    mixed = request_of("m", prompt_token_ids=[0, 5], prompt_is_token_ids=[True, False])
    assert side._is_excluded(mixed)
    request = request_of(
        "r",
        lora_request="adapter" if has_adapter else None,
        mm_features=("picture",) if has_media else (),
    )
    side.arrived(request)
    if media in ("old", "new"):
        side.begin_step(SimpleNamespace(total_num_scheduled_tokens=1))
        monkeypatch.setattr(scheduler.checks, "is_pausing", lambda: media == "new")
        side.reset(True)
        side._weights.ask(0.0)
        side._adopt("other")
    is_left_out = has_adapter or (has_media and media in ("counted", "old"))
    assert side._is_excluded(request) == is_left_out
    assert tier.told == {"r": is_left_out}


def test_media_of_a_later_turn_ends_sharing(monkeypatch):
    side, tier = made(monkeypatch)
    side._counts_media = True
    session = request_of("s", num_computed_tokens=0, mm_features=[])
    side.arrived(session)
    side.got_blocks(session, blocks([1, 2]), None)
    assert tier.told == {"s": False}
    session.mm_features.append("picture")
    side.got_blocks(session, blocks([1, 2]), None)
    assert tier.told == {"s": True} and not side.edge.broken


def test_reset_of_device_in_use_excludes_live(monkeypatch):
    side, tier = made(monkeypatch)
    side.arrived(request_of("r"))
    assert tier.told == {"r": False}
    side.reset(is_device_empty=False)
    assert tier.told == {"r": True} and not tier.may_repeat
    side.reset(is_device_empty=True)
    assert tier.may_repeat


@pytest.mark.parametrize("in_doubt", [False, True])
@pytest.mark.parametrize("name", ["", "mine"])
def test_files_changing_during_warm_up_disable_hotkv(monkeypatch, name, in_doubt):
    """The weights files may have changed while the engine started, so it is in doubt which weights
    it has, and the engine must not use hotkv. It may use hotkv in two cases: the user has named the
    weights (`weights_identity`), or the ranks doubted the files themselves and identified the
    weights by their content in memory."""
    side, tier = made(monkeypatch)
    tier.space, side.wants_formats = None, True
    side._config = ConnectorConfig(weights_identity=name)
    monkeypatch.setattr(scheduler.model_weights, "weights_may_be_older", lambda _: True)
    side.connect([PageFormat(rank, "page", weights_in_doubt=in_doubt) for rank in range(NUM_RANKS)])
    assert (tier.space is not None) == (in_doubt or name == "mine")


def test_a_tier_begins_once_files_are_read(monkeypatch):
    """The ranks may have written weights since they described themselves, so they are asked first
    which weights they have."""
    side, tier = made(monkeypatch)
    side._reading, tier.space, side.wants_formats = Future(), None, True
    side._space = side._reports = side._reset = None
    monkeypatch.setattr(scheduler, "READ_WAIT_S", 0.0)
    side.connect([PageFormat(rank, "page") for rank in range(NUM_RANKS)])
    for _ in range(3):
        side.begin_step(SimpleNamespace(total_num_scheduled_tokens=1))
        assert tier.space is None and not side.wants_steps()
    side.reset(is_device_empty=True)
    side._reading.set_result("files")
    assert side.wants_steps(), "a flush is owed"
    side.arrived(request_of("r"))
    assert tier.space is not None and tier.is_held and side._weights.under_way
    assert not side.edge.broken


def test_unreadable_files_leave_the_tier_off(monkeypatch):
    side, tier = made(monkeypatch)
    side._reading, tier.space, side.wants_formats = Future(), None, True
    side._space = side._reports = side._reset = None
    side._reading.set_exception(OSError("gone"))
    side.connect([PageFormat(rank, "page") for rank in range(NUM_RANKS)])
    side.begin_step(SimpleNamespace(total_num_scheduled_tokens=1))
    assert tier.space is None and not side.edge.broken


@pytest.mark.parametrize("formats", [1, 3])
def test_missing_or_disabled_ranks_disable_the_engine(monkeypatch, formats):
    side, tier = made(monkeypatch)
    tier.space, side.wants_formats = None, True
    said = [PageFormat(rank, "page", why_off="no" * (rank == 2)) for rank in range(formats)]
    side.connect(said)
    assert tier.space is None


@pytest.mark.parametrize(
    ("callback", "arguments"),
    [
        ("connect", (None,)),
        ("arrived", (SimpleNamespace(request_id="r"),)),
        ("matched", (None, 0, 0)),
        ("allocated", (None, 0)),
        ("got_blocks", (None, None, None)),
        ("tell_written", (None, None)),
        ("load_failed", ({1}, None)),
        ("leave_out_holes", (None, None)),
        ("planned", (None, None)),
        ("stop_at_computed", (None, None)),
        ("finished", (None,)),
        ("begin_step", (None,)),
        ("update", (None, ())),
    ],
)
def test_broken_callback_is_counted_and_never_raises(monkeypatch, callback, arguments):
    side, tier = made(monkeypatch)
    side.wants_formats = callback == "connect"
    getattr(side, callback)(*arguments)
    assert side.edge.broken == {f"door.{callback}"}
    if callback not in ("connect", "arrived", "matched", "allocated", "finished"):
        assert not tier.serves, "nothing is shared before the ranks or a reset have settled it"
    assert tier.told == ({"r": True} if callback == "arrived" else {})


def test_a_reset_that_breaks_holds_the_tier(monkeypatch):
    side, tier = made(monkeypatch)
    monkeypatch.setattr(side._weights, "suspect", None)
    assert side.reset(is_device_empty=True) is False
    assert side.edge.broken == {"door.reset"}
    # The reset could not delete the blocks in the server (flush). Each step must try again, and
    # until then the tier must not serve lookups.
    for _ in range(3):
        assert not tier.serves
        side.begin_step(SimpleNamespace(total_num_scheduled_tokens=0))
    assert not tier.serves and not side._reset.under_way
    monkeypatch.setattr(scheduler.checks, "is_pausing", lambda: True)
    assert side.reset(is_device_empty=True), "a pause would fail with it"


def test_after_early_reset_requests_wait_for_ranks(monkeypatch):
    _, tier = made(monkeypatch, is_reset=True)
    assert tier.makes_wait()
    tier.session.connected = False
    assert not tier.makes_wait()


def test_another_connectors_first_loads_are_not_stored(monkeypatch):
    """Another connector loads KV for request a; with sparse decode such KV may be inexact. The
    request must not store blocks, and neither may a later request b that hits these blocks on the
    device."""
    side, _ = made(monkeypatch)
    monkeypatch.setattr(scheduler, "sparse_rows", lambda *_: SparseRows())
    for name, own_tokens, fresh in (("a", 0, {1, 2}), ("b", 16, {2})):
        monkeypatch.setattr(scheduler.steps, "fresh_block_ids", lambda *_, fresh=fresh: fresh)
        status = SimpleNamespace(max_offload_tokens=None)
        side.matched(SimpleNamespace(request_id=name, resumable=False), own_tokens, 0)
        side.allocated(SimpleNamespace(request_id=name), 0)
        side.tell_written(admission(name, 16, 16), SimpleNamespace(_req_status={name: status}))
        assert not side.edge.broken and status.max_offload_tokens == 0


@pytest.mark.parametrize("kind", ["asynchronous", "synchronous", "aborted"])
def test_server_learns_of_loads_no_rank_reports(monkeypatch, kind):
    """The server must be told the end of each load, or it will subtract the load's hits from its
    statistics when the connection closes. But vLLM 0.33 does not report the end of a synchronous
    load, for which its step waits, and a load may outlive its request. The scheduler side must
    report the end in both cases."""
    side, tier = made(monkeypatch)
    monkeypatch.setattr(tier, "first_loaded", lambda *_: 0)
    loads = []
    tier.session.report_requests = lambda *said: loads.extend(said[3])
    sizes = {"num_prompt_tokens": 32, "block_hashes": (), "num_computed_tokens": 0}
    request = request_of("r", resumable=False, skip_reading_prefix_cache=False, **sizes)
    side.arrived(request)
    side.matched(request, 0, 16)
    side.allocated(request, 16)
    job = SimpleNamespace(req_id="r", sync=kind == "synchronous")
    side.end_step(SimpleNamespace(load_jobs={1: job}))
    if kind == "aborted":
        side.finished(request)
    side.begin_step(SimpleNamespace(total_num_scheduled_tokens=0))
    assert [one.failed for one in loads] == {"synchronous": [False], "aborted": [True]}.get(
        kind, []
    )
    # Reports two ends of loads for this request. If the load above is asynchronous, the first is
    # its end. All others belong to loads of another connector, or from vLLM's CPU tier only, so the
    # server must not be told of them.
    for _ in range(2):
        side.update(DoorReport(), {"r"})
    side.begin_step(SimpleNamespace(total_num_scheduled_tokens=0))
    assert len(loads) == 1 and not side.edge.broken


@pytest.mark.parametrize(
    ("first", "device_hit_tokens", "loaded_tokens"), [(None, 16, 0), (0, 16, 32), (32, 16, 16)]
)
def test_hit_counts_from_the_servers_first_chunk(
    monkeypatch, first, device_hit_tokens, loaded_tokens
):
    """A hit ends after 48 tokens. The tokens from `first` on must count as loaded from the server,
    except those that the device had.

    first: where the first chunk begins that came from the server; None if all chunks came from
        vLLM's CPU tier.
    """
    side, tier = made(monkeypatch)
    monkeypatch.setattr(tier, "first_loaded", lambda *_: first)
    side.arrived(request := request_of("r"))
    found = side._loaded_tokens(request, device_hit_tokens, 48 - device_hit_tokens)
    assert found == loaded_tokens


def test_state_of_a_reassigned_block_is_not_stored(monkeypatch):
    """vLLM offers recurrent states to store, as (group, block, tokens). This step may have
    overwritten blocks 1 and 3. A state in one of them may be stored only if this step itself wrote
    it there for this request, or if the state's tokens end within a block."""
    side, _ = made(monkeypatch)
    monkeypatch.setattr(scheduler, "sparse_rows", lambda *_: None)
    monkeypatch.setattr(scheduler.steps, "fresh_block_ids", lambda *_: {1, 3})
    step = admission("a", 0, 16)
    offers = [(0, 1, 16), (0, 3, 16), (0, 2, 16), (0, 3, 8), (0, 2, 24)]
    step.kv_connector_block_state.boundary_state_offloads["a"] = offers
    status = SimpleNamespace(max_offload_tokens=16)
    side.tell_written(step, SimpleNamespace(_req_status={"a": status}))
    assert offers == [(0, 1, 16), (0, 2, 16), (0, 3, 8)] and not side.edge.broken

"""A `HotKVOffloadingConnector`'s weights change in place. Blocks are stored and found only under
the weights that computed them.

Scheduler side and ranks are real, tier and session doubles.
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
from hotkv_vllm.stats import CallbackClock, HotKVStats
from tests.offloading.rig import scheduler_side
from tests.vllm.changing_weights import FakeWatch
from tests.vllm.desks import blocks
from tests.vllm.parts import admission

NUM_RANKS = 2
WEIGHTS = range(3)
"""Engines begin with 0."""


def _identity(weights):
    digests = "\0".join([f"digest of {weights}"] * NUM_RANKS)
    return f"updated:{hashlib.sha256(digests.encode()).hexdigest()}"


class Session:
    connected = True
    can_flush = True

    def flush(self):
        answer: Future[Flushed] = Future()
        answer.set_result(Flushed(0)) if self.can_flush else answer.set_exception(OSError("no"))
        return answer

    def report_requests(self, *_):
        """Reports are not checked."""


class Tier:
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
    """Only the parts that report; rank 0 reports a job of vLLM's."""
    one = object.__new__(HotKVOffloadingConnector)
    ended = None if number else OffloadingWorkerMetadata({7: 1})
    one.connector_worker = SimpleNamespace(build_connector_worker_meta=lambda: ended)
    one._connector_metadata = None

    def report(_):
        return DoorRankReport(weights=weights.take_report(), callback_errors=number)

    one._door_worker = SimpleNamespace(report=report, report_ids=report_ids(number))
    return one


def joined(ranks):
    """Joined as vLLM aggregates them."""
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
    """is_reset: a reset and a step come before the handshakes.
    is_refused: no thread can start, so no session opens.
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
    """Else the request would compute the prompt itself."""
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
    """cached: weights of blocks on the device or in the primary tier.
    computed: weights of blocks that wait to be stored.
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
        """Weights by identity."""

    @initialize(is_reset=st.booleans(), is_refused=st.booleans())
    def start(self, is_reset=False, is_refused=False):
        self.side, self.tier = made(self.patch, is_reset=is_reset, is_refused=is_refused)

    def teardown(self):
        self.patch.undo()

    @rule()
    def the_system_has_threads_again(self):
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
            # With this report vLLM counts the previous step's blocks as stored.
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
        # Empties the primary tier and drops stores that have not begun.
        self.computed = None
        if is_device_empty:
            self.cached.clear()
        assert not self.tier.serves or can_flush

    @precondition(lambda self: self.tier.session)
    @rule(weights=st.sampled_from(WEIGHTS))
    def write_after_a_lost_check(self, weights):
        """The ranks' first answer gets lost, and weights are written before the second."""
        self.reset(is_device_empty=True, can_flush=True)
        self.run(is_lost=True)
        self.write(weights, range(NUM_RANKS))
        self.run()

    @precondition(lambda self: self.tier.session)
    @rule(weights=st.sampled_from(WEIGHTS))
    def share_again(self, weights=0):
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
        """Checks nothing between a write and the step that notices it."""
        if not self.tier.serves or any(watch.touched for watch in self.watches):
            return
        now = self.watches[0].weights
        assert self.weights_of_space() == now, "loaded under other weights"
        assert self.cached <= {now}, "blocks of other weights are cached"

    def weights_of_space(self):
        return self.identities[self.tier.space.weights_identity]


TestWeights = WeightsMachine.TestCase


def begun():
    one = WeightsMachine()
    one.start()
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


def test_write_after_ranks_answer_voids_it():
    """Asynchronous scheduling: the next step is planned before the answers arrive."""
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
    """A reset leaves blocks on the device."""
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
    edge = CallbackEdge(CallbackClock("test"), stats.add)
    side = worker.DoorWorker(vllm_config, None, None, config, edge, stats, is_child=False)
    side.register({"layer": torch.empty(1)})
    assert side.handshake() == PageFormat(0, "cpu/rows", "", is_in_doubt, "rows")
    assert not side.report(None).callback_errors
    side.before_step(None)
    assert [side.report(None).callback_errors for _ in range(2)] == [1, 0]


@pytest.mark.parametrize(
    ("media", "has_adapter", "has_media"),
    [
        ("named", False, True),
        ("named", True, False),
        ("counted", False, True),
        ("counted", False, False),
        ("old", False, True),
        ("new", False, True),
    ],
)
def test_requests_beyond_vllms_hashes_are_left_out(monkeypatch, media, has_adapter, has_media):
    """vLLM hashes an adapter by its path only; embeddings show as token id 0.

    media: hashed by content ("named") or by a counter; encoded by "old" or "new" weights.
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
    """It stays on if the user named the weights, or the ranks identified them in memory."""
    side, tier = made(monkeypatch)
    tier.space, side.wants_formats = None, True
    side._config = ConnectorConfig(weights_identity=name)
    monkeypatch.setattr(scheduler.model_weights, "weights_may_be_older", lambda _: True)
    side.connect([PageFormat(rank, "page", weights_in_doubt=in_doubt) for rank in range(NUM_RANKS)])
    assert (tier.space is not None) == (in_doubt or name == "mine")


def test_a_tier_begins_once_files_are_read(monkeypatch):
    """The ranks may have written since the handshake, so they are asked first."""
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
    for _ in range(3):
        assert not tier.serves
        side.begin_step(SimpleNamespace(total_num_scheduled_tokens=0))
    assert not tier.serves and not side._reset.under_way
    monkeypatch.setattr(scheduler.checks, "is_pausing", lambda: True)
    assert side.reset(is_device_empty=True), "a pause would fail with it"


def test_another_connectors_first_loads_are_not_stored(monkeypatch):
    """Such KV may be inexact."""
    side, _ = made(monkeypatch)
    monkeypatch.setattr(scheduler, "inexact_requests", lambda *_: ())
    for name, own_tokens, fresh in (("a", 0, {1, 2}), ("b", 16, {2})):
        monkeypatch.setattr(scheduler.steps, "fresh_block_ids", lambda *_, fresh=fresh: fresh)
        status = SimpleNamespace(max_offload_tokens=None)
        side.matched(SimpleNamespace(request_id=name, resumable=False), own_tokens, 0)
        side.allocated(SimpleNamespace(request_id=name), 0)
        side.tell_written(admission(name, 16, 16), SimpleNamespace(_req_status={name: status}))
        assert not side.edge.broken and status.max_offload_tokens == 0


@pytest.mark.parametrize("kind", ["asynchronous", "synchronous", "aborted"])
def test_server_learns_of_loads_no_rank_reports(monkeypatch, kind):
    """vLLM 0.33 reports no synchronous loads, and a load may outlive its request. Without an end
    the server subtracts the hits."""
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
    # The first may be the load's end, the others are not of the server.
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
    """first: begin of the server's first chunk; None: it has none."""
    side, tier = made(monkeypatch)
    monkeypatch.setattr(tier, "first_loaded", lambda *_: first)
    side.arrived(request := request_of("r"))
    found = side._loaded_tokens(request, device_hit_tokens, 48 - device_hit_tokens)
    assert found == loaded_tokens


def test_state_of_a_reassigned_block_is_not_stored(monkeypatch):
    """The step may have overwritten blocks 1 and 3."""
    side, _ = made(monkeypatch)
    monkeypatch.setattr(scheduler, "inexact_requests", lambda *_: None)
    monkeypatch.setattr(scheduler.steps, "fresh_block_ids", lambda *_: {1, 3})
    step = admission("a", 0, 16)
    offers = [(0, 1, 16), (0, 3, 16), (0, 2, 16), (0, 3, 8), (0, 2, 24)]
    step.kv_connector_block_state.boundary_state_offloads["a"] = offers
    status = SimpleNamespace(max_offload_tokens=16)
    side.tell_written(step, SimpleNamespace(_req_status={"a": status}))
    assert offers == [(0, 1, 16), (0, 2, 16), (0, 3, 8)] and not side.edge.broken

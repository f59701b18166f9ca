"""After weights have changed, scheduler side and ranks agree on a new key space."""

import contextlib
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hotkv_client.types import Role
from hotkv_vllm import link
from hotkv_vllm.compat import checks, model_weights
from hotkv_vllm.identity.rekeying import ASK_AGAIN_S, RankWeights, Rekeying
from hotkv_vllm.scheduler import sharing
from tests.doubles.fake import FakeServer
from tests.vllm.changing_weights import FakeWatch, load
from tests.vllm.harness import prompt
from tests.vllm.other_connectors import beside, our_connector
from tests.vllm.specs import hybrid_model

ORIGINAL = "files:abc"
PROMPT, OTHER = prompt(1, 200), prompt(2, 40)


class Machine(RuleBasedStateMachine):
    """Ranks obey the scheduler's `Rekeying`; their reports come at the step's end or are lost."""

    @initialize(
        num_ranks=st.integers(1, 3),
        unseen=st.booleans(),
        in_doubt=st.booleans(),
        late=st.booleans(),
    )
    def start(self, num_ranks: int, unseen: bool, in_doubt: bool, late: bool = False) -> None:
        """unseen: no rank notices writes.
        in_doubt: a rank's weights may not be those of the files.
        late: steps came before the handshakes.
        """
        self.now_s = 0.0
        self.watches = [FakeWatch() for _ in range(num_ranks)]
        self.unseen, self.in_doubt = unseen, in_doubt
        # One rank in doubt is enough.
        self.ranks = [RankWeights(None if unseen else watch) for watch in self.watches]
        for number, rank in enumerate(self.ranks, 1):
            rank.begin(ORIGINAL, in_doubt and number == num_ranks)
        self.scheduler = Rekeying(num_ranks)
        self.encoded: set[tuple[int, ...]] = set()
        """Weights of vLLM's cached encodings."""
        if late:
            self.scheduler.is_fresh = False
            self.encoded.add(tuple(watch.weights for watch in self.watches))
            if in_doubt:
                self.watches[-1].write(1, quietly=True)
        self.scheduler.begin(ORIGINAL, in_doubt)
        self.under: dict[str, Any] = {
            ORIGINAL: None if in_doubt else tuple(watch.weights for watch in self.watches)
        }
        """Weights in use when a block was stored under an identity."""
        self.on_device: set[tuple[int, ...]] = set()
        """Weights of the device's blocks that may be stored."""

    @rule(weights=st.integers(0, 2))
    def write(self, weights: int) -> None:
        if not self.unseen:
            for watch in self.watches:
                watch.write(weights)

    @rule(weights=st.integers(0, 2), lost=st.booleans())
    def write_for_a_step(self, weights: int, lost: bool) -> None:
        before = [watch.weights for watch in self.watches]
        self.write(weights)
        self.step(lost)
        if not self.unseen:
            for watch, old in zip(self.watches, before, strict=True):
                watch.write(old)

    @rule(weights=st.integers(0, 2))
    def write_past_everything_and_reset(self, weights: int) -> None:
        for watch in self.watches:
            watch.write(weights, quietly=True)
        self.scheduler.ask(self.now_s)

    @rule()
    def reset(self) -> None:
        self.scheduler.ask(self.now_s)

    @rule(in_doubt=st.booleans())
    def wake_up(self, in_doubt: bool) -> None:
        self.scheduler.begin(self.scheduler.identity, in_doubt)

    @rule(drops_media=st.booleans())
    def pause(self, drops_media: bool = True) -> None:
        self.scheduler.suspect(drops_media)
        if drops_media:
            self.encoded.clear()

    @rule(weights=st.integers(0, 2))
    def pause_and_write_past_everything(self, weights: int) -> None:
        self.scheduler.suspect()
        self.step(runs=False)
        for watch in self.watches:
            watch.write(weights, quietly=True)

    @rule()
    def arrive(self) -> None:
        assert self.scheduler.waits(self.now_s) <= self.scheduler.under_way

    @rule(lost=st.booleans(), runs=st.booleans())
    def step(self, lost: bool = False, runs: bool = True) -> None:
        self.now_s += 1.0
        settled = self.scheduler.step(runs, self.now_s)
        if settled is not None:
            if settled != self.scheduler.identity or self.scheduler.were_written:
                self.on_device.clear()
            self.scheduler.adopt(settled)
        for rank in self.ranks:
            rank.obey(self.scheduler.order())
        if runs:
            self.scheduler.is_fresh = False
            self.on_device.add(tuple(watch.weights for watch in self.watches))
            self.encoded.add(tuple(watch.weights for watch in self.watches))
        self.use()
        reports = {
            number: report
            for number, rank in enumerate(self.ranks)
            if (report := rank.take_report()) is not None
        }
        if not lost:
            self.scheduler.reported(reports, self.now_s)

    def use(self) -> None:
        """All have one identity, which always stood for the same weights. Not while any rank
        holds."""
        if self.scheduler.under_way or any(rank.held for rank in self.ranks):
            return
        assert {rank.identity for rank in self.ranks} == {self.scheduler.identity}
        weights = tuple(watch.weights for watch in self.watches)
        assert self.under.setdefault(self.scheduler.identity, weights) == weights, (
            "one identity for two sets of weights"
        )
        assert self.on_device <= {weights}, "KV of other weights is stored under this identity"
        assert self.scheduler.media_are_old or self.encoded <= {weights}, "old encodings are used"

    @invariant()
    def ranks_hold_while_the_scheduler_asks(self) -> None:
        if (
            hasattr(self, "ranks")
            and not self.scheduler.under_way
            and not any(rank.held for rank in self.ranks)
        ):
            assert {rank.identity for rank in self.ranks} == {self.scheduler.identity}

    def teardown(self) -> None:
        if hasattr(self, "ranks"):
            for _ in range(2 * int(ASK_AGAIN_S) + 6):
                self.step()
            assert not self.scheduler.under_way and not any(rank.held for rank in self.ranks)
            originals = all(watch.weights == 0 for watch in self.watches)
            assert self.unseen or (self.scheduler.identity == ORIGINAL) == (
                originals and not self.in_doubt
            )


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


# --------------------------------------------------------------------------------- in the connector


def refuse_threads(server: Any, monkeypatch: pytest.MonkeyPatch, *roles: Role) -> list[Role]:
    """No thread can start. Returns the roles still to fail."""
    refused = list(roles)

    def opened(config: Any, *more: Any) -> Any:
        if config.role in refused:
            refused.remove(config.role)
            raise RuntimeError("can't start new thread")
        return FakeServer.open(server, config, *more)

    monkeypatch.setattr(server, "open", opened)
    monkeypatch.setattr(link, "open_session", opened)
    return refused


def test_start_refused_a_thread_is_retried(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = refuse_threads(server, monkeypatch, Role.SCHEDULER, Role.SCHEDULER)
    one = engine()
    one.generate("a", PROMPT)
    assert one.hit(PROMPT) == 192 and not refused


def test_weights_change_in_pause_before_handshakes(updated: Any) -> None:
    """Handshakes come with the first step."""
    one, two = updated(within=beside("LoadingConnector", ours_first=True)), updated()
    with pausing():
        one.connector.reset_cache()
    load(one, 7, quietly=True)
    one.fill(PROMPT)
    assert two.hit(PROMPT) == 0


@pytest.mark.parametrize("is_late", [False, True])
def test_media_encoded_before_handshakes_are_in_doubt(
    updated: Any, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    monkeypatch.setattr(model_weights, "weights_may_be_older", lambda _: True)
    if is_late:
        monkeypatch.setattr(sharing, "JOINING_PATIENCE_S", 0.0)
    one = updated(within=beside("LoadingConnector", ours_first=True))
    one.fill(PROMPT)
    cache = our_connector(one.connector)._scheduler.cache
    assert cache.finder.groups.leaves_media_out == is_late


@pytest.mark.parametrize("pipelined", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("told", ["noticed", "no thread", "reset", "owed", "paused"])
def test_engines_with_other_weights_never_meet(
    updated: Any, server: Any, monkeypatch: Any, pipelined: bool, told: str
) -> None:
    """told: "noticed": by `load_weights`. "no thread": and at first no session opens. "reset":
    at a later reset. "owed": without a server. "paused": by the pause."""
    one, two, three = (updated(specs=hybrid_model(), pipelined=pipelined) for _ in range(3))
    one.fill(PROMPT)
    assert two.hit(PROMPT) == 192
    one.drop_local()
    if told == "no thread":
        refuse = mock.Mock(side_effect=RuntimeError("can't start new thread"))
        monkeypatch.setattr(threading.Thread, "start", refuse)
        refused = refuse_threads(server, monkeypatch, *[Role.SCHEDULER, Role.WORKER] * 2)
        load(one, 7)
        one.generate("tries again", prompt(6, 10), 9)
        assert not refused
    elif told == "noticed":
        load(one, 7)
    else:
        # A reset or pause must find it.
        if told == "paused":
            with pausing():
                one.connector.reset_cache()
        load(one, 7, quietly=True)
        if told == "owed":
            server.die(empty=False)
        if told in ("reset", "owed"):
            assert one.scheduler.reset_prefix_cache(reset_connector=True)
            two.drop_local()
        if told == "owed":
            one.generate("no server", prompt(6, 10), 3)
            server.come_back()
    assert one.generate("c", PROMPT)[1] == 0
    one.fill(PROMPT)
    assert one.hit(PROMPT) == 192, "it finds what it has computed itself"
    assert two.hit(PROMPT) == (0 if told in ("reset", "owed") else 192)
    # It must hit the first engine's new blocks.
    load(three, 7)
    three.generate("begin", prompt(5, 10), 2)
    assert three.hit(PROMPT) == 192
    load(one, 0)
    assert not any("callback_errors" in engine.counters for engine in (one, two, three))


@contextlib.contextmanager
def pausing() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "is_pausing", lambda: True)
        yield


@pytest.mark.parametrize("is_there", [True, False])
def test_step_awaits_new_session_only_with_server(
    updated: Any, server: Any, monkeypatch: pytest.MonkeyPatch, *, is_there: bool
) -> None:
    one, waits_s = updated(extra={"startup_wait_s": 0.25}), []
    one.generate("a", OTHER, 2)

    def noted(session: Any, wait_s: float, opening_s: float) -> bool:
        waits_s.append(wait_s)
        return False

    monkeypatch.setattr(link, "await_server", noted)
    server.up = is_there
    one.connector._scheduler.sharing.adopt("files:new")
    assert waits_s == [0.25 if is_there else 0.0]


def test_a_reset_by_itself_costs_no_sharing(updated: Any) -> None:
    one, two = updated(), updated()
    one.fill(PROMPT)
    session = two.connector._scheduler.cache.session
    with pausing():
        two.connector.reset_cache()
    assert two.hit(PROMPT) == 192 and two.connector._scheduler.cache.session is session
    assert two.scheduler.reset_prefix_cache(reset_connector=True)
    two.fill(PROMPT)
    assert one.hit(PROMPT) == 192


def test_engines_with_older_files_share_by_memory(
    updated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So these engines identify weights in memory."""
    sure = updated()
    sure.fill(PROMPT)
    monkeypatch.setattr(model_weights, "weights_may_be_older", lambda _: True)
    one, two = updated(), updated()
    assert one.hit(PROMPT) == 0, "it may have other weights than the first engine"
    one.fill(PROMPT)
    assert two.hit(PROMPT) == 192
    assert two.worker.get_handshake_metadata().weights_in_doubt
    assert not two.connector._scheduler.cache.finder.groups.leaves_media_out
    two.fill(prompt(3, 150))
    assert sure.hit(prompt(3, 150)) == 0 and sure.hit(PROMPT) == 192
    named = updated(extra={"weights_identity": "mine"})
    assert not named.worker.get_handshake_metadata().weights_in_doubt, (
        "who names weights answers for the name"
    )


def test_weights_that_change_while_requests_run(updated: Any, server: Any) -> None:
    one, two = updated(blocks=40), updated()
    two.fill(PROMPT)
    server.hold = {"store", "load"}
    one.add("loading", [*PROMPT, 5, 6, 7], 4)
    one.add("running", prompt(3, 150), 60)
    one.steps(6)
    # The harness checks against one set of weights at a time.
    one.abort("running")
    load(one, 7)
    server.resume()
    one.run()
    assert one.counters["failed_loads"] == 1 and one.external.get("loading", 0) == 0
    one.generate("reports", OTHER, 2)
    for engine in (updated(), two):
        engine.hit([*PROMPT, 5, 6, 7])
        engine.hit(prompt(3, 150))
    assert not server.leases


def test_old_weights_leftovers_are_not_stored(updated: Any) -> None:
    """vLLM keeps its prefix cache and its running requests."""
    one = updated()
    one._check = lambda *_: None
    one.generate("a", PROMPT, 4)
    one.add("running", prompt(3, 150), 60)
    one.steps(6)
    load(one, 7)
    one.run()
    one.fill([*PROMPT, *[5] * 60])
    one.fill(OTHER)
    other = updated()
    load(other, 7)
    other.generate("begin", prompt(5, 10), 2)
    for tokens in ([*PROMPT, *[5] * 70], prompt(3, 150) + one.outputs["running"]):
        assert other.hit(tokens) == 0
    assert other.hit([*OTHER, 5]) == 32


def test_media_are_shared_once_encodings_are_dropped(
    updated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM drops encodings only in a pause.

    pauses: None: no reset.
    """
    one = updated()
    one._check = lambda *_: None
    sharing = one.connector._scheduler.sharing
    one.generate("before", OTHER, 2)
    for seed, pauses in enumerate((False, True, True, None, True, False), 7):
        if pauses is not None:
            monkeypatch.setattr(checks, "is_pausing", lambda is_pausing=pauses: is_pausing)
            one.connector.reset_cache()
            sharing.weights.suspect()
        load(one, seed)
        one.fill(OTHER)
        shown = SimpleNamespace(mm_features=["picture"], prompt_is_token_ids=None)
        assert sharing.cache.finder.groups.may_share(shown) == bool(pauses)
    # Off, and on with the handshakes.
    handshakes = sharing._handshakes
    sharing.turn_off()
    sharing.connect(handshakes)
    assert not sharing.cache.finder.groups.may_share(shown)
    # Media may be shared; then the same weights are written.
    monkeypatch.setattr(checks, "is_pausing", lambda: True)
    one.connector.reset_cache()
    assert sharing.cache.finder.groups.may_share(shown)
    one.fill(OTHER)
    load(one, seed)
    one.fill(OTHER)
    assert not sharing.cache.finder.groups.may_share(shown)


@pytest.mark.parametrize("told", ["noticed", "while asked", "reports lost"])
@pytest.mark.parametrize(
    ("pipelined", "in_decode"),
    [(False, False), (True, True)],
    ids=["sync prefill", "async decode"],
)
def test_weights_change_for_a_step_and_return(
    updated: Any, pipelined: bool, told: str, in_decode: bool
) -> None:
    """The original weights return before the ranks check."""
    one = updated(max_tokens_per_step=40, pipelined=pipelined, blocks=128, max_model_len=2048)
    one._check = lambda *_: None
    original = {name: value.clone() for name, value in one.model.state_dict().items()}
    weights = one.connector._scheduler.sharing.weights
    one.generate("warm", prompt(9, 10), 1)
    one.add("a", prompt(1, 150 if in_decode else 1000), 80 if in_decode else 1)
    one.steps(20 if in_decode else 5)
    if told == "while asked":
        weights.ask(time.monotonic())
    with pytest.MonkeyPatch.context() as patch:
        if told == "reports lost":
            patch.setattr(one.worker._worker.rank.weights, "take_report", lambda: None)
        load(one, 7)
        one.step()
        one.model.load_weights(original)
    if told == "reports lost":
        weights.suspect()
    one.run()
    one.generate("reports", OTHER, 2)
    whole = [*prompt(1, 150 if in_decode else 1000), *one.outputs["a"]]
    for _ in range(2):
        # The first of these engines stores what the server lacks.
        other = updated(blocks=128, max_model_len=2048)
        assert other.connector._scheduler.sharing.weights.identity == weights.identity
        assert other.hit(whole) >= 128
        other.generate("reports", OTHER, 2)
    one.drop_local()
    one.fill(prompt(4, 150))
    assert other.hit(prompt(4, 150)) == 128
    assert "callback_errors" not in one.counters

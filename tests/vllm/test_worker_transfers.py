"""Loads and stores of one rank, from the hook that begins them to the report of their end. The real
worker side; the session answers when it is told to, and the device is where the test puts it."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from hotkv.order import NO_ORDER, OrderKind
from hotkv_client.types import BlockResult, BlockRun, LoadRun, TransferResult, TransferStatus
from hotkv_vllm.compat.places import RankPlace
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.hooks import HookEdge
from hotkv_vllm.metadata import HotKVMetadata, LoadJob, StoreJob
from hotkv_vllm.worker import loads, side, stores
from hotkv_vllm.worker.loads import CANCEL_GRACE_S
from hotkv_vllm.worker.side import HotKVWorker
from tests.vllm.parts import ids
from tests.vllm.test_admission import Clock

STORED, WRITTEN = BlockResult.STORED, BlockResult.WRITTEN
FAILED = b""
"""Results of a store that failed as a whole."""


class Session:
    """Stands for the rank's session. `answers`: of each transfer, by its name."""

    def __init__(self) -> None:
        self.connected = True
        self.order_kind, self.order_message = OrderKind.HOST, ""
        self.answers: dict[str, Future[Any]] = {}
        self.sent: dict[str, Any] = {}
        self.cancelled: list[str] = []
        self.ends_cancelled = True
        self.is_closed = False
        self.num_revocations = 0
        self.breaks = False
        self.waited_s: list[float] = []

    def _begin(self, name: str, what: Any) -> Any:
        if self.breaks:
            raise RuntimeError("told to break")
        self.sent[name] = what
        return self.answers.setdefault(name, Future())

    def load(self, name: str, lease_id: str, runs: Any, timeout_s: float, after: Any) -> Any:
        return self._begin(name, (lease_id, runs, timeout_s, after))

    def store(self, name: str, lease_id: str, runs: Any, *more: Any) -> Any:
        return self._begin(name, (lease_id, runs, *more))

    def cancel(self, name: str) -> None:
        self.cancelled.append(name)
        if self.ends_cancelled:
            self.answers[name].set_result(TransferResult(name, TransferStatus.CANCELLED))

    def revoke_stores(self) -> None:
        if self.breaks:
            raise RuntimeError("told to break")
        self.num_revocations += 1

    def wait_connected(self, timeout_s: float) -> bool:
        self.waited_s.append(timeout_s)
        return True

    def close(self) -> None:
        self.is_closed = True

    def end(self, name: str, *results: Any, num_bytes: int = 0, status: Any = None) -> None:
        answer = TransferResult(
            name, status or TransferStatus.DONE, num_bytes, tuple(map(list, results))
        )
        self.answers[name].set_result(answer)


class Device:
    """A device whose marks pass when `is_there` is set."""

    uuid, stream = bytes(16), 1

    def __init__(self) -> None:
        self.is_there = True

    def new_event(self, *, interprocess: bool) -> Any:
        return SimpleNamespace(query=lambda: self.is_there)

    def record(self, event: Any) -> None:
        pass


class Rig:
    """A worker side with a session. `now_s`: time, as the test sets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.now_s = 100.0
        for module in (loads, side, stores):
            monkeypatch.setattr(module.time, "monotonic", lambda: self.now_s)
        vllm_config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(engine_id="engine"),
            parallel_config=SimpleNamespace(rank=0),
        )
        kv = SimpleNamespace(num_blocks=64)
        self.counted: list[str] = []
        edge = HookEdge(Clock(), self.counted.append)
        self.config = ConnectorConfig(**{"flush_timeout_s": 0.0} | settings)
        self.worker = HotKVWorker(vllm_config, kv, self.config, None, edge)
        self.rank: Any = self.worker.rank
        self.session = Session()
        self.device = Device()
        self.rank.marks._device = self.device
        self.rank.session = self.session
        self.opened: list[Session] = []
        monkeypatch.setattr(self.rank, "leave", self._leave)
        monkeypatch.setattr(self.rank, "begin", self._begin)

    def _leave(self) -> bool:
        session, self.rank.session = self.rank.session, None
        if session is not None:
            session.close()
        return session is not None

    def _begin(self) -> None:
        self.rank.session = Session()
        self.opened.append(self.rank.session)

    def step(self, **meta: Any) -> None:
        """All hooks of a step."""
        told = HotKVMetadata(**meta)
        self.worker.before_step(told)
        self.worker.start_loads(told)
        self.worker.save(told)

    def report(self) -> Any:
        report = self.worker.take_report(None)
        return report.stores if report is not None else {}

    def results(self) -> dict[int, list[bytes]]:
        return {store_id: one.results for store_id, one in self.report().items()}

    @property
    def counters(self) -> dict[str, float]:
        return dict(self.worker._report.counters)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda **settings: Rig(monkeypatch, **settings)


def load(name: str = "a", *, timeout_s: float = 10.0, **more: Any) -> LoadJob:
    runs = (LoadRun(0, ids([0, 1]), ids([3, 4])),)
    return LoadJob(name, f"t-{name}", f"l-{name}", runs, timeout_s, **more)


def store(number: int = 1, blocks: int = 2, **more: Any) -> StoreJob:
    runs = (BlockRun(0, [b"h"] * blocks, ids(list(range(blocks)))),) if blocks else ()
    return StoreJob(number, f"w{number}", runs, **more)


REPRESENTED = BlockRun(1, [b"h"], ids([5]))


# ------------------------------------------------------------------------------------------- stores


def test_a_store_is_sent_and_reported_once_when_it_has_ended(rig: Any) -> None:
    one = rig()
    one.step(stores=(store(fence_index=7),))
    lease_id, runs, timeout_s, _, _, fence_index = one.session.sent["w1-k0"]
    assert (lease_id, fence_index, timeout_s) == ("w1", 7, one.config.store_timeout_s)
    assert len(runs) == 1 and not one.report() and len(one.worker.stores) == 1
    one.session.end("w1-k0", [STORED, WRITTEN], num_bytes=30)
    assert one.results() == {1: [bytes([STORED, WRITTEN])]}
    assert not one.worker.stores and not one.report()
    assert one.worker.stores.active == {}


def test_bytes_that_were_stored_are_counted(rig: Any) -> None:
    one = rig()
    one.step(stores=(store(),))
    one.session.end("w1-k0", [STORED, STORED], num_bytes=30)
    assert one.worker.take_report(None).counters == {"store_bytes": 30}


@pytest.mark.parametrize("how", ["cancelled", "refused", "unreadable", "breaks", "absent"])
def test_a_store_that_failed_is_reported_as_failed(rig: Any, how: str) -> None:
    one = rig()
    one.session.breaks, one.session.connected = how == "breaks", how != "absent"
    one.step(stores=(store(),))
    answer = one.session.answers.get("w1-k0")
    if how == "cancelled":
        answer.cancel()
    elif how == "refused":
        answer.set_exception(OSError("no"))
    elif how == "unreadable":
        answer.set_result(None)
    report = one.worker.take_report(None)
    assert report.stores[1].results == [FAILED]
    assert report.counters == ({"hook_errors": 1} if how == "unreadable" else {})
    assert not one.report()


def test_a_store_behind_a_mark_is_sent_when_the_mark_has_passed(rig: Any) -> None:
    one = rig()
    one.device.is_there = False
    one.step(stores=(store(),))
    assert not one.session.sent
    one.step()
    assert not one.session.sent
    one.device.is_there = True
    one.worker.save(HotKVMetadata())
    assert list(one.session.sent) == ["w1-k0"]
    one.session.end("w1-k0", [STORED, STORED])
    one.step()
    assert list(one.results()) == [1]


@pytest.mark.parametrize("why", ["copies", "not trusted"])
def test_stores_that_this_rank_does_not_write_are_reported_at_once(rig: Any, why: str) -> None:
    one = rig()
    if why == "copies":
        one.rank.place = RankPlace(1, 1, 0, False)
    else:
        one.worker.transfers.adapters._unacknowledged = frozenset({1})
    one.step(stores=(store(1), store(2, 3)))
    assert not one.session.sent and not one.worker.stores
    wanted = (
        {1: [bytes([WRITTEN] * 2)], 2: [bytes([WRITTEN] * 3)]}
        if why == "copies"
        else {1: [FAILED], 2: [FAILED]}
    )
    assert one.results() == wanted


def test_a_store_of_nothing_but_what_could_not_be_built_has_ended(rig: Any) -> None:
    one = rig()
    one.step(stores=(store(blocks=0, representations=(REPRESENTED,)),))
    assert not one.session.sent and one.results() == {1: [b""]}


def test_a_hook_that_broke_fails_what_it_has_not_sent(rig: Any) -> None:
    one = rig()
    one.step(stores=(store(1),))
    one.device.is_there = False
    one.step(stores=(store(2),))
    one.worker.stores_broke(HotKVMetadata(stores=(store(1), store(2), store(3))))
    one.device.is_there = True
    one.step()
    assert list(one.session.sent) == ["w1-k0"]
    assert one.results() == {2: [FAILED], 3: [FAILED]}
    one.session.end("w1-k0", [STORED, STORED])
    assert one.results() == {1: [bytes([STORED] * 2)]}


# ---------------------------------------------------------------------------------- representations


class Sparse:
    """Stands for the sparse worker whose representations are shared."""

    def __init__(self) -> None:
        self.built: list[Any] = []
        self.brought: list[Any] = []
        self.breaks = False

    def build(self, group: int, blocks: Any) -> None:
        if self.breaks:
            raise RuntimeError("told to break")
        self.built.append((group, blocks.tolist()))

    def loaded(self, group: int, blocks: Any) -> None:
        self.brought.append((group, blocks.tolist()))


def with_sparse(one: Rig, monkeypatch: pytest.MonkeyPatch) -> Sparse:
    one.rank.shared = sparse = Sparse()
    monkeypatch.setattr(one.rank, "shared_group", lambda index: index + 10)
    return sparse


@pytest.mark.parametrize("how", ["built", "breaks", "absent", "not shared", "none"])
def test_representations_go_with_a_store_if_they_are_built(
    rig: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    one = rig()
    sparse = with_sparse(one, monkeypatch)
    sparse.breaks, one.session.connected = how == "breaks", how != "absent"
    if how == "not shared":
        one.rank.shared = None
    one.step(stores=(store(representations=() if how == "none" else (REPRESENTED,)),))
    assert sparse.built == ([(11, [5])] if how == "built" else [])
    assert one.counters == ({"sparse_faults": 1} if how == "breaks" else {})
    if how != "absent":
        _, runs, *_ = one.session.sent["w1-k0"]
        assert [run.group_index for run in runs] == ([0, 1] if how == "built" else [0])


def test_of_a_store_with_representations_only_blocks_are_reported(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig()
    with_sparse(one, monkeypatch)
    one.step(stores=(store(representations=(REPRESENTED,)),))
    one.session.end("w1-k0", [STORED, STORED], [STORED])
    assert one.results() == {1: [bytes([STORED] * 2)]}


@pytest.mark.parametrize("shared", [True, False])
def test_representations_come_with_a_load_if_somebody_takes_them(
    rig: Any, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    one = rig()
    sparse = with_sparse(one, monkeypatch)
    if not shared:
        one.rank.shared = None
    come = LoadRun(1, ids([0]), ids([3]))
    one.step(loads=(load("a", representations=(come,)), load("b", representations=(come,))))
    _, runs, *_ = one.session.sent["t-a-k0"]
    assert [run.group_index for run in runs] == ([0, 1] if shared else [0])
    one.session.end("t-a-k0", num_bytes=5)
    one.session.end("t-b-k0", status=TransferStatus.FAILED)
    assert one.worker.take_results() == ({"a", "b"}, {"b"})
    assert sparse.brought == ([(11, [3])] if shared else [])
    assert one.counters == {"load_bytes": 5}


# -------------------------------------------------------------------------------------- taking back


def test_a_step_goes_on_at_once_if_the_stores_that_it_awaits_have_ended(rig: Any) -> None:
    one = rig()
    one.step(stores=(store(),))
    one.session.end("w1-k0", [STORED, STORED])
    one.step(flush_stores=(1, 99))
    assert not one.session.cancelled and "flush_s" in one.counters
    assert one.results() == {1: [bytes([STORED] * 2)]}


def test_unknown_stores_are_not_awaited(rig: Any) -> None:
    one = rig()
    one.step(flush_stores=(99,))
    assert "flush_s" not in one.counters


def test_a_store_that_does_not_end_is_taken_back(rig: Any) -> None:
    one = rig()
    one.step(stores=(store(1), store(2)))
    one.step(flush_stores=(1,))
    assert one.session.cancelled == ["w1-k0"]
    assert one.results() == {1: [FAILED]} and list(one.worker.stores.active) == [2]
    assert not one.opened


def test_the_time_that_a_step_waited_is_counted(rig: Any) -> None:
    one = rig()
    one.step(stores=(store(),))
    one.session.answers["w1-k0"] = answer = one.worker.stores.active[1].answer
    answer.add_done_callback(lambda _: setattr(one, "now_s", one.now_s + 3))
    one.step(flush_stores=(1,))
    assert one.counters["flush_s"] == 3


def test_while_the_server_is_slow_no_step_waits_for_it(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig(flush_timeout_s=0.25)
    monkeypatch.setattr(stores, "_all_done", noted := NotedWaits(stores._all_done))
    waits = noted.waits
    for number in (1, 2):
        one.step(stores=(store(number),))
        one.step(flush_stores=(number,))
    # Each time a moment for the store to end, none when it is known to be slow, then its deadline.
    assert waits[0] == 0.25 and waits[2] == 0.0
    one.report()
    one.step(stores=(store(3),))
    one.session.end("w3-k0", [STORED, STORED])
    one.report()
    one.step(stores=(store(4),))
    waits.clear()
    one.step(flush_stores=(4,))
    assert waits[0] == 0.25


def test_a_store_that_was_not_sent_is_taken_back_without_the_server(rig: Any) -> None:
    one = rig()
    one.device.is_there = False
    one.step(stores=(store(),))
    one.step(flush_stores=(1,))
    one.device.is_there = True
    one.step()
    assert not one.session.sent and not one.session.cancelled and one.results() == {1: [FAILED]}


@pytest.mark.parametrize("reason", ["fenced", "device behind"])
def test_stores_that_have_not_read_or_are_revoked_are_taken_back_without_waiting(
    rig: Any, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    one = rig(flush_timeout_s=0.25)
    monkeypatch.setattr(stores, "_all_done", noted := NotedWaits(stores._all_done))
    if reason == "fenced":
        one.rank.fence = object()
    one.step(stores=(store(),))
    if reason == "device behind":
        one.worker.stores.active[1].after.has_passed = False
        one.device.is_there = False
    one.step(flush_stores=(1,))
    assert one.session.cancelled == ["w1-k0"] and 0.25 not in noted.waits[:1]
    assert one.results() == {1: [FAILED]} and not one.opened


class NotedWaits:
    """Stands for `_all_done`: notes how long each wait may be, and does not wait."""

    def __init__(self, plain: Any) -> None:
        self.plain, self.waits = plain, list[float]()

    def __call__(self, waiting: Any, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return bool(self.plain(waiting, 0.0))


@pytest.mark.parametrize("reason", ["slow", "fenced"])
def test_a_store_that_a_server_does_not_end_takes_the_session(
    rig: Any, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    one = rig()
    monkeypatch.setattr(stores, "_all_done", noted := NotedWaits(stores._all_done))
    one.session.ends_cancelled = False
    one.rank.fence = object() if reason == "fenced" else None
    one.step(stores=(store(1),))
    one.now_s += 1
    one.step(stores=(store(2),))
    one.now_s += 1
    one.step(flush_stores=(1, 2))
    assert one.session.is_closed and len(one.opened) == 1
    assert noted.waits[-1] == one.config.store_timeout_s + stores.FENCE_GRACE_S - 1
    assert one.results() == {1: [FAILED], 2: [FAILED]} and not one.worker.stores
    # Its marks are free again.
    assert len(one.rank.marks._spare) == 2


def test_without_a_session_nothing_is_taken_back(rig: Any) -> None:
    one = rig()
    one.step(stores=(store(),))
    one.rank.session = None
    one.step(flush_stores=(1,))
    assert not one.session.cancelled and not one.opened


@pytest.mark.parametrize("how", ["well", "breaks", "absent"])
def test_a_step_that_was_lost_track_of_takes_everything_back(rig: Any, how: str) -> None:
    one = rig()
    one.step(stores=(store(1),))
    one.device.is_there = False
    one.step(stores=(store(2),))
    one.session.breaks = how == "breaks"
    if how == "absent":
        one.rank.session = None
    one.step(lost_track=True)
    assert one.session.num_revocations == (how == "well")
    assert one.session.is_closed == (how == "breaks") == bool(one.opened)
    assert one.counters == ({"hook_errors": 1} if how == "breaks" else {})
    assert one.results() == {1: [FAILED], 2: [FAILED]} and not one.worker.stores.active
    # Marks come back once.
    assert len(one.rank.marks._spare) == 2 and one.results() == {}


def test_representations_that_can_not_be_forgotten_are_shared_no_more(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig()
    sparse = with_sparse(one, monkeypatch)
    monkeypatch.setattr(one.worker.sparse, "distrust", lambda: True)
    one.step(lost_track=True)
    assert one.rank.shared is sparse
    monkeypatch.setattr(one.worker.sparse, "distrust", lambda: False)
    one.step(lost_track=True)
    assert one.rank.shared is None


def test_changed_weights_begin_another_session(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig(startup_wait_s=0.5)
    one.step(stores=(store(),))
    one.step()
    assert not one.opened
    monkeypatch.setattr(one.rank, "follow", lambda order: True)
    one.step()
    (session,) = one.opened
    assert one.session.is_closed and session.waited_s == [min(0.5, side.RECONNECT_S)]
    assert one.results() == {1: [FAILED]}
    # Without a server there is nothing to wait for.
    session.connected = False
    one.step()
    assert one.opened[-1].waited_s == []


# -------------------------------------------------------------------------------------------- loads


def test_a_load_is_sent_and_reported_once(rig: Any) -> None:
    one = rig()
    one.step(loads=(load(),))
    assert one.session.sent["t-a-k0"][0] == "l-a" and one.session.sent["t-a-k0"][2] == 10.0
    assert one.worker.take_results() == (set(), set())
    one.session.end("t-a-k0", num_bytes=9)
    assert one.worker.take_results() == ({"a"}, set()) and one.counters == {"load_bytes": 9}
    assert one.worker.take_results() == (set(), set()) and not one.worker.loads
    assert len(one.rank.marks._spare) == 1


@pytest.mark.parametrize("how", ["cancelled", "refused", "unreadable", "aborted", "not trusted"])
def test_a_load_that_failed_is_reported_as_failed(rig: Any, how: str) -> None:
    one = rig()
    if how == "not trusted":
        one.worker.transfers.adapters._unacknowledged = frozenset({1})
    one.step(loads=(load(),))
    answer = one.session.answers.get("t-a-k0")
    match how:
        case "cancelled":
            answer.cancel()
        case "refused":
            answer.set_exception(OSError("no"))
        case "unreadable":
            answer.set_result(None)
        case "aborted":
            one.session.end("t-a-k0", status=TransferStatus.FAILED)
        case _:
            assert not one.session.sent
    assert one.worker.take_results() == ({"a"}, {"a"}) and not one.counters


def test_loads_that_were_never_begun_are_reported_as_failed(rig: Any) -> None:
    one = rig()
    one.step(abandoned_loads=("x",))
    assert one.worker.take_results() == ({"x"}, {"x"})
    assert one.worker.take_results() == (set(), set())
    one.step(loads=(load("a"),))
    (job,) = [one.worker.loads._active["a"].job]
    one.worker.loads_broke(HotKVMetadata(loads=(job, load("b")), abandoned_loads=("c",)))
    assert one.worker.take_results() == ({"b", "c"}, {"b", "c"})
    # A load of the same request that is another one has not begun.
    one.worker.loads_broke(HotKVMetadata(loads=(load("a"),)))
    assert one.worker.take_results() == ({"a"}, {"a"})


def test_a_load_behind_a_mark_waits_for_it_and_its_deadline_too(rig: Any) -> None:
    one = rig()
    one.device.is_there = False
    one.step(loads=(load(timeout_s=5.0),))
    one.now_s += 100
    one.worker.take_results()
    assert not one.session.sent
    one.device.is_there = True
    one.worker.take_results()
    assert list(one.session.sent) == ["t-a-k0"]
    one.now_s += 4.9
    one.worker.take_results()
    assert not one.session.cancelled
    one.now_s += 0.1
    one.worker.take_results()
    assert one.session.cancelled == ["t-a-k0"]
    assert one.worker.take_results() == ({"a"}, {"a"})


def test_the_deadline_of_a_load_that_was_sent_runs_from_its_mark(rig: Any) -> None:
    """The server waits for the mark itself: the load is sent before the device is there."""
    one = rig()
    one.step(loads=(load(timeout_s=5.0),))
    active = one.worker.loads._active["a"]
    active.after.has_passed = False
    one.device.is_there = False
    one.now_s += 100
    one.worker.take_results()
    assert active.deadline_s is None
    one.device.is_there = True
    one.worker.take_results()
    assert active.deadline_s == one.now_s + 5.0


def test_a_cancelled_load_is_cancelled_once(rig: Any) -> None:
    one = rig()
    one.session.ends_cancelled = False
    one.step(loads=(load(timeout_s=5.0),))
    one.step(cancel_loads=("a", "unknown"))
    one.step(cancel_loads=("a",))
    one.worker.take_results()
    one.now_s += 50
    one.worker.take_results()
    assert one.session.cancelled == ["t-a-k0"]


def test_a_cancelled_load_that_was_not_sent_is_not_sent_any_more(rig: Any) -> None:
    one = rig()
    one.device.is_there = False
    one.step(loads=(load(),))
    one.step(cancel_loads=("a",))
    one.device.is_there = True
    assert one.worker.take_results() == ({"a"}, {"a"})
    assert not one.session.sent and not one.session.cancelled


def hung(rig: Any) -> Rig:
    """A load that was cancelled and that the server does not end."""
    one: Rig = rig()
    one.session.ends_cancelled = False
    one.step(loads=(load(),), cancel_loads=("a",))
    return one


def test_a_load_that_the_server_does_not_end_is_overdue_after_a_moment(rig: Any) -> None:
    one = hung(rig)
    one.now_s += CANCEL_GRACE_S - 0.1
    assert one.worker.take_report(None) is None
    one.now_s += 0.1
    for _ in range(2):
        assert one.worker.take_report(None).overdue_loads == ("t-a",)
    one.session.end("t-a-k0")
    assert one.worker.take_report(None) is None


def test_a_load_that_goes_well_is_never_overdue(rig: Any) -> None:
    one = rig()
    one.step(loads=(load(),))
    one.now_s += 100
    assert one.worker.take_report(None) is None


def test_a_load_whose_blocks_are_held_fails_before_the_server_ends_it(rig: Any) -> None:
    one = hung(rig)
    one.step(held_loads=("t-a",))
    assert one.worker.take_results() == ({"a"}, {"a"}) and not one.worker.loads
    assert one.worker.take_report(None) is None
    one.session.end("t-a-k0")
    report = one.worker.take_report(None)
    assert report.settled_loads == {"t-a": 1}
    assert len(one.rank.marks._spare) == 1
    # For as long as the scheduler holds them it is told.
    assert one.worker.take_report(None).settled_loads == {"t-a": 1}
    one.step()
    assert one.worker.take_report(None) is None


def test_a_held_load_that_is_over_here_is_reported_as_it_ended(rig: Any) -> None:
    one = rig()
    one.step(loads=(load("a"), load("b")))
    one.session.end("t-a-k0", num_bytes=3)
    one.step(held_loads=("t-a", "t-c"))
    assert one.worker.take_results() == ({"a"}, set())
    assert one.worker.take_report(None).settled_loads == {"t-a": 1, "t-c": 1}


def test_a_load_that_is_held_and_was_not_sent_is_never_sent(rig: Any) -> None:
    one = rig()
    one.device.is_there = False
    one.step(loads=(load("a"), load("b")))
    one.step(held_loads=("t-a",))
    assert one.worker.take_report(None).settled_loads == {"t-a": 1}
    one.device.is_there = True
    one.step()
    assert list(one.session.sent) == ["t-b-k0"]
    assert one.worker.take_results() == ({"a"}, {"a"})


def test_results_that_break_are_taken_as_failures(rig: Any) -> None:
    one = rig()
    one.step(loads=(load("a"), load("b")), abandoned_loads=("x",))
    one.session.end("t-a-k0")
    one.device.is_there = False
    one.step(loads=(load("c"),))
    assert one.worker.take_failed_results() == {"a", "c", "x"}
    assert one.worker.take_failed_results() == set() and len(one.worker.loads) == 1
    one.worker.take_report(None)
    assert len(one.rank.marks._spare) == 1


def test_what_follows_a_load_may_break_and_its_request_is_told(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig()
    one.step(loads=(load(),))
    one.session.end("t-a-k0")
    monkeypatch.setattr(one.worker, "_load_ended", lambda *_: 1 // 0)
    assert one.worker.take_results() == ({"a"}, set())
    assert one.counters == {"hook_errors": 1}


# ------------------------------------------------------------------------------------------ weights


class Weights:
    """Stands for a rank's weights."""

    held = False
    report: Any = None

    def take_report(self) -> Any:
        return self.report

    def obey(self, order: Any) -> bool:
        return False


def test_loads_of_changed_weights_are_void(rig: Any) -> None:
    one = rig()
    one.rank.weights = weights = Weights()
    one.step(loads=(load("a"),))
    assert one.worker.take_results() == (set(), set()) and not one.session.cancelled
    weights.held = True
    one.session.ends_cancelled = False
    one.worker.take_results()
    assert one.session.cancelled == ["t-a-k0"]
    one.session.end("t-a-k0", num_bytes=5)
    assert one.worker.take_results() == ({"a"}, {"a"})


def test_nothing_is_sent_while_weights_are_held(rig: Any) -> None:
    one = rig()
    one.rank.weights = weights = Weights()
    weights.held = True
    one.step(loads=(load(),), stores=(store(),))
    assert not one.session.sent and one.worker.take_results() == ({"a"}, {"a"})
    assert one.results() == {1: [FAILED]}


def test_weights_are_reported_by_rank(rig: Any) -> None:
    one = rig()
    one.rank.weights = weights = Weights()
    assert one.worker.take_report(None) is None
    weights.report = "changed"
    assert one.worker.take_report(None).weights == {0: "changed"}


# ------------------------------------------------------------------------------------------ reports


def test_what_the_scheduler_asks_of_a_step_is_reported(rig: Any) -> None:
    one = rig()
    assert one.worker.take_report(HotKVMetadata()) is None
    report = one.worker.take_report(HotKVMetadata(settles_step=5))
    assert report.settled_step == 5 and report.handshakes == ()
    report = one.worker.take_report(HotKVMetadata(wants_handshake=True))
    assert report.settled_step == 0 and report.handshakes == (one.worker.handshake(),)


def test_links_are_reported_when_they_are_asked_for(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig()
    asked: list[bool] = []
    monkeypatch.setattr(one.rank, "link_report", lambda is_asked: asked.append(is_asked) or {})
    one.step(asks_links=True)
    one.worker.take_report(None)
    one.step()
    one.worker.take_report(None)
    assert asked == [True, False]


def test_a_state_that_can_not_be_read_is_left_out_of_the_report(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig()
    monkeypatch.setattr(one.worker.loads, "overdue", lambda now_s: 1 // 0)
    report = one.worker.take_report(HotKVMetadata(settles_step=5))
    assert report is not None and report.settled_step == 5 and one.counted


# -------------------------------------------------------------------------------------------- sleep


def test_before_a_sleep_all_transfers_are_ended(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig()
    closed: list[bool] = []
    monkeypatch.setattr(one.rank, "shutdown", lambda keeps_fence: closed.append(keeps_fence))
    one.step(loads=(load("a"),), stores=(store(1), store(2)))
    one.session.end("w2-k0", [STORED, STORED])
    one.device.is_there = False
    one.step(stores=(store(3),))
    one.worker.unregister()
    assert one.session.cancelled == ["t-a-k0", "w1-k0"] and closed == [True]
    assert one.worker.take_results() == ({"a"}, {"a"})
    assert one.results() == {1: [FAILED], 2: [bytes([STORED] * 2)], 3: [FAILED]}
    assert "w3-k0" not in one.session.sent and one.worker._is_unregistered


@pytest.mark.parametrize("ends", [True, False])
def test_a_server_that_hangs_does_not_keep_the_engine_awake(
    rig: Any, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    one = rig()
    waits: list[float] = []

    def wait(answers: Any, timeout_s: float) -> Any:
        waits.append(timeout_s)
        left = {answer for answer in answers if not answer.done()}
        return SimpleNamespace(not_done=left)

    monkeypatch.setattr(side, "wait_futures", wait)
    one.session.ends_cancelled = ends
    one.step(loads=(load("a"),), stores=(store(1),))
    one.worker.let_go()
    assert waits == [one.config.store_timeout_s + side.FENCE_GRACE_S]
    assert len(one.worker.stores) == (1 if ends else 0)
    assert one.results() == {1: [FAILED]}
    # A load that a hung server has not ended stays unreported.
    assert one.worker.take_results() == (({"a"}, {"a"}) if ends else (set(), set()))


def test_a_worker_without_a_session_has_nothing_to_let_go(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig()
    one.rank.session = None
    monkeypatch.setattr(one.worker, "_end_transfers", lambda: 1 // 0)
    one.worker.unregister()
    one.worker.let_go()
    assert not one.worker._is_unregistered


def test_memory_is_exported_again_after_a_sleep_and_not_before(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig()
    done: list[str] = []
    monkeypatch.setattr(one.rank, "export", lambda caches: done.append("export") or True)
    monkeypatch.setattr(one.rank, "open", lambda *_: done.append("open"))
    monkeypatch.setattr(one.worker.transfers, "watch_adapters", lambda: done.append("watch"))
    one.worker.restore()
    assert not done
    one.worker.unregister()
    one.worker.restore()
    assert done == ["export", "watch", "open"]
    one.worker.restore()
    assert len(done) == 3
    monkeypatch.setattr(one.rank, "export", lambda caches: False)
    one.worker.register({})
    assert done[3:] == ["open"]


def test_memory_that_was_exported_before_is_let_go_of_first(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig()
    done: list[str] = []
    monkeypatch.setattr(one.rank, "export", lambda caches: done.append("export"))
    monkeypatch.setattr(one.worker, "let_go", lambda: done.append("let go"))
    one.worker.register({})
    one.rank.memory = SimpleNamespace(close=lambda: None)
    one.worker.register({})
    one.rank.memory = None
    assert done == ["export", "let go", "export"] and one.rank.marks.order == NO_ORDER

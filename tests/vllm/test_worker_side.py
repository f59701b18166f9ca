"""What one rank does around its transfers: representations, weights, reports, sleep."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from hotkv_client.types import LoadRun, TransferStatus
from hotkv_proto.order import NO_ORDER
from hotkv_vllm.compat import Unsupported
from hotkv_vllm.identity.adapters import NO_WORK
from hotkv_vllm.metadata import HotKVMetadata
from hotkv_vllm.worker import session, side
from tests.vllm.parts import ids
from tests.vllm.worker_parts import (
    FAILED,
    REPRESENTED,
    STORED,
    load,
    store,
    with_sparse,
)

# ---------------------------------------------------------------------------------- representations


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


# ------------------------------------------------------------------------------------ before a step


def test_transfers_whose_mark_has_passed_are_sent_before_the_next_step(rig: Any) -> None:
    """They need not wait until it has computed."""
    one = rig()
    one.device.is_there = False
    one.step(loads=(load(),), stores=(store(),))
    one.device.is_there = True
    one.worker.before_step(HotKVMetadata())
    assert list(one.session.sent) == ["t-a-k0", "w1-k0"]


def test_adapters_are_told_of_each_step_before_anything_is_sent(rig: Any) -> None:
    one = rig()
    one.rank.adapters._unacknowledged = frozenset({1})
    acknowledged = replace(NO_WORK, acknowledged=frozenset({1}))
    one.step(adapters=acknowledged, stores=(store(),))
    assert list(one.session.sent) == ["w1-k0"]


def test_adapters_are_watched_from_the_first_export_on(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch that has found its manager is kept: it knows what is in use."""
    one = rig()
    found = [SimpleNamespace(is_watching=False), SimpleNamespace(is_watching=True)]
    left = list(found)
    monkeypatch.setattr(session, "watch_adapters", lambda config: left.pop(0))
    before = one.rank.adapters
    monkeypatch.setattr(one.rank, "_export", Mock(side_effect=Unsupported("no")))
    assert not one.rank.export({}) and one.rank.adapters is before
    monkeypatch.setattr(one.rank, "_export", lambda caches: None)
    for watch in (*found, found[1]):
        assert one.rank.export({})
        assert one.rank.adapters is watch


def test_sparse_attention_is_put_in_before_the_session_begins(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig()
    done: list[str] = []
    monkeypatch.setattr(one.rank, "export", lambda caches: done.append("export"))
    monkeypatch.setattr(one.worker.sparse, "install_sparse", lambda caches: done.append("install"))
    monkeypatch.setattr(one.rank, "open", lambda *_: done.append("open"))
    one.worker.register({})
    assert done == ["export", "install", "open"]


def test_an_unregistration_that_broke_leaves_no_session(rig: Any) -> None:
    one = rig()
    one.worker.unregister_broke()
    assert one.session.is_closed and one.rank.session is None


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


def test_a_report_between_steps_says_nothing_and_breaks_nothing(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig()
    asked: list[bool] = []
    monkeypatch.setattr(one.rank, "link_report", lambda is_asked: asked.append(is_asked) or {})
    assert one.worker.take_report(None) is None
    assert asked == [False] and not one.counted and not one.worker.report.edge.broken


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
    one.worker._let_go()
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
    monkeypatch.setattr(one.worker.loads, "make_void", lambda: 1 // 0)
    one.worker.unregister()
    one.worker._let_go()
    assert not one.worker._is_unregistered


def test_memory_is_exported_again_after_a_sleep_and_not_before(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig()
    done: list[str] = []
    monkeypatch.setattr(one.rank, "export", lambda caches: done.append("export") or True)
    monkeypatch.setattr(one.rank, "open", lambda *_: done.append("open"))
    one.worker.restore()
    assert not done
    one.worker.unregister()
    one.worker.restore()
    assert done == ["export", "open"]
    one.worker.restore()
    assert len(done) == 2
    monkeypatch.setattr(one.rank, "export", lambda caches: False)
    one.worker.register({})
    assert done[2:] == ["open"]


def test_memory_that_was_exported_before_is_let_go_of_first(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig()
    done: list[str] = []
    monkeypatch.setattr(one.rank, "export", lambda caches: done.append("export"))
    monkeypatch.setattr(one.worker, "_let_go", lambda: done.append("let go"))
    one.worker.register({})
    one.rank.memory = SimpleNamespace(close=lambda: None)
    one.worker.register({})
    one.rank.memory = None
    assert done == ["export", "let go", "export"] and one.rank.marks.order == NO_ORDER

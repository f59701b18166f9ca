"""A rank's stores, from a callback to the report of the end, and their revocation."""

from typing import Any

import pytest

from hotkv_vllm.compat.checks import RankPlace
from hotkv_vllm.metadata import HotKVMetadata
from hotkv_vllm.worker import rank_stores, side
from tests.vllm.worker_parts import ATTACHED, FAILED, STORED, WRITTEN, store, with_companion


@pytest.mark.parametrize("why", ["copies", "not trusted"])
def test_stores_another_rank_writes_are_reported_immediately(rig: Any, why: str) -> None:
    one = rig()
    if why == "copies":
        one.rank.place = RankPlace(1, 1, 0, False)
    else:
        one.rank.adapters._unacknowledged = frozenset({1})
    one.step(stores=(store(1), store(2, 3)))
    assert not one.session.sent and not one.worker.stores
    wanted = {number: bytes([WRITTEN] * blocks) for number, blocks in ((1, 2), (2, 3))}
    assert one.results() == {
        number: answer if why == "copies" else FAILED for number, answer in wanted.items()
    }


def test_store_of_unmade_attachments_has_ended(rig: Any) -> None:
    one = rig()
    one.step(stores=(store(blocks=0, attached=(ATTACHED,)),))
    assert not one.session.sent and one.results() == {1: b""}


def test_store_behind_mark_is_late_or_revoked(rig: Any) -> None:
    one = rig()
    one.device.is_there = False
    one.step(stores=(store(1), store(2)))
    one.step(flush_stores=(2, 99))
    assert not one.session.sent
    one.device.is_there = True
    one.worker.save(HotKVMetadata())
    assert list(one.session.sent) == ["w1-k0"] and not one.session.cancelled
    one.session.end("w1-k0", [STORED, STORED])
    one.step()
    assert one.results() == {1: bytes([STORED] * 2), 2: FAILED}


class NotedWaits:
    """Notes time limits and does not wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plain, self.waits = rank_stores._all_done, list[float]()
        monkeypatch.setattr(rank_stores, "_all_done", self)

    def __call__(self, waiting: Any, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return bool(self.plain(waiting, 0.0))


def test_the_time_that_a_step_waited_is_counted(rig: Any) -> None:
    one = rig()
    one.step(flush_stores=(99,))
    assert "flush_s" not in one.counters
    one.step(stores=(store(),))
    one.session.answers["w1-k0"] = answer = one.worker.stores.active[1].answer
    answer.add_done_callback(lambda _: setattr(one, "now_s", one.now_s + 3))
    one.step(flush_stores=(1,))
    assert one.counters["flush_s"] == 3


def test_no_step_waits_for_a_slow_server(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, waits = rig(flush_timeout_s=0.25), NotedWaits(monkeypatch).waits
    for number in (1, 2):
        one.step(stores=(store(number),))
        one.step(flush_stores=(number,))
        one.report()
    # The wait was in vain: the server counts as slow.
    assert waits[0] == 0.25 and waits[2] == 0.0
    one.step(stores=(store(3),))
    one.session.end("w3-k0", [STORED, STORED])
    one.report()
    one.step(stores=(store(4),))
    waits.clear()
    one.step(flush_stores=(4,))
    assert waits[0] == 0.25


@pytest.mark.parametrize("reason", ["fenced", "device behind"])
def test_unread_or_revoked_stores_return_without_waiting(
    rig: Any, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    one, waits = rig(flush_timeout_s=0.25), NotedWaits(monkeypatch).waits
    if reason == "fenced":
        one.rank.fence = object()
    one.step(stores=(store(),))
    if reason == "device behind":
        one.worker.stores.active[1].after.has_passed = False
        one.device.is_there = False
    one.step(flush_stores=(1,))
    assert one.session.cancelled == ["w1-k0"] and 0.25 not in waits[:1]
    assert "flush_s" in one.counters
    assert one.results() == {1: FAILED} and not one.opened


@pytest.mark.parametrize("reason", ["slow", "fenced"])
def test_store_the_server_never_ends_takes_session(
    rig: Any, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    one, waits = rig(), NotedWaits(monkeypatch).waits
    one.session.ends_cancelled = False
    one.rank.fence = object() if reason == "fenced" else None
    for number in (1, 2):
        one.step(stores=(store(number),))
        one.now_s += 1
    one.step(flush_stores=(1, 2))
    assert one.session.is_closed and len(one.opened) == 1
    assert waits[-1] == one.config.store_timeout_s + rank_stores.FENCE_GRACE_S - 1
    assert one.results() == {1: FAILED, 2: FAILED} and not one.worker.stores
    # Both marks are free again.
    assert len(one.rank.marks._spare) == 2


@pytest.mark.parametrize("how", ["well", "breaks", "absent"])
def test_lost_step_takes_everything_back(rig: Any, how: str) -> None:
    one = rig()
    one.step(stores=(store(1),))
    one.device.is_there = False
    one.step(stores=(store(2),))
    one.session.breaks = how == "breaks"
    if how == "absent":
        one.rank.session = None
    one.step(lost_track=True)
    assert one.session.num_revocations == (how == "well")
    assert one.session.is_closed == (how == "breaks")
    # The step opens one.
    assert bool(one.opened) == (how != "well")
    assert one.counters == ({"callback_errors": 1} if how == "breaks" else {})
    assert one.results() == {1: FAILED, 2: FAILED} and not one.worker.stores.active
    # Once each.
    assert len(one.rank.marks._spare) == 2 and one.results() == {}


def test_changed_weights_begin_another_session(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig(startup_wait_s=0.5)
    one.step(stores=(store(),))
    one.step()
    assert not one.opened
    monkeypatch.setattr(one.rank, "follow", lambda order: True)
    one.step()
    (session,) = one.opened
    assert one.session.is_closed and session.waited_s == [min(0.5, side.RECONNECT_S)]
    assert one.results() == {1: FAILED}
    # Another is opened, and not waited for.
    session.connected = False
    one.step()
    assert one.opened[-1].waited_s == []
    # Not while the engine sleeps.
    one.worker.unregister()
    num_opened = len(one.opened)
    one.step()
    assert len(one.opened) == num_opened and one.rank.session is None


def test_blocks_computed_from_lost_ones_arent_stored(rig: Any) -> None:
    one = rig()
    with_companion(one).lost = {"a"}
    one.step(stores=tuple(store(number + 1, request_id=name) for number, name in enumerate("ab")))
    assert [*one.session.sent] == ["w2-k0"]
    assert one.worker.stores.take_reports()[1] == FAILED


@pytest.mark.parametrize("how", ["built", "breaks", "absent", "not shared", "none"])
def test_attachments_go_with_a_store(rig: Any, how: str) -> None:
    one = rig()
    companion = with_companion(one)
    companion.breaks, one.session.connected = how == "breaks", how != "absent"
    if how == "not shared":
        one.rank.has_attachments = False
    one.step(stores=(store(attached=() if how == "none" else (ATTACHED,)),))
    assert companion.built == ([(1, [5])] if how == "built" else [])
    if how != "absent":
        _, runs, *_ = one.session.sent["w1-k0"]
        assert [run.group_index for run in runs] == ([0, 1] if how == "built" else [0])

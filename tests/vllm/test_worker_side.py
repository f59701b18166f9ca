"""What one rank does around its transfers: representations, weights, reports, sleep."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hotkv_vllm.identity.adapters import NO_WORK
from hotkv_vllm.metadata import HotKVMetadata
from tests.vllm.worker_parts import FAILED, REPRESENTED, STORED, load, store, with_sparse


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


def test_before_a_step_adapters_are_told_and_transfers_sent_whose_mark_has_passed(
    rig: Any,
) -> None:
    one = rig()
    one.rank.adapters._unacknowledged = frozenset({1})
    acknowledged = replace(NO_WORK, acknowledged=frozenset({1}))
    one.device.is_there = False
    one.step(adapters=acknowledged, loads=(load(),), stores=(store(),))
    assert not one.session.sent
    one.device.is_there = True
    one.worker.before_step(HotKVMetadata())
    assert list(one.session.sent) == ["t-a-k0", "w1-k0"]


def test_loads_of_changed_weights_are_void(rig: Any) -> None:
    one = rig()
    one.rank.weights = weights = SimpleNamespace(
        held=False, take_report=lambda: None, obey=lambda order: False
    )
    one.step(loads=(load("a"),))
    assert one.worker.take_results() == (set(), set()) and not one.session.cancelled
    weights.held = True
    one.session.ends_cancelled = False
    one.worker.take_results()
    assert one.session.cancelled == ["t-a-k0"]
    one.session.end("t-a-k0", num_bytes=5)
    assert one.worker.take_results() == ({"a"}, {"a"})


def test_links_are_reported_when_they_are_asked_for(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig()
    asked: list[bool] = []
    monkeypatch.setattr(one.rank, "link_report", lambda is_asked: asked.append(is_asked) or {})
    for asks_links in (True, False):
        one.step(asks_links=asks_links)
        one.worker.take_report(None)
    assert asked == [True, False]


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


def test_memory_is_exported_at_the_start_and_again_after_a_sleep(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig()
    done: list[str] = []
    monkeypatch.setattr(one.rank, "export", lambda caches: done.append("export") or True)
    monkeypatch.setattr(one.worker.sparse, "install_sparse", lambda caches: done.append("install"))
    monkeypatch.setattr(one.rank, "open", lambda *_: done.append("open"))
    one.worker.register({})
    assert done == ["export", "install", "open"]
    one.worker.restore()
    assert len(done) == 3
    one.worker.unregister()
    one.worker.restore()
    assert done[3:] == ["export", "open"]
    one.worker.restore()
    assert len(done) == 5
    monkeypatch.setattr(one.rank, "export", lambda caches: False)
    one.worker.register({})
    assert done[5:] == ["install", "open"]

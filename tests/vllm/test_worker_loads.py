"""A rank's loads, from a callback to the report of the end."""

from typing import Any

import pytest

from hotkv_client.types import TransferResult, TransferStatus
from hotkv_vllm.metadata import HotKVMetadata
from hotkv_vllm.worker.rank_loads import CANCEL_GRACE_S
from tests.vllm.worker_parts import load


@pytest.mark.parametrize("how", ["refused", "unreadable", "aborted", "not trusted", "late"])
def test_a_load_that_failed_is_reported_as_failed(rig: Any, how: str) -> None:
    one = rig()
    if how == "not trusted":
        one.rank.adapters._unacknowledged = frozenset({1})
    one.device.is_there = how != "late"
    one.step(loads=(load(),))
    answer = one.session.answers.get("t-a-k0")
    match how:
        case "late":
            # An adapter's bytes change while the load waits for its mark.
            one.rank.adapters._unacknowledged = frozenset({1})
            one.device.is_there = True
        case "refused":
            answer.set_exception(OSError("no"))
        case "unreadable":
            answer.set_result(None)
        case "aborted":
            one.session.end("t-a-k0", status=TransferStatus.FAILED)
    assert one.worker.take_results() == ({"a"}, {"a"}) and not one.counters
    assert bool(one.session.sent) == (how not in ("not trusted", "late"))


def test_loads_never_begun_are_reported_failed(rig: Any) -> None:
    one = rig()
    one.step(loads=(load("a"),), abandoned_loads=("x",))
    assert one.worker.take_results() == ({"x"}, {"x"})
    (job,) = [one.worker.loads._active["a"].job]
    one.worker.loads_broke(HotKVMetadata(loads=(job, load("b")), abandoned_loads=("c",)))
    assert one.worker.take_results() == ({"b", "c"}, {"b", "c"})
    one.worker.loads_broke(HotKVMetadata(loads=(load("a"),)))
    assert one.worker.take_results() == ({"a"}, {"a"})


@pytest.mark.parametrize("sent", [False, True])
def test_loads_deadline_runs_from_its_mark(rig: Any, sent: bool) -> None:
    """sent: the server waits for the mark, else the worker."""
    one = rig()
    one.device.is_there = sent
    one.step(loads=(load(timeout_s=5.0),))
    one.device.is_there = one.worker.loads._active["a"].after.has_passed = False
    one.now_s += 100
    one.worker.take_results()
    assert list(one.session.sent) == ["t-a-k0"] * sent
    one.device.is_there = True
    one.worker.take_results()
    assert list(one.session.sent) == ["t-a-k0"]
    for waited_s, cancelled in ((4.9, []), (0.1, ["t-a-k0"])):
        one.now_s += waited_s
        one.worker.take_results()
        assert one.session.cancelled == cancelled
    assert one.worker.take_results() == ({"a"}, {"a"})


def told(one: Any) -> dict[str, float]:
    return one.report().load_seconds


def test_load_is_timed_from_mark_to_answer(rig: Any) -> None:
    one = rig()
    one.step(loads=(load("a"), load("b")))
    one.now_s += 0.7
    one.session.end("t-a-k0")
    one.now_s += 9.0
    one.session.answers["t-b-k0"].set_exception(OSError("no"))
    one.worker.take_results()
    assert told(one) == {"a": pytest.approx(0.7)}, "a load that failed says nothing"
    assert not told(one)
    one.step(loads=(load("c"), load("d")))
    for active in one.worker.loads._active.values():
        active.after.has_passed, active.time = False, None
    one.device.is_there = False
    one.worker.take_results()
    one.session.end("t-d-k0")
    one.device.is_there = True
    one.worker.take_results()
    assert not told(one), "d ended before the device was seen at its mark"
    one.now_s += 3.0
    one.session.end("t-c-k0")
    one.now_s += 9.0
    one.worker.take_results()
    assert told(one) == {"c": pytest.approx(3.0)}


@pytest.mark.parametrize("hangs", [False, True])
def test_late_load_is_timed_until_abandoned(rig: Any, hangs: bool) -> None:
    one = rig()
    one.session.ends_cancelled = False
    one.step(loads=(load("a", timeout_s=5.0), load("b", timeout_s=5.5)))
    one.step(cancel_loads=("b", "unknown"))
    one.step(cancel_loads=("b",))
    for waited_s in (0.0, 5.0, 0.5, 0.5):
        one.now_s += waited_s
        one.worker.take_results()
    assert one.session.cancelled == ["t-b-k0", "t-a-k0"]
    if hangs:
        one.step(held_loads=("t-a", "t-b"))
    else:
        for name in one.session.cancelled:
            one.session.answers[name].set_result(TransferResult(name, TransferStatus.CANCELLED))
    assert one.worker.take_results() == ({"a", "b"}, {"a", "b"})
    assert told(one) == {"a": pytest.approx(-6.0)}


@pytest.mark.parametrize("held", [False, True])
def test_load_the_server_never_ends_is_overdue(rig: Any, held: bool) -> None:
    one = rig()
    one.session.ends_cancelled = False
    one.step(loads=(load(),), cancel_loads=("a",))
    one.now_s += CANCEL_GRACE_S - 0.1
    assert one.worker.take_report(None) is None
    one.now_s += 0.1
    for _ in range(2):
        assert one.report().overdue_loads == ("t-a",)
    if held:
        one.step(held_loads=("t-a",))
        assert one.worker.take_results() == ({"a"}, {"a"}) and not one.worker.loads
        assert one.worker.take_report(None) is None
    one.session.end("t-a-k0")
    if held:
        # Its end is reported in each step while its blocks are held.
        for _ in range(2):
            assert one.report().settled_loads == {"t-a": {0}}
        assert len(one.rank.marks._spare) == 1
        one.step()
    assert one.worker.take_report(None) is None


def test_held_load_is_cancelled_or_reported_right(rig: Any) -> None:
    one = rig()
    one.session.ends_cancelled = False
    one.step(loads=(load("a"), load("b"), load("c")))
    one.session.end("t-a-k0", num_bytes=3)
    one.step(held_loads=("t-a", "t-x"))
    assert one.worker.take_results() == ({"a"}, set()) and not one.session.cancelled
    assert one.report().settled_loads == {"t-a": {0}, "t-x": {0}}
    # Another rank has reported it as hung.
    one.step(held_loads=("t-b",))
    assert one.session.cancelled == ["t-b-k0"]
    one.device.is_there = False
    one.step(loads=(load("d"),))
    one.step(held_loads=("t-d",))
    assert one.report().settled_loads == {"t-d": {0}}
    one.device.is_there = True
    one.step()
    assert "t-d-k0" not in one.session.sent
    assert one.worker.take_results() == ({"b", "d"}, {"b", "d"})
    # As when weights may have changed.
    one.worker.loads.make_void()
    assert one.session.cancelled == ["t-b-k0", "t-c-k0"]

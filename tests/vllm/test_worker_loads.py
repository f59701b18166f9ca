"""Loads of one rank, from the hook that begins them to the report of their end."""

from typing import Any

import pytest

from hotkv_client.types import TransferResult, TransferStatus
from hotkv_vllm.metadata import HotKVMetadata
from hotkv_vllm.worker.rank_loads import CANCEL_GRACE_S
from tests.vllm.worker_parts import (
    Rig,
    load,
)

# -------------------------------------------------------------------------------------------- loads


@pytest.mark.parametrize("how", ["cancelled", "refused", "unreadable", "aborted", "not trusted"])
def test_a_load_that_failed_is_reported_as_failed(rig: Any, how: str) -> None:
    one = rig()
    if how == "not trusted":
        one.rank.adapters._unacknowledged = frozenset({1})
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


def told(one: Any) -> dict[str, float]:
    report = one.worker.take_report(None)
    return {} if report is None else report.load_seconds


def test_a_load_is_timed_by_its_answer_and_not_by_the_engines_looks(rig: Any) -> None:
    one = rig()
    one.step(loads=(load("a"), load("b")))
    one.now_s += 0.7
    one.session.end("t-a-k0")
    one.now_s += 9.0
    one.session.answers["t-b-k0"].set_exception(OSError("no"))
    one.worker.take_results()
    assert told(one) == {"a": pytest.approx(0.7)}, "a load that failed says nothing"
    assert not told(one)


def test_a_load_behind_a_mark_is_timed_from_the_mark_on(rig: Any) -> None:
    one = rig()
    one.step(loads=(load("a"), load("b")))
    for active in one.worker.loads._active.values():
        active.after.has_passed, active.time = False, None
    one.device.is_there = False
    one.worker.take_results()
    one.session.end("t-b-k0")
    one.device.is_there = True
    one.worker.take_results()
    assert not told(one), "b ended before the device was seen at its mark"
    one.now_s += 3.0
    one.session.end("t-a-k0")
    one.now_s += 9.0
    one.worker.take_results()
    assert told(one) == {"a": pytest.approx(3.0)}


@pytest.mark.parametrize("hangs", [False, True])
def test_a_late_load_is_timed_until_it_is_over_or_given_up(rig: Any, hangs: bool) -> None:
    one = rig()
    one.session.ends_cancelled = False
    one.step(loads=(load("a", timeout_s=5.0), load("b", timeout_s=50.0)))
    one.step(cancel_loads=("b",))
    one.worker.take_results()
    one.now_s += 5.0
    one.worker.take_results()
    one.now_s += 1.0
    if hangs:
        one.step(held_loads=("t-a", "t-b"))
    else:
        for name in one.session.cancelled:
            one.session.answers[name].set_result(TransferResult(name, TransferStatus.CANCELLED))
    assert one.worker.take_results() == ({"a", "b"}, {"a", "b"})
    assert told(one) == {"a": pytest.approx(-6.0)}


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


def hung(rig: Any) -> Rig:
    """Returns a load that was cancelled and that the server does not end."""
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


def test_a_load_whose_blocks_are_held_is_cancelled(rig: Any) -> None:
    """Of another rank the server did not end it; this one is still at it."""
    one = rig()
    one.session.ends_cancelled = False
    one.step(loads=(load("a"), load("b")))
    one.step(held_loads=("t-a",))
    assert one.session.cancelled == ["t-a-k0"]


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


def test_a_load_is_sent_and_reported_once(rig: Any) -> None:
    one = rig()
    one.step(loads=(load(),))
    assert one.session.sent["t-a-k0"][0] == "l-a" and one.session.sent["t-a-k0"][2] == 10.0
    assert one.worker.take_results() == (set(), set())
    one.session.end("t-a-k0", num_bytes=9)
    assert one.worker.take_results() == ({"a"}, set()) and one.counters == {"load_bytes": 9}
    assert one.worker.take_results() == (set(), set()) and not one.worker.loads
    assert len(one.rank.marks._spare) == 1


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

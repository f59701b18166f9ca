"""The small books of the scheduler side, each alone: names of blocks, hidden keys, representations,
reports, hints, links of workers."""

from typing import Any

import numpy as np
import pytest

from hotkv_proto.blocks import MAX_PRIORITY, MAX_TTL_S, NO_RETENTION, Retention
from hotkv_vllm.costs.prefill_speed import PrefillSpeed
from hotkv_vllm.hints.requests import LOG_INTERVAL_S, HintReader
from hotkv_vllm.scheduler import hits, sharing
from hotkv_vllm.scheduler.groups import CachedGroups
from hotkv_vllm.scheduler.hits import HiddenKeys
from hotkv_vllm.scheduler.reports import UseReports
from hotkv_vllm.scheduler.sharing import Joining, WorkerLinks
from hotkv_vllm.stats import HotKVStats
from tests.vllm.parts import FULL, TOKENS, Parts, request

# ---------------------------------------------------------------------------------- names of blocks


def test_masks_of_other_groups_than_there_are_make_no_hit() -> None:
    groups = CachedGroups([FULL, FULL], TOKENS, TOKENS)
    for count in (1, 3):
        with pytest.raises(ValueError, match=r"shorter|longer"):
            groups.longest_hit((np.ones(2, np.bool_),) * count, 0, 64)


# -------------------------------------------------------------------------------------- hidden keys


def shown(hidden: HiddenKeys, group: int, *hashes: bytes) -> list[bool]:
    return list(hidden.mask(group, hashes, np.ones(len(hashes), np.bool_)).tolist())


def test_keys_stay_hidden_until_they_are_cleared() -> None:
    hidden = HiddenKeys()
    hidden.hide(0, [b"a", b"b"])
    assert shown(hidden, 0, b"a", b"b", b"c") == [False, False, True]
    assert shown(hidden, 1, b"a") == [True] and len(hidden) == 2
    assert hidden.mask(0, [b"c"], np.zeros(1, np.bool_)).tolist() == [False]
    hidden.clear(0, b"a")
    hidden.clear(0, b"unknown")
    assert shown(hidden, 0, b"a", b"b") == [True, False]
    hidden.clear_all()
    assert shown(hidden, 0, b"b") == [True]


@pytest.mark.parametrize("first", [0, 1])
def test_a_new_epoch_clears_all_keys_and_the_same_none(first: int) -> None:
    hidden = HiddenKeys()
    hidden.set_epoch(first)
    hidden.hide(0, [b"a"])
    hidden.set_epoch(first)
    assert len(hidden) == 1
    hidden.set_epoch(first + 1)
    assert not len(hidden)


def test_the_first_epoch_clears_what_was_hidden_before_it() -> None:
    hidden = HiddenKeys()
    hidden.hide(0, [b"a"])
    hidden.set_epoch(1)
    assert not len(hidden)


def test_the_oldest_keys_are_forgotten_beyond_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hits, "MAX_HIDDEN_KEYS", 3)
    hidden = HiddenKeys()
    hidden.hide(0, [b"a", b"b", b"c"])
    assert shown(hidden, 0, b"a", b"b", b"c") == [False] * 3
    hidden.hide(0, [b"d"])
    assert shown(hidden, 0, b"a", b"b", b"c", b"d") == [True, False, False, False]


# ------------------------------------------------------------------------------------------ reports


def reports_of(
    parts: Parts, *, names: bool = True, prefill: PrefillSpeed | None = None
) -> UseReports:
    return UseReports(
        parts.session,
        TOKENS,
        parts.stats,
        lambda one: one.block_hashes if names else (),
        prefill,
    )


def sent(parts: Parts) -> list[Any]:
    return [what for kind, what in parts.server.calls if kind == "report_requests"]


@pytest.mark.parametrize(
    "device, external, hits",
    [(0, 0, (0, 0)), (16, 16, (16, 32)), (36, 16, (36, 37)), (99, 0, (37, 37))],
)
def test_a_request_is_reported_once_with_what_it_hit(
    device: int, external: int, hits: tuple[int, int]
) -> None:
    parts = Parts()
    reports = reports_of(parts)
    state = parts.state(request("a", 37, decoded=30))
    state.arrived_s, state.retention = 90.0, Retention(priority=1)
    reports.matched(state, device)
    reports.admitted(state, external)
    reports.admitted(state, 99)
    reports.send(100.0)
    reports.send(101.0)
    ((report,),) = sent(parts)
    assert (report.device_hit_tokens, report.hit_tokens) == hits
    assert report.hashes == state.request.block_hashes[:2] and report.prompt_tokens == 37
    assert report.age_s == 10.0 and report.retention == state.retention
    assert parts.count("reported_requests") == 1


def test_a_clock_that_went_back_makes_no_negative_age() -> None:
    parts = Parts()
    reports, state = reports_of(parts), parts.state(request("a", 37))
    state.arrived_s = 200.0
    reports.admitted(state, 0)
    reports.send(100.0)
    assert sent(parts)[0][0].age_s == 0.0


def test_a_request_without_a_name_is_not_reported_and_a_short_one_is() -> None:
    parts = Parts()
    reports = reports_of(parts, names=False)
    reports.admitted(parts.state(request("a", 37)), 0)
    reports.send(100.0)
    assert not sent(parts)
    reports.admitted(parts.state(request("short", 5)), 0)
    reports.send(100.0)
    assert len(sent(parts)) == 1


# -------------------------------------------------------------------------------------------- hints


@pytest.mark.parametrize(
    "params, retention",
    [
        (None, NO_RETENTION),
        ("no mapping", NO_RETENTION),
        ({}, NO_RETENTION),
        ({"other.priority": 3, 5: 6}, NO_RETENTION),
        ({"hotkv.priority": MAX_PRIORITY}, Retention(MAX_PRIORITY)),
        ({"hotkv.priority": -MAX_PRIORITY}, Retention(-MAX_PRIORITY)),
        ({"hotkv.ttl_s": MAX_TTL_S}, Retention(0, MAX_TTL_S)),
        ({"hotkv.ttl_s": 0}, NO_RETENTION),
        ({"hotkv.ttl_s": 5, "hotkv.pin": True}, Retention(0, 5.0, True)),
        ({"hotkv.pin": False}, NO_RETENTION),
    ],
)
def test_hints_that_fit_are_read(warnings: list[str], params: Any, retention: Retention) -> None:
    stats = HotKVStats()
    assert HintReader(stats).read(params, 1.0) == retention
    assert not warnings and stats.is_empty()


@pytest.mark.parametrize(
    "params",
    [
        {"hotkv.priority": MAX_PRIORITY + 1},
        {"hotkv.priority": -MAX_PRIORITY - 1},
        {"hotkv.priority": True},
        {"hotkv.priority": 1.0},
        {"hotkv.ttl_s": MAX_TTL_S + 1},
        {"hotkv.ttl_s": -1},
        {"hotkv.ttl_s": True},
        {"hotkv.ttl_s": "5"},
        {"hotkv.ttl_s": float("nan")},
        {"hotkv.pin": 1},
        {"hotkv.pin": True},
        {"hotkv.pin": True, "hotkv.ttl_s": 0},
        {"hotkv.such": 1},
    ],
)
def test_a_wrong_hint_is_left_out_counted_and_said(warnings: list[str], params: Any) -> None:
    stats = HotKVStats()
    assert HintReader(stats).read(params, 1.0) == NO_RETENTION
    assert stats.data["wrong_hints"] == 1 and len(warnings) == 1


def test_a_wrong_hint_leaves_the_others_as_they_are(warnings: list[str]) -> None:
    params = {"hotkv.priority": 2, "hotkv.ttl_s": "x", "hotkv.pin": True}
    assert HintReader(HotKVStats()).read(params, 1.0) == Retention(2)


def test_wrong_hints_are_said_once_in_a_while(warnings: list[str]) -> None:
    stats = HotKVStats()
    reader = HintReader(stats)
    for now_s, said in ((1.0, 1), (LOG_INTERVAL_S, 1), (1.0 + LOG_INTERVAL_S, 2)):
        reader.read({"hotkv.pin": 1}, now_s)
        assert len(warnings) == said
    assert stats.data["wrong_hints"] == 3


# --------------------------------------------------------------------------------- links of workers


@pytest.mark.parametrize("patience_s", [None, 0.5, 0.0])
def test_a_worker_that_stays_absent_is_warned_of_once(
    warnings: list[str], patience_s: float | None
) -> None:
    links = WorkerLinks()
    waits_s = sharing.ABSENCE_PATIENCE_S if patience_s is None else patience_s
    links.check(True, 0.0, patience_s)
    links.told({1: "gone"}, 10.0)
    # The time runs from the first of them on.
    links.told({2: "gone"}, 10.0 + waits_s)
    if waits_s:
        links.check(True, 10.0 + waits_s - 0.1, patience_s)
    assert not warnings
    for now_s in (10.0, 20.0):
        links.check(True, now_s + waits_s, patience_s)
        assert len(warnings) == 2
    assert "worker 1" in warnings[0] and "worker 2" in warnings[1]
    # One that was back is warned of again.
    links.told({1: ""}, 30.0)
    links.told({1: "gone"}, 30.0)
    links.check(True, 40.0 + waits_s, patience_s)
    assert len(warnings) == 3


def test_without_a_server_no_worker_is_warned_of(warnings: list[str]) -> None:
    links = WorkerLinks()
    links.told({1: "gone"}, 10.0)
    links.check(False, 100.0)
    links.check(True, 100.0 + sharing.ABSENCE_PATIENCE_S - 0.1)
    assert not warnings
    links.check(True, 100.0 + sharing.ABSENCE_PATIENCE_S)
    assert len(warnings) == 1


# ------------------------------------------------------------------------------------------ joining


def test_requests_ask_again_until_ranks_are_late(warnings: list[str]) -> None:
    one = Joining(2)
    assert not one.was_late
    assert one.asks_again(10.0) and not one.was_late
    assert one.asks_again(10.0 + sharing.JOINING_PATIENCE_S - 0.1) and not warnings
    for _ in range(3):
        assert not one.asks_again(10.0 + sharing.JOINING_PATIENCE_S)
        assert one.was_late and len(warnings) == 1

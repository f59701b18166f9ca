"""The small books of the scheduler side, each alone: names of blocks, hidden keys, loads to begin
and to hold back, blocks about to be written, reports, hints, links of workers."""

import logging
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hotkv.keys import Representation
from hotkv.retention import MAX_PRIORITY, MAX_TTL_S, NO_RETENTION, Retention
from hotkv_client.types import GroupHashes, LoadRun
from hotkv_vllm import link
from hotkv_vllm.compat import NULL_BLOCK
from hotkv_vllm.metadata import HotKVHandshake, HotKVWorkerMetadata, LoadJob
from hotkv_vllm.scheduler import hidden_keys, joining, worker_links
from hotkv_vllm.scheduler.failed_loads import PATIENCE_S, FailedLoads
from hotkv_vllm.scheduler.groups import CachedGroups
from hotkv_vllm.scheduler.hidden_keys import HiddenKeys
from hotkv_vllm.scheduler.hints import LOG_INTERVAL_S, HintReader
from hotkv_vllm.scheduler.joining import Joining
from hotkv_vllm.scheduler.load_orders import LoadOrders
from hotkv_vllm.scheduler.other_loads import OtherLoads
from hotkv_vllm.scheduler.reports import UseReports
from hotkv_vllm.scheduler.representation_planner import RepresentationPlanner
from hotkv_vllm.scheduler.worker_links import WorkerLinks
from hotkv_vllm.scheduler.written_blocks import WrittenBlocks
from hotkv_vllm.stats import HotKVStats
from tests.vllm.parts import FULL, TOKENS, Parts, ids, request


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings of hotkv, as they are logged."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(link.logger, "handlers", [handler])
    return said


# ---------------------------------------------------------------------------------- names of blocks


def test_only_requests_of_an_adapter_are_named_by_it() -> None:
    adapters: Any = SimpleNamespace(keys=lambda one: [b"adapter"])
    plain, own = request("a", 32), request("b", 32)
    own.lora_request = object()
    groups = CachedGroups([FULL], TOKENS, TOKENS, adapters=adapters)
    assert groups.keys(plain) == plain.block_hashes and groups.keys(own) == [b"adapter"]
    groups = CachedGroups([FULL], TOKENS, TOKENS)
    assert groups.keys(own) == own.block_hashes


def test_masks_of_other_groups_than_there_are_make_no_hit() -> None:
    groups = CachedGroups([FULL, FULL], TOKENS, TOKENS)
    with pytest.raises(ValueError, match="shorter"):
        groups.longest_hit((np.ones(2, np.bool_),), 0, 64)


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


def test_the_oldest_keys_are_forgotten_beyond_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_keys, "MAX_HIDDEN_KEYS", 3)
    hidden = HiddenKeys()
    hidden.hide(0, [b"a", b"b", b"c"])
    assert shown(hidden, 0, b"a", b"b", b"c") == [False] * 3
    hidden.hide(0, [b"d"])
    assert shown(hidden, 0, b"a", b"b", b"c", b"d") == [True, False, False, False]


# ------------------------------------------------------------------------------------- failed loads


def test_a_request_whose_load_failed_is_in_the_way_once() -> None:
    failed = FailedLoads()
    assert failed.is_empty and not failed.steps_aside("a")
    failed.add("a")
    assert "a" in failed and len(failed) == 1 and not failed.is_empty
    assert not failed.steps_aside("b")
    assert failed.steps_aside("a") and not failed.steps_aside("a")
    assert not failed.is_empty and "a" in failed


def test_a_hit_waits_a_moment_while_requests_wait_whose_load_failed() -> None:
    failed = FailedLoads()
    assert not failed.outwait(10.0, 99.0)
    failed.add("a")
    assert not failed.outwait(10.0, 10.0 + PATIENCE_S)
    assert failed.outwait(10.0, 10.0 + PATIENCE_S + 0.01)
    failed.scheduled(["b"])
    assert failed.outwait(10.0, 99.0)
    failed.scheduled(["a"])
    assert not failed.outwait(10.0, 99.0) and "a" not in failed
    # It was not asked for its hit since.
    assert not failed.is_empty


def test_a_request_that_ends_is_neither_waited_for_nor_in_the_way() -> None:
    failed = FailedLoads()
    failed.add("a")
    failed.add("b")
    failed.ended("a")
    failed.ended("unknown")
    assert "a" not in failed and not failed.steps_aside("a")
    assert "b" in failed and failed.steps_aside("b") and not failed.is_empty
    failed.ended("b")
    assert failed.is_empty


def test_a_request_that_was_asked_and_scheduled_is_nobodys_business() -> None:
    failed = FailedLoads()
    failed.add("a")
    assert failed.steps_aside("a")
    failed.scheduled(["a"])
    assert failed.is_empty


# ---------------------------------------------------------------------------------- representations


def test_kinds_are_numbered_behind_the_groups_in_their_order() -> None:
    kinds = [Representation(group, "test", 1, (64 + group,)) for group in (0, 2)]
    planner = RepresentationPlanner(3, kinds)
    asked = planner.asked([GroupHashes(group, [b"a"]) for group in range(3)])
    assert [group.group_index for group in asked] == [3, 4] and planner.slot_bytes == (64, 66)
    granted = planner.granted([np.array([True]), np.array([False])])
    assert {group: mask.tolist() for group, mask in granted.items()} == {0: [True], 2: [False]}
    with pytest.raises(ValueError, match="shorter"):
        planner.granted([np.array([True])])


# ---------------------------------------------------------------------------- loads and held blocks


class Pool:
    """vLLM's block pool, as far as it is told."""

    def __init__(self) -> None:
        self.num_gpu_blocks = 10
        self.told: list[tuple[str, list[int]]] = []

    def touch(self, blocks: Sequence[Any]) -> None:
        self.told.append(("touch", [block.block_id for block in blocks]))

    def free_blocks(self, blocks: Sequence[Any]) -> None:
        self.told.append(("free", [block.block_id for block in blocks]))


def given(*groups: Sequence[int]) -> Any:
    return SimpleNamespace(
        get_block_ids=lambda: tuple(list(one) for one in groups),
        blocks=tuple([SimpleNamespace(block_id=block) for block in one] for one in groups),
    )


def job(name: str, blocks: Sequence[int] = (3, 4)) -> LoadJob:
    run = LoadRun(0, ids(range(len(blocks))), ids(blocks))
    return LoadJob(name, f"t-{name}", f"l-{name}", (run,), 1.0)


def test_loads_are_told_to_the_workers_once() -> None:
    orders = LoadOrders(1)
    assert orders.is_empty
    first, second = job("a"), job("b")
    orders.begin(first, given([3, 4]))
    orders.begin(second, given([3, 4]))
    orders.cancel("c")
    assert not orders.is_empty
    orders.abandon("b")
    orders.abandon("d")
    assert orders.take() == ((first,), ("c",), ("b", "d")) and orders.is_empty
    assert orders.take() == ((), (), ()) and set(orders.quarantine.loading) == {"a"}


@pytest.mark.parametrize("what", ["jobs", "cancelled", "abandoned"])
def test_whatever_is_to_be_told_is_not_nothing(what: str) -> None:
    orders = LoadOrders(1)
    match what:
        case "jobs":
            orders.begin(job("a"), given([3, 4]))
        case "cancelled":
            orders.cancel("a")
        case _:
            orders.abandon("a")
    assert not orders.is_empty


def test_the_end_of_a_load_is_taken_in_once_and_of_others_loads_never() -> None:
    orders = LoadOrders(1)
    orders.begin(job("a"), given([3, 4]))
    orders.abandon("b")
    assert list(orders.ended(["x", "a", "b"])) == ["a", "b"]
    assert not list(orders.ended(["a", "b"])) and not orders.quarantine.loading


def test_blocks_of_a_load_that_hangs_are_kept_until_every_rank_has_ended_it(
    warnings: list[str],
) -> None:
    orders, pool = LoadOrders(2), Pool()
    quarantine = orders.quarantine
    orders.begin(job("a", [3, 4]), given([2, 3], [4, 5]))
    assert quarantine.overdue(["t-a"]) == 0 and not quarantine.held
    quarantine.pool = pool
    assert quarantine.overdue(["t-b", "t-a"]) == 1 and quarantine.held == ("t-a",)
    assert quarantine.overdue(["t-a"]) == 0 and len(warnings) == 1
    assert pool.told == [("touch", [3, 4])] and pool.num_gpu_blocks == 8
    assert quarantine.num_blocks == 2
    quarantine.settled({"t-a": 1, "t-b": 2})
    assert len(pool.told) == 1
    quarantine.settled({"t-a": 2})
    quarantine.settled({"t-a": 2})
    assert pool.told[1:] == [("free", [3, 4])] and pool.num_gpu_blocks == 10
    assert not quarantine.held and not quarantine.num_blocks


# ---------------------------------------------------------------------------------- loads of others


def test_without_other_loads_nobody_needs_to_know_of_a_steps_end() -> None:
    others = OtherLoads()
    assert others.step(["a"], False) == 0 and others.may_store("a")


def test_a_request_is_trusted_when_a_step_runs_it() -> None:
    others = OtherLoads()
    others.admitted("a")
    others.admitted("b")
    assert not others.may_store("a")
    assert others.step(["a"], False) == 0
    assert others.may_store("a") and not others.may_store("b")
    others.ended("b")
    assert others.may_store("b")


@pytest.mark.parametrize("went_well", [True, False])
def test_a_synchronous_load_holds_back_what_was_admitted_until_its_step_has_ended(
    went_well: bool,
) -> None:
    others = OtherLoads()
    others.admitted("a")
    assert others.step(["a", "old"], True) == 1
    assert others.held == {"a"} and not others.may_store("a") and others.may_store("old")
    # A step behind it builds on it.
    others.admitted("b")
    assert others.step(["a", "b"], False) == 2 and others.held == {"a", "b"}
    others.settled(1, went_well)
    assert others.held == ({"b"} if went_well else {"a", "b"})
    others.settled(2, True)
    assert others.held == (set() if went_well else {"a", "b"})
    assert others.step([], False) == 0
    others.ended("a")
    others.ended("b")
    assert not others.held and others.may_store("a")


def test_a_step_whose_report_was_lost_is_not_trusted() -> None:
    others = OtherLoads()
    for name in ("a", "b", "c"):
        others.admitted(name)
        others.step([name], True)
    others.settled(2, True)
    assert others.held == {"a", "c"}
    others.settled(3, True)
    assert others.held == {"a"}


def test_what_was_admitted_in_a_step_that_was_lost_is_never_stored() -> None:
    others = OtherLoads()
    others.admitted("a")
    others.lost()
    assert others.held == {"a"}
    assert others.step(["a"], True) == 1
    others.settled(1, True)
    assert not others.may_store("a") and others.held == {"a"}


# ----------------------------------------------------------------------------------- written blocks


def asks(name: str, computed: int = 0) -> Any:
    return SimpleNamespace(request_id=name, num_computed_tokens=computed)


@pytest.mark.parametrize(
    "matched, computed, fresh",
    [
        (0, 0, {1, 2, 3, 11, 12}),
        (16, 0, {2, 3, 11, 12}),
        (31, 0, {2, 3, 11, 12}),
        # Behind a load that has ended.
        (0, 32, {3, 11, 12}),
        (16, 32, {3, 11, 12}),
        (32, 16, {3, 11, 12}),
    ],
)
def test_blocks_behind_what_a_request_hit_are_new_to_it(
    matched: int, computed: int, fresh: set[int]
) -> None:
    written = WrittenBlocks([16, 0])
    written.matched("a", matched)
    written.allocated(asks("a", computed), given([1, 2, 3], [11, 12]))
    assert written.of_step() == fresh and written.take() == fresh
    assert written.take() == set() == written.of_step()


def test_a_local_hit_is_of_one_admission() -> None:
    written = WrittenBlocks([16])
    written.matched("a", 32)
    written.allocated(asks("a"), given([1, 2, 3]))
    written.take()
    written.allocated(asks("a"), given([1, 2, 3]))
    assert written.take() == {1, 2, 3}
    written.matched("b", 32)
    written.ended("b")
    written.ended("unknown")
    written.allocated(asks("b"), given([1, 2, 3]))
    assert written.take() == {1, 2, 3}


def test_a_step_is_looked_at_when_somebody_asks_and_the_null_block_is_nobodys() -> None:
    step = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(num_computed_tokens=0, block_ids=([NULL_BLOCK, 7],))],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set()
        ),
        kv_cache_block_copies=None,
        new_block_ids_to_zero=None,
    )
    written = WrittenBlocks([16])
    written.allocated(asks("a"), given([NULL_BLOCK, 3]))
    written.step(step)
    assert written.of_step() == {3, 7} and written.take() == {3, 7}
    assert written.of_step() == set()
    written.step(step)
    written.allocated(asks("a"), given([NULL_BLOCK, 3]))
    # Nobody asked, so the workers hear of what was allocated.
    assert written.take() == {3} and written.of_step() == set()


def test_blocks_of_other_groups_than_there_are_are_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        WrittenBlocks([16, 16]).allocated(asks("a"), given([1]))


# ------------------------------------------------------------------------------------------ reports


def reports_of(parts: Parts, *, names: bool = True) -> UseReports:
    return UseReports(
        parts.session, TOKENS, parts.stats, lambda one: one.block_hashes if names else ()
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


def test_reports_are_dropped_without_a_server() -> None:
    parts = Parts()
    reports = reports_of(parts)
    reports.admitted(parts.state(request("a", 37)), 0)
    parts.server.up = False
    reports.send(100.0)
    parts.server.up = True
    reports.send(101.0)
    assert not sent(parts) and not parts.count("reported_requests")


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


def test_links_are_complete_while_every_rank_has_one() -> None:
    links = WorkerLinks()
    assert links.are_complete and not links.will_say
    links.told({0: "", 1: "gone"}, 1.0)
    assert not links.are_complete and not links.will_say
    links.told({}, 2.0, is_connected=False)
    assert not links.will_say
    links.told({1: "gone"}, 2.0, is_connected=False)
    assert links.will_say
    links.told({1: ""}, 3.0)
    assert links.are_complete and not links.will_say


@pytest.mark.parametrize("patience_s", [None, 0.5, 0.0])
def test_a_worker_that_stays_absent_is_warned_of_once(
    warnings: list[str], patience_s: float | None
) -> None:
    links = WorkerLinks()
    waits_s = worker_links.PATIENCE_S if patience_s is None else patience_s
    links.check(True, 0.0, patience_s)
    links.told({1: "gone"}, 10.0)
    # The time runs from the first of them on.
    links.told({2: "gone"}, 10.0 + waits_s)
    if waits_s:
        links.check(True, 10.0 + waits_s - 0.1, patience_s)
    assert not warnings
    links.check(True, 10.0 + waits_s, patience_s)
    links.check(True, 20.0 + waits_s, patience_s)
    assert len(warnings) == 2 and "worker 1" in warnings[0] and "worker 2" in warnings[1]
    # One that was back is warned of again.
    links.told({1: ""}, 30.0)
    links.told({1: "gone"}, 30.0)
    links.check(True, 40.0 + waits_s, patience_s)
    assert len(warnings) == 3


def test_without_a_server_no_worker_is_warned_of(warnings: list[str]) -> None:
    links = WorkerLinks()
    links.told({1: "gone"}, 10.0)
    links.check(False, 100.0)
    links.check(True, 100.0 + worker_links.PATIENCE_S - 0.1)
    assert not warnings
    links.check(True, 100.0 + worker_links.PATIENCE_S)
    assert len(warnings) == 1


# ------------------------------------------------------------------------------------------ joining


def test_requests_ask_again_until_ranks_are_late(warnings: list[str]) -> None:
    one = Joining(2)
    assert one.asks_again(10.0) and not one.was_late
    assert one.asks_again(10.0 + joining.PATIENCE_S - 0.1) and not warnings
    for _ in range(2):
        assert not one.asks_again(10.0 + joining.PATIENCE_S)
    assert one.was_late and len(warnings) == 1


def test_requests_wait_in_their_order_and_leave_once() -> None:
    one = Joining(2)
    first, second, third = (request(name, 5) for name in "abc")
    for each in (first, second, third):
        one.arrived(each)
    one.ended("b")
    one.ended("unknown")
    assert one.take_requests() == [first, third] and one.take_requests() == []


@pytest.mark.parametrize("count, complete", [(0, False), (1, False), (2, True), (3, True)])
def test_handshakes_are_taken_when_all_ranks_have_sent_theirs(count: int, complete: bool) -> None:
    report = HotKVWorkerMetadata(handshakes=(HotKVHandshake(None),) * count)
    assert len(Joining(2).handshakes(report)) == (count if complete else 0)


def test_reports_of_two_ranks_add_up() -> None:
    """And stay as they are, each for itself."""
    counters: Mapping[str, float] = {"stores": 1, "loads": 2}
    one = HotKVWorkerMetadata(counters=dict(counters), settled_loads={"a": 1}, settled_step=3)
    two = HotKVWorkerMetadata(counters={"stores": 5}, settled_loads={"a": 1, "b": 1})
    both = one.aggregate(two)
    assert both.counters == {"stores": 6, "loads": 2} and both.settled_loads == {"a": 2, "b": 1}
    assert both.settled_step == 3 and one.counters == counters and one.settled_loads == {"a": 1}

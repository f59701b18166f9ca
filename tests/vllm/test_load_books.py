"""What the scheduler side notes of loads, each book alone: loads that failed, loads to begin and to
hold back, loads of other connectors, blocks about to be written."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hotkv_client.types import LoadRun
from hotkv_vllm.compat import NULL_BLOCK
from hotkv_vllm.metadata import LoadJob
from hotkv_vllm.scheduler.admission import WrittenBlocks
from hotkv_vllm.scheduler.loads import ADMISSION_PATIENCE_S, FailedLoads, LoadOrders, OtherLoads
from tests.vllm.parts import ids

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
    assert not failed.outwait(10.0, 10.0 + ADMISSION_PATIENCE_S)
    assert failed.outwait(10.0, 10.0 + ADMISSION_PATIENCE_S + 0.01)
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

"""Which stores a step waits for, and what a store has come to: the planner of stores alone, over
requests that are names and hashes."""

import numpy as np
import pytest

from hotkv_client.types import BlockResult, BlockRun
from hotkv_vllm.metadata import StoreJob
from hotkv_vllm.scheduler import stores_in_flight
from tests.vllm.parts import (
    BLOCK_BYTES,
    Parts,
    ids,
    plan,
    report,
    request,
    stored,
)

STORED, PRESENT, WRITTEN = BlockResult.STORED, BlockResult.PRESENT, BlockResult.WRITTEN
REFUSED = BlockResult.ABORTED

# --------------------------------------------------------------------------------- what steps await


def test_a_step_waits_for_the_stores_that_read_what_it_writes() -> None:
    parts = Parts()
    (one,), _ = plan(parts, (parts.state(request("a", 32)), 32))
    (two,), _ = plan(parts, (parts.state(request("b", 32)), 32), tables=[[11, 12]])
    assert plan(parts, written=[5]) == ((), ())
    assert plan(parts, written=[12, 5]) == ((), (two.store_id,))
    # It reads nothing any more, and its blocks may be stored again.
    assert plan(parts, written=[11]) == ((), ())
    assert plan(parts, written=[1, 2, 11]) == ((), (one.store_id,))


def test_who_writes_is_asked_only_if_something_reads() -> None:
    parts = Parts()
    asked: list[int] = []

    def written() -> list[int]:
        asked.append(1)
        return []

    parts.planner.plan([], lambda _: None, {}, written)
    assert not asked
    parts.planner.finish(parts.state(request("a", 16)), [[1]], 16)
    parts.planner.plan([], lambda _: None, {}, written)
    assert len(asked) == 1
    parts.planner.plan([], lambda _: None, {}, written)
    assert len(asked) == 2


@pytest.mark.parametrize("how", ["is_held", "is_rekeying"])
def test_while_nothing_is_stored_every_step_waits_for_what_is_in_flight(how: str) -> None:
    parts = Parts()
    (job,), _ = plan(parts, (parts.state(request("a", 32)), 32))
    setattr(parts.planner, how, True)
    state = parts.state(request("b", 32))
    assert plan(parts, (state, 32), tables=[[11, 12]]) == ((), (job.store_id,))
    setattr(parts.planner, how, False)
    assert stored(plan(parts, (state, 32), tables=[[11, 12]])[0]) == [(0, [11, 12])]


def test_a_store_that_nobody_reported_is_listed_once_more_and_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(stores_in_flight.time, "monotonic", lambda: now_s[0])
    parts = Parts()
    (job,), _ = plan(parts, (parts.state(request("a", 32)), 32))
    now_s[0] += stores_in_flight.UNREPORTED_S - 1
    assert plan(parts) == ((), ())
    now_s[0] += 1
    assert plan(parts) == ((), (job.store_id,))
    assert parts.count("dropped_blocks") == 2 and not parts.planner.in_flight.num_bytes
    assert plan(parts) == ((), ())


def test_a_plan_that_broke_takes_back_what_no_worker_was_told_of() -> None:
    parts = Parts()
    (sent,), _ = plan(parts, (parts.state(request("a", 16)), 16))
    parts.planner.in_flight.step()
    flight = parts.planner.in_flight
    lost = flight.begin([BlockRun(0, [b"x"], ids([9]))], [], 5)
    assert lost is not None and flight.reading == {1: sent.store_id, 9: lost.store_id}
    parts.planner.plan_broke()
    assert list(flight.stores) == [sent.store_id] and flight.num_bytes == BLOCK_BYTES
    assert flight.reading == {1: sent.store_id}


# ------------------------------------------------------------------------------------------ results


def in_flight(parts: Parts, num_blocks: int) -> StoreJob:
    (job,), _ = plan(parts, (parts.state(request("a", 16 * num_blocks)), 16 * num_blocks))
    return job


@pytest.mark.parametrize(
    "ranks, counts",
    [
        ([[STORED, PRESENT, REFUSED]], (1, 1, 1)),
        # Written by this rank, and never whole.
        ([[WRITTEN] * 3], (0, 0, 3)),
        ([[WRITTEN, PRESENT, STORED], [STORED, WRITTEN, REFUSED]], (1, 1, 1)),
        ([[STORED] * 3, []], (0, 0, 3)),
        ([[STORED] * 3, [PRESENT] * 2], (2, 0, 1)),
    ],
)
def test_a_block_is_stored_if_every_rank_has_stored_its_shard(
    ranks: list[list[BlockResult]], counts: tuple[int, int, int]
) -> None:
    parts = Parts(num_ranks=len(ranks))
    job = in_flight(parts, 3)
    for answers in ranks:
        assert len(parts.planner.in_flight) == 1
        parts.planner.reported(report((job.store_id, answers)))
    assert not parts.planner.in_flight.stores and not parts.planner.in_flight.reading
    names = ("stored_blocks", "present_blocks", "refused_blocks")
    assert tuple(parts.count(name) for name in names) == counts
    assert all(parts.stats.data.get(name, 1) for name in names)


def test_only_what_was_stored_whole_is_offered_again() -> None:
    parts = Parts()
    hashes = request("a", 48).block_hashes
    parts.finder.hidden.hide(0, hashes)
    job = in_flight(parts, 3)
    parts.planner.reported(report((job.store_id, [STORED, REFUSED, PRESENT])))
    mask = parts.finder.hidden.mask(0, hashes, np.ones(3, np.bool_))
    assert mask.tolist() == [True, False, True]


def test_a_report_is_taken_once_and_of_unknown_stores_not_at_all() -> None:
    parts = Parts(num_ranks=2)
    job = in_flight(parts, 1)
    once = report((job.store_id, [STORED]), (1 << 40, [STORED]))
    parts.planner.reported(once)
    parts.planner.reported(once)
    assert len(parts.planner.in_flight) == 1
    parts.planner.reported(report((job.store_id, [WRITTEN])))
    assert not len(parts.planner.in_flight) and parts.count("stored_blocks") == 1

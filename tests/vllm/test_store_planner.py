"""Which blocks the scheduler side stores after a step, and which stores a step waits for: the
planner alone, over requests that are names and hashes."""

import pytest

from hotkv_client.fence import Revocations, SharedFence
from hotkv_client.types import BlockResult
from hotkv_vllm.identity.exactness import EVERYTHING
from hotkv_vllm.scheduler.stores_in_flight import StoreFence
from tests.vllm.parts import (
    BLOCK_BYTES,
    STATES,
    TOKENS,
    WINDOW,
    Parts,
    plan,
    report,
    request,
    stored,
)

# ----------------------------------------------------------------------------- blocks that are full


def test_a_request_is_looked_at_when_another_block_is_full() -> None:
    parts = Parts()
    one = request("a", 100)
    state = parts.state(one)
    states = {"a": state}
    assert not parts.planner.due(states, {"a": 15}, (), {})
    assert parts.planner.due(states, {"a": 16}, (), {}) == [(state, 16)]
    plan(parts, (state, 20))
    assert state.store.next_check_tokens == 32 and state.store.stored_blocks == [1]
    one.num_computed_tokens = 20
    assert not parts.planner.due(states, {"a": 11}, (), {})
    assert parts.planner.due(states, {"a": 12}, (), {})
    # A state that vLLM hands over is due whatever else is full.
    assert parts.planner.due(states, {"a": 1}, (), {"a": [(0, 1, 16)]})
    # Not: an unknown request, one that is held, one that may not store.
    assert not parts.planner.due({}, {"a": 16}, (), {})
    assert not parts.planner.due(states, {"a": 16}, {"a"}, {})
    state.store.may_store = False
    assert not parts.planner.due(states, {"a": 16}, (), {})


def test_behind_inexact_tokens_nothing_is_stored_ever() -> None:
    parts = Parts()
    parts.exactness.is_watching = True
    parts.exactness._exact_tokens = {"a": 20, "b": 32}
    state = parts.state(request("a", 100))
    assert stored(plan(parts, (state, 48))[0]) == [(0, [1])]
    assert state.store.next_check_tokens == EVERYTHING
    state = parts.state(request("b", 100))
    assert stored(plan(parts, (state, 32), tables=[[11, 12, 13]])[0]) == [(0, [11, 12])]
    assert state.store.next_check_tokens == 48


def test_blocks_that_a_store_reads_are_not_stored_beside_it() -> None:
    parts = Parts()
    assert stored(plan(parts, (parts.state(request("a", 32)), 32))[0]) == [(0, [1, 2])]
    assert stored(plan(parts, (parts.state(request("a", 48)), 48))[0]) == [(0, [3])]
    # Nor twice in one step.
    parts = Parts()
    both = (parts.state(request("a", 32)), 32), (parts.state(request("a", 48)), 48)
    assert stored(plan(parts, *both)[0]) == [(0, [1, 2]), (0, [3])]


def test_blocks_that_no_hit_could_use_are_counted_and_left() -> None:
    """Windows of two blocks, hits at every fourth: the two before each boundary are of use."""
    parts = Parts([WINDOW], alignment=4 * TOKENS)
    jobs, _ = plan(parts, (parts.state(request("a", 128)), 128))
    assert stored(jobs) == [(0, [3, 4]), (0, [7, 8])]
    assert parts.count("unreachable_blocks") == 4
    # Null blocks are nobody's.
    plan(parts, (parts.state(request("b", 64)), 64), tables=[[0, 0, 13, 14]])
    assert parts.count("unreachable_blocks") == 4


def test_a_request_without_a_block_table_is_looked_at_again() -> None:
    parts = Parts()
    state = parts.state(request("a", 32))
    jobs, _ = parts.planner.plan([(state, 32)], lambda _: None, {}, lambda: ())
    assert not jobs and state.store.stored_blocks == [0]
    assert stored(plan(parts, (state, 32))[0]) == [(0, [1, 2])]


# -------------------------------------------------------------------------------------- handed over


@pytest.mark.parametrize(
    "group, boundary, exact_tokens, is_stored",
    [
        (0, 16, 64, True),
        (0, 64, 64, True),
        # At the begin, beyond what is known, and between blocks states have no name.
        (0, 0, 64, False),
        (0, 80, 64, False),
        (0, 40, 64, False),
        # Of another group.
        (1, 48, 64, False),
        # Behind inexact tokens.
        (0, 48, 48, True),
        (0, 48, 47, False),
    ],
)
def test_a_state_is_stored_under_the_hash_of_the_block_that_ends_at_its_boundary(
    group: int, boundary: int, exact_tokens: int, is_stored: bool
) -> None:
    parts = Parts([STATES], by_handoff=[0])
    parts.exactness.is_watching = True
    parts.exactness._exact_tokens = {"a": exact_tokens}
    state = parts.state(request("a", 64))
    jobs, _ = plan(parts, (state, 64), handoffs={"a": [(group, 7, boundary)]})
    # Its blocks are not stored by their place.
    assert stored(jobs) == ([(0, [7])] if is_stored else [])
    if is_stored:
        (run,) = jobs[0].runs
        depth = boundary // TOKENS - 1
        assert (run.depth, [*run.hashes]) == (depth, [state.request.block_hashes[depth]])


# --------------------------------------------------------------------------------- ends of requests


def test_a_block_that_a_tail_holds_is_not_stored_by_another_request() -> None:
    parts = Parts()
    parts.planner.finish(parts.state(request("a", 32)), [[1, 2]], 32)
    parts.planner.finish(parts.state(request("b", 48)), [[1, 2, 3]], 48)
    state = parts.state(request("c", 64))
    assert stored(plan(parts, (state, 64))[0]) == [(0, [1, 2]), (0, [3]), (0, [4])]


# ------------------------------------------------------------------------------- room in the flight


def test_more_than_fits_waits_and_what_is_last_is_dropped() -> None:
    """The room is for four blocks."""
    parts = Parts(max_inflight_store_mib=1)
    first, second = parts.state(request("a", 64)), parts.state(request("b", 32))
    jobs, _ = plan(parts, (first, 64))
    assert len(jobs) == 1 and parts.planner.in_flight.num_bytes == 4 * BLOCK_BYTES
    tables = [[11, 12]]
    assert plan(parts, (second, 32), tables=tables)[0] == ()
    assert second.store.stored_blocks == [0] and not parts.count("dropped_blocks")
    parts.planner.finish(second, tables, 32)
    assert parts.count("dropped_blocks") == 2
    parts.planner.reported(report((jobs[0].store_id, [BlockResult.STORED] * 4)))
    assert not parts.planner.in_flight.num_bytes
    assert stored(plan(parts, (second, 32), tables=tables)[0]) == [(0, [11, 12])]


def test_what_the_step_plans_already_counts_as_in_flight() -> None:
    """Two blocks are in flight and two are planned: the third request's would be too many."""
    parts = Parts(max_inflight_store_mib=1)
    plan(parts, (parts.state(request("a", 32)), 32))
    tables = {"b": ([11, 12],), "c": ([21],)}
    second, third = parts.state(request("b", 32)), parts.state(request("c", 16))
    jobs, _ = parts.planner.plan([(second, 32), (third, 16)], tables.get, {}, lambda: ())
    assert stored(jobs) == [(0, [11, 12])] and third.store.stored_blocks == [0]


def test_a_store_that_can_not_be_revoked_is_not_sent() -> None:
    page = SharedFence()
    revocations = Revocations([page.place])
    revocations._free = revocations._free[-1:]
    parts = Parts(fence=StoreFence(revocations))
    (job,), _ = plan(parts, (parts.state(request("a", 32)), 32))
    assert job.fence_index
    jobs, _ = plan(parts, (parts.state(request("b", 48)), 48), tables=[[11, 12, 13]])
    assert jobs == () and parts.count("dropped_blocks") == 3 and parts.count("stores") == 1

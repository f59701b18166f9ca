"""Which blocks the scheduler side stores after a step, and which stores a step waits for: the
planner alone, over requests that are names and hashes."""

from operator import attrgetter

import pytest

from hotkv_client.fence import Revocations, SharedFence
from hotkv_client.types import BlockResult, BlockRun
from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_vllm.identity.exactness import EVERYTHING
from hotkv_vllm.scheduler.stores import STORE_BLOCKS, portions
from hotkv_vllm.scheduler.stores_in_flight import StoreFence
from tests.vllm.parts import (
    BLOCK_BYTES,
    FULL,
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


@pytest.mark.parametrize("tokens, blocks", [(15, 0), (16, 1), (31, 1), (32, 2), (48, 3)])
def test_blocks_are_stored_when_they_are_full(tokens: int, blocks: int) -> None:
    parts = Parts()
    jobs, flush = plan(parts, (parts.state(request("a", 48)), tokens))
    assert stored(jobs) == ([(0, list(range(1, blocks + 1)))] if blocks else [])
    assert flush == () and parts.count("stores") == len(jobs)


def test_each_block_is_stored_once_and_named_with_its_chain() -> None:
    parts = Parts()
    one = request("a", 64)
    state = parts.state(one)
    jobs = []
    for step in range(4):
        one.num_computed_tokens = 16 * step
        found, _ = plan(parts, (state, 16))
        jobs += found
    assert stored(jobs) == [(0, [1]), (0, [2]), (0, [3]), (0, [4])]
    runs = [job.runs[0] for job in jobs]
    assert [list(run.hashes) for run in runs] == [[h] for h in one.block_hashes]
    assert [run.parent_hash for run in runs] == [b"", *one.block_hashes[:3]]
    assert [run.depth for run in runs] == [0, 1, 2, 3]
    assert len({job.lease_id for job in jobs}) == 4


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


def test_the_smallest_block_decides_when_a_request_is_looked_at_first() -> None:
    large = type(FULL)(FULL.kind, 3 * TOKENS, FULL.shard_bytes)
    parts = Parts([large, FULL], alignment=3 * TOKENS)
    state = parts.state(request("a", 100))
    assert state.store.next_check_tokens == TOKENS and state.store.stored_blocks == [0, 0]
    assert stored(plan(parts, (state, 40))[0]) == [(1, [11, 12])]
    assert state.store.next_check_tokens == 48


def test_a_drafters_last_block_is_stored_when_it_can_not_change_any_more() -> None:
    """While decoding the block may still change; prompts do not, nor what is over."""
    parts = Parts(drafts=[0])
    one = request("a", 32, decoded=40)
    state = parts.state(one)
    assert stored(plan(parts, (state, 32))[0]) == [(0, [1, 2])]
    one.num_computed_tokens = 32
    assert stored(plan(parts, (state, 16))[0]) == []
    one.num_computed_tokens = 48
    assert stored(plan(parts, (state, 16))[0]) == [(0, [3])]
    parts.planner.finish(state, [[1, 2, 3, 4]], 64)
    assert stored(plan(parts)[0]) == [(0, [4])]


def test_blocks_whose_hash_is_not_known_yet_are_not_stored() -> None:
    parts = Parts()
    one = request("a", 32)
    one.block_hashes = one.block_hashes[:1]
    assert stored(plan(parts, (parts.state(one), 32))[0]) == [(0, [1])]
    # Tokens that are computed ahead of what is known (drafts) fill no block.
    one = request("b", 40)
    state = parts.state(one)
    assert stored(plan(parts, (state, 48), tables=[[11, 12, 13]])[0]) == [(0, [11, 12])]
    assert state.store.stored_blocks == [2]


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


def test_what_the_server_has_is_not_stored_again_and_hidden_keys_are() -> None:
    parts = Parts()
    parts.put("a", [0, 2])
    jobs, _ = plan(parts, (parts.state(request("a", 64)), 64))
    assert stored(jobs) == [(0, [2]), (0, [4])]
    parts.finder.hidden.hide(0, [request("a", 64).block_hashes[0]])
    jobs, _ = plan(parts, (parts.state(request("a", 64)), 64), tables=[[11, 12, 13, 14]])
    assert stored(jobs) == [(0, [11, 12]), (0, [14])]


def test_blocks_that_a_store_reads_are_not_stored_beside_it() -> None:
    parts = Parts()
    assert stored(plan(parts, (parts.state(request("a", 32)), 32))[0]) == [(0, [1, 2])]
    assert stored(plan(parts, (parts.state(request("a", 48)), 48))[0]) == [(0, [3])]
    # Nor twice in one step.
    parts = Parts()
    both = (parts.state(request("a", 32)), 32), (parts.state(request("a", 48)), 48)
    assert stored(plan(parts, *both)[0]) == [(0, [1, 2]), (0, [3])]


def test_null_blocks_are_not_stored() -> None:
    parts = Parts()
    jobs, _ = plan(parts, (parts.state(request("a", 64)), 64), tables=[[0, 2, 0, 4]])
    assert stored(jobs) == [(0, [2]), (0, [4])]


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


def test_token_ids_go_along_where_the_server_tells_of_blocks() -> None:
    parts = Parts()
    parts.server.wants_token_ids = True
    parts.put("a", [0])
    one = request("a", 64)
    one.cache_salt = "salt"
    (job,), _ = plan(parts, (parts.state(one), 48))
    assert list(job.runs[0].token_ids) == list(range(16, 48)) and not job.runs[0].extra_keys
    parts.drop("a", [0])
    (job,), _ = plan(parts, (parts.state(one), 16), tables=[[11]])
    assert list(job.runs[0].token_ids) == list(range(16))
    assert job.runs[0].extra_keys == (("salt",),)
    parts.server.wants_token_ids = False
    (job,), _ = plan(parts, (parts.state(one), 16), tables=[[21]])
    assert not len(job.runs[0].token_ids) and not job.runs[0].extra_keys


def test_retention_goes_with_each_requests_blocks() -> None:
    parts = Parts()
    kept = parts.state(request("b", 16))
    kept.retention = Retention(priority=3)
    tables = {"a": ([1],), "b": ([2],), "c": ([3],)}
    jobs, _ = parts.planner.plan(
        [(parts.state(request("a", 16)), 16), (kept, 16), (parts.state(request("c", 16)), 16)],
        tables.get,
        {},
        lambda: (),
    )
    assert [(job.options.retention, stored([job])) for job in jobs] == [
        (NO_RETENTION, [(0, [1]), (0, [3])]),
        (kept.retention, [(0, [2])]),
    ]


# -------------------------------------------------------------------------------------- handed over


def handed_over(
    parts: Parts, block: int, boundary: int, *, group: int = 0, tokens: int = 64
) -> list[tuple[int, list[int]]]:
    """What is stored of a request of so many tokens when vLLM hands over one state."""
    state = parts.state(request("a", tokens))
    return stored(plan(parts, (state, 1), handoffs={"a": [(group, block, boundary)]})[0])


def test_a_state_is_stored_under_the_hash_of_the_block_that_ends_at_its_boundary() -> None:
    parts = Parts([STATES], by_handoff=[0])
    state = parts.state(request("a", 64))
    (job,), _ = plan(parts, (state, 1), handoffs={"a": [(0, 7, 48)]})
    (run,) = job.runs
    assert run.block_ids.tolist() == [7] and list(run.hashes) == [state.request.block_hashes[2]]
    assert run.depth == 2


@pytest.mark.parametrize("boundary, is_stored", [(16, True), (64, True), (0, False), (80, False)])
def test_states_at_the_begin_or_beyond_what_is_known_have_no_name(
    boundary: int, is_stored: bool
) -> None:
    parts = Parts([STATES], by_handoff=[0])
    assert handed_over(parts, 7, boundary) == ([(0, [7])] if is_stored else [])


def test_states_of_other_groups_or_between_blocks_are_not_stored() -> None:
    parts = Parts([STATES], by_handoff=[0])
    assert handed_over(parts, 7, 40) == [] and handed_over(parts, 7, 48, group=1) == []
    both = Parts([FULL, STATES], by_handoff=[1])
    assert handed_over(both, 7, 48, group=1) == [(1, [7])]


def test_states_behind_inexact_tokens_are_not_stored() -> None:
    parts = Parts([STATES], by_handoff=[0])
    parts.exactness.is_watching = True
    for exact, is_stored in ((47, False), (48, True)):
        parts.exactness._exact_tokens = {"a": exact}
        assert handed_over(parts, 7, 48) == ([(0, [7])] if is_stored else [])


def test_blocks_of_states_that_are_handed_over_are_not_stored_by_their_place() -> None:
    parts = Parts([STATES], by_handoff=[0])
    assert plan(parts, (parts.state(request("a", 64)), 64))[0] == ()


# --------------------------------------------------------------------------------- ends of requests


def test_what_a_request_left_is_stored_with_the_next_step() -> None:
    parts = Parts()
    state = parts.state(request("a", 16, decoded=17))
    parts.planner.finish(state, [[1, 2]], 32)
    assert stored(plan(parts)[0]) == [(0, [1, 2])]
    assert plan(parts) == ((), ())


@pytest.mark.parametrize("tokens, is_stored", [(15, False), (16, True)])
def test_a_request_that_fills_no_block_leaves_nothing(tokens: int, is_stored: bool) -> None:
    parts = Parts()
    parts.planner.finish(parts.state(request("a", 16)), [[1]], tokens)
    assert bool(plan(parts)[0]) == is_stored


@pytest.mark.parametrize("how", ["is_held", "is_rekeying", "absent"])
def test_nothing_is_left_while_nothing_may_be_stored(how: str) -> None:
    parts = Parts()
    parts.server.up = how != "absent"
    if how != "absent":
        setattr(parts.planner, how, True)
    parts.planner.finish(parts.state(request("a", 32)), [[1, 2]], 32)
    parts.server.up = True
    parts.planner.is_held = parts.planner.is_rekeying = False
    assert plan(parts)[0] == ()


def test_tails_that_are_overwritten_before_their_step_are_dropped_whole() -> None:
    parts = Parts()
    parts.put("a", [1])
    parts.planner.finish(parts.state(request("a", 48)), [[1, 2, 3]], 48)
    parts.planner.finish(parts.state(request("b", 16)), [[4]], 16)
    assert stored(plan(parts, written=[3])[0]) == [(0, [4])]


def test_a_block_that_a_tail_holds_is_not_stored_by_another_request() -> None:
    parts = Parts()
    parts.planner.finish(parts.state(request("a", 32)), [[1, 2]], 32)
    parts.planner.finish(parts.state(request("b", 48)), [[1, 2, 3]], 48)
    state = parts.state(request("c", 64))
    assert stored(plan(parts, (state, 64))[0]) == [(0, [1, 2]), (0, [3]), (0, [4])]


@pytest.mark.parametrize("how", ["tails.forget", "take_all_back", "plan_broke"])
def test_tails_that_are_void_are_gone_and_their_blocks_free(how: str) -> None:
    parts = Parts()
    parts.planner.finish(parts.state(request("a", 32)), [[1, 2]], 32)
    attrgetter(how)(parts.planner)()
    assert plan(parts) == ((), ())
    parts.planner.finish(parts.state(request("b", 32)), [[1, 2]], 32)
    assert stored(plan(parts)[0]) == [(0, [1, 2])]


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


@pytest.mark.parametrize(
    "sizes, stores",
    [([1, 1], 1), ([STORE_BLOCKS, 1], 2), ([0, 0], 1), ([STORE_BLOCKS - 1, 1], 1)],
)
def test_one_store_has_so_many_blocks_at_most(sizes: list[int], stores: int) -> None:
    runs = [BlockRun(0, [b""] * size) for size in sizes]
    found = portions(runs)
    assert len(found) == stores and [run for part in found for run in part] == runs
    assert all(sum(len(run.hashes) for run in part) <= STORE_BLOCKS for part in found)


def test_chains_are_no_longer_than_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    from hotkv_vllm.scheduler import stores

    monkeypatch.setattr(stores, "STORE_BLOCKS", 3)
    parts = Parts()
    jobs, _ = plan(parts, (parts.state(request("a", 112)), 112))
    assert stored(jobs) == [(0, [1, 2, 3]), (0, [4, 5, 6]), (0, [7])]
    assert [run.depth for job in jobs for run in job.runs] == [0, 3, 6] and len(jobs) == 3


# --------------------------------------------------------------------------------- loads and resets


def test_what_a_load_brought_is_not_stored_and_marks_only_go_forward() -> None:
    parts = Parts()
    state = parts.state(request("a", 64))
    parts.planner.loaded(state, (2,))
    assert stored(plan(parts, (state, 64))[0]) == [(0, [3, 4])]
    parts.planner.loaded(state, (1,))
    parts.planner.loaded(state, ())
    assert state.store.stored_blocks == [4]


@pytest.mark.parametrize("computed, may_store", [(0, True), (1, False)])
def test_after_a_reset_only_requests_without_blocks_store(computed: int, may_store: bool) -> None:
    parts = Parts()
    one = request("a", 64)
    state = parts.state(one)
    plan(parts, (state, 32))
    one.num_computed_tokens = computed
    parts.planner.reset(state)
    assert state.store.may_store == may_store
    if may_store:
        assert (state.store.stored_blocks, state.store.next_check_tokens) == ([0], TOKENS)
        state.store.may_store = False
        parts.planner.reset(state)
        assert not state.store.may_store


# ---------------------------------------------------------------------------------- representations


def test_representations_go_with_their_blocks_or_after_them() -> None:
    parts = Parts(represented=[0])
    parts.put("a", [0, 1])
    parts.put("a", [1], 1)
    (job,), _ = plan(parts, (parts.state(request("a", 64)), 64))
    assert stored([job]) == [(0, [3, 4])]
    assert [run.block_ids.tolist() for run in job.representations] == [[1], [3, 4]]
    assert all(run.group_index == 1 and not len(run.token_ids) for run in job.representations)

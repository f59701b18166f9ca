"""How one request comes to its hit, step by step: what is asked, what is answered to vLLM, what is
given back. No engine; the server is a double and time stands still."""

from typing import Any

import numpy as np
import pytest

from hotkv_client.types import LeaseGrant
from hotkv_vllm.scheduler.hits import (
    HINT_MEMORY_S,
    LEASE_SHARE_BEFORE_LOAD,
    MISS_MEMORY_S,
    NEVER_AGAIN,
    pinned_masks,
)
from hotkv_vllm.scheduler.loads import ADMISSION_PATIENCE_S
from hotkv_vllm.scheduler.request import ASK_AGAIN, NO_HIT, HitState, Phase
from tests.vllm.desks import LONG, granted
from tests.vllm.parts import FULL, TOKENS, WINDOW, Parts, request


def loading(parts: Parts, name: str = "a", blocks: int = 4) -> Any:
    state = granted(parts, name, blocks)
    assert parts.load(state, blocks * TOKENS, [list(range(1, 8))] * len(parts.specs))
    assert state.is_loading
    return state


# ---------------------------------------------------------------------------------------- the limit


@pytest.mark.parametrize("table", [True, False], ids=["table", "calls"])
def test_no_more_is_asked_for_than_a_hit_could_use(table: bool) -> None:
    parts = Parts()
    parts.server.table = table
    parts.put("a", range(5))
    parts.hit(parts.state(request("a", 4 * TOKENS)))
    asked = dict(parts.server.calls)
    (leased,) = asked["acquire"]
    assert len(leased.hashes) == 3
    if not table:
        (looked_up,) = asked["lookup"]
        assert len(looked_up.hashes) == 3


def test_what_the_engine_holds_is_neither_leased_nor_offered() -> None:
    parts = Parts()
    state = granted(parts, computed=TOKENS)
    assert state.hit.leased == [range(1, 4)]
    # A local hit inside a block: that block is loaded whole.
    other = parts.state(request("b", LONG))
    parts.put("b", range(1, 4))
    assert parts.hit(other, TOKENS + 3) == 3 * TOKENS - 3
    assert other.hit.leased == [range(1, 4)]


# ------------------------------------------------------------------------------------ hint and miss


def test_the_hint_of_an_arrival_is_used_for_a_moment() -> None:
    parts = Parts()
    parts.server.hold.add("acquire")
    parts.put("a", range(4))
    for age_s, probes in ((HINT_MEMORY_S / 2, 0), (HINT_MEMORY_S, 1), (HINT_MEMORY_S * 2, 1)):
        state = parts.state(request("a", LONG))
        parts.finder.arrive(state, parts.clock)
        before = parts.server.count("probe")
        assert parts.finder.match(state, 0, parts.clock + age_s) == ASK_AGAIN
        assert (parts.server.count("probe") > before) == bool(probes)
        # It is used once.
        assert state.hit.hint is None
        parts.finder.give_back(state)


def test_a_miss_is_remembered_for_a_moment_and_counted_once() -> None:
    parts = Parts()
    state = parts.state(request("a", LONG))
    assert parts.match(state) == NO_HIT
    parts.put("a", range(4))
    parts.clock += MISS_MEMORY_S / 2
    probes = parts.server.count("probe")
    assert parts.match(state) == NO_HIT and parts.server.count("probe") == probes
    parts.clock = state.hit.miss_until_s
    assert parts.hit(state) == 4 * TOKENS
    parts.finder.forget(state)
    parts.drop("a", range(4))
    assert parts.match(state) == NO_HIT
    assert parts.count("miss_requests") == 1 and not parts.count("offered_requests")


def test_an_offer_is_counted_once_and_what_is_loaded_too() -> None:
    parts = Parts()
    state = loading(parts)
    for _ in range(2):
        parts.finder.end_load(state, False)
        parts.clock += 1
        assert parts.hit(state) == 4 * TOKENS
        assert parts.load(state, 4 * TOKENS, [[1, 2, 3, 4]])
    assert parts.count("offered_requests") == parts.count("hit_requests") == 1
    assert parts.count("offered_tokens") == parts.count("hit_tokens") == 4 * TOKENS
    assert not parts.count("miss_requests")


# ------------------------------------------------------------------------------------ late and lost


@pytest.mark.parametrize("kind", ["lookup", "acquire"])
def test_a_request_waits_for_an_answer_up_to_its_deadline(kind: str) -> None:
    parts = Parts()
    parts.server.table, parts.server.hold = kind == "acquire", {kind}
    parts.put("a", range(4))
    state = parts.state(request("a", LONG))
    assert parts.match(state) == ASK_AGAIN
    waits_s = parts.config.lookup_timeout_s
    parts.clock += waits_s * 0.99
    assert parts.match(state) == ASK_AGAIN and not parts.count("lookup_timeouts")
    parts.clock += waits_s * 0.01
    assert parts.match(state) == NO_HIT
    assert parts.count("lookup_timeouts") == 1 and state.hit.phase is Phase.IDLE
    # While it is overdue nobody else asks; once it has come all do.
    other = parts.state(request("b", LONG))
    parts.put("b", range(4))
    assert parts.match(other) == NO_HIT
    lease = parts.server.leases.copy()
    parts.server.hold = set()
    parts.server.settle()
    parts.clock += 1
    assert parts.hit(other) == 4 * TOKENS
    # The lease that came late was let go again.
    assert lease.keys() <= set(parts.server.released) or not lease
    assert list(parts.server.leases) == [other.hit.lease_id]


# ------------------------------------------------------------------------------------------- leases


def test_a_grant_that_is_shorter_than_asked_shortens_the_hit() -> None:
    parts = Parts()
    parts.put("a", range(4))
    parts.server.grant_limit = 2
    assert parts.hit(parts.state(request("a", LONG))) == 2 * TOKENS
    assert parts.count("short_grants") == 1
    parts.server.grant_limit = 0
    state = parts.state(request("a", LONG))
    assert parts.hit(state) == 0 and state.hit.lease_id == ""
    assert parts.count("short_grants") == 2 and len(parts.server.released) == 1
    parts.server.grant_limit = 1 << 30
    assert parts.hit(parts.state(request("a", LONG))) == 4 * TOKENS
    assert parts.count("short_grants") == 2


def test_a_grant_of_fewer_groups_than_were_asked_for_is_an_error() -> None:
    parts = Parts([FULL, WINDOW])
    hit = HitState(hit_tokens=TOKENS, leased=[range(1), range(1)])
    with pytest.raises(ValueError, match="shorter"):
        pinned_masks(parts.groups, hit, [np.ones(1, np.bool_)])


def test_a_grant_is_answered_again_until_half_its_life_is_over() -> None:
    parts = Parts(lease_ttl_s=10.0)
    state = granted(parts)
    first = state.hit.lease_id
    parts.clock += 10.0 * LEASE_SHARE_BEFORE_LOAD - 0.01
    assert parts.match(state) == (4 * TOKENS, True) and state.hit.lease_id == first
    parts.clock += 0.01
    assert parts.match(state) == (4 * TOKENS, True)
    assert parts.server.released == [first] and state.hit.lease_id != first


def test_the_life_of_a_grant_is_the_servers_where_it_says_one() -> None:
    parts = Parts(lease_ttl_s=10.0)
    parts.put("a", range(4))
    for given_s, life_s in ((4.0, 4.0), (0.0, 10.0)):
        parts.server.hold = {"acquire"}
        state = parts.state(request("a", LONG))
        assert parts.match(state) == ASK_AGAIN
        mask = (np.ones(4, np.bool_),)
        state.hit.answer.set_result(LeaseGrant(state.hit.lease_id, mask, given_s))
        parts.server.held.clear()
        assert parts.match(state) == (4 * TOKENS, True)
        assert state.hit.lease_ends_s == parts.clock + life_s * LEASE_SHARE_BEFORE_LOAD


@pytest.mark.parametrize("moment", ["leasing", "granted"])
def test_a_lease_for_another_local_hit_is_given_back(moment: str) -> None:
    parts = Parts()
    parts.server.hold = {"acquire"} if moment == "leasing" else set()
    parts.put("a", range(4))
    state = parts.state(request("a", LONG))
    assert parts.match(state) == (ASK_AGAIN if moment == "leasing" else (4 * TOKENS, True))
    parts.server.hold.clear()
    parts.server.settle()
    first = state.hit.lease_id
    answer = parts.match(state, TOKENS)
    assert answer == (NO_HIT if moment == "leasing" else (3 * TOKENS, True))
    assert parts.server.released == [first]
    parts.clock += 1
    assert parts.hit(state, TOKENS) == 3 * TOKENS


# -------------------------------------------------------------------------------------------- loads


@pytest.mark.parametrize(
    "external, fits", [(0, False), (-1, False), (4, True), (1, True), (5, False)]
)
def test_no_load_is_longer_than_its_lease(external: int, fits: bool) -> None:
    parts = Parts()
    state = granted(parts)
    job = parts.load(state, external * TOKENS, [list(range(1, 9))])
    assert (job is not None) == fits == state.is_loading
    if job is not None:
        (run,) = job.runs
        assert run.lease_positions.tolist() == list(range(external))
        assert run.block_ids.tolist() == list(range(1, external + 1))
        assert (job.lease_id, job.timeout_s) == (state.hit.lease_id, parts.config.load_timeout_s)


def test_a_table_that_is_too_short_is_no_load() -> None:
    parts = Parts()
    assert parts.load(granted(parts), 4 * TOKENS, [[1, 2, 3]]) is None


def test_a_load_that_needs_more_than_is_leased_is_none() -> None:
    """vLLM wants a shorter hit, whose window lies before what is leased."""
    parts = Parts([FULL, WINDOW])
    parts.put("a", range(4))
    parts.put("a", [2, 3], 1)
    state = parts.state(request("a", LONG))
    parts.hit(state)
    assert parts.load(state, 3 * TOKENS, [[1, 2, 3], [0, 12, 13]]) is None
    assert not state.is_loading and not state.hit.unproved_loads


def test_a_shorter_hit_does_not_reach_behind_the_lease() -> None:
    """The grant lacks the last full block. A hit of three blocks would need the window's second,
    which is ready and not leased."""
    parts = Parts([FULL, WINDOW])
    parts.put("a", range(4))
    parts.put("a", range(4), 1)
    parts.server.hold = {"acquire"}
    state = parts.state(request("a", LONG))
    assert parts.match(state) == ASK_AGAIN and state.hit.leased == [range(4), range(2, 4)]
    pinned = np.array([True, True, True, False]), np.ones(2, np.bool_)
    state.hit.answer.set_result(LeaseGrant(state.hit.lease_id, pinned, 9.0))
    assert parts.match(state) == NO_HIT
    assert parts.count("short_grants") == 1 and parts.server.released


def test_blocks_that_are_leased_and_were_not_pinned_are_not_loaded() -> None:
    parts = Parts([FULL, WINDOW])
    parts.put("a", range(4))
    parts.put("a", [1, 2, 3], 1)
    state = parts.state(request("a", LONG))
    parts.hit(state)
    state.hit.ready[1][3] = False
    assert parts.load(state, 4 * TOKENS, [[1, 2, 3, 4], [0, 0, 13, 14]]) is None


# ------------------------------------------------------------------------------------ ends of loads


def test_only_what_was_leased_is_hidden() -> None:
    parts = Parts()
    parts.put("a", range(4))
    state = parts.state(request("a", LONG))
    parts.hit(state, 2 * TOKENS)
    parts.load(state, 2 * TOKENS, [[1, 2, 3, 4]])
    parts.finder.end_load(state, True)
    assert len(parts.finder.hidden) == 2
    assert parts.hit(parts.state(request("a", LONG))) == 2 * TOKENS


@pytest.mark.parametrize("retries", [0, 2])
def test_a_request_is_offered_hits_until_so_many_loads_failed(retries: int) -> None:
    parts = Parts(max_load_retries=retries)
    state = loading(parts)
    for failed in range(1, retries + 2):
        parts.finder.end_load(state, True)
        parts.finder.hidden.clear_all()
        parts.clock += 1
        assert state.hit.failed_loads == failed
        if failed <= retries:
            assert parts.hit(state) == 4 * TOKENS
            assert parts.load(state, 4 * TOKENS, [[1, 2, 3, 4]])
    assert parts.match(state) == NO_HIT


def test_loads_whose_end_was_never_seen_count_as_failed() -> None:
    parts = Parts()
    state = loading(parts)
    parts.finder.give_back(state)
    assert not state.hit.failed_loads and parts.match(state) == NO_HIT
    assert not parts.server.count("lookup") and parts.server.count("acquire") == 1


def test_a_request_whose_load_is_given_up_is_offered_nothing_more() -> None:
    parts = Parts(max_load_retries=1000)
    state = loading(parts)
    parts.finder.give_up(state)
    assert state.hit.failed_loads == NEVER_AGAIN and not parts.server.leases
    parts.clock += 1
    assert parts.match(state) == NO_HIT and "a" in parts.finder.failed_loads


def test_a_grant_does_not_wait_for_ever_behind_a_request_whose_load_failed() -> None:
    parts = Parts()
    state = granted(parts)
    parts.finder.load_failed(parts.state(request("other", LONG)))
    parts.clock += ADMISSION_PATIENCE_S
    assert parts.match(state) == (4 * TOKENS, True)
    parts.clock += 0.01
    assert parts.match(state) == NO_HIT and not parts.server.leases
    # It is computed, and not offered the hit again.
    parts.clock += 1
    assert parts.match(state) == NO_HIT


@pytest.mark.parametrize("failed_too", [False, True])
def test_what_is_void_is_forgotten_and_a_load_under_way_goes_on(failed_too: bool) -> None:
    parts = Parts()
    state = granted(parts)
    lease_id, state.hit.failed_loads = state.hit.lease_id, 1
    state.hit.miss_until_s, state.hit.hint = parts.clock + 9, ()
    parts.finder.forget(state, failed_too)
    assert parts.server.released == [lease_id] and state.hit.phase is Phase.IDLE
    assert not state.hit.miss_until_s and state.hit.hint is None
    assert state.hit.failed_loads == (0 if failed_too else 1)
    state = loading(parts, "b")
    parts.finder.forget(state)
    assert state.is_loading and state.hit.lease_id in parts.server.leases


# ----------------------------------------------------------------------------- groups of many kinds


def test_groups_that_need_every_block_bound_what_is_probed_of_the_others() -> None:
    """The full group has one block, so of the windows' four only the first is looked at."""
    parts = Parts([WINDOW, FULL])
    parts.put("a", range(1), 1)
    parts.put("a", range(4), 0)
    state = parts.state(request("a", LONG))
    assert parts.hit(state) == TOKENS
    probes = [what for kind, what in parts.server.calls if kind == "probe"]
    assert probes[-1] == 1
    # Without a block of the full group the windows are not looked at at all.
    parts.drop("a", [0], 1)
    before = len(parts.server.calls)
    assert parts.match(parts.state(request("a", LONG))) == NO_HIT
    assert [what for kind, what in parts.server.calls[before:] if kind == "probe"] == [1]


def test_of_windows_no_block_is_probed_that_no_hit_could_use() -> None:
    parts = Parts([WINDOW])
    parts.match(parts.state(request("a", 4 * TOKENS)))
    assert [what for kind, what in parts.server.calls if kind == "probe"] == [3]


# ---------------------------------------------------------------------------------- representations


def test_blocks_that_all_came_with_representations_are_not_looked_at_again() -> None:
    parts = Parts(represented=[0])
    for group in (0, 1):
        parts.put("a", range(4), group)
    state = parts.state(request("a", LONG))
    parts.hit(state)
    parts.load(state, 4 * TOKENS, [[1, 2, 3, 4]])
    assert parts.finder.end_load(state, False) == (4,)
    # Behind a local hit they count from there.
    parts.drop("a", [3], 1)
    other = parts.state(request("a", LONG))
    parts.hit(other, TOKENS)
    parts.load(other, 3 * TOKENS, [[1, 2, 3, 4]])
    assert parts.finder.end_load(other, False) == (3,)

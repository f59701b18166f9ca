"""`HitFinder` step by step. Fake server, simulated time."""

from typing import Any

import numpy as np
import pytest

from hotkv_client.types import LeaseGrant
from hotkv_proto.reports import Miss
from hotkv_vllm.config import LEASE_TTL_S
from hotkv_vllm.scheduler.failed_loads import ADMISSION_PATIENCE_S
from hotkv_vllm.scheduler.find.hits import (
    HINT_MEMORY_S,
    LEASE_SHARE_BEFORE_LOAD,
    MISS_MEMORY_S,
)
from hotkv_vllm.scheduler.hidden_keys import HIDDEN_FOR_S
from hotkv_vllm.scheduler.request import ASK_AGAIN, NO_HIT, Phase
from tests.vllm.desks import LONG, desk, granted
from tests.vllm.parts import FULL, TOKENS, WINDOW, Parts, request

__all__ = ["desk"]


def loading(parts: Parts, name: str = "a", blocks: int = 4) -> Any:
    state = granted(parts, name, blocks)
    assert parts.load(state, blocks * TOKENS, [list(range(1, 8))] * len(parts.specs))
    assert state.is_loading
    return state


def asking(**settings: Any) -> tuple[Parts, Any]:
    parts = Parts(**settings)
    parts.put("a", range(4))
    return parts, parts.state(request("a", LONG))


@pytest.mark.parametrize("table", [True, False], ids=["table", "calls"])
def test_hit_asks_for_no_more_than_usable(table: bool) -> None:
    parts = Parts()
    parts.server.table = table
    parts.put("a", range(5))
    parts.hit(parts.state(request("a", 4 * TOKENS)))
    asked = dict(parts.server.calls)
    for kind in ("acquire", *(["lookup"] if not table else [])):
        (group,) = asked[kind]
        assert len(group.hashes) == 3
    # A block in which the engine's own hit ends is loaded whole.
    for computed, hit in ((TOKENS, 3 * TOKENS), (TOKENS + 3, 3 * TOKENS - 3)):
        state = parts.state(request("a", LONG))
        assert parts.hit(state, computed) == hit
        assert state.hit.leased == [range(1, 4)]


@pytest.mark.parametrize("kind", ["probe", "lookup"])
@pytest.mark.parametrize("age, asks", [(0.5, False), (1, True), (2, True)])
def test_arrivals_finding_is_used_once_briefly(kind: str, age: float, asks: bool) -> None:
    """age: multiple of `HINT_MEMORY_S`."""
    parts, state = asking()
    parts.server.table = kind == "probe"
    parts.drop("a", [3])
    parts.finder.arrive(state, parts.clock)
    parts.put("a", [3])
    before = parts.server.count(kind)
    parts.clock += age * HINT_MEMORY_S
    assert parts.hit(state) == (4 if asks else 3) * TOKENS
    assert (parts.server.count(kind) > before) == asks and state.hit.hint is None


def test_miss_is_remembered_briefly_counted_once() -> None:
    parts = Parts([FULL, WINDOW])
    state = parts.state(request("a", LONG))
    assert parts.match(state) == NO_HIT
    assert parts.server.count("probe") == 1, "no hit has a block of the window without the first"
    assert not parts.server.count("acquire")
    for group in (0, 1):
        parts.put("a", range(4), group)
    parts.clock += MISS_MEMORY_S / 2
    probes = parts.server.count("probe")
    assert parts.match(state) == NO_HIT and parts.server.count("probe") == probes
    parts.clock = state.hit.miss_until_s
    assert parts.hit(state) == 4 * TOKENS
    parts.finder.forget(state)
    parts.drop("a", range(4))
    assert parts.match(state) == NO_HIT
    assert parts.count("miss_requests") == 1 and not parts.count("offered_requests")


def test_offer_and_load_are_each_counted_once() -> None:
    parts = Parts()
    state = loading(parts)
    for _ in range(2):
        assert parts.finder.end_load(state, False) == (4,)
        parts.clock += 1
        assert parts.hit(state) == 4 * TOKENS
        assert parts.load(state, 4 * TOKENS, [[1, 2, 3, 4]])
    assert parts.count("offered_requests") == parts.count("hit_requests") == 1
    assert parts.count("offered_tokens") == parts.count("hit_tokens") == 4 * TOKENS
    assert not parts.count("miss_requests")


def test_a_hit_counts_once_its_load_has_succeeded() -> None:
    parts = Parts()
    state = loading(parts)
    assert parts.finder.end_load(state, True, is_excused=True) == ()
    parts.finder.forget(state, failed_too=True)
    parts.clock += 1
    assert parts.hit(state) == 4 * TOKENS
    assert parts.load(state, 3 * TOKENS, [[1, 2, 3]])
    assert not parts.count("hit_requests") and not parts.count("hit_tokens")
    assert parts.finder.end_load(state, False) == (3,)
    assert (parts.count("hit_requests"), parts.count("hit_tokens")) == (1, 3 * TOKENS)


@pytest.mark.parametrize("kind", ["lookup", "acquire"])
def test_request_waits_for_an_answer_until_deadline(kind: str) -> None:
    parts, state = asking()
    parts.server.table, parts.server.hold = kind == "acquire", {kind}
    assert parts.match(state) == ASK_AGAIN
    waits_s = parts.config.lookup_timeout_s
    parts.clock += waits_s * 0.99
    assert parts.match(state) == ASK_AGAIN and not parts.count("lookup_timeouts")
    parts.clock += waits_s * 0.01
    assert parts.match(state) == NO_HIT
    assert parts.count("lookup_timeouts") == 1 and state.hit.phase is Phase.IDLE
    assert state.hit.miss is Miss.LATE
    # No request asks while an answer is overdue.
    other = parts.state(request("b", LONG))
    parts.put("b", range(4))
    assert parts.match(other) == NO_HIT and other.hit.miss is Miss.LATE
    lease = parts.server.leases.copy()
    parts.server.hold = set()
    parts.server.settle()
    parts.clock += 1
    assert parts.hit(other) == 4 * TOKENS
    # The late answer granted a lease.
    assert lease.keys() <= set(parts.server.released) or not lease
    assert list(parts.server.leases) == [other.hit.lease_id]
    # The report must not name the earlier timeout.
    parts.drop("a", range(4))
    assert not parts.hit(state) and state.hit.miss is Miss.ABSENT


def test_shorter_grant_shortens_the_hit() -> None:
    parts, state = asking()
    for limit, blocks, num_short in ((2, 2, 1), (0, 0, 2), (1 << 30, 4, 2)):
        parts.server.grant_limit = limit
        parts.finder.forget(state)
        assert parts.hit(state) == blocks * TOKENS and bool(state.hit.lease_id) == bool(blocks)
        assert parts.count("short_grants") == num_short
        assert state.hit.miss is (Miss.REFUSED if blocks < 4 else Miss.PARTIAL_BLOCK)
    assert len(parts.server.released) == 2
    parts.finder.give_back(state)
    assert state.hit.miss is Miss.ABSENT, "vLLM has not taken the hit"


@pytest.mark.parametrize("num_tokens", [4 * TOKENS, 4 * TOKENS + 1, 5 * TOKENS - 1])
def test_drafters_hit_may_end_before_last_block(
    num_tokens: int,
) -> None:
    parts = Parts(drafts=[0])
    state, limit = parts.state(request("a", num_tokens)), num_tokens - 1
    for num_blocks, is_whole in ((3, False), (4, True)):
        parts.put("a", range(num_blocks))
        parts.finder.forget(state)
        assert parts.hit(state) == (num_blocks - 1) * TOKENS
        assert state.hit.miss is (Miss.PARTIAL_BLOCK if is_whole else Miss.ABSENT)
        masks = parts.finder.table.ready(state.request, 0)
        assert parts.groups.is_whole(masks, 0, limit) == is_whole


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW)])
def test_device_hit_is_whole_without_longer_hit(specs: Any) -> None:
    parts = Parts(specs)
    state, computed = parts.state(request("a", LONG)), (LONG - 1) // TOKENS * TOKENS
    masks = parts.finder.table.ready(state.request, computed)
    assert parts.groups.is_whole(masks, computed, LONG - 1)
    assert not parts.hit(state, computed) and state.hit.miss is Miss.PARTIAL_BLOCK


def test_shorter_hit_stays_within_the_lease() -> None:
    """A hit of three needs the window's second block."""
    parts = Parts([FULL, WINDOW])
    for group in (0, 1):
        parts.put("a", range(4), group)
    parts.server.hold = {"acquire"}
    state = parts.state(request("a", LONG))
    assert parts.match(state) == ASK_AGAIN and state.hit.leased == [range(4), range(2, 4)]
    pinned = np.array([True, True, True, False]), np.ones(2, np.bool_)
    state.hit.answer.set_result(LeaseGrant(state.hit.lease_id, pinned, 9.0))
    assert parts.match(state) == NO_HIT
    assert parts.count("short_grants") == 1 and parts.server.released


@pytest.mark.parametrize("given_s, life_s", [(4.0, 4.0), (0.0, LEASE_TTL_S)])
def test_grant_is_repeated_until_half_its_life(given_s: float, life_s: float) -> None:
    """given_s: time by the server; 0: not stated."""
    parts, state = asking()
    parts.server.hold = {"acquire"}
    assert parts.match(state) == ASK_AGAIN
    first = state.hit.lease_id
    state.hit.answer.set_result(LeaseGrant(first, (np.ones(4, np.bool_),), given_s))
    parts.server.hold.clear()
    for later_s in (0.0, life_s * LEASE_SHARE_BEFORE_LOAD - 0.01):
        parts.clock += later_s
        assert parts.match(state) == (4 * TOKENS, True) and state.hit.lease_id == first
    parts.clock += 0.02
    assert parts.match(state) == (4 * TOKENS, True)
    assert parts.server.released == [first] and state.hit.lease_id != first


@pytest.mark.parametrize("waits_s", [9.9, 10.0])
def test_lease_expiring_unread_is_taken_once_more(waits_s: float) -> None:
    """vLLM does not ask for requests behind others. Steps may be longer than leases: no third
    one."""
    parts, state = asking()
    parts.server.hold = {"acquire"}
    answers, leases = [parts.match(state)], []
    while answers[-1] == ASK_AGAIN:
        leases.append(state.hit.lease_id)
        state.hit.answer.set_result(LeaseGrant(leases[-1], (np.ones(4, np.bool_),), 10.0))
        parts.clock += waits_s
        answers.append(parts.match(state))
    if waits_s < 10:
        assert answers == [ASK_AGAIN, (4 * TOKENS, True)] and not parts.server.released
    else:
        assert answers == [ASK_AGAIN, ASK_AGAIN, NO_HIT] and parts.server.released == leases
        assert state.hit.miss is Miss.LATE


@pytest.mark.parametrize(("before", "after"), [(0, TOKENS), (TOKENS, 0)])
def test_grant_for_another_device_hit_is_replaced(before: int, after: int) -> None:
    """It changes, for example, when another request computes the common prefix."""
    parts, state = asking()
    parts.server.hold = {"acquire"}
    assert parts.match(state, before) == ASK_AGAIN
    first = state.hit.lease_id
    parts.server.resume()
    assert parts.hit(state, after) == 4 * TOKENS - after
    assert state.hit.leased == [range(after // TOKENS, 4)]
    assert list(parts.server.leases) == [state.hit.lease_id] != [first]
    assert not parts.count("miss_requests") and parts.hit(state, after) == 4 * TOKENS - after


def test_a_lease_ends_with_its_connection() -> None:
    parts = Parts()
    state = granted(parts)
    first = state.hit.lease_id
    parts.connection += 1
    assert parts.hit(state) == 4 * TOKENS and state.hit.lease_id != first
    parts.connection += 1
    assert parts.load(state, 4 * TOKENS, [[1, 2, 3, 4]]) is None


@pytest.mark.parametrize(
    "external, table, waits_s, fits",
    [
        (0, 9, 0.0, False),
        (-1, 9, 0.0, False),
        (4, 9, 0.0, True),
        (1, 9, 0.0, True),
        (5, 9, 0.0, False),
        (4, 3, 0.0, False),
        (4, 9, 29.9, True),
        (4, 9, 30.0, False),
    ],
)
def test_load_fits_its_lease_and_table(
    external: int, table: int, waits_s: float, fits: bool
) -> None:
    parts = Parts()
    state = granted(parts)
    parts.clock += waits_s
    job = parts.load(state, external * TOKENS, [list(range(1, 1 + table))])
    assert (job is not None) == fits == state.is_loading
    if job is not None:
        (run,) = job.runs
        assert run.lease_positions.tolist() == list(range(external))
        assert run.block_ids.tolist() == list(range(1, external + 1))
        assert (job.lease_id, job.timeout_s) == (state.hit.lease_id, parts.config.load_timeout_s)


@pytest.mark.parametrize("why", ["late", "cancelled", "server lost", "server back"])
def test_load_failing_without_bad_blocks_hides_none(desk: Any, why: str) -> None:
    one = desk()
    one.load()
    if why == "cancelled":
        one.desk.cancel_loads()
    one.parts.server.up = why != "server lost"
    one.parts.connection += why == "server back"
    assert one.parts.finder.end_load(one.desk.states["a"], True, why == "late") == ()
    one.parts.server.up = True
    assert one.parts.hit(one.parts.state(request("a", LONG))) == 4 * TOKENS


@pytest.mark.parametrize("stores", [True, False])
def test_the_keys_of_a_failed_load_are_hidden(stores: bool) -> None:
    """They are hidden until stored again, or for HIDDEN_FOR_S in an engine that never stores."""
    parts = Parts(stores=stores)
    parts.clock = 2 * HIDDEN_FOR_S
    parts.finder.end_load(loading(parts), True)
    parts.put("whole", range(4))
    whole = parts.state(request("whole", LONG))
    assert parts.hit(whole) == 4 * TOKENS and whole.hit.miss is Miss.PARTIAL_BLOCK
    for waited_s, hits in ((HIDDEN_FOR_S - 0.1, False), (0.1, not stores)):
        parts.clock += waited_s
        state = parts.state(request("a", LONG))
        assert bool(parts.hit(state)) == hits
        assert state.hit.miss is (Miss.PARTIAL_BLOCK if hits else Miss.FAILED_LOAD)


def test_unseen_and_abandoned_load_ends_count_failed() -> None:
    parts = Parts()
    state = loading(parts)
    parts.finder.give_back(state)
    assert not state.hit.has_failed and parts.match(state) == NO_HIT
    assert not parts.server.count("lookup") and parts.server.count("acquire") == 1
    parts = Parts()
    state = loading(parts)
    parts.finder.give_up(state)
    assert state.hit.has_failed and not parts.server.leases
    parts.clock += 1
    assert parts.match(state) == NO_HIT and "a" in parts.finder.failed_loads


def test_grant_does_not_wait_behind_failed_load() -> None:
    parts = Parts()
    state = granted(parts)
    parts.finder.load_failed(parts.state(request("other", LONG)))
    parts.clock += ADMISSION_PATIENCE_S
    assert parts.match(state) == (4 * TOKENS, True)
    # A failed request waits to be scheduled. This one waits ADMISSION_PATIENCE_S, then is
    # computed.
    for later_s in (0.01, 1):
        parts.clock += later_s
        assert parts.match(state) == NO_HIT and not parts.server.leases
        assert state.hit.miss is Miss.FAILED_LOAD


@pytest.mark.parametrize("failed_too", [False, True])
def test_void_is_forgotten_running_load_continues(failed_too: bool) -> None:
    parts = Parts()
    state = granted(parts)
    lease_id, state.hit.has_failed = state.hit.lease_id, True
    state.hit.miss_until_s, state.hit.hint = parts.clock + 9, ()
    parts.finder.forget(state, failed_too)
    assert parts.server.released == [lease_id] and state.hit.phase is Phase.IDLE
    assert not state.hit.miss_until_s and state.hit.hint is None
    assert state.hit.has_failed != failed_too
    state = loading(parts, "b")
    parts.finder.forget(state)
    assert state.is_loading and state.hit.lease_id in parts.server.leases

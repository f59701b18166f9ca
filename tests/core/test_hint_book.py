"""Tests the server's books of hints against naive models."""

from collections import OrderedDict
from dataclasses import replace
from statistics import median

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from hotkv_proto.hints import Status
from hotkv_proto.table import Words
from hotkv_server.hints import figures
from hotkv_server.hints.book.outcomes import HintBook, HintLimits, HintOutcome, TenantHints
from hotkv_server.hints.book.returns import (
    HELD_GAPS,
    MAX_HOLD_S,
    OWN_GAPS,
    PRIOR_GAPS,
    SHARED_GAPS,
    ReturnTimes,
    SessionGaps,
)
from hotkv_server.hints.book.sessions import MAX_OTHERS, MAX_OTHERS_BYTES, RECENT_S, HintSessions
from hotkv_server.node.capability import Filters

LIMITS = HintLimits(
    sessions=4, session_bytes=32 * 40, outcomes=6, actions_per_s=2.0, burst_actions=5, tracked=3,
    tracked_bytes=600, tenants=2,
)  # fmt: skip
CHAINS = st.lists(st.integers(0, 2), max_size=12)


def words(chain: list[int]) -> Words:
    """As in a real chain, each hash depends on all earlier blocks."""
    found, seed = [], 1
    for number in chain:
        seed = hash((seed, number)) & 0x7FFF_FFFF
        found.append(np.random.default_rng(seed).integers(0, 1 << 32, 8, np.uint32))
    return np.array(found, np.uint32).reshape(-1, 8)


def common(one: list[int], other: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


class SessionsMachine(RuleBasedStateMachine):
    """`HintSessions` against an OrderedDict. It has the latest prompt of each session and key
    space."""

    @initialize()
    def start(self) -> None:
        self.real = HintSessions(LIMITS.sessions, LIMITS.session_bytes)
        self.naive: OrderedDict[str, dict[int, list[int]]] = OrderedDict()
        self.others: list[tuple[float, int, list[int]]] = []
        self.now_s = 0.0

    @rule(name=st.sampled_from("abcdef"), space=st.integers(1, 2), chain=CHAINS)
    def use(self, name: str, space: int, chain: list[int]) -> None:
        self.real.use(name, space, words(chain), self.now_s)
        chains = self.naive.pop(name, {})
        chains[space] = chain
        self.naive[name] = chains
        while len(self.naive) > LIMITS.sessions or self.num_bytes() > LIMITS.session_bytes:
            self.naive.popitem(last=False)

    def num_bytes(self) -> int:
        return sum(32 * len(c) for chains in self.naive.values() for c in chains.values())

    @rule(space=st.integers(1, 2), chain=CHAINS)
    def use_without(self, space: int, chain: list[int]) -> None:
        self.real.use_without(space, words(chain), self.now_s)
        if chain:
            self.others.append((self.now_s, space, chain))

    @rule(name=st.sampled_from("abcdef"))
    def end(self, name: str) -> None:
        self.real.end(name)
        self.naive.pop(name, None)

    @rule(passed_s=st.sampled_from([1.0, RECENT_S, RECENT_S + 1]))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s

    @rule(
        name=st.sampled_from(["", *"abcdef"]),
        space=st.integers(1, 2),
        chain=CHAINS,
        back=st.integers(1, 4),
    )
    def shared(self, name: str, space: int, chain: list[int], back: int) -> None:
        for _, _, known in self.others[-back:][:1]:
            chain = known + chain
        lengths = [
            common(chains[space], chain)
            for other, chains in self.naive.items()
            if other != name and space in chains
        ]
        for used_s, where, other_chain in self.others:
            length = common(other_chain, chain)
            if where == space and used_s >= self.now_s - RECENT_S and length < len(other_chain):
                lengths.append(length)
        found = self.real.shared_blocks(space, words(chain), name, self.now_s)
        assert found == max(lengths, default=0)

    @invariant()
    def agrees(self) -> None:
        self.real.check_invariants()
        assert len(self.real) == len(self.naive)
        for name, chains in self.naive.items():
            session = self.real.get(name)
            assert session is not None
            lengths = {space: len(found) for space, found in session.chains.items()}
            assert lengths == {space: len(chain) for space, chain in chains.items()}


TestSessionsMachine = SessionsMachine.TestCase
TestSessionsMachine.settings = settings(max_examples=25, stateful_step_count=30)


class TenantMachine(RuleBasedStateMachine):
    """A tenant's record against dicts: outcomes of actions, and blocks reused because of them."""

    @initialize()
    def start(self) -> None:
        self.book = HintBook(LIMITS)
        self.real = self.book.tenant("t", 0.0)
        self.naive: OrderedDict[tuple[str, str], HintOutcome] = OrderedDict()
        self.watched: list[tuple[HintOutcome, list[int], int, set[int]]] = []
        self.now_s = 0.0

    @rule(
        message=st.sampled_from(["", "m", "n"]),
        action=st.sampled_from("abc"),
        chain=st.lists(st.integers(0, 2), min_size=4, max_size=12),
        start=st.integers(0, 5),
    )
    def act(self, message: str, action: str, chain: list[int], start: int) -> None:
        outcome, before = (
            HintOutcome(message, action, "pin", "", self.now_s),
            self.real.last_sequence,
        )
        begun = self.real.begin(outcome)
        if message and (message, action) in self.naive:
            assert begun is None
            return
        assert begun is outcome and self.real.since(before, "", 9) == [outcome]
        self.naive.pop((message, action), None)
        self.naive[message, action] = outcome
        while len(self.naive) > LIMITS.outcomes:
            _, gone = self.naive.popitem(last=False)
            self.watched = [one for one in self.watched if one[0] is not gone]
        if start < len(chain):
            self.watch(outcome, chain, start, set())

    def watch(self, outcome: HintOutcome, chain: list[int], start: int, seen: set[int]) -> None:
        self.real.track(outcome, 1, words(chain), start, len(chain))
        self.watched.append((outcome, chain, start, seen))
        while len(self.watched) > LIMITS.tracked or self.watched_bytes() > LIMITS.tracked_bytes:
            self.watched.pop(0)

    def watched_bytes(self) -> int:
        return sum(8 * len(chain) + len(chain) - start for _, chain, start, _ in self.watched)

    @rule(which=st.integers(0, 2), more=CHAINS)
    def go_on(self, which: int, more: list[int]) -> None:
        """Later hits of the ended request's own blocks count for the hint too."""
        for outcome, chain, start, seen in self.watched[which : which + 1]:
            self.watched.remove((outcome, chain, start, seen))
            self.watch(outcome, chain + more, start, seen)

    @precondition(lambda self: self.watched)
    @rule(chain=CHAINS, like=st.integers(0, 3), first=st.integers(0, 6), stop=st.integers(4, 12))
    def hit(self, chain: list[int], like: int, first: int, stop: int) -> None:
        """The prompt continues the chain of action `like`, or does not. Only first hits count as
        reused."""
        for _, watched, _, _ in self.watched[like : like + 1]:
            chain = watched + chain
        stop = min(stop, len(chain))
        before = {id(one[0]): (one[0].reused_blocks, one[0].sequence) for one in self.watched}
        expected = {name: count for name, (count, _) in before.items()}
        for outcome, mine, start, seen in self.watched:
            span = range(max(first, start), min(stop, common(mine, chain)))
            fresh = set(span) - seen
            seen |= fresh
            expected[id(outcome)] += len(fresh)
        for _ in range(2):
            self.real.hit(1, words(chain), first, stop, 0.5)
        for outcome, _, _, _ in self.watched:
            assert outcome.reused_blocks == expected[id(outcome)]
            assert outcome.saved_s == pytest.approx(0.5 * outcome.reused_blocks)
            count, sequence = before[id(outcome)]
            assert (outcome.sequence > sequence) == (outcome.reused_blocks > count)

    @rule(which=st.integers(0, 5))
    def settle(self, which: int) -> None:
        for outcome in list(self.naive.values())[which : which + 1]:
            before = self.real.last_sequence
            self.real.settle(outcome, Status.ACCEPTED, "why")
            assert (outcome.status, outcome.reason) == (Status.ACCEPTED, "why")
            assert self.real.since(before, "", 9) == [outcome]

    @rule(cursor_of=st.integers(0, 5), message=st.sampled_from(["", "m"]))
    def poll(self, cursor_of: int, message: str) -> None:
        numbers = sorted(one.sequence for one in self.naive.values())
        cursor = numbers[cursor_of] if cursor_of < len(numbers) else 0
        found = self.real.since(cursor, message, 100)
        assert [one.sequence for one in found] == sorted(
            one.sequence
            for one in self.naive.values()
            if one.sequence > cursor and message in ("", one.message_id)
        )

    @invariant()
    def agrees(self) -> None:
        self.book.check_invariants()
        assert list(self.real.outcomes) == list(self.naive)


TestTenantMachine = TenantMachine.TestCase
TestTenantMachine.settings = settings(max_examples=25, stateful_step_count=30)


def test_actions_beyond_the_rate_wait_a_second() -> None:
    tenant = HintBook(LIMITS).tenant("t", 10.0)
    assert [tenant.may_act(10.0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert [tenant.may_act(11.0) for _ in range(3)] == [True, True, False]
    assert not tenant.may_act(10.5)
    assert not tenant.may_act(13.0, 4.5) and tenant.may_act(13.0, 3.5)


def names(book: HintBook) -> list[str]:
    book.check_invariants()
    return [name for name, _ in book.all()]


def use(book: HintBook, name: str, now_s: float) -> TenantHints:
    tenant = book.tenant(name, now_s)
    tenant.sessions.use("s", 1, words([0] * 20), now_s)
    return tenant


def test_a_cursor_misses_nothing_of_the_next_server() -> None:
    cursor = 0
    for now_s, num_actions in ((10.0, 2), (10.5, 5)):
        tenant = HintBook().tenant("t", now_s)
        for number in range(num_actions):
            tenant.begin(HintOutcome("m", f"{now_s} {number}", "pin", "", now_s))
        assert len(tenant.since(cursor, "", 100)) == num_actions
        cursor = tenant.last_sequence


def test_operators_see_latest_actions_in_order() -> None:
    book = HintBook()
    for name, came_s in (("b", 1.0), ("a", 2.0), ("b", 3.0)):
        book.tenant(name, 0.0).begin(HintOutcome("m", f"{came_s}", "pin", "", came_s))
    for size in (1, 2, 3):
        rows = figures.hints(book, Filters({"page_size": f"{size}"}))["outcomes"]
        assert [row["action_id"] for row in rows] == ["1.0", "2.0", "3.0"][-size:]


def test_tenant_seen_longest_ago_is_forgotten() -> None:
    book = HintBook(LIMITS)
    first = book.tenant("a", 0.0)
    book.tenant("b", 1.0)
    assert book.tenant("a", 2.0) is first
    book.tenant("c", 3.0)
    assert names(book) == ["a", "c"]
    assert book.known("b") is None and book.known("a") is first


def test_sessions_of_all_tenants_are_bounded_together() -> None:
    """The tenant unused for longest is forgotten, but none with prefetches in progress."""
    limits = HintLimits(session_bytes=32 * 40, tenants=9, node_bytes=32 * 40)
    book = HintBook(limits)
    for number, name in enumerate("abc"):
        use(book, name, float(number))
    assert book.session_bytes() == 32 * 60
    book.tenant("c", 3.0)
    assert names(book) == ["b", "c"] and book.session_bytes() == 32 * 40
    book = HintBook(replace(limits, tenants=2))
    busy = use(book, "busy", 0.0)
    busy.num_prefetches, busy.prefetch_bytes = 1, 100
    for number, name in enumerate("abc"):
        use(book, name, float(number))
    book.tenant("c", 4.0)
    assert names(book) == ["busy", "c"] and book.known("busy") is busy
    busy.num_prefetches = 0
    book.tenant("a", 5.0)
    book.tenant("b", 6.0)
    assert names(book) == ["a", "b"]


def test_prompts_without_session_share_one_bound() -> None:
    book = HintBook()
    sessions = book.tenant("t", 0.0).sessions
    sessions.use("s", 1, words([0]), 0.0)
    for number in range(1, 40):
        sessions.use_without(number, np.zeros((1 << 13, 8), np.uint32), 1.0)
        sessions.check_invariants()
    assert sessions.other_bytes == MAX_OTHERS_BYTES
    assert book.session_bytes() == 32 + MAX_OTHERS_BYTES
    sessions.use_without(1, words([0, 1]), 2.0 + RECENT_S)
    assert sessions.other_bytes == 16
    for _ in range(2 * MAX_OTHERS):
        sessions.use_without(1, words([0, 1]), 2.0 + RECENT_S)
    assert sessions.other_bytes == 16 * MAX_OTHERS
    book.tenant("t", 3.0 + 2 * RECENT_S)
    assert sessions.other_bytes == 0


def test_a_prompt_larger_than_the_bound_is_cut() -> None:
    sessions = HintSessions(4, 32 * 5)
    sessions.use("s", 1, words([0] * 9), 0.0)
    session = sessions.get("s")
    assert session is not None and len(session.chains[1]) == 5
    sessions.check_invariants()


TURNS = st.tuples(st.integers(0, 2), st.booleans(), st.sampled_from([0.0, 0.5, 1.0, 3.0, 60.0]))


@given(turns=st.lists(TURNS, max_size=60))
@example([(0, at % 2 == 0, 0.5 + at % 7) for at in range(3 * SHARED_GAPS)])
@example([(0, False, 0.0), (0, True, MAX_HOLD_S / HELD_GAPS), (0, False, 0.0)])
@example([(0, at % 2 == 0, 4.0 if at < 40 else 1.0) for at in range(80)])
def test_session_is_expected_as_others_then_itself(
    turns: list[tuple[int, bool, float]],
) -> None:
    """That is the median of its latest pauses and of PRIOR_GAPS times the common median. Blocks
    are held for HELD_GAPS times that, but not beyond MAX_HOLD_S."""
    times, now_s = ReturnTimes(), 0.0
    known = [SessionGaps() for _ in range(3)]
    own: list[list[float]] = [[] for _ in known]
    everybody: list[float] = []
    idle_since_s: dict[int, float] = {}
    for which, begins, passed_s in turns:
        now_s += passed_s
        if begins:
            times.began(known[which], now_s)
            if which in idle_since_s:
                gap_s = now_s - idle_since_s.pop(which)
                own[which].append(gap_s)
                everybody.append(gap_s)
        else:
            expected_s, latest = 0.0, everybody[-SHARED_GAPS:]
            if latest:
                expected_s = median([*own[which][-OWN_GAPS:], *[median(latest)] * PRIOR_GAPS])
            hold_s = HELD_GAPS * expected_s
            found_s = times.ended(known[which], now_s)
            assert found_s == (hold_s if hold_s <= MAX_HOLD_S else 0.0)
            idle_since_s[which] = now_s
            assert times.expected_s(known[which]) == expected_s

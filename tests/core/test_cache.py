"""The whole core agrees with `CacheModel`: every answer is right, pinned blocks stay, and a call
that raises has changed no state."""

from collections.abc import Callable

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule

from hotkv_proto.errors import Reason
from hotkv_server.cache.values import HashList, Run
from tests.core.cache_machine import MAX_BLOCKS, NUMBERS
from tests.core.cache_reads import ReadRules
from tests.core.cache_residencies import ResidencyRules
from tests.core.support import begin_store, evict, evict_all, flush, reserve, words_of


class CacheMachine(ReadRules, ResidencyRules):
    """Reads, writes, operators, hints and nonsense in any order."""

    @rule(ks=st.integers(0, 2), group=st.integers(0, 1), numbers=NUMBERS | st.none())
    def evict(self, ks: int, group: int, numbers: list[int] | None) -> None:
        hashes = None if numbers is None else words_of(numbers)
        reasons = self.refusal(
            (
                ks > len(self.core.key_spaces) or (ks == 0 and numbers is not None),
                Reason.UNKNOWN_KEY_SPACE,
            )
        )
        answer = self.call(
            lambda: (
                evict_all(self.core, ks) if hashes is None else evict(self.core, ks, group, hashes)
            ),
            *reasons,
        )
        if answer is None:
            return
        if numbers is None:
            named = {key for key in self.model.ready if ks in (0, key[0])}
        else:
            named = {
                key
                for key in self.model.ready | set(self.model.written)
                if key[:2] == (ks, group) and key[2] in numbers
            }
        going = named & self.model.evictable()
        assert answer == (len(going), len(named - going))
        assert self.model.take_notices() == going

    @rule(ks=st.integers(0, 3))
    def flush(self, ks: int) -> None:
        reasons = self.refusal((ks not in self.core.key_spaces, Reason.UNKNOWN_KEY_SPACE))
        count = self.call(lambda: flush(self.core, ks), *reasons)
        if count is not None:
            assert count == self.model.flush(ks, self.whole)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), numbers=NUMBERS, group=st.integers(0, 1))
    def touch(self, data: st.DataObject, numbers: list[int], group: int) -> None:
        session, _, _ = self.session(data)
        self.core.touch(session, [HashList(group, words_of(numbers))], self.now_s)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def nonsense(self, data: st.DataObject) -> None:
        session, engine, ks = self.session(data)
        core, now_s, one = self.core, self.now_s, words_of([1])
        many = words_of([1] * (MAX_BLOCKS + 1))
        no_group, too_many = Run(2, one), Run(0, many)
        calls: list[tuple[Callable[[], object], Reason]] = [
            (lambda: core.lookup(0, []), Reason.UNKNOWN_KEY_SPACE),
            (lambda: core.lookup(ks, [HashList(-1, one)]), Reason.INVALID_FIELD),
            (lambda: core.lookup(ks, [HashList(0, many)]), Reason.TOO_LARGE),
            (lambda: core.acquire(999, "z", [], 0.0, now_s), Reason.UNKNOWN_SESSION),
            (lambda: core.acquire(session, "", [], 0.0, now_s), Reason.INVALID_FIELD),
            (
                lambda: core.acquire(
                    session, "z", [HashList(0, one), HashList(0, one)], 0.0, now_s
                ),
                Reason.INVALID_FIELD,
            ),
            (
                lambda: core.acquire(session, "z", [HashList(7, one)], 0.0, now_s),
                Reason.INVALID_FIELD,
            ),
            (lambda: core.touch(999, [], now_s), Reason.UNKNOWN_SESSION),
            (lambda: core.touch(session, [HashList(2, one)], now_s), Reason.INVALID_FIELD),
            (lambda: core.release(999, "a"), Reason.UNKNOWN_SESSION),
            (lambda: reserve(core, 999, "z", [], 0.0, now_s), Reason.UNKNOWN_SESSION),
            (lambda: reserve(core, session, "z", [no_group], 0.0, now_s), Reason.INVALID_FIELD),
            (lambda: reserve(core, session, "z", [too_many], 0.0, now_s), Reason.TOO_LARGE),
            (
                lambda: reserve(core, session, "z", [Run(0, one, depth=-1)], 0.0, now_s),
                Reason.INVALID_FIELD,
            ),
            (lambda: reserve(core, session, "", [Run(0, one)], 0.0, now_s), Reason.INVALID_FIELD),
            (lambda: core.begin_load(999, "z", "a", []), Reason.UNKNOWN_SESSION),
            (lambda: core.begin_load(session, "", "a", []), Reason.INVALID_FIELD),
            (lambda: core.begin_load(session, "z", "never", []), Reason.UNKNOWN_LEASE),
            (lambda: begin_store(core, 999, "z", "a", [], 0, 0.0, now_s), Reason.UNKNOWN_SESSION),
            (lambda: begin_store(core, session, "", "a", [], 0, 0.0, now_s), Reason.INVALID_FIELD),
            (
                lambda: core.open_session("", "rank", self.key_spaces[0], now_s),
                Reason.INVALID_FIELD,
            ),
            (lambda: evict_all(core, 9), Reason.UNKNOWN_KEY_SPACE),
            (lambda: evict(core, ks, 2, one), Reason.INVALID_FIELD),
            (lambda: evict(core, ks, 0, many), Reason.TOO_LARGE),
        ]
        if not core.draining and self.may_lease(engine):
            calls += [
                (
                    lambda: begin_store(core, session, "z", "z", [no_group], 0, 0.0, now_s),
                    Reason.INVALID_FIELD,
                ),
                (
                    lambda: begin_store(
                        core, session, "z", "z", [Run(0, one)], self.num_shards, 0.0, now_s
                    ),
                    Reason.INVALID_FIELD,
                ),
                (
                    lambda: begin_store(core, session, "z", "z", [Run(0, one)], -1, 0.0, now_s),
                    Reason.INVALID_FIELD,
                ),
            ]
        for function, reason in calls:
            self.call(function, reason)


class ResidentMachine(CacheMachine):
    """Leaves out rules that do not concern residencies, so that the others run more often."""

    acquire = release = begin_load = reserve = touch = nonsense = None  # type: ignore[assignment]


TestCacheMachine = CacheMachine.TestCase
TestResidentMachine = ResidentMachine.TestCase

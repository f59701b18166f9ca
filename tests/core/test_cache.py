"""Compares `CacheCore` with the naive `CacheModel` in random calls. A call that raises must
change nothing."""

from collections.abc import Callable

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule

from hotkv_proto.errors import Reason
from hotkv_server.cache.values import HashList, Run
from tests.core.cache_machine import MAX_BLOCKS, NUMBERS
from tests.core.cache_reads import ReadRules
from tests.core.cache_residencies import ResidencyRules
from tests.core.cache_resizes import ResizeRules
from tests.core.support import (
    begin_store,
    evict,
    evict_all,
    flush,
    make_room_ahead,
    reserve,
    words_of,
)

Call = Callable[[], object]


class CacheMachine(ReadRules, ResidencyRules, ResizeRules):
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

    @rule()
    def make_room_ahead(self) -> None:
        make_room_ahead(self.core, self.now_s)
        wanted = self.core.space.reserve.wanted
        gone = self.model.take_notices()
        assert not gone or (wanted and not self.core.draining), "evicted for nobody"

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
        field, large, nobody = Reason.INVALID_FIELD, Reason.TOO_LARGE, Reason.UNKNOWN_SESSION

        def acquires(*groups: int, by: int = session, lease: str = "z") -> Call:
            listed = [HashList(group, one) for group in groups]
            return lambda: core.acquire(by, lease, listed, 0.0, now_s)

        def reserves(*runs: Run, by: int = session, lease: str = "z") -> Call:
            return lambda: reserve(core, by, lease, [*runs], 0.0, now_s)

        def stores(*runs: Run, by: int = session, transfer: str = "z", shard: int = 0) -> Call:
            return lambda: begin_store(core, by, transfer, "z", [*runs], shard, 0.0, now_s)

        calls: list[tuple[Call, Reason]] = [
            (lambda: core.lookup(0, []), Reason.UNKNOWN_KEY_SPACE),
            (lambda: core.lookup(ks, [HashList(-1, one)]), field),
            (lambda: core.lookup(ks, [HashList(0, many)]), large),
            (acquires(by=999), nobody),
            (acquires(lease=""), field),
            (acquires(0, 0), field),
            (acquires(7), field),
            (lambda: core.touch(999, [], now_s), nobody),
            (lambda: core.touch(session, [HashList(2, one)], now_s), field),
            (lambda: core.release(999, "a"), nobody),
            (reserves(by=999), nobody),
            (reserves(Run(2, one)), field),
            (reserves(Run(0, many)), large),
            (reserves(Run(0, one, depth=-1)), field),
            (reserves(Run(0, one), lease=""), field),
            (lambda: core.begin_load(999, "z", "a", []), nobody),
            (lambda: core.begin_load(session, "", "a", []), field),
            (lambda: core.begin_load(session, "z", "never", []), Reason.UNKNOWN_LEASE),
            (stores(by=999), nobody),
            (stores(transfer=""), field),
            (lambda: core.open_session("", "rank", self.key_spaces[0], now_s), field),
            (lambda: evict_all(core, 9), Reason.UNKNOWN_KEY_SPACE),
            (lambda: evict(core, ks, 2, one), field),
            (lambda: evict(core, ks, 0, many), large),
        ]
        if not core.draining and self.may_lease(engine):
            shards = (stores(Run(0, one), shard=shard) for shard in (-1, self.num_shards))
            calls += [(call, field) for call in (stores(Run(2, one)), *shards)]
        for call, reason in calls:
            self.call(call, reason)


class ResidentMachine(CacheMachine):
    """Has only the rules for residencies, so that they run more often."""

    acquire = release = begin_load = reserve = touch = nonsense = None  # type: ignore[assignment]


TestCacheMachine = CacheMachine.TestCase
TestResidentMachine = ResidentMachine.TestCase

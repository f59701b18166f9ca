"""Rules for residencies. A simulated client knows the slots of blocks, and whether its residency
is valid; while it is, the slots must hold these blocks."""

from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis.stateful import invariant, precondition, rule

from hotkv_proto import words
from hotkv_proto.blocks import BlockResult, ResidencyOpened
from hotkv_proto.errors import Reason
from hotkv_server.cache.readers import Uint64s
from hotkv_server.cache.room.shares import most_pinned
from hotkv_sparse.server.residency.book.bound import slot_cost
from tests.core.cache_machine import NUMBERS, RESIDENCY_IDS, SLAB
from tests.core.cache_model import Key, ModelResidency
from tests.core.cache_writes import WriteRules
from tests.core.support import residencies, words_of


def holds(arena_words: Uint64s, opened: ResidencyOpened) -> bool:
    """As `hotkv_client.Arena.holds` computes it."""
    return bool(
        arena_words[words.OLDEST_START] <= opened.start_number
        and arena_words[opened.word_index] == opened.word_value
    )


@dataclass
class Reader:
    """A client that reads a residency's blocks in place. `slots`: offset to key."""

    opened: ResidencyOpened
    session: int
    slots: dict[int, Key] = field(default_factory=dict)
    is_done: bool = False


class ResidencyRules(WriteRules):
    def taken_bytes(self) -> int:
        """Bytes that are pinned or still reserved. A slot that several residencies pin counts
        once."""
        pinned: dict[int, int] = {}
        promised = 0
        for residency in self.model.residencies.values():
            for group, most in residency.asked.items():
                cost = slot_cost(self.sizes[group], SLAB)
                mine = residency.rows.get(group, {})
                promised += (most - len(mine)) * cost
                pinned |= {offset: cost for _, _, offset in mine.values()}
        bound = residencies(self.core).bound
        assert (bound.promised_bytes, bound.pinned_bytes) == (promised, sum(pinned.values()))
        return promised + sum(pinned.values())

    @precondition(lambda self: self.sessions)
    @rule(
        data=st.data(),
        residency_id=st.sampled_from(RESIDENCY_IDS),
        counts=st.tuples(st.integers(0, 6), st.integers(0, 3)),
    )
    def open_residency(
        self, data: st.DataObject, residency_id: str, counts: tuple[int, int]
    ) -> None:
        session, engine, _ = self.session(data)
        existing = self.model.residencies.get((engine, residency_id))
        asked = {group: count for group, count in enumerate(counts) if count}
        if existing and data.draw(st.booleans()):
            asked = {group: count + counts[group] // 2 for group, count in existing.asked.items()}
        self.opens(session, residency_id, asked)

    def opens(self, session: int, residency_id: str, asked: dict[int, int]) -> None:
        """Opens or enlarges a residency. `asked`: blocks in each group."""
        engine, ks = self.sessions[session]
        existing = self.model.residencies.get((engine, residency_id))
        had = existing.asked if existing else dict.fromkeys(asked, 0)
        only_grows = asked.keys() == had.keys() and all(asked[g] >= n for g, n in had.items())
        more = {group: count - had[group] for group, count in asked.items()} if only_grows else {}
        whole, cost = (
            sum(count * slot_cost(self.sizes[group], SLAB) for group, count in counted.items())
            for counted in (asked, more)
        )
        taken = self.taken_bytes()
        others = self.model.unadmitted_bytes() + self.core.retention_pins.held_bytes
        arena_bytes = self.core.config.arena_bytes
        bound = min(int(0.8 * arena_bytes), most_pinned(arena_bytes))
        room = min(bound - taken, most_pinned(arena_bytes) - taken - others)
        if asked and only_grows:
            for _ in residencies(self.core).make_room(session, residency_id, asked):
                pass
            self.model.take_notices()
        slots: Counter[int] = Counter()
        for group, count in more.items():
            slots[self.sizes[group]] += count
        has_slabs = self.core.space.pool.floors.would_fit(slots)
        if self.sizes[0] == self.sizes[1] and not self.model.pins():
            assert has_slabs or cost > room, "nothing is in the way of slabs"
        reasons = self.refusal(
            (not asked, Reason.INVALID_FIELD),
            (not only_grows, Reason.DUPLICATE_ID),
            (cost and self.core.draining, Reason.DRAINING),
            (cost and whole > bound, Reason.RESIDENCY_TOO_LARGE),
            (cost and (cost > room or not has_slabs), Reason.NO_ROOM_FOR_RESIDENCY),
        )
        opened = self.call(
            lambda: residencies(self.core).open(session, residency_id, asked, self.now_s), *reasons
        )
        if opened is None:
            return
        assert holds(self.words, opened)
        if existing is not None:
            reader = self.readers[engine, residency_id]
            assert opened == reader.opened
            existing.asked = asked
            return
        self.model.residencies[engine, residency_id] = ModelResidency(engine, session, ks, asked)
        self.readers[engine, residency_id] = Reader(opened, session)
        self.all_readers.append(self.readers[engine, residency_id])

    def named(self, data: st.DataObject) -> tuple[int, str, int, str]:
        """(Session, engine, key space, residency id); mostly a residency that the engine has."""
        session, engine, ks = self.session(data)
        mine = sorted(name for name in self.model.residencies if name[0] == engine)
        if mine and data.draw(st.integers(0, 5)):
            return session, engine, ks, data.draw(st.sampled_from(mine))[1]
        return session, engine, ks, data.draw(st.sampled_from(RESIDENCY_IDS))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), group=st.integers(0, 2), first=st.integers(0, 3), numbers=NUMBERS)
    def extend_residency(
        self, data: st.DataObject, group: int, first: int, numbers: list[int]
    ) -> None:
        session, engine, ks, residency_id = self.named(data)
        residency = self.model.residencies.get((engine, residency_id))
        rows = residency.rows.get(group, {}) if residency else {}
        if rows and data.draw(st.integers(0, 3)):
            # Mostly lists blocks that the residency already has.
            numbers = [
                rows[first + at][1] if first + at in rows else number
                for at, number in enumerate(numbers)
            ]
        named = list(enumerate(numbers, first))
        fresh = [
            (at, number)
            for at, number in named
            if at not in rows and (ks, group, number) in self.model.ready
        ]
        most = residency.asked.get(group, 0) if residency else 0
        reasons = self.refusal(
            (residency is None, Reason.UNKNOWN_RESIDENCY),
            (residency is not None and group not in residency.asked, Reason.INVALID_FIELD),
            (
                residency is not None and any(at in rows and rows[at][1] != n for at, n in named),
                Reason.DUPLICATE_ID,
            ),
            (residency is not None and len(rows) + len(fresh) > most, Reason.INVALID_FIELD),
        )
        offsets = self.call(
            lambda: residencies(self.core).extend(
                session, residency_id, group, first, words_of(numbers), self.now_s
            ),
            *reasons,
        )
        if offsets is None or residency is None:
            return
        for at, number in fresh:
            self.model.pin_resident(residency, group, at, (ks, group, number))
        rows = residency.rows.get(group, {})
        assert offsets.tolist() == [rows[at][2] if at in rows else -1 for at, _ in named]
        self.tell(engine, residency_id)

    def tell(self, engine: str, residency_id: str) -> None:
        residency = self.model.residencies[engine, residency_id]
        self.readers[engine, residency_id].slots = {
            offset: (residency.key_space_id, group, number)
            for group, rows in residency.rows.items()
            for _, number, offset in rows.values()
        }

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), lists=st.tuples(NUMBERS, NUMBERS | st.just([])))
    def store_into_residency(self, data: st.DataObject, lists: tuple[list[int], list[int]]) -> None:
        """Within the reserved room, no store may be refused."""
        session, engine, _, residency_id = self.named(data)
        if (engine, residency_id) not in self.model.residencies:
            self.opens(session, residency_id, {0: 5, 1: 2})
        self.num_stores += 1
        name = f"store {self.num_stores}"
        residency = self.model.residencies.get((engine, residency_id))
        is_sure = residency is not None and self.is_sure(residency, lists)
        for shard in range(self.num_shards):
            if not self.store_begins(session, name, name, lists, shard, 0.0, residency_id):
                return
            started = self.model.transfers[session, name].results
            assert not is_sure or not any(BlockResult.NO_SPACE in row for row in started), (
                "a store was refused the room that it was promised"
            )
            self.finish(session, name, succeeded=True)
        if residency is not None:
            self.tell(engine, residency_id)
            for group, rows in residency.rows.items():
                first = min(rows, default=0)
                span = max(rows, default=-1) + 1 - first
                numbers = [rows[at][1] if at in rows else 77 for at in range(first, first + span)]
                offsets = residencies(self.core).extend(
                    session, residency_id, group, first, words_of(numbers), self.now_s
                )
                assert offsets.tolist() == [
                    rows[at][2] if at in rows else -1 for at in range(first, first + span)
                ]

    def is_sure(self, residency: ModelResidency, lists: tuple[list[int], list[int]]) -> bool:
        """Nobody else pins or writes, entries are free, and no slot is larger than a slab: the
        room is certain."""
        others = self.model.leases or self.model.transfers or self.model.kept
        if others or self.core.config.capacity < 60 or max(self.sizes) > SLAB:
            return False
        return all(
            len(set(numbers)) <= residency.asked.get(group, 0) - len(residency.rows.get(group, {}))
            for group, numbers in enumerate(lists)
        )

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), steps=st.integers(1, 9))
    def close_residency(self, data: st.DataObject, steps: int) -> None:
        session, engine, _, residency_id = self.named(data)
        record = self.core.sessions.record(session)
        residency = residencies(self.core).book.named(record, residency_id)
        known = self.model.residencies.pop((engine, residency_id), None)
        assert (residency is None) == (known is None)
        if residency is None or known is None:
            return
        known.is_open = False
        self.readers.pop((engine, residency_id)).is_done = True
        residencies(self.core).begin_closing(residency)
        residencies(self.core).check_invariants(self.core.sessions.records)
        while not residencies(self.core).give_back(residency, steps):
            residencies(self.core).check_invariants(self.core.sessions.records)

    @invariant()
    def readers_read_what_they_were_told(self) -> None:
        self.taken_bytes()
        for (engine, residency_id), residency in self.model.residencies.items():
            reader = self.readers[engine, residency_id]
            assert residency.is_open and holds(self.words, reader.opened)
        for reader in self.all_readers:
            if reader.is_done or not holds(self.words, reader.opened):
                continue
            for offset, key in reader.slots.items():
                for shard in range(self.num_shards):
                    assert self.model.arena[offset, shard] == key, (
                        "a slot changed under a reader whose words say that it holds"
                    )

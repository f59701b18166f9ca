"""Residencies: requests whose blocks stay in the arena as long as they run, for engines that read
them there and keep no copy.

Opening one reserves room; extending it, or storing into it, pins blocks and says where they lie.
Always true: an entry has one pin from each position of a residency that names it; what is pinned
and what is promised is within `ResidencyBound`; a residency that pins what another has pinned
already is promised less all the same. Before anything is unpinned that its engine did not give
back, the session's word has changed (`reader_words`). `marks` has every entry that a reader may
read, so that the server that takes over after a kill knows them (`grace`). Residencies belong to
their engine, as leases do, and end with the session that opened them; if the server drains they
stay as they are, for the next server.
"""

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from hotkv import table
from hotkv.errors import HotKVError, Reason
from hotkv.keys import MAX_GROUPS
from hotkv.table import Words
from hotkv_server.core.grace import Grace, Marks
from hotkv_server.core.reader_words import ReaderWords
from hotkv_server.core.residency import Residency, ResidentGroup
from hotkv_server.core.residency_book import ResidencyBook
from hotkv_server.core.residency_bound import ResidencyBound
from hotkv_server.core.sessions import SessionBook, check_named
from hotkv_server.core.space import Space
from hotkv_server.core.values import (
    CoreConfig,
    Entries,
    Int64s,
    KeySpaceRecord,
    OpenedResidency,
    SessionRecord,
)

MAX_POSITION = 1 << 31


class Residencies:
    """See the module."""

    def __init__(
        self,
        config: CoreConfig,
        space: Space,
        sessions: SessionBook,
        book: ResidencyBook,
        bound: ResidencyBound,
        words: ReaderWords,
        marks: Marks,
    ) -> None:
        self.book = book
        self.bound = bound
        self.words = words
        self.grace = Grace(space, words, marks)
        self._config = config
        self._space = space
        self._sessions = sessions
        self._marks = marks
        # Memory comes with the first pin of an entry nearby.
        self._counts = np.zeros(space.index.capacity + 1, np.uint32)
        # Entries that are compared with their check values before they may be pinned here.
        self._comparing: list[Entries] = []

    def __repr__(self) -> str:
        return f"Residencies({self.book!r}, {self.bound!r}, {self.words!r}, {self.grace!r})"

    # Opening

    def open(
        self,
        session: SessionRecord,
        record: KeySpaceRecord,
        residency_id: str,
        num_blocks: Mapping[int, int],
        now_s: float,
    ) -> OpenedResidency:
        """As `CacheCore.open_residency`."""
        _check_asked(record, num_blocks)
        existing = self.book.of_call(session, residency_id)
        if existing is not None:
            if existing.asked != num_blocks:
                raise HotKVError(
                    Reason.DUPLICATE_ID,
                    f"residency_id {residency_id!r} is open for other numbers of blocks; close it, "
                    "or choose a new id",
                )
            return self._opened(existing)
        self._sessions.check_takes_new("opens no residencies")
        owner = self._sessions.owner(session)
        groups = {
            group: self._group(session, record, group, count) for group, count in num_blocks.items()
        }
        residency = Residency(
            session.engine_id, owner, residency_id, session.number, session.key_space_id,
            self._space.tenants.number(session.key_space_id), now_s, dict(num_blocks), groups,
        )  # fmt: skip
        asked_bytes = residency.promised_bytes
        try:
            self.bound.check_ever(residency.tenant, asked_bytes)
            self.book.check_room(residency)
            self.words.check_room(session.number)
            self.bound.check_room(residency.tenant, asked_bytes)
        except HotKVError as error:
            room = self.bound.room_bytes(residency.tenant)
            self.book.note_refusal(residency, asked_bytes, room, error.message, now_s)
            raise
        self.book.add(residency)
        self.bound.change(residency.tenant, promised_bytes=asked_bytes)
        return self._opened(residency)

    def _group(
        self, session: SessionRecord, record: KeySpaceRecord, group_index: int, count: int
    ) -> ResidentGroup:
        kinds = [k for k in session.representations if record.block_group(k) == group_index]
        return ResidentGroup(
            count,
            self.bound.cost(record.shape(group_index).slot_bytes),
            frozenset(kinds),
            max((self.bound.cost(record.shape(kind).slot_bytes) for kind in kinds), default=0),
        )

    def _opened(self, residency: Residency) -> OpenedResidency:
        index, value = self.words.of_session(residency.session_number)
        return OpenedResidency(residency.residency_id, index, value, self.words.generation)

    # Pinning

    def extend(
        self,
        session: SessionRecord,
        residency_id: str,
        group_index: int,
        first_position: int,
        hashes: Words,
        now_s: float,
    ) -> Int64s:
        """As `CacheCore.extend_residency`."""
        residency, group = self._named(session, residency_id, group_index, len(hashes))
        if not 0 <= first_position < MAX_POSITION - len(hashes):
            raise HotKVError(
                Reason.INVALID_FIELD,
                "first_position is negative or too large; it counts blocks from the start of the "
                "request",
            )
        index = self._space.index
        positions = first_position + np.arange(len(hashes), dtype=np.int64)
        rows, known = group.rows(positions)
        theirs = index.keys(group.entries[rows[known]])[2]
        if not np.array_equal(theirs, hashes[known]):
            raise HotKVError(
                Reason.DUPLICATE_ID,
                f"hashes: residency {residency_id!r} has another block at one of these positions; "
                "a position names one block",
            )
        words = index.find(residency.key_space_id, group_index, hashes)
        fresh = table.is_ready(words) & ~known
        fresh[fresh] = ~index.unverified[words[fresh]]
        if len(group.positions) + int(fresh.sum()) > group.most:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"hashes: residency {residency_id!r} was opened for {group.most} blocks of this "
                f"group and would have {len(group.positions) + int(fresh.sum())}; open it for all "
                "that it will keep",
            )
        self.pin(residency, group_index, positions[fresh], words[fresh])
        self.pin_linked(residency, group_index, positions)
        self._space.touch(words[fresh], now_s)
        rows, known = group.rows(positions)
        offsets = np.full(len(hashes), -1, np.int64)
        entries = group.entries[rows[known]]
        offsets[known] = np.where(index.unverified[entries], -1, index.offsets(entries))
        return offsets

    def _named(
        self, session: SessionRecord, residency_id: str, group_index: int, num_blocks: int
    ) -> tuple[Residency, ResidentGroup]:
        """The residency and group of a call. Raises HotKVError."""
        residency = self.book.live(session, residency_id)
        if group_index not in residency.groups:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"group_index is {group_index}; the residency was opened for groups "
                f"{sorted(residency.groups)}",
            )
        if num_blocks > self._config.max_blocks_per_call:
            raise HotKVError(
                Reason.TOO_LARGE,
                f"hashes: {num_blocks} blocks; at most {self._config.max_blocks_per_call} are "
                "accepted in a call",
            )
        return residency, residency.groups[group_index]

    def pin(
        self, residency: Residency, group_index: int, positions: Int64s, entries: Entries
    ) -> None:
        """Pins ready, verified blocks at rising positions, as many as the residency has left.
        Positions that it has stay as they are."""
        group = residency.groups.get(group_index)
        if group is None or residency.is_closing or not len(positions):
            return
        _, known = group.rows(positions)
        room = group.most - len(group.positions)
        positions, entries = positions[~known][:room], entries[~known][:room]
        group.add(positions, entries)
        self._pin(residency, entries, -len(entries) * group.block_cost)

    def pin_linked(self, residency: Residency, group_index: int, positions: Int64s) -> None:
        """Pins the representations of those blocks that the residency has at these positions, each
        if it is of a kind that the session declares; one a position."""
        group = residency.groups.get(group_index)
        if group is None or residency.is_closing or not group.kinds:
            return
        index, records = self._space.index, self._space.index.table.records
        rows, known = group.rows(positions)
        rows = rows[known]
        rows = rows[(group.linked[rows] == 0) & index.is_ready(group.entries[rows])]
        linked = self._space.representations.of(group.entries[rows])
        kinds = records[linked, table.W_GROUP_STATE] & np.uint32(0xFFFF)
        wanted = (linked != 0) & np.isin(kinds, list(group.kinds))
        rows, linked = rows[wanted], linked[wanted]
        group.link(rows, linked)
        self._pin(residency, linked, -len(linked) * group.kind_cost)

    def _pin(self, residency: Residency, entries: Entries, promised_bytes: int) -> None:
        """Pins entries, and changes what is promised by so much."""
        distinct = np.unique(entries)
        fresh = distinct[self._counts[distinct] == 0]
        # Before anybody is told where they lie: a server that is killed leaves them marked.
        self._marks[distinct] = 1
        np.add.at(self._counts, entries, np.uint32(1))
        self._space.index.pin(entries, 1)
        self.bound.change(
            residency.tenant,
            promised_bytes=promised_bytes,
            pinned_bytes=self.bound.costs(self._space.index.slot_bytes(fresh)),
        )

    # Comparing first

    def begin_comparing(
        self, session: SessionRecord, residency_id: str, group_index: int, hashes: Words
    ) -> Entries:
        """The ready blocks among these that have not been compared with their check values; pinned
        until `end_comparing` if there are any."""
        residency, _ = self._named(session, residency_id, group_index, len(hashes))
        index = self._space.index
        words = index.find(residency.key_space_id, group_index, hashes)
        waiting = np.unique(words[table.is_ready(words)])
        waiting = waiting[index.unverified[waiting]]
        if len(waiting):
            index.pin(waiting, 1)
            self._comparing.append(waiting)
        return waiting

    def end_comparing(self, entries: Entries) -> None:
        """They have been compared, or will not be."""
        self._comparing = [kept for kept in self._comparing if kept is not entries]
        self._space.index.pin(entries, -1)
        self._space.removal.reap(entries)

    # Ending

    def get(self, session: SessionRecord, residency_id: str) -> Residency | None:
        """The residency that a store names, None if it is not open in this key space."""
        residency = self.book.get(session.engine_id, residency_id)
        if residency is None or residency.key_space_id != session.key_space_id:
            return None
        return residency

    def begin_closing(self, residency: Residency) -> None:
        """Gives the promise of a residency back; its id is free from now on. `give_back` does the
        rest."""
        if not residency.is_closing:
            self.bound.change(residency.tenant, promised_bytes=-residency.promised_bytes)
            residency.is_closing = True
            self.book.begin_closing(residency)

    def give_back(self, residency: Residency, most: int) -> bool:
        """Unpins up to `most` blocks of a residency that is closing; True if none is left and it is
        gone."""
        if residency.is_gone:
            return True
        for group in residency.groups.values():
            if len(group.positions):
                self._unpin(residency.tenant, group.take(most))
                break
        if any(len(group.positions) for group in residency.groups.values()):
            return False
        self.book.remove(residency)
        residency.is_gone = True
        return True

    def _unpin(self, tenant: int, entries: Entries) -> None:
        index, distinct = self._space.index, np.unique(entries)
        np.subtract.at(self._counts, entries, np.uint32(1))
        last = distinct[self._counts[distinct] == 0]
        self.bound.change(tenant, pinned_bytes=-self.bound.costs(index.slot_bytes(last)))
        self._marks[last[~self.grace.among(last)]] = 0
        index.pin(entries, -1)
        self._space.removal.reap(distinct)

    def begin_ending(self, session: SessionRecord) -> list[Residency]:
        """The residencies of a session that ends, to be given back: its readers have been told.

        No residency if the server drains: all stay as they are, so that the next server can keep
        them for their readers.
        """
        residencies = self.book.of_session(session.number)
        if residencies and self._sessions.draining:
            self.book.orphans.add(session.number)
            return []
        self.words.revoke(session.number)
        for residency in residencies:
            self.begin_closing(residency)
        return residencies

    def condemned(self, entries: Entries) -> None:
        """These blocks do not agree with their check values: ends all residencies of sessions that
        read one of them, whose readers have had other bytes than were stored."""
        reading = {
            residency.session_number for residency in self.book.all() if residency.reads(entries)
        }
        if self.grace.among(entries).any():
            self.grace.revoke()
        for number in reading:
            self.words.revoke(number)
            for residency in self.book.of_session(number):
                self.begin_closing(residency)
                while not self.give_back(residency, MAX_POSITION):
                    pass

    def expire_grace(self, now_s: float) -> Iterator[None]:
        """As `Grace.expire`."""
        return self.grace.expire(now_s, self._counts)

    # For those who look

    def pins(self) -> Int64s:
        """Pins of each entry [capacity + 1] from here. Linear in capacity."""
        pins = self._counts.astype(np.int64)
        for entries in (*self._comparing, self.grace.entries):
            np.add.at(pins, entries, 1)
        return pins

    def check_invariants(self, live_sessions: Collection[int]) -> None:
        """Raises AssertionError if the books disagree. Linear in capacity."""
        counts = np.zeros(len(self._counts), np.int64)
        promised: dict[int, int] = {}
        for residency in self.book.all():
            promised[residency.tenant] = (
                promised.get(residency.tenant, 0) + residency.promised_bytes
            )
            for group in residency.groups.values():
                assert len(group.positions) <= group.most, "more blocks than were asked for"
                assert np.all(np.diff(group.positions) > 0), "a position is there twice"
                assert group.num_linked == np.count_nonzero(group.linked), "kinds miscounted"
            for entries in residency.pinned():
                np.add.at(counts, entries, 1)
        assert np.array_equal(counts, self._counts), "pins of residencies miscounted"
        pinned = np.flatnonzero(counts).astype(np.uint32)
        assert np.all(self._space.index.can_be_read(pinned)), "pins something that has no bytes"
        owners = self._space.tenants.of(self._space.index.key_spaces(pinned))
        by_tenant = {
            int(tenant): self.bound.costs(self._space.index.slot_bytes(pinned[owners == tenant]))
            for tenant in np.unique(owners)
        }
        self.bound.check(promised, by_tenant)
        marked = np.flatnonzero(self._marks).astype(np.uint32)
        expected = np.union1d(pinned, self.grace.entries)
        assert np.array_equal(marked, expected), "marks and pins of readers disagree"
        sessions = {residency.session_number for residency in self.book.all()}
        assert sessions - self.book.orphans <= set(live_sessions), "a residency is nobody's"
        self.words.check_invariants({r.session_number for r in self.book.all() if not r.is_closing})
        self.book.check_invariants()
        self.grace.check_invariants()


def _check_asked(record: KeySpaceRecord, num_blocks: Mapping[int, int]) -> None:
    """Raises unless a residency may be opened for these groups."""
    check_named(record, num_blocks, 0, 0, only_blocks=True)
    if not num_blocks or min(num_blocks.values()) < 1 or max(num_blocks.values()) >= MAX_POSITION:
        raise HotKVError(
            Reason.INVALID_FIELD,
            "groups.block_count must be from 1 to 2147483647, for one group at least",
        )
    assert all(group < MAX_GROUPS for group in num_blocks)

"""Opens, extends and closes residencies, whose blocks engines read in the arena without a copy.

Opening reserves room; opening again with more blocks reserves more. Extending pins stored blocks
and returns offsets. A store that names a residency pins its blocks when they become ready.

Always true: pinned and promised bytes are within `ResidencyBound`. Before the server unpins
blocks that the engine has not released, it changes the session's validity word. All sessions of
an engine use its residencies; one ends with the session that opened it. If the server drains
they stay, and the next server's `Grace` keeps their blocks for a time.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from hotkv_proto import table
from hotkv_proto.blocks import ResidencyOpened
from hotkv_proto.errors import HotKVError, Reason, invalid
from hotkv_proto.table import Words
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.seams import StorePins
from hotkv_server.cache.sessions import check_named
from hotkv_server.cache.values import (
    BoolMask,
    Entries,
    Int64s,
    KeySpaceRecord,
    SessionRecord,
)
from hotkv_sparse.server.residency.book.bound import ResidencyBound
from hotkv_sparse.server.residency.book.pins import ResidencyPins, ResidencyStore
from hotkv_sparse.server.residency.book.register import (
    Residency,
    ResidencyBook,
    ResidentGroup,
)

MAX_POSITION = 1 << 31
PART_BLOCKS = 1 << 14
"""Unpinned by `closing` per step."""


class Residencies:
    """Registers itself with the core as a `Pinner`."""

    def __init__(self, core: CacheCore) -> None:
        space = core.space
        self.book = ResidencyBook(core.client_memory)
        self.bound = ResidencyBound(
            space.tenants, core.pin_budget, core.config.residency_share, space.pool
        )
        self.resident = ResidencyPins(space, self.bound, core.grace, core.marks)
        self._words = core.words
        self._config = core.config
        self._space = space
        self._catalog = core.catalog
        self._sessions = core.sessions
        core.pinners.append(self)

    def __repr__(self) -> str:
        return f"Residencies({self.book!r}, {self.bound!r})"

    # Opening

    def open(
        self, session_number: int, residency_id: str, num_blocks: Mapping[int, int], now_s: float
    ) -> ResidencyOpened:
        """Reserves room for `num_blocks` in total, by group, and for a sketch per block if the
        session has declared a kind.

        Raises DUPLICATE_ID if it is open for other groups or for more blocks,
        NO_ROOM_FOR_RESIDENCY if there is no room now, RESIDENCY_TOO_LARGE if never, HotKVError
        for other reasons. A refusal for lack of room is recorded; otherwise refusals change
        nothing.
        """
        residency, slots, is_new = self._asked(session_number, residency_id, num_blocks, now_s)
        if slots:
            self._sessions.check_takes_new("opens no residencies")
            with self._noting_refusal(residency, slots, now_s):
                self._check(residency, num_blocks, is_new)
                self.bound.check_room(residency.tenant, slots)
            if is_new:
                self.book.add(residency)
            else:
                self.book.grow(residency, num_blocks)
            self.bound.promise(residency.tenant, slots)
        index, value = self._words.of_session(residency.session_number)
        return ResidencyOpened(residency.residency_id, index, value, self._words.start_number)

    def _asked(
        self, session_number: int, residency_id: str, num_blocks: Mapping[int, int], now_s: float
    ) -> tuple[Residency, dict[int, int], bool]:
        """The residency, slots to reserve by size, whether it is new. Changes nothing. Raises
        HotKVError if the call is not valid."""
        session = self._sessions.record(session_number)
        record = self._catalog.record(session.key_space_id)
        groups = _new_groups(session, record, num_blocks)
        existing = self.book.of_call(session, residency_id)
        if existing is not None:
            return existing, existing.growth(num_blocks), False
        residency = Residency(
            session.engine_id, session.owner, residency_id, session.number,
            session.key_space_id, self._space.tenants.number(session.key_space_id), now_s,
            dict(num_blocks), groups,
        )  # fmt: skip
        return residency, residency.left(), True

    def _check(self, residency: Residency, num_blocks: Mapping[int, int], is_new: bool) -> None:
        """Raises HotKVError for what evictions can't cure: too large, or beyond a bound of its
        owner."""
        self.bound.check_ever(residency.tenant, self.bound.costs(residency.slots_of(num_blocks)))
        if is_new:
            self.book.check_room(residency)
            self._words.check_room(residency.session_number)
        else:
            self.book.check_growth(residency, num_blocks)

    @contextmanager
    def _noting_refusal(
        self, residency: Residency, slots: Mapping[int, int], now_s: float
    ) -> Iterator[None]:
        """Records a HotKVError of the body and passes it on."""
        try:
            yield
        except HotKVError as error:
            room = self.bound.room_bytes(residency.tenant)
            self.book.note_refusal(residency, self.bound.costs(slots), room, error.message, now_s)
            raise

    def make_room(
        self, session_number: int, residency_id: str, num_blocks: Mapping[int, int]
    ) -> Iterator[None]:
        """Frees slabs, in parts, for the slots that `open` will reserve. Does nothing if it
        would be refused."""
        try:
            residency, slots, is_new = self._asked(session_number, residency_id, num_blocks, 0.0)
            self._check(residency, num_blocks, is_new)
        except HotKVError:
            # `open` raises it next.
            return
        if slots and self.bound.costs(slots) <= self.bound.room_bytes(residency.tenant):
            yield from self._space.room.make_floors(slots, residency.tenant)

    # Pinning

    def extend(
        self,
        session_number: int,
        residency_id: str,
        group_index: int,
        first_position: int,
        hashes: Words,
        now_s: float,
    ) -> Int64s:
        """Pins the ready, verified blocks with their sketches. `hashes` (words [n, 8]) begin at
        `first_position` of the request.

        Returns slot offsets; -1 if not pinned or not verified yet. A block that is pinned
        already keeps its offset even if it was flushed. Raises DUPLICATE_ID if a position has
        another block, UNKNOWN_RESIDENCY, INVALID_FIELD or TOO_LARGE.
        """
        session = self._sessions.record(session_number)
        _check_position(first_position, len(hashes))
        residency, group = self._named(session, residency_id, group_index, len(hashes))
        index = self._space.index
        positions = first_position + np.arange(len(hashes), dtype=np.int64)
        rows, known = group.rows(positions)
        mine = group.entries[rows[known]]
        if not np.array_equal(index.table.records[mine, :8], hashes[known]):
            raise HotKVError(
                Reason.DUPLICATE_ID,
                f"hashes: residency {residency_id!r} has another block at one of these positions; "
                "a position names one block",
            )
        fresh = np.flatnonzero(~known)
        words = index.find(residency.key_space_id, group_index, hashes[fresh])
        good = table.is_ready(words)
        good[good] = ~index.unverified[words[good]]
        fresh, words = fresh[good], words[good]
        _check_most(group, len(fresh))
        self.resident.pin(residency, group_index, positions[fresh], words)
        self.resident.pin_linked(residency, group_index, positions)
        self._space.touch(words, now_s)
        offsets = np.full(len(hashes), -1, np.int64)
        offsets[known] = np.where(index.unverified[mine], -1, index.offsets(mine))
        offsets[fresh] = index.offsets(words)
        return offsets

    def _named(
        self, session: SessionRecord, residency_id: str, group_index: int, num_blocks: int
    ) -> tuple[Residency, ResidentGroup]:
        """Raises HotKVError if the residency is not open or lacks the group, or above the blocks
        per call."""
        residency = self.book.live(session, residency_id)
        if group_index not in residency.groups:
            raise invalid(
                f"group_index is {group_index}; the residency was opened for groups "
                f"{sorted(residency.groups)}"
            )
        if num_blocks > self._config.max_blocks_per_call:
            raise HotKVError(
                Reason.TOO_LARGE,
                f"hashes: {num_blocks} blocks; at most {self._config.max_blocks_per_call} are "
                "accepted in a call",
            )
        return residency, residency.groups[group_index]

    # Comparing first

    def begin_comparing(
        self, session: SessionRecord, residency_id: str, group_index: int, hashes: Words
    ) -> Entries:
        """Pins and returns ready entries that are not verified yet. The caller verifies them,
        then passes them to `resident.release_held`."""
        residency, _ = self._named(session, residency_id, group_index, len(hashes))
        index = self._space.index
        words = index.find(residency.key_space_id, group_index, hashes)
        waiting = np.unique(words[table.is_ready(words)])
        return self.resident.hold(waiting[index.unverified[waiting]])

    # Ending

    def end(self, session: SessionRecord) -> Iterator[None]:
        """Closes a session's residencies, in parts. Draining leaves them pinned."""
        for residency in self._begin_ending(session):
            yield from self.closing(residency)
            yield

    def closing(self, residency: Residency) -> Iterator[None]:
        """Unpins in parts. Only after the engine has closed the residency or the validity word
        has changed."""
        self.begin_closing(residency)
        while not self.give_back(residency, PART_BLOCKS):
            yield

    def begin_closing(self, residency: Residency) -> None:
        """Cancels the promise and frees the id. Then call `give_back` until it returns True."""
        if not residency.is_closing:
            self.bound.promise(residency.tenant, residency.left(), -1)
            residency.is_closing = True
            self.book.begin_closing(residency)

    def close(self, residency: Residency) -> None:
        """Like `closing`, at once."""
        self.begin_closing(residency)
        while not self.give_back(residency, MAX_POSITION):
            pass

    def give_back(self, residency: Residency, most: int) -> bool:
        """Unpins up to `most` blocks of a closing residency. Once none is left, removes it and
        returns True."""
        if residency.is_gone:
            return True
        for group in residency.groups.values():
            if len(group.positions):
                self.resident.unpin(residency.tenant, group.take(most))
                break
        if any(len(group.positions) for group in residency.groups.values()):
            return False
        self.book.remove(residency)
        residency.is_gone = True
        return True

    def _begin_ending(self, session: SessionRecord) -> list[Residency]:
        """Changes the validity word, so that readers stop, and begins to close. If draining,
        returns [] and changes nothing."""
        residencies = self.book.of_session(session.number)
        if residencies and self._sessions.draining:
            self.book.orphans.add(session.number)
            return []
        self._words.revoke(session.number)
        for residency in residencies:
            self.begin_closing(residency)
        return residencies

    def condemned(self, entries: Entries) -> None:
        """Ends all residencies of each session that may have read these damaged blocks."""
        reading = {
            residency.session_number for residency in self.book.all() if residency.reads(entries)
        }
        for number in reading:
            self._words.revoke(number)
            for residency in self.book.of_session(number):
                self.close(residency)

    # For the core: see `Pinner`

    def of_store(self, session: SessionRecord, residency_id: str) -> StorePins | None:
        residency = self.book.named(session, residency_id)
        return None if residency is None else ResidencyStore(residency, self.resident)

    def is_read(self, entries: Entries) -> BoolMask:
        return self.resident.counts[entries] > 0

    def pins(self) -> Int64s:
        return self.resident.all()

    # Checking

    def check_invariants(self, live_sessions: Collection[int]) -> None:
        """Takes time linear in the capacity."""
        counts = np.zeros(len(self.resident.counts), np.int64)
        promised: Counter[int] = Counter()
        slots: Counter[int] = Counter()
        for residency in self.book.all():
            promised[residency.tenant] += self.bound.costs(residency.left())
            slots.update(residency.left())
            residency.check_invariants()
            for entries in residency.pinned():
                np.add.at(counts, entries, 1)
        pinned, pinned_slots = self.resident.check(counts)
        slots.update(pinned_slots)
        self.bound.check(promised, pinned, slots)
        sessions = {residency.session_number for residency in self.book.all()}
        assert sessions - self.book.orphans <= set(live_sessions), "a residency is nobody's"
        holding = [residency for residency in self.book.all() if not residency.is_closing]
        self._words.check_invariants({residency.session_number for residency in holding})
        self.book.check_invariants()


def _new_groups(
    session: SessionRecord, record: KeySpaceRecord, num_blocks: Mapping[int, int]
) -> dict[int, ResidentGroup]:
    """Raises INVALID_FIELD for a wrong group or number."""
    check_named(record, num_blocks, 0, 0, only_blocks=True)
    if not num_blocks or min(num_blocks.values()) < 1 or max(num_blocks.values()) >= MAX_POSITION:
        raise invalid("groups.block_count must be from 1 to 2147483647, for one group at least")
    return {group: _new_group(session, record, group, count) for group, count in num_blocks.items()}


def _check_position(first_position: int, num_blocks: int) -> None:
    if not 0 <= first_position < MAX_POSITION - num_blocks:
        raise invalid(
            "first_position is negative or too large; it counts blocks from the start of the "
            "request"
        )


def _check_most(group: ResidentGroup, num_fresh: int) -> None:
    """Raises INVALID_FIELD if the group would exceed what it was opened for."""
    count = len(group.positions) + num_fresh
    if count > group.most:
        raise invalid(
            f"hashes: the residency was opened for {group.most} blocks of this group and would "
            f"have {count}; open it again for more"
        )


def _new_group(
    session: SessionRecord, record: KeySpaceRecord, group_index: int, count: int
) -> ResidentGroup:
    kinds = {
        kind: record.slot_bytes(kind)
        for kind in session.sketches
        if record.block_group(kind) == group_index
    }
    largest = max(kinds.values(), default=0)
    return ResidentGroup(
        count,
        record.slot_bytes(group_index),
        # Only the largest kinds: room for one slot of this size is reserved per block.
        frozenset(kind for kind, slot_bytes in kinds.items() if slot_bytes == largest),
        largest,
    )

"""The residencies of all engines: which blocks each pins, what is still promised to it, and what
was refused for want of room.

Always true: an id names one open residency of its engine; one that is closing has no id any more.
A position of a residency names one entry; a group has no more positions than were asked for, and no
more representations than positions; rows are in the order of positions. Residencies count for their
owner, by number and by the memory that they take, see `bounds`. A refusal is remembered for each
engine that has a session, until it opens the residency.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from hotkv_proto.errors import HotKVError, Reason
from hotkv_server.cache.room.shares import BoundShare, FairBound
from hotkv_server.cache.values import BoolMask, Entries, Int64s, SessionRecord

RESIDENCY_BYTES = 1024
GROUP_BYTES = 512
BLOCK_BYTES = 16
"""Bytes that a residency takes by itself, for each group, and for each block that it may pin."""
MAX_RESIDENCIES = 1 << 14


# ------------------------------------------------------------------------------------ one residency


@dataclass(slots=True, eq=False)
class ResidentGroup:
    """Blocks of one group. `most`: positions that there may be. `block_bytes`, `kind_bytes`: slot
    sizes of a block, and of a representation of one of `kinds`, all of one size; 0 without any.

    `positions` [n], rising; `entries` [n] of the blocks; `linked` [n] of their representations, 0
    for none.
    """

    most: int
    block_bytes: int
    kinds: frozenset[int]
    kind_bytes: int
    positions: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    entries: Entries = field(default_factory=lambda: np.empty(0, np.uint32))
    linked: Entries = field(default_factory=lambda: np.empty(0, np.uint32))
    num_linked: int = 0

    def left(self) -> dict[int, int]:
        """Slots by size for what it may still pin."""
        left = {self.block_bytes: self.most - len(self.positions)}
        if self.kinds:
            kinds = self.most - self.num_linked
            left[self.kind_bytes] = left.get(self.kind_bytes, 0) + kinds
        return left

    def rows(self, positions: Int64s) -> tuple[Int64s, BoolMask]:
        """Per position [n] its row, or the row that it would get; and whether it has one."""
        rows = np.searchsorted(self.positions, positions)
        known = np.zeros(len(positions), np.bool_)
        inside = rows < len(self.positions)
        known[inside] = self.positions[rows[inside]] == positions[inside]
        return rows, known

    def linked_at(self, positions: Int64s) -> Entries:
        """Per position [n] the representation that is pinned with its block, 0 for none."""
        rows, known = self.rows(positions)
        found = np.zeros(len(positions), np.uint32)
        found[known] = self.linked[rows[known]]
        return found

    def add(self, positions: Int64s, entries: Entries) -> None:
        """Adds blocks at rising positions that it does not have, without representations."""
        rows = np.searchsorted(self.positions, positions)
        self.positions = np.insert(self.positions, rows, positions)
        self.entries = np.insert(self.entries, rows, entries)
        self.linked = np.insert(self.linked, rows, np.uint32(0))

    def link(self, rows: Int64s, linked: Entries) -> None:
        """Notes representations [n] of rows that have none."""
        self.linked[rows] = linked
        self.num_linked += len(rows)

    def take(self, most: int) -> Entries:
        """Removes the last rows, `most` at most; returns their entries, representations too."""
        keep = max(0, len(self.positions) - most)
        linked = self.linked[keep:]
        gone: Entries = np.concatenate((self.entries[keep:], linked[linked != 0]))
        self.positions, self.entries, self.linked = (
            self.positions[:keep],
            self.entries[:keep],
            self.linked[:keep],
        )
        self.num_linked -= int(np.count_nonzero(linked))
        return gone

    def pinned(self) -> Entries:
        """All its entries, representations too."""
        entries: Entries = np.concatenate((self.entries, self.linked[self.linked != 0]))
        return entries


@dataclass(slots=True, eq=False)
class Residency:
    """`asked`: blocks by group, as the call that opened it said. `is_closing`: it promises nothing
    and takes no blocks any more, and its pins are being given back. `is_gone`: all of them are."""

    engine_id: str
    owner: str
    residency_id: str
    session_number: int
    key_space_id: int
    tenant: int
    opened_s: float
    asked: Mapping[int, int]
    groups: Mapping[int, ResidentGroup]
    is_closing: bool = False
    is_gone: bool = False

    def __repr__(self) -> str:
        return (
            f"Residency({self.engine_id!r}, {self.residency_id!r}, {self.num_blocks} of "
            f"{sum(self.asked.values())} blocks{', closing' if self.is_closing else ''})"
        )

    @property
    def num_blocks(self) -> int:
        """Blocks that it pins."""
        return sum(len(group.positions) for group in self.groups.values())

    def left(self) -> dict[int, int]:
        """Slots by size for what it may still pin."""
        left: Counter[int] = Counter()
        for group in () if self.is_closing else self.groups.values():
            left.update(group.left())
        return dict(left)

    @property
    def weight(self) -> int:
        """Most bytes, about, that it takes itself."""
        return weight_of(self.asked)

    def pinned(self) -> Iterator[Entries]:
        """Its entries, a group at a time."""
        for group in self.groups.values():
            yield group.pinned()

    def check_invariants(self) -> None:
        """Raises AssertionError if rows disagree."""
        for group in self.groups.values():
            assert len(group.positions) <= group.most, "more blocks than were asked for"
            assert np.all(np.diff(group.positions) > 0), "a position is there twice"
            assert group.num_linked == np.count_nonzero(group.linked), "kinds miscounted"

    def reads(self, entries: Entries) -> bool:
        """True if one of these is a block that its readers may read."""
        return any(np.isin(group.entries, entries).any() for group in self.groups.values())


def weight_of(asked: Mapping[int, int]) -> int:
    """Most bytes, about, that a residency for so many blocks a group takes."""
    return RESIDENCY_BYTES + GROUP_BYTES * len(asked) + BLOCK_BYTES * sum(asked.values())


# ---------------------------------------------------------------------------------- all residencies


@dataclass(frozen=True, slots=True)
class Refusal:
    """The last residency that an engine was refused for want of room. `num_attempts`: in a row."""

    engine_id: str
    residency_id: str
    asked_bytes: int
    available_bytes: int
    message: str
    at_s: float
    num_attempts: int


class ResidencyBook:
    """Residencies by id and by session. `orphans`: sessions that have ended while the server
    drained."""

    def __init__(self, memory: BoundShare) -> None:
        self.bound = FairBound(MAX_RESIDENCIES)
        self.memory = memory
        self.orphans: set[int] = set()
        self.num_opened = 0
        self.num_refused = 0
        self._by_id: dict[tuple[str, str], Residency] = {}
        self._by_session: dict[int, list[Residency]] = {}
        self._refusals: dict[str, Refusal] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_session.values()))

    def __repr__(self) -> str:
        return f"ResidencyBook({len(self)} residencies, {len(self._refusals)} refused)"

    def of_call(self, session: SessionRecord, residency_id: str) -> Residency | None:
        """The open residency that a call repeats; None if the id is new. Raises DUPLICATE_ID if the
        engine uses the id under another key space."""
        if not residency_id:
            raise HotKVError(
                Reason.INVALID_FIELD,
                "residency_id is empty; choose an id that is unique in the engine",
            )
        residency = self.get(session.engine_id, residency_id)
        if residency is not None and residency.key_space_id != session.key_space_id:
            raise HotKVError(
                Reason.DUPLICATE_ID,
                f"residency_id {residency_id!r} is open under another key space; choose a new id",
            )
        return residency

    def get(self, engine_id: str, residency_id: str) -> Residency | None:
        """The engine's open residency with this id."""
        return self._by_id.get((engine_id, residency_id))

    def named(self, session: SessionRecord, residency_id: str) -> Residency | None:
        """The residency that a call names, None if it is not open in this key space."""
        residency = self.get(session.engine_id, residency_id)
        if residency is None or residency.key_space_id != session.key_space_id:
            return None
        return residency

    def live(self, session: SessionRecord, residency_id: str) -> Residency:
        """The residency that a call works on. Raises UNKNOWN_RESIDENCY."""
        residency = self.named(session, residency_id)
        if residency is None:
            raise HotKVError(
                Reason.UNKNOWN_RESIDENCY,
                f"residency_id {residency_id!r} is unknown, closed or has ended with its session; "
                "open it again",
            )
        return residency

    def check_room(self, residency: Residency) -> None:
        """Raises RESIDENCY_TOO_LARGE if nobody may ever have this one, OVERLOADED unless the owner
        may have one more."""
        owner = residency.owner
        if residency.weight > self.memory.capacity // 2:
            raise HotKVError(
                Reason.RESIDENCY_TOO_LARGE,
                f"groups.block_count: the lists of this take {residency.weight} bytes, more than "
                f"half of client_memory_bytes; raise that to {2 * residency.weight} at least",
            )
        if not self.bound.room(owner):
            raise HotKVError(
                Reason.OVERLOADED,
                f"residency_id: {self.bound.refusal(owner, 'residencies')}; close some first",
            )
        if residency.weight > self.memory.room(owner):
            raise HotKVError(
                Reason.OVERLOADED,
                f"groups.block_count: {self.memory.refusal(owner, 'bytes of lists of residencies')}"
                "; close some first",
            )

    def add(self, residency: Residency) -> None:
        """Takes a residency in, and counts it for its owner."""
        self._by_id[residency.engine_id, residency.residency_id] = residency
        self._by_session.setdefault(residency.session_number, []).append(residency)
        self.bound.take(residency.owner, 1)
        self.memory.take(residency.owner, residency.weight)
        self.num_opened += 1
        refusal = self._refusals.get(residency.engine_id)
        if refusal is not None and refusal.residency_id == residency.residency_id:
            del self._refusals[residency.engine_id]

    def begin_closing(self, residency: Residency) -> None:
        """Frees the id of a residency."""
        del self._by_id[residency.engine_id, residency.residency_id]

    def remove(self, residency: Residency) -> None:
        """Forgets a residency that was closing and pins nothing any more."""
        of_session = self._by_session[residency.session_number]
        of_session.remove(residency)
        if not of_session:
            del self._by_session[residency.session_number]
        self.bound.give(residency.owner, 1)
        self.memory.give(residency.owner, residency.weight)

    def all(self) -> list[Residency]:
        """All residencies, also those that are closing."""
        return [residency for mine in self._by_session.values() for residency in mine]

    def of_session(self, session_number: int) -> list[Residency]:
        """Those that a session has opened, also those that are closing."""
        return list(self._by_session.get(session_number, ()))

    def note_refusal(
        self,
        residency: Residency,
        asked_bytes: int,
        available_bytes: int,
        message: str,
        now_s: float,
    ) -> None:
        """Remembers that the engine was refused this for want of room."""
        self.num_refused += 1
        before = self._refusals.get(residency.engine_id)
        again = before is not None and before.residency_id == residency.residency_id
        attempts = before.num_attempts + 1 if before is not None and again else 1
        self._refusals[residency.engine_id] = Refusal(
            residency.engine_id,
            residency.residency_id,
            asked_bytes,
            available_bytes,
            message,
            now_s,
            attempts,
        )

    def forget_engine(self, engine_id: str) -> None:
        """The engine has no session any more."""
        self._refusals.pop(engine_id, None)

    def refusals(self) -> list[Refusal]:
        """What engines were refused last, and have not opened since."""
        return list(self._refusals.values())

    def check_invariants(self) -> None:
        """Raises AssertionError if the books disagree."""
        everything = self.all()
        is_open = [residency for residency in everything if not residency.is_closing]
        assert len(is_open) == len(self._by_id), "open residencies miscounted"
        assert all(
            self._by_id[residency.engine_id, residency.residency_id] is residency
            for residency in is_open
        ), "ids of residencies disagree"
        self.bound.check(Counter(residency.owner for residency in everything))
        weights: Counter[str] = Counter()
        for residency in everything:
            weights[residency.owner] += residency.weight
        self.memory.check(weights)

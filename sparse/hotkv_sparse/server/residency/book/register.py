"""Records all residencies: what each pins, its *promise* (slots that it may still pin), and
refusals for lack of room.

Always true:
- An id names one open residency of its engine; a closing one has no id.
- A position (index of a block in the request) names one entry of a residency. A group has at most
  as many positions, sorted, as the last successful call named, and one sketch each.
- Number and lists of residencies are bounded per owner (`cache.room.shares`).
- An engine's latest refusal is kept until that residency opens, grows or closes, or the engine's
  last session closes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from hotkv_proto.errors import HotKVError, Reason, invalid
from hotkv_server.cache.room.shares import FairBound
from hotkv_server.cache.values import BoolMask, Entries, Int64s, SessionRecord

RESIDENCY_BYTES = 1024
GROUP_BYTES = 512
BLOCK_BYTES = 16
"""Estimated memory of a residency's lists: these, per residency, group and block that may be
pinned."""
LISTS = "lists of residencies"
"""Their kind in the bound of clients' memory."""
MAX_RESIDENCIES = 1 << 14
"""Of all owners."""


# ------------------------------------------------------------------------------------ one residency


@dataclass(slots=True, eq=False)
class ResidentGroup:
    """Blocks of a group that a residency pins, a row each.

    most: rows that there may be.
    block_bytes, kind_bytes: slot size of a block and a sketch (0 without kinds).
    kinds: sketches to pin with blocks, as group indexes.
    positions: int64, increasing.
    entries: uint32.
    linked: the pinned sketches' entries, uint32; 0: none.
    num_linked: rows with one.
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
        """Slots that may still be pinned, by size."""
        return self._slots(self.most - len(self.positions), self.most - self.num_linked)

    def slots(self, num_blocks: int) -> dict[int, int]:
        """Slots of `num_blocks` blocks with their sketches, by size."""
        return self._slots(num_blocks, num_blocks)

    def _slots(self, num_blocks: int, num_kinds: int) -> dict[int, int]:
        slots = {self.block_bytes: num_blocks}
        if self.kinds:
            slots[self.kind_bytes] = slots.get(self.kind_bytes, 0) + num_kinds
        return slots

    def rows(self, positions: Int64s) -> tuple[Int64s, BoolMask]:
        """For each position its row, or where it would be inserted; and whether it is there."""
        rows = np.searchsorted(self.positions, positions)
        known = np.zeros(len(positions), np.bool_)
        inside = rows < len(self.positions)
        known[inside] = self.positions[rows[inside]] == positions[inside]
        return rows, known

    def linked_at(self, positions: Int64s) -> Entries:
        """Entries of pinned sketches; 0 if none."""
        rows, known = self.rows(positions)
        found = np.zeros(len(positions), np.uint32)
        found[known] = self.linked[rows[known]]
        return found

    def add(self, positions: Int64s, entries: Entries) -> None:
        """`positions`: increasing, none of them there yet."""
        rows = np.searchsorted(self.positions, positions)
        self.positions = np.insert(self.positions, rows, positions)
        self.entries = np.insert(self.entries, rows, entries)
        self.linked = np.insert(self.linked, rows, np.uint32(0))

    def link(self, rows: Int64s, linked: Entries) -> None:
        """For rows that have no sketch yet."""
        self.linked[rows] = linked
        self.num_linked += len(rows)

    def take(self, most: int) -> Entries:
        """Removes up to `most` rows, the last first. Returns the entries of their blocks and
        sketches."""
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
        """Blocks and sketches."""
        entries: Entries = np.concatenate((self.entries, self.linked[self.linked != 0]))
        return entries


@dataclass(slots=True, eq=False)
class Residency:
    """Room reserved for a running request, and its pinned blocks.

    owner: tenant, or the engine if there are no tenants; bounds apply to it.
    session_number: that opened it.
    tenant: number.
    opened_s: monotonic.
    asked: blocks to reserve, by group, as of the latest call.
    is_closing: the promise is cancelled, no blocks are accepted, pins are being released.
    is_gone: all pins are released.
    """

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
        """Without sketches."""
        return sum(len(group.positions) for group in self.groups.values())

    def left(self) -> dict[int, int]:
        """The promise: slots by size."""
        return {} if self.is_closing else sum_of_slots(self.groups)

    def slots_of(self, num_blocks: Mapping[int, int]) -> dict[int, int]:
        """Slots by size of these blocks, by group, with their sketches."""
        slots: Counter[int] = Counter()
        for group, count in num_blocks.items():
            slots.update(self.groups[group].slots(count))
        return dict(slots)

    def growth(self, num_blocks: Mapping[int, int]) -> dict[int, int]:
        """Additional slots by size for `num_blocks` in total; empty if there is room already.
        Raises DUPLICATE_ID if other groups or fewer blocks are named: a residency never shrinks."""
        if num_blocks.keys() != self.asked.keys() or any(
            count < self.asked[group] for group, count in num_blocks.items()
        ):
            raise HotKVError(
                Reason.DUPLICATE_ID,
                f"residency_id {self.residency_id!r} is open for other groups or for more blocks; "
                "a residency only grows: close it, or choose a new id",
            )
        more = {group: count - self.asked[group] for group, count in num_blocks.items()}
        return self.slots_of(more) if any(more.values()) else {}

    @property
    def weight(self) -> int:
        return weight_of(self.asked)

    def pinned(self) -> Iterator[Entries]:
        """An array per group."""
        for group in self.groups.values():
            yield group.pinned()

    def check_invariants(self) -> None:
        for group in self.groups.values():
            assert len(group.positions) <= group.most, "more blocks than were asked for"
            assert np.all(np.diff(group.positions) > 0), "a position is there twice"
            assert group.num_linked == np.count_nonzero(group.linked), "kinds miscounted"

    def reads(self, entries: Entries) -> bool:
        """Whether the engine may be reading any of these blocks."""
        return any(np.isin(group.entries, entries).any() for group in self.groups.values())


def sum_of_slots(groups: Mapping[int, ResidentGroup]) -> dict[int, int]:
    left: Counter[int] = Counter()
    for group in groups.values():
        left.update(group.left())
    return dict(left)


def weight_of(asked: Mapping[int, int]) -> int:
    """Upper estimate of the lists' memory in this process, in bytes."""
    return RESIDENCY_BYTES + GROUP_BYTES * len(asked) + BLOCK_BYTES * sum(asked.values())


# ---------------------------------------------------------------------------------- all residencies


@dataclass(frozen=True, slots=True)
class Refusal:
    """Latest refusal of an engine for lack of room in the arena.

    asked_bytes, available_bytes: of the arena, at that time.
    at_s: monotonic.
    num_attempts: refusals of this residency in a row.
    """

    engine_id: str
    residency_id: str
    asked_bytes: int
    available_bytes: int
    message: str
    at_s: float
    num_attempts: int


class ResidencyBook:
    """Finds residencies by id and by session, and bounds them per owner.

    bound: number per owner.
    memory: bytes per owner, of which the lists' are of the kind LISTS.
    orphans: sessions that ended while the server drained; their residencies stay for the next
        server.
    """

    def __init__(self, memory: FairBound) -> None:
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
        """None if the id is new. Raises INVALID_FIELD if it is empty, DUPLICATE_ID if it is open
        in another key space."""
        if not residency_id:
            raise invalid("residency_id is empty; choose an id that is unique in the engine")
        residency = self.get(session.engine_id, residency_id)
        if residency is not None and residency.key_space_id != session.key_space_id:
            raise HotKVError(
                Reason.DUPLICATE_ID,
                f"residency_id {residency_id!r} is open under another key space; choose a new id",
            )
        return residency

    def get(self, engine_id: str, residency_id: str) -> Residency | None:
        return self._by_id.get((engine_id, residency_id))

    def named(self, session: SessionRecord, residency_id: str) -> Residency | None:
        """None if it is not open in the session's key space."""
        residency = self.get(session.engine_id, residency_id)
        if residency is None or residency.key_space_id != session.key_space_id:
            return None
        return residency

    def live(self, session: SessionRecord, residency_id: str) -> Residency:
        """Raises UNKNOWN_RESIDENCY if it is not open in the session's key space."""
        residency = self.named(session, residency_id)
        if residency is None:
            raise HotKVError(
                Reason.UNKNOWN_RESIDENCY,
                f"residency_id {residency_id!r} is unknown, closed or has ended with its session; "
                "open it again",
            )
        return residency

    def check_room(self, residency: Residency) -> None:
        """For a new residency. Raises RESIDENCY_TOO_LARGE if its lists exceed what any owner may
        have, OVERLOADED if its owner has too many residencies or too little memory left."""
        self._check_memory(residency.owner, residency.weight, residency.weight)
        if not self.bound.room(residency.owner):
            raise HotKVError(
                Reason.OVERLOADED,
                f"residency_id: {self.bound.refusal(residency.owner, 'residencies')}; close some "
                "first",
            )

    def check_growth(self, residency: Residency, num_blocks: Mapping[int, int]) -> None:
        """For an open residency with `num_blocks` in total, by group. Raises as `check_room`."""
        weight = weight_of(num_blocks)
        self._check_memory(residency.owner, weight, weight - residency.weight)

    def _check_memory(self, owner: str, weight: int, more: int) -> None:
        """`weight`: of the lists in total, `more` of it new."""
        if weight > self.memory.capacity // 2:
            raise HotKVError(
                Reason.RESIDENCY_TOO_LARGE,
                f"groups.block_count: the lists of this take {weight} bytes, more than half of "
                f"client_memory_bytes; raise that to {2 * weight} at least",
            )
        if more > self.memory.room(owner):
            raise HotKVError(
                Reason.OVERLOADED,
                f"groups.block_count: {self.memory.refusal(owner, 'bytes', LISTS)}"
                "; close some first",
            )

    def add(self, residency: Residency) -> None:
        self._by_id[residency.engine_id, residency.residency_id] = residency
        self._by_session.setdefault(residency.session_number, []).append(residency)
        self.bound.take(residency.owner, 1)
        self.memory.take(residency.owner, residency.weight, LISTS)
        self.num_opened += 1
        self.settle_refusal(residency.engine_id, residency.residency_id)

    def grow(self, residency: Residency, num_blocks: Mapping[int, int]) -> None:
        """`num_blocks`: by group, at least the old numbers."""
        weight = residency.weight
        residency.asked = dict(num_blocks)
        for group, count in num_blocks.items():
            residency.groups[group].most = count
        self.memory.take(residency.owner, residency.weight - weight, LISTS)
        self.settle_refusal(residency.engine_id, residency.residency_id)

    def begin_closing(self, residency: Residency) -> None:
        """Frees the id."""
        del self._by_id[residency.engine_id, residency.residency_id]
        self.settle_refusal(residency.engine_id, residency.residency_id)

    def settle_refusal(self, engine_id: str, residency_id: str) -> None:
        """Drops the engine's refusal if it is this residency's."""
        refusal = self._refusals.get(engine_id)
        if refusal is not None and refusal.residency_id == residency_id:
            del self._refusals[engine_id]

    def remove(self, residency: Residency) -> None:
        """The residency must be closing and without pins."""
        of_session = self._by_session[residency.session_number]
        of_session.remove(residency)
        if not of_session:
            del self._by_session[residency.session_number]
        self.bound.give(residency.owner, 1)
        self.memory.give(residency.owner, residency.weight, LISTS)

    def all(self) -> list[Residency]:
        """With closing ones."""
        return [residency for mine in self._by_session.values() for residency in mine]

    def of_session(self, session_number: int) -> list[Residency]:
        """That it opened, with closing ones."""
        return list(self._by_session.get(session_number, ()))

    def note_refusal(
        self,
        residency: Residency,
        asked_bytes: int,
        available_bytes: int,
        message: str,
        now_s: float,
    ) -> None:
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
        """After its last session."""
        self._refusals.pop(engine_id, None)

    def refusals(self) -> list[Refusal]:
        return list(self._refusals.values())

    def check_invariants(self) -> None:
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
        self.memory.check(weights, LISTS)

"""Records the residencies of all engines: the blocks that each residency pins, the slots (places in
the arena) that it may still pin (its promise), and refusals for lack of room.

Always true:
- An id names a single open residency of its engine; a closing residency has no id.
- A position (index of a block in the request) names a single entry (record in the block table) of a
  residency.
- A call that opens or grows a residency names the number of blocks of each group. A group has at
  most as many positions as the last successful call named, and at most one sketch (compact
  form of keys) per position. A group's rows are sorted by position.
- The number of residencies and the memory of their lists are bounded for each owner, a tenant or an
  engine (`cache.room.shares.FairBound`, `BoundShare`).
- An engine's latest refusal is kept until the refused residency opens, grows or closes, or the
  engine's last session closes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from hotkv_proto.errors import HotKVError, Reason, invalid
from hotkv_server.cache.room.shares import BoundShare, FairBound
from hotkv_server.cache.values import BoolMask, Entries, Int64s, SessionRecord

RESIDENCY_BYTES = 1024
GROUP_BYTES = 512
BLOCK_BYTES = 16
"""The memory of a residency's lists is estimated as RESIDENCY_BYTES, plus GROUP_BYTES for each of
its groups, plus BLOCK_BYTES for each block that it may pin."""
MAX_RESIDENCIES = 1 << 14
"""Most residencies of all owners together."""


# ------------------------------------------------------------------------------------ one residency


@dataclass(slots=True, eq=False)
class ResidentGroup:
    """A table of the blocks of a group that a residency (a request whose KV stays in host memory)
    pins, with a row for each block.

    most: most blocks (rows) that the group may have.
    block_bytes: slot size of a block.
    kinds: the kinds of sketches (compact forms of keys, for sparse attention) to pin
        together with the blocks, as group indexes.
    kind_bytes: slot size of a sketch, the same for all `kinds`; 0 without kinds.
    positions: position of each row's block in the request, int64, increasing.
    entries: entry number of each row's block, uint32.
    linked: entry number of the sketch that is pinned with each row's block, uint32; 0:
        none.
    num_linked: number of rows with a pinned sketch.
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
        """Returns the number of slots (places in the arena) of each size that the group may still
        pin."""
        return self._slots(self.most - len(self.positions), self.most - self.num_linked)

    def slots(self, num_blocks: int) -> dict[int, int]:
        """Returns the number of slots (places in the arena) of each size that `num_blocks` blocks
        need, with a sketch (compact form of keys) for each block."""
        return self._slots(num_blocks, num_blocks)

    def _slots(self, num_blocks: int, num_kinds: int) -> dict[int, int]:
        slots = {self.block_bytes: num_blocks}
        if self.kinds:
            slots[self.kind_bytes] = slots.get(self.kind_bytes, 0) + num_kinds
        return slots

    def rows(self, positions: Int64s) -> tuple[Int64s, BoolMask]:
        """Finds the rows of the blocks at these positions in the request. Returns two results for
        each position: its row, and whether the row exists. If the row does not exist, the first
        result is the index at which it would be inserted."""
        rows = np.searchsorted(self.positions, positions)
        known = np.zeros(len(positions), np.bool_)
        inside = rows < len(self.positions)
        known[inside] = self.positions[rows[inside]] == positions[inside]
        return rows, known

    def linked_at(self, positions: Int64s) -> Entries:
        """Returns for each position the entry (record in the block table) of the sketch
        (compact form of keys) that is pinned with its block; 0 if no sketch is pinned."""
        rows, known = self.rows(positions)
        found = np.zeros(len(positions), np.uint32)
        found[known] = self.linked[rows[known]]
        return found

    def add(self, positions: Int64s, entries: Entries) -> None:
        """Adds a row for each block that the residency now pins, without its sketch
        (compact form of keys).

        positions: positions of the blocks, increasing; the group must not have rows for them yet.
        entries: entry (record in the block table) of each block.
        """
        rows = np.searchsorted(self.positions, positions)
        self.positions = np.insert(self.positions, rows, positions)
        self.entries = np.insert(self.entries, rows, entries)
        self.linked = np.insert(self.linked, rows, np.uint32(0))

    def link(self, rows: Int64s, linked: Entries) -> None:
        """Records the pinned sketches of blocks that had no sketch (compact form of
        keys) yet.

        rows: rows of the blocks.
        linked: entry (record in the block table) of each block's sketch.
        """
        self.linked[rows] = linked
        self.num_linked += len(rows)

    def take(self, most: int) -> Entries:
        """Removes up to `most` rows (one for each pinned block), the last rows first. Returns the
        entries of their blocks and sketches (compact forms of keys)."""
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
        """Returns the entries of all blocks and sketches (compact forms of keys) that the
        group pins."""
        entries: Entries = np.concatenate((self.entries, self.linked[self.linked != 0]))
        return entries


@dataclass(slots=True, eq=False)
class Residency:
    """The room that is reserved for a running request of an engine, and the request's blocks that
    are pinned in host memory.

    owner: the tenant of the engine, or the engine itself if no tenants are configured. The bounds
        on the number and memory of residencies apply to each owner.
    session_number: the session that opened the residency.
    tenant: number of the key space's tenant.
    opened_s: when the residency was opened, on the monotonic clock.
    asked: number of blocks to reserve, by group, from the latest call that opened or grew the
        residency.
    groups: the pinned blocks, by group.
    is_closing: True if the residency is being closed: its promise (the slots that it may still pin)
        is cancelled, it accepts no blocks, and its pins are being released.
    is_gone: True if all pins of the residency have been released.
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
        """Returns the number of blocks that the residency pins, without sketches (compact
        forms of keys)."""
        return sum(len(group.positions) for group in self.groups.values())

    def left(self) -> dict[int, int]:
        """Returns the number of slots (places in the arena) of each size that the residency may
        still pin (its promise)."""
        return {} if self.is_closing else sum_of_slots(self.groups)

    def slots_of(self, num_blocks: Mapping[int, int]) -> dict[int, int]:
        """Returns the number of slots (places in the arena) of each size that blocks need, together
        with their sketches (compact forms of keys, for sparse attention).

        num_blocks: number of blocks, by group.
        """
        slots: Counter[int] = Counter()
        for group, count in num_blocks.items():
            slots.update(self.groups[group].slots(count))
        return dict(slots)

    def growth(self, num_blocks: Mapping[int, int]) -> dict[int, int]:
        """Returns the number of additional slots (places in the arena), by size, that the residency
        needs to have room for `num_blocks`. Returns an empty dict if it already has that room.

        Raises DUPLICATE_ID if the groups of the residency are not the groups in `num_blocks`, or if
        the residency has room for more blocks of a group than `num_blocks` asks for: a residency
        never shrinks.

        num_blocks: all blocks of the residency after it has grown, by group.
        """
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
        """Returns an upper estimate of the memory, in bytes, that the lists of the residency's
        blocks use."""
        return weight_of(self.asked)

    def pinned(self) -> Iterator[Entries]:
        """Yields the entries (records of blocks) that the residency pins, an array per group."""
        for group in self.groups.values():
            yield group.pinned()

    def check_invariants(self) -> None:
        """Raises AssertionError if the rows of the residency (one for each pinned block) break an
        invariant."""
        for group in self.groups.values():
            assert len(group.positions) <= group.most, "more blocks than were asked for"
            assert np.all(np.diff(group.positions) > 0), "a position is there twice"
            assert group.num_linked == np.count_nonzero(group.linked), "kinds miscounted"

    def reads(self, entries: Entries) -> bool:
        """Returns True if the residency (a request's reserved room and pinned blocks) pins any of
        these blocks. Its engine may then be reading the blocks."""
        return any(np.isin(group.entries, entries).any() for group in self.groups.values())


def sum_of_slots(groups: Mapping[int, ResidentGroup]) -> dict[int, int]:
    """Returns the number of slots (places in the arena) of each size that these groups together may
    still pin."""
    left: Counter[int] = Counter()
    for group in groups.values():
        left.update(group.left())
    return dict(left)


def weight_of(asked: Mapping[int, int]) -> int:
    """Returns an upper estimate of the memory, in bytes, that the lists of a residency's blocks use
    in this process (not the slots of the blocks in the arena).

    asked: number of blocks to reserve, by group.
    """
    return RESIDENCY_BYTES + GROUP_BYTES * len(asked) + BLOCK_BYTES * sum(asked.values())


# ---------------------------------------------------------------------------------- all residencies


@dataclass(frozen=True, slots=True)
class Refusal:
    """The latest refusal of an engine's call to open or grow a residency (to pin the blocks of a
    running request), because the arena lacked room.

    asked_bytes: bytes of the arena that the refused call would have reserved.
    available_bytes: bytes that could be reserved at that time.
    message: text of the error.
    at_s: when the residency was refused, on the monotonic clock.
    num_attempts: how many times in a row this residency has been refused.
    """

    engine_id: str
    residency_id: str
    asked_bytes: int
    available_bytes: int
    message: str
    at_s: float
    num_attempts: int


class ResidencyBook:
    """Finds residencies (each pins the blocks of a running request) by id and by session. Bounds
    their number and memory for each owner (tenant or engine).

    bound: counts the residencies of each owner.
    memory: counts, for each owner, the bytes of memory that the lists of the residencies' blocks
        use.
    orphans: numbers of sessions (connections of engines) that ended while the server drained before
        its stop. Their residencies stay, for the next server.
    """

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
        """Returns the open residency (a request whose KV stays in host memory) with the id that a
        call to open a residency gives; None if the id is new.

        Raises INVALID_FIELD if the id is empty, DUPLICATE_ID if the engine uses it in another key
        space.
        """
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
        """Returns the engine's open residency (a request whose KV stays in host memory) with this
        id; None if there is none."""
        return self._by_id.get((engine_id, residency_id))

    def named(self, session: SessionRecord, residency_id: str) -> Residency | None:
        """Returns the residency (a request whose KV stays in host memory) with this id; None if the
        session's engine has no open residency with this id, or has it in another key space."""
        residency = self.get(session.engine_id, residency_id)
        if residency is None or residency.key_space_id != session.key_space_id:
            return None
        return residency

    def live(self, session: SessionRecord, residency_id: str) -> Residency:
        """Returns the open residency (a request whose KV stays in host memory) with this id. Raises
        UNKNOWN_RESIDENCY if it is not open in the session's key space (a model in a
        configuration)."""
        residency = self.named(session, residency_id)
        if residency is None:
            raise HotKVError(
                Reason.UNKNOWN_RESIDENCY,
                f"residency_id {residency_id!r} is unknown, closed or has ended with its session; "
                "open it again",
            )
        return residency

    def check_room(self, residency: Residency) -> None:
        """Checks a new residency (a request whose KV stays in host memory) against the bounds of
        its owner.

        Raises RESIDENCY_TOO_LARGE if the server's lists of its blocks would use more memory
        (outside the arena) than any owner, a tenant or engine, may have. Raises OVERLOADED if the
        owner has too many residencies, or too little memory left for the lists.
        """
        self._check_memory(residency.owner, residency.weight, residency.weight)
        if not self.bound.room(residency.owner):
            raise HotKVError(
                Reason.OVERLOADED,
                f"residency_id: {self.bound.refusal(residency.owner, 'residencies')}; close some "
                "first",
            )

    def check_growth(self, residency: Residency, num_blocks: Mapping[int, int]) -> None:
        """Checks whether the lists of blocks that the server keeps for an open residency (a request
        whose KV stays in host memory) may grow. Their memory, outside the arena, is bounded for
        each owner (tenant or engine).

        Raises RESIDENCY_TOO_LARGE if the lists would use more memory than any owner may have,
        OVERLOADED if the owner has too little memory left.

        num_blocks: number of blocks of the residency after it has grown, by group.
        """
        weight = weight_of(num_blocks)
        self._check_memory(residency.owner, weight, weight - residency.weight)

    def _check_memory(self, owner: str, weight: int, more: int) -> None:
        """Raises HotKVError unless an owner (tenant or engine) may use `more` additional bytes of
        memory, outside the arena, for the lists of a residency's blocks.

        weight: bytes that these lists would then use in total.
        """
        if weight > self.memory.capacity // 2:
            raise HotKVError(
                Reason.RESIDENCY_TOO_LARGE,
                f"groups.block_count: the lists of this take {weight} bytes, more than half of "
                f"client_memory_bytes; raise that to {2 * weight} at least",
            )
        if more > self.memory.room(owner):
            raise HotKVError(
                Reason.OVERLOADED,
                f"groups.block_count: {self.memory.refusal(owner, 'bytes of lists of residencies')}"
                "; close some first",
            )

    def add(self, residency: Residency) -> None:
        """Registers a residency (a request whose KV stays in host memory) and counts it for its
        owner (a tenant or engine)."""
        self._by_id[residency.engine_id, residency.residency_id] = residency
        self._by_session.setdefault(residency.session_number, []).append(residency)
        self.bound.take(residency.owner, 1)
        self.memory.take(residency.owner, residency.weight)
        self.num_opened += 1
        self.settle_refusal(residency.engine_id, residency.residency_id)

    def grow(self, residency: Residency, num_blocks: Mapping[int, int]) -> None:
        """Raises the number of blocks that a residency may have.

        num_blocks: the new number of blocks by group, at least the old number.
        """
        weight = residency.weight
        residency.asked = dict(num_blocks)
        for group, count in num_blocks.items():
            residency.groups[group].most = count
        self.memory.take(residency.owner, residency.weight - weight)
        self.settle_refusal(residency.engine_id, residency.residency_id)

    def begin_closing(self, residency: Residency) -> None:
        """Frees the id of a residency (a request whose KV stays in host memory) that is about to
        close, so that a call may use the id again. Deletes the recorded refusal of the residency,
        if any."""
        del self._by_id[residency.engine_id, residency.residency_id]
        self.settle_refusal(residency.engine_id, residency.residency_id)

    def settle_refusal(self, engine_id: str, residency_id: str) -> None:
        """Deletes the recorded refusal of an engine (for lack of room) if it is about this
        residency."""
        refusal = self._refusals.get(engine_id)
        if refusal is not None and refusal.residency_id == residency_id:
            del self._refusals[engine_id]

    def remove(self, residency: Residency) -> None:
        """Removes a closing residency (a request whose KV stays in host memory) that has no pins
        left. Subtracts it from the counts of its owner (a tenant or engine)."""
        of_session = self._by_session[residency.session_number]
        of_session.remove(residency)
        if not of_session:
            del self._by_session[residency.session_number]
        self.bound.give(residency.owner, 1)
        self.memory.give(residency.owner, residency.weight)

    def all(self) -> list[Residency]:
        """Returns all residencies (requests whose KV stays in host memory), including closing
        residencies."""
        return [residency for mine in self._by_session.values() for residency in mine]

    def of_session(self, session_number: int) -> list[Residency]:
        """Returns the residencies that a session has opened, including closing residencies."""
        return list(self._by_session.get(session_number, ()))

    def note_refusal(
        self,
        residency: Residency,
        asked_bytes: int,
        available_bytes: int,
        message: str,
        now_s: float,
    ) -> None:
        """Records that an engine's call to open or grow this residency (a request whose KV stays in
        host memory) was refused for lack of room. `Refusal` explains the arguments."""
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
        """Deletes the recorded refusal (for lack of room) of an engine whose last session
        (connection) has closed."""
        self._refusals.pop(engine_id, None)

    def refusals(self) -> list[Refusal]:
        """Returns the latest refusal of each engine that was refused. A refusal is deleted once the
        refused residency (a request whose KV stays in host memory) opens, grows or closes."""
        return list(self._refusals.values())

    def check_invariants(self) -> None:
        """Raises AssertionError if the register contradicts itself: if the ids or the counts do not
        match the residencies (requests whose KV stays in host memory), or the counted memory does
        not match the memory of the residencies."""
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

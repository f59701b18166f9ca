"""One residency: which blocks of a request it pins, and what is still promised to it.

Always true: a position names one entry; a group has no more positions than were asked for, and no
more representations than positions. Rows are in the order of positions.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from hotkv_server.cache.values import BoolMask, Entries, Int64s

RESIDENCY_BYTES = 1024
GROUP_BYTES = 512
BLOCK_BYTES = 16
"""Bytes that a residency takes by itself, for each group, and for each block that it may pin."""


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

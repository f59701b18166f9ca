"""The moves under way: up, to host memory, or down, to a tier.

Always true: a block is in at most one move up, but may move down to several tiers. A block
flushed during its move is void: it does not become ready.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hotkv_server.cache.room.space import Space
from hotkv_server.cache.values import FIRST_MOVE, BoolMask, Entries, Int64s


@dataclass(slots=True)
class Move:
    """A promotion or demotion under way: n blocks of one key space.

    `number`: owner of the entries that a move up has reserved.
    `entries`: in host memory; empty once a move up has ended.
    `places`: entries of the disk; empty for a shared tier.
    `kept`: arrived, and pinned until all who waited have leased or given up.
    `forsaken`: of an abandoned move up; slots in use until the tier answers.
    """

    number: int
    key_space_id: int
    is_up: bool
    entries: Entries
    places: Entries
    is_void: BoolMask
    kept: Entries = field(default_factory=lambda: np.empty(0, np.uint32))
    forsaken: Entries = field(default_factory=lambda: np.empty(0, np.uint32))

    def __len__(self) -> int:
        return len(self.entries)


@dataclass(slots=True)
class MoveCounters:
    """Blocks to and from the disk since the start.

    `encoded`: of `demoted`, compressed.
    `refused`: not demoted for want of a place.
    `lost`: damaged or missing when read.
    """

    demoted: int = 0
    encoded: int = 0
    promoted: int = 0
    refused: int = 0
    lost: int = 0


class Moves:
    """See the module."""

    def __init__(self, host: Space) -> None:
        self.host = host
        self._under_way: dict[int, Move] = {}
        self._stopped: Counter[int] = Counter()
        self._next_number = FIRST_MOVE

    def __repr__(self) -> str:
        return f"Moves({len(self)} under way)"

    def __len__(self) -> int:
        return len(self._under_way)

    def __iter__(self) -> Iterator[Move]:
        return iter(self._under_way.values())

    def next_number(self) -> int:
        """At least FIRST_MOVE, at most 32 bits, and free."""
        while self._next_number in self._under_way:
            self._next_number = _after(self._next_number)
        number, self._next_number = self._next_number, _after(self._next_number)
        return number

    def add(
        self, number: int, key_space_id: int, is_up: bool, entries: Entries, places: Entries
    ) -> Move:
        void = np.zeros(len(entries), np.bool_)
        move = self._under_way[number] = Move(number, key_space_id, is_up, entries, places, void)
        return move

    def remove(self, move: Move) -> None:
        del self._under_way[move.number]

    def may_begin(self, key_space_id: int) -> bool:
        return not self._stopped[key_space_id]

    @contextmanager
    def stopped(self, key_space_id: int) -> Iterator[None]:
        """For a flush: no move of the key space begins, and those under way are void."""
        for move in self:
            if move.key_space_id == key_space_id:
                move.is_void[:] = True
        self._stopped[key_space_id] += 1
        try:
            yield
        finally:
            self._stopped[key_space_id] -= 1
            if not self._stopped[key_space_id]:
                del self._stopped[key_space_id]

    def check_invariants(self) -> None:
        for move in self:
            owners = self.host.index.owners(move.entries)
            assert not move.is_up or np.all(owners == move.number), "a move up has another's slot"

    def reserved(self) -> Entries:
        """Entries that moves up have reserved."""
        return joined([move.entries for move in self if move.is_up])

    def pins(self) -> NDArray[np.int64]:
        """Pins that moves hold, int64 [capacity + 1], by entry number."""
        counts = np.zeros(self.host.index.capacity + 1, np.int64)
        for move in self:
            np.add.at(counts, move.kept if move.is_up else move.entries, 1)
            np.add.at(counts, move.forsaken, 1)
        return counts


def _after(number: int) -> int:
    return number + 1 if number < 0xFFFF_FFFF else FIRST_MOVE


def joined(parts: list[Entries]) -> Entries:
    return np.concatenate(parts) if parts else np.empty(0, np.uint32)


def by_group(space: Space, entries: Entries) -> Iterator[tuple[int, int, Int64s]]:
    """Yields key space, group and positions in `entries`."""
    if not len(entries):
        return
    key_spaces, groups, _ = space.index.keys(entries)
    both = np.stack((key_spaces, groups), axis=1)
    for key_space_id, group in np.unique(both, axis=0).tolist():
        yield key_space_id, group, np.flatnonzero((key_spaces == key_space_id) & (groups == group))

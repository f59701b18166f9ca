"""Records the moves of blocks that are under way between host memory and tiers.

Always true: a block is in at most one move up. It may be copied to several tiers at the same time.
If a block is flushed during its move, the move marks it as void, and it does not become ready.
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
    """A move of n blocks of a key space.

    `is_up`: True for a move from a tier to host memory, False for a move or copy to a tier.
    `entries`: the blocks' entries in host memory.
    `places`: the blocks' entries in the disk's books; empty for a shared tier.
    `is_void`: mask [n] of the blocks that were flushed during the move.
    `kept`: entries of blocks that have arrived in host memory, and stay pinned for the callers that
        wait.
    `forsaken`: entries of blocks that were given up because the tier hangs. The blocks' slots stay
        reserved until the tier answers.
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
    """Numbers of blocks since the start, for the disk.

    `demoted`: blocks moved down.
    `encoded`: how many of these in encoded form.
    `promoted`: blocks moved up.
    `refused`: blocks that were not moved down, because there was no place for them.
    `lost`: blocks that the disk returned damaged, or no longer had.
    """

    demoted: int = 0
    encoded: int = 0
    promoted: int = 0
    refused: int = 0
    lost: int = 0


class Moves:
    """The moves under way to and from `host`, the space of host memory."""

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
        """Returns an unused number for a new move, of 32 bits."""
        while self._next_number in self._under_way:
            self._next_number = _after(self._next_number)
        number, self._next_number = self._next_number, _after(self._next_number)
        return number

    def add(
        self, number: int, key_space_id: int, is_up: bool, entries: Entries, places: Entries
    ) -> Move:
        """Records a move that begins."""
        void = np.zeros(len(entries), np.bool_)
        move = self._under_way[number] = Move(number, key_space_id, is_up, entries, places, void)
        return move

    def remove(self, move: Move) -> None:
        """Removes a move that has ended."""
        del self._under_way[move.number]

    def may_begin(self, key_space_id: int) -> bool:
        """Returns True if moves of this key space may begin now, because no `stopped` is open."""
        return not self._stopped[key_space_id]

    @contextmanager
    def stopped(self, key_space_id: int) -> Iterator[None]:
        """Prevents new moves of this key space while the context is open. Blocks that are already
        moving become void."""
        self.void(key_space_id)
        self._stopped[key_space_id] += 1
        try:
            yield
        finally:
            self._stopped[key_space_id] -= 1
            if not self._stopped[key_space_id]:
                del self._stopped[key_space_id]

    def check_invariants(self) -> None:
        """Raises AssertionError if a move up has a slot that is not its own."""
        for move in self:
            owners = self.host.index.owners(move.entries)
            assert not move.is_up or np.all(owners == move.number), "a move up has another's slot"

    def void(self, key_space_id: int) -> None:
        """Makes the moves of this key space void: their blocks don't become ready."""
        for move in self:
            if move.key_space_id == key_space_id:
                move.is_void[:] = True

    def reserved(self) -> Entries:
        """Returns the entries of host memory that moves up have reserved."""
        return joined([move.entries for move in self if move.is_up])

    def pins(self) -> NDArray[np.int64]:
        """Returns the number of pins that moves hold on each entry of host memory."""
        counts = np.zeros(self.host.index.capacity + 1, np.int64)
        for move in self:
            np.add.at(counts, move.kept if move.is_up else move.entries, 1)
            np.add.at(counts, move.forsaken, 1)
        return counts


def _after(number: int) -> int:
    return number + 1 if number < 0xFFFF_FFFF else FIRST_MOVE


def joined(parts: list[Entries]) -> Entries:
    """Concatenates the arrays; returns an empty array if there are none."""
    return np.concatenate(parts) if parts else np.empty(0, np.uint32)


def by_group(space: Space, entries: Entries) -> Iterator[tuple[int, int, Int64s]]:
    """Splits blocks by key space and KV cache group. Yields for each pair the key space, the group,
    and the positions of its blocks in `entries`."""
    if not len(entries):
        return
    key_spaces, groups, _ = space.index.keys(entries)
    both = np.stack((key_spaces, groups), axis=1)
    for key_space_id, group in np.unique(both, axis=0).tolist():
        yield key_space_id, group, np.flatnonzero((key_spaces == key_space_id) & (groups == group))

"""Records the moves of blocks that are under way between host memory and tiers. A move "up" goes to
host memory, a move "down" to a tier.

Always true: a block is in at most one move up, but several moves may copy it down to different
tiers at the same time. If a block is flushed (deleted with its whole key space) during its move, it
becomes void in the move: it does not become ready.
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
    """A move of n blocks of a key space (a model in a configuration), between host memory and
    one tier.

    `number`: identifies the move. The entries (records in the block table) that a move up has
        reserved in host memory have this number as their owner.
    `is_up`: True for a move from the tier to host memory, False for a move or copy to the tier.
    `entries`: the blocks' entries in host memory. Empty once a move up has ended.
    `places`: the blocks' entries in the disk's block table; empty for a shared tier.
    `is_void`: mask [n] of the blocks that were flushed (deleted with their whole key space) during
        the move.
    `kept`: entries of the blocks that have arrived in host memory. They stay pinned until all
        waiting callers have leased them or given up.
    `forsaken`: entries of a move up that was abandoned, because the tier hangs or the blocks were
        flushed. Their slots (places in the arena) stay in use until the tier answers.
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
    """Counts of the blocks that moved to and from the disk since the start.

    `demoted`: blocks moved to the disk.
    `encoded`: blocks moved to the disk in encoded (compressed) form; also counted in `demoted`.
    `promoted`: blocks moved from the disk to host memory.
    `refused`: blocks that were not moved to the disk, because there was no place for them.
    `lost`: blocks that the disk returned damaged, or no longer had.
    """

    demoted: int = 0
    encoded: int = 0
    promoted: int = 0
    refused: int = 0
    lost: int = 0


class Moves:
    """Records the moves of blocks that are under way between host memory and tiers; see the module.
    `host`: the blocks and slots of host memory."""

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
        """Returns a number for a new move of blocks: at least FIRST_MOVE, at most 32 bits, and not
        the number of a move under way."""
        while self._next_number in self._under_way:
            self._next_number = _after(self._next_number)
        number, self._next_number = self._next_number, _after(self._next_number)
        return number

    def add(
        self, number: int, key_space_id: int, is_up: bool, entries: Entries, places: Entries
    ) -> Move:
        """Records and returns a move of blocks (between host memory and a tier) that begins now.
        The arguments are the fields of `Move`."""
        void = np.zeros(len(entries), np.bool_)
        move = self._under_way[number] = Move(number, key_space_id, is_up, entries, places, void)
        return move

    def remove(self, move: Move) -> None:
        """Removes a move of blocks (between host memory and a tier) that has ended."""
        del self._under_way[move.number]

    def may_begin(self, key_space_id: int) -> bool:
        """Returns True if moves of this key space (a model in a configuration) may begin.
        Returns False while a flush deletes its blocks (in the `with` block of `stopped`)."""
        return not self._stopped[key_space_id]

    @contextmanager
    def stopped(self, key_space_id: int) -> Iterator[None]:
        """Context manager for a flush (deletion of all blocks of the key space). While the context
        is open, no move of blocks of this key space between tiers may begin. Blocks in moves under
        way become void: they don't become ready when the move ends."""
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
        """Raises AssertionError if entries (records in the block table) that a move up (from a tier
        to host memory) has reserved don't name this move as their owner."""
        for move in self:
            owners = self.host.index.owners(move.entries)
            assert not move.is_up or np.all(owners == move.number), "a move up has another's slot"

    def reserved(self) -> Entries:
        """Returns the entries (records in the block table) that moves up (from tiers) have reserved
        in host memory."""
        return joined([move.entries for move in self if move.is_up])

    def pins(self) -> NDArray[np.int64]:
        """Returns how many pins moves hold on each block in host memory, int64 [capacity + 1], by
        the number of the block's entry in the block table."""
        counts = np.zeros(self.host.index.capacity + 1, np.int64)
        for move in self:
            np.add.at(counts, move.kept if move.is_up else move.entries, 1)
            np.add.at(counts, move.forsaken, 1)
        return counts


def _after(number: int) -> int:
    return number + 1 if number < 0xFFFF_FFFF else FIRST_MOVE


def joined(parts: list[Entries]) -> Entries:
    """Concatenates arrays of entries (records in the block table). Returns an empty array for an
    empty list."""
    return np.concatenate(parts) if parts else np.empty(0, np.uint32)


def by_group(space: Space, entries: Entries) -> Iterator[tuple[int, int, Int64s]]:
    """Splits blocks by key space (a model in a configuration) and KV cache group. Yields, for
    each group that has some of the blocks: the number of its key space, the number of the group,
    and the positions of its blocks in `entries`."""
    if not len(entries):
        return
    key_spaces, groups, _ = space.index.keys(entries)
    both = np.stack((key_spaces, groups), axis=1)
    for key_space_id, group in np.unique(both, axis=0).tolist():
        yield key_space_id, group, np.flatnonzero((key_spaces == key_space_id) & (groups == group))

"""Records which blocks are on the disk tier, and which moves of blocks between host memory and the
disk are under way. A move "up" goes to host memory, a move "down" to the disk; "below" means on the
disk.

The disk tier only moves bytes. `LowerTier` has the `Space` that gives each block its place on the
disk; `place_sizes` chooses the sizes of the places. Always true:

- a place is not reused while a move reads or writes it;
- a block that is flushed (deleted with its whole key space) while it moves does not become ready
  anywhere;
- if the disk loses a block, the copy of the block in host memory stays.

Sketches (summaries of blocks for sparse attention) stay in host memory.
"""

from collections.abc import Iterator

import numpy as np

from hotkv_proto import table
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.values import Cause, KeySpaceRecord
from hotkv_server.tiers.book.arrivals import Arrivals
from hotkv_server.tiers.book.demotion import Demotion
from hotkv_server.tiers.book.moves import MoveCounters, Moves, joined
from hotkv_server.tiers.book.place_sizes import EncodedBytes, PlaceSizes
from hotkv_server.tiers.book.promotion import Promotion
from hotkv_server.tiers.book.write_gate import WriteGate


class LowerTier:
    """Records which blocks are on the disk tier, and begins and ends the moves of blocks between
    host memory and the disk; see the module.

    `moves`: the moves under way, of all tiers.
    `arrivals`: reserves slots in host memory for moves up.
    `space`: the blocks on the disk and their places.
    `down`: begins and ends moves to the disk.
    `up`: begins and ends moves from the disk to host memory.
    `write_bytes_per_day`: most bytes to write to the disk in 24 hours; None: no limit.
    `encoded_bytes`: returns the size of the place for an encoded block, given the size of its slot;
        None if blocks are never encoded.
    """

    def __init__(
        self,
        moves: Moves,
        arrivals: Arrivals,
        space: Space,
        write_bytes_per_day: int | None = None,
        encoded_bytes: EncodedBytes | None = None,
    ) -> None:
        self.space = space
        self.moves = moves
        moves.host.room.may_keep = space.room.may_keep = False
        self.counters = MoveCounters()
        gate = WriteGate(write_bytes_per_day)
        sizes = PlaceSizes(encoded_bytes)
        self.down = Demotion(moves, space, gate, sizes, self.counters)
        self.up = Promotion(moves, arrivals, space, sizes, self.counters)

    def __repr__(self) -> str:
        return f"LowerTier({self.space!r}, {self.moves!r})"

    def add_key_space(self, record: KeySpaceRecord) -> None:
        """Registers a key space (a model in a configuration), so that its blocks can be moved
        to the disk."""
        number, key_space = record.number, record.key_space
        self.down.add_key_space(record)
        self.space.tenants.add_key_space(number, key_space.tenant)
        self.space.index.add_key_space(
            number, [key_space.group_salt(group) for group in range(len(key_space.groups))]
        )

    def forget_key_space(self, record: KeySpaceRecord) -> None:
        """Forgets a key space (a model in a configuration). The key space must have no blocks
        on the disk and no moves."""
        self.down.forget_key_space(record)

    def has_blocks(self, key_space_id: int) -> bool:
        """Returns True if a block of the key space (a model in a configuration) is on the disk,
        or is being moved to or from any tier."""
        return bool(self.space.tenants.bytes_of(key_space_id)) or any(
            move.key_space_id == key_space_id for move in self.moves
        )

    def flush(self, key_space_id: int, portion: int) -> Iterator[int]:
        """Removes the blocks of a key space (a model in a configuration) from the records of
        the disk tier. Works in steps: each step searches `portion` entries of the disk's block
        table, and then yields the number of blocks that it has removed. The caller must have
        stopped new moves of the key space (`Moves.stopped`)."""
        assert not self.moves.may_begin(key_space_id), "flushed while blocks may move"
        for first in range(0, self.space.index.num_numbers, portion):
            ready = self.space.index.ready_blocks(key_space_id, first, first + portion)
            # Record that a flush has removed these blocks. Record it for host memory, because the
            # cause of a miss is looked up there.
            self.moves.host.removal.remember(self.space.index.mixed(ready), Cause.FLUSH)
            self.space.removal.flush(ready)
            yield len(ready)

    def check_invariants(self) -> None:
        """Raises AssertionError if the records of the disk tier contradict each other. Takes time
        linear in the capacity of the disk's block table."""
        self.space.check_invariants()
        reserved, pins = [], np.zeros(self.space.index.capacity + 1, np.int64)
        for move in self.moves:
            if move.is_up:
                np.add.at(pins, move.places, 1)
            else:
                reserved.append(move.places)
        found = np.flatnonzero(self.space.index.states() == table.STATE_RESERVED)
        assert np.array_equal(np.sort(joined(reserved)), found), (
            "reserved places and moves down disagree"
        )
        assert np.array_equal(pins, self.space.index.pins), "pins below and moves up disagree"

"""Which blocks are on the disk ("below"), and their moves. The tier only moves bytes: `LowerTier`
has the `Space` of the places. Always true:

- a place is not reused while a move reads or writes it;
- a block flushed while it moves becomes ready nowhere;
- if the disk loses a block, host memory keeps it.

Sketches stay in host memory.
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
    """See the module.

    `write_bytes_per_day`: None: no limit.
    `encoded_bytes`: None: nothing is encoded.
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
        moves.host.room.may_refuse = space.room.may_refuse = False
        self.counters = MoveCounters()
        gate = WriteGate(write_bytes_per_day)
        sizes = PlaceSizes(encoded_bytes)
        self.down = Demotion(moves, space, gate, sizes, self.counters)
        self.up = Promotion(moves, arrivals, space, sizes, self.counters)

    def __repr__(self) -> str:
        return f"LowerTier({self.space!r}, {self.moves!r})"

    def add_key_space(self, record: KeySpaceRecord) -> None:
        number, key_space = record.number, record.key_space
        self.down.add_key_space(record)
        self.space.tenants.add_key_space(number, key_space.tenant)
        self.space.index.add_key_space(
            number, [key_space.group_salt(group) for group in range(len(key_space.groups))]
        )

    def forget_key_space(self, record: KeySpaceRecord) -> None:
        """The key space must have no blocks on the disk and no moves."""
        self.down.forget_key_space(record)

    def has_blocks(self, key_space_id: int) -> bool:
        """A block is on the disk, or moving to or from any tier."""
        return bool(self.space.tenants.bytes_of(key_space_id)) or any(
            move.key_space_id == key_space_id for move in self.moves
        )

    def flush(self, key_space_id: int, portion: int) -> Iterator[int]:
        """Removes a key space's blocks, whose moves must be stopped. Each step searches
        `portion` entries and yields how many it has removed."""
        assert not self.moves.may_begin(key_space_id), "flushed while blocks may move"
        for first in range(0, self.space.index.num_numbers, portion):
            ready = self.space.index.ready_blocks(key_space_id, first, first + portion)
            # In host memory's removals, where the cause of a miss is looked up.
            self.moves.host.removal.remember(self.space.index.mixed(ready), Cause.FLUSH)
            self.space.removal.flush(ready)
            yield len(ready)

    def check_invariants(self) -> None:
        """Linear in the capacity of the disk's block table."""
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

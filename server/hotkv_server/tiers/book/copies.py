"""Decides which blocks of host memory are copied to a shared tier, and when a failed copy is tried
again.

The blocks wait in queues, called lanes. The lane STORED has the blocks that engines stored on this
node, in the order of the stores. The lane OLD has blocks that the tier may already have. The lanes
after OLD have blocks whose copy failed.

Always true: a block that is being copied stays pinned in host memory until the tier has stopped
reading it. A failed copy is tried again at most MAX_TRIES times, and only while the block is in
host memory.
"""

from collections.abc import Callable

import numpy as np

from hotkv_proto import table
from hotkv_server.cache.arrays import each_once
from hotkv_server.cache.room.removal import Parts
from hotkv_server.cache.values import BoolMask, Entries
from hotkv_server.tiers.book.moves import Move, Moves
from hotkv_server.tiers.book.waiting import MAX_LOOKED, PART_BLOCKS, WaitingBlocks

STORED, OLD = 0, 1
"""Numbers of lanes (queues of blocks). STORED: blocks that engines stored on this node. OLD: blocks
that came from the disk or were left by an earlier server. OLD + k: blocks whose copy has failed k
times."""
MAX_TRIES = 4
"""Most times that a failed copy of a block is tried again."""


class Copies:
    """Queues blocks for a shared tier, and begins and ends their copies.

    `moves`: the moves under way, of all tiers.
    `on_stored`: called each time `add_stored` has queued blocks.
    """

    def __init__(self, moves: Moves) -> None:
        self.on_stored: Callable[[], None] = lambda: None
        self._moves = moves
        self._host = moves.host
        self._host.room.may_keep = False
        index = moves.host.index
        self.lanes = tuple(WaitingBlocks(index) for _ in range(2 + MAX_TRIES))
        self._under_way: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"Copies({', '.join(map(str, map(len, self.lanes)))} waiting)"

    @property
    def num_waiting(self) -> int:
        """Number of blocks that wait in all lanes (queues)."""
        return sum(map(len, self.lanes))

    def add_stored(self, entries: Entries) -> None:
        """Queues blocks that an engine has stored on this node. Blocks of a sequence must be in the
        order of the sequence."""
        self.lanes[STORED].add(entries)
        self.on_stored()

    def add_old(self, entries: Entries) -> None:
        """Queues ready blocks of host memory that came from the disk or were left by an earlier
        server. The tier may have them already."""
        self.lanes[OLD].add(entries)

    def lane_to_do(self) -> int | None:
        """Returns the number of the lane (queue) from which to copy next; never the lane STORED. Of
        the other lanes that are not empty, returns the lane whose blocks have failed most often.
        Returns None if all lanes except STORED are empty."""
        lanes = range(len(self.lanes) - 1, STORED, -1)
        return next((at for at in lanes if len(self.lanes[at])), None)

    def take(self, num_bytes: int, lane: int = STORED) -> Parts[Entries]:
        """Removes the next blocks from a lane (queue), and returns the removed blocks that are
        still ready, without duplicates. Stops when the removed blocks have about `num_bytes` in
        total, or when about MAX_LOOKED blocks were checked. This is a generator, which yields
        between parts of the work, so that the caller can run other work."""
        index, waiting, num_looked = self._host.index, self.lanes[lane], 0
        reuses = index.table.records[:, table.W_REUSES]
        parts, known = [np.empty(0, np.uint32)], [np.empty(0, np.uint32)]
        while len(waiting) and num_bytes > 0 and num_looked < MAX_LOOKED:
            some = waiting.take(num_bytes)
            num_looked += len(some) + PART_BLOCKS
            num_bytes -= int(index.slot_bytes(some).sum())
            parts.append(some)
            known.append(reuses[some])
            yield
        # While this generator was suspended, a block may have been evicted and its entry number
        # reused for another block. The reuse count of the entry has then changed.
        taken = np.concatenate(parts)
        same = (reuses[taken] == np.concatenate(known)) & index.is_ready(taken)
        return each_once(taken[same])

    def begin(self, entries: Entries, lane: int = STORED) -> list[Move]:
        """Begins to copy blocks that `take` has just removed from the queue `lane`. Pins them, and
        returns a move for each key space (a model in a configuration). If a flush is deleting
        the blocks of a key space (`Moves.stopped`), puts these blocks back into the queue instead.
        """
        moves, key_spaces = [], self._host.index.key_spaces(entries)
        for key_space_id in np.unique(key_spaces).tolist():
            mine = entries[key_spaces == key_space_id]
            if not self._moves.may_begin(key_space_id):
                self.lanes[lane].add(mine)
            else:
                self._host.index.pin(mine, 1)
                number, none = self._moves.next_number(), np.empty(0, np.uint32)
                moves.append(self._moves.add(number, key_space_id, False, mine, none))
                self._under_way[number] = lane
        return moves

    def end(self, move: Move, has_failed: BoolMask | None = None) -> int:
        """Ends a move of n blocks after the tier has stopped reading its slots (places in the
        arena). Unpins the blocks. If the copy of a block failed, queues the block again, in the
        lane (queue) of blocks with one more failure. Returns the number of failed blocks that are
        not queued again, because all their tries have failed.

        `has_failed` [n]: True if the copy of the block failed; None if no copy failed.
        """
        index, lane = self._host.index, max(self._under_way.pop(move.number), OLD) + 1
        num_given_up = 0
        if has_failed is not None:
            failed = move.entries[has_failed & ~move.is_void]
            failed = failed[index.is_ready(failed)]
            if lane < len(self.lanes):
                self.lanes[lane].add(failed)
            else:
                num_given_up = len(failed)
        self._moves.remove(move)
        index.pin(move.entries, -1)
        self._host.removal.reap(move.entries)
        return num_given_up

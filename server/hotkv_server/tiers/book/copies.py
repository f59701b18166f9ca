"""Decides which blocks are copied to a shared tier, and when again. They wait in queues, the lanes.

Always true: a block stays pinned until the tier has stopped reading it. A failed copy is tried
again at most MAX_TRIES times, and only while the block is in host memory.
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
"""Lanes. STORED: stored on this node. OLD: from the disk or an earlier server, so perhaps in the
tier. OLD + k: failed k times."""
MAX_TRIES = 4


class Copies:
    """See the module. `on_stored`: called when `add_stored` has queued blocks."""

    def __init__(self, moves: Moves) -> None:
        self.on_stored: Callable[[], None] = lambda: None
        self._moves = moves
        self._host = moves.host
        self._host.room.may_refuse = False
        index = moves.host.index
        self.lanes = tuple(WaitingBlocks(index) for _ in range(2 + MAX_TRIES))
        self._under_way: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"Copies({', '.join(map(str, map(len, self.lanes)))} waiting)"

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.lanes))

    def add_stored(self, entries: Entries) -> None:
        """Blocks of a prompt must be in its order."""
        self.lanes[STORED].add(entries)
        self.on_stored()

    def add_old(self, entries: Entries) -> None:
        self.lanes[OLD].add(entries)

    def lane_to_do(self) -> int | None:
        """The non-empty lane with the most failures, never STORED; None if there is none."""
        lanes = range(len(self.lanes) - 1, STORED, -1)
        return next((at for at in lanes if len(self.lanes[at])), None)

    def take(self, num_bytes: int, lane: int = STORED) -> Parts[Entries]:
        """The next blocks of a lane that are still ready, each once: about `num_bytes`, or
        MAX_LOOKED blocks. Yields between parts of the work."""
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
        # Entries may have been reused while this generator was suspended.
        taken = np.concatenate(parts)
        same = (reuses[taken] == np.concatenate(known)) & index.is_ready(taken)
        return each_once(taken[same])

    def begin(self, entries: Entries, lane: int = STORED) -> list[Move]:
        """Pins blocks and begins a move per key space. Blocks that are being flushed go back
        into the lane."""
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
        """Unpins the blocks once the tier has stopped reading, and queues failed ones in the
        next lane. Returns how many are given up."""
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

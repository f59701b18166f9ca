"""Copies blocks of host memory to a tier that places them itself.

Blocks that were stored here are copied first, in order. Further queues (lanes) hold blocks that the
tier may already have, and blocks that it failed to store. Always true: a block stays pinned in host
memory until the tier has stopped reading it. A failed copy is tried again at most MAX_TRIES times,
and only while the block is in host memory.
"""

from collections.abc import Callable

import numpy as np

from hotkv_server.cache.values import BoolMask, Entries
from hotkv_server.tiers.book.moves import Move, Moves
from hotkv_server.tiers.book.waiting import WaitingBlocks

STORED, OLD = 0, 1
"""Lanes of blocks that were stored here, and of blocks that came from a disk or an earlier server.
Lane OLD + k holds blocks of which k copies have failed."""
MAX_TRIES = 4


class Copies:
    """Begins and ends the copies for a tier.

    `on_stored`: called when blocks that were stored here begin to wait.
    """

    def __init__(self, moves: Moves) -> None:
        self.on_stored: Callable[[], None] = lambda: None
        self._moves = moves
        self._host = moves.host
        self._host.room.may_keep = False
        index = moves.host.index
        # Blocks that were not compared since a restart are compared before they are copied.
        old = [WaitingBlocks(index, takes_unverified=True) for _ in range(1 + MAX_TRIES)]
        self.lanes = (WaitingBlocks(index), *old)
        self._under_way: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"Copies({', '.join(map(str, map(len, self.lanes)))} waiting)"

    @property
    def num_waiting(self) -> int:
        """Number of waiting blocks in all lanes."""
        return sum(map(len, self.lanes))

    def add_stored(self, entries: Entries) -> None:
        """Queues blocks that were stored here. The blocks of a chain come in its order."""
        self.lanes[STORED].add(entries)
        self.on_stored()

    def add_old(self, entries: Entries) -> None:
        """Queues ready blocks that came into host memory from another source than this tier."""
        self.lanes[OLD].add(entries)

    def lane_to_do(self) -> int | None:
        """Returns the lane behind STORED with waiting blocks that have failed most often; None if
        all these lanes are empty."""
        lanes = range(len(self.lanes) - 1, STORED, -1)
        return next((at for at in lanes if len(self.lanes[at])), None)

    def take(self, num_bytes: int, lane: int = STORED) -> Entries:
        """Removes and returns the next blocks of a lane, about `num_bytes` of slots, without
        duplicates."""
        waiting, parts = self.lanes[lane], [np.empty(0, np.uint32)]
        while len(waiting) and num_bytes > 0:
            parts.append(waiting.take(num_bytes))
            num_bytes -= int(self._host.index.slot_bytes(parts[-1]).sum())
        taken = np.concatenate(parts)
        return taken[np.sort(np.unique(taken, return_index=True)[1])]

    def begin(self, entries: Entries, lane: int = STORED) -> list[Move]:
        """Begins to copy ready blocks. Returns a move for each key space whose blocks may move;
        queues the blocks of other key spaces again."""
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
        """Ends a move after the tier has stopped reading its slots. Returns the number of blocks
        that are given up.

        `has_failed` [n]: True where the copy failed; such a block is queued again while it is ready
            and has tries left. None: all copies succeeded.
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

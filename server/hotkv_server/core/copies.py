"""Copies of blocks of host memory for a tier that places them by itself, in the order in which they
were stored.

Always true: a block stays pinned in host memory until the tier reads it no more.
"""

import numpy as np

from hotkv_server.core.moves import Move, Moves
from hotkv_server.core.values import Entries
from hotkv_server.core.waiting import WaitingBlocks


class Copies:
    """Begins and ends the copies for one tier. `waiting`: blocks that were stored."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._host = moves.host
        self.waiting = WaitingBlocks(moves.host.index)

    def __repr__(self) -> str:
        return f"Copies({self.waiting!r})"

    def take(self, num_bytes: int) -> Entries:
        """The next waiting blocks, about so many bytes of slots, each once. They wait no longer."""
        parts = [np.empty(0, np.uint32)]
        while len(self.waiting) and num_bytes > 0:
            parts.append(self.waiting.take(num_bytes))
            num_bytes -= int(self._host.index.slot_bytes(parts[-1]).sum())
        taken = np.concatenate(parts)
        return taken[np.sort(np.unique(taken, return_index=True)[1])]

    def begin(self, entries: Entries) -> list[Move]:
        """Begins to copy ready blocks; a move for each key space whose blocks may move."""
        moves, key_spaces = [], self._host.index.key_spaces(entries)
        for key_space_id in np.unique(key_spaces).tolist():
            if self._moves.may_begin(key_space_id):
                mine = entries[key_spaces == key_space_id]
                self._host.index.pin(mine, 1)
                number, none = self._moves.next_number(), np.empty(0, np.uint32)
                moves.append(self._moves.add(number, key_space_id, False, mine, none))
        return moves

    def end(self, move: Move) -> None:
        """The tier reads no slot of a move any more."""
        self._moves.remove(move)
        self._host.index.pin(move.entries, -1)
        self._host.removal.reap(move.entries)

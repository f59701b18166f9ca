"""Moves up: blocks of a tier below into slots of host memory.

Always true: a block is ready in host memory only when the tier has filled its slot with the very
bytes that were stored. What has come up stays pinned until `let_go`, so that whoever asked for it
can lease it.
"""

import numpy as np

from hotkv import table
from hotkv.keys import MAX_GROUPS
from hotkv.table import Words
from hotkv_server.core.arrays import first_occurrences, rows
from hotkv_server.core.index import Keys
from hotkv_server.core.moves import Move, Moves, joined
from hotkv_server.core.values import FIRST_MOVE, BoolMask, Entries, HashList, Int64s


class Promotion:
    """Begins and ends moves up."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._host = moves.host
        self._below = moves.below

    def __repr__(self) -> str:
        return f"Promotion({self._moves!r})"

    def wanted(self, key_space_id: int, groups: list[HashList]) -> list[Int64s]:
        """Positions of blocks, one array a list, that are ready below and not in host memory,
        reserved ones neither."""
        found = []
        for one in groups:
            if one.group_index >= MAX_GROUPS:
                found.append(np.empty(0, np.int64))
                continue
            here = self._host.index.find(key_space_id, one.group_index, one.hashes)
            absent = np.flatnonzero(here == 0)
            below = self._moves.find(key_space_id, one.group_index, rows(one.hashes, absent))
            found.append(absent[below != 0])
        return found

    def begin(self, key_space_id: int, groups: list[HashList], now_s: float) -> Move | None:
        """Begins to move blocks that are ready below into host memory, as many as find a slot; None
        for none. `groups`: lists in chain order, also of blocks that are there already.

        Room is made as for a store: in parts before the call if the core does not make it itself.
        """
        if not self._moves.may_begin(key_space_id):
            return None
        number = self._moves.next_number()
        entries, places = [], []
        for one, positions in zip(groups, self.wanted(key_space_id, groups), strict=True):
            if not len(positions):
                continue
            positions = positions[first_occurrences(rows(one.hashes, positions))]
            below = self._moves.find(key_space_id, one.group_index, rows(one.hashes, positions))
            for size in np.unique(self._below.index.slot_bytes(below)).tolist():
                at = self._below.index.slot_bytes(below) == size
                taken = self._reserve_slots(
                    key_space_id, one, positions[at], below[at], size, number
                )
                entries.append(taken)
                places.append(below[at][: len(taken)])
        coming = joined(places)
        if not len(coming):
            return None
        self._below.index.pin(coming, 1)
        self._below.touch(coming, now_s)
        return self._moves.add(number, key_space_id, True, joined(entries), coming)

    def _reserve_slots(
        self,
        key_space_id: int,
        listed: HashList,
        positions: Int64s,
        places: Entries,
        size: int,
        number: int,
    ) -> Entries:
        """Reserves slots of one size in host memory, as many as find room, and links them to the
        blocks of their list."""
        index, group = self._host.index, listed.group_index
        words = index.find(key_space_id, group, listed.hashes)
        staying = words[table.is_ready(words)]
        index.pin(staying, 1)
        depths = self._below.index.table.records[places, table.W_DEPTH].astype(np.int64)
        taken = self._host.insert(
            key_space_id, group, rows(listed.hashes, positions), size, depths, number
        )
        index.pin(staying, -1)
        words &= ~table.RESERVED_FLAG
        words[positions[: len(taken)]] = taken
        self._host.chains.link(key_space_id, group, words, None)
        return taken

    def end(
        self,
        move: Move,
        is_found: BoolMask,
        is_lost: BoolMask,
        checks: Keys | None,
        now_s: float,
    ) -> None:
        """The tier has ended a move up, and writes no slot of it any more. What is ready now stays
        pinned until `let_go`.

        `is_found` [n]: whose slots hold the block; `is_lost` [n]: whose places don't. `checks`
        uint64 [n]: check values of those that were found; None for none.
        """
        good = is_found & ~move.is_void
        came = move.entries[good]
        self._host.publish(came, now_s, checks=None if checks is None else checks[good])
        self._host.removal.drop(move.entries[~good])
        self._host.index.pin(came, 1)
        move.kept = came
        self._below.index.pin(move.places, -1)
        self._below.removal.reap(move.places)
        gone = move.places[is_lost & ~is_found & ~move.is_void]
        self._below.removal.flush(gone[self._below.index.is_ready(gone)])
        self._moves.counters.promoted += len(came)
        self._moves.counters.lost += len(gone)
        move.entries, move.places = move.entries[:0], move.places[:0]

    def let_go(self, move: Move) -> None:
        """Nobody waits for the blocks of a move up any more that has ended."""
        self._moves.remove(move)
        self._host.index.pin(move.kept, -1)
        self._host.removal.reap(move.kept)

    def is_coming(self, key_space_id: int, group_index: int, hashes: Words) -> BoolMask:
        """Which blocks [n] are on their way up."""
        words = self._host.index.find(key_space_id, group_index, hashes)
        is_reserved = words >= table.RESERVED_FLAG
        owners = self._host.index.owners(words & ~table.RESERVED_FLAG)
        coming: BoolMask = is_reserved & (owners >= FIRST_MOVE)
        return coming

    def numbers(self, key_space_id: int, groups: list[HashList]) -> set[int]:
        """The moves that bring up a block of these lists."""
        found: set[int] = set()
        for one in groups:
            words = self._host.index.find(key_space_id, one.group_index, one.hashes)
            reserved = words[words >= table.RESERVED_FLAG] & ~table.RESERVED_FLAG
            owners = self._host.index.owners(reserved)
            found.update(owners[owners >= FIRST_MOVE].tolist())
        return found

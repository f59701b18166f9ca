"""Begins and ends moves of blocks from the disk up to host memory. In names of this module, "below"
means on the disk."""

import numpy as np

from hotkv_proto import table
from hotkv_proto.keys import MAX_GROUPS
from hotkv_server.cache.arrays import first_occurrences, rows
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.table.index import Keys
from hotkv_server.cache.values import BoolMask, Cause, Entries, HashList, Int64s
from hotkv_server.tiers.book.arrivals import Arrivals
from hotkv_server.tiers.book.moves import Move, MoveCounters, Moves, joined
from hotkv_server.tiers.book.place_sizes import PlaceSizes


class Promotion:
    """Begins and ends moves of blocks up, from the disk to host memory.

    `moves`: the moves under way, of all tiers.
    `arrivals`: reserves the slots in host memory, and makes the arrived blocks ready.
    `below`: the blocks on the disk and their places.
    `sizes`: knows the sizes of the slots in host memory.
    """

    def __init__(
        self,
        moves: Moves,
        arrivals: Arrivals,
        below: Space,
        sizes: PlaceSizes,
        counters: MoveCounters,
    ) -> None:
        self._moves = moves
        self._arrivals = arrivals
        self._below = below
        self._sizes = sizes
        self._counters = counters

    def __repr__(self) -> str:
        return f"Promotion({self._moves!r})"

    def wanted(self, key_space_id: int, groups: list[HashList]) -> list[Int64s]:
        """Returns, for each list of block hashes in `groups`, the positions of the blocks that are
        ready on the disk, but neither ready nor reserved in host memory."""
        absent = self._arrivals.absent(key_space_id, groups)
        return [
            at[self.find(key_space_id, one, at) != 0] if len(at) else at
            for one, at in zip(groups, absent, strict=True)
        ]

    def find(self, key_space_id: int, listed: HashList, positions: Int64s | None = None) -> Entries:
        """Looks up a list of blocks in the disk's block table. Returns, for each block, the number
        of its entry in this table; 0 if the block is not ready on the disk. Returns only zeros for
        a list of sketches (compact forms of keys, for sparse attention), because
        sketches are never on the disk.

        `positions`: positions in the list of the blocks to look up; None: all blocks.
        """
        hashes = listed.hashes if positions is None else rows(listed.hashes, positions)
        if listed.group_index >= MAX_GROUPS:
            return np.zeros(len(hashes), np.uint32)
        words = self._below.index.find(key_space_id, listed.group_index, hashes)
        return np.where(table.is_ready(words), words, 0).astype(np.uint32)

    def begin(self, key_space_id: int, groups: list[HashList], now_s: float) -> Move | None:
        """Begins to move blocks that are ready on the disk to host memory, as many as there are
        free slots (places in the arena). Returns None if no block moves. Before the call, the
        caller must evict blocks to make room, as for blocks that an engine stores.

        `groups`: for each KV cache group, block hashes in the order of the sequence. Blocks that
            are in host memory already are skipped.

        Each slot has the full size of the group's slots, even if the block on the disk is encoded
        and so has a smaller place.
        """
        if not self._moves.may_begin(key_space_id):
            return None
        number = self._moves.next_number()
        entries, places = [], []
        for one in groups:
            # Find out which blocks of this list must move only after the lists before it have
            # reserved their slots: if a client sends a block in two lists, it must move only once.
            (positions,) = self.wanted(key_space_id, [one])
            if not len(positions):
                continue
            positions = positions[first_occurrences(rows(one.hashes, positions))]
            below = self.find(key_space_id, one, positions)
            depths = self._below.index.table.records[below, table.W_DEPTH].astype(np.int64)
            size = self._sizes.slot_bytes(key_space_id, one.group_index)
            taken = self._arrivals.reserve(key_space_id, one, positions, size, depths, number)
            entries.append(taken)
            places.append(below[: len(taken)])
        coming = joined(places)
        if not len(coming):
            return None
        self._below.index.pin(coming, 1)
        self._below.touch(coming, now_s)
        return self._moves.add(number, key_space_id, True, joined(entries), coming)

    def end(
        self,
        move: Move,
        is_found: BoolMask,
        is_lost: BoolMask,
        checks: Keys | None,
        now_s: float,
    ) -> None:
        """Ends a move of n blocks after the tier has stopped writing to its slots (places in the
        arena). Makes the found blocks ready in host memory, and removes the lost blocks from the
        disk's block table.

        `is_found` [n]: True if the tier has written the block's bytes to its slot.
        `is_lost` [n]: True if the block's place on the disk no longer has the block's bytes.
        `checks` uint64 [n]: checksums of the found blocks; None if the server
            computes no checksums.
        """
        places, is_void = move.places, move.is_void
        self._counters.promoted += len(self._arrivals.end(move, is_found, checks, now_s))
        self._below.index.pin(places, -1)
        self._below.removal.reap(places)
        gone = places[is_lost & ~is_void]
        lost = gone[self._below.index.is_ready(gone)]
        # Record that these blocks were removed because of damage. Record it for host memory,
        # because the cause of a miss is looked up there.
        self._moves.host.removal.remember(self._below.index.mixed(lost), Cause.DAMAGE)
        self._below.removal.flush(lost)
        self._counters.lost += len(gone)
        move.places = places[:0]

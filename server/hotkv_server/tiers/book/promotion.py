"""Begins and ends moves from the disk ("below") to host memory."""

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
        """For each list, positions of blocks ready on the disk, but neither ready nor reserved
        in host memory."""
        absent = self._arrivals.absent(key_space_id, groups)
        return [
            at[self.find(key_space_id, one, at) != 0] if len(at) else at
            for one, at in zip(groups, absent, strict=True)
        ]

    def find(self, key_space_id: int, listed: HashList, positions: Int64s | None = None) -> Entries:
        """Entries of the disk; 0 if not ready there, as sketches always. `positions`: None: all."""
        hashes = listed.hashes if positions is None else rows(listed.hashes, positions)
        if listed.group_index >= MAX_GROUPS:
            return np.zeros(len(hashes), np.uint32)
        words = self._below.index.find(key_space_id, listed.group_index, hashes)
        return np.where(table.is_ready(words), words, 0).astype(np.uint32)

    def begin(self, key_space_id: int, groups: list[HashList], now_s: float) -> Move | None:
        """Moves blocks while there are slots; None if none moves. Evict first, as for a store.
        Slots have full size even for encoded blocks."""
        if not self._moves.may_begin(key_space_id):
            return None
        number = self._moves.next_number()
        entries, places = [], []
        for one in groups:
            # After the lists before have reserved: a block in two lists moves once.
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
        """Publishes found blocks in host memory and removes lost ones from the disk, once the tier
        has stopped writing.

        `is_found` [n]: the slot is filled.
        `is_lost` [n]: the place no longer has the bytes.
        `checks` [n]: checksums of found blocks; None if the server computes none.
        """
        places, is_void = move.places, move.is_void
        self._counters.promoted += len(self._arrivals.end(move, is_found, checks, now_s))
        self._below.index.pin(places, -1)
        self._below.removal.reap(places)
        gone = places[is_lost & ~is_void]
        lost = gone[self._below.index.is_ready(gone)]
        # In host memory's removals, where the cause of a miss is looked up.
        self._moves.host.removal.remember(self._below.index.mixed(lost), Cause.DAMAGE)
        self._below.removal.flush(lost)
        self._counters.lost += len(gone)
        move.places = places[:0]

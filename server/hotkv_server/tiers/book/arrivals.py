"""Reserves slots for blocks that tiers copy into host memory, and pins what has arrived.

Always true: a block becomes ready only after the tier has filled its slot, and stays pinned
until `release`, so that those who wait can lease it.
"""

from collections.abc import Callable

import numpy as np

from hotkv_proto import table
from hotkv_proto.keys import MAX_GROUPS
from hotkv_server.cache.arrays import first_occurrences, rows
from hotkv_server.cache.table.index import Keys
from hotkv_server.cache.values import FIRST_MOVE, BoolMask, Entries, HashList, Int64s
from hotkv_server.tiers.book.moves import Move, Moves, joined


class Arrivals:
    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._host = moves.host

    def __repr__(self) -> str:
        return f"Arrivals({self._moves!r})"

    def absent(self, key_space_id: int, groups: list[HashList]) -> list[Int64s]:
        """For each list, positions of blocks neither ready nor reserved in host memory. None for
        sketches, which tiers don't store."""
        found = []
        for one in groups:
            if one.group_index >= MAX_GROUPS:
                found.append(np.empty(0, np.int64))
                continue
            here = self._host.index.find(key_space_id, one.group_index, one.hashes)
            found.append(np.flatnonzero(here == 0))
        return found

    def begin(
        self,
        key_space_id: int,
        groups: list[HashList],
        positions: list[Int64s],
        slot_bytes: Callable[[int], int],
    ) -> Move | None:
        """Begins a move of as many blocks as there are slots; None if there is none. Evict first,
        as for a store.

        `positions`: to move, for each list.
        """
        if not self._moves.may_begin(key_space_id):
            return None
        number, entries = self._moves.next_number(), []
        for one, at in zip(groups, positions, strict=True):
            words = self._host.index.find(key_space_id, one.group_index, rows(one.hashes, at))
            at = at[words == 0]
            at = at[first_occurrences(rows(one.hashes, at))] if len(at) else at
            if len(at):
                size = slot_bytes(one.group_index)
                # If the list begins a prompt, positions are depths; for sliding windows too low,
                # but in order.
                depths = at if one.depths is None else one.depths[at]
                entries.append(self.reserve(key_space_id, one, at, size, depths, number))
        coming = joined(entries)
        none = np.empty(0, np.uint32)
        return self._moves.add(number, key_space_id, True, coming, none) if len(coming) else None

    def reserve(
        self,
        key_space_id: int,
        listed: HashList,
        positions: Int64s,
        size: int,
        depths: Int64s,
        number: int,
    ) -> Entries:
        """Reserves slots and links entries to their parents. Entries in order of `positions`, fewer
        if slots are short.

        `size`: bytes of a slot.
        `number`: of the owning move.
        """
        index, group = self._host.index, listed.group_index
        words = index.find(key_space_id, group, listed.hashes)
        staying = words[table.is_ready(words)]
        # `insert` evicts: not the blocks of this prompt that are here already.
        index.pin(staying, 1)
        taken = self._host.insert(
            key_space_id, group, rows(listed.hashes, positions), size, depths, number
        )
        index.pin(staying, -1)
        words &= ~table.RESERVED_FLAG
        words[positions[: len(taken)]] = taken
        self._link(words, positions[: len(taken)])
        return taken

    def _link(self, words: Entries, came: Int64s) -> None:
        """Links new entries and those after them, if depths follow each other: lists may have gaps.

        `words`: each block's entry, or 0.
        `came`: positions of new entries.
        """
        at = np.union1d(came, came + 1)
        at = at[(at > 0) & (at < len(words))]
        before, after = words[at - 1], words[at]
        depths = self._host.index.depths
        follows = (before != 0) & (after != 0) & (depths(before) + 1 == depths(after))
        self._host.chains.set_parents(after[follows], before[follows])

    def end(self, move: Move, is_found: BoolMask, checks: Keys | None, now_s: float) -> Entries:
        """Publishes found blocks and frees the other slots, once the tier has stopped writing.
        Returns the ready entries, pinned until `release`; none of an abandoned move.

        `is_found` [n]: the slot is filled.
        `checks` [n]: checksums of found blocks; None if the server computes none.
        """
        if len(move.forsaken):
            forsaken, move.forsaken = move.forsaken, move.forsaken[:0]
            self._host.index.pin(forsaken, -1)
            self._host.removal.reap(forsaken)
            return move.kept
        came = move.entries[is_found]
        self._host.publish(came, now_s, checks=None if checks is None else checks[is_found])
        self._host.removal.drop(move.entries[~is_found])
        self._host.index.pin(came, 1)
        move.kept, move.entries = came, move.entries[:0]
        return came

    def forsake(self, move: Move) -> None:
        """Abandons a move whose tier hangs or whose blocks are flushed. They may come again into
        other slots; its own stay in use until `end`, as the tier may still write."""
        self._host.index.pin(move.entries, 1)
        self._host.removal.forsake(move.entries)
        move.forsaken, move.entries = joined([move.forsaken, move.entries]), move.entries[:0]

    def release(self, move: Move) -> None:
        """Unpins an ended move's blocks, once all who waited have leased or given up."""
        self._moves.remove(move)
        self._host.index.pin(move.kept, -1)
        self._host.removal.reap(move.kept)

    def is_coming(self, key_space_id: int, group_index: int, hashes: table.Words) -> BoolMask:
        """Mask [n] of the blocks that are moving up."""
        words = self._host.index.find(key_space_id, group_index, hashes)
        is_reserved = words >= table.RESERVED_FLAG
        owners = self._host.index.owners(words & ~table.RESERVED_FLAG)
        coming: BoolMask = is_reserved & (owners >= FIRST_MOVE)
        return coming

    def numbers(self, key_space_id: int, groups: list[HashList]) -> set[int]:
        """Moves that bring one of these blocks."""
        found: set[int] = set()
        for one in groups:
            words = self._host.index.find(key_space_id, one.group_index, one.hashes)
            reserved = words[words >= table.RESERVED_FLAG] & ~table.RESERVED_FLAG
            owners = self._host.index.owners(reserved)
            found.update(owners[owners >= FIRST_MOVE].tolist())
        return found

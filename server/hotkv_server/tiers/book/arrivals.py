"""Records the blocks that tiers copy into host memory: reserves the slots (places in the arena) of
these blocks, and pins the blocks that have arrived, for the callers that wait for them.

Always true: a block becomes ready in host memory only after the tier has filled its slot with the
stored bytes. From then on it stays pinned until `release`, so that the waiting callers can lease
it.
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
    """Reserves slots (places in the arena) for the blocks of moves up (from a tier to host memory),
    and makes the blocks ready when they have arrived. In its methods, `groups` has a list of block
    hashes for each KV cache group.

    `moves`: the moves under way.
    """

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._host = moves.host

    def __repr__(self) -> str:
        return f"Arrivals({self._moves!r})"

    def absent(self, key_space_id: int, groups: list[HashList]) -> list[Int64s]:
        """Returns, for each list of block hashes in `groups`, the positions of the blocks that are
        neither ready nor reserved in host memory. Returns no positions for a list of
        sketches (compact forms of keys, for sparse attention), because tiers don't store
        sketches."""
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
        """Begins to move blocks from a shared tier up to host memory: reserves as many slots
        (places in the arena) as are free. Returns None if no block gets a slot. Before the call,
        the caller must evict blocks to make room, as for blocks that an engine stores.

        `positions`: for each list of block hashes in `groups`, the positions of the blocks to move.
        `slot_bytes`: returns the size of the slots of a KV cache group, given its number.
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
                # If the blocks' depths (numbers of blocks before them in the sequence) are unknown,
                # use the positions in the list. They are exact if the list begins at the first
                # block of the sequence. In other lists (of sliding windows) they are too low, but
                # later blocks still get greater depths.
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
        """Reserves slots (places in the arena) for the blocks at `positions` of a list, and links
        the entry (table record) of each block to the entry of the block before it. Returns the new
        entries, in order of `positions`; fewer if not enough slots are free.

        `listed`: the list, with the hashes of its blocks.
        `positions`: positions in the list of the blocks that get a slot.
        `size`: bytes of each slot.
        `depths`: for each position, the number of blocks before its block in the sequence.
        `number`: number of the move (`Move.number`); the reserved entries get it as their owner.
        """
        index, group = self._host.index, listed.group_index
        words = index.find(key_space_id, group, listed.hashes)
        staying = words[table.is_ready(words)]
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
        """Links each new entry (table record) of a list of blocks to the entry of the block before
        it, and links the entry of the block after it to the new entry. A list may have gaps. So two
        entries are linked only if their depths (numbers of blocks before them in the sequence) show
        that one block follows the other.

        `words`: for each block of the list, its entry in the block table of host memory; 0 if the
            block has no entry.
        `came`: positions of the new entries in the list.
        """
        at = np.union1d(came, came + 1)
        at = at[(at > 0) & (at < len(words))]
        before, after = words[at - 1], words[at]
        depths = self._host.index.depths
        follows = (before != 0) & (after != 0) & (depths(before) + 1 == depths(after))
        self._host.chains.set_parents(after[follows], before[follows])

    def end(self, move: Move, is_found: BoolMask, checks: Keys | None, now_s: float) -> Entries:
        """Ends a move of n blocks up to host memory, after the tier has stopped writing to its
        slots (places in the arena). Makes the found blocks ready, and frees the other slots.
        Returns the entries (records in the block table) of the ready blocks, which stay pinned
        until `release`. If the move was abandoned (`forsake`), frees all its slots, and makes no
        block ready.

        `is_found` [n]: True if the tier has written the block's bytes to its slot.
        `checks` uint64 [n]: checksums of the found blocks; None if the server
            computes no checksums.
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
        """Abandons a move up to host memory, because its tier hangs, or because a flush deletes its
        blocks. Engines may then store its blocks again, in other slots (places in the arena), and
        other tiers may move them up. The move's slots stay in use until `end`, because the tier may
        still write to them."""
        self._host.index.pin(move.entries, 1)
        self._host.removal.forsake(move.entries)
        move.forsaken, move.entries = joined([move.forsaken, move.entries]), move.entries[:0]

    def release(self, move: Move) -> None:
        """Unpins the blocks that an ended move has brought to host memory. Called when each caller
        that waited for the blocks has leased them or given up."""
        self._moves.remove(move)
        self._host.index.pin(move.kept, -1)
        self._host.removal.reap(move.kept)

    def is_coming(self, key_space_id: int, group_index: int, hashes: table.Words) -> BoolMask:
        """Returns a mask [n]: True for each block that is being moved up to host memory. `hashes`:
        hashes of n blocks."""
        words = self._host.index.find(key_space_id, group_index, hashes)
        is_reserved = words >= table.RESERVED_FLAG
        owners = self._host.index.owners(words & ~table.RESERVED_FLAG)
        coming: BoolMask = is_reserved & (owners >= FIRST_MOVE)
        return coming

    def numbers(self, key_space_id: int, groups: list[HashList]) -> set[int]:
        """Returns the numbers (`Move.number`) of the moves up to host memory that contain a block
        of the lists in `groups`."""
        found: set[int] = set()
        for one in groups:
            words = self._host.index.find(key_space_id, one.group_index, one.hashes)
            reserved = words[words >= table.RESERVED_FLAG] & ~table.RESERVED_FLAG
            owners = self._host.index.owners(reserved)
            found.update(owners[owners >= FIRST_MOVE].tolist())
        return found

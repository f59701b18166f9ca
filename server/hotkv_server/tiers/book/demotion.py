"""Moves blocks from host memory to the disk ("below"), in the order of the stores.

A block is written soon after it is stored, not at its eviction, so no store waits for the disk; if
the gate refuses it, again at each use. If its encoded form does not fit its place, it moves once
more, to a place as large as its slot. Always true:

- a block is ready on the disk only after the tier has reported it stored;
- it stays pinned until the tier has stopped reading it;
- a place is not reused while it is written.
"""

from collections import Counter

import numpy as np

from hotkv_proto import table
from hotkv_server.cache.room.removal import Parts
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.table.index import Keys
from hotkv_server.cache.values import BoolMask, Entries, KeySpaceRecord
from hotkv_server.tiers.book.moves import Move, MoveCounters, Moves, by_group, joined
from hotkv_server.tiers.book.place_sizes import PlaceSizes
from hotkv_server.tiers.book.waiting import MAX_LOOKED, PART_BLOCKS, WaitingBlocks
from hotkv_server.tiers.book.write_gate import Offered, WriteGate


class Demotion:
    """See the module. `waiting`: stored or used blocks that the disk may lack."""

    def __init__(
        self,
        moves: Moves,
        below: Space,
        gate: WriteGate,
        sizes: PlaceSizes,
        counters: MoveCounters,
    ) -> None:
        self._moves = moves
        self._host = moves.host
        self._below = below
        self._sizes = sizes
        self._counters = counters
        self._block_tokens: dict[tuple[int, int], int] = {}
        self.gate = gate
        self.waiting = WaitingBlocks(moves.host.index)

    def __repr__(self) -> str:
        return f"Demotion({self.waiting!r}, {self.gate!r}, {self._moves!r})"

    def add_key_space(self, record: KeySpaceRecord) -> None:
        self._sizes.add_key_space(record)
        for group, spec in enumerate(record.key_space.groups):
            self._block_tokens[record.number, group] = spec.block_tokens

    def forget_key_space(self, record: KeySpaceRecord) -> None:
        """The key space must have no blocks in host memory and no moves."""
        self._sizes.forget_key_space(record)
        for group in range(len(record.key_space.groups)):
            del self._block_tokens[record.number, group]

    def take(self, num_bytes: int, now_s: float) -> Parts[Entries]:
        """Takes the blocks to write: ready, not on the disk, admitted by the gate. Blocks of a key
        space that is being flushed stay queued, in order.

        Stops at about `num_bytes`, or MAX_LOOKED blocks. Yields between parts of the work.
        """
        index, num_looked = self._host.index, 0
        reuses = index.table.records[:, table.W_REUSES]
        taken = known = np.empty(0, np.uint32)
        held, held_known = taken, known
        held_key_spaces: set[int] = set()
        while len(self.waiting) and num_bytes > 0 and num_looked < MAX_LOOKED:
            some = self.waiting.take(num_bytes)
            num_looked += len(some) + PART_BLOCKS
            some = some[np.sort(np.unique(some, return_index=True)[1])]
            # Engines may store new blocks during a flush: hold them back, and those after its
            # end too, to keep their order.
            held_key_spaces |= self._stopped(some)
            is_held = np.isin(index.key_spaces(some), list(held_key_spaces))
            held = np.concatenate((held, some[is_held]))
            held_known = np.concatenate((held_known, reuses[some[is_held]]))
            some = some[~is_held]
            same = taken[reuses[taken] == known]
            some = some[self.lacks(some) & ~np.isin(some, same)]
            if len(some):
                some = some[self.gate.admit(self._offered(some, same), now_s)]
            num_bytes -= int(index.slot_bytes(some).sum())
            taken = np.concatenate((taken, some))
            known = np.concatenate((known, reuses[some]))
            yield
        # Entries may have been reused while this generator was suspended.
        ready: Entries = taken[(reuses[taken] == known) & index.is_ready(taken)]
        # Held blocks first: `put_back` then inserts others before them, which precede them in
        # their prompts.
        self.waiting.add_first(held[(reuses[held] == held_known) & index.is_ready(held)])
        is_stopped = np.isin(index.key_spaces(ready), list(self._stopped(ready)))
        if is_stopped.any():
            self.put_back(ready[is_stopped], now_s)
        return ready[~is_stopped]

    def _stopped(self, entries: Entries) -> set[int]:
        key_spaces = np.unique(self._host.index.key_spaces(entries)).tolist()
        return {number for number in key_spaces if not self._moves.may_begin(number)}

    def put_back(self, entries: Entries, now_s: float) -> None:
        """Puts blocks of `take` back at the head of the queue, and subtracts their bytes from
        what the gate has counted."""
        sizes = (
            (len(at), self._sizes.place_bytes(*kind)) for *kind, at in by_group(self._host, entries)
        )
        self.gate.add(-sum(count * size for count, size in sizes), now_s)
        self.waiting.add_first(entries)

    def _offered(self, entries: Entries, taken: Entries) -> Offered:
        """`taken`: admitted before in this call, so they count as on the disk."""
        index = self._host.index
        key_spaces, groups, hashes = index.keys(entries)
        records = index.table.records
        parents = records[entries, table.W_PARENT]
        begins = np.append(True, parents[1:] != entries[:-1])
        is_known = begins & (parents != 0) & index.is_ready(parents)
        lies_below = np.isin(parents, taken)
        lies_below[is_known] |= ~self.lacks(parents[is_known])
        kinds = list(zip(key_spaces.tolist(), groups.tolist(), strict=True))
        block_tokens = np.array([self._block_tokens[kind] for kind in kinds], np.int64)
        place_bytes = np.array([self._sizes.place_bytes(*kind) for kind in kinds], np.int64)
        return Offered(
            index.mixed(entries),
            hashes,
            place_bytes,
            (records[entries, table.W_DEPTH].astype(np.int64) + 1) * block_tokens,
            begins,
            is_known & lies_below,
            is_known & ~lies_below,
        )

    def lacks(self, entries: Entries) -> BoolMask:
        """Mask [n] of ready blocks neither on the disk nor moving there."""
        missing = np.zeros(len(entries), np.bool_)
        for key_space_id, group, at in by_group(self._host, entries):
            hashes = self._host.index.keys(entries[at])[2]
            missing[at] = self._below.index.find(key_space_id, group, hashes) == 0
        return missing

    def make_room(self, entries: Entries, *, is_plain: bool = False) -> Parts[None]:
        """Evicts from the disk for `entries`. Yields between parts of the work, not at all if
        there is room. Call `begin` directly afterwards."""
        wanted: Counter[int] = Counter()
        for key_space_id, group, at in by_group(self._host, entries[self.lacks(entries)]):
            wanted[self._size(key_space_id, group, is_plain=is_plain)] += len(at)
        for size, count in wanted.items():
            # The key space only finds a tenant's share, which a disk lacks: any will do.
            yield from self._below.make_room(key_space_id, 0, size, count)

    def begin(self, entries: Entries, *, is_plain: bool = False) -> list[Move]:
        """Moves blocks that the disk lacks, while there are places: a move per key space.

        `is_plain`: in places as large as slots, so not encoded.
        """
        moves = []
        entries = entries[self.lacks(entries)]
        for key_space_id in np.unique(self._host.index.key_spaces(entries)).tolist():
            if not self._moves.may_begin(key_space_id):
                continue
            mine = entries[self._host.index.key_spaces(entries) == key_space_id]
            number = self._moves.next_number()
            moving, places = [], []
            for _, group, at in by_group(self._host, mine):
                size = self._place_bytes(key_space_id, group, len(at), is_plain=is_plain)
                some, taken = self._reserve_places(key_space_id, group, mine[at], size, number)
                moving.append(some)
                places.append(taken)
            going = joined(moving)
            self._counters.refused += len(mine) - len(going)
            if len(going):
                self._host.index.pin(going, 1)
                moves.append(self._moves.add(number, key_space_id, False, going, joined(places)))
        return moves

    def _place_bytes(
        self, key_space_id: int, group: int, num_blocks: int, *, is_plain: bool
    ) -> int:
        """Size of the places for a group's blocks. Also counts the blocks if the group is not
        encoded at present."""
        size = self._size(key_space_id, group, is_plain=is_plain)
        if size == self._sizes.slot_bytes(key_space_id, group) and not is_plain:
            self._sizes.kept_plain(key_space_id, group, num_blocks)
        return size

    def _size(self, key_space_id: int, group: int, *, is_plain: bool) -> int:
        of_kind = self._sizes.slot_bytes if is_plain else self._sizes.place_bytes
        return of_kind(key_space_id, group)

    def _reserve_places(
        self, key_space_id: int, group: int, entries: Entries, size: int, number: int
    ) -> tuple[Entries, Entries]:
        """For a group's blocks, least depth first, while there is room. `number`: of the owning
        move."""
        depths = self._host.index.table.records[entries, table.W_DEPTH].astype(np.int64)
        entries = entries[np.argsort(depths, kind="stable")]
        hashes = self._host.index.keys(entries)[2]
        taken = self._below.insert(key_space_id, group, hashes, size, np.sort(depths), number)
        entries = entries[: len(taken)]
        self._below.chains.set_parents(taken, self._parents(key_space_id, group, entries))
        return entries, taken

    def _parents(self, key_space_id: int, group: int, entries: Entries) -> Entries:
        """Parents' entries on the disk; 0 if it lacks one."""
        parents = self._host.index.table.records[entries, table.W_PARENT]
        found = self._below.index.find(key_space_id, group, self._host.index.keys(parents)[2])
        places: Entries = np.where(parents != 0, found & ~table.RESERVED_FLAG, 0).astype(np.uint32)
        return places

    def end(
        self,
        move: Move,
        is_stored: BoolMask,
        seals: Keys,
        now_s: float,
        is_unfit: BoolMask | None = None,
    ) -> Entries:
        """Publishes stored blocks and unpins all, once the tier has stopped reading. Returns those
        to move again with `is_plain`, past the gate.

        `is_stored` [n]: the tier has stored the block.
        `seals` [n]: of stored blocks.
        `is_unfit` [n]: the form did not fit its place; None: all did.
        """
        self._moves.remove(move)
        good = is_stored & ~move.is_void
        place_bytes = self._below.index.slot_bytes(move.places)
        more_bytes = self._host.index.slot_bytes(move.entries) - place_bytes
        is_encoded, unfit = more_bytes > 0, np.zeros(len(move), np.bool_)
        if is_unfit is not None:
            unfit = is_unfit & is_encoded
        self._learn(move, is_stored & is_encoded, unfit)
        self._counters.demoted += int(good.sum())
        self._counters.encoded += int((good & is_encoded).sum())
        stored_again = self._stored_again(move)
        self._below.publish(move.places[good], now_s, checks=seals[good])
        self._below.removal.drop(move.places[~good])
        self.waiting.add(stored_again)
        self._host.index.pin(move.entries, -1)
        self._host.removal.reap(move.entries)
        again = unfit & ~move.is_void & self._host.index.is_ready(move.entries)
        # The gate has counted all blocks as written.
        unspent_bytes = place_bytes[~is_stored & ~again].sum()
        if change_bytes := int(more_bytes[again].sum() - unspent_bytes):
            self.gate.add(change_bytes, now_s)
        return move.entries[again]

    def _stored_again(self, move: Move) -> Entries:
        """Blocks that a flush deleted during their move and engines then stored anew. `take`
        dropped them, as the move still had their keys on the disk."""
        again, places = [], move.places[move.is_void]
        for key_space_id, group, at in by_group(self._below, places):
            hashes = self._below.index.keys(places[at])[2]
            words = self._host.index.find(key_space_id, group, hashes)
            again.append(words[(words != 0) & (words & table.RESERVED_FLAG == 0)])
        return joined(again)

    def _learn(self, move: Move, is_encoded: BoolMask, is_unfit: BoolMask) -> None:
        """Counts tried and fitted blocks per group. Call it before the move's places are
        published or dropped."""
        for key_space_id, group, at in by_group(self._below, move.places):
            num_fitted, num_unfit = int(is_encoded[at].sum()), int(is_unfit[at].sum())
            self._sizes.tried(key_space_id, group, num_fitted, num_fitted + num_unfit)

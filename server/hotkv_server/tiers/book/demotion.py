"""Begins and ends moves of blocks from host memory down to the disk, in the order in which the
blocks were stored. ("Below" means on the disk; a place is the part of the disk's file that a block
gets.)

Blocks are written to the disk soon after they are stored in host memory, not when they are evicted.
So a store that needs room never waits for the disk. A block that was not written then is considered
again at each use. If the encoded (compressed) form of a block does not fit its place, the block is
moved again, to a place as large as its slot. Always true:

- a block becomes ready on the disk only after the tier has reported that it has stored the block;
- the block stays pinned in host memory until the tier has stopped reading it;
- a place is not reused while the tier writes to it.
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
    """Begins and ends moves of blocks down, from host memory to the disk; see the module.

    `moves`: the moves under way, of all tiers.
    `below`: the blocks on the disk and their places.
    `gate`: decides which blocks are written, so that the budget of disk writes lasts.
    `sizes`: chooses the sizes of the places.
    `waiting`: queue of blocks that were stored or used, and may not be on the disk yet.
    """

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
        """Registers a key space (a model in a configuration), with the tokens and bytes of a
        block in each KV cache group."""
        self._sizes.add_key_space(record)
        for group, spec in enumerate(record.key_space.groups):
            self._block_tokens[record.number, group] = spec.block_tokens

    def forget_key_space(self, record: KeySpaceRecord) -> None:
        """Forgets a key space (a model in a configuration) that has no blocks in host memory
        and no moves."""
        self._sizes.forget_key_space(record)
        for group in range(len(record.key_space.groups)):
            del self._block_tokens[record.number, group]

    def take(self, num_bytes: int, now_s: float) -> Parts[Entries]:
        """Removes blocks from the queue `waiting`, and returns the blocks to write to the disk:
        ready blocks that are not on the disk, and that the write gate admits (`WriteGate`, which
        enforces the budget of disk writes).

        While a flush deletes the blocks of a key space (`Moves.stopped`), blocks of this key space
        stay in the queue, in their order, and the gate is not asked about them.

        Stops when the returned blocks have about `num_bytes` in total, or when about MAX_LOOKED
        blocks were checked. This is a generator, which yields between parts of the work, so that
        the caller can run other work.
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
            # A flush may be deleting the blocks of a key space while engines already store new
            # blocks in it. Hold the new blocks back. If the flush ends during this call, also hold
            # back later blocks of the key space, so that its blocks stay in order.
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
        # While this generator was suspended, a block may have been evicted and its entry number
        # reused for another block. The reuse count of the entry has then changed.
        ready: Entries = taken[(reuses[taken] == known) & index.is_ready(taken)]
        # First put the held blocks back at the head of the queue. If blocks of `ready` must go back
        # too (`put_back`, below), they are then inserted before the held blocks, which follow them
        # in their sequences.
        self.waiting.add_first(held[(reuses[held] == held_known) & index.is_ready(held)])
        # A flush may have begun while this generator was suspended.
        is_stopped = np.isin(index.key_spaces(ready), list(self._stopped(ready)))
        if is_stopped.any():
            self.put_back(ready[is_stopped], now_s)
        return ready[~is_stopped]

    def _stopped(self, entries: Entries) -> set[int]:
        """Returns the ids of the given blocks' key spaces whose blocks may not be moved to the disk
        now, because a flush deletes them (`Moves.stopped`)."""
        key_spaces = np.unique(self._host.index.key_spaces(entries)).tolist()
        return {number for number in key_spaces if not self._moves.may_begin(number)}

    def put_back(self, entries: Entries, now_s: float) -> None:
        """Queues blocks again that `take` has just returned, before all others. Subtracts their
        bytes from the written bytes that the write gate (`WriteGate`) counts: `take` will count
        them when it returns the blocks again.
        """
        sizes = (
            (len(at), self._sizes.place_bytes(*kind)) for *kind, at in by_group(self._host, entries)
        )
        self.gate.add(-sum(count * size for count, size in sizes), now_s)
        self.waiting.add_first(entries)

    def _offered(self, entries: Entries, taken: Entries) -> Offered:
        """Describes blocks for the write gate (`WriteGate`), which decides whether to write them to
        the disk. `taken`: blocks that the gate has already admitted in the present call of `take`.
        They count as blocks on the disk."""
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
        """Returns a mask [n]: True for each block that is neither on the disk nor being moved
        there. `entries`: n ready blocks of host memory."""
        missing = np.zeros(len(entries), np.bool_)
        for key_space_id, group, at in by_group(self._host, entries):
            hashes = self._host.index.keys(entries[at])[2]
            missing[at] = self._below.index.find(key_space_id, group, hashes) == 0
        return missing

    def make_room(self, entries: Entries, *, is_plain: bool = False) -> Parts[None]:
        """Evicts blocks from the disk, to make room for the blocks of `entries` that the disk
        lacks. The caller must call `begin` directly afterwards, with the blocks that are still
        ready. This is a generator, which yields between parts of the work, so that the caller can
        run other work. It does not yield if there is room already.

        `entries`: ready blocks of host memory.
        `is_plain`: the same as for `begin`. True: a block needs as many bytes on the disk as in the
            arena, because it is not encoded (compressed).
        """
        wanted: Counter[int] = Counter()
        for key_space_id, group, at in by_group(self._host, entries[self.lacks(entries)]):
            wanted[self._size(key_space_id, group, is_plain=is_plain)] += len(at)
        for size, count in wanted.items():
            # `make_room` needs a key space only to find the tenant in whose share room is made.
            # The disk has no shares of tenants, so pass any of the key spaces.
            yield from self._below.make_room(key_space_id, 0, size, count)

    def begin(self, entries: Entries, *, is_plain: bool = False) -> list[Move]:
        """Begins to move ready blocks to the disk, as many as there are places for. Skips blocks
        that the disk already has. Returns a move for each key space (a model in a
        configuration). The caller must call `make_room` first.

        `is_plain`: True gives each block a place as large as its slot in the arena, so that the
            tier stores it without encoding (compression).
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
        """Returns the size of the places (ranges of the disk's file) for the next `num_blocks`
        blocks of a group. If the group's blocks are at present not encoded (compressed), also
        counts these blocks (`PlaceSizes.kept_plain`): after a certain number of them, encoding is
        tried again."""
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
        """Reserves places of `size` bytes on the disk for blocks of a group. Begins with the blocks
        of the least depth (number of blocks before the block in its sequence). Returns the blocks
        that got a place, and the entries of these places in the disk's block table.

        `number`: number of the move (`Move.number`), which owns the places.
        """
        depths = self._host.index.table.records[entries, table.W_DEPTH].astype(np.int64)
        entries = entries[np.argsort(depths, kind="stable")]
        hashes = self._host.index.keys(entries)[2]
        taken = self._below.insert(key_space_id, group, hashes, size, np.sort(depths), number)
        entries = entries[: len(taken)]
        self._below.chains.set_parents(taken, self._parents(key_space_id, group, entries))
        return entries, taken

    def _parents(self, key_space_id: int, group: int, entries: Entries) -> Entries:
        """Looks up, for each block, the preceding block of its sequence in the disk's block table.
        Returns the preceding block's entry number; 0 if the disk does not have that block."""
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
        """Ends a move of n blocks after the tier has stopped reading its slots (places in the
        arena). Makes the stored blocks ready on the disk, and unpins all blocks in host memory.
        Returns the blocks whose encoded form did not fit: the caller must move them again, with
        `is_plain`, without asking the write gate (`WriteGate`).

        `is_stored` [n]: True if the tier has stored the block.
        `seals` uint64 [n]: seals (checksums) of the stored blocks.
        `is_unfit` [n]: True if the encoded form of the block did not fit its place; None if all
            forms fitted.
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
        # The write gate (which keeps the budget of disk writes) has counted the bytes of all blocks
        # as written: subtract the bytes that were not written.
        unspent_bytes = place_bytes[~is_stored & ~again].sum()
        if change_bytes := int(more_bytes[again].sum() - unspent_bytes):
            self.gate.add(change_bytes, now_s)
        return move.entries[again]

    def _stored_again(self, move: Move) -> Entries:
        """Returns the blocks of host memory that must be queued again at the end of `move`, because
        they are not on the disk. A flush has deleted blocks of the move while they were written;
        then engines have stored blocks with the same keys again. `take` has dropped these new
        blocks from the queue, because the disk's table still had the move's entries with the same
        keys."""
        again, places = [], move.places[move.is_void]
        for key_space_id, group, at in by_group(self._below, places):
            hashes = self._below.index.keys(places[at])[2]
            words = self._host.index.find(key_space_id, group, hashes)
            again.append(words[(words != 0) & (words & table.RESERVED_FLAG == 0)])
        return joined(again)

    def _learn(self, move: Move, is_encoded: BoolMask, is_unfit: BoolMask) -> None:
        """Reports two numbers for each KV cache group in a move of n blocks to `PlaceSizes`, which
        decides whether the group's next blocks are encoded (compressed): how many blocks the tier
        tried to encode, and how many of these had an encoded form that fitted its place. Must be
        called while the places (ranges of the disk's file) of the move are still reserved.

        `is_encoded` [n]: True if the tier has stored the block in encoded form.
        `is_unfit` [n]: True if the encoded form of the block did not fit its place.
        """
        for key_space_id, group, at in by_group(self._below, move.places):
            num_fitted, num_unfit = int(is_encoded[at].sum()), int(is_unfit[at].sum())
            self._sizes.tried(key_space_id, group, num_fitted, num_fitted + num_unfit)

"""Replays a trace over host memory and a tier below it; the server's `tiers.book` decides the
moves."""

import numpy as np

from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.table import SLOT_ALIGN, Words
from hotkv_server.cache.room.removal import finished
from hotkv_server.cache.values import Entries, HashList, KeySpaceRecord
from hotkv_server.simulate.replay import (
    BLOCK_TOKENS,
    GROUP,
    KEY_SPACE,
    MakePolicy,
    Progress,
    Replayed,
    SimulatedTier,
    prefix_of,
    timed,
    warm_up,
)
from hotkv_server.simulate.trace import Trace
from hotkv_server.tiers.book.arrivals import Arrivals
from hotkv_server.tiers.book.lower import LowerTier
from hotkv_server.tiers.book.moves import Moves


class TwoTiers:
    """Leading blocks that only the second tier has are promoted first; after each request its
    blocks are written to the second tier if the gate admits them.

    write_bytes_per_day: the gate's budget, in bytes of the replay's slots; None: no limit.
    """

    def __init__(
        self,
        first: SimulatedTier,
        second: SimulatedTier,
        block_tokens: int,
        write_bytes_per_day: int | None,
    ) -> None:
        self.first = first
        self.second = second
        moves = Moves(first.space)
        self.arrivals = Arrivals(moves)
        self.lower = LowerTier(moves, self.arrivals, second.space, write_bytes_per_day)
        self.lower.down.add_key_space(_record(block_tokens))
        self.num_hits = 0
        self.num_writes = 0

    def serve(self, hashes: Words, now_s: float) -> int:
        """Leading blocks that hit in either tier. `hashes`: in order, words [n, 8]."""
        finished(self.first.space.make_room_ahead(now_s))
        entries, below = self.first.find(hashes), self.second.find(hashes)
        prefix = prefix_of(np.where(entries == 0, below, entries))
        if not entries[:prefix].all():
            self._promote(hashes[:prefix], now_s)
            entries = self.first.find(hashes)
            prefix = min(prefix, prefix_of(entries))
        self.first.store(hashes, entries, prefix_of(entries), now_s)
        self.first.space.removal.take_effects()
        self._write(self.first.find(hashes), now_s)
        return prefix

    def _promote(self, hashes: Words, now_s: float) -> None:
        here = self.first.find(hashes)
        with self.first.staying(here[here != 0]):
            self.first.make_room(int(np.count_nonzero(here == 0)))
        move = self.lower.up.begin(KEY_SPACE, [HashList(GROUP, hashes)], now_s)
        if move is not None:
            self.num_hits += len(move)
            all_of = np.ones(len(move), np.bool_)
            self.lower.up.end(move, all_of, ~all_of, None, now_s)
            self.arrivals.release(move)

    def _write(self, entries: Entries, now_s: float) -> None:
        """Writes what the gate admits. An entry is 0 if its block found no room in the first
        tier."""
        down = self.lower.down
        self.first.space.chains.link(KEY_SPACE, GROUP, entries, None)
        down.waiting.add(entries[entries != 0])
        while len(down.waiting):
            taken = finished(down.take(self.first.space.pool.capacity_bytes, now_s))
            finished(down.make_room(taken))
            for move in down.begin(taken):
                self.num_writes += len(move)
                seals = np.zeros(len(move), np.uint64)
                down.end(move, np.ones(len(move), np.bool_), seals, now_s)
        self.second.space.removal.take_effects()


def _record(block_tokens: int) -> KeySpaceRecord:
    """The code that moves blocks needs a key space, which a trace lacks."""
    group = GroupSpec(GroupKind.FULL_ATTENTION, block_tokens, (SLOT_ALIGN,))
    key_space = KeySpace("trace", "trace", "bfloat16", (group,), block_tokens)
    return KeySpaceRecord(KEY_SPACE, key_space)


def replay_two_tiers(
    trace: Trace,
    capacity_blocks: int,
    second_blocks: int,
    make_policy: MakePolicy,
    *,
    block_tokens: int = BLOCK_TOKENS,
    writes_per_day: float | None = None,
    progress: Progress | None = None,
) -> Replayed:
    """Each tier has its own policy.

    writes_per_day: blocks to the second tier; None: no limit.
    """
    warm_up(trace, make_policy)
    tiers = TwoTiers(
        SimulatedTier(capacity_blocks, make_policy),
        SimulatedTier(second_blocks, make_policy),
        block_tokens,
        None if writes_per_day is None else int(writes_per_day * SLOT_ALIGN),
    )
    prefix, seconds = timed(trace, tiers.serve, progress)
    return Replayed(prefix, seconds, tiers.num_hits, tiers.num_writes)

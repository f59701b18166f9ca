"""Rules of the state machine that tests `CacheCore`: the arena grows and shrinks."""

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule

from hotkv_proto.errors import Reason
from hotkv_server.cache.resizing import Resizing
from hotkv_server.cache.room.removal import finished
from hotkv_server.cache.values import Int64s
from tests.core.cache_machine import NUM_SLABS, CacheWorld
from tests.core.support import SLAB

MOST_SLABS = NUM_SLABS + 4


class ResizeRules(CacheWorld):
    @property
    def resizing(self) -> Resizing:
        return self.core.resizing

    @property
    def shrinks(self) -> bool:
        pool = self.core.space.pool
        return pool.bar_start < pool.num_slabs

    @rule(num_slabs=st.integers(1, MOST_SLABS), is_half_filled=st.booleans())
    def resize(self, num_slabs: int, is_half_filled: bool) -> None:
        if self.shrinks:
            return
        now = self.core.space.pool.num_slabs
        least = max(max(self.sizes), SLAB)
        reasons = self.refusal((num_slabs * SLAB < least, Reason.INVALID_FIELD))
        self.call(lambda: self.resizing.check(num_slabs * SLAB), *reasons)
        if reasons:
            return
        if num_slabs > now:
            self.resizing.grow(num_slabs * SLAB)
            backed = (now + num_slabs) // 2 if is_half_filled else num_slabs
            self.core.space.grow(backed * SLAB, 0)
            self.core.space.grow(num_slabs * SLAB, 0)
        elif num_slabs < now and not self.resizing.why_not_yet(num_slabs * SLAB):
            self.resizing.begin_shrink(num_slabs * SLAB)
            assert self.core.config.arena_bytes == num_slabs * SLAB
            # What the filling thread has said just before.
            self.core.space.grow(now * SLAB, 0)

    @precondition(lambda self: self.shrinks)
    @rule()
    def shrink(self) -> None:
        """Only blocks that nobody pins go or move, and none goes if there is room for it."""
        before = self.model.evictable()
        finished(self.resizing.shrink(self.copy, self.now_s))
        assert self.model.take_notices() <= before
        pool, index = self.core.space.pool, self.core.space.index
        movable = self.model.evictable()
        for key in movable:
            assert self.model.slot(key) < pool.bar_start * SLAB, "a block could have moved"
        if not self.model.ready - movable and not self.model.written and not self.model.kept:
            assert self.resizing.is_empty or index.num_entries
        assert self.resizing.is_empty or sum(self.resizing.holders().values())

    def copy(self, old: Int64s, new: Int64s, size: int) -> None:
        for source, target in zip(old.tolist(), new.tolist(), strict=True):
            for shard in range(self.num_shards):
                if (source, shard) in self.model.arena:
                    self.model.arena[target, shard] = self.model.arena[source, shard]

    @precondition(lambda self: self.shrinks)
    @rule()
    def end_shrink(self) -> None:
        wanted, was_empty = self.core.space.pool.bar_start * SLAB, self.resizing.is_empty
        reached = self.resizing.end_shrink()
        assert reached == wanted if was_empty else reached > wanted
        assert reached == self.core.config.arena_bytes == self.core.space.pool.capacity_bytes

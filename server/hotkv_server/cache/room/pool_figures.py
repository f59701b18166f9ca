"""How well the arena is divided among slot sizes: figures of the pool, for metrics.

Always true: lent bytes are used, idle or tail.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlabClassStats:
    """One slot size: slabs that are lent to it, slots in them, slots in use."""

    slot_bytes: int
    num_slabs: int
    num_slots: int
    num_used: int


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """How well the arena is divided, as far as it has memory.

    `lent_bytes`: slabs that are lent to some slot size. `idle_bytes`: free slots in them.
    `tail_bytes`: bytes of them that no slot covers, because slot sizes don't divide slabs.
    `stranded_bytes`: free slabs that don't lie together as the widest known slot size needs them; 0
    if no slot spans slabs.
    `shares`: (slot size, its slabs / slabs with memory, its used bytes / all used bytes) of each
    size that has slabs.
    """

    arena_bytes: int
    lent_bytes: int
    idle_bytes: int
    tail_bytes: int
    stranded_bytes: int
    shares: tuple[tuple[int, float, float], ...]

    @property
    def fragmentation_ratio(self) -> float:
        """(idle + tail) / lent: the share of lent memory that holds nothing. 0 if none is lent."""
        return (self.idle_bytes + self.tail_bytes) / self.lent_bytes if self.lent_bytes else 0.0

    @property
    def imbalance_ratio(self) -> float:
        """½ Σ |share of lent slabs - share of used bytes| over slot sizes: the share of lent memory
        that other sizes have than those that use it.

        0 if every size has slabs in proportion to its used bytes; below 1.
        """
        lent_share = sum(of_arena for _, of_arena, _ in self.shares)
        return sum(abs(of_arena / lent_share - of_used) for _, of_arena, of_used in self.shares) / 2


def figures_of(
    rows: Sequence[SlabClassStats], num_backed: int, num_stranded: int, slab_bytes: int
) -> PoolFigures:
    """Figures of a pool whose slot sizes have these `rows`. `num_backed`, `num_stranded`: slabs."""
    used = sum(row.num_used * row.slot_bytes for row in rows)
    idle = sum((row.num_slots - row.num_used) * row.slot_bytes for row in rows)
    lent = sum(row.num_slabs for row in rows) * slab_bytes
    shares = tuple(
        (row.slot_bytes, row.num_slabs / num_backed, row.num_used * row.slot_bytes / max(1, used))
        for row in rows
    )
    return PoolFigures(
        num_backed * slab_bytes, lent, idle, lent - idle - used, num_stranded * slab_bytes, shares
    )

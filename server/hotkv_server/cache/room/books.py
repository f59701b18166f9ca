"""The books of one tier: index, pool, tenants, policy and representations, and what joins them.

Always true: an entry of the index owns exactly one slot of the pool, and no two own the same bytes;
the bytes of every slot in use count for one key space and its tenant. The parts of `Space` share
one `Books`; nothing is decided here.
"""

from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import table
from hotkv_proto.table import Words
from hotkv_server.cache.room.policies.protocol import Policy
from hotkv_server.cache.room.slabs import SlabPool
from hotkv_server.cache.room.tenants import TenantBook
from hotkv_server.cache.table.index import BlockIndex
from hotkv_server.cache.table.representations import Representations
from hotkv_server.cache.values import Entries, Int64s

T = TypeVar("T")
Parts = Generator[None, None, T]
"""Long work: it yields between its parts and returns its result. Between two parts anything else
may be called."""


def finished(parts: Parts[T], between: Callable[[], object] = lambda: None) -> T:
    """Does all parts at once, and returns the result. `between`: called between two parts."""
    while True:
        try:
            next(parts)
            between()
        except StopIteration as end:
            result: T = end.value
            return result


PART_ENTRIES = 1 << 16
"""Entry numbers that one part of long work looks at: a few milliseconds."""
EVICTED_PER_PART = 1 << 12
"""Entries that one part of long work removes."""


class Books:
    """Index, pool, tenants, policy and representations of one tier."""

    def __init__(
        self, index: BlockIndex, pool: SlabPool, tenants: TenantBook, policy: Policy
    ) -> None:
        self.index = index
        self.pool = pool
        self.tenants = tenants
        self.policy = policy
        self.representations = Representations(index, self.free_slots)

    def __repr__(self) -> str:
        return f"Books({self.index!r}, {self.pool!r})"

    def free_slots(self, parts: list[Words]) -> None:
        """Frees the slots of removed records, given in parts of one key space and slot size."""
        for rows in parts:
            slot_bytes = int(rows[0, table.W_SIZE]) * table.SLOT_ALIGN
            offsets = rows[:, table.W_OFFSET].astype(np.int64) * table.SLOT_ALIGN
            self.tenants.count(int(rows[0, table.W_KEY_SPACE]), -len(rows) * slot_bytes)
            self.pool.free(slot_bytes, offsets)

    def free_numbers(self) -> int:
        """Entries that may still be inserted."""
        return self.index.limit - self.index.num_entries

    def owners(self, entries: Entries) -> Int64s:
        """The tenant of each entry [n]."""
        return self.tenants.of(self.index.table.records[entries, table.W_KEY_SPACE])

    def heat(self, entries: Entries) -> NDArray[np.float64]:
        """Heat of each entry [n]; a representation is as hot as its block."""
        return self.policy.heat(self.representations.blocks_of(entries))

    def walk(self) -> Iterator[Entries]:
        """All entries that are not free, a part at a time."""
        for start in range(0, self.index.num_numbers, PART_ENTRIES):
            yield (start + np.flatnonzero(self.index.states(start, start + PART_ENTRIES))).astype(
                np.uint32
            )

    def check_invariants(self) -> None:
        """Raises AssertionError if two books disagree. Linear in capacity."""
        self.index.check_invariants()
        self.pool.check_invariants()
        self.policy.check_invariants()
        self.representations.check_invariants()
        live = np.flatnonzero(self.index.states()).astype(np.uint32)
        key_spaces, sizes = self.index.keys(live)[0], self.index.slot_bytes(live)
        self.tenants.check(
            {
                number: int(sizes[key_spaces == number].sum())
                for number in np.unique(key_spaces).tolist()
            }
        )
        offsets = self.index.offsets(live)
        order = np.argsort(offsets)
        ends = offsets[order] + sizes[order]
        assert np.all(ends[:-1] <= offsets[order][1:]), "two entries share bytes of the arena"
        assert sum(s.num_used for s in self.pool.stats()) == len(live), (
            "slots used and entries differ"
        )
        assert np.all(self.pool.slab_owner()[self.pool.slab_of(offsets)] == sizes), (
            "entry in a slab of another size"
        )

"""An index, in memory, of the blocks that this node knows to be in the bucket. The bucket stores
blocks in packs: a pack is an object with the blocks of one write. The list of a pack has a row for
each block.

Always true: memory is bounded. Each pack counts as the number of its blocks plus PACK_ROWS. The sum
over all packs in the index is at most `max_blocks`, unless the index has only one pack. To make
room for a new pack, the index drops the oldest packs, which stay in the bucket. If a block is in
several packs, it is found in the newest of them. The index is only a hint: a pack in it may no
longer exist in the bucket.
"""

import heapq
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hotkv_server.tiers.s3.packs import Pack, Space, tag

INDEX_ENTRY_BYTES = 170
"""Memory that a block needs in the index, measured."""
PACK_ROWS = 6
"""A pack (object with blocks) needs as much memory in the index as this number of blocks, in
addition to the memory for its own blocks."""
_ROW_BITS = 24
_ROW_MASK = (1 << _ROW_BITS) - 1


class PackRow(NamedTuple):
    """The place of a block in the bucket: a pack (object with blocks), and the number of the
    block's row in the pack's list."""

    pack: Pack
    row: int


class PackIndex:
    """An index of the blocks that this node knows to be in the bucket; see the module.
    Thread-safe."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        # Maps the tag (hash) of a key to the place of its block: pack number << _ROW_BITS | row.
        self._where: dict[int, int] = {}
        self._packs: dict[int, Pack] = {}
        self._numbers: dict[str, int] = {}
        self._next = 0
        # Heap of (-age, pack number), with the oldest pack on top. Packs that were dropped from the
        # index are removed from the heap later.
        self._oldest: list[tuple[int, int]] = []
        self._num_rows = 0

    def __repr__(self) -> str:
        return f"PackIndex({len(self._where)} blocks, {len(self._packs)} packs)"

    def __len__(self) -> int:
        return len(self._where)

    @property
    def num_bytes(self) -> int:
        """Memory that the index uses, in bytes; estimated."""
        return self._num_rows * INDEX_ENTRY_BYTES

    def add(self, pack: Pack) -> bool:
        """Adds a pack (object with blocks) to the index. If there is no room, first drops older
        packs. Returns False, without adding the pack, if there is no room and no pack in the index
        is older."""
        with self._lock:
            if pack.path in self._numbers:
                return True
            while self._packs and self._num_rows + _rows(pack) > self._max_blocks:
                while (first := self._oldest[0][1]) not in self._packs:
                    heapq.heappop(self._oldest)
                oldest = self._packs[first]
                if pack.age >= oldest.age:
                    return False
                self._drop(oldest.path)
            self._next += 1
            number = self._next
            self._packs[number] = pack
            self._numbers[pack.path] = number
            self._num_rows += _rows(pack)
            heapq.heappush(self._oldest, (-pack.age, number))
            for row, key_tag in enumerate(pack.tags.tolist()):
                known = self._where.get(key_tag)
                if known is None or self._packs[known >> _ROW_BITS].age >= pack.age:
                    self._where[key_tag] = number << _ROW_BITS | row
            return True

    def has(self, path: str) -> bool:
        """Returns True if the pack (object with blocks) with this path is in the index."""
        return path in self._numbers

    def find(self, keys: Sequence[bytes]) -> list[PackRow | None]:
        """Returns, for each key, the place of its block: a pack (object with blocks) and a row in
        it; None if the block is not in the index."""
        tags = [tag(key) for key in keys]
        with self._lock:
            found = [self._where.get(key_tag) for key_tag in tags]
            return [
                None if at is None else PackRow(self._packs[at >> _ROW_BITS], at & _ROW_MASK)
                for at in found
            ]

    def forget(self, keys: Iterable[bytes]) -> None:
        """Removes blocks from the index. The blocks stay in the bucket."""
        tags = [tag(key) for key in keys]
        with self._lock:
            for key_tag in tags:
                self._where.pop(key_tag, None)

    def drop(self, path: str) -> None:
        """Removes a pack (object with blocks) from the index. The pack stays in the bucket."""
        with self._lock:
            self._drop(path)

    def drop_others(self, fingerprint: str, space: Space | None) -> None:
        """Removes the packs (objects with blocks) of a key space from the index, except the packs
        of one generation (number that each flush raises). Called when the key space has a new
        generation, because blocks of other generations may not be used.

        `fingerprint`: name of the key space.
        `space`: names the generation whose packs stay (`packs.Space`); None: removes all packs.
        """
        with self._lock:
            packs = list(self._packs.values())
        for pack in packs:
            if pack.space.partition("/")[0] == fingerprint and pack.space != space:
                # Acquire the lock for each pack anew, so that other threads can look blocks up
                # in between.
                self.drop(pack.path)

    def check_invariants(self) -> None:
        """Raises AssertionError if the tables of the index contradict each other."""
        with self._lock:
            assert self._num_rows == sum(map(_rows, self._packs.values()))
            assert self._num_rows <= self._max_blocks or len(self._packs) == 1
            assert {pack.path: number for number, pack in self._packs.items()} == self._numbers
            for key_tag, at in self._where.items():
                assert self._packs[at >> _ROW_BITS].tags[at & _ROW_MASK] == key_tag
            assert len(self._oldest) <= 2 * len(self._packs) + 64

    def _drop(self, path: str) -> None:
        number = self._numbers.pop(path, None)
        if number is None:
            return
        pack = self._packs.pop(number)
        self._num_rows -= _rows(pack)
        for key_tag in pack.tags.tolist():
            if self._where.get(key_tag, 0) >> _ROW_BITS == number:
                del self._where[key_tag]
        if len(self._oldest) > 2 * len(self._packs) + 64:
            self._oldest = [(-one.age, at) for at, one in self._packs.items()]
            heapq.heapify(self._oldest)


def _rows(pack: Pack) -> int:
    """Returns how many rows a pack (object with blocks) counts in the limit of the index."""
    return len(pack) + PACK_ROWS

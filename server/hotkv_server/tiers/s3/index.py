"""Index, in memory, of the blocks that this node knows to be in the bucket.

Always true: a pack counts as its blocks plus PACK_ROWS, and all packs together as at most
`max_blocks`, unless there is only one. The oldest are dropped for a new one; they stay in the
bucket. A block in several packs is found in the newest. The index is a hint: a pack may no
longer exist.
"""

import heapq
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hotkv_server.tiers.s3.packs import Pack, Space, tag

INDEX_ENTRY_BYTES = 170
"""Memory per block, measured."""
PACK_ROWS = 6
"""A pack's own memory, in blocks."""
_ROW_BITS = 24
_ROW_MASK = (1 << _ROW_BITS) - 1


class PackRow(NamedTuple):
    pack: Pack
    row: int


class PackIndex:
    """See the module. Thread-safe."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        # Tag to pack number << _ROW_BITS | row.
        self._where: dict[int, int] = {}
        self._packs: dict[int, Pack] = {}
        self._numbers: dict[str, int] = {}
        self._next = 0
        # Heap of (-age, pack number), oldest on top; dropped packs are removed later.
        self._oldest: list[tuple[int, int]] = []
        self._num_rows = 0

    def __repr__(self) -> str:
        return f"PackIndex({len(self._where)} blocks, {len(self._packs)} packs)"

    def __len__(self) -> int:
        return len(self._where)

    @property
    def num_bytes(self) -> int:
        """Estimated memory."""
        return self._num_rows * INDEX_ENTRY_BYTES

    def add(self, pack: Pack) -> bool:
        """Drops older packs if there is no room. False if none is older."""
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
        return path in self._numbers

    def find(self, keys: Sequence[bytes]) -> list[PackRow | None]:
        tags = [tag(key) for key in keys]
        with self._lock:
            found = [self._where.get(key_tag) for key_tag in tags]
            return [
                None if at is None else PackRow(self._packs[at >> _ROW_BITS], at & _ROW_MASK)
                for at in found
            ]

    def forget(self, keys: Iterable[bytes]) -> None:
        tags = [tag(key) for key in keys]
        with self._lock:
            for key_tag in tags:
                self._where.pop(key_tag, None)

    def drop(self, path: str) -> None:
        with self._lock:
            self._drop(path)

    def drop_others(self, fingerprint: str, space: Space | None) -> None:
        """Drops the packs of a key space's other generations; all if `space` is None."""
        with self._lock:
            packs = list(self._packs.values())
        for pack in packs:
            if pack.space.partition("/")[0] == fingerprint and pack.space != space:
                # One lock per pack, so that lookups run in between.
                self.drop(pack.path)

    def check_invariants(self) -> None:
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
    return len(pack) + PACK_ROWS

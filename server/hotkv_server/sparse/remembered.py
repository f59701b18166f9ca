"""Remembered hot sets: those that sequences ended with, for the next ones over the same prefix.

Always true: memory is bounded. If there is too little, the owner that has most of it loses the
context that was asked for least recently, so nobody loses one to others as long as it takes no more
than an equal part. A context is found by its last block and by every `ANCHOR_BLOCKS`-th one before
it, so a sequence that shares a prefix with several finds the one that shares most, the newest of
equals. Positions that are handed out are below the shared part only. Block hashes are chained:
equal hashes mean equal prefixes.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv.table import Words

I32 = NDArray[np.int32]
LayerShard = tuple[int, int]
"""A layer and a shard."""
HotSets = Mapping[LayerShard, I32]
"""Positions of blocks, most recently used first."""

ANCHOR_BLOCKS = 8
ENTRY_BYTES = 1024
ANCHOR_BYTES = 400
"""What an anchor weighs in Python's tables, about."""
SET_BYTES = 256
CONTEXT_SHARE = 4
"""A context takes 1/4 of the memory at most."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """The hot sets of a context that shares `num_blocks` leading blocks; all positions are below
    that."""

    num_blocks: int
    hot_sets: HotSets


NOTHING = Recalled(0, {})


@dataclass(slots=True)
class _Context:
    """One remembered context. `anchors`: keys from the start on; the last one is of its last
    block."""

    key_space_id: int
    owner: int
    anchors: list[bytes]
    hot_sets: dict[LayerShard, I32]

    @property
    def num_bytes(self) -> int:
        sets = sum(positions.nbytes + SET_BYTES for positions in self.hot_sets.values())
        return ENTRY_BYTES + ANCHOR_BYTES * len(self.anchors) + sets


class RememberedHotSets:
    """See the module."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self._next_number = 0
        self._contexts: dict[int, _Context] = {}
        # Per owner: numbers of its contexts, the one asked for least recently first, and what they
        # weigh.
        self._order: dict[int, OrderedDict[int, None]] = {}
        self._bytes_of: dict[int, int] = {}
        # Numbers of the contexts with this anchor, the newest last; the inner dicts are ordered
        # sets.
        self._anchors: dict[bytes, dict[int, None]] = {}
        self._by_last: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._contexts)

    def __repr__(self) -> str:
        return f"RememberedHotSets({len(self)} contexts, {self.num_bytes}/{self.capacity_bytes} B)"

    def remember(
        self, key_space_id: int, group_index: int, hashes: Words, hot_sets: HotSets, owner: int = 0
    ) -> bool:
        """Keeps the hot sets of a context with block hashes [n, 8]; those that it had before of
        other layers and shards stay.

        Positions from n on are left out. Returns False if there is nothing to keep, or more than a
        context may have. `owner`: the tenant.
        """
        kept = {
            at: positions[positions < len(hashes)].astype(np.int32)
            for at, positions in hot_sets.items()
        }
        if not len(hashes) or not any(len(positions) for positions in kept.values()):
            return False
        anchors = _keys(key_space_id, group_index, hashes, _anchor_positions(len(hashes)))
        known = self._by_last.get(anchors[-1])
        if known is not None and self._contexts[known].anchors == anchors:
            kept = {**self._contexts[known].hot_sets, **kept}
        context = _Context(key_space_id, owner, anchors, kept)
        if context.num_bytes > self.capacity_bytes // CONTEXT_SHARE:
            return False
        if known is not None:
            self._drop(known)
        while self.num_bytes + context.num_bytes > self.capacity_bytes:
            more = {owner: context.num_bytes}
            largest = max(
                self._order, key=lambda other: (self._bytes_of[other] + more.get(other, 0), other)
            )
            self._drop(next(iter(self._order[largest])))
        self._add(context)
        return True

    def recall(self, key_space_id: int, group_index: int, hashes: Words) -> Recalled:
        """The hot sets of the longest known prefix of a context with block hashes [n, 8]."""
        position = self._longest(key_space_id, group_index, hashes)
        if position < 0:
            return NOTHING
        number = next(
            reversed(
                self._anchors[_keys(key_space_id, group_index, hashes, np.array([position]))[0]]
            )
        )
        self._order[self._contexts[number].owner].move_to_end(number)
        shared = position + 1
        hot_sets = {
            at: positions[positions < shared]
            for at, positions in self._contexts[number].hot_sets.items()
        }
        return Recalled(shared, hot_sets)

    def forget(self, key_space_id: int) -> Iterator[None]:
        """Forgets the contexts that a key space has at the first step, one a step; anything else
        may be called between two."""
        for number in [
            number
            for number, context in self._contexts.items()
            if context.key_space_id == key_space_id
        ]:
            if number in self._contexts:
                self._drop(number)
                yield

    def _longest(self, key_space_id: int, group_index: int, hashes: Words) -> int:
        """Position of the last block of the longest known prefix; -1 for none.

        Every context beyond a regular anchor has that anchor, so regular ones are searched by
        halving; irregular ones lie before the next.
        """
        regular = np.arange(ANCHOR_BLOCKS - 1, len(hashes), ANCHOR_BLOCKS)
        low, high = 0, len(regular)
        while low < high:
            middle = (low + high) // 2
            key = _keys(key_space_id, group_index, hashes, regular[middle : middle + 1])[0]
            low, high = (middle + 1, high) if key in self._anchors else (low, middle)
        start = low * ANCHOR_BLOCKS
        beyond = np.arange(start, min(start + ANCHOR_BLOCKS, len(hashes)))
        for position, key in reversed(
            list(
                zip(beyond.tolist(), _keys(key_space_id, group_index, hashes, beyond), strict=True)
            )
        ):
            if key in self._anchors:
                return int(position)
        return start - 1

    def _add(self, context: _Context) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        self._contexts[number] = context
        self._order.setdefault(context.owner, OrderedDict())[number] = None
        self._bytes_of[context.owner] = self._bytes_of.get(context.owner, 0) + context.num_bytes
        self._by_last[context.anchors[-1]] = number
        for key in context.anchors:
            self._anchors.setdefault(key, {})[number] = None
        self.num_bytes += context.num_bytes

    def _drop(self, number: int) -> None:
        context = self._contexts.pop(number)
        del self._order[context.owner][number]
        self._bytes_of[context.owner] -= context.num_bytes
        if not self._order[context.owner]:
            del self._order[context.owner], self._bytes_of[context.owner]
        del self._by_last[context.anchors[-1]]
        for key in context.anchors:
            numbers = self._anchors[key]
            del numbers[number]
            if not numbers:
                del self._anchors[key]
        self.num_bytes -= context.num_bytes

    def check_invariants(self) -> None:
        """Raises AssertionError if the books disagree."""
        assert (
            self.num_bytes
            == sum(context.num_bytes for context in self._contexts.values())
            <= self.capacity_bytes
        ), "bytes miscounted"
        order = {number: owner for owner, numbers in self._order.items() for number in numbers}
        assert order == {number: context.owner for number, context in self._contexts.items()}, (
            "owners disagree"
        )
        assert self._bytes_of == {
            owner: sum(self._contexts[number].num_bytes for number in numbers)
            for owner, numbers in self._order.items()
        }, "bytes of owners miscounted"
        named = {(key, number) for key, numbers in self._anchors.items() for number in numbers}
        assert named == {
            (key, number) for number, context in self._contexts.items() for key in context.anchors
        }, "anchors disagree"
        assert self._by_last == {
            context.anchors[-1]: number for number, context in self._contexts.items()
        }, "last blocks disagree"


def _anchor_positions(num_blocks: int) -> NDArray[np.int64]:
    regular = np.arange(ANCHOR_BLOCKS - 1, num_blocks, ANCHOR_BLOCKS)
    return regular if num_blocks % ANCHOR_BLOCKS == 0 else np.append(regular, num_blocks - 1)


def _keys(
    key_space_id: int, group_index: int, hashes: Words, positions: NDArray[np.int64]
) -> list[bytes]:
    """One key per position: of key space, group and block hash."""
    head = key_space_id.to_bytes(4, "little") + group_index.to_bytes(2, "little")
    return [head + row.tobytes() for row in hashes[positions]]

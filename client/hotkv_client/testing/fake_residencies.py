"""Residencies of the double of the server: an arena in plain memory, and words that readers ask.

Always true: a slot has the bytes of the block for which it was given, all shards one after the
other, and is never given again, so that a test finds every reader that goes on too long by the
words alone. `most`: how many may be open, None for any number; beyond it opening one is refused as
NO_ROOM_FOR_RESIDENCY. `revoke` is what a server does that takes its residencies back; `die` of the
server leaves them to their readers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hotkv_client.arena import holds
from hotkv_client.testing.fake_writes import Shards
from hotkv_client.types import Int64s, ResidencyOpened
from hotkv_proto import words
from hotkv_proto.errors import HotKVError, Reason

SLOT_ALIGN = 4096


class FakeArena:
    """Stands for `hotkv_client.Arena`."""

    def __init__(self, num_bytes: int) -> None:
        self.memory: NDArray[np.uint8] = np.zeros(num_bytes, np.uint8)
        self.words: NDArray[np.uint64] = np.zeros(words.WORD_COUNT, np.uint64)
        self.words[words.GENERATION] = self.words[words.LATEST] = 1
        self.file_id = (0, id(self))

    def holds(self, opened: ResidencyOpened) -> bool:
        return holds(self.words, opened)


@dataclass
class FakeResidency:
    """By group and position: `offsets` and `names`."""

    opened: ResidencyOpened
    asked: dict[int, int]
    offsets: dict[tuple[int, int], int] = field(default_factory=dict)
    names: dict[tuple[int, int], bytes] = field(default_factory=dict)


class FakeResidencies:
    """All residencies of one server, by engine id and residency id."""

    def __init__(self, num_bytes: int) -> None:
        self.arena = FakeArena(num_bytes)
        self.open: dict[tuple[str, str], FakeResidency] = {}
        self.most: int | None = None
        # Of each store, in order; blocks of the double are never evicted, so nothing is pinned.
        self.stored_into: list[str] = []
        self.generation = 1
        self._next_offset = 0
        self._next_word = 1

    def add(self, name: tuple[str, str], asked: dict[int, int]) -> ResidencyOpened:
        """Opens a residency. Raises NO_ROOM_FOR_RESIDENCY, or DUPLICATE_ID for other numbers."""
        known = self.open.get(name)
        if known is not None:
            if known.asked != asked:
                raise HotKVError(Reason.DUPLICATE_ID, f"residency_id {name[1]!r} is open")
            return known.opened
        if self.most is not None and len(self.open) >= self.most:
            raise HotKVError(Reason.NO_ROOM_FOR_RESIDENCY, "told to refuse")
        index, self._next_word = self._next_word, self._next_word % words.MAX_SESSION_WORD + 1
        self.arena.words[index] += np.uint64(1)
        opened = ResidencyOpened(name[1], index, int(self.arena.words[index]), self.generation)
        self.open[name] = FakeResidency(opened, asked)
        return opened

    def extend(
        self,
        name: tuple[str, str],
        group_index: int,
        first_position: int,
        hashes: Sequence[bytes],
        blocks: Sequence[Shards | None],
    ) -> Int64s:
        """Offsets of blocks, given their names and shards; -1 for None. Raises UNKNOWN_RESIDENCY,
        or DUPLICATE_ID where another block is pinned."""
        residency = self.open.get(name)
        if residency is None:
            raise HotKVError(Reason.UNKNOWN_RESIDENCY, f"residency_id {name[1]!r} is unknown")
        found = np.full(len(blocks), -1, np.int64)
        for at, (name_of_block, shards) in enumerate(zip(hashes, blocks, strict=True)):
            place = (group_index, first_position + at)
            if residency.names.get(place, name_of_block) != name_of_block:
                raise HotKVError(Reason.DUPLICATE_ID, "another block at one of these positions")
            if shards is not None:
                residency.names[place] = name_of_block
            if place not in residency.offsets and shards is not None:
                residency.offsets[place] = self._slot(shards)
            found[at] = residency.offsets.get(place, -1)
        return found

    def _slot(self, shards: Shards) -> int:
        data = np.frombuffer(b"".join(shards[shard] for shard in sorted(shards)), np.uint8)
        offset = self._next_offset
        assert offset + len(data) <= self.arena.memory.size, "the double's arena is too small"
        self.arena.memory[offset : offset + len(data)] = data
        self._next_offset += -(-len(data) // SLOT_ALIGN) * SLOT_ALIGN
        return offset

    def close(self, name: tuple[str, str]) -> None:
        """The engine gives one back."""
        self.open.pop(name, None)

    def revoke(self, engine_id: str) -> None:
        """The server takes all of an engine's back; their readers are told."""
        for name in [name for name in self.open if name[0] == engine_id]:
            self.arena.words[self.open.pop(name).opened.word_index] += np.uint64(1)

    def restart(self) -> None:
        """Another server: forgets what was open, whose readers go on, and raises the generation."""
        self.open.clear()
        self.generation += 1

"""Grace: what readers of the server before this one may still read stays as it is, for a time.

The old server's marks say which entries its residencies pinned; `restore` makes them anew and gives
them to `begin`. Always true: such an entry is pinned once from here until the grace is over, and
marked, so that a third server knows it, too. At the end the words change first; only then is
anything unpinned. If an entry could not be kept, the words have changed before its slot is used.
"""

from collections.abc import Callable, Iterator

import numpy as np

from hotkv_server.cache.room.space import Space
from hotkv_server.cache.table.reader_words import Marks, ReaderWords
from hotkv_server.cache.values import BoolMask, Entries

PART_ENTRIES = 1 << 16


class Grace:
    """`entries`: pinned from here. `until_s`: when it is over, in seconds of `now_s`; inf until it
    is known. `num_bytes`: of their slots."""

    def __init__(self, space: Space, words: ReaderWords, marks: Marks) -> None:
        self.entries: Entries = np.empty(0, np.uint32)
        self.until_s = np.inf
        self.num_bytes = 0
        self._space = space
        self._words = words
        self._marks = marks
        self._held = np.zeros(space.index.capacity + 1, np.bool_)

    def __repr__(self) -> str:
        return f"Grace({len(self.entries)} entries, {self.num_bytes} B)"

    @property
    def is_on(self) -> bool:
        """Returns True while something is kept, or readers of an earlier server may read."""
        return bool(len(self.entries)) or self._words.has_earlier_readers

    def among(self, entries: Entries) -> BoolMask:
        """Which of the entries [n] are kept."""
        return self._held[entries]

    def begin(self, entries: Entries) -> None:
        """Keeps entries that an earlier server's residencies had pinned: ready or detached, each
        once."""
        assert not len(self.entries), "grace begins once"
        self.entries = entries
        self._held[entries] = True
        self._marks[entries] = 1
        self._space.index.pin(entries, 1)
        self.num_bytes = int(self._space.index.slot_bytes(entries).sum())

    def revoke(self) -> None:
        """Tells readers of earlier servers that nothing they have is sure."""
        if self._words.has_earlier_readers:
            self._words.revoke_earlier()

    def expire(self, now_s: float, is_read: Callable[[Entries], BoolMask]) -> Iterator[None]:
        """Ends the grace if its time is over, in parts. `is_read`: which entries [n] this server's
        own readers may read."""
        if now_s < self.until_s or not self.is_on:
            return
        self.revoke()
        while len(self.entries):
            part, self.entries = self.entries[-PART_ENTRIES:], self.entries[:-PART_ENTRIES]
            self._held[part] = False
            self._marks[part[~is_read(part)]] = 0
            self.num_bytes -= int(self._space.index.slot_bytes(part).sum())
            self._space.index.pin(part, -1)
            self._space.removal.reap(part)
            yield

    def check_invariants(self) -> None:
        """Raises AssertionError if the books disagree. Linear in capacity."""
        assert np.array_equal(np.sort(self.entries), np.flatnonzero(self._held)), (
            "kept entries miscounted"
        )
        index = self._space.index
        assert self.num_bytes == int(index.slot_bytes(self.entries).sum()), "bytes miscounted"
        assert np.all(index.can_be_read(self.entries)), "keeps something that has no bytes"

"""Those who read the arena in place: the words that tell them whether what they read still holds,
and the grace of an earlier server's readers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.words import GENERATION, LATEST, MAX_SESSION_WORD, WORD_COUNT
from hotkv_server.cache.room.removal import Removal
from hotkv_server.cache.values import BoolMask, Entries

# Words: those in which readers of the arena see whether their residencies still hold
# (`hotkv_proto.words`).
#
# Always true: a session's word is odd from its first residency on and even once one of them has
# ended otherwise than by its engine; no word ever has the same odd value twice. A word of an
# earlier server's session stays as it is, and is given to nobody, until that server's readers may
# read no more. Whoever unpins something that a reader may still read changes its word first.


Uint64s = NDArray[np.uint64]


Marks = NDArray[np.uint8]
"""By entry number: 1 for an entry that a reader may read."""


@dataclass(frozen=True, slots=True)
class ReaderMemory:
    """What readers see, and what the next server finds: `words`, and `marks` by entry number. Both
    outlive the server."""

    words: Uint64s
    marks: Marks


def no_readers(capacity: int) -> ReaderMemory:
    """For a core whose arena nobody reads, with so many entries."""
    return ReaderMemory(np.zeros(WORD_COUNT, np.uint64), np.zeros(capacity + 1, np.uint8))


class ReaderWords:
    """Writes the words. `generation`: of the residencies that are opened here.

    `has_earlier_readers`: an earlier server's residencies may still be read.
    """

    def __init__(self, words: Uint64s) -> None:
        self._words = words
        self.generation = 1 + int(max(words[GENERATION], words[LATEST]))
        self._earlier = 1 + np.flatnonzero(words[1 : MAX_SESSION_WORD + 1] & np.uint64(1))
        self._of_session: dict[int, int] = {}
        taken = set(self._earlier.tolist())
        # Low words first: they share pages.
        self._free = [index for index in range(MAX_SESSION_WORD, 0, -1) if index not in taken]
        # Before any residency has it: the next server gives out a higher one.
        words[LATEST] = self.generation
        if not len(self._earlier):
            words[GENERATION] = self.generation

    def __repr__(self) -> str:
        return (
            f"ReaderWords(generation {self.generation}, {len(self._of_session)} sessions, "
            f"{len(self._earlier)} of an earlier server)"
        )

    @property
    def has_earlier_readers(self) -> bool:
        return bool(len(self._earlier))

    def check_room(self, session_number: int) -> None:
        """Raises OVERLOADED unless the session has a word or can get one."""
        if session_number not in self._of_session and not self._free:
            raise HotKVError(
                Reason.OVERLOADED,
                f"residency_id: all {MAX_SESSION_WORD} words of readers are in use, "
                f"{len(self._earlier)} of them by an earlier server's; wait for its grace to end",
            )

    def of_session(self, session_number: int) -> tuple[int, int]:
        """Index and value of a session's word, which it gets now if it has none."""
        if session_number not in self._of_session:
            index = self._of_session[session_number] = self._free.pop()
            self._words[index] += np.uint64(1)
        index = self._of_session[session_number]
        return index, int(self._words[index])

    def revoke(self, session_number: int) -> None:
        """Tells a session's readers that nothing they have is sure; no error if it has no word."""
        index = self._of_session.pop(session_number, 0)
        if index:
            self._words[index] += np.uint64(1)
            self._free.append(index)

    def revoke_earlier(self) -> None:
        """Tells the readers of earlier servers the same; their words are free then."""
        self._words[GENERATION] = self.generation
        self._words[self._earlier] += np.uint64(1)
        self._free += self._earlier.tolist()
        self._earlier = self._earlier[:0]

    def check_invariants(self, in_sessions: set[int]) -> None:
        """Raises AssertionError if words disagree. `in_sessions`: those that have residencies."""
        assert in_sessions <= set(self._of_session), "a session with residencies has no word"
        in_use = [*self._of_session.values(), *self._earlier.tolist()]
        assert sorted([*in_use, *self._free]) == list(range(1, MAX_SESSION_WORD + 1)), (
            "words are lost or given twice"
        )
        assert np.all(self._words[in_use] & np.uint64(1)), "a word in use is even"
        assert not np.any(self._words[self._free] & np.uint64(1)), "a free word is odd"
        assert self._words[LATEST] == self.generation >= self._words[GENERATION], (
            "generations disagree"
        )
        assert self.has_earlier_readers or self._words[GENERATION] == self.generation, (
            "an old generation that nobody has"
        )


# Grace: what readers of the server before this one may still read stays as it is, for a time.
#
# The old server's marks say which entries its residencies pinned; `restore` makes them anew and
# gives them to `begin`. Always true: such an entry is pinned once from here until the grace is
# over, and marked, so that a third server knows it, too. At the end the words change first; only
# then is anything unpinned. If an entry could not be kept, the words have changed before its slot
# is used.


PART_ENTRIES = 1 << 16


class Grace:
    """`entries`: pinned from here. `until_s`: when it is over, in seconds of `now_s`; inf until it
    is known. `num_bytes`: of their slots."""

    def __init__(self, removal: Removal, words: ReaderWords, marks: Marks) -> None:
        self.entries: Entries = np.empty(0, np.uint32)
        self.until_s = np.inf
        self.num_bytes = 0
        self._removal = removal
        self._index = removal.index
        self._words = words
        self._marks = marks
        self._held = np.zeros(removal.index.capacity + 1, np.bool_)

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
        self._index.pin(entries, 1)
        self.num_bytes = int(self._index.slot_bytes(entries).sum())

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
            self.num_bytes -= int(self._index.slot_bytes(part).sum())
            self._index.pin(part, -1)
            self._removal.reap(part)
            yield

    def check_invariants(self) -> None:
        """Raises AssertionError if the books disagree. Linear in capacity."""
        assert np.array_equal(np.sort(self.entries), np.flatnonzero(self._held)), (
            "kept entries miscounted"
        )
        assert self.num_bytes == int(self._index.slot_bytes(self.entries).sum()), "bytes miscounted"
        assert np.all(self._index.can_be_read(self.entries)), "keeps something that has no bytes"

"""Clients that map the arena and read there the blocks of their residencies, without calling the
server.

After each read, such a reader checks its session's validity word (`hotkv_proto.words`), which
`ReaderWords` changes before blocks are unpinned. After a restart, `Grace` pins for some seconds
what readers of the earlier server may still read.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.words import LATEST_START, MAX_SESSION_WORD, OLDEST_START, WORD_COUNT
from hotkv_server.cache.room.removal import Removal
from hotkv_server.cache.values import BoolMask, Entries

# Validity words.
#
# Always true: a session's word becomes odd, that is valid, with its first residency, and even
# when a residency ends, unless the engine itself ended it. No odd value comes twice. An earlier
# server's word keeps its value and is not reused until the grace ends. A word changes before a
# block that its session may read is unpinned.


Uint64s = NDArray[np.uint64]


Marks = NDArray[np.uint8]
"""By entry number, 1 if a client may read it in the arena."""


@dataclass(frozen=True, slots=True)
class ReaderMemory:
    """In mapped files that outlive the server; the marks tell the next one what to retain."""

    words: Uint64s
    marks: Marks


def no_readers(capacity: int) -> ReaderMemory:
    """All 0, in no file."""
    return ReaderMemory(np.zeros(WORD_COUNT, np.uint64), np.zeros(capacity + 1, np.uint8))


class ReaderWords:
    """A word in use is odd, a free one even.

    start_number: of this server and of the residencies that it opens; it only rises. The word
        OLDEST_START has the lowest one whose residencies are valid.
    """

    def __init__(self, words: Uint64s) -> None:
        self._words = words
        self.start_number = 1 + int(max(words[OLDEST_START], words[LATEST_START]))
        self._earlier = 1 + np.flatnonzero(words[1 : MAX_SESSION_WORD + 1] & np.uint64(1))
        self._of_session: dict[int, int] = {}
        taken = set(self._earlier.tolist())
        # Low words first, so that those in use lie on few pages.
        self._free = [index for index in range(MAX_SESSION_WORD, 0, -1) if index not in taken]
        # Before any residency has the number: the next server must choose a higher one.
        words[LATEST_START] = self.start_number
        if not len(self._earlier):
            words[OLDEST_START] = self.start_number

    def __repr__(self) -> str:
        return (
            f"ReaderWords(start_number {self.start_number}, {len(self._of_session)} sessions, "
            f"{len(self._earlier)} of an earlier server)"
        )

    @property
    def has_earlier_readers(self) -> bool:
        return bool(len(self._earlier))

    def check_room(self, session_number: int) -> None:
        """Raises OVERLOADED if the session has no word and none is free."""
        if session_number not in self._of_session and not self._free:
            raise HotKVError(
                Reason.OVERLOADED,
                f"residency_id: all {MAX_SESSION_WORD} words of readers are in use, "
                f"{len(self._earlier)} of them by an earlier server's; wait for its grace to end",
            )

    def of_session(self, session_number: int) -> tuple[int, int]:
        """Index and value of its word; assigns one if needed."""
        if session_number not in self._of_session:
            index = self._of_session[session_number] = self._free.pop()
            self._words[index] += np.uint64(1)
        index = self._of_session[session_number]
        return index, int(self._words[index])

    def revoke(self, session_number: int) -> None:
        """Makes the word even and frees it."""
        index = self._of_session.pop(session_number, 0)
        if index:
            self._words[index] += np.uint64(1)
            self._free.append(index)

    def revoke_earlier(self) -> None:
        """Ends all residencies of earlier servers and frees their words."""
        self._words[OLDEST_START] = self.start_number
        self._words[self._earlier] += np.uint64(1)
        self._free += self._earlier.tolist()
        self._earlier = self._earlier[:0]

    def check_invariants(self, in_sessions: set[int]) -> None:
        assert in_sessions <= set(self._of_session), "a session with residencies has no word"
        in_use = [*self._of_session.values(), *self._earlier.tolist()]
        assert sorted([*in_use, *self._free]) == list(range(1, MAX_SESSION_WORD + 1)), (
            "words are lost or given twice"
        )
        assert np.all(self._words[in_use] & np.uint64(1)), "a word in use is even"
        assert not np.any(self._words[self._free] & np.uint64(1)), "a free word is odd"
        assert self._words[LATEST_START] == self.start_number >= self._words[OLDEST_START], (
            "start numbers disagree"
        )
        assert self.has_earlier_readers or self._words[OLDEST_START] == self.start_number, (
            "an old start_number that nobody has"
        )


# Grace.
#
# `cache.restore` passes the entries that the old server marked to `begin`. Until the grace ends,
# each has a pin and a mark, so that a further restart finds it too. At its end the words change
# first, then entries are unpinned. If one can't be retained, the words change before its slot is
# reused.


PART_ENTRIES = 1 << 16


class Grace:
    """until_s: on the clock of `now_s`; inf until known.
    num_bytes: of the slots.
    """

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
        return bool(len(self.entries)) or self._words.has_earlier_readers

    def among(self, entries: Entries) -> BoolMask:
        return self._held[entries]

    def begin(self, entries: Entries) -> None:
        """Ready or flushed entries, each once."""
        assert not len(self.entries), "grace begins once"
        self.entries = entries
        self._held[entries] = True
        self._marks[entries] = 1
        self._index.pin(entries, 1)
        self.num_bytes = int(self._index.slot_bytes(entries).sum())

    def revoke(self) -> None:
        if self._words.has_earlier_readers:
            self._words.revoke_earlier()

    def expire(self, now_s: float, is_read: Callable[[Entries], BoolMask]) -> Iterator[None]:
        """If `until_s` has passed. Entries that this server's clients read (`is_read`) keep
        their mark."""
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
        assert np.array_equal(np.sort(self.entries), np.flatnonzero(self._held)), (
            "kept entries miscounted"
        )
        assert self.num_bytes == int(self._index.slot_bytes(self.entries).sum()), "bytes miscounted"
        assert np.all(self._index.can_be_read(self.entries)), "keeps something that has no bytes"

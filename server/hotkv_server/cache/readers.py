"""Readers: clients that map the arena and read there the blocks of their residencies (requests
whose KV stays in host memory), without calling the server.

A reader must notice if the server has unpinned such a block and reused its slot. So after each read
it checks a number in shared memory, its session's validity word, which `ReaderWords` changes before
blocks are unpinned. After a restart, `Grace` pins the blocks that readers of the earlier server may
still read, for some seconds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.words import LATEST_START, MAX_SESSION_WORD, OLDEST_START, WORD_COUNT
from hotkv_server.cache.room.removal import Removal
from hotkv_server.cache.values import BoolMask, Entries

# Validity words: numbers in shared memory, one for each session (connection of an engine) with
# residencies. A reader checks the word of its session to see whether its residencies are still
# valid, so that their blocks are pinned (`hotkv_proto.words`). An odd word means that they are.
#
# Always true: a session's validity word becomes odd when the session opens its first residency. The
# word becomes even when a residency of the session ends, unless the engine itself has ended the
# residency. A word never has the same odd value twice. A word of an earlier server's session keeps
# its value and is not reused until the grace (`Grace`) ends. Before a block that a reader may still
# read is unpinned, the word of the reader's session changes.


Uint64s = NDArray[np.uint64]


Marks = NDArray[np.uint8]
"""Array by entry number: 1 for each entry that a client may read directly in the mapped arena."""


@dataclass(frozen=True, slots=True)
class ReaderMemory:
    """The state that the server stores about its readers: clients that read blocks directly in the
    mapped arena. The arrays lie in mapped files, which outlive the server.

    words: the validity words, which readers map too: numbers by which they check whether their
        blocks are still pinned.
    marks: by entry number, 1 for each entry (record in the block table) that a reader may read. So
        after a restart, the next server knows which entries it must retain for readers.
    """

    words: Uint64s
    marks: Marks


def no_readers(capacity: int) -> ReaderMemory:
    """Returns the state of a core without readers (clients that read blocks in the arena): validity
    words and marks (`ReaderMemory`) that are all 0 and lie in no file. `capacity`: number of
    entries (records in the block table)."""
    return ReaderMemory(np.zeros(WORD_COUNT, np.uint64), np.zeros(capacity + 1, np.uint8))


class ReaderWords:
    """Writes the validity words: a number in shared memory for each session with residencies
    (requests whose KV stays in host memory, where the client reads it). After a client has read
    blocks in the arena, it compares its session's word with the value that the word had when the
    residency was opened. If the word is unchanged, the blocks were still pinned while the client
    read them. A word that a session uses is odd, a free word is even.

    start_number: number of this server's start; higher than the number of any earlier start. A
        residency gets the number of the server that opened it. The word OLDEST_START has the lowest
        number whose residencies are still valid; clients compare their residency's number with it.
    has_earlier_readers: True while clients may still read blocks that residencies of an earlier
        server pinned.
    """

    def __init__(self, words: Uint64s) -> None:
        self._words = words
        self.start_number = 1 + int(max(words[OLDEST_START], words[LATEST_START]))
        self._earlier = 1 + np.flatnonzero(words[1 : MAX_SESSION_WORD + 1] & np.uint64(1))
        self._of_session: dict[int, int] = {}
        taken = set(self._earlier.tolist())
        # Assign validity words with low numbers first, so that the words in use lie on few memory
        # pages.
        self._free = [index for index in range(MAX_SESSION_WORD, 0, -1) if index not in taken]
        # Write this server's start number before any residency uses it, so that
        # the next server chooses a higher start number.
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
        """Raises OVERLOADED if the session (connection of an engine) has no validity word (by which
        clients check that blocks are still pinned), and all words are in use."""
        if session_number not in self._of_session and not self._free:
            raise HotKVError(
                Reason.OVERLOADED,
                f"residency_id: all {MAX_SESSION_WORD} words of readers are in use, "
                f"{len(self._earlier)} of them by an earlier server's; wait for its grace to end",
            )

    def of_session(self, session_number: int) -> tuple[int, int]:
        """Returns the index and the current value of a session's validity word, by which its client
        checks that blocks are still pinned. If the session has no word, first assigns a word to
        it."""
        if session_number not in self._of_session:
            index = self._of_session[session_number] = self._free.pop()
            self._words[index] += np.uint64(1)
        index = self._of_session[session_number]
        return index, int(self._words[index])

    def revoke(self, session_number: int) -> None:
        """Revokes a session's validity word, by which the client checks that its blocks are still
        pinned: makes the word even (not valid), and frees it. The client then discards the bytes
        that it has read since it last checked the word. Does nothing if the session has no word."""
        index = self._of_session.pop(session_number, 0)
        if index:
            self._words[index] += np.uint64(1)
            self._free.append(index)

    def revoke_earlier(self) -> None:
        """Makes all residencies (requests whose KV stays in host memory) of earlier servers
        invalid. To show this to their clients, raises the word OLDEST_START (the lowest valid
        server number) to this server's number, and makes the validity words of earlier servers'
        sessions even (not valid). Then frees these words for new sessions."""
        self._words[OLDEST_START] = self.start_number
        self._words[self._earlier] += np.uint64(1)
        self._free += self._earlier.tolist()
        self._earlier = self._earlier[:0]

    def check_invariants(self, in_sessions: set[int]) -> None:
        """Raises AssertionError if a validity word is neither free nor assigned, is assigned twice,
        or has a wrong value. `in_sessions`: numbers of the sessions that have residencies (requests
        whose KV stays in host memory)."""
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


# The grace: the time after a restart, some seconds long, in which blocks that readers of the
# previous server may still read stay unchanged.
#
# The old server has left an array (`ReaderMemory.marks`) which marks the entries that its
# residencies pinned. `cache.restore` restores these entries and passes them to `begin`. Always
# true: until the grace ends, `Grace` holds one pin on each such entry and marks the entry, so that
# a further restart finds it too. When the grace ends, the readers' validity words change first, so
# that readers discard what they read; then the entries are unpinned. If an entry can't be retained,
# the words change before another block uses the entry's slot.


PART_ENTRIES = 1 << 16


class Grace:
    """Pins the entries (records in the block table) that clients of an earlier server may still
    read in the arena, until the grace (some seconds after the restart) ends.

    entries: the entries that this object pins.
    until_s: end of the grace, on the same clock as `now_s`; inf until the end is known.
    num_bytes: bytes of the slots (places in the arena) of `entries`.

    Arguments of the constructor: `removal` frees slots. `words` has the validity words, by which
    clients notice that blocks are no longer pinned. `marks` has a 1 for each entry that clients may
    read.
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
        """True while this object pins entries (records in the block table), or while clients of an
        earlier server may still read blocks in the arena."""
        return bool(len(self.entries)) or self._words.has_earlier_readers

    def among(self, entries: Entries) -> BoolMask:
        """Returns a mask of those entries (records in the block table) that this object pins
        because clients of an earlier server may still read them."""
        return self._held[entries]

    def begin(self, entries: Entries) -> None:
        """Pins the entries (records in the block table) that an earlier server had pinned for
        residencies (requests whose KV stays in host memory), and marks them, because clients may be
        reading them in the arena. `entries`: the entries, each listed once; an entry is ready or
        detached (flushed while pinned)."""
        assert not len(self.entries), "grace begins once"
        self.entries = entries
        self._held[entries] = True
        self._marks[entries] = 1
        self._index.pin(entries, 1)
        self.num_bytes = int(self._index.slot_bytes(entries).sum())

    def revoke(self) -> None:
        """Revokes the validity words of clients of earlier servers, if there are such clients. By
        its word a client notices that it must discard the bytes that it has read in the arena since
        it last checked the word."""
        if self._words.has_earlier_readers:
            self._words.revoke_earlier()

    def expire(self, now_s: float, is_read: Callable[[Entries], BoolMask]) -> Iterator[None]:
        """Ends the grace (the time after a restart in which blocks stay pinned for clients of the
        earlier server) if `until_s` has passed; otherwise does nothing. First revokes the validity
        words of these clients, so that they read no longer. Then unpins the entries (records in the
        block table) that this object pins. Yields after each part of the work.

        is_read: function that returns a mask of the entries that clients of this server may read.
            The array `marks` still has a 1 for these entries afterwards.
        """
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
        """Raises AssertionError if the pinned entries are miscounted, or if a pinned entry is
        neither ready nor detached (flushed while pinned). Takes time linear in the capacity."""
        assert np.array_equal(np.sort(self.entries), np.flatnonzero(self._held)), (
            "kept entries miscounted"
        )
        assert self.num_bytes == int(self._index.slot_bytes(self.entries).sum()), "bytes miscounted"
        assert np.all(self._index.can_be_read(self.entries)), "keeps something that has no bytes"

"""The fence: a memory page shared with the server, through which an engine revokes its stores.

The page consists of uint32 words. Each store in flight has a word; the value 1 revokes the store.
The server reads the word after it has copied the store's blocks, and commits the copy only if the
word is not set. So once the word is set, the engine may overwrite the store's blocks at once, even
if the server hangs. Either the server committed the copy before, with the right bytes, or it never
commits the copy. A word is reused only after the server has answered the store.

There are two kinds of fence:
- `Fence`: the session that owns the page chooses the word of each store.
- `SharedFence`: another process of the engine (the scheduler) chooses the words through
  `Revocations`, for the pages of several sessions at once. So the scheduler can revoke a store
  before the process of the session learns of it. The page also records, for each word, whether the
  session still waits for the server's answer. Both the session and the scheduler may set a store's
  word; only `Revocations` clears it.

A page's descriptor is closed when its `Fence` or `SharedFence` is garbage-collected. The words stay
mapped as long as they are referenced.
"""

import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.layout import FENCE_WORDS

SHARED_WORDS = 500
"""A `SharedFence` has words for stores at indices 1 to SHARED_WORDS - 1 of its page.

For the store of word i there is a second word, at index SHARED_WORDS + i. It is not zero while a
session waits for the server's answer to this store. The token of `FencePlace` starts at index
TOKEN_WORD.
"""
TOKEN_WORD = 1000
TOKEN_BYTES = 16


class Fence:
    """A session's own page, shared with the server, through which the session revokes stores. Each
    store in flight has one of the page's words 1 to FENCE_WORDS - 1 (uint32). The session revokes
    the store by setting its word. Thread-safe."""

    def __init__(self) -> None:
        self.fd, self._words = _new_page(self)
        self._free = list(range(FENCE_WORDS - 1, 0, -1))
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Fence({len(self._free)}/{FENCE_WORDS - 1} words free)"

    def take(self) -> int:
        """Acquires a word of the page for a new store, and clears it. Returns the word's index, or
        0 if all words are in use. Without a word the store must not be sent, because it could not
        be revoked."""
        with self._lock:
            if not self._free:
                return 0
            index = self._free.pop()
        self._words[index] = 0
        return index

    def revoke(self, index: int) -> None:
        """Revokes a store: sets its word on the page that the server reads. The server does not
        commit the store after this call.

        index: index of the store's word.
        """
        self._words[index] = 1

    def revoke_all(self) -> None:
        """Revokes all stores in flight: sets all words of the page. `take` clears a word before it
        returns the word for a new store."""
        self._words[1:] = 1

    def give_back(self, index: int) -> None:
        """Frees a word for another store. Call it when the server has answered the store that had
        the word, or when the server is dead.

        index: index of the word; ignored if 0.
        """
        if index:
            with self._lock:
                self._free.append(index)


@dataclass(frozen=True, slots=True)
class FencePlace:
    """Says where another process finds the page of a `SharedFence`: in `/proc/PID/fd/FD`.

    pid: process that owns the page.
    fd: descriptor of the page in that process.
    token: random bytes, which are also on the page. A process that opens the page compares them,
        because the system may give the same process id to another process later.
    """

    pid: int
    fd: int
    token: bytes


class SharedFence:
    """A session's page through which stores are revoked: each store in flight has a word (uint32)
    on the page. Another process of the engine (the scheduler) chooses the words, through
    `Revocations`. Thread-safe.

    Sessions of the same process may share a `SharedFence`.
    """

    def __init__(self) -> None:
        self.fd, self._words = _new_page(self)
        token = os.urandom(TOKEN_BYTES)
        self._words[TOKEN_WORD : TOKEN_WORD + TOKEN_BYTES // 4] = np.frombuffer(token, np.uint32)
        self.place = FencePlace(os.getpid(), self.fd, token)

    def __repr__(self) -> str:
        num_used = np.count_nonzero(self._words[SHARED_WORDS : 2 * SHARED_WORDS])
        return f"SharedFence({num_used}/{SHARED_WORDS - 1} words in use)"

    def hold(self, index: int) -> None:
        """Records on the page that the session waits for the server's answer to the store with the
        word `index`. Call it before the store is sent.

        Raises ValueError if `index` is not a word for stores: the store could not be revoked.
        """
        if not 0 < index < SHARED_WORDS:
            raise ValueError(
                f"fence_index is {index}; a store over a shared fence needs a word of it, from 1 "
                f"to {SHARED_WORDS - 1}"
            )
        self._words[SHARED_WORDS + index] = 1

    def is_revoked(self, index: int) -> bool:
        """Returns True if the store whose word has this index is revoked: the server will not
        commit it."""
        return bool(self._words[index])

    def revoke(self, index: int) -> None:
        """Revokes a store: sets its word on the page that the server reads. The server does not
        commit the store after this call.

        index: index of the store's word.
        """
        self._words[index] = 1

    def revoke_all(self) -> None:
        """Revokes all stores in flight of this session: sets all words for stores on its page.
        `Revocations.take` clears a word before it returns the word for a new store."""
        self._words[1:SHARED_WORDS] = 1

    def give_back(self, index: int) -> None:
        """Records on the page that the session does not wait any more for the server's answer to
        the store with the word `index`: the server has answered, or is dead."""
        self._words[SHARED_WORDS + index] = 0


class Revocations:
    """Revokes stores of several sessions, for the engine's scheduler. Each session has a page
    (fence) that it shares with the server. This class chooses a word on these pages for each store,
    and revokes a store by setting its word. For one thread.

    A store has the same word on all pages. Always true: a word is reused only after `end` was
    called for it and no session waits for the server's answer to its store. The constructor revokes
    all stores in flight, and raises OSError or ValueError if a page can't be mapped.
    """

    def __init__(self, places: Sequence[FencePlace]) -> None:
        self._pages = [_found(place) for place in places]
        # An earlier scheduler process may have chosen words for stores that are still in flight.
        # That process is gone, so only this object can revoke those stores.
        self.revoke_all()
        self._ended = list(range(SHARED_WORDS - 1, 0, -1))
        self._free = self._answered()

    def __repr__(self) -> str:
        return (
            f"Revocations({len(self._free)}/{SHARED_WORDS - 1} words free, {len(self._ended)} "
            f"ended, {len(self._pages)} pages)"
        )

    def take(self) -> int:
        """Acquires a word for a new store, and clears it on the pages of all sessions. Returns the
        word's index, or 0 if all words are in use. Without a word the store must not be sent,
        because it could not be revoked."""
        if not self._free:
            self._free = self._answered()
        if not self._free:
            return 0
        index = self._free.pop()
        for page in self._pages:
            page[index] = 0
        return index

    def _answered(self) -> list[int]:
        """Returns the words that can be reused: `end` was called for them, and no session waits any
        more for an answer to their stores. Removes these words from `_ended`."""
        waiting = {
            index
            for index in self._ended
            if any(page[SHARED_WORDS + index] for page in self._pages)
        }
        answered = [index for index in self._ended if index not in waiting]
        self._ended = list(waiting)
        return answered

    def revoke(self, index: int) -> None:
        """Revokes a store: sets its word on the pages of all sessions. The server does not commit
        the store after this call.

        index: index of the store's word.
        """
        for page in self._pages:
            page[index] = 1

    def revoke_all(self) -> None:
        """Revokes all stores in flight in all sessions."""
        for page in self._pages:
            page[1:SHARED_WORDS] = 1

    def end(self, index: int) -> None:
        """Revokes the store that has the word `index`, and frees the word. Another store gets the
        word only once no session waits for the server's answer to this store.

        Call this method when no session will send the store again and the engine does not need the
        store's uncommitted blocks.
        """
        self.revoke(index)
        self._ended.append(index)


def _new_page(owner: object) -> tuple[int, NDArray[np.uint32]]:
    """Creates a zeroed page for a fence. Returns its descriptor and its words (uint32).

    The descriptor is closed when `owner` is garbage-collected. Raises OSError if the system
    refuses.
    """
    fd = os.memfd_create("hotkv-fence", os.MFD_CLOEXEC)
    weakref.finalize(owner, os.close, fd)
    os.truncate(fd, FENCE_WORDS * 4)
    return fd, _mapped(fd)


def _mapped(fd: int) -> NDArray[np.uint32]:
    return np.frombuffer(mmap.mmap(fd, FENCE_WORDS * 4), np.uint32)


def _found(place: FencePlace) -> NDArray[np.uint32]:
    fd = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if os.fstat(fd).st_size != FENCE_WORDS * 4:
            raise ValueError(
                f"descriptor {place.fd} of process {place.pid} is no fence; is it in another "
                "container or on another node?"
            )
        words = _mapped(fd)
    finally:
        os.close(fd)
    if words[TOKEN_WORD : TOKEN_WORD + TOKEN_BYTES // 4].tobytes() != place.token:
        raise ValueError(
            f"descriptor {place.fd} of process {place.pid} is another fence; is it in another "
            "container or on another node?"
        )
    return words

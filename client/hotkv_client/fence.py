"""The fence: a page shared with the server, through which an engine revokes its stores.

Each store in flight has a uint32 word; 1 revokes it. The server reads the word after it has copied
the blocks, and commits only if it is not set. So once it is set, the engine may overwrite the
blocks, even if the server hangs: the copy was committed before with the right bytes, or never is. A
word is reused only after the server has answered the store.

- `Fence`: the session that owns the page chooses the words.
- `SharedFence`: the engine's scheduler chooses them through `Revocations`, for the pages of several
  sessions, and revokes a store before the session's process learns of it. The page also says for
  which words the session still waits for an answer. Both may set a word; only `Revocations` clears
  it.

A page's descriptor is closed with its `Fence` or `SharedFence`. The words stay mapped as long as
they are referenced.
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
"""Stores have words 1 to SHARED_WORDS - 1 of a `SharedFence`. Word SHARED_WORDS + i is not zero
while a session waits for the answer to the store of word i. The token begins at TOKEN_WORD."""
TOKEN_WORD = 1000
TOKEN_BYTES = 16


class Fence:
    """A session's own page, with the words 1 to FENCE_WORDS - 1. Thread-safe."""

    def __init__(self) -> None:
        self.fd, self._words = _new_page(self)
        self._free = list(range(FENCE_WORDS - 1, 0, -1))
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Fence({len(self._free)}/{FENCE_WORDS - 1} words free)"

    def take(self) -> int:
        """A cleared word for a new store; 0 if all are in use: the store must not be sent,
        because it could not be revoked."""
        with self._lock:
            if not self._free:
                return 0
            index = self._free.pop()
        self._words[index] = 0
        return index

    def revoke(self, index: int) -> None:
        """The server does not commit the store after this call."""
        self._words[index] = 1

    def revoke_all(self) -> None:
        """Revokes all stores in flight."""
        self._words[1:] = 1

    def give_back(self, index: int) -> None:
        """Must be called when the server has answered the store or is dead. Ignores 0."""
        if index:
            with self._lock:
                self._free.append(index)


@dataclass(frozen=True, slots=True)
class FencePlace:
    """Where another process finds a `SharedFence`: `/proc/PID/fd/FD`.

    token: random bytes that are also on the page, because the system may reuse a process id.
    """

    pid: int
    fd: int
    token: bytes


class SharedFence:
    """A session's page whose words the engine's scheduler chooses through `Revocations`.
    Sessions of a process may share it. Thread-safe."""

    def __init__(self) -> None:
        self.fd, self._words = _new_page(self)
        token = os.urandom(TOKEN_BYTES)
        self._words[TOKEN_WORD : TOKEN_WORD + TOKEN_BYTES // 4] = np.frombuffer(token, np.uint32)
        self.place = FencePlace(os.getpid(), self.fd, token)

    def __repr__(self) -> str:
        num_used = np.count_nonzero(self._words[SHARED_WORDS : 2 * SHARED_WORDS])
        return f"SharedFence({num_used}/{SHARED_WORDS - 1} words in use)"

    def hold(self, index: int) -> None:
        """The session waits for the answer to the store of this word; must be called before the
        store is sent. Raises ValueError for a word that stores can't have."""
        if not 0 < index < SHARED_WORDS:
            raise ValueError(
                f"fence_index is {index}; a store over a shared fence needs a word of it, from 1 "
                f"to {SHARED_WORDS - 1}"
            )
        self._words[SHARED_WORDS + index] = 1

    def is_revoked(self, index: int) -> bool:
        return bool(self._words[index])

    def revoke(self, index: int) -> None:
        """The server does not commit the store after this call."""
        self._words[index] = 1

    def revoke_all(self) -> None:
        """Revokes all stores in flight of this session."""
        self._words[1:SHARED_WORDS] = 1

    def give_back(self, index: int) -> None:
        """The server has answered the store of this word, or is dead."""
        self._words[SHARED_WORDS + index] = 0


class Revocations:
    """Revokes stores of several sessions, for the engine's scheduler. For one thread.

    A store has the same word on all pages. Always true: a word is reused only after `end`, and
    when no session waits for the answer to its store. The constructor revokes all stores in
    flight, and raises OSError or ValueError if a page can't be mapped.
    """

    def __init__(self, places: Sequence[FencePlace]) -> None:
        self._pages = [_found(place) for place in places]
        # Only this object can revoke stores that an earlier scheduler process left in flight.
        self.revoke_all()
        self._ended = list(range(SHARED_WORDS - 1, 0, -1))
        self._free = self._answered()

    def __repr__(self) -> str:
        return (
            f"Revocations({len(self._free)}/{SHARED_WORDS - 1} words free, {len(self._ended)} "
            f"ended, {len(self._pages)} pages)"
        )

    def take(self) -> int:
        """A cleared word for a new store; 0 if all are in use: the store must not be sent,
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
        """Removes and returns the ended words for which no session waits."""
        waiting = {
            index
            for index in self._ended
            if any(page[SHARED_WORDS + index] for page in self._pages)
        }
        answered = [index for index in self._ended if index not in waiting]
        self._ended = list(waiting)
        return answered

    def revoke(self, index: int) -> None:
        """The server does not commit the store after this call."""
        for page in self._pages:
            page[index] = 1

    def revoke_all(self) -> None:
        for page in self._pages:
            page[1:SHARED_WORDS] = 1

    def end(self, index: int) -> None:
        """Revokes the store and frees its word. Must be called when no session will send the
        store again and its uncommitted blocks are not needed."""
        self.revoke(index)
        self._ended.append(index)


def _new_page(owner: object) -> tuple[int, NDArray[np.uint32]]:
    """Descriptor and words; the descriptor is closed with `owner`. Raises OSError if the system
    refuses."""
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

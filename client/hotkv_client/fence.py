"""The fence: a page shared with the server in which an engine takes its blocks back from a store.

The server reads a store's word after the copy and before the commit. So once the word is set, the
engine may overwrite the blocks at once, even if the server hangs: the copy was committed before,
and is right, or never will be. A word is used again only after the server has answered.

`Fence`: its session chooses the words. `SharedFence`: another process of the engine does
(`Revocations`), over the pages of several sessions at once, and can so take blocks back before the
owner of the session hears of it. Such a page holds, beside each word, whether the session still
waits for the server's answer. The owner of a page and the process that chooses write the same words
only to revoke.

A page's descriptor is closed when its `Fence` or `SharedFence` is collected. The words stay mapped
as long as they are referenced.
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
"""Words of a shared fence for stores: 1 to SHARED_WORDS - 1. Word SHARED_WORDS + i is not zero
while a session has sent the store of word i and the server has not answered. The token of
`FencePlace` lies from word TOKEN_WORD on.
"""
TOKEN_WORD = 1000
TOKEN_BYTES = 16


class Fence:
    """Words 1 to FENCE_WORDS - 1, each for one store in flight. Thread-safe."""

    def __init__(self) -> None:
        self.fd, self._words = _new_page(self)
        self._free = list(range(FENCE_WORDS - 1, 0, -1))
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Fence({len(self._free)}/{FENCE_WORDS - 1} words free)"

    def take(self) -> int:
        """A cleared word; 0 if all are in use: such a store can't be revoked."""
        with self._lock:
            if not self._free:
                return 0
            index = self._free.pop()
        self._words[index] = 0
        return index

    def revoke(self, index: int) -> None:
        """From here on the store of this word commits nothing more."""
        self._words[index] = 1

    def revoke_all(self) -> None:
        """The same for all stores under way. A free word is cleared when it is taken."""
        self._words[1:] = 1

    def give_back(self, index: int) -> None:
        """The server has answered, or is dead."""
        if index:
            with self._lock:
                self._free.append(index)


@dataclass(frozen=True, slots=True)
class FencePlace:
    """Place of a shared fence: a descriptor of a process, and the token that must be written there,
    since a process id may be used again."""

    pid: int
    fd: int
    token: bytes


class SharedFence:
    """A session's side of a page whose words another process chooses. Sessions of one process may
    share it. Thread-safe."""

    def __init__(self) -> None:
        self.fd, self._words = _new_page(self)
        token = os.urandom(TOKEN_BYTES)
        self._words[TOKEN_WORD : TOKEN_WORD + TOKEN_BYTES // 4] = np.frombuffer(token, np.uint32)
        self.place = FencePlace(os.getpid(), self.fd, token)

    def __repr__(self) -> str:
        num_used = np.count_nonzero(self._words[SHARED_WORDS : 2 * SHARED_WORDS])
        return f"SharedFence({num_used}/{SHARED_WORDS - 1} words in use)"

    def hold(self, index: int) -> None:
        """The store of this word is about to be sent. Raises ValueError for no word: the store
        could not be revoked."""
        if not 0 < index < SHARED_WORDS:
            raise ValueError(
                f"fence_index is {index}; a store over a shared fence needs a word of it, from 1 "
                f"to {SHARED_WORDS - 1}"
            )
        self._words[SHARED_WORDS + index] = 1

    def is_revoked(self, index: int) -> bool:
        """As the server reads it."""
        return bool(self._words[index])

    def revoke(self, index: int) -> None:
        """From here on the store of this word commits nothing more."""
        self._words[index] = 1

    def revoke_all(self) -> None:
        """The same for all stores under way. A free word is cleared when it is taken."""
        self._words[1:SHARED_WORDS] = 1

    def give_back(self, index: int) -> None:
        """The server has answered, or is dead."""
        if index:
            self._words[SHARED_WORDS + index] = 0


class Revocations:
    """The other side: chooses words and revokes them on all pages. Raises OSError, ValueError if
    a page can't be mapped. One thread.

    What is always true: a word is cleared only when its store has ended here and no session waits
    for the server's answer to it.
    """

    def __init__(self, places: Sequence[FencePlace]) -> None:
        self._pages = [_found(place) for place in places]
        # Of stores whose words another one has chosen, sessions may still wait for the server's
        # answers; nobody else could revoke them now.
        self.revoke_all()
        self._ended = list(range(SHARED_WORDS - 1, 0, -1))
        self._free = self._answered()

    def __repr__(self) -> str:
        return (
            f"Revocations({len(self._free)}/{SHARED_WORDS - 1} words free, {len(self._ended)} "
            f"ended, {len(self._pages)} pages)"
        )

    def take(self) -> int:
        """A cleared word; 0 if all are in use: such a store must not be sent."""
        if not self._free:
            self._free = self._answered()
        if not self._free:
            return 0
        index = self._free.pop()
        for page in self._pages:
            page[index] = 0
        return index

    def _answered(self) -> list[int]:
        """Takes out of the ended words those that no session waits for."""
        waiting = {
            index
            for index in self._ended
            if any(page[SHARED_WORDS + index] for page in self._pages)
        }
        answered = [index for index in self._ended if index not in waiting]
        self._ended = list(waiting)
        return answered

    def revoke(self, index: int) -> None:
        """From here on the store of this word commits nothing more, in any session."""
        for page in self._pages:
            page[index] = 1

    def revoke_all(self) -> None:
        """The same for all stores under way."""
        for page in self._pages:
            page[1:SHARED_WORDS] = 1

    def end(self, index: int) -> None:
        """No session will send the store of this word any more, or needs what it has not yet
        committed."""
        self.revoke(index)
        self._ended.append(index)


def _new_page(owner: object) -> tuple[int, NDArray[np.uint32]]:
    """A descriptor of a zeroed page, open as long as `owner` lives, and its words. Raises
    OSError."""
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

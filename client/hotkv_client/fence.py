"""The fence: a page shared with the server in which an engine takes its blocks back from a store.

The server reads a store's word after the copy and before the commit. So once the word is set, the engine may overwrite the
blocks at once, even where the server hangs: what was copied is either committed already, and right, or never will be. A word
is used again only after the server has answered.
"""

import mmap
import os
import threading

import numpy as np

from hotkv.layout import FENCE_WORDS


class Fence:
    """Words 1 to FENCE_WORDS - 1, each for one store in flight. Thread-safe."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("hotkv-fence", os.MFD_CLOEXEC)
        os.truncate(self.fd, FENCE_WORDS * 4)
        self._words = np.frombuffer(mmap.mmap(self.fd, FENCE_WORDS * 4), np.uint32)
        self._free = list(range(FENCE_WORDS - 1, 0, -1))
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Fence({len(self._free)}/{FENCE_WORDS - 1} words free)"

    def take(self) -> int:
        """A cleared word; 0 where all are in use: such a store can't be revoked."""
        with self._lock:
            if not self._free:
                return 0
            index = self._free.pop()
        self._words[index] = 0
        return index

    def revoke(self, index: int) -> None:
        """From here on the store of this word commits nothing more."""
        self._words[index] = 1

    def give_back(self, index: int) -> None:
        """The server has answered, or is dead."""
        if index:
            with self._lock:
                self._free.append(index)

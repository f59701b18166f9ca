"""The server's arena in this process: memory that a session's link hands out, read-only unless the
server trusts this process's user with all of it (`security.arena_writers`).

Always true: nobody writes through it, also where it could be written; it stays mapped as long as
somebody holds it or a view of its `memory`, even after session and server have ended. A block may
be read only under a lease or in a residency: slots are used again. If a mapping outlives its server
for good, it keeps that server's memory.
"""

import fcntl
import os

import numpy as np
from numpy.typing import NDArray

from hotkv_client.mapping import map_file
from hotkv_client.types import ResidencyOpened
from hotkv_proto.words import GENERATION


class Arena:
    """`memory` uint8 [bytes], a read-only array; `is_writable`: its pages are writable, for CUDA.
    `words` uint64 [n], read-only: see `hotkv_proto.words`; none from a server without residencies.
    `file_id`: (device, inode) of its file.

    A server that takes over the arena of an earlier one has the same `file_id`: memory that was
    registered with a device can stay registered.
    """

    def __init__(
        self, fd: int, num_bytes: int, words_offset_bytes: int = 0, num_words: int = 0
    ) -> None:
        """Maps the file; `fd` stays the caller's. Raises OSError if the system refuses, or the
        file is shorter."""
        status = os.fstat(fd)
        self.file_id = (status.st_dev, status.st_ino)
        end = words_offset_bytes + 8 * num_words
        self.is_writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        mapped = map_file(fd, max(num_bytes, end), self.is_writable)
        self.memory: NDArray[np.uint8] = mapped[:num_bytes]
        self.words: NDArray[np.uint64] = mapped[words_offset_bytes:end].view("<u8")

    def holds(self, opened: ResidencyOpened) -> bool:
        """True if all that a residency has pinned was pinned until now: what was copied out of
        `memory` before this call is what was stored. Never True again once it was False.

        The copy must be complete before the words are read. On x86-64 that is so in program order;
        elsewhere the caller needs an acquire fence between the two.
        """
        return holds(self.words, opened)

    def __repr__(self) -> str:
        return (
            f"Arena({self.memory.size >> 20} MiB at {self.memory.ctypes.data:#x}, file "
            f"{self.file_id})"
        )


def holds(words: NDArray[np.uint64], opened: ResidencyOpened) -> bool:
    """As `Arena.holds`, of any words; False without words."""
    return bool(
        len(words)
        and words[GENERATION] <= opened.generation
        and words[opened.word_index] == opened.word_value
    )

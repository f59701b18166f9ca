"""The server's arena in this process: memory that a session's link hands out, read-only unless the
server trusts this process's user with all of it (`security.arena_writers`).

Always true: nobody writes through it, also where it could be written; it stays mapped as long as
somebody holds it or a view of its `memory`, even after session and server have ended. A block may
be read only under a lease or in a residency: slots are used again. If a mapping outlives its server
for good, it keeps that server's memory.
"""

import ctypes
import fcntl
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from hotkv_client.types import ResidencyOpened
from hotkv_proto.words import GENERATION

# ----------------------------------------------------------------------------------- mapping a file

# Nobody writes through the arrays.
#
# Always true: the address is a multiple of 2 MiB. The files are of huge pages as far as the kernel
# gives them, and it maps those as such only at such addresses, which Python's own mmap does not
# promise. In small pages a cold lookup waits for page tables longer than for the table.


HUGE_PAGE_BYTES = 2 << 20
_MAP_FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)


def map_file(fd: int, num_bytes: int, is_writable: bool = False) -> NDArray[np.uint8]:
    """The first bytes of a file, uint8 [num_bytes], a read-only array; mapped as long as somebody
    holds the array or a view of it. `is_writable`: the pages are writable all the same, which CUDA
    asks of memory that it registers.

    `fd` stays the caller's. Raises OSError if the system refuses, or the file is shorter.
    """
    file_bytes = os.fstat(fd).st_size
    if file_bytes < num_bytes:
        raise OSError(f"the file has {file_bytes} bytes, not {num_bytes}")
    # The file replaces a part of this mapping and is unmapped with it.
    room = mmap.mmap(
        -1, num_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ
    )
    whole = np.frombuffer(room, np.uint8)
    offset = -whole.ctypes.data % HUGE_PAGE_BYTES
    place = whole[offset : offset + num_bytes]
    address = place.ctypes.data
    access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    if (
        num_bytes
        and _libc.mmap(address, num_bytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != address
    ):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return place


# ---------------------------------------------------------------------------------------- the arena


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

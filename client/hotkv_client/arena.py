"""Maps the server's arena into this process.

The server sends its descriptor over the link, read-only unless `security.arena_writers` names this
process's user.

Always true: this process never writes to the arena. It stays mapped as long as the `Arena` or a
view of `Arena.memory` is referenced, even after session and server have ended; until then the
system can't free its memory.

A block may be read only while a lease or a residency pins it, because the server reuses slots.
"""

import ctypes
import fcntl
import mmap
import os
import weakref

import numpy as np
from numpy.typing import NDArray

from hotkv_client.types import ResidencyOpened
from hotkv_proto.words import OLDEST_START

# ----------------------------------------------------------------------------------- mapping a file

# No code writes through the arrays that `map_file` returns.
#
# Always true: a mapping begins at a multiple of 2 MiB. Only there can the kernel map a file with
# huge pages, which Python's own mmap does not promise. With small pages, a cold lookup spends
# more time on page faults than on the block table.


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
    """The first `num_bytes` of a file as a read-only array, uint8, mapped as long as it or a view
    of it is referenced. Raises OSError if the system refuses or the file is shorter.

    fd: may be closed after the call.
    is_writable: maps writable pages, because CUDA registers only these; the array is read-only
        even so.
    """
    file_bytes = os.fstat(fd).st_size
    if file_bytes < num_bytes:
        raise OSError(f"the file has {file_bytes} bytes, not {num_bytes}")
    # Reserves addresses. The file's mapping replaces a part, and both are unmapped together.
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
    """The server's arena, mapped into this process.

    memory: uint8, read-only.
    is_writable: of the mapped pages; CUDA registers only writable ones.
    words: the validity words (`hotkv_proto.words`), uint64, read-only; empty without residencies.
    file_id: (device, inode). As long as it does not change, also over a server's restart, memory
        may stay registered with CUDA.
    """

    def __init__(
        self, fd: int, num_bytes: int, words_offset_bytes: int = 0, num_words: int = 0
    ) -> None:
        """Raises OSError if the system refuses or the file is shorter.

        fd: may be closed after the call.
        words_offset_bytes: in the file.
        """
        status = os.fstat(fd)
        self.file_id = (status.st_dev, status.st_ino)
        end = words_offset_bytes + 8 * num_words
        self.is_writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        mapped = map_file(fd, max(num_bytes, end), self.is_writable)
        self.memory: NDArray[np.uint8] = mapped[:num_bytes]
        self.words: NDArray[np.uint64] = mapped[words_offset_bytes:end].view("<u8")
        self._fd = os.dup(fd)
        weakref.finalize(self, os.close, self._fd)

    def memory_end(self, start: int) -> int:
        """End of the part from `start` on that has memory. The server allocates it from
        beginning to end, and may not have finished. Later bytes must not be touched or
        registered: that would allocate them in the caller's control group.
        """
        return min(os.lseek(self._fd, start, os.SEEK_HOLE), self.memory.size)

    def holds(self, opened: ResidencyOpened) -> bool:
        """Whether all blocks pinned for a residency have stayed pinned until this call, so that the
        bytes copied before it are the stored ones. Once False, it stays False.

        The copy must be finished before this call reads the validity words. On x86-64, program
        order guarantees that; elsewhere an acquire fence is needed in between.
        """
        return holds(self.words, opened)

    def __repr__(self) -> str:
        return (
            f"Arena({self.memory.size >> 20} MiB at {self.memory.ctypes.data:#x}, file "
            f"{self.file_id})"
        )


def holds(words: NDArray[np.uint64], opened: ResidencyOpened) -> bool:
    """False if `words` is empty."""
    return bool(
        len(words)
        and words[OLDEST_START] <= opened.start_number
        and words[opened.word_index] == opened.word_value
    )

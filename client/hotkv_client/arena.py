"""Maps the server's arena into this process.

The server sends the arena's descriptor over the link, the session's connection to the descriptor
socket. The descriptor is read-only unless the setting `security.arena_writers` names this process's
user.

Always true: this process never writes to the arena, even if the mapping is writable. The arena
stays mapped as long as the `Arena` or a view of `Arena.memory` is referenced, even after the
session and the server have ended. As long as the arena is mapped, the system can't free its memory.

A caller may read a block only while a lease or a residency (a request's reserved room in the arena)
pins the block, because the server reuses slots.
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

# Maps files. No code writes through the arrays that `map_file` returns.
#
# Always true: a mapping begins at a multiple of 2 MiB. The kernel can map a file with huge pages
# only at such an address, which Python's own mmap does not promise. With small pages, a cold lookup
# spends more time on page faults than on reading the block table.


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
    """Maps the first `num_bytes` bytes of a file. Returns them as a read-only array, uint8
    [num_bytes].

    The file stays mapped as long as the array or a view of it is referenced. Raises OSError if the
    system refuses or the file is shorter.

    fd: descriptor of the file; the caller may close it after the call.
    is_writable: True maps writable pages, because CUDA registers only writable memory. The array
        is read-only in both cases.
    """
    file_bytes = os.fstat(fd).st_size
    if file_bytes < num_bytes:
        raise OSError(f"the file has {file_bytes} bytes, not {num_bytes}")
    # This anonymous mapping reserves addresses. The file's mapping then replaces a part of it, and
    # both are unmapped together.
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

    memory: a read-only array of the arena's bytes, uint8.
    is_writable: whether the mapped pages are writable; CUDA registers only writable pages.
    words: the validity words (`hotkv_proto.words`), uint64, read-only. `holds` reads these words to
        check that blocks stayed pinned. Empty if the server has no residencies (requests whose KV
        stays in host memory).
    file_id: (device, inode) of the arena's file. A restarted server may continue to use the same
        file. If `file_id` has not changed, memory that is registered with CUDA can stay registered.
    """

    def __init__(
        self, fd: int, num_bytes: int, words_offset_bytes: int = 0, num_words: int = 0
    ) -> None:
        """Maps the file.

        Raises OSError if the system refuses or the file is shorter.

        fd: descriptor of the arena's file; the caller may close it after the call.
        num_bytes: size of the arena.
        words_offset_bytes: offset of the validity words in the file.
        num_words: number of validity words.
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
        """Returns the end of the part of the arena, from the offset `start` on, that has memory
        already. The server allocates the arena's memory from the file's beginning to its end, and
        may not have finished. The caller must not touch or register later bytes: that would
        allocate their memory, at the expense of the caller's own control group."""
        return min(os.lseek(self._fd, start, os.SEEK_HOLE), self.memory.size)

    def holds(self, opened: ResidencyOpened) -> bool:
        """Returns True if all blocks that the server pinned for a residency (a request's reserved
        room) have stayed pinned until this call. Compares the validity words in the arena's file,
        which the server changes when it ends residencies on its own.

        True: the bytes that the caller copied from `memory` before this call are the stored bytes.
        False: the copied bytes may be wrong; all later calls for this residency return False too.

        opened: the residency, as `Session.open_residency` returned it.

        The caller must finish its copy before this call reads the validity words. On x86-64,
        program order guarantees that. On other machines the caller needs an acquire fence between
        copy and call.
        """
        return holds(self.words, opened)

    def __repr__(self) -> str:
        return (
            f"Arena({self.memory.size >> 20} MiB at {self.memory.ctypes.data:#x}, file "
            f"{self.file_id})"
        )


def holds(words: NDArray[np.uint64], opened: ResidencyOpened) -> bool:
    """Returns True if all blocks that the server pinned for a residency (a request's reserved room)
    are still pinned. Returns False if `words` is empty.

    words: the validity words, which are in the arena's file after the arena's bytes, and show which
        residencies are still valid (`hotkv_proto.words`).
    opened: the residency, as `Session.open_residency` returned it.
    """
    return bool(
        len(words)
        and words[OLDEST_START] <= opened.start_number
        and words[opened.word_index] == opened.word_value
    )

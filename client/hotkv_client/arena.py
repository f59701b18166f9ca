"""Maps the server's arena into this process.

The link (the session's connection to the descriptor socket) provides the arena's descriptor. The
descriptor is read-only unless the setting `security.arena_writers` names this process's user.

Always true: this process never writes to the arena, even if the mapping is writable. The arena
stays mapped as long as the object or a view of its `memory` is referenced, even after session and
server have ended; until then its memory stays allocated. The server reuses slots, so a caller may
read a block only while a lease or a residency pins it.
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

# No code writes through the arrays.
#
# Always true: the address is a multiple of 2 MiB. The files consist of huge pages if the kernel
# provides them. The kernel maps them as huge pages only at such addresses, which Python's own mmap
# does not promise. With small pages, a cold lookup spends more time on page faults than on reading
# the block table.


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
    """Maps the first bytes of a file and returns them as a read-only array, uint8 [num_bytes].

    The file stays mapped as long as the array or a view of it is referenced. Raises OSError if the
    system refuses or the file is shorter.

    fd: descriptor of the file; the caller may close it after the call.
    is_writable: True maps writable pages, because CUDA registers only writable memory. The array
        is read-only in both cases.
    """
    file_bytes = os.fstat(fd).st_size
    if file_bytes < num_bytes:
        raise OSError(f"the file has {file_bytes} bytes, not {num_bytes}")
    # The file replaces a part of this mapping and is unmapped together with it.
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

    memory: uint8 [bytes], a read-only array of the arena's bytes.
    is_writable: whether the mapped pages are writable; CUDA registers only writable pages.
    words: uint64 [n], read-only: validity words, by which `holds` checks that blocks stayed pinned
        (`hotkv_proto.words`). Empty if the server has no residencies.
    file_id: (device, inode) of the arena's file. If a restarted server reuses the arena of the
        server before it, the id is the same, and memory that is registered with CUDA can stay
        registered.
    """

    def __init__(
        self, fd: int, num_bytes: int, words_offset_bytes: int = 0, num_words: int = 0
    ) -> None:
        """Maps the file.

        Raises OSError if the system refuses or the file is shorter.

        fd: descriptor of the arena's file; the caller may close it after the call.
        words_offset_bytes: place of the validity words in the file.
        """
        status = os.fstat(fd)
        self.file_id = (status.st_dev, status.st_ino)
        end = words_offset_bytes + 8 * num_words
        self.is_writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        mapped = map_file(fd, max(num_bytes, end), self.is_writable)
        self.memory: NDArray[np.uint8] = mapped[:num_bytes]
        self.words: NDArray[np.uint64] = mapped[words_offset_bytes:end].view("<u8")

    def holds(self, opened: ResidencyOpened) -> bool:
        """Returns True if all blocks that a residency has pinned have stayed pinned until this
        call, according to the validity words that the server writes behind the arena's bytes.

        True: the bytes that the caller copied from `memory` before this call are the bytes that
        were stored. False: the bytes may be other bytes; all later calls for the residency return
        False too.

        The caller's copy must be complete before this call reads the validity words. On x86-64
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
    """Returns True if all blocks that a residency has pinned have stayed pinned until this call,
    according to the validity `words`. Returns False if `words` is empty."""
    return bool(
        len(words)
        and words[GENERATION] <= opened.generation
        and words[opened.word_index] == opened.word_value
    )

"""The server's arena in this process: read-only memory that a session's link hands out.

Always true: nobody writes through it; it stays mapped as long as somebody holds it or a view of its
`memory`, even after session and server have ended. A block may be read only under a lease: slots
are used again. If a mapping outlives its server for good, it keeps that server's memory.
"""

import os

import numpy as np
from numpy.typing import NDArray

from hotkv_client.mapping import map_file


class Arena:
    """`memory` uint8 [bytes], read-only. `file_id`: (device, inode) of its file.

    A server that takes over the arena of an earlier one has the same `file_id`: memory that was
    registered with a device can stay registered.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Maps the file; `fd` stays the caller's. Raises OSError if the system refuses, or the
        file is shorter."""
        status = os.fstat(fd)
        self.file_id = (status.st_dev, status.st_ino)
        self.memory: NDArray[np.uint8] = map_file(fd, num_bytes)

    def __repr__(self) -> str:
        return (
            f"Arena({self.memory.size >> 20} MiB at {self.memory.ctypes.data:#x}, file "
            f"{self.file_id})"
        )

"""Memory for those who read the arena in place: the words behind it (`hotkv_proto.words`), and
marks behind the block table of what they may read.

Always true: words have memory, so that writing one never fails; the marks are in the table's file,
so that they change place together with the entry numbers that they are about. A file of an older
server has neither: its arena is extended, its table has no marks.
"""

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.table import TableGeometry
from hotkv_proto.words import WORD_BYTES, words_offset_bytes

Marks = NDArray[np.uint8]


def map_words(fd: int, arena_bytes: int) -> NDArray[np.uint64]:
    """The words of an arena's file, writable, mapped as long as somebody holds them; added to the
    file if it has none. Raises OSError."""
    start = words_offset_bytes(arena_bytes)
    os.posix_fallocate(fd, start, WORD_BYTES)
    return np.frombuffer(mmap.mmap(fd, WORD_BYTES, offset=start), "<u8")


def _marks_offset_bytes(geometry: TableGeometry) -> int:
    """Where the marks begin in a table's file."""
    return -(-geometry.file_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def table_file_bytes(geometry: TableGeometry) -> int:
    """Bytes of a table's file, marks included."""
    return _marks_offset_bytes(geometry) + geometry.capacity + 1


def marks_of(mapping: NDArray[np.uint8], geometry: TableGeometry) -> Marks:
    """The marks in a mapped table's file, uint8 [capacity + 1] by entry number; all 0 if it has
    none."""
    start, end = _marks_offset_bytes(geometry), table_file_bytes(geometry)
    return mapping[start:end] if len(mapping) >= end else np.zeros(end - start, np.uint8)

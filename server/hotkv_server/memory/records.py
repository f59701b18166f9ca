"""Memory for the records of the block table: from the first on, in pieces. The start does some, the
thread that fills the arena the rest.

Always true: the first `num_entries` records have memory, and the number only grows; the core has no
more entries than that, so nothing is written where memory might be missing, which would end the
process.
"""

import os
from collections.abc import Iterator

from hotkv_proto.table import RECORD_WORDS, TableGeometry

FIRST_ENTRIES = 1 << 21
"""Records that the start prefaults: 144 MiB, enough for an arena of 32 GiB with as many blocks as
there are by default."""
PIECE_ENTRIES = 1 << 20


class RecordsMemory:
    """Records of one table file, whose buckets have memory. `num_entries`: how many entries there
    may be for now."""

    def __init__(self, fd: int, geometry: TableGeometry, num_entries: int) -> None:
        self.num_entries = num_entries
        self._fd = fd
        self._geometry = geometry

    def __repr__(self) -> str:
        return f"RecordsMemory({self.num_entries}/{self._geometry.capacity} entries)"

    @property
    def is_done(self) -> bool:
        """Returns True if all records have memory."""
        return self.num_entries == self._geometry.capacity

    def back(self, num_entries: int) -> None:
        """Prefaults the first so many records, or all there are. Blocks; raises OSError, with
        nothing changed, if memory is short."""
        end = min(num_entries, self._geometry.capacity)
        if end > self.num_entries:
            start_bytes, end_bytes = (
                self._geometry.records_offset_bytes + count * RECORD_WORDS * 4
                for count in (self.num_entries, end + 1)
            )
            os.posix_fallocate(self._fd, start_bytes, end_bytes - start_bytes)
            self.num_entries = end

    def back_rest(self) -> Iterator[int]:
        """Prefaults the rest; yields `num_entries` after each piece. Blocks for a piece at a time;
        raises OSError if memory is short."""
        while not self.is_done:
            self.back(self.num_entries + PIECE_ENTRIES)
            yield self.num_entries

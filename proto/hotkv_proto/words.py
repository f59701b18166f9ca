"""The validity words behind the arena. By these words a reader of the arena checks that the blocks
it read were still pinned for its residency (a request's reserved room).

This module defines the place and the meaning of the words; only the server writes them. They are
64-bit little-endian numbers in whole pages behind the arena's bytes, in the same file:
- Word `OLDEST_START`: a start number is the number of a start of the server; each start has a
  higher number than all earlier starts. The word has the lowest start number whose residencies are
  valid. If a residency was opened under a lower start number, its reader must discard the bytes
  that it has read.
- Words 1 to `MAX_SESSION_WORD`: each session (connection of an engine) that has opened residencies
  has one of these words. The word is odd and does not change as long as the session's residencies
  are valid.
- Word `LATEST_START`: the highest start number issued so far, from which a restarted server
  continues.
"""

from typing import Final

WORD_COUNT: Final = 4096
WORD_BYTES: Final = 8 * WORD_COUNT
OLDEST_START: Final = 0
LATEST_START: Final = WORD_COUNT - 1
MAX_SESSION_WORD: Final = WORD_COUNT - 2
_PAGE_BYTES: Final = 4096


def words_offset_bytes(arena_bytes: int) -> int:
    """Returns the offset of the validity words in the file of an arena of this size."""
    return -(-arena_bytes // _PAGE_BYTES) * _PAGE_BYTES


def file_bytes(arena_bytes: int) -> int:
    """Returns the size of the arena's file, including the validity words."""
    return words_offset_bytes(arena_bytes) + WORD_BYTES

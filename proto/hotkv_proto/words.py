"""The validity words behind the arena: by them a reader checks that the blocks it read were still
pinned for its residency. Only the server writes them.

They are 64-bit little-endian numbers in whole pages behind the arena's bytes, in the same file:
- `OLDEST_START`: lowest start number whose residencies are valid. A reader with a residency of a
  lower one must discard what it has read.
- 1 to `MAX_SESSION_WORD`: one per session that has opened residencies; odd, and unchanged as long
  as these are valid.
- `LATEST_START`: highest start number so far, from which a restarted server continues.
"""

from typing import Final

WORD_COUNT: Final = 4096
WORD_BYTES: Final = 8 * WORD_COUNT
OLDEST_START: Final = 0
LATEST_START: Final = WORD_COUNT - 1
MAX_SESSION_WORD: Final = WORD_COUNT - 2
_PAGE_BYTES: Final = 4096


def words_offset_bytes(arena_bytes: int) -> int:
    return -(-arena_bytes // _PAGE_BYTES) * _PAGE_BYTES


def file_bytes(arena_bytes: int) -> int:
    """Of the arena's file, with the validity words."""
    return words_offset_bytes(arena_bytes) + WORD_BYTES

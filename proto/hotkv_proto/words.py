"""The validity words behind the arena, by which a reader checks that blocks were still pinned for
its residency. Only the server writes them.

64-bit little-endian numbers in whole pages behind the arena's bytes, in the same file:
- `OLDEST_START`: lowest start number whose residencies are valid.
- 1 to `MAX_SESSION_WORD`: per session that has opened residencies; odd, and unchanged while these
  are valid.
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
    """Size of the arena's file, with the validity words."""
    return words_offset_bytes(arena_bytes) + WORD_BYTES

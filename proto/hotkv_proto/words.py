"""The words behind the arena: how a reader of the arena checks that its bytes were still pinned.

Defines their place and meaning; the server is their only writer. They have 64 bits each,
little-endian, and lie in whole pages behind the arena's bytes in the same file. Word `GENERATION`:
readers whose residencies were opened under a lower generation must stop reading. Words 1 to
`MAX_SESSION_WORD`: a word for each session that has opened residencies; odd while they hold. Word
`LATEST`: the highest generation issued so far, for the next server.
"""

from typing import Final

WORD_COUNT: Final = 4096
WORD_BYTES: Final = 8 * WORD_COUNT
GENERATION: Final = 0
LATEST: Final = WORD_COUNT - 1
MAX_SESSION_WORD: Final = WORD_COUNT - 2
_PAGE_BYTES: Final = 4096


def words_offset_bytes(arena_bytes: int) -> int:
    """Returns where the words of an arena of this size begin in its file."""
    return -(-arena_bytes // _PAGE_BYTES) * _PAGE_BYTES


def file_bytes(arena_bytes: int) -> int:
    """Returns the bytes of the arena's file, with the words."""
    return words_offset_bytes(arena_bytes) + WORD_BYTES

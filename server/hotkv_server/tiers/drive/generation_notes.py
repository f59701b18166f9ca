"""Saves `GenerationBook` in a small file for the next server, a copy in each folder with blocks
that outlive the server (the arena's, the disk's).

Always true: the file is replaced as a whole, and is on its disk when `write` returns. It stays
when a folder's blocks are removed. If the copies disagree on a generation, this node's blocks
may be older than a flush, and are flushed as soon as the store answers.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotkv_server.memory.state import read_file, replace_file
from hotkv_server.tiers.book.generations import GenerationBook, GenerationStanding, Record

log = logging.getLogger(__name__)

GENERATIONS_FILE = "generations.json"
FORMAT_VERSION = 2


@dataclass(frozen=True, slots=True)
class NotesFolder:
    """`has_blocks`: an earlier server left blocks in it."""

    path: Path
    has_blocks: bool = False


@dataclass(frozen=True, slots=True)
class _Content:
    """What one copy says. `base`: `Record.local` of key spaces without a record. `records`: by
    fingerprint."""

    base: int
    last: int
    records: Mapping[str, Record]


class GenerationNotes:
    """See the module. Without folders the book ends with the process."""

    def __init__(self, folders: Sequence[NotesFolder] = ()) -> None:
        self._folders = tuple(folders)

    def __repr__(self) -> str:
        return f"GenerationNotes({[str(one.path) for one in self._folders]})"

    def read(self, stores: Sequence[str]) -> GenerationBook:
        """The saved book, or an empty one. Blocking."""
        read = [(one, _read(one.path / GENERATIONS_FILE)) for one in self._folders]
        contents = [content for _, content in read if content is not None]
        # A folder with blocks but no usable file: their flushes are unknown.
        is_complete = all(content is not None or not one.has_blocks for one, content in read)
        names = {name for content in contents for name in content.records}
        records = {name: _merged(name, contents, is_complete=is_complete) for name in names}
        base = max((content.base for content in contents), default=0)
        last = max((content.last for content in contents), default=0)
        # A folder may be new, or its write may have failed. Each copy needs all seal numbers
        # before blocks are written: after a reboot only the disk's is left.
        is_saved = all(content == contents[0] for _, content in read) if contents else True
        return GenerationBook(stores, records, base, last, is_saved=is_saved)

    def write(self, text: str) -> None:
        """Replaces all copies. If a folder fails, tries the others, then raises the first
        OSError. Blocking; any thread, but one call at a time."""
        failed: OSError | None = None
        for one in self._folders:
            try:
                replace_file(one.path / GENERATIONS_FILE, [text], sync=True)
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def discard(self, book: GenerationBook) -> None:
        """Removes all copies, unless the book has a flush for which a store's generation was not
        raised yet. Blocking."""
        if not any(s.is_unraised for one in book.records.values() for s in one.stores.values()):
            for one in self._folders:
                (one.path / GENERATIONS_FILE).unlink(missing_ok=True)


def text_of(book: GenerationBook) -> str:
    key_spaces = {
        name: {
            "local": record.local,
            "stores": {
                store: [standing.generation, standing.is_verified, standing.is_unraised]
                for store, standing in record.stores.items()
            },
        }
        for name, record in book.records.items()
    }
    content = {"base": book.base, "last": book.last, "key_spaces": key_spaces}
    return json.dumps({"format": FORMAT_VERSION, **content})


def _merged(name: str, contents: Sequence[_Content], *, is_complete: bool) -> Record:
    """A key space's record from all usable copies, at least one. If not `is_complete`, the
    blocks belong to no known generation."""
    found = [content.records.get(name) or Record(content.base) for content in contents]
    record = Record(max(one.local for one in found))
    for store in {store for one in found for store in one.stores}:
        standings = [one.stores.get(store, GenerationStanding()) for one in found]
        generations = {one.generation for one in standings}
        is_agreed = len(generations) == 1 and all(one.is_verified for one in standings)
        record.stores[store] = GenerationStanding(
            max(generations), is_complete and is_agreed, any(one.is_unraised for one in standings)
        )
    return record


def _read(path: Path) -> _Content | None:
    """None if the copy is missing or unusable."""
    try:
        content = json.loads(read_file(path))
        if content["format"] != FORMAT_VERSION:
            raise ValueError(f"format {content['format']!r}")
        # Checks and lowers the hexadecimal fingerprint.
        records = {
            bytes.fromhex(name).hex(): _record(one) for name, one in content["key_spaces"].items()
        }
        return _Content(int(content["base"]), int(content["last"]), records)
    except FileNotFoundError:
        return None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        log.error(
            "%s can't be used: flushes that stores were not told of are forgotten, and blocks that "
            "are here are flushed when a store that nodes share is reached: %s %s",
            path,
            type(error).__name__,
            error,
        )
        return None


def _record(said: Mapping[str, Any]) -> Record:
    stores = {
        str(store): GenerationStanding(int(generation), bool(is_verified), bool(is_unraised))
        for store, (generation, is_verified, is_unraised) in said["stores"].items()
    }
    return Record(int(said["local"]), stores)

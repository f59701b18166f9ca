"""Saves the book of generations (`GenerationBook`, the record of flushes) in a small file for the
next server. Each folder with blocks that outlive the server (the arena's, the disk's) has a copy of
the file.

Always true: the file is replaced as a whole, and is on its disk when `write` returns. Removing the
blocks of a folder does not remove the folder's copy. If the copies disagree on the generation
(number that each flush raises) of a key space in a store, the key space's blocks on this node may
be older than a flush. So this node then flushes the key space as soon as the store answers.
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
    """A folder for a copy of the file GENERATIONS_FILE (the saved `GenerationBook`). `has_blocks`:
    True if an earlier server left blocks in the folder."""

    path: Path
    has_blocks: bool = False


@dataclass(frozen=True, slots=True)
class _Content:
    """The content of a copy of the file GENERATIONS_FILE. `GenerationBook` describes the fields."""

    base: int
    last: int
    records: Mapping[str, Record]


class GenerationNotes:
    """Reads and writes the copies of the file GENERATIONS_FILE (the saved `GenerationBook`); see
    the module. Without folders, writes no file, so the `GenerationBook` is lost when the process
    ends."""

    def __init__(self, folders: Sequence[NotesFolder] = ()) -> None:
        self._folders = tuple(folders)

    def __repr__(self) -> str:
        return f"GenerationNotes({[str(one.path) for one in self._folders]})"

    def read(self, stores: Sequence[str]) -> GenerationBook:
        """Returns the `GenerationBook` that an earlier server saved; an empty `GenerationBook` if
        there is no file. Blocks the calling thread. `stores`: names of the shared stores in the
        present settings."""
        read = [(one, _read(one.path / GENERATIONS_FILE)) for one in self._folders]
        contents = [content for _, content in read if content is not None]
        # Incomplete: a folder has blocks but no usable file, so their flushes are unknown.
        is_complete = all(content is not None or not one.has_blocks for one, content in read)
        names = {name for content in contents for name in content.records}
        records = {name: _merged(name, contents, is_complete=is_complete) for name in names}
        base = max((content.base for content in contents), default=0)
        last = max((content.last for content in contents), default=0)
        # A new folder has no copy yet, and a write may have failed in one folder only. Each copy
        # must have all seal numbers (part of the checksums of blocks on the disk) before blocks
        # are written: after a reboot, only the disk's copy is left.
        is_saved = all(content == contents[0] for _, content in read) if contents else True
        return GenerationBook(stores, records, base, last, is_saved=is_saved)

    def write(self, text: str) -> None:
        """Replaces the file GENERATIONS_FILE in each folder. `text`: the new content (`text_of`).
        Blocks the calling thread. Callable from any thread, but only one call at a time. If a
        folder fails, tries the others, then raises the first OSError."""
        failed: OSError | None = None
        for one in self._folders:
            try:
                replace_file(one.path / GENERATIONS_FILE, [text], sync=True)
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def discard(self, book: GenerationBook) -> None:
        """Removes all copies of the file GENERATIONS_FILE, unless a store must still raise a
        generation (a number that each flush raises) for a flush that `book` records. Called at the
        end of a server that leaves no blocks to the next server. Blocks the calling thread."""
        if not any(s.is_unraised for one in book.records.values() for s in one.stores.values()):
            for one in self._folders:
                (one.path / GENERATIONS_FILE).unlink(missing_ok=True)


def text_of(book: GenerationBook) -> str:
    """Returns the content of the file GENERATIONS_FILE for this `GenerationBook`: the text for
    `GenerationNotes.write`."""
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
    """Returns the record of a key space (a model in a configuration), merged from all copies of
    the file GENERATIONS_FILE.

    `name`: fingerprint of the key space.
    `contents`: the contents of the usable copies; at least one.
    `is_complete`: False if a folder has blocks but no usable file. The node's blocks then belong to
        no known generation (number that each flush raises).
    """
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
    """Returns the content of a copy of the file GENERATIONS_FILE; None if the copy is missing or
    unusable."""
    try:
        content = json.loads(read_file(path))
        if content["format"] != FORMAT_VERSION:
            raise ValueError(f"format {content['format']!r}")
        # A fingerprint is hexadecimal, in lower case.
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

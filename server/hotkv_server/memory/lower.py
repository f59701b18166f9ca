"""The records of a tier whose places the core chooses: a block table in a file, what its key spaces
are, and how much was written to it.

Always true: the file of the key spaces is written before the first block of a new one; a start that
is killed has changed nothing, because the new table is another file until `adopt`. No record is
trusted beyond its shape: a block is the one that its seal says.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from hotkv.table import SLOT_ALIGN, BlockTable, TableGeometry
from hotkv_server.memory.arena import lock_file
from hotkv_server.memory.mapping import FileMapping
from hotkv_server.memory.state import (
    ServerState,
    StateError,
    read_state,
    replace_file,
    write_state,
)

LOCK_FILE, STATE_FILE, TABLE_FILE, NEW_TABLE_FILE = "lock", "state.json", "records", "records.new"
WRITTEN_FILE = "written.json"
Written = list[tuple[float, int]]
"""Bytes that were written, each with when they were: seconds since 1970."""
MODE = 0o600


@dataclass(slots=True)
class LowerMemory:
    """The table of one tier, empty until the core has filled it, and `old` of an earlier server
    with its `state`. `why_empty`: why there is none; empty on a fresh folder."""

    folder: Path
    slab_bytes: int
    num_bytes: int
    table: BlockTable
    old: BlockTable | None
    state: ServerState | None
    why_empty: str
    _files: list[FileMapping]
    _lock_fd: int

    @staticmethod
    def open(
        folder: Path, num_bytes: int, slab_bytes: int, capacity: int, *, reset: bool = False
    ) -> "LowerMemory":
        """Makes a new table for at most `num_bytes` of places, in whole slabs, and maps the one
        that is there. Slabs are as large as they were, if that one can be used, else of
        `slab_bytes`. `reset`: drops that one. Raises BusyError if another server has the folder, or
        OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_fd = lock_file(folder / LOCK_FILE)
        files: list[FileMapping] = []
        try:
            if reset:
                for name in (STATE_FILE, TABLE_FILE):
                    (folder / name).unlink(missing_ok=True)
            old, state, why_empty = _left(folder, num_bytes, files)
            slab_bytes = slab_bytes if state is None else state.slab_bytes
            num_bytes = num_bytes // slab_bytes * slab_bytes
            geometry = TableGeometry.for_capacity(capacity, 1, num_bytes)
            (folder / NEW_TABLE_FILE).unlink(missing_ok=True)
            fresh = FileMapping.create(folder / NEW_TABLE_FILE, geometry.file_bytes, MODE)
            files.append(fresh)
        except BaseException:
            for file in files:
                file.close()
            os.close(lock_fd)
            raise
        view, header = fresh.array(), geometry.pack()
        view[: len(header)] = memoryview(header)
        table = BlockTable(view, geometry)
        return LowerMemory(
            folder, slab_bytes, num_bytes, table, old, state, why_empty, files, lock_fd
        )

    def adopt(self, state: ServerState) -> None:
        """Puts the new table in the place of the old one, and its key spaces beside it. Between the
        two there are no key spaces, so that no block is found under another's. Raises OSError."""
        (self.folder / STATE_FILE).unlink(missing_ok=True)
        (self.folder / NEW_TABLE_FILE).replace(self.folder / TABLE_FILE)
        self.save_state(state)
        self.old = self.state = None
        for file in self._files[:-1]:
            file.close()
        del self._files[:-1]

    def save_state(self, state: ServerState) -> None:
        """Writes down what the records mean. Raises OSError."""
        write_state(self.folder / STATE_FILE, state)

    def save_written(self, written: Written) -> None:
        """Writes down how much was written and when. It stays if the tier is made anew: what was
        written has worn the disk. Raises OSError. Blocks."""
        replace_file(self.folder / WRITTEN_FILE, [json.dumps(written)])

    def read_written(self) -> Written:
        """What an earlier server has written; nothing if it has noted nothing. Raises StateError if
        its note can't be used, or OSError."""
        path = self.folder / WRITTEN_FILE
        try:
            found = [(float(at_s), int(size)) for at_s, size in json.loads(path.read_bytes())]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError, OverflowError) as error:
            raise StateError(f"{path.name} is damaged: {error}") from error
        if not all(math.isfinite(at_s) and size >= 0 for at_s, size in found):
            raise StateError(f"{path.name} is damaged: a time or a size that can't be")
        return found

    def close(self) -> None:
        """Lets another server have the folder. The table must not be used any more."""
        os.close(self._lock_fd)


def _left(
    folder: Path, num_bytes: int, files: list[FileMapping]
) -> tuple[BlockTable | None, ServerState | None, str]:
    """Table and key spaces of an earlier server, whose mapping is added to `files`; else why they
    can't be used."""
    path = folder / TABLE_FILE
    if not path.exists() and not (folder / STATE_FILE).exists():
        return None, None, ""
    try:
        state = read_state(folder / STATE_FILE)
        if not 0 < state.slab_bytes <= num_bytes or state.slab_bytes % SLOT_ALIGN:
            raise StateError(
                f"slabs were of {state.slab_bytes} bytes, the disk has {num_bytes} now"
            )
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        mapping = FileMapping(fd, os.fstat(fd).st_size, str(path))
        files.append(mapping)
        return BlockTable.open(mapping.array()), state, ""
    except (FileNotFoundError, ValueError, StateError) as error:
        return None, None, str(error)

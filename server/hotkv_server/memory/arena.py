"""The arena: the file of host memory in which all slots lie, and the block table beside it.

Both are files in one directory on tmpfs, created anew at start and removed at a clean stop. They are complete, mapped and
prefaulted before the server is ready.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from hotkv.table import BlockTable, TableGeometry
from hotkv_server.memory.mapping import HUGE_PAGE_BYTES, FileMapping

ARENA_FILE = "arena"
TABLE_FILE = "table"
HUGE_PAGE_BUDGET_S = 0.5
"""Longest time that the start spends on huge pages before it goes on without."""


@dataclass(slots=True)
class NodeMemory:
    """Arena and table of one server. `arena.huge_bytes` says how much of it lies in huge pages."""

    directory: Path
    arena: FileMapping
    table_file: FileMapping
    table: BlockTable
    _collapsed_bytes: int = 0

    @staticmethod
    def create(directory: Path, arena_bytes: int, capacity: int, epoch: int, mode: int = 0o640, *, prefault: bool = True) -> "NodeMemory":
        """Makes and prefaults both files. Raises OSError, naming what to do, where memory is short."""
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        geometry = TableGeometry.for_capacity(capacity, epoch, arena_bytes)
        for name in (ARENA_FILE, TABLE_FILE):
            (directory / name).unlink(missing_ok=True)
        space = os.statvfs(directory)
        free_bytes = space.f_bavail * space.f_frsize
        if free_bytes < arena_bytes + geometry.file_bytes:
            _remove_if_empty(directory)
            raise OSError(
                f"{directory} has {free_bytes >> 20} MiB free, the arena needs {arena_bytes >> 20} MiB: lower arena.bytes, "
                "or enlarge the file system (Docker: --shm-size; Kubernetes: an emptyDir with medium Memory)"
            )
        arena = FileMapping.create(directory / ARENA_FILE, arena_bytes, mode)
        table_file = FileMapping.create(directory / TABLE_FILE, geometry.file_bytes, mode)
        view = table_file.array()
        view[: len(geometry.pack())] = memoryview(geometry.pack())
        memory = NodeMemory(directory, arena, table_file, BlockTable(view, geometry))
        if prefault:
            memory._prefault()
        return memory

    def _prefault(self) -> None:
        """Brings the arena in: as huge pages while that is quick, then as it comes."""
        self._collapsed_bytes = self.arena.make_huge(0, HUGE_PAGE_BUDGET_S)
        self.arena.populate()

    def collapse_rest(self, pause_s: float = 0.01) -> None:
        """Turns the rest of the arena into huge pages, piece by piece, as far as the kernel goes along. Blocks; for a thread of its own."""
        while (end := self.arena.make_huge(self._collapsed_bytes, pause_s, HUGE_PAGE_BYTES)) > self._collapsed_bytes:
            self._collapsed_bytes = end
            time.sleep(pause_s)

    def open_read_only(self) -> tuple[int, int]:
        """Fresh read-only descriptors of arena and table, to be sent and closed."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self.directory / ARENA_FILE, flags), os.open(self.directory / TABLE_FILE, flags)

    def remove(self) -> None:
        """Removes the files; the memory goes when nobody maps it any more."""
        for name in (ARENA_FILE, TABLE_FILE):
            (self.directory / name).unlink(missing_ok=True)
        _remove_if_empty(self.directory)


def _remove_if_empty(directory: Path) -> None:
    if not any(directory.iterdir()):
        directory.rmdir()

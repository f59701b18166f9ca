"""Fills the arena: prefaults it from its start, in pieces, as huge pages if the kernel provides
them. The first part is filled while the server starts, the rest by a thread.

Always true: the first `filled_bytes` bytes of the arena have memory and retain it, and
`filled_bytes` only grows. A small file beside the arena, the note, records `filled_bytes` for the
next server. Beyond `filled_bytes`, other modules touch only slabs (pieces of the arena) that
`bring_in` has prefaulted. So the server never writes to pages without memory. A piece is not filled
if the machine or the control group would then have less than `RESERVE_BYTES` of free memory,
because the kernel might have to kill a process. In that case filling ends for good, and `problem`
gives the reason.
"""

import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from hotkv_proto import limits
from hotkv_server.memory.mapping import COLLAPSE_BYTES, HUGE_PAGE_BYTES, FileMapping
from hotkv_server.memory.state import read_file

log = logging.getLogger(__name__)

RESERVE_BYTES = 64 << 20
HUGE_PAGE_BUDGET_S = 0.5
"""Longest time, in seconds, to fill one piece with huge pages. If the kernel takes longer or
refuses, the rest of the arena is filled with pages of any size, which `settle` collapses into huge
pages afterwards."""
HUGE_LOOK_S = 0.05
"""Longest time, in seconds, that `fill_for` spends on counting the huge pages of an arena that an
earlier server has filled: enough for some hundred MiB."""
COMING_S = 1.0
"""`Filling.coming_bytes` is the number of bytes of the arena that get memory within this time, in
seconds."""
PAUSE_S = 0.01
NOTE: Final = struct.Struct("<8sqq")
NOTE_MAGIC: Final = b"HOTKVFI1"


def read_note(path: Path, arena: FileMapping) -> int:
    """Reads the note, a small file beside the arena: how many bytes of this arena file an earlier
    server has filled (prefaulted). Returns 0 if the note is missing or belongs to another file."""
    try:
        content = read_file(path, NOTE.size)
    except (OSError, ValueError):
        return 0
    if len(content) != NOTE.size:
        return 0
    magic, inode, filled_bytes = NOTE.unpack(content)
    is_ours = magic == NOTE_MAGIC and inode == os.fstat(arena.fd).st_ino
    return max(0, min(filled_bytes, arena.num_bytes)) if is_ours else 0


class Filling:
    """Prefaults the arena: `fill_for` fills the first part while the server starts, and a thread
    fills the rest. Until `start` is called, only the thread that made this object uses it.

    filled_bytes: number of bytes, from the arena's start, that are known to have memory.
    problem: why filling ended early; an empty text if it did not end early.
    note: path of the file that records `filled_bytes` (`read_note`).
    """

    def __init__(self, arena: FileMapping, note: Path, filled_bytes: int) -> None:
        self.problem = ""
        self._arena = arena
        self._note = note
        self.filled_bytes = filled_bytes
        self._bytes_per_s = 0.0
        self._note_fd = -1
        # Offset in the arena up to which `make_huge` has tried to make huge pages.
        self._huge_end = 0
        self._takes_huge = filled_bytes < arena.num_bytes
        self._turn, self._changed = threading.Lock(), threading.Condition()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return (
            f"Filling({self.filled_bytes >> 20} of {self._arena.num_bytes >> 20} "
            f"MiB{', ' + self.problem if self.problem else ''})"
        )

    @property
    def is_done(self) -> bool:
        """True if all of the arena has memory."""
        return self.filled_bytes == self._arena.num_bytes

    @property
    def coming_bytes(self) -> int:
        """Number of bytes of the arena that will get memory within COMING_S seconds, at the speed
        at which the last piece was filled; 0 when filling has ended."""
        if self.problem:
            return 0
        return int(min(self._arena.num_bytes - self.filled_bytes, self._bytes_per_s * COMING_S))

    def progress(self) -> str:
        """Returns how far the arena is filled, or why filling ended early, as text for people;
        empty once the arena is filled."""
        if self.problem or self.is_done:
            return self.problem
        return (
            f"bringing the arena in: {self.filled_bytes >> 20} of {self._arena.num_bytes >> 20} MiB"
        )

    def fill_for(self, budget_s: float, least_bytes: int = 0) -> None:
        """Fills (prefaults) the arena in pieces, for `budget_s` seconds. Fills at least one piece
        and at least `least_bytes`, even if that takes longer. Blocks the calling thread. Raises
        OSError if memory is short for even one piece."""
        if self.filled_bytes:
            # An earlier server has filled the first `filled_bytes` of the arena. Count the huge
            # pages among them, for HUGE_LOOK_S at most. `settle` counts the others later.
            self._huge_end = self._arena.make_huge(
                0, HUGE_LOOK_S, HUGE_PAGE_BYTES, self.filled_bytes
            )
        deadline_s = time.monotonic() + budget_s
        while not self.is_done and not self.problem:
            try:
                self._fill_next()
            except OSError as error:
                if not self.filled_bytes:
                    raise
                self._end_early(error)
            if time.monotonic() >= deadline_s and self.filled_bytes >= least_bytes:
                break

    def bring_in(self, start: int, num_bytes: int) -> None:
        """Prefaults a part of the arena behind `filled_bytes` in which restored blocks lie. May be
        called only before `start`. Blocks the calling thread. Raises OSError if memory is short."""
        self._arena.populate(start, num_bytes)

    def wait(self, end: int) -> None:
        """Blocks until the first `end` bytes of the arena have memory. If the thread has not been
        started yet, the calling thread fills these bytes itself. Raises OSError if filling ends
        before the bytes have memory."""
        while self._thread is None and self.filled_bytes < end:
            self._fill_next()
        with self._changed:
            self._changed.wait_for(
                lambda: self.filled_bytes >= end or bool(self.problem) or self._stop.is_set()
            )
        if self.filled_bytes < end:
            raise OSError(self.problem or "the server stops")

    def start(
        self, on_filled: Callable[[int, int], None], *, settles: bool, first: Iterable[object] = ()
    ) -> None:
        """Starts the thread, which fills the rest of the arena.

        on_filled: called on the thread after each piece and when filling ends early, with
            `filled_bytes` and `coming_bytes`.
        settles: if True, the thread calls `settle` for the whole arena when it is filled; if False,
            the caller must call `settle`.
        first: iterator whose steps the thread runs before it fills the arena, for example to
            prefault the block table. If a step raises OSError, filling ends.
        """

        def work() -> None:
            try:
                for _ in first:
                    if self._stop.is_set():
                        return
            except OSError as error:
                self._end_early(error)
                on_filled(self.filled_bytes, self.coming_bytes)
            self._fill_rest(on_filled)
            try:
                if settles:
                    self.settle()
            except OSError as error:
                log.warning("arena not settled: %s", error)

        self._thread = threading.Thread(target=work, name="hotkv-fill", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        """Returns False if the thread that fills the arena has died before filling ended."""
        ended = self.is_done or bool(self.problem) or self._stop.is_set()
        return ended or self._thread is None or self._thread.is_alive()

    def close(self) -> None:
        """Stops the thread, once it has filled its present piece of the arena. Blocks until
        then."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._note_fd != -1:
            os.close(self._note_fd)
            self._note_fd = -1

    def settle(
        self, start: int = 0, num_bytes: int | None = None, pause_s: float = PAUSE_S
    ) -> None:
        """Waits until a part of the arena is filled. The part begins at `start` and has
        `num_bytes`; without `num_bytes` it ends at `filled_bytes`. Then fills this process's page
        tables for the part, and collapses the part's pages into huge pages as far as the kernel
        allows. Raises OSError.

        Blocks the calling thread, which must not be the event loop's. Works in pieces with pauses
        of `pause_s`, because while a piece is processed, no other thread of this process can map
        memory.
        """
        end = self.filled_bytes if num_bytes is None else start + num_bytes
        self.wait(end)
        for at in range(start, end, COLLAPSE_BYTES):
            self._arena.populate(at, min(COLLAPSE_BYTES, end - at))
            if self._stop.wait(pause_s):
                return
        at = max(start, self._huge_end)
        while (reached := self._arena.make_huge(at, pause_s, HUGE_PAGE_BYTES, end)) > at:
            self._huge_end = at = reached
            if self._stop.wait(pause_s):
                return

    def _fill_rest(self, on_filled: Callable[[int, int], None]) -> None:
        began_s, began_bytes = time.monotonic(), self.filled_bytes
        while not self.is_done and not self.problem and not self._stop.is_set():
            try:
                self._fill_next()
            except OSError as error:
                self._end_early(error)
            on_filled(self.filled_bytes, self.coming_bytes)
        if self.is_done and began_bytes < self.filled_bytes:
            took_s = time.monotonic() - began_s
            log.info(
                "arena filled bytes=%d huge_bytes=%d took_s=%.1f",
                self.filled_bytes,
                self._arena.huge_bytes,
                took_s,
            )

    def _fill_next(self) -> None:
        """Fills (prefaults) the next piece of the arena. Blocks the calling thread. Raises OSError
        if memory is short."""
        # Hold the lock, because two threads may want to fill the next piece: the thread that
        # `start` has started, and a thread that called `wait` before that and still fills pieces
        # itself.
        with self._turn:
            start = self.filled_bytes
            length, began_s = min(COLLAPSE_BYTES, self._arena.num_bytes - start), time.monotonic()
            if not length:
                return
            available_bytes = limits.available_bytes()
            if available_bytes < length + RESERVE_BYTES:
                raise OSError(f"only {available_bytes >> 20} MiB of memory are free")
            self._bring_in_next(start, length)
            self._bytes_per_s = length / max(1e-6, time.monotonic() - began_s)
            with self._changed:
                self.filled_bytes = start + length
                self._changed.notify_all()
            self._write_note()

    def _bring_in_next(self, start: int, length: int) -> None:
        if self._takes_huge:
            began_s = time.monotonic()
            reached = self._arena.make_huge(
                start, HUGE_PAGE_BUDGET_S, COLLAPSE_BYTES, start + length
            )
            self._takes_huge = reached > start and time.monotonic() - began_s < HUGE_PAGE_BUDGET_S
            self._huge_end = reached
        self._arena.populate(start, length)

    def _end_early(self, error: OSError) -> None:
        with self._changed:
            self.problem = (
                f"the arena has memory up to {self.filled_bytes >> 20} of "
                f"{self._arena.num_bytes >> 20} MiB, no more is free ({error}): "
                "make room (hotkv-server arenas lists what servers left behind) or lower "
                "arena.bytes, then restart"
            )
            self._changed.notify_all()
        log.warning("%s", self.problem)

    def _write_note(self) -> None:
        """Writes the note: how far the arena is filled. The note is one small write to a file in
        memory, so it is complete or unchanged even if the server is killed."""
        if self._note_fd == -1:
            self._note_fd = os.open(
                self._note, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        os.pwrite(
            self._note_fd,
            NOTE.pack(NOTE_MAGIC, os.fstat(self._arena.fd).st_ino, self.filled_bytes),
            0,
        )

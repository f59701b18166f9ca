"""Prefaults the arena from its start, in pieces, as huge pages where the kernel has them; a first
part at the server's start, the rest on a thread.

Always true: the first `filled_bytes` have memory, and only grow, but for `shrink`. The *note*, a
file beside the arena, tells the next server how many. Beyond them, only what `bring_in` has
prefaulted is touched. A piece that would leave less than RESERVE_BYTES free is not filled, because
the kernel might kill a process: filling then ends for good, and `problem` says why.
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
"""For a piece with huge pages. If it takes longer or the kernel refuses, pages of any size fill
the rest, and `settle` collapses them."""
HUGE_LOOK_S = 0.05
"""For counting huge pages that an earlier server filled: enough for some hundred MiB."""
COMING_S = 1.0
"""Period of `Filling.coming_bytes`."""
PAUSE_S = 0.01
NOTE: Final = struct.Struct("<8sqq")
NOTE_MAGIC: Final = b"HOTKVFI1"


def read_note(path: Path, arena: FileMapping) -> int:
    """0 if the note is missing or of another file."""
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
    """Until `start`, only the thread that made this object uses it.

    end_bytes: up to which the arena shall have memory.
    problem: why filling ended early.
    """

    def __init__(
        self, arena: FileMapping, note: Path, filled_bytes: int, end_bytes: int | None = None
    ) -> None:
        self.problem = ""
        self.end_bytes = arena.num_bytes if end_bytes is None else end_bytes
        self._arena = arena
        self._note = note
        self.filled_bytes = filled_bytes
        self._bytes_per_s = 0.0
        self._note_fd = -1
        # Up to which `make_huge` has tried.
        self._huge_end = 0
        self._takes_huge = filled_bytes < self.end_bytes
        self._turn, self._changed = threading.Lock(), threading.Condition()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return (
            f"Filling({self.filled_bytes >> 20} of {self.end_bytes >> 20} "
            f"MiB{', ' + self.problem if self.problem else ''})"
        )

    @property
    def is_done(self) -> bool:
        return self.filled_bytes >= self.end_bytes

    @property
    def coming_bytes(self) -> int:
        """Bytes that get memory within COMING_S, at the last piece's speed; 0 when filling has
        ended."""
        if self.problem:
            return 0
        left_bytes = max(0, self.end_bytes - self.filled_bytes)
        return int(min(left_bytes, self._bytes_per_s * COMING_S))

    def progress(self) -> str:
        """For people; empty once the arena is filled."""
        if self.problem or self.is_done:
            return self.problem
        return (
            f"bringing the arena in: {self.filled_bytes >> 20} of {self.end_bytes >> 20} "
            f"MiB ({self.filled_bytes / self.end_bytes:.0%})"
        )

    def fill_for(self, budget_s: float, least_bytes: int = 0) -> None:
        """Fills at least a piece and `least_bytes`, even beyond `budget_s`. Blocks. Raises
        OSError if memory is short for even one piece."""
        if self.filled_bytes:
            # `settle` counts the rest later.
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
        """Prefaults a part behind `filled_bytes` with restored blocks; only before `start`.
        Blocks. Raises OSError."""
        self._arena.populate(start, num_bytes)

    def wait(self, end: int) -> None:
        """Waits until the first `end` bytes have memory; before `start`, fills them itself.
        Raises OSError if filling ends before."""
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
        """on_filled: called on the thread with `filled_bytes` and `coming_bytes` after each piece
            and at an early end.
        settles: the thread calls `settle` at the end; else the caller must.
        first: steps to run before; filling ends if one raises OSError.
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
        """False if the thread has died before filling ended."""
        ended = self.is_done or bool(self.problem) or self._stop.is_set()
        return ended or self._thread is None or self._thread.is_alive()

    def grow(self, end_bytes: int) -> None:
        """`start` must follow. Blocks."""
        self.halt()
        self.end_bytes, self.problem = end_bytes, ""
        self._takes_huge = True

    def shrink(self, end_bytes: int, kept_bytes: int = 0) -> None:
        """Gives memory behind `end_bytes`, in which no block lies, back to the system; but not of
        the first `kept_bytes`. Blocks. Raises OSError."""
        self.halt()
        had_bytes, kept_bytes = max(self.filled_bytes, self.end_bytes), max(end_bytes, kept_bytes)
        self.end_bytes, self.problem = end_bytes, ""
        self.filled_bytes = min(self.filled_bytes, kept_bytes)
        self._huge_end = min(self._huge_end, kept_bytes)
        self._write_note()
        self._arena.punch(kept_bytes, max(0, had_bytes - kept_bytes))

    def halt(self) -> None:
        """Until the next `start`. Blocks until the present piece is filled."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._thread, self._stop = None, threading.Event()

    def close(self) -> None:
        """Stops the thread, and blocks until its present piece is filled."""
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
        """Waits until a part is filled (without `num_bytes`: up to `filled_bytes`), fills this
        process's page tables for it, and collapses it into huge pages where the kernel allows.
        Blocks, so not on the event loop. Raises OSError. Pauses between pieces, during which no
        other thread can map memory."""
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
        """Blocks. Raises OSError if memory is short."""
        # The thread of `start`, and one that called `wait` before, may both want the next piece.
        with self._turn:
            start = self.filled_bytes
            length, began_s = min(COLLAPSE_BYTES, self.end_bytes - start), time.monotonic()
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
                f"{self.end_bytes >> 20} MiB, no more is free ({error}): "
                "make room (hotkv-server arenas lists what servers left behind) or lower "
                "arena.bytes, then restart"
            )
            self._changed.notify_all()
        log.warning("%s", self.problem)

    def _write_note(self) -> None:
        """One small write in memory: complete or unchanged, even after a kill."""
        if self._note_fd == -1:
            self._note_fd = os.open(
                self._note, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        os.pwrite(
            self._note_fd,
            NOTE.pack(NOTE_MAGIC, os.fstat(self._arena.fd).st_ino, self.filled_bytes),
            0,
        )

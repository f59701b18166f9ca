"""Splits the plans of a job into pieces. A piece has the runs (contiguous byte ranges) that are
submitted to a device at once.

The arena is registered with CUDA in several parts, the registrations. Always true: no run crosses
the border between two registrations. The host memory of a piece is either pinned as a whole or not
at all. The bytes and the number of runs of a piece are bounded.

The runs of all plans are sorted together by their addresses in the arena. So if the layers of a
block lie in several memories of the engine, the block's runs still adjoin in the arena. Runs are
planned in windows. The first window is small, so that the first bytes of a large job need not wait
until its last bytes are planned.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_server.dataplane.cuda.values import (
    MAX_PIECE_RUNS,
    CudaCopySettings,
    Direction,
    Method,
    PinnedArena,
)
from hotkv_server.dataplane.plan import Plan
from hotkv_server.device.runtime import Int64s

Choose = Callable[[int, int], Method]
"""Returns the copy method for a piece, given the bytes of a page, and the bytes of a run
(contiguous byte range) in the arena."""
FIRST_WINDOW_RUNS = 512
"""Number of runs (contiguous byte ranges) that are planned first, as the first window. Their
planning takes 50 us. Each further window is GROWTH times as large, up to MAX_PIECE_RUNS."""
GROWTH = 4
ALIGN_BYTES = 16
"""A range that is contiguous in the arena begins in staging memory at a multiple of this, because a
kernel moves this many bytes at a time."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a job: runs (contiguous byte ranges) that are copied at once.

    `method`: the copy method; None if the host memory is not pinned.
    `device`: addresses of the runs on the device, int64 [runs].
    `host`: addresses of the runs in host memory, int64 [runs].
    `num_bytes`: sizes of the runs, int64 [runs].
    `registration`: for each run, the number of its registration (part of the arena, as registered
        with CUDA), int64 [runs].
    """

    direction: Direction
    method: Method | None
    device: Int64s
    host: Int64s
    num_bytes: Int64s
    registration: Int64s

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())

    @property
    def dst(self) -> Int64s:
        return self.device if self.direction is Direction.LOAD else self.host

    @property
    def src(self) -> Int64s:
        return self.host if self.direction is Direction.LOAD else self.device


@dataclass(frozen=True, slots=True)
class StagedPlan:
    """The layout of a piece in staging memory on the device. A piece is a part of a job; its runs
    are contiguous byte ranges.

    `offsets`: offsets of the piece's runs in staging memory, int64 [runs].

    The copies between staging memory and host memory; each of them covers runs that adjoin in host
    memory:

    `starts`: offsets in staging memory, int64 [copies].
    `hosts`: addresses in host memory, int64 [copies].
    `num_bytes`: sizes, int64 [copies].
    """

    offsets: Int64s
    starts: Int64s
    hosts: Int64s
    num_bytes: Int64s


def pieces(
    plans: Sequence[Plan],
    direction: Direction,
    arena: PinnedArena,
    settings: CudaCopySettings,
    choose: Choose,
) -> Iterator[Piece]:
    """Yields the pieces (parts) of a job. Together the pieces copy each byte of the plans once.
    Whether the host memory of a piece is pinned is determined when the piece is made.

    `plans`: the plans of the job; all have the direction `direction`.
    `arena`: the arena, and how much of it is pinned.
    `settings`: has the bounds of a piece.
    `choose`: returns the method for a piece in pinned memory (see `Choose`).
    """
    for device, host, num_bytes in _windows(plans, direction):
        device, host, num_bytes = _cut(
            device, host, num_bytes, (host - arena.address) % arena.piece_bytes, arena.piece_bytes
        )
        registration = (host - arena.address) // arena.piece_bytes
        pinned = (host >= arena.address) & (host + num_bytes <= arena.address + arena.pinned_bytes)
        whole = slice(None)
        for is_pinned, mine in (
            [(True, whole)] if pinned.all() else [(True, pinned), (False, ~pinned)]
        ):
            if len(host[mine]):
                method = choose(*run_bytes(host[mine], num_bytes[mine])) if is_pinned else None
                yield from _bounded(
                    Piece(
                        direction,
                        method,
                        device[mine],
                        host[mine],
                        num_bytes[mine],
                        registration[mine],
                    ),
                    settings,
                )


def _windows(
    plans: Sequence[Plan], direction: Direction
) -> Iterator[tuple[Int64s, Int64s, Int64s]]:
    """Yields the runs (contiguous byte ranges) of all plans in windows. A window has the same
    fraction of the runs of each plan. It consists of three arrays: the runs' addresses on the
    device, their addresses in host memory, and their sizes. The first window is small, so that
    copying can begin early; later windows are larger. Leaves out empty runs."""
    num_runs, end, size = sum(plan.num_runs for plan in plans), 0, FIRST_WINDOW_RUNS
    while end < num_runs:
        begin, end, size = end, min(end + size, num_runs), min(size * GROWTH, MAX_PIECE_RUNS)
        parts: list[tuple[Int64s, Int64s, Int64s]] = []
        for plan in plans:
            share = plan.share(begin, end, num_runs)
            dst, src = share.dst.address + share.dst_offsets, share.src.address + share.src_offsets
            parts.append(
                (dst, src, share.num_bytes)
                if direction is Direction.LOAD
                else (src, dst, share.num_bytes)
            )
        device, host, num_bytes = (
            parts[0]
            if len(parts) == 1
            else (np.concatenate(column) for column in zip(*parts, strict=True))
        )
        if len(parts) > 1:
            order = np.argsort(host, kind="stable")
            device, host, num_bytes = device[order], host[order], num_bytes[order]
        if not num_bytes.all():
            device, host, num_bytes = (
                column[num_bytes > 0] for column in (device, host, num_bytes)
            )
        if len(host):
            yield device, host, num_bytes


def _cut(
    device: Int64s, host: Int64s, num_bytes: Int64s, phase: Int64s, grain_bytes: int
) -> tuple[Int64s, Int64s, Int64s]:
    """Splits runs (contiguous byte ranges) at multiples of `grain_bytes`. Returns arrays like the
    arguments, with a value for each smaller run.

    `device`, `host`: addresses of the runs on the device, and in host memory.
    `num_bytes`: sizes of the runs.
    `phase`: for each run, the distance in bytes of its first byte from the preceding multiple of
        `grain_bytes`.
    """
    counts = (phase + num_bytes - 1) // grain_bytes + 1
    if not len(counts) or int(counts.max()) == 1:
        return device, host, num_bytes
    run = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.maximum(number * grain_bytes - phase[run], 0)
    ends = np.minimum((number + 1) * grain_bytes - phase[run], num_bytes[run])
    return device[run] + begins, host[run] + begins, ends - begins


def run_bytes(host: Int64s, num_bytes: Int64s) -> tuple[int, int]:
    """Returns the two sizes, in bytes, by which the copy method for runs (contiguous byte ranges)
    is chosen. The first is the size of a page: the upper median of `num_bytes`. The second is the
    mean size of a run in host memory after adjoining runs are merged. The arrays must not be empty.

    `host`: addresses of the runs in host memory.
    `num_bytes`: sizes of the runs.
    """
    num_runs = 1 + int(np.count_nonzero(host[1:] != host[:-1] + num_bytes[:-1]))
    middle = len(num_bytes) // 2
    return int(np.partition(num_bytes, middle)[middle]), int(num_bytes.sum()) // num_runs


def _bounded(piece: Piece, settings: CudaCopySettings) -> Iterator[Piece]:
    """Splits a piece that may be too large. Yields pieces of at most MAX_PIECE_RUNS runs
    (contiguous byte ranges) and `settings.piece_bytes` bytes. If the method is STAGED, the pieces
    must instead fit into the staging memory of a slot (`settings.slot_staging_bytes`)."""
    staged = piece.method is Method.STAGED
    room, extra = (
        (settings.slot_staging_bytes, ALIGN_BYTES) if staged else (settings.piece_bytes, 0)
    )
    device, host, num_bytes = _cut(
        piece.device, piece.host, piece.num_bytes, np.zeros(len(piece.host), np.int64), room - extra
    )
    registration = piece.registration
    if len(host) > len(registration):
        # Some runs were cut into several smaller runs. Give each smaller run the registration (part
        # of the arena that is registered with CUDA) of the run from which it was cut. The order is
        # the same. So that run is the first that ends, counted in bytes, at or after the end of the
        # smaller run.
        registration = registration[
            np.searchsorted(np.cumsum(piece.num_bytes), np.cumsum(num_bytes))
        ]
    ends = np.cumsum(num_bytes + extra)
    at = 0
    while at < len(ends):
        used = int(ends[at - 1]) if at else 0
        end = min(int(np.searchsorted(ends, used + room, side="right")), at + MAX_PIECE_RUNS)
        share = slice(at, end)
        yield Piece(
            piece.direction,
            piece.method,
            device[share],
            host[share],
            num_bytes[share],
            registration[share],
        )
        at = end


def plan_staged(host: Int64s, num_bytes: Int64s, registration: Int64s) -> StagedPlan:
    """Plans the layout of a piece in staging memory. Runs (contiguous byte ranges) that adjoin in
    host memory, in the same registration, also adjoin in staging memory, so that a single copy
    moves them. Alignment adds at most ALIGN_BYTES for each run.

    `host`, `num_bytes`: addresses of the runs in host memory, and their sizes, int64 [runs].
    `registration`: for each run, the number of the registration (part of the arena, as registered
        with CUDA) in which it lies, int64 [runs].
    """
    apart = (host[1:] != host[:-1] + num_bytes[:-1]) | (registration[1:] != registration[:-1])
    begins: NDArray[np.bool_] = np.concatenate(([True], apart))
    firsts = np.flatnonzero(begins)
    lengths = np.add.reduceat(num_bytes, firsts)
    padded = -(-lengths // ALIGN_BYTES) * ALIGN_BYTES
    starts = np.cumsum(padded) - padded
    group = np.cumsum(begins) - 1
    return StagedPlan(starts[group] + host - host[firsts][group], starts, host[firsts], lengths)

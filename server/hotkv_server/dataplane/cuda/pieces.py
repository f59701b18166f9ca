"""Splits the plans of a job into pieces.

Always true: no run crosses the border between two registrations of the arena. The host memory of a
piece is pinned as a whole or not at all. Its bytes and runs are bounded.

Runs of all plans are sorted together by their addresses in the arena, so that a block's runs
adjoin there even if its layers lie in several memories of the engine. They are planned in
windows, the first a small one, so that a large job begins before all of it is planned.
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
"""Method for a piece, given the bytes of a page and of a run in the arena."""
FIRST_WINDOW_RUNS = 512
"""Runs of the first window, planned in 50 us. Each further one is GROWTH times as large, up to
MAX_PIECE_RUNS."""
GROWTH = 4
ALIGN_BYTES = 16
"""A contiguous range begins in staging memory at a multiple of this: a kernel moves so many
bytes at a time."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Runs that are copied at once; arrays are int64 [runs].

    `method`: None if the host memory is not pinned.
    `device`, `host`: addresses.
    `registration`: number of each run's registration.
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
    """A piece's layout in staging memory.

    `offsets`: of its runs there, int64 [runs].

    Copies between staging and host memory, each of runs that adjoin in host memory; int64 [copies]:

    `starts`: offsets in staging memory.
    `hosts`: addresses.
    `num_bytes`: sizes.
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
    """Yields pieces that copy each byte of the plans once. Whether memory is pinned is
    determined when a piece is made. `choose`: for pinned memory; `settings`: bounds of a piece."""
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
    """Yields the runs of all plans, without empty ones, in windows with the same fraction of
    each plan: addresses on the device, in host memory, and sizes."""
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
    """Splits runs at multiples of `grain_bytes`. `phase`: distance of each run's first byte from
    the multiple before it."""
    counts = (phase + num_bytes - 1) // grain_bytes + 1
    if not len(counts) or int(counts.max()) == 1:
        return device, host, num_bytes
    run = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.maximum(number * grain_bytes - phase[run], 0)
    ends = np.minimum((number + 1) * grain_bytes - phase[run], num_bytes[run])
    return device[run] + begins, host[run] + begins, ends - begins


def run_bytes(host: Int64s, num_bytes: Int64s) -> tuple[int, int]:
    """Sizes by which the method is chosen: of a page, the upper median of `num_bytes`; and the
    mean of a run in host memory after merging. The arrays must not be empty."""
    num_runs = 1 + int(np.count_nonzero(host[1:] != host[:-1] + num_bytes[:-1]))
    middle = len(num_bytes) // 2
    return int(np.partition(num_bytes, middle)[middle]), int(num_bytes.sum()) // num_runs


def _bounded(piece: Piece, settings: CudaCopySettings) -> Iterator[Piece]:
    """Splits a piece to at most MAX_PIECE_RUNS runs and `settings.piece_bytes`; for STAGED, to
    what fits into a slot's staging memory."""
    staged = piece.method is Method.STAGED
    room, extra = (
        (settings.slot_staging_bytes, ALIGN_BYTES) if staged else (settings.piece_bytes, 0)
    )
    device, host, num_bytes = _cut(
        piece.device, piece.host, piece.num_bytes, np.zeros(len(piece.host), np.int64), room - extra
    )
    registration = piece.registration
    if len(host) > len(registration):
        # A smaller run has the registration of the run it was cut from: the first that ends,
        # counted in bytes, at or after its end.
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
    """Runs that adjoin in host memory, in one registration, also adjoin in staging memory, so
    that one copy moves them. Alignment adds at most ALIGN_BYTES for each. Arrays are int64
    [runs]."""
    apart = (host[1:] != host[:-1] + num_bytes[:-1]) | (registration[1:] != registration[:-1])
    begins: NDArray[np.bool_] = np.concatenate(([True], apart))
    firsts = np.flatnonzero(begins)
    lengths = np.add.reduceat(num_bytes, firsts)
    padded = -(-lengths // ALIGN_BYTES) * ALIGN_BYTES
    starts = np.cumsum(padded) - padded
    group = np.cumsum(begins) - 1
    return StagedPlan(starts[group] + host - host[firsts][group], starts, host[firsts], lengths)

"""Values of the CUDA copy engine: settings, directions, methods, figures."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

MAX_PIECE_RUNS = 16384
"""Most runs (contiguous byte ranges) of a piece. Bounds the size of the table that a kernel reads,
and the time of planning before the first byte of a job moves."""


class Direction(enum.Enum):
    """Direction of a copy, as the engine sees it: a load writes device memory, a store reads it."""

    LOAD = "load"
    STORE = "store"


class Method(enum.Enum):
    """How a device copies the runs (contiguous byte ranges) of a piece."""

    MEMCPY = "memcpy"
    """One copy for each run (contiguous byte range): best for long runs."""
    BATCH = "batch"
    """All runs (contiguous byte ranges) of a piece in a single call."""
    KERNEL = "kernel"
    """A kernel reads and writes the arena directly."""
    STAGED = "staged"
    """A kernel gathers runs (contiguous byte ranges) into a staging buffer on the device, or
    scatters them from it. Between buffer and arena, a single copy moves each contiguous range of
    the arena."""


class PinnedArena(Protocol):
    """The part of the arena that is registered with CUDA: its first `pinned_bytes` bytes."""

    @property
    def address(self) -> int:
        """Address at which the arena is mapped."""

    @property
    def piece_bytes(self) -> int:
        """Size of each registration; the last may be shorter. A copy must not cross the border
        between two registrations."""

    @property
    def pinned_bytes(self) -> int:
        """Number of registered bytes. Grows from the arena's start in steps of `piece_bytes`, from
        any thread; never shrinks while a copy engine is open."""


@dataclass(frozen=True, slots=True)
class CudaCopySettings:
    """Settings of a device's copy engine.

    method: None lets the calibration choose.
    piece_bytes: size of the pieces into which jobs are split; jobs take turns between pieces.
    depth: pieces of each direction (lane) that are in the device's queue at a time.
    staging_bytes: device memory for staging, for both directions together; 0: no staging.
    calibration_bytes: size of the pinned memory and of the device memory for a measurement at
        start, if no calibration is given; 0 uses a rule of thumb.
    """

    method: Method | None = None
    piece_bytes: int = 32 << 20
    depth: int = 4
    staging_bytes: int = 128 << 20
    calibration_bytes: int = 32 << 20

    def __post_init__(self) -> None:
        if self.piece_bytes < 4096:
            raise ValueError(f"piece_bytes is {self.piece_bytes}; it must be 4096 or more")
        if self.depth < 1:
            raise ValueError(f"depth is {self.depth}; it must be 1 or more")
        if self.staging_bytes and self.slot_staging_bytes < 4096:
            raise ValueError(
                f"staging_bytes is {self.staging_bytes}; it must be 0 or {2 * self.depth * 4096} "
                "and more"
            )

    @property
    def slot_staging_bytes(self) -> int:
        """Staging memory of a piece (part of a job) in the device's queue, in bytes; a multiple of
        256."""
        return min(self.staging_bytes // (2 * self.depth), self.piece_bytes) // 256 * 256


@dataclass(frozen=True, slots=True)
class Moved:
    """Numbers of bytes and pieces (parts of jobs) copied since the start, in a direction and by a
    method.

    method: name of a `Method`, or `pageable` for copies to or from memory that was not pinned yet.
    """

    direction: Direction
    method: str
    num_bytes: int
    num_pieces: int


@dataclass(frozen=True, slots=True)
class CudaCopyFigures:
    """Figures of a device's copy engine. A piece is a part of a job; a job is a transfer.

    num_queued: estimated number of pieces that are not in the device's queue yet.
    num_in_flight: number of pieces in the device's queue.
    num_failed: number of jobs that failed.
    busy_s: for each direction (load, store), the seconds in which the device's queue had pieces of
        that direction.
    problem: why every job fails; empty while the copy engine works.
    """

    device: int
    moved: tuple[Moved, ...]
    num_queued: int
    num_in_flight: int
    num_failed: int
    busy_s: Mapping[Direction, float]
    problem: str

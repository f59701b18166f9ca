"""Values of the CUDA copy engine: settings, directions, methods, figures. A *piece* is the part of
a copy job that is submitted to the device at once; a *run* is a contiguous byte range of a
piece."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

MAX_PIECE_RUNS = 16384
"""Most runs (contiguous byte ranges) of a piece (part of a job). This limits the size of the table
that a kernel reads, and the time to plan a piece."""


class Direction(enum.Enum):
    """Direction of a copy, from the view of the vLLM engine: a load writes device memory, a store
    reads it."""

    LOAD = "load"
    STORE = "store"


class Method(enum.Enum):
    """The method by which a device copies the runs (contiguous byte ranges) of a piece, which is a
    part of a copy job."""

    MEMCPY = "memcpy"
    """One copy call for each run. The best method for long runs."""
    BATCH = "batch"
    """A single copy call for all runs."""
    KERNEL = "kernel"
    """A kernel on the device reads or writes the arena directly."""
    STAGED = "staged"
    """A kernel gathers the runs into a staging buffer on the device, or scatters them from it. A
    copy between the buffer and the arena moves all runs that adjoin in the arena."""


class PinnedArena(Protocol):
    """The part of the arena that is registered with CUDA: its first `pinned_bytes` bytes."""

    @property
    def address(self) -> int:
        """Address at which the arena is mapped."""

    @property
    def piece_bytes(self) -> int:
        """Size of the registrations (parts of the arena that are registered separately); the last
        may be shorter. A copy must not cross the border between two registrations."""

    @property
    def pinned_bytes(self) -> int:
        """Number of bytes, from the start of the arena, that are registered. Any thread may
        increase it, in steps of `piece_bytes`. It never falls while a copy engine is open."""


@dataclass(frozen=True, slots=True)
class CudaCopySettings:
    """Settings of a device's copy engine.

    `method`: the copy method; None: the calibration chooses it.
    `piece_bytes`: largest size of a piece (part of a job). Jobs take turns, a piece each.
    `depth`: largest number of pieces of a direction that are in the device's queue at a time.
    `staging_bytes`: device memory for staging, for both directions together; 0: no staging.
    `calibration_bytes`: size of the scratch memory, on the device and in host memory, for measuring
        the speeds if there is no calibration. 0: no measurement; a rule of thumb chooses methods.
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
        """Staging memory for each piece (part of a job) in the device's queue, in bytes; a multiple
        of 256."""
        return min(self.staging_bytes // (2 * self.depth), self.piece_bytes) // 256 * 256


@dataclass(frozen=True, slots=True)
class Moved:
    """Counts of the bytes and pieces (parts of jobs) that were copied since the start, in one
    direction and by one method.

    `method`: name of a `Method`, or "pageable" for copies to or from host memory that was not
        pinned yet.
    """

    direction: Direction
    method: str
    num_bytes: int
    num_pieces: int


@dataclass(frozen=True, slots=True)
class CudaCopyFigures:
    """Figures of a device's copy engine.

    `device`: number of the device.
    `num_queued`: estimated number of pieces (parts of jobs) that are not in the device's queue yet.
    `num_in_flight`: number of pieces in the device's queue.
    `num_failed`: number of jobs (transfers) that have failed.
    `busy_s`: for each direction, the seconds in which the device's queue had pieces.
    `problem`: why every job fails; empty while the copy engine works.
    """

    device: int
    moved: tuple[Moved, ...]
    num_queued: int
    num_in_flight: int
    num_failed: int
    busy_s: Mapping[Direction, float]
    problem: str

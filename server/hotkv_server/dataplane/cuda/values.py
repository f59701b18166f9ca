"""Values of the CUDA copy engine. A *piece* is the part of a job that is submitted to the device
at once; a *run* is a contiguous byte range of it."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

MAX_PIECE_RUNS = 16384
"""Limits the table that a kernel reads, and the time to plan a piece."""


class Direction(enum.Enum):
    """A load writes device memory, a store reads it."""

    LOAD = "load"
    STORE = "store"


class Method(enum.Enum):
    """How a device copies the runs of a piece."""

    MEMCPY = "memcpy"
    """A call for each run; best for long runs."""
    BATCH = "batch"
    """One call for all runs."""
    KERNEL = "kernel"
    """A kernel reads or writes the arena directly."""
    STAGED = "staged"
    """A kernel gathers runs into a staging buffer on the device, or scatters them from it.
    Between it and the arena, one copy moves all runs that adjoin in the arena."""


WITHOUT_KERNELS = (Method.MEMCPY, Method.BATCH)
"""Without MPS a kernel of the server waits for the end of the engine's time slice, one or two
milliseconds, and the engine's kernels wait while it runs. A measurement on an idle device does not
show it."""


class PinnedArena(Protocol):
    """The arena, of which the first `pinned_bytes` are registered with CUDA."""

    @property
    def address(self) -> int: ...

    @property
    def piece_bytes(self) -> int:
        """Size of a registration; the last may be shorter. A copy must not cross a border."""

    @property
    def pinned_bytes(self) -> int:
        """From the arena's start. Grows by `piece_bytes`, on any thread; never falls while a
        copy engine is open."""


@dataclass(frozen=True, slots=True)
class CudaCopySettings:
    """`method`: None lets the calibration choose among `methods`.
    `piece_bytes`: largest piece. Jobs take turns, a piece each.
    `depth`: most pieces of a direction in flight, that is in the device's queue.
    `staging_bytes`: device memory for both directions; 0: no staging.
    `calibration_bytes`: scratch memory, on the device and on the host, for measuring if there is
        no calibration. 0: a rule of thumb chooses.
    """

    method: Method | None = None
    piece_bytes: int = 32 << 20
    depth: int = 4
    staging_bytes: int = 128 << 20
    calibration_bytes: int = 32 << 20
    methods: tuple[Method, ...] = tuple(Method)

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
    def may_stage(self) -> bool:
        wanted = self.methods if self.method is None else (self.method,)
        return Method.STAGED in wanted and self.slot_staging_bytes > 0

    @property
    def slot_staging_bytes(self) -> int:
        """For each piece in flight; a multiple of 256."""
        return min(self.staging_bytes // (2 * self.depth), self.piece_bytes) // 256 * 256


@dataclass(frozen=True, slots=True)
class Moved:
    """What was copied since the start, in one direction by one method. `method`: of `Method`, or
    "pageable" for host memory that was not pinned yet."""

    direction: Direction
    method: str
    num_bytes: int
    num_pieces: int


@dataclass(frozen=True, slots=True)
class DemotedMethod:
    direction: Direction
    method: Method
    replacement: Method


@dataclass(frozen=True, slots=True)
class FailureFigures:
    """`num_failed`: pieces, by direction and method.
    `num_retried`: jobs that were tried twice.
    """

    demoted: tuple[DemotedMethod, ...]
    num_failed: Mapping[tuple[Direction, Method], int]
    num_retried: int


@dataclass(frozen=True, slots=True)
class CudaCopyFigures:
    """`num_queued`: estimated pieces that are not yet in flight.
    `num_in_flight`: pieces.
    `num_failed`: jobs.
    `busy_s`: time in which pieces were in flight.
    `problem`: why every job fails; else empty.
    """

    device: int
    moved: tuple[Moved, ...]
    num_queued: int
    num_in_flight: int
    num_failed: int
    busy_s: Mapping[Direction, float]
    problem: str
    failures: FailureFigures

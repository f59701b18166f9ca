"""Values of the CUDA copy engine: settings, directions, methods, figures."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

MAX_PIECE_RUNS = 16384
"""Most runs of a piece: bounds the table that a kernel reads, and the planning before a job's first
byte moves."""


class Direction(enum.Enum):
    """As seen from the engine: a load writes device memory, a store reads it."""

    LOAD = "load"
    STORE = "store"


class Method(enum.Enum):
    """How a device copies a piece's runs."""

    MEMCPY = "memcpy"
    """One copy a run: best for long runs."""
    BATCH = "batch"
    """All runs in one call."""
    KERNEL = "kernel"
    """A kernel reads and writes the arena itself."""
    STAGED = "staged"
    """A kernel gathers or scatters on the device; between its staging buffer and the arena go
    copies as long as the arena's runs."""


class PinnedArena(Protocol):
    """The arena, as far as it is registered with CUDA: its first `pinned_bytes` bytes."""

    @property
    def address(self) -> int:
        """Where it is mapped."""

    @property
    def piece_bytes(self) -> int:
        """Size of each registration, the last may be shorter; a copy may not cross from one to the
        next."""

    @property
    def pinned_bytes(self) -> int:
        """Grows from the arena's start in whole pieces, from any thread; never shrinks while a copy
        engine is open."""


@dataclass(frozen=True, slots=True)
class CudaCopySettings:
    """`method`: None for what calibration finds best. `piece_bytes`: size of pieces, between which
    other jobs take their turns. `depth`: pieces of a lane in the device's queue at a time.
    `staging_bytes`: device memory for staging, both lanes together; 0 for none.
    `calibration_bytes`: pinned memory, and as much of the device's, for a measurement at start if
    no calibration is given; 0 goes by a rule of thumb.
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
        """Staging of one piece in flight, a multiple of 256."""
        return min(self.staging_bytes // (2 * self.depth), self.piece_bytes) // 256 * 256


@dataclass(frozen=True, slots=True)
class Moved:
    """Sums since the start. `method`: of `Method`, or `pageable` for copies to or from memory that
    was not pinned yet."""

    direction: Direction
    method: str
    num_bytes: int
    num_pieces: int


@dataclass(frozen=True, slots=True)
class CudaCopyFigures:
    """Figures of one device. `num_queued`: pieces not yet given to the device, by estimate.
    `num_in_flight`: given and not done. `num_failed`: jobs that failed. `busy_s`: seconds in
    which the device had pieces of a direction. `problem`: why the engine takes no more jobs; empty
    while it takes them.
    """

    device: int
    moved: tuple[Moved, ...]
    num_queued: int
    num_in_flight: int
    num_failed: int
    busy_s: Mapping[Direction, float]
    problem: str

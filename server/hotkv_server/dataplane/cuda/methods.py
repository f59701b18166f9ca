"""Submits pieces (parts of jobs) to a CUDA stream, with a function for each copy method. All these
functions return at once. A *run* is a contiguous byte range of a piece.

For each piece in the device's queue there is a slot: an event, and memory that the copy needs. The
slot is in use until the stream has passed the event, which is recorded behind the piece.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hotkv_server.dataplane.cuda.pieces import Piece, plan_staged
from hotkv_server.dataplane.cuda.values import MAX_PIECE_RUNS, CudaCopySettings, Direction, Method
from hotkv_server.dataplane.plan import Region
from hotkv_server.device.runtime import DeviceError, DeviceRuntime, Event, Int64s, Stream

# ------------------------------------------------------------------------------------------ Methods

TABLE_BYTES = 3 * 8 * MAX_PIECE_RUNS


@dataclass(frozen=True, slots=True)
class Slot:
    """The event and the memory that a piece (part of a job) uses while it is in the device's queue.
    (Not a slot of the arena.)

    `event`: is recorded in the stream behind the piece's copies, so it passes when they have ended.
    `table`: address of TABLE_BYTES pinned bytes of host memory, for the addresses and sizes of the
        runs. A kernel reads the table from host memory, because a copy of the table to the device
        would queue behind the copies of the other lane (`engine.Lane`).
    `staging`: address of staging memory on the device; 0 without staging.
    """

    event: Event
    table: int
    staging: int


def memcpy(runtime: DeviceRuntime, stream: Stream, piece: Piece, slot: Slot) -> None:
    """Copies each run (contiguous byte range) of the piece (part of a job) with a separate call.
    Also works for host memory that is not pinned. `slot` (the table and staging memory of a piece,
    which other methods need) is not used."""
    for dst, src, num_bytes in zip(
        piece.dst.tolist(), piece.src.tolist(), piece.num_bytes.tolist(), strict=True
    ):
        runtime.copy(stream, dst, src, num_bytes)


def batch(runtime: DeviceRuntime, stream: Stream, piece: Piece, slot: Slot) -> None:
    """Copies all runs (contiguous byte ranges) of the piece (part of a job) with a single call.
    `slot` (the table and staging memory of a piece, which other methods need) is not used."""
    runtime.copy_batch(stream, piece.dst, piece.src, piece.num_bytes)


def kernel(runtime: DeviceRuntime, stream: Stream, piece: Piece, slot: Slot) -> None:
    """Copies all runs (contiguous byte ranges) of the piece (part of a job) with a kernel, which
    reads or writes host memory directly over the bus. The table of `slot` tells the kernel the
    addresses and sizes."""
    _launch(runtime, stream, slot, piece.dst, piece.src, piece.num_bytes)


def staged(runtime: DeviceRuntime, stream: Stream, piece: Piece, slot: Slot) -> None:
    """Copies the piece by way of the staging memory of `slot`, which is on the device. For a store,
    a kernel first gathers the piece's runs (contiguous byte ranges) in the staging memory. Then
    runs that adjoin in the arena are copied there by one call. For a load, runs that adjoin in the
    arena are copied to the staging memory by one call. Then a kernel scatters them to their
    addresses on the device."""
    plan = plan_staged(piece.host, piece.num_bytes, piece.registration)
    copies = list(
        zip(
            (slot.staging + plan.starts).tolist(),
            plan.hosts.tolist(),
            plan.num_bytes.tolist(),
            strict=True,
        )
    )
    if piece.direction is Direction.STORE:
        _launch(runtime, stream, slot, slot.staging + plan.offsets, piece.device, piece.num_bytes)
        for staging, host, num_bytes in copies:
            runtime.copy(stream, host, staging, num_bytes)
    else:
        for staging, host, num_bytes in copies:
            runtime.copy(stream, staging, host, num_bytes)
        _launch(runtime, stream, slot, piece.device, slot.staging + plan.offsets, piece.num_bytes)


def _launch(
    runtime: DeviceRuntime, stream: Stream, slot: Slot, dst: Int64s, src: Int64s, num_bytes: Int64s
) -> None:
    table = (
        Region(slot.table, 3 * 8 * len(num_bytes), "a table of copies")
        .array()
        .view(np.int64)
        .reshape(3, -1)
    )
    table[0], table[1], table[2] = dst, src, num_bytes
    runtime.copy_kernel(stream, slot.table, len(num_bytes), int(num_bytes.max()))


GIVE: Mapping[Method | None, Callable[[DeviceRuntime, Stream, Piece, Slot], None]] = {
    None: memcpy,
    Method.MEMCPY: memcpy,
    Method.BATCH: batch,
    Method.KERNEL: kernel,
    Method.STAGED: staged,
}
"""Maps each copy method to the function that submits a piece (part of a job) by this method. The
key None has the function for host memory that is not pinned."""


# ---------------------------------------------------------------------------------- Slots of a lane
# A lane executes the copies of one direction, loads or stores. Each piece (part of a job) that is
# in the device's queue uses a slot (not a slot of the arena): an event, a table of the piece's
# addresses in pinned host memory, and staging memory if the device has room for it.
#
# Always true: either all slots of a lane have staging memory, or none of them has it. If a slot
# can't be made, the memory of all slots is freed.

log = logging.getLogger(__name__)


class Slots:
    """The slots of a lane (the copies in one direction). A slot is needed for each piece in the
    device's queue.

    `all`: the slots, used or not: `settings.depth` of them.
    `can_stage`: True if the slots have staging memory.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        device: int,
        settings: CudaCopySettings,
        direction: Direction,
    ) -> None:
        """Allocates the slots: for each piece in the device's queue an event, and memory that its
        copies need. Raises DeviceError."""
        self._runtime = runtime
        self._device = device
        self._direction = direction
        self.can_stage = False
        self.all: list[Slot] = []
        num_staging_bytes = settings.slot_staging_bytes
        try:
            for _ in range(settings.depth):
                event, table = runtime.new_event(device), runtime.allocate_pinned(TABLE_BYTES)
                self.all.append(Slot(event, table, 0))
            if settings.method in (None, Method.STAGED) and num_staging_bytes > 0:
                self._add_staging(num_staging_bytes)
        except DeviceError:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"Slots({len(self.all)}, {'with' if self.can_stage else 'no'} staging)"

    def _add_staging(self, num_bytes: int) -> None:
        """Allocates `num_bytes` of staging memory for each slot, or none at all if the device is
        short of memory."""
        staging: list[int] = []
        try:
            staging.extend(self._runtime.allocate(self._device, num_bytes) for _ in self.all)
        except DeviceError as error:
            if error.is_lost:
                raise
            log.warning(
                "no staging memory device=%d lane=%s error=%s",
                self._device,
                self._direction.value,
                error,
            )
            for address in staging:
                self._runtime.free(self._device, address)
            return
        self.can_stage = True
        self.all = [
            Slot(slot.event, slot.table, address)
            for slot, address in zip(self.all, staging, strict=True)
        ]

    def close(self) -> None:
        """Frees the memory of all slots, which must not be in use. Logs failures."""
        for slot in self.all:
            try:
                if slot.staging:
                    self._runtime.free(self._device, slot.staging)
                self._runtime.free_pinned(slot.table)
            except DeviceError as error:
                log.warning(
                    "not given back device=%d lane=%s error=%s",
                    self._device,
                    self._direction.value,
                    error,
                )

"""Submits pieces to a CUDA stream, with a function for each copy method. All return at once.

Each piece in flight has a slot: an event, and memory that the copy needs. It is in use until the
event, recorded behind the piece, has passed.
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
    """What a piece uses while it is in flight; not a slot of the arena.

    `table`: TABLE_BYTES of pinned host memory for the runs' addresses and sizes. A kernel reads it
        from the host: a copy of it would queue behind those of the other lane.
    `staging`: address on the device; 0 without staging.
    """

    event: Event
    table: int
    staging: int


def memcpy(runtime: DeviceRuntime, stream: Stream, piece: Piece, slot: Slot) -> None:
    """Also works for host memory that is not pinned."""
    for dst, src, num_bytes in zip(
        piece.dst.tolist(), piece.src.tolist(), piece.num_bytes.tolist(), strict=True
    ):
        runtime.copy(stream, dst, src, num_bytes)


def batch(runtime: DeviceRuntime, stream: Stream, piece: Piece, slot: Slot) -> None:
    runtime.copy_batch(stream, piece.dst, piece.src, piece.num_bytes)


def kernel(runtime: DeviceRuntime, stream: Stream, piece: Piece, slot: Slot) -> None:
    """A kernel copies over the bus, by the addresses and sizes in the slot's table."""
    _launch(runtime, stream, slot, piece.dst, piece.src, piece.num_bytes)


def staged(runtime: DeviceRuntime, stream: Stream, piece: Piece, slot: Slot) -> None:
    """Copies by way of staging memory. For a store, a kernel gathers the runs there, then one
    call copies those that adjoin in the arena. For a load, the reverse."""
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
"""What submits a piece, by method; None is for host memory that is not pinned."""


# ---------------------------------------------------------------------------------- Slots of a lane
# Always true: all slots of a lane have staging memory, or none. If one can't be made, all are
# freed.

log = logging.getLogger(__name__)


class Slots:
    """`all`: `settings.depth` of them, used or not."""

    def __init__(
        self,
        runtime: DeviceRuntime,
        device: int,
        settings: CudaCopySettings,
        direction: Direction,
    ) -> None:
        """Raises DeviceError."""
        self._runtime = runtime
        self._device = device
        self._direction = direction
        self.can_stage = False
        self.all: list[Slot] = []
        try:
            for _ in range(settings.depth):
                event, table = runtime.new_event(device), runtime.allocate_pinned(TABLE_BYTES)
                self.all.append(Slot(event, table, 0))
            if settings.may_stage:
                self._add_staging(settings.slot_staging_bytes)
        except DeviceError:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"Slots({len(self.all)}, {'with' if self.can_stage else 'no'} staging)"

    def _add_staging(self, num_bytes: int) -> None:
        """For each slot, or for none if the device is short of memory."""
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
        """No slot may be in use. Logs failures."""
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

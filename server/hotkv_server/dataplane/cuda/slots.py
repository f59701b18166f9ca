"""Slots of a lane: for each piece in flight an event, a pinned table, and staging memory if the
device has it.

Always true: all slots have staging memory or none has; slots that can't be made leave nothing
allocated.
"""

import logging

from hotkv_server.dataplane.cuda.methods import TABLE_BYTES, Slot
from hotkv_server.dataplane.cuda.values import CudaCopySettings, Direction, Method
from hotkv_server.device.runtime import DeviceError, DeviceRuntime

log = logging.getLogger(__name__)


class Slots:
    """See the module. `all`: as many as `settings.depth`."""

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
        """Gives each slot staging memory, if the device can spare it for all."""
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
        """Frees all memory; nothing uses it any more. Failures are logged."""
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

"""The protocol by which the server uses CUDA. `cupy_runtime` implements it,
`tests.doubles.device` simulates it.

Addresses are numbers: CUDA derives the device from them, and registered host memory has the same
address everywhere. Work runs in the order of its stream; only events order different streams.
Methods may be called from any thread, release the GIL while they block, and raise DeviceError.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

HOST = -1
"""In place of a device's number."""


class DeviceError(Exception):
    """A call of CUDA failed.

    `is_lost`: every later call for the device will fail in this process, and its work has stopped
        accessing memory.
    `is_everywhere`: the same holds for all devices.
    """

    def __init__(self, message: str, *, is_lost: bool = False, is_everywhere: bool = False) -> None:
        super().__init__(message)
        self.is_lost = is_lost or is_everywhere
        self.is_everywhere = is_everywhere


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """`number`: index in this process.
    `numa_node`: of the PCIe slot; -1 if unknown.
    """

    number: int
    uuid: bytes
    name: str
    pci_bus_id: str
    numa_node: int


@dataclass(frozen=True, slots=True)
class Extent:
    """An allocation on a device. `device`: negative if unknown."""

    start: int
    num_bytes: int
    device: int


class Priority(enum.IntEnum):
    """Among the streams of a device."""

    LOW = 0
    HIGH = 1


class Stream(Protocol):
    @property
    def device(self) -> int: ...


class Event(Protocol):
    """An event has passed once the device reaches the point of a stream where it was last
    recorded. An event that was never recorded has passed, too."""

    @property
    def device(self) -> int: ...


class DeviceRuntime(Protocol):
    def devices(self) -> Sequence[DeviceInfo]:
        """In the order of their numbers."""

    # Order

    def new_stream(self, device: int, priority: Priority) -> Stream:
        """A stream that does not wait for any other."""

    def new_event(self, device: int) -> Event:
        """Without timing. A thread that waits for it does not spin."""

    def record(self, event: Event, stream: Stream) -> None:
        """Records the event behind all work submitted before."""

    def passed(self, event: Event) -> bool:
        """Does not wait. Raises errors of the work before the event."""

    def synchronize(self, event: Event) -> None:
        """Waits. Raises errors of the work before the event."""

    # Copies. The caller must not change or free either memory before an event recorded behind
    # them has passed.

    def copy(self, stream: Stream, dst: int, src: int, num_bytes: int) -> None:
        """Starts a copy. Waits for it, which is slow, if one address is in unregistered host
        memory."""

    def copy_batch(self, stream: Stream, dst: Int64s, src: Int64s, num_bytes: Int64s) -> None:
        """Starts many copies with one call; they may run in any order. All go between the
        stream's device and registered host memory, or all stay on the device. Arrays are int64
        [copies], contiguous; no size is 0."""

    def copy_kernel(self, stream: Stream, table: int, num_copies: int, max_bytes: int) -> None:
        """Starts many short copies by a kernel. Host addresses must be registered. It moves 16
        bytes at a time where addresses and sizes allow. Without MPS a device runs kernels of one
        process at a time, so an engine's kernels wait for this one, but never for `copy` or
        `copy_batch`.

        `table`: address of int64 [3, num_copies] that the device can read: destinations, sources,
            sizes.
        `max_bytes`: largest of the sizes.
        """

    # Memory

    def allocate(self, device: int, num_bytes: int) -> int:
        """Address of device memory, a multiple of 256."""

    def free(self, device: int, address: int) -> None:
        """Work that uses the memory must have ended. May wait for the device."""

    def allocate_pinned(self, num_bytes: int) -> int:
        """Address of registered host memory, a multiple of 4096."""

    def free_pinned(self, address: int) -> None: ...

    def register(self, address: int, num_bytes: int) -> None:
        """Pins host memory for all devices, in whole pages. A copy must not cross the border
        between two registrations."""

    def unregister(self, address: int) -> None: ...

    # Between processes

    def open_memory(self, device: int, handle: bytes) -> int:
        """Opens an allocation of another process by its 64-byte handle. Opened twice, it has the
        same address and must be closed twice."""

    def extent(self, device: int, address: int) -> Extent:
        """Of the opened allocation that contains `address`; it may begin before what
        `open_memory` returned."""

    def close_memory(self, device: int, address: int) -> None:
        """The last close frees the memory if its owner has freed it or has died."""

    def map_range(self, device: int, backings: Sequence[tuple[int, int]]) -> int:
        """Maps other processes' device memory side by side, for the device's copies. Returns the
        address. Leaves nothing mapped if it raises. The caller may close the descriptors.

        backings: (POSIX descriptor, all bytes of its memory), in the order of addresses.
        """

    def unmap_range(self, device: int, address: int, sizes: Sequence[int]) -> None:
        """Gives back a range that `map_range` returned for backings of these sizes. Copies of it
        must have ended. Does all that it can before it raises."""

    def open_event(self, device: int, handle: bytes) -> Event:
        """Opens an event of another process by its 64-byte handle, to wait for it."""

    def close_event(self, event: Event) -> None:
        """Closes what `open_event` returned."""

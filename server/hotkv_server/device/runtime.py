"""The protocol by which the server uses CUDA: `cupy_runtime` implements it on a machine with GPUs,
`hotkv_server.testing.device` without.

Addresses are numbers: unified addressing tells the device by them, and registered host memory has
one address everywhere. Work that is given to a stream runs later, in the stream's order; only
events order streams among each other. Methods may be called from any thread, give up the GIL if
they block, and raise DeviceError.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

HOST = -1
"""In place of a device's number: memory of the host."""


class DeviceError(Exception):
    """A call failed. `is_lost`: every later call on that device will fail too, for as long as this
    process lives; nothing that was given to its streams touches memory any more.
    """

    def __init__(self, message: str, *, is_lost: bool = False) -> None:
        super().__init__(message)
        self.is_lost = is_lost


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device of this process. `number`: as this process counts them. `numa_node`: of its PCIe
    slot; -1 if not known."""

    number: int
    uuid: bytes
    name: str
    pci_bus_id: str
    numa_node: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Start and size of an allocation on a device. `device`: the device that has the memory;
    negative if not known."""

    start: int
    num_bytes: int
    device: int


class Priority(enum.IntEnum):
    """Of a stream, against others of the device."""

    LOW = 0
    HIGH = 1


class Stream(Protocol):
    """A queue of a device."""

    @property
    def device(self) -> int:
        """Its number."""


class Event(Protocol):
    """A point in a stream, once it is recorded; before, it counts as passed."""

    @property
    def device(self) -> int:
        """The number of its device."""


class DeviceRuntime(Protocol):
    """What the server asks of CUDA."""

    def devices(self) -> Sequence[DeviceInfo]:
        """All devices, by number."""

    # Order

    def new_stream(self, device: int, priority: Priority) -> Stream:
        """A stream that waits for no other."""

    def new_event(self, device: int) -> Event:
        """An event without a time, on which a thread waits without spinning."""

    def record(self, event: Event, stream: Stream) -> None:
        """Puts the event at the end of what the stream was given."""

    def passed(self, event: Event) -> bool:
        """True if the device has come to the event, as last recorded. Does not wait. Raises errors
        of the work before it."""

    def synchronize(self, event: Event) -> None:
        """Waits until the device has come to it. Raises errors of the work before it."""

    # Copies: neither memory may change or be freed before an event after them has passed.

    def copy(self, stream: Stream, dst: int, src: int, num_bytes: int) -> None:
        """One copy between any two addresses. If the host's side is not registered, the call waits
        for the copy, which is slow."""

    def copy_batch(self, stream: Stream, dst: Int64s, src: Int64s, num_bytes: Int64s) -> None:
        """Many copies in one call, int64 [copies] addresses and sizes, in any order among
        themselves. All of them between the device of the stream and registered host memory, or all
        on the device.
        """

    def copy_kernel(self, stream: Stream, table: int, num_copies: int, max_bytes: int) -> None:
        """Many copies by a kernel of the stream's device, for short ones.

        `table`: address of int64 [3, num_copies] (dst, src, bytes) that the device can read.
        `max_bytes`: the largest of the sizes. Host addresses must be registered. It copies 16 bytes
        at a time if addresses and sizes allow it. Without MPS a device runs kernels of one process
        at a time: while this kernel runs, an engine's kernels wait; for the other two ways to copy
        they never wait.
        """

    # Memory

    def allocate(self, device: int, num_bytes: int) -> int:
        """Address of new device memory, a multiple of 256."""

    def free(self, device: int, address: int) -> None:
        """Frees it; may wait for the device. Work that uses it must have ended."""

    def allocate_pinned(self, num_bytes: int) -> int:
        """Address of new host memory that is registered, a multiple of 4096."""

    def free_pinned(self, address: int) -> None:
        """Frees it."""

    def register(self, address: int, num_bytes: int, *, read_only: bool = False) -> None:
        """Pins host memory for all devices; multiples of the page size. A copy may not cross from
        one registration to the next."""

    def unregister(self, address: int) -> None:
        """Undoes `register` of that address."""

    # Between processes

    def open_memory(self, device: int, handle: bytes) -> int:
        """Address of another process's allocation, from its handle of 64 bytes. Opened twice, it
        has one address, and is closed twice."""

    def extent(self, device: int, address: int) -> Extent:
        """Of the opened allocation in which the address lies. It may begin before the address that
        was opened."""

    def close_memory(self, device: int, address: int) -> None:
        """Closes it once. Memory that its process has freed meanwhile, or left by dying, is free
        after that."""

    def open_event(self, device: int, handle: bytes) -> Event:
        """Another process's event, from its handle of 64 bytes."""

    def close_event(self, event: Event) -> None:
        """Closes it."""

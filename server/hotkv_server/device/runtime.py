"""The protocol by which the server uses CUDA. `cupy_runtime` implements it on a machine with GPUs,
`hotkv_server.testing.device` without GPUs.

Addresses are numbers: unified addressing derives the device from them, and registered host memory
has the same address everywhere. Work in a stream runs later, in the stream's order; only events
order streams among each other. Methods may be called from any thread, release the GIL while they
block, and raise DeviceError.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

HOST = -1
"""Stands for host memory in place of a device's number."""


class DeviceError(Exception):
    """Raised if a call failed.

    is_lost: True if every later call on that device will fail too, for the lifetime of this
        process. Work in the device's streams has stopped accessing memory.
    """

    def __init__(self, message: str, *, is_lost: bool = False) -> None:
        super().__init__(message)
        self.is_lost = is_lost


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device that this process can use.

    number: index of the device in this process, by which CUDA's calls name it.
    numa_node: NUMA node of the device's PCIe slot; -1 if unknown.
    """

    number: int
    uuid: bytes
    name: str
    pci_bus_id: str
    numa_node: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Start and size of an allocation on a device.

    device: the device that has the memory; negative if unknown.
    """

    start: int
    num_bytes: int
    device: int


class Priority(enum.IntEnum):
    """Priority of a stream among the streams of its device."""

    LOW = 0
    HIGH = 1


class Stream(Protocol):
    """A queue of a device."""

    @property
    def device(self) -> int:
        """Number of the device."""


class Event(Protocol):
    """A point in a stream, after it is recorded; before that it counts as passed."""

    @property
    def device(self) -> int:
        """Number of the device."""


class DeviceRuntime(Protocol):
    """The functions of CUDA that the server uses."""

    def devices(self) -> Sequence[DeviceInfo]:
        """Returns all devices, by number."""

    # Order

    def new_stream(self, device: int, priority: Priority) -> Stream:
        """Makes a stream that does not wait for any other stream."""

    def new_event(self, device: int) -> Event:
        """Makes an event without timing. A thread waits for it without spinning."""

    def record(self, event: Event, stream: Stream) -> None:
        """Records the event behind all work in the stream."""

    def passed(self, event: Event) -> bool:
        """Returns whether the device has reached the event, as last recorded. Does not wait. Raises
        errors of the work before it."""

    def synchronize(self, event: Event) -> None:
        """Waits until the device has reached the event. Raises errors of the work before it."""

    # Copies: neither memory may change or be freed before an event behind the copy has passed.

    def copy(self, stream: Stream, dst: int, src: int, num_bytes: int) -> None:
        """Copies between any two addresses. If the host's side is not registered, the call waits
        for the copy, which is slow."""

    def copy_batch(self, stream: Stream, dst: Int64s, src: Int64s, num_bytes: Int64s) -> None:
        """Starts many copies in a single call, in any order.

        dst, src, num_bytes: addresses and sizes, int64 [copies]. Either all copies go between the
            stream's device and registered host memory, or all stay on the device.
        """

    def copy_kernel(self, stream: Stream, table: int, num_copies: int, max_bytes: int) -> None:
        """Starts many copies by a kernel of the stream's device; for short copies.

        table: address of int64 [3, num_copies] (dst, src, bytes) that the device can read.
        max_bytes: the largest of the sizes.

        Host addresses must be registered. The kernel copies 16 bytes at a time if addresses and
        sizes allow it. Without MPS a device runs kernels of one process at a time, so an engine's
        kernels wait while this kernel runs. The engine's kernels never wait for the other two ways
        to copy.
        """

    # Memory

    def allocate(self, device: int, num_bytes: int) -> int:
        """Allocates device memory; returns its address, a multiple of 256."""

    def free(self, device: int, address: int) -> None:
        """Frees device memory; may wait for the device. Work that uses the memory must have
        ended."""

    def allocate_pinned(self, num_bytes: int) -> int:
        """Allocates registered host memory; returns its address, a multiple of 4096."""

    def free_pinned(self, address: int) -> None:
        """Frees memory of `allocate_pinned`."""

    def register(self, address: int, num_bytes: int, *, read_only: bool = False) -> None:
        """Pins host memory for all devices. Address and size are multiples of the page size. A copy
        must not cross the border between two registrations."""

    def unregister(self, address: int) -> None:
        """Undoes `register` of that address."""

    # Between processes

    def open_memory(self, device: int, handle: bytes) -> int:
        """Opens another process's allocation by its handle of 64 bytes; returns the allocation's
        address. An allocation that is opened twice has the same address and must be closed
        twice."""

    def extent(self, device: int, address: int) -> Extent:
        """Returns the extent of the opened allocation that contains the address. The extent may
        begin before the address that was opened."""

    def close_memory(self, device: int, address: int) -> None:
        """Closes an opened allocation once. After the last close, the memory is free if the process
        that owns it has freed it or has died."""

    def open_event(self, device: int, handle: bytes) -> Event:
        """Opens another process's event by its handle of 64 bytes."""

    def close_event(self, event: Event) -> None:
        """Closes an opened event."""

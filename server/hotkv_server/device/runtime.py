"""The protocol by which the server uses CUDA (`DeviceRuntime`). `cupy_runtime` implements it on a
machine with GPUs, `hotkv_server.testing.device` simulates it without GPUs.

Addresses are numbers. CUDA derives the device from an address (unified addressing), and registered
host memory has the same address on the host and on all devices. Work that is submitted to a stream
runs later, in the order of the stream. Different streams are ordered only by events. Methods may be
called from any thread, release the GIL while they block, and raise DeviceError.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

HOST = -1
"""Stands for host memory, in place of the number of a device."""


class DeviceError(Exception):
    """A call of CUDA has failed.

    `is_lost`: True if the device is lost: every later call for it will fail, for the lifetime of
        this process. The work in its streams has then stopped accessing memory.
    """

    def __init__(self, message: str, *, is_lost: bool = False) -> None:
        super().__init__(message)
        self.is_lost = is_lost


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device that this process can use.

    `number`: index of the device in this process, with which CUDA's calls name it.
    `numa_node`: NUMA node of the device's PCIe slot; -1 if unknown.
    """

    number: int
    uuid: bytes
    name: str
    pci_bus_id: str
    numa_node: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Address and size of an allocation on a device.

    `device`: number of the device that has the memory; negative if unknown.
    """

    start: int
    num_bytes: int
    device: int


class Priority(enum.IntEnum):
    """Priority of a stream among the streams of its device."""

    LOW = 0
    HIGH = 1


class Stream(Protocol):
    """A queue of a device. Work in it runs in the order in which it was submitted."""

    @property
    def device(self) -> int:
        """Number of the device."""


class Event(Protocol):
    """A marker that can be recorded in a stream. The device has passed the event once it has
    reached the point of the stream at which the event was last recorded. An event that was never
    recorded counts as passed."""

    @property
    def device(self) -> int:
        """Number of the device."""


class DeviceRuntime(Protocol):
    """The functions of CUDA that the server uses."""

    def devices(self) -> Sequence[DeviceInfo]:
        """Returns all devices, in the order of their numbers."""

    # Order

    def new_stream(self, device: int, priority: Priority) -> Stream:
        """Makes a stream (queue) that does not wait for any other stream. `priority`: its priority
        among the streams of the device."""

    def new_event(self, device: int) -> Event:
        """Makes an event without timing. A thread that waits for it does not spin."""

    def record(self, event: Event, stream: Stream) -> None:
        """Records the event in the stream, behind all work that was submitted before."""

    def passed(self, event: Event) -> bool:
        """Returns True if the device has reached the point where the event was last recorded. Does
        not wait. Raises errors of the work before that point."""

    def synchronize(self, event: Event) -> None:
        """Waits until the device has reached the point where the event was last recorded. Raises
        errors of the work before that point."""

    # Copies: the caller must not change or free either memory before the device has passed an event
    # that was recorded behind the copy.

    def copy(self, stream: Stream, dst: int, src: int, num_bytes: int) -> None:
        """Starts a copy from address `src` to address `dst`. If one of them is in unregistered host
        memory, the call waits for the copy, which is then slow."""

    def copy_batch(self, stream: Stream, dst: Int64s, src: Int64s, num_bytes: Int64s) -> None:
        """Starts many copies with a single call. The device may execute them in any order.

        `dst`, `src`: addresses, int64 [copies]. Either all copies go between the stream's device
            and registered host memory, or all stay on the device.
        `num_bytes`: sizes, int64 [copies].
        """

    def copy_kernel(self, stream: Stream, table: int, num_copies: int, max_bytes: int) -> None:
        """Starts many copies with a kernel on the stream's device; meant for short copies.

        `table`: address of an int64 array [3, num_copies] that the device can read; its rows are
            destinations, sources and sizes.
        `max_bytes`: the largest of the sizes.

        Host addresses must be registered. The kernel copies 16 bytes at a time if addresses and
        sizes allow it. Without MPS a device runs kernels of only one process at a time. So the
        kernels of an engine wait while this kernel runs; they never wait for `copy` or
        `copy_batch`.
        """

    # Memory

    def allocate(self, device: int, num_bytes: int) -> int:
        """Allocates device memory. Returns its address, a multiple of 256."""

    def free(self, device: int, address: int) -> None:
        """Frees device memory that `allocate` has returned. Work that uses the memory must have
        ended before. May wait for the device."""

    def allocate_pinned(self, num_bytes: int) -> int:
        """Allocates registered host memory. Returns its address, a multiple of 4096."""

    def free_pinned(self, address: int) -> None:
        """Frees host memory that `allocate_pinned` has returned."""

    def register(self, address: int, num_bytes: int) -> None:
        """Registers (pins) host memory for all devices. Address and size must be multiples of the
        page size. A copy must not cross the border between two registrations."""

    def unregister(self, address: int) -> None:
        """Unregisters the host memory that was registered at `address`."""

    # Between processes

    def open_memory(self, device: int, handle: bytes) -> int:
        """Opens an allocation of another process and returns its address in this process. If an
        allocation is opened twice, it has the same address and must be closed twice. `handle`:
        CUDA's interprocess handle of the allocation, 64 bytes."""

    def extent(self, device: int, address: int) -> Extent:
        """Returns the extent of the opened allocation that contains `address`. The extent may begin
        before the address that `open_memory` has returned."""

    def close_memory(self, device: int, address: int) -> None:
        """Closes an opened allocation once. After the last close, its memory becomes free if the
        owning process has freed it or has died."""

    def open_event(self, device: int, handle: bytes) -> Event:
        """Opens an event of another process, so that this process can wait for it. `handle`: CUDA's
        interprocess handle of the event, 64 bytes."""

    def close_event(self, event: Event) -> None:
        """Closes an event that `open_event` has returned."""

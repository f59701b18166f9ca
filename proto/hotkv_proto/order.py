"""Device order: how the server learns that an engine's device has reached a mark, a point in the
device's queue of work.

A device runs its work later than the host submits it. A store may read pages only after the kernels
that fill them have run. A load may write pages only after the kernels that still read them have
run. So a transfer names a mark, and the server copies only after the device has passed the mark. An
engine offers the kinds of marks that it can make. The server chooses a kind that works between the
two processes.
"""

import enum
from dataclasses import dataclass

EVENT_HANDLE_BYTES = 64
MAX_MARKS = 1024
"""Largest number of events or flag words of a session (connection of an engine's rank). It limits
the marks (points in the device's queue of work) that are in use at the same time."""
HALF_RANGE = 1 << 31


class OrderKind(enum.IntEnum):
    """The way in which the server learns that the device has passed a mark (a point in its queue of
    work); numbered as on the wire."""

    HOST = 1
    """No mark: the engine itself waits for the device before it sends a transfer."""
    EVENTS = 2
    """The engine records CUDA interprocess events. If engine and server run in containers, these
    must share an IPC namespace."""
    FLAGS = 3
    """The device writes words in shared memory from its queue, and the server reads the words."""


@dataclass(frozen=True, slots=True)
class DeviceOrder:
    """The kinds of marks (points in the device's queue of work) that an engine offers: events, flag
    words, or both. Without any of them the kind is HOST.

    device_uuid: UUID of the GPU whose work the marks follow.
    event_handles: CUDA IPC handles of events, 64 bytes each. The engine makes a mark by recording
        one of these events again.
    flags_handle_id: id of the layout's memory handle with `num_flags` little-endian uint32 words,
        which are 0 at first. Its memory is device memory, or a file that the device can write.
    """

    device_uuid: bytes = b""
    event_handles: tuple[bytes, ...] = ()
    flags_handle_id: str = ""
    num_flags: int = 0


NO_ORDER = DeviceOrder()


@dataclass(frozen=True, slots=True)
class DeviceMark:
    """A point in the queue of an engine's device.

    index: with EVENTS, index of the event. The engine records the event before it sends the
        transfer, and does not record the event again until the transfer has ended. With FLAGS,
        index of the flag word.
    value: with FLAGS, the device has passed the mark once `has_reached(word[index], value)`; with
        EVENTS not used.
    """

    index: int
    value: int = 0


def has_reached(word: int, value: int) -> bool:
    """Returns whether a uint32 word has reached `value`. The word counts up, and begins again at 0
    after its largest value.

    Source: the cyclic comparison of CU_STREAM_WAIT_VALUE_GEQ in the CUDA driver API,
    `(int32_t)(*addr - value) >= 0`.
    """
    return (word - value) % (1 << 32) < HALF_RANGE

"""Device order: how the server learns that an engine's device has passed a point in its queue.

A device runs its work later than the host submits it. A store may read pages only after the kernels
that fill them have run. A load may write pages only after the kernels that still read them have
run. So a transfer names a mark, and the server copies only after the device has passed it. An
engine offers the kinds of marks that it can make; the server chooses a kind that works between the
two processes.
"""

import enum
from dataclasses import dataclass

EVENT_HANDLE_BYTES = 64
MAX_MARKS = 1024
"""Most events or words of a session: the marks in use at a time."""
HALF_RANGE = 1 << 31


class OrderKind(enum.IntEnum):
    """How marks are made; numbered as on the wire."""

    HOST = 1
    """The engine waits itself, and sends a transfer after its mark is passed."""
    EVENTS = 2
    """CUDA interprocess events; both containers must share an IPC namespace."""
    FLAGS = 3
    """Words in shared memory; the device's queue writes them."""


@dataclass(frozen=True, slots=True)
class DeviceOrder:
    """The kinds of marks that an engine offers: events, words, or both. An empty value means HOST.

    event_handles: IPC handles of 64 bytes; an event is recorded anew for each mark.
    flags_handle_id: memory handle of the layout with `num_flags` little-endian uint32 words, zero
        at first. It is device memory, or a file that the device can write.
    """

    device_uuid: bytes = b""
    event_handles: tuple[bytes, ...] = ()
    flags_handle_id: str = ""
    num_flags: int = 0


NO_ORDER = DeviceOrder()


@dataclass(frozen=True, slots=True)
class DeviceMark:
    """A point in the device's queue.

    index: EVENTS: the event. It is recorded before the transfer is sent, and not again before the
        transfer's end. FLAGS: the word.
    value: FLAGS: the device has passed the mark when `has_reached(word[index], value)`.
    """

    index: int
    value: int = 0


def has_reached(word: int, value: int) -> bool:
    """Returns whether a uint32 word that counts up and wraps has reached `value`.

    Source: the cyclic comparison of CU_STREAM_WAIT_VALUE_GEQ in the CUDA driver API,
    `(int32_t)(*addr - value) >= 0`.
    """
    return (word - value) % (1 << 32) < HALF_RANGE

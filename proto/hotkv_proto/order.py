"""Device order: how the server learns that an engine's device has passed a point in its queue.

A device works later than it is told to. A store may read pages only when the kernels that fill them
have run; a load may write pages only when the kernels that still read them have run. So a transfer
names a mark, and nothing of it is copied before the device has passed it. An engine offers what it
can; the server takes what works between the two processes.
"""

import enum
from dataclasses import dataclass

EVENT_HANDLE_BYTES = 64
MAX_MARKS = 1024
"""Most events or words of a session: marks that are in use at a time."""
HALF_RANGE = 1 << 31


class OrderKind(enum.IntEnum):
    """How marks are made. Values are those of the wire."""

    HOST = 1
    """The engine waits by itself and sends a transfer when its mark is passed."""
    EVENTS = 2
    """CUDA interprocess events; the two containers must share an IPC namespace."""
    FLAGS = 3
    """Words in shared memory that the device's queue writes."""


@dataclass(frozen=True, slots=True)
class DeviceOrder:
    """What an engine offers: events, words, both, or (empty) nothing, which means HOST.

    `event_handles`: IPC handles of 64 bytes, recorded anew for each mark. `flags_handle_id`: memory
    handle of the layout with `num_flags` little-endian uint32 words, zero at first: device memory,
    or a file that the device can write.
    """

    device_uuid: bytes = b""
    event_handles: tuple[bytes, ...] = ()
    flags_handle_id: str = ""
    num_flags: int = 0


NO_ORDER = DeviceOrder()


@dataclass(frozen=True, slots=True)
class DeviceMark:
    """A point in the device's queue. EVENTS: `index` is that of the event, recorded before the
    transfer was sent, and not again before its end. FLAGS: the device has passed the mark when
    `has_reached(word[index], value)`.
    """

    index: int
    value: int = 0


def has_reached(word: int, value: int) -> bool:
    """Whether a uint32 word that counts up, and wraps, is at `value` or beyond.

    Source: the cyclic comparison of CU_STREAM_WAIT_VALUE_GEQ in the CUDA driver API,
    `(int32_t)(*addr - value) >= 0`.
    """
    return (word - value) % (1 << 32) < HALF_RANGE

"""How the server learns that an engine's device has passed a mark.

A device works later than the host submits. A store may read pages only after the kernels that
fill them, a load write pages only after those that still read them. The engine offers kinds of
marks; the server chooses one that works between the processes.
"""

import enum
from dataclasses import dataclass

EVENT_HANDLE_BYTES = 64
MAX_MARKS = 1024
"""Events or flag words of a session."""
HALF_RANGE = 1 << 31


class OrderKind(enum.IntEnum):
    """How a mark is tested; numbered as on the wire."""

    HOST = 1
    """The engine waits for the device before it sends a transfer."""
    EVENTS = 2
    """CUDA interprocess events. Engine and server in containers must share an IPC namespace."""
    FLAGS = 3
    """Words in shared memory, written by the device from its queue."""


@dataclass(frozen=True, slots=True)
class DeviceOrder:
    """Events, flag words, or both; none: HOST.

    event_handles: CUDA IPC handles, 64 bytes each, recorded again for each mark.
    flags_handle_id: the layout's handle with `num_flags` little-endian uint32 words, 0 at first,
        on the device or in a file that it can write.
    """

    device_uuid: bytes = b""
    event_handles: tuple[bytes, ...] = ()
    flags_handle_id: str = ""
    num_flags: int = 0


NO_ORDER = DeviceOrder()


@dataclass(frozen=True, slots=True)
class DeviceMark:
    """A mark as transfers name it.

    index: of the flag word, or of the event, which is not recorded again until the transfer has
        ended.
    value: with FLAGS, passed once `has_reached(word[index], value)`.
    """

    index: int
    value: int = 0


def has_reached(word: int, value: int) -> bool:
    """Compares with a uint32 word that counts up cyclically.

    Source: CU_STREAM_WAIT_VALUE_GEQ in the CUDA driver API, `(int32_t)(*addr - value) >= 0`.
    """
    return (word - value) % (1 << 32) < HALF_RANGE

"""Finds out whether an engine's device has passed a mark (`hotkv_proto.order`).

Always true: no stream of this server waits for a mark. A device runs many operations of this
process (closing memory, loading kernels) only after the work of all its streams: a stream that
waited for a stuck engine would block every other session. The server polls instead: CUDA events,
or words of a file that the engine's device counts up. A mark that is never reached delays only
its own transfer. Polling never writes to the engine's memory, and enters the driver never on the
event loop.
"""

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hotkv_proto.errors import invalid
from hotkv_proto.layout import Layout
from hotkv_proto.order import (
    EVENT_HANDLE_BYTES,
    MAX_MARKS,
    DeviceMark,
    DeviceOrder,
    OrderKind,
    has_reached,
)
from hotkv_server.dataplane.plan import Region
from hotkv_server.device.devices import Devices
from hotkv_server.device.runtime import HOST, DeviceError, DeviceRuntime, Event
from hotkv_server.memory.mapping import FileMapping

log = logging.getLogger(__name__)

WORD_BYTES = 4


class MarkReader(Protocol):
    """kind: EVENTS for CUDA events, FLAGS for words.
    num_marks: events or words; a mark names one by its index.
    device: on whose thread `has_passed` calls the driver; HOST if it does not.
    """

    kind: OrderKind
    num_marks: int
    device: int

    def has_passed(self, mark: DeviceMark) -> bool:
        """Does not wait. Raises DeviceError if the mark can't be read."""

    def close(self) -> None:
        """Later calls of `has_passed` raise DeviceError."""


class EventMarks:
    """Marks that are CUDA events of the engine's process."""

    kind = OrderKind.EVENTS

    def __init__(self, runtime: DeviceRuntime, device: int, handles: Sequence[bytes]) -> None:
        """Raises DeviceError, and leaves no event open, if one can't be opened.

        handles: CUDA's IPC handles.
        """
        self.num_marks = len(handles)
        self.device = device
        self._runtime = runtime
        self._lock = threading.Lock()
        self._events: list[Event] = []
        try:
            for handle in handles:
                self._events.append(runtime.open_event(device, handle))
        except BaseException:
            self.close()
            raise

    def has_passed(self, mark: DeviceMark) -> bool:
        with self._lock:
            if not self._events:
                raise DeviceError("the session's events are closed")
            return self._runtime.passed(self._events[mark.index])

    def close(self) -> None:
        with self._lock:
            for event in self._events:
                try:
                    self._runtime.close_event(event)
                except DeviceError as error:
                    log.warning("event not closed: %s", error)
            self._events.clear()


class FileWords:
    """Marks that are 32-bit words of a mapped file, passed once a word has reached the mark's
    value. Each read checks the file for truncation."""

    kind = OrderKind.FLAGS
    device = HOST

    def __init__(self, mapping: FileMapping, region: Region, num_words: int) -> None:
        self.num_marks = num_words
        self._mapping = mapping
        self._address = region.address
        self._lock = threading.Lock()
        self._open = True

    def has_passed(self, mark: DeviceMark) -> bool:
        with self._lock:
            if not self._open:
                raise DeviceError("the session's words are closed")
            word = ctypes.c_uint32.from_address(self._address + mark.index * WORD_BYTES).value
            # After the read: a page that a client cut off reads as zeros.
            if not self._mapping.is_whole():
                raise DeviceError("the file of the session's words has been truncated")
            return has_reached(word, mark.value)

    def close(self) -> None:
        with self._lock:
            self._open = False


@dataclass(frozen=True, slots=True)
class SessionOrder:
    """marks: None for the kind HOST: the engine sends a transfer only after its mark was passed.
    message: why offered marks could not be opened; empty if all could.
    """

    marks: MarkReader | None = None
    message: str = ""

    @property
    def kind(self) -> OrderKind:
        return OrderKind.HOST if self.marks is None else self.marks.kind

    def gate(self, mark: DeviceMark, on_released: Callable[[], None]) -> "MarkGate":
        """Raises INVALID_FIELD if the session has no such mark.

        on_released: called from any thread when the transfer is no longer delayed.
        """
        if self.marks is None:
            raise invalid(
                "after: this session has no device order (HOST); send the transfer when its "
                "mark has passed"
            )
        if not 0 <= mark.index < self.marks.num_marks:
            raise invalid(
                f"after.index is {mark.index}; this session has {self.marks.num_marks} marks, "
                "counted from 0"
            )
        if not 0 <= mark.value < 1 << 32:
            raise invalid(f"after.value is {mark.value}; it must be a number of 32 bits")
        return MarkGate(self.marks, mark, on_released)

    def close(self) -> None:
        """Blocks."""
        if self.marks is not None:
            self.marks.close()


class MarkGate:
    """Delays a transfer: a copy engine calls `passed` until it returns True.

    on_released: called from any thread when the copy engine stops calling `passed`.
    """

    def __init__(
        self, marks: MarkReader, mark: DeviceMark, on_released: Callable[[], None]
    ) -> None:
        self._marks = marks
        self._mark = mark
        self._on_released = on_released

    def __repr__(self) -> str:
        return f"MarkGate({self._marks.kind.name}, {self._mark})"

    @property
    def device(self) -> int:
        return self._marks.device

    def passed(self) -> bool:
        return self._marks.has_passed(self._mark)

    def release(self) -> None:
        self._on_released()


def check_order(offer: DeviceOrder, layout: Layout) -> None:
    """Raises ValueError, which names the field, if an engine's offer of marks is not valid.
    Words must lie in one of the layout's memory handles."""
    if offer.device_uuid and len(offer.device_uuid) != 16:
        raise ValueError(f"device_uuid has {len(offer.device_uuid)} bytes; it must have 16")
    if len(offer.event_handles) > MAX_MARKS:
        raise ValueError(
            f"event_handles has {len(offer.event_handles)} entries; at most {MAX_MARKS} are "
            "supported"
        )
    if offer.event_handles and not offer.device_uuid:
        raise ValueError("device_uuid is empty; events need it")
    for index, handle in enumerate(offer.event_handles):
        if len(handle) != EVENT_HANDLE_BYTES:
            raise ValueError(
                f"event_handles[{index}] has {len(handle)} bytes; it must have {EVENT_HANDLE_BYTES}"
            )
    if not offer.flags_handle_id:
        if offer.num_flags:
            raise ValueError(f"flag_count is {offer.num_flags} without flags_handle_id")
        return
    if not 0 < offer.num_flags <= MAX_MARKS:
        raise ValueError(f"flag_count is {offer.num_flags}; allowed are 1 to {MAX_MARKS}")
    memory = next(
        (handle for handle in layout.handles if handle.handle_id == offer.flags_handle_id), None
    )
    if memory is None:
        raise ValueError(
            f"flags_handle_id is {offer.flags_handle_id!r}, which is not among the layout's handles"
        )
    if memory.base_offset_bytes % WORD_BYTES or offer.num_flags * WORD_BYTES > memory.num_bytes:
        raise ValueError(
            f"flags_handle_id: {memory.handle_id!r} has {memory.num_bytes} bytes from "
            f"{memory.base_offset_bytes} on; {offer.num_flags} "
            f"words need {offer.num_flags * WORD_BYTES}, at a multiple of {WORD_BYTES}"
        )


def open_order(
    offer: DeviceOrder,
    devices: Devices,
    mappings: dict[str, FileMapping],
    regions: dict[str, Region],
) -> SessionOrder:
    """Opens offered marks: words if possible, else CUDA events, else none; `message` says why.
    Blocks.

    Words are preferred because an engine may die: only its device's queue writes a word, but CUDA
    does not document the state of an event whose process has died.

    mappings, regions: by handle id.
    """
    reasons: list[str] = []
    if offer.flags_handle_id:
        mapping = mappings.get(offer.flags_handle_id)
        if mapping is not None:
            return SessionOrder(FileWords(mapping, regions[offer.flags_handle_id], offer.num_flags))
        reasons.append("words lie on a device; offer words in a file that the device writes")
    if offer.event_handles:
        try:
            marks = EventMarks(
                devices.runtime, devices.find(offer.device_uuid), offer.event_handles
            )
            return SessionOrder(marks, "; ".join(reasons))
        except (DeviceError, ValueError) as error:
            reasons.append(
                f"events don't work here ({error}); containers need one PID and IPC namespace "
                "(hostPID, hostIPC)"
            )
    return SessionOrder(None, "; ".join(reasons))

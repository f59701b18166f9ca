"""Makes marks on the engine's device. Each transfer names one, and copies only after the device has
passed it (`hotkv_proto.order`), so that no store reads blocks that are not computed yet.

The server tests a mark by an interprocess CUDA event, or by a *word* in a file that the device
writes. If it can't, or all are in use, this process tests the mark before it sends the transfer.

Always true:

- A mark is made on the CUDA stream that is current when vLLM calls the connector: behind all work
  that vLLM queued before.
- An event is recorded again only after every transfer that names it has ended.
- Each mark increases its word by 1 (modulo 2^32), and a word belongs to one stream.
- No method that runs in a step waits for the device.

Words are written by torch's `fill_`: cuStreamWriteValue32 would need a binding to the CUDA
driver.
"""

import contextlib
import mmap
import os
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from hotkv_client.types import After
from hotkv_proto.layout import MemoryHandle
from hotkv_proto.order import NO_ORDER, DeviceMark, OrderKind
from hotkv_vllm import link
from hotkv_vllm.compat import Unsupported
from hotkv_vllm.worker.layout import ExportedMemory, cuda_device_uuid

logger = link.logger

NUM_EVENTS = 64
"""A mark holds one until its transfers have ended. A step makes at most two marks."""
NUM_WORDS = 4
"""One per CUDA stream with marks. vLLM 0.32 calls the connector on one stream."""
WORDS_HANDLE = "hotkv-order"
PAGE_BYTES = mmap.PAGESIZE
REGISTER_MAPPED = 1 | 2
"""cudaHostRegisterPortable and cudaHostRegisterMapped."""


class MarkEvent(Protocol):
    def query(self) -> bool: ...
    def ipc_handle(self) -> bytes: ...


class Words(Protocol):
    """uint32 in a file, zero at first.

    handle, fds: for the server; the caller owns the descriptors, new ones each time.
    """

    @property
    def handle(self) -> MemoryHandle: ...
    @property
    def fds(self) -> Mapping[str, int]: ...
    def write(self, index: int, value: int) -> None:
        """At the end of the current stream."""


class MarkedDevice(Protocol):
    """What `Marks` needs of a device; tests simulate it."""

    @property
    def uuid(self) -> bytes: ...
    @property
    def stream(self) -> int:
        """Its handle."""

    def new_event(self, *, interprocess: bool) -> MarkEvent: ...
    def record(self, event: MarkEvent) -> None:
        """At the end of the current stream."""

    def new_words(self, count: int) -> Words: ...


@dataclass(slots=True, eq=False)
class Mark:
    """A point in the device's queue.

    event: for this process; None on a CPU, where every mark counts as passed.
    after: for the server; None if it can't test the mark.
    uses: transfers after the mark, plus 1 until the caller of `Marks.make` calls `Marks.done`.
    """

    event: MarkEvent | None = None
    after: After | None = None
    uses: int = 1
    has_passed: bool = False

    def passed(self) -> bool:
        """Does not wait."""
        if not self.has_passed:
            self.has_passed = self.event is None or self.event.query()
        return self.has_passed

    def lets_send(self) -> bool:
        """A transfer after this mark may be sent now."""
        return self.after is not None or self.passed()


class Marks:
    """Makes marks and reuses their events. Without a device every mark counts as passed.

    order: offers events and words to the server.
    """

    def __init__(self, device: MarkedDevice | None = None, wanted: str = "auto") -> None:
        """wanted: the setting `device_order`: `auto` (events and words), `events`, `flags`
        (words) or `host` (neither). What the device does not support is logged."""
        self.order = NO_ORDER
        self._device = device
        self._ring: list[MarkEvent] = []
        self._words: Words | None = None
        self._values: dict[int, int] = {}
        self._streams: dict[int, int] = {}
        self._spare: list[MarkEvent] = []
        if device is not None and wanted in ("auto", "events"):
            self._offer_events(device)
        if device is not None and wanted in ("auto", "flags"):
            self._offer_words(device)
        self._free = deque(range(len(self._ring)))

    def __repr__(self) -> str:
        return f"Marks(events {len(self._free)}/{len(self._ring)} free, words {self._values})"

    def _offer_events(self, device: MarkedDevice) -> None:
        try:
            ring = [device.new_event(interprocess=True) for _ in range(NUM_EVENTS)]
            handles = tuple(bytes(event.ipc_handle()) for event in ring)
            self.order = replace(self.order, device_uuid=device.uuid, event_handles=handles)
            self._ring = ring
        except (RuntimeError, AttributeError, TypeError, OSError) as error:
            logger.info("hotkv: no interprocess events on this device: %s", error)

    def _offer_words(self, device: MarkedDevice) -> None:
        try:
            self._words = device.new_words(NUM_WORDS)
            self.order = replace(
                self.order,
                device_uuid=device.uuid,
                flags_handle_id=self._words.handle.handle_id,
                num_flags=NUM_WORDS,
            )
        except (Unsupported, RuntimeError, AttributeError, TypeError, OSError) as error:
            logger.info("hotkv: no words on this device that the server could read: %s", error)

    @property
    def is_on_device(self) -> bool:
        return self._device is not None

    def beside(self, memory: ExportedMemory) -> ExportedMemory:
        """Adds the words to the memory."""
        if self._words is None:
            return memory
        layout = replace(memory.layout, handles=(*memory.layout.handles, self._words.handle))
        return ExportedMemory(layout, {**memory.fds, **self._words.fds})

    def make(self, kind: OrderKind) -> Mark:
        """Makes a mark at the end of the current CUDA stream. The caller must call `done`.

        kind: HOST takes its place if no event or word is free.
        """
        if self._device is None:
            return Mark()
        if kind is OrderKind.EVENTS and self._free:
            index = self._free[0]
            self._device.record(self._ring[index])
            self._free.popleft()
            return Mark(self._ring[index], After(kind, DeviceMark(index)))
        after = self._word(self._device) if kind is OrderKind.FLAGS else None
        event = self._spare.pop() if self._spare else self._device.new_event(interprocess=False)
        self._device.record(event)
        return Mark(event, after)

    def _word(self, device: MarkedDevice) -> After | None:
        index = self._streams.setdefault(device.stream, len(self._streams))
        if self._words is None or index >= NUM_WORDS:
            return None
        value = self._values[index] = (self._values.get(index, 0) + 1) % (1 << 32)
        self._words.write(index, value)
        return After(OrderKind.FLAGS, DeviceMark(index, value))

    def use(self, mark: Mark) -> Mark:
        """Counts a transfer, until `done`."""
        mark.uses += 1
        return mark

    def done(self, mark: Mark) -> None:
        """Ends a use. After the last one the event is free for another mark."""
        mark.uses -= 1
        if mark.uses or mark.event is None:
            return
        if mark.after is not None and mark.after.kind is OrderKind.EVENTS:
            self._free.append(mark.after.mark.index)
        else:
            self._spare.append(mark.event)


class CudaDevice:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.uuid = cuda_device_uuid(device)

    @property
    def stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def new_event(self, *, interprocess: bool) -> MarkEvent:
        event = torch.cuda.Event(interprocess=interprocess)
        # Torch creates a CUDA event when it is first recorded. Before that it can't be exported.
        self.record(event)
        return event

    def record(self, event: MarkEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        event.record(torch.cuda.current_stream(self._device))

    def new_words(self, count: int) -> "CudaWords":
        return CudaWords(self._device, count)


class CudaWords:
    """In a page of host memory that the device writes and the server maps. Raises RuntimeError if
    the device can't."""

    def __init__(self, device: torch.device, count: int) -> None:
        fd = os.memfd_create("hotkv-order", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        os.posix_fallocate(fd, 0, PAGE_BYTES)
        self._page = np.frombuffer(mmap.mmap(fd, PAGE_BYTES), np.int32)
        address = self._page.ctypes.data
        cudart = torch.cuda.cudart()
        torch.cuda.check_error(int(cudart.cudaHostRegister(address, PAGE_BYTES, REGISTER_MAPPED)))
        # The page stays mapped until it is unregistered.
        weakref.finalize(self, _unregister, cudart, self._page)
        words = torch.as_tensor(_OnDevice(address, count), device=device)
        self.handle = MemoryHandle(WORDS_HANDLE, 4 * count)
        self._fd = fd
        self._cells = tuple(words[index] for index in range(count))

    @property
    def fds(self) -> dict[str, int]:
        return {WORDS_HANDLE: os.dup(self._fd)}

    def write(self, index: int, value: int) -> None:
        self._cells[index].fill_(value - (1 << 32) if value >= 1 << 31 else value)


class _OnDevice:
    """int32 [count] at `address`, by which registered host memory is known to the device too."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "<i4",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _unregister(cudart: Any, page: Any) -> None:
    with contextlib.suppress(RuntimeError):
        cudart.cudaHostUnregister(page.ctypes.data)


def marks_for(device: torch.device, wanted: str) -> Marks:
    """wanted: the setting `device_order`.

    Raises Unsupported if torch lacks functions that marks need.
    """
    if device.type != "cuda":
        return Marks()
    try:
        return Marks(CudaDevice(device), wanted)
    except (RuntimeError, AttributeError) as error:
        raise Unsupported(f"this torch does not tell enough of {device}: {error}") from error

"""Makes marks in the queue of the engine's device. A mark is a point in that queue: the device
passes the mark when it has done all work that was queued before. Each transfer (load or store)
names a mark, and begins only after the device has passed it (`hotkv_proto.order`), so that a store
does not copy blocks that are not computed yet.

The server can find out by itself that the device has passed a mark, in two ways: by an interprocess
CUDA event, or by a *word*, a number in device memory that the device writes. If the device or the
server supports neither way, or if all events and words are in use, only this process can find out.
The worker then sends the transfer after the device has passed the mark.

Always true:

- A mark is made on the CUDA stream that is current when vLLM calls the connector. So the device
  passes it after all work that vLLM queued before, whether that work writes the blocks or reads
  them.
- An interprocess event is recorded again only after every transfer that names it has ended.
- Each mark increases the value of its word by 1 (modulo 2^32), and a word belongs to one stream.
- No method that runs in a step waits for the device.

The device writes a word by a kernel of torch (`fill_`), not by cuStreamWriteValue32. Both would be
correct, because both run after all earlier work on the stream. The kernel needs no binding to the
CUDA driver, and takes a few microseconds on the device.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from hotkv_client.types import After
from hotkv_proto.layout import MemoryHandle
from hotkv_proto.order import NO_ORDER, DeviceMark, OrderKind
from hotkv_vllm import link
from hotkv_vllm.compat import Unsupported
from hotkv_vllm.worker.layout import ExportedMemory, cuda_device_uuid, cuda_handle

logger = link.logger

NUM_EVENTS = 64
"""Number of interprocess CUDA events. A mark (point in the device's queue) that is made by an event
uses the event until its transfers have ended. A step makes at most two marks: one for its loads,
one for its stores."""
NUM_WORDS = 4
"""Number of words (numbers in device memory by which the server tests marks). Each CUDA stream on
which marks are made needs its own word. vLLM 0.32 calls the connector on one stream."""
WORDS_HANDLE = "hotkv-order"


class MarkEvent(Protocol):
    """The part of `torch.cuda.Event` that is used for marks (points in the device's queue, for
    which transfers wait)."""

    def query(self) -> bool: ...
    def ipc_handle(self) -> bytes: ...


class Words(Protocol):
    """uint32 numbers in device memory, by which the server tests whether the device has passed a
    mark (a point in its queue): the device writes a number at the mark, and the server reads it.
    They are zero at first.

    handle: names the words' memory to the server.
    fds: file descriptors to send with the handle, by name.
    """

    @property
    def handle(self) -> MemoryHandle: ...
    @property
    def fds(self) -> Mapping[str, int]: ...
    def write(self, index: int, value: int) -> None:
        """Queues a write of `value` to the word at `index` in device memory, at the end of the
        current stream."""


class MarkedDevice(Protocol):
    """The calls that `Marks` makes to the engine's device. `CudaDevice` implements them; tests use
    a simulated device."""

    @property
    def uuid(self) -> bytes: ...
    @property
    def stream(self) -> int:
        """Returns the number (handle) of the device's current stream."""

    def new_event(self, *, interprocess: bool) -> MarkEvent: ...
    def record(self, event: MarkEvent) -> None:
        """Records the event at the end of the device's current stream."""

    def new_words(self, count: int) -> Words: ...


@dataclass(slots=True, eq=False)
class Mark:
    """A point in the device's queue. The device passes the mark when it has done all work that was
    queued before.

    event: the CUDA event by which this process tests the mark; None on a CPU, where every mark
        counts as passed.
    after: names the event or word by which the server tests the mark; None if only this process can
        test the mark.
    uses: number of transfers that name the mark, plus 1 until the caller of `Marks.make` has called
        `Marks.done`.
    has_passed: True once `passed` has seen that the device has passed the mark.
    """

    event: MarkEvent | None = None
    after: After | None = None
    uses: int = 1
    has_passed: bool = False

    def passed(self) -> bool:
        """Returns True if the device has passed the mark (has done all work that was queued before
        the mark). Does not wait."""
        if not self.has_passed:
            self.has_passed = self.event is None or self.event.query()
        return self.has_passed

    def lets_send(self) -> bool:
        """Returns True if a transfer that names this mark (point in the device's queue) may be sent
        to the server now, because the server can test the mark or because the device has already
        passed it."""
        return self.after is not None or self.passed()


class Marks:
    """Makes marks (points in the device's queue for which transfers wait) and reuses their events.
    On a CPU (`device` is None) every mark counts as passed.

    order: describes to the server the CUDA events and words (numbers in device memory) that this
        rank uses for marks.
    """

    def __init__(self, device: MarkedDevice | None = None, wanted: str = "auto") -> None:
        """Creates the events and words by which the server can test marks, as far as the setting
        allows them and the device supports them. `order` offers them to the server.

        wanted: the setting `device_order`. `auto`: CUDA events and words in device memory,
            `events`: only events, `flags`: only words, `host`: neither. If the device does not
            support one of them, it is not offered, and the log says why.
        """
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

    def beside(self, memory: ExportedMemory) -> ExportedMemory:
        """Returns a copy of `memory` (the memory that the server maps) with the words added, which
        the server reads to test marks."""
        if self._words is None:
            return memory
        layout = replace(memory.layout, handles=(*memory.layout.handles, self._words.handle))
        return ExportedMemory(layout, {**memory.fds, **self._words.fds})

    def make(self, kind: OrderKind) -> Mark:
        """Makes a mark at the end of the current CUDA stream: the device passes the mark when it
        has done all work that was queued before. The caller must call `done` when it does not use
        the mark any more.

        kind: how the server finds out that the device has passed a mark of this session. EVENTS: by
            a CUDA event; FLAGS: by a word (a number that the device writes to its memory); HOST: it
            can't, only this process can. If no event or word is free, the mark is like a mark of
            HOST.
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
        """Counts one more transfer that names the mark (point in the device's queue), and returns
        the mark. `done` ends the use."""
        mark.uses += 1
        return mark

    def done(self, mark: Mark) -> None:
        """Ends one use of the mark (point in the device's queue). After the last use, the mark's
        event is free for another mark."""
        mark.uses -= 1
        if mark.uses or mark.event is None:
            return
        if mark.after is not None and mark.after.kind is OrderKind.EVENTS:
            self._free.append(mark.after.mark.index)
        else:
            self._spare.append(mark.event)


class CudaDevice:
    """Implements `MarkedDevice` for a CUDA device, with torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.uuid = cuda_device_uuid(device)

    @property
    def stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def new_event(self, *, interprocess: bool) -> MarkEvent:
        event = torch.cuda.Event(interprocess=interprocess)
        # Records the event once, because torch creates a CUDA event only when it is first recorded.
        # Before that it can't be exported.
        self.record(event)
        return event

    def record(self, event: MarkEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        event.record(torch.cuda.current_stream(self._device))

    def new_words(self, count: int) -> "CudaWords":
        return CudaWords(self._device, count)


@dataclass(slots=True, init=False)
class CudaWords:
    """`Words` in a tensor of torch on a CUDA device. The constructor raises Unsupported if the
    tensor's memory can't be shared with the server."""

    handle: MemoryHandle
    fds: Mapping[str, int] = field(default_factory=dict)
    _cells: tuple[torch.Tensor, ...] = ()

    def __init__(self, device: torch.device, count: int) -> None:
        words = torch.zeros(count, dtype=torch.int32, device=device)
        # Waits until the device has set the words to zero, because the server may read them as soon
        # as it knows of them.
        torch.cuda.synchronize(device)
        self.handle = cuda_handle(WORDS_HANDLE, words.untyped_storage())
        self.fds = {}
        self._cells = tuple(words[index] for index in range(count))

    def write(self, index: int, value: int) -> None:
        self._cells[index].fill_(value - (1 << 32) if value >= 1 << 31 else value)


def marks_for(device: torch.device, wanted: str) -> Marks:
    """Returns the object that makes marks (points in the device's queue, for which transfers wait)
    for the device that holds the engine's KV cache. Raises Unsupported if torch lacks functions
    that marks need.

    wanted: the setting `device_order`.
    """
    if device.type != "cuda":
        return Marks()
    try:
        return Marks(CudaDevice(device), wanted)
    except (RuntimeError, AttributeError) as error:
        raise Unsupported(f"this torch does not tell enough of {device}: {error}") from error

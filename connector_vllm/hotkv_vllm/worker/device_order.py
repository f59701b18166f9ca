"""Makes marks in the queue of the engine's device. A transfer begins only after the device has
passed its mark (`hotkv_proto.order`). A mark is an interprocess CUDA event, or a value that the
device writes to a word in its memory.

Always true:

- A mark is on the stream that is current in the hook. So it comes after all work that vLLM queued
  before, whether that work writes the blocks or reads them.
- An interprocess event is recorded again only after every transfer that names it has ended.
- A word only counts up, and belongs to one stream.
- No method that runs in a step waits for the device.

If the device or the server supports neither events nor words, or if all are in use, a mark serves
this process alone: the worker sends the transfer when the mark has passed.

Words are written by a kernel of torch (`fill_`), not by cuStreamWriteValue32. Both run after all
earlier work on the stream, and the server reads the word before it copies. The kernel needs no
binding to the driver, and takes a few microseconds on the device.
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
"""Most marks (points in the device's queue) in use at a time. A step makes at most two, and only if
it loads or stores."""
NUM_WORDS = 4
"""Most streams on which hooks may run. vLLM 0.32 uses one."""
WORDS_HANDLE = "hotkv-order"


class MarkEvent(Protocol):
    """An event that marks a point in a stream: the used part of `torch.cuda.Event`."""

    def query(self) -> bool: ...
    def ipc_handle(self) -> bytes: ...


class Words(Protocol):
    """uint32 words that the device writes and the server reads. The words begin as zero."""

    @property
    def handle(self) -> MemoryHandle: ...
    @property
    def fds(self) -> Mapping[str, int]: ...
    def write(self, index: int, value: int) -> None:
        """Queues the write at the end of the current stream."""


class MarkedDevice(Protocol):
    """The calls that `Marks` (the maker of marks, points in the device's queue) makes to the
    engine's device."""

    @property
    def uuid(self) -> bytes: ...
    @property
    def stream(self) -> int:
        """Returns the number of the current stream."""

    def new_event(self, *, interprocess: bool) -> MarkEvent: ...
    def record(self, event: MarkEvent) -> None:
        """Records the event at the end of the current stream."""

    def new_words(self, count: int) -> Words: ...


@dataclass(slots=True, eq=False)
class Mark:
    """A point in the device's queue.

    event: None if all queued work is already done.
    after: how the server can test that the device has passed the mark; None if only this process
        can test it.
    uses: number of transfers that wait for the mark, plus 1 while the mark's maker holds it.
    """

    event: MarkEvent | None = None
    after: After | None = None
    uses: int = 1
    has_passed: bool = False

    def passed(self) -> bool:
        """Returns True if the device has passed the mark (has done all work queued before it). Does
        not wait."""
        if not self.has_passed:
            self.has_passed = self.event is None or self.event.query()
        return self.has_passed

    def lets_send(self) -> bool:
        """Returns True if a transfer that waits for the mark may be sent now."""
        return self.after is not None or self.passed()


class Marks:
    """Makes marks (points in the device's queue for which transfers wait) and reuses their events.
    On a CPU (`device` None) all marks have passed.

    order: the kinds of marks (events, words) that this rank offers to the server.
    """

    def __init__(self, device: MarkedDevice | None = None, wanted: str = "auto") -> None:
        """wanted: the kinds of marks to offer: `auto`, `events`, `flags` or `host`. A kind that the
        device does not support is not offered, and the log says why; nothing is raised."""
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
        """Returns `memory` with the memory of the words added: the server must map both."""
        if self._words is None:
            return memory
        layout = replace(memory.layout, handles=(*memory.layout.handles, self._words.handle))
        return ExportedMemory(layout, {**memory.fds, **self._words.fds})

    def make(self, kind: OrderKind) -> Mark:
        """Returns a mark at the end of the current stream. The caller holds one use of the mark,
        and must end this use with `done`.

        kind: the kind of mark that the session uses. If no event or word is free, only this process
            can test the mark.
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
        """Counts one more use of the mark: a transfer that waits for it."""
        mark.uses += 1
        return mark

    def done(self, mark: Mark) -> None:
        """Ends a use of the mark. After the last use, the mark's event may be recorded again."""
        mark.uses -= 1
        if mark.uses or mark.event is None:
            return
        if mark.after is not None and mark.after.kind is OrderKind.EVENTS:
            self._free.append(mark.after.mark.index)
        else:
            self._spare.append(mark.event)


class CudaDevice:
    """A CUDA device, through torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.uuid = cuda_device_uuid(device)

    @property
    def stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def new_event(self, *, interprocess: bool) -> MarkEvent:
        event = torch.cuda.Event(interprocess=interprocess)
        # An event belongs to a device, and can be exported, only after it is recorded.
        self.record(event)
        return event

    def record(self, event: MarkEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        event.record(torch.cuda.current_stream(self._device))

    def new_words(self, count: int) -> "CudaWords":
        return CudaWords(self._device, count)


@dataclass(slots=True, init=False)
class CudaWords:
    """Words in device memory that torch allocated. Raises Unsupported if the memory can't be
    shared."""

    handle: MemoryHandle
    fds: Mapping[str, int] = field(default_factory=dict)
    _cells: tuple[torch.Tensor, ...] = ()

    def __init__(self, device: torch.device, count: int) -> None:
        words = torch.zeros(count, dtype=torch.int32, device=device)
        # The server may read the words as soon as it knows of them.
        torch.cuda.synchronize(device)
        self.handle = cuda_handle(WORDS_HANDLE, words.untyped_storage())
        self.fds = {}
        self._cells = tuple(words[index] for index in range(count))

    def write(self, index: int, value: int) -> None:
        self._cells[index].fill_(value - (1 << 32) if value >= 1 << 31 else value)


def marks_for(device: torch.device, wanted: str) -> Marks:
    """Returns the maker of marks for the device that holds the engine's KV cache. Raises
    Unsupported."""
    if device.type != "cuda":
        return Marks()
    try:
        return Marks(CudaDevice(device), wanted)
    except (RuntimeError, AttributeError) as error:
        raise Unsupported(f"this torch does not tell enough of {device}: {error}") from error

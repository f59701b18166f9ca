"""A fake CUDA device that moves on only when told."""

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from hotkv_client.types import After
from hotkv_proto.layout import MemoryHandle
from hotkv_proto.order import OrderKind
from hotkv_vllm.worker.device_order import WORDS_HANDLE


class ScriptedEvent:
    """Passes when the device has reached the point of its record."""

    def __init__(self, device: "ScriptedDevice", number: int) -> None:
        self.device, self.number, self.point = device, number, 0

    def query(self) -> bool:
        return self.device.done >= self.point

    def ipc_handle(self) -> bytes:
        return self.number.to_bytes(64, "little")


class ScriptedWords:
    """Words in a shared file, written in the order of the queue."""

    def __init__(self, device: "ScriptedDevice", count: int) -> None:
        self._device = device
        self.fd = os.memfd_create("words")
        os.posix_fallocate(self.fd, 0, 4096)
        self.words: Any = np.frombuffer(mmap.mmap(self.fd, 4096), np.uint32)
        self.handle = MemoryHandle(WORDS_HANDLE, 4 * count)

    @property
    def fds(self) -> dict[str, int]:
        return {WORDS_HANDLE: os.dup(self.fd)}

    def write(self, index: int, value: int) -> None:
        self._device.give(lambda: self.words.__setitem__(index, value))


class ScriptedDevice:
    """given, done: pieces of work.
    on_record: called before an event is recorded.
    """

    uuid = bytes(range(16))
    stream = 7

    def __init__(self, *, has_events: bool = True, has_words: bool = True) -> None:
        self.given = self.done = 0
        self.events: list[ScriptedEvent] = []
        self.words: ScriptedWords | None = None
        self.on_record: Callable[[ScriptedEvent], None] = lambda event: None
        self._has_events, self._has_words = has_events, has_words
        self._queue: list[Callable[[], None]] = []

    def give(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        self.given += 1

    def run(self, count: int = 1 << 30) -> None:
        self.run_to(self.done + count)

    def run_to(self, point: int) -> None:
        while self.done < min(point, self.given):
            self._queue[0]()
            del self._queue[0]
            self.done += 1

    def new_event(self, *, interprocess: bool) -> ScriptedEvent:
        if interprocess and not self._has_events:
            raise RuntimeError("told to have no events\nand a second line")
        event = ScriptedEvent(self, len(self.events) if interprocess else -1)
        if interprocess:
            self.events.append(event)
        return event

    def record(self, event: Any) -> None:
        self.on_record(event)
        event.point = self.given

    def new_words(self, count: int) -> ScriptedWords:
        if not self._has_words:
            raise RuntimeError("told to have no words")
        self.words = ScriptedWords(self, count)
        return self.words

    def has_passed(self, after: After) -> bool:
        if after.kind is OrderKind.EVENTS:
            return self.events[after.mark.index].query()
        assert self.words is not None
        return ctypes.c_int32(int(self.words.words[after.mark.index]) - after.mark.value).value >= 0

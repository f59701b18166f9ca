"""A device runtime without a device: streams that run late and in any order, memory that only
streams may touch, and errors on demand.

Always true: bytes are read and written when a copy's turn comes, never when it is given; between
streams there is no order but that of events and words; the host can't touch device memory; what
CUDA refuses or dies of is refused or loses the device here. `device_streams`, `device_ranges` and
`device_copies` have the rules.

Order, delays and the parts in which copies move come from a seed. A thread runs the streams, or the
test does, with `run`. Then calls that wait for the device run them too if the thread that made the
runtime makes them; other threads wait for that one.
"""

import contextlib
import ctypes
import random
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.order import has_reached
from hotkv_server.device.runtime import (
    HOST,
    DeviceError,
    DeviceInfo,
    Event,
    Extent,
    Int64s,
    Priority,
    Stream,
)
from hotkv_server.testing.device_copies import Copies, Work
from hotkv_server.testing.device_memory import (
    EVENT_BYTES,
    EVENT_NAME,
    Handle,
    bytes_at,
    unmap_pages,
    uuid_of,
)
from hotkv_server.testing.device_ranges import Ranges
from hotkv_server.testing.device_streams import COPIES, FakeEvent, FakeStream, Streams, fake

__all__ = ["COPIES", "FakeEvent", "FakeRuntime", "FakeStream"]


class FakeRuntime:
    """`DeviceRuntime`; see the module. `max_delay_s`: longest pause between two steps of the
    thread."""

    def __init__(
        self,
        seed: int = 0,
        *,
        num_devices: int = 1,
        threaded: bool = True,
        max_delay_s: float = 0.0,
    ) -> None:
        dice = random.Random(seed)
        self._infos = [_info(number) for number in range(num_devices)]
        self._ranges = Ranges()
        self._copies = Copies(self._ranges, dice)
        self._dice = dice
        self._streams = Streams(dice, num_devices, threaded=threaded, max_delay_s=max_delay_s)
        self._changed = self._streams.changed

    def __repr__(self) -> str:
        return f"FakeRuntime({len(self._infos)} devices, {self._ranges!r}, {self._streams!r})"

    # For tests

    def run(self, num_steps: int) -> int:
        """Does so many steps of streams chosen at random, and returns how many could be done. For
        runtimes without a thread."""
        return self._streams.run(num_steps)

    def lose(self, device: int, why: str = "an illegal memory access was encountered") -> None:
        """Loses the device: nothing that its streams were given goes on."""
        self._streams.lose(device, why)

    def lose_after(self, device: int, num_steps: int) -> None:
        """Loses the device in the middle of the `num_steps`-th step of its streams from now on."""
        self._streams.lose_after(device, num_steps)

    def fail_call(self, method: str, nth: int = 1) -> None:
        """Has the nth call from now on of that method, or of any that copies (COPIES), fail,
        without loss. A batch that fails has copied some of what it was given.
        """
        self._streams.fail_call(method, nth)

    def peek(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        """Copy of device memory, as it is."""
        with self._changed:
            return bytes_at(self._ranges.shadow_of(address, num_bytes), num_bytes).copy()

    def poke(self, address: int, data: NDArray[np.uint8]) -> None:
        """Writes device memory at once."""
        with self._changed:
            target = bytes_at(self._ranges.shadow_of(address, data.nbytes), data.nbytes)
            target[:] = data.reshape(-1).view(np.uint8)

    def held(self) -> dict[str, int]:
        """Numbers of allocations, pinned, registered and opened memories that have not been given
        back."""
        with self._changed:
            return self._ranges.held()

    def close(self) -> None:
        """Stops the thread, drops what streams were given, and frees all memory."""
        self._streams.close()
        with self._changed:
            self._ranges.drop_all()

    @contextlib.contextmanager
    def _call(self, method: str, device: int = HOST) -> Iterator[None]:
        """One call, under the lock. Raises DeviceError if it must fail."""
        with self._changed:
            self._streams.enter(method, device)
            yield

    # DeviceRuntime: order

    def devices(self) -> Sequence[DeviceInfo]:
        return self._infos

    def new_stream(self, device: int, priority: Priority) -> FakeStream:
        with self._call("new_stream", device):
            return self._streams.add(device, priority)

    def new_event(self, device: int) -> FakeEvent:
        with self._call("new_event", device):
            return FakeEvent(device)

    def record(self, event: Event, stream: Stream) -> None:
        with self._call("record", stream.device):
            if fake(event).opened or event.device != stream.device:
                raise DeviceError(
                    "fake device: record: invalid resource handle: the event is not this "
                    "device's and process's"
                )
            fake(event).counters[0] += np.uint64(1)
            self._streams.give(stream, fake(event).reach(fake(event).counters[0]))

    def wait_event(self, stream: Stream, event: Event) -> None:
        with self._call("wait_event", stream.device):
            self._streams.give(stream, fake(event).wait(fake(event).counters[0]))

    def passed(self, event: Event) -> bool:
        with self._call("passed", event.device):
            return bool(fake(event).counters[1] >= fake(event).counters[0])

    def synchronize(self, event: Event) -> None:
        with self._call("synchronize", event.device):
            number = fake(event).counters[0]
        self._streams.wait_for(event.device, lambda: bool(fake(event).counters[1] >= number))
        with self._changed:
            if event.device in self._streams.lost:
                why = self._streams.lost[event.device]
                raise DeviceError(f"fake device {event.device}: synchronize: {why}", is_lost=True)

    # DeviceRuntime: copies

    def copy(self, stream: Stream, dst: int, src: int, num_bytes: int) -> None:
        ended, copies = False, [(dst, src, num_bytes)]

        def work() -> Work:
            nonlocal ended
            yield from self._copies.move(stream.device, copies, "copy", pageable=pageable)
            ended = True

        with self._call("copy", stream.device):
            pageable = self._copies.check(stream.device, copies, "copy", may_be_pageable=True)
            self._streams.give(stream, work())
        if pageable:
            self._streams.wait_for(stream.device, lambda: ended)

    def copy_batch(self, stream: Stream, dst: Int64s, src: Int64s, num_bytes: Int64s) -> None:
        copies = list(zip(dst.tolist(), src.tolist(), num_bytes.tolist(), strict=True))
        with self._changed:
            self._copies.check(stream.device, copies, "copy_batch", may_be_pageable=False)
            self._dice.shuffle(copies)
            try:
                self._streams.enter("copy_batch", stream.device)
            except DeviceError as error:
                if not error.is_lost:
                    some = copies[: len(copies) // 2]
                    self._streams.give(stream, self._copies.move(stream.device, some, "copy_batch"))
                raise
            self._streams.give(stream, self._copies.move(stream.device, copies, "copy_batch"))

    def copy_kernel(self, stream: Stream, table: int, num_copies: int, max_bytes: int) -> None:
        with self._call("copy_kernel", stream.device):
            work = self._copies.move_by_table(stream.device, table, num_copies, max_bytes)
            self._streams.give(stream, work)

    # DeviceRuntime: memory

    def allocate(self, device: int, num_bytes: int) -> int:
        with self._call("allocate", device):
            return self._ranges.allocate(device, num_bytes)

    def free(self, device: int, address: int) -> None:
        with self._call("free", device):
            memory = self._ranges.find("free", address, device, "allocated")
        self._streams.wait_for(device, lambda: self._streams.is_idle(device))
        with self._changed:
            self._ranges.drop(memory)

    def allocate_pinned(self, num_bytes: int) -> int:
        with self._call("allocate_pinned"):
            return self._ranges.allocate_pinned(num_bytes)

    def free_pinned(self, address: int) -> None:
        with self._call("free_pinned"):
            self._ranges.drop(self._ranges.find("free_pinned", address, HOST, "pinned"))

    def register(self, address: int, num_bytes: int, *, read_only: bool = False) -> None:
        with self._call("register"):
            self._ranges.register(address, num_bytes, read_only=read_only)

    def unregister(self, address: int) -> None:
        with self._call("unregister"):
            self._ranges.drop(self._ranges.find("unregister", address, HOST, "registered"))

    # DeviceRuntime: between processes

    def open_memory(self, device: int, handle: bytes) -> int:
        with self._call("open_memory", device):
            return self._ranges.open(device, handle)

    def extent(self, device: int, address: int) -> Extent:
        with self._call("extent", device):
            return self._ranges.extent(device, address)

    def close_memory(self, device: int, address: int) -> None:
        with self._call("close_memory", device):
            self._ranges.close(device, address)

    def open_event(self, device: int, handle: bytes) -> FakeEvent:
        with self._call("open_event", device):
            parsed = Handle.parse(handle, EVENT_NAME)
            return FakeEvent(parsed.device, parsed.map())

    def close_event(self, event: Event) -> None:
        opened = fake(event)
        with self._changed:
            if not opened.opened:
                raise DeviceError(
                    "fake device: close_event: invalid resource handle: it was not opened, or is "
                    "closed"
                )
            self._streams.enter("close_event", event.device)
            counters, opened.counters = opened.counters.copy(), np.zeros(2, np.uint64)
            unmap_pages(opened.address, EVENT_BYTES)
            opened.address, opened.counters = 0, counters

    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        def work() -> Work:
            while not has_reached(self._word(stream, address).value, value):
                yield False

        with self._call("wait_value", stream.device):
            self._word(stream, address)
            self._streams.give(stream, work())

    def write_value(self, stream: Stream, address: int, value: int) -> None:
        def work() -> Work:
            self._word(stream, address).value = value
            yield from ()

        with self._call("write_value", stream.device):
            self._word(stream, address)
            self._streams.give(stream, work())

    def _word(self, stream: Stream, address: int) -> ctypes.c_uint32:
        return ctypes.c_uint32.from_address(self._ranges.word(stream.device, address))


def _info(number: int) -> DeviceInfo:
    return DeviceInfo(
        number,
        uuid_of(number),
        f"Fake GPU {number}",
        f"0000:{number + 1:02x}:00.0",
        -1,
        1 << 34,
    )

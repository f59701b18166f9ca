"""Simulates a CUDA runtime: streams that run late and in any order, memory that only they may
access, errors on demand.

Always true: a copy moves bytes when it runs, not when it is submitted. Different streams have no
order. The host can't access device memory. What CUDA would refuse raises DeviceError; where it
would crash, the device is lost, and every later call on it raises.

A seed decides orders, delays and parts of copies. A thread runs the streams; without one the
test does, by `run`. Then a call that waits for the device runs them itself on the thread that
made the runtime; on others it waits for that thread.
"""

import contextlib
import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

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
from tests.doubles.device_memory import (
    EVENT_BYTES,
    EVENT_NAME,
    FakeHandle,
    Ranges,
    bytes_at,
    unmap_pages,
    uuid_of,
)

# ------------------------------------------------------------------------------------------- Copies
# A copy is checked when it is submitted and runs in steps when its stream reaches it. It then
# looks its ranges up again: if memory was freed meanwhile, the device is lost, as with CUDA.

Work = Iterator[bool]
"""Of a stream, in steps. Yields True after a step, False if it waits for an event."""
Copy = tuple[int, int, int]
"""(target address, source address, bytes)."""


class DeviceCopies:
    """Checks copies and returns them as `Work`. The caller holds the runtime's lock, in each
    step too."""

    def __init__(self, ranges: Ranges, dice: random.Random) -> None:
        self._ranges = ranges
        self._dice = dice

    def check(self, device: int, copies: list[Copy], what: str, *, may_be_pageable: bool) -> bool:
        """Raises DeviceError if CUDA's call would fail. True if host memory is involved that is
        not registered; an error unless `may_be_pageable`. `what`: for messages."""
        pageable = False
        for dst, src, count in copies:
            (_, to), (_, from_) = (
                self._ranges.copy_range(device, dst, count, what),
                self._ranges.copy_range(device, src, count, what),
            )
            pageable = pageable or to is None or from_ is None
        if pageable and not may_be_pageable:
            raise DeviceError(
                f"fake device {device}: {what}: invalid argument: host memory that is not "
                "registered"
            )
        return pageable

    def move(
        self,
        device: int,
        copies: list[Copy],
        what: str,
        *,
        by_kernel: bool = False,
        pageable: bool = False,
    ) -> Work:
        """Copies in 1 to 3 steps.

        by_kernel: an access that is not allowed loses the device.
        pageable: host memory need not be registered.
        """
        num_steps, version, real = self._dice.randint(1, 3), -1, copies
        for step in range(num_steps):
            if version != self._ranges.version:
                version = self._ranges.version
                real = [
                    self._resolve_by_kernel(device, copy)
                    if by_kernel
                    else self._resolve(device, copy, what, pageable=pageable)
                    for copy in copies
                ]
            for to, from_, count in real:
                begin, end = count * step // num_steps, count * (step + 1) // num_steps
                ctypes.memmove(to + begin, from_ + begin, end - begin)
            if step < num_steps - 1:
                yield True

    def move_by_table(self, device: int, table: int, num_copies: int, max_bytes: int) -> Work:
        """The copy kernel: reads int64 [3, num_copies] (targets, sources, bytes) at `table`,
        copies in any order. Raises DeviceError if a copy is longer than `max_bytes`."""
        real = self._ranges.kernel_range(device, table, 24 * num_copies)
        rows = bytes_at(real, 24 * num_copies).view(np.int64).reshape(3, num_copies).copy()
        copies = list(zip(*rows.tolist(), strict=True))
        if any(count > max_bytes for _, _, count in copies):
            raise DeviceError(
                f"fake device {device}: copy_kernel: max_bytes is {max_bytes}, and a copy is longer"
            )
        self._dice.shuffle(copies)
        yield from self.move(device, copies, "copy_kernel", by_kernel=True)

    def _resolve_by_kernel(self, device: int, copy: Copy) -> Copy:
        dst, src, count = copy
        return (
            self._ranges.kernel_range(device, dst, count),
            self._ranges.kernel_range(device, src, count),
            count,
        )

    def _resolve(self, device: int, copy: Copy, what: str, *, pageable: bool) -> Copy:
        """Addresses here. Raises DeviceError if memory was freed or unregistered meanwhile."""
        dst, src, count = copy
        (to, to_memory), (from_, from_memory) = (
            self._ranges.copy_range(device, dst, count, what),
            self._ranges.copy_range(device, src, count, what),
        )
        if not pageable and (to_memory is None or from_memory is None):
            raise DeviceError(f"{what} of memory that has been unregistered meanwhile")
        return to, from_, count


# ------------------------------------------------------------------------------- Streams and events
# The work of different streams has no order. A lost device does no further work, and every later
# call on it raises. `changed` is the runtime's only lock, notified at every change.

POLL_S = 50e-6
COPIES = "copies"
"""`method` of `fail_call`: all that copy."""


class FakeStream:
    """Implements `Stream`."""

    def __init__(self, device: int, priority: Priority) -> None:
        self.priority = priority
        self._device = device
        self.work: deque[Work] = deque()

    @property
    def device(self) -> int:
        return self._device

    def __repr__(self) -> str:
        return f"FakeStream(device {self._device}, {self.priority.name}, {len(self.work)} given)"


class FakeEvent:
    """Implements `Event`. The counters of an event of another process (`opened`) lie in shared
    memory.

    counters: records, and the latest that the device has passed.
    """

    def __init__(self, device: int, address: int = 0) -> None:
        self._device = device
        self.address = address
        self.counters: NDArray[np.uint64] = (
            bytes_at(address, EVENT_BYTES).view(np.uint64) if address else np.zeros(2, np.uint64)
        )

    @property
    def device(self) -> int:
        return self._device

    @property
    def opened(self) -> bool:
        return self.address != 0

    def reach(self, number: np.uint64) -> Work:
        """The device passes this record."""
        self.counters[1] = max(self.counters[1], number)
        yield from ()


def fake(event: Event) -> FakeEvent:
    assert isinstance(event, FakeEvent)
    return event


class Streams:
    """The streams of all devices. A thread executes their work, or the test by `run`."""

    def __init__(
        self, dice: random.Random, num_devices: int, *, threaded: bool, max_delay_s: float
    ) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.lost: dict[int, str] = {}
        self._dice = dice
        self._num_devices = num_devices
        self._max_delay_s = max_delay_s
        self._streams: list[FakeStream] = []
        self._steps_to_loss: dict[int, int] = {}
        self._failing: dict[str, list[int]] = {}
        self._closed = False
        self._maker = threading.get_ident()
        self._thread = (
            threading.Thread(target=self._run, name="hotkv-fake-device", daemon=True)
            if threaded
            else None
        )
        if self._thread is not None:
            self._thread.start()

    def __repr__(self) -> str:
        given = sum(len(stream.work) for stream in self._streams)
        return f"Streams({len(self._streams)}, {given} given, lost {sorted(self.lost)})"

    def add(self, device: int, priority: Priority) -> FakeStream:
        self._streams.append(FakeStream(device, priority))
        return self._streams[-1]

    def give(self, stream: Stream, work: Work) -> None:
        assert isinstance(stream, FakeStream)
        stream.work.append(work)
        self.changed.notify_all()

    def is_idle(self, device: int) -> bool:
        return not any(stream.work for stream in self._streams if stream.device == device)

    def wait_for(self, device: int, reached: Callable[[], bool]) -> None:
        """Waits until `reached`, or the device is lost. Without a thread, the runtime's maker
        runs the streams here; other threads wait for it."""
        runs_itself = self._thread is None and threading.get_ident() == self._maker
        with self.changed:
            while not reached() and device not in self.lost and not self._closed:
                if not (runs_itself and self._step()):
                    self.changed.wait(POLL_S * 10)

    def close(self) -> None:
        """Drops all work."""
        with self.changed:
            self._closed = True
            for stream in self._streams:
                stream.work.clear()
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # Running

    def run(self, num_steps: int) -> int:
        """Number of executed steps."""
        done = 0
        with self.changed:
            while done < num_steps and self._step():
                done += 1
        return done

    def _run(self) -> None:
        while True:
            with self.changed:
                if self._closed:
                    return
                if not self._step():
                    self.changed.wait(
                        POLL_S if any(stream.work for stream in self._streams) else None
                    )
                    continue
            if self._max_delay_s and self._dice.random() < 0.5:
                time.sleep(self._dice.random() * self._max_delay_s)

    def _step(self) -> bool:
        """Runs a step of a random stream. False if none can continue."""
        return any(
            stream.work and self._advance(stream)
            for stream in self._dice.sample(self._streams, len(self._streams))
        )

    def _advance(self, stream: FakeStream) -> bool:
        left = self._steps_to_loss.get(stream.device)
        if left is not None and left <= 1:
            with contextlib.suppress(StopIteration):
                next(stream.work[0])
            del self._steps_to_loss[stream.device]
            self.lose(stream.device)
            return True
        try:
            progressed = next(stream.work[0])
        except StopIteration:
            stream.work.popleft()
            progressed = True
            self.changed.notify_all()
        except DeviceError as error:
            self.lose(stream.device, str(error))
            return True
        if progressed and left is not None:
            self._steps_to_loss[stream.device] = left - 1
        return progressed

    # Faults on demand

    def lose(self, device: int, why: str = "an illegal memory access was encountered") -> None:
        """Drops the device's work; every later call on it raises DeviceError."""
        with self.changed:
            self.lost.setdefault(device, why)
            for stream in self._streams:
                if stream.device == device:
                    stream.work.clear()
            self.changed.notify_all()

    def lose_after(self, device: int, num_steps: int) -> None:
        """After that many steps of its streams; may leave a copy half done."""
        with self.changed:
            self._steps_to_loss[device] = num_steps

    def fail_call(self, method: str, nth: int) -> None:
        """The nth call from now raises DeviceError. `method`: name, or COPIES."""
        with self.changed:
            self._failing.setdefault(method, []).append(nth)

    def enter(self, method: str, device: int) -> None:
        """Begins a call. Raises DeviceError if the device is unknown or lost, or if `fail_call`
        says so."""
        if device != HOST and not 0 <= device < self._num_devices:
            raise DeviceError(f"fake device: {method}: invalid device ordinal {device}")
        if device in self.lost:
            raise DeviceError(f"fake device {device}: {method}: {self.lost[device]}", is_lost=True)
        names = {method, COPIES if method.startswith("copy") else method} & self._failing.keys()
        counts = [count for name in names for count in self._failing[name]]
        for name in names:
            self._failing[name] = [count - 1 for count in self._failing[name] if count > 1]
        if 1 in counts:
            raise DeviceError(f"fake device: {method}: told to fail")


# -------------------------------------------------------------------------------------- The runtime

__all__ = ["COPIES", "FakeEvent", "FakeRuntime", "FakeStream"]


class FakeRuntime:
    """Implements `DeviceRuntime`.

    max_delay_s: between two steps of the thread.
    """

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
        self._copies = DeviceCopies(self._ranges, dice)
        self._dice = dice
        self._streams = Streams(dice, num_devices, threaded=threaded, max_delay_s=max_delay_s)
        self._changed = self._streams.changed

    def __repr__(self) -> str:
        return f"FakeRuntime({len(self._infos)} devices, {self._ranges!r}, {self._streams!r})"

    # For tests

    def run(self, num_steps: int) -> int:
        """See `Streams.run`; only without a thread."""
        return self._streams.run(num_steps)

    def lose(self, device: int, why: str = "an illegal memory access was encountered") -> None:
        self._streams.lose(device, why)

    def lose_after(self, device: int, num_steps: int) -> None:
        self._streams.lose_after(device, num_steps)

    def fail_call(self, method: str, nth: int = 1) -> None:
        """See `Streams.fail_call`. The device stays usable; a batch copies some bytes before it
        fails."""
        self._streams.fail_call(method, nth)

    def peek(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        """Without waiting for streams."""
        with self._changed:
            return bytes_at(self._ranges.shadow_of(address, num_bytes), num_bytes).copy()

    def poke(self, address: int, data: NDArray[np.uint8]) -> None:
        """Without waiting for streams."""
        with self._changed:
            target = bytes_at(self._ranges.shadow_of(address, data.nbytes), data.nbytes)
            target[:] = data.reshape(-1).view(np.uint8)

    def held(self) -> dict[str, int]:
        with self._changed:
            return self._ranges.held()

    def close(self) -> None:
        """Drops all work and frees all memory."""
        self._streams.close()
        with self._changed:
            self._ranges.drop_all()

    @contextlib.contextmanager
    def _call(self, method: str, device: int = HOST) -> Iterator[None]:
        """Holds the lock. Raises as `Streams.enter`."""
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

    def register(self, address: int, num_bytes: int) -> None:
        with self._call("register"):
            self._ranges.register(address, num_bytes)

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

    def map_range(self, device: int, backings: Sequence[tuple[int, int]]) -> int:
        with self._call("map_range", device):
            return self._ranges.map_range(device, backings)

    def unmap_range(self, device: int, address: int, sizes: Sequence[int]) -> None:
        with self._call("unmap_range", device):
            self._ranges.close(device, address)

    def open_event(self, device: int, handle: bytes) -> FakeEvent:
        with self._call("open_event", device):
            parsed = FakeHandle.parse(handle, EVENT_NAME)
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


def _info(number: int) -> DeviceInfo:
    return DeviceInfo(
        number,
        uuid_of(number),
        f"Fake GPU {number}",
        f"0000:{number + 1:02x}:00.0",
        -1,
    )

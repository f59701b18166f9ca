"""A device runtime without a device: streams that run late and in any order, memory that only
streams may touch, and errors on demand.

Always true: bytes are read and written when a copy's turn comes, never when it is given; between
streams there is no order but that of events and words; the host can't touch device memory (it has
addresses, and no pages behind them); what CUDA refuses or dies of is refused or loses the device
here: ranges that leave allocations, cross registrations, are freed, closed or not registered.

Order, delays and the parts in which copies move come from a seed. A thread runs the streams, or the
test does, with `run`. Then calls that wait for the device run them too where the thread that made
the runtime makes them; other threads wait for that one.
"""

import bisect
import contextlib
import ctypes
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv.order import has_reached
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
from hotkv_server.testing.device_memory import (
    EVENT_BYTES,
    EVENT_NAME,
    MEMORY_NAME,
    PAGE_BYTES,
    Handle,
    bytes_at,
    map_pages,
    reserve_pages,
    unmap_pages,
    uuid_of,
)

__all__ = ["FakeEvent", "FakeRuntime", "FakeStream"]

POLL_S = 50e-6
COPIES = "copies"
Work = Iterator[bool]
"""What a stream does, step by step: yields True after a step, False where it can't go on yet."""


@dataclass(slots=True, eq=False)
class _Memory:
    """Memory that streams know. `shadow`: where the bytes of [start, end) really lie. `device`:
    HOST for registered memory."""

    start: int
    end: int
    shadow: int
    device: int
    read_only: bool = False
    mapped_bytes: int = 0
    handle: bytes = b""
    num_opened: int = 0


class FakeStream:
    """See `Stream`."""

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
    """See `Event`. One of another process is `opened`: its counters lie in shared memory."""

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
        self._random = random.Random(seed)
        self._infos = [
            DeviceInfo(
                number,
                uuid_of(number),
                f"Fake GPU {number}",
                f"0000:{number + 1:02x}:00.0",
                -1,
                1 << 34,
            )
            for number in range(num_devices)
        ]
        self._max_delay_s = max_delay_s
        self._changed = threading.Condition(threading.RLock())
        self._streams: list[FakeStream] = []
        self._memories: list[_Memory] = []
        self._graves: list[tuple[int, int]] = []
        self._lost: dict[int, str] = {}
        self._steps_to_loss: dict[int, int] = {}
        self._failing: dict[str, list[int]] = {}
        self._closed = False
        self._version = 0
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
        return (
            f"FakeRuntime({len(self._infos)} devices, {len(self._memories)} memories, {given} "
            f"given, lost {sorted(self._lost)})"
        )

    # For tests

    def run(self, num_steps: int) -> int:
        """Does so many steps of streams chosen at random; how many could be done. For runtimes
        without a thread."""
        done = 0
        with self._changed:
            while done < num_steps and self._step():
                done += 1
        return done

    def lose(self, device: int, why: str = "an illegal memory access was encountered") -> None:
        """The device is lost: nothing that its streams were given goes on."""
        with self._changed:
            self._lost.setdefault(device, why)
            for stream in self._streams:
                if stream.device == device:
                    stream.work.clear()
            self._changed.notify_all()

    def lose_after(self, device: int, num_steps: int) -> None:
        """The device is lost in the middle of the so-manieth step of its streams from now on."""
        with self._changed:
            self._steps_to_loss[device] = num_steps

    def fail_call(self, method: str, nth: int = 1) -> None:
        """The nth call from now on of that method, or of any that copies (COPIES), fails, without
        loss. A batch that fails has copied some of what it was given.
        """
        with self._changed:
            self._failing.setdefault(method, []).append(nth)

    def peek(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        """Copy of device memory, as it is."""
        with self._changed:
            return bytes_at(self._real(address, num_bytes), num_bytes).copy()

    def poke(self, address: int, data: NDArray[np.uint8]) -> None:
        """Writes device memory at once."""
        with self._changed:
            bytes_at(self._real(address, data.nbytes), data.nbytes)[:] = data.reshape(-1).view(
                np.uint8
            )

    def held(self) -> dict[str, int]:
        """What has not been given back: numbers of allocations, pinned, registered and opened
        memories."""
        with self._changed:
            kinds = [
                ("opened" if m.handle else "allocated")
                if m.device != HOST
                else "pinned"
                if m.mapped_bytes
                else "registered"
                for m in self._memories
            ]
        return {
            kind: kinds.count(kind)
            for kind in ("allocated", "pinned", "registered", "opened")
            if kind in kinds
        }

    def close(self) -> None:
        """Stops the thread, drops what streams were given, and frees all memory."""
        with self._changed:
            self._closed = True
            for stream in self._streams:
                stream.work.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        with self._changed:
            for memory in list(self._memories):
                self._drop(memory)

    # Streams

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                if not self._step():
                    self._changed.wait(
                        POLL_S if any(stream.work for stream in self._streams) else None
                    )
                    continue
            if self._max_delay_s and self._random.random() < 0.5:
                time.sleep(self._random.random() * self._max_delay_s)

    def _step(self) -> bool:
        """One step of one stream; False where none can go on."""
        return any(
            stream.work and self._advance(stream)
            for stream in self._random.sample(self._streams, len(self._streams))
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
            self._changed.notify_all()
        except DeviceError as error:
            self.lose(stream.device, str(error))
            return True
        if progressed and left is not None:
            self._steps_to_loss[stream.device] = left - 1
        return progressed

    def _wait_for(self, device: int, reached: Callable[[], bool]) -> None:
        """Until then, or until the device is lost."""
        runs_itself = self._thread is None and threading.get_ident() == self._maker
        with self._changed:
            while not reached() and device not in self._lost and not self._closed:
                if not (runs_itself and self._step()):
                    self._changed.wait(POLL_S * 10)

    def _give(self, stream: Stream, work: Work) -> None:
        assert isinstance(stream, FakeStream)
        stream.work.append(work)
        self._changed.notify_all()

    def _enter(self, method: str, device: int) -> None:
        """Raises where the call must fail."""
        if device != HOST and not 0 <= device < len(self._infos):
            raise DeviceError(f"fake device: {method}: invalid device ordinal {device}")
        if device in self._lost:
            raise DeviceError(f"fake device {device}: {method}: {self._lost[device]}", is_lost=True)
        names = {method, COPIES if method.startswith("copy") else method} & self._failing.keys()
        counts = [count for name in names for count in self._failing[name]]
        for name in names:
            self._failing[name] = [count - 1 for count in self._failing[name] if count > 1]
        if 1 in counts:
            raise DeviceError(f"fake device: {method}: told to fail")

    # DeviceRuntime: order

    def devices(self) -> Sequence[DeviceInfo]:
        return self._infos

    def new_stream(self, device: int, priority: Priority) -> FakeStream:
        with self._changed:
            self._enter("new_stream", device)
            self._streams.append(FakeStream(device, priority))
            return self._streams[-1]

    def new_event(self, device: int) -> FakeEvent:
        with self._changed:
            self._enter("new_event", device)
            return FakeEvent(device)

    def record(self, event: Event, stream: Stream) -> None:
        assert isinstance(event, FakeEvent)

        def reach(number: np.uint64) -> Work:
            event.counters[1] = max(event.counters[1], number)
            yield from ()

        with self._changed:
            self._enter("record", stream.device)
            if event.opened or event.device != stream.device:
                raise DeviceError(
                    "fake device: record: invalid resource handle: the event is not this "
                    "device's and process's"
                )
            event.counters[0] += np.uint64(1)
            self._give(stream, reach(event.counters[0]))

    def wait_event(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, FakeEvent)

        def wait(number: np.uint64) -> Work:
            while event.counters[1] < number:
                yield False

        with self._changed:
            self._enter("wait_event", stream.device)
            self._give(stream, wait(event.counters[0]))

    def passed(self, event: Event) -> bool:
        assert isinstance(event, FakeEvent)
        with self._changed:
            self._enter("passed", event.device)
            return bool(event.counters[1] >= event.counters[0])

    def synchronize(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        with self._changed:
            self._enter("synchronize", event.device)
            number = event.counters[0]
        self._wait_for(event.device, lambda: bool(event.counters[1] >= number))
        with self._changed:
            if event.device in self._lost:
                raise DeviceError(
                    f"fake device {event.device}: synchronize: {self._lost[event.device]}",
                    is_lost=True,
                )

    # DeviceRuntime: copies

    def copy(self, stream: Stream, dst: int, src: int, num_bytes: int) -> None:
        ended = False

        def work() -> Work:
            nonlocal ended
            yield from self._move(stream.device, copies, "copy", pageable=pageable)
            ended = True

        with self._changed:
            self._enter("copy", stream.device)
            copies = [(dst, src, num_bytes)]
            pageable = self._check_copies(stream.device, copies, "copy", may_be_pageable=True)
            self._give(stream, work())
        if pageable:
            self._wait_for(stream.device, lambda: ended)

    def copy_batch(self, stream: Stream, dst: Int64s, src: Int64s, num_bytes: Int64s) -> None:
        copies = list(zip(dst.tolist(), src.tolist(), num_bytes.tolist(), strict=True))
        with self._changed:
            self._check_copies(stream.device, copies, "copy_batch", may_be_pageable=False)
            self._random.shuffle(copies)
            try:
                self._enter("copy_batch", stream.device)
            except DeviceError as error:
                if not error.is_lost:
                    self._give(
                        stream, self._move(stream.device, copies[: len(copies) // 2], "copy_batch")
                    )
                raise
            self._give(stream, self._move(stream.device, copies, "copy_batch"))

    def copy_kernel(self, stream: Stream, table: int, num_copies: int, max_bytes: int) -> None:
        def work() -> Work:
            real = self._kernel_range(stream.device, table, 24 * num_copies, writes=False)
            rows = bytes_at(real, 24 * num_copies).view(np.int64).reshape(3, num_copies).copy()
            copies = list(zip(*rows.tolist(), strict=True))
            if any(count > max_bytes for _, _, count in copies):
                raise DeviceError(
                    f"fake device {stream.device}: copy_kernel: max_bytes is {max_bytes}, "
                    "and a "
                    "copy is longer"
                )
            self._random.shuffle(copies)
            yield from self._move(stream.device, copies, "copy_kernel", by_kernel=True)

        with self._changed:
            self._enter("copy_kernel", stream.device)
            self._give(stream, work())

    def _move(
        self,
        device: int,
        copies: list[tuple[int, int, int]],
        what: str,
        *,
        by_kernel: bool = False,
        pageable: bool = False,
    ) -> Work:
        """Moves bytes, in one to three steps; ranges are looked at again: they may be gone by now,
        and a device does not survive that."""
        num_steps, version, real = self._random.randint(1, 3), -1, copies
        for step in range(num_steps):
            if version != self._version:
                version = self._version
                real = [
                    self._real_copy(device, copy, what, by_kernel=by_kernel, pageable=pageable)
                    for copy in copies
                ]
            for to, from_, count in real:
                begin, end = count * step // num_steps, count * (step + 1) // num_steps
                ctypes.memmove(to + begin, from_ + begin, end - begin)
            if step < num_steps - 1:
                yield True

    def _real_copy(
        self, device: int, copy: tuple[int, int, int], what: str, *, by_kernel: bool, pageable: bool
    ) -> tuple[int, int, int]:
        """The copy between the places where its bytes really lie."""
        dst, src, count = copy
        if by_kernel:
            return (
                self._kernel_range(device, dst, count, writes=True),
                self._kernel_range(device, src, count, writes=False),
                count,
            )
        (to, to_memory), (from_, from_memory) = (
            self._copy_range(device, dst, count, what),
            self._copy_range(device, src, count, what),
        )
        if not pageable and (to_memory is None or from_memory is None):
            raise DeviceError(f"{what} of memory that has been unregistered meanwhile")
        return to, from_, count

    # Ranges of memory

    def _overlapping(self, start: int, end: int) -> list[_Memory]:
        at = bisect.bisect_right(self._memories, start, key=lambda memory: memory.end)
        found = []
        while at < len(self._memories) and self._memories[at].start < end:
            found.append(self._memories[at])
            at += 1
        return found

    def _copy_range(
        self, device: int, start: int, num_bytes: int, what: str
    ) -> tuple[int, _Memory | None]:
        """Where the bytes really lie, and in what; None for memory that is not registered. Raises
        DeviceError as a copy would."""
        end = start + num_bytes
        found = self._overlapping(start, end)
        problem = ""
        if any(start < grave_end and end > grave for grave, grave_end in self._graves):
            problem = "memory that was freed or closed"
        elif found and not (found[0].start <= start and end <= found[0].end):
            problem = (
                "a range that leaves its allocation"
                if found[0].device != HOST
                else "a range that crosses registrations"
            )
        elif found and found[0].device not in (HOST, device):
            problem = f"memory of device {found[0].device}"
        if problem:
            raise DeviceError(
                f"fake device {device}: {what}: invalid argument: {problem}: {start:#x} and "
                f"{num_bytes} bytes"
            )
        return (start, None) if not found else (start - found[0].start + found[0].shadow, found[0])

    def _check_copies(
        self, device: int, copies: list[tuple[int, int, int]], what: str, *, may_be_pageable: bool
    ) -> bool:
        """Whether memory is among them that is not registered. Raises DeviceError."""
        pageable = False
        for dst, src, count in copies:
            (_, to), (_, from_) = (
                self._copy_range(device, dst, count, what),
                self._copy_range(device, src, count, what),
            )
            pageable = pageable or to is None or from_ is None
            if to is not None and to.read_only:
                raise DeviceError(
                    f"fake device {device}: {what}: invalid argument: writes to memory "
                    "registered as read-only"
                )
        if pageable and not may_be_pageable:
            raise DeviceError(
                f"fake device {device}: {what}: invalid argument: host memory that is not "
                "registered"
            )
        return pageable

    def _kernel_range(self, device: int, start: int, num_bytes: int, *, writes: bool) -> int:
        """Where the bytes really lie. Raises DeviceError where a kernel would die of it."""
        found, end = self._overlapping(start, start + num_bytes), start + num_bytes
        # Registrations that adjoin are one range to a kernel: each has the host's own addresses.
        covered = (
            found
            and found[0].start <= start
            and end <= found[-1].end
            and all(a.end == b.start for a, b in itertools.pairwise(found))
        )
        if num_bytes and (
            not covered
            or (len(found) > 1 and any(m.device != HOST for m in found))
            or found[0].device not in (HOST, device)
            or (writes and any(m.read_only for m in found))
        ):
            raise DeviceError("an illegal memory access was encountered", is_lost=True)
        return start - found[0].start + found[0].shadow if found else start

    def _real(self, address: int, num_bytes: int) -> int:
        found = self._overlapping(address, address + num_bytes)
        if not found or not (found[0].start <= address and address + num_bytes <= found[0].end):
            raise ValueError(f"no memory of a device at {address:#x}")
        return address - found[0].start + found[0].shadow

    def _keep(self, memory: _Memory) -> int:
        self._version += 1
        bisect.insort(self._memories, memory, key=lambda other: other.start)
        return memory.start

    def _take(
        self, method: str, address: int, device: int, *, is_mapped: bool, is_opened: bool = False
    ) -> _Memory:
        for memory in self._memories:
            same_kind = (memory.device, bool(memory.mapped_bytes), bool(memory.handle)) == (
                device,
                is_mapped,
                is_opened,
            )
            if memory.start == address and same_kind:
                return memory
        raise DeviceError(
            f"fake device: {method}: invalid argument: nothing of the kind at {address:#x}"
        )

    def _drop(self, memory: _Memory) -> None:
        self._version += 1
        self._memories.remove(memory)
        if memory.device != HOST:
            unmap_pages(memory.shadow, memory.mapped_bytes)
            # Its addresses stay reserved, so that nothing else is taken for it.
            self._graves.append((memory.start, memory.end))
        elif memory.mapped_bytes:
            unmap_pages(memory.shadow, memory.mapped_bytes)

    # DeviceRuntime: memory

    def allocate(self, device: int, num_bytes: int) -> int:
        with self._changed:
            self._enter("allocate", device)
            return self._keep_device(device, num_bytes, map_pages(num_bytes), b"")

    def _keep_device(self, device: int, num_bytes: int, shadow: int, handle: bytes) -> int:
        start = reserve_pages(num_bytes)
        return self._keep(
            _Memory(
                start,
                start + num_bytes,
                shadow,
                device,
                mapped_bytes=num_bytes,
                handle=handle,
                num_opened=1,
            )
        )

    def free(self, device: int, address: int) -> None:
        with self._changed:
            self._enter("free", device)
            memory = self._take("free", address, device, is_mapped=True)
        self._wait_for(
            device,
            lambda: not any(stream.work for stream in self._streams if stream.device == device),
        )
        with self._changed:
            self._drop(memory)

    def allocate_pinned(self, num_bytes: int) -> int:
        with self._changed:
            self._enter("allocate_pinned", HOST)
            start = map_pages(num_bytes)
            return self._keep(
                _Memory(start, start + num_bytes, start, HOST, mapped_bytes=num_bytes)
            )

    def free_pinned(self, address: int) -> None:
        with self._changed:
            self._enter("free_pinned", HOST)
            self._drop(self._take("free_pinned", address, HOST, is_mapped=True))

    def register(self, address: int, num_bytes: int, *, read_only: bool = False) -> None:
        with self._changed:
            self._enter("register", HOST)
            if address % PAGE_BYTES or num_bytes % PAGE_BYTES or num_bytes <= 0:
                raise DeviceError(
                    f"fake device: register: invalid argument: {address:#x} and {num_bytes} "
                    "bytes are no whole pages"
                )
            if self._overlapping(address, address + num_bytes):
                raise DeviceError(
                    "fake device: register: part or all of the requested memory range is "
                    "already "
                    "mapped"
                )
            self._keep(_Memory(address, address + num_bytes, address, HOST, read_only))

    def unregister(self, address: int) -> None:
        with self._changed:
            self._enter("unregister", HOST)
            self._drop(self._take("unregister", address, HOST, is_mapped=False))

    # DeviceRuntime: between processes

    def open_memory(self, device: int, handle: bytes) -> int:
        with self._changed:
            self._enter("open_memory", device)
            for memory in self._memories:
                if memory.handle == handle and memory.device == device:
                    memory.num_opened += 1
                    return memory.start
            parsed = Handle.parse(handle, MEMORY_NAME)
            if parsed.device != device:
                raise DeviceError(
                    f"fake device {device}: open_memory: invalid device context: the memory is "
                    f"of device {parsed.device}"
                )
            return self._keep_device(device, parsed.num_bytes, parsed.map(), handle)

    def extent(self, device: int, address: int) -> Extent:
        with self._changed:
            self._enter("extent", device)
            found = next(
                (m for m in self._memories if m.device != HOST and m.start <= address < m.end), None
            )
            if found is None:
                raise DeviceError(
                    f"fake device {device}: extent: invalid argument: no memory of a device at "
                    f"{address:#x}"
                )
            return Extent(found.start, found.end - found.start, found.device)

    def close_memory(self, device: int, address: int) -> None:
        with self._changed:
            self._enter("close_memory", device)
            memory = self._take("close_memory", address, device, is_mapped=True, is_opened=True)
            memory.num_opened -= 1
            if not memory.num_opened:
                self._drop(memory)

    def open_event(self, device: int, handle: bytes) -> FakeEvent:
        with self._changed:
            self._enter("open_event", device)
            parsed = Handle.parse(handle, EVENT_NAME)
            return FakeEvent(parsed.device, parsed.map())

    def close_event(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        with self._changed:
            if not event.opened:
                raise DeviceError(
                    "fake device: close_event: invalid resource handle: it was not opened, "
                    "or is "
                    "closed"
                )
            self._enter("close_event", event.device)
            counters, event.counters = event.counters.copy(), np.zeros(2, np.uint64)
            unmap_pages(event.address, EVENT_BYTES)
            event.address, event.counters = 0, counters

    def _word(self, device: int, address: int) -> int:
        if address % 4:
            raise DeviceError(
                f"fake device {device}: invalid argument: the word at {address:#x} is not aligned"
            )
        real, memory = self._copy_range(device, address, 4, "word")
        if memory is None:
            raise DeviceError(
                f"fake device {device}: invalid argument: the word at {address:#x} lies in "
                "memory that is not registered"
            )
        return real

    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        def work() -> Work:
            while not has_reached(
                ctypes.c_uint32.from_address(self._word(stream.device, address)).value, value
            ):
                yield False

        with self._changed:
            self._enter("wait_value", stream.device)
            self._word(stream.device, address)
            self._give(stream, work())

    def write_value(self, stream: Stream, address: int, value: int) -> None:
        def work() -> Work:
            ctypes.c_uint32.from_address(self._word(stream.device, address)).value = value
            yield from ()

        with self._changed:
            self._enter("write_value", stream.device)
            self._word(stream.device, address)
            self._give(stream, work())

"""Streams of a made-up device: they run late, in an order that dice choose, and fail on demand.

Always true: between streams there is no order but that of events and words; a lost device does
nothing any more, and every later call on it raises. `changed` is the runtime's one lock, which
notifies of every change.
"""

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hotkv_server.device.runtime import HOST, DeviceError, Event, Priority, Stream
from hotkv_server.testing.device_copies import Work
from hotkv_server.testing.device_memory import EVENT_BYTES, bytes_at

POLL_S = 50e-6
COPIES = "copies"
"""Stands for any method that copies, in `fail_call`."""


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
    """See `Event`. An event of another process is `opened`: its counters lie in shared memory.

    `counters`: how often it was recorded, and the highest record that has passed.
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
        """Work that passes the event, as recorded under this number."""
        self.counters[1] = max(self.counters[1], number)
        yield from ()

    def wait(self, number: np.uint64) -> Work:
        """Work that waits until the event has passed."""
        while self.counters[1] < number:
            yield False


def fake(event: Event) -> FakeEvent:
    """The event as one of this runtime's."""
    assert isinstance(event, FakeEvent)
    return event


class Streams:
    """See the module. A thread runs them; without one the test does, with `run`."""

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
        """A new stream."""
        self._streams.append(FakeStream(device, priority))
        return self._streams[-1]

    def give(self, stream: Stream, work: Work) -> None:
        """Puts work at the end of a stream."""
        assert isinstance(stream, FakeStream)
        stream.work.append(work)
        self.changed.notify_all()

    def is_idle(self, device: int) -> bool:
        """True if no stream of the device has work."""
        return not any(stream.work for stream in self._streams if stream.device == device)

    def wait_for(self, device: int, reached: Callable[[], bool]) -> None:
        """Waits until `reached`, or until the device is lost. In a runtime without a thread the
        thread that made it runs the streams meanwhile; other threads wait for that one."""
        runs_itself = self._thread is None and threading.get_ident() == self._maker
        with self.changed:
            while not reached() and device not in self.lost and not self._closed:
                if not (runs_itself and self._step()):
                    self.changed.wait(POLL_S * 10)

    def close(self) -> None:
        """Stops the thread and drops what streams were given."""
        with self.changed:
            self._closed = True
            for stream in self._streams:
                stream.work.clear()
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # Running

    def run(self, num_steps: int) -> int:
        """Does so many steps, and returns how many could be done."""
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
        """Does one step of one stream; False if none can go on."""
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
        """Loses the device: nothing that its streams were given goes on."""
        with self.changed:
            self.lost.setdefault(device, why)
            for stream in self._streams:
                if stream.device == device:
                    stream.work.clear()
            self.changed.notify_all()

    def lose_after(self, device: int, num_steps: int) -> None:
        """Loses the device in the middle of the `num_steps`-th step of its streams from now on."""
        with self.changed:
            self._steps_to_loss[device] = num_steps

    def fail_call(self, method: str, nth: int) -> None:
        """Has the nth call from now on of that method, or of any that copies (COPIES), fail."""
        with self.changed:
            self._failing.setdefault(method, []).append(nth)

    def enter(self, method: str, device: int) -> None:
        """Counts a call. Raises DeviceError if it must fail."""
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

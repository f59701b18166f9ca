"""Threads that make calls for an event loop.

A system call on a file may hang. So each clerk has a daemon thread for the files of one place,
such as a disk. A call that hangs delays only later calls of this clerk.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Clerk:
    """Runs calls one after another. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"hotkv-{name}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Clerk({self._thread.name!r}, {self._queue.qsize()} calls wait)"

    def do(self, call: Callable[[], T]) -> "Future[T]":
        """Does not block."""
        future: Future[T] = Future()
        self._queue.put((future, call))
        return future

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _work(self) -> None:
        while True:
            future, call = self._queue.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 The future passes it to the caller.
                future.set_exception(error)
            del future, call


class HungError(OSError):
    """A file was not read in time."""


class PatientReader(Generic[T]):
    """Reads files whose disk may hang, for callers that wait at most `wait_s`. Thread-safe.
    `name`: of the thread, which starts with the first `read`.
    """

    def __init__(self, name: str, call: Callable[[], T], wait_s: float) -> None:
        self._name = name
        self._call = call
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._clerk: Clerk | None = None
        self._reading: Future[T] | None = None

    def __repr__(self) -> str:
        return f"PatientReader({self._name!r}, {self._clerk!r})"

    def read(self) -> T:
        """Raises the errors of `call`, and HungError. Does not block while the disk still hangs
        since an earlier call."""
        with self._lock:
            if self._reading is None or self._reading.done():
                self._clerk = self._clerk or Clerk(self._name)
                self._reading = self._clerk.do(self._call)
                wait([self._reading], self._wait_s)
            reading = self._reading
        if not reading.done():
            raise HungError(f"not read within {self._wait_s:g} s: the disk hangs")
        return reading.result()


def full_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """All threads run already: one that starts them on demand would raise in the middle of a
    transfer. Raises RuntimeError if the system refuses a thread."""
    pool, started = ThreadPoolExecutor(num_threads, name), threading.Barrier(num_threads)
    try:
        wait([pool.submit(started.wait) for _ in range(num_threads)])
    except RuntimeError:
        started.abort()
        raise
    return pool

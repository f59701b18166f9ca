"""The threads that make calls for an event loop: `Clerk` and `full_pool`.

A `Clerk` is a thread that reads and writes the files of one place, such as a disk. A system call on
a file may hang, so it must not run on an event loop. Always true: each clerk has a daemon thread of
its own. So a call that hangs delays only the later calls of the same clerk. It does not delay calls
on other places, an event loop, or the end of the process.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

T = TypeVar("T")


class Clerk:
    """Runs calls on its thread, one after another. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"hotkv-{name}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Clerk({self._thread.name!r}, {self._queue.qsize()} calls wait)"

    def do(self, call: Callable[[], T]) -> "Future[T]":
        """Queues a call. Returns a future, which receives the call's result or exception. Does not
        block."""
        future: Future[T] = Future()
        self._queue.put((future, call))
        return future

    def is_alive(self) -> bool:
        """Returns True if the thread is alive."""
        return self._thread.is_alive()

    def _work(self) -> None:
        while True:
            future, call = self._queue.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 - the caller has the future
                future.set_exception(error)
            del future, call


def full_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Returns a pool whose threads all run already. A pool that starts its threads at need would
    raise when the system refuses a thread, in the middle of a transfer or of a session's end.

    name: prefix of the threads' names. Raises RuntimeError if the system refuses the threads now.
    """
    pool, started = ThreadPoolExecutor(num_threads, name), threading.Barrier(num_threads)
    try:
        wait([pool.submit(started.wait) for _ in range(num_threads)])
    except RuntimeError:
        started.abort()
        raise
    return pool

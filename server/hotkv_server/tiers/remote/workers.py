"""The threads of a remote tier. Each executes a part of a call at a time, over its own connection.

Always true: if a part fails, its connection is closed before the part ends. While the store has
a known problem, parts end at once without a request, and one thread at a time tries to connect.
Control calls, about generations, have a thread and a connection of their own, so they don't wait
behind blocks, and end in their order.
"""

import logging
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hotkv_server.tiers.remote.calls import Part, PartQueue, RemoteCall
from hotkv_server.tiers.remote.client import (
    Client,
    Connect,
    LateError,
    LostError,
    RefusedError,
    StoreError,
)

log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------- Health

# Always true: while there is a problem, no call goes to the store. A thread claims the next try
# to connect; the wait doubles with each failure in a row, and the first success ends the
# problem.

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 2.0
"""Bounds of the wait before a try, which varies at random by a quarter."""


class RemoteHealth:
    """A store's known problem, and when to connect again. Thread-safe. `name`: in messages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._problem = ""
        self._failures = 0
        self._refuses_writes = False
        # At once, so that a problem is known before the first call.
        self._retry_at_s = 0.0

    def __repr__(self) -> str:
        return f"RemoteHealth({self._problem or 'well'!r}, {self._failures} failures in a row)"

    @property
    def problem(self) -> str:
        return self._problem

    @property
    def retry_at_s(self) -> float:
        """When the next try to connect is due; infinity while the store works or a thread tries."""
        return self._retry_at_s

    def claim(self) -> bool:
        """True if a try is due: the caller must connect, and call `connected` or `fail`."""
        with self._lock:
            if time.monotonic() < self._retry_at_s:
                return False
            self._retry_at_s = float("inf")
            return True

    def connected(self) -> None:
        with self._lock:
            if self._problem:
                log.info("%s can be used again", self._name)
            self._problem, self._retry_at_s = "", float("inf")

    def worked(self) -> None:
        self._failures = 0

    def refuse(self, words: str) -> None:
        """Logs once that writes are refused. `words` follow the store's name."""
        if not self._refuses_writes:
            self._refuses_writes = True
            log.warning("%s %s", self._name, words)

    def fail(self, words: str) -> None:
        """The store can't be used; sets the next try. `words` follow the store's name."""
        with self._lock:
            problem = f"{self._name} {words}"
            if problem != self._problem:
                log.warning("%s", problem)
            is_known = bool(self._problem) and self._retry_at_s < float("inf")
            self._problem = problem
            if is_known:
                # A call that was under way must not delay the scheduled try.
                return
            # Random: nodes that lost the store together should not connect together.
            wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(self._failures, 20))
            self._retry_at_s = time.monotonic() + wait_s * random.uniform(0.75, 1.25)
            self._failures += 1


# ------------------------------------------------------------------------------------------ Workers


@dataclass(frozen=True, slots=True)
class Timeouts:
    """connect_s: to connect and log in.
    batch_s: to execute a part.
    """

    connect_s: float
    batch_s: float


class Workers:
    """See the module. Thread-safe.

    `name`: in messages, such as "valkey at host:port", the kind first.
    `num_connections`: for blocks, a thread each; control calls use one more.
    `num_writers`: threads that also write; None: all. Fewer for a store that writes slowly.
    `connects_first`: a thread connects before it takes a part. For slow connects: a part could
        else wait for one while another thread is idle.
    """

    def __init__(
        self,
        name: str,
        num_connections: int,
        timeouts: Timeouts,
        connect: Connect,
        num_writers: int | None = None,
        *,
        connects_first: bool = False,
    ) -> None:
        self._name = name
        self._connects_first = connects_first
        self.num_connections = num_connections
        self._num_writers = num_connections if num_writers is None else num_writers
        self._timeouts = timeouts
        self._connect_to = connect
        self._health = RemoteHealth(name)
        self._queue, self._control = PartQueue(), PartQueue()
        queues = [self._queue] * num_connections + [self._control]
        # When each thread began to wait for the store, or 0.
        self._begun_s = [0.0] * len(queues)
        self._clients: list[Client | None] = [None] * len(queues)
        kind = name.partition(" ")[0]
        self._threads = [
            threading.Thread(
                target=self._work, args=(i, queue), name=f"hotkv-{kind}-{i}", daemon=True
            )
            for i, queue in enumerate(queues)
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        what = f"{len(self._threads)} threads, {self._queue!r}, {self._health!r}"
        return f"Workers({self._name!r}, {what})"

    @property
    def problem(self) -> str:
        return self._health.problem

    def stalled_s(self, now_s: float) -> float:
        """Longest wait of a thread for the store since bytes moved; 0 if none waits.

        A connecting thread does not count if another is connected. Writes don't count if only
        some threads write, because they may just take long.
        """
        clients = [*self._clients]
        is_any = any(one is not None for one in clients[:-1])
        begun = [
            begun_s if client is None else max(begun_s, client.moved_s)
            for begun_s, client in zip(self._begun_s, clients, strict=True)
            if begun_s and (client is not None or not is_any)
        ]
        return max(0.0, now_s - min(begun, default=now_s))

    def is_alive(self) -> bool:
        """True after `close`."""
        return self._queue.is_closed or all(thread.is_alive() for thread in self._threads)

    def submit(self, call: RemoteCall, parts: Sequence[Part]) -> None:
        """Ends the call at once if it has no parts, if the queue has no room, or after `close`."""
        call.expect(max(1, len(parts)))
        if not parts:
            call.part_ended()
        elif not self._queue.put(parts):
            for part in parts:
                part.call.part_ended()

    def submit_control(self, call: RemoteCall, part: Part) -> None:
        """Ends the call at once if the queue is full, or after `close`."""
        call.expect(1)
        if not self._control.put([part]):
            part.call.part_ended()

    def close(self) -> None:
        """Ends queued calls and threads. Blocks until the parts under way have ended."""
        for part in (*self._control.close(), *self._queue.close()):
            part.call.part_ended()
        for thread in self._threads:
            thread.join()

    def _work(self, number: int, queue: PartQueue) -> None:
        client: Client | None = None
        while not queue.is_closed:
            self._clients[number] = client
            if self._health.claim():
                client = self._retry(client)
                continue
            if self._connects_first and client is None and not self._health.problem:
                self._begun_s[number] = time.monotonic() if len(queue) else 0.0
                client = self._connect()
                self._begun_s[number] = 0.0
                continue
            until_s = self._health.retry_at_s
            if self._connects_first and client is None:
                # Another thread may end the problem by connecting; then this one must connect
                # too.
                until_s = min(until_s, time.monotonic() + LONGEST_WAIT_S)
            part = queue.get(until_s, takes_writes=number < self._num_writers)
            if part is None:
                continue
            if not part.is_write or self._num_writers == self.num_connections:
                self._begun_s[number] = time.monotonic()
            client = self._do(number, part, client)
            self._begun_s[number] = 0.0
            part.call.part_ended()
            del part
        if client is not None:
            client.close()

    def _retry(self, client: Client | None) -> Client | None:
        if client is not None:
            client.close()
        client = self._connect()
        if client is not None:
            self._health.connected()
        return client

    def _do(self, number: int, part: Part, client: Client | None) -> Client | None:
        """Executes a part, unless it is late or the store has a problem. Returns the client for
        the next part; None: connect first."""
        begun_s = time.monotonic()
        if begun_s > part.deadline_s or self._health.problem:
            return client
        if client is not None and not client.is_fresh():
            client.close()
            client = None
        client = client or self._connect()
        if client is None:
            return None
        self._clients[number] = client
        until_s = time.monotonic() + self._timeouts.batch_s
        try:
            part.do(client, min(part.deadline_s, until_s) if part.moves_blocks else until_s)
            self._health.worked()
            return client
        except StoreError as error:
            # Before the part ends: late bytes must not reach a slot.
            client.close()
            self._judge(error, part)
        except Exception as error:  # If a part fails, only its call fails; the thread goes on.
            client.close()
            log.exception("%s: %s", self._name, type(error).__name__)
        return None

    def _judge(self, error: StoreError, part: Part) -> None:
        """Records a problem if the error is the store's, so that calls fail until a connect
        succeeds; else logs it."""
        is_too_late = (
            isinstance(error, LateError)
            and part.moves_blocks
            and time.monotonic() >= part.deadline_s
        )
        if is_too_late:
            log.debug("%s %s", self._name, error)
        elif isinstance(error, LostError):
            # Only the next connect shows whether the store is down.
            log.info("%s %s", self._name, error)
        elif isinstance(error, RefusedError):
            self._health.refuse(str(error))
        else:
            self._health.fail(str(error))

    def _connect(self) -> Client | None:
        until_s = time.monotonic() + self._timeouts.connect_s
        try:
            return self._connect_to(until_s)
        except StoreError as error:
            self._health.fail(str(error))
        except Exception as error:
            # The thread must go on.
            log.exception("%s: %s", self._name, type(error).__name__)
            self._health.fail(f"can't be asked: {type(error).__name__}")
        return None

"""The threads of a remote tier. Each thread has its own connection, and executes one part of a call
(some of the call's blocks) at a time.

Always true: if a part fails, its connection is closed before the part ends. While the store has a
known problem, parts end at once without a request to the store, and one thread at a time tries to
connect. Control calls (calls about generations) have a thread and a connection for themselves. So
they don't wait behind blocks, and they end in the order in which they were made.
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

# Tracks the known problem of a store, and decides when to connect again.
#
# Always true: while there is a problem, no call goes to the store. A thread claims the next try to
# connect, so that threads do not all try at once. The wait before a try doubles with each failure
# in a row. The first try that succeeds ends the problem.

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 2.0
"""The first and the longest wait before a try to connect. Each wait varies at random by a
quarter."""


class RemoteHealth:
    """Tracks the known problem of a store, and decides when to connect again. Thread-safe.

    `name`: name of the store in messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._problem = ""
        self._failures = 0
        self._refuses_writes = False
        # The first try is due at once, so that a problem is known before the first call.
        self._retry_at_s = 0.0

    def __repr__(self) -> str:
        return f"RemoteHealth({self._problem or 'well'!r}, {self._failures} failures in a row)"

    @property
    def problem(self) -> str:
        """The known problem of the store; empty if the store works."""
        return self._problem

    @property
    def retry_at_s(self) -> float:
        """The time of the next try to connect, a time of time.monotonic. Infinity while the store
        works, and while a thread tries to connect."""
        return self._retry_at_s

    def claim(self) -> bool:
        """Returns True if a try to connect is due. The caller must then connect, and call
        `connected` or `fail` with the result."""
        with self._lock:
            if time.monotonic() < self._retry_at_s:
                return False
            self._retry_at_s = float("inf")
            return True

    def connected(self) -> None:
        """Records that the store has accepted a connection."""
        with self._lock:
            if self._problem:
                log.info("%s can be used again", self._name)
            self._problem, self._retry_at_s = "", float("inf")

    def worked(self) -> None:
        """Records that a call has succeeded."""
        self._failures = 0

    def refuse(self, words: str) -> None:
        """Logs, only once, that the store refuses writes. `words`: the reason, as text that
        continues a sentence that begins with the store's name."""
        if not self._refuses_writes:
            self._refuses_writes = True
            log.warning("%s %s", self._name, words)

    def fail(self, words: str) -> None:
        """Records that the store can't be used, and sets the time of the next try to connect.
        `words`: the reason, as text that continues a sentence that begins with the store's name."""
        with self._lock:
            problem = f"{self._name} {words}"
            if problem != self._problem:
                log.warning("%s", problem)
            is_known = bool(self._problem) and self._retry_at_s < float("inf")
            self._problem = problem
            if is_known:
                # The problem is known and the next try to connect is scheduled. So this failure, of
                # a call that was under way, must not delay the next try.
                return
            # Random, so that nodes that have lost the store together don't all connect at once.
            wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(self._failures, 20))
            self._retry_at_s = time.monotonic() + wait_s * random.uniform(0.75, 1.25)
            self._failures += 1


# ------------------------------------------------------------------------------------------ Workers


@dataclass(frozen=True, slots=True)
class RemoteLimits:
    """Limits of a remote tier's connections.

    `connections`: number of connections for blocks, each with a thread. Control calls (calls about
        generations) use one more connection.
    `connect_timeout_s`: longest time to connect and log in.
    `timeout_s`: longest time to execute a part of a call.
    """

    connections: int
    connect_timeout_s: float
    timeout_s: float


class Workers:
    """The threads of a remote tier and their queue of parts; see the module. Thread-safe.

    `name`: name of the store in messages, such as "valkey at host:port". It begins with the kind
        of the tier.
    `connect`: connects a thread to the store.
    `num_writers`: number of threads that execute writes as well as reads; the others only read.
        None: all threads. A tier whose store writes slowly passes a smaller number.
    `connects_first`: True if each thread connects before it takes a part from the queue. A tier
        sets it if connecting takes long. Otherwise a part could wait until its thread has
        connected, while another thread is connected and idle.
    """

    def __init__(
        self,
        name: str,
        limits: RemoteLimits,
        connect: Connect,
        num_writers: int | None = None,
        *,
        connects_first: bool = False,
    ) -> None:
        self._name = name
        self._connects_first = connects_first
        self._num_writers = limits.connections if num_writers is None else num_writers
        self._limits = limits
        self._connect_to = connect
        self._health = RemoteHealth(name)
        self._queue, self._control = PartQueue(), PartQueue()
        queues = [self._queue] * limits.connections + [self._control]
        # When each thread began to wait for the store; 0 if it does not wait.
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
        """The known problem of the store; empty if the store works."""
        return self._health.problem

    def stalled_s(self, now_s: float) -> float:
        """Returns the longest time, in seconds, for which a thread has already waited for the
        store; 0 if no thread waits. A wait begins anew when bytes move (`Client.moved_s`). Two
        kinds of waits are left out:

        - the wait of a thread that is connecting, if another thread for blocks is connected;
        - the wait of a write, if only one thread may write: the store may be working, and the write
          just takes long.

        `now_s`: a time of time.monotonic.
        """
        clients = [*self._clients]
        is_any = any(one is not None for one in clients[:-1])
        begun = [
            begun_s if client is None else max(begun_s, client.moved_s)
            for begun_s, client in zip(self._begun_s, clients, strict=True)
            if begun_s and (client is not None or not is_any)
        ]
        return max(0.0, now_s - min(begun, default=now_s))

    @property
    def num_connections(self) -> int:
        """Number of connections for blocks, without the connection for control calls (calls about
        generations)."""
        return self._limits.connections

    def is_alive(self) -> bool:
        """Returns False if a thread has died. True once `close` was called."""
        return self._queue.is_closed or all(thread.is_alive() for thread in self._threads)

    def submit(self, call: RemoteCall, parts: Sequence[Part]) -> None:
        """Queues the parts of a call. Ends the call at once if it has no parts, if the queue has no
        room for them, or after `close`."""
        call.expect(max(1, len(parts)))
        if not parts:
            call.part_ended()
        elif not self._queue.put(parts):
            for part in parts:
                part.call.part_ended()

    def submit_control(self, call: RemoteCall, part: Part) -> None:
        """Queues the only part of a control call (a call about generations) for the thread of
        control calls. Ends the call at once if that thread's queue is full, or after `close`."""
        call.expect(1)
        if not self._control.put([part]):
            part.call.part_ended()

    def close(self) -> None:
        """Ends the queued calls and all threads. Blocks until the parts under way have ended."""
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
                # Another thread may connect meanwhile, which ends the store's problem. Then this
                # thread must connect too, so it waits at most LONGEST_WAIT_S for a part.
                until_s = min(until_s, time.monotonic() + LONGEST_WAIT_S)
            part = queue.get(until_s, takes_writes=number < self._num_writers)
            if part is None:
                continue
            if not part.is_write or self._num_writers == self._limits.connections:
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
        """Executes a part in thread `number`. Skips the part if its deadline has passed, or if the
        store has a known problem. Returns the client with which the thread executes its next part;
        None if the thread must first connect again.

        `client`: the thread's connection; None if the thread has none.
        """
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
        until_s = time.monotonic() + self._limits.timeout_s
        try:
            part.do(client, min(part.deadline_s, until_s) if part.moves_blocks else until_s)
            self._health.worked()
            return client
        except StoreError as error:
            # Close the connection before the part ends: bytes that arrive late must not be written
            # to a slot.
            client.close()
            self._judge(error, part)
        except Exception as error:  # If a part fails, only its call fails; the thread goes on.
            client.close()
            log.exception("%s: %s", self._name, type(error).__name__)
        return None

    def _judge(self, error: StoreError, part: Part) -> None:
        """Decides whether the error of a part (some blocks of a call) means that the store itself
        has a problem. If so, records the problem (`RemoteHealth`), so that all calls fail until a
        connect succeeds; else logs the error."""
        is_too_late = (
            isinstance(error, LateError)
            and part.moves_blocks
            and time.monotonic() >= part.deadline_s
        )
        if is_too_late:
            log.debug("%s %s", self._name, error)
        elif isinstance(error, LostError):
            # The tier stays up: only the next connect shows whether the store is down.
            log.info("%s %s", self._name, error)
        elif isinstance(error, RefusedError):
            self._health.refuse(str(error))
        else:
            self._health.fail(str(error))

    def _connect(self) -> Client | None:
        until_s = time.monotonic() + self._limits.connect_timeout_s
        try:
            return self._connect_to(until_s)
        except StoreError as error:
            self._health.fail(str(error))
        except Exception as error:
            # Catch any exception, so that the thread goes on.
            log.exception("%s: %s", self._name, type(error).__name__)
            self._health.fail(f"can't be asked: {type(error).__name__}")
        return None

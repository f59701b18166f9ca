"""A test double of the server: its state, which any number of sessions share, with faults on
demand.

The double copies the bytes of blocks from and to the engines' memory. As with the real server, the
ranks of an engine store under one write lease (`FakeWrites`), and a block is ready when every shard
(part of a rank) is written. A store makes no block ready if its session is closed or has called
`revoke_stores`. If a store over a shared fence (a page through which another process can revoke
stores) is cancelled, its future resolves at once; the double still ends the store later and finds
it revoked. `FakeServer.residencies` holds the residencies (rooms reserved for requests).

Attributes of `FakeServer` that a test may set:
- `up`: whether the server runs.
- `table`: False: there is no block table, so `probe` returns None.
- `hold`: names of calls whose answers are held until `settle`.
- `late`: names of calls that reach the server only at `settle`.
- `fail_loads`, `fail_stores`, `fail_flushes`: True: these calls fail.
- `pending_tiers`: the tiers that flushes report as not deleted yet.
- `spoil_loads`: a load writes wrong bytes to every second block when it begins, and the right bytes
  only if it succeeds.
- `grant_limit`: a read lease pins blocks only among the first `grant_limit` blocks of the call.
- `ack_cancels`: False: a cancel has no effect until `settle`.
- `wants_token_ids`, `order_kind`: the values that sessions return.
- `has_passed`: function that returns whether the device has passed a transfer's mark (a point in
  the device's queue). Until then the transfer is held.
- `refuse_workers`: the reason with which sessions with memory are refused; empty: such sessions are
  accepted.

`settle()` resolves the held calls, except transfers whose mark the device has not passed. If the
server dies (`die`), held calls fail with SessionLostError.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import grpc

from hotkv_client.fence import SharedFence
from hotkv_client.testing.fake_books import FakeResidencies, FakeWrites, Key, Shards
from hotkv_client.testing.fake_session import FakeSession, resolve
from hotkv_client.types import (
    After,
    BlockRun,
    LeaseGrant,
    LinkState,
    LoadEnd,
    SessionConfig,
)
from hotkv_proto.blocks import Retention
from hotkv_proto.errors import SessionLostError
from hotkv_proto.layout import Layout
from hotkv_proto.order import NO_ORDER, DeviceOrder, OrderKind

ARENA_BYTES = 64 << 20
"""Size of the arena of `FakeServer`. The system allocates its memory when slots are first
written."""


class FakeServer:
    """A test double of the server: the state that all of its sessions share. The docstring of the
    module lists the attributes that a test may set."""

    def __init__(self) -> None:
        self.up = True
        self.table = True
        self.epoch = 1
        self.has_tiers = False
        self.hold: set[str] = set()
        self.late: set[str] = set()
        self.fail_loads = False
        self.spoil_loads = False
        self.fail_stores = False
        self.fail_flushes = False
        self.pending_tiers: tuple[str, ...] = ()
        self.flushes = 0
        self.grant_limit = 1 << 30
        self.blocks: dict[Key, Shards] = {}
        self.writes = FakeWrites(
            lambda key: key in self.blocks, lambda key, shards: self.blocks.update({key: shards})
        )
        self.leases: dict[str, list[tuple[int, list[bytes]]]] = {}
        self.grants: dict[str, LeaseGrant] = {}
        self.residencies = FakeResidencies(ARENA_BYTES)
        self.released: list[str] = []
        self.calls: list[tuple[str, Any]] = []
        self.prefill_tokens_per_s = 0.0
        self.load_ends: list[LoadEnd] = []
        self.sequences: dict[tuple[int, str], tuple[bytes, int, list[bytes]]] = {}
        self.retentions: list[tuple[Retention, Sequence[BlockRun]]] = []
        self.held: list[tuple[str, str, Future[Any], Callable[[], Any]]] = []
        self.afters: dict[str, After] = {}
        self.order_kind = OrderKind.HOST
        self.has_passed: Callable[[After], bool] = lambda after: True
        self.sessions: list[FakeSession] = []
        self.cancelled: list[str] = []
        self.ack_cancels = True
        self.wants_token_ids = False
        self.why_absent = "start"
        self.refuse_workers = ""

    def open(
        self,
        config: SessionConfig,
        layout: Layout | None = None,
        fds: dict[str, int] | None = None,
        order: DeviceOrder = NO_ORDER,
        fence: SharedFence | None = None,
    ) -> "FakeSession":
        session = FakeSession(self, config, layout, fds or {}, order, fence)
        self.sessions.append(session)
        session.start()
        return session

    def count(self, kind: str) -> int:
        return sum(1 for name, _ in self.calls if name == kind)

    def ready(self, space: bytes, group: int, block_hash: bytes) -> bool:
        return (space, group, block_hash) in self.blocks

    def settle(self, kind: str = "") -> int:
        """Resolves held calls and returns their number.

        A transfer that is not cancelled stays held until the device has passed its mark (a point in
        the queue of the engine's device).

        kind: resolves only the held calls of this name; empty: all held calls.
        """
        now = [
            entry
            for entry in self.held
            if (not kind or entry[0] == kind) and not self._is_early(entry[1])
        ]
        self.held = [entry for entry in self.held if entry not in now]
        for _, name, future, act in now:
            resolve(future, act, name in self.cancelled)
        return len(now)

    def resume(self) -> None:
        """Resolves the held calls (calls whose answers a test has delayed). From now on, no answers
        are delayed."""
        self.hold = set()
        self.settle()

    def _is_early(self, name: str) -> bool:
        after = self.afters.get(name)
        return after is not None and name not in self.cancelled and not self.has_passed(after)

    def die(self, *, empty: bool = True) -> None:
        self.up = False
        for _, _, future, _ in self.held:
            future.set_exception(SessionLostError("the server died"))
        self.held.clear()
        self.leases.clear()
        self.writes.forget()
        self.sequences.clear()
        self.residencies.restart()
        for session in self.sessions:
            session.tell(LinkState.ABSENT, "the server died")
        if empty:
            self.blocks.clear()
            self.epoch += 1

    def come_back(self) -> None:
        self.up = True
        for session in self.sessions:
            session.tell(LinkState.CONNECTED, "it is back")


# ------------------------------------------------------------- a server whose answers are any bytes


class OddServer:
    """A gRPC server that answers with arbitrary bytes, to test how clients handle answers that a
    hotkv server never sends.

    For each serialized message of a session's stream the server sends the serialized messages that
    `answers` returns. An exception of `answers` ends the stream. Use it in a `with` block.
    """

    def __init__(self, target: str, answers: Callable[[bytes], Iterable[bytes]]) -> None:
        self._answers = answers
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        connect: Any = grpc.stream_stream_rpc_method_handler(self._connect)
        handler = grpc.method_handlers_generic_handler(
            "hotkv.v1.SessionService", {"Connect": connect}
        )
        self._server.add_generic_rpc_handlers((handler,))
        self._server.add_insecure_port(target)

    def __enter__(self) -> "OddServer":
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()

    def _connect(self, requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            yield from self._answers(request)

"""A test double of the server: the state that any number of sessions share, with faults on demand.

It copies bytes from and to the engines' memory. As in the real server, ranks store under one write
lease (`FakeWrites`). A cancelled store over a shared fence resolves at once; the double ends it
later and finds it revoked.

Attributes of `FakeServer` that a test may set:
- `up`: whether the server runs.
- `table`: False: there is no block table, so `probe` returns None.
- `hold`: calls whose answers are held until `settle`.
- `late`: calls that reach the server only at `settle`.
- `fail_loads`, `fail_stores`, `fail_flushes`: these calls fail.
- `pending_tiers`: that flushes report.
- `spoil_loads`: a load first writes wrong bytes to every second block, and the right ones only if
  it succeeds.
- `grant_limit`: a read lease pins only among the first so many blocks of the call.
- `ack_cancels`: False: a cancel has no effect until `settle`.
- `wants_token_ids`, `order_kind`: what sessions return.
- `has_passed`: whether the device has passed a transfer's mark; the transfer is held until then.
- `refuse_workers`: why sessions with memory are refused; empty: they are accepted.

`settle()` resolves held calls, except transfers whose mark is not passed. `die` fails them with
SessionLostError.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import grpc

from hotkv_client.fence import SharedFence
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
from tests.doubles.fake_books import FakeResidencies, FakeWrites, Key, Shards
from tests.doubles.fake_session import FakeSession, resolve

ARENA_BYTES = 64 << 20
"""The system allocates its memory when slots are first written."""


class FakeServer:
    """The module lists the attributes that a test may set."""

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
        """Returns the number of resolved calls. A transfer stays held until its mark is passed or
        it is cancelled.

        kind: of the calls; empty: all.
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
        """Resolves the held calls, and holds none from now on."""
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
    """Answers each serialized message of a session's stream by those that `answers` returns, to
    test answers that a hotkv server never sends. An exception ends the stream. Must be used in a
    `with` block."""

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

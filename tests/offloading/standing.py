"""A fake session whose server stands still from some moment on, as after SIGSTOP, and later does
what it was asked meanwhile.

Moments are the arrival of a message and the middle of a load or store. All runs in the caller's
thread.
"""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hotkv_client.types import BlockResult, TransferResult, TransferStatus
from hotkv_proto.errors import HotKVError, Reason
from hotkv_vllm.offloading import tier
from tests.offloading.rig import Rig

STEP_S = 0.05


class Clock:
    """The time of all modules; a waiting reset moves it on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = time.monotonic()
        patch.setattr(time, "monotonic", lambda: self.now_s)

    def condition(self) -> threading.Condition:
        class Settled(threading.Condition):
            def wait_for(_, met: Callable[[], Any], timeout: float | None = None) -> Any:
                self.now_s += 0.0 if met() else timeout or 0.0
                return met()

        return Settled()


class Server:
    """stands_at: number of the moment from which it stands still; None: never.
    blocks: bytes of a chunk by group and hash.
    """

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, bytes], Any] = {}
        self.stands_at: int | None = None
        self.num_moments = 0
        self._later: list[Callable[[], None]] = []
        self.promoting: list[Callable[[], None]] = []

    @property
    def stands(self) -> bool:
        return self.stands_at is not None and self.num_moments >= self.stands_at

    def then(self, act: Callable[[], None]) -> None:
        """Acts now, or when the server goes on."""
        self.num_moments += 1
        if self.stands:
            self._later.append(act)
        else:
            act()

    def promote(self) -> None:
        """Grants the leases that waited for a tier."""
        grants, self.promoting = self.promoting, []
        for grant in grants:
            self.then(grant)

    def go_on(self) -> None:
        self.stands_at = None
        while self._later:
            self._later.pop(0)()


class Standing:
    """has_table: the engine reads the block table without the server."""

    connected, wants_token_ids, has_events, stored_bytes = True, False, False, 0

    def __init__(self, server: Server, rows: Any, *, has_table: bool, has_tiers: bool) -> None:
        self._server = server
        self._rows = rows
        self._has_table = has_table
        self.has_tiers = has_tiers
        self._leases: dict[str, list[Any]] = {}
        self._revoked: set[str] = set()
        self._stores: dict[str, Future[Any]] = {}

    def _mask(self, group: int, hashes: Iterable[bytes]) -> Any:
        return np.array([(group, one) in self._server.blocks for one in hashes], bool)

    def _ask(self, act: Callable[[], Any]) -> "Future[Any]":
        answer: Future[Any] = Future()
        self._server.then(lambda: answer.set_result(act()))
        return answer

    def probe(self, group: int, hashes: Any) -> Any:
        return self._mask(group, hashes) if self._has_table else None

    def lookup(self, groups: Any) -> "Future[Any]":
        return self._ask(lambda: [self._mask(one.group_index, one.hashes) for one in groups])

    def acquire(self, name: str, groups: Any, ttl_s: float) -> "Future[Any]":
        """A server with tiers grants the lease only after it has read later messages."""
        answer: Future[Any] = Future()

        def grant() -> None:
            self._leases[name] = list(groups)
            pinned = tuple(self._mask(one.group_index, one.hashes) for one in groups)
            answer.set_result(SimpleNamespace(pinned=pinned))

        promotes = self.has_tiers
        self._server.then(lambda: self._server.promoting.append(grant) if promotes else grant())
        return answer

    def load(self, name: str, lease: str, runs: Any, timeout_s: float) -> "Future[Any]":
        answer: Future[Any] = Future()

        def copies() -> list[Any]:
            found = []
            for run in runs:
                (group,) = [g for g in self._leases[lease] if g.group_index == run.group_index]
                for place, row in zip(run.lease_positions, run.block_ids, strict=True):
                    page = self._server.blocks[run.group_index, group.hashes[place]]
                    found.append((int(row), page))
            return found

        def begin() -> None:
            try:
                pages = copies()
            except KeyError:
                answer.set_exception(HotKVError(Reason.INVALID_FIELD, "the lease lacks a block"))
                return
            half = len(pages) // 2
            copy(pages[:half])
            self._server.then(lambda: end(pages[half:]))

        def copy(part: Any) -> None:
            for row, page in part:
                self._rows[row] = page

        def end(part: Any) -> None:
            copy(part)
            answer.set_result(TransferResult(name, TransferStatus.DONE))

        self._server.then(begin)
        return answer

    def store(self, name: str, lease: str, runs: Any, timeout_s: float, options: Any) -> Any:
        answer = self._stores[name] = Future()

        def begin() -> None:
            found = [
                ((run.group_index, one), np.array(self._rows[row]))
                for run in runs
                for one, row in zip(run.hashes, run.block_ids, strict=True)
            ]
            self._server.then(lambda: commit(found))

        def commit(found: Any) -> None:
            if name not in self._revoked:
                self._server.blocks.update(found)
                codes = [np.full(len(run.hashes), BlockResult.STORED, np.uint8) for run in runs]
                answer.set_result(TransferResult(name, TransferStatus.DONE, tuple(codes)))

        self._server.then(begin)
        return answer

    def cancel(self, name: str) -> None:
        store = self._stores.get(name)
        if store is not None and not store.done():
            self._revoked.add(name)
            store.set_result(TransferResult(name, TransferStatus.CANCELLED))

    def flush(self) -> "Future[Any]":
        return self._ask(self._server.blocks.clear)

    def release(self, name: str) -> None:
        """No lease expires here."""

    def report_use(self, *_: Any) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def standing_rig(
    server: Server,
    patch: pytest.MonkeyPatch,
    clock: Clock,
    num_rows: int,
    *,
    has_table: bool = True,
    has_tiers: bool = False,
    **settings: Any,
) -> Rig:
    patch.setattr(tier.link, "open_session", lambda *_: SimpleNamespace(probe=lambda *_: None))
    patch.setattr(tier.link, "await_server", lambda *_: True)
    patch.setattr(tier.HotKVTier, "_say_on", lambda _: None)
    rig = Rig("unix:/nowhere", num_rows=num_rows, **settings)
    session: Any = Standing(server, rig.rows, has_table=has_table, has_tiers=has_tiers)
    assert rig.tier._transfers is not None
    rig.tier._session = rig.tier._transfers._session = session
    rig.tier._transfers._settled = clock.condition()
    step = rig.step

    def step_and_promote() -> None:
        step()
        server.promote()

    patch.setattr(rig, "step", step_and_promote)
    return rig

"""Tests how much the descriptor socket does in one turn of the event loop: other sessions' requests
are answered between its turns, however many connections there are."""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from hotkv_client.wire import link_messages as _link_messages
from hotkv_server.wire import descriptors
from hotkv_server.wire.descriptors import MAX_ACCEPTS, DescriptorServer

NUM_PEERS = 100


class Turns:
    """Counts the turns of the running event loop, and in which of them something happens."""

    def __init__(self) -> None:
        self.number = 0
        self.events: Counter[int] = Counter()
        self._next()

    def _next(self) -> None:
        self.number += 1
        self._handle = asyncio.get_running_loop().call_soon(self._next)

    def happens(self, *_: Any) -> bytes:
        self.events[self.number] += 1
        return b"ticket"

    async def pass_(self, count: int) -> None:
        until = self.number + count
        while self.number < until:
            await asyncio.sleep(0)

    def end(self) -> None:
        self._handle.cancel()


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[Any, Any, Turns]]:
    """Yields a descriptor socket, its node, and the turns in which it issues tickets."""
    turns, node = Turns(), SimpleNamespace(refusals=Counter())
    node.health = Mock()
    server: Any = DescriptorServer(
        node,  # type: ignore[arg-type]
        folder / "fd.sock",
        0o600,
        frozenset(),
        Mock(),
        Mock(issue=turns.happens),
        50.0,
    )
    try:
        yield server, node, turns
    finally:
        turns.end()
        server.close()
        await asyncio.gather(*server._pending, return_exceptions=True)


def peers(folder: Path, stack: contextlib.ExitStack, count: int) -> list[socket.socket]:
    made = []
    for _ in range(count):
        one = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        one.setblocking(False)
        one.connect(str(folder / "fd.sock"))
        made.append(one)
    return made


async def test_requests_sent_at_once_are_answered_in_turns(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, _, turns):
        with contextlib.ExitStack() as stack:
            held = peers(tmp_path, stack, NUM_PEERS)
            while len(server._pending) < NUM_PEERS:
                await asyncio.sleep(0)
            for one in held:
                one.send(_link_messages.ticket_request())
            while server._pending:
                await asyncio.sleep(0)
            assert turns.events.total() == NUM_PEERS
            assert max(turns.events.values()) == 1
            assert all(one.recv(4096) for one in held)


async def test_the_socket_pauses_after_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "FAULT_PAUSE_S", 3600.0)
    async with serving(tmp_path) as (server, node, turns):
        server._faults = Mock(is_over=Mock(return_value=True))
        with contextlib.ExitStack() as stack:
            peers(tmp_path, stack, NUM_PEERS)
            await turns.pass_(10 * NUM_PEERS)
            assert node.refusals.total() == MAX_ACCEPTS
